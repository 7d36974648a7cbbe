"""`FlopsCount`: what was counted, as numbers, as a table and as a file."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_tricks._shared.checks import check_choice
from lightning_tricks._shared.text import format_shape, render_text
from lightning_tricks._shared.units import format_si

if TYPE_CHECKING:
    from rich.table import Table

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class FlopsRow:
    """One module in a `FlopsCount`, with all that it calls.

    Attributes:
        name: Its qualified name, empty for the model itself.
        kind: Its class.
        params: The number of its parameters' elements, its submodules' among them.
        trainable_params: Those of them that require a gradient.
        macs: Multiply-accumulates of matrix products and convolutions in all its calls.
        flops: The same in FLOPs: `2 * macs`.
        other_flops: FLOPs of norms, pools and pointwise operators.
        share: Of the model's MACs, in [0, 1].
        calls: How often it was called.
        input_shapes: Of the tensors in its first call.
        output_shapes: Of the tensors that its first call returned.
        has_rule: Whether the backend can count what the module does itself; only thop cannot.
    """

    name: str
    kind: str
    params: int
    trainable_params: int
    macs: float
    flops: float
    other_flops: float
    share: float
    calls: int
    input_shapes: Shapes
    output_shapes: Shapes
    has_rule: bool = True

    @property
    def depth(self) -> int:
        """How deep the module lies: 0 for the model itself."""
        return self.name.count(".") + 1 if self.name else 0


@dataclass(frozen=True)
class FlopsCount:
    """What one call of a model costs. Printed, it is a table.

    Attributes:
        macs: Multiply-accumulates of matrix products and convolutions in the forward pass.
        flops: The same in FLOPs: `2 * macs`.
        other_flops: FLOPs of norms, pools and pointwise operators in the forward pass, by convention: one for each
            element of a pointwise operator, five for each element of a normalization or softmax, the window's size for
            each element of a pooling's result. thop counts them among the MACs.
        train_step_flops: FLOPs of matrix products and convolutions in forward and backward pass together, what
            activation checkpointing computes again among them; None where the backward pass was not counted.
        params: The number of the parameters' elements, shared ones once.
        trainable_params: Those of them that require a gradient.
        uncounted: What was called and has no rule, and how often: operators or, of thop, module classes.
        rows: The modules, the model itself first.
        backend: "torch" or "thop".
        notes: What to know about how it was counted.
        peer: What the other backend counted, if the two were to be compared.
    """

    macs: float
    flops: float
    other_flops: float
    train_step_flops: float | None
    params: int
    trainable_params: int
    uncounted: dict[str, int]
    rows: tuple[FlopsRow, ...] = field(repr=False)
    backend: str = "torch"
    notes: tuple[str, ...] = ()
    peer: FlopsCount | None = field(default=None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, as they go into JSON."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    def clever_format(self, format: str = "%.2f") -> tuple[str, str]:  # noqa: A002  # thop's name
        """Return MACs and parameters as `thop.clever_format` writes them, such as `("4.09G", "25.56M")`."""
        from lightning_tricks.flops.core.thop_backend import load_thop

        macs, params = load_thop().clever_format([self.macs, self.params], format)
        return macs, params

    def table(self, depth: int | None = 3) -> Table:
        """Return the counts as a rich table.

        Args:
            depth: How deep the modules that are shown may lie, 0 for the model alone, None for no limit. Modules that
                cost nothing and have no parameters are left out.
        """
        from rich.table import Table
        from rich.text import Text

        columns = self._columns()
        table = Table(title=f"FLOPs of {self.rows[0].kind}", caption="\n".join(self.summary()), caption_justify="left")
        for place, (heading, _) in enumerate(columns):
            squeezed = heading in ("class", "output")
            table.add_column(
                heading, justify="left" if place < 2 else "right", no_wrap=not squeezed, overflow="ellipsis"
            )
        for row in self._visible_rows(depth):
            indent = "  " * row.depth
            cells = [value(row) for _, value in columns]
            cells[0] = indent + (row.name.rpartition(".")[2] or "(model)")
            table.add_row(*map(Text, cells), style="bold" if not row.depth else None)
        return table

    def summary(self) -> list[str]:
        """Return the totals in a few lines."""
        macs, flops = format_si(self.macs, "MAC"), format_si(self.flops, "FLOP")
        forward = f"forward {macs} = {flops} in matrix products and convolutions"
        if self.backend == "torch":
            forward += f", {format_si(self.other_flops, 'FLOP')} in all else"
        lines = [forward]
        if self.train_step_flops is not None:
            ratio = f" ({self.train_step_flops / self.flops:.2f}x forward)" if self.flops else ""
            lines.append(f"training step {format_si(self.train_step_flops, 'FLOP')}{ratio}")
        lines.append(f"parameters {format_si(self.params)}, trainable {format_si(self.trainable_params)}")
        if self.peer is not None:
            lines.append(f"{self.peer.backend} counts {format_si(self.peer.macs, 'MAC')}{_difference(self.peer, self)}")
        for count in filter(None, (self, self.peer)):
            if count.uncounted:
                listed = ", ".join(f"{name} ({calls})" for name, calls in sorted(count.uncounted.items()))
                lines.append(f"{count.backend} has no rule for: {listed}")
        return lines + [note for count in filter(None, (self, self.peer)) for note in count.notes]

    def write(self, path: str | Path) -> Path:
        """Write the counts to a file, whose suffix says how: `.csv`, `.json`, `.md` or `.html`.

        CSV, JSON, and HTML hold all modules; numbers are exact in CSV and JSON.

        Returns:
            The path of the file; folders on the way to it are created.

        Raises:
            ValueError: If the suffix is another one.
        """
        path = check_path(path)
        text = _WRITERS[path.suffix](self)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def to_csv(self) -> str:
        """Return one line for each module, with exact numbers."""
        file = io.StringIO()
        rows = [asdict(row) for row in self.rows]
        if self.peer is not None:
            peer_rows = {row.name: row.macs for row in self.peer.rows}
            for row in rows:
                row[f"{self.peer.backend}_macs"] = peer_rows.get(row["name"], "")
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            for key in ("input_shapes", "output_shapes"):
                row[key] = " ".join(format_shape(shape) for shape in row[key])
            writer.writerow(row)
        return file.getvalue()

    def to_json(self) -> str:
        """Return `to_dict()` as JSON."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def __rich__(self) -> Table:
        return self.table()

    def __str__(self) -> str:
        return render_text(self)

    def _visible_rows(self, depth: int | None) -> list[FlopsRow]:
        return [
            row
            for row in self.rows
            if (depth is None or row.depth <= depth) and (row.params or row.macs or not row.has_rule or not row.depth)
        ]

    def _columns(self) -> list[tuple[str, Callable[[FlopsRow], str]]]:
        columns: list[tuple[str, Callable[[FlopsRow], str]]] = [
            ("module", lambda row: row.name or "(model)"),
            ("class", lambda row: row.kind),
            ("params", lambda row: format_si(row.params) + " (frozen)" * (row.params > 0 == row.trainable_params)),
            ("MACs", lambda row: "no rule" if not row.has_rule and not row.macs else format_si(row.macs)),
            ("share", lambda row: f"{row.share:.1%}"),
            ("other FLOPs", lambda row: format_si(row.other_flops)),
            ("output", lambda row: _format_shapes(row.output_shapes)),
        ]
        if self.backend != "torch":
            columns.pop(5)
        if self.peer is not None:
            peer_rows = {row.name: row for row in self.peer.rows}

            def peer_macs(row: FlopsRow) -> str:
                other = peer_rows.get(row.name)
                if other is None:
                    return ""
                return format_si(other.macs) + ("" if other.has_rule else " (no rule)")

            columns.insert(4, (f"{self.peer.backend}'s MACs", peer_macs))
        return columns


