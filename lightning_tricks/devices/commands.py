"""`lightning-tricks gpus` and `lightning-tricks env`: the GPUs of this machine, and what else a bug report needs."""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from lightning_tricks._shared.console import errors_of_use, make_console, write_json, write_output

if TYPE_CHECKING:
    from rich.console import Console

    from lightning_tricks.devices.core.gpu import Gpu

_LIMITS = ("min_free_memory", "max_utilization", "max_temperature", "prefer", "timeout")
_GPUS = """\
Show the state of all NVIDIA GPUs, whatever CUDA_VISIBLE_DEVICES says. No CUDA context is created."""
_SELECT = """\
The GPUs that --select prints are chosen as by lightning_tricks.devices.select_gpus. They are reserved only until the
command ends: another job may take them before yours does. It is safer to call select_gpus in the script itself, where
they stay reserved as long as it runs."""


def add_to(commands: Any) -> None:
    """Add the subcommands `gpus` and `env`."""
    _add_gpus(commands.add_parser("gpus", help="show, watch and choose GPUs", description=_GPUS, epilog=_SELECT))
    report: argparse.ArgumentParser = commands.add_parser(
        "env",
        help="print versions and hardware for a bug report",
        description="Print versions and hardware for a bug report. There are no names of users or hosts, no paths and "
        "no environment variables in it.",
    )
    report.add_argument("--json", action="store_true", help="print JSON")
    report.set_defaults(run=_report)


def _add_gpus(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--watch",
        type=_interval,
        nargs="?",
        const=1.0,
        metavar="SECONDS",
        help="show it again and again, at this interval (default: 1), until Ctrl+C",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON; with --watch one line each time")
    output.add_argument("--csv", action="store_true", help="print CSV, with units in the first line")
    parser.add_argument(
        "--query",
        metavar="FIELDS",
        help="fields with commas between them: those of nvidia-smi --query-gpu (memory.used, in MiB) or the attributes "
        "of lightning_tricks.devices.Gpu (memory_used, in bytes)",
    )
    parser.add_argument(
        "--id", metavar="IDS", help="only these GPUs: indices, UUIDs or their beginnings, with commas between them"
    )
    choice = parser.add_argument_group("choosing GPUs")
    choice.add_argument("--select", type=int, metavar="N", help="print N free GPUs, and nothing else")
    choice.add_argument(
        "--format",
        choices=("cuda_visible_devices", "devices"),
        help="what --select prints: UUIDs for CUDA_VISIBLE_DEVICES (default), or indices for the Trainer's devices",
    )
    choice.add_argument("--min-free-memory", metavar="SIZE", help="memory that must be free, such as 8GiB")
    choice.add_argument("--max-utilization", type=float, metavar="PERCENT", help="utilization that is still free")
    choice.add_argument("--max-temperature", type=float, metavar="CELSIUS", help="temperature that is not too hot")
    choice.add_argument("--prefer", choices=("free_memory", "idle", "cool"), help="which of the free GPUs are the best")
    choice.add_argument("--timeout", type=float, metavar="SECONDS", help="how long to wait for free GPUs")
    parser.set_defaults(run=_gpus)


def _gpus(arguments: argparse.Namespace) -> int:
    given = {name: getattr(arguments, name) for name in _LIMITS if getattr(arguments, name) is not None}
    showing = [name for name in ("watch", "json", "csv", "query", "id") if getattr(arguments, name)]
    if arguments.select is not None:
        if showing:
            arguments.parser.error(f"--select prints nothing but its choice: leave out --{showing[0]}.")
        with errors_of_use(arguments):
            return _select(arguments.select, arguments.format or "cuda_visible_devices", given)
    if given or arguments.format:
        name = next(iter(given), "format").replace("_", "-")
        arguments.parser.error(f"--{name} says how to choose GPUs: add --select N.")
    try:
        return _show(arguments)
    except KeyboardInterrupt:
        if not arguments.watch:
            raise
        return 0


def _select(n: int, form: str, limits: dict[str, Any]) -> int:
    from lightning_tricks.devices import select_gpus

    selection = select_gpus(n, **limits)
    if form == "cuda_visible_devices":
        text = selection.cuda_visible_devices
    else:
        numbers = selection.devices if isinstance(selection.devices, list) else [selection.devices]
        text = ",".join(map(str, numbers)) + "," * (len(numbers) == 1)  # "1" would mean one GPU
    write_output(f"{text}\n")
    selection.release()
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from rich.live import Live

    from lightning_tricks.devices.core.gpu import list_gpus
    from lightning_tricks.devices.core.gpu_table import GpuTable, gpu_fields, pick_gpus
    from lightning_tricks.devices.core.nvml import open_nvml

    if arguments.query is not None:
        with errors_of_use(arguments):
            gpu_fields(arguments.query)  # a wrong name is an error before anything else
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # `Live` writes past the console's own output
    console = make_console(highlight=False)
    on_screen = console.is_terminal and not console.is_dumb_terminal and not (arguments.json or arguments.csv)
    # without a thread: what is shown changes only here
    live = Live(console=console, auto_refresh=False) if on_screen and arguments.watch is not None else None
    with open_nvml(), live or nullcontext():  # once: without persistence mode, each start takes seconds
        for number in itertools.count():
            gpus = list_gpus()
            if arguments.id is not None:
                with errors_of_use(arguments):
                    gpus = pick_gpus(gpus, arguments.id)
            if live is not None:
                live.update(GpuTable(gpus, arguments.query), refresh=True)
            else:
                _print(gpus, arguments, console, is_first=number == 0)
            if arguments.watch is None:
                break
            time.sleep(arguments.watch)
    return 0


def _print(gpus: list[Gpu], arguments: argparse.Namespace, console: Console, is_first: bool) -> None:
    from lightning_tricks.devices.core.gpu_table import DEFAULT_QUERY, GpuTable, csv_text, plain_values

    if arguments.json:
        write_json(plain_values(gpus, arguments.query), indent=2 if arguments.watch is None else None)
    elif arguments.csv:
        write_output(csv_text(gpus, arguments.query or DEFAULT_QUERY, header=is_first))
    else:
        console.print(*[""] * (not is_first), GpuTable(gpus, arguments.query), sep="\n")
    sys.stdout.flush()


def _report(arguments: argparse.Namespace) -> int:
    from lightning_tricks.devices.core.environment import environment_report, environment_text

    report = environment_report()
    if arguments.json:
        write_json(report)
    else:
        write_output(environment_text(report))
    return 0


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.1 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"must be seconds from 0.1 to 86400, got {text!r}")
    return seconds
