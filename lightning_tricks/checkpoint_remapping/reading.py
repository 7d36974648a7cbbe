"""`read_checkpoint`: the weights of any file, without running anything that the file names."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import torch

from lightning_tricks._shared.checks import nearest
from lightning_tricks.checkpoint_remapping.containers import MapLocation, read_container
from lightning_tricks.checkpoint_remapping.errors import (
    CheckpointError,
    MissingCheckpointError,
    NotACheckpointError,
    UnsafeCheckpointError,
)
from lightning_tricks.checkpoint_remapping.pickles import Global, Placeholder, children


@dataclass(frozen=True)
class Checkpoint:
    """The weights of a file and what else is in it.

    Attributes:
        state_dict: The tensors by qualified name, in the file's order; they may be mapped from the file.
        kind: `"lightning"`, `"state_dict"`, `"nested"` (in a dict of other things), `"model"` (a pickled module),
            `"torchscript"`, `"safetensors"` or `"sharded"`.
        metadata: The rest: what lies beside the weights, or the header's metadata.
        placeholders: What stands for the objects that were not constructed, each with its `name` and `location`.
        key: Where in the file the weights are, such as `"model_state_dict"`; empty at the top.
        source: What was read.
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
    """Read the weights of a file of any usual format; what it is, is told from its content.

    Nothing beyond tensors and plain values is constructed, and nothing that the file names is imported or called,
    whatever the environment says. Objects of other types come back as placeholders, so that the weights beside them
    load; a pickled module gives up its tensors by qualified name.

    Args:
        path: A local file, the index of a sharded model, or an address (`https://...`, or what fsspec opens), which is
            downloaded first.
        map_location: Where tensors go, as in `torch.load`: a device, a dict or a function; None for where they were.
        mmap: Whether tensors are mapped from the file, so that they take no memory before they are used.
        key: The entry that holds the weights (`"model.ema"` for an entry inside an entry); None finds it.

    Raises:
        MissingCheckpointError: If there is no such file.
        NotACheckpointError: If it holds no weights, is of another kind or is cut off; the message says what it is.
        UnsafeCheckpointError: If it asks for a call that no honest checkpoint needs.
        CheckpointError: If several entries could be the weights, or a device is missing.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"epoch": 3, "model": {"weight": torch.eye(2)}}, f"{folder}/checkpoint.pt")
        ...     checkpoint = read_checkpoint(f"{folder}/checkpoint.pt")
        >>> checkpoint.state_dict["weight"].shape, checkpoint.metadata
        (torch.Size([2, 2]), {'epoch': 3})
    """
    name = os.fspath(path)
    if "://" not in name:
        return _read(Path(name).expanduser(), name, map_location, mmap, key)
    with tempfile.TemporaryDirectory(prefix="lightning_tricks_") as folder:
        return _read(_download(name, Path(folder)), name, map_location, False, key)


# What comes of bytes that mean nothing: offsets beyond the file, names that are no text, a list where a dict should be
_BROKEN = (ArithmeticError, AttributeError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError)


def _read(path: Path, name: str, map_location: MapLocation, mmap: bool, key: str | None) -> Checkpoint:
    if path.is_dir():
        raise NotACheckpointError(f"{name} is {_described_directory(path)}")
    if not path.exists():
        folder = path.parent
        near = nearest(path.name, (file.name for file in folder.iterdir())) if folder.is_dir() else ""
        raise MissingCheckpointError(f"{name} does not exist.{near or ' Is the path right?'}")
    try:
        value, container, header = read_container(path, map_location, mmap)
        found, tensors = _find_weights(value, key)
        if not tensors:
            raise NotACheckpointError("a checkpoint with an empty state dict: it holds no weights.")
    except UnsafeCheckpointError as error:
        raise UnsafeCheckpointError(
            f"{name} is {error}. Nothing of it was run, and it was not read. Use a file of tensors alone, such as "
            ".safetensors, or one from another source."
        ) from error
    except CheckpointError as error:
        raise type(error)(f"{name} is {error}") from error
    except _BROKEN as error:
        if isinstance(error, torch.OutOfMemoryError) or (isinstance(error, OSError) and error.errno != errno.EINVAL):
            raise
        raise NotACheckpointError(f"{name} is broken or cut off ({error}). Download it again.") from error
    rest = _without(value, found) if isinstance(value, dict) and found else {}
    checkpoint = Checkpoint(
        state_dict=tensors,
        kind=_kind(value, found, container),
        metadata=header | rest,
        placeholders=tuple(_placeholders(value)),
        key=".".join(found),
        source=name,
    )
    _check_instantiators(name, checkpoint.metadata)
    return checkpoint


