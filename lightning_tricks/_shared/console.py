"""Standard output that takes every text, whatever its encoding."""

from __future__ import annotations

import sys
from typing import IO, TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from rich.console import Console


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
    """Return a console of rich that prints to standard output, and does not fail for the sake of a character.

    Args:
        **options: Arguments of `rich.console.Console`.
    """
    from rich.console import Console

    return Console(file=cast("IO[str]", _EncodableOutput()), **options)


def write_output(text: str) -> None:
    """Write text to standard output, with a question mark for each character that its encoding lacks."""
    _EncodableOutput().write(text)
