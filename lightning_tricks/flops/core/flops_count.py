"""`FlopsCount`: the FLOPs, MACs and parameters of a model and of each of its modules."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_tricks._shared.text import render_text
from lightning_tricks._shared.units import format_si
from lightning_tricks.flops.core import flops_table

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
        uncounted: How often something without a rule was called: operators or, with thop, module classes.
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
        """Return all counts as values that JSON can hold."""
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
            depth: The depth of the deepest modules that are shown: 0 for the model alone, None for no limit. Modules
                that cost nothing and have no parameters are left out.
        """
        return flops_table.to_rich(self, depth)

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
        """Write the counts to a file in the format of its suffix: `.csv`, `.json`, `.md` or `.html`.

        The files hold modules of all depths. Numbers are exact in CSV and JSON, and rounded in the other formats.

        Args:
            path: The file; folders that do not exist are created.

        Returns:
            The path of the file.

        Raises:
            ValueError: If the suffix is another one.
        """
        return flops_table.write(self, path)

    def to_csv(self) -> str:
        """Return the counts as CSV, with one line for each module and exact numbers."""
        return flops_table.to_csv(self)

    def to_json(self) -> str:
        """Return `to_dict()` as JSON."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def __rich__(self) -> Table:
        return self.table()

    def __str__(self) -> str:
        return render_text(self)


def _difference(count: FlopsCount, reference: FlopsCount) -> str:
    return f", {count.macs / reference.macs - 1:+.1%}" if reference.macs else ""
