"""`align`: find which tensor of a file is which of a model without rules, or refuse where it is ambiguous."""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from lightning_tricks._shared.checks import check_path
from lightning_tricks._shared.patterns import LIST_NUMBER
from lightning_tricks.checkpoint_remapping.core.errors import AmbiguousAlignmentError
from lightning_tricks.checkpoint_remapping.core.files.reading import Checkpoint
from lightning_tricks.checkpoint_remapping.core.matching.alignment import Alignment, Mismatch
from lightning_tricks.checkpoint_remapping.core.matching.alignment_report import Proposals, describe_ambiguity, diagnose
from lightning_tricks.checkpoint_remapping.core.matching.conversion import find_conversion
from lightning_tricks.checkpoint_remapping.core.matching.layers import Layer, Shape, equal_groups, group_layers
from lightning_tricks.checkpoint_remapping.core.matching.matches import Match, Matching
from lightning_tricks.checkpoint_remapping.core.matching.name_matching import (
    NameMatching,
    Prefixes,
    match_by_name,
    replace_prefix,
)
from lightning_tricks.checkpoint_remapping.core.matching.structure_matching import match_by_structure
from lightning_tricks.checkpoint_remapping.core.matching.synonyms import is_computed
from lightning_tricks.checkpoint_remapping.core.remapping import strip_wrappers
from lightning_tricks.checkpoint_remapping.core.rule_application import RulesArgument, apply_rules


def align(
    model_or_state_dict: torch.nn.Module | Mapping[str, Any],
    checkpoint: Checkpoint | Mapping[str, Any],
    rules: RulesArgument = "auto",
) -> Alignment:
    """Find which tensor of a checkpoint is which of a model, whatever their names.

    The parts of names that wrappers add are stripped first. Then names decide, with one prefix on either side if
    needed; then the order of layers, their sizes and the words in their names. So a model with other names and another
    order of layers within its blocks is matched; two layers that nothing tells apart are refused.

    Args:
        model_or_state_dict: The model, or its tensors by name.
        checkpoint: What `read_checkpoint` returned, or tensors by name.
        rules: As in `load_weights`: applied first, and the rest is matched.

    Returns:
        The matches with their reasons, and what has no match.

    Raises:
        AmbiguousAlignmentError: If two assignments are equally good.
        CheckpointError: If the rules do not fit, as in `load_weights`.

    Examples:
        >>> weights = {f"module.{name}": tensor for name, tensor in torch.nn.Linear(2, 3).state_dict().items()}
        >>> align(torch.nn.Sequential(torch.nn.Linear(2, 3)), weights).renamed
        {'module.weight': '0.weight', 'module.bias': '0.bias'}
    """
    if isinstance(rules, str | os.PathLike):
        check_path("rules", rules, "a file of rules")
    target, tensors = shapes_of(model_or_state_dict), _tensors_of(checkpoint)
    applied = apply_rules(tensors, rules, target)
    found = find_alignment(target, shapes_of(applied.tensors), not applied.search, applied.pinned).after(applied)
    if found.ambiguous:
        raise AmbiguousAlignmentError(describe_ambiguity(found))
    return found


def shapes_of(tensors: torch.nn.Module | Checkpoint | Mapping[str, Any]) -> dict[str, Shape]:
    """Return the shapes of tensors by name."""
    return {name: tuple(tensor.shape) for name, tensor in _tensors_of(tensors).items()}


def _tensors_of(tensors: torch.nn.Module | Checkpoint | Mapping[str, Any]) -> dict[str, torch.Tensor]:
    if isinstance(tensors, Checkpoint | torch.nn.Module):
        tensors = tensors.state_dict if isinstance(tensors, Checkpoint) else tensors.state_dict()
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}


def find_alignment(
    target: Mapping[str, Shape],
    source: Mapping[str, Shape],
    by_name: bool = False,
    pinned: Collection[str] = (),
    origins: Mapping[str, str] | None = None,
) -> Alignment:
    """Return the best alignment, with what is ambiguous.

    Args:
        target: Shapes of the model's tensors.
        source: Shapes of the file's tensors.
        by_name: Whether names must be equal as they are.
        pinned: Names of the file that are those of the same tensors in the model; only the rest is searched.
        origins: The names that pinned ones had before rules changed them.
    """
    return _AlignmentSearch(target, source, by_name, pinned, origins or {}).run()


