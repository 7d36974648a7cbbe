"""`align`: which tensor of a file is which of a model, with no rules given; refused where it could be two ways."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_tricks._shared.files import atomic_write
from lightning_tricks._shared.text import format_shape
from lightning_tricks._shared.units import format_si
from lightning_tricks.checkpoint_remapping.core.errors import AmbiguousAlignmentError
from lightning_tricks.checkpoint_remapping.core.files.reading import Checkpoint
from lightning_tricks.checkpoint_remapping.core.matching.layer_grouping import Shape
from lightning_tricks.checkpoint_remapping.core.matching.layer_matching import (
    Match,
    Matching,
    match_by_structure,
    resized,
)
from lightning_tricks.checkpoint_remapping.core.matching.synonyms import is_computed
from lightning_tricks.checkpoint_remapping.core.rules import (
    WRAPPERS,
    Remapped,
    RemapRule,
    remap_keys,
    renamed_from,
    strip_wrappers,
)

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Mismatch:
    """A tensor that is there under a name which fits and with a shape which does not."""

    source: str
    source_shape: Shape
    target: str
    target_shape: Shape

    def __str__(self) -> str:
        shapes = f"{format_shape(self.target_shape)} in the model, {format_shape(self.source_shape)} in the file"
        return f"{self.target} ({shapes})"


@dataclass(frozen=True)
class Alignment:
    """Which tensor of a checkpoint becomes which of a model, and why.

    Attributes:
        matches: Of the names after wrappers were stripped, each with its reason.
        missing: Names of the model that the checkpoint has nothing for.
        unexpected: Names of the checkpoint, without wrappers' parts, that the model has no place for.
        mismatched: Tensors whose shapes differ.
        ambiguous: (names in the checkpoint, names in the model) that could go several ways.
        diagnosis: What was found, in words.
        loaded: Of the model's tensors, how many have a counterpart.
        total: How many tensors the model has.
        loaded_parameters: The numbers in those that have.
        total_parameters: The numbers in all.
    """

    matches: tuple[Match, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[Mismatch, ...]
    ambiguous: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    diagnosis: str
    loaded: int
    total: int
    loaded_parameters: int
    total_parameters: int
    _clean: Mapping[str, str | None] = field(repr=False, default_factory=dict)
    _prefixes: tuple[str, str] | None = None

    @property
    def renamed(self) -> dict[str, str]:
        """The model's names by the file's, where they differ; of fused and split tensors joined by `" + "`."""
        names = [(" + ".join(map(self.name_in_file, match.sources)), match.targets) for match in self.matches]
        return renamed_from((source, target) for source, targets in names for target in targets)

    def name_in_file(self, clean: str) -> str:
        """Return the name that a tensor has in the file, by its name without wrappers' parts."""
        return self._names_in_file.get(clean, clean)

    @cached_property
    def _names_in_file(self) -> dict[str | None, str]:
        return {clean: name for name, clean in self._clean.items()}

    @property
    def by_prefix(self) -> bool:
        """Whether names differ in wrappers' parts and one prefix alone."""
        own = strip_wrappers(name for match in self.matches for name in match.targets)
        return self._prefixes is not None or all(m.sources == (own[m.targets[0]],) for m in self.matches)

    @property
    def reshaped(self) -> list[str]:
        """Names of the model's tensors that get another shape than the file's have."""
        return [name for match in self.matches if match.transpose or match.shape for name in match.targets]

    @property
    def rules(self) -> list[Any]:
        """The rules for `remap_keys` that do the same: prefixes where that is all, else one for each tensor."""
        steps: list[Any] = ["wrappers"] if any(old != new for old, new in self._clean.items()) else []
        if self._prefixes is None:
            taken = {target for match in self.matches for target in match.targets}
            drops = [RemapRule(name, None) for name in self.unexpected if name in taken]
            return [*steps, [rule for rule in (*map(_rule, self.matches), *drops) if rule.source != rule.target]]
        source, target = self._prefixes
        if source:
            steps.append(RemapRule(f"{source}.", f"{target}." if target else ""))
        elif target:
            steps.append(RemapRule("*", f"{target}.*"))
        return steps

    def apply(self, state_dict: Mapping[str, Any]) -> Remapped:
        """Return the tensors that have a place in the model, under its names and in its shapes."""
        used = {name for match in self.matches for name in match.sources}
        clean = {self._clean.get(name, name): tensor for name, tensor in state_dict.items()}
        return remap_keys(
            {name: tensor for name, tensor in clean.items() if name in used}, [[_rule(match) for match in self.matches]]
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the rules as YAML, for a look, a change and `load_weights(model, path, rules=...)`."""
        lines = [f"# {self.diagnosis}", *(_yaml(step) for step in self.rules)] + ["[]"] * (not self.rules)
        with atomic_write(Path(path)) as staged:
            staged.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def report(self, limit: int | None = None) -> Table:
        """Return a rich table of what goes where, and why; of the matches at most `limit`, and everything else."""
        from rich.table import Table

        table = Table(title=self.summary(), caption=self.diagnosis, title_justify="left", caption_justify="left")
        for column in ("in the file", "in the model", "why"):
            table.add_column(column, overflow="fold")
        for match in self.matches[:limit]:
            shape = f", reshaped to {format_shape(match.shape)}" if match.shape else ", transposed" * match.transpose
            table.add_row("\n".join(match.sources), "\n".join(match.targets), match.reason + shape)
        for mismatch in self.mismatched:
            shapes = f"{format_shape(mismatch.source_shape)} and {format_shape(mismatch.target_shape)}"
            table.add_row(mismatch.source, mismatch.target, f"MISMATCHED: {shapes}")
        for name in self.missing:
            table.add_row("", name, "MISSING" + ", the model computes it itself" * is_computed(name))
        for name in self.unexpected:
            table.add_row(name, "", "UNEXPECTED")
        return table

    def summary(self) -> str:
        """Return the counts in a line."""
        return (
            f"{self.loaded}/{self.total} tensors, "
            f"{format_si(self.loaded_parameters)}/{format_si(self.total_parameters)} parameters; "
            f"{len(self.renamed)} renamed, {len(self.reshaped)} reshaped, {len(self.missing)} missing, "
            f"{len(self.unexpected)} unexpected, {len(self.mismatched)} mismatched"
        )


def align(
    model_or_state_dict: torch.nn.Module | Mapping[str, Any], checkpoint: Checkpoint | Mapping[str, Any]
) -> Alignment:
    """Find which tensor of a checkpoint is which of a model, whatever their names.

    Wrappers' parts of names are stripped first. Then names decide, with one prefix on either side if need be; then the
    order of layers, their sizes and the words of their names. A model with other names and a different order of layers
    within its blocks is matched so; two layers that nothing tells apart are not.

    Args:
        model_or_state_dict: The model, or its tensors by name.
        checkpoint: What `read_checkpoint` returned, or tensors by name.

    Raises:
        AmbiguousAlignmentError: If two assignments are equally good.

    Example:
        >>> weights = {f"module.{name}": tensor for name, tensor in torch.nn.Linear(2, 3).state_dict().items()}
        >>> align(torch.nn.Sequential(torch.nn.Linear(2, 3)), weights).renamed
        {'module.weight': '0.weight', 'module.bias': '0.bias'}
    """
    found = find_alignment(shapes_of(model_or_state_dict), shapes_of(checkpoint))
    if found.ambiguous:
        raise AmbiguousAlignmentError(ambiguity(found))
    return found


def shapes_of(tensors: torch.nn.Module | Checkpoint | Mapping[str, Any]) -> dict[str, Shape]:
    """Return the shapes of tensors by name."""
    if isinstance(tensors, Checkpoint | torch.nn.Module):
        tensors = tensors.state_dict if isinstance(tensors, Checkpoint) else tensors.state_dict()
    return {name: tuple(tensor.shape) for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}


def ambiguity(found: Alignment) -> str:
    """Return the sentence about what could go several ways."""
    sources, targets = found.ambiguous[0]
    more = f" (and {len(found.ambiguous) - 1} more such cases)" if len(found.ambiguous) > 1 else ""
    return (
        f"nothing tells which of {listed(sources)} in the checkpoint is which of {listed(targets)} in the model{more}. "
        f"Say it: rules=[({sources[0]!r}, {targets[0]!r}), ...], or submodule=... where one part of the model is meant."
    )


def find_alignment(target: Mapping[str, Shape], source: Mapping[str, Shape], by_name: bool = False) -> Alignment:
    """Return the best alignment, with what is ambiguous; by names alone where `by_name`."""
    clean_source = {name: name for name in source} if by_name else strip_wrappers(source)
    clean_target = strip_wrappers(target)
    names = {new: old for old, new in clean_target.items() if new is not None}  # the model's own
    ours = {new: source[old] for old, new in clean_source.items() if new is not None}
    theirs = {new: target[old] for new, old in names.items()}
    found, prefixes, wrong = _match_names(ours, theirs, by_name)
    lacking = theirs.keys() - _targets(found)
    if not by_name and (found.ambiguous or not all(map(is_computed, lacking))):
        best = _best(found, ours, theirs)
        if best is not found:
            found, prefixes = best, None
    return _alignment(found, ours, theirs, names, clean_source, prefixes, wrong)


def _best(by_names: Matching, ours: Mapping[str, Shape], theirs: Mapping[str, Shape]) -> Matching:
    """Return the matching by names, completed by structure, or the one by structure alone; the one that covers most."""
    everything = match_by_structure(ours, theirs)
    if by_names.ambiguous:
        return everything if _covered(everything) and not everything.ambiguous else by_names
    rest = match_by_structure(
        {name: shape for name, shape in ours.items() if name not in _sources(by_names)},
        {name: shape for name, shape in theirs.items() if name not in _targets(by_names)},
    )
    completed = (
        Matching(by_names.matches + rest.matches, rest.ambiguous) if rest.matches or rest.ambiguous else by_names
    )
    trusted = 2 * _covered(by_names) >= len(theirs)
    return max((completed, everything) if trusted else (everything, completed), key=_covered)  # the first of equals


def _covered(found: Matching) -> int:
    return len(_targets(found))


def _targets(found: Matching) -> set[str]:
    return {name for match in found.matches for name in match.targets}


def _sources(found: Matching) -> set[str]:
    return {name for match in found.matches for name in match.sources}


def _match_names(
    ours: Mapping[str, Shape], theirs: Mapping[str, Shape], by_name: bool
) -> tuple[Matching, tuple[str, str] | None, list[tuple[str, str]]]:
    """Match by names, with the prefix on either side that makes the most of them equal."""
    as_they_are = by_name or all(ours.get(name) == shape for name, shape in theirs.items())
    (source, target), rivals = (("", ""), []) if as_they_are else _best_prefixes(ours, theirs)
    reason = "the same name" if not source + target else f"the same name, with {source or target!r} in front"
    pairs = [(name, other) for name in ours if (other := _moved(name, source, target)) in theirs]
    same = [(name, other) for name, other in pairs if ours[name] == theirs[other]]
    found = Matching([Match((name,), (other,), reason=reason) for name, other in same])
    if rivals:
        sides = (
            [f"{prefix}.*" if prefix else "*" for prefix in dict.fromkeys(side)] for side in zip(*rivals, strict=True)
        )
        found = Matching(ambiguous=[tuple(sides)])  # type: ignore[list-item]
    wrong = [(name, other) for name, other in pairs if ours[name] != theirs[other]]
    return found, (source, target), wrong


def _moved(name: str, source: str, target: str) -> str:
    """Return a name with one prefix instead of another; empty where it has not the first."""
    if source and not name.startswith(f"{source}."):
        return ""
    rest = name[len(source) + 1 :] if source else name
    return f"{target}.{rest}" if target else rest


def _best_prefixes(
    ours: Mapping[str, Shape], theirs: Mapping[str, Shape]
) -> tuple[tuple[str, str], list[tuple[str, str]]]:
    """Return the prefixes (in the file, in the model) that fit most tensors, and all that fit as many."""
    places: dict[tuple[str, Shape], list[str]] = {}
    for name, shape in theirs.items():
        for prefix, rest in _splits(name):
            places.setdefault((rest, shape), []).append(prefix)
    counts: Counter[tuple[str, str]] = Counter()
    for name, shape in ours.items():
        for prefix, rest in _splits(name):
            if prefix and len(places.get((rest, shape), ())) > 64:
                break  # what is left is a layer's leaf, and fits anywhere
            for place in places.get((rest, shape), ()):
                if not prefix or not place or prefix.rpartition(".")[2] != place.rpartition(".")[2]:
                    counts[prefix, place] += 1
    if not counts:
        return ("", ""), []
    most = max(counts.values())
    best = [pair for pair, count in counts.items() if count == most]
    if ("", "") in best or len(best) == 1:
        return (("", "") if ("", "") in best else best[0]), []
    shortest = min(len(source) + len(target) for source, target in best)
    return next(pair for pair in best if len(pair[0]) + len(pair[1]) == shortest), best


def _splits(name: str) -> Iterable[tuple[str, str]]:
    yield "", name
    for position, letter in enumerate(name):
        if letter == ".":
            yield name[:position], name[position + 1 :]


def _alignment(
    found: Matching,
    ours: Mapping[str, Shape],
    theirs: Mapping[str, Shape],
    names: Mapping[str, str],
    clean: Mapping[str, str | None],
    prefixes: tuple[str, str] | None,
    wrong: list[tuple[str, str]],
) -> Alignment:
    sources, targets = _sources(found), _targets(found)
    wrong = [(s, t) for s, t in wrong if s not in sources and t not in targets]
    if prefixes is None:
        seen = sources | {name for name, _ in wrong}
        left = {name: shape for name, shape in ours.items() if name not in seen}
        seen = targets | {name for _, name in wrong}
        wrong += resized(left, {name: shape for name, shape in theirs.items() if name not in seen})
    sources |= {source for source, _ in wrong}
    missing = tuple(names[name] for name in theirs if name not in targets | {target for _, target in wrong})
    unexpected = tuple(name for name in ours if name not in sources and not is_computed(name))
    if prefixes and names.keys() != set(names.values()):
        prefixes = None
    places = {name: place for place, name in enumerate(theirs)}
    matches = sorted(found.matches, key=lambda match: places[match.targets[0]])
    return Alignment(
        matches=tuple(
            Match(m.sources, tuple(names[t] for t in m.targets), m.transpose, m.shape, m.reason) for m in matches
        ),
        missing=missing,
        unexpected=unexpected,
        mismatched=tuple(Mismatch(s, ours[s], names[t], theirs[t]) for s, t in wrong),
        ambiguous=tuple((tuple(mine), tuple(yours)) for mine, yours in found.ambiguous),
        diagnosis=_diagnosis(found, ours, theirs, clean, prefixes, missing),
        loaded=len(targets),
        total=len(theirs),
        loaded_parameters=sum(math.prod(theirs[name]) for name in targets),
        total_parameters=sum(map(math.prod, theirs.values())),
        _clean=clean,
        _prefixes=prefixes,
    )


def _diagnosis(
    found: Matching,
    ours: Mapping[str, Shape],
    theirs: Mapping[str, Shape],
    clean: Mapping[str, str | None],
    prefixes: tuple[str, str] | None,
    missing: tuple[str, ...],
) -> str:
    said = []
    for part, origin in WRAPPERS.items():
        carry = [name for name, new in clean.items() if new != name and part in name.split(".")]
        if carry:
            said.append(f"{_all(carry, clean)} carry `{part}.`: {origin}")
    dropped = [name for name, new in clean.items() if new is None]
    if dropped:
        said.append(f"{len(dropped)} are counters of thop or of averaging ({listed(dropped)}), and were left out")
    source, target = prefixes or ("", "")
    if found.matches and source:
        carry = [name for name in ours if name.startswith(f"{source}.")]
        said.append(f"{_all(carry, ours)} carry `{source}.`: saved from a model that holds this one as `{source}`")
    if found.matches and target:
        said.append(f"the model holds what was saved as `{target}`")
    if found.matches and prefixes is None and any(match.sources != match.targets for match in found.matches):
        said.append("the names are another project's: layers were told by their order, their sizes and their words")
    if not found.matches and not found.ambiguous:
        said.append(
            f"nothing fits by name and shape: the checkpoint has {listed(list(ours))}, the model {listed(list(theirs))}"
        )
    computed = [name for name in missing if is_computed(name)]
    if computed:
        said.append(f"{listed(computed)} are computed by the model itself and stay as they are")
    return "; ".join(said or ["all names are the model's own"]) + "."


def _all(some: list[str], everything: Iterable[str]) -> str:
    count = len(list(everything))
    return f"all {count} keys" if len(some) == count else f"{len(some)} of {count} keys"


def listed(names: Iterable[str], most: int = 4) -> str:
    """Return the first few names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "nothing") + more


def _rule(match: Match) -> RemapRule:
    source, target = (names if len(names) > 1 else names[0] for names in (match.sources, match.targets))
    return RemapRule(source, target, match.transpose, match.shape)


def _yaml(step: Any) -> str:
    import yaml

    if isinstance(step, list):
        return "- " + ("\n  ".join(map(_yaml, step)) or "[]")
    if isinstance(step, RemapRule):
        plain = {"from": step.source, "to": step.target, "transpose": step.transpose, "shape": step.shape}
        step = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in plain.items()
            if value not in (None, False) or name == "to"
        }
    text: str = yaml.safe_dump(step, sort_keys=False, default_flow_style=True, width=10**6)
    return "- " + text.removesuffix("...\n").strip()
