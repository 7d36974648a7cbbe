"""Clipping against torch's foreach `clip_grad_norm_` and timm's AGC, and the callback against `gradient_clip_val`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torchvision
from _ratios import ACCELERATOR, arguments, be_quiet, measure, now, ratios, report
from lightning.pytorch import Callback, LightningModule, Trainer
from timm.utils.agc import adaptive_clip_grad as timm_adaptive_clip_grad
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_tricks.gradient_clipping import (
    GradientClipping,
    adaptive_clip_grad_,
    clip_grad_norm_,
    clip_grads_with_norm_,
    gradient_norms,
)

_STEPS = 20


def resnet50_shapes() -> list[torch.Size]:
    """The 161 parameters of ResNet-50, 25.6 M values."""
    with torch.device("meta"):
        return [parameter.shape for parameter in torchvision.models.resnet50().parameters()]


def small_shapes() -> list[torch.Size]:
    """2,000 parameters of 64 values."""
    return [torch.Size([64])] * 2000


def functions(shapes: list[torch.Size]) -> dict[str, Callable[[], object]]:
    """The pure functions, each on the same gradients; `max_norm` is never reached, so that they stay as they are."""
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)

    def ours_with_layers() -> Tensor:
        norms = gradient_norms(parameters)
        clip_grads_with_norm_(parameters, 1e9, norms.total)
        return norms.per_parameter

    return {
        "torch": lambda: torch.nn.utils.clip_grad_norm_(parameters, 1e9, foreach=True),
        "ours": lambda: clip_grad_norm_(parameters, 1e9),
        "ours, with per-layer norms": ours_with_layers,
        "ours, AGC": lambda: adaptive_clip_grad_(parameters, 1e9),
        "timm, AGC": lambda: timm_adaptive_clip_grad(parameters, 1e9),
    }


class Steps(LightningModule):
    """All of a training step but the forward: nothing hides what clipping costs."""

    def __init__(self, shapes: list[torch.Size]) -> None:
        super().__init__()
        self.parameters_ = nn.ParameterList(torch.zeros(shape) for shape in shapes)
        self.gradients = [torch.randn(shape) * 1e-3 for shape in shapes]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return a loss whose gradient is a constant."""
        return sum((p * g).sum() for p, g in zip(self.parameters_, self.gradients, strict=True))  # type: ignore[return-value]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class Clock(Callback):
    """Times the training loop alone."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start."""
        self.start = now()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop."""
        self.elapsed = now() - self.start


def trainers(shapes: list[torch.Size]) -> dict[str, Callable[[], float]]:
    """The same fit with the Trainer's own clipping, with ours, and with none."""

    def fit(callbacks: list[Callback], **trainer: float) -> float:
        clock = Clock()
        Trainer(
            max_epochs=1, accelerator=ACCELERATOR, devices=1,
            callbacks=[clock, *callbacks], logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, **trainer,
        ).fit(module, DataLoader(torch.zeros(_STEPS, 1)))  # fmt: skip
        return clock.elapsed

    module = Steps(shapes)
    return {
        "Trainer(gradient_clip_val=1.0)": lambda: fit([], gradient_clip_val=1.0),
        "GradientClipping(1.0)": lambda: fit([GradientClipping(1.0)]),
        "GradientClipping(1.0, log_norm=False)": lambda: fit([GradientClipping(1.0, log_norm=False)]),
        'on_nonfinite="skip"': lambda: fit([GradientClipping(1.0, on_nonfinite="skip")]),
        "no clipping": lambda: fit([]),
    }


def main() -> None:
    """Measure, print and write."""
    be_quiet()
    given = arguments(default_rounds=21)
    torch.manual_seed(0)
    results = {}
    for name, shapes in (("ResNet-50 shapes", resnet50_shapes()), ("2,000 small parameters", small_shapes())):
        times = measure(functions(shapes), given.rounds)
        results[f"function, {name}"] = ratios(times, peer="torch")
        rules = {rule: times[rule] for rule in ("ours, AGC", "timm, AGC")}
        results[f"AGC, {name}"] = ratios(rules, peer="ours, AGC")
        times = measure(trainers(shapes), given.rounds)
        results[f"training loop, {name}"] = ratios(times, peer="Trainer(gradient_clip_val=1.0)")
        policies = {policy: times[policy] for policy in ("GradientClipping(1.0)", 'on_nonfinite="skip"')}
        results[f"skip policy, {name}"] = ratios(policies, peer="GradientClipping(1.0)")
    report("gradient_clipping", results, given.rounds, given.out)


if __name__ == "__main__":
    main()
