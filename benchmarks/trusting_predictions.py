"""How far predictions can be trusted: one net, ensembles of five, before and after calibration, and torchensemble's.

Noisy digits of eight classes. Those of the two other classes, which differ between seeds, no model was trained on.
"""

from __future__ import annotations

import argparse
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import torch
from _figures import figures, report_figures
from _ratios import be_quiet
from ensemble_families import fit_ours, fit_theirs
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from lightning_tricks import calibrate
from lightning_tricks.calibration import CalibratedClassifier, calibration_scores
from lightning_tricks.conformal import ConformalClassifier

ENSEMBLES = {"VotingClassifier": "Voting", "FusionClassifier": "Fusion"}
LEFT_OUT = list(combinations(range(10), 2))
NOISE, ALPHA = 0.25, 0.1


class Net(nn.Module):
    """64-64-64-8."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.last(functional.relu(self.second(functional.relu(self.first(x)))))


def parts(seed: int) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Return 400 rows to train with, 300 to calibrate probabilities with, 300 for sets, and the others, to test with.

    Also the pixels of the digits of the classes that are left out, which are the seed's.
    """
    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    x, y = pixels[order].float() / 16, labels[order]
    x += NOISE * torch.randn(x.shape, generator=generator)
    left_out = torch.tensor(LEFT_OUT[seed * 7 % len(LEFT_OUT)])  # in 45 seeds, all pairs
    known = ~torch.isin(y, left_out)
    classes = y.unique()[~torch.isin(y.unique(), left_out)]
    rows, numbers = x[known], torch.searchsorted(classes, y[known])
    ends = (0, 400, 700, 1000, len(rows))
    return [(rows[a:b], numbers[a:b]) for a, b in pairwise(ends)], x[~known]


def likeliest(probabilities: Tensor) -> Tensor:
    """Return the sets that are taken where nothing is calibrated: the likeliest classes, up to a sum of 1 - alpha."""
    values, order = probabilities.sort(dim=1, descending=True)
    return torch.zeros_like(probabilities, dtype=torch.bool).scatter_(1, order, values.cumsum(1) - values < 1 - ALPHA)


def area(known: Tensor, unseen: Tensor) -> float:
    """Return the area under the ROC curve with which an uncertainty tells unseen digits from known ones."""
    return float(roc_auc_score([0] * len(known) + [1] * len(unseen), torch.cat([known, unseen])))


def scores(probabilities: Tensor, of_unseen: Tensor, sets: Tensor, labels: Tensor) -> dict[str, float]:
    """Return what the probabilities and sets of test digits, and the probabilities of unseen ones, are worth."""
    found = calibration_scores(probabilities, labels)
    doubts = (torch.special.entr(each.double()).sum(1) for each in (probabilities, of_unseen))
    return {
        "accuracy, %": 100 * (probabilities.argmax(1) == labels).double().mean().item(),
        "NLL": found["nll"],
        "ECE": found["ece"],
        "coverage, %": 100 * sets[torch.arange(len(labels)), labels].double().mean().item(),
        "classes in a set": sets.sum(1).double().mean().item(),
        "AUROC, entropy": area(*doubts),
    }


def one_seed(seed: int, epochs: int) -> dict[str, dict[str, float]]:
    """Return the scores of each contestant."""
    (train, held_out, for_sets, (x, y)), unseen = parts(seed)
    torch.manual_seed(seed)
    job: dict[str, Any] = {"net": Net, "n": 5, "data": TensorDataset(*train), "epochs": epochs}
    found = {}
    for name, family in ENSEMBLES.items():
        model = fit_theirs(family, **job)[0]
        predicted = model.predict(x)
        found[f"torchensemble's {name}"] = scores(predicted, model.predict(unseen), likeliest(predicted), y)
    ensembles = {name: fit_ours(family, **job, classes=8)[0].eval() for name, family in ENSEMBLES.items()}
    member = nn.Sequential(ensembles["VotingClassifier"].estimators_[0], nn.Softmax(1))
    with torch.no_grad():
        for name, model in {"one member": member, **ensembles}.items():
            found[name] = scores(model(x), model(unseen), likeliest(model(x)), y)
            if name in ensembles:
                doubts = (model.predict_uncertainty(rows).epistemic for rows in (x, unseen))
                found[name]["AUROC, epistemic"] = area(*doubts)
            calibrated = CalibratedClassifier(member[0] if model is member else model)
            calibrate(calibrated, [held_out])
            sets = ConformalClassifier(calibrated, [for_sets], ALPHA, outputs="probabilities").predict(x)
            found[f"{name}, calibrated"] = scores(calibrated(x), calibrated(unseen), sets, y)
    return found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=50, help="fits of each (%(default)s)")
    parser.add_argument("--epochs", type=int, default=30, help="epochs of a fit (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the JSON")
    given = parser.parse_args()
    be_quiet()
    torch.set_num_threads(1)
    runs = [one_seed(seed, given.epochs) for seed in range(given.seeds)]
    seeds = {name: [run[name] for run in runs] for name in runs[0]}
    pairs = [(f"{name}, calibrated", name) for name in ("one member", *ENSEMBLES)]
    pairs += [(name, f"torchensemble's {name}") for name in ENSEMBLES]
    pairs += [(f"{name}, calibrated", f"torchensemble's {name}") for name in ENSEMBLES]
    pairs += [(f"{name}, calibrated", "one member, calibrated") for name in ENSEMBLES]
    report_figures("trusting_predictions", figures(seeds, pairs), given.seeds, given.out)


if __name__ == "__main__":
    main()
