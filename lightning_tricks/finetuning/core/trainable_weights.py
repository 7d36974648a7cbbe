"""Checkpoints without the tensors that did not change: what is left out, how it is recorded, and how it is restored."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_tricks._shared.checks import check_path
from lightning_tricks._shared.partial_checkpoints import NOTE, RECORD_KEY
from lightning_tricks._shared.patterns import strip_compile_prefix
from lightning_tricks._shared.tensors import clone_tensors
from lightning_tricks._shared.text import format_shape, list_names
from lightning_tricks._torch_compat.modules import set_state_dict_versions, state_dict_versions
from lightning_tricks.run_fingerprint.core.fingerprint import fingerprint

FORMAT = 1
_ENTRIES = ("state_dict", "current_model_state")  # the second is where Lightning's WeightAveraging puts the first
_EXTRA_STATE = "_extra_state"  # the name under which a module saves what `get_extra_state` returns

Key = TypeVar("Key", bound=Hashable)


class BaseMismatchError(ValueError):
    """A model whose tensors are not those that a checkpoint left out; the message lists what differs."""


class TensorRecord(NamedTuple):
    """What identifies a tensor that is not saved.

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
    instances of tensor subclasses have no record, and are therefore always saved.

    Args:
        model: The model, on any devices.

    Example:
        >>> base_fingerprints(nn.Linear(3, 2))["weight"][:2]
        ((2, 3), 'float32')
    """
    return _records({name: value for name, (_, value) in _own_tensors(model).items() if _is_plain(value)})


def trainable_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters that require gradients, without the prefixes of `torch.compile`.

    A parameter that has several names is returned under each.
    """
    named = model.named_parameters(remove_duplicate=False)
    return {strip_compile_prefix(name) for name, parameter in named if parameter.requires_grad}


def forget(base: dict[str, TensorRecord], model: nn.Module, names: Collection[str]) -> None:
    """Remove tensors, and those that share memory with them, from the record of a base: they are saved from now on.

    Args:
        base: What `base_fingerprints` returned.
        model: The model.
        names: Names without the prefixes of `torch.compile`.
    """
    for name in base.keys() & set(names):
        del base[name]
    for group in _groups_in_memory(model):
        if not base.keys() >= group:
            for name in group & base.keys():
                del base[name]


def leave_out_base(checkpoint: dict[str, Any], model: nn.Module, base: Mapping[str, TensorRecord]) -> list[str]:
    """Remove from a checkpoint the tensors that are as in the base, and record which ones.

    Tensors that share memory in the model are removed together or not at all. Where nothing can be removed, the
    checkpoint stays as it is.

    Args:
        checkpoint: A checkpoint with a `state_dict`, which is replaced by a smaller one.
        model: The model that it was made from.
        base: What `base_fingerprints` returned, without the tensors that are to be saved in any case.

    Returns:
        The names that were removed, without the prefixes of `torch.compile`.
    """
    candidates = {
        (key, short): value
        for key, name, value in weights_of(checkpoint)
        if (short := strip_compile_prefix(name)) in base and _is_plain(value)
    }
    left_out: dict[str, dict[str, TensorRecord]] = {}
    for (key, name), record in _records(candidates).items():
        if record == base[name]:
            left_out.setdefault(key, {})[name] = record
    for key, records in left_out.items():
        forget(records, model, ())
        part = checkpoint[key]
        kept = {name: value for name, value in part.items() if strip_compile_prefix(name) not in records}
        checkpoint[key] = _with_versions_of(part, {**kept, NOTE: torch.empty(0)})
    if not any(left_out.values()):
        return []
    plain = {
        key: {name: {**record._asdict(), "shape": list(record.shape)} for name, record in records.items()}
        for key, records in left_out.items()
    }
    checkpoint[RECORD_KEY] = {"format": FORMAT, "left_out": plain}
    return list(recorded_base(checkpoint))