def names_in_file(
    target: Mapping[str, Shape], source: Mapping[str, Shape], by_name: bool, pinned: Collection[str]
) -> dict[str, str]:
    """Return the names in the file by the equal ones of the model, with one prefix on either side if needed."""
    return _AlignmentSearch(target, source, by_name, pinned, {}).names_in_file()


class _AlignmentSearch:
    """The tensors of a file and a model under names without wrappers' parts."""

    def __init__(
        self,
        target: Mapping[str, Shape],
        source: Mapping[str, Shape],
        by_name: bool,
        pinned: Collection[str],
        origins: Mapping[str, str],
    ) -> None:
        # The order of a file says nothing; in messages, a weight stands before its bias
        source = {name: source[name] for name in sorted(source, key=lambda name: (name.removesuffix("weight"), name))}
        self.by_name = by_name
        self.model_names = {
            (old if by_name and old in source else new): old
            for old, new in strip_wrappers(target).items()
            if new is not None
        }
        clean_of = {old: new for new, old in self.model_names.items()}
        self.pinned = {name: clean_of.get(name, name) for name in source if name in pinned}
        rest = [name for name in source if name not in self.pinned]
        clean_names: dict[str, str | None] = {name: name for name in rest} if by_name else strip_wrappers(rest)
        self.clean_names: dict[str, str | None] = {name: name for name in self.pinned}
        self.clean_names |= {name: name if new in self.pinned else new for name, new in clean_names.items()}
        before = strip_wrappers(origins[name] for name in self.pinned if name in origins)
        self.ruled = {before[origins[name]] or "": new for name, new in self.pinned.items() if name in origins}
        self.source_shapes = {new: source[old] for old, new in self.clean_names.items() if new is not None}
        self.target_shapes = {new: target[old] for new, old in self.model_names.items()}

    def names_in_file(self) -> dict[str, str]:
        """Return the names in the file by the equal ones of the model."""
        found, _, mismatched = self._match_names()
        pairs = [*((match.sources[0], match.targets[0]) for match in found.matches), *mismatched, *self.pinned.items()]
        in_file = {clean: name for name, clean in self.clean_names.items()}
        return {self.model_names[target]: in_file[source] for source, target in pairs}

    def run(self) -> Alignment:
        """Match by names and, where these are not enough, by structure; return also what is ambiguous."""
        found, prefixes, mismatched = self._match_names()
        if self._needs_structure(found):
            best = self._best(found, prefixes, mismatched)
            if best is not found:
                return self._result(refuse_against_rules(best, self.ruled), None, mismatched)
        return self._result(refuse_against_rules(found, self.ruled), prefixes, mismatched)

    def _match_names(self) -> NameMatching:
        return match_by_name(*self._left(set(), set()), search_prefixes=not self.by_name)

    def _needs_structure(self, by_names: Matching) -> bool:
        lacking = self.target_shapes.keys() - by_names.targets() - set(self.pinned.values())
        learned = any(not is_computed(name, self.target_shapes[name]) for name in lacking)
        return not self.by_name and bool(by_names.ambiguous or learned)

    def _best(self, by_names: Matching, prefixes: Prefixes, mismatched: list[tuple[str, str]]) -> Matching:
        """Return a conversion that fits, or the matching by names, completed by structure, or by structure alone."""
        sources, targets = self._left(set(), set())
        converted = find_conversion(sources, targets)
        if converted is not None:
            return converted
        by_structure = match_by_structure(sources, targets)
        if by_names.ambiguous:
            return by_structure if by_structure.targets() and not by_structure.ambiguous else by_names
        # Some names are equal by chance, and say nothing unless they fit half of the model
        if 2 * len(by_names.targets()) < len(targets):
            return by_structure
        completed = self._completed(by_names, prefixes, mismatched)
        return max((completed, by_structure), key=lambda matching: len(matching.targets()))  # the first of equals

    def _completed(self, by_names: Matching, prefixes: Prefixes, mismatched: list[tuple[str, str]]) -> Matching:
        """Return what names match and, of what is left, what structure does.

        A bias is no evidence beside a weight of the same name and another shape, if that weight is found elsewhere.
        Nor is a number, if other numbers behind the same words are found to differ: they count from elsewhere.
        """
        layers = {target.rpartition(".")[0] for _, target in mismatched}
        doubted: list[Match] = []
        certain: list[Match] = []
        for match in by_names.matches:
            (doubted if match.targets[0].rpartition(".")[0] in layers else certain).append(match)
        trusted = Matching(certain)
        rest = match_by_structure(*self._left(trusted.sources(), trusted.targets()))
        shifted = _shifted_starts(rest, prefixes)
        if shifted:
            trusted = Matching([match for match in trusted.matches if not _begins(match.targets[0], shifted)])
            doubted = [match for match in doubted if not _begins(match.targets[0], shifted)]
            rest = match_by_structure(*self._left(trusted.sources(), trusted.targets()))
        sources, targets = rest.sources(), rest.targets()
        kept = [match for match in doubted if not (sources & {*match.sources} or targets & {*match.targets})]
        return Matching(trusted.matches + kept + rest.matches, rest.ambiguous)

    def _left(self, sources: set[str], targets: set[str]) -> tuple[dict[str, Shape], dict[str, Shape]]:
        """Return the tensors of the file and of the model that are not pinned and not among these."""
        sources, targets = sources | self.pinned.keys(), targets | set(self.pinned.values())
        return (
            {name: shape for name, shape in self.source_shapes.items() if name not in sources},
            {name: shape for name, shape in self.target_shapes.items() if name not in targets},
        )

    def _result(self, found: Matching, prefixes: Prefixes | None, mismatched_names: list[tuple[str, str]]) -> Alignment:
        equal = [pair for pair in self.pinned.items() if self.source_shapes[pair[0]] == self.target_shapes[pair[1]]]
        pinned = [Match((source,), (target,), reason="a rule") for source, target in equal]
        found = Matching([*pinned, *found.matches], found.ambiguous)
        sources, targets = found.sources(), found.targets()
        mismatched = [
            pair
            for pair in (*self.pinned.items(), *mismatched_names)
            if pair[0] not in sources and pair[1] not in targets
        ]
        if prefixes is None:
            seen = {source for source, _ in mismatched}, {target for _, target in mismatched}
            mismatched += find_resized(*self._left(sources | seen[0], targets | seen[1]))
        unmatched_sources, unmatched_targets = self._left(
            sources | {source for source, _ in mismatched}, targets | {target for _, target in mismatched}
        )
        missing = tuple(self.model_names[name] for name in unmatched_targets)
        computed = [self.model_names[name] for name, shape in unmatched_targets.items() if is_computed(name, shape)]
        # Rules for prefixes would lead to the names without wrappers' parts, and change the names that rules made
        rules_are_prefixes = not self.pinned and all(clean == name for clean, name in self.model_names.items())
        return Alignment(
            matches=self._in_model_order(found),
            missing=missing,
            unexpected=tuple(name for name, shape in unmatched_sources.items() if not is_computed(name, shape)),
            mismatched=tuple(self._mismatch(*pair) for pair in mismatched),
            ambiguous=tuple((tuple(sources), tuple(targets)) for sources, targets in found.ambiguous),
            diagnosis=diagnose(found, self.source_shapes, self.target_shapes, self.clean_names, prefixes, computed),
            loaded=len(targets),
            total=len(self.target_shapes),
            loaded_parameters=sum(math.prod(self.target_shapes[name]) for name in targets),
            total_parameters=sum(map(math.prod, self.target_shapes.values())),
            computed=tuple(computed),
            proposals=Proposals(self.source_shapes, self.target_shapes, *self._left(sources, targets)),
            _clean_names=self.clean_names,
            _prefixes=prefixes if rules_are_prefixes else None,
        )

    def _in_model_order(self, found: Matching) -> tuple[Match, ...]:
        """Return the matches with the model's own names, in the order of its tensors."""
        positions = {name: position for position, name in enumerate(self.target_shapes)}
        matches = sorted(found.matches, key=lambda match: positions[match.targets[0]])
        names = self.model_names
        return tuple(replace(match, targets=tuple(names[name] for name in match.targets)) for match in matches)

    def _mismatch(self, source: str, target: str) -> Mismatch:
        shapes = self.source_shapes[source], self.target_shapes[target]
        return Mismatch(source, shapes[0], self.model_names[target], shapes[1])


