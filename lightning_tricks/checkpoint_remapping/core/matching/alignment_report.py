"""What an alignment found, in words: a table, a line of counts, a diagnosis, and what is ambiguous."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from lightning_tricks._shared.text import format_shape, list_names
from lightning_tricks._shared.units import format_si
from lightning_tricks.checkpoint_remapping.core.matching.layer_grouping import Shape
from lightning_tricks.checkpoint_remapping.core.matching.matches import CONVERSION, FUSED, Matching
from lightning_tricks.checkpoint_remapping.core.matching.name_matching import Prefixes
from lightning_tricks.checkpoint_remapping.core.matching.proposals import in_words, is_at
from lightning_tricks.checkpoint_remapping.core.wrappers import WRAPPERS, strip_wrappers

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
    rules = (alignment.proposals.for_layers(*case) for case in cases[:8]) if alignment.proposals else iter(())
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
