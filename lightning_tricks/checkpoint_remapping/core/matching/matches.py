"""Matches: which tensors of a file become which of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from lightning_tricks._shared.text import format_shape
from lightning_tricks.checkpoint_remapping.core.remapping import FUSION

Shape = tuple[int, ...]
Prefixes = tuple[str, str]  # of the names in the file, and of those in the model; without the dot
SAME_NAME = "the same name"
CONVERSION = "the conversion of"  # how the reason of a match begins that a table of names made
FUSED = "taken to be query, key and value, one after another"


@dataclass(frozen=True)
class Match:
    """Which tensors of a file become which of a model.

    Attributes:
        sources: Names in the file; several are fused.
        targets: Names in the model; several are made by a split.
        transpose: Whether the last two dimensions are swapped.
        shape: The new shape, None where it does not change; before a split and behind a fusion.
        sizes: The lengths of the parts of a split, None where they are equal.
        reason: Why these tensors belong together.
        strength: How strong that is. `"strong"` are rules, equal names, conversions, words, numbers behind the same
            word, and sizes that no other layer has; `"weak"` are neighbors, numbers behind different words, and layouts
            that are taken for granted.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    transpose: bool = False
    shape: Shape | None = None
    reason: str = ""
    strength: Literal["strong", "weak"] = "strong"
    sizes: tuple[int, ...] | None = None
    _ruled: tuple[str, ...] = field(default=(), repr=False)  # the names that rules made of the sources

    @property
    def ruled(self) -> tuple[str, ...]:
        """The names of the sources after the caller's rules, which are those in the file where no rule changed them."""
        return self._ruled or self.sources

    def with_names_in_file(self, origins: Mapping[str, str]) -> Match:
        """Return the match with the names in the file as sources, of those that rules made."""
        if origins.keys().isdisjoint(self.sources):
            return self
        names = tuple(origin for source in self.sources for origin in origins.get(source, source).split(FUSION))
        reason = "a rule" if self.reason in ("a rule", SAME_NAME) else f"a rule, then {self.reason}"
        return replace(self, sources=names, reason=reason, _ruled=self.sources)


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


@dataclass
class Matching:
    """All matches of a file and a model.

    Attributes:
        matches: What was matched.
        ambiguous: (names in the file, names in the model) that could be matched in several ways.
    """

    matches: list[Match] = field(default_factory=list)
    ambiguous: list[tuple[list[str], list[str]]] = field(default_factory=list)

    def sources(self) -> set[str]:
        """Return the names in the file that have a match."""
        return {name for match in self.matches for name in match.sources}

    def targets(self) -> set[str]:
        """Return the names in the model that have a match."""
        return {name for match in self.matches for name in match.targets}
