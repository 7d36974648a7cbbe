"""The part of `lightning-tricks demo` about devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from lightning_tricks._lightning_compat.trainer import callbacks_of_type
from lightning_tricks.devices.core.utilization import available_cores
from lightning_tricks.devices.device_monitor import DeviceMonitor


def specs(seed: int, out: Path) -> dict[str, Any]:
    """Return the fields of `Tricks` that the demo sets for devices; none without the extra."""
    return {"device_monitor": {"every_n_train_steps": 20}} if find_spec("psutil") else {}


def rows(trainer: Trainer, history: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Return what the run was on, and how often its load was logged."""
    if not callbacks_of_type(trainer, DeviceMonitor):
        return {"load": "not measured: that needs the extra 'devices'"}
    times = sum("host/data_wait" in step for step in history)
    return {"hardware": f"{available_cores()} cores", "load": f"logged {times} times; its table stands above"}
