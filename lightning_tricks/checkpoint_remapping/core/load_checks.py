"""Refuse to load weights that do not fit a model, with the argument that would allow it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lightning_tricks._shared.patterns import LIST_NUMBER, Pattern
from lightning_tricks._shared.text import list_names
from lightning_tricks.checkpoint_remapping.core.errors import (
    AmbiguousAlignmentError,
    CheckpointError,
    NothingLoadedError,
)
from lightning_tricks.checkpoint_remapping.core.matching.alignment import Mismatch
from lightning_tricks.checkpoint_remapping.core.matching.alignment_report import (
    ambiguous_cases,
    describe_ambiguity,
    in_words,
)

if TYPE_CHECKING:
    from lightning_tricks.checkpoint_remapping.core.load_plan import LoadPlan


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


def suggested_patterns(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return patterns that match these names and, among those known, no others: globs where they are shorter.

    Examples:
        >>> suggested_patterns(["fc.weight", "fc.bias", "a.0.bias", "a.1.bias"], ["a.0.weight", "a.1.weight"])
        ['fc.*', 'a.*.bias']
    """
    wanted = set(names)
    others = [name for name in known if name not in wanted]
    patterns: list[str] = []
    left = list(names)
    while left:
        globs = (glob for glob in _globs(left[0], left) if not any(map(Pattern(glob).matches, others)))
        patterns.append(next(globs, _escaped(left[0])))
        pattern = Pattern(patterns[-1])
        left = [name for name in left if not pattern.matches(name)]
    return patterns


def _globs(name: str, names: Sequence[str]) -> Iterator[str]:
    """Yield globs for a name, from the widest: all below a parent, then names that differ in numbers alone."""
    ends = [found.start() for found in re.finditer(r"\.", name)]
    yield from (f"{_escaped(name[:end])}.*" for end in ends)
    numbered = LIST_NUMBER.sub("*", _escaped(name))
    if sum(map(Pattern(numbered).matches, names)) > 1:
        yield numbered


def _escaped(name: str) -> str:
    return re.sub(r"[*?[]", lambda found: f"[{found[0]}]", name)


def is_position(name: str) -> bool:
    """Whether a name is that of position embeddings."""
    return re.search(r"pos|wpe(\.|$)", name) is not None


@dataclass(frozen=True)
class Allowed:
    """Patterns of the names that need not fit."""

    missing: Sequence[Pattern]
    unexpected: Sequence[Pattern]
    mismatched: Sequence[Pattern]


def check_fit(plan: LoadPlan, allowed: Allowed) -> None:
    """Check that what would load fits the model, and that what does not fit is allowed.

    Raises:
        AmbiguousAlignmentError: If tensors are missing because they could be matched in several ways.
        NothingLoadedError: If no tensor would load.
        CheckpointError: If something that does not fit is not allowed, has no values, or differs in tied tensors.
    """
    with _explaining_shards(plan.source):
        _check_names_and_shapes(plan, allowed)
        _check_values(plan)
        _check_tied(plan)


