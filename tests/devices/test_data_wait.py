"""The time that a run waits for its data, on a clock of the test."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_tricks.devices.core import utilization
from lightning_tricks.devices.core.bottleneck import (
    DataWait,
    IdleClock,
    WaitTotals,
    judge_gpu,
    judge_wait,
    num_workers_needed,
    waits_for_data,
)
from lightning_tricks.devices.core.utilization import available_cores
from tests.small import cases


class Clock:
    """A clock that stands still unless it is moved."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def pass_(self, seconds):
        self.now += seconds


def fetch(wait, clock, stage, seconds):
    wait.fetch_started(stage)
    clock.pass_(seconds)
    wait.fetch_ended(stage)


@pytest.fixture
def clock():
    return Clock()


def test_waiting_is_a_share_of_the_stage(clock):
    wait = DataWait(clock=clock)
    wait.enter("train")
    for _ in range(5):
        fetch(wait, clock, "train", 1.0)
        clock.pass_(3.0)
    wait.leave("train")
    clock.pass_(50.0)  # between epochs
    # the first wait is neither waited nor time: workers start
    assert wait.totals["train"] == WaitTotals(seconds=4 * 1.0 + 5 * 3.0, waited=4.0, waited_first=0.0, n_batches=5)
    assert wait.take("train") == {"waited": pytest.approx(100 * 4 / 19)}
    assert wait.take("train") == {}, "no time has passed since"


def test_the_start_of_workers_is_a_wait_of_later_epochs(clock):
    wait = DataWait(clock=clock)
    for starting in (7.0, 3.0):
        wait.enter("train")
        wait.fetch_started("train")
        fetch(wait, clock, "train", starting)  # in advance
        wait.fetch_ended("train", is_batch=False)
        fetch(wait, clock, "train", 2.0)
        fetch(wait, clock, "train", 0.5)
        clock.pass_(1.0)
        wait.leave("train")
    # nothing counts until the first batch of the run is there
    expected = WaitTotals(seconds=0.5 + 1 + 3 + 2 + 0.5 + 1, waited=0.5 + 3 + 2 + 0.5, waited_first=3 + 2, n_batches=4)
    assert wait.totals["train"] == expected


def test_the_start_of_the_workers_of_validation_is_no_time_of_training(clock):
    wait = DataWait(clock=clock)
    wait.enter("train")
    fetch(wait, clock, "train", 1.0)
    clock.pass_(4.0)
    wait.fetch_started("val")
    clock.pass_(9.0)
    wait.fetch_ended("val", is_batch=False)
    wait.enter("val")
    wait.leave("val")
    wait.leave("train")
    assert wait.totals["train"].seconds == 4.0


def test_validation_inside_an_epoch_is_not_its_time(clock):
    wait = DataWait(clock=clock)
    wait.enter("train")
    fetch(wait, clock, "train", 0.0)
    clock.pass_(2.0)
    wait.enter("val")
    fetch(wait, clock, "val", 7.0)
    fetch(wait, clock, "val", 1.0)
    clock.pass_(2.0)
    wait.leave("val")
    clock.pass_(1.0)
    assert wait.stage == "train"
    wait.leave("train")
    assert wait.stage is None
    assert wait.totals["train"].seconds == 3.0
    assert (wait.totals["val"].seconds, wait.totals["val"].waited) == (3.0, 1.0)


def test_batches_of_sanity_checking_do_not_count(clock):
    wait = DataWait(clock=clock)
    fetch(wait, clock, "val", 3.0)
    assert wait.totals == {}
    assert wait.take("val") == {}


def test_an_epoch_that_resumes_repeats_its_first_hook(clock):
    wait = DataWait(clock=clock)
    wait.enter("train")
    fetch(wait, clock, "train", 1.0)
    clock.pass_(1.0)
    wait.enter("train")
    fetch(wait, clock, "train", 1.0)
    wait.leave("train")
    assert wait.totals["train"].seconds == 2.0
    assert wait.totals["train"].waited_first == 0.0
    assert wait.stage is None
    wait.leave("train")  # and nothing happens


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=2, max_size=20), st.integers(1, 5))
def test_windows_add_up(steps, every):
    clock = Clock()
    wait = DataWait(clock=clock)
    wait.enter("train")
    waited = before = 0.0
    for number, (loading, working) in enumerate(steps, 1):
        fetch(wait, clock, "train", loading)
        clock.pass_(working)
        if number % every == 0:
            shares = wait.take("train")
            seconds = wait.totals["train"].seconds - before
            before = wait.totals["train"].seconds
            waited += shares.get("waited", 0.0) * seconds / 100
    rest = wait.take("train").get("waited", 0.0) * (wait.totals["train"].seconds - before) / 100
    assert waited + rest == pytest.approx(sum(loading for loading, _ in steps[1:]), abs=1e-6)


