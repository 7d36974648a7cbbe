"""`merge`: fold the low-rank changes of LoRA into the weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_tricks._shared.added_parameters import added_modules
from lightning_tricks._shared.text import list_names
from lightning_tricks._torch_compat.modules import registered_tensor
from lightning_tricks.finetuning.core.class_extension import check_restorable, restore
from lightning_tricks.finetuning.core.lora_layers import CHANGE, LoRA, changes_of


@torch.no_grad()
def merge(model: nn.Module) -> nn.Module:
    """Fold the low-rank changes of LoRA into the weights, in place: the model is a plain one again, with its old names.

    What is frozen stays frozen; `unfreeze_(model, "*")` unfreezes it.

    Args:
        model: A model with LoRA.

    Returns:
        The model.

    Raises:
        ValueError: If there is no LoRA, or a weight cannot be set: it is sharded, or a hook computes it. Nothing is
            changed then.

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
        remark = f" What was added in {list_names(others)} cannot be folded into a weight." if others else ""
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
    """Return a weight that is computed from other tensors, with its change, if these can take it."""
    value: Tensor = module.compute_weight(weight)
    try:
        module.parametrizations[weight].right_inverse(value)
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        raise ValueError(
            f"{name}.{weight} is computed from other tensors, as by spectral_norm or pruning, and these cannot take "
            "the change: make it a plain weight first, with torch's function that removes what computes it."
        ) from error
    return value
