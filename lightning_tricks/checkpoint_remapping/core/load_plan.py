"""All of `load_weights` but the loading: which tensors of a file go where in a model, checked before any changes."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lightning_tricks._shared.added_parameters import added_names, names_added_by_peft
from lightning_tricks._shared.checks import check_path
from lightning_tricks._shared.patterns import Pattern
from lightning_tricks._shared.text import format_shape, list_names
from lightning_tricks.checkpoint_remapping.core.errors import CheckpointError
from lightning_tricks.checkpoint_remapping.core.files.reading import Checkpoint, checkpoint_of_values, read_checkpoint
from lightning_tricks.checkpoint_remapping.core.files.storages import MapLocation
from lightning_tricks.checkpoint_remapping.core.load_checks import (
    Allowed,
    check_values,
    explaining_shards,
    matches_any,
    parse_patterns,
)
from lightning_tricks.checkpoint_remapping.core.matching.alignment import Alignment, Mismatch
from lightning_tricks.checkpoint_remapping.core.matching.alignment_search import (
    find_alignment,
    names_in_file,
    shapes_of,
)
from lightning_tricks.checkpoint_remapping.core.matching.synonyms import is_computed
from lightning_tricks.checkpoint_remapping.core.position_embeddings import resize_positions
from lightning_tricks.checkpoint_remapping.core.remapping import strip_wrappers
from lightning_tricks.checkpoint_remapping.core.rule_application import AppliedRules, RulesArgument, apply_rules
from lightning_tricks.checkpoint_remapping.core.tied_tensors import (
    check_tied,
    find_aliases,
    repeated_tensors,
    tied_names,
    with_names_of_header,
)

Source = str | os.PathLike[str] | Checkpoint | Mapping[str, Any]
Patterns = str | Iterable[str]


@dataclass(frozen=True)
class LoadReport:
    """What `load_weights` did.

    Attributes:
        loaded: Number of tensors of the model that were loaded.
        total: Number of tensors of the model.
        renamed: The model's names by those of the file, where they differ.
        missing: Names of the model that the file has no tensor for.
        unexpected: Names of the file, without wrappers' parts, that the model has no tensor for.
        mismatched: Names of the model whose shapes or kinds differ, and which kept their values.
        diagnosis: What was found, in words.
        alignment: Which tensor became which, why, and how strong that evidence is; its `report()` is a table.
    """

    loaded: int
    total: int
    renamed: dict[str, str]
    missing: list[str]
    unexpected: list[str]
    mismatched: list[str]
    diagnosis: str
    alignment: Alignment

    def __str__(self) -> str:
        return f"{self.alignment.summary()}: {self.diagnosis}"


@dataclass(frozen=True)
class LoadPlan:
    """Tensors that fit a module, under its names, and the report of what was found."""

    tensors: dict[str, Any]
    report: LoadReport


def plan_loading(
    module: nn.Module,
    path: Source,
    *,
    rules: RulesArgument = "auto",
    allow_missing: Patterns = (),
    allow_unexpected: Patterns = (),
    allow_mismatched: Patterns = (),
    interpolate: Patterns = (),
    map_location: MapLocation = None,
    key: str | None = None,
) -> LoadPlan:
    """Do all of `load_weights` but the loading; the arguments are the same."""
    if isinstance(rules, str | os.PathLike):
        check_path("rules", rules, "a file of rules")
    allowed = Allowed(
        parse_patterns("allow_missing", allow_missing),
        parse_patterns("allow_unexpected", allow_unexpected),
        parse_patterns("allow_mismatched", allow_mismatched),
    )
    resizable = parse_patterns("interpolate", interpolate)
    planner = _LoadPlanner(module, _as_checkpoint(path, map_location, key))
    planner.apply_rules(rules)
    planner.align()
    planner.leave_out(allowed.unexpected)
    planner.keep_other_kinds()
    planner.resize(resizable)
    planner.check(allowed)
    return LoadPlan(planner.loaded | planner.extra_state(), planner.report())


class _LoadPlanner:
    """The steps of a plan, in the order of the methods."""

    rules: AppliedRules
    alignment: Alignment

    def __init__(self, module: nn.Module, checkpoint: Checkpoint) -> None:
        self.module = module
        self.checkpoint = checkpoint
        self.model_tensors = _model_tensors(module)
        self.file_tensors = with_names_of_header(
            {n: value for n, value in checkpoint.state_dict.items() if isinstance(value, torch.Tensor)},
            checkpoint.metadata if checkpoint.kind == "safetensors" else {},
            self.model_tensors,
        )
        self.notes: list[str] = []
        self._leave_out_added()
        self.aliases: dict[str, str] = {}  # names of tied tensors, with the names that are loaded for them
        self.loaded: dict[str, Any] = {}  # the file's tensors, under the model's names

    def _leave_out_added(self) -> None:
        """Leave out the parameters of LoRA and adapters, if the file has none."""
        added = added_names(self.module) | names_added_by_peft(self.module)
        modules = {f"{name.rpartition('.')[0].rpartition('.')[2]}." for name in added}
        if added and not any(module in name for name in self.file_tensors for module in modules):
            self.model_tensors = {n: tensor for n, tensor in self.model_tensors.items() if n not in added}
            self.notes.append(f"{len(added)} tensors of adapters keep their values")

    def apply_rules(self, rules: RulesArgument) -> None:
        """Apply the caller's rules to the file's tensors."""
        self.rules = apply_rules(self.file_tensors, rules, self.model_tensors.keys())
        self.notes += self.rules.notes
        self.file_tensors = self.rules.tensors

    def align(self) -> None:
        """Find the file's tensor for each of the model's that no rule led to; of tied tensors for one name alone."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self.model_tensors.items()}
        by_name, pinned = not self.rules.search, self.rules.pinned
        groups = tied_names(self.model_tensors)
        if groups:
            named = names_in_file(shapes, shapes_of(self.file_tensors), by_name, pinned)
            self.aliases = find_aliases(groups, named)
            self._leave_out_repeated({shapes[name] for name in self.aliases}, {*named.values()})
        self.alignment = self._align(self.file_tensors)
        self.loaded = dict(self.alignment.apply(self.file_tensors))

    def _align(self, tensors: Mapping[str, torch.Tensor]) -> Alignment:
        target = {n: tuple(tensor.shape) for n, tensor in self.model_tensors.items() if n not in self.aliases}
        return find_alignment(target, shapes_of(tensors), not self.rules.search, self.rules.pinned, self.rules.ruled)

    def leave_out(self, patterns: Sequence[Pattern]) -> None:
        """Leave out what may be left over, if a file has too much to tell what is meant, and everything else fits.

        So a file of a student and its teacher, or of an encoder and a decoder, is one of either.
        """
        lacking = {*self.alignment.missing} - {*self.alignment.computed}
        if not (lacking and patterns and self.rules.search):
            return
        clean = strip_wrappers(self.file_tensors)
        left_out = [name for name, new in clean.items() if new is not None and matches_any(patterns, new)]
        kept = {name: tensor for name, tensor in self.file_tensors.items() if name not in left_out}
        found = self._align(kept)
        if left_out and kept and {*found.missing} <= {*found.computed}:
            unexpected = (*found.unexpected, *(clean[name] or name for name in left_out))
            self.alignment = replace(found, unexpected=unexpected)
            self.loaded = dict(found.apply(kept))

    def _leave_out_repeated(self, shapes: Collection[tuple[int, ...]], named: Collection[str]) -> None:
        """Leave out the further names of tied tensors of the file where the model has other names for such ones."""
        for names in repeated_tensors(self.file_tensors):
            kept = [name for name in names if name in named] or names[:1]
            for name in names:
                if name not in kept and tuple(self.file_tensors[name].shape) in shapes:
                    del self.file_tensors[name]
                    self.notes.append(f"{name} is the same tensor as {kept[0]} in the file")

    def keep_other_kinds(self) -> None:
        """Leave out the tensors of integers that would become numbers of another kind, such as quantized weights."""
        others = list(self._other_kinds())
        for mismatch in others:
            del self.loaded[mismatch.target]
        self.alignment = self.alignment.without(others)

    def _other_kinds(self) -> Iterator[Mismatch]:
        for match in self.alignment.matches:
            for name in match.targets:
                tensors = self.loaded[name], self.model_tensors[name]
                if _number_kind(tensors[0]) != _number_kind(tensors[1]) and not is_computed(
                    name, tuple(tensors[1].shape)
                ):
                    file_shape, own_shape = (tuple(tensor.shape) for tensor in tensors)
                    file_kind, own_kind = map(_describe_kind, tensors)
                    yield Mismatch(match.sources[0], file_shape, name, own_shape, (file_kind, own_kind))

    def resize(self, resizable: list[Pattern]) -> None:
        """Resize position embeddings; other tensors whose shapes differ keep their values."""
        resized = []
        for mismatch in self.alignment.mismatched:
            if mismatch.kinds is None and matches_any(resizable, mismatch.target):
                tensor = self.file_tensors[self.alignment.name_in_file(mismatch.source)]
                self.loaded[mismatch.target] = resize_positions(mismatch, tensor, self.module)
                self.notes.append(f"{mismatch.target} was resized from {format_shape(mismatch.source_shape)}")
                resized.append(mismatch)
        self.alignment = self.alignment.with_resized(resized)

    def check(self, allowed: Allowed) -> None:
        """Refuse what does not fit and is not allowed."""
        source, model = self.checkpoint.source or "the checkpoint", type(self.module).__name__
        with explaining_shards(source):
            self._check(source, model, allowed)

    def _check(self, source: str, model: str, allowed: Allowed) -> None:
        ruled = [mismatch for mismatch in self.alignment.mismatched if mismatch.source in self.rules.pinned]
        allowed.check_ruled(source, model, ruled)
        allowed.check(source, model, self.alignment, len(self.loaded))
        check_values(source, self.loaded)
        check_tied(self.model_tensors, self.loaded)

    def extra_state(self) -> dict[str, Any]:
        """Return the values of `get_extra_state` in the file, under names without wrappers' parts."""
        extra = {n: value for n, value in self.checkpoint.state_dict.items() if n.endswith("_extra_state")}
        return {new: extra[old] for old, new in strip_wrappers(extra).items() if new is not None}

    def report(self) -> LoadReport:
        """Return what the plan does."""
        alignment = self.alignment.after(self.rules)
        return LoadReport(
            loaded=len(self.loaded) + sum(1 for first in self.aliases.values() if first in self.loaded),
            total=len(self.model_tensors),
            renamed=alignment.renamed,
            missing=list(alignment.missing),
            unexpected=list(alignment.unexpected),
            mismatched=[mismatch.target for mismatch in alignment.mismatched],
            diagnosis="; ".join([alignment.diagnosis.rstrip("."), *self.notes]) + ".",
            alignment=alignment,
        )


def _as_checkpoint(path: Source, map_location: MapLocation, key: str | None) -> Checkpoint:
    if isinstance(path, Checkpoint):
        return path
    if isinstance(path, Mapping):
        return checkpoint_of_values(path, key)
    return read_checkpoint(path, map_location="cpu" if map_location is None else map_location, key=key)


def _model_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    tensors = {n: tensor for n, tensor in module.state_dict(keep_vars=True).items() if isinstance(tensor, torch.Tensor)}
    lazy = [name for name, tensor in tensors.items() if nn.parameter.is_lazy(tensor)]
    if lazy:
        raise CheckpointError(f"{list_names(lazy)} have no shape yet: run a batch through the model first.")
    return tensors


def _number_kind(tensor: torch.Tensor) -> tuple[str, torch.layout]:
    kind = "complex" if tensor.is_complex() else "floating" if tensor.is_floating_point() else "integer"
    return kind, tensor.layout


def _describe_kind(tensor: torch.Tensor) -> str:
    return str(tensor.dtype) + f" ({tensor.layout})" * (tensor.layout != torch.strided)
