"""The time of a fit of 8 members that two ranks share out, over that of one process that trains them one by one."""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from _ratios import LEAN, arguments, be_quiet, measure, ratios, report
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_tricks.ensembles import VotingClassifier

ONE = "1 process, one by one"
RANKS = {"strategy": "ddp_fork", "devices": 2}
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    ONE: ({"vectorize": False}, {}),
    "1 process, at once": ({"vectorize": True}, {}),
    "2 ranks, sharded": ({"members": "sharded"}, RANKS),
    "2 ranks, replicated": ({"vectorize": False}, RANKS),
}


class Clock(Callback):
    """Times training and the last validation, without the start of the ranks."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Start the clock."""
        self.start = time.perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Bring the time to the first process, as a logged value."""
        trainer.callback_metrics["seconds"] = torch.tensor(time.perf_counter() - self.start)


def convolutions() -> nn.Module:
    """Return a small convolutional net for digits of 28 x 28 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def perceptron() -> nn.Module:
    """Return a wide perceptron."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )


def seconds(make: Any, name: str, train: DataLoader[list[Tensor]], val: DataLoader[list[Tensor]]) -> float:
    """Return the time of a fit with two validations."""
    members, ranks = RUNS[name]
    torch.manual_seed(0)
    ensemble = VotingClassifier([make() for _ in range(8)], seed=0, **members)
    options = {**LEAN, "accelerator": "cpu", "enable_checkpointing": False, "max_epochs": 2, **ranks}
    trainer = Trainer(callbacks=[Clock()], **options)
    trainer.fit(ensemble, train, val)
    return float(trainer.callback_metrics["seconds"])


def main() -> None:
    """Measure and report."""
    given = arguments(15)
    torch.set_num_threads(1)
    be_quiet()
    x, y = torch.rand(768, 1, 28, 28), torch.randint(10, (768,))
    train, val = DataLoader(TensorDataset(x, y), 64, shuffle=True), DataLoader(TensorDataset(x[:256], y[:256]), 64)
    results = {
        f"8 {name}": ratios(
            measure({run: functools.partial(seconds, make, run, train, val) for run in RUNS}, given.rounds, 1), ONE
        )
        for name, make in (("convolutional nets", convolutions), ("perceptrons, 784-512-512-10", perceptron))
    }
    report("sharded_members", results, given.rounds, given.out)


if __name__ == "__main__":
    main()
