"""`save_adapter` and `load_adapter`: exchange LoRA with the peft library, through its files."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_tricks._shared.added_parameters import added_names
from lightning_tricks._shared.patterns import strip_compile_prefix
from lightning_tricks._shared.text import list_names
from lightning_tricks.finetuning.core.adapter_checks import (
    check_computed_alike,
    check_modules_to_save,
    check_places,
    check_present,
    check_shapes,
    check_shared,
    check_tied,
)
from lightning_tricks.finetuning.core.adapter_config import AdapterConfig
from lightning_tricks.finetuning.core.adapter_contents import (
    Place,
    changed_weights,
    config_of,
    factors_of,
    layer_for_peft,
    modules_to_save,
    not_for_peft,
    peft_matrices,
    single_parameters,
)
from lightning_tricks.finetuning.core.adapter_format import (
    names_of_matrices,
    parse_names,
    read_adapter,
    write_adapter,
)
from lightning_tricks.finetuning.core.injection import InjectionReport
from lightning_tricks.finetuning.core.lora_injection import describe_lora, put_changes
from lightning_tricks.finetuning.core.lora_plan import LoRASettings, changes_at, weights_of
from lightning_tricks.finetuning.core.targets import check_targets, plain_names


def save_adapter(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write the LoRA of a model, and what else of it is trained, as files of the peft library.

    `adapter_model.safetensors` has the matrices, the whole of each module with trained parameters or running
    statistics, and single trained parameters. peft loads the files into a plain model
    (`PeftModel.from_pretrained(base, folder)`), whose outputs are those of this model; a warning says which layers peft
    cannot adapt, such as recurrent ones. `load_adapter` reads all of them. In evaluation mode without gradients,
    `nn.TransformerEncoderLayer` ignores the adapters of peft, and so does a model that reads a weight without calling
    its layer, such as timm's BEiT, EVA and Swin V2: that is not known here.

    Args:
        model: A model with LoRA, or the part of a LightningModule that has it (`module.model`): the names in the files
            are those inside of it. Of several ranks with the same weights, one calls this function.
        folder: The folder, which is created if it does not exist. Files of the two names are replaced, atomically.

    Raises:
        ValueError: If the model has no LoRA, or this process has only a part of a weight.

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
    modules = {"": model, **plain_names(model)}
    changes = dict(changed_weights(modules))
    if not changes:
        raise ValueError(f"{type(model).__name__} has no LoRA to save: call add_lora, or train with the callback LoRA.")
    saved = modules_to_save(model, modules)
    single = single_parameters(modules, saved)
    tensors: dict[str, Tensor] = {}
    for (layer, weight), change in changes.items():
        is_wrapped = layer_for_peft((layer, weight), changes, modules) != layer
        names = names_of_matrices(layer, modules[layer], weight, is_wrapped)
        tensors.update(zip(names, peft_matrices(change, modules[layer], weight), strict=True))
    inside = tuple(f"{name}." for name in saved)
    for name, value in model.state_dict().items():
        plain = strip_compile_prefix(name)
        if isinstance(value, Tensor) and (plain.startswith(inside) or plain in single):
            tensors[f"base_model.model.{plain}"] = value
    parts = [name for name, value in tensors.items() if type(value) not in (Tensor, nn.Parameter) or value.is_meta]
    if parts:
        raise ValueError(
            f"{parts[0]} is a {type(tensors[parts[0]]).__name__} of which this process has no or a part of the values: "
            "save the whole model, loaded from a checkpoint."
        )
    unreadable = list(not_for_peft(model, modules, changes, list(saved), single))
    stored = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    write_adapter(folder, stored, config_of(changes, modules, list(saved)))
    if unreadable:
        warnings.warn(
            f"save_adapter: load_adapter reads all of {os.fspath(folder)}, but peft does not: "
            f"{list_names(unreadable)}.",
            stacklevel=2,
        )


@torch.no_grad()
def load_adapter(model: nn.Module, folder: str | os.PathLike[str]) -> InjectionReport:
    """Load LoRA from files of `save_adapter` or of the peft library, in place.

    A plain model gets LoRA of the ranks and scales in the files, and is frozen but for it and for what else the files
    have. A model with LoRA of the same layers, ranks and scales gets the values alone.

    Args:
        model: The model; nothing is changed if an error is raised. It has the weights of the base already: the files
            have only those of modules that were trained whole.
        folder: The folder with `adapter_model.safetensors` and `adapter_config.json`. Nothing is downloaded.

    Returns:
        What the model has now.

    Raises:
        FileNotFoundError: If the folder or a file is missing.
        ValueError: If the files are those of another model, layers or shapes, which are listed, or need what only peft
            has, such as DoRA.

    Examples:
        >>> import tempfile
        >>> from lightning_tricks.finetuning import add_lora
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        >>> report = add_lora(model, LoRASettings(rank=4, target_modules="0"))
        >>> plain = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_adapter(model, folder)
        ...     print(load_adapter(plain, folder))
        Low-rank changes (rank 4) in 1 Linear add 512 values; 512 of 5,322 values (9.62%) are trained.
    """
    config, tensors = read_adapter(folder)
    modules = {"": model, **plain_names(model)}
    try:
        pairs, values, frozen = parse_names(tensors, modules)
        for place, pair in pairs.items():
            if config.by_peft and config.is_old and layer_for_peft(place, pairs, modules) != place[0]:
                pair["B"] = 2 * pair["B"]
        added = added_names(model)
        state = {
            strip_compile_prefix(name): value
            for name, value in model.state_dict(keep_vars=True).items()
            if name not in added and isinstance(value, Tensor)
        }
        check_places(model, modules, pairs)
        if config.by_peft:
            check_computed_alike(modules, pairs)
        order = {name: number for number, name in enumerate(modules)}  # of tied weights, the first has the change
        places = sorted(pairs, key=lambda place: order[place[0]])
        factors = {place: factors_of(pairs[place], modules[place[0]]) for place in places}
        check_shapes(modules, factors, state, values)
        check_modules_to_save(config, modules, state, values)
        check_shared(modules, factors)
        check_tied(config, modules, state, values)
        present = dict(changed_weights(modules))
        if present:
            check_present(present, factors, config, modules)
        elif factors:
            _add(model, modules, factors, config)
    except ValueError as error:
        raise ValueError(f"{os.fspath(folder)}: {error}") from error
    for name, value in values.items():
        state[name].copy_(value)
        if not present and name not in frozen and isinstance(state[name], nn.Parameter):
            state[name].requires_grad_()
    changes = dict(changed_weights(modules))
    for place, (left, right) in factors.items():
        change = changes[place]
        change.A.copy_(left.t() if change.is_transposed else right)
        change.B.copy_(right.t() if change.is_transposed else left)
    owners = dict.fromkeys(name.rpartition(".")[0] or name for name in values if name not in frozen)
    return describe_lora(model, owners)


def _add(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    factors: Mapping[Place, tuple[Tensor, Tensor]],
    config: AdapterConfig,
) -> None:
    """Add LoRA of the layers, ranks and scales of a file."""
    targets = {layer: modules[layer] for layer, _ in factors}
    own = [(layer, weight) for layer in targets for weight in weights_of(modules[layer])]
    missing = [".".join(place) for place in own if place not in factors]
    if missing:
        raise ValueError(f"the matrices of {len(missing)} weights are missing: {list_names(missing)}.")
    check_targets(model, targets, "the adapter")
    settings = LoRASettings(dropout=config.dropout, use_rslora=config.use_rslora)
    put_changes(model, changes_at(modules, {place: len(right) for place, (_, right) in factors.items()}), settings)
    for place, change in changed_weights(modules):
        change.set_alpha(config.alpha_of(layer_for_peft(place, factors, modules)), config.use_rslora)
