"""Groups of parameters that are clipped together, and what clipping remembers of each optimizer, such as counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_tricks._shared.patterns import Pattern
from lightning_tricks._shared.text import list_names
from lightning_tricks.gradient_clipping.core.clipping import GradientNorms, gradient_norms, is_nonfinite
from lightning_tricks.gradient_clipping.core.methods import ClipMethod, ClipResult, Threshold
from lightning_tricks.gradient_clipping.core.step_skipping import (
    hold_schedulers,
    skip_step_,
    skip_step_on_device_,
    skips_on_device,
)


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
    ) -> list[tuple[ClipGroup, ClipResult | None]]:
        """Clip the gradients of each group in place.

        Args:
            clip_groups: How the groups are clipped.
            parameters: Those of the optimizer that have a gradient.
            norms: The norms of their gradients.
            norm_type: The p of these norms.
            names_of: Returns the qualified names of parameters.

        Returns:
            Each group with its result; None for a group that is not clipped.
        """
        clipped: list[tuple[ClipGroup, ClipResult | None]] = []
        for group in self._groups_of(clip_groups, parameters, names_of):
            result = None
            if group.method is not None:
                threshold = self.thresholds.setdefault(group.label, group.method.new_threshold())
                norm = group.norm(norms, norm_type)
                result = group.method.clip_(group.parameters, norm, norm_type, threshold)
            clipped.append((group, result))
        return clipped

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


def norm_after(
    clipped: Sequence[tuple[ClipGroup, ClipResult | None]], norms: GradientNorms, norm_type: float
) -> Tensor:
    """Return the norm of all gradients after what `ClipState.clip_` returned, shape (), right after it."""
    each = [_norm_after(group, result, norms, norm_type) for group, result in clipped]
    # not a norm of one norm, which would round
    return each[0] if len(each) == 1 else torch.linalg.vector_norm(torch.stack(each), norm_type)


def _norm_after(group: ClipGroup, result: ClipResult | None, norms: GradientNorms, norm_type: float) -> Tensor:
    if result is None:
        return group.norm(norms, norm_type)
    if result.factor is not None:
        return group.norm(norms, norm_type) * result.factor
    return gradient_norms(group.parameters, norm_type).total if result.norm_after is None else result.norm_after


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