def weights_of(checkpoint: Mapping[str, Any]) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the key of an entry with weights, the name and the tensor, for all weights of a checkpoint."""
    for key in _ENTRIES:
        if isinstance(part := checkpoint.get(key), Mapping):
            yield from (
                (key, name, value) for name, value in part.items() if isinstance(value, Tensor) and name != NOTE
            )


def recorded_base(checkpoint: Mapping[str, Any]) -> dict[str, TensorRecord]:
    """Return the record of the tensors that a checkpoint left out.

    Raises:
        ValueError: If the record has another format.
    """
    return {name: record for records in _recorded(checkpoint).values() for name, record in records.items()}


def _recorded(checkpoint: Mapping[str, Any]) -> dict[str, dict[str, TensorRecord]]:
    found = checkpoint[RECORD_KEY]
    try:
        if found["format"] != FORMAT:
            raise ValueError(
                f"This checkpoint's record of what it left out has format {found['format']!r}, and this release reads "
                f"format {FORMAT}. Load it with the release that wrote it."
            )
        return {
            key: {
                name: TensorRecord(tuple(one["shape"]), one["dtype"], one["fingerprint"])
                for name, one in records.items()
            }
            for key, records in found["left_out"].items()
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"This checkpoint's record of what it left out is damaged ({error!r}).") from error


def complete_checkpoint(model: nn.Module, checkpoint: Mapping[str, Any], *, strict: bool = True) -> dict[str, Any]:
    """Return a whole checkpoint: what was left out is taken from the model, if the model has just that.

    A floating-point tensor may have another dtype if it has the recorded values after a conversion to the recorded
    dtype: a run in bf16 may be completed by the float32 weights that it began with.

    Args:
        model: The model, with the weights that it had before it was trained, in the parts that were left out.
        checkpoint: A checkpoint that `leave_out_base` made smaller.
        strict: Whether a tensor that was left out and that the model does not have is an error.

    Returns:
        A new dict, whose weights have the model's names. What its `state_dict` lacked shares memory with the model.

    Raises:
        BaseMismatchError: If names are missing from the model, or shapes, dtypes or values differ.
    """
    own = _own_tensors(model)
    values = _verified(own, recorded_base(checkpoint), strict)
    whole = {key: value for key, value in checkpoint.items() if key != RECORD_KEY}
    for key, records in _recorded(checkpoint).items():
        part = checkpoint[key]
        saved = {strip_compile_prefix(name): value for name, value in part.items() if name != NOTE}
        taken = {name: values[name] for name in records if name in values}
        if key != _ENTRIES[0]:  # the first is loaded before it, into the tensors of the model
            taken = clone_tensors(taken)
        named = {own[name][0] if name in own else name: value for name, value in {**saved, **taken}.items()}
        whole[key] = _with_versions_of(part, named, model)
    return whole


def complete_state_dict(model: nn.Module, checkpoint: Mapping[str, Any], *, strict: bool = True) -> dict[str, Any]:
    """Return the whole state dict of a checkpoint, as `complete_checkpoint` does the checkpoint."""
    state_dict: dict[str, Any] = complete_checkpoint(model, checkpoint, strict=strict)["state_dict"]
    return state_dict


def load_trainable(model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> Any:
    """Load a checkpoint that `TrainableCheckpoint` made smaller into a model with the base's weights.

    Nothing of the file is run. All is checked before the first value changes.

    Args:
        model: The model, built as before training: with the same pretrained weights in the parts that were left out.
        path: The file.
        strict: Whether names that only the model or only the file has are an error. Values that the model has and the
            file left out are compared in any case.

    Returns:
        What `load_state_dict` returned: the names that are missing and those that are left over.

    Raises:
        FileNotFoundError: If there is no such file.
        BaseMismatchError: If the model is not the one that was trained; the message lists what differs.
        ValueError: If the file is no such checkpoint.
        RuntimeError: If saved tensors do not fit the model, as in `load_state_dict`.
    """
    checkpoint = _read(Path(check_path("path", path, "a checkpoint")).expanduser())
    return model.load_state_dict(complete_state_dict(model, checkpoint, strict=strict), strict=strict)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}. Is the path right?")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} was not read: it holds objects that are neither tensors nor plain values, or is no checkpoint "
            f"({str(error).splitlines()[0]}). If they are hyper-parameters, leave them out by "
            "save_hyperparameters(ignore=...), or load the file by a Trainer with TrainableCheckpoint among its "
            "callbacks."
        ) from error
    except (EOFError, RuntimeError) as error:
        raise ValueError(f"{path} is damaged, or no checkpoint ({str(error).splitlines()[:1]}).") from error
    if isinstance(checkpoint, dict) and RECORD_KEY in checkpoint:
        return checkpoint
    kind = "a full checkpoint of the Trainer" if _is_full(checkpoint) else "another kind of file"
    raise ValueError(
        f"{path} is {kind}: TrainableCheckpoint left nothing out of it. Load it with load_weights(model, path), or "
        "pass it to the Trainer as ckpt_path."
    )


def _is_full(checkpoint: Any) -> bool:
    return isinstance(checkpoint, dict) and {"state_dict", "pytorch-lightning_version"} <= checkpoint.keys()


def _verified(
    own: Mapping[str, tuple[str, Tensor]], base: Mapping[str, TensorRecord], strict: bool
) -> dict[str, Tensor]:
    """Return the tensors that were left out, from the model, in the recorded dtype."""
    missing = [name for name in base if name not in own]
    found = {name: own[name][1] for name in base if name in own}
    shapes = [name for name, value in found.items() if is_lazy(value) or tuple(value.shape) != base[name].shape]
    dtypes = [name for name, value in found.items() if not _converts(value, base[name].dtype)]
    values = {
        name: _in_dtype(value, base[name].dtype) for name, value in found.items() if name not in {*shapes, *dtypes}
    }
    now = _records(values)
    others = [name for name in values if now[name] != base[name] or not _is_plain(found[name])]
    dtypes += [name for name in others if found[name].dtype != values[name].dtype]
    others = [name for name in others if name not in set(dtypes)]
    phrases = [
        _phrase(missing if strict else [], "missing from the model", lambda name: name),
        _phrase(
            shapes,
            "of another shape",
            lambda name: (
                f"{name}: {_shape(found[name])} in the model, {format_shape(base[name].shape) or 'a scalar'} then"
            ),
        ),
        _phrase(
            dtypes,
            "of another dtype",
            lambda name: f"{name}: {_dtype(found[name])} in the model, {base[name].dtype} then",
        ),
        _phrase(others, "of other values", lambda name: name),
    ]
    if any(phrases):
        raise BaseMismatchError(
            f"The model is not the one that was trained. Of {len(base):,} tensors that this checkpoint left out, "
            f"{'; '.join(phrase for phrase in phrases if phrase)}. Build the model with the same pretrained weights. "
            "Frozen layers that start from random weights are saved with TrainableCheckpoint(extra=[...])."
        )
    return values


def _phrase(names: Collection[str], what: str, describe: Callable[[str], str]) -> str:
    return (
        f"{len(names):,} {'is' if len(names) == 1 else 'are'} {what} ({list_names(map(describe, names))})"
        if names
        else ""
    )


def _shape(value: Tensor) -> str:
    return "not yet known" if is_lazy(value) else format_shape(value.shape) or "a scalar"


def _dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _converts(value: Tensor, dtype: str) -> bool:
    """Whether a tensor has a dtype, or can be compared in it."""
    target = getattr(torch, dtype, None)
    if _dtype(value) == dtype:
        return True
    return isinstance(target, torch.dtype) and target.is_floating_point and value.is_floating_point()


def _in_dtype(value: Tensor, dtype: str) -> Tensor:
    return value if _dtype(value) == dtype else value.to(getattr(torch, dtype))


def _own_tensors(model: nn.Module) -> dict[str, tuple[str, Tensor]]:
    """Return name without the prefixes of `torch.compile` -> name and tensor of the model's state dict."""
    return {
        strip_compile_prefix(name): (name, value)
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor) and name.rpartition(".")[2] != _EXTRA_STATE
    }


