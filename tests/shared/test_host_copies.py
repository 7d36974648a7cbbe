"""What a save reads of a GPU goes to the host in one copy, and the file holds what it held without it."""

import io
from collections import OrderedDict
from unittest.mock import patch

import torch
from torch import nn

from lightning_tricks._shared import host_copies
from lightning_tricks._shared.host_copies import HostCopies, stage_on_host
from tests.emulated_cuda.device import EmulatedCuda
from tests.small import same


def saved_and_loaded(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True, map_location="cpu")


def test_many_tensors_are_waited_for_once_and_have_the_same_values():
    with EmulatedCuda() as device:
        net = nn.Sequential(*(nn.Linear(7, 7) for _ in range(20))).cuda().half()
        whole = torch.arange(12, dtype=torch.float64, device="cuda")
        value = {
            "state_dict": net.state_dict(),
            "parts": (whole[2:5], whole.view(3, 4).t(), whole[::2]),
            "others": [torch.ones(2), 3, "text", None, torch.empty(0, device="cuda")],
            "there": torch.ones(2, device="cuda:1"),
        }
        device.waits.clear()
        staged = stage_on_host(value)
        assert [wait.what for wait in device.waits if wait.blocks] == ["Stream.synchronize"] * 2  # of each device
        assert not any(part.is_cuda for part in (*staged["state_dict"].values(), *staged["parts"], staged["there"]))
        assert same(saved_and_loaded(staged), saved_and_loaded(value))
        assert staged["others"][0] is value["others"][0]
        assert staged["state_dict"]._metadata == net.state_dict()._metadata
        assert type(staged["state_dict"]) is OrderedDict
        copies = HostCopies()
        for _ in range(2):  # the second takes the memory of the first
            device.waits.clear()
            copied = copies.take(value)
            assert [wait.what for wait in device.waits if wait.blocks] == ["Stream.synchronize"] * 2
            assert same(saved_and_loaded(copied), saved_and_loaded(value))


def test_tensors_that_share_memory_share_the_copy():
    with EmulatedCuda():
        tied = torch.ones(5, device="cuda")
        staged = stage_on_host({"one": tied, "other": tied.view(5, 1), "alone": torch.ones(5, device="cuda")})
    addresses = [part.untyped_storage().data_ptr() for part in staged.values()]
    assert addresses[0] == addresses[1] != addresses[2]
    assert all(part.untyped_storage().nbytes() == 20 for part in staged.values())


def test_what_is_too_large_is_left_to_torch():
    with EmulatedCuda(), patch.object(host_copies, "_MAX_BYTES", 100):
        value = {"large": torch.ones(30, device="cuda"), "small": torch.ones(5, device="cuda")}
        staged = stage_on_host(value)
        assert staged["large"] is value["large"]
        assert not staged["small"].is_cuda


def test_where_no_memory_can_be_pinned_all_is_left_to_torch():
    make = torch.empty

    def refusing(*args, pin_memory=False, **kwargs):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return make(*args, **kwargs)

    with EmulatedCuda():
        value = {"weight": torch.ones(3, device="cuda")}
        with patch.object(torch, "empty", refusing):
            assert stage_on_host(value) is value


def test_other_tensors_are_left_as_they_are():
    with EmulatedCuda():
        parameter = nn.Parameter(torch.ones(2, device="cuda"))
        conjugated = torch.ones(2, dtype=torch.complex64, device="cuda").conj()
        sparse = torch.ones(2, 2, device="cuda").to_sparse()
        for tensor in (parameter, conjugated, sparse, torch.ones(2)):
            assert stage_on_host([tensor])[0] is tensor


def test_without_a_gpu_nothing_is_copied():
    value = {"state_dict": nn.Linear(2, 2).state_dict()}
    assert stage_on_host(value) is value
