"""When SpikeGuard judges, and what it finds: modules whose losses and gradients are given, and observers beside it."""

import math
from collections import Counter

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.loggers.logger import DummyLogger
from torch.utils.data import DataLoader

from lightning_tricks import MetricsMonitor, SpikeGuard
from lightning_tricks.metrics import multiclass_metrics
from tests.small import cases
from tests.spike_guard.oracle import Noisy, Rows, loader, rank, run
from tests.spike_guard.test_callback import SMALL, guarded

pytestmark = pytest.mark.filterwarnings("ignore:SpikeGuard:UserWarning", "ignore:.*lr_scheduler.step:UserWarning")


class Given(LightningModule):
    """A weight of 1 that stays as it is, with a loss and a gradient that are given by the number of the batch."""

    def __init__(self, values, of_rank=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.values, self.of_rank, self.count = values, of_rank, 0

    def training_step(self, batch, batch_idx):
        self.count += 1
        given = self.values.get(self.count - 1) if self.of_rank in (None, rank()) else None
        return self.weight * (1 + 0.1 * math.sin(self.count) if given is None else given)

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def steps_done(folder, guard, values, rows=48, of_rank=None, **options):
    (end, *_) = run(folder, DataLoader(range(rows), 4), [guard], module=lambda: Given(values, of_rank), **options)
    return end["global_step"]


@pytest.mark.parametrize("monitor", ["loss", "grad_norm"])
@pytest.mark.parametrize("mode", ["skip", "rewind"])
def test_the_largest_value_of_the_ranks_is_judged(mode, monitor, tmp_path):
    guard = SpikeGuard(mode, monitor=monitor, every_n_train_steps=1, threshold=8.0, window=16, warmup_steps=4)
    assert steps_done(tmp_path / "one", guard, {8: 2.6}, max_epochs=1) == 11
    assert guard.spikes[0]["limit"] > 1.8  # the mean of both ranks
    # DDP has averaged the gradients of both
    value = 2.6 if monitor == "loss" else 4.4
    assert steps_done(tmp_path / "two", guard, {8: value}, max_epochs=1, ranks=2, of_rank=1) == 11


def test_the_steps_before_the_last_one_of_max_steps_are_judged_before_the_fit_ends(tmp_path):
    guard = SpikeGuard("rewind", every_n_train_steps=100, **SMALL)
    assert steps_done(tmp_path / "run", guard, {15: math.nan, 16: math.nan}, max_epochs=-1, max_steps=16) == 16
    assert [(spike["batch_idx"], spike["left_out"]) for spike in guard.spikes] == [(3, 4), (4, 4)]


def test_a_last_batch_with_fewer_rows_is_only_left_out_if_it_is_not_finite(tmp_path):
    for name, value, steps in (("large", 1e6, 13), ("nan", math.nan, 12), ("whole", 1e6, 12)):
        rows = 49 if name != "whole" else 52
        guard = SpikeGuard(**SMALL)
        assert steps_done(tmp_path / name, guard, {12: value}, rows=rows, max_epochs=1) == steps


class SpoiltGradients(Noisy):
    """Has gradients that are not finite, and a finite loss, where pixels are negative."""

    def loss(self, batch):
        pixels, labels = batch
        loss = super().loss((pixels.abs(), labels))
        # the derivative of the root is infinite at 0
        return loss + (self.net[0].weight[0, 0] * 0).abs().sqrt() if pixels.min() < 0 else loss


@pytest.mark.parametrize("mode", ["skip", "rewind"])
def test_gradients_that_are_not_finite_are_found_in_their_step(mode, tmp_path):
    guard = SpikeGuard(mode, every_n_train_steps=3, threshold=math.inf)
    guarded(tmp_path, guard, poisoned={8}, factor=-1.0, module=SpoiltGradients)


def test_weights_that_a_step_has_spoilt_end_skip_in_words(tmp_path):
    class Spoiling(Given):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 5:
                self.weight.data.fill_(math.inf)

    guard = SpikeGuard(threshold=math.inf, max_consecutive=2)
    with pytest.raises(RuntimeError, match=r'at batch 8 .*damaged the weights, which only "rewind" undoes'):
        run(tmp_path / "run", DataLoader(range(48), 4), [guard], module=lambda: Spoiling({}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan, 1e18])
def test_each_gradient_that_is_not_finite_is_found_though_the_loss_is(value, dtype, tmp_path):
    class Spoilt(Given):
        def on_after_backward(self):
            if self.count == 6:
                self.weight.grad.fill_(value)

    guard, module = SpikeGuard(threshold=math.inf), Spoilt({}).to(dtype)
    (end,) = run(tmp_path / "run", DataLoader(range(48), 4), [guard], module=lambda: module, max_epochs=1)
    assert end["global_step"] == 11 + math.isfinite(value)


class OneSchedule(Noisy):
    def configure_optimizers(self):
        (optimizer,), (*_, by_epoch) = super().configure_optimizers()
        return [optimizer], [by_epoch]


@pytest.mark.parametrize("mode", ["skip", "rewind"])
def test_the_epoch_of_batch_statistics_leaves_out_what_is_not_finite_alone(mode, tmp_path):
    def averaging():
        return [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=1)]

    guard = SpikeGuard(mode, every_n_train_steps=1, threshold=math.inf)
    options = {"others": averaging, "module": OneSchedule, "max_epochs": 2}
    guarded(tmp_path, guard, poisoned={5, 6}, factor=math.nan, **options)
    assert Counter(spike["epoch"] for spike in guard.spikes) == {0: 2, 1: 2, 2: 2}


class Measured(Noisy):
    """Accumulates by calling the closure alone in every other batch, as Lightning's documentation does."""

    def training_step(self, batch, batch_idx):
        scores = self.net(batch[0])
        return {"loss": self.loss(batch), "preds": scores, "target": batch[1]}


class ClosureAlone(Measured):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if batch_idx % 2 == 1:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


@pytest.mark.parametrize("mode", ["skip", "rewind"])
@pytest.mark.parametrize("poisoned", [4, 5])
@cases("module, options", (Measured, {"accumulate_grad_batches": 2}), (ClosureAlone, {}), (Measured, {}))
def test_all_batches_of_a_step_are_left_out_of_what_observers_count(mode, poisoned, module, options, tmp_path):
    every = 2 if module is Measured and not options else 1
    guard = SpikeGuard(mode, every_n_train_steps=every, threshold=math.inf)
    left_out = {poisoned} if mode == "skip" and every == 2 else {4, 5}
    options = {"others": lambda: [MetricsMonitor(multiclass_metrics(10), stages=["train"])], **options}
    guarded(tmp_path, guard, poisoned={poisoned}, left_out=left_out, factor=math.nan, module=module, **options)


@pytest.mark.parametrize("mode", ["skip", "rewind"])
def test_loggers_get_nothing_of_a_step_that_is_left_out(mode, tmp_path):
    class Kept(DummyLogger):
        def log_metrics(self, metrics, step=None, **_):
            steps.extend([step] * ("train_loss_step" in metrics))

    steps: list[int] = []
    guard = SpikeGuard(mode, every_n_train_steps=1, **SMALL)
    options = {"logger": Kept(), "log_every_n_steps": 1, "max_epochs": 1}
    run(tmp_path / "run", loader(Rows(12, {5}, math.nan)), [guard], **options)
    assert steps == [step for step in range(12) if step != 5]
