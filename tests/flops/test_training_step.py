"""Counting other people's `training_step`: losses, metrics, loggers, optimizers, gathering; none of it acts."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_tricks import count_flops
from tests.contract.lab import same, traces

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
    assert not count.notes, "metrics are idle"
    assert same(before, dict(module.state_dict()))
    assert traces(module) == marks
    assert module.losses == []
    assert not module.accuracy.update_called
    assert not module.mean.update_called


def test_a_tensor_runs_forward():
    assert count_flops(Classifier(), X, backward=True).macs == FORWARD


def test_example_input_array():
    module = Classifier()
    module.example_input_array = X
    assert count_flops(module, None).macs == FORWARD


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
    forward, first, second = 2 * (FORWARD + 12), BACKWARD + 2 * 12, 12
    assert (count.macs, count.train_step_flops) == (forward, 2 * (forward + first + second))
    assert same(before, dict(module.state_dict()))
    assert all(parameter.grad is None for parameter in module.parameters())
    assert count_flops(module, BATCH, compare=True).macs == forward


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
    with pytest.raises(ValueError, match=r"what training_step returned \(NoneType\) holds no tensor"):
        count_flops(Nothing(), BATCH, backward=True)
