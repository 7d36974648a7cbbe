"""Counting a `training_step` with losses, metrics, loggers, optimizers and gathering has no side effects."""

import functools
import io
from collections import UserDict
from typing import NamedTuple

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_tricks import FlopsReport, ModelReport, count_flops
from lightning_tricks.model_report import summarize_model
from tests.contract.lab import traces
from tests.small import cases, fit, same

pytestmark = pytest.mark.oldest

X, Y = torch.randn(4, 8), torch.tensor([0, 1, 2, 0])
BATCH = [X, Y]


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        self.accuracy = MulticlassAccuracy(3)
        self.metrics = MetricCollection([MulticlassAccuracy(3), MulticlassF1Score(3)])
        self.mean = MeanMetric()
        self.losses = []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        scores = self(x)
        loss = nn.functional.cross_entropy(scores, y)
        self.accuracy(scores, y)
        self.mean.update(loss)
        self.log_dict({"loss": loss, "accuracy": self.accuracy}, prog_bar=True)
        self.log_dict(self.metrics(scores, y))
        self.print("loss", loss)
        self.losses.append(loss)
        if self.logger:
            self.logger.experiment.add_scalar("loss", loss.item(), self.global_step)
        return {"loss": loss, "scores": scores.detach()}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


FORWARD, BACKWARD = 4 * (8 * 16 + 16 * 3), 4 * (8 * 16 + 2 * 16 * 3)


@pytest.mark.parametrize("batch", [BATCH, tuple(BATCH)])
def test_a_batch_runs_the_training_step(batch):
    module = Classifier()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    marks = traces(module)
    count = count_flops(module, batch, backward=True)
    assert (count.macs, count.train_step_flops) == (FORWARD, 2 * (FORWARD + BACKWARD))
    assert not count.notes, "metrics do nothing"
    assert same(before, dict(module.state_dict()))
    assert traces(module) == marks
    assert module.losses == []
    assert not module.accuracy.update_called
    assert not module.mean.update_called


def test_a_dict_batch_and_other_signatures():
    class Mapped(Classifier):
        def training_step(self, batch):
            return nn.functional.cross_entropy(self(batch["x"]), batch["y"])

    count = count_flops(Mapped(), {"x": X, "y": Y}, backward=True)
    assert count.train_step_flops == 2 * (FORWARD + BACKWARD)

    class Iterates(Classifier):
        def training_step(self, dataloader_iter):
            return None

    with pytest.raises(ValueError, match=r"Iterates\.training_step takes `dataloader_iter`"):
        count_flops(Iterates(), BATCH)


class Adversaries(Classifier):
    """Two optimizers, stepped by hand; one of them by a closure."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = self.other(self(batch[0])).mean()
        first.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        first.step()
        self.untoggle_optimizer(first)

        def closure():
            second.zero_grad()
            loss = self.other(self(batch[0]).detach()).mean()
            self.manual_backward(loss)
            return loss

        second.step(closure=closure)
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self):
        optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in (self.net, self.other)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizer, 1) for optimizer in optimizers]


def test_manual_optimization():
    module = Adversaries()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    count = count_flops(module, BATCH, backward=True)
    forward, first, second = 2 * (FORWARD + 12), BACKWARD + 12, 12  # the first one toggles `other`'s weight off
    assert (count.macs, count.train_step_flops) == (forward, 2 * (forward + first + second))
    assert same(before, dict(module.state_dict()))
    assert all(parameter.grad is None for parameter in module.parameters())
    assert count_flops(module, BATCH, compare=True).macs == forward


class Toggles(Adversaries):
    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            self.manual_backward(self.other(self(batch[0])).mean())
            self.untoggle_optimizer(optimizer)


class TogglesInAContext(Adversaries):
    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            with self.toggled_optimizer(optimizer):
                self.manual_backward(self.other(self(batch[0])).mean())
        assert all(parameter.requires_grad for parameter in self.parameters())


@pytest.mark.parametrize(("kind", "has_trainer"), [(Toggles, True), (Toggles, False), (TogglesInAContext, False)])
def test_toggled_optimizers_count_only_the_gradients_that_are_computed(kind, has_trainer):
    report, module = FlopsReport(backward=True), kind()
    if has_trainer:
        fit(module, report, data=DataLoader(TensorDataset(*BATCH), batch_size=4))
    count = report.count if has_trainer else count_flops(module, BATCH, backward=True)
    with FlopCounterMode(display=False) as real:
        for frozen in (module.other, module.net):
            module.requires_grad_(True)
            frozen.requires_grad_(False)
            module.other(module(BATCH[0])).mean().backward()
    assert count.train_step_flops == real.get_total_flops()


class Plainly(Adversaries):
    def training_step(self, batch):
        self.optimizers()[0].zero_grad()
        self.net(batch[0]).mean().backward()


def test_a_plain_backward_is_not_counted_as_forward():
    for backward, step in ((True, 2 * (FORWARD + BACKWARD)), (False, None)):
        count = count_flops(Plainly(), BATCH, backward=backward)
        assert (count.macs, count.train_step_flops) == (FORWARD, step)
    summary = summarize_model(Plainly(), BATCH)
    assert summary.layers is not None
    assert "MeanBackward" in summary.graph


class WithoutOptimizers(Adversaries):
    """As a module whose layers are all frozen for now."""

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.step()
        return self.other(self(batch[0])).mean()

    def configure_optimizers(self):
        return []


def test_manual_optimization_without_an_optimizer():
    assert count_flops(WithoutOptimizers(), BATCH).macs == FORWARD + 12


def _decorated(step):
    @functools.wraps(step)
    def wrapper(*args, **kwargs):
        return step(*args, **kwargs)

    return wrapper


def _without_a_name(step):
    return lambda self, *args: step(self, *args)


STEPS = {
    "batch": lambda self, batch: self.lose(batch),
    "train_batch, batch_idx": lambda self, train_batch, batch_idx: self.lose(train_batch, batch_idx),
    "batch, i": lambda self, batch, i: self.lose(batch, i),
    "batch, batch_idx=None": lambda self, batch, batch_idx=None: self.lose(batch, batch_idx),
    "batch, batch_idx, dataloader_idx=7": lambda self, batch, i, dataloader_idx=7: self.lose(batch, i, dataloader_idx),
    "*args": lambda self, *args: self.lose(*args),
    "batch, *rest": lambda self, batch, *rest: self.lose(batch, *rest),
    "batch, **kwargs": lambda self, batch, **kwargs: self.lose(batch, *kwargs),
    "batch, *, batch_idx=None": lambda self, batch, *, batch_idx=None: self.lose(batch, batch_idx),
}
STEPS["decorated twice"] = _decorated(_decorated(STEPS["batch, i"]))
STEPS["*args by a decorator"] = _without_a_name(STEPS["batch, i"])


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_called_as_lightning_calls_it(name, capsys):
    calls = io.StringIO()  # a list would be put back as it was

    class Called(Classifier):
        training_step = STEPS[name]

        def lose(self, batch, *rest):
            print(rest, file=calls)
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    count_flops(Called(), BATCH)
    report, model_report = FlopsReport(), ModelReport()
    fit(Called(), report, model_report, data=DataLoader(TensorDataset(*BATCH), batch_size=4))
    assert report.count.macs == FORWARD
    assert model_report.summary.layers is not None
    assert len(lines := calls.getvalue().splitlines()) > 3
    assert len(set(lines)) == 1, "Lightning's own call is among them"


class Words(LightningModule):
    """As around models of transformers: the batch is a mapping, and the step unpacks it."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(30, 8), nn.Linear(8, 2)

    def forward(self, input_ids, labels=None):
        return self.head(self.embedding(input_ids)).mean(1)

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self(**batch), batch["labels"])


