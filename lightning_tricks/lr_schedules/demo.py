"""What the demo shows of optimizers and learning rate schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer


def specs(seed: int, out: Path) -> dict[str, Any]:
    """Return the fields of `Tricks` that this room fills in the demo."""
    return {"optimizer": {"lr": 5e-3}, "schedule": {"kind": "warmup_cosine", "warmup": 0.1}}


def rows(trainer: Trainer, history: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Say what the trick did in this fit, of which `history` holds the logged values, step by step."""
    (optimizer,), (config,) = trainer.optimizers, trainer.lr_scheduler_configs
    scheduler: Any = config.scheduler
    rates = [
        scheduler.factor(step) * optimizer.param_groups[0]["initial_lr"] for step in range(trainer.global_step + 1)
    ]
    groups = ", ".join(f"{len(group['params'])} {group['name']}" for group in optimizer.param_groups)
    return {
        "optimizer": f"{type(optimizer).__name__} ({groups})",
        "learning rate": f"{rates[0]:.2g} at first, {max(rates):.2g} at step {rates.index(max(rates))}, "
        f"{optimizer.param_groups[0]['lr']:.2g} at the end",
    }
