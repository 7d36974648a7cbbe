"""Peaks of stages, growth from epoch to epoch, and advice, from sizes that are given."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_tricks._torch_compat.memory import memory_that_ran_out
from lightning_tricks.devices.core.memory_figures import EpochGrowth, StagePeaks
from lightning_tricks.devices.core.memory_report import MemoryReport
from lightning_tricks.devices.core.out_of_memory import advise, describe_batch, requested_bytes
from tests.small import cases

GIB = 2**30


class Allocator:
    """A device whose memory goes up and down."""

    def __init__(self):
        self.size = self.peak = 0

    def use(self, size):
        self.size = size
        self.peak = max(self.peak, size)

    def reset(self):
        self.peak = self.size


@given(st.lists(st.tuples(st.sampled_from(["", "train", "val"]), st.lists(st.integers(0, 99), max_size=4)), max_size=8))
def test_each_stage_has_its_own_peak(phases):
    allocator = Allocator()
    peaks, expected, overall = StagePeaks(lambda: allocator.peak, allocator.reset), {}, 0
    for stage, sizes in phases:
        peaks.enter(stage)
        seen = [allocator.size, *sizes]
        for size in sizes:
            allocator.use(size)
        overall = max(overall, *seen)
        if stage:
            expected[stage] = max(expected.get(stage, 0), *seen)
    assert peaks.take() == expected
    assert peaks.overall == overall
    assert peaks.take() == {}


def growth_of(sizes):
    growth = EpochGrowth()
    for size in sizes:
        growth.add(size)
    return growth


def test_growth():
    assert growth_of([]).per_epoch is None
    assert growth_of([5]).per_epoch is None
    assert growth_of([5, 5]).per_epoch == 0
    assert growth_of([10, 40, 20, 50, 30, 70]).per_epoch == 12
    assert growth_of([100, 40]).per_epoch == -60


@cases(
    "sizes, steady",
    ([GIB * n for n in range(4)], False),  # too few epochs
    ([GIB * n for n in range(5)], True),
    ([9 * GIB, 1 * GIB, 2 * GIB, 3 * GIB, 4 * GIB, 5 * GIB], True),
    ([1 * GIB, 2 * GIB, 2 * GIB, 2 * GIB + 1, 3 * GIB, 4 * GIB, 5 * GIB], True),
    ([1 * GIB, 2 * GIB, 3 * GIB, 3 * GIB, 4 * GIB, 5 * GIB], False),
    ([GIB + 512 * n for n in range(9)], False),  # a few numbers
    ([GIB + 2**18 * n for n in range(5)], True),
    ([GIB + 2**18 * n - 1 * (n == 4) for n in range(5)], False),
)
def test_steady_growth(sizes, steady):
    assert growth_of(sizes).steady() == (sizes[-5:] if steady else [])


def report(device="cuda:0", **sizes):
    known = dict.fromkeys(("reserved", "peak_allocated", "peak_reserved", "total", "free"))
    given = {"found": 0, "found_by_kind": {}, "in_graph": 0, "largest": (), "allocated": 10 * GIB, **known, **sizes}
    return MemoryReport(device=device, **given)


TIGHT = {"total": 24 * GIB, "free": GIB, "reserved": 22 * GIB, "allocated": 22 * GIB}
BATCH = "smaller batch_size and Trainer(accumulate_grad_batches=n)"


@cases(
    "facts, words, other_words",
    ({"report": report(**TIGHT)}, [BATCH, "checkpoint"], ["expandable", "Other processes", "limit", "precision="]),
    ({"report": report(**TIGHT), "precision": "32-true"}, ['precision="bf16-mixed"'], []),
    ({"report": report("cpu", **TIGHT), "precision": "32-true"}, [BATCH], ["bf16", "expandable", "Other proc"]),
    (
        {"report": report(**TIGHT | {"reserved": 10 * GIB, "allocated": 10 * GIB})},
        ["Other processes hold 13 GiB of 24 GiB"],
        ["expandable"],
    ),
    ({"report": report("cpu", **TIGHT | {"reserved": GIB, "allocated": GIB})}, [BATCH], ["Other processes"]),
    ({"report": report(**TIGHT | {"free": None})}, [BATCH], ["Other processes"]),
    (
        {"report": report(**TIGHT | {"allocated": 12 * GIB}), "requested": 4 * GIB},
        ["10 GiB are reserved but not allocated", "expandable_segments:True"],
        ["Other processes"],
    ),
    ({"report": report(**TIGHT | {"allocated": 12 * GIB}), "requested": 11 * GIB}, [BATCH], ["expandable"]),
    ({"report": report(**TIGHT), "limit": 0.5}, ["only 50% of the memory: raise limit=0.5"], []),
    ({"report": report(**TIGHT), "limit": 1.0}, [], ["limit"]),
    (
        {"report": report(**TIGHT, found_by_kind={"optimizer states": 12 * GIB, "parameters": 6 * GIB})},
        ["optimizer's states take 12 GiB of 22 GiB"],
        ["checkpoint"],
    ),
    ({"report": report(**TIGHT, growth_per_epoch=GIB)}, ["grew by 1 GiB per epoch", "loss.detach()"], []),
    ({"report": report(**TIGHT, growth_per_epoch=1)}, [], ["grew"]),
    ({"report": report(**TIGHT), "stage": "validate"}, ["validation loader"], ["accumulate", "graph", "recompute"]),
    ({"report": report(**TIGHT, in_graph=8 * GIB), "stage": "validate"}, ["8 GiB belong to an autograd graph"], []),
    ({"report": report(**TIGHT, in_graph=8 * GIB)}, [], ["belong to an autograd graph"]),
    ({"report": report(**TIGHT), "stage": "test"}, ["test loader"], []),
    ({"report": report(**TIGHT), "stage": "predict"}, ["return_predictions=False"], []),
    ({"report": report(**TIGHT), "requested": 25 * GIB}, ["more than the device has (24 GiB)"], [BATCH]),
    ({"report": report("cpu", allocated=0)}, [BATCH], []),
    ({"report": report("cpu", allocated=1 << 20, reserved=GIB)}, [BATCH], ["recompute"]),
    ({"report": report("cpu", allocated=8 * GIB, reserved=9 * GIB)}, [BATCH, "recompute"], []),
    ({"report": report("cpu"), "is_of_worker": True}, ["num_workers or prefetch_factor"], ["accumulate"]),
)
def test_advice_follows_from_the_sizes(facts, words, other_words):
    text = "\n".join(advise(**facts))
    assert text
    for word in words:
        assert word in text
    for word in other_words:
        assert word not in text


def really_refused(allocate):
    try:
        allocate()
    except (RuntimeError, MemoryError) as error:
        return error
    raise AssertionError("this machine has endless memory")


def caused_by(error):
    try:
        raise ValueError("while compiling") from error
    except ValueError as raised:
        return raised


REFUSED = {
    "torch": lambda: really_refused(lambda: torch.empty(1 << 50)),
    "python": lambda: really_refused(lambda: bytearray(1 << 55)),
    "numpy": lambda: really_refused(lambda: np.zeros(1 << 50)),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_really_refused_allocation_of_the_host(kind):
    assert memory_that_ran_out(REFUSED[kind]()) == "host"
    assert memory_that_ran_out(caused_by(REFUSED[kind]())) == "host"


def test_how_much_was_asked_for():
    assert requested_bytes(REFUSED["torch"]()) == 4 << 50
    assert requested_bytes(caused_by(REFUSED["torch"]())) == 4 << 50
    assert requested_bytes(REFUSED["python"]()) is None
    assert requested_bytes(REFUSED["numpy"]()) == 8 << 50
    message = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1 MiB"
    assert requested_bytes(torch.OutOfMemoryError(message)) == 2.5 * GIB


@cases(
    "error, owner",
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), "device"),
    (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), "device"),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "device"),
    (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "device"),
    (RuntimeError("CUDA error: CUSOLVER_STATUS_ALLOC_FAILED when calling `cusolverDnCreate(handle)`"), "device"),
    (RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"), "device"),
    (RuntimeError("CUDA driver error: out of memory"), "device"),
    (RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB."), "device"),
    (RuntimeError("Worker 3 failed\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate"), "device"),
    (RuntimeError("ncclUnhandledCudaError: Call failed.\nLast error:\nCuda failure 2 'out of memory'"), "device"),
    (RuntimeError("Skipping batches on CUDA out of memory is not supported"), ""),
    (RuntimeError("CUDA_RETRIES: the job ran out of memory budgets"), ""),
    (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB"), "device"),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:1] . DefaultCPUAllocator: not enough memory: you tried"), "host"),
    (RuntimeError("CUDA error: device-side assert triggered"), ""),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ""),
    (ValueError("CUDA out of memory"), ""),
    (KeyboardInterrupt(), ""),
)
def test_which_errors_say_that_memory_ran_out(error, owner):
    assert memory_that_ran_out(error) == owner


def test_an_error_in_a_handler_is_another_one():
    def handles():
        try:
            torch.empty(1 << 50)
        except RuntimeError:
            raise KeyError("a typo in the handler")  # noqa: B904

    with pytest.raises(KeyError) as caught:
        handles()
    assert memory_that_ran_out(caught.value.__context__) == "host"
    assert memory_that_ran_out(caught.value) == ""


def test_a_circle_of_causes_ends():
    first, second = ValueError("one"), ValueError("two")
    first.__cause__, second.__cause__ = second, first
    assert memory_that_ran_out(first) == ""


def test_a_batch_is_described_without_values():
    batch = {"image": torch.zeros(2, 3, dtype=torch.uint8), "text": ["secret", 4], 7: (torch.tensor(1.5), None)}
    assert describe_batch(batch) == [
        "batch: dict of 3",
        "  ['image']: uint8 2x3 on cpu, 6 B",
        "  ['text']: list of 2",
        "    [0]: str",
        "    [1]: int",
        "  [7]: tuple of 2",
        "    [0]: float32 scalar on cpu, 4 B",
        "    [1]: NoneType",
    ]


def test_a_large_or_circular_batch_is_cut():
    circle = []
    circle.append(circle)
    assert len(describe_batch(circle)) == 6
    lines = describe_batch(list(range(1000)))
    assert len(lines) == 41
    assert lines[-1] == "..."


@pytest.mark.gpu
def test_a_really_refused_allocation_of_a_gpu():
    error = really_refused(lambda: torch.empty(1 << 45, device="cuda"))
    assert memory_that_ran_out(error) == "device"
    assert requested_bytes(error) == pytest.approx(4 << 45, rel=0.01)