def _shifted_starts(found: Matching, prefixes: Prefixes) -> tuple[str, ...]:
    """Return what precedes the numbers in which names differ that were matched with each other."""
    starts = set()
    for match in found.matches:
        other = re.split(r"(\d+)", match.targets[0])
        one = re.split(r"(\d+)", replace_prefix(match.sources[0], *prefixes))
        differ = next((i for i, parts in enumerate(zip(one, other, strict=False)) if parts[0] != parts[1]), 0)
        if differ % 2:
            starts.add("".join(other[:differ]))
    return tuple(starts)


def _begins(name: str, starts: tuple[str, ...]) -> bool:
    """Whether a name is one of these beginnings with a number behind it."""
    return any(name.startswith(start) and name[len(start) : len(start) + 1].isdecimal() for start in starts)


def find_resized(source_shapes: Mapping[str, Shape], target_shapes: Mapping[str, Shape]) -> list[tuple[str, str]]:
    """Return pairs of names whose tensors differ in one size alone, where there is one candidate on each side."""
    found: list[tuple[Layer, Layer]] = []
    for sources, targets in equal_groups(group_layers(source_shapes), group_layers(target_shapes), _kinds):
        for source in sources:
            fitting = [target for target in targets if _is_resized(source, target)]
            if len(fitting) == 1 and sum(_is_resized(other, fitting[0]) for other in sources) == 1:
                found.append((source, fitting[0]))
    return [
        (names[0], target.tensors[tensor][0][0])
        for source, target in sorted(found, key=lambda pair: pair[0].position)
        for tensor, (names, _) in source.tensors.items()
    ]


