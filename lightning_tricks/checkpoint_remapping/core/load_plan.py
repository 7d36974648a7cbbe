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
    check_fit,
    parse_patterns,
)
from lightning_tricks.checkpoint_remapping.core.matching.alignment import Alignment, Mismatch
from lightning_tricks.checkpoint_remapping.core.matching.alignment_search import find_tensors, tensors_of
from lightning_tricks.checkpoint_remapping.core.matching.matches import Match
from lightning_tricks.checkpoint_remapping.core.matching.synonyms import is_computed
from lightning_tricks.checkpoint_remapping.core.position_embeddings import resize_positions
from lightning_tricks.checkpoint_remapping.core.remapping import (
    RulesArgument,
    strip_wrappers,
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
        missing=parse_patterns("allow_missing", allow_missing),
        unexpected=parse_patterns("allow_unexpected", allow_unexpected),
        mismatched=parse_patterns("allow_mismatched", allow_mismatched),
    )
    resizable = parse_patterns("interpolate", interpolate)
    checkpoint = _as_checkpoint(path, map_location, key)
    plan = LoadPlan(module, checkpoint, rules, allowed.unexpected)
    plan.keep_other_kinds()
    plan.resize(resizable)
    check_fit(plan, allowed)
    return plan


class LoadPlan:
    """What loading does: the file's tensors under the names of the model.

    Args:
        module: The model.
        checkpoint: The file.
        rules: The caller's rules, as in `load_weights`.
        left_over: Patterns of names in the file that may be left over.

    Attributes:
        loaded: The tensors that are loaded, under the model's names.
        alignment: Which tensor of the file became which of the model.
        model_tensors: The model's tensors; of tied ones, all names.
        rules: What the rules made of the file.
    """

    def __init__(
        self, module: nn.Module, checkpoint: Checkpoint, rules: RulesArgument, left_over: Sequence[Pattern]
    ) -> None:
        self.module = module
        self.source = checkpoint.source or "the checkpoint"
        self.model_tensors = _model_tensors(module)
        self._values = checkpoint.state_dict
        tensors = _with_names_of_header(checkpoint, self.model_tensors)
        adapters = self._leave_out_added(tensors)
        found = find_tensors(self.model_tensors, tensors, rules, left_over)
        self.alignment, self.loaded, self.rules, self._aliases, notes = found
        self._notes = [*adapters, *notes]

    def _leave_out_added(self, tensors: Collection[str]) -> list[str]:
        """Leave out the parameters of LoRA and adapters, if the file has none; return what should be said."""
        added = added_names(self.module) | names_added_by_peft(self.module)
        modules = {f"{name.rpartition('.')[0].rpartition('.')[2]}." for name in added}
        if not added or any(module in name for name in tensors for module in modules):
            return []
        self.model_tensors = {n: tensor for n, tensor in self.model_tensors.items() if n not in added}
        return [f"{len(added)} tensors of adapters keep their values"]

    def keep_other_kinds(self) -> None:
        """Leave out the tensors of integers that would become numbers of another kind, such as quantized weights."""
        others = list(self._other_kinds())
        for mismatch in others:
            del self.loaded[mismatch.target]
        names = {mismatch.target for mismatch in others}
        self.alignment = replace(
            self.alignment,
            matches=tuple(match for match in self.alignment.matches if names.isdisjoint(match.targets)),
            mismatched=(*others, *self.alignment.mismatched),
        )

    def _other_kinds(self) -> Iterator[Mismatch]:
        for match in self.alignment.matches:
            for name in match.targets:
                tensors = self.loaded[name], self.model_tensors[name]
                shapes = [tuple(tensor.shape) for tensor in tensors]
                kinds = [_number_kind(tensor) for tensor in tensors]
                if kinds[0] != kinds[1] and not is_computed(name, shapes[1]):
                    file_kind, own_kind = map(_describe_kind, tensors)
                    yield Mismatch(match.ruled[0], shapes[0], name, shapes[1], (file_kind, own_kind))

    def resize(self, resizable: Sequence[Pattern]) -> None:
        """Resize position embeddings; other tensors whose shapes differ keep their values."""
        resized = [
            mismatch
            for mismatch in self.alignment.mismatched
            if mismatch.kinds is None and any(pattern.matches(mismatch.target) for pattern in resizable)
        ]
        for mismatch in resized:
            tensor = self.rules.tensors[self.alignment.name_in_file(mismatch.source)]
            self.loaded[mismatch.target] = resize_positions(mismatch, tensor, self.module)
            self._notes.append(f"{mismatch.target} was resized from {format_shape(mismatch.source_shape)}")
        made = (Match((m.source,), (m.target,), reason="positions, resized to their new number") for m in resized)
        self.alignment = replace(
            self.alignment,
            matches=(*self.alignment.matches, *(match.with_names_in_file(self.rules.ruled) for match in made)),
            mismatched=tuple(mismatch for mismatch in self.alignment.mismatched if mismatch not in resized),
        )

    @property
    def tensors(self) -> dict[str, Any]:
        """The tensors that are loaded, and the values of `get_extra_state`, under the model's names."""
        extra = {name: value for name, value in self._values.items() if name.endswith("_extra_state")}
        return self.loaded | {new: extra[old] for old, new in strip_wrappers(extra).items() if new is not None}

    @property
    def report(self) -> LoadReport:
        """What the plan does."""
        found = self.alignment
        return LoadReport(
            loaded=len(self.loaded) + sum(1 for first in self._aliases.values() if first in self.loaded),
            total=len(self.model_tensors),
            renamed=found.renamed,
            missing=list(found.missing),
            unexpected=list(found.unexpected),
            mismatched=[mismatch.target for mismatch in found.mismatched],
            diagnosis="; ".join([found.diagnosis.rstrip("."), *self._notes]) + ".",
            alignment=found,
        )


