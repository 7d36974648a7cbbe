"""`NvtxRanges`: which ranges each way to train opens, and that each one is closed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, IterableDataset

from lightning_tricks.devices.nvtx_ranges import NvtxRanges, RangeStack
from tests.small import BATCHES, QUIET, EvaluatedNet, Net, digits, loader, real_fp16
from tests.small import fit as train


class Recorder:
    """What Nsight Systems would see, as nested lists: [name, *inner ranges]."""

    def __init__(self):
        self.seen = []
        self.open = [self.seen]

    def push(self, name):
        inner = [name]
        self.open[-1].append(inner)
        self.open.append(inner)

    def pop(self):
        assert len(self.open) > 1, "a range was closed that is not open"
        self.open.pop()

    @property
    def depth(self):
        return len(self.open) - 1


def waits(stage="train"):
    return [f"{stage} data wait"]


def step(*phases, name="train step"):
    return [name, *([phase] for phase in phases)]


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", recorder.push)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", recorder.pop)
    yield recorder
    assert recorder.depth == 0, "a range was left open"


class Ranges(NvtxRanges):
    """Finds CUDA in its own setup alone: the Trainer would warn that it uses none."""

    def setup(self, trainer, pl_module, stage):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            super().setup(trainer, pl_module, stage)


USUAL = ("forward", "backward", "optimizer")


def fit(module=None, **options):
    return train(module, Ranges(), **options)


def test_accumulation_with_a_partial_tail(recorder):
    trainer = fit(accumulate_grad_batches=4)
    steps = [USUAL if (number + 1) % 4 == 0 or number == 9 else USUAL[:2] for number in range(BATCHES)]
    assert recorder.seen == [one for phases in steps for one in (waits(), step(*phases))]
    assert not trainer.optimizers[0]._optimizer_step_post_hooks, "the optimizer is not left as it was"


def test_validation_and_a_second_epoch(recorder):
    fit(EvaluatedNet(), limit_train_batches=2, limit_val_batches=1, max_epochs=2)
    epoch = [waits(), step(*USUAL)] * 2 + [waits("val"), step(name="val step")]
    assert recorder.seen == epoch * 2


@pytest.mark.parametrize(("function", "name"), [("validate", "val"), ("test", "test"), ("predict", "predict")])
def test_a_stage_alone(recorder, function, name):
    trainer = Trainer(callbacks=[Ranges()], **QUIET)
    getattr(trainer, function)(EvaluatedNet(), loader())
    assert recorder.seen == [waits(name), step(name=f"{name} step")] * BATCHES


def test_a_closure_that_runs_several_times(recorder):
    """Only the first forward pass has a range of its own: no hook comes before the others."""
    fit(Net(optimization="lbfgs"), limit_train_batches=2)
    for one in recorder.seen[1::2]:
        assert one[:4] == step(*USUAL)
        assert one[4:] == [["backward"], ["optimizer"]] * ((len(one) - 4) // 2)
        assert len(one) > 4


class Overflows(Net):
    """Has gradients that are not finite in its second step, which the GradScaler skips."""

    def training_step(self, batch, batch_idx):
        out = super().training_step(batch, batch_idx)
        return {**out, "loss": out["loss"] * (float("inf") if batch_idx == 1 else 1.0)}


def test_a_step_that_the_scaler_skips(recorder):
    trainer = fit(Overflows(optimization="sgd"), plugins=[real_fp16()], limit_train_batches=3)
    assert trainer.precision_plugin.scaler.get_scale() < 1024, "the step was not skipped"
    assert recorder.seen == [waits(), step(*USUAL)] * 3


def test_manual_optimization_with_two_optimizers(recorder):
    fit(Net(optimization="manual"), limit_train_batches=2)
    phases = ("forward", "backward", "forward", "optimizer", "forward", "optimizer", "forward")
    assert recorder.seen == [waits(), step(*phases)] * 2


class Skips(Net):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 0 else super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_step_that_returns_none(recorder):
    fit(Skips(), limit_train_batches=2)
    assert [one[0] for one in recorder.seen] == ["train data wait", "train step"] * 2
    assert ["backward"] not in recorder.seen[1]
    assert recorder.seen[3] == step(*USUAL)


class StopsEpoch(Net):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 2 else None


def test_an_epoch_that_a_hook_stops(recorder):
    fit(StopsEpoch(), max_epochs=2)
    epoch = [*[waits(), step(*USUAL)] * 2, waits(), step("forward")]
    assert recorder.seen == epoch * 2


class Breaks(EvaluatedNet):
    def __init__(self, where, error, **arguments):
        super().__init__(**arguments)
        self.where, self.error = where, error

    def fail(self, where, batch_idx=2):
        if (where, batch_idx) == (self.where, 2):
            raise self.error

    def training_step(self, batch, batch_idx):
        self.fail("forward", batch_idx)
        return super().training_step(batch, batch_idx)

    def on_before_backward(self, loss):
        self.fail("backward")

    def on_before_optimizer_step(self, optimizer):
        self.fail("optimizer")

    def validation_step(self, batch, batch_idx):
        self.fail("val step", batch_idx)
        return super().validation_step(batch, batch_idx)


@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt()])
@pytest.mark.parametrize("where", ["forward", "backward", "optimizer", "val step"])
def test_an_exception_closes_all(recorder, where, error):
    module = Breaks(where, error)
    with pytest.raises((ZeroDivisionError, SystemExit)):
        fit(module)
    assert not any(optimizer._optimizer_step_post_hooks for optimizer in module.trainer.optimizers)
    last = recorder.seen[-1]
    assert last == (step(name=where) if where == "val step" else step(*USUAL[: USUAL.index(where) + 1]))


class Rows(IterableDataset):
    """Rows without a length, the last of which may fail."""

    def __init__(self, fails=False):
        self.fails = fails

    def __iter__(self):
        yield from (digits()[index] for index in range(8))
        if self.fails:
            raise ZeroDivisionError


def test_unsized_data(recorder):
    """The Trainer fetches a batch in advance, the first where no hook can see it."""
    fit(data=DataLoader(Rows(), batch_size=4))
    assert recorder.seen == [waits(), step(*USUAL)] * 2


def test_data_that_fail(recorder):
    with pytest.raises(ZeroDivisionError):
        fit(data=DataLoader(Rows(fails=True), batch_size=4))
    assert recorder.seen[-1] == waits()


class Fetches(Net):
    def training_step(self, dataloader_iter):
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:.*dataloader_iter")
def test_a_step_that_fetches_its_batch(recorder):
    fit(Fetches(), limit_train_batches=2)
    assert recorder.seen == [["train step", ["forward", waits()], ["backward"], ["optimizer"]]] * 2


def test_nothing_without_cuda(recorder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    train(Net(), NvtxRanges())
    assert recorder.seen == []


CALLS = st.sampled_from(["begin_step", "begin_phase", "end_phase", "begin_wait", "end_wait", "close"])


@given(st.lists(CALLS, max_size=30))
def test_ranges_balance_after_any_calls(calls):
    recorder = Recorder()
    ranges = RangeStack(recorder.push, recorder.pop)
    for call in calls:
        getattr(ranges, call)(*([call] if call.startswith("begin") else []))
        assert recorder.depth <= 3
    ranges.end_wait()
    depth = recorder.depth
    ranges.begin_wait("begin_wait")
    assert recorder.depth == depth + 1
    ranges.end_wait()
    assert recorder.depth == depth, "a wait ends where it began"
    ranges.close()
    assert recorder.depth == 0
    for one in recorder.seen:
        assert one[0] in ("begin_step", "begin_wait"), "a phase lies in a step"
        assert one[0] == "begin_step" or len(one) == 1, "nothing lies in a wait"
    ranges.begin_step("step")  # and it works on
    ranges.begin_phase("phase")
    assert recorder.seen[-1] == ["step", ["phase"]]


@pytest.mark.gpu
def test_real_ranges_balance(monkeypatch):
    recorder, nvtx = Recorder(), torch.cuda.nvtx
    push, pop = nvtx.range_push, nvtx.range_pop
    monkeypatch.setattr(nvtx, "range_push", lambda name: (recorder.push(name), push(name)))
    monkeypatch.setattr(nvtx, "range_pop", lambda: (recorder.pop(), pop()))
    train(Net(), NvtxRanges(), accelerator="gpu", devices=1, precision="16-mixed")
    assert recorder.depth == 0
    assert [one[:3] for one in recorder.seen[1::2]] == [step("forward", "backward")] * BATCHES
