"""Operators below autograd, the modes that see them, and tensors without data, on which they compute shapes alone."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_tricks._torch_compat.guards import needs_private

_USERS = "FlopsReport, ModelReport or an ensemble"

with needs_private(_USERS):
    from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes
with needs_private("FlopsReport or ModelReport"):
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "argument_names",
    "is_composite",
    "mark_as_parameter",
    "reshaped_as_new",
    "without_dispatch_modes",
]


def argument_names(operator: OpOverload) -> list[str]:
    """Return the names of an operator's arguments."""
    with needs_private(_USERS):
        return [argument.name for argument in operator._schema.arguments]


def is_composite(operator: OpOverload) -> bool:
    """Whether an operator is made of others, below which autograd needs no rule of its own."""
    with needs_private(_USERS):
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    # A mode sees such an operator in inference mode alone; elsewhere only its parts come (torch 2.15).
    return bool(has_kernel(operator.name(), "CompositeImplicitAutograd"))


def reshaped_as_new(tensor: Tensor, shape: torch.Size) -> Tensor:
    """Return a temporary tensor in another shape, which autograd does not take for a view, as `nn.Linear` does.

    There is no guard: compiled code runs this.
    """
    # Of a view, an activation in place behind the layer would make autograd copy slices of the base (`CopySlices`).
    reshaped: Tensor = torch.ops.aten._unsafe_view(tensor, shape)
    return reshaped


def mark_as_parameter(tensor: FakeTensor) -> None:
    """Let `isinstance(tensor, nn.Parameter)` hold."""
    # What `isinstance` asks of a tensor of another class (nn/parameter.py, `_ParameterMeta`); wrapping it in
    # `nn.Parameter` would detach it.
    tensor._is_param = True
