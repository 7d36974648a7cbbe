"""What of a model with LoRA an adapter's files have, and what of that peft reads."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_tricks._shared.text import list_names
from lightning_tricks._torch_compat.modules import registered_tensor
from lightning_tricks.finetuning.core.adapter_config import targets_for, values_and_patterns
from lightning_tricks.finetuning.core.class_extension import class_below
from lightning_tricks.finetuning.core.lora_layers import LoRA, changes_of, has_transposed_weight, is_transposed_linear
from lightning_tricks.finetuning.core.low_rank import LowRank
from lightning_tricks.finetuning.core.transformer_blocks import reads_weights_of_its_parts

Place = tuple[str, str]  # the qualified name of a layer, and the name of its weight
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_PLAIN = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def changed_weights(modules: Mapping[str, nn.Module]) -> Iterator[tuple[Place, LowRank]]:
    """Yield the changed weights of a model; a weight that layers share comes once for each."""
    for name, module in modules.items():
        for weight, change in changes_of(module).items():
            yield (name, weight), change


def attention_of(layer: str, modules: Mapping[str, nn.Module]) -> str | None:
    """Return the name of the `nn.MultiheadAttention` whose `out_proj` a layer is."""
    parent, _, name = layer.rpartition(".")
    return parent if name == "out_proj" and isinstance(modules.get(parent), nn.MultiheadAttention) else None


def layer_for_peft(place: Place, places: Container[Place], modules: Mapping[str, nn.Module]) -> str:
    """Return the name of the layer that peft replaces: an attention and its `out_proj` are one, if both are changed."""
    attention = attention_of(place[0], modules)
    return attention if attention is not None and (attention, "in_proj_weight") in places else place[0]


def registered_or_computed(module: nn.Module, weight: str) -> Tensor:
    """Return the weight that a module registers, or that hooks and parametrizations compute."""
    value: Any = registered_tensor(module, weight)
    return getattr(module, weight) if value is None else value  # type: ignore[no-any-return]


def peft_matrices(change: LowRank, module: nn.Module, weight: str) -> tuple[Tensor, Tensor]:
    """Return A and B in the shapes of peft."""
    left, right = change.factors()
    if has_transposed_weight(module):
        return left.t(), right.t()
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        shape = registered_or_computed(module, weight).shape
        return right.view(-1, *shape[1:]), left.view(*left.shape, *[1] * (len(shape) - 2))
    return right, left


def factors_of(pair: Mapping[str, Tensor], module: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the matrices of `LowRank.factors` for A and B in the shapes of peft."""
    a, b = (pair[name].flatten(1) if pair[name].ndim > 1 else pair[name][None] for name in "AB")
    return (a.t(), b.t()) if has_transposed_weight(module) else (b, a)


def modules_to_save(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the largest modules that are trained whole, and those with running statistics, which training changes."""
    saved: dict[str, nn.Module] = {}
    for name, module in modules.items():
        parts = list(module.modules())
        if module is model or name.startswith(tuple(f"{outer}." for outer in saved)):
            continue
        if isinstance(module, _CONTAINERS) or any(isinstance(part, LoRA | LowRank) for part in parts):
            continue
        trained = [parameter.requires_grad for parameter in module.parameters()]
        is_leaf = len(parts) == 1
        has_statistics = any(name == "running_mean" for name, _ in module.named_buffers(recurse=False))
        whole = bool(trained) and all(trained) and not _named_like(name, modules)
        if whole or (is_leaf and any(trained)) or has_statistics:
            saved[name] = module
    return saved


def _named_like(name: str, modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of modules that peft takes for a module to save, as their names end in its name."""
    return [other for other in modules if other.endswith(name) and other != name]


def single_parameters(modules: Mapping[str, nn.Module], saved: Mapping[str, nn.Module]) -> set[str]:
    """Return the names of trained parameters that modules with other parts have of their own."""
    inside = tuple(f"{name}." for name in saved)
    return {
        f"{name}.{own}".lstrip(".")
        for name, module in modules.items()
        if not isinstance(module, LowRank) and not f"{name}.".startswith(inside)
        for own, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad
    }


def config_of(changes: Mapping[Place, LowRank], modules: Mapping[str, nn.Module], saved: list[str]) -> dict[str, Any]:
    """Return the `adapter_config.json` of a model's LoRA, which makes peft build the same."""
    of_layers: dict[str, LowRank] = {}
    for place, change in changes.items():
        of_layers.setdefault(layer_for_peft(place, changes, modules), change)
    rank, ranks = values_and_patterns({layer: change.rank for layer, change in of_layers.items()})
    alpha, alphas = values_and_patterns({layer: _number(change.alpha) for layer, change in of_layers.items()})
    first = next(iter(of_layers.values()))
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": rank,
        "rank_pattern": ranks,
        "lora_alpha": alpha,
        "alpha_pattern": alphas,
        "use_rslora": first.use_rslora,
        "lora_dropout": first.dropout.p,
        "bias": "none",
        "fan_in_fan_out": all(is_transposed_linear(modules[layer]) for layer in of_layers),
        "target_modules": targets_for(list(of_layers), list(modules)),
        "modules_to_save": saved or None,
    }


