"""Tensors without data."""

from __future__ import annotations

from lightning_tricks._torch_compat.guards import needs_private

with needs_private("FlopsReport or ModelReport"):
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = ["FakeTensor", "FakeTensorMode", "mark_as_parameter"]


def mark_as_parameter(tensor: FakeTensor) -> None:
    """Let `isinstance(tensor, nn.Parameter)` hold."""
    tensor._is_param = True
