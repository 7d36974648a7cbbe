"""`ModelReportSummary`: what is known of a model, as numbers, as tables and as files."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_tricks._shared.text import format_shape, render_text
from lightning_tricks._shared.units import format_bytes
from lightning_tricks.model_report.core.autograd_graph import render_graph

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table


@dataclass(frozen=True)
class ParameterRow:
    """One parameter tensor.

    Attributes:
        name: Its qualified name; of a shared one, the first.
        shape: Its whole shape, also where it is sharded; None where it is not initialized.
        dtype: Such as `float32`.
        trainable: Whether it requires a gradient.
        mean: Of its elements; None where there are no values (on the meta device, or not initialized).
        std: Their standard deviation.
        grad_norm: The L2 norm of its gradient, None where there is none.
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: str
    trainable: bool
    mean: float | None
    std: float | None
    grad_norm: float | None


@dataclass(frozen=True)
class ModelMemory:
    """Sizes in bytes, on this rank.

    Attributes:
        weights: Of the parameters, shared ones once.
        buffers: Of the buffers.
        gradients: Of the gradients that there are.
        optimizer_state: Of the tensors in the optimizers' state.
    """

    weights: int
    buffers: int
    gradients: int
    optimizer_state: int

    @property
    def total(self) -> int:
        """All of them together."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class ModelReportSummary:
    """What `summarize_model` found out. Printed, it is tables.

    Attributes:
        model: The model's class.
        parameters: One row for each parameter tensor.
        memory: What it takes.
        layers: torchinfo's summary, None where there were no inputs or torchinfo is not installed.
        graph: The autograd graph of one call, as DOT source; None where it was not asked for or could not be made.
        notes: What is missing, and why.
    """

    model: str
    parameters: tuple[ParameterRow, ...]
    memory: ModelMemory
    layers: str | None
    graph: str | None
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the graph as plain values, as they go into JSON."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        del plain["graph"]
        return plain

    def table(self) -> Table:
        """Return the parameters as a rich table."""
        from rich.table import Table
        from rich.text import Text

        memory = ", ".join(
            f"{field.name.replace('_', ' ')} {format_bytes(getattr(self.memory, field.name))}"
            for field in fields(ModelMemory)
        )
        table = Table(title=f"Parameters of {self.model}", caption=f"memory: {memory}", caption_justify="left")
        for heading in ("parameter", "shape", "dtype", "trains", "mean", "std", "grad norm"):
            squeezed = heading in ("dtype", "trains")
            numeric = heading in ("mean", "std", "grad norm")
            table.add_column(heading, justify="right" if numeric else "left", no_wrap=not squeezed, overflow="ellipsis")
        for row in self.parameters:
            numbers = ["" if n is None else f"{n:.3g}" for n in (row.mean, row.std, row.grad_norm)]
            shape = "lazy" if row.shape is None else format_shape(row.shape) or "scalar"
            table.add_row(*map(Text, (row.name, shape, row.dtype, "yes" if row.trainable else "no", *numbers)))
        return table

    def write(self, folder: str | Path) -> list[Path]:
        """Write `parameters.csv`, `report.json`, `layers.txt`, `graph.dot` and, where `dot` is, `graph.svg` and `.png`.

        Returns:
            The files that were written; the folder is made.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        texts = {"parameters.csv": self._csv(), "report.json": json.dumps(self.to_dict(), indent=2) + "\n"}
        if self.layers is not None:
            texts["layers.txt"] = self.layers + "\n"
        if self.graph is not None:
            texts["graph.dot"] = self.graph
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        pictures = render_graph(folder / "graph.dot") if self.graph is not None else []
        return [*(folder / name for name in texts), *pictures]

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.text import Text

        layers = Text(self.layers or "", no_wrap=True, overflow="ellipsis")
        return Group(self.table(), *([layers] if self.layers else []), *map(Text, self.notes))

    def __str__(self) -> str:
        return render_text(self)

    def _csv(self) -> str:
        file = io.StringIO()
        writer = csv.DictWriter(file, [field.name for field in fields(ParameterRow)], lineterminator="\n")
        writer.writeheader()
        for row in self.parameters:
            writer.writerow(asdict(row) | {"shape": format_shape(row.shape or ())})
        return file.getvalue()
