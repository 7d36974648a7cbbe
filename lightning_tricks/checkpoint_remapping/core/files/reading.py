"""`read_checkpoint`: the weights of any file, without running anything that the file names."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import torch

from lightning_tricks._shared.checks import check_path, did_you_mean
from lightning_tricks._shared.extras import needed_for_address
from lightning_tricks._shared.files import MAIN_FILE, NotAFileError
from lightning_tricks._shared.read_budget import Budget, OverBudgetError
from lightning_tricks._shared.shards import read_whole
from lightning_tricks._shared.tensors import replace_tensors
from lightning_tricks.checkpoint_remapping.core.errors import (
    CheckpointError,
    MissingCheckpointError,
    NotACheckpointError,
    UnsafeCheckpointError,
)
from lightning_tricks.checkpoint_remapping.core.files.checkpoint import Checkpoint, checkpoint_of_file
from lightning_tricks.checkpoint_remapping.core.files.containers import read_container
from lightning_tricks.checkpoint_remapping.core.files.other_formats import describe_directory
from lightning_tricks.checkpoint_remapping.core.files.pickle_values import find_placeholders
from lightning_tricks.checkpoint_remapping.core.files.storages import MapLocation, is_available

TIMEOUT = 60.0  # seconds in which a server must answer, or send the next bytes


def read_checkpoint(
    path: str | os.PathLike[str], *, map_location: MapLocation = "cpu", mmap: bool = True, key: str | None = None
) -> Checkpoint:
    """Read the weights of a file of any usual format, which is recognized by its content.

    Only tensors and plain values are constructed, and nothing that the file names is imported or called, whatever
    environment variables say. Other objects become placeholders, so the weights beside them load; a pickled module
    gives its tensors by qualified name. A file that needs far more memory or time than its size explains is refused.

    Args:
        path: A local file, the index of a sharded model, a folder of shards that Lightning or `AutoResume` wrote, or a
            URL (`https://...`, or one that fsspec opens), which is downloaded first, with a timeout of one minute.
        map_location: The device for the tensors; None for the devices that they were saved from, if they
            exist.
        mmap: Whether tensors are mapped from the file, so they take no memory before they are used.
        key: The entry that holds the weights (`"model.ema"` for an entry inside an entry); None searches for it.

    Returns:
        The weights and the other values of the file.

    Raises:
        MissingCheckpointError: If there is no such file.
        NotACheckpointError: If it contains no weights, is of another kind or is truncated; the message says what it is.
        UnsafeCheckpointError: If it requests a call that no checkpoint needs.
        CheckpointError: If several entries could be the weights, or a device is not available.

    Examples:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"epoch": 3, "model": {"weight": torch.eye(2)}}, f"{folder}/checkpoint.pt")
        ...     checkpoint = read_checkpoint(f"{folder}/checkpoint.pt")
        >>> checkpoint.state_dict["weight"].shape, checkpoint.metadata
        (torch.Size([2, 2]), {'epoch': 3})
    """
    if not isinstance(map_location, str | torch.device | None):
        raise TypeError(f"map_location must be a device or None, got {map_location!r}: move the tensors after reading.")
    name = os.fspath(check_path("path", path, "a checkpoint", takes_address=True))
    if "://" not in name:
        return _read_file(Path(name).expanduser(), name, map_location, mmap, key)
    with tempfile.TemporaryDirectory(prefix="lightning_tricks_") as folder:
        target = Path(folder) / "checkpoint"
        _download(name, target)
        return _read_file(target, name, map_location, False, key)


def _download(address: str, target: Path) -> None:
    """Download a URL (`https://...`, `http://...`, or one that fsspec opens) to a file.

    Raises:
        MissingCheckpointError: If it cannot be downloaded, whatever the reason.
    """
    rng_state = random.getstate()
    try:
        if address.lower().startswith(("https://", "http://")):
            opened = urlopen(address, timeout=TIMEOUT)  # noqa: S310  # of these schemes
        else:
            import fsspec

            opened = fsspec.open(address, "rb")
        with opened as source, target.open("wb") as file:
            shutil.copyfileobj(source, file)
        if not target.stat().st_size and hasattr(opened, "fs") and opened.fs.isdir(opened.path):
            raise IsADirectoryError("it is a folder. Give the address of a file in it")
    except ImportError as error:
        needed = needed_for_address(address, error)
        raise MissingCheckpointError(f"{address} cannot be downloaded: {needed}") from error
    except Exception as error:  # of the network, HTTP, TLS, the address itself, or one of fsspec's many libraries
        text = " ".join(str(error).split())[:200].rstrip(".")
        if isinstance(error, FileNotFoundError):  # whose text may be the path alone
            text = f"it does not exist ({text})"
        raise MissingCheckpointError(f"{address} cannot be downloaded: {text or type(error).__name__}.") from error
    finally:
        random.setstate(rng_state)  # of which botocore takes the delays of its retries


def _read_file(path: Path, name: str, map_location: MapLocation, mmap: bool, key: str | None) -> Checkpoint:
    with _explaining_errors(path, name):
        main_file = path / MAIN_FILE
        if path.is_dir() and not ((path / ".metadata").is_file() and main_file.is_file()):
            raise NotACheckpointError(describe_directory(path))
        if map_location is not None and not is_available(map_location):
            raise CheckpointError(f"not read to {str(map_location)!r}, which is unavailable: pass map_location='cpu'.")
        budget = Budget(0)
        contents = read_container(main_file if path.is_dir() else path, map_location, mmap, budget)
        if path.is_dir():
            whole = replace_tensors(read_whole(contents[0], path), lambda _, tensor: tensor.to(map_location or "cpu"))
            contents = whole, *contents[1:]
        return checkpoint_of_file(*contents, key, budget, name, map_location)


def read_values(path: Path, *, mmap: bool = True) -> Any:
    """Return all values of a local file, as `read_checkpoint` reads them.

    Raises:
        CheckpointError: As `read_checkpoint` does.
    """
    with _explaining_errors(path, str(path)):
        budget = Budget(0)
        value = read_container(path, "cpu", mmap, budget)[0]
        find_placeholders(value, budget)  # which refuses what is nested too deeply
        return value


@contextmanager
def _explaining_errors(path: Path, name: str) -> Iterator[None]:
    """Turn what goes wrong while a file is read into a sentence that names it."""
    try:
        yield
    except UnsafeCheckpointError as error:
        raise UnsafeCheckpointError(
            f"{name} is {error}. Nothing of it was run, and it was not read. Use a file with only tensors, such as "
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
            "its source, save only its weights."
        ) from error
    except (ImportError, torch.OutOfMemoryError):
        raise
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {error.strerror or error}.") from error
    except Exception as error:  # corrupt bytes: offsets beyond the file, invalid names
        raise NotACheckpointError(f"{name} is corrupt or truncated ({str(error)[:200]}). Download it again.") from error


def _similar_file(path: Path) -> str:
    """Return a sentence that names a file with nearly the name of one that is not there."""
    folder = path.parent
    return did_you_mean(path.name, (file.name for file in folder.iterdir())) if folder.is_dir() else ""
