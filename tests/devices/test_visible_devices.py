"""CUDA_VISIBLE_DEVICES against a slow reading of CUDA's rules, against torch's, and the wrong values by name."""

import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_tricks.devices import Gpu, GpuProcess, MigSlice
from lightning_tricks.devices.core.scoring import Usage, usage_of
from lightning_tricks.devices.core.visible_devices import VisibleDevice, visible_devices
from tests.small import cases

UUIDS = ("GPU-aa11", "GPU-aa22", "GPU-b")
PARTS = "0|1|2|3| 1|01|-1||abc|1x|GPU-aa11|GPU-aa|GPU-b| GPU-b|GPU-|GPU-c".split("|")  # noqa: SIM905  # also nothing


def machine(count, uuids=UUIDS):
    return [Gpu(index=index, uuid=uuids[index], name="H100") for index in range(count)]


def what_cuda_sees(value, uuids):
    """Return the indices that CUDA sees, and whether it takes the whole value for what it says."""
    if value is None:
        return list(range(len(uuids))), True
    if value in ("", "-1", "NoDevFiles"):
        return [], True
    seen, clean = [], True
    for part in value.split(","):
        if value[:4] == "GPU-":
            same = [number for number, uuid in enumerate(uuids) if uuid == part]
            starts = [number for number, uuid in enumerate(uuids) if part[:4] == "GPU-" and uuid[: len(part)] == part]
            number = (same or starts or [-1])[0] if len(same or starts) == 1 else -1
        else:
            digits = ""
            for character in part.strip():
                if character not in "0123456789":
                    break
                digits += character
            number = int(digits) if digits else -1
            clean = clean and digits == part.strip()
        if not 0 <= number < len(uuids):
            return seen, False
        if number in seen:
            return [], False
        seen.append(number)
    return seen, clean


def check(value, count, uuids=UUIDS):
    expected, whole = what_cuda_sees(value, uuids[:count])
    if whole:
        assert [device.gpu.index for device in visible_devices(value, machine(count, uuids))] == expected
        return
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES=") as error:
        visible_devices(value, machine(count, uuids))
    assert repr(value) in str(error.value)


@pytest.mark.parametrize("count", range(4))
def test_every_value_of_up_to_three_parts_means_what_cuda_makes_of_it_or_is_an_error(count):
    for length, parts_of_it in ((1, PARTS), (2, PARTS), (3, PARTS[::3])):
        for parts in product(parts_of_it, repeat=length):
            check(",".join(parts), count)
    check(None, count)


@example("+0", 1)
@given(st.text("0123 -+,GPU-MIGab/", max_size=12), st.integers(0, 3))
def test_any_text_means_what_cuda_makes_of_it_or_is_an_error(value, count):
    gpus = machine(count)
    expected, whole = what_cuda_sees(value, UUIDS[:count])
    try:
        found = [device.gpu.index for device in visible_devices(value, gpus)]
    except ValueError as error:
        assert repr(value) in str(error)  # noqa: PT017
        assert not whole
    else:
        assert found == expected


@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_is_accepted_is_what_torch_sees(count, monkeypatch):
    uuids = list(UUIDS[:count])
    accepted = 0
    for parts in product(PARTS, repeat=2):
        value = ",".join(parts)
        try:
            found = [device.gpu.index for device in visible_devices(value, machine(count))]
        except ValueError:
            continue
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        torch_sees = torch.cuda._parse_visible_devices()
        if torch_sees and isinstance(torch_sees[0], str):
            torch_sees = torch.cuda._transform_uuid_to_ordinals(torch_sees, uuids)
        assert found == torch_sees, value
        accepted += 1
    assert accepted >= 2 * (count - 1)


@pytest.mark.trap("devices: duplicates raise IndexError, `5,0` on two GPUs gives count 0 but index 5")
@cases(
    "value, part, says, consequence",
    ("0,0", "0", "names GPU 0 (H100) again", "see no GPU"),
    ("5,0", "5", "is not a GPU of this machine", "see no GPU"),
    ("0,5", "5", "is not a GPU of this machine", "see GPU 0 (H100)."),
    ("0,abc", "abc", "is neither an index nor a UUID", "see GPU 0 (H100)."),
    ("0,-1", "-1", "is neither an index nor a UUID", "see GPU 0 (H100)."),
    ("1,", "", "is neither an index nor a UUID", "see GPU 1 (H100)."),
    ("1gpu", "1gpu", "is not an index", "read it as 1"),
    ("+1", "+1", "is not an index", "read it as 1"),
    ("none", "none", "is neither an index nor a UUID", "see no GPU"),
    ("GPU-x", "GPU-x", "is not a GPU of this machine", "see no GPU"),
    ("GPU-aa", "GPU-aa", "is ambiguous, as the UUIDs of GPU 0 (H100) and GPU 1 (H100) begin", "see no GPU"),
    ("0,GPU-aa22", "GPU-aa22", "is not an index", "see GPU 0 (H100)."),
    ("GPU-aa22,0", "0", "is not a UUID of a GPU", "see GPU 1 (H100)."),
    ("MIG-x", "MIG-x", "is not a GPU of this machine", "see no GPU"),
)
def test_a_wrong_value_is_named_with_what_cuda_makes_of_it_and_the_remedy(value, part, says, consequence):
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES") as error:
        visible_devices(value, machine(2))
    message = str(error.value)
    assert message.startswith(f"CUDA_VISIBLE_DEVICES={value!r}: the part {part!r} {says}")
    assert f"CUDA would silently {consequence}" in message
    assert "0 is GPU-aa11, 1 is GPU-aa22" in message
    assert "unset the variable" in message


