"""The number of targets of a batch, and gradients of the mean over the targets of several batches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_tricks._shared.tensors import to_double
from lightning_tricks._torch_compat.foreach import foreach_mul_, group_by_device_and_dtype

Count = Callable[[Any], Tensor | float] | Literal["labels"]


def count_targets(count: Count, batch: Any, device: torch.device) -> Tensor:
    """Return the number of targets of a batch on a device, in double precision; shape ()."""
    if not callable(count) and not (isinstance(batch, Mapping) and count in batch):
        raise TypeError(
            f'count="labels" needs a batch with batch["labels"], got a {type(batch).__name__}: give a callable of the '
            "batch, such as count=lambda batch: (batch[1] != -100).sum()."
        )
    found: Any = count(batch) if callable(count) else (batch[count] != -100).sum()
    if isinstance(found, Real):
        found = torch.full((), found, device=device)  # type: ignore[call-overload]
    if not isinstance(found, Tensor) or found.ndim:
        raise TypeError(f"count must return an int or a tensor of shape (), got {found!r:.60}.")
    return to_double(found.detach().to(device, non_blocking=True))


class TargetMean:
    """Keeps accumulated gradients those of the mean over all targets so far.

    A window is what one optimizer step accumulates. After its last batch, whose gradients DDP averages over the ranks,
    they are those of the mean over the targets of all ranks. A loss is multiplied by its share of the targets so far,
    at most 1, and in the last batch by at most the number of ranks: in fp16, a scaled loss overflows no sooner than
    that of one batch alone.

    Args:
        count: As `count_targets` takes it.
        device: The device of the loss.

    Attributes:
        targets: The number of targets of the window so far, on this rank; None at its start.
        part: That of the part of a batch whose loss is computed; None before the first.
        scale: What the loss of the batch is multiplied by.
        is_checked: Whether the number of targets of the batch is to be compared with those of its loss.
        checks: How often it was.
    """

    def __init__(self, count: Count, device: torch.device) -> None:
        self._count, self._device = count, device
        self._batches = self.checks = 0
        self.targets: Tensor | None = None
        self.part: Tensor | None = None

    def begin(self, batch: Any, ranks: int, *, begins_window: bool) -> None:
        """Count a batch.

        Args:
            batch: The batch.
            ranks: The number of ranks whose gradients are averaged after this batch; all of them call it.
            begins_window: Whether there are no gradients yet.
        """
        self.is_checked = self._batches & (self._batches - 1) == 0 and not 0 < self._batches < 32
        self._batches += 1
        self.targets = None if begins_window else self.targets  # at once: a batch may have no loss to rescale by
        self._batch, self._before = self.count(batch), self.targets
        self._after = self._batch if self._before is None else self._batch + self._before
        self._total = self._after / ranks
        self._sum = torch.distributed.all_reduce(self._total, async_op=True) if ranks > 1 else None

    def count(self, batch: Any) -> Tensor:
        """Return the number of targets of a batch or a part of it."""
        return count_targets(self._count, batch, self._device)

    def count_parts(self, parts: Sequence[Any]) -> tuple[list[Tensor], list[Any]]:
        """Return the numbers of targets of the parts of the batch, and their shares."""
        if len(parts) == 1:
            return [self._batch], [1.0]
        return (counts := [*map(self.count, parts)]), [count / positive(self._batch) for count in counts]

    def rescale_(self, gradients: Iterable[Tensor]) -> None:
        """Multiply the gradients of the batches before by their share; call it once for each batch."""
        if self._sum is not None:
            self._sum.wait()
        self.targets, total = self._after, positive(self._total)
        self.scale = self._batch / total
        if self._before is not None and (given := [*gradients]):
            grouped: Any = group_by_device_and_dtype([given])
            for (device, _), ((alike,), _) in grouped.items():
                foreach_mul_(alike, (positive(self._before) / total).to(device))

    def changed_loss(self, loss: Tensor) -> Tensor:
        """Return the loss of the part; zero where it is a mean over no targets, which is NaN."""
        return loss if self.part is None else without_targets_zero(loss, self.part)


def positive(count: Tensor) -> Tensor:
    """Return a number of targets to divide by: what has none is zero, and stays it."""
    return count.where(count > 0, 1)


def without_targets_zero(means: Tensor, targets: Tensor) -> Tensor:
    """Return means over targets, with zeros where there are none."""
    return means.where(targets > 0, 0)
