"""The lottery tickets of Lightning's ModelPruning: copies of layers, to which it resets the weights that it prunes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_tricks._lightning_compat.guards import needs_private

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import ModelPruning


@needs_private("AutoResume")
def capture_lottery_tickets(callback: ModelPruning) -> dict[str, Any]:
    """Return the tickets by the names of their parameters; None for one that shares the memory of its parameter.

    A reset lets the parameter use the memory of its ticket, which from then on is trained as well.
    """
    pairs = _tickets_with_parameters(callback)
    return {
        name: None if ticket.data_ptr() == parameter.data_ptr() else ticket.detach()
        for name, (ticket, parameter) in pairs
    }


@needs_private("AutoResume")
def restore_lottery_tickets(callback: ModelPruning, saved: Mapping[str, Any]) -> None:
    """Restore tickets, after the parameters were restored."""
    for name, (ticket, parameter) in _tickets_with_parameters(callback):
        if name not in saved:
            continue
        if saved[name] is None:
            ticket.data = parameter.data
        else:
            with torch.no_grad():
                ticket.copy_(saved[name])


def _tickets_with_parameters(callback: ModelPruning) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    layers: Mapping[int, Any] = callback._original_layers or {}
    for layer in layers.values():
        for number, name in layer["names"]:
            module = callback._parameters_to_prune[number][0]
            parameter = getattr(module, f"{name}_orig", getattr(module, name))
            ticket = getattr(layer["data"], name)
            if isinstance(parameter, Tensor) and isinstance(ticket, Tensor):
                yield f"{number}.{name}", (ticket, parameter)
