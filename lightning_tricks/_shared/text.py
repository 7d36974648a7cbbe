"""Text for people: tables without colour, and shapes."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any


def render_text(renderable: Any) -> str:
    """Return an object as rich prints it: in 120 columns, without colour and without trailing blanks."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=120, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def format_shape(shape: Iterable[int]) -> str:
    """Return a shape with its sizes joined by "x".

    Example:
        >>> format_shape((2, 3, 224))
        '2x3x224'
    """
    return "x".join(map(str, shape))