def _as_checkpoint(path: Source, map_location: MapLocation, key: str | None) -> Checkpoint:
    if isinstance(path, Checkpoint):
        return path
    if isinstance(path, Mapping):
        return checkpoint_of_values(path, key)
    return read_checkpoint(path, map_location="cpu" if map_location is None else map_location, key=key)


def _model_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    tensors = tensors_of(module.state_dict(keep_vars=True))
    lazy = [name for name, tensor in tensors.items() if nn.parameter.is_lazy(tensor)]
    if lazy:
        raise CheckpointError(f"{list_names(lazy)} have no shape yet: run a batch through the model first.")
    return tensors


def _number_kind(tensor: torch.Tensor) -> tuple[str, torch.layout]:
    kind = "complex" if tensor.is_complex() else "floating" if tensor.is_floating_point() else "integer"
    return kind, tensor.layout


def _describe_kind(tensor: torch.Tensor) -> str:
    return str(tensor.dtype) + f" ({tensor.layout})" * (tensor.layout != torch.strided)


def _with_names_of_header(checkpoint: Checkpoint, model_names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return tensors with the names that a .safetensors left out and the model has, whatever stands in front of them.

    The header names the tensor that each is tied to.
    """
    tensors = {n: value for n, value in checkpoint.state_dict.items() if isinstance(value, torch.Tensor)}
    header = checkpoint.metadata if checkpoint.kind == "safetensors" else {}
    left_out = {name: tensors[kept] for name, kept in header.items() if isinstance(kept, str) and kept in tensors}
    wanted = [f".{name}" for name in strip_wrappers(model_names).values() if name] if left_out else []
    clean = {name: f".{new}" for name, new in strip_wrappers(left_out).items() if new}
    endings = {name: [own for own in wanted if own.endswith(new) or new.endswith(own)] for name, new in clean.items()}
    return {name: left_out[name] for name, found in endings.items() if found} | tensors
