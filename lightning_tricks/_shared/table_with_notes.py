"""A table of rich with lines below it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


class TableWithNotes(Table):
    """A table with lines below it, as wide as the terminal; rich wraps a caption where the table ends.

    Args:
        notes: The lines.
        **options: Arguments of `rich.table.Table`.
    """

    def __init__(self, notes: str, **options: Any) -> None:
        super().__init__(**options)
        self.notes = notes

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table, then the lines."""
        yield from super().__rich_console__(console, options)
        if self.notes:
            yield Text(self.notes, style="table.caption")
