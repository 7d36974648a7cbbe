"""The `lightning-tricks` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning_tricks
from lightning_tricks._lazy import public_packages
from lightning_tricks._shared.checks import file_argument, path_argument
from lightning_tricks._shared.console import write_output

_STAGES = {
    "fit": "train a model from a YAML file or options, with any of the tricks",
    "validate": "validate the model",
    "test": "test the model",
    "predict": "predict with the model",
}
_SIGINT_STATUS = 130  # what a shell says of a program that Ctrl+C has ended, 128 + SIGINT
_SIGPIPE_STATUS = 141  # and of one that a broken pipe has ended, 128 + SIGPIPE


class _Parser(argparse.ArgumentParser):
    """A parser, also of a command, that takes no option by its beginning: another may begin with it later.

    What it parses has the parser of the command as `parser`. Without a command it prints its help, as pip does.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})
        self.set_defaults(parser=self, run=_print_help)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse what is unknown here, beside the usage of this command; argparse leaves that to the first parser."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


class _PrintCompletion(argparse.Action):
    """Print the completion for a shell, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: object, values: Any, option: object = None) -> None:
        from lightning_tricks._shared.extras import import_extra

        try:
            shtab = import_extra("shtab", "completion", "Completion needs shtab")
        except ModuleNotFoundError as error:
            parser.exit(1, f"{parser.prog}: error: {error}\n")
        _complete_paths(parser, shtab)
        write_output(shtab.complete(parser, values) + "\n")
        parser.exit()


def _complete_paths(parser: argparse.ArgumentParser, shtab: Any) -> None:
    for action in parser._actions:
        if action.type in (path_argument, file_argument):
            action.complete = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE  # type: ignore[attr-defined]
        for command in action.choices.values() if isinstance(action.choices, dict) else ():
            _complete_paths(command, shtab)


def _print_help(arguments: argparse.Namespace) -> int:
    write_output(arguments.parser.format_help())
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The arguments without the program's name; None takes the process's own.

    Returns:
        The exit status: 0 on success, also of the help that is printed where no command is given; 130 after Ctrl+C.

    Raises:
        SystemExit: With status 2 and the usage if the arguments are wrong; with status 1 and one sentence if the
            command fails, or 2 where 1 is an answer, as of `diff`; with 141 if the reader of its output has ended.
    """
    parser = _Parser(
        prog="lightning-tricks", description="Training tricks for PyTorch Lightning, each correct, free and one line."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {lightning_tricks.__version__}")
    parser.add_argument(
        "--print-completion",
        action=_PrintCompletion,
        choices=("bash", "zsh", "fish"),
        help="print the completion of commands, options and files for this shell",
    )
    commands = parser.add_subparsers(metavar="COMMAND")
    for package in public_packages():
        if find_spec(f"{package}.commands"):
            import_module(f"{package}.commands").add_to(commands)
    for stage, description in _STAGES.items():
        commands.add_parser(stage, help=description, add_help=False)
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        with _output():
            if argv and argv[0] in _STAGES:
                return _run_stage(parser, argv)
            return _run_command(parser.parse_args(argv))
    except KeyboardInterrupt:
        return _SIGINT_STATUS


@contextmanager
def _output() -> Iterator[None]:
    """Flush what was printed, and exit quietly if the reader has ended, as `| head` does."""
    try:
        with Path(os.devnull).open("w", encoding="utf-8") as nobody, redirect_stdout(sys.stdout or nobody):  # by `>&-`
            try:
                yield
            finally:
                sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more
        sys.exit(_SIGPIPE_STATUS)


def _run_command(arguments: argparse.Namespace) -> int:
    try:
        return int(arguments.run(arguments))
    except BrokenPipeError:
        raise
    except Exception as error:  # of a model as well: a command prints no traceback
        from lightning_tricks._shared.text import describe_error

        is_ours = isinstance(error, OSError) or type(error).__module__.startswith("lightning_tricks.")
        said = " ".join((_without_number(error) if is_ours else describe_error(error)).splitlines())
        parser: argparse.ArgumentParser = arguments.parser
        parser.exit(getattr(arguments, "error_status", 1), f"{parser.prog}: error: {said}\n")


def _without_number(error: Exception) -> str:
    """Return what an error says, that of a system call without its number: "a: No such file or directory"."""
    if isinstance(error, OSError) and error.strerror:
        return ": ".join(str(part) for part in (error.filename, error.strerror) if part is not None)
    return str(error)


def _run_stage(parser: argparse.ArgumentParser, argv: list[str]) -> int:
    """Run LightningCLI, which has a parser of its own."""
    from lightning_tricks._shared.extras import import_extra

    try:
        for module in ("jsonargparse", "docstring_parser", "typeshed_client"):
            import_extra(module, "cli", f"`lightning-tricks {argv[0]}` needs jsonargparse[signatures]")
    except ModuleNotFoundError as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    folder = str(Path.cwd())
    if folder not in sys.path:  # a script would find the modules beside it, a command does not
        sys.path.insert(0, folder)
    from lightning_tricks.training_cli import TricksCLI

    TricksCLI(args=argv, parser_kwargs={"prog": parser.prog})
    return 0
