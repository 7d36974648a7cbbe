"""GPUs as a table for a terminal, as plain values and as CSV, with the fields that a query names."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from lightning_tricks._shared.checks import did_you_mean
from lightning_tricks._shared.text import format_bytes, printable
from lightning_tricks.devices.core.gpu import THROTTLE_REASONS, Gpu, MigSlice, Told

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table
    from rich.text import Text

DEFAULT_QUERY = (
    "index,uuid,name,memory.total,memory.used,memory.free,utilization.gpu,temperature.gpu,power.draw,power.limit"
)
_NOT_AVAILABLE = "[N/A]"  # as nvidia-smi prints it
_UNKNOWN = "-"
_BAR_FROM = 100  # the width from which there is space for a bar and the whole name
_CUT_OFF_TO = 10  # columns of a name or a command, before other columns are left out
_WARM, _HOT = 70, 85  # °C: from here on it is worth a look; GPUs slow down at about 90


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


def _own_fields() -> Iterator[GpuField]:
    """Yield the attributes of `Gpu`, and those of them that nvidia-smi has under another name."""
    for each in fields(Gpu):
        told: Told | None = each.metadata.get("told")
        unit = told.unit if told else ""
        yield GpuField(each.name, unit, partial(_plain, each.name))
        for smi in told.smi if told else ():
            in_mib = unit == "B"
            read = partial(_mebibytes, each.name) if in_mib else attrgetter(each.name)
            yield GpuField(smi, "MiB" if in_mib else unit, read)


def _smi_fields() -> Iterator[GpuField]:
    """Yield the fields of nvidia-smi that are not attributes of `Gpu`."""
    yield GpuField("timestamp", "", lambda gpu: f"{datetime.now():%Y/%m/%d %H:%M:%S.%f}"[:-3])
    yield GpuField("pstate", "", lambda gpu: None if gpu.performance_state is None else f"P{gpu.performance_state}")
    for reason in THROTTLE_REASONS:
        for kind in ("event", "throttle") if reason.smi else ():
            yield GpuField(f"clocks_{kind}_reasons.{reason.smi}", "", partial(_activity, reason.words))


def _plain(name: str, gpu: Gpu) -> Any:
    value = asdict(gpu)[name]
    return list(value) if isinstance(value, tuple) else value


def _mebibytes(name: str, gpu: Gpu) -> int | None:
    size = getattr(gpu, name)
    return None if size is None else size >> 20


def _activity(words: str, gpu: Gpu) -> str | None:
    reasons = gpu.throttle_reasons
    return None if reasons is None else "Active" if words in reasons else "Not Active"


FIELDS = {each.name: each for each in (*_own_fields(), *_smi_fields())}


def gpu_fields(query: str) -> list[GpuField]:
    """Return the fields with these names.

    Args:
        query: Names with commas between them: those of `nvidia-smi --query-gpu`, whose values have nvidia-smi's units
            (MiB), and the attributes of `Gpu`, whose values have their own (bytes).

    Raises:
        ValueError: If there is no name, or an unknown one; the message has the most similar name.

    Examples:
        >>> [field.title for field in gpu_fields("name, memory.used, memory_used")]
        ['name', 'memory.used [MiB]', 'memory_used [B]']
    """
    names = [name.strip() for name in query.split(",") if name.strip()]
    if not names:
        raise ValueError(f"query must name at least one field, such as 'name,memory.used', got {query!r}.")
    for name in names:
        if name not in FIELDS:
            hint = did_you_mean(name, FIELDS) or f" Known are {', '.join(FIELDS)}."
            raise ValueError(f"query must consist of known fields, got {name!r}.{hint}")
    return [FIELDS[name] for name in names]


def plain_values(gpus: Sequence[Gpu], query: str | None = None) -> list[dict[str, Any]]:
    """Return the fields of each GPU as values that JSON has, by name; None stands for what is not known.

    Args:
        gpus: The GPUs.
        query: The fields, as for `gpu_fields`; None for all attributes of `Gpu`.
    """
    if query is None:
        return [asdict(gpu) for gpu in gpus]
    chosen = gpu_fields(query)
    return [{field.name: field.read(gpu) for field in chosen} for gpu in gpus]


def csv_text(gpus: Sequence[Gpu], query: str = DEFAULT_QUERY, *, header: bool = True) -> str:
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
    if isinstance(value, dict):  # a process or a MIG slice
        memory = value.get("memory", value.get("memory_used"))
        words = [
            value.get("pid", value.get("uuid")),
            value.get("user"),
            None if memory is None else format_bytes(memory),
        ]
        return printable(" ".join(str(word) for word in words if word is not None))
    if isinstance(value, list | tuple):
        return "; ".join(map(cell_text, value))
    return printable(f"{value:.2f}" if isinstance(value, float) else str(value))


class GpuTable:
    """What rich prints: a table of the GPUs, one of their processes, and sentences about anything unusual.

    Args:
        gpus: The GPUs.
        query: The fields to show instead, as for `gpu_fields`; None for the usual tables.
    """

    def __init__(self, gpus: Sequence[Gpu], query: str | None = None) -> None:
        self.gpus = gpus
        self.fields = None if query is None else gpu_fields(query)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        """Yield tables that fit the width of the terminal."""
        from rich.text import Text

        remarks = [(gpu, remark) for gpu in self.gpus for remark in gpu_remarks(gpu)]
        if self.fields is not None:
            table = _new_table(drop=[field.title for field in self.fields[:0:-1]])
            for field in self.fields:
                table.add_column(Text(field.title))
            for gpu in self.gpus:
                table.add_row(*(Text(cell_text(field.read(gpu))) for field in self.fields))
            yield table
            remarks = [(gpu, remark) for gpu, remark in remarks if gpu.error is not None]
        elif self.gpus:
            yield _gpu_table(self.gpus, wide=options.max_width >= _BAR_FROM)
            if any(gpu.processes for gpu in self.gpus):
                yield ""
                yield _process_table(self.gpus)
        else:
            yield Text("There is a driver, but no GPU.")
        if remarks:
            yield Text("\n" + "\n".join(remark for _, remark in remarks))


def gpu_remarks(gpu: Gpu) -> Iterator[str]:
    """Yield a sentence for each unusual thing about a GPU, and for each value that could not be read."""
    name = f"GPU {gpu.index}"
    if gpu.error is not None:
        yield f"{name} does not answer: {printable(gpu.error)}."
        return
    if gpu.throttle_reasons:
        yield f"{name} is throttled: {', '.join(gpu.throttle_reasons)}."
    if gpu.compute_mode not in (None, "Default"):
        yield f"{name} is in compute mode {gpu.compute_mode}."
    if gpu.display_active:
        yield f"{name} drives a display."
    if gpu.ecc_errors:
        yield f"{name} had {gpu.ecc_errors:,} uncorrected memory error{'s' * (gpu.ecc_errors > 1)} since its start."
    for part in gpu.mig_slices:
        yield f"{name}, MIG slice {part.index}: {part.uuid}"
    if gpu.mig_mode and not gpu.mig_slices:
        yield f"{name} is in MIG mode and has no slices."
    for problem in gpu.unreadable:
        yield f"{name} could not be read: {printable(problem)}."
    if gpu.processes is None:
        yield f"{name} does not report its processes."


def _new_table(*columns: str, left: Sequence[str] = (), cut_off: str = "", **options: Any) -> Table:
    from rich import box

    from lightning_tricks._shared.fitting_table import FittingTable

    table = FittingTable(title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), **options)
    for name in columns:
        min_width = _CUT_OFF_TO if name == cut_off else None
        table.add_column(name, justify="left" if name in left else "right", min_width=min_width)
    return table


def _gpu_table(gpus: Sequence[Gpu], wide: bool) -> Table:
    driver = next((gpu.driver_version for gpu in gpus if gpu.driver_version), "unknown")
    columns = ("GPU", "Name", "Memory", *[""] * wide, "Util", "Temp", "Power", "State")
    title = f"{len(gpus)} GPU{'s' * (len(gpus) > 1)}, driver {driver}"
    drop = ("", "Power", "Temp", "State")
    table = _new_table(*columns, left=("Name", "", "State"), cut_off="Name", drop=drop, title=title)
    for gpu in gpus:
        name = gpu.name or _UNKNOWN
        name = name if wide else name.removeprefix("NVIDIA ")
        table.add_row(str(gpu.index), _text(name), *_memory(gpu, wide), *_utilization(gpu), _state(gpu))
        for part in gpu.mig_slices:
            profile = (part.name or "").rpartition("MIG ")[2]
            table.add_row("", _text(f"  MIG {profile}"), *_memory(part, wide))
    return table


def _process_table(gpus: Sequence[Gpu]) -> Table:
    columns = ("GPU", "PID", "User", "Memory", "Type", "Command")
    table = _new_table(*columns, left=("User", "Type", "Command"), cut_off="Command", drop=("Type", "User"))
    for gpu in gpus:
        for process in gpu.processes or ():
            memory = _UNKNOWN if process.memory is None else format_bytes(process.memory)
            user, command = _text(process.user or _UNKNOWN), _text(process.command or _UNKNOWN)
            table.add_row(str(gpu.index), str(process.pid), user, memory, process.kind, command)
    return table


def _text(text: str) -> Text:
    from rich.text import Text

    return Text(printable(text), no_wrap=True, overflow="ellipsis")  # never markup


def _memory(part: Gpu | MigSlice, bar: bool) -> list[Any]:
    from rich.progress_bar import ProgressBar

    if part.memory_total is None or part.memory_used is None:
        return [_UNKNOWN, *[""] * bar]
    text = f"{part.memory_used / 2**30:.1f}/{part.memory_total / 2**30:.1f} GiB"
    return [text, *[ProgressBar(total=part.memory_total, completed=part.memory_used, width=10)] * bar]


def _utilization(gpu: Gpu) -> tuple[Any, ...]:
    from rich.text import Text

    style = "" if gpu.temperature is None or gpu.temperature < _WARM else "yellow" if gpu.temperature < _HOT else "red"
    power = _UNKNOWN if gpu.power is None else f"{gpu.power:.0f}"
    limit = "" if gpu.power_limit is None else f"/{gpu.power_limit:.0f}"
    return (
        _UNKNOWN if gpu.utilization is None else f"{gpu.utilization} %",
        Text(_UNKNOWN if gpu.temperature is None else f"{gpu.temperature} °C", style=style),
        _UNKNOWN if power + limit == _UNKNOWN else f"{power}{limit} W",
    )


def _state(gpu: Gpu) -> Text:
    from rich.text import Text

    if gpu.error is not None:
        return Text("no answer", style="red")
    words = [f"P{gpu.performance_state}"] if gpu.performance_state is not None else []
    words += ["throttled"] if gpu.throttle_reasons else []
    return Text(" ".join(words) or _UNKNOWN, style="yellow" if gpu.throttle_reasons else "")


def pick_gpus(gpus: Sequence[Gpu], ids: str) -> list[Gpu]:
    """Return those GPUs that are named, in the order of the names, each once.

    Args:
        gpus: All GPUs of the machine.
        ids: Names with commas between them: indices, PCI bus addresses, UUIDs or their beginnings. The UUID of a MIG
            slice stands for its GPU.

    Raises:
        ValueError: If there is no name, or one that no GPU or more than one has; the message names it.

    Examples:
        >>> [gpu.index for gpu in pick_gpus([Gpu(index=0, uuid="GPU-8f6d"), Gpu(index=1, uuid="GPU-77aa")], "gpu-7,0")]
        [1, 0]
    """
    names = [name.strip() for name in ids.split(",") if name.strip()]
    if not names:
        raise ValueError(f"id must be indices or UUIDs of GPUs, such as '0,1', got {ids!r}.")
    picked: dict[int, Gpu] = {}
    for name in names:
        found = [gpu for gpu in gpus if _is_called(gpu, name.lower())]
        if not found:
            known = ", ".join(f"{gpu.index} ({gpu.uuid})" if gpu.uuid else str(gpu.index) for gpu in gpus)
            raise ValueError(f"id must name GPUs of this machine, got {name!r}. It has {known or 'none'}.")
        if len(found) > 1:
            fitting = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in found)
            raise ValueError(f"id must name one GPU each, got {name!r}, which fits {fitting}. Give more of the UUID.")
        picked[found[0].index] = found[0]
    return list(picked.values())


def _is_called(gpu: Gpu, name: str) -> bool:
    if name.isdecimal():
        return gpu.index == int(name)
    if gpu.bus_id is not None and gpu.bus_id.lower() == name:
        return True
    uuids = [gpu.uuid, *(part.uuid for part in gpu.mig_slices)]
    return any(uuid.lower().startswith(name) for uuid in uuids if uuid is not None)
