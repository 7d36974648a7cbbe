"""Groups of parameters that are clipped together, and what clipping remembers of each optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_tricks._shared.patterns import Pattern
from lightning_tricks._shared.text import list_names
from lightning_tricks.gradient_clipping.core.clipping import GradientNorms, gradient_norms
from lightning_tricks.gradient_clipping.core.methods import ClipMethod, Threshold
from lightning_tricks.gradient_clipping.core.step_skipping import (
    hold_schedulers,
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
        finite_at_skip: Which gradients were finite when a step was last skipped; shape (n,).
    """

    def __init__(self) -> None:
        self.counts = StepCounts()
        self.thresholds: dict[str, Threshold | None] = {}
        self._forget_fit()

    def _forget_fit(self) -> None:
        self._restore_schedulers: Callable[[], None] = _do_nothing  # of a skipped step
        self._end_skip: Callable[[], None] = _do_nothing
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
        end, self._end_skip = self._end_skip, _do_nothing
        end()

    def skip_step_(
        self, optimizer: Optimizer, nonfinite: Tensor, *, by_scaler: bool, schedulers: list[Any] | None
    ) -> bool:
        """Skip the optimizer's next step if its gradients are not finite.

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
            self._restore_schedulers = hold_schedulers(optimizer, schedulers)
        if not by_scaler:
            self._end_skip = skip_step_(optimizer)
        return True

    def restore_schedulers(self) -> None:
        """Restore the schedulers of a skipped step."""
        restore, self._restore_schedulers = self._restore_schedulers, _do_nothing
        restore()

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


def _do_nothing() -> None: ...


def states_to_dict(states: Mapping[int, ClipState]) -> dict[str, Any]:
    """Return the counts of each optimizer, and what the thresholds have learnt, for a checkpoint."""
    thresholds = {
        f"{index}:{label}": learnt
        for index, state in states.items()
        for label, threshold in state.thresholds.items()
        if threshold is not None and (learnt := threshold.state_dict())
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
        if threshold is not None and threshold.state_dict().keys() <= learnt.keys():
            threshold.load_state_dict(learnt)
            states[int(index)].thresholds[label] = threshold
        else:
            dropped.append(key)
    return dropped


class ClipGroup(NamedTuple):
    """Parameters that are clipped together.

    Attributes:
        label: The pattern that the parameters match, or `ClipGroups.REST`.
        method: How they are clipped; None if they are not.
        parameters: The parameters of the group that have a gradient.
        indices: Their indices among all parameters that have a gradient, shape (n,); None if the group has them all.
    """

    label: str
    method: ClipMethod | None
    parameters: list[Tensor]
    indices: Tensor | None

    def norm(self, norms: GradientNorms, norm_type: float) -> Tensor:
        """Return the norm of the group's gradients, shape (), from the norms of all gradients."""
        if self.indices is None:
            return norms.total
        total: Tensor = torch.linalg.vector_norm(norms.per_parameter[self.indices], norm_type)
        return total


class ClipGroups:
    """Assigns parameters to groups by the first pattern that matches their qualified name.

    Args:
        methods: Pattern -> method.
        rest: The method for the parameters that no pattern matches.
    """

    REST = "the rest"  # also in checkpoints

    def __init__(self, methods: Mapping[str, ClipMethod], rest: ClipMethod) -> None:
        self._methods = {**methods, self.REST: rest}
        self._patterns = [Pattern(text) for text in methods]
        self._excludes = {label: [Pattern(text) for text in m.exclude] for label, m in self._methods.items()}

    @property
    def is_single(self) -> bool:
        """Whether all parameters form one group."""
        return not self._patterns and not self._excludes[self.REST]

    def label_of(self, name: str) -> tuple[str, bool]:
        """Return the label of a name's group, and whether the group's method excludes the name."""
        label = next((pattern.text for pattern in self._patterns if pattern.matches(name)), self.REST)
        return label, any(pattern.matches(name) for pattern in self._excludes[label])

    def new_threshold(self, label: str) -> Threshold | None:
        """Return a new threshold of a group's method; None if it has none, or for an unknown label."""
        return self._methods[label].new_threshold() if label in self._methods else None

    def report(self, sizes: Mapping[str, int]) -> str:
        """Describe which parameters each group has and how they are clipped.

        Args:
            sizes: Qualified name -> number of elements, for all parameters of a model.

        Raises:
            ValueError: If a pattern matches nothing, or only what earlier patterns match.
        """
        labels = {name: self.label_of(name) for name in sizes}
        for label, method in self._methods.items():
            patterns = [label] * (label != self.REST) + list(method.exclude)
            for pattern in patterns:
                excluded = pattern != label
                if (label, excluded) not in labels.values() or not any(map(Pattern(pattern).matches, sizes)):
                    raise ValueError(
                        f"pattern {pattern!r} matches none of the {len(sizes)} parameters that no earlier pattern "
                        f"matches: {list_names(sizes, 5)}"
                    )
        said = []
        for label, method in self._methods.items():
            members = [name for name, found in labels.items() if found == (label, False)]
            if members or label != self.REST:
                values = sum(sizes[name] for name in members)
                said.append(f"{label}: {len(members)} tensors ({values:,} values) by {method}")
        left = [name for name, (_, excluded) in labels.items() if excluded]
        return "; ".join(said + [f"excluded: {', '.join(left)}"] * bool(left))

    def split(self, parameters: Sequence[Tensor], names: Sequence[str]) -> list[ClipGroup]:
        """Split parameters, all of which have a gradient, into groups by their qualified names."""
        if self.is_single:
            return [ClipGroup(self.REST, self._methods[self.REST], list(parameters), None)]
        indices_by_label: dict[tuple[str, bool], list[int]] = {}
        for index, name in enumerate(names):
            indices_by_label.setdefault(self.label_of(name), []).append(index)
        return [
            ClipGroup(
                label,
                None if excluded else self._methods[label],
                [parameters[index] for index in members],
                torch.tensor(members, device="cpu").to(parameters[0].device, non_blocking=True),
            )
            for (label, excluded), members in indices_by_label.items()
        ]
