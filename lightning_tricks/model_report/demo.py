"""The part of `lightning-tricks demo` about the model report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from lightning_tricks._lightning_compat.trainer import callbacks_of_type
from lightning_tricks._shared.text import format_bytes
from lightning_tricks.model_report.callback import ModelReport


def specs(seed: int, out: Path) -> dict[str, Any]:
    """Return the fields of `Tricks` that the demo sets for the model report."""
    return {"model_report": {"graph": False, "depth": 2}}


def rows(trainer: Trainer, history: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Return what was measured after the first step, by label."""
    (callback,) = callbacks_of_type(trainer, ModelReport)
    if callback.summary is None:
        return {"memory": "not measured"}
    memory = callback.summary.memory
    sizes = [f"weights {format_bytes(memory.weights)}", f"gradients {format_bytes(memory.gradients)}"]
    return {"memory": ", ".join([*sizes, f"optimizer state {format_bytes(memory.optimizer_state)}"])}
