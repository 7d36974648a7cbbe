"""The parameters and buffers of a model, by qualified name."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_tricks._shared.patterns import strip_compile_prefix
from lightning_tricks._torch_compat.modules import own_buffers, own_parameters


class ModelTensors:
    """The parameters and buffers of a model, by qualified name.

    Which module holds each of them is found once; each call returns what these modules hold now.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._holders: dict[str, tuple[dict[str, Any], str]] = {}
        seen: set[int] = set()
        for prefix, module in model.named_modules():
            for holder in (own_parameters(module), own_buffers(module)):
                for name, value in holder.items():
                    if value is not None and id(value) not in seen:
                        seen.add(id(value))
                        self._holders[strip_compile_prefix(f"{prefix}.{name}" if prefix else name)] = (holder, name)

    def __call__(self) -> dict[str, Tensor]:
        """Return qualified name -> tensor, without those that are None or lazy by now."""
        found = {name: holder.get(key) for name, (holder, key) in self._holders.items()}
        return {name: tensor for name, tensor in found.items() if tensor is not None and not is_lazy(tensor)}
