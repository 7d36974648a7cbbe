"""`memory_report`: what a device's memory is used for."""

from __future__ import annotations

import gc
import json
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_tricks._shared.checks import check_count
from lightning_tricks._shared.patterns import strip_compile_prefix
from lightning_tricks._shared.text import format_bytes, format_shape, list_names, render_text
from lightning_tricks._torch_compat.memory import as_plain_tensors, parts_of_sparse, storage_id
from lightning_tricks.devices.core.memory_figures import memory_figures, resolve_device

if TYPE_CHECKING:
    from rich.table import Table


_SIZES = ("reserved", "peak_allocated", "peak_reserved", "total", "free")  # which a device may not tell


@dataclass(frozen=True)
class TensorMemory:
    """A storage and a tensor in it.

    Attributes:
        shape: The shape of the tensor.
        dtype: Its dtype, such as "float32".
        bytes: The size of the storage, which tensors may share.
        name: The names of its tensors in the model and optimizers: "net.0.weight", "gradient of net.0.weight",
            "exp_avg of net.0.weight". Empty for others, such as activations.
    """

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    name: str


@dataclass(frozen=True)
class MemoryReport:
    """The use of a device's memory. Sizes are in bytes, and None if they are unknown.

    Attributes:
        device: The device, such as "cuda:0".
        allocated: The memory of tensors. On CUDA, torch's allocator reports it; elsewhere it is `found`.
        reserved: On CUDA, the memory that the allocator has taken from the device; on the CPU, the resident memory of
            the process, measured by psutil (from the extra `devices`).
        peak_allocated: The peak of `allocated` on CUDA since the last `torch.cuda.reset_peak_memory_stats`.
        peak_reserved: The peak of `reserved`.
        total: The memory of the device or the machine.
        free: The free memory, for all processes together.
        found: The memory of tensors that Python can see. The rest of `allocated` belongs to C++: tensors that autograd
            saved for the backward pass, for instance.
        found_by_kind: The parts of `found`: "parameters", "gradients", "buffers", "attributes", "optimizer states" and,
            without a name, "other".
        in_graph: The part of `found` with results of operations that autograd recorded.
        largest: The largest storages, in descending order.
        growth_per_epoch: The average growth of `allocated` from epoch to epoch; `CudaMemory` fills it in.
    """

    device: str
    allocated: int | None
    reserved: int | None
    peak_allocated: int | None
    peak_reserved: int | None
    total: int | None
    free: int | None
    found: int
    found_by_kind: dict[str, int]
    in_graph: int
    largest: tuple[TensorMemory, ...]
    growth_per_epoch: int | None = None

    def table(self) -> Table:
        """Return the largest storages as a rich table, with the sizes below it."""
        from rich.text import Text

        from lightning_tricks._shared.fitting_table import FittingTable, FoldedName

        notes, title = "\n".join(self.summary()), f"Memory of {self.device}"
        table = FittingTable("largest tensors", drop=("dtype", "shape"), notes=notes, title=title)
        for heading in ("shape", "dtype", "size"):
            table.add_column(heading, justify="right")
        for tensor in self.largest:
            shape = format_shape(tensor.shape) or "scalar"
            numbers = (shape, tensor.dtype, format_bytes(tensor.bytes))
            table.add_row(FoldedName(tensor.name or "(no name)"), *map(Text, numbers))
        return table

    def summary(self) -> list[str]:
        """Return the sizes as lines of text."""
        sizes = {
            "allocated": (self.allocated, self.peak_allocated, "peak "),
            "reserved" if self.device != "cpu" else "resident": (self.reserved, self.peak_reserved, "peak "),
            "free": (self.free, self.total, "of "),
            "growth per epoch": (self.growth_per_epoch, None, ""),
            "in tensors that Python knows": (self.found, None, ""),
            **{f"- {kind}": (size, None, "") for kind, size in self.found_by_kind.items()},
        }
        return [_describe(name, *size) for name, size in sizes.items() if size[:2] != (None, None)]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self)

    def to_json(self) -> str:
        """Return the report as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        return render_text(self.table())


def _describe(name: str, size: int | None, other: int | None, relation: str) -> str:
    first = "unknown" if size is None else format_bytes(size)
    return f"{name}: {first}" + (f" ({relation}{format_bytes(other)})" if other is not None else "")


def memory_report(
    device: int | str | torch.device | None = None,
    *,
    model: nn.Module | None = None,
    optimizers: Iterable[Optimizer] | Optimizer = (),
    n_largest: int = 10,
) -> MemoryReport:
    """Report what uses a device's memory: sizes, and the largest tensors with their names.

    Tensors that share a storage are counted once. It reads no value from the device, does not wait for it, and creates
    no CUDA context: the free memory of a GPU that this process does not use is None. Listing all tensors takes a
    fraction of a second: call it at the end of an epoch rather than in each step.

    Args:
        device: The device. None for the current CUDA device if this process uses CUDA, else for the CPU.
        model: A model; its parameters, gradients, buffers and attributes are shown under their names.
        optimizers: An optimizer or optimizers; their states are shown under their names.
        n_largest: How many of the largest storages to list, >= 0.

    Returns:
        The report. `print(report)` shows it as a table.

    Raises:
        TypeError: If `n_largest` is not a whole number.
        ValueError: If `n_largest` is negative.
        RuntimeError: If there is no such device.

    Examples:
        >>> model = nn.Linear(1000, 1000, bias=False)
        >>> report = memory_report("cpu", model=model, n_largest=1_000)
        >>> next(tensor for tensor in report.largest if tensor.name)
        TensorMemory(shape=(1000, 1000), dtype='float32', bytes=4000000, name='weight')
    """
    check_count("n_largest", n_largest, minimum=0)
    device = resolve_device(device)
    optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    figures = memory_figures(device)  # before the tensors are listed, which takes memory of the host
    storages = live_storages(device, named_tensors(model, optimizers))
    storages.sort(key=lambda storage: -storage.bytes)
    found = sum(storage.bytes for storage in storages)
    by_kind: dict[str, int] = {}
    for storage in storages:
        by_kind[storage.kind] = by_kind.get(storage.kind, 0) + storage.bytes
    return MemoryReport(
        device=str(device),
        **(dict.fromkeys(_SIZES) | {"allocated": found} | figures),
        found=found,
        found_by_kind=by_kind,
        in_graph=sum(storage.bytes for storage in storages if storage.in_graph),
        largest=tuple(
            TensorMemory(each.shape, each.dtype, each.bytes, list_names(each.names) if each.names else "")
            for each in storages[:n_largest]
        ),
    )


_DEPTH = 3  # of containers in attributes
_REGISTRIES = frozenset(vars(nn.Module()))
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


class NamedTensor(NamedTuple):
    """A tensor with one of its names.

    Attributes:
        name: The name, such as "gradient of net.0.weight".
        kind: "parameters", "gradients", "buffers", "attributes" or "optimizer states".
        tensor: The tensor.
    """

    name: str
    kind: str
    tensor: Tensor


def named_tensors(model: nn.Module | None, optimizers: Iterable[Optimizer]) -> Iterator[NamedTensor]:
    """Yield parameters, gradients, buffers, attributes of modules, and optimizer states, once for each name."""
    names: dict[int, str] = {}
    if model is not None:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), strip_compile_prefix(name))
            yield from _parameter(strip_compile_prefix(name), parameter)
        for name, buffer in model.named_buffers(remove_duplicate=False):
            yield NamedTensor(strip_compile_prefix(name), "buffers", buffer)
        for path, module in model.named_modules():
            prefix = strip_compile_prefix(f"{path}.") if path else ""
            for attribute, value in list(vars(module).items()):
                if attribute not in _REGISTRIES:
                    for name, tensor in _tensors_in(value, prefix + attribute):
                        yield NamedTensor(name, "attributes", tensor)
    for optimizer in optimizers:
        yield from _of_optimizer(optimizer, names)


def _parameter(name: str, parameter: Tensor) -> Iterator[NamedTensor]:
    yield NamedTensor(name, "parameters", parameter)
    if parameter.is_leaf and parameter.grad is not None:  # torch warns where the gradient of others is asked for
        yield NamedTensor(f"gradient of {name}", "gradients", parameter.grad)


def _of_optimizer(optimizer: Optimizer, names: Mapping[int, str]) -> Iterator[NamedTensor]:
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            owner = names.get(id(parameter), "")
            if not owner:
                owner = f"parameter {index} of group {number}"
                yield from _parameter(owner, parameter)
            state = optimizer.state.get(parameter, {})
            states = dict.items(state) if isinstance(state, dict) else [("state", state)]
            for key, value in states:
                for name, tensor in _tensors_in(value, str(key)):
                    yield NamedTensor(f"{name} of {owner}", "optimizer states", tensor)


def _tensors_in(value: Any, name: str, depth: int = _DEPTH) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in plain containers with their names; no other object is looked into."""
    kind = type(value)
    if issubclass(kind, Tensor):
        yield name, value
    elif depth and kind in (list, tuple, deque):
        for index, part in enumerate(list(value)):
            yield from _tensors_in(part, f"{name}[{index}]", depth - 1)
    elif depth and issubclass(kind, dict):
        for key, part in list(dict.items(value)):
            yield from _tensors_in(part, f"{name}[{key!r}]" if type(key) in (str, int) else name, depth - 1)


