"""All of `load_weights` but the loading: which tensors of a file go where in a model, checked before any changes."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_tricks._shared.patterns import Pattern
from lightning_tricks._shared.text import format_shape, list_names
from lightning_tricks.checkpoint_remapping.core.errors import CheckpointError
from lightning_tricks.checkpoint_remapping.core.files.reading import Checkpoint, read_checkpoint
from lightning_tricks.checkpoint_remapping.core.files.storages import MapLocation
from lightning_tricks.checkpoint_remapping.core.load_checks import Allowed, check_tied, matches_any, parse_patterns
from lightning_tricks.checkpoint_remapping.core.matching.alignment import Alignment, Mismatch
from lightning_tricks.checkpoint_remapping.core.matching.alignment_search import find_alignment, shapes_of
from lightning_tricks.checkpoint_remapping.core.matching.synonyms import is_computed
from lightning_tricks.checkpoint_remapping.core.position_embeddings import resize_positions
from lightning_tricks.checkpoint_remapping.core.remapping import remap_keys
from lightning_tricks.checkpoint_remapping.core.rule_file import read_rules
from lightning_tricks.checkpoint_remapping.core.rules import Rules
from lightning_tricks.checkpoint_remapping.core.wrappers import strip_wrappers

Source = str | os.PathLike[str] | Checkpoint | Mapping[str, Any]
Patterns = str | Iterable[str]
RulesArgument = Rules | str | os.PathLike[str] | None


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
        alignment: Which tensor became which, and why; its `report()` is a table.
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
    allowed = Allowed(
        parse_patterns("allow_missing", allow_missing),
        parse_patterns("allow_unexpected", allow_unexpected),
        parse_patterns("allow_mismatched", allow_mismatched),
    )
    resizable = parse_patterns("interpolate", interpolate)
    planner = _LoadPlanner(module, _as_checkpoint(path, map_location, key))
    planner.apply_rules(rules)
    planner.align(by_name=rules != "auto")
    planner.keep_other_kinds()
    planner.resize(resizable)
    planner.check(allowed)
    return LoadPlan(planner.loaded | planner.extra_state(), planner.report())


class _LoadPlanner:
    """The steps of a plan, in the order of the methods."""

    alignment: Alignment

    def __init__(self, module: nn.Module, checkpoint: Checkpoint) -> None:
        self.module = module
        self.checkpoint = checkpoint
        self.file_tensors = {n: value for n, value in checkpoint.state_dict.items() if isinstance(value, torch.Tensor)}
        self.model_tensors = _model_tensors(module)
        self.aliases: dict[str, str] = {}  # names of tied tensors, with the names that are loaded for them
        self.loaded: dict[str, Any] = {}  # the file's tensors, under the model's names
        self.mismatched: list[Mismatch] = []  # what keeps its values
        self.notes: list[str] = []

    def apply_rules(self, rules: RulesArgument) -> None:
        """Rename the file's tensors by the caller's rules; `"auto"` leaves all to `align`."""
        if rules == "auto":
            return
        if rules == "wrappers":
            rules = ["wrappers"]
        remapped = remap_keys(
            self.file_tensors, read_rules(rules) if isinstance(rules, str | os.PathLike) else rules or []
        )
        self.notes += [f"the rule {rule} matched nothing" for rule in remapped.unmatched]
        self.file_tensors = dict(remapped)

    def align(self, by_name: bool) -> None:
        """Find the file's tensor for each of the model's; of tied tensors for one name alone."""
        self.aliases = _aliases(self.model_tensors, self.file_tensors)
        target = {n: tuple(t.shape) for n, t in self.model_tensors.items() if n not in self.aliases}
        self.alignment = find_alignment(target, shapes_of(self.file_tensors), by_name)
        self.loaded = dict(self.alignment.apply(self.file_tensors))

    def keep_other_kinds(self) -> None:
        """Leave out the tensors of integers that would become numbers of another kind, such as quantized weights."""
        self.mismatched += list(self._other_kinds())
        for mismatch in self.mismatched:
            del self.loaded[mismatch.target]

    def _other_kinds(self) -> Iterator[Mismatch]:
        for match in self.alignment.matches:
            for name in match.targets:
                if _number_kind(self.loaded[name]) != _number_kind(self.model_tensors[name]) and not is_computed(name):
                    shape = tuple(self.model_tensors[name].shape)
                    yield Mismatch(f"{match.sources[0]} of {self.loaded[name].dtype}", shape, name, shape)

    def resize(self, resizable: list[Pattern]) -> None:
        """Resize position embeddings; other tensors whose shapes differ keep their values."""
        for mismatch in self.alignment.mismatched:
            if matches_any(resizable, mismatch.target):
                tensor = self.file_tensors[self.alignment.name_in_file(mismatch.source)]
                self.loaded[mismatch.target] = resize_positions(mismatch, tensor)
                self.notes.append(f"{mismatch.target} was resized from {format_shape(mismatch.source_shape)}")
            else:
                self.mismatched.append(mismatch)

    def check(self, allowed: Allowed) -> None:
        """Refuse what does not fit and is not allowed."""
        source, model = self.checkpoint.source or "the checkpoint", type(self.module).__name__
        allowed.check(source, model, self.alignment, self.mismatched, len(self.loaded))
        check_tied(self.model_tensors, self.loaded)

    def extra_state(self) -> dict[str, Any]:
        """Return the values of `get_extra_state` in the file, under names without wrappers' parts."""
        extra = {n: value for n, value in self.checkpoint.state_dict.items() if n.endswith("_extra_state")}
        return {new: extra[old] for old, new in strip_wrappers(extra).items() if new is not None}

    def report(self) -> LoadReport:
        """Return what the plan does."""
        return LoadReport(
            loaded=len(self.loaded) + sum(1 for first in self.aliases.values() if first in self.loaded),
            total=len(self.model_tensors),
            renamed=self.alignment.renamed,
            missing=list(self.alignment.missing),
            unexpected=list(self.alignment.unexpected),
            mismatched=[mismatch.target for mismatch in self.mismatched],
            diagnosis="; ".join([self.alignment.diagnosis.rstrip("."), *self.notes]) + ".",
            alignment=self.alignment,
        )


