"""What each kind of ensemble costs over torchensemble's of the same name, how accurate it is, and what it is unsure of.

`--seeds` pairs of fits compare accuracies. The last table is for choosing: accuracy, loss, cost and how well the
uncertainty tells digits of classes that were never seen from others (area under the ROC curve).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchensemble
from _figures import interval
from _ratios import ACCELERATOR, LEAN, be_quiet, environment, measure, ratios, report, work
from ensembles import MLP, DigitsMLP, LeNet, digits, random_images
from lightning.pytorch import LightningModule, Trainer
from rich.console import Console
from rich.table import Table
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import lightning_tricks.ensembles

FAMILIES = (
    "Voting", "Bagging", "Fusion", "SnapshotEnsemble", "GradientBoosting", "SoftGradientBoosting", "FastGeometric",
    "AdversarialTraining", "NeuralForest",
)  # fmt: skip
CYCLE = 2  # epochs of a cycle of FastGeometric


class EightClasses(nn.Module):
    """64-64-8."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.last(functional.relu(self.first(x)))


def fit_theirs(
    family: str, net: type[nn.Module], n: int, data: TensorDataset, epochs: int, lr: float = 5e-3
) -> tuple[Any, float]:
    """Fit torchensemble's class; return it and the CPU time in seconds."""
    kind = getattr(torchensemble, f"{family}Classifier")
    members = {"depth": 5} if family == "NeuralForest" else {"estimator": net}
    model = kind(**members, n_estimators=n, cuda=ACCELERATOR == "cuda")
    model.set_optimizer("Adam", lr=lr)
    own: dict[str, dict[str, Any]] = {
        "FastGeometric": {"cycle": CYCLE, "lr_1": lr / 2, "lr_2": lr / 200},
        "AdversarialTraining": {"epsilon": 0.01},
    }
    loader = DataLoader(data, 64, shuffle=True)
    start = work()
    with contextlib.redirect_stdout(io.StringIO()):
        model.fit(loader, epochs=epochs, log_interval=10**9, save_model=False, **own.get(family, {}))
    return model, work() - start


def fit_ours(
    family: str, net: type[nn.Module], n: int, data: TensorDataset, epochs: int, lr: float = 5e-3, classes: int = 10
) -> tuple[Any, float]:
    """Fit our class with the same epochs of each member, the Trainer included; return it and the CPU time."""
    kind = getattr(lightning_tricks.ensembles, f"{family}Classifier")
    members = {"n_outputs": classes} if family == "NeuralForest" else {"estimator": net}
    own = {"FastGeometric": {"cycle": CYCLE, "base_epochs": epochs}}
    model = kind(**members, n_estimators=n, optimizer=("Adam", {"lr": lr}), **own.get(family, {}))
    length = {"GradientBoosting": epochs * n, "FastGeometric": epochs + CYCLE * n}.get(family, epochs)
    loader = DataLoader(data, 64, shuffle=True)
    start = work()
    Trainer(max_epochs=length, enable_checkpointing=False, **LEAN).fit(model, loader)
    return model, work() - start


class Plain(LightningModule):
    """One model with nothing around it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss."""
        return functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam, fused as that of ours."""
        return torch.optim.Adam(self.parameters(), lr=5e-3, fused=True)


def fit_plain(net: type[nn.Module], data: TensorDataset, epochs: int) -> float:
    """Fit one model with the bare Trainer; return the CPU time in seconds."""
    model, loader = Plain(net()), DataLoader(data, 64, shuffle=True)
    start = work()
    Trainer(max_epochs=epochs, enable_checkpointing=False, **LEAN).fit(model, loader)
    return work() - start


def share_of_kernels(rounds: int) -> dict[str, float]:
    """Shares of a training step of LeNet, batch 64, which no ensemble can save: medians."""
    net, x, y = LeNet(), torch.rand(64, 1, 28, 28), torch.randint(10, (64,))
    optimizer = torch.optim.Adam(net.parameters(), fused=True)

    def backward(times: int = 20) -> None:
        for _ in range(times):
            optimizer.zero_grad()
            functional.cross_entropy(net(x), y).backward()

    def convolutions(times: int = 20) -> None:
        for _ in range(times):
            hidden = functional.max_pool2d(functional.relu(net.conv1(x)), 2)
            functional.max_pool2d(functional.relu(net.conv2(hidden)), 2).sum().backward()

    def step(times: int = 20) -> None:
        for _ in range(times):
            backward(1)
            optimizer.step()

    contestants = {"step": step, "forward and backward": backward, "convolutions and pooling": convolutions}
    found = ratios(measure(contestants, rounds), "step")
    return {name: row["median"] for name, row in found.items()}


def training(rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """CPU time of a fit over torchensemble's of the same class, data, epochs, batch size and optimizer."""
    train, images, results = digits()[0], random_images(1000), {}
    for net, n, data, epochs in ((DigitsMLP, 10, train, 2), (MLP, 5, images, 2), (LeNet, 5, images, 1)):
        for family in FAMILIES:
            if family == "NeuralForest" and net is not DigitsMLP:
                continue  # it has trees instead
            epochs_of_family = 5 * epochs if family == "SnapshotEnsemble" else epochs  # a cycle is an epoch

            def cpu_time(fit: Callable[..., tuple[Any, float]], job: tuple) -> float:
                return fit(*job)[1]

            job = (family, net, n if family != "SnapshotEnsemble" else 5, data, epochs_of_family)
            contestants = {
                "torchensemble": partial(cpu_time, fit_theirs, job),
                f"{family}Classifier": partial(cpu_time, fit_ours, job),
            }
            if family == "SnapshotEnsemble":  # what the Trainer alone costs with one model
                plain = (net, data, epochs_of_family)
                contestants["the bare Trainer, one model"] = partial(fit_plain, *plain)
            results[f"fit {net.__name__}, {job[2]} members, {family}"] = ratios(
                measure(contestants, rounds, 1), "torchensemble"
            )
    return results


