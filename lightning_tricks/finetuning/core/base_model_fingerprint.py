"""A record of the tensors that a model had before it was trained, and the comparison of another model with it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_tricks._shared.patterns import strip_compile_prefix
from lightning_tricks._shared.tensors import full_tensor, is_sharded, local_part
from lightning_tricks._shared.text import format_shape, list_names
from lightning_tricks.run_fingerprint.core.fingerprint import fingerprint

_EXTRA_STATE = "_extra_state"  # the name under which a module saves what `get_extra_state` returns
_OF_LORA = re.compile(r"(^|\.)lora_\w+\.scale$")  # the buffer of a change, which stays as it was

Key = TypeVar("Key", bound=Hashable)


class BaseMismatchError(ValueError):
    """A model whose tensors are not those that a checkpoint left out; the message lists what differs."""


class TensorRecord(NamedTuple):
    """The identity of a tensor that is not saved.

    Attributes:
        shape: Its shape.
        dtype: The name of its dtype, such as "float32".
        fingerprint: 64 bits of its values (`fingerprint`).
    """

    shape: tuple[int, ...]
    dtype: str
    fingerprint: int


def base_fingerprints(model: nn.Module) -> dict[str, TensorRecord]:
    """Return a record of every tensor of a model's state dict, read from the device in one transfer.

    Names are without the prefixes of `torch.compile`. Lazy, sparse and quantized tensors, those on the meta device and
    instances of other tensor subclasses than DTensor have no record, and are therefore always saved.

    Args:
        model: The model, on any devices.

    Examples:
        >>> base_fingerprints(nn.Linear(3, 2))["weight"][:2]
        ((2, 3), 'float32')
    """
    return records_of({name: value for name, (_, value) in tensors_by_name(model).items() if is_plain(value)})


def trainable_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters that require gradients, without the prefixes of `torch.compile`.

    A parameter that has several names is returned under each.
    """
    named = model.named_parameters(remove_duplicate=False)
    return {strip_compile_prefix(name) for name, parameter in named if parameter.requires_grad}


def forget(base: dict[str, TensorRecord], model: nn.Module, names: Collection[str] = ()) -> None:
    """Remove tensors, and those that share memory with a removed one, from a record: they are saved from now on.

    Args:
        base: The result of `base_fingerprints`.
        model: The model.
        names: Names without the prefixes of `torch.compile`.
    """
    for name in base.keys() & set(names):
        del base[name]
    for group in _groups_in_memory(model):
        if not base.keys() >= group:
            for name in group & base.keys():
                del base[name]


def verified_tensors(model: nn.Module, base: Mapping[str, TensorRecord], *, strict: bool) -> dict[str, Tensor]:
    """Return the recorded tensors from a model, in the recorded dtype.

    Args:
        model: The model.
        base: The record.
        strict: Whether a tensor that the model does not have is an error.

    Raises:
        BaseMismatchError: If the model's tensors are not the recorded ones.
    """
    found = {name: value for name, (_, value) in tensors_by_name(model).items() if name in base}
    missing = [name for name in base if name not in found] if strict else []
    shapes = [name for name, value in found.items() if is_lazy(value) or tuple(value.shape) != base[name].shape]
    dtypes = [name for name, value in found.items() if not _is_convertible(value, base[name].dtype)]
    values = {
        name: value.to(getattr(torch, base[name].dtype))
        for name, value in found.items()
        if name not in {*shapes, *dtypes}
    }
    now = records_of(values)
    others = [name for name in values if now[name] != base[name] or not is_plain(found[name])]
    dtypes += [name for name in others if _dtype(found[name]) != base[name].dtype]
    phrases = (
        _phrase(missing, "missing from the model"),
        _phrase(shapes, "of another shape", lambda name: (_shape(found[name]), format_shape(base[name].shape))),
        _phrase(dtypes, "of another dtype", lambda name: (_dtype(found[name]), base[name].dtype)),
        _phrase([name for name in others if name not in dtypes], "of other values"),
    )
    if any(phrases):
        remedy = (
            "Build the model with the same pretrained weights. Frozen layers that start from random weights are saved "
            "with TrainableCheckpoint(extra=[...])."
        )
        if any(_OF_LORA.search(name) for name in missing):
            remedy = (
                "It was trained with LoRA, which the model does not have: add it before the checkpoint is loaded, by "
                "the callback LoRA(...), add_lora(model, LoRASettings(...)) or Tricks(lora=...)."
            )
        raise BaseMismatchError(
            f"The model is not the one that was trained. Of {len(base):,} tensors that this checkpoint left out, "
            f"{'; '.join(filter(None, phrases))}. {remedy}"
        )
    return values


def tensors_by_name(model: nn.Module) -> dict[str, tuple[str, Tensor]]:
    """Return name without the prefixes of `torch.compile` -> name and tensor of a model's state dict."""
    return {
        strip_compile_prefix(name): (name, value)
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor) and name.rpartition(".")[2] != _EXTRA_STATE
    }


def records_of(tensors: Mapping[Key, Tensor]) -> dict[Key, TensorRecord]:
    """Return a record of each tensor, with one transfer from the device; all ranks call it if some are sharded."""
    hashes = [fingerprint(full_tensor(tensor)) for tensor in tensors.values()]
    device = next((each.device for each in hashes if each.device.type != "cpu"), torch.device("cpu"))
    read = torch.stack([each.to(device, non_blocking=True) for each in hashes]).tolist() if hashes else []
    return {
        key: TensorRecord(tuple(tensor.shape), _dtype(tensor), number)
        for (key, tensor), number in zip(tensors.items(), read, strict=True)
    }


def is_plain(value: Any) -> bool:
    """Whether a value is a dense tensor with values, whose bits say all of it; it may be sharded over ranks."""
    is_known = type(value) in (Tensor, nn.Parameter) or (isinstance(value, Tensor) and is_sharded(value))
    return is_known and value.layout is torch.strided and not (value.is_meta or value.is_quantized)


def _groups_in_memory(model: nn.Module) -> Iterator[set[str]]:
    """Yield the names of tensors of the state dict that share memory, such as tied weights."""
    groups: dict[tuple[torch.device, int], set[str]] = {}
    for name, (_, value) in tensors_by_name(model).items():
        if is_plain(value) and (address := local_part(value).untyped_storage().data_ptr()):
            groups.setdefault((value.device, address), set()).add(name)
    yield from (group for group in groups.values() if len(group) > 1)


def _is_convertible(value: Tensor, dtype: str) -> bool:
    """Whether a tensor has a dtype, or can be compared in it."""
    target = getattr(torch, dtype, None)
    both_floating = isinstance(target, torch.dtype) and target.is_floating_point and value.is_floating_point()
    return both_floating or _dtype(value) == dtype


def _phrase(names: Collection[str], what: str, describe: Callable[[str], tuple[str, str]] | None = None) -> str:
    if not names:
        return ""
    described = names
    if describe is not None:
        described = [f"{name}: {now} in the model, {then} then" for name in names for now, then in [describe(name)]]
    return f"{len(names):,} {'is' if len(names) == 1 else 'are'} {what} ({list_names(described)})"


def _shape(value: Tensor) -> str:
    return "not yet known" if is_lazy(value) else format_shape(value.shape) or "a scalar"


def _dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")
