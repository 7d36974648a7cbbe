"""What is recorded of each step of a fit."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_tricks.run_fingerprint.core.layer_outputs import LayerOutputs
from lightning_tricks.run_fingerprint.core.model_tensors import ModelTensors
from lightning_tricks.run_fingerprint.core.row_writer import RowWriter
from lightning_tricks.run_fingerprint.core.value_parts import children_of


class StepRecorder:
    """Records the batch, loss, gradients and weights of a fit's steps, as a whole or by layer.

    Args:
        writer: The writer of the fingerprints.
        model: The model that is trained.
    """

    def __init__(self, writer: RowWriter, model: nn.Module) -> None:
        self.writer, self.model = writer, model
        self._by_layer = writer.header.detail == "layer"
        self._stepped = False
        self._installed = ExitStack()
        self.find_layers()

    def find_layers(self) -> None:
        """Find the layers and tensors of the model again."""
        self._tensors = ModelTensors(self.model)
        self._outputs = LayerOutputs(self.model) if self._by_layer else None

    def record_initial_weights(self, step: int, epoch: int) -> None:
        """Start the file with the weights before the first batch."""
        self.writer.start_file()
        self.writer.start_row(step, epoch, -1)
        self._add("weights", self._tensors())
        self.writer.end_row()

    def on_batch_start(self, step: int, epoch: int, number: int, batch: Any) -> None:
        """Record a batch, and hook the layers until it ends."""
        self.close()  # the hooks of a batch that was skipped
        self._stepped = False
        self.writer.start_row(step, epoch, number)
        self._add("data", children_of(batch))
        if self._outputs is not None:
            self._installed.enter_context(
                self._outputs.hooked(lambda name, output: self._add("forward", {name: output}))
            )

    def on_backward_start(self, loss: Any) -> None:
        """Record a loss."""
        if self.writer.has_open_row:
            self.writer.add("loss", loss)

    def on_optimizer_step(self, optimizer: Optimizer) -> None:
        """Record the gradients of an optimizer."""
        if self.writer.has_open_row:
            self._stepped = True
            own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            tensors = self._tensors().items()
            self._add("gradient", {name: t.grad for name, t in tensors if id(t) in own and t.grad is not None})

    def on_batch_end(self, loss: Any, *, may_have_stepped: bool) -> None:
        """Record the weights after a step, and the loss, if `on_backward_start` did not.

        Raises:
            OSError: If the rows cannot be written.
        """
        self.close()
        if not self.writer.has_open_row:
            return
        if loss is not None and not self.writer.has("loss"):
            self.writer.add("loss", loss)
        if self._stepped or may_have_stepped:
            self._add("weights", self._tensors())
        self.writer.end_row()

    def on_exception(self) -> None:
        """Write all rows, also that of the interrupted step.

        Raises:
            OSError: If the rows cannot be written.
        """
        self.close()
        self.writer.end_row()
        self.writer.flush()

    def close(self) -> None:
        """Remove the hooks from the layers."""
        self._installed.close()

    def _add(self, kind: str, values: Mapping[str, Any]) -> None:
        if not self._by_layer:
            self.writer.add(kind, values)
            return
        for name, value in values.items():
            self.writer.add(kind, value, name)