def _is_plain(value: Any) -> bool:
    """Whether a value is a dense tensor with values, whose bits say all of it."""
    usual = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided
    return usual and not (value.is_meta or value.is_quantized)


def _records(tensors: Mapping[Key, Tensor]) -> dict[Key, TensorRecord]:
    """Return a record of each tensor, with one transfer from the device."""
    hashes = [fingerprint(tensor) for tensor in tensors.values()]
    device = next((each.device for each in hashes if each.device.type != "cpu"), torch.device("cpu"))
    read = torch.stack([each.to(device, non_blocking=True) for each in hashes]).tolist() if hashes else []
    return {
        key: TensorRecord(tuple(tensor.shape), _dtype(tensor), number)
        for (key, tensor), number in zip(tensors.items(), read, strict=True)
    }


def _groups_in_memory(model: nn.Module) -> Iterator[set[str]]:
    """Yield the names of tensors of the state dict that share memory, such as tied weights."""
    groups: dict[tuple[torch.device, int], set[str]] = {}
    for name, (_, value) in _own_tensors(model).items():
        if _is_plain(value) and (address := value.untyped_storage().data_ptr()):
            groups.setdefault((value.device, address), set()).add(name)
    yield from (group for group in groups.values() if len(group) > 1)


def _with_versions_of(
    state_dict: Mapping[str, Any], values: Mapping[str, Any], model: nn.Module | None = None
) -> OrderedDict[str, Any]:
    """Return values as a state dict with the versions of another one, or the model's if that has none."""
    whole: OrderedDict[str, Any] = OrderedDict(values)
    versions = state_dict_versions(state_dict) or (model and state_dict_versions(model.state_dict()))
    if versions:
        set_state_dict_versions(whole, versions)
    return whole