def _check_names_and_shapes(plan: LoadPlan, allowed: Allowed) -> None:
    found, model = plan.alignment, type(plan.module).__name__
    wrong = [m for m in found.mismatched if not _matches_any(allowed.mismatched, m.target)]
    ruled = [mismatch for mismatch in wrong if mismatch.source in plan.rules.pinned]
    if ruled:
        raise CheckpointError(
            f"{plan.source} does not fit {model}, which was not modified: rules lead to tensors of other shapes or "
            f"kinds: {list_names(map(str, ruled))}. Correct the rules; a RemapRule can transpose and reshape."
        )
    missing = [name for name in found.lacking if not _matches_any(allowed.missing, name)]
    if ambiguous_cases(found, missing):
        raise AmbiguousAlignmentError(f"{plan.source} does not load into {model}: {describe_ambiguity(found, missing)}")
    unexpected = [name for name in found.unexpected if not _matches_any(allowed.unexpected, name)]
    # What a model computes for itself may match a pattern
    in_model = [name for name in found.names_in_model if name not in found.computed]
    matched = [name for match in found.matches for name in match.ruled]
    in_file = [*matched, *(mismatch.source for mismatch in found.mismatched), *found.unexpected]
    problems = [
        *_mismatch_problem(wrong, in_model),
        *_problem("missing in the file", missing, "allow_missing", in_model),
        *_problem("left over in the file", unexpected, "allow_unexpected", in_file),
    ]
    rule = found.proposals.for_the_rest() if missing or wrong else None
    problems += [f"if one of them is another's, {in_words(rule)}"] if rule else []
    if not plan.loaded:
        others = f" ({'; '.join(problems[-1:] if rule else problems[:1])})" if wrong or rule else ""
        raise NothingLoadedError(f"No tensor of {plan.source} fits {model}{others}: {found.diagnosis}")
    if problems:
        is_adapted = any(".lora_" in f".{name}" for name in unexpected)
        remedy = "The file has changes of LoRA: call add_lora(model) first, as in training. " * is_adapted
        raise CheckpointError(
            f"{plan.source} does not fit {model}, which was not modified. {'; '.join(problems)}. {remedy}"
            f"{len(plan.loaded)} of {found.total} tensors would load: {found.diagnosis}"
        )


def _check_values(plan: LoadPlan) -> None:
    without = [name for name, tensor in plan.loaded.items() if tensor.is_meta]
    if without:
        raise CheckpointError(
            f"{plan.source} has no values for {list_names(without)}: its tensors are on the meta device. Nothing was "
            "loaded. Save the model once it has values, and read the file without map_location='meta'."
        )


def _check_tied(plan: LoadPlan) -> None:
    """Check that the names of one tied tensor get equal values."""
    first: dict[int, str] = {}
    for name in plan.loaded:
        other = first.setdefault(id(plan.model_tensors[name]), name)
        if other != name and not torch.equal(plan.loaded[name], plan.loaded[other]):
            raise CheckpointError(
                f"{other} and {name} are one tensor in the model and two different ones in the checkpoint: untie them, "
                "or drop one with a rule."
            )


_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)\.(\w+)")


@contextmanager
def _explaining_shards(source: str) -> Iterator[None]:
    """Add to an error that a file is one shard of several, with the name of the index that lists them all."""
    try:
        yield
    except CheckpointError as error:
        name = source.rpartition("/")[2]
        shard = _SHARD.fullmatch(name)
        if not shard or int(shard[3]) < 2:
            raise
        index = f"{source.removesuffix(name)}{shard[1]}.{shard[4]}.index.json"
        raise type(error)(
            f"{name} is shard {int(shard[2])} of {int(shard[3])} of a model: give the index of all shards, {index}, "
            f"instead. {error}"
        ) from error


def _matches_any(patterns: Iterable[Pattern], name: str) -> bool:
    return any(pattern.matches(name) for pattern in patterns)


def _mismatch_problem(wrong: Sequence[Mismatch], known: Sequence[str]) -> list[str]:
    positions = [mismatch.target for mismatch in wrong if mismatch.kinds is None and is_position(mismatch.target)]
    resize = f", interpolate={suggested_patterns(positions, known)} resizes positions" if positions else ""
    names = [mismatch.target for mismatch in wrong]
    return _problem("of other shapes or kinds", names, "allow_mismatched", known, list(map(str, wrong)), resize)


def _problem(
    what: str,
    names: Sequence[str],
    remedy: str,
    known: Sequence[str],
    shown: Sequence[str] | None = None,
    more: str = "",
) -> list[str]:
    if not names:
        return []
    allowed = f"{remedy}={suggested_patterns(names, known)} allows that{more}"
    tensors = "1 tensor is" if len(names) == 1 else f"{len(names)} tensors are"
    return [f"{tensors} {what}: {list_names(shown or names)} ({allowed})"]
