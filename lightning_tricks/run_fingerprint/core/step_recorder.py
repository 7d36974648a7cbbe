"""What is looked at in each step of a fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_tricks.run_fingerprint.core.layer_outputs import Outputs, Tensors
from lightning_tricks.run_fingerprint.core.row_writer import Recorder
from lightning_tricks.run_fingerprint.core.value_parts import branches_of


class FitRecording:
    """Shows a recorder the batch, loss, gradients and weights of a fit's steps, as a whole or by layer.

    Args:
        recorder: That writes the fingerprints.
        model: That is trained.
    """

    def __init__(self, recorder: Recorder, model: nn.Module) -> None:
        self.recorder, self.model = recorder, model
        self._by_layer = recorder.origin.detail == "layer"
        self._stepped = False
        self._unwatch: Callable[[], None] | None = None
        self.look_up()

    def look_up(self) -> None:
        """Find the layers and tensors of the model anew."""
        self._tensors = Tensors(self.model)
        self._outputs = Outputs(self.model) if self._by_layer else None

    def begin(self, step: int, epoch: int) -> None:
        """Start the file with the weights as they are before the first batch."""
        self.recorder.begin()
        self.recorder.start_row(step, epoch, -1)
        self._add("weights", self._tensors())
        self.recorder.end_row()

    def batch_starts(self, step: int, epoch: int, number: int, batch: Any) -> None:
        """Look at a batch, and at the layers until it ends."""
        self.stop_watching()  # of a batch that was left out
        self._stepped = False
        self.recorder.start_row(step, epoch, number)
        self._add("data", branches_of(batch))
        if self._outputs is not None:
            self._unwatch = self._outputs.watch(lambda name, output: self._add("forward", {name: output}))

    def backward_starts(self, loss: Any) -> None:
        """Look at a loss."""
        if self.recorder.is_in_row:
            self.recorder.add("loss", loss)

    def optimizer_steps(self, optimizer: Optimizer) -> None:
        """Look at the gradients of an optimizer."""
        if self.recorder.is_in_row:
            self._stepped = True
            own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            tensors = self._tensors().items()
            self._add("gradient", {name: t.grad for name, t in tensors if id(t) in own and t.grad is not None})

    def batch_ends(self, loss: Any, *, may_have_stepped: bool) -> None:
        """Look at the weights after a step, and at the loss, if no backward showed it.

        Raises:
            OSError: If the rows cannot be written.
        """
        self.stop_watching()
        if not self.recorder.is_in_row:
            return
        if loss is not None and not self.recorder.has("loss"):
            self.recorder.add("loss", loss)
        if self._stepped or may_have_stepped:
            self._add("weights", self._tensors())
        self.recorder.end_row()

    def breaks_off(self) -> None:
        """Write what there is, of the step that is not done as well.

        Raises:
            OSError: If the rows cannot be written.
        """
        self.stop_watching()
        self.recorder.end_row()
        self.recorder.write()

    def stop_watching(self) -> None:
        """Leave the layers alone."""
        if self._unwatch is not None:
            self._unwatch()
        self._unwatch = None

    def _add(self, kind: str, values: Mapping[str, Any]) -> None:
        if not self._by_layer:
            self.recorder.add(kind, values)
            return
        for name, value in values.items():
            self.recorder.add(kind, value, name)
