"""Statistics of the parameters of a model, and the memory that the model takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_tricks._shared.tensors import full_tensor, is_sharded, tensors_in
from lightning_tricks._torch_compat.memory import parts_of_sparse
from lightning_tricks.model_report.core.report_summary import ModelMemory, ParameterRow


def parameter_rows(model: nn.Module) -> tuple[ParameterRow, ...]:
    """Return one row for each parameter tensor of a model."""
    parameters = dict(model.named_parameters())
    with_values = {name: p for name, p in parameters.items() if not is_lazy(p) and not p.is_meta and p.numel()}
    statistics = _statistics(_mean_and_std, with_values)
    norms = _statistics(_norm, {name: p.grad for name, p in with_values.items() if p.grad is not None})
    rows = []
    for name, parameter in parameters.items():
        mean, std = statistics.get(name, (None, None))
        shape = None if is_lazy(parameter) else tuple(parameter.shape)
        dtype = str(parameter.dtype).removeprefix("torch.")
        norm = norms[name][0] if name in norms else None
        rows.append(ParameterRow(name, shape, dtype, parameter.requires_grad, mean, std, norm))
    return tuple(rows)


def measure_memory(model: nn.Module, optimizers: Iterable[Optimizer]) -> ModelMemory:
    """Return the memory of a model and of the state of its optimizers on this rank."""
    parameters = [parameter for parameter in model.parameters() if not is_lazy(parameter)]
    states = (list(optimizer.state.values()) for optimizer in optimizers)
    return ModelMemory(
        weights=_local_bytes(parameters),
        buffers=_local_bytes(buffer for buffer in model.buffers() if not is_lazy(buffer)),
        gradients=_local_bytes(parameter.grad for parameter in parameters if parameter.grad is not None),
        optimizer_state=_local_bytes(tensor for state in states for tensor in tensors_in(state)),
    )


def _statistics(function: Callable[[Tensor], Tensor], tensors: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Return the values of a function for all tensors that can be computed with, by name."""
    values = {}
    for name, tensor in tensors.items():
        with suppress(Exception):  # quantized, packed, nested or sparse tensors may lack an operator
            values[name] = function(full_tensor(tensor).detach())
    return dict(zip(values, _read_to_host(list(values.values())), strict=True))


def _mean_and_std(values: Tensor) -> Tensor:
    values = values.abs() if values.is_complex() else values
    return torch.stack([values.double().mean(), values.double().std(correction=0)])


def _norm(gradient: Tensor) -> Tensor:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    norm: Tensor = torch.linalg.vector_norm(values)
    return norm.double().reshape(1)


def _read_to_host(values: list[Tensor]) -> list[list[float]]:
    """Read small tensors, with one transfer for each device."""
    found: dict[int, list[float]] = {}
    for device in {value.device for value in values}:
        indices = [index for index, value in enumerate(values) if value.device == device]
        found |= dict(zip(indices, torch.stack([values[index] for index in indices]).tolist(), strict=True))
    return [found[index] for index in range(len(values))]


def _local_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of some tensors, of sharded ones those of this rank's part."""
    local = [tensor.to_local() if is_sharded(tensor) else tensor for tensor in tensors]  # type: ignore[attr-defined]
    return sum(map(_stored_bytes, local))


def _stored_bytes(tensor: Tensor) -> int:
    parts = parts_of_sparse(tensor)
    if hasattr(tensor, "__tensor_flatten__"):  # a subclass that packs or wraps others
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return sum(map(_stored_bytes, parts)) if parts else tensor.numel() * tensor.element_size()
