"""What RunFingerprint costs in a step, and what its fingerprint costs beside other ways to stand for memory."""

from __future__ import annotations

import hashlib
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torchvision
from _ratios import LEAN, arguments, be_quiet, measure, now, ratios, report
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_tricks import RunFingerprint, seed_everything
from lightning_tricks.run_fingerprint import fingerprint
from lightning_tricks.run_fingerprint.core.step_recorder import StepRecorder

HOOKS = ("on_batch_start", "on_backward_start", "on_optimizer_step", "on_batch_end")


class Classifier(LightningModule):
    """Any net that puts out ten scores."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the cross-entropy."""
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters())


class Clock(Callback):
    """Notes when each step began, and how much of it passed inside RunFingerprint."""

    def __init__(self) -> None:
        self.began: list[float] = []
        self.inside: list[float] = []
        self.ended = 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        """Begin a step."""
        self.began.append(now())
        self.inside.append(0.0)

    def on_train_end(self, *args: Any) -> None:
        """Note the end."""
        self.ended = now()

    def timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Count the time in a method as passed inside."""

        def clocked(*given: Any, **named: Any) -> None:
            start = time.perf_counter()
            method(*given, **named)
            self.inside[-1] += time.perf_counter() - start

        return clocked


def perceptron() -> nn.Module:
    """Return a small multilayer perceptron."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def fit(net: nn.Module, batch: tuple[int, ...], steps: int, detail: str | None) -> Clock:
    """Train on one batch again and again."""
    seed_everything(1, verbose=False)
    clock, generator = Clock(), torch.Generator().manual_seed(0)
    x, y = torch.rand(batch, generator=generator), torch.randint(10, batch[:1], generator=generator)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as patches:
        for name in HOOKS:
            patches.enter_context(patch.object(StepRecorder, name, clock.timed(getattr(StepRecorder, name))))
        seen = [RunFingerprint(Path(folder) / "run.jsonl", detail=detail)] if detail else []
        trainer = Trainer(max_epochs=1, callbacks=[clock, *seen], enable_checkpointing=False, **LEAN)
        trainer.fit(Classifier(net), DataLoader([(x, y)] * steps, batch_size=None))
    return clock


def inside(make: Callable[[], nn.Module], batch: tuple[int, ...], steps: int) -> dict[str, dict[str, float]]:
    """Measure each step over the same step without what passes inside RunFingerprint."""
    found = {}
    for detail in ("step", "layer"):
        clock = fit(make(), batch, steps + 2, detail)
        whole = [after - before for before, after in pairwise([*clock.began, clock.ended])]
        each = [all_ / (all_ - own) for all_, own in zip(whole, clock.inside, strict=True)][1:-1]
        low, median, high = statistics.quantiles(each, n=4)
        found[f'detail="{detail}", inside'] = {"median": median, "q1": low, "q3": high, "peer": "without"}
    return found


def wall(make: Callable[[], nn.Module], batch: tuple[int, ...], rounds: int) -> dict[str, dict[str, float]]:
    """Time fits of 300 steps with and without a record."""

    def run(detail: str | None) -> float:
        clock = fit(make(), batch, 300, detail)
        return clock.ended - clock.began[20]

    times = measure({"without": lambda: run(None), "step": lambda: run("step"), "layer": lambda: run("layer")}, rounds)
    return {f'detail="{name}"': ratio for name, ratio in ratios(times, "without").items()}


def hashes(rounds: int) -> dict[str, dict[str, float]]:
    """Time ways to stand for weights that no cache holds; the sum of words reads them and does nothing else."""
    weights = {name: weight.detach() for name, weight in torchvision.models.resnet18().named_parameters()}
    words = [weight.reshape(-1).view(torch.int64) for weight in weights.values()]
    others = torch.rand(2**25)  # 128 MiB
    contestants: dict[str, Callable[[], Any]] = {
        "sum of 64-bit words": lambda: [each.sum() for each in words],
        "fingerprint": lambda: fingerprint(weights),
        "norm": lambda: [each.norm() for each in weights.values()],
        "zlib.crc32": lambda: [zlib.crc32(each.numpy()) for each in weights.values()],
        "sha256": lambda: [hashlib.sha256(each.numpy()).digest() for each in weights.values()],
    }

    def cold(contestant: Callable[[], Any]) -> float:
        others.add_(1)
        start = now()
        contestant()
        return now() - start

    times = measure({name: partial(cold, each) for name, each in contestants.items()}, rounds)
    return ratios(times, "sum of 64-bit words")


def main() -> None:
    """Measure and report."""
    given = arguments(15)
    torch.set_num_threads(1)
    be_quiet()
    results = {
        "ResNet-18's weights, over reading them": hashes(given.rounds),
        "a step: ResNet-50, 32 images of 224 x 224": inside(
            lambda: torchvision.models.resnet50(num_classes=10), (32, 3, 224, 224), given.rounds
        ),
        "a step: ResNet-18, 32 images of 128 x 128": inside(
            lambda: torchvision.models.resnet18(num_classes=10), (32, 3, 128, 128), given.rounds
        ),
        "a step: 9,000 parameters, 32 vectors of 64": wall(perceptron, (32, 64), given.rounds),
    }
    report("run_fingerprint", results, given.rounds, given.out)


if __name__ == "__main__":
    main()
