"""The part of the demo that shows RunReport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from lightning_tricks._lightning_compat.trainer import callbacks_of_type
from lightning_tricks.run_report.callback import RunReport
from lightning_tricks.run_report.core.record_file import PAGE_FILE


def specs(seed: int, out: Path) -> dict[str, Any]:
    """Return the fields of `Tricks` that RunReport fills in the demo."""
    return {"run_report": str(page_path(out).parent)}


def page_path(out: Path) -> Path:
    """Return where the page about the demo's run is."""
    return out / "run" / PAGE_FILE


def rows(trainer: Trainer, history: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Return where the page is, as label -> text."""
    (callback,) = callbacks_of_type(trainer, RunReport)
    return {"page": f"{Path(callback.path).name}/{PAGE_FILE}, to open in a browser"}
