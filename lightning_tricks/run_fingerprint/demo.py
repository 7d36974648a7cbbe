"""The part of the demo that shows RunFingerprint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from lightning_tricks._lightning_compat.trainer import callbacks_of_type
from lightning_tricks._shared.text import format_bytes
from lightning_tricks.run_fingerprint.callback import RunFingerprint
from lightning_tricks.run_fingerprint.core.record import read_record


def specs(seed: int, out: Path) -> dict[str, Any]:
    """Return the fields of `Tricks` that RunFingerprint fills in the demo."""
    return {"run_fingerprint": str(out / "fingerprint.jsonl")}


def rows(trainer: Trainer, history: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Return the number and size of the recorded steps, as label -> text."""
    (callback,) = callbacks_of_type(trainer, RunFingerprint)
    path = Path(callback.path)
    size = format_bytes(path.stat().st_size)
    return {"recorded": f"{len(read_record(path)) - 1} steps in {size}, to compare with another run"}
