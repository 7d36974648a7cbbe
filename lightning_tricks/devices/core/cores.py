"""How many cores this process may use."""

from __future__ import annotations

import os
from pathlib import Path

_CONTAINER_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # in microseconds, of a period


def allowed_cores() -> int:
    """Return on how many cores the operating system lets this process run; all where it does not tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_cores() -> int:
    """Return how many cores this process may use; a container may have a quota of the time of all cores."""
    cores = allowed_cores()
    try:
        quota, period = _CONTAINER_QUOTA.read_text(encoding="ascii").split()
        return min(cores, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):  # there is no such file, or its quota is "max"
        return cores
