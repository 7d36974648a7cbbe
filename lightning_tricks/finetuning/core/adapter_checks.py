"""Checks of an adapter's files against the model that they are loaded into."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from lightning_tricks._shared.text import list_names
from lightning_tricks._torch_compat.modules import registered_tensor
from lightning_tricks.finetuning.core.adapter_config import AdapterConfig
from lightning_tricks.finetuning.core.adapter_contents import (
    Place,
    computed_otherwise,
    has_own_forward,
    layer_for_peft,
    registered_or_computed,
)
from lightning_tricks.finetuning.core.class_extension import class_below
from lightning_tricks.finetuning.core.injection import kind_of_layer
from lightning_tricks.finetuning.core.lora_plan import owners_of_parameters, weights_of
from lightning_tricks.finetuning.core.low_rank import LowRank


def check_places(
    model: nn.Module, modules: Mapping[str, nn.Module], pairs: Mapping[Place, Mapping[str, Tensor]]
) -> None:
    """Refuse files with layers that the model has not."""
    unknown = [layer for layer, _ in pairs if layer not in modules]
    if not unknown:
        without = [
            f"{layer} ({kind_of_layer(modules[layer])})"
            for layer, weight in pairs
            if weight not in weights_of(modules[layer])
        ]
        if without:
            raise ValueError(
                f"{len(without)} of {len(pairs)} layers have no such matrix of floating-point numbers in "
                f"{type(model).__name__}: {list_names(without)}. If they are quantized, load the adapter before they "
                "are, or with peft; otherwise it is the adapter of another model."
            )
        return
    inner = [child for child, _ in model.named_children() if all(f"{child}.{layer}" in modules for layer in unknown)]
    remedy = f" Pass {inner[0]} of the model, which has them." if inner else ""
    raise ValueError(
        f"it is the adapter of another model: {len(unknown)} of {len(pairs)} layers are not in "
        f"{type(model).__name__}: {list_names(unknown)}.{remedy}"
    )


def check_computed_alike(modules: Mapping[str, nn.Module], places: Iterable[Place]) -> None:
    """Refuse layers beside which peft puts what is no change of their weight, and name those that are not known."""
    layers = dict.fromkeys(layer for layer, _ in places)
    otherwise = {layer: why for layer in layers if (why := computed_otherwise(modules[layer]))}
    if otherwise:
        listed = list_names([f"{layer} ({why})" for layer, why in otherwise.items()])
        raise ValueError(
            f"what peft adds to the outputs of {len(otherwise)} layers is no change of their weights: {listed}. Load "
            "it with peft."
        )
    own = [f"{layer} ({class_below(modules[layer]).__name__})" for layer in layers if has_own_forward(modules[layer])]
    if own:
        warnings.warn(
            f"load_adapter: peft may compute {len(own)} layers otherwise than with a change of their weights, as they "
            f"have a forward pass of their own: {list_names(own)}. Compare the outputs with those of peft.",
            stacklevel=4,  # of the caller of load_adapter, which torch.no_grad wraps
        )


def check_shapes(
    modules: Mapping[str, nn.Module],
    factors: Mapping[Place, tuple[Tensor, Tensor]],
    state: Mapping[str, Tensor],
    values: Mapping[str, Tensor],
) -> None:
    """Refuse files with tensors that the model has not, or has in another shape."""
    unknown = [name for name in values if name not in state]
    if unknown:
        raise ValueError(f"{len(unknown)} tensors are not in the model: {list_names(unknown)}.")
    owned = [*(state[name] for name in values), *(registered_or_computed(modules[name], own) for name, own in factors)]
    if any(hasattr(tensor, "full_tensor") for tensor in owned):
        raise ValueError("the model is sharded already: load the adapter before.")
    wrong = [
        f"{name} is {tuple(value.shape)}, and {tuple(state[name].shape)} in the model"
        for name, value in values.items()
        if value.shape != state[name].shape
    ]
    for (layer, weight), (left, right) in factors.items():
        shape = registered_or_computed(modules[layer], weight).shape
        if (*left.shape, *right.shape) != (shape[0], len(right), len(right), shape[1:].numel()) or not len(right):
            changed = f"{tuple(left.shape)} @ {tuple(right.shape)}"
            wrong.append(f"{layer}.{weight} is {tuple(shape)} in the model, and its change is {changed}")
    if wrong:
        raise ValueError(f"it is the adapter of another model: {len(wrong)} shapes differ: {list_names(wrong)}.")


def check_modules_to_save(
    config: AdapterConfig, modules: Mapping[str, nn.Module], state: Mapping[str, Tensor], values: Mapping[str, Tensor]
) -> None:
    """Refuse files with a part of a module that was trained whole."""
    for end in config.modules_to_save:
        named = [f"{name}." for name in modules if f".{name}".endswith(f".{end}")]
        owned = [[name for name in state if name.startswith(front)] for front in named]
        found = [names for names in owned if any(name in values for name in names)] or owned
        missing = [name for names in found for name in names if name not in values]
        if missing:
            raise ValueError(f"{len(missing)} tensors of modules_to_save={end!r} are missing: {list_names(missing)}.")


def check_shared(modules: Mapping[str, nn.Module], factors: Mapping[Place, tuple[Tensor, Tensor]]) -> None:
    """Refuse files in which layers that share a weight do not share its change, as the model would."""
    owners = owners_of_parameters(modules)
    for place, pair in factors.items():
        registered = registered_tensor(modules[place[0]], place[1])
        for layer, _, weight in owners.get(id(registered), []):
            other = (layer, weight)
            same = other in factors and all(map(torch.equal, pair, factors[other]))
            if not same:
                raise ValueError(
                    f"it changes {place[0]} otherwise than {other[0]}, which share a weight in the model: load it with "
                    "peft, which changes layers, and not weights."
                )


def check_tied(
    config: AdapterConfig, modules: Mapping[str, nn.Module], state: Mapping[str, Tensor], values: Mapping[str, Tensor]
) -> None:
    """Refuse files with another value for a module that was trained whole than for one that shares it in the model."""
    ends = tuple(f".{end}" for end in config.modules_to_save)
    copied = tuple(f"{name}." for name in modules if f".{name}".endswith(ends))  # peft trains a copy of each
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    for name in filter(lambda name: name.startswith(copied), values):
        for other in names[id(state[name])]:
            if not torch.equal(values[name], values.get(other, state[name].to(values[name]))):
                raise ValueError(
                    f"it has another {name} than {other}, which are one tensor in the model: untie them first "
                    "(layer.weight = nn.Parameter(layer.weight.detach().clone())), or load it with peft."
                )


def check_present(
    present: Mapping[Place, LowRank],
    factors: Mapping[Place, tuple[Tensor, Tensor]],
    config: AdapterConfig,
    modules: Mapping[str, nn.Module],
) -> None:
    """Refuse files with other layers, ranks or scales than those of a model that has LoRA."""
    missing = [".".join(place) for place in present if place not in factors]
    unexpected = [".".join(place) for place in factors if place not in present]
    if missing or unexpected:
        raise ValueError(
            f"the model has LoRA of other layers: {list_names(missing)} are not in the file, and "
            f"{list_names(unexpected)} are not in the model. merge(model) first, or build the model anew."
        )
    for place, change in present.items():
        there = (change.rank, change.alpha, change.use_rslora)
        here = (
            len(factors[place][1]),
            config.alpha_of(layer_for_peft(place, factors, modules)),
            config.use_rslora,
        )
        if there != here:
            raise ValueError(
                f"{place[0]} has (rank, alpha, use_rslora) = {here} in the file, and {there} in the model: "
                "merge(model) first, or build the model anew."
            )
