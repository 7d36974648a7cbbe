"""GPUs and their processes as a table for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lightning_tricks._shared.units import format_bytes
from lightning_tricks.devices.core.gpu import Gpu, MigSlice
from lightning_tricks.devices.core.gpu_fields import cell_text, gpu_fields, printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table
    from rich.text import Text

_UNKNOWN = "-"
_BAR_FROM = 100  # the width from which there is space for a bar and the whole name
_WARM, _HOT = 70, 85  # °C: from here on it is worth a look; GPUs slow down at about 90


class GpuTable:
    """What rich prints: the GPUs, below them the processes, below these what there is to say.

    Args:
        gpus: The GPUs.
    """

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self.gpus = gpus

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        """Yield tables that fit the width of the terminal."""
        from rich.text import Text

        if not self.gpus:
            yield Text("There is a driver, and no GPU.")
            return
        yield _gpu_table(self.gpus, wide=options.max_width >= _BAR_FROM)
        if any(gpu.processes for gpu in self.gpus):
            yield ""
            yield _process_table(self.gpus)
        remarks = [remark for gpu in self.gpus for remark in gpu_remarks(gpu)]
        if remarks:
            yield Text("\n" + "\n".join(remarks))


def gpu_remarks(gpu: Gpu) -> Iterator[str]:
    """Yield a sentence for all of a GPU that is not as usual, and for each value that could not be read."""
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
        yield f"{name} does not tell its processes."


def _gpu_table(gpus: Sequence[Gpu], wide: bool) -> Table:
    driver = next((gpu.driver_version for gpu in gpus if gpu.driver_version), "unknown")
    table = _new_table(f"{len(gpus)} GPU{'s' * (len(gpus) > 1)}, driver {driver}")
    table.add_column("GPU", justify="right", no_wrap=True)
    table.add_column("Name")  # what does not fit is cut off here
    table.add_column("Memory", justify="right", no_wrap=True)
    if wide:
        table.add_column(no_wrap=True)
    for name in ("Util", "Temp", "Power"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("State", no_wrap=True)
    for gpu in gpus:
        name = gpu.name or _UNKNOWN
        name = name if wide else name.removeprefix("NVIDIA ")
        table.add_row(str(gpu.index), _text(name), *_memory(gpu, wide), *_load(gpu), _state(gpu))
        for part in gpu.mig_slices:
            profile = (part.name or "").rpartition("MIG ")[2]
            table.add_row("", _text(f"  MIG {profile}"), *_memory(part, wide))
    return table


def _process_table(gpus: Sequence[Gpu]) -> Table:
    table = _new_table()
    table.add_column("GPU", justify="right", no_wrap=True)
    table.add_column("PID", justify="right", no_wrap=True)
    table.add_column("User", no_wrap=True)
    table.add_column("Memory", justify="right", no_wrap=True)
    table.add_column("Type", no_wrap=True)
    table.add_column("Command")
    for gpu in gpus:
        for process in gpu.processes or ():
            table.add_row(
                str(gpu.index),
                str(process.pid),
                _text(process.user or _UNKNOWN),
                _UNKNOWN if process.memory is None else format_bytes(process.memory),
                process.kind,
                _text(process.command or _UNKNOWN),
            )
    return table


class QueryTable:
    """What rich prints: the chosen fields of GPUs, one a line, below them which GPU does not answer.

    Args:
        gpus: The GPUs.
        query: The fields, as for `gpu_fields`.
    """

    def __init__(self, gpus: Sequence[Gpu], query: str | Iterable[str]) -> None:
        self.gpus = gpus
        self.fields = gpu_fields(query)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        """Yield the table and the sentences."""
        from rich.text import Text

        table = _new_table()
        for field in self.fields:
            table.add_column(Text(field.title), overflow="fold")
        for gpu in self.gpus:
            table.add_row(*(Text(cell_text(field.read(gpu))) for field in self.fields))
        yield table
        silent = [remark for gpu in self.gpus if gpu.error is not None for remark in gpu_remarks(gpu)]
        if silent:
            yield Text("\n" + "\n".join(silent))


def _new_table(title: str | None = None) -> Table:
    from rich import box
    from rich.table import Table

    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))


def _text(text: str) -> Text:
    from rich.text import Text

    return Text(printable(text), no_wrap=True, overflow="ellipsis")  # never markup


def _memory(part: Gpu | MigSlice, bar: bool) -> list[Any]:
    from rich.progress_bar import ProgressBar

    if part.memory_total is None or part.memory_used is None:
        return [_UNKNOWN, *[""] * bar]
    gib = 1 << 30
    text = f"{part.memory_used / gib:.1f}/{part.memory_total / gib:.1f} GiB"
    return [text, *[ProgressBar(total=part.memory_total, completed=part.memory_used, width=10)] * bar]


def _load(gpu: Gpu) -> tuple[Any, ...]:
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