@dataclass
class LiveStorage:
    """A storage, described by the tensor in it that has a name, or else by the largest.

    Attributes:
        bytes: The size of the whole storage.
        shape: The shape of that tensor.
        dtype: Its dtype, such as "float32".
        names: The names of the tensors that lie in it.
        kind: What the first of them is, see `NamedTensor`; "other" if none has a name.
        in_graph: Whether one of them is the result of an operation that autograd recorded.
    """

    bytes: int
    shape: tuple[int, ...] = ()
    dtype: str = ""
    names: list[str] = field(default_factory=list)
    kind: str = "other"
    in_graph: bool = False
    _elements: int = -1

    def add(self, tensor: Tensor, name: str, kind: str) -> None:
        """Take a tensor that lies in the storage into account; those with names come first."""
        fits = tensor.numel() * tensor.element_size() <= self.bytes  # unless it is expanded
        elements = tensor.numel() if fits else 0
        if elements > self._elements and (name or not self.names):
            self.shape, self.dtype, self._elements = _shape(tensor), str(tensor.dtype).removeprefix("torch."), elements
        if name and name not in self.names:
            self.kind = self.kind if self.names else kind
            self.names.append(name)
        self.in_graph = self.in_graph or (tensor.requires_grad and not tensor.is_leaf)


