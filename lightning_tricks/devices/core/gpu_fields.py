"""The fields of a GPU by name, those of `nvidia-smi --query-gpu` among them, as plain values and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from typing import Any

from lightning_tricks._shared.checks import did_you_mean
from lightning_tricks._shared.units import format_bytes
from lightning_tricks.devices.core.gpu import Gpu

DEFAULT_QUERY = (
    "index",
    "uuid",
    "name",
    "memory.total",
    "memory.used",
    "memory.free",
    "utilization.gpu",
    "temperature.gpu",
    "power.draw",
    "power.limit",
)
_NOT_AVAILABLE = "[N/A]"  # as nvidia-smi prints it


@dataclass(frozen=True)
class GpuField:
    """A field that can be asked for.

    Attributes:
        name: Its name.
        unit: The unit of its values, for the head of a column; empty if they have none.
        read: Returns its value of a GPU: a number, text, a bool, None, or lists and dicts of these.
    """

    name: str
    unit: str
    read: Callable[[Gpu], Any]

    @property
    def title(self) -> str:
        """The head of its column, as nvidia-smi prints it: "memory.used [MiB]"."""
        return f"{self.name} [{self.unit}]" if self.unit else self.name


def gpu_fields(query: str | Iterable[str]) -> list[GpuField]:
    """Return the fields with these names.

    Args:
        query: Names, or one text with commas between them: those of `nvidia-smi --query-gpu`, whose values have
            nvidia-smi's units (MiB), and the attributes of `Gpu`, whose values have their own (bytes).

    Raises:
        ValueError: If there is no name, or an unknown one; the message has the most similar name.

    Examples:
        >>> [field.title for field in gpu_fields("name, memory.used, memory_used")]
        ['name', 'memory.used [MiB]', 'memory_used [B]']
    """
    names = query.split(",") if isinstance(query, str) else query
    names = [name.strip() for name in names if name.strip()]
    if not names:
        raise ValueError(f"query must name at least one field, such as 'name,memory.used', got {query!r}.")
    for name in names:
        if name not in FIELDS:
            hint = did_you_mean(name, FIELDS) or f" Known are {', '.join(FIELDS)}."
            raise ValueError(f"query must consist of known fields, got {name!r}.{hint}")
    return [FIELDS[name] for name in names]


def plain_values(gpus: Sequence[Gpu], query: str | Iterable[str] | None = None) -> list[dict[str, Any]]:
    """Return the fields of each GPU as values that JSON has, by name; None stands for what is not known.

    Args:
        gpus: The GPUs.
        query: The fields, as for `gpu_fields`; None for all attributes of `Gpu`.
    """
    if query is None:
        return [asdict(gpu) for gpu in gpus]
    chosen = gpu_fields(query)
    return [{field.name: field.read(gpu) for field in chosen} for gpu in gpus]


def csv_text(gpus: Sequence[Gpu], query: str | Iterable[str] = DEFAULT_QUERY, *, header: bool = True) -> str:
    """Return fields of GPUs as CSV, as `nvidia-smi --format=csv,nounits` tells them: units are in the head.

    Args:
        gpus: The GPUs, one a line.
        query: The fields, as for `gpu_fields`.
        header: Whether the first line names the fields.
    """
    chosen = gpu_fields(query)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    if header:
        writer.writerow(field.title for field in chosen)
    writer.writerows([cell_text(field.read(gpu)) for field in chosen] for gpu in gpus)
    return file.getvalue()


def cell_text(value: Any) -> str:
    """Return a value of a field in one line."""
    if value is None:
        return _NOT_AVAILABLE
    if isinstance(value, bool):
        return "Enabled" if value else "Disabled"  # as nvidia-smi prints a mode
    if isinstance(value, list):
        return "; ".join(_describe(part) if isinstance(part, dict) else cell_text(part) for part in value)
    return printable(f"{value:.2f}" if isinstance(value, float) else str(value))


def printable(text: str) -> str:
    r"""Return text of a process or a driver in one line, without what a terminal would act on.

    Examples:
        >>> printable("python train.py\x1b[2J")
        'python train.py\\x1b[2J'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def _describe(part: dict[str, Any]) -> str:
    memory = part.get("memory", part.get("memory_used"))
    words = [part.get("pid", part.get("uuid")), part.get("user"), None if memory is None else format_bytes(memory)]
    return printable(" ".join(str(word) for word in words if word is not None))


