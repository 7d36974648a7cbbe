"""Copies of tensors for a dry run: real ones with data, or fake ones that have everything but data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_tricks._shared.tensors import is_sharded
from lightning_tricks._torch_compat.fake_tensors import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    mark_as_parameter,
)
from lightning_tricks._torch_compat.operators import OpOverload, changes_or_returns_arguments

_COPYING_OPERATORS = (torch.ops.aten._unsafe_view.default, torch.ops.aten.clone.default)


class NoDataError(NotImplementedError):
    """Real copies were requested, but some tensors have no data, or this rank holds only a part of it."""


class RealTensorCopies:
    """Makes copies that have data: clones of the originals."""

    def context(self) -> AbstractContextManager[Any]:
        """Return the context manager in which a model of these copies must run."""
        return nullcontext()

    def copy_tensor(self, tensor: Tensor, device: torch.device | None = None) -> Tensor:
        """Return a copy of a tensor.

        Args:
            tensor: The original.
            device: The device of the copy; None for that of the original.

        Raises:
            NoDataError: If the tensor has no data, or this rank holds only a part of it.
        """
        if is_lazy(tensor):
            return copy.deepcopy(tensor)
        if tensor.is_meta or is_sharded(tensor) or isinstance(tensor, FakeTensor):
            kind = "sharded" if is_sharded(tensor) else "on the meta device" if tensor.is_meta else "fake"
            raise NoDataError(f"there is no data to copy: some tensors are {kind}")
        copied = tensor.detach().clone()
        if device is not None:
            copied = copied.to(device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(copied, tensor.requires_grad)
        return copied.requires_grad_(tensor.requires_grad)

    def run_operator(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on copies."""
        return operator(*args, **kwargs)


class FakeTensorCopies:
    """Makes copies without data: `FakeTensor`s, which have a shape, strides, a dtype and a device, but no elements."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._kinds: dict[Any, str] = {}
        self._results: dict[Hashable, Any] = {}

    def context(self) -> AbstractContextManager[Any]:
        """Return the context manager in which a model of these copies must run."""
        return self._mode

    def copy_tensor(self, tensor: Tensor, device: torch.device | None = None) -> Tensor:
        """Return a fake tensor that is like a tensor.

        A meta tensor becomes a fake CPU tensor, and a sharded tensor gets its full shape.

        Args:
            tensor: The original.
            device: The device that the fake tensor claims to be on; None for that of the original.
        """
        fake_device = device or tensor.device
        if fake_device.type == "meta":
            fake_device = torch.device("cpu")
        if is_sharded(tensor):
            elem = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        elif tensor.layout != torch.strided:
            raise NotImplementedError(f"a tensor without data has no elements to skip, as {tensor.layout} does")
        elif type(tensor) in (Tensor, nn.Parameter, FakeTensor) and not tensor.is_quantized:
            elem = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        else:
            return self._mode.from_tensor(tensor)
        fake = FakeTensor(self._mode, elem, fake_device)
        if isinstance(tensor, nn.Parameter):
            mark_as_parameter(fake)
        return fake.requires_grad_(tensor.requires_grad)

    def run_operator(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on copies with the result that `FakeTensorMode` gives, but without its overhead.

        Views run on the meta tensors inside. The layout of other results is remembered, so that a model of many equal
        layers computes it once.
        """
        if operator is torch.ops.prim.device.default:
            return args[0].fake_device
        kind = self._kinds.get(operator)
        if kind is None:
            kind = self._kinds[operator] = _operator_kind(operator)
        if kind == "view" and type(args[0]) is FakeTensor:
            device = args[0].fake_device
            with in_kernel_invocation_manager(self._mode):
                out = operator(*args, **kwargs)
            return _map_tensors(out, lambda part: FakeTensor(self._mode, part, device))
        if kind == "pure":
            return self._run_pure(operator, args, kwargs)
        return operator(*args, **kwargs)

    def _run_pure(self, operator: Any, args: Any, kwargs: Any) -> Any:
        key = _cache_key(operator, args, kwargs)
        if key is None:
            return operator(*args, **kwargs)
        known = self._results.get(key)
        if known is not None:
            with in_kernel_invocation_manager(self._mode):
                return _map_tensors(known, self._from_layout)
        out = operator(*args, **kwargs)
        self._results[key] = _map_tensors(out, _layout_of)
        return out

    def _from_layout(self, layout: _Layout) -> Tensor:
        shape, stride, dtype, device = layout
        return FakeTensor(self._mode, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)


class _Layout(NamedTuple):
    """Everything that distinguishes one fake tensor from another."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _DependsOnValueError(Exception):
    """The layout of a result may depend on the value of an argument."""


def _cache_key(operator: Any, args: Any, kwargs: Any) -> Hashable | None:
    """Return what determines the layout of an operator's results, or None where that is not known from layouts."""
    try:
        key = (operator, _argument_key(args), _argument_key(tuple(kwargs.items())))
        hash(key)
    except (_DependsOnValueError, TypeError):  # a TypeError: an argument is not hashable
        return None
    return key


def _argument_key(argument: Any) -> Hashable:
    """Return the part of a cache key that stands for one argument.

    Raises:
        _DependsOnValueError: If the argument is a tensor whose value is known.
    """
    if type(argument) is FakeTensor and argument.constant is None:
        return _layout_of(argument)
    if isinstance(argument, Tensor):
        raise _DependsOnValueError
    if isinstance(argument, tuple | list):
        return (type(argument), *map(_argument_key, argument))
    return type(argument), argument  # with the type, because True == 1 == 1.0


def _operator_kind(operator: Any) -> str:
    """Return "view" for a view or a copy, "pure" for new tensors that depend on the arguments alone, else "other"."""
    if not isinstance(operator, OpOverload):
        return "other"
    if operator.is_view or operator in _COPYING_OPERATORS:
        return "view"
    return "other" if changes_or_returns_arguments(operator) else "pure"


def _layout_of(tensor: Any) -> _Layout:
    return _Layout(tensor.shape, tensor.stride(), tensor.dtype, tensor.fake_device)


def _map_tensors(out: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to each tensor, or each layout of a tensor, in the result of an operator."""
    if isinstance(out, Tensor | _Layout):
        return function(out)
    if isinstance(out, list | tuple):
        return type(out)(_map_tensors(part, function) for part in out)
    return out