def _as_checkpoint(path: Source, map_location: MapLocation, key: str | None) -> Checkpoint:
    if isinstance(path, Checkpoint):
        return path
    if isinstance(path, Mapping):
        return Checkpoint(dict(path), "state_dict", {})
    return read_checkpoint(path, map_location="cpu" if map_location is None else map_location, key=key)


def _model_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    tensors = {n: tensor for n, tensor in module.state_dict(keep_vars=True).items() if isinstance(tensor, torch.Tensor)}
    lazy = [name for name, tensor in tensors.items() if nn.parameter.is_lazy(tensor)]
    if lazy:
        raise CheckpointError(f"{list_names(lazy)} have no shape yet: run a batch through the model first.")
    return tensors


def _aliases(model_tensors: Mapping[str, torch.Tensor], file_names: Iterable[str]) -> dict[str, str]:
    """Return the names of tied tensors that the file does not have, with the names that stand for them."""
    names_of: dict[int, list[str]] = defaultdict(list)
    for name, tensor in model_tensors.items():
        names_of[id(tensor)].append(name)
    endings = tuple(f".{name}" for name in file_names)
    aliases: dict[str, str] = {}
    for names in names_of.values():
        named = [name for name in names if f".{name}".endswith(endings)] if len(names) > 1 else names
        first, *_ = named or names
        aliases |= {name: first for name in names if name != first and name not in named}
    return aliases


def _number_kind(tensor: torch.Tensor) -> str:
    return "complex" if tensor.is_complex() else "floating" if tensor.is_floating_point() else "integer"
