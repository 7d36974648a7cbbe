"""Add the adapters of the peft library to a model, with the checks that peft lacks."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tricks._shared.added_parameters import added_modules
from lightning_tricks._shared.checks import check_choice, check_names
from lightning_tricks._shared.extras import import_extra
from lightning_tricks._shared.rng import isolated_rng
from lightning_tricks._shared.text import describe_error, list_names
from lightning_tricks._torch_compat.modules import own_modules, own_parameters
from lightning_tricks.finetuning.core.adapter_coverage import is_compiled
from lightning_tricks.finetuning.core.freezing import names_of_parameters
from lightning_tricks.finetuning.core.injection import InjectionReport, parameters_of

_ADAPTER = "default"  # peft's name for an adapter
_MARK = "_peft_adapters"  # the attribute of a model with the configuration of its adapters
_LISTS = ("target_modules", "exclude_modules", "modules_to_save", "feedforward_modules")
_NEEDING_MORE = (
    "megatron_config", "corda_config", "eva_config", "lora_ga_config", "loftq_config", "arrow_config",
    "layer_replication",
)  # fmt: skip
_LOW_RANK = ("LORA", "LOHA", "LOKR")  # whose r is a rank
_SEEDS = 2**32


def peft_config(config: Any) -> Any:
    """Return a `peft.PeftConfig` from one, or from a dict of its fields with `peft_type`.

    Raises:
        ModuleNotFoundError: If peft is missing; the message names the extra.
        TypeError: If the config is neither, or names a field that the method does not have.
        ValueError: If a value is refused by peft, or the method cannot be added to any module.
    """
    peft = _peft()
    mapping = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING
    if isinstance(config, Mapping):
        known = {str(getattr(kind, "value", kind)): made for kind, made in mapping.items()}
        kind = check_choice("config['peft_type']", config.get("peft_type"), known)
        _check_kind(kind)
        check_names(known[kind].__name__, config, [field.name for field in fields(known[kind])])
        given = {name: _names(name, value) for name, value in config.items() if name != "peft_type"}
        made = known[kind](**given)
    elif isinstance(config, peft.PeftConfig) and config.peft_type is not None:
        made = copy.deepcopy(config)
        _check_kind(_kind(made))
    else:
        raise TypeError(
            "config must be a peft.PeftConfig, such as peft.IA3Config(...), or a dict of its fields with 'peft_type', "
            f"got {config!r:.80} ({type(config).__name__})."
        )
    tuner = peft.mapping.PEFT_TYPE_TO_TUNER_MAPPING.get(made.peft_type)
    if made.is_prompt_learning or made.is_adaption_prompt or tuner is None:
        raise ValueError(_no_prompts(_kind(made)))
    if getattr(tuner, "uses_shared_state", False):
        raise ValueError(
            f"config: the layers of {_kind(made)} share values that peft keeps outside of the model, where no "
            "optimizer and no checkpoint finds them: take another method, such as LORA."
        )
    if needed := [name for name in _NEEDING_MORE if getattr(made, name, None)]:
        raise ValueError(
            f"config: {needed[0]} needs data, files or other modules than those of the model: use peft itself for "
            "that, or leave it out."
        )
    if made.inference_mode:
        raise ValueError("config: inference_mode=True would train nothing: leave it out.")
    return made


def ensure_peft(model: nn.Module, config: Any) -> InjectionReport:
    """Add the adapters of peft to a model, in place, unless it has them, and freeze the rest of it.

    Args:
        model: The model; it is as it was if an error is raised, but for weights that an initialization such as PiSSA
            has changed.
        config: As for `peft_config`.

    Returns:
        A report on the adapters of the model.

    Raises:
        ValueError: If the model is compiled or has other adapters, a pattern matches nothing, or what peft adds would
            not be what its configuration says: a rank exceeds a layer, a layer is used in two places, or is an
            `nn.MultiheadAttention`.
    """
    made = peft_config(config)
    text = json.dumps(made.to_dict(), sort_keys=True, default=lambda value: sorted(map(str, value)))
    mark = vars(model).get(_MARK)
    if mark is None and not adapters_in(model):
        _inject(model, made)
        vars(model)[_MARK] = text
    elif mark != text:
        raise ValueError(
            f"{type(model).__name__} has adapters of peft already, of another configuration or injected by others, and "
            "peft would reset them or add to them: build the model anew."
        )
    return _report(model, made)


def _inject(model: nn.Module, config: Any) -> None:
    if is_compiled(model):
        raise ValueError(
            f"{type(model).__name__} is compiled: add the adapters first, and call torch.compile on the model that has "
            "them."
        )
    if others := [name for name, _ in added_modules(model)]:
        raise ValueError(f"{type(model).__name__} has adapters already, such as {others[0]}: build the model anew.")
    places: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        places.setdefault(module, []).append(name)
    _check_patterns(config, [name for names in places.values() for name in names if name])
    before = [(module, dict(own_modules(module)), dict(own_parameters(module))) for module in model.modules()]
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        try:
            with isolated_rng(seed=torch.initial_seed() % _SEEDS):
                _peft().inject_adapter_in_model(copy.deepcopy(config), model, _ADAPTER)
        except Exception as error:  # of many types, such as AttributeError for a layer with weight_norm
            raise ValueError(f"peft cannot adapt {type(model).__name__} ({describe_error(error)})") from error
        _check_layers(model, config, places)
    except BaseException:
        for module, parts, parameters in before:
            own_modules(module).clear()
            own_modules(module).update(parts)
            own_parameters(module).clear()
            own_parameters(module).update(parameters)
        for parameter, requires_grad in trained:
            parameter.requires_grad_(requires_grad)
        vars(model).pop("peft_config", None)
        raise
    _follow_modes(model, places)


def adapters_in(model: nn.Module) -> dict[str, Any]:
    """Return the modules that peft has made, by name, whose `forward` has to run."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, BaseTunerLayer) or _is_wrapper(module)
    }


