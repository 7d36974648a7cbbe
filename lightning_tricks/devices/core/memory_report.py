"""`memory_report`: what a device's memory is used for."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_tricks._shared.checks import check_count
from lightning_tricks._shared.text import format_shape, list_names, render_text
from lightning_tricks._shared.units import format_bytes
from lightning_tricks.devices.core.live_tensors import live_storages, named_tensors
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
        bytes: The size of the storage, which several tensors may share.
        name: The names that model and optimizers give to tensors in it: "net.0.weight", "gradient of net.0.weight",
            "exp_avg of net.0.weight". Empty for others, such as activations.
    """

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    name: str


@dataclass(frozen=True)
class MemoryReport:
    """What a device's memory is used for. Sizes are in bytes, and None where they are unknown.

    Attributes:
        device: The device, such as "cuda:0".
        allocated: What tensors hold. On CUDA, torch's allocator says it; elsewhere it is `found`.
        reserved: On CUDA, what the allocator has taken from the device; on the CPU, the resident memory of the process,
            which psutil says (from the extra `devices`).
        peak_allocated: The most that tensors held, on CUDA, since the last `torch.cuda.reset_peak_memory_stats`.
        peak_reserved: The most that was reserved.
        total: The memory of the device or the machine.
        free: What is free for all processes together.
        found: What the tensors that Python knows hold. The rest of `allocated` is held by C++ alone: what autograd
            saved for the backward pass, for instance.
        found_by_kind: The parts of `found`: "parameters", "gradients", "buffers", "attributes", "optimizer states" and,
            without a name, "other".
        in_graph: The part of `found` that holds results of operations which autograd recorded.
        largest: The largest storages, in descending order.
        growth_per_epoch: By how much `allocated` grew from epoch to epoch, on average; `CudaMemory` fills it in.
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

        from lightning_tricks._shared.table_with_notes import TableWithNotes

        table = TableWithNotes("\n".join(self.summary()), title=f"Memory of {self.device}")
        table.add_column("largest tensors", overflow="ellipsis")
        for heading in ("shape", "dtype", "size"):
            table.add_column(heading, justify="right")
        for tensor in self.largest:
            shape = format_shape(tensor.shape) or "scalar"
            cells = (tensor.name or "(no name)", shape, tensor.dtype, format_bytes(tensor.bytes))
            table.add_row(*map(Text, cells))
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
    """Report what a device's memory is used for: its sizes, and the largest tensors with their names.

    Tensors that share a storage are counted once. No value is read from the device, nothing waits for it, and no CUDA
    context is created: the free memory of a GPU that this process does not use is None. Listing all tensors takes a
    fraction of a second, so this is for the end of an epoch rather than for each step.

    Args:
        device: The device. None for the current CUDA device if this process uses CUDA, else for the CPU.
        model: A model, whose parameters, gradients, buffers and attributes are shown under their names.
        optimizers: The optimizer or optimizers whose states are shown under their names.
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
