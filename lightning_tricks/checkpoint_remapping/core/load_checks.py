"""Refuse to load weights that do not fit a model, with the argument that would allow it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_tricks._shared.patterns import Pattern
from lightning_tricks._shared.text import list_names
from lightning_tricks.checkpoint_remapping.core.errors import (
    AmbiguousAlignmentError,
    CheckpointError,
    NothingLoadedError,
)
from lightning_tricks.checkpoint_remapping.core.matching.alignment import Alignment, Mismatch
from lightning_tricks.checkpoint_remapping.core.matching.alignment_report import describe_ambiguity
from lightning_tricks.checkpoint_remapping.core.matching.synonyms import is_computed


def parse_patterns(argument: str, patterns: str | Iterable[str]) -> list[Pattern]:
    """Return the patterns of an argument.

    Raises:
        TypeError: If it is not a pattern or a list of patterns.
    """
    if isinstance(patterns, str):
        patterns = (patterns,)
    if not isinstance(patterns, Iterable):
        raise TypeError(f"{argument} must be a pattern or a list of patterns, got {patterns!r}.")
    return [Pattern(pattern) for pattern in patterns]


def matches_any(patterns: Iterable[Pattern], name: str) -> bool:
    """Whether one of several patterns matches a name."""
    return any(pattern.matches(name) for pattern in patterns)


@dataclass(frozen=True)
class Allowed:
    """Patterns of the names that need not fit."""

    missing: Sequence[Pattern]
    unexpected: Sequence[Pattern]
    mismatched: Sequence[Pattern]

    def check(
        self, source: str, model: str, alignment: Alignment, mismatched: Sequence[Mismatch], num_loaded: int
    ) -> None:
        """Check what does not fit.

        Args:
            source: Name of the file.
            model: Name of the model's class.
            alignment: What was found.
            mismatched: Tensors of other shapes or kinds, which keep their values.
            num_loaded: Number of tensors that would load.

        Raises:
            AmbiguousAlignmentError: If tensors are missing because they could be matched in several ways.
            NothingLoadedError: If no tensor would load.
            CheckpointError: If something that does not fit is not allowed.
        """
        missing = [n for n in alignment.missing if not is_computed(n) and not matches_any(self.missing, n)]
        if alignment.ambiguous and missing:
            raise AmbiguousAlignmentError(f"{source} does not load into {model}: {describe_ambiguity(alignment)}")
        unexpected = [name for name in alignment.unexpected if not matches_any(self.unexpected, name)]
        wrong = [mismatch for mismatch in mismatched if not matches_any(self.mismatched, mismatch.target)]
        problems = [*_mismatch_problem(wrong), *_problem("missing in the file", missing, "allow_missing")]
        problems += _problem("left over in the file", unexpected, "allow_unexpected")
        if not num_loaded:
            others = f" ({problems[0]})" if wrong else ""
            raise NothingLoadedError(f"No tensor of {source} fits {model}{others}: {alignment.diagnosis}")
        if problems:
            raise CheckpointError(
                f"{source} does not fit {model}, which was not modified. {'; '.join(problems)}. {num_loaded} of "
                f"{alignment.total} tensors would load: {alignment.diagnosis}"
            )


def check_tied(model_tensors: Mapping[str, torch.Tensor], loaded: Mapping[str, Any]) -> None:
    """Check that the names of one tied tensor get equal values.

    Raises:
        CheckpointError: If they do not.
    """
    first: dict[int, str] = {}
    for name in loaded:
        other = first.setdefault(id(model_tensors[name]), name)
        if other != name and not torch.equal(loaded[name], loaded[other]):
            raise CheckpointError(
                f"{other} and {name} are one tensor in the model and two different ones in the checkpoint: untie them, "
                "or drop one with a rule."
            )


def _mismatch_problem(wrong: Sequence[Mismatch]) -> list[str]:
    positions = [mismatch.target for mismatch in wrong if "pos" in mismatch.target]
    resize = f", interpolate={_suggested_patterns(positions)} resizes positions" if positions else ""
    names = [mismatch.target for mismatch in wrong]
    return _problem("of other shapes or kinds", names, "allow_mismatched", list(map(str, wrong)), resize)


def _problem(
    what: str, names: Sequence[str], remedy: str, shown: Sequence[str] | None = None, more: str = ""
) -> list[str]:
    if not names:
        return []
    allowed = f"{remedy}={_suggested_patterns(names)} allows that{more}"
    tensors = "1 tensor is" if len(names) == 1 else f"{len(names)} tensors are"
    return [f"{tensors} {what}: {list_names(shown or names)} ({allowed})"]


def _suggested_patterns(names: Sequence[str]) -> list[str]:
    parents = dict.fromkeys(f"{name.rpartition('.')[0]}.*" if "." in name else name for name in names)
    tops = dict.fromkeys(f"{name.partition('.')[0]}.*" if "." in name else name for name in names)
    return list(parents if len(parents) <= 3 else tops)