def live_storages(device: torch.device, named: Iterable[NamedTensor] = ()) -> list[LiveStorage]:
    """Return the storages on a device.

    They are those of tensors that the garbage collector tracks. What only C++ holds is not among them: gradients that
    Python has never asked for, and what autograd has saved for the backward pass. Nothing is kept alive, and of
    an object that is not a tensor only the type is read.

    Args:
        device: The device, with an index if there are several of its type.
        named: More tensors to look at, which may not be tracked because of `gc.freeze`, with their names.
    """
    found: dict[int, LiveStorage] = {}
    with as_plain_tensors(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns when the data of a fake tensor are asked for
        for name, kind, tensor in named:
            _add(found, device, tensor, name, kind)
        for value in gc.get_objects():
            if issubclass(type(value), Tensor):  # `isinstance` would ask proxies for their `__class__`
                _add(found, device, value)
    return list(found.values())


def _add(found: dict[int, LiveStorage], device: torch.device, tensor: Tensor, name: str = "", kind: str = "") -> None:
    with suppress(Exception):  # a subclass may raise anything, and torch does for kinds that have no storage
        for part in _dense_parts(tensor, inner=bool(name)):
            storage = part.untyped_storage()
            if storage.device == device and storage.nbytes():
                found.setdefault(storage_id(storage), LiveStorage(storage.nbytes())).add(part, name, kind)


def _dense_parts(tensor: Tensor, inner: bool) -> Iterator[Tensor]:
    """Yield the tensors with a storage of their own that a tensor consists of.

    Args:
        tensor: The tensor.
        inner: Whether to look into subclasses that wrap others, such as DTensor; those are tracked themselves.
    """
    kind = type(tensor)
    if kind in _PLAIN_TYPES:
        if tensor.layout is torch.strided:
            yield tensor
        yield from parts_of_sparse(tensor)
    elif not hasattr(kind, "__tensor_flatten__"):
        storage = tensor.untyped_storage()
        if storage.device.type != "meta":  # of a fake tensor, which warns where it is asked for its data
            storage.data_ptr()  # raises for a wrapper, whose storage is a pretence
            yield tensor
    elif inner:
        parts = (getattr(tensor, attribute) for attribute in tensor.__tensor_flatten__()[0])  # type: ignore[attr-defined]
        for part in parts:
            if issubclass(type(part), Tensor):
                yield from _dense_parts(part, inner)


def _shape(tensor: Tensor) -> tuple[int, ...]:
    try:
        return tuple(map(int, tensor.shape))
    except RuntimeError:  # of a nested tensor
        return (tensor.numel(),)
