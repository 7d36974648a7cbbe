"""What a checkpoint holds: plain data, read without running code of it, and DTensors, stored beside it as shards.

The shards are written by torch.distributed.checkpoint, and each rank reads back its part.
"""

from __future__ import annotations

import codecs
import enum
import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import is_dataclass
from pathlib import Path, PurePath
from typing import IO, Any

import torch
from torch import Tensor, nn

from lightning_tricks._shared.tensors import is_dense, is_sharded, replace_tensors
from lightning_tricks._torch_compat.tensors import tensor_version
from lightning_tricks.auto_resume.core.checkpoint_folder import CHECKPOINT_KEY
from lightning_tricks.auto_resume.core.durable_writing import file_digest
from lightning_tricks.checkpoint_remapping.core.files.pickle_values import Global, Placeholder, children
from lightning_tricks.checkpoint_remapping.core.files.reading import read_values

# A resume does not restore these: they may hold any object
_ARGUMENTS = ("hyper_parameters", "datamodule_hyper_parameters", "hparams_type")
_READ_ONCE = (*_ARGUMENTS, CHECKPOINT_KEY)  # when a fit begins
_KEY = "lightning_tricks.shards"  # of the place of a tensor that was taken out: under which key the shards are stored
_WEIGHTS = "state_dict"  # all of its tensors are stored as shards: then Lightning evaluates the checkpoint, too
_PLACEMENTS: dict[str, tuple[str, ...]] = {
    "Replicate": (),
    "Shard": ("dim",),
    "_StridedShard": ("dim", "split_factor"),
}  # and their arguments
_CHECKPOINT = "torch.distributed.checkpoint"
_METADATA_MODULES = (f"{_CHECKPOINT}.metadata", f"{_CHECKPOINT}.filesystem", "torch", "torch.serialization", "pathlib")


