"""Standard output that takes every text, whatever its encoding."""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from argparse import Namespace

    from rich.console import Console

VERBOSE_VARIABLE = "LIGHTNING_TRICKS_VERBOSE"
_UNLIMITED = 100_000  # columns


class _EncodableOutput:
    """Standard output, as it is when something is written, with a question mark for what its encoding lacks."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)

    def write(self, text: str) -> int:
        try:
            return sys.stdout.write(text)
        except UnicodeEncodeError:  # a pipe or a file on Windows has the encoding of the country
            encoding = sys.stdout.encoding
            return sys.stdout.write(text.encode(encoding, "replace").decode(encoding))


def make_console(**options: Any) -> Console:
    """Return a console of rich that prints to standard output, also characters that its encoding lacks.

    A file and a pipe are as wide as any line, so that tables in them have all columns and each name in one piece,
    unless the variable COLUMNS says how wide they are. When the reader of the output has ended, the console raises
    BrokenPipeError, as `print` does; rich itself would exit.

    Args:
        **options: Arguments of `rich.console.Console`.
    """
    from rich.console import Console

    class RaisingConsole(Console):
        def on_broken_pipe(self) -> None:
            raise  # the error, which rich handles where it calls this

    console = RaisingConsole(file=cast("IO[str]", _EncodableOutput()), **options)
    if not console.width:  # COLUMNS=0: nobody knows it, and rich would print nothing
        console.width = 80
    elif not (console.is_terminal or console.is_jupyter or "width" in options or os.environ.get("COLUMNS")):
        console.width = _UNLIMITED
    return console


def is_verbose(verbose: bool | None) -> bool:
    """Whether tables are printed: as an argument says, or else the variable `LIGHTNING_TRICKS_VERBOSE`.

    Raises:
        ValueError: If the variable is neither 0 nor 1.
    """
    if verbose is not None:
        return verbose
    given = os.environ.get(VERBOSE_VARIABLE, "")
    if given not in ("", "0", "1"):
        raise ValueError(f"{VERBOSE_VARIABLE} must be 0 or 1, got {given!r}.")
    return given == "1"


def print_report(trick: str, report: Any) -> None:
    """Print the report of a callback; if that fails, warn, so that the run continues."""
    try:
        make_console().print(report)
    except (OSError, ValueError) as error:  # a pipe that nobody reads, a full disk, a closed file
        warnings.warn(f"{trick} could not print its table: {error}", stacklevel=2)


def write_output(text: str) -> None:
    """Write text to standard output, with a question mark for each character that its encoding lacks."""
    _EncodableOutput().write(text)


def write_json(value: Any, indent: int | None = 2) -> None:
    """Write plain values to standard output as JSON, with null for the numbers that JSON lacks, such as NaN."""
    write_output(json.dumps(_without_nan(value), indent=indent, allow_nan=False) + "\n")


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def errors_of_use(arguments: Namespace) -> Iterator[None]:
    """Print an error about what a command was given beside its usage, and exit with status 2."""
    try:
        yield
    except (TypeError, ValueError) as error:
        arguments.parser.error(str(error))