def _number(value: float) -> float:
    return int(value) if value == int(value) else value


def not_for_peft(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    changes: Mapping[Place, LowRank],
    saved: list[str],
    single: set[str],
) -> Iterator[str]:
    """Yield what peft does not load, or computes otherwise."""
    places: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        places.setdefault(id(module), []).append(name)
    for layer, weight in changes:
        reason = _why_not(layer, weight, modules, changes)
        if reason is None and len(names := places[id(modules[layer])]) > 1:
            reason = f"used as {list_names(names)}"
        if reason is None and any(re.match(rf"(^|.*\.){name}($|\..*)", layer) for name in saved):
            reason = "its name ends like that of a module that is trained whole"
        if reason is not None:
            yield f"{layer or type(model).__name__} ({reason})"
    for name in saved:
        if others := [other for other in _named_like(name, modules) if other not in saved]:
            yield f"{name} (peft takes {list_names(others)} for it)"
    for name in sorted(single):
        yield f"{name} (a parameter of a module with other parts)"


def _why_not(layer: str, weight: str, modules: Mapping[str, nn.Module], changes: Mapping[Place, LowRank]) -> str | None:
    """Return why peft cannot read the change of a layer, or None."""
    module = modules[layer]
    kind = class_below(module).__name__
    if not layer:
        return "the model itself"
    attention = layer if isinstance(module, nn.MultiheadAttention) else attention_of(layer, modules)
    if attention is not None:
        parts = [changes.get((attention, "in_proj_weight")), changes.get((f"{attention}.out_proj", "weight"))]
        if None in parts or len({(part.rank, part.alpha) for part in parts if part}) > 1:
            return "attention, of which a part is changed, or parts by other ranks"
        return None if layer == attention else "peft <= 0.21 adds its change twice, huggingface/peft#3774"
    around = modules.get(layer.rpartition(".")[0])
    if around is not None and reads_weights_of_its_parts(around):
        return f"{class_below(around).__name__} reads its weight without calling it"
    if weight != "weight" or registered_tensor(module, "weight") is None:
        return f"{weight} of {kind}"
    if has_own_forward(module):
        return f"{kind} with a forward pass of its own"
    is_known = isinstance(module, (nn.Linear, *_PLAIN)) or is_transposed_linear(module)
    return computed_otherwise(module) if is_known else kind


def computed_otherwise(module: nn.Module) -> str | None:
    """Return for what peft puts something else beside a layer than a change of its weight, or None."""
    kind = class_below(module).__name__
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        plain = module.groups == 1 and module.padding_mode == "zeros" and set(module.dilation) == {1}
        return None if plain else f"{kind} with groups, dilation or padding_mode"
    return f"{kind} with max_norm" if isinstance(module, nn.Embedding) and module.max_norm is not None else None


def has_own_forward(module: nn.Module) -> bool:
    """Whether a layer computes otherwise than the class of torch that peft takes it for."""
    return any(isinstance(module, plain) and class_below(module).forward is not plain.forward for plain in _PLAIN)
