"""`save_adapter`: write the LoRA of a model as files of the peft library, and name the layers that peft cannot read."""

from __future__ import annotations

import os
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_tricks._shared.modules import names_of_modules
from lightning_tricks._shared.patterns import strip_compile_prefix
from lightning_tricks._shared.text import list_names
from lightning_tricks._torch_compat.modules import registered_tensor
from lightning_tricks.finetuning.core.adapter_format import (
    PLAIN,
    PREFIX,
    Place,
    attention_of,
    changed_weights,
    computed_otherwise,
    layer_for_peft,
    names_of_matrices,
    registered_or_computed,
    write_adapter,
)
from lightning_tricks.finetuning.core.class_extension import class_below
from lightning_tricks.finetuning.core.injection import modules_by_name
from lightning_tricks.finetuning.core.lora_layers import LoRA, LowRank, has_transposed_weight, is_transposed_linear
from lightning_tricks.finetuning.core.transformer_blocks import reads_weights_of_its_parts

_MAMBA = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")  # the model types of peft's own refusal
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def save_adapter(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write the LoRA of a model, and the other parameters that are trained, as files of the peft library.

    `adapter_model.safetensors` contains the matrices, all of each module with trained parameters or running
    statistics, and single trained parameters. peft loads the files into a plain model
    (`PeftModel.from_pretrained(base, folder)`) with the same outputs; a warning names layers that peft cannot adapt,
    such as recurrent ones. `load_adapter` reads all of them. In evaluation mode without gradients,
    `nn.TransformerEncoderLayer` ignores peft's adapters, and so does a model that reads a weight without calling its
    layer, such as timm's BEiT, EVA and Swin V2: this function cannot detect that.

    Args:
        model: A model with LoRA, or the part of a LightningModule that has it (`module.model`): the names in the files
            are those inside it. Call this function on one rank.
        folder: The folder, which is created if it does not exist. Files with the two names are replaced, atomically.

    Raises:
        ValueError: If the model has no LoRA, or this process has only a shard of a weight.

    Examples:
        >>> import tempfile
        >>> from lightning_tricks.finetuning import add_lora
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        >>> report = add_lora(model)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_adapter(model, folder)
        ...     sorted(os.listdir(folder))
        ['adapter_config.json', 'adapter_model.safetensors']
    """
    modules = modules_by_name(model)
    changes = dict(changed_weights(modules))
    if not changes:
        raise ValueError(f"{type(model).__name__} has no LoRA to save: call add_lora, or train with the callback LoRA.")
    saved = _modules_to_save(model, modules)
    single = _single_parameters(modules, saved)
    tensors: dict[str, Tensor] = {}
    for (layer, weight), change in changes.items():
        is_wrapped = layer_for_peft((layer, weight), changes, modules) != layer
        names = names_of_matrices(layer, modules[layer], weight, is_wrapped)
        tensors.update(zip(names, _peft_matrices(change, modules[layer], weight), strict=True))
    inside = tuple(f"{name}." for name in saved)
    for name, value in model.state_dict().items():
        plain = strip_compile_prefix(name)
        if isinstance(value, Tensor) and (plain.startswith(inside) or plain in single):
            tensors[f"{PREFIX}{plain}"] = value
    parts = [name for name, value in tensors.items() if type(value) not in (Tensor, nn.Parameter) or value.is_meta]
    if parts:
        raise ValueError(
            f"{parts[0]} is a {type(tensors[parts[0]]).__name__} of which this process does not have all values: "
            "save the whole model, loaded from a checkpoint."
        )
    unreadable = list(_not_for_peft(modules, changes, list(saved), single))
    stored = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    write_adapter(folder, stored, _config_of(changes, modules, list(saved)))
    if unreadable:
        warnings.warn(
            f"save_adapter: load_adapter reads all of {os.fspath(folder)}, but peft does not: "
            f"{list_names(unreadable)}.",
            stacklevel=2,
        )


def _peft_matrices(change: LowRank, module: nn.Module, weight: str) -> tuple[Tensor, Tensor]:
    """Return A and B in the shapes of peft."""
    left, right = change.factors()
    if has_transposed_weight(module):
        return left.t(), right.t()
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        shape = registered_or_computed(module, weight).shape
        return right.view(-1, *shape[1:]), left.view(*left.shape, *[1] * (len(shape) - 2))
    return right, left


def _modules_to_save(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the largest modules that are trained whole, and those with running statistics, which training changes."""
    saved: dict[str, nn.Module] = {}
    for name, module in modules.items():
        parts = list(module.modules())
        if not name or name.startswith(tuple(f"{outer}." for outer in saved)):
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


def _single_parameters(modules: Mapping[str, nn.Module], saved: Mapping[str, nn.Module]) -> set[str]:
    """Return the names of trained parameters that modules with other parts have of their own."""
    inside = tuple(f"{name}." for name in saved)
    return {
        f"{name}.{own}".lstrip(".")
        for name, module in modules.items()
        if not isinstance(module, LowRank) and not f"{name}.".startswith(inside)
        for own, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad
    }


def _config_of(changes: Mapping[Place, LowRank], modules: Mapping[str, nn.Module], saved: list[str]) -> dict[str, Any]:
    """Return the `adapter_config.json` of a model's LoRA, which makes peft build the same."""
    of_layers: dict[str, LowRank] = {}
    for place, change in changes.items():
        of_layers.setdefault(layer_for_peft(place, changes, modules), change)
    rank, ranks = _values_and_patterns({layer: change.rank for layer, change in of_layers.items()})
    alpha, alphas = _values_and_patterns({layer: _number(change.alpha) for layer, change in of_layers.items()})
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
        "target_modules": _targets_for(list(of_layers), list(modules)),
        "modules_to_save": saved or None,
    }


