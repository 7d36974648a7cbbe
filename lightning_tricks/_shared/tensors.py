"""Tensors inside other values, their copies, tensors that are sharded over ranks, and values of all ranks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tricks._torch_compat.tensors import tree_map_only


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested containers, dataclasses and named tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, list | tuple | set):
        for part in value:
            yield from tensors_in(part)
    elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        for name in value.__dataclass_fields__:
            yield from tensors_in(getattr(value, name, None))


def to_double(numbers: Tensor) -> Tensor:
    """Return numbers as float64; as float32 on MPS, which has no float64."""
    return numbers.float() if numbers.device.type == "mps" else numbers.double()


def read_numbers(tensors: Sequence[Tensor]) -> list[list[float]]:
    """Return the numbers of each tensor, with one read from each device."""
    parts: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        parts.setdefault(tensor.device, []).append(to_double(tensor.detach().reshape(-1)))
    numbers = {device: iter(torch.cat(flat).tolist()) for device, flat in parts.items()}
    return [[next(numbers[tensor.device]) for _ in range(tensor.numel())] for tensor in tensors]


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, of which this rank may hold only a part."""
    return hasattr(tensor, "full_tensor")


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a DTensor, so that each rank has the whole tensor; return any other tensor as it is."""
    if not is_sharded(tensor):
        return tensor
    gathered: Any = tensor.to(tensor.device_mesh.device_type)  # type: ignore[attr-defined]  # it may have been copied
    whole: Tensor = gathered.full_tensor()
    return whole


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a DTensor that this rank holds; return any other tensor as it is."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return part


def shard_as(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of a tensor that all ranks have, as a DTensor that is sharded as another one.

    What is sharded already is returned as it is, and so is all where the other one is no DTensor.
    """
    if is_sharded(tensor) or not is_sharded(like):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh  # type: ignore[attr-defined]
    whole = DTensor.from_local(tensor.to(mesh.device_type), mesh, [Replicate()] * mesh.ndim, run_check=False)
    part: Tensor = whole.redistribute(placements=like.placements)  # type: ignore[attr-defined]
    return part


def replace_tensors(
    value: Any,
    function: Callable[[tuple[Any, ...], Tensor], Any],
    path: tuple[Any, ...] = (),
    others: Callable[[Any], Any] = lambda value: value,
) -> Any:
    """Rebuild plain containers with what a function makes of each tensor, given the keys that lead to it.

    What is no plain container is what `others` makes of it; as a rule it is left as it is.
    """
    if isinstance(value, Tensor):
        return function(path, value)
    if type(value) in (dict, OrderedDict):
        items = ((key, replace_tensors(part, function, (*path, key), others)) for key, part in value.items())
        made = type(value)(items)
        if isinstance(made, OrderedDict):
            vars(made).update(vars(value))  # a state dict's versions
        return made
    if type(value) in (list, tuple):
        places = enumerate(value)
        return type(value)(replace_tensors(part, function, (*path, place), others) for place, part in places)
    return others(value)


def detach_tensors(value: Any) -> Any:
    """Return nested containers with their tensors detached."""
    return tree_map_only(Tensor, Tensor.detach, value)


def clone_tensors(value: Any, device: torch.device | str | None = None) -> Any:
    """Return nested containers with copies of their tensors, without gradients; on a device if one is given."""

    def clone(tensor: Tensor) -> Tensor:
        return tensor.detach().to(device, copy=True) if device is not None else tensor.detach().clone()

    return tree_map_only(Tensor, clone, value)


def named_tensors(module: nn.Module, *, remove_duplicate: bool = True) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module by name, tied ones by their first name; of FSDP2 the shards.

    Without `remove_duplicate`, tied ones are there by each of their names.
    """
    reshard_fsdp2(module)
    options: dict[str, Any] = {} if remove_duplicate else {"remove_duplicate": False}  # an override may not know it
    return {**dict(module.named_parameters(**options)), **dict(module.named_buffers(**options))}


def parameters_of(optimizer: Any) -> list[Tensor]:
    """Return the parameters of an optimizer, in the order of their numbers in its state dict."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Leave inference mode, whose tensors can be changed in no other mode, and record no gradients."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def unsharded_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module, which FSDP2 has replaced if it has sharded the module."""
    cls = type(module)
    return cls.__bases__[1] if cls.__bases__[0].__name__ == "FSDPModule" else cls


def reshard_fsdp2(module: nn.Module) -> None:
    """Free the whole parameters that FSDP2 has gathered: what is set on the shards counts from the next gathering."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    from torch.distributed import fsdp

    for part in module.modules():
        if isinstance(part, fsdp.FSDPModule):
            part.reshard()


def gather_objects(value: Any, group: Any = None) -> list[Any]:
    """Return the values of all ranks in order, on each rank; the value of this process alone if there is no other.

    Every rank has to call it. Tensors should be on the CPU, because they are pickled. A `group` of all ranks keeps a
    thread of its own apart from what others exchange.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return [value]
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value, group)
    return values


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is one block of numbers: neither sparse nor quantized nor nested."""
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)


def is_on_meta(tensor: Any) -> bool:
    """Whether a tensor has no values."""
    return isinstance(tensor, torch.Tensor) and tensor.is_meta
