"""The part of `lightning-tricks demo` about images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer


def specs(seed: int, out: Path) -> dict[str, Any]:
    """Return the fields of `Tricks` that this room fills in the demo."""
    return {"images": {"n": 16, "every_n_epochs": 5}}


def rows(trainer: Trainer, history: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Return how many grids of images were logged."""
    grids = list(Path(str(getattr(trainer.logger, "log_dir", "")), "pictures").rglob("images_*.png"))
    return {"grids of mistakes": f"{len(grids)} PNG files beside the logs"}
