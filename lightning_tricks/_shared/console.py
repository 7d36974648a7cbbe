"""Standard output that takes every text, whatever its encoding."""

from __future__ import annotations

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

    When the reader of the output has ended, it raises BrokenPipeError, as `print` does; rich itself would exit.

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


@contextmanager
def errors_of_use(arguments: Namespace) -> Iterator[None]:
    """Print an error about what a command was given beside its usage, and exit with status 2."""
    try:
        yield
    except (TypeError, ValueError) as error:
        arguments.parser.error(str(error))
