"""Gradients that the next step reads before it clears them are state; those that it clears unread are not saved."""

import functools
import sys
import types
import warnings

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import grad_norm
from torch import nn

from lightning_tricks.auto_resume import AutoResume, CheckpointFolder
from lightning_tricks.auto_resume.core.attributes.user_code import reads_gradients
from tests.auto_resume.test_callback import fit, stop, weights
from tests.contract.lab import Net, same

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


class InTrainingStep(Dropped):
    def training_step(self, batch, batch_idx):
        outputs = super().training_step(batch, batch_idx)
        norms = [one.grad.norm() for one in self.parameters() if one.grad is not None]
        return {**outputs, "loss": outputs["loss"] * (1 + 0.01 * sum(norms))}


class BeforeZeroGrad(Dropped):
    def on_before_zero_grad(self, optimizer):
        norms = [float(one.grad.norm()) for one in self.parameters() if one.grad is not None]
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + sum(norms))


class Norm(Dropped):
    """Reads them by a function of Lightning."""

    def on_train_batch_start(self, batch, batch_idx):
        norms = grad_norm(self, 2)
        for group in self.optimizers().param_groups:
            group["weight_decay"] = 0.1 * float(norms.get("grad_2.0_norm_total", 0.0))


class Named(Dropped):
    """Reads them by a name in a string, in a method that a hook calls."""

    def on_train_batch_start(self, batch, batch_idx):
        self.move()

    def move(self):
        for weight in self.net.parameters():
            if getattr(weight, "grad", None) is not None:
                weight.data.sub_(0.01 * weight.grad)


class Hooked(Dropped):
    """Has a hook of its optimizer, which is called before the closure is."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(lambda *_: push(self))
        return optimizer


class Replaced(Dropped):
    """Has another method in the place of its optimizer's."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        plain = optimizer.step

        def step(optimizer, closure=None):
            push(self)
            return plain(closure)

        optimizer.step = types.MethodType(step, optimizer)
        return optimizer


class ForwardHook(Dropped):
    def __init__(self):
        super().__init__()
        self.net.register_forward_pre_hook(functools.partial(lambda move, *_: move(self.net), push))


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


class Accumulates(Dropped):
    """Begins to accumulate between two steps: the next batch clears nothing."""

    def on_train_batch_start(self, batch, batch_idx):
        self.trainer.accumulate_grad_batches = 3 if batch_idx >= 4 else 1


class Sparse(Net):
    def __init__(self):
        super().__init__(dropout=0.2)
        self.table = nn.Embedding(10, 16, sparse=True)

    def training_step(self, batch, batch_idx):
        outputs = super().training_step(batch, batch_idx)
        extra = self.table(batch[1]).square().mean()
        before = 0.0 if self.table.weight.grad is None else self.table.weight.grad.coalesce().values().norm()
        return {**outputs, "loss": outputs["loss"] * (1 + before) + extra}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Pushes(Callback):
    """Reads them in a function that it was given."""

    def __init__(self):
        self.on_train_batch_start = lambda trainer, module, *_: push(module)


class PushesLater(Callback):
    """Reads them between two epochs."""

    def on_train_epoch_end(self, trainer, pl_module):
        push(pl_module)


MODULES = (Sharpness, InTrainingStep, BeforeZeroGrad, Norm, Named, Hooked, Replaced, ForwardHook, Outside, Accumulates)


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


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
@pytest.mark.parametrize("at", SAVES)
@pytest.mark.parametrize(
    ("module", "make"),
    [*((module, None) for module in (*MODULES, Sparse)), (Dropped, Pushes), (Dropped, PushesLater)],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.sampled(2)
def test_gradients_that_are_read_before_they_are_cleared(tmp_path, module, make, at):
    often, batch = SAVES[at]
    if module is not Accumulates and "every_n_epochs" in often:
        often = {**often, "every_n_train_steps": 10}

    def callbacks():
        return [*([] if make is None else [make()]), AutoResume(tmp_path, **often)]

    whole = fit(*callbacks()[:-1], module=module, epochs=3)
    with pytest.raises(RuntimeError, match="gone"):
        fit(*callbacks(), Dies(batch), module=module, epochs=3)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="AutoResume")
        again = fit(*callbacks(), module=module, epochs=3)
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
    newest = CheckpointFolder(folder).manifests()[0]
    checkpoint = torch.load(folder / newest.file, weights_only=True)
    return set(checkpoint["auto_resume"]["ranks"][0]["gradients"])


@pytest.mark.parametrize("module", [Dropped, Logs, Outside])
def test_gradients_that_are_cleared_unread_are_not_saved(tmp_path, module):
    stop(AutoResume(tmp_path), module=module)
    assert saved_gradients(tmp_path) == ({"scale"} if module is Outside else set())


def test_a_class_of_a_library_that_the_code_names(monkeypatch):
    package = types.ModuleType("strange_library")
    exec("class Norms:\n def of(self, module):\n  return [one.grad for one in module.parameters()]", vars(package))
    package.Norms.__module__ = package.__name__

    def reads(module):
        return package.Norms().of(module)

    def reads_not(module):
        return [one.requires_grad for one in module.parameters()]

    def imports(module):
        import strange_library

        return strange_library.Norms().of(module)

    monkeypatch.setitem(sys.modules, package.__name__, package)
    assert reads_gradients([reads])
    assert reads_gradients([imports])
    assert not reads_gradients([reads_not, None, 3, [reads_not], torch.nn.Linear(1, 1)])
    assert reads_gradients([{"a": [reads]}])
