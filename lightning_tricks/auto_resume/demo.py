"""The demo of AutoResume."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from lightning_tricks._lightning_compat.trainer import callbacks_of_type
from lightning_tricks.auto_resume.callback import AutoResume
from lightning_tricks.auto_resume.core.checkpoint_folder import CheckpointFolder


def specs(seed: int, out: Path) -> dict[str, Any]:
    """Return the fields of `Tricks` that the demo sets for AutoResume."""
    return {"auto_resume": {"dirpath": str(out / "resume")}}


def rows(trainer: Trainer, history: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Return how often the run was saved."""
    (callback,) = callbacks_of_type(trainer, AutoResume)
    saves = CheckpointFolder(callback.dirpath).manifests()[0].number
    return {"checkpoints": f"{saves}; after a kill, the same command resumes"}
