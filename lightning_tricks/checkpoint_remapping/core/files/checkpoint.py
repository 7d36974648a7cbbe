"""`Checkpoint`: the weights among the values of a file or of a dict, and the other values beside them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_tricks._shared.read_budget import Budget
from lightning_tricks._shared.text import list_names
from lightning_tricks.checkpoint_remapping.core.errors import CheckpointError, NotACheckpointError
from lightning_tricks.checkpoint_remapping.core.files.pickle_values import (
    MAX_NAME_LENGTH,
    Placeholder,
    are_copies,
    describe_value,
    find_placeholders,
    is_array,
    tensor_of,
)
from lightning_tricks.checkpoint_remapping.core.files.storages import MapLocation

KeyPath = tuple[str, ...]

_NOT_WEIGHTS = ("optim", "sched", "scaler", "callback", "loops", "hyper_param", "hparam", "rng", "args", "config")
AVERAGE = "<the average of the weights>"  # as a key, for what callbacks that average put there
# Where an average is, and the entry that is there only beside one
_AVERAGES: Mapping[KeyPath, str] = {("state_dict",): "averaging_state", ("state_dict_ema",): "state_dict_ema"}
_REST_OF_AVERAGE = ("moving_average", "averages")  # what a `state_dict` cannot hold, such as float32 of half precision
_DEEPEST_WEIGHTS = 3  # dicts inside each other in which weights are searched for


@dataclass(frozen=True)
class Checkpoint:
    """The weights of a file and its other contents.

    Attributes:
        state_dict: The tensors by qualified name, in the file's order; they may be mapped from the file.
        kind: `"lightning"`, `"state_dict"`, `"nested"` (in a dict of other things), `"model"` (a pickled module),
            `"torchscript"`, `"safetensors"` or `"sharded"`.
        metadata: The values beside the weights, or the metadata of the header.
        placeholders: Placeholders of the objects that were not constructed, each with its `name` and `location`.
        key: The entry that contains the weights, such as `"model_state_dict"`; empty at the top.
        source: The path or URL that was read.
    """

    state_dict: dict[str, Any] = field(repr=False)
    kind: str
    metadata: dict[str, Any] = field(repr=False)
    placeholders: tuple[Placeholder, ...] = ()
    key: str = ""
    source: str = ""


def checkpoint_of_file(
    value: Any,
    container: str,
    header: Mapping[str, str],
    key: str | None,
    budget: Budget,
    source: str,
    map_location: MapLocation,
) -> Checkpoint:
    """Return the weights of a file, and the other values in it.

    Args:
        value: The values of the file.
        container: The kind of its container.
        header: The metadata in its header.
        key: As in `read_checkpoint`.
        budget: Limits on memory and time.
        source: The path or URL of the file.
        map_location: Where arrays of NumPy go; tensors are there already.

    Raises:
        CheckpointError: If there are no weights, several and no `key`, or what no model has; the message continues
            "it is".
    """
    placeholders = find_placeholders(value, budget)
    key_path, tensors = _find_weights(value, key, budget)
    if not tensors:
        raise NotACheckpointError("a checkpoint with an empty state dict: it holds no weights.")
    tensors = {name: tensor_of(part).to(map_location) if is_array(part) else part for name, part in tensors.items()}
    metadata = {**header, **(_without_weights(value, key_path) if isinstance(value, dict) and key_path else {})}
    return Checkpoint(
        state_dict=tensors,
        kind=_kind(value, key_path, container),
        metadata=metadata,
        placeholders=tuple(placeholders),
        key=".".join(key_path),
        source=source,
    )


def checkpoint_of_values(values: Mapping[Any, Any], key: str | None) -> Checkpoint:
    """Return the weights among values in memory, such as `torch.load` returns, and the others beside them.

    Args:
        values: Tensors by name, or a dict with those or modules in it.
        key: As in `read_checkpoint`.

    Raises:
        CheckpointError: If there are no weights, or several and no `key`.
    """
    try:
        key_path, tensors = _find_weights(dict(values), key, Budget(sys.maxsize))
    except CheckpointError as error:
        raise type(error)(f"The dict of weights is {error}") from error
    tensors = {name: tensor_of(value) for name, value in tensors.items()}
    beside = _without_weights(dict(values), key_path) if key_path else {}
    return Checkpoint(tensors, "nested" if key_path else "state_dict", beside, key=".".join(key_path))


def _find_weights(value: Any, key: str | None, budget: Budget) -> tuple[KeyPath, dict[str, Any]]:
    """Return the path of keys to the weights, or to those at `key`, and the tensors there.

    Raises:
        CheckpointError: If there are none or several, or one has a name that no layer has; the message continues
            "it is".
    """
    key_path, tensors = _choose_weights(value, key, budget)
    for name in tensors:
        # Very long ones, and those with control characters, which act on terminals
        if not name or len(name) > MAX_NAME_LENGTH or not name.isprintable():
            raise NotACheckpointError(f"a checkpoint with a tensor whose name no layer has, {describe_value(name)}.")
    return key_path, tensors


def _choose_weights(value: Any, key: str | None, budget: Budget) -> tuple[KeyPath, dict[str, Any]]:
    search = _Search(budget)
    found = dict(search.candidates(value))
    if key is AVERAGE:
        for key_path, mark in _AVERAGES.items():
            if key_path in found and mark in value:
                average, rest = found[key_path], found.get(_REST_OF_AVERAGE, {})
                if "current_model_state" in value:  # the state dict is newer if a module was changed after its fit
                    rest = {name: one for name, one in rest.items() if _rounds_to(one, average.get(name))}
                return key_path, {**average, **rest}
        key_paths = _list_key_paths(".".join(path) or "the top" for path in found)
        raise CheckpointError(
            f"a checkpoint without an average of its weights, which are at {key_paths}: leave out ema=True."
        )
    if key is not None:
        key_path = next((path for path in found if ".".join(path) == key), tuple(key.split(".")))  # names may have dots
        tensors = search.tensors(_value_at(value, key_path))
        if tensors is None:
            key_paths = _list_key_paths(".".join(path) for path in found)
            raise CheckpointError(
                f"a checkpoint without weights at key={key!r}. Its weights are at {key_paths or 'no key'}."
            )
        return key_path, tensors
    if _is_of_lightning(value) and ("state_dict",) in found:
        return ("state_dict",), found["state_dict",]
    # arrays beside tensors, such as means of the data, are no weights
    found = {path: tensors for path, tensors in found.items() if not all(map(is_array, tensors.values()))} or found
    if not found:
        raise NotACheckpointError(_describe_other(value))
    if len(found) > 1 and not are_copies(*found.values()):
        key_paths = _list_key_paths(repr(".".join(path)) for path in found)
        raise CheckpointError(f"a checkpoint with several sets of weights. Choose one with key=: {key_paths}.")
    return next(iter(found.items()))


def _rounds_to(finer: torch.Tensor, value: torch.Tensor | None) -> bool:
    return value is None or torch.equal(finer.to(value), value)


def _kind(value: Any, key_path: KeyPath, container: str) -> str:
    """Return the `kind` of a checkpoint whose weights are at a path of keys."""
    if container in ("safetensors", "sharded", "torchscript"):
        return container
    inside = _value_at(value, key_path)
    if isinstance(inside, Placeholder) and not inside.items:
        return "model"
    if key_path == ("state_dict",) and _is_of_lightning(value):
        return "lightning"
    return "nested" if key_path else "state_dict"


def _is_of_lightning(value: Any) -> bool:
    return isinstance(value, dict) and "pytorch-lightning_version" in value


def _without_weights(value: dict[Any, Any], key_path: KeyPath) -> dict[Any, Any]:
    """Return a copy of nested dicts without the value at a path of keys."""
    first, *others = key_path
    inner = value[first]
    if others and isinstance(inner, dict):
        return {**value, first: _without_weights(inner, tuple(others))}
    return {name: part for name, part in value.items() if name != first}


class _Search:
    """A search for state dicts."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget

    def candidates(self, value: Any, key_path: KeyPath = ()) -> Iterator[tuple[KeyPath, dict[str, Any]]]:
        """Yield the paths of keys to weights, at most three keys long, and the tensors there."""
        tensors = self.tensors(value)
        if tensors is not None:
            yield key_path, tensors
        items = _items(value)
        if len(key_path) == _DEEPEST_WEIGHTS or items is None or {"param_groups", "state"} <= items.keys():
            return
        for name, part in items.items():
            self.budget.spend(8)
            if isinstance(name, str) and isinstance(part, dict | Placeholder | torch.nn.Module):
                self.budget.spend(128 + len(name))
                if not (name.endswith("_extra_state") or any(word in name.lower() for word in _NOT_WEIGHTS)):
                    yield from self.candidates(part, (*key_path, name))

    def tensors(self, value: Any) -> dict[str, Any] | None:
        """Return the tensors of a state dict or of a pickled module; None for other values."""
        if isinstance(value, Placeholder) and isinstance(_attributes(value), dict) and not value.items:
            return dict(self._of_module(value)) or None
        items = _items(value)
        if items is None:
            return None
        self.budget.spend(128 * len(items))
        if not all(isinstance(name, str) for name in items):
            return None
        kept = {
            name: part
            for name, part in items.items()
            if isinstance(part, torch.Tensor) or is_array(part) or name.endswith("_extra_state")
        }
        empty = not items and isinstance(value, dict)
        has_weights = any(isinstance(part, torch.Tensor) or is_array(part) for part in kept.values())
        return kept if has_weights or empty else None

    def _of_module(
        self, module: Placeholder, prefix: str = "", above: tuple[Placeholder, ...] = ()
    ) -> Iterator[tuple[str, Any]]:
        """Yield the tensors that `module.state_dict()` would have, from the placeholder of a pickled module."""
        for name, part in self._parts(module):
            path = prefix + name
            self.budget.spend(128 + len(path))  # a shared module is listed at each of its paths
            if isinstance(part, torch.Tensor):
                yield path, part
            elif part is not module and part not in above:
                yield from self._of_module(part, f"{path}.", (*above, module))

    def _parts(self, module: Placeholder) -> Iterator[tuple[str, Any]]:
        """Yield the tensors and modules directly inside a module, with their names."""
        attributes = _attributes(module)
        if not isinstance(attributes, dict):
            return
        groups: list[Any] = [attributes]
        skipped = None
        if "_modules" in attributes:
            groups = [attributes.get(group) for group in ("_parameters", "_buffers", "_modules")]
            skipped = attributes.get("_non_persistent_buffers_set")
        for group in groups:
            for name, part in group.items() if isinstance(group, dict) else ():
                self.budget.spend(64)
                hidden = isinstance(part, torch.Tensor) and isinstance(skipped, set) and name in skipped
                if isinstance(name, str) and isinstance(part, torch.Tensor | Placeholder) and not hidden:
                    yield name, part