class Device:
    """A CUDA stream on the test's clock: it works on what the host has queued, and events are passed in order."""

    def __init__(self, clock, monkeypatch):
        self.clock, self.busy_until = clock, clock.now
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: self.Event(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(device=device))

    def queue(self, seconds):
        self.busy_until = max(self.busy_until, self.clock.now) + seconds

    class Event:
        def __init__(self, device):
            self.device = device

        def record(self, stream):
            self.time = max(self.device.busy_until, self.device.clock.now)

        def query(self):
            return self.device.clock.now >= self.time

        def elapsed_time(self, other):
            assert self.query(), "CUDA raises an error for an event that has not been passed"
            assert other.query()
            return 1000 * (other.time - self.time)


@pytest.mark.trap("devices: is the loader the bottleneck, and was the device idle meanwhile")
@cases(
    "loading, working, idle",
    (1.0, 4.0, 0.0),
    (4.0, 1.0, 3.0),  # the host is done at once; the device works on
)
def test_a_gpu_that_works_while_the_host_waits_is_not_idle(loading, working, idle, clock, monkeypatch):
    device = Device(clock, monkeypatch)
    wait = DataWait(IdleClock(torch.device("cuda", 0)), clock)
    wait.enter("train")
    for _ in range(11):
        fetch(wait, clock, "train", loading)
        device.queue(working)
    clock.pass_(100.0)
    fetch(wait, clock, "train", 0.0)  # the device is asked when a batch is there
    wait.take("train")
    assert wait.totals["train"].waited == 10 * loading
    assert wait.totals["train"].idle == pytest.approx(10 * idle)


def test_the_first_batch_of_a_run_is_no_idle_time(clock, monkeypatch):
    device = Device(clock, monkeypatch)
    wait = DataWait(IdleClock(torch.device("cuda", 0)), clock)
    wait.enter("train")
    fetch(wait, clock, "train", 60.0)
    device.queue(1.0)
    fetch(wait, clock, "train", 1.0)
    clock.pass_(1.0)
    assert wait.take("train") == {"waited": 50.0, "idle": 0.0}


def test_the_device_is_never_waited_for(clock, monkeypatch):
    device = Device(clock, monkeypatch)
    wait = DataWait(IdleClock(torch.device("cuda", 0)), clock)
    wait.enter("train")
    for _ in range(2000):  # it never catches up: nothing may be asked for its time
        fetch(wait, clock, "train", 0.001)
        device.queue(1.0)
    assert wait.take("train")["idle"] == 0.0


def pipeline(loading, working, num_workers, batches=400, prefetch=2):
    """A slow twin of a DataLoader: what is waited for in a run, batch by batch."""
    wait = WaitTotals()
    free = [0.0] * max(num_workers, 1)
    now, started = 0.0, []
    for number in range(batches):
        if num_workers == 0:
            waited = loading
        else:
            worker = number % num_workers
            # a worker starts with a batch when it is free, and when the batch was asked for
            asked = started[number - prefetch * num_workers] if number >= prefetch * num_workers else 0.0
            free[worker] = max(free[worker], asked) + loading
            waited = max(0.0, free[worker] - now)
        now += waited
        started.append(now)
        if number >= batches // 2:  # when it has settled
            wait.waited += waited
            wait.seconds += waited + working
            wait.n_batches += 1
        now += working
    return wait


@given(st.floats(0.05, 20), st.integers(0, 6))
def test_so_many_workers_keep_up_and_hardly_fewer_would(ratio, num_workers):
    wait = pipeline(ratio, 1.0, num_workers)
    if not waits_for_data(wait):
        return
    needed = num_workers_needed(wait, num_workers)
    assert not waits_for_data(pipeline(ratio, 1.0, needed))
    assert abs(needed - max(num_workers + 1, math.ceil(ratio))) <= 1


def loader(num_workers, persistent_workers=False):
    return SimpleNamespace(num_workers=num_workers, persistent_workers=persistent_workers)


def waited(seconds, first=0, idle=None, n_batches=50):
    return WaitTotals(seconds=100, waited=seconds, waited_first=first, idle=idle, n_batches=n_batches)