class Named(NamedTuple):
    image: torch.Tensor
    label: torch.Tensor


class OfNamed(Classifier):
    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch.image), batch.label)


@cases(
    "module, batch, macs",
    (Words, {"input_ids": torch.ones(4, 5, dtype=torch.long), "labels": Y.clamp(max=1)}, 4 * 5 * 8 * 2),
    (Words, UserDict(input_ids=torch.ones(4, 5, dtype=torch.long), labels=Y.clamp(max=1)), 4 * 5 * 8 * 2),
    (OfNamed, Named(X, Y), FORWARD),
    ids=["mapping", "UserDict", "named tuple"],
)
def test_batches_of_other_types(module, batch, macs):
    assert count_flops(module(), batch, backward=True).macs == macs
    assert summarize_model(module(), batch).layers is not None


def test_a_step_that_looks_at_its_loss_runs_on_a_copy():
    class Careful(Classifier):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)["loss"]
            return loss if loss.isfinite() else None

    module = Careful()
    count = count_flops(module, BATCH, backward=True)
    assert "real run on a copy" in count.notes[0]
    assert count.train_step_flops == 2 * (FORWARD + BACKWARD)
    assert not module.accuracy.update_called


def test_a_step_without_a_loss():
    class Nothing(Classifier):
        def training_step(self, batch, batch_idx):
            self(batch[0])

    assert count_flops(Nothing(), BATCH).macs == FORWARD
    with pytest.raises(ValueError, match=r"what training_step returned \(NoneType\) contains no tensor"):
        count_flops(Nothing(), BATCH, backward=True)


def test_a_metric_may_be_the_loss():
    class Measures(Classifier):
        def training_step(self, batch, batch_idx):
            wrong = self.mean(value=nn.functional.cross_entropy(self(batch[0]), batch[1]))
            return wrong + self.metrics(self(batch[0]), batch[1])["MulticlassAccuracy"]

    count = count_flops(Measures(), BATCH, backward=True)
    assert (count.macs, count.train_step_flops) == (2 * FORWARD, 2 * 2 * (FORWARD + BACKWARD))
    assert not count.notes


class AsksItsOptimizer(Classifier):
    """Checks types for the sake of a type checker, reads the rate, and sets it."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        assert isinstance(optimizer, torch.optim.AdamW)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.5
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1e-9)
        optimizer.zero_grad()
        self.manual_backward(nn.functional.cross_entropy(self(batch[0]), batch[1]))
        optimizer.step()


def test_an_optimizer_is_what_it_stands_for():
    report, model_report = FlopsReport(backward=True), ModelReport()
    trainer = fit(AsksItsOptimizer(), report, model_report, data=DataLoader(TensorDataset(*BATCH), batch_size=4))
    assert report.count.train_step_flops == 2 * (FORWARD + BACKWARD)
    assert model_report.summary.layers is not None
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.05, "the step has halved it once"
    assert count_flops(AsksItsOptimizer(), BATCH, backward=True).train_step_flops == 2 * (FORWARD + BACKWARD)
