"""What is measured of devices while they train, and how values are gathered."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from lightning_tricks._shared.checks import check_choice


@dataclass(frozen=True)
class Quantity:
    """One quantity that is measured again and again.

    Attributes:
        unit: Its unit, for people.
        logged: What of the values since the last log is logged: their mean, or the largest.
    """

    unit: str
    logged: Literal["mean", "max"]


QUANTITIES: Mapping[str, Quantity] = {
    "gpu/utilization": Quantity("%", "mean"),
    "gpu/memory_used_gib": Quantity("GiB", "max"),
    "gpu/peak_memory_gib": Quantity("GiB", "max"),
    "gpu/temperature": Quantity("°C", "max"),
    "gpu/power_w": Quantity("W", "mean"),
    "gpu/data_wait": Quantity("%", "mean"),
    "gpu/throttled": Quantity("%", "mean"),
    "gpu/memory_utilization": Quantity("%", "mean"),
    "gpu/sm_clock_mhz": Quantity("MHz", "mean"),
    "gpu/fan": Quantity("%", "max"),
    "host/cpu_utilization": Quantity("%", "mean"),
    "host/ram_used_gib": Quantity("GiB", "max"),
    "host/data_wait": Quantity("%", "mean"),
    "host/process_ram_gib": Quantity("GiB", "max"),
}
DEFAULT_KEYS = (
    "gpu/utilization",
    "gpu/memory_used_gib",
    "gpu/peak_memory_gib",
    "gpu/temperature",
    "gpu/power_w",
    "host/cpu_utilization",
    "host/ram_used_gib",
    "host/data_wait",
)


def check_keys(keys: object) -> tuple[str, ...]:
    """Return the names of the quantities that "default" or a list of names stands for.

    Raises:
        TypeError: If it is neither.
        ValueError: If a name is unknown; the message has the most similar one.
    """
    if keys == "default":
        return DEFAULT_KEYS
    if isinstance(keys, str) or not isinstance(keys, Iterable):
        raise TypeError(f"keys must be 'default' or a list of {', '.join(QUANTITIES)}, got {keys!r}.")
    return tuple(check_choice("keys", key, QUANTITIES) for key in keys)


@dataclass
class Statistics:
    """The mean and the largest of some values."""

    count: int = 0
    total: float = 0.0
    maximum: float = float("-inf")

    def add(self, value: float) -> None:
        """Include a value."""
        self.count += 1
        self.total += value
        self.maximum = max(self.maximum, value)

    @property
    def mean(self) -> float:
        """The mean of the values; there has to be one."""
        return self.total / self.count


class Recorder:
    """Gathers values by key, for a whole stage and since they were last taken; several threads may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stages: dict[str, dict[str, Statistics]] = {}
        self._recent: dict[str, dict[str, Statistics]] = {}

    def add(self, stage: str, values: Mapping[str, float]) -> None:
        """Include values of a stage."""
        with self._lock:
            for gathered in (self._stages, self._recent):
                of_stage = gathered.setdefault(stage, {})
                for key, value in values.items():
                    of_stage.setdefault(key, Statistics()).add(value)

    def take_recent(self, stage: str) -> dict[str, Statistics]:
        """Return what was added to a stage since this was last called, by key."""
        with self._lock:
            return self._recent.pop(stage, {})

    def whole(self, stage: str) -> dict[str, Statistics]:
        """Return what was added to a stage, by key."""
        with self._lock:
            return {key: Statistics(*vars(value).values()) for key, value in self._stages.get(stage, {}).items()}


def generic_key(key: str) -> str:
    """Return the name of the quantity that a logged key is about: "gpu/power_w" for "gpu3/power_w"."""
    device, _, name = key.partition("/")
    return f"{device.rstrip('0123456789')}/{name}"


def quantity_of(key: str) -> Quantity:
    """Return the quantity that a logged key is about."""
    return QUANTITIES[generic_key(key)]