def _kinds(layer: Layer) -> frozenset[tuple[str, int]]:
    """Return the names of a layer's tensors and their numbers of dimensions."""
    return frozenset((tensor, len(shape)) for tensor, (_, shape) in layer.tensors.items())


def _is_resized(source: Layer, target: Layer) -> bool:
    """Whether every tensor of a layer differs in its first size, or a lone one in any one size."""
    differ = [
        [i for i, sizes in enumerate(zip(shape, target.tensors[tensor][1], strict=True)) if sizes[0] != sizes[1]]
        for tensor, (_, shape) in source.tensors.items()
    ]
    return all(dims == [0] for dims in differ) or (len(differ) == 1 and len(differ[0]) == 1)


_Numbers = tuple[int, ...]


def refuse_against_rules(found: Matching, ruled: Mapping[str, str]) -> Matching:
    """Return the matches that do not contradict rules; the others are ambiguous.

    A rule that takes `blocks.0.norm1` as `layers.0.ln_2` says that `blocks.1.norm1` is not `layers.1.ln_1`, and one
    that takes `blocks.0` as `layers.3` says that the blocks are counted from the other end.

    Args:
        found: The matches.
        ruled: The names of the model by those of the file to which rules lead.
    """
    rules = _Rules(ruled)
    against = [
        m
        for m in found.matches
        if len(m.sources) == len(m.targets) == 1 and rules.contradict(m.sources[0], m.targets[0])
    ]
    groups: dict[tuple[str, str], tuple[dict[str, None], dict[str, None]]] = defaultdict(lambda: ({}, {}))
    for match in against:
        (source, target) = (name.rpartition(".")[0] or name for name in (match.sources[0], match.targets[0]))
        group = groups[source.rpartition(".")[0], target.rpartition(".")[0]]
        group[0][source] = group[1][target] = None
    ambiguous = [([*sources], [*targets]) for sources, targets in groups.values()]
    kept = [match for match in found.matches if match not in against] if against else found.matches
    return Matching(kept, [*found.ambiguous, *ambiguous])


class _Rules:
    """The kinds of names, with each number of a list left open, to which rules lead, and these numbers."""

    def __init__(self, ruled: Mapping[str, str]) -> None:
        self._kinds: tuple[dict[str, set[str]], ...] = (defaultdict(set), defaultdict(set))
        self._numbers: dict[tuple[str, str], list[tuple[_Numbers, _Numbers]]] = defaultdict(list)
        for names in ruled.items():
            (source, target), numbers = zip(*map(_kind_and_numbers, names), strict=True)
            self._kinds[0][source].add(target)
            self._kinds[1][target].add(source)
            self._numbers[source, target].append(numbers)

    def contradict(self, source: str, target: str) -> bool:
        """Whether rules lead from names like one of the file to others than such of the model, or in another order."""
        kinds, (one, other) = zip(*map(_kind_and_numbers, (source, target)), strict=True)
        if not (one or other):
            return False
        wanted = (self._kinds[0].get(kinds[0]), self._kinds[1].get(kinds[1]))
        if any(known is not None and kind not in known for known, kind in zip(wanted, reversed(kinds), strict=True)):
            return True
        return any(
            (mine > one) != (theirs > other) or (mine < one) != (theirs < other)
            for mine, theirs in self._numbers.get(kinds, ())
        )


def _kind_and_numbers(name: str) -> tuple[str, _Numbers]:
    return LIST_NUMBER.sub("#", name), tuple(map(int, LIST_NUMBER.findall(name)))