def _number(value: float) -> float:
    return int(value) if value == int(value) else value


def _values_and_patterns(values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the most frequent value of some layers, and the keys of `rank_pattern` and the like for the others."""
    ((usual, _),) = Counter(values.values()).most_common(1)
    return usual, {f"^{re.escape(layer)}": value for layer, value in values.items() if value != usual}


def _targets_for(layers: Sequence[str], others: Sequence[str]) -> str | list[str]:
    """Return `target_modules` for some layers of a model; a list, unless the names of other modules end like theirs."""
    ends = tuple(f".{layer}" for layer in layers)
    chosen = set(layers)
    if any(other.endswith(ends) and other not in chosen for other in others):
        return "|".join(map(re.escape, layers))
    return list(layers)


def _not_for_peft(
    modules: Mapping[str, nn.Module], changes: Mapping[Place, LowRank], saved: list[str], single: set[str]
) -> Iterator[str]:
    """Yield the layers and parameters that peft does not load, or computes otherwise, with the reason."""
    places = names_of_modules(modules[""])
    for layer, weight in changes:
        reason = _why_not(layer, weight, modules, changes)
        if reason is None and len(names := places[modules[layer]]) > 1:
            reason = f"used as {list_names(names)}"
        if reason is None and any(re.match(rf"(^|.*\.){name}($|\..*)", layer) for name in saved):
            reason = "its name ends like that of a module that is trained whole"
        if reason is not None:
            yield f"{layer or type(modules['']).__name__} ({reason})"
    for name in saved:
        if others := [other for other in _named_like(name, modules) if other not in saved]:
            yield f"{name} (peft takes {list_names(others)} for it)"
        elif len(places[modules[name]]) > 1:
            yield f"{name} (used as {list_names(places[modules[name]])})"
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
            return "attention that is changed only in part, or with different ranks"
        return None if layer == attention else "peft <= 0.21 adds its change twice, huggingface/peft#3774"
    model_type = getattr(getattr(modules[""], "config", None), "model_type", None)
    if model_type in _MAMBA and layer.rpartition(".")[2] in ("out_proj", "conv1d"):
        return f"peft refuses it in models of the type {model_type}"
    around = modules.get(layer.rpartition(".")[0])
    if around is not None and reads_weights_of_its_parts(around):
        return f"{class_below(around).__name__} reads its weight without calling it"
    if weight != "weight" or registered_tensor(module, "weight") is None:
        return f"{weight} of {kind}"
    is_known = isinstance(module, (nn.Linear, *PLAIN)) or is_transposed_linear(module)
    return computed_otherwise(module) if is_known else kind
