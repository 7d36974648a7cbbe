"""`FlopsCount`: the FLOPs, MACs and parameters of a model and of each of its modules, as numbers, tables and files."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_tricks._shared.checks import check_choice, check_path
from lightning_tricks._shared.text import format_shape, format_si, render_text

if TYPE_CHECKING:
    from rich.table import Table

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class FlopsRow:
    """The counts of one module in a `FlopsCount`, including the modules that it calls.

    Attributes:
        name: The qualified name of the module; empty for the model itself.
        kind: The name of its class.
        params: The number of elements of its parameters, including those of its submodules.
        trainable_params: The number of those elements that require a gradient.
        macs: Multiply-accumulates of matrix products and convolutions in all its calls.
        flops: The same in FLOPs: `2 * macs`.
        other_flops: Estimated FLOPs of normalizations, poolings and pointwise operators.
        share: Its fraction of the model's MACs, in [0, 1].
        calls: The number of its calls.
        input_shapes: The shapes of the input tensors of its first call.
        output_shapes: The shapes of the output tensors of its first call.
        has_rule: Whether the backend can count what the module computes itself; False only with thop.
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
        """The depth of the module in the model: 0 for the model itself."""
        return self.name.count(".") + 1 if self.name else 0


@dataclass(frozen=True)
class FlopsCount:
    """The cost of one call of a model. Printed, it is a table.

    Attributes:
        macs: Multiply-accumulates of matrix products and convolutions in the forward pass.
        flops: The same in FLOPs: `2 * macs`.
        other_flops: Estimated FLOPs of normalizations, poolings and pointwise operators in the forward pass: one for
            each element of a pointwise operator, five for each element of a normalization or softmax, and the size of
            the window for each element that a pooling returns. thop counts them as MACs.
        train_step_flops: FLOPs of matrix products and convolutions in the forward and backward pass, including those
            that activation checkpointing computes again; None if the backward pass was not counted.
        params: The number of elements of all parameters; shared parameters count once.
        trainable_params: The number of those elements that require a gradient.
        uncounted: The numbers of calls without a rule: of operators or, with thop, of module classes.
        rows: The counts of each module, with the model itself first.
        backend: "torch" or "thop".
        notes: Remarks on how the model was counted.
        peer: The counts of the other backend, if the two were compared.
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
        """Return all counts as JSON-serializable values."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    def clever_format(self, format: str = "%.2f") -> tuple[str, str]:  # noqa: A002  # thop's name
        """Return MACs and parameters in the format of `thop.clever_format`, such as `("4.09G", "25.56M")`."""
        from lightning_tricks.flops.core.thop_rules import load_thop

        macs, params = load_thop().clever_format([self.macs, self.params], format)
        return macs, params

    def table(self, depth: int | None = 3) -> Table:
        """Return the counts as a rich table.

        Args:
            depth: The depth of the deepest modules to show: 0 for only the model, None for no limit. Modules that cost
                nothing and have no parameters are left out.
        """
        from rich.text import Text

        from lightning_tricks._shared.fitting_table import FittingTable, FoldedName

        columns = _columns(self)
        table = FittingTable(
            drop=["output", "other FLOPs", "class", "share", "params", columns[4][0]],  # last, what the peer counts
            notes="\n".join(self.summary()),
            title=f"FLOPs of {self.rows[0].kind}",
        )
        for index, (heading, _) in enumerate(columns):
            table.add_column(heading, justify="left" if index < 2 else "right")
        for row in _visible_rows(self, depth):
            module = FoldedName(row.name.rpartition(".")[2] or "(model)", indent="  " * row.depth)
            numbers = (Text(value(row)) for _, value in columns[2:])
            table.add_row(module, FoldedName(row.kind), *numbers, style="bold" if not row.depth else None)
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
            difference = f", {self.peer.macs / self.macs - 1:+.1%}" if self.macs else ""
            lines.append(f"{self.peer.backend} counts {format_si(self.peer.macs, 'MAC')}{difference}")
        for count in filter(None, (self, self.peer)):
            if count.uncounted:
                listed = ", ".join(f"{name} ({calls})" for name, calls in sorted(count.uncounted.items()))
                lines.append(f"{count.backend} has no rule for: {listed}")
        return lines + [note for count in filter(None, (self, self.peer)) for note in count.notes]

    def write(self, path: str | Path) -> Path:
        """Write the counts to a file in the format of its suffix: `.csv`, `.json`, `.md` or `.html`.

        The files contain modules of all depths. Numbers are exact in CSV and JSON, and rounded in the other formats.

        Args:
            path: The file; folders that do not exist are created.

        Returns:
            The path of the file.

        Raises:
            ValueError: If the suffix is unknown.
        """
        path = check_report_path(path)
        text = _FORMATS[path.suffix](self)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def to_csv(self) -> str:
        """Return the counts as CSV, with one line per module and exact numbers."""
        file = io.StringIO()
        rows = [asdict(row) for row in self.rows]
        if self.peer is not None:
            peer_macs = {row.name: row.macs for row in self.peer.rows}
            for row in rows:
                row[f"{self.peer.backend}_macs"] = peer_macs.get(row["name"], "")
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
        ("params", lambda row: format_si(row.params) + (" (frozen)" if row.params > 0 == row.trainable_params else "")),
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


def _format_shapes(shapes: Shapes) -> str:
    text = ", ".join(format_shape(shape) or "scalar" for shape in shapes[:2])
    return text + (", ..." if len(shapes) > 2 else "")


def _to_markdown(count: FlopsCount) -> str:
    columns = _columns(count)
    lines = [[heading for heading, _ in columns], ["---"] * 2 + ["---:"] * (len(columns) - 2)]
    lines += [[value(row).replace("|", "\\|") for _, value in columns] for row in _visible_rows(count, None)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"# FLOPs of {count.rows[0].kind}\n\n{table}\n\n" + "".join(f"- {line}\n" for line in count.summary())


def _to_html(count: FlopsCount) -> str:
    from rich.console import Console

    table, console = count.table(depth=None), Console(file=io.StringIO(), record=True)
    unlimited = console.options.update_width(10_000)
    console.width = max(160, console.measure(table, options=unlimited).maximum)
    console.print(table)
    return console.export_html(inline_styles=True)


_FORMATS: dict[str, Callable[[FlopsCount], str]] = {
    ".csv": FlopsCount.to_csv,
    ".json": FlopsCount.to_json,
    ".md": _to_markdown,
    ".html": _to_html,
}
