"""`align`: match the tensors of a file to those of a model without rules, or refuse if that is ambiguous."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from lightning_tricks._shared.checks import check_path
from lightning_tricks._shared.patterns import Pattern, parse_patterns
from lightning_tricks._shared.text import list_names
from lightning_tricks.checkpoint_remapping.core.errors import AmbiguousAlignmentError
from lightning_tricks.checkpoint_remapping.core.files.checkpoint import Checkpoint
from lightning_tricks.checkpoint_remapping.core.files.pickle_values import are_copies
from lightning_tricks.checkpoint_remapping.core.matching.alignment import Alignment, describe_ambiguity, diagnose
from lightning_tricks.checkpoint_remapping.core.matching.conversion import find_conversion
from lightning_tricks.checkpoint_remapping.core.matching.matches import (
    Match,
    Matching,
    Mismatch,
    Prefixes,
    Proposals,
    Shape,
    is_at,
)
from lightning_tricks.checkpoint_remapping.core.matching.name_matching import (
    NameMatching,
    match_by_name,
    refuse_against_rules,
    turn_squares,
)
from lightning_tricks.checkpoint_remapping.core.matching.structure_matching import match_by_structure
from lightning_tricks.checkpoint_remapping.core.matching.synonyms import describe_orders, is_computed
from lightning_tricks.checkpoint_remapping.core.remapping import (
    AppliedRules,
    RulesArgument,
    apply_rules,
    strip_wrappers,
)
from lightning_tricks.checkpoint_remapping.core.rules import source_expression


def align(
    model_or_state_dict: torch.nn.Module | Mapping[str, Any],
    checkpoint: Checkpoint | Mapping[str, Any],
    rules: RulesArgument = "auto",
    accept: str | Iterable[str] = (),
) -> Alignment:
    """Match the tensors of a checkpoint with the tensors of a model, whatever their names.

    First, the parts of names that wrappers add are stripped. Then only evidence decides: equal names, with one prefix
    on either side if needed; a table of two projects' names; synonyms; sizes that occur once; and, in the trunk of a
    model (its only list of that kind), the numbers of the blocks. Likely matches, such as the order of a list beside
    the trunk, are only suggested. Two layers that nothing distinguishes are ambiguous.

    Args:
        model_or_state_dict: The model, or its tensors by name.
        checkpoint: What `read_checkpoint` returned, or tensors by name.
        rules: As in `load_weights`: applied first, and the rest is matched.
        accept: Patterns of names of the model whose suggestions are taken as matches.

    Returns:
        The matches with their reasons, the suggestions, and the tensors without a match.

    Raises:
        AmbiguousAlignmentError: If two assignments are equally good.
        CheckpointError: If the rules do not fit, as in `load_weights`.
        TypeError: If an argument does not contain tensors by name, such as the path of a file.

    Examples:
        >>> weights = {f"module.{name}": tensor for name, tensor in torch.nn.Linear(2, 3).state_dict().items()}
        >>> align(torch.nn.Sequential(torch.nn.Linear(2, 3)), weights).renamed
        {'module.weight': '0.weight', 'module.bias': '0.bias'}
    """
    if isinstance(rules, str | os.PathLike):
        check_path("rules", rules, "a file of rules")
    target = shapes_of(tensors_of(model_or_state_dict))
    search = AlignmentSearch(
        target, apply_rules(tensors_of(checkpoint), rules, target), parse_patterns("accept", accept)
    )
    found = search.run()
    if found.ambiguous:
        raise AmbiguousAlignmentError(describe_ambiguity(found))
    return found


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Shape]:
    """Return the shapes of tensors by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def tensors_of(holder: torch.nn.Module | Checkpoint | Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors by name of a model, of a checkpoint, or among other values."""
    if isinstance(holder, Checkpoint | torch.nn.Module):
        holder = holder.state_dict if isinstance(holder, Checkpoint) else holder.state_dict()
    if not isinstance(holder, Mapping):
        raise TypeError(
            f"expected a model, a result of read_checkpoint, or tensors by name, got {holder!r}; to read a file, call "
            "read_checkpoint(path)."
        )
    # `get_extra_state` of a module puts other values into a state dict, which have no shape to match by.
    return {name: tensor for name, tensor in holder.items() if isinstance(tensor, torch.Tensor)}


class Found(NamedTuple):
    """The tensors of a file that a model takes.

    Attributes:
        alignment: Which tensor became which.
        tensors: Those of the file, under the model's names.
        aliases: Names of tied tensors that the file does not have, with the names that are loaded for them.
        notes: What should be said.
    """

    alignment: Alignment
    tensors: dict[str, Any]
    aliases: dict[str, str]
    notes: list[str]


def find_tensors(
    own: Mapping[str, torch.Tensor], applied: AppliedRules, left_over: Sequence[Pattern], accept: Sequence[Pattern]
) -> Found:
    """Match the tensors of a file, first those that rules name, then the others; of tied tensors only one name.

    Args:
        own: The model's tensors.
        applied: What the caller's rules made of the file.
        left_over: Patterns of names that are left out if a file has too much to tell what is meant, and everything
            else fits: so a file of a student and its teacher, or of an encoder and a decoder, is one of either.
        accept: Patterns of names of the model whose suggestions are taken.
    """
    notes = [*applied.notes, *_notes_on_orders(applied)]
    tied = tied_names(own)
    named = AlignmentSearch(shapes_of(own), applied).names_in_file() if tied else {}
    aliases = _find_aliases(tied, named)
    # `torch.save` writes a tied weight under each of its names; the second would be left over, and be reported.
    _leave_out_repeated(applied.tensors, {own[name].shape for name in aliases}, {*named.values()})
    target = shapes_of({name: tensor for name, tensor in own.items() if name not in aliases})
    search = AlignmentSearch(target, applied, accept)
    alignment = search.run()
    if copies := [*_copies(search, alignment)]:
        kept = {name: tensor for name, tensor in applied.tensors.items() if name not in copies}
        notes = [*applied.notes, f"{list_names(copies)} have the values of others, and were left out"]
        return find_tensors(own, replace(applied, tensors=kept, notes=notes), left_over, accept)
    if alignment.lacking and left_over and applied.search:
        clean = {old: new for old, new in search.clean_names.items() if new is not None}
        less = {old: new for old, new in clean.items() if any(pattern.matches(new) for pattern in left_over)}
        kept = {name: tensor for name, tensor in applied.tensors.items() if name not in less}
        other = AlignmentSearch(target, replace(applied, tensors=kept), accept).run() if less and kept else alignment
        if not other.lacking:
            alignment = replace(other, unexpected=(*other.unexpected, *less.values()))
    tensors = dict(alignment.apply_to_ruled(applied.tensors))
    return Found(alignment, tensors, aliases, notes)


def _notes_on_orders(applied: AppliedRules) -> Iterator[str]:
    """Say which tensors rules only rename, though the elements of the two are in different orders."""
    rules = [rule for step in applied.steps if isinstance(step, list) for rule in step]
    if not any(rule.shape for rule in rules) and (
        note := describe_orders((applied.origins[name], name) for name in sorted(applied.pinned))
    ):
        yield f"rules rename tensors that are stored in another order: {note}"


def tied_names(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Return the groups of names that stand for one tensor, such as an embedding and the output of a language model."""
    names_of: dict[int, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        # `state_dict(keep_vars=True)` returns one object for a Parameter that two modules share.
        names_of[id(tensor)].append(name)
    return [names for names in names_of.values() if len(names) > 1]


def _find_aliases(tied: list[list[str]], named: Collection[str]) -> dict[str, str]:
    aliases: dict[str, str] = {}
    for names in tied:
        # The name that the file has: files of a tied model may have either one, or both.
        first = next((name for name in names if name in named), names[0])
        aliases |= {name: first for name in names if name != first and name not in named}
    return aliases


def _leave_out_repeated(
    tensors: dict[str, torch.Tensor], shapes: Collection[torch.Size], named: Collection[str]
) -> None:
    """Leave out the further names of one tensor in a file if the model has other names for such tensors."""
    names_at: dict[object, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        # Empty and meta tensors all have the address 0, and sparse ones have none.
        if tensor.shape in shapes and tensor.numel() and tensor.layout == torch.strided and not tensor.is_meta:
            names_at[tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype].append(name)
    for names in map(sorted, names_at.values()):
        kept = [name for name in names if name in named] or names[:1]
        for name in names:
            if name not in kept:
                del tensors[name]


def _copies(search: AlignmentSearch, found: Alignment) -> Iterator[str]:
    """Yield the names of tensors that one place of the model may take, and that are copies of others that may."""
    clean, tensors = search.clean_names.items(), search.rules.tensors
    for sources, targets in found.ambiguous:
        names = [{new[len(s.rstrip(".*")) :]: old for old, new in clean if new and is_at(new, s)} for s in sources]
        first, *others = ({rest: tensors[old] for rest, old in each.items()} for each in names)
        for each, other in zip(names[1:], others, strict=True):
            if len(targets) == 1 and are_copies(first, other):
                yield from each.values()


class AlignmentSearch:
    """The tensors of a file and a model under names without wrappers' parts.

    Args:
        target: Shapes of the model's tensors.
        rules: What the caller's rules made of the file's. Names that they lead to are those of the same tensors in the
            model, and only the rest is searched.
        accept: Patterns of names of the model whose suggestions are taken.
    """

    def __init__(self, target: Mapping[str, Shape], rules: AppliedRules, accept: Sequence[Pattern] = ()) -> None:
        self.rules, self.by_name, self.accept = rules, not rules.search, accept
        # The order of a file says nothing; in messages, a weight stands before its bias
        ordered = sorted(rules.tensors, key=lambda name: (name.removesuffix("weight"), name))
        source = shapes_of({name: rules.tensors[name] for name in ordered})
        self.model_names = {
            (old if self.by_name and old in source else new): old
            for old, new in strip_wrappers(target).items()
            if new is not None
        }
        clean_of = {old: new for new, old in self.model_names.items()}
        self.pinned = {name: clean_of.get(name, name) for name in source if name in rules.pinned}
        rest = [name for name in source if name not in self.pinned]
        clean_names: dict[str, str | None] = {name: name for name in rest} if self.by_name else strip_wrappers(rest)
        self.clean_names: dict[str, str | None] = {name: name for name in self.pinned}
        self.clean_names |= {name: name if new in self.pinned else new for name, new in clean_names.items()}
        # By names without wrappers' parts, as the search sees all the others.
        before = strip_wrappers(rules.origins[name] for name in self.pinned)
        self.ruled = {before[rules.origins[name]] or "": new for name, new in self.pinned.items()}
        self.source_shapes = {new: source[old] for old, new in self.clean_names.items() if new is not None}
        self.target_shapes = {new: target[old] for new, old in self.model_names.items()}
        sides = self.source_shapes, self.target_shapes
        # What models compute for themselves
        self.computed_in_file, self.computed = (
            {name for name, shape in shapes.items() if is_computed(name, shape)} for shapes in sides
        )

    def names_in_file(self) -> dict[str, str]:
        """Return the names in the file by the equal ones of the model."""
        # Also those of another shape: a file with the name of a tied weight has that weight.
        found, _, mismatched = self._match_names()
        pairs = [*((match.sources[0], match.targets[0]) for match in found.matches), *mismatched, *self.pinned.items()]
        in_file = {clean: name for name, clean in self.clean_names.items()}
        return {self.model_names[target]: in_file[source] for source, target in pairs}

    def run(self) -> Alignment:
        """Match by names and, where these are not enough, by structure; return also what is ambiguous."""
        named = self._match_names()
        found = self._best(named) if self._needs_structure(named.matching) else named.matching
        prefixes = named.prefixes if found is named.matching else None
        # A table says for each tensor which way round it is.
        if not self.by_name and not any(match.is_conversion for match in found.matches):
            found = turn_squares(found, [*self._made_by_rules()], self.source_shapes, self.target_shapes)
        # A rule of a prefix does not transpose.
        prefixes = None if any(match.transpose for match in found.matches) else prefixes
        return self._result(refuse_against_rules(found, self.ruled), prefixes, named.mismatched)

    def _made_by_rules(self) -> Iterator[Match]:
        """Yield the matches of the caller's rules, with which of them transpose."""
        # What the caller says of some matrices is evidence for the square ones, whose shapes say nothing.
        rules = [rule for step in self.rules.steps if isinstance(step, list) for rule in step if rule.transpose]
        expressions = [source_expression(source) for rule in rules for source in rule.sources]
        for source, target in self.pinned.items():
            is_turned = any(expression.search(self.rules.origins[source]) for expression in expressions)
            yield Match((source,), (target,), transpose=is_turned)

    def _match_names(self) -> NameMatching:
        return match_by_name(*self._left(set(), set()), search_prefixes=not self.by_name)

    def _needs_structure(self, by_names: Matching) -> bool:
        lacking = self.target_shapes.keys() - by_names.targets() - set(self.pinned.values()) - self.computed
        return not self.by_name and bool(by_names.ambiguous or lacking)

    def _best(self, named: NameMatching) -> Matching:
        """Return a conversion that fits, or the matching by names, completed by structure, or by structure alone."""
        sources, targets = self._left(set(), set())
        converted = find_conversion(sources, targets)
        if converted is not None:
            return converted
        by_names = named.matching
        by_structure = self._match_structure(Matching(), named)
        if by_names.ambiguous:
            return by_structure if by_structure.targets() and not by_structure.ambiguous else by_names
        # Some names are equal by chance, and say nothing unless they fit half of the model
        if 2 * len(by_names.targets()) < len(targets):
            return by_structure
        rest = self._match_structure(by_names, named)
        both = Matching(by_names.matches + rest.matches, rest.ambiguous), by_structure
        return max(both, key=lambda matching: len(matching.targets()))  # of equals the first

    def _match_structure(self, matched: Matching, named: NameMatching) -> Matching:
        """Match what is left; an equal name of another size, unless of another rank, is not offered to other names."""
        sources, targets = matched.sources(), matched.targets()
        for source, target in named.mismatched:
            shapes = self.source_shapes[source], self.target_shapes[target]
            if source != target and not matched.matches:
                continue  # equal behind a prefix that fits by chance
            # A head for other classes is the same layer: its name is not to be given to another one that happens to
            # fit.
            if len(shapes[0]) == len(shapes[1]) or math.prod(shapes[0]) != math.prod(shapes[1]):
                sources.add(source)
                targets.add(target)
        return match_by_structure(*self._left(sources, targets))

    def _left(self, sources: set[str], targets: set[str]) -> tuple[dict[str, Shape], dict[str, Shape]]:
        """Return the tensors of the file and of the model that are not pinned and not among these."""
        sources, targets = sources | self.pinned.keys(), targets | set(self.pinned.values())
        return (
            {name: shape for name, shape in self.source_shapes.items() if name not in sources},
            {name: shape for name, shape in self.target_shapes.items() if name not in targets},
        )

    def _result(self, found: Matching, prefixes: Prefixes | None, mismatched_names: list[tuple[str, str]]) -> Alignment:
        equal = [pair for pair in self.pinned.items() if self.source_shapes[pair[0]] == self.target_shapes[pair[1]]]
        pinned = [Match((source,), (target,), reason="a rule", is_plain=True) for source, target in equal]
        suggested = [match for match in found.matches if not self._is_taken(match)]
        found = Matching([*pinned, *filter(self._is_taken, found.matches)], found.ambiguous)
        sources, targets = found.sources(), found.targets()
        mismatched = [
            pair
            for pair in (*self.pinned.items(), *mismatched_names)
            if pair[0] not in sources and pair[1] not in targets
        ]
        unmatched_sources, unmatched_targets = self._left(
            sources | {source for source, _ in mismatched}, targets | {target for _, target in mismatched}
        )
        left = self._left(sources, targets)
        computed = [own for name, own in self.model_names.items() if name in self.computed & unmatched_targets.keys()]
        # Rules for prefixes would lead to the names without wrappers' parts, and change the names that rules made
        rules_are_prefixes = not self.pinned and all(clean == name for clean, name in self.model_names.items())
        return Alignment(
            matches=self._in_model_order(found),
            suggested=self._in_model_order(Matching(suggested)),
            missing=tuple(self.model_names[name] for name in unmatched_targets),
            unexpected=tuple(name for name in unmatched_sources if name not in self.computed_in_file),
            mismatched=tuple(self._mismatch(*pair) for pair in mismatched),
            ambiguous=tuple((tuple(sources), tuple(targets)) for sources, targets in found.ambiguous),
            diagnosis=diagnose(found, self.source_shapes, self.target_shapes, self.clean_names, prefixes, computed),
            computed=tuple(computed),
            proposals=Proposals(*left),
            _shapes={own: self.target_shapes[name] for name, own in self.model_names.items()},
            _clean_names=self.clean_names,
            _prefixes=prefixes if rules_are_prefixes else None,
            _first=tuple(self.rules.steps),
            _origins=self.rules.origins,
        )

    def _is_taken(self, match: Match) -> bool:
        """Whether a match rests on evidence, or the caller accepts what is suggested for its tensors."""
        if match.strength == "strong":
            return True
        # All of them: a fused tensor cannot be taken in part.
        names = [self.model_names[target] for target in match.targets]
        return all(any(pattern.matches(name) for pattern in self.accept) for name in names)

    def _in_model_order(self, found: Matching) -> tuple[Match, ...]:
        """Return the matches with the model's own names, in the order of its tensors."""
        positions = {name: position for position, name in enumerate(self.target_shapes)}
        matches = sorted(found.matches, key=lambda match: positions[match.targets[0]])
        return tuple(
            replace(match, targets=tuple(map(self.model_names.__getitem__, match.targets))).with_names_in_file(
                self.rules.ruled
            )
            for match in matches
        )

    def _mismatch(self, source: str, target: str) -> Mismatch:
        shapes = self.source_shapes[source], self.target_shapes[target]
        return Mismatch(source, shapes[0], self.model_names[target], shapes[1])