def _attribute(name: str, scale: int = 1) -> Callable[[Gpu], Any]:
    def read(gpu: Gpu) -> Any:
        value = getattr(gpu, name)
        return value if value is None or scale == 1 else value // scale

    return read


def _reason(words: str) -> Callable[[Gpu], str | None]:
    def read(gpu: Gpu) -> str | None:
        reasons = gpu.throttle_reasons
        return None if reasons is None else "Active" if words in reasons else "Not Active"

    return read


def _plain(name: str) -> Callable[[Gpu], Any]:
    def read(gpu: Gpu) -> Any:
        value = asdict(gpu)[name]
        return list(value) if isinstance(value, tuple) else value

    return read


_MIB = 1 << 20
_REASONS = {
    "applications_clocks_setting": "application clocks",
    "sw_power_cap": "power cap",
    "hw_slowdown": "hardware slowdown",
    "sync_boost": "sync boost",
    "sw_thermal_slowdown": "software thermal slowdown",
    "hw_thermal_slowdown": "hardware thermal slowdown",
    "hw_power_brake_slowdown": "power brake",
}
_NVIDIA_SMI: dict[str, tuple[str, Callable[[Gpu], Any]]] = {
    "timestamp": ("", lambda gpu: f"{datetime.now():%Y/%m/%d %H:%M:%S.%f}"[:-3]),
    "index": ("", _attribute("index")),
    "uuid": ("", _attribute("uuid")),
    "gpu_uuid": ("", _attribute("uuid")),
    "pci.bus_id": ("", _attribute("bus_id")),
    "gpu_bus_id": ("", _attribute("bus_id")),
    "name": ("", _attribute("name")),
    "gpu_name": ("", _attribute("name")),
    "memory.total": ("MiB", _attribute("memory_total", _MIB)),
    "memory.used": ("MiB", _attribute("memory_used", _MIB)),
    "memory.free": ("MiB", _attribute("memory_free", _MIB)),
    "utilization.gpu": ("%", _attribute("utilization")),
    "utilization.memory": ("%", _attribute("memory_utilization")),
    "temperature.gpu": ("", _attribute("temperature")),
    "power.draw": ("W", _attribute("power")),
    "power.limit": ("W", _attribute("power_limit")),
    "enforced.power.limit": ("W", _attribute("power_limit")),
    "fan.speed": ("%", _attribute("fan")),
    "pstate": ("", lambda gpu: None if gpu.performance_state is None else f"P{gpu.performance_state}"),
    "persistence_mode": ("", _attribute("persistence_mode")),
    "compute_mode": ("", _attribute("compute_mode")),
    "display_active": ("", _attribute("display_active")),
    "ecc.errors.uncorrected.volatile.total": ("", _attribute("ecc_errors")),
    "clocks.sm": ("MHz", _attribute("sm_clock")),
    "clocks.current.sm": ("MHz", _attribute("sm_clock")),
    "clocks.mem": ("MHz", _attribute("memory_clock")),
    "clocks.current.memory": ("MHz", _attribute("memory_clock")),
    "driver_version": ("", _attribute("driver_version")),
    "vbios_version": ("", _attribute("vbios_version")),
    "mig.mode.current": ("", _attribute("mig_mode")),
    **{
        f"clocks_{kind}_reasons.{name}": ("", _reason(words))
        for kind in ("event", "throttle")
        for name, words in _REASONS.items()
    },
}
_UNITS = {
    "memory_total": "B",
    "memory_used": "B",
    "memory_free": "B",
    "utilization": "%",
    "memory_utilization": "%",
    "power": "W",
    "power_limit": "W",
    "energy": "J",
    "fan": "%",
    "sm_clock": "MHz",
    "memory_clock": "MHz",
}
FIELDS = {field.name: GpuField(field.name, _UNITS.get(field.name, ""), _plain(field.name)) for field in fields(Gpu)} | {
    name: GpuField(name, unit, read) for name, (unit, read) in _NVIDIA_SMI.items()
}
