"""What a batch changes before its optimizer step, kept so that the batch can be tried again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_tricks._shared.rng import capture_rng_state, restore_rng_state
from lightning_tricks._torch_compat.modules import own_buffers


class StatefulParts:
    """The parts of a module whose state a step may change: parameters, owners of buffers, metrics of torchmetrics."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = list(module.parameters())
        self.buffers = [own_buffers(part) for part in module.modules() if own_buffers(part)]
        self.metrics = [part for part in module.modules() if isinstance(part, Metric)]


class BatchState:
    """The random state, the buffers and the metrics of a module before a batch; gradients once they are noted."""

    def __init__(self, parts: StatefulParts) -> None:
        self._parts = parts
        self._rng = capture_rng_state()
        self._buffers = [dict(buffers) for buffers in parts.buffers]
        self._metrics = [dict(vars(metric)) for metric in parts.metrics]
        states = [state for metric in parts.metrics for state in metric.metric_state.values()]
        self._lists = [(state, list(state)) for state in states if isinstance(state, list)]
        buffers = [buffer for owned in self._buffers for buffer in owned.values()]
        self._copies = _copies([value for value in (*buffers, *states) if isinstance(value, Tensor)])
        self._gradients: list[Tensor | None] | None = None
        self._gradient_copies: list[tuple[Tensor, Tensor]] = []

    def note_gradients(self) -> None:
        """Note the gradients, with a copy of each; there are none yet unless batches are accumulated."""
        self._gradients = [parameter.grad for parameter in self._parts.parameters]
        self._gradient_copies = _copies([gradient for gradient in self._gradients if gradient is not None])

    def set_gradients_aside(self) -> None:
        """Note the gradients and let the parameters have none."""
        self._gradients = [parameter.grad for parameter in self._parts.parameters]
        for parameter in self._parts.parameters:
            parameter.grad = None

    def restore(self) -> None:
        """Restore everything, in the same tensors."""
        restore_rng_state(self._rng)
        for owned, before in zip(self._parts.buffers, self._buffers, strict=True):
            owned.update(before)
        for metric, attributes in zip(self._parts.metrics, self._metrics, strict=True):
            vars(metric).update(attributes)
        for state, elements in self._lists:
            state[:] = elements
        if self._gradients is not None:
            for parameter, gradient in zip(self._parts.parameters, self._gradients, strict=True):
                parameter.grad = gradient
        with torch.no_grad():
            for tensor, copy in (*self._copies, *self._gradient_copies):
                tensor.copy_(copy)


def _copies(tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return [(tensor, tensor.detach().clone()) for tensor in tensors]


def same_random_state(before: dict[str, Any]) -> bool:
    """Whether the global random number generators are as they were when `capture_rng_state` returned `before`."""
    now = capture_rng_state()
    return (
        torch.equal(now["torch"], before["torch"])
        and torch.equal(now["python"][1], before["python"][1])
        and torch.equal(now["numpy"][1], before["numpy"][1])
        and now["numpy"][2] == before["numpy"][2]
        and all(map(torch.equal, now["cuda"], before["cuda"]))
    )