def _peft() -> Any:
    need = "PeftAdapters needs peft"
    import_extra("peft.mapping", "finetune", need)
    return import_extra("peft", "finetune", need)


def _kind(config: Any) -> str:
    return str(getattr(config.peft_type, "value", config.peft_type))


def _names(argument: str, value: Any) -> Any:
    """Return a copy of an argument, in which the names of modules are strings: YAML takes some for numbers."""
    if argument not in _LISTS:
        return copy.deepcopy(value)
    if isinstance(value, list | tuple | set):
        return [str(name) for name in value]
    return value if value is None else str(value)


def _check_kind(kind: str) -> None:
    """Refuse a method by its name: configurations of some need values that only a run knows."""
    if kind == "ADALORA":
        raise ValueError(
            "config: ADALORA takes ranks away by a call after each step of the optimizer, which a model that adapters "
            "are injected into does not get: take LORA, or LoRA(rank_pattern=...)."
        )
    if kind in ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "ADAPTION_PROMPT", "CPT"):
        raise ValueError(_no_prompts(kind))


def _no_prompts(kind: str) -> str:
    return (
        f"config: {kind} cannot be injected into a module: it changes the inputs of a model of transformers. Use "
        "PrefixTuning(...) for attention, or peft.get_peft_model."
    )


def _check_patterns(config: Any, modules: Sequence[str]) -> None:
    """Refuse a pattern that matches nothing; peft wants one of several to match."""
    for argument in _LISTS:
        patterns = getattr(config, argument, None)
        if not patterns or patterns == "all-linear":
            continue
        matching = [patterns] if isinstance(patterns, str) else sorted(patterns)
        for pattern in matching:
            if not any(_matches(pattern, isinstance(patterns, str), name) for name in modules):
                raise ValueError(f"config: {argument}: {pattern!r} matches none of the {len(modules)} modules.")


