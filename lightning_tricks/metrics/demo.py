"""The part of `lightning-tricks demo` about metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from lightning_tricks._lightning_compat.trainer import callbacks_of_type
from lightning_tricks.metrics.callback import MetricsMonitor


def specs(seed: int, out: Path) -> dict[str, Any]:
    """Return the fields of `Tricks` that this room fills in the demo."""
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    preset = {"task": "multiclass", "num_classes": 10}
    return {"metrics": {"metrics": preset, "class_names": names, "best": {"val/f1": "max"}}}


def rows(trainer: Trainer, history: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Return the best epoch, the values of the test, and the hardest class."""
    (monitor,) = callbacks_of_type(trainer, MetricsMonitor)
    value, step = monitor.best["val/f1"]
    names = monitor.class_names or ()
    weakest = min(names, key=lambda name: float(monitor.results[f"test/f1_{name}"]))
    return {
        "best": f"val/f1 {value:.3f} at step {step}",
        "test": f"f1 {monitor.results['test/f1']:.3f}, kappa {monitor.results['test/kappa']:.3f}",
        "hardest class": f"{weakest}: f1 {monitor.results[f'test/f1_{weakest}']:.3f}",
    }
