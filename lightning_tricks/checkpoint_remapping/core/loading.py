"""Loading and comparing weights; pure PyTorch."""

from __future__ import annotations

import math
import os
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_tricks._shared.modes import eval_mode
from lightning_tricks._shared.patterns import Pattern
from lightning_tricks._shared.tensors import tensors_in
from lightning_tricks._shared.text import format_shape
from lightning_tricks.checkpoint_remapping.core.errors import (
    AmbiguousAlignmentError,
    CheckpointError,
    NothingLoadedError,
)
from lightning_tricks.checkpoint_remapping.core.files.reading import Checkpoint, read_checkpoint
from lightning_tricks.checkpoint_remapping.core.files.saving import is_on_meta
from lightning_tricks.checkpoint_remapping.core.files.storages import MapLocation
from lightning_tricks.checkpoint_remapping.core.matching.alignment import (
    Alignment,
    Mismatch,
    ambiguity,
    find_alignment,
    listed,
    shapes_of,
)
from lightning_tricks.checkpoint_remapping.core.matching.synonyms import is_computed
from lightning_tricks.checkpoint_remapping.core.rules import Rules, read_rules, remap_keys, strip_wrappers

Source = str | os.PathLike[str] | Checkpoint | Mapping[str, Any]
Patterns = str | Iterable[str]