_SHORT = WaitTotals(seconds=1, waited=0.4, n_batches=800)  # measured: a worker makes such a run twice as slow


@cases(
    "wait, loader, cores, share, remedy",
    (waited(43, first=40), loader(0), 1, 43, "try num_workers=1, now 0."),
    (
        _SHORT, loader(0), 8, 40,
        "loading a batch takes only 0.5 ms, which worker processes would not make faster; use larger batches, or "
        "index each batch at once out of tensors in memory.",
    ),
    (waited(80), loader(0), 2, 80,
     "try num_workers=2, now 0 (4 would keep up, on 2 cores: make loading cheaper, too)."),
    (
        waited(50), loader(4), 4, 50,
        "4 workers on 4 cores are not enough, so make loading cheaper: decoded, smaller or cached data, fewer "
        "augmentations.",
    ),
    (
        waited(50, first=40), loader(4), 16, 50,
        "most of it was at the start of epochs, when the workers start again; try persistent_workers=True.",
    ),
    (waited(50, first=10), loader(4), 16, 50, "try num_workers=8, now 4."),
    (waited(50, first=40), loader(4, True), 16, 50, "try num_workers=8, now 4."),
    (waited(10, n_batches=10), None, 16, 10, "load in worker processes, or make loading cheaper."),
    (waited(60, idle=50), loader(0), 8, 50, "try num_workers=2, now 0."),
)  # fmt: skip
def test_the_bottleneck_in_words(wait, loader, cores, share, remedy):
    words = f"Waited for data {share} % of the time: the loader is the bottleneck; {remedy}"
    assert judge_wait(wait, [loader] if loader else [], cores) == [words]


@cases(
    "wait, words",
    (waited(3), ["Waited for data 3 % of the time: the loader keeps up."]),
    (waited(5, idle=2), ["Waited for data 2 % of the time: the loader keeps up."]),
    (
        waited(10, idle=2),
        ["The host waited for data 10 % of the time, and the GPU had work meanwhile: the loader keeps up."],
    ),
    (waited(90, n_batches=9), []),
    (WaitTotals(), []),
)
def test_no_bottleneck_in_words(wait, words):
    assert judge_wait(wait, [loader(0)], 8) == words


@cases(
    "busy, words",
    (20.0, "try num_workers=8, now 4: the CPU is not busy, so the workers wait for a disk or a network."),
    (50.0, "4 workers on 4 cores are not enough"),
)
def test_workers_that_only_wait_may_be_more_than_cores(busy, words):
    wait = WaitTotals(seconds=100, waited=50, n_batches=50)
    assert words in judge_wait(wait, [loader(4)], 4, busy)[0]
    assert "try num_workers=1, now 0." in judge_wait(wait, [loader(0)], 4, busy)[0]


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 8), ("250000 100000", 2), ("10000 100000", 1), ("", 8)])
def test_the_quota_of_a_container_counts(quota, cores, tmp_path, monkeypatch):
    monkeypatch.setattr(utilization.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(utilization, "CONTAINER_QUOTA", tmp_path / "cpu.max")
    assert available_cores() == 8
    (tmp_path / "cpu.max").write_text(quota)
    assert available_cores() == cores


@cases(
    "arguments, words",
    ((50.0, {}, 100, True), []),
    ((None, {}, 0, True), []),
    ((20.0, {}, 100, False), []),
    (
        (20.0, {}, 100, True),
        [
            "gpu0 worked 20 % of the time although data was available: the host starts kernels too slowly, or "
            "something else runs between the steps; try larger batches or torch.compile."
        ],
    ),
    (
        (97.0, {"power cap": 40, "hardware thermal slowdown": 10, "power brake": 9}, 100, True),
        ["gpu0 ran below its clock rate: power cap 40 %, hardware thermal slowdown 10 % of the time."],
    ),
)
def test_what_is_said_of_a_gpu(arguments, words):
    assert judge_gpu("gpu0", *arguments) == words


def test_a_remedy_names_the_arguments_of_one_dataloader_alone():
    wait = WaitTotals(seconds=100, waited=50, n_batches=50)
    known = torch.utils.data.DataLoader(range(4), num_workers=2, persistent_workers=True)
    for loaders, words in (
        ([known], "try num_workers=4, now 2."),
        ([known, known], "load in worker processes"),
        ([range(4)], "load in worker processes"),
        ([], "load in worker processes"),
    ):
        assert words in judge_wait(wait, loaders, 8)[0]
