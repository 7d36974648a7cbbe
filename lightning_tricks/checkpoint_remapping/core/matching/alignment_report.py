"""What an alignment found, in words: a table, counts, a diagnosis, what is ambiguous, and rules that would decide."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice, product
from typing import TYPE_CHECKING, Any

from lightning_tricks._shared.patterns import LIST_NUMBER
from lightning_tricks._shared.text import format_shape, format_si, list_names
from lightning_tricks.checkpoint_remapping.core.matching.layers import Shape
from lightning_tricks.checkpoint_remapping.core.matching.matches import CONVERSION, FUSED, Matching
from lightning_tricks.checkpoint_remapping.core.matching.name_matching import Prefixes
from lightning_tricks.checkpoint_remapping.core.matching.synonyms import words_of
from lightning_tricks.checkpoint_remapping.core.remapping import WRAPPERS, remap_keys, strip_wrappers
from lightning_tricks.checkpoint_remapping.core.rules import RemapRule

if TYPE_CHECKING:
    from rich.table import Table

    from lightning_tricks.checkpoint_remapping.core.matching.alignment import Alignment


def alignment_table(alignment: Alignment, limit: int | None) -> Table:
    """Return a rich table of all tensors and the reasons of at most `limit` matches."""
    from lightning_tricks._shared.table_with_notes import TableWithNotes

    table = TableWithNotes(alignment.diagnosis, title=summary_line(alignment), title_justify="left")
    for column in ("in the file", "in the model", "why", "evidence"):
        table.add_column(column, overflow="fold")
    for match in alignment.matches[:limit]:
        shape = f", reshaped to {format_shape(match.shape)}" if match.shape else ", transposed" * match.transpose
        table.add_row("\n".join(match.sources), "\n".join(match.targets), match.reason + shape, match.strength)
    for mismatch in alignment.mismatched:
        shapes = f"{format_shape(mismatch.source_shape)} and {format_shape(mismatch.target_shape)}"
        table.add_row(mismatch.source, mismatch.target, f"MISMATCHED: {shapes}")
    for name in alignment.missing:
        table.add_row("", name, "MISSING" + ", the model computes it itself" * (name in alignment.computed))
    for name in alignment.unexpected:
        table.add_row(name, "", "UNEXPECTED")
    return table


def summary_line(alignment: Alignment) -> str:
    """Return the counts of an alignment in one line."""
    parameters = f"{format_si(alignment.loaded_parameters)}/{format_si(alignment.total_parameters)} parameters"
    return (
        f"{alignment.loaded}/{alignment.total} tensors, {parameters}; "
        f"{len(alignment.renamed)} renamed, {len(alignment.reshaped)} reshaped, {len(alignment.missing)} missing, "
        f"{len(alignment.unexpected)} unexpected, {len(alignment.mismatched)} mismatched"
    )


def describe_ambiguity(alignment: Alignment, missing: Collection[str] | None = None) -> str:
    """Return the sentence about tensors that could be matched in several ways, with the remedy.

    Args:
        alignment: An alignment with something ambiguous.
        missing: Names of the model that should have a match, some of them ambiguous; None for all.
    """
    cases = alignment.ambiguous if missing is None else ambiguous_cases(alignment, missing)
    sources, targets = cases[0]
    more = f" (and {len(cases) - 1} more such cases)" if len(cases) > 1 else ""
    rules = (alignment.proposals.for_layers(*case) for case in cases[:8])
    rule = next((rule for rule in rules if rule), None)
    hint = "".join(f"; {words}" for words in _tensorflow_names(alignment.clean_names_in_file))
    return (
        f"it is ambiguous which of {list_names(sources)} in the checkpoint is which of {list_names(targets)} in the "
        f"model{more}{hint}. Say which is which with a rule{f': {in_words(rule)}' if rule else ''}. If a part of the "
        "model is meant, give submodule=..."
    )


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
    """Return what was found about the names of a file, in words.

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
        carry = [name for name in source_shapes if name.startswith(f"{source}.")]
        said.append(
            f"{_count_keys(carry, source_shapes)} carry `{source}.`: saved from a model that holds this one as "
            f"`{source}`"
        )
    if found.matches and target:
        said.append(f"the model holds what was saved as `{target}`")
    said += _tensorflow_names(source_shapes)
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


def _tensorflow_names(names: Iterable[str]) -> Iterable[str]:
    """Say how names of TensorFlow and Flax are made names of torch."""
    if sum(re.search("[^.]/[^.]", name) is not None for name in names) > 1:
        yield (
            "the names are those of TensorFlow or Flax: load "
            'remap_keys(tensors, [("re:/", "."), RemapRule("re:[.]kernel$", ".weight", transpose=True), '
            '("re:_embeddings$", "_embeddings.weight")]) instead'
        )


def _other_names(found: Matching) -> Iterable[str]:
    """Say how the names of another project were matched, and what is taken for granted."""
    conversions = dict.fromkeys(match.reason for match in found.matches if match.reason.startswith(CONVERSION))
    if conversions:
        yield f"the names are another project's: {list_names(conversions)} was used"
        return
    yield (
        "the names are another project's: layers were matched by their order, their sizes and the words in their names"
    )
    weak = [match for match in found.matches if match.strength == "weak"]
    if weak:
        fused = sum(FUSED in match.reason for match in weak)
        parts = f", among them {fused} fused tensors, whose parts are {FUSED}" if fused else ""
        yield (
            f"{len(weak)} of {len(found.matches)} matches rest on weak evidence{parts}: "
            "max_output_difference shows whether the outputs agree"
        )


