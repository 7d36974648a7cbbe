"""`lightning-tricks gpus` and `lightning-tricks env`: the GPUs of this machine, and what else a bug report needs."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import asdict
from importlib import metadata
from typing import Any

from lightning_tricks._shared.console import errors_of_use, make_console, write_json, write_output

_LIMITS = ("min_free_memory", "max_utilization", "max_temperature", "prefer", "timeout")
# Those that a report names in any case, and those that it names if they are there
_PACKAGES = ("lightning_tricks", "lightning", "torchmetrics", "torchensemble", "thop", "numpy", "nvidia-ml-py")
_MORE_PACKAGES = """
    pytorch-lightning torchvision transformers timm peft safetensors scikit-learn jsonargparse tensorboard rich psutil
    filelock
""".split()  # noqa: SIM905
_GPUS = """\
Show the state of all NVIDIA GPUs, whatever CUDA_VISIBLE_DEVICES says, choose free ones, or start a program on them. No
CUDA context is created."""
_SELECT = """\
GPUs are chosen as by lightning_tricks.devices.select_gpus. `lightning-tricks gpus --select 2 -- torchrun train.py`
starts a program that sees only these two, by CUDA_VISIBLE_DEVICES, and keeps them locked until it ends. Without a
program, the GPUs are printed and locked only until the command ends: another job may take them before yours does."""


def add_to(commands: Any) -> None:
    """Add the subcommands `gpus` and `env`."""
    _add_gpus(
        commands.add_parser(
            "gpus", help="show, watch and choose GPUs, and start programs on them", description=_GPUS, epilog=_SELECT
        )
    )
    report: argparse.ArgumentParser = commands.add_parser(
        "env",
        help="print versions and hardware for a bug report",
        description="Print versions and hardware for a bug report: the report of torch.utils.collect_env, and the "
        "versions of this package and of the packages that it works with.",
    )
    report.add_argument("--json", action="store_true", help="print JSON")
    report.set_defaults(run=_report)


def _add_gpus(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--watch",
        type=_interval,
        nargs="?",
        const=1.0,
        metavar="SECONDS",
        help="show it again and again, at this interval (default: 1), until Ctrl+C",
    )
    add("--json", action="store_true", help="print JSON; with --watch one line each time")
    add("--id", metavar="IDS", help="only these GPUs: comma-separated indices, UUIDs or prefixes of UUIDs")
    choose = parser.add_argument_group("choosing GPUs").add_argument
    choose("--select", type=int, metavar="N", help="choose N free GPUs")
    choose(
        "--format",
        choices=("cuda_visible_devices", "devices"),
        help="what --select N prints: UUIDs for CUDA_VISIBLE_DEVICES (default), or indices for the Trainer's devices",
    )
    choose("--min-free-memory", metavar="SIZE", help="lowest free memory of a free GPU, such as 8GiB")
    choose("--max-utilization", type=float, metavar="PERCENT", help="highest utilization of a free GPU")
    choose("--max-temperature", type=float, metavar="CELSIUS", help="highest temperature of a free GPU")
    choose("--prefer", choices=("free_memory", "idle", "cool"), help="which of the free GPUs to prefer")
    choose("--timeout", type=float, metavar="SECONDS", help="how long to wait for free GPUs")
    choose(
        "program",
        nargs="*",
        metavar="-- PROGRAM",
        help="program to start on them, with its arguments, instead of printing them",
    )
    parser.set_defaults(run=_gpus)


def _gpus(arguments: argparse.Namespace) -> int:
    limits = {name: getattr(arguments, name) for name in _LIMITS if getattr(arguments, name) is not None}
    if arguments.select is not None:
        for name in ("watch", "json", "id", *["format"] * bool(arguments.program)):
            if getattr(arguments, name):
                arguments.parser.error(f"--select prints only the GPUs that it chooses: leave out --{name}.")
        with errors_of_use(arguments):
            return _start(arguments, limits) if arguments.program else _print_choice(arguments, limits)
    if arguments.program:
        arguments.parser.error(f"{arguments.program[0]!r} needs GPUs to start on: add --select N before --.")
    if limits or arguments.format:
        name = next(iter(limits), "format").replace("_", "-")
        arguments.parser.error(f"--{name} says how to choose GPUs: add --select N.")
    try:
        return _show(arguments)
    except KeyboardInterrupt:
        if not arguments.watch:
            raise
        return 0


def _print_choice(arguments: argparse.Namespace, limits: dict[str, Any]) -> int:
    from lightning_tricks.devices import select_gpus

    with select_gpus(arguments.select, **limits) as selection:
        text = selection.cuda_visible_devices
        if arguments.format == "devices":
            numbers = selection.devices if isinstance(selection.devices, list) else [selection.devices]
            text = ",".join(map(str, numbers)) + ("," if len(numbers) == 1 else "")  # "1" would mean one GPU
        write_output(f"{text}\n")
    return 0


def _start(arguments: argparse.Namespace, limits: dict[str, Any]) -> int:
    """Become the program, which keeps the locks until it ends; on Windows, where none can, wait for it."""
    from lightning_tricks.devices.core.result import hand_over
    from lightning_tricks.devices.core.select import select_gpus

    program = shutil.which(arguments.program[0])
    if program is None:
        raise ValueError(f"no program is called {arguments.program[0]!r} here.")
    selection = select_gpus(arguments.select, **limits)
    environment = hand_over(selection)
    gpus = ", ".join(f"GPU {gpu.index}" for gpu in selection.gpus)
    sys.stderr.write(f"{arguments.parser.prog}: {arguments.program[0]} runs on {gpus}\n")
    sys.stderr.flush()
    if sys.platform != "win32":
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # which Python ignores, and a program would inherit that
        os.execve(program, arguments.program, environment)  # noqa: S606
    return subprocess.call([program, *arguments.program[1:]], env=environment)  # noqa: S603


def _show(arguments: argparse.Namespace) -> int:
    from rich.live import Live

    from lightning_tricks.devices.core.gpu import list_gpus
    from lightning_tricks.devices.core.gpu_table import GpuTable, pick_gpus
    from lightning_tricks.devices.core.nvml import open_nvml

    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # `Live` writes past the console's own output
    console = make_console(highlight=False)
    on_screen = console.is_terminal and not console.is_dumb_terminal and not arguments.json
    # without a thread: what is shown changes only here
    live = Live(console=console, auto_refresh=False) if on_screen and arguments.watch is not None else None
    with open_nvml(), live or nullcontext():  # once: without persistence mode, each start takes seconds
        for number in itertools.count():
            gpus = list_gpus()
            if arguments.id is not None:
                with errors_of_use(arguments):
                    gpus = pick_gpus(gpus, arguments.id)
            if arguments.json:
                write_json([asdict(gpu) for gpu in gpus], indent=2 if arguments.watch is None else None)
            elif live is not None:
                live.update(GpuTable(gpus), refresh=True)
            else:
                console.print(*[""] * (number > 0), GpuTable(gpus), sep="\n")
            sys.stdout.flush()
            if arguments.watch is None:
                break
            time.sleep(arguments.watch)
    return 0


def _report(arguments: argparse.Namespace) -> int:
    packages: dict[str, str | None] = dict.fromkeys(_PACKAGES)
    for name in (*_PACKAGES, *_MORE_PACKAGES):
        with suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    of_torch = _report_of_torch()
    if arguments.json:
        write_json({"packages": packages, "collect_env": of_torch})
    else:  # lines that need no markup, for a code block
        versions = "".join(f"{name}: {version or 'not installed'}\n" for name, version in packages.items())
        write_output(f"{versions}\n{of_torch}\n")
    return 0


def _report_of_torch() -> str:
    """Return what torch reports; it asks programs such as pip and nvidia-smi for seconds, and initializes CUDA."""
    import torch
    from torch.utils import collect_env

    try:
        cudnn = torch.backends.cudnn.version()
        found = collect_env.get_env_info()._replace(cudnn_version=cudnn and str(cudnn))  # instead of paths of its files
        return str(collect_env.pretty_str(found))
    except Exception as error:  # in some versions of torch, where pip is not installed
        return f"torch.utils.collect_env fails: {error!r}"


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.1 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"must be seconds from 0.1 to 86400, got {text!r}")
    return seconds
