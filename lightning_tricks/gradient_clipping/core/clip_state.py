"""What clipping remembers of each optimizer, from step to step and in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_tricks.gradient_clipping.core.adaptive_thresholds import NoThreshold, Threshold
from lightning_tricks.gradient_clipping.core.clip_groups import ClipGroup, ClipGroups
from lightning_tricks.gradient_clipping.core.clipping import GradientNorms, gradient_norms
from lightning_tricks.gradient_clipping.core.step_skipping import (
    HeldSchedulers,
    skip_step_,
    skip_step_on_device_,
    skips_on_device,
)

_COUNTED_AT_ONCE = 128


class StepCounts:
    """Counts of an optimizer's steps, on the device of its gradients.

    Attributes:
        steps: All steps.
        clipped: The steps in which something was clipped; shape ().
        skipped: The steps that were skipped; shape ().
        consecutive: How many of the last steps in a row were truly nonfinite; shape ().
        most_consecutive: The longest such row; shape ().
    """

    def __init__(self) -> None:
        self.steps = 0
        self.clipped = torch.zeros(())
        self._rows = torch.zeros(3)
        self._waiting: list[tuple[Tensor, Tensor]] = []  # what `_rows` lacks: counting many steps at once is cheaper

    skipped = property(lambda self: self.count_waiting()[0])
    consecutive = property(lambda self: self.count_waiting()[1])
    most_consecutive = property(lambda self: self.count_waiting()[2])

    def add(self, clipped: Tensor, skipped: Tensor, truly_nonfinite: Tensor) -> None:
        """Count a step; the arguments are bools of shape ()."""
        self.steps += 1
        self.clipped = self.clipped.to(clipped.device) + clipped
        self._waiting.append((skipped, truly_nonfinite))
        if len(self._waiting) == _COUNTED_AT_ONCE:
            self.count_waiting()

    def count_waiting(self) -> Tensor:
        """Count the steps that wait, and return `skipped`, `consecutive` and `most_consecutive`; shape (3,)."""
        if self._waiting:
            skipped, nonfinite = (torch.stack(flags) for flags in zip(*self._waiting, strict=True))
            before, consecutive, most = self._rows.to(skipped.device)
            position = torch.arange(1, len(nonfinite) + 1, device=nonfinite.device)
            last_finite = (position * ~nonfinite).cummax(0).values
            rows = position - last_finite + consecutive * (last_finite == 0)
            self._rows = torch.stack([before + skipped.sum(), rows[-1], torch.maximum(most, rows.max())])
            self._waiting = []
        return self._rows

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {"steps": self.steps, "counts": torch.cat([self.clipped.reshape(1), self.count_waiting()]).cpu()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the counts."""
        counts = state_dict["counts"].clone()
        self.steps, self.clipped, self._rows, self._waiting = state_dict["steps"], counts[0], counts[1:], []


