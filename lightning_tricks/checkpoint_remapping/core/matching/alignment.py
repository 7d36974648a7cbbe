"""`Alignment`: what `align` found, as rules and applied to tensors."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lightning_tricks._shared.text import format_shape
from lightning_tricks.checkpoint_remapping.core.matching.alignment_report import (
    Proposals,
    alignment_table,
    summary_line,
)
from lightning_tricks.checkpoint_remapping.core.matching.layers import Shape
from lightning_tricks.checkpoint_remapping.core.matching.matches import Match
from lightning_tricks.checkpoint_remapping.core.remapping import Remapped, remap_keys, renamed_from, strip_wrappers
from lightning_tricks.checkpoint_remapping.core.rules import RemapRule, write_rules

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Mismatch:
    """A tensor of the file whose name fits one of the model and whose shape, or kind of numbers, does not."""

    source: str
    source_shape: Shape
    target: str
    target_shape: Shape
    kinds: tuple[str, str] | None = None  # of the file and the model, where these differ

    def __str__(self) -> str:
        if self.kinds is not None:
            return f"{self.target} ({self.kinds[1]} in the model, {self.kinds[0]} in the file)"
        shapes = f"{format_shape(self.target_shape)} in the model, {format_shape(self.source_shape)} in the file"
        return f"{self.target} ({shapes})"


@dataclass(frozen=True)
class Alignment:
    """Which tensor of a checkpoint becomes which of a model, and why.

    Attributes:
        matches: The matches, each with its reason; names in the file are without the parts that wrappers add.
        missing: Names of the model that the checkpoint has no tensor for.
        unexpected: Names of the checkpoint, without wrappers' parts, that the model has no tensor for.
        mismatched: Tensors whose shapes differ.
        ambiguous: (names in the checkpoint, names in the model) that could be matched in several ways.
        diagnosis: What was found, in words.
        computed: Those missing that the model computes for itself, such as BatchNorm's counters.
        proposals: Rules for what has no match.
    """

    matches: tuple[Match, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[Mismatch, ...]
    ambiguous: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    diagnosis: str
    computed: tuple[str, ...]
    proposals: Proposals = field(repr=False, compare=False)
    _shapes: Mapping[str, Shape] = field(repr=False)  # of the model's tensors
    _clean_names: Mapping[str, str | None] = field(repr=False)
    _prefixes: tuple[str, str] | None
    _first: tuple[Any, ...]  # the steps of rules that were applied before
    _origins: Mapping[str, str] = field(repr=False)  # names in the file by what these steps made

    @property
    def loaded(self) -> int:
        """Number of tensors of the model that have a match."""
        return sum(len(match.targets) for match in self.matches)

    @property
    def total(self) -> int:
        """Number of tensors of the model."""
        return len(self._shapes)

    @property
    def loaded_parameters(self) -> int:
        """Number of elements in the tensors that have a match."""
        return sum(math.prod(self._shapes[name]) for match in self.matches for name in match.targets)

    @property
    def total_parameters(self) -> int:
        """Number of elements in all tensors of the model."""
        return sum(map(math.prod, self._shapes.values()))

    @property
    def renamed(self) -> dict[str, str]:
        """The model's names by the file's, where they differ; of fused and split tensors joined by `" + "`."""
        names = [(" + ".join(map(self._origin, match.ruled)), match.targets) for match in self.matches]
        return renamed_from((source, target) for source, targets in names for target in targets)

    def name_in_file(self, clean: str) -> str:
        """Return the name that a tensor has in the file, by its name without wrappers' parts."""
        return self._names_in_file.get(clean, clean)

    def _origin(self, clean: str) -> str:
        name = self.name_in_file(clean)
        return self._origins.get(name, name)

    @cached_property
    def _names_in_file(self) -> dict[str | None, str]:
        return {clean: name for name, clean in self._clean_names.items()}

    @property
    def lacking(self) -> list[str]:
        """The missing names that the model does not compute for itself."""
        return [name for name in self.missing if name not in self.computed]

    @property
    def names_in_model(self) -> list[str]:
        """The names of the model's tensors."""
        matched = (target for match in self.matches for target in match.targets)
        return [*matched, *(mismatch.target for mismatch in self.mismatched), *self.missing]

    @property
    def clean_names_in_file(self) -> list[str]:
        """The names of the file's tensors, without wrappers' parts."""
        return [clean for clean in self._clean_names.values() if clean is not None]

    @property
    def by_prefix(self) -> bool:
        """Whether names differ only in wrappers' parts and in one prefix."""
        clean = strip_wrappers(name for match in self.matches for name in match.targets)
        return self._prefixes is not None or all(m.ruled == (clean[m.targets[0]],) for m in self.matches)

    @property
    def reshaped(self) -> list[str]:
        """Names of the model's tensors that get another shape than those of the file have."""
        return [name for match in self.matches if match.transpose or match.shape for name in match.targets]

    @property
    def rules(self) -> list[Any]:
        """The rules that do the same: prefixes where these are enough, else one for each tensor.

        They end with `"only"` where both sides have tensors left over, which nothing else should match.
        """
        steps = [step for step in self._first if step != "only"]
        if any(old != new for old, new in self._clean_names.items()):
            steps.append("wrappers")
        only = ["only"] * ("only" in self._first or bool(self.missing and self.unexpected))
        if self._prefixes is None:
            resized = [RemapRule(mismatch.source, mismatch.target) for mismatch in self.mismatched]
            rules = [rule for rule in (*map(_rule, self.matches), *resized) if rule.source != rule.target]
            taken = {target for match in self.matches for target in match.targets}
            drops = [RemapRule(name, None) for name in self.unexpected if name in taken]
            return [*steps, [*rules, *drops], *only]
        source, target = self._prefixes
        if source:
            steps.append(RemapRule(f"{source}.", f"{target}." if target else ""))
        elif target:
            steps.append(RemapRule("*", f"{target}.*"))
        return [*steps, *only]

    def apply(self, state_dict: Mapping[str, Any]) -> Remapped:
        """Return the tensors that have a match, under the model's names and in its shapes."""
        return self.apply_to_ruled(remap_keys(state_dict, self._first) if self._first else state_dict)

    def apply_to_ruled(self, tensors: Mapping[str, Any]) -> Remapped:
        """Do the same with tensors that the caller's rules were applied to before."""
        used = {name for match in self.matches for name in match.ruled}
        clean = {self._clean_names.get(name, name): tensor for name, tensor in tensors.items()}
        return remap_keys(
            {name: tensor for name, tensor in clean.items() if name in used}, [[_rule(match) for match in self.matches]]
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the rules to a YAML file, to be read, edited and given to `load_weights(model, path, rules=...)`."""
        write_rules(path, self.rules, comment=self.diagnosis)

    def report(self, limit: int | None = None) -> Table:
        """Return a rich table of all tensors and the reasons of the matches.

        Args:
            limit: Maximum number of matches in the table; None shows all. What has no match is always shown.
        """
        return alignment_table(self, limit)

    def summary(self) -> str:
        """Return the counts in one line."""
        return summary_line(self)


def _rule(match: Match) -> RemapRule:
    source, target = (names if len(names) > 1 else names[0] for names in (match.ruled, match.targets))
    return RemapRule(source, target, match.transpose, match.shape, sizes=match.sizes)
