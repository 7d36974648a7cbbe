"""Refuse to load weights that do not fit a model, with the argument that would allow it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lightning_tricks._shared.patterns import LIST_NUMBER, Pattern
from lightning_tricks._shared.text import list_names
from lightning_tricks.checkpoint_remapping.core.errors import (
    AmbiguousAlignmentError,
    CheckpointError,
    NothingLoadedError,
)
from lightning_tricks.checkpoint_remapping.core.matching.alignment import Alignment, Mismatch
from lightning_tricks.checkpoint_remapping.core.matching.alignment_report import (
    ambiguous_cases,
    describe_ambiguity,
    in_words,
)


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


def matches_any(patterns: Iterable[Pattern], name: str) -> bool:
    """Whether one of several patterns matches a name."""
    return any(pattern.matches(name) for pattern in patterns)


@dataclass(frozen=True)
class Allowed:
    """Patterns of the names that need not fit."""

    missing: Sequence[Pattern]
    unexpected: Sequence[Pattern]
    mismatched: Sequence[Pattern]

    def check_ruled(self, source: str, model: str, ruled: Sequence[Mismatch]) -> None:
        """Check that the tensors that rules lead to have the shapes and kinds of the model's.

        Raises:
            CheckpointError: If one has another shape or kind, and that is not allowed.
        """
        wrong = [mismatch for mismatch in ruled if not matches_any(self.mismatched, mismatch.target)]
        if wrong:
            raise CheckpointError(
                f"{source} does not fit {model}, which was not modified: rules lead to tensors of other shapes or "
                f"kinds: {list_names(map(str, wrong))}. Correct the rules; a RemapRule can transpose and reshape."
            )

    def check(self, source: str, model: str, alignment: Alignment, num_loaded: int) -> None:
        """Check what does not fit.

        Args:
            source: Name of the file.
            model: Name of the model's class.
            alignment: What was found.
            num_loaded: Number of tensors that would load.

        Raises:
            AmbiguousAlignmentError: If tensors are missing because they could be matched in several ways.
            NothingLoadedError: If no tensor would load.
            CheckpointError: If something that does not fit is not allowed.
        """
        missing = [n for n in alignment.missing if n not in alignment.computed and not matches_any(self.missing, n)]
        if ambiguous_cases(alignment, missing):
            raise AmbiguousAlignmentError(
                f"{source} does not load into {model}: {describe_ambiguity(alignment, missing)}"
            )
        unexpected = [name for name in alignment.unexpected if not matches_any(self.unexpected, name)]
        wrong = [mismatch for mismatch in alignment.mismatched if not matches_any(self.mismatched, mismatch.target)]
        # What a model computes for itself may match a pattern
        in_model = [name for name in alignment.names_in_model if name not in alignment.computed]
        matched = [name for match in alignment.matches for name in match.sources]
        in_file = [*matched, *(mismatch.source for mismatch in alignment.mismatched), *alignment.unexpected]
        problems = [
            *_mismatch_problem(wrong, in_model),
            *_problem("missing in the file", missing, "allow_missing", in_model),
            *_problem("left over in the file", unexpected, "allow_unexpected", in_file),
        ]
        rule = alignment.proposals.for_the_rest() if alignment.proposals and (missing or wrong) else None
        problems += [f"if one of them is another's, {in_words(rule)}"] if rule else []
        if not num_loaded:
            others = f" ({'; '.join(problems[-1:] if rule else problems[:1])})" if wrong or rule else ""
            raise NothingLoadedError(f"No tensor of {source} fits {model}{others}: {alignment.diagnosis}")
        if problems:
            is_adapted = any(".lora_" in f".{name}" for name in unexpected)
            remedy = "The file has changes of LoRA: call add_lora(model) first, as in training. " * is_adapted
            raise CheckpointError(
                f"{source} does not fit {model}, which was not modified. {'; '.join(problems)}. {remedy}{num_loaded} "
                f"of {alignment.total} tensors would load: {alignment.diagnosis}"
            )


_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)\.(\w+)")


@contextmanager
def explaining_shards(source: str) -> Iterator[None]:
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


def check_values(source: str, loaded: Mapping[str, torch.Tensor]) -> None:
    """Check that what would load has values.

    Raises:
        CheckpointError: If tensors are on the meta device.
    """
    without = [name for name, tensor in loaded.items() if tensor.is_meta]
    if without:
        raise CheckpointError(
            f"{source} has no values for {list_names(without)}: its tensors are on the meta device. Nothing was "
            "loaded. Save the model once it has values, and read the file without map_location='meta'."
        )


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