def _wrappers_found(clean_names: Mapping[str, str | None]) -> Iterable[str]:
    for part, origin in WRAPPERS.items():
        carry = [name for name, new in clean_names.items() if new != name and part in name.split(".")]
        if carry:
            yield f"{_count_keys(carry, clean_names)} carry `{part}.`: {origin}"
    dropped = [name for name, new in clean_names.items() if new is None]
    if dropped:
        yield f"{len(dropped)} are counters of thop or of averaging ({list_names(dropped)}), and were left out"


def _count_keys(some: list[str], everything: Iterable[str]) -> str:
    count = len(list(everything))
    return f"all {count} keys" if len(some) == count else f"{len(some)} of {count} keys"


Proposal = tuple[str, str] | dict[str, Any]
_MOST_TRIED = 8  # pairs of layers for which a rule is tried
_MOST_STARS = 3  # that a file of rules may have


@dataclass(frozen=True)
class Proposals:
    """Rules that lead from tensors of a file without a match to those of a model without one.

    Attributes:
        sources: Shapes of the tensors in the file that have no match.
        targets: Those in the model.
    """

    sources: Mapping[str, Shape]
    targets: Mapping[str, Shape]

    def for_layers(self, sources: Iterable[str], targets: Iterable[str]) -> Proposal | None:
        """Return a rule that takes one of some layers, or of some parts written as `part.*`, as one of the model's."""
        pairs = islice(product(sources, targets), _MOST_TRIED)
        return next((rule for pair in pairs if (rule := self._for_layer(*pair))), None)

    def _for_layer(self, source: str, target: str) -> Proposal | None:
        if "*" in (source[-1:], target[-1:]):
            return ("*", target) if source == "*" else (source.removesuffix("*"), target.removesuffix("*"))
        endings = [
            {name.removeprefix(path) for name in names if is_at(name, path)}
            for names, path in ((self.sources, source), (self.targets, target))
        ]
        if endings[0] == endings[1] and endings[0] and all(ending[:1] in ("", ".") for ending in endings[0]):
            return self._widest(source, target)
        if len(endings[0]) == len(endings[1]) == 1:
            return self._widest(source + endings[0].pop(), target + endings[1].pop())
        return self._widest(f"{source}_*", f"{target}_*") if endings[0] == endings[1] and endings[0] else None

    def for_the_rest(self) -> Proposal | None:
        """Return a rule for the tensors of one shape that are left on both sides and have most words in common."""
        pairs = [
            (len(words_of(source) & words_of(target)), source, target)
            for target, wanted in self.targets.items()
            for source, shape in self.sources.items()
            if shape == wanted
        ]
        if not pairs:
            return None
        _, source, target = max(pairs, key=lambda pair: pair[0])
        endings = [name.rpartition(".") for name in (source, target)]
        if endings[0][0] and endings[0][2] == endings[1][2] and (rule := self._for_layer(endings[0][0], endings[1][0])):
            return rule
        return self._widest(source, target)

    def _widest(self, source: str, target: str) -> Proposal | None:
        """Return the rule for all blocks of a list, if it leads from such tensors to such, else that for one."""
        glob = [LIST_NUMBER.sub("*", name) for name in (source, target)]
        if LIST_NUMBER.findall(source) == LIST_NUMBER.findall(target) and 0 < glob[0].count("*") <= _MOST_STARS:
            end = "" if source in self.sources or source.endswith("*") else ".*"
            if glob[0].count("*") < _MOST_STARS or not end:
                wide = glob[0] + end, glob[1] + end
                if self._fits(*wide):
                    return wide
        return (source, target) if self._fits(source, target) else self._in_another_layout(source, target)

    def _in_another_layout(self, source: str, target: str) -> Proposal | None:
        """Return a rule for one tensor of a layer that is transposed, or has other dimensions of size one."""
        for name, shape in self.sources.items():
            new = target + name.removeprefix(source)
            wanted = self.targets.get(new)
            if wanted is None or shape == wanted or not is_at(name, source):
                continue
            if shape == wanted[::-1] and len(shape) == 2:
                return {"from": name, "to": new, "transpose": True}
            if [size for size in shape if size != 1] == [size for size in wanted if size != 1]:
                return {"from": name, "to": new, "shape": [*wanted]}
        return None

    def _fits(self, source: str, target: str) -> bool:
        """Whether a rule leads from tensors without a match to tensors of their shapes without one."""
        made = remap_keys(dict(self.sources), [RemapRule(source, target)])
        ruled = [name for name in made.rules_of if made.rules_of[name]]
        return bool(ruled) and all(self.targets.get(name) == made[name] for name in ruled)


def is_at(name: str, path: str) -> bool:
    """Whether a tensor is that of a layer, or is in a part of the model that is written as `part.*`."""
    stem = path.removesuffix("*").removesuffix(".")
    return name == stem or not stem or name.startswith((f"{stem}.", f"{stem}_weight", f"{stem}_bias"))


def in_words(rule: Proposal) -> str:
    """Return what a rule does, as an argument with its meaning."""
    source, target = (rule["from"], rule["to"]) if isinstance(rule, dict) else rule
    return f"rules=[{rule!r}] takes {source} as {target}, and the rest is matched as before"
