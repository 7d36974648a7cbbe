"""Matches: which tensors of a file become which of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from lightning_tricks.checkpoint_remapping.core.matching.layers import Layer, Shape
from lightning_tricks.checkpoint_remapping.core.remapping import FUSION

SAME_NAME = "the same name"
CONVERSION = "the conversion of"  # how the reason of a match begins that a table of names made
FUSED = "taken to be query, key and value, one after another"

GATED = "taken to be the gate and the input of each expert, one after another"


def joined_shape(parts: Sequence[Shape]) -> Shape:
    """Return the shape of tensors one after another."""
    return (sum(shape[0] for shape in parts), *parts[0][1:])


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


def matches_of_layers(source: Layer, target: Layer, reason: str, doubt: str = "") -> list[Match]:
    """Return the matches of the tensors of two layers, with the transposition and the shape that each needs.

    Args:
        source: The layer of the file.
        target: The layer of the model.
        reason: Why they belong together.
        doubt: What makes the match a weak one.
    """
    matches = []
    for tensor, (sources, shape) in source.tensors.items():
        if tensor not in target.tensors:
            continue
        targets, wanted = target.tensors[tensor]
        transpose = tensor == "weight" and source.transposed != target.transposed
        if transpose and max(len(sources), len(targets)) > 1:
            continue  # a rule cannot transpose what it fuses or splits
        got = shape[:-2] + shape[:-3:-1] if transpose else shape
        got = joined_shape(source.parts[tensor]) if len(sources) > 1 else got
        parts = target.parts.get(tensor, [])
        wanted = joined_shape(parts) if len(targets) > 1 else wanted
        new = None if got == wanted else wanted
        sizes = tuple(part[0] for part in parts) if len({part[0] for part in parts}) > 1 else None
        why = doubt or source.taken_for or target.taken_for
        matches.append(
            Match(
                sources,
                targets,
                transpose,
                new,
                f"{reason}; {why}" if why else reason,
                "weak" if why else "strong",
                sizes,
            )
        )
    return matches
