"""GPUs as a table for a terminal, and which of them a user names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lightning_tricks._shared.text import counted, format_bytes, printable
from lightning_tricks.devices.core.gpu import Gpu, MigSlice

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table
    from rich.text import Text

_UNKNOWN = "-"
_BAR_FROM = 100  # the width from which there is space for a bar and the whole name
_CUT_OFF_TO = 10  # columns of a name or a command, before other columns are left out
_WARM, _HOT = 70, 85  # °C: from here on it is worth a look; GPUs slow down at about 90


class GpuTable:
    """What rich prints: a table of the GPUs, one of their processes, and sentences about anything unusual.

    Args:
        gpus: The GPUs.
    """

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self.gpus = gpus

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        """Yield tables that fit the width of the terminal."""
        from rich.text import Text

        if not self.gpus:
            yield Text("There is a driver, but no GPU.")
            return
        yield _gpu_table(self.gpus, wide=options.max_width >= _BAR_FROM)
        if any(gpu.processes for gpu in self.gpus):
            yield ""
            yield _process_table(self.gpus)
        if remarks := [remark for gpu in self.gpus for remark in gpu_remarks(gpu)]:
            yield Text("\n" + "\n".join(remarks))


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
        yield f"{name} had {counted(gpu.ecc_errors, 'uncorrected memory error')} since its start."
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
    title = f"{counted(len(gpus), 'GPU')}, driver {driver}"
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