def accuracies(family: str, seeds: int, epochs: int = 20) -> dict[str, float]:
    """Difference of the test accuracies, ours minus torchensemble's, in points, with its 95 % interval."""
    train, test = digits(797)
    x, y = test.tensors
    pairs, losses = [], []
    for seed in range(seeds):
        torch.manual_seed(seed)
        models = [fit(family, DigitsMLP, 5, train, epochs)[0] for fit in (fit_ours, fit_theirs)]
        predictions = [model.predict(x) for model in models]
        pairs.append([100 * (p.argmax(1) == y).double().mean().item() for p in predictions])
        losses.append([functional.nll_loss(p.clamp(min=1e-12).log(), y).item() for p in predictions])
    differences = [ours - theirs for ours, theirs in pairs]
    mean, lower, upper = interval(differences).values()
    columns = {"ours": 0, "torchensemble": 1}
    return {
        **{name: statistics.mean(pair[index] for pair in pairs) for name, index in columns.items()},
        "difference": mean,
        "lower": lower,
        "upper": upper,
        **{f"nll, {name}": statistics.mean(pair[index] for pair in losses) for name, index in columns.items()},
    }


def choice(family: str, seeds: int, epochs: int = 20) -> dict[str, float]:
    """What a kind is worth on digits: trained on eight classes, and asked about ten."""
    train, test = digits(797)
    (x, y), (pixels, labels) = train.tensors, test.tensors
    known = TensorDataset(x[y < 8], y[y < 8])
    found = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        _, single = fit_ours("Voting", EightClasses, 1, known, epochs)
        model, seconds = fit_ours(family, EightClasses, 5, known, epochs, classes=8)
        doubt = model.predict_uncertainty(pixels)
        seen = labels < 8
        share = (doubt.mean[seen].argmax(1) == labels[seen]).double().mean().item()
        loss = functional.nll_loss(doubt.mean[seen].clamp(min=1e-12).log(), labels[seen]).item()
        areas = [roc_auc_score(~seen, part) for part in (doubt.total, doubt.epistemic)]
        found.append([100 * share, loss, seconds / single, *areas])
    names = ("accuracy", "nll", "cost over one model", "AUROC of total", "AUROC of epistemic")
    return {name: statistics.median(column) for name, column in zip(names, zip(*found, strict=True), strict=True)}


def table(title: str, rows: dict[str, dict[str, float]]) -> None:
    """Print rows of numbers."""
    shown = Table("kind", *next(iter(rows.values())), title=title)
    for name, row in rows.items():
        shown.add_row(name, *(f"{value:.3f}" for value in row.values()))
    Console().print(shown)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15, help="alternations (%(default)s)")
    parser.add_argument("--seeds", type=int, default=50, help="pairs of fits (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the JSON")
    parser.add_argument("--family", action="append", help="this one alone; nothing is written")
    given = parser.parse_args()
    be_quiet()
    torch.set_num_threads(1)
    families = given.family or FAMILIES
    points = {family: accuracies(family, given.seeds) for family in families}
    table(f"test accuracy on digits, 5 members, 20 epochs, {given.seeds} pairs of fits, %", points)
    worth = {family: choice(family, max(5, given.seeds // 5)) for family in families}
    table("digits of eight classes, and two that were never seen; 5 members, 20 epochs", worth)
    if given.family:
        return
    report("ensemble_families", training(given.rounds), given.rounds, given.out)
    kernels = share_of_kernels(given.rounds)
    table("a training step of LeNet", {"LeNet": kernels})
    rounded = {
        name: {family: {key: round(value, 4) for key, value in row.items()} for family, row in rows.items()}
        for name, rows in (("accuracy", points), ("choice", worth))
    }
    text = json.dumps({"environment": environment(), "seeds": given.seeds, "LeNet": kernels, **rounded}, indent=2)
    (given.out / "ensemble_families_accuracy.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
