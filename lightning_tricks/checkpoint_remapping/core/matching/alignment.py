"""`Alignment`: what `align` found, as rules, applied to tensors, and as text."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lightning_tricks._shared.text import format_shape, format_si, list_names
from lightning_tricks.checkpoint_remapping.core.matching.matches import (
    FUSED,
    Match,
    Matching,
    Mismatch,
    Prefixes,
    Proposal,
    Proposals,
    Shape,
    in_words,
    is_at,
    suggested_patterns,
)
from lightning_tricks.checkpoint_remapping.core.remapping import (
    WRAPPERS,
    Remapped,
    remap_keys,
    renamed_from,
    strip_wrappers,
)
from lightning_tricks.checkpoint_remapping.core.rules import RemapRule, write_rules

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Alignment:
    """Which tensor of a checkpoint becomes which of a model, and why.

    Attributes:
        matches: The matches, each with its reason; names in the file are without the parts that wrappers add.
        suggested: Likely matches that were not accepted; their tensors are among the missing and the unexpected.
        missing: Names of the model without a tensor in the checkpoint.
        unexpected: Names of the checkpoint, without wrappers' parts, without a tensor in the model.
        mismatched: Tensors whose shapes differ.
        ambiguous: (names in the checkpoint, names in the model) that could be matched in several ways.
        diagnosis: A sentence that describes the file.
        computed: The missing names that the model computes itself, such as BatchNorm's counters.
        proposals: Rules for tensors without a match.
    """

    matches: tuple[Match, ...]
    suggested: tuple[Match, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[Mismatch, ...]
    ambiguous: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    diagnosis: str
    computed: tuple[str, ...]
    proposals: Proposals = field(repr=False, compare=False)
    _shapes: Mapping[str, Shape] = field(repr=False)  # of the model's tensors
    _clean_names: Mapping[str, str | None] = field(repr=False)
    _prefixes: Prefixes | None
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
        """The model's names by the file's, if they differ; names of fused and split tensors are joined by `" + "`."""
        names = [(" + ".join(map(self._origin, match.ruled)), match.targets) for match in self.matches]
        return renamed_from((source, target) for source, targets in names for target in targets)

    def name_in_file(self, clean: str) -> str:
        """Return the name of a tensor in the file, by its name without wrappers' parts."""
        return self._names_in_file.get(clean, clean)

    def _origin(self, clean: str) -> str:
        name = self.name_in_file(clean)
        return self._origins.get(name, name)

    @cached_property
    def _names_in_file(self) -> dict[str | None, str]:
        return {clean: name for name, clean in self._clean_names.items()}

    @property
    def lacking(self) -> list[str]:
        """The missing names that the model does not compute itself."""
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
        """Names of the model's tensors that have another shape in the file."""
        return [name for match in self.matches if match.transpose or match.shape for name in match.targets]

    @property
    def rules(self) -> list[Any]:
        """The rules that do the same: prefixes where these are enough, else one for each tensor.

        They end with `"only"` if both sides have tensors left over, which nothing else should match.
        """
        steps = [step for step in self._first if step != "only"]
        if any(old != new for old, new in self._clean_names.items()):
            steps.append("wrappers")
        # Without it, a run of the saved rules would search again, and might match what was left on purpose.
        only = ["only"] * ("only" in self._first or bool(self.missing and self.unexpected))
        if self._prefixes is None:
            resized = [RemapRule(mismatch.source, mismatch.target) for mismatch in self.mismatched]
            rules = [
                rule
                for rule in (*map(_rule, self.matches), *resized)
                if rule.source != rule.target or rule.transpose or rule.shape
            ]
            taken = {target for match in self.matches for target in match.targets}
            # A file may have a tensor under a name that a rule makes of another one.
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
        """Do the same with tensors to which the caller's rules were applied before."""
        used = {name for match in self.matches for name in match.ruled}
        clean = {self._clean_names.get(name, name): tensor for name, tensor in tensors.items()}
        return remap_keys(
            {name: tensor for name, tensor in clean.items() if name in used}, [[_rule(match) for match in self.matches]]
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the rules to a YAML file that you can read, edit and pass to `load_weights(model, path, rules=...)`."""
        write_rules(path, self.rules, comment=self.diagnosis)

    def report(self, limit: int | None = None) -> Table:
        """Return a rich table of all tensors and the reasons of the matches.

        Args:
            limit: Maximum number of matches in the table; None shows all. Tensors without a match are always shown.
        """
        from rich.console import Group
        from rich.text import Text

        from lightning_tricks._shared.fitting_table import FittingTable, FoldedName

        columns = ("in the file", "in the model", "why", "evidence")
        table = FittingTable(
            *columns, drop=("evidence", "why"), notes=self.diagnosis, title=self.summary(), title_justify="left"
        )
        for match in self.matches[:limit]:
            shape = ", transposed" if match.transpose else ""
            shape = f", reshaped to {format_shape(match.shape)}" if match.shape else shape
            # As texts of their own: rich would take brackets in a name for markup, and cut what does not fit.
            names = (Group(*map(FoldedName, of_side)) for of_side in (match.sources, match.targets))
            table.add_row(*names, Text(match.reason + shape), match.strength)
        for match in self.suggested:
            names = (Group(*map(FoldedName, of_side)) for of_side in (match.sources, match.targets))
            table.add_row(*names, Text(f"SUGGESTED: {match.reason}"), match.strength)
        for mismatch in self.mismatched:
            shapes = f"{format_shape(mismatch.source_shape)} and {format_shape(mismatch.target_shape)}"
            table.add_row(FoldedName(mismatch.source), FoldedName(mismatch.target), f"MISMATCHED: {shapes}")
        for name in self.missing:
            state = "MISSING, the model computes it itself" if name in self.computed else "MISSING"
            table.add_row("", FoldedName(name), state)
        for name in self.unexpected:
            table.add_row(FoldedName(name), "", "UNEXPECTED")
        return table

    def summary(self) -> str:
        """Return the counts in one line."""
        parameters = f"{format_si(self.loaded_parameters)}/{format_si(self.total_parameters)} parameters"
        return (
            f"{self.loaded}/{self.total} tensors, {parameters}; "
            f"{len(self.renamed)} renamed, {len(self.reshaped)} reshaped, {len(self.missing)} missing, "
            f"{len(self.unexpected)} unexpected, {len(self.mismatched)} mismatched"
        )


def _rule(match: Match) -> RemapRule:
    source, target = (names if len(names) > 1 else names[0] for names in (match.ruled, match.targets))
    return RemapRule(source, target, match.transpose, match.shape, sizes=match.sizes)


def describe_ambiguity(alignment: Alignment, missing: Collection[str] | None = None) -> str:
    """Return the sentence about tensors that could be matched in several ways, with the remedy.

    Args:
        alignment: An alignment with something ambiguous.
        missing: Names of the model that should have a match, some of them ambiguous; None for all.
    """
    cases = alignment.ambiguous if missing is None else ambiguous_cases(alignment, missing)
    sources, targets = cases[0]
    more = f" (and {len(cases) - 1} more such cases)" if len(cases) > 1 else ""
    # Each try applies a rule to all tensors; one that can be pasted is enough.
    rules = (alignment.proposals.for_layers(*case) for case in cases[:8])
    rule = next((rule for rule in rules if rule), None)
    how = f": {in_words(rule)}{alignment.proposals.backwards(rule)}" if rule else ""
    return (
        f"it is ambiguous which of {list_names(sources)} in the checkpoint is which of {list_names(targets)} in the "
        f"model{more}. Say which is which with a rule{how}. If a part of the "
        "model is meant, give submodule=..."
    )


_MOST_SHOWN = 3  # rules and patterns of what is suggested


def suggestions_for(alignment: Alignment, missing: Collection[str]) -> list[Match]:
    """Return what is suggested for some names of the model that have no match."""
    return [match for match in alignment.suggested if not set(missing).isdisjoint(match.targets)]


def describe_suggestions(alignment: Alignment, suggested: Sequence[Match]) -> str:
    """Return the sentence about likely matches, with the arguments that accept or correct them.

    Args:
        alignment: An alignment.
        suggested: Some of what it suggests.
    """
    targets = [name for match in suggested for name in match.targets]
    patterns = suggested_patterns(targets, known=())  # which may match what is evidence too
    rules = _first_rules(alignment, suggested)
    more = [" and others" if len(found) > _MOST_SHOWN else "" for found in (patterns, rules)]
    count = "1 tensor has" if len(targets) == 1 else f"{len(targets)} tensors of the model have"
    return (
        f"{count} a likely match, which may be wrong: {suggested[0].reason}. If they are right, "
        f"accept={patterns[:_MOST_SHOWN]} takes them as suggested{more[0]}; if not, correct the rules: "
        f"rules={rules[:_MOST_SHOWN]} takes them one by one{more[1]}"
        f"{alignment.proposals.backwards(rules[0])}. align(...).report() shows all"
    )


def _first_rules(alignment: Alignment, suggested: Sequence[Match]) -> list[Proposal]:
    """Return the first rules that do the same as matches: one for all blocks of a list where these are numbered alike.

    There is one more than a message shows, if there are so many.
    """
    plain = {m.ruled[0]: m.targets[0] for m in suggested if len(m.ruled) == len(m.targets) == 1}
    rules: list[Proposal] = []
    done: set[str] = set()
    for match in suggested:
        if match.ruled[0] in done or len(rules) > _MOST_SHOWN:
            continue
        layers = [names[0].rpartition(".")[0] for names in (match.ruled, match.targets)]
        rule = alignment.proposals.for_layers(layers[:1], layers[1:]) if all(layers) else None
        # Tried on what is suggested: a wide rule may lead a block to another one than the suggestion does.
        made = remap_keys({name: name for name in plain}, [rule]) if isinstance(rule, tuple) else {}
        takes = {old: new for new, old in made.items() if new != old}
        is_true = match.ruled[0] in takes and all(new == plain[old] for old, new in takes.items())
        if rule is None or match.transpose or match.shape or not is_true:
            rule, takes = _rule(match).as_dict(), {}
        done |= takes.keys()
        rules.append(rule)
    return rules


def ambiguous_cases(alignment: Alignment, missing: Iterable[str]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return what is ambiguous about some names of the model: (names in the checkpoint, names in the model)."""
    clean = [name for name in strip_wrappers(missing).values() if name is not None]
    return [
        (sources, targets)
        for sources, targets in alignment.ambiguous
        if any(is_at(name, path) for path in targets for name in clean)
    ]


def diagnose(
    found: Matching,
    source_shapes: Mapping[str, Shape],
    target_shapes: Mapping[str, Shape],
    clean_names: Mapping[str, str | None],
    prefixes: Prefixes | None,
    computed: Iterable[str],
) -> str:
    """Describe what was found about the names of a file.

    Args:
        found: All matches.
        source_shapes: Shapes of the file's tensors, by names without wrappers' parts.
        target_shapes: The same of the model.
        clean_names: The names in the file, with those without wrappers' parts.
        prefixes: The prefixes in which names differ; None where they differ in more than that.
        computed: Names of the model without a match that it computes for itself.
    """
    said = [*_wrappers_found(clean_names)]
    source, target = prefixes or ("", "")
    if found.matches and source:
        # How many, as a file of several models has the prefix on some names only.
        carry = [name for name in source_shapes if name.startswith(f"{source}.")]
        said.append(
            f"{_count_keys(carry, source_shapes)} carry `{source}.`: saved from a model that contains this one as "
            f"`{source}`"
        )
    if found.matches and target:
        said.append(f"the model contains what was saved as `{target}`")
    if found.matches and prefixes is None and any(match.sources != match.targets for match in found.matches):
        said += _other_names(found)
    if not found.matches and not found.ambiguous:
        equal = [name for name, shape in target_shapes.items() if source_shapes.get(name) == shape]
        said.append(
            f"only {list_names(equal)}, of the model's {len(target_shapes)} tensors, has the name and the shape of one "
            "in the file, which may be by chance: rules=None takes names as they are"
            if equal
            else f"nothing fits by name and shape: the checkpoint has {list_names(source_shapes)}, the model "
            f"{list_names(target_shapes)}"
        )
    if computed:
        said.append(f"{list_names(computed)} are computed by the model itself and keep their values")
    return "; ".join(said or ["all names are the model's own"]) + "."


def _other_names(found: Matching) -> Iterable[str]:
    """Say how the names of another project were matched, and what is taken for granted."""
    conversions = dict.fromkeys(match.reason for match in found.matches if match.is_conversion)
    if conversions:
        yield f"the names are another project's: {list_names(conversions)} was used"
        return
    yield (
        "the names are another project's: layers were matched by their order, their sizes and the words in their names"
    )
    fused = sum(match.is_fused for match in found.matches)
    if fused:
        yield f"{fused} fused tensors are {FUSED}"
    weak = sum(match.strength == "weak" for match in found.matches)
    if weak:
        yield (
            f"{weak} of {len(found.matches)} matches are accepted suggestions: max_output_difference shows whether the "
            "outputs agree"
        )


def _wrappers_found(clean_names: Mapping[str, str | None]) -> Iterable[str]:
    for part, origin in WRAPPERS.items():
        # Between dots: a layer whose own name contains the word has no wrapper.
        carry = [name for name, new in clean_names.items() if new != name and part in name.split(".")]
        if carry:
            yield f"{_count_keys(carry, clean_names)} carry `{part}.`: {origin}"
    dropped = [name for name, new in clean_names.items() if new is None]
    if dropped:
        yield f"{len(dropped)} are counters of thop or of averaging ({list_names(dropped)}), and were left out"


def _count_keys(some: list[str], everything: Iterable[str]) -> str:
    count = len(list(everything))
    return f"all {count} keys" if len(some) == count else f"{len(some)} of {count} keys"