def _download(address: str, folder: Path) -> Path:
    parts = urlsplit(address)
    target = folder / (Path(unquote(parts.path)).name or "checkpoint")
    try:
        if parts.scheme in ("http", "https"):
            with urllib.request.urlopen(address) as answer, target.open("wb") as file:  # noqa: S310  # scheme is checked
                shutil.copyfileobj(answer, file, 1 << 20)
                expected = answer.headers.get("Content-Length")
            if expected is not None and target.stat().st_size != int(expected):
                raise NotACheckpointError(
                    f"{address} broke off after {target.stat().st_size:,} of {int(expected):,} bytes. Try again."
                )
        else:
            import fsspec

            with fsspec.open(address, "rb") as source, target.open("wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
    except (ImportError, OSError, urllib.error.URLError) as error:
        raise MissingCheckpointError(f"{address} cannot be downloaded: {error}.") from error
    return target


def _described_directory(path: Path) -> str:
    files = {file.name for file in path.iterdir()}
    if ".metadata" in files:
        tool = (
            "python -m lightning.pytorch.utilities.consolidate_checkpoint " + str(path)
            if "meta.pt" in files
            else f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {path} weights.pt"
        )
        return f"a directory of torch.distributed.checkpoint. Make one file of it: {tool}"
    if "zero_to_fp32.py" in files:
        return f"a DeepSpeed directory. Make one file of it: python {path / 'zero_to_fp32.py'} {path} weights.pt"
    weights = sorted(
        (file for file in files if file.endswith((".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".index.json"))),
        key=lambda file: (not file.endswith(".index.json"), not file.endswith(".safetensors"), file),
    )
    return f"a directory. Give a file{f' in it, such as {path / weights[0]}' if weights else ''}."


# Where the weights are

_RAW = ("state_dict", "model_state_dict", "model_state", "model", "module", "net", "network", "weights", "params")
_AVERAGED = (
    "state_dict_ema",
    "model_ema",
    "ema",
    "ema_state_dict",
    "ema_model",
    "params_ema",
    "averaged_model",
)
_NOT_WEIGHTS = ("optim", "sched", "scaler", "callback", "loops", "hyper_param", "hparam", "rng", "args", "config")


def _find_weights(value: Any, key: str | None) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return where the weights are and the tensors there."""
    if key is not None:
        chosen = tuple(key.split("."))
        inside = _at(value, chosen)
        tensors = None if inside is None else _tensors(inside)
        if tensors is None:
            places = [".".join(place) for place, _ in _candidates(value)]
            raise CheckpointError(f"a checkpoint without weights at key={key!r}. It has {', '.join(places) or 'none'}.")
        return chosen, tensors
    found = dict(_candidates(value))
    for known in (_RAW, _AVERAGED):
        top = [place for place in found if place and place[0] in known]
        if len({place[0] for place in top}) == 1:
            found = {place: found[place] for place in top}
            break
        if len(top) > 1:
            found = {place: found[place] for place in top}
            raise CheckpointError(_several(found))
        if () in found:
            return (), found[()]
    if not found:
        raise NotACheckpointError(_without_weights(value))
    if len(found) > 1:
        raise CheckpointError(_several(found))
    return next(iter(found.items()))


def _several(found: Mapping[tuple[str, ...], Any]) -> str:
    places = ", ".join(repr(".".join(place)) for place in found)
    return f"a checkpoint with several sets of weights. Choose one with key=: {places}."


def _without_weights(value: Any) -> str:
    if isinstance(value, dict):
        if "param_groups" in value or any("optim" in str(key) for key in value):
            return "a checkpoint of an optimizer, without a model's weights. Take the file that holds the model."
        keys = ", ".join(map(str, list(value)[:8]))
        return f"a checkpoint without weights: it holds {keys or 'nothing'}."
    what = value.name if isinstance(value, Placeholder) else type(value).__name__
    return f"a pickled {what}, not a state dict. Save model.state_dict() instead."


def _candidates(value: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    tensors = _tensors(value)
    if tensors is not None:
        yield place, tensors
    items = value.items if isinstance(value, Placeholder) else value
    if len(place) == 3 or not isinstance(items, dict) or {"param_groups", "state"} <= items.keys():
        return
    for name, part in items.items():
        if isinstance(name, str) and not any(word in name.lower() for word in _NOT_WEIGHTS):
            yield from _candidates(part, (*place, name))


def _at(value: Any, place: tuple[str, ...]) -> Any:
    for name in place:
        items = value.items if isinstance(value, Placeholder) else value
        if not isinstance(items, dict) or name not in items:
            return None
        value = items[name]
    return value


def _without(value: dict[Any, Any], place: tuple[str, ...]) -> dict[Any, Any]:
    first, *others = place
    inner = value[first]
    if others and isinstance(inner, dict):
        return {**value, first: _without(inner, tuple(others))}
    return {name: part for name, part in value.items() if name != first}


def _tensors(value: Any) -> dict[str, Any] | None:
    """Return the tensors of a state dict or of a pickled module; None where it is neither."""
    if isinstance(value, Placeholder) and isinstance(_attributes(value), dict) and not value.items:
        tensors: dict[str, Any] = {}
        _collect(value, "", tensors, set())
        return tensors or None
    items = value.items if isinstance(value, Placeholder) else value
    if not isinstance(items, dict) or not all(isinstance(name, str) for name in items):
        return None
    kept = {
        name: part for name, part in items.items() if isinstance(part, torch.Tensor) or name.endswith("_extra_state")
    }
    empty = not items and isinstance(value, dict)
    return kept if any(isinstance(part, torch.Tensor) for part in kept.values()) or empty else None


def _attributes(module: Placeholder) -> Any:
    return module.state[0] if isinstance(module.state, tuple) and module.state else module.state


def _collect(module: Placeholder, prefix: str, tensors: dict[str, Any], above: set[int]) -> None:
    """Collect the tensors that `module.state_dict()` would have, from what is left of a pickled module."""
    attributes = _attributes(module)
    if not isinstance(attributes, dict) or id(module) in above:
        return
    ours, skipped = dict(attributes), set[str]()
    if "_modules" in attributes:
        skipped = attributes.get("_non_persistent_buffers_set") or set()
        groups = ("_parameters", "_buffers", "_modules")
        ours = {name: part for group in groups for name, part in (attributes.get(group) or {}).items()}
    for name, part in ours.items():
        if isinstance(part, torch.Tensor) and name not in skipped:
            tensors[f"{prefix}{name}"] = part
        elif isinstance(part, Placeholder):
            _collect(part, f"{prefix}{name}.", tensors, above | {id(module)})


def _kind(value: Any, place: tuple[str, ...], container: str) -> str:
    if container in ("safetensors", "sharded", "torchscript"):
        return container
    inside = _at(value, place)
    if isinstance(inside, Placeholder) and not inside.items:
        return "model"
    if place == ("state_dict",) and isinstance(value, dict) and "pytorch-lightning_version" in value:
        return "lightning"
    return "nested" if place else "state_dict"


def _placeholders(value: Any) -> Iterator[Placeholder]:
    """Yield what was not constructed, with its location; the parts of a placeholder belong to it."""
    seen: set[int] = set()
    stack: list[tuple[str, Any]] = [("", value)]
    while stack:
        location, part = stack.pop()
        if isinstance(part, Global):
            yield Placeholder(str(part), location=location)
        elif isinstance(part, Placeholder) and id(part) not in seen:
            part.location = location
            yield part
        elif id(part) not in seen and not isinstance(part, Placeholder):
            inner = [(f"{location}.{name}".lstrip("."), inside) for name, inside in children(part)]
            stack.extend(reversed(inner))
        seen.add(id(part))


_INSTANTIATORS = ("lightning.pytorch.cli.instantiate_module", "pytorch_lightning.cli.instantiate_module")


def _check_instantiators(name: str, metadata: Mapping[str, Any]) -> None:
    """Refuse hyper-parameters that make Lightning call a function which the file names (CVE-2026-58659)."""
    for key, values in metadata.items():
        asked = values.get("_instantiator") if isinstance(values, dict) else None
        if asked is not None and asked not in _INSTANTIATORS:
            raise UnsafeCheckpointError(
                f"{name} is a checkpoint whose {key} name {asked!r} as the function that makes the model. Nothing "
                "of it was run. Lightning's own is lightning.pytorch.cli.instantiate_module."
            )
