"""Copies of what a checkpoint holds in the memory of the host.

What lies on a CUDA device is copied together, with one wait in place of one for each tensor; or all is copied, to be
written while training goes on.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_tricks._shared.tensors import replace_tensors, tensors_in

_MAX_BYTES = 2**28  # of pinned memory; what is larger is left to `torch.save`, which holds one storage at a time


def stage_on_host(value: Any) -> Any:
    """Return plain containers in which the tensors of CUDA devices are on the CPU, the smallest first up to 256 MiB.

    `torch.save` reads one storage after the other, and the host waits for each. Here the copies go to pinned memory and
    are waited for together. Tensors that share a storage share its copy. What is no plain container, and what is in it,
    is left as it is.
    """
    if not torch.cuda.is_initialized():  # then there is no tensor on such a device
        return value
    given = (tensor.untyped_storage() for tensor in tensors_in(value) if _is_staged(tensor))
    copies = _copies(_smallest({storage.data_ptr(): storage for storage in given if storage.nbytes()}.values()))

    def replace(_: Any, tensor: Tensor) -> Tensor:
        copy = copies.get(tensor.untyped_storage().data_ptr()) if _is_staged(tensor) else None
        return tensor if copy is None else _like(tensor, copy)

    return replace_tensors(value, replace) if copies else value


class HostCopies:
    """Copies checkpoints to memory of the host, which the next copy uses again: there is one copy at a time."""

    def __init__(self) -> None:
        self._devices = set[torch.device]()  # on which copies may not have ended
        self._memory: dict[tuple[int, bool], list[Tensor]] = {}  # by number of bytes, and whether it is pinned

    def take(self, value: Any, *, waits: bool = True) -> Any:
        """Return a copy of plain containers, tensors and what else can be copied; the one before is overwritten.

        Tensors that share memory share it in the copy as well. What cannot be copied is left as it is.

        Args:
            value: What is copied.
            waits: Whether the copy is complete at once. Otherwise it is after `wait`, and the values are those of now.
        """
        memory, copies = self._memory, dict[tuple[torch.device, int], Tensor]()
        self._memory = {}

        def memory_for(storage: torch.UntypedStorage) -> Tensor:
            size, pins = kind = storage.nbytes(), storage.device.type == "cuda"
            free = memory.get(kind)
            try:
                found = free.pop() if free else torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pins)
            except RuntimeError:  # the system lets nobody pin as much
                found = torch.empty(size, dtype=torch.uint8, device="cpu")
            self._memory.setdefault(kind, []).append(found)
            return found

        def copy_tensor(_: Any, tensor: Tensor) -> Tensor:
            tensor = tensor.detach().resolve_conj().resolve_neg()
            if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
                return tensor.clone() if tensor.device.type == "cpu" else tensor.to("cpu")
            storage = tensor.untyped_storage()
            key = storage.device, storage.data_ptr()
            if key not in copies:
                copies[key] = memory_for(storage).copy_(_bytes_of(storage), non_blocking=storage.device.type == "cuda")
                self._devices.add(storage.device)
            return _like(tensor, copies[key].untyped_storage())

        made = replace_tensors(value, copy_tensor, others=_copied)
        if waits:
            self.wait()
        return made

    def wait(self) -> None:
        """Wait until what was taken is complete."""
        while self._devices:
            if (device := self._devices.pop()).type == "cuda":
                torch.cuda.current_stream(device).synchronize()


def _like(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    """Return the tensor that views a copy of its storage on the CPU as the given one views its own."""
    empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # an object of the user
        return value


def _is_staged(tensor: Tensor) -> bool:
    """Whether a tensor is on a CUDA device, and is what its storage, offset, sizes and strides make it."""
    is_plain = type(tensor) is Tensor and tensor.is_cuda and tensor.layout is torch.strided
    return is_plain and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def _smallest(storages: Iterable[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
    taken, room = [], _MAX_BYTES
    for storage in sorted(storages, key=torch.UntypedStorage.nbytes):
        room -= storage.nbytes()
        if room < 0:
            break
        taken.append(storage)
    return taken


def _copies(storages: list[torch.UntypedStorage]) -> dict[int, torch.UntypedStorage]:
    """Copy storages to the CPU; by the address of each."""
    if not storages:
        return {}
    sizes = [storage.nbytes() for storage in storages]
    try:
        memory = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError:  # the system lets nobody pin as much: then `torch.save` reads all
        return {}
    parts = memory.split(sizes)
    for storage, part in zip(storages, parts, strict=True):
        part.copy_(_bytes_of(storage), non_blocking=True)
    for device in {storage.device for storage in storages}:
        torch.cuda.current_stream(device).synchronize()
    # apart from each other, or each would keep all of them
    return {storage.data_ptr(): part.clone().untyped_storage() for storage, part in zip(storages, parts, strict=True)}
