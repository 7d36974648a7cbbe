"""Counts of an optimizer's steps: how many were clipped, and how many skipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_tricks.gradient_clipping.core.clipping import is_nonfinite
from lightning_tricks.gradient_clipping.core.methods import ClipResult

_COUNTED_AT_ONCE = 128


class StepCounts:
    """Counts of an optimizer's steps, on the device of its gradients.

    Attributes:
        steps: All steps.
        clipped: The steps in which something was clipped, and that were not skipped; shape ().
        skipped: The steps whose gradients were not finite; shape ().
        consecutive: How many of the last steps in a row were truly nonfinite; shape ().
        most_consecutive: The longest such row; shape ().
    """

    def __init__(self) -> None:
        self.steps = 0
        self._counts = torch.zeros(4)
        self._waiting: list[_Step] = []  # what `_counts` lacks: counting many steps at once is cheaper

    clipped = property(lambda self: self.count_waiting()[0])
    skipped = property(lambda self: self.count_waiting()[1])
    consecutive = property(lambda self: self.count_waiting()[2])
    most_consecutive = property(lambda self: self.count_waiting()[3])

    def add(
        self,
        norm: Tensor,
        results: Sequence[ClipResult],
        nonfinite: Tensor | None = None,
        truly_nonfinite: Tensor | None = None,
    ) -> None:
        """Count a step.

        Args:
            norm: The norm of all gradients before clipping; shape ().
            results: Those of its groups.
            nonfinite: Whether a gradient is not finite, a bool of shape (); None for what the norm says.
            truly_nonfinite: The same without what the scale of a GradScaler may have caused; None if there is none.
        """
        self.steps += 1
        step = _Step(norm, [(result.measured, result.bound) for result in results], nonfinite, truly_nonfinite)
        if self._waiting and self._waiting[0].form != step.form:
            self.count_waiting()
        self._waiting.append(step)
        if len(self._waiting) == _COUNTED_AT_ONCE:
            self.count_waiting()

    def count_waiting(self) -> Tensor:
        """Count the steps that wait, and return the four counts; shape (4,)."""
        if self._waiting:
            clipped, skipped, nonfinite = _flags(self._waiting)
            clipped_before, skipped_before, consecutive, most = self._counts.to(skipped.device, non_blocking=True)
            position = torch.arange(1, len(nonfinite) + 1, device=nonfinite.device)
            last_finite = (position * ~nonfinite).cummax(0).values
            rows = position - last_finite + consecutive * (last_finite == 0)
            counts = clipped_before + clipped.sum(), skipped_before + skipped.sum()
            self._counts = torch.stack([*counts, rows[-1], torch.maximum(most, rows.max())])
            self._waiting = []
        return self._counts

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {"steps": self.steps, "counts": self.count_waiting().cpu()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the counts."""
        self.steps, self._counts, self._waiting = state_dict["steps"], state_dict["counts"].clone(), []


class _Step(NamedTuple):
    """A step that waits to be counted; see `StepCounts.add`."""

    norm: Tensor
    compared: list[tuple[Tensor, float | Tensor]]  # for each group
    nonfinite: Tensor | None
    truly_nonfinite: Tensor | None

    @property
    def form(self) -> tuple[bool, bool, int]:
        """What steps share that can be counted at once."""
        return self.nonfinite is None, self.truly_nonfinite is None, len(self.compared)


def _flags(steps: Sequence[_Step]) -> tuple[Tensor, Tensor, Tensor]:
    """Return which steps were clipped, skipped and truly nonfinite; bools of shape (n,)."""
    norms, compared, nonfinite, truly_nonfinite = zip(*steps, strict=True)
    skipped = is_nonfinite(torch.stack(norms)) if nonfinite[0] is None else torch.stack(nonfinite)
    clipped = torch.zeros_like(skipped)
    for group in zip(*compared, strict=True):
        measured, bounds = zip(*group, strict=True)
        bound = torch.stack(bounds) if isinstance(bounds[0], Tensor) else bounds[0]  # else that of the group's method
        clipped |= torch.stack(measured) > bound
    return clipped & ~skipped, skipped, skipped if truly_nonfinite[0] is None else torch.stack(truly_nonfinite)
