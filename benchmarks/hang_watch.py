"""What HangWatch costs in a fit of small steps, over the bare Trainer."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from _ratios import LEAN, arguments, be_quiet, measure, ratios, report, work
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

from lightning_tricks import HangWatch

_STEPS = 300


def main() -> None:
    """Measure, print and write."""
    be_quiet()
    given = arguments(default_rounds=15)
    torch.manual_seed(0)

    def fit(*callbacks: HangWatch) -> float:
        trainer = Trainer(max_epochs=1, callbacks=[*callbacks], enable_checkpointing=False, **LEAN)
        start = work()
        trainer.fit(BoringModel(), DataLoader(RandomDataset(32, _STEPS)))
        return work() - start

    with tempfile.TemporaryDirectory() as folder:
        watched = Path(folder) / "hang"
        times = measure({"bare": fit, "HangWatch": lambda: fit(HangWatch(dirpath=watched))}, given.rounds)
    results = {f"{_STEPS:,} steps of a linear layer": ratios(times, peer="bare")}
    report("hang_watch", results, given.rounds, given.out)


if __name__ == "__main__":
    main()
