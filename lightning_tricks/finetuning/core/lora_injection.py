"""`add_lora` and `merge`: put low-rank changes beside the weights of a model, and fold them in."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tricks._shared.added_parameters import added_modules
from lightning_tricks._shared.patterns import strip_compile_prefix
from lightning_tricks._shared.text import list_names
from lightning_tricks._torch_compat.modules import registered_tensor
from lightning_tricks.finetuning.core.class_extension import check_restorable, extend, restore
from lightning_tricks.finetuning.core.injection import Injection, InjectionReport, parameters_of
from lightning_tricks.finetuning.core.lora_layers import (
    CHANGE,
    LoRA,
    LoRASettings,
    LowRank,
    changes_of,
    is_linear,
    is_transposed_linear,
    kind_for,
    refuse_other_weights,
    weights_of,
)


def add_lora(
    model: nn.Module, settings: LoRASettings | None = None, *, generator: torch.Generator | None = None
) -> InjectionReport:
    """Freeze a model, and add a trainable low-rank change to the weights of some of its layers, in place.

    The weights keep their identity, names and values: a checkpoint of the plain model has the same names, except for
    the new `<layer>.lora_<weight>.A` and `.B`. At first the changes are zero. A weight that multiple layers share has
    one change, in all of them. Values that are written into a weight that was read from its layer, as by `nn.init`, are
    lost: tie and initialize weights, and apply weight_norm or pruning, before this.

    Args:
        model: The model; nothing is changed if an error is raised.
        settings: The layers to change, and how.
        generator: Draws the initial values; None for a new one with torch's seed.

    Returns:
        A report on the added parameters.

    Raises:
        ValueError: If a pattern matches nothing, a rank exceeds a layer, or the model has LoRA already.

    Examples:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        >>> print(add_lora(model, LoRASettings(rank=4, target_modules="0", modules_to_save="2")))
        Low-rank changes (rank 4) in 1 Linear add 512 values; 1,162 of 5,322 values (21.83%) are trained, with all of 2.
    """
    return LoRAInjection.add(model, settings, generator)


@dataclass(frozen=True)
class Change:
    """A weight that is to be changed, and all places where it is: names of modules, modules, names of the weight."""

    weight: Tensor = field(repr=False)
    rank: int
    places: list[tuple[str, nn.Module, str]]

    @property
    def largest_rank(self) -> int:
        """The largest rank that a change of the weight can have."""
        return min(self.weight.shape[0], self.weight.shape[1:].numel())

    def too_large(self) -> str:
        """Return that the rank is larger, and what to do."""
        (name, _, weight), most = self.places[0], self.largest_rank
        return (
            f"rank={self.rank} exceeds the largest possible rank of {name}.{weight}, {most} (shape "
            f"{tuple(self.weight.shape)}): give a smaller rank, rank_pattern={{{name!r}: {most}}}, exclude={name!r}, "
            f"or modules_to_save={name!r} to train it whole."
        )


class LoRAInjection(Injection):
    """Low-rank changes of the weights of layers.

    Attributes:
        changes: The changes, each once.
    """

    settings_type = LoRASettings
    part = LowRank
    noun = "LoRA"
    otherwise = "with other layers, ranks, scales or dropout"
    remedy = "merge(model) first, or build the model again"

    def choose_targets(self) -> dict[str, nn.Module]:
        """Return the layers whose weights are changed."""
        targets = self._linear() if self.settings.target_modules == "linear" else self._by_patterns()
        ranks = dict.fromkeys(targets, self.settings.rank)
        for pattern, rank in reversed([*(self.settings.rank_pattern or {}).items()]):  # the first that matches counts
            ranks |= dict.fromkeys(self.select("rank_pattern", pattern, targets, what="targets"), rank)
        places = {(name, weight): ranks[name] for name, module in targets.items() for weight in weights_of(module)}
        self.changes = changes_at({"": self.model, **self.modules}, places)
        misfits = [change for change in self.changes if change.rank > change.largest_rank]
        if misfits:
            others = [".".join(change.places[0][::2]) for change in misfits[1:]]
            more = f" It exceeds that of {len(others)} more, too: {list_names(others)}." if others else ""
            raise ValueError(f"{misfits[0].too_large()}{more}")
        return targets

    def _linear(self) -> dict[str, nn.Module]:
        refuse_other_weights({name: part for name, part in self.rest.items() if is_linear(part)})
        chosen = {
            name: part
            for name, part in self.rest.items()
            if (isinstance(part, nn.Linear | nn.MultiheadAttention) or is_transposed_linear(part)) and weights_of(part)
        }
        if not chosen:
            raise ValueError(f'target_modules="linear": none of the {len(self.rest)} modules is a linear layer.')
        return chosen

    def _by_patterns(self) -> dict[str, nn.Module]:
        given = self.settings.target_modules
        refuse_other_weights(self.matching(given, self.rest))
        chosen = self.select(
            "target_modules", given, self.rest, lambda part: bool(weights_of(part)), "layers with a matrix"
        )
        inside = {part.out_proj for part in chosen.values() if isinstance(part, nn.MultiheadAttention)}
        return {name: part for name, part in self.rest.items() if name in chosen or part in inside}

    def put(self, generator: torch.Generator) -> None:
        """Add the changes."""
        put_changes(self.changes, self.settings, generator)

    def planned(self) -> dict[int, Any]:
        """Return the ids of the changes of the planned weights, and their settings."""
        shared = self.settings.alpha, self.settings.use_rslora, self.settings.dropout
        return {
            id(getattr(owner, CHANGE + weight, None)): (change.rank, *shared)
            for change in self.changes
            for _, owner, weight in change.places
        }

    def settings_of(self, part: LowRank) -> Any:
        """Return the settings of a change."""
        return part.rank, part.alpha, part.use_rslora, part.dropout.p

    def report(self) -> InjectionReport:
        """Return which changes the model has."""
        return describe_lora(self.model, self.trained_whole())


def changes_at(modules: Mapping[str, nn.Module], ranks: Mapping[tuple[str, str], int]) -> list[Change]:
    """Return the changes of some weights, each once, without changing anything.

    Args:
        modules: All modules by qualified name.
        ranks: Name of a module and of its weight -> the rank of the change.
    """
    owners = owners_of_parameters(modules)
    changes: dict[int, Change] = {}
    for (name, weight), rank in ranks.items():
        module = modules[name]
        registered = registered_tensor(module, weight)
        if id(registered) in changes:
            continue
        tensor = getattr(module, weight) if registered is None else registered
        places = [(name, module, weight)]
        places += [place for place in owners.get(id(registered), []) if place[1:] != (module, weight)]
        changes[id(tensor)] = Change(tensor, rank, places)
    return list(changes.values())


def owners_of_parameters(modules: Mapping[str, nn.Module]) -> dict[int, list[tuple[str, nn.Module, str]]]:
    """Return id of a parameter -> name of the module, module and name of the parameter, for each place where it is."""
    owners: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for name, module in modules.items():
        for own, _ in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(registered_tensor(module, own)), []).append((name, module, own))
    return owners


def put_changes(changes: Iterable[Change], settings: LoRASettings, generator: torch.Generator) -> None:
    """Put changes beside their weights."""
    changed: dict[nn.Module, list[str]] = {}
    for change in changes:
        module = change.places[0][1]
        low_rank = LowRank(change.weight, change.rank, module, settings, generator).train(module.training)
        for place, (_, owner, weight) in enumerate(change.places):
            if place == 0:
                owner.add_module(CHANGE + weight, low_rank)
            else:  # the state dict has it once
                vars(owner)[CHANGE + weight] = low_rank
            changed.setdefault(owner, []).append(weight)
    for module, weights in changed.items():
        extend(module, kind_for(module), tuple(weights))


def describe_lora(model: nn.Module, saved: Iterable[str]) -> InjectionReport:
    """Return what LoRA changes in a model.

    Args:
        model: A model with LoRA.
        saved: The names of the modules that are trained whole.
    """
    layers: dict[LowRank, tuple[str, nn.Module]] = {}
    further = []
    places = [
        (f"{strip_compile_prefix(name)}.{weight}".lstrip("."), module, change, CHANGE + weight in vars(module))
        for name, module in model.named_modules(remove_duplicate=False)
        for weight, change in changes_of(module).items()
    ]
    for label, module, change, _ in sorted(places, key=lambda place: place[-1]):  # where it is registered comes first
        if layers.setdefault(change, (label, module))[0] != label:
            further.append(label)
    ranks = sorted({change.rank for change in layers})
    what = f"Low-rank changes (rank {' to '.join(dict.fromkeys(map(str, ranks[:1] + ranks[-1:])))})"
    remark = f"The same weights, with the same change, are in {list_names(further)}." if further else ""
    return InjectionReport.of(model, what, dict(layers.values()), parameters_of(layers), saved, remark)


@torch.no_grad()
def merge(model: nn.Module) -> nn.Module:
    """Fold the low-rank changes of LoRA into the weights, in place, and restore the plain model and its names.

    Frozen parameters stay frozen; `unfreeze_(model, "*")` unfreezes them.

    Args:
        model: A model with LoRA.

    Returns:
        The model.

    Raises:
        ValueError: If there is no LoRA, or a weight cannot be set: it is sharded, a hook computes it, or it has a
            parametrization that does not return what is assigned, such as `spectral_norm`. Nothing is changed then.

    Examples:
        >>> from lightning_tricks.finetuning import LoRASettings, add_lora
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        >>> report = add_lora(model, LoRASettings(rank=4))
        >>> list(merge(model).state_dict())
        ['0.weight', '0.bias', '2.weight', '2.bias']
    """
    layers: list[tuple[str, Any]] = [(name, part) for name, part in model.named_modules() if isinstance(part, LoRA)]
    if not layers:
        others = [name for name, _ in added_modules(model)]
        remark = f" The layers added in {list_names(others)} cannot be merged into a weight." if others else ""
        raise ValueError(f"{type(model).__name__} has no LoRA to merge.{remark}")
    merged: dict[int, Tensor] = {}
    parametrized: list[tuple[nn.Module, str, Tensor]] = []
    for name, module in layers:
        check_restorable(module, LoRA)
        for weight in changes_of(module):
            registered = registered_tensor(module, weight)
            if registered is None:
                parametrized.append((module, weight, _merged_parametrization(name, module, weight)))
            elif id(registered) not in merged:
                merged[id(registered)] = _merged(name, module, weight)
    for _, module in layers:
        weights = changes_of(module)
        restore(module, LoRA)
        for weight in weights:
            delattr(module, CHANGE + weight)
            registered = registered_tensor(module, weight)
            if registered is not None:
                registered.copy_(merged[id(registered)])
    for module, weight, value in parametrized:
        setattr(module, weight, value)
    return model


def _merged(name: str, module: Any, weight: str) -> Tensor:
    """Return a weight with its change, computed in at least fp32."""
    base: Tensor = module.base_weight(weight)
    if type(base) not in (Tensor, nn.Parameter):
        raise ValueError(
            f"{name}.{weight} is a {type(base).__name__}, of which this process has a part: merge the "
            "whole model, loaded from a checkpoint."
        )
    dtype = torch.promote_types(base.dtype, torch.float32)
    return base.to(dtype) + changes_of(module)[weight].change(base.shape, dtype)


def _merged_parametrization(name: str, module: Any, weight: str) -> Tensor:
    """Return a weight that is computed from other tensors, with its change, if these give it back in either mode."""
    computed = dict(getattr(module, "parametrizations", {})).get(weight)
    if computed is None:
        raise ValueError(
            f"{name}.{weight} is computed by a hook, as by pruning, which cannot take the change: make it a plain "
            "weight first, with torch's function that removes what computes it."
        )
    change, gives_back = changes_of(module)[weight], False
    for dtype in (torch.float64, change.A.dtype):  # the other one is for those that know one dtype
        with suppress(RuntimeError, TypeError, ValueError):  # as where there is no right_inverse
            gives_back = _gives_back(computed, change, dtype)
            break
    if not gives_back:
        kinds = ", ".join(type(part).__name__ for part in computed)
        raise ValueError(
            f"{name}.{weight} cannot take the change: its parametrization ({kinds}) does not give back what is "
            "assigned to it, so the merged model would give other outputs. Keep the LoRA, or call "
            f"torch.nn.utils.parametrize.remove_parametrizations(layer, {weight!r}) before it is added."
        )
    value: Tensor = copy.deepcopy(computed).eval()()
    return (value + change.change(value.shape, torch.promote_types(value.dtype, torch.float32))).to(value.dtype)


def _gives_back(computed: Any, change: LowRank, dtype: torch.dtype) -> bool:
    """Whether a copy of a parametrization, to which the changed weight is assigned, computes this weight."""
    plain, changed = (copy.deepcopy(computed).to(dtype) for _ in range(2))
    added = change.change(plain().shape, dtype)
    changed.right_inverse(plain() + added)
    tolerance = max(1e-6, 8 * torch.finfo(dtype).eps)
    for mode in (True, False):
        wanted = plain.train(mode)() + added
        if not torch.allclose(changed.train(mode)(), wanted, rtol=0, atol=tolerance * float(wanted.abs().max())):
            return False
    return True
