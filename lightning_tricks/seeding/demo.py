"""The part of the demo that shows SeedEverything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from lightning_tricks._lightning_compat.trainer import callbacks_of_type
from lightning_tricks.seeding.callback import SeedEverything


def specs(seed: int, out: Path) -> dict[str, Any]:
    """Return the fields of `Tricks` that SeedEverything fills in the demo."""
    return {"seeding": seed}


def rows(trainer: Trainer, history: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Return the seed and the settings of determinism, as label -> text."""
    (callback,) = callbacks_of_type(trainer, SeedEverything)
    settings = callback.state_dict()
    return {
        "seed": f"{callback.seed} (initial weights, batch order, workers)",
        "deterministic algorithms": "on" if settings["deterministic_algorithms"] else "off",
    }
