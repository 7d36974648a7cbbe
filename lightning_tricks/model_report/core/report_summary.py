"""`ModelReportSummary`: the parameters, layers, memory and graph of a model, as numbers, tables and files."""

from __future__ import annotations

import csv
import io
import json
import shutil
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_tricks._shared.checks import check_path
from lightning_tricks._shared.lightning_name import lightning_logger
from lightning_tricks._shared.modules import describe_without_gradient
from lightning_tricks._shared.text import format_bytes, format_shape, render_text

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table


DOT_NOT_INSTALLED = (
    "graph.dot was written, but not drawn: graphviz's program `dot` is not installed (on Debian: apt install graphviz)."
)


@dataclass(frozen=True)
class ParameterRow:
    """One parameter tensor.

    Attributes:
        name: The qualified name of the parameter; of a shared parameter, the first one.
        shape: Its shape, or the shape of the whole tensor if it is sharded; None if it is not initialized.
        dtype: The name of its dtype, such as `float32`.
        trainable: Whether it requires a gradient.
        mean: The mean of its elements; None if it has no values (on the meta device, or not initialized).
        std: The population standard deviation of its elements; None if it has no values.
        grad_norm: The L2 norm of its gradient; None if it has no gradient.
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
    """The memory of a model on this rank, in bytes.

    Attributes:
        weights: The size of the parameters; shared parameters count once.
        buffers: The size of the buffers.
        gradients: The size of the gradients.
        optimizer_state: The size of the tensors in the state of the optimizers.
    """

    weights: int
    buffers: int
    gradients: int
    optimizer_state: int

    @property
    def total(self) -> int:
        """The sum of all sizes."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class ModelReportSummary:
    """The report of `summarize_model`. Printed, it is one table per part.

    Attributes:
        model: The name of the model's class.
        parameters: One row for each parameter tensor.
        memory: The memory of the model.
        layers: torchinfo's summary; None without inputs or if torchinfo is not installed.
        graph: The autograd graph of one call as DOT source; None if it was not requested or could not be made.
        notes: The missing parts, with the reasons.
        without_gradient: The trainable parameters that no backward pass reached before the first optimizer step, with
            the ranks if it is not so on all; empty for `summarize_model`, which does not train.
    """

    model: str
    parameters: tuple[ParameterRow, ...]
    memory: ModelMemory
    layers: str | None
    graph: str | None
    notes: tuple[str, ...]
    without_gradient: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return everything except the graph as JSON-serializable values."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        del plain["graph"]
        return plain

    def table(self) -> Table:
        """Return the parameters as a rich table."""
        from rich.text import Text

        from lightning_tricks._shared.fitting_table import FittingTable, FoldedName

        memory = ", ".join(
            f"{field.name.replace('_', ' ')} {format_bytes(getattr(self.memory, field.name))}"
            for field in fields(ModelMemory)
        )
        drop = ("dtype", "std", "trains", "grad norm", "mean", "shape")
        table = FittingTable(drop=drop, notes=f"memory: {memory}", title=f"Parameters of {self.model}")
        for heading in ("parameter", "shape", "dtype", "trains"):
            table.add_column(heading)
        for heading in ("mean", "std", "grad norm"):
            table.add_column(heading, justify="right")
        for row in self.parameters:
            numbers = ["" if n is None else f"{n:.3g}" for n in (row.mean, row.std, row.grad_norm)]
            shape = "lazy" if row.shape is None else format_shape(row.shape) or "scalar"
            others = (shape, row.dtype, "yes" if row.trainable else "no", *numbers)
            table.add_row(FoldedName(row.name), *map(Text, others))
        return table

    def write(self, folder: str | Path) -> list[Path]:
        """Write `parameters.csv`, `report.json`, `layers.txt` and `graph.dot`, and draw `graph.svg` and `graph.png`.

        The pictures need graphviz's program `dot`.

        Args:
            folder: The folder for the files; it is created if it does not exist.

        Returns:
            The paths of the written files.
        """
        folder = Path(check_path("folder", folder, "a folder"))
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

        layers = [Text(self.layers, no_wrap=True, overflow="ellipsis")] if self.layers else []
        unused = [describe_without_gradient(self.without_gradient) + "."] if self.without_gradient else []
        return Group(self.table(), *layers, *map(Text, [*unused, *self.notes]))

    def __str__(self) -> str:
        return render_text(self)

    def _csv(self) -> str:
        file = io.StringIO()
        writer = csv.DictWriter(file, [field.name for field in fields(ParameterRow)], lineterminator="\n")
        writer.writeheader()
        for row in self.parameters:
            writer.writerow(asdict(row) | {"shape": format_shape(row.shape or ())})
        return file.getvalue()


def render_graph(source: Path) -> list[Path]:
    """Draw a DOT file as SVG and as PNG in the same folder, or log that `dot` is not installed.

    Returns:
        The paths of the pictures.
    """
    if shutil.which("dot") is None:
        lightning_logger("model_report").info(DOT_NOT_INSTALLED)
        return []
    import graphviz

    return [
        Path(graphviz.render("dot", kind, outfile=source.with_suffix(f".{kind}"), filepath=source))
        for kind in ("svg", "png")
    ]
