"""Gradients are state where a step may read those of the step before: elsewhere it clears them unread."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import grad_norm
from torch import nn

from lightning_tricks.auto_resume import AutoResume
from tests.auto_resume.killing import own_state
from tests.auto_resume.test_callback import fit, stop, weights
from tests.small import Net, same

pytestmark = pytest.mark.oldest


def push(module):
    """Move weights along the gradients that are there, as anything may depend on them."""
    with torch.no_grad():
        for weight in module.parameters():
            if weight.grad is not None:
                weight -= 0.01 * weight.grad


class Dropped(Net):
    def __init__(self):
        super().__init__(dropout=0.2)


class Climbs(torch.optim.SGD):
    """Climbs along the gradients that it finds before it computes others: SAM in automatic optimization."""

    @torch.no_grad()
    def step(self, closure=None):
        found = [one for one in self.param_groups[0]["params"] if one.grad is not None]
        moved = [0.05 * one.grad for one in found]
        for one, change in zip(found, moved, strict=True):
            one += change
        with torch.enable_grad():
            loss = closure()
        for one, change in zip(found, moved, strict=True):
            one -= change
        super().step()
        return loss


class Sharpness(Dropped):
    def configure_optimizers(self):
        return Climbs(self.parameters(), lr=0.1)


class ByHand(Net):
    """Reads in a step of manual optimization what the step before has left."""

    def __init__(self):
        super().__init__(optimization="manual", dropout=0.2)

    def training_step(self, batch, batch_idx):
        push(self)
        return super().training_step(batch, batch_idx)


class Gathers(Dropped):
    """Lets gradients add up over three batches."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if batch_idx % 3 == 0:
            optimizer.zero_grad()


class Outside(Dropped):
    """Has a weight in no optimizer, whose gradients add up, and reads them with those of its own step."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def training_step(self, batch, batch_idx):
        outputs = super().training_step(batch, batch_idx)
        return {**outputs, "loss": outputs["loss"] * self.scale}

    def on_after_backward(self):
        self.net[0].weight.grad.mul_(1 + 0.01 * self.scale.grad)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.05)


MODULES = (Sharpness, ByHand, Gathers, Outside)


class Dies(Callback):
    training_arguments = ()  # it is there once

    def __init__(self, batch):
        self.batch = batch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == (1, self.batch):
            raise RuntimeError("gone")


SAVES = {  # when, and the batch in which the run dies
    "after a step": ({"every_n_train_steps": 1}, 4),
    "at an epoch's start": ({}, 4),
    "at an epoch's end": ({"every_n_train_steps": 7, "every_n_epochs": None}, 1),
}


@pytest.mark.parametrize("at", SAVES)
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.sampled(2)
def test_gradients_that_are_read_before_they_are_cleared(tmp_path, module, at):
    often, batch = SAVES[at]
    whole = fit(module=module, epochs=3)
    with pytest.raises(RuntimeError, match="gone"):
        fit(AutoResume(tmp_path, **often), Dies(batch), module=module, epochs=3)
    again = fit(AutoResume(tmp_path, **often), module=module, epochs=3)
    assert same(weights(again), weights(whole))


class Logs(Dropped):
    """Reads the gradients of its own step, as most do, and those of other functions."""

    def training_step(self, batch, batch_idx):
        outputs = super().training_step(batch, batch_idx)
        inputs = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.net(inputs).sum(), inputs)
        factor = self.trainer.accumulate_grad_batches * (self.trainer.gradient_clip_val or 1)
        return {**outputs, "loss": outputs["loss"] / factor + 0.01 * slope.square().mean()}

    def on_after_backward(self):
        self.log_dict(grad_norm(self, 2))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.norm = float(sum(one.grad.norm() for one in self.parameters()))

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)


def saved_gradients(folder):
    return set(own_state(max(folder.glob(".auto_resume/0*/meta.pt")))["ranks"][0]["gradients"])


@pytest.mark.parametrize("module", [Dropped, Logs, Outside])
def test_gradients_that_are_cleared_unread_are_not_saved(tmp_path, module):
    stop(AutoResume(tmp_path), module=module)
    assert saved_gradients(tmp_path) == ({"scale"} if module is Outside else set())