def _items(value: Any) -> dict[Any, Any] | None:
    """Return the entries of a dict, of a placeholder that is like one, or of a module; None for other values."""
    if isinstance(value, torch.nn.Module):
        return value.state_dict()
    items = value.items if isinstance(value, Placeholder) else value
    return items if isinstance(items, dict) else None


def _attributes(module: Placeholder) -> Any:
    return module.state[0] if isinstance(module.state, tuple) and module.state else module.state


def _value_at(value: Any, key_path: KeyPath) -> Any:
    for name in key_path:
        items = _items(value)
        if items is None or name not in items:
            return None
        value = items[name]
    return value


def _list_key_paths(key_paths: Iterable[str]) -> str:
    return list_names((key_path[:200] for key_path in key_paths), 8)


def _describe_other(value: Any) -> str:
    if isinstance(value, dict):
        if "param_groups" in value or any("optim" in key for key in value if isinstance(key, str)):
            return "a checkpoint of an optimizer, without a model's weights. Use the file that holds the model."
        keys = _list_key_paths(key if isinstance(key, str) else describe_value(key) for key in value)
        return f"a checkpoint without weights: it holds {keys}."
    what = value.name if isinstance(value, Placeholder) else type(value).__name__
    return f"a pickled {what}, not a state dict. Save model.state_dict() instead."
