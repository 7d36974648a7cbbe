"""A `FlopsCount` as a table: on the screen, and as CSV, Markdown and HTML in files."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_tricks._shared.checks import check_choice, check_path
from lightning_tricks._shared.text import format_shape
from lightning_tricks._shared.units import format_si

if TYPE_CHECKING:
    from rich.table import Table

    from lightning_tricks.flops.core.flops_count import FlopsCount, FlopsRow


def to_rich(count: FlopsCount, depth: int | None) -> Table:
    """Return the modules up to a depth as a rich table; see `FlopsCount.table`."""
    from rich.text import Text

    from lightning_tricks._shared.table_with_notes import TableWithNotes

    columns = _columns(count)
    table = TableWithNotes("\n".join(count.summary()), title=f"FLOPs of {count.rows[0].kind}")
    for index, (heading, _) in enumerate(columns):
        is_squeezed = heading in ("class", "output")
        table.add_column(
            heading, justify="left" if index < 2 else "right", no_wrap=not is_squeezed, overflow="ellipsis"
        )
    for row in _visible_rows(count, depth):
        cells = [value(row) for _, value in columns]
        cells[0] = "  " * row.depth + (row.name.rpartition(".")[2] or "(model)")
        table.add_row(*map(Text, cells), style="bold" if not row.depth else None)
    return table


def to_csv(count: FlopsCount) -> str:
    """Return one line for each module, with exact numbers."""
    file = io.StringIO()
    rows = [asdict(row) for row in count.rows]
    if count.peer is not None:
        peer_macs = {row.name: row.macs for row in count.peer.rows}
        for row in rows:
            row[f"{count.peer.backend}_macs"] = peer_macs.get(row["name"], "")
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        for key in ("input_shapes", "output_shapes"):
            row[key] = " ".join(format_shape(shape) for shape in row[key])
        writer.writerow(row)
    return file.getvalue()


def write(count: FlopsCount, path: str | Path) -> Path:
    """Write a count in the format of the file's suffix; see `FlopsCount.write`."""
    path = check_report_path(path)
    text = _FORMATS[path.suffix](count)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def check_report_path(path: str | Path) -> Path:
    """Return a path whose suffix is that of a known format, or raise a ValueError."""
    path = Path(check_path("path", path, "a file"))
    check_choice("the suffix of path", path.suffix, _FORMATS)
    return path


def _columns(count: FlopsCount) -> list[tuple[str, Callable[[FlopsRow], str]]]:
    """Return the heading of each column, and the function that makes its cells."""
    columns: list[tuple[str, Callable[[FlopsRow], str]]] = [
        ("module", lambda row: row.name or "(model)"),
        ("class", lambda row: row.kind),
        ("params", lambda row: format_si(row.params) + " (frozen)" * (row.params > 0 == row.trainable_params)),
        ("MACs", lambda row: "no rule" if not row.has_rule and not row.macs else format_si(row.macs)),
        ("share", lambda row: f"{row.share:.1%}"),
        ("other FLOPs", lambda row: format_si(row.other_flops)),
        ("output", lambda row: _format_shapes(row.output_shapes)),
    ]
    if count.backend != "torch":
        columns.pop(5)
    if count.peer is not None:
        peer_rows = {row.name: row for row in count.peer.rows}

        def peer_macs(row: FlopsRow) -> str:
            peer_row = peer_rows.get(row.name)
            if peer_row is None:
                return ""
            return format_si(peer_row.macs) + ("" if peer_row.has_rule else " (no rule)")

        columns.insert(4, (f"{count.peer.backend}'s MACs", peer_macs))
    return columns


def _visible_rows(count: FlopsCount, depth: int | None) -> list[FlopsRow]:
    return [
        row
        for row in count.rows
        if (depth is None or row.depth <= depth) and (row.params or row.macs or not row.has_rule or not row.depth)
    ]


def _format_shapes(shapes: tuple[tuple[int, ...], ...]) -> str:
    text = ", ".join(format_shape(shape) or "scalar" for shape in shapes[:2])
    return text + ", ..." * (len(shapes) > 2)


def _to_json(count: FlopsCount) -> str:
    return count.to_json()


def _to_markdown(count: FlopsCount) -> str:
    columns = _columns(count)
    lines = [[heading for heading, _ in columns], ["---"] * 2 + ["---:"] * (len(columns) - 2)]
    lines += [[value(row).replace("|", "\\|") for _, value in columns] for row in _visible_rows(count, None)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"# FLOPs of {count.rows[0].kind}\n\n{table}\n\n" + "".join(f"- {line}\n" for line in count.summary())


def _to_html(count: FlopsCount) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=160, record=True)
    console.print(count.table(depth=None))
    return console.export_html(inline_styles=True)


_FORMATS: dict[str, Callable[[FlopsCount], str]] = {
    ".csv": to_csv,
    ".json": _to_json,
    ".md": _to_markdown,
    ".html": _to_html,
}