def _matches(pattern: str, is_expression: bool, name: str) -> bool:
    """Whether a pattern of peft matches a name: in a list it is the end of a name, and else a regular expression."""
    return re.fullmatch(pattern, name) is not None if is_expression else f".{name}".endswith(f".{pattern}")


def _is_wrapper(module: nn.Module) -> bool:
    """Whether peft has made a module to train a copy of another."""
    from peft.utils import ModulesToSaveWrapper

    return isinstance(module, ModulesToSaveWrapper)


def _base_of(adapter: Any) -> nn.Module:
    base: nn.Module = adapter.original_module if _is_wrapper(adapter) else adapter.get_base_layer()
    return base


def _check_layers(model: nn.Module, config: Any, places: Mapping[nn.Module, Sequence[str]]) -> None:
    layers = {name: layer for name, layer in adapters_in(model).items() if not _is_wrapper(layer)}
    for key in (*(getattr(config, "rank_pattern", None) or ()), *(getattr(config, "alpha_pattern", None) or ())):
        if not any(re.match(rf"(.*\.)?({key})$", name) for name in layers):
            raise ValueError(f"config: rank_pattern or alpha_pattern: {key!r} matches none of the adapted layers.")
    for name, adapter in adapters_in(model).items():
        base = _base_of(adapter)
        if len(places.get(base, ())) > 1:
            raise ValueError(
                f"config: {list_names(places[base])} are one module, of which peft would adapt one place: use "
                "LoRA(...), or leave it out."
            )
        if isinstance(base, nn.MultiheadAttention) and not _is_wrapper(adapter):
            raise ValueError(
                f"config: {name} is an nn.MultiheadAttention, whose weights peft replaces in each forward pass: "
                "frozen ones drift, and DDP and FSDP lose them. Use LoRA(...)."
            )
    if _kind(config) in _LOW_RANK:
        for name, layer in layers.items():
            rank, weight = layer.r[_ADAPTER], getattr(_base_of(layer), "weight", None)
            if (
                isinstance(weight, Tensor)
                and weight.ndim > 1
                and rank > (most := min(weight.shape[0], weight.shape[1:].numel()))
            ):
                raise ValueError(
                    f"config: r={rank} exceeds the largest possible rank of {name}, {most} (shape "
                    f"{tuple(weight.shape)}): give a smaller one, also by rank_pattern, or leave the layer out."
                )


def _follow_modes(model: nn.Module, before: Mapping[nn.Module, object]) -> None:
    """Give new modules the mode of the layer that they wrap: peft leaves them in training mode, but for copies."""
    for adapter in adapters_in(model).values():
        copies = set(adapter.modules_to_save.default.modules()) if _is_wrapper(adapter) else set()
        for part in set(adapter.modules()) - set(before) - copies:
            part.training = _base_of(adapter).training


def _shared_weights(model: nn.Module, layers: Mapping[str, Any]) -> Iterator[str]:
    adapted = {parameter for layer in layers.values() for parameter in _base_of(layer).parameters(recurse=False)}
    for parameter, names in names_of_parameters(model).items():
        if parameter in adapted and len(names) > 1:
            yield from (name.replace(".base_layer.", ".") for name in names)


def _report(model: nn.Module, config: Any) -> InjectionReport:
    adapters = adapters_in(model)
    layers = {name: adapter for name, adapter in adapters.items() if not _is_wrapper(adapter)}
    saved = {name: adapter for name, adapter in adapters.items() if _is_wrapper(adapter)}
    whole = {id(parameter) for adapter in saved.values() for parameter in adapter.modules_to_save.parameters()}
    inside = [p for p in parameters_of(layers.values()) if p.requires_grad and id(p) not in whole]
    shared = list(_shared_weights(model, layers))
    remark = f"{list_names(shared)} share a weight, but no adapter." if shared else ""
    bases = {name: _base_of(layer) for name, layer in layers.items()}
    return InjectionReport.of(model, f"Adapters of peft ({_kind(config)})", bases, inside, saved, remark)
