"""What the demo shows of resuming."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from lightning_tricks.auto_resume.callback import AutoResume
from lightning_tricks.auto_resume.core.checkpoint_files import CheckpointFolder


def specs(seed: int, out: Path) -> dict[str, Any]:
    """Return the fields of `Tricks` that this room fills in the demo."""
    return {"auto_resume": {"dirpath": str(out / "resume")}}


def rows(trainer: Trainer, history: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Say how often the run was saved."""
    (callback,) = (c for c in trainer.callbacks if isinstance(c, AutoResume))  # type: ignore[attr-defined]
    saves = CheckpointFolder(callback.dirpath).manifests()[0].number
    return {"checkpoints": f"{saves}; killed meanwhile, the same command goes on"}
