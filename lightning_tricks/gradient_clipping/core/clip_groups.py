"""Groups of parameters that are clipped together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_tricks._shared.patterns import Pattern
from lightning_tricks._shared.text import list_names
from lightning_tricks.gradient_clipping.core.adaptive_thresholds import NoThreshold, Threshold
from lightning_tricks.gradient_clipping.core.clipping import GradientNorms
from lightning_tricks.gradient_clipping.core.methods import ClipMethod


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

    def new_threshold(self, label: str) -> Threshold:
        """Return a new threshold of a group's method; `NoThreshold` for an unknown label."""
        return self._methods[label].new_threshold() if label in self._methods else NoThreshold()

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
                torch.tensor(members, device=parameters[0].device),
            )
            for (label, excluded), members in indices_by_label.items()
        ]