class ClipState:
    """What clipping remembers of one optimizer: counts and thresholds for good, all else until a fit ends.

    Attributes:
        counts: The counts of its steps.
        thresholds: Label of a group -> the threshold that follows its norms.
        held_schedulers: The schedulers to restore after a skipped step, or None.
        finite_at_skip: Which gradients were finite when a step was last skipped; shape (n,).
    """

    def __init__(self) -> None:
        self.counts = StepCounts()
        self.thresholds: dict[str, Threshold] = {}
        self._forget_fit()

    def _forget_fit(self) -> None:
        self.held_schedulers: HeldSchedulers | None = None
        self._end_skip: Callable[[], None] | None = None
        self.finite_at_skip: Tensor | None = None
        self._parameter_ids: list[int] = []
        self._groups: list[ClipGroup] = []

    def close(self) -> None:
        """Remove the hook of a skipped step that never came, and forget parameters and schedulers of the fit."""
        self.end_skip()
        self.counts.count_waiting()
        self._forget_fit()

    def end_skip(self) -> None:
        """End the skipping of a step, if one was skipped: it is over, or never came."""
        end, self._end_skip = self._end_skip, None
        if end is not None:
            end()

    def skip_step_(
        self, optimizer: Optimizer, nonfinite: Tensor, *, by_scaler: bool, schedulers: list[Any] | None
    ) -> bool:
        """Skip the optimizer's next step where its gradients are not finite.

        Args:
            optimizer: The optimizer.
            nonfinite: Whether a gradient is not finite; shape ().
            by_scaler: Whether a GradScaler skips it by itself.
            schedulers: The schedulers that are restored after a skipped step; None for none.

        Returns:
            Whether the host knows that the step is skipped.
        """
        on_device = by_scaler or skips_on_device(optimizer)
        if on_device and schedulers is None:
            if not by_scaler:
                self._end_skip = skip_step_on_device_(optimizer, nonfinite)
            return False
        if not nonfinite:
            return False
        if schedulers is not None:
            self.held_schedulers = HeldSchedulers(optimizer, schedulers)
        if not by_scaler:
            self._end_skip = skip_step_(optimizer)
        return True

    def restore_schedulers(self) -> None:
        """Restore the schedulers of a skipped step."""
        held, self.held_schedulers = self.held_schedulers, None
        if held is not None:
            held.restore()

    def clip_(
        self,
        clip_groups: ClipGroups,
        parameters: Sequence[Tensor],
        norms: GradientNorms,
        norm_type: float,
        names_of: Callable[[Sequence[Tensor]], list[str]],
    ) -> tuple[Tensor, Tensor]:
        """Clip the gradients of each group in place.

        Args:
            clip_groups: How the groups are clipped.
            parameters: Those of the optimizer that have a gradient.
            norms: The norms of their gradients.
            norm_type: The p of these norms.
            names_of: Returns the qualified names of parameters.

        Returns:
            The norm of all gradients after clipping, and whether any was clipped (a bool); both of shape ().
        """
        norms_after, was_clipped = [], []
        for group in self._groups_of(clip_groups, parameters, names_of):
            norm = group.norm(norms, norm_type)
            if group.method is None:
                norms_after.append(norm)
                continue
            threshold = self.thresholds.setdefault(group.label, group.method.new_threshold())
            result = group.method.clip_(group.parameters, norm, norm_type, threshold)
            after = result.norm_after
            norms_after.append(gradient_norms(group.parameters, norm_type).total if after is None else after)
            was_clipped.append(result.was_clipped)
        if len(norms_after) == 1:  # not a norm of one norm, which would round
            return norms_after[0], was_clipped[0] if was_clipped else torch.zeros_like(norms.total, dtype=torch.bool)
        return torch.linalg.vector_norm(torch.stack(norms_after), norm_type), torch.stack(was_clipped).any()

    def has_too_many_skips(self, limit: int, norms: GradientNorms, *, is_known: bool) -> bool:
        """Whether more than `limit` steps in a row were skipped.

        Args:
            limit: The most steps in a row that may be skipped.
            norms: The norms of the present step.
            is_known: Whether the host knows that the present step is skipped; else the counts are read from their
                device only every `limit` steps.
        """
        finite = norms.per_parameter.isfinite()
        before = self.finite_at_skip
        if before is None or before.shape != finite.shape:
            self.finite_at_skip = finite
        else:  # a step that was not skipped says nothing about the layers
            self.finite_at_skip = torch.where(self.counts.consecutive > 0, finite, before)
        return (is_known or self.counts.steps % limit == 0) and bool(self.counts.most_consecutive > limit)

    def _groups_of(
        self, clip_groups: ClipGroups, parameters: Sequence[Tensor], names_of: Callable[[Sequence[Tensor]], list[str]]
    ) -> list[ClipGroup]:
        """Split the parameters into groups, again only if other parameters than before have a gradient."""
        ids = [id(parameter) for parameter in parameters]
        if ids != self._parameter_ids:
            names = [] if clip_groups.is_single else names_of(parameters)
            self._parameter_ids, self._groups = ids, clip_groups.split(parameters, names)
        return self._groups

    def __getstate__(self) -> dict[str, Any]:
        # a copy that is made in the middle of a fit takes neither parameters nor hooks along
        copy = ClipState()
        copy.counts, copy.thresholds = self.counts, self.thresholds
        return vars(copy)


def states_to_dict(states: Mapping[int, ClipState]) -> dict[str, Any]:
    """Return the counts of each optimizer, and what the thresholds have learnt, for a checkpoint."""
    thresholds = {
        f"{index}:{label}": learnt
        for index, state in states.items()
        for label, threshold in state.thresholds.items()
        if (learnt := threshold.state_dict())
    }
    counts = {index: state.counts.state_dict() for index, state in states.items() if state.counts.steps}
    return {"counts": counts, "thresholds": thresholds}


def load_states(states: Mapping[int, ClipState], saved: Mapping[str, Any], clip_groups: ClipGroups) -> list[str]:
    """Restore what `states_to_dict` returned.

    Args:
        states: The states to restore; each index gives one.
        saved: What was returned.
        clip_groups: How the groups are clipped now.

    Returns:
        The keys of thresholds that were learnt by another method, and are dropped.
    """
    dropped = []
    for index, counts in saved["counts"].items():
        states[index].counts.load_state_dict(counts)
    for key, learnt in saved["thresholds"].items():
        index, _, label = key.partition(":")
        threshold = clip_groups.new_threshold(label)
        if threshold.state_dict().keys() <= learnt.keys() and not isinstance(threshold, NoThreshold):
            threshold.load_state_dict(learnt)
            states[int(index)].thresholds[label] = threshold
        else:
            dropped.append(key)
    return dropped
