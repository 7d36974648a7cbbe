"""The mean of the losses of an epoch's batches, weighted by their samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_tricks._shared.tensors import outside_inference_mode, to_double

_MAX_BATCHES = 256


class MeanLoss:
    """The mean loss over samples, from losses of batches or single samples, without host reads.

    Examples:
        >>> import torch
        >>> mean = MeanLoss()
        >>> mean.update(torch.tensor(1.0), samples=3)
        >>> mean.update(torch.tensor(5.0), samples=1)
        >>> mean.compute()
        tensor(2., dtype=torch.float64)
    """

    def __init__(self) -> None:
        self.samples = 0
        self._sum: Tensor | None = None
        self._pending: list[tuple[Tensor, float]] = []

    def update(self, loss: Tensor, samples: int, factor: float = 1.0, *, own: bool = False) -> None:
        """Add a batch.

        Args:
            loss: The mean over the batch, without dimensions, or the loss of each sample.
            samples: The number of samples of the batch.
            factor: A factor for the loss.
            own: Whether the tensor will not be changed by other code, so that it need not be copied.
        """
        if samples > 0:
            if not own or loss.ndim:
                loss = loss.detach().mean()
            self._pending.append((loss, factor * samples))
            self.samples += samples
            if len(self._pending) >= _MAX_BATCHES:
                self.flush()

    def compute(self) -> Tensor | None:
        """Return the mean, or None if there were no samples."""
        self.flush()
        return None if self._sum is None or not self.samples else self._sum / self.samples

    def __copy__(self) -> MeanLoss:
        """Return one that goes on by itself."""
        other = MeanLoss()
        vars(other).update(vars(self), _pending=[*self._pending])
        return other

    def state_dict(self) -> dict[str, Any]:
        """Return sum, number of samples and pending losses on the CPU, without adding the pending ones up."""
        losses = torch.stack([loss for loss, _ in self._pending]).cpu() if self._pending else torch.empty(0)
        waiting = {"losses": losses, "weights": [weight for _, weight in self._pending]}
        return {"sum": None if self._sum is None else self._sum.cpu(), "samples": self.samples, "waiting": waiting}

    def load(self, states: Sequence[Mapping[str, Any]], device: torch.device | str | None = None) -> None:
        """Replace the state by the merged states of several parts of the data."""
        sums = [state["sum"].to(device) for state in states if state["sum"] is not None]
        self._sum = torch.stack(sums).sum(0) if sums else None
        self.samples = sum(state["samples"] for state in states)
        waiting = [state["waiting"] for state in states if "waiting" in state]
        losses = [loss for part in waiting for loss in part["losses"].to(device)]
        self._pending = list(zip(losses, [weight for part in waiting for weight in part["weights"]], strict=True))

    def flush(self) -> None:
        """Add up the pending losses."""
        if not self._pending:
            return
        with outside_inference_mode():
            losses = to_double(torch.stack([loss for loss, _ in self._pending]))
            weights = torch.tensor([weight for _, weight in self._pending], dtype=losses.dtype)
            total = (losses * weights.to(losses.device, non_blocking=True)).sum()
            self._sum = total if self._sum is None else self._sum + total
        self._pending = []
