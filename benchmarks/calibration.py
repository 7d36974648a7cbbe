"""What calibration is worth on test digits: accuracy, likelihood and calibration error, before and after it."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _ratios import LEAN, Ratio, be_quiet, environment, ratios, report
from lightning.pytorch import Trainer
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_tricks import calibrate
from lightning_tricks.calibration import calibration_scores
from lightning_tricks.ensembles import SoftGradientBoostingClassifier, VotingClassifier

METHODS = ("temperature", "vector", "isotonic")
ADAM = ("Adam", {"lr": 0.01})
CLASSIFIERS = {
    "one model": partial(VotingClassifier, n_estimators=1, optimizer=ADAM),
    "Voting, 5": partial(VotingClassifier, n_estimators=5, optimizer=ADAM),
    "SoftGradientBoosting, 5": partial(SoftGradientBoostingClassifier, n_estimators=5, optimizer=ADAM),
}


def net() -> nn.Module:
    """Return 64-32-10."""
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def parts(seed: int) -> list[TensorDataset]:
    """Return 600 digits to train with, 600 to calibrate with and 597 to test with, in an order of the seed."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    x, y = torch.tensor(pixels, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    return [TensorDataset(x[rows], y[rows]) for rows in (slice(600), slice(600, 1200), slice(1200, None))]


def scores(probabilities: Tensor, labels: Tensor) -> dict[str, float]:
    """Return accuracy in per cent, and the scores of the probabilities."""
    right = (probabilities.argmax(1) == labels).double().mean().item()
    return {"accuracy": 100 * right, **calibration_scores(probabilities, labels)}


def one_seed(make: Any, seed: int, epochs: int) -> dict[str, dict[str, float] | None]:
    """Return the scores on the test digits: uncalibrated, and by each method that was not refused."""
    train, held_out, test = parts(seed)
    x, y = test.tensors
    torch.manual_seed(seed)
    ensemble = make(net, seed=seed)
    Trainer(max_epochs=epochs, enable_checkpointing=False, **LEAN).fit(ensemble, DataLoader(train, 32, shuffle=True))
    found: dict[str, dict[str, float] | None] = {"none": scores(ensemble.predict(x), y)}
    for method in METHODS:
        try:
            calibrate(ensemble, DataLoader(held_out, 200), method)  # type: ignore[arg-type]
            found[method] = scores(ensemble.predict(x, calibrated=True), y)
        except ValueError:
            found[method] = None
    return found


def medians(runs: list[dict[str, dict[str, float] | None]], method: str) -> dict[str, float]:
    """Return the medians over the runs that were not refused, and how many those are."""
    done = [run[method] for run in runs if run[method] is not None]
    names = done[0] if done else {}
    return {**{name: statistics.median(run[name] for run in done) for name in names}, "runs": len(done)}


def over_uncalibrated(runs: list[dict[str, dict[str, float] | None]], score: str) -> dict[str, Ratio]:
    """Return the ratio of a score with each method to that without, of methods that were never refused or infinite."""
    values = {method: [run[method][score] for run in runs if run[method] is not None] for method in ("none", *METHODS)}
    finite = {m: each for m, each in values.items() if len(each) == len(runs) and all(map(math.isfinite, each))}
    return ratios({"uncalibrated": finite.pop("none"), **finite}, "uncalibrated")


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=30, help="fits of each classifier (%(default)s)")
    parser.add_argument("--epochs", type=int, default=20, help="epochs of a fit (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the JSON")
    given = parser.parse_args()
    be_quiet()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results, changes = {}, {}
    for name, make in CLASSIFIERS.items():
        runs = [one_seed(make, seed, given.epochs) for seed in range(given.seeds)]
        changes |= {f"{score} of test digits, {name}": over_uncalibrated(runs, score) for score in ("nll", "ece")}
        results[name] = {method: medians(runs, method) for method in ("none", *METHODS)}
    columns = ("accuracy", "nll", "ece", "adaptive_ece", "brier", "runs")
    table = Table("classifier", "calibration", *columns, title=f"test digits, medians of {given.seeds} fits")
    for name, methods in results.items():
        for method, row in methods.items():
            table.add_row(name, method, *(f"{row[column]:.4g}" if column in row else "" for column in columns))
    Console().print(table)
    report("calibration", changes, given.seeds, given.out)
    text = json.dumps({"environment": environment(), "seeds": given.seeds, "calibration": results}, indent=2)
    (given.out / "calibration_scores.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
