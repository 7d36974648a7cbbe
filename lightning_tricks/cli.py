"""The `lightning-tricks` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import lightning_tricks
from lightning_tricks._shared.checks import path_argument

_STAGES = {
    "fit": "train a model that a YAML file or options describe, with any of the tricks",
    "validate": "validate it",
    "test": "test it",
    "predict": "predict with it",
}


class _Parser(argparse.ArgumentParser):
    """A parser, also of a command, that takes no option by its beginning: another may begin with it later."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The arguments without the program's name; None takes the process's own.

    Returns:
        The exit status: 0 on success. Wrong arguments exit with status 2 and a sentence that names them.
    """
    parser = _Parser(
        prog="lightning-tricks", description="Training tricks for PyTorch Lightning, each correct, free and one line."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {lightning_tricks.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_demo(commands.add_parser("demo", help="train a small classifier on real digits with every trick"))
    for room in iter_modules(lightning_tricks.__path__):
        if room.ispkg and find_spec(f"lightning_tricks.{room.name}.commands"):
            import_module(f"lightning_tricks.{room.name}.commands").add_to(commands)
    for stage, description in _STAGES.items():
        commands.add_parser(stage, help=description, add_help=False)
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv and argv[0] in _STAGES:
        return _run_stage(parser, argv)
    arguments = parser.parse_args(argv)
    status = 0
    try:
        status = int(arguments.run(arguments))
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-epochs", type=_positive, default=10, metavar="N", help="number of epochs (default: %(default)s)"
    )
    parser.add_argument(
        "--accelerator", default="auto", help="accelerator of the Trainer: auto, cpu, gpu, ... (default: %(default)s)"
    )
    parser.add_argument(
        "--devices",
        type=_devices,
        default=1,
        help="devices of the Trainer: a number, '0,1' or auto (default: %(default)s)",
    )
    parser.add_argument(
        "--precision",
        default="32-true",
        help="precision of the Trainer: 32-true, bf16-mixed, ... (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=42, help="seed of the run, in [0, 2**32 - 1] (default: %(default)s)"
    )
    parser.add_argument(
        "--out",
        type=path_argument,
        default=Path("lightning_tricks_demo"),
        metavar="DIR",
        help="folder of the report (default: ./%(default)s)",
    )
    parser.add_argument(
        "--no-kill", action="store_true", help="leave out the run that is killed and resumed in the end"
    )
    parser.set_defaults(run=partial(_run_demo, parser))


def _run_demo(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from lightning_tricks import demo

    try:
        trainer, tricks = demo.prepare(
            out=arguments.out,
            seed=arguments.seed,
            max_epochs=arguments.max_epochs,
            accelerator=arguments.accelerator,
            devices=arguments.devices,
            precision=arguments.precision,
        )
    except (MisconfigurationException, OSError, TypeError, ValueError) as error:
        parser.error(str(error))
    demo.run(trainer, tricks, arguments.out)
    if trainer.is_global_zero and not arguments.no_kill:
        from lightning_tricks.demo_resume import show_resume

        show_resume()
    if trainer.is_global_zero:
        demo.print_paths(trainer, arguments.out)
    return 0


def _run_stage(parser: argparse.ArgumentParser, argv: list[str]) -> int:
    """Run LightningCLI, which has a parser of its own."""
    from lightning_tricks._shared.extras import import_extra

    try:
        for module in ("jsonargparse", "docstring_parser", "typeshed_client"):
            import_extra(module, "cli", f"`lightning-tricks {argv[0]}` needs jsonargparse[signatures]")
    except ModuleNotFoundError as error:
        parser.error(str(error))
    folder = str(Path.cwd())
    if folder not in sys.path:  # a script would find the modules beside it, a command does not
        sys.path.insert(0, folder)
    from lightning_tricks.training_cli import TricksCLI

    TricksCLI(args=argv, parser_kwargs={"prog": parser.prog})
    return 0


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text!r}")
    return int(text)


def _devices(text: str) -> int | str:
    return int(text) if text.isdecimal() else text