@dataclass(frozen=True)
class LoadReport:
    """What `load_weights` did.

    Attributes:
        loaded: How many of the model's tensors were loaded.
        total: How many it has.
        renamed: The model's names by those of the file, where they differ.
        missing: The model's names that the file has nothing for.
        unexpected: The file's names, without wrappers' parts, that the model has no place for.
        mismatched: The model's names whose shapes differ, and which kept their values.
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


def load_weights(
    model: nn.Module,
    path: Source,
    *,
    rules: Rules | str | os.PathLike[str] | None = "auto",
    submodule: str | None = None,
    allow_missing: Patterns = (),
    allow_unexpected: Patterns = (),
    allow_mismatched: Patterns = (),
    interpolate: Patterns = (),
    map_location: MapLocation = None,
    assign: bool | None = None,
    key: str | None = None,
) -> LoadReport:
    """Load the weights of any file into a model that has a place for them, whatever the names.

    All is checked before the first value changes: what is missing, left over or of another shape raises, unless a
    pattern allows it. Buffers that a model computes for itself (BatchNorm's counters, indices of positions) may be
    missing.

    Args:
        model: Takes the values, in its own precision and on its own devices; on the meta device it takes the tensors.
        path: As in `read_checkpoint`, or what it returned, or tensors by name.
        rules: `"auto"` finds the mapping (`align`); a list of rules, `"wrappers"` or the path of a YAML file of rules
            is applied as it is (`remap_keys`); None takes the names as they are.
        submodule: The part of the model that takes them, such as `"backbone"`.
        allow_missing: Patterns (a glob, or `re:` and a regular expression) of names of the model that may be missing.
        allow_unexpected: Patterns of names of the file, without wrappers' parts, that may be left over.
        allow_mismatched: Patterns of names of the model that keep their values where shapes differ.
        interpolate: Patterns of names of the model, of position embeddings, that are resized to their new length.
        map_location: Where the file's tensors go first, as in `torch.load`; None reads them as the model needs them.
        assign: Whether tensors replace the model's instead of being copied into them; None does so on the meta device
            alone. Tensors that replace others stay mapped from the file: never write into it.
        key: As in `read_checkpoint`.

    Returns:
        What was loaded and what was not.

    Raises:
        CheckpointError: If something is missing, left over or of another shape and no pattern allows it; the model is
            then unchanged. The other errors are those of `read_checkpoint` and `align`.
        NothingLoadedError: If no tensor fits.
        AttributeError: If there is no such submodule.

    Example:
        >>> model = torch.nn.Linear(2, 3)
        >>> report = load_weights(model, {"module.weight": torch.zeros(3, 2), "module.bias": torch.ones(3)})
        >>> report.loaded, report.diagnosis
        (2, 'all 2 keys carry `module.`: saved from DataParallel, DistributedDataParallel or an averaged model.')
    """
    module = model.get_submodule(submodule) if submodule else model
    plan = plan_loading(
        module,
        path,
        rules=rules,
        allow_missing=allow_missing,
        allow_unexpected=allow_unexpected,
        allow_mismatched=allow_mismatched,
        interpolate=interpolate,
        map_location=map_location,
        key=key,
    )
    own = module.state_dict()
    assigned: dict[str, Any] = {}
    copied: dict[str, Any] = {}
    for name, tensor in plan.tensors.items():
        valueless = is_on_meta(own.get(name))
        if assign or (valueless and assign is None):
            assigned[name] = _like(tensor, own.get(name))
        elif not valueless:
            copied[name] = tensor
    for tensors in (assigned, copied):
        if tensors:
            _load(module, tensors, assign=tensors is assigned)
    left = [name for name, tensor in module.state_dict().items() if is_on_meta(tensor)]
    if not left:
        return plan.report
    diagnosis = f"{plan.report.diagnosis} Still on the meta device, without values: {listed(left)}."
    return LoadReport(**{**vars(plan.report), "diagnosis": diagnosis})


@dataclass(frozen=True)
class LoadPlan:
    """Tensors that fit a module, under its names, and what is to be said of them."""

    tensors: dict[str, Any]
    report: LoadReport


def plan_loading(
    module: nn.Module,
    path: Source,
    *,
    rules: Rules | str | os.PathLike[str] | None = "auto",
    allow_missing: Patterns = (),
    allow_unexpected: Patterns = (),
    allow_mismatched: Patterns = (),
    interpolate: Patterns = (),
    map_location: MapLocation = None,
    key: str | None = None,
) -> LoadPlan:
    """Do all of `load_weights` but the loading."""
    allowed = {
        "missing": _patterns("allow_missing", allow_missing),
        "unexpected": _patterns("allow_unexpected", allow_unexpected),
        "mismatched": _patterns("allow_mismatched", allow_mismatched),
    }
    resizable = _patterns("interpolate", interpolate)
    checkpoint = _checkpoint(path, map_location, key)
    source = checkpoint.source or "the checkpoint"
    tensors = {name: value for name, value in checkpoint.state_dict.items() if isinstance(value, torch.Tensor)}
    notes: list[str] = []
    own = _own_tensors(module)
    if rules != "auto":
        if rules == "wrappers":
            rules = ["wrappers"]
        chosen = read_rules(rules) if isinstance(rules, str | os.PathLike) else rules or []
        remapped = remap_keys(tensors, chosen)
        notes += [f"the rule {rule} matched nothing" for rule in remapped.unmatched]
        tensors = dict(remapped)
    target = {name: tuple(tensor.shape) for name, tensor in own.items()}
    alike = _aliases(own, tensors)
    target = {name: shape for name, shape in target.items() if name not in alike}
    alignment = find_alignment(target, shapes_of(tensors), by_name=rules != "auto")
    fitting: dict[str, Any] = dict(alignment.apply(tensors))
    kept = list(_other_kinds(alignment, fitting, own))
    for mismatch in kept:
        del fitting[mismatch.target]
    for mismatch in alignment.mismatched:
        if any(pattern.matches(mismatch.target) for pattern in resizable):
            fitting[mismatch.target] = _resized(mismatch, tensors[alignment.name_in_file(mismatch.source)])
            notes.append(f"{mismatch.target} was resized from {format_shape(mismatch.source_shape)}")
        else:
            kept.append(mismatch)
    _refuse(source, type(module).__name__, alignment, kept, allowed, len(fitting))
    _check_tied(own, fitting)
    extra = {name: value for name, value in checkpoint.state_dict.items() if name.endswith("_extra_state")}
    extra = {new: extra[old] for old, new in strip_wrappers(extra).items() if new is not None}
    report = LoadReport(
        loaded=len(fitting) + sum(1 for first in alike.values() if first in fitting),
        total=len(own),
        renamed=alignment.renamed,
        missing=list(alignment.missing),
        unexpected=list(alignment.unexpected),
        mismatched=[mismatch.target for mismatch in kept],
        diagnosis="; ".join([alignment.diagnosis.rstrip("."), *notes]) + ".",
        alignment=alignment,
    )
    return LoadPlan(fitting | extra, report)


@torch.no_grad()
def max_output_difference(model_a: nn.Module, model_b: nn.Module, inputs: Any) -> float:
    """Return the largest difference between two models' outputs, relative to the largest output of the first.

    Both run in evaluation mode, and are left in the modes that they were in.

    Args:
        model_a: The one to compare with.
        model_b: The other.
        inputs: A tensor, a tuple of arguments or a dict of them.

    Raises:
        ValueError: If the outputs are not tensors of equal shapes.

    Example:
        >>> max_output_difference(torch.nn.Identity(), torch.nn.ReLU(), torch.tensor([-1.0, 2.0]))
        0.5
    """
    outputs = [_output(model, inputs) for model in (model_a, model_b)]
    shapes = [[tuple(tensor.shape) for tensor in tensors] for tensors in outputs]
    if shapes[0] != shapes[1] or not shapes[0]:
        raise ValueError(f"the outputs have other shapes: {shapes[0]} and {shapes[1]}.")
    pairs = [(one.double(), other.double()) for one, other in zip(*outputs, strict=True)]
    difference = max(float((one - other).abs().max()) if one.numel() else 0.0 for one, other in pairs)
    largest = max(float(one.abs().max()) if one.numel() else 0.0 for one, _ in pairs)
    return difference / largest if largest else (math.inf if difference else 0.0)


def _output(model: nn.Module, inputs: Any) -> list[torch.Tensor]:
    with eval_mode(model):
        if isinstance(inputs, Mapping):
            result = model(**inputs)
        else:
            result = model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)
    return [tensor for tensor in tensors_in(result) if tensor.is_floating_point()]


# Loading


def _checkpoint(path: Source, map_location: MapLocation, key: str | None) -> Checkpoint:
    if isinstance(path, Checkpoint):
        return path
    if isinstance(path, Mapping):
        return Checkpoint(dict(path), "state_dict", {})
    return read_checkpoint(path, map_location="cpu" if map_location is None else map_location, key=key)


def _patterns(name: str, patterns: Patterns) -> list[Pattern]:
    if isinstance(patterns, str):
        patterns = (patterns,)
    if not isinstance(patterns, Iterable):
        raise TypeError(f"{name} must be a pattern or a list of them, got {patterns!r}.")
    return [Pattern(pattern) for pattern in patterns]


def _own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    own = {n: tensor for n, tensor in module.state_dict(keep_vars=True).items() if isinstance(tensor, torch.Tensor)}
    lazy = [name for name, tensor in own.items() if nn.parameter.is_lazy(tensor)]
    if lazy:
        raise CheckpointError(f"{listed(lazy)} have no shape yet: run a batch through the model first.")
    return own


def _aliases(own: Mapping[str, torch.Tensor], tensors: Iterable[str]) -> dict[str, str]:
    """Return the names of tied tensors that the checkpoint doesn't name, with the names that stand for them."""
    same: dict[int, list[str]] = defaultdict(list)
    for name, tensor in own.items():
        same[id(tensor)].append(name)
    endings = tuple(f".{name}" for name in tensors)
    alike: dict[str, str] = {}
    for names in same.values():
        named = [name for name in names if f".{name}".endswith(endings)] if len(names) > 1 else names
        first, *_ = named or names
        alike |= {name: first for name in names if name != first and name not in named}
    return alike


def _check_tied(own: Mapping[str, torch.Tensor], fitting: Mapping[str, Any]) -> None:
    first: dict[int, str] = {}
    for name in fitting:
        other = first.setdefault(id(own[name]), name)
        if other != name and not torch.equal(fitting[name], fitting[other]):
            raise CheckpointError(
                f"{other} and {name} are one tensor in the model and two different ones in the checkpoint: untie them, "
                "or drop one with a rule."
            )


def _other_kinds(
    alignment: Alignment, fitting: Mapping[str, Any], own: Mapping[str, torch.Tensor]
) -> Iterator[Mismatch]:
    """Yield the tensors of integers that would become numbers of another kind, such as quantised weights."""
    for match in alignment.matches:
        for name in match.targets:
            if _kind(fitting[name]) != _kind(own[name]) and not is_computed(name):
                shape = tuple(own[name].shape)
                yield Mismatch(f"{match.sources[0]} of {fitting[name].dtype}", shape, f"{name}", shape)


def _kind(tensor: torch.Tensor) -> str:
    return "complex" if tensor.is_complex() else "floating" if tensor.is_floating_point() else "whole"


def _refuse(
    source: str,
    model: str,
    found: Alignment,
    mismatched: Sequence[Mismatch],
    allowed: Mapping[str, Sequence[Pattern]],
    count: int,
) -> None:
    """Raise what is wrong with an alignment, with the argument that allows it."""

    def is_allowed(what: str, name: str) -> bool:
        return any(pattern.matches(name) for pattern in allowed[what])

    missing = [name for name in found.missing if not is_computed(name) and not is_allowed("missing", name)]
    if found.ambiguous and missing:
        raise AmbiguousAlignmentError(f"{source} does not load into {model}: {ambiguity(found)}")
    unexpected = [name for name in found.unexpected if not is_allowed("unexpected", name)]
    wrong = [mismatch for mismatch in mismatched if not is_allowed("mismatched", mismatch.target)]
    positions = [mismatch.target for mismatch in wrong if "pos" in mismatch.target]
    resize = f", interpolate={_suggestion(positions)} resizes positions" if positions else ""
    problems = [
        f"{len(names)} {what}: {listed(shown)} ({remedy}={_suggestion(names)} allows that{more})"
        for what, names, shown, remedy, more in (
            ("of other shapes or kinds", [m.target for m in wrong], map(str, wrong), "allow_mismatched", resize),
            ("missing in the file", missing, missing, "allow_missing", ""),
            ("left over in the file", unexpected, unexpected, "allow_unexpected", ""),
        )
        if names
    ]
    if not count:
        others = f" ({problems[0]})" if wrong else ""
        raise NothingLoadedError(f"not one tensor of {source} has a place in {model}{others}: {found.diagnosis}")
    if problems:
        raise CheckpointError(
            f"{source} does not fit {model}, which was left as it is. {'; '.join(problems)}. {count} of {found.total} "
            f"tensors would load: {found.diagnosis}"
        )


def _suggestion(names: Sequence[str]) -> list[str]:
    parents = dict.fromkeys(f"{name.rpartition('.')[0]}.*" if "." in name else name for name in names)
    tops = dict.fromkeys(f"{name.partition('.')[0]}.*" if "." in name else name for name in names)
    return list(parents if len(parents) <= 3 else tops)


def _resized(mismatch: Mismatch, tensor: torch.Tensor) -> torch.Tensor:
    """Resize embeddings of positions: (1, tokens + n^2, C), (1, C, H, W) or Swin's ((2n-1)^2, heads), bicubically."""
    old, new = mismatch.source_shape, mismatch.target_shape
    if len(old) == len(new) == 4 and old[:2] == new[:2]:
        return _bicubic(tensor, new[2:])
    if len(old) == len(new) in (2, 3) and old[-1] == new[-1] and math.prod(old[:-2]) == math.prod(new[:-2]) == 1:
        rows, length = tensor.reshape(old[-2], old[-1]), new[-2]
        for extra in range(3):  # class and distillation tokens come first
            sides = [math.isqrt(max(count - extra, 0)) for count in (len(rows), length)]
            if [side * side + extra for side in sides] == [len(rows), length] and min(sides) > 0:
                grid = rows[extra:].T.reshape(1, -1, sides[0], sides[0])
                moved = _bicubic(grid, (sides[1], sides[1])).reshape(old[-1], -1).T
                return torch.cat([rows[:extra], moved.to(rows.dtype)]).reshape(new)
    raise CheckpointError(f"{mismatch} cannot be interpolated: it is no grid of positions.")


def _bicubic(grid: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    resized = nn.functional.interpolate(grid.float(), list(size), mode="bicubic", antialias=True, align_corners=False)
    return resized.to(grid.dtype)


def _like(tensor: Any, own: Any) -> Any:
    return tensor.to(own.dtype) if isinstance(own, torch.Tensor) and isinstance(tensor, torch.Tensor) else tensor


def _load(module: nn.Module, tensors: dict[str, Any], assign: bool) -> None:
    """Copy or assign; with the module's own versions, as tensors with its names and shapes are of its version."""
    state = OrderedDict(tensors)
    state._metadata = getattr(module.state_dict(), "_metadata", None)  # type: ignore[attr-defined]
    module.load_state_dict(state, strict=False, assign=assign)