def check_path(path: str | Path) -> Path:
    """Return a path whose suffix says how to write a count, or raise a ValueError."""
    path = Path(path)
    check_choice("the suffix of path", path.suffix, _WRITERS)
    return path


def _format_shapes(shapes: Shapes) -> str:
    text = ", ".join(format_shape(shape) or "scalar" for shape in shapes[:2])
    return text + ", ..." * (len(shapes) > 2)


def _difference(count: FlopsCount, reference: FlopsCount) -> str:
    return f", {count.macs / reference.macs - 1:+.1%}" if reference.macs else ""


def _to_markdown(count: FlopsCount) -> str:
    columns = count._columns()
    lines = [[heading for heading, _ in columns], ["---"] * 2 + ["---:"] * (len(columns) - 2)]
    lines += [[value(row).replace("|", "\\|") for _, value in columns] for row in count._visible_rows(None)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"# FLOPs of {count.rows[0].kind}\n\n{table}\n\n" + "".join(f"- {line}\n" for line in count.summary())


def _to_html(count: FlopsCount) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=160, record=True)
    console.print(count.table(depth=None))
    return console.export_html(inline_styles=True)


_WRITERS: dict[str, Callable[[FlopsCount], str]] = {
    ".csv": FlopsCount.to_csv,
    ".json": FlopsCount.to_json,
    ".md": _to_markdown,
    ".html": _to_html,
}
