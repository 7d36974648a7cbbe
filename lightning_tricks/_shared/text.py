"""Text of what rooms show: tables without colour, and shapes."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any


def render_text(renderable: Any) -> str:
    """Return what rich prints of an object: 120 columns, no colour, no blanks at the ends of lines."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=120, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def format_shape(shape: Iterable[int]) -> str:
    """Return a shape as people write it.

    Example:
        >>> format_shape((2, 3, 224))
        '2x3x224'
    """
    return "x".join(map(str, shape))
