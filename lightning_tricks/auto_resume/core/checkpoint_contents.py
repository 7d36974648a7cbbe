"""What a checkpoint holds: plain data, read without running code of it."""

from __future__ import annotations

import codecs
import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from lightning_tricks._shared.tensors import is_dense, is_sharded
from lightning_tricks._torch_compat.tensors import tensor_version
from lightning_tricks.auto_resume.core.checkpoint_folder import CHECKPOINT_KEY
from lightning_tricks.auto_resume.core.durable_writing import file_digest
from lightning_tricks.checkpoint_remapping.core.files.pickle_values import Global, Placeholder, children
from lightning_tricks.checkpoint_remapping.core.files.reading import read_values

# A resume does not restore these: they may hold any object
_ARGUMENTS = ("hyper_parameters", "datamodule_hyper_parameters", "hparams_type")
_READ_ONCE = (*_ARGUMENTS, CHECKPOINT_KEY)  # when a fit begins


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


def files_of_rank(folder: Path, rank: int) -> dict[str, tuple[str, int]]:
    """Return the files that a rank wrote to a folder, with SHA-256 and size; those of no rank are rank zero's."""
    own = f"__{rank}_"
    found = {}
    for path in folder.iterdir():
        if path.name.startswith(own) or not (rank or path.name.startswith("__")):
            with path.open("rb") as file:
                found[path.name] = file_digest(file).hexdigest(), path.stat().st_size
    return found
