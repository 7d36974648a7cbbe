"""Copies of what a training step changes in a module, by name: buffers, weights, states of metrics, gradients."""

from __future__ import annotations

from collections.abc import Container, Mapping
from copy import copy
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchmetrics import Metric

from lightning_tricks._shared.tensors import outside_inference_mode
from lightning_tricks._shared.text import list_names
from lightning_tricks._torch_compat.modules import own_buffers

_VALUES = ("_computed", "_forward_cache")  # of a metric, beside its states
_PLAIN = (Tensor, int, float, type(None))  # its counts and flags, and what wrappers of metrics keep


def copy_step_state(module: nn.Module, *, weights: Container[str] | Literal[True] = ()) -> dict[str, Any]:
    """Copy the buffers of a module, also those that no checkpoint has, and the states of metrics of torchmetrics in it.

    Args:
        module: The module.
        weights: The names of the parameters to copy, too; True for all.

    Returns:
        Tensors and plain values, with the names of the module's parts.
    """
    parts, named = [*module.named_modules()], module.named_parameters() if weights else ()
    return {
        "buffers": {name: _copied(own) for name, part in parts if (own := own_buffers(part))},
        "weights": _copied({n: p for n, p in named if weights is True or n in weights}),
        "metrics": {
            name: _copied({k: v for k, v in vars(part).items() if k in kept or isinstance(v, _PLAIN)})
            for name, part in parts
            if Metric in type(part).__mro__ and (kept := {*part.metric_state, *_VALUES})
        },
    }


def restore_step_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Restore what `copy_step_state` copied, in the same tensors where their shape has not changed."""
    with outside_inference_mode():
        for name, part in module.named_modules():
            buffers = own_buffers(part)
            for key, kept in state["buffers"].get(name, {}).items():
                buffers[key] = _written(buffers.get(key), kept)
            vars(part).update(_copied(state["metrics"].get(name, {})))
        for name, parameter in module.named_parameters():
            if name in state["weights"]:
                parameter.copy_(state["weights"][name])


def copy_gradients(module: nn.Module) -> dict[str, Tensor]:
    """Copy the gradients of a module's parameters, by name."""
    return _copied({name: p.grad for name, p in module.named_parameters() if p.grad is not None})


def restore_gradients(module: nn.Module, copies: Mapping[str, Tensor]) -> None:
    """Restore what `copy_gradients` copied; parameters that had no gradient then have none."""
    with outside_inference_mode():
        for name, parameter in module.named_parameters():
            parameter.grad = _written(parameter.grad, copies.get(name))  # DDP may hold the gradient in a bucket


def refuse_lazy(values: Mapping[str, Any]) -> None:
    """Raise an error for values that are tensors of lazy layers, which have no shape before a first batch."""
    if lazy := [name for name, value in values.items() if is_lazy(value)]:
        raise ValueError(
            f"{list_names(lazy)} of a lazy layer can be neither copied nor compared before it has a shape: run a batch "
            "through the module before the fit, such as in `setup`."
        )


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with copies of tensors, and of lists, to which tensors are only appended."""
    refuse_lazy(values)
    return {k: v.detach().clone() if isinstance(v, Tensor) else copy(v) for k, v in values.items()}


def _written(tensor: Tensor | None, kept: Tensor | None) -> Tensor | None:
    """Return a tensor into which a copy was written if it fits, else a clone of the copy."""
    if tensor is not None and kept is not None and (tensor.shape, tensor.layout) == (kept.shape, kept.layout):
        return tensor.copy_(kept)
    return kept if kept is None else kept.clone()