def load_plain_data(path: Path, stream: IO[bytes] | None = None) -> dict[str, Any]:
    """Read a checkpoint without running code of it.

    Args:
        path: Path of the file.
        stream: The file, open; None opens it and maps the tensors from it, where it is a zip archive.

    Returns:
        The values of the checkpoint; a `Placeholder` for each object that is neither plain data nor a tensor.

    Raises:
        CheckpointError: If it is not a checkpoint, or holds a call that no checkpoint needs.
    """
    mmap = stream is None and zipfile.is_zipfile(path)
    try:
        checkpoint: dict[str, Any] = torch.load(stream or path, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError:
        checkpoint = read_values(path, mmap=mmap)
    return checkpoint


def object_pickle(values: Mapping[str, Any]) -> bytes:
    """Return nothing if `load_plain_data` certainly reads values as they are, once they are saved.

    Others have to be read to know it: what is returned for them is the same for values with the same objects.
    """
    stream = io.BytesIO()
    pickler = _ObjectPickler(stream)
    pickler.dump(values)
    return stream.getvalue() if pickler.found else b""


def plain_tensors(values: Mapping[str, Any]) -> list[Tensor] | None:
    """Return the tensors in values that `load_plain_data` certainly reads as they are; None for other values."""
    pickler = _ObjectPickler(io.BytesIO())
    try:
        pickler.dump(values)
    except Exception:  # of an object that nothing can save
        return None
    return None if pickler.found else pickler.tensors


def split_arguments(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the hyper-parameters in a checkpoint, which may hold any object, and what else is in it."""
    parts: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    for key, value in checkpoint.items():
        parts[key not in _ARGUMENTS][key] = value
    return parts


def find_objects(checkpoint: Mapping[str, Any]) -> list[str]:
    """Return a phrase such as "checkpoint['a'] is a Y" for each object that a resume needs and that was left out."""
    found, seen = list[str](), set[int]()
    pending = [(value, f"[{str(key)!r}]") for key, value in split_arguments(checkpoint)[1].items()]
    while pending:
        value, place = pending.pop()
        if isinstance(value, Global | Placeholder):
            found.append(f"checkpoint{place} is a {value if isinstance(value, Global) else value.name}")
        elif id(value) not in seen:
            seen.add(id(value))
            for key, part in children(value):
                pending += [(key, f"{place}['a key']"), (part, f"{place}[{str(key)!r}]")]
    return found


class KeptCheckpoint:
    """Keeps what was read from a checkpoint, and gives copies to hooks, which may change what they are given.

    The copies share the memory of the tensors, whose versions tell whether one of them was changed in place. A
    checkpoint with objects that may change without notice is not kept.

    Args:
        values: What was read.

    Attributes:
        values: The same; they must not be changed.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self._read_again = {key: value for key, value in values.items() if key not in _READ_ONCE}
        pickler = _ObjectPickler(io.BytesIO())
        pickler.dump(self._read_again)
        self._versions = [(tensor, tensor_version(tensor)) for tensor in pickler.tensors]
        self._can_be_kept = not pickler.found and not any(tensor.requires_grad for tensor in pickler.tensors)

    @property
    def is_intact(self) -> bool:
        """Whether the values are certainly those that were read."""
        return self._can_be_kept and all(tensor_version(tensor) == version for tensor, version in self._versions)

    def copy(self) -> dict[str, Any]:
        """Return a copy of all containers, with tensors of their own that share their memory."""
        own = {id(tensor): tensor.detach() for tensor, _ in self._versions}
        return {**self.values, **deepcopy(self._read_again, own)}


class _ObjectPickler(pickle.Pickler):
    """Pickles values without the data of tensors, and notes whether there are objects beside plain data."""

    _PLAIN_TYPES = frozenset({OrderedDict, torch.Size, torch.dtype, torch.device, complex})

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(stream, protocol=2)  # as `torch.save` pickles
        self.found, self.tensors = False, list[Tensor]()

    def reducer_override(self, value: Any) -> Any:
        """Take notice of a value that is not a number, a string or a container of the language itself."""
        kind = type(value)
        if (kind in (Tensor, nn.Parameter) and _is_usual(value)) or (isinstance(value, Tensor) and is_sharded(value)):
            self.tensors.append(value)
            return _tensor, ()
        if kind not in self._PLAIN_TYPES and not any(value is call for call in _PLAIN_CALLS):
            self.found = True
        return NotImplemented


def _is_usual(value: Tensor) -> bool:
    return is_dense(value) and value.device.type in ("cpu", "cuda") and not vars(value)


def _tensor() -> None:
    """Stand for a tensor."""


_PLAIN_CALLS = (_tensor, OrderedDict, set, complex, codecs.encode, torch.Size, torch.device)


def take_shards(values: Mapping[str, Any], module: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Take the tensors out of plain containers that are sharded over ranks.

    Args:
        values: The containers, the same on all ranks but for what the tensors hold.
        module: The module whose meshes the tensors lie on.

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
        place: dict[str, Any] = {_KEY: key, "shape": list(tensor.shape), "dtype": tensor.dtype}
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
    meshes, wanted = _meshes(module), dict[str, Tensor]()

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
    _read(wanted, folder)
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


def files_of_rank(folder: Path, rank: int) -> dict[str, tuple[str, int]]:
    """Return the files that a rank wrote to a folder, with SHA-256 and size; those of no rank are rank zero's."""
    own = f"__{rank}_"
    found = {}
    for path in folder.iterdir():
        if path.name.startswith(own) or not (rank or path.name.startswith("__")):
            with path.open("rb") as file:
                found[path.name] = file_digest(file).hexdigest(), path.stat().st_size
    return found


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
        raise ValueError(f"{place[_KEY]} was sharded over another kind of device mesh than the module")
    made = empty(place["shape"], dtype=place["dtype"], device_mesh=meshes[place["mesh"]], placements=placements)
    return made.to("cpu")


def _read(tensors: dict[str, Tensor], folder: Path) -> None:
    """Fill tensors from a folder; each rank may do that on its own."""
    reader, planner = _engine().FileSystemReader(folder), _engine().DefaultLoadPlanner()
    with (folder / ".metadata").open("rb") as file:
        metadata = _MetadataUnpickler(file).load()
    planner.set_up_planner(tensors, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
    reader.read_data(planner.finish_plan(plan), planner).wait()


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
