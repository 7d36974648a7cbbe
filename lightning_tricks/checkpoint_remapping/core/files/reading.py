"""`read_checkpoint`: the weights of any file, without running anything that the file names."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_tricks._shared.checks import check_path, did_you_mean
from lightning_tricks._shared.files import NotAFileError
from lightning_tricks._shared.read_budget import Budget, OverBudgetError
from lightning_tricks.checkpoint_remapping.core.errors import (
    CheckpointError,
    MissingCheckpointError,
    NotACheckpointError,
    UnsafeCheckpointError,
)
from lightning_tricks.checkpoint_remapping.core.files.download import download
from lightning_tricks.checkpoint_remapping.core.files.formats import describe_directory, read_container
from lightning_tricks.checkpoint_remapping.core.files.pickle_values import Placeholder, describe_value
from lightning_tricks.checkpoint_remapping.core.files.storages import MapLocation
from lightning_tricks.checkpoint_remapping.core.files.weight_search import (
    check_names,
    checkpoint_kind,
    find_placeholders,
    find_weights,
    without_weights,
)

_DEEPEST_WEIGHTS = 3  # dicts inside each other in which weights are searched for


@dataclass(frozen=True)
class Checkpoint:
    """The weights of a file and what else is in it.

    Attributes:
        state_dict: The tensors by qualified name, in the file's order; they may be mapped from the file.
        kind: `"lightning"`, `"state_dict"`, `"nested"` (in a dict of other things), `"model"` (a pickled module),
            `"torchscript"`, `"safetensors"` or `"sharded"`.
        metadata: The other values: those beside the weights, or the metadata of the header.
        placeholders: Placeholders of the objects that were not constructed, each with its `name` and `location`.
        key: Where in the file the weights are, such as `"model_state_dict"`; empty at the top.
        source: The path or URL that was read.
    """

    state_dict: dict[str, Any] = field(repr=False)
    kind: str
    metadata: dict[str, Any] = field(repr=False)
    placeholders: tuple[Placeholder, ...] = ()
    key: str = ""
    source: str = ""


def read_checkpoint(
    path: str | os.PathLike[str], *, map_location: MapLocation = "cpu", mmap: bool = True, key: str | None = None
) -> Checkpoint:
    """Read the weights of a file of any usual format, which is recognized by its content.

    Only tensors and plain values are constructed, and nothing that the file names is imported or called, whatever
    environment variables say. Objects of other types are returned as placeholders, so that the weights beside them
    load; of a pickled module the tensors are returned by qualified name. A file that asks for far more memory or time
    than its size explains is refused.

    Args:
        path: A local file, the index of a sharded model, or a URL (`https://...`, or one that fsspec opens), which is
            downloaded first: at most 64 GiB, with a timeout of one minute.
        map_location: Where tensors go, as in `torch.load`: a device, a dict or a function; None for the device that
            they were saved from.
        mmap: Whether tensors are mapped from the file, so that they take no memory before they are used.
        key: The entry that holds the weights (`"model.ema"` for an entry inside an entry); None searches for it.

    Returns:
        The weights and the other values of the file.

    Raises:
        MissingCheckpointError: If there is no such file.
        NotACheckpointError: If it holds no weights, is of another kind or is truncated; the message says what it is.
        UnsafeCheckpointError: If it asks for a call that no checkpoint needs.
        CheckpointError: If several entries could be the weights, or a device is not available.

    Examples:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"epoch": 3, "model": {"weight": torch.eye(2)}}, f"{folder}/checkpoint.pt")
        ...     checkpoint = read_checkpoint(f"{folder}/checkpoint.pt")
        >>> checkpoint.state_dict["weight"].shape, checkpoint.metadata
        (torch.Size([2, 2]), {'epoch': 3})
    """
    name = os.fspath(check_path("path", path, "a checkpoint", takes_address=True))
    if "://" not in name:
        return _read_file(Path(name).expanduser(), name, map_location, mmap, key)
    with tempfile.TemporaryDirectory(prefix="lightning_tricks_") as folder:
        target = Path(folder) / "checkpoint"
        download(name, target)
        return _read_file(target, name, map_location, False, key)


def checkpoint_of_values(values: Mapping[Any, Any], key: str | None) -> Checkpoint:
    """Return the weights among values in memory, such as `torch.load` returns, and the others beside them.

    Args:
        values: Tensors by name, or a dict with weights or modules in it.
        key: As in `read_checkpoint`.

    Raises:
        CheckpointError: If there are no weights, or several and no `key`.
    """
    if key is None and any(isinstance(value, torch.Tensor) for value in values.values()):
        return Checkpoint(dict(values), "state_dict", {})
    try:
        key_path, tensors = find_weights(_with_state_dicts(values), key, Budget(sys.maxsize))
    except CheckpointError as error:
        arrays = any(hasattr(value, "__array__") for value in values.values())
        remedy = " Make tensors of its arrays: torch.from_numpy(array)." * arrays
        raise type(error)(f"The dict of weights is {error}{remedy}") from error
    return Checkpoint(tensors, "nested" if key_path else "state_dict", {}, key=".".join(key_path))


def _with_state_dicts(values: Mapping[Any, Any], depth: int = 0) -> dict[Any, Any]:
    """Return nested dicts as they are, with the state dicts of modules in place of these."""
    return {
        name: value.state_dict()
        if isinstance(value, torch.nn.Module)
        else _with_state_dicts(value, depth + 1)
        if isinstance(value, Mapping) and depth < _DEEPEST_WEIGHTS
        else value
        for name, value in values.items()
    }


def read_values(path: Path, *, mmap: bool = True) -> Any:
    """Return all values of a local file, as `read_checkpoint` reads them.

    Raises:
        CheckpointError: As `read_checkpoint` does.
    """
    with _explaining_errors(path, str(path)):
        return read_container(path, "cpu", mmap, Budget(0))[0]


@contextmanager
def _explaining_errors(path: Path, name: str) -> Iterator[None]:
    """Turn what goes wrong while a file is read into a sentence that names it."""
    try:
        yield
    except UnsafeCheckpointError as error:
        raise UnsafeCheckpointError(
            f"{name} is {error}. Nothing of it was run, and it was not read. Use a file of tensors alone, such as "
            ".safetensors, or one from another source."
        ) from error
    except CheckpointError as error:
        raise type(error)(f"{name} is {error}") from error
    except FileNotFoundError as error:
        raise MissingCheckpointError(f"{name} does not exist.{_similar_file(path) or ' Is the path right?'}") from error
    except NotAFileError as error:
        raise NotACheckpointError(f"{name}: {error}. Save it to a file first.") from error
    except OverBudgetError as error:
        raise NotACheckpointError(
            f"{name} is too costly to read: {error}, which is far more than its size explains. If you trust "
            "its source, save its weights alone."
        ) from error
    except (ImportError, torch.OutOfMemoryError):
        raise
    except OSError as error:
        if error.errno == errno.EINVAL:  # an impossible offset
            raise NotACheckpointError(f"{name} is corrupt or truncated. Download it again.") from error
        raise CheckpointError(f"{name} cannot be read: {error.strerror or error}.") from error
    except Exception as error:  # corrupt bytes: offsets beyond the file, invalid names
        raise NotACheckpointError(f"{name} is corrupt or truncated ({str(error)[:200]}). Download it again.") from error


def _read_file(path: Path, name: str, map_location: MapLocation, mmap: bool, key: str | None) -> Checkpoint:
    with _explaining_errors(path, name):
        if path.is_dir():
            raise NotACheckpointError(describe_directory(path))
        budget = Budget(0)
        value, container, header = read_container(path, map_location, mmap, budget)
        key_path, tensors = find_weights(value, key, budget)
        if not tensors:
            raise NotACheckpointError("a checkpoint with an empty state dict: it holds no weights.")
        check_names(tensors)
        metadata = header | (without_weights(value, key_path) if isinstance(value, dict) and key_path else {})
        _check_instantiators(metadata)
        return Checkpoint(
            state_dict=tensors,
            kind=checkpoint_kind(value, key_path, container),
            metadata=metadata,
            placeholders=tuple(find_placeholders(value, budget)),
            key=".".join(key_path),
            source=name,
        )


def _similar_file(path: Path) -> str:
    """Return a sentence that names a file with nearly the name of one that is not there."""
    folder = path.parent
    return did_you_mean(path.name, (file.name for file in folder.iterdir())) if folder.is_dir() else ""


_INSTANTIATORS = ("lightning.pytorch.cli.instantiate_module", "pytorch_lightning.cli.instantiate_module")


def _check_instantiators(metadata: Mapping[str, Any]) -> None:
    """Refuse hyper-parameters that make Lightning call a function which the file names (CVE-2026-58659)."""
    for key, values in metadata.items():
        asked = values.get("_instantiator") if isinstance(values, dict) else None
        if asked is not None and not (isinstance(asked, str) and asked in _INSTANTIATORS):
            named = key[:80] if isinstance(key, str) else describe_value(key)
            raise UnsafeCheckpointError(
                f"a checkpoint whose {named} name {describe_value(asked)} as the function that makes the model "
                "(Lightning's own is lightning.pytorch.cli.instantiate_module)"
            )
