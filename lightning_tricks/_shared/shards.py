"""DTensors of a checkpoint, stored beside its plain values as shards.

The shards are written by torch.distributed.checkpoint, and each rank reads back its part, or one process the whole.
"""

from __future__ import annotations

import enum
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from math import prod
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tricks._shared.tensors import is_sharded, replace_tensors

_KEY = "lightning_tricks.shards"  # of the place of a tensor that was taken out: under which key the shards are stored
_WEIGHTS = "state_dict"  # all of its tensors are stored as shards: then Lightning evaluates the checkpoint, too
_WEIGHTS_OF_LIGHTNING = (_WEIGHTS, "model")  # where ModelParallelStrategy and FSDPStrategy store them
_PLACEMENTS: dict[str, tuple[str, ...]] = {
    "Replicate": (),
    "Shard": ("dim",),
    "_StridedShard": ("dim", "split_factor"),
}  # and their arguments
_CHECKPOINT = "torch.distributed.checkpoint"
_METADATA_MODULES = (f"{_CHECKPOINT}.metadata", f"{_CHECKPOINT}.filesystem", "torch", "torch.serialization", "pathlib")


def take_shards(
    values: Mapping[str, Any], module: nn.Module, prefix: str = ""
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Take the tensors out of plain containers that are sharded over ranks.

    Args:
        values: The containers, the same on all ranks but for what the tensors hold.
        module: The module whose meshes the tensors lie on.
        prefix: What their keys begin with where they are stored.

    Returns:
        The containers with a description in the place of each tensor; and the tensors by their keys.

    Raises:
        ValueError: If a tensor is placed in a way that cannot be described, such as a sum that is still to be made.
    """
    meshes, taken = _meshes(module), dict[str, Tensor]()

    def describe(path: tuple[Any, ...], tensor: Tensor) -> Any:
        is_weight = path[0] == _WEIGHTS and len(path) == 2
        if not (is_sharded(tensor) or is_weight):
            return tensor
        key = ".".join(path) if is_weight else f"{path[0]}{''.join(f'[{part!r}]' for part in path[1:])}"
        taken[key] = tensor.detach()
        place: dict[str, Any] = {_KEY: prefix + key, "shape": list(tensor.shape), "dtype": tensor.dtype}
        if is_sharded(tensor):
            mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
            place |= {"mesh": meshes.index(mesh), "placements": [_described(each) for each in placements]}
        return place

    return replace_tensors(dict(values), describe), taken


def put_shards(values: Any, folder: Path, module: nn.Module) -> Any:
    """Put the tensors that `take_shards` took back into the containers, on the CPU, each rank its part.

    The module may have other meshes of the same kinds than at the save, as with another number of ranks. Where it has
    none, as it is not sharded, the tensors are whole.

    Args:
        values: The containers, with descriptions.
        folder: Where `write_shards` wrote.
        module: The module, sharded.

    Raises:
        ValueError: If the module is sharded in another way.
        Exception: Whatever torch.distributed.checkpoint raises where a file is damaged.
    """
    return _put(values, folder, _read_metadata(folder), _meshes(module))


def _put(values: Any, folder: Path, metadata: Any, meshes: Sequence[Any]) -> Any:
    wanted = dict[str, Tensor]()

    def put(value: Any) -> Any:
        if isinstance(value, dict):
            if _KEY in value:
                return wanted.setdefault(value[_KEY], _empty(value, meshes))
            for key, part in value.items():
                value[key] = put(part)
        elif isinstance(value, list):
            value[:] = map(put, value)
        elif type(value) is tuple:
            return tuple(map(put, value))
        return value

    whole = put(values)
    _read(wanted, folder, metadata)
    return whole


def read_whole(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the values of a checkpoint that is a folder, with whole tensors on the CPU, without running its code.

    Args:
        values: What lies in the folder beside the shards.
        folder: As `AutoResume`, `ModelParallelStrategy` or FSDPStrategy wrote it.

    Raises:
        ValueError: If the folder would need more memory than its files explain.
        Exception: Whatever torch.distributed.checkpoint raises where a file is damaged.
    """
    metadata = _read_metadata(folder)
    tensors = {key: stored for key, stored in metadata.state_dict_metadata.items() if hasattr(stored, "properties")}
    needed = sum(stored.properties.dtype.itemsize * prod(stored.size) for stored in tensors.values())
    if needed > sum(file.stat().st_size for file in folder.iterdir()):
        raise ValueError("its shards would be larger than its files")
    weights = {}
    for key, stored in tensors.items():
        entry, _, name = key.partition(".")
        if entry in _WEIGHTS_OF_LIGHTNING:
            weights[name] = {_KEY: key, "shape": list(stored.size), "dtype": stored.properties.dtype}
    whole: dict[str, Any] = _put({**values, _WEIGHTS: weights}, folder, metadata, ())
    return whole


def write_shards(folder: Path, shards: Mapping[str, Tensor], group: Any = None) -> None:
    """Write tensors to a folder, each rank its part; all ranks have to call it.

    Args:
        folder: The folder.
        shards: The tensors by their keys.
        group: The process group by which the ranks agree; None for the usual one.

    Raises:
        OSError: On all ranks, if one of them could not write.
    """
    checkpoint = _engine()
    writer = checkpoint.FileSystemWriter(folder)
    planner = checkpoint.DefaultSavePlanner(dedup_save_to_lowest_rank=True)  # what ranks share is as rank zero has it
    try:
        checkpoint.save(dict(shards), storage_writer=writer, planner=planner, process_group=group)
    except checkpoint.CheckpointException as error:
        reasons = "; ".join(f"rank {rank}: {cause[0]}" for rank, cause in sorted(error.failures.items()))
        raise OSError(reasons) from error


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of a tensor, or of one that `take_shards` took out of this place."""
    return tuple(value["shape"] if isinstance(value, Mapping) else value.shape)


def _engine() -> Any:
    from torch.distributed import checkpoint  # takes long to import

    return checkpoint


def _meshes(module: nn.Module) -> list[Any]:
    """Return the meshes of ranks that a module is sharded over, in an order that all processes have."""
    tensors: tuple[Any, ...] = (*module.parameters(), *module.buffers())
    return list(dict.fromkeys(tensor.device_mesh for tensor in tensors if is_sharded(tensor)))


def _described(placement: Any) -> list[Any]:
    kind = type(placement).__name__
    if kind not in _PLACEMENTS:
        raise ValueError(f"tensors that are placed as {placement} cannot be saved")
    return [kind, *(getattr(placement, name) for name in _PLACEMENTS[kind])]


def _placement(description: Sequence[Any]) -> Any:
    from torch.distributed.tensor import placement_types

    kind, *values = description
    return getattr(placement_types, kind)(**dict(zip(_PLACEMENTS[kind], values, strict=True)))


def _empty(place: Mapping[str, Any], meshes: Sequence[Any]) -> Tensor:
    """Return a tensor of the CPU as it is described, with any values."""
    if "mesh" not in place or not meshes:
        return torch.empty(place["shape"], dtype=place["dtype"], device="cpu")
    from torch.distributed.tensor import empty

    placements = [_placement(each) for each in place["placements"]]
    if place["mesh"] >= len(meshes) or meshes[place["mesh"]].ndim != len(placements):
        raise ValueError(
            f"{place[_KEY]} was sharded over another kind of device mesh than the module. Parallelize in as many "
            "dimensions as the run did"
        )
    made = empty(place["shape"], dtype=place["dtype"], device_mesh=meshes[place["mesh"]], placements=placements)
    return made.to("cpu")


def _read(tensors: dict[str, Tensor], folder: Path, metadata: Any) -> None:
    """Fill tensors from a folder; each rank may do that on its own."""
    reader, planner = _engine().FileSystemReader(folder), _engine().DefaultLoadPlanner()
    planner.set_up_planner(tensors, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
    reader.read_data(planner.finish_plan(plan), planner).wait()


def _read_metadata(folder: Path) -> Any:
    with (folder / ".metadata").open("rb") as file:
        return _MetadataUnpickler(file).load()


class _MetadataUnpickler(pickle.Unpickler):
    """Reads the metadata of shards, which are a pickle, without running code of it."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that metadata consist of.

        Raises:
            pickle.UnpicklingError: If it is something else.
        """
        if module in _METADATA_MODULES:
            found = super().find_class(module, name)
            is_record = isinstance(found, type) and (is_dataclass(found) or issubclass(found, enum.Enum | PurePath))
            if is_record or isinstance(found, torch.dtype) or found is torch.Size or name == "_get_layout":
                return found
        raise pickle.UnpicklingError(f"the metadata of the shards contain {module}.{name}, which is not allowed there")
