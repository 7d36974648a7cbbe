"""What calibration costs over a pass through the data, and coverage and size of sets and intervals on real data."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from _ratios import arguments, be_quiet, environment, measure, ratios, report
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_diabetes, load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_tricks.conformal import ConformalClassifier, ConformalRegressor
from lightning_tricks.ensembles import VotingRegressor

FITS, SPLITS = 10, 20
SETS: dict[str, dict[str, Any]] = {
    "lac": {},
    "aps": {"score": "aps"},
    "aps, randomized": {"score": "aps", "generator": torch.Generator()},
    "raps": {"score": "raps"},
    "lac, class-conditional": {"groups": "class-conditional"},
    "aps, class-conditional": {"score": "aps", "groups": "class-conditional"},
}


def fitted(net: nn.Module, x: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor], steps: int) -> nn.Module:
    """Train on all rows at once by Adam."""
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(net(x), y).backward()
        optimizer.step()
    return net.eval()


def sets(alpha: float = 0.02) -> dict[str, dict[str, float]]:
    """Sets on 297 digits, calibrated with 1,000 others, of nets that were trained on the remaining 500."""
    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
    found: dict[str, list[list[float]]] = {name: [] for name in SETS}
    for seed in range(FITS):
        torch.manual_seed(seed)
        order = torch.randperm(len(labels))
        x, y = pixels[order].float() / 16, labels[order]
        net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        fitted(net, x[:500], y[:500], functional.cross_entropy, 100)
        for _ in range(SPLITS):
            rows = 500 + torch.randperm(len(y) - 500)
            calibration, test = rows[:1000], rows[1000:]
            for name, settings in SETS.items():
                made = ConformalClassifier(net, [(x[calibration], y[calibration])], alpha, **settings).predict(x[test])
                covered = made[torch.arange(len(test)), y[test]].double()
                of_classes = [covered[y[test] == label].mean().item() for label in range(10)]
                empty = (~made.any(1)).double().mean().item()
                found[name].append([covered.mean().item(), made.sum(1).double().mean().item(), empty, *of_classes])
    return {name: _of_sets(torch.tensor(rows)) for name, rows in found.items()}


def _of_sets(rows: Tensor) -> dict[str, float]:
    coverage, size, empty, *of_classes = rows.mean(0).tolist()
    return {"coverage": coverage, "worst class": min(of_classes), "size": size, "empty": empty}


class Quantiles(nn.Module):
    """A net and the levels of its two outputs."""

    levels = torch.tensor([0.1, 0.9])

    @staticmethod
    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        """Return the pinball loss of both quantiles."""
        error = y - outputs
        return torch.maximum(Quantiles.levels * error, (Quantiles.levels - 1) * error).mean()


def intervals(alpha: float = 0.2) -> dict[str, dict[str, float]]:
    """Intervals of 100 patients, calibrated with 142 others, of nets that were trained on the remaining 200."""
    x_all, y_all = (torch.tensor(part, dtype=torch.float32) for part in load_diabetes(return_X_y=True))
    found: dict[str, list[list[float]]] = {"absolute": [], "normalised": [], "quantile": []}
    for seed in range(FITS * SPLITS // 8):
        torch.manual_seed(seed)
        order = torch.randperm(len(y_all))
        x, y = x_all[order] * 20, (y_all[order] / y_all.std()).unsqueeze(1)
        train, calibration, test = slice(200), slice(200, 342), slice(342, None)

        def net(outputs: int) -> nn.Module:
            return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, outputs))

        def gaussian(outputs: Tensor, y: Tensor) -> Tensor:
            return functional.gaussian_nll_loss(outputs[:, :1], y, outputs[:, 1:].exp())

        members = [fitted(net(2), x[train], y[train], gaussian, 100) for _ in range(5)]
        ensemble = VotingRegressor(members, criterion=nn.GaussianNLLLoss())
        quantiles = fitted(net(2), x[train], y[train], Quantiles.loss, 100)
        for name, rows in found.items():
            module = quantiles if name == "quantile" else ensemble
            conformal = ConformalRegressor(module, [(x[calibration], y[calibration])], alpha, name)  # type: ignore[arg-type]
            made, truth = conformal.predict(x[test]), y[test]
            covered = ((made[:, :1] <= truth) & (truth <= made[:, 1:])).double()
            width = made[:, 1] - made[:, 0]
            unsure = ensemble.predict_uncertainty(x[test]).total[:, 0].argsort()[-30:]
            rows.append([covered.mean().item(), covered[unsure].mean().item(), width.mean().item(), width.std().item()])
    names = ("coverage", "of the 30 most unsure", "width", "deviation of widths")
    return {name: dict(zip(names, torch.tensor(rows).mean(0).tolist(), strict=True)) for name, rows in found.items()}


def costs(rounds: int) -> dict[str, Any]:
    """The time of a calibration over that of a pass of the same net over the same loader."""
    net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 100)).eval()
    data = TensorDataset(torch.randn(10_000, 256), torch.randint(100, (10_000,)))
    loader = DataLoader(data, 250)

    def forward() -> None:
        with torch.no_grad():
            for x, _ in loader:
                net(x)

    contestants: dict[str, Callable[[], Any]] = {"a pass over the data": forward}
    for score in ("lac", "aps", "raps"):
        contestants[f"calibrate, {score}"] = lambda score=score: ConformalClassifier(net, loader, score=score)  # type: ignore[misc]
    return {"10,000 rows, 100 classes": ratios(measure(contestants, rounds), "a pass over the data")}


def main() -> None:
    """Measure, print and write."""
    given = arguments(default_rounds=15)
    be_quiet()
    torch.set_num_threads(1)
    report("conformal", costs(given.rounds), given.rounds, given.out)
    tables = {"digits, alpha = 0.02": sets(), "diabetes, alpha = 0.2": intervals()}
    for title, rows in tables.items():
        shown = Table("score", *next(iter(rows.values())), title=title)
        for name, row in rows.items():
            shown.add_row(name, *(f"{value:.3f}" for value in row.values()))
        Console().print(shown)
    text = json.dumps({"environment": environment(), "fits": FITS, "splits": SPLITS, **tables}, indent=2)
    (given.out / "conformal_coverage.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
