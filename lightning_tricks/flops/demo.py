"""The part of `lightning-tricks demo` about FLOPs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from lightning_tricks._lightning_compat.trainer import callbacks_of_type
from lightning_tricks._shared.text import format_si
from lightning_tricks.flops.callback import FlopsReport


def specs(seed: int, out: Path) -> dict[str, Any]:
    """Return the fields of `Tricks` that the demo sets for FLOPs."""
    return {"flops": {"backward": True, "depth": 2}}


def rows(trainer: Trainer, history: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Return what was counted in this fit, by label."""
    (callback,) = callbacks_of_type(trainer, FlopsReport)
    if callback.count is None:
        return {"FLOPs": "not counted"}
    count = callback.count
    ratio = f" ({count.train_step_flops / count.flops:.2f}x forward)" if count.train_step_flops else ""
    return {
        "parameters": f"{format_si(count.params)}, trainable {format_si(count.trainable_params)}",
        "forward": f"{format_si(count.macs, 'MAC')} a batch",
        "training step": f"{format_si(count.train_step_flops or 0, 'FLOP')} a batch{ratio}",
    }