def test_a_gpu_that_does_not_answer_is_named():
    gpus = [*machine(1), Gpu(index=1, error="GPU is lost"), Gpu(index=2)]
    assert [device.gpu.index for device in visible_devices("1,0", gpus)] == [1, 0]
    with pytest.raises(ValueError, match=r"here, 0 is GPU-aa11, 1 does not answer \(GPU is lost\), 2 is a GPU without"):
        visible_devices("GPU-aa22", gpus)


@pytest.mark.trap("devices: torch's NVML index: `MIG-` UUIDs raise")
@pytest.mark.parametrize("name", ["MIG-2222", "MIG-GPU-aa22/7/1"])
def test_slices_are_named_by_their_uuid_or_by_their_place_on_the_gpu(name):
    parts = (
        MigSlice(index=0, uuid="MIG-1111", gpu_instance=7, compute_instance=0),
        MigSlice(index=1, uuid="MIG-2222", gpu_instance=7, compute_instance=1),
    )
    gpus = [Gpu(index=0, uuid="GPU-aa11"), Gpu(index=1, uuid="GPU-aa22", mig_mode=True, mig_slices=parts)]
    (device,) = visible_devices(name, gpus)
    assert (device.gpu.index, device.part.uuid) == (1, "MIG-2222")
    assert device.label == "GPU 1, MIG slice 1"
    with pytest.raises(ValueError, match="is not a GPU"):
        visible_devices("MIG-GPU-aa22/7/2", gpus)
    with pytest.raises(ValueError, match="is not a UUID of a MIG slice"):
        visible_devices("MIG-1111,GPU-aa11", gpus)
    with pytest.raises(ValueError, match="1 is GPU-aa22 with MIG-1111, MIG-2222"):
        visible_devices("MIG-3333", gpus)


def test_what_a_process_uses_itself_does_not_count_on_a_gpu_that_it_holds():
    own, other = GpuProcess(pid=os.getpid(), kind="C", memory=30), GpuProcess(pid=1, kind="C", memory=5)
    gpu = Gpu(index=0, memory_total=100, memory_free=65, utilization=90, temperature=50, processes=(own, other))
    assert usage_of(VisibleDevice(gpu), held=False) == Usage(65, 90, 50, (own, other))
    assert usage_of(VisibleDevice(gpu), held=True) == Usage(95, 0, 50, (other,))
    in_container = VisibleDevice(replace(gpu, processes=(other,)))  # whose own processes have other numbers
    assert usage_of(in_container, held=True) == Usage(100, 0, 50, None)
    silent = VisibleDevice(Gpu(index=0))
    assert usage_of(silent, held=True) == usage_of(silent, held=False) == Usage(None, None, None, None)


# A GPU


@pytest.mark.gpu("it asks the driver")
def test_a_real_gpu_is_selected_without_a_context():
    code = """
        import os
        from lightning_tricks.devices import select_gpus
        from lightning_tricks.devices.core.visible_devices import uuids_seen_by_cuda
        selection = select_gpus(min_free_memory=0, max_utilization=None)
        assert uuids_seen_by_cuda() is None
        import torch
        assert not torch.cuda.is_initialized()
        found = str(torch.cuda.get_device_properties(selection.devices[0]).uuid).removeprefix("GPU-")
        assert selection.gpus[0].uuid == f"GPU-{found}", (selection.gpus[0].uuid, found)
        torch.zeros(1, device=f"cuda:{selection.devices[0]}")
        assert uuids_seen_by_cuda()[selection.devices[0]] == found
        again = select_gpus(min_free_memory=0, max_utilization=None)
        assert again.gpus[0].uuid == selection.gpus[0].uuid
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


@pytest.mark.gpu("it asks the driver")
def test_where_torch_has_only_asked_for_cuda_the_driver_tells_its_order():
    code = """
        import torch
        assert torch.cuda.is_available()
        from lightning_tricks.devices.core.visible_devices import uuids_seen_by_cuda
        seen = uuids_seen_by_cuda()
        assert not torch.cuda.is_initialized()
        told = [torch.cuda.get_device_properties(n).uuid for n in range(torch.cuda.device_count())]
        assert seen == [str(uuid).removeprefix("GPU-") for uuid in told], (seen, told)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
