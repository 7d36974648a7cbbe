"""Tables of rich that fit: names are folded, and the least important columns are left out, which a line then says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_LINES = 3  # that a name takes before columns are left out
_END = re.compile(r"(?<=[./])(?![0-9])|(?<=[, ] )")
_END_OF_WORD = re.compile(r"(?<=[_ ])|(?<=[a-z])(?=[A-Z])")


class FoldedName:
    """A name in a table, of which no character is lost: where it is too long, it goes on in the next line.

    A line ends behind a dot, a slash, a comma or two blanks; of a name without any, or where what is between them is
    wider than the column, behind an underscore or a blank, or before a capital letter. A number stays with what it is
    about: `layer.11`.

    Args:
        text: The name, such as "encoder.layer.11.output.dense.weight".
        indent: What stands before the name, as far as there is space for it.
    """

    def __init__(self, text: str, indent: str = "") -> None:
        self.text, self.indent = text, indent
        self._pieces = _END.split(text)
        if len(self._pieces) == 1:
            self._pieces = _END_OF_WORD.split(text)
        self._longest = max(cell_len(piece.rstrip()) for piece in self._pieces)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Return the widths at which the name takes a few lines, and one."""
        whole, indent = cell_len(self.text), cell_len(self.indent)
        few = next(width for width in count(max(self._longest, whole // _LINES)) if len(self._fold(width)) <= _LINES)
        return Measurement(indent + few, indent + whole)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the name in as many lines as it needs."""
        indent = self.indent[: max(0, options.max_width - self._longest)]
        first, *others = self._fold(options.max_width - len(indent))
        yield Text("\n".join([indent + first, *(" " * len(indent) + line for line in others)]), overflow="fold")

    def _fold(self, width: int) -> list[str]:
        lines = [""]
        for piece in (part for each in self._pieces for part in _cut(each, width)):
            if lines[-1] and cell_len(lines[-1] + piece.rstrip()) > width:
                lines.append("")
            lines[-1] += piece
        return lines


def _cut(piece: str, width: int) -> list[str]:
    """Return a piece of a name or, if it is too wide, its words."""
    return [piece] if cell_len(piece.rstrip()) <= width else _END_OF_WORD.split(piece)


class FittingTable(Table):
    """A table that leaves out its least important columns where there is no space for all, and has lines below it.

    Before a column is left out, a `FoldedName` takes three lines, and text as many as it has words. What is justified
    to the right is a number, which stays whole; a column with a `min_width` needs no more. Once no column is left that
    may be left out, the widest texts are folded further.

    Args:
        *columns: As those of `rich.table.Table`.
        drop: The headings of the columns that may be left out, that of the least important one first.
        notes: The lines below the table, which are as wide as the terminal; rich wraps a caption where the table ends.
        **options: Arguments of `rich.table.Table`.
    """

    def __init__(self, *columns: Column | str, drop: Sequence[str] = (), notes: str = "", **options: Any) -> None:
        super().__init__(*columns, **options)
        self.drop, self.notes = drop, notes

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the columns that fit, then the lines."""
        sizes = [(column, _measure(column, console, options)) for column in self.columns]
        left_out = []
        for heading in self.drop:
            if sum(size.minimum for _, size in sizes) <= self._space(len(sizes), options):
                break
            kept = [(column, size) for column, size in sizes if str(column.header) != heading]
            left_out += [heading] * (len(kept) < len(sizes) and heading != "")
            sizes = kept
        fitting = copy(self)
        widths = _widths(sizes, self._space(len(sizes), options))
        fitting.columns = [
            replace(column, width=width, overflow="fold") for (column, _), width in zip(sizes, widths, strict=True)
        ]
        yield from Table.__rich_console__(fitting, console, options)
        lines = [f"left out to fit the width: {', '.join(left_out)}"] if left_out else []
        if lines := [*lines, *filter(None, [self.notes])]:
            yield Text("\n".join(lines), style="table.caption")

    def _space(self, columns: int, options: ConsoleOptions) -> int:
        """Return how much is left for the text of this number of columns."""
        _, right, _, left = self.padding
        lines = columns - 1 + 2 * self.show_edge if self.box else 0
        return options.max_width - columns * (left + right) - lines


def _measure(column: Column, console: Console, options: ConsoleOptions) -> Measurement:
    cells = [Measurement.get(console, options, cell) for cell in column.cells]
    head = Measurement.get(console, options, column.header)
    maximum = max(size.maximum for size in (head, *cells))
    if column.min_width is not None:
        return Measurement(min(column.min_width, maximum), maximum)
    whole = column.justify == "right"
    return Measurement(max(head.minimum, *(size.maximum if whole else size.minimum for size in cells), 1), maximum)


def _widths(sizes: Sequence[tuple[Column, Measurement]], space: int) -> list[int]:
    """Return a width for each column: as much as it can use, or less of the widest ones, below their minimum last."""
    widths = [size.maximum for _, size in sizes]
    numbers_whole = [size.minimum if column.justify == "right" else 1 for column, size in sizes]
    for least in ([size.minimum for _, size in sizes], numbers_whole, [1] * len(sizes)):
        while sum(widths) > space:
            above = [index for index, width in enumerate(widths) if width > least[index]]
            if not above:
                break
            widths[max(above, key=widths.__getitem__)] -= 1
    return widths
