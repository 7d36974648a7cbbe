"""Checkpoints without the tensors that did not change: a record of these, and how the file becomes whole again."""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_tricks._shared.added_parameters import NOTE, RECORD_KEY
from lightning_tricks._shared.patterns import strip_compile_prefix
from lightning_tricks._shared.tensors import clone_tensors, full_tensor, is_sharded, local_part
from lightning_tricks._shared.text import format_shape, list_names
from lightning_tricks._torch_compat.modules import set_state_dict_versions, state_dict_versions
from lightning_tricks.checkpoint_remapping.core.files.reading import read_checkpoint
from lightning_tricks.run_fingerprint.core.fingerprint import fingerprint

FORMAT = 1
# Lightning's WeightAveraging puts averages into the first, and what it found there into the second
_ENTRIES = ("state_dict", "current_model_state")


def leave_out_base(checkpoint: dict[str, Any], model: nn.Module, base: Mapping[str, TensorRecord]) -> list[str]:
    """Remove from a checkpoint the tensors that are as in the base, and record which ones.

    Tensors that share memory in the model are removed together or not at all. Where nothing can be removed, the
    checkpoint stays as it is.

    Args:
        checkpoint: A checkpoint with a `state_dict`, which is replaced by a smaller one, whose names are without the
            prefixes of `torch.compile`, unless it is sharded.
        model: The model that it was made from.
        base: The result of `base_fingerprints`, without the tensors that are to be saved in any case.

    Returns:
        The names that were removed, without the prefixes of `torch.compile`.
    """
    candidates = {
        (key, short): value
        for key, name, value in weights_of(checkpoint)
        if (short := strip_compile_prefix(name)) in base and is_plain(value)
    }
    now = records_of(candidates)
    left_out = {}
    for key in _ENTRIES[_averages_may_drift(checkpoint) :]:
        same = {name: record for (entry, name), record in now.items() if entry == key and record == base[name]}
        forget(same, model)
        if same:
            part = checkpoint[key]
            is_whole = not any(map(is_sharded, part.values()))  # shards are found by the module's own names
            named = [(strip_compile_prefix(name), name, value) for name, value in part.items()]
            kept = {short if is_whole else name: value for short, name, value in named if short not in same}
            checkpoint[key] = _with_versions({**kept, NOTE: torch.empty(0)}, state_dict_versions(part))
            left_out[key] = {name: {**record._asdict(), "shape": list(record.shape)} for name, record in same.items()}
    if not left_out:
        return []
    checkpoint[RECORD_KEY] = {"format": FORMAT, "left_out": left_out}
    return list(recorded_base(checkpoint))


def _averages_may_drift(checkpoint: Mapping[str, Any]) -> bool:
    """Whether averages of values that stay may yet become others by rounding, and then be those of the module."""
    number = checkpoint.get("averaging_state", {}).get("n_averaged")
    return number is not None and int(number) < 2  # the first average is a copy


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
    return _joined(_recorded(checkpoint))


def _joined(recorded: Mapping[str, Mapping[str, TensorRecord]]) -> dict[str, TensorRecord]:
    return {name: record for records in recorded.values() for name, record in records.items()}


def complete_checkpoint(
    model: nn.Module, checkpoint: Mapping[str, Any], *, strict: bool = True, to_resume: bool = True
) -> dict[str, Any]:
    """Return a whole checkpoint: tensors that were left out are taken from the model, if it has the same.

    A floating-point tensor may have another dtype if it has the recorded values after a conversion to the recorded
    dtype: a run in bf16 may be completed by the float32 weights that it began with.

    Args:
        model: The model, with the weights that it had before it was trained, in the parts that were left out.
        checkpoint: A checkpoint that `leave_out_base` made smaller.
        strict: Whether a tensor that was left out and that the model does not have is an error.
        to_resume: Whether training continues. Otherwise averaged weights take the place of those that they are made of.

    Returns:
        A new dict, whose weights have the model's names. What its `state_dict` lacked shares memory with the model.

    Raises:
        BaseMismatchError: If names are missing from the model, or shapes, dtypes or values differ.
        ValueError: If the record of what was left out is damaged or has another format.
    """
    recorded = {key: records for key, records in _recorded(checkpoint).items() if to_resume or key == _ENTRIES[0]}
    values = verified_tensors(model, _joined(recorded), strict=strict)
    own = {name: full for name, (full, _) in tensors_by_name(model).items()}
    whole = {key: value for key, value in checkpoint.items() if key != RECORD_KEY}
    for key, records in recorded.items():
        part = checkpoint[key]
        saved = {strip_compile_prefix(name): value for name, value in part.items() if name != NOTE}
        taken = {name: values[name] for name in records if name in values}
        if key != _ENTRIES[0]:  # the first is loaded before it, into the tensors of the model
            taken = clone_tensors(taken)
        named = {own.get(name, name): value for name, value in {**saved, **taken}.items()}
        whole[key] = _with_versions(named, state_dict_versions(part) or state_dict_versions(model.state_dict()))
    if not to_resume and _ENTRIES[1] in whole:
        whole[_ENTRIES[1]] = whole[_ENTRIES[0]]
    return whole


def complete_state_dict(model: nn.Module, checkpoint: Mapping[str, Any], *, strict: bool = True) -> dict[str, Any]:
    """Return the whole state dict of a checkpoint, as `complete_checkpoint` does the checkpoint."""
    state_dict: dict[str, Any] = complete_checkpoint(model, checkpoint, strict=strict, to_resume=False)["state_dict"]
    return state_dict


def load_trainable(model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> Any:
    """Load a checkpoint that `TrainableCheckpoint` made smaller into a model with the base's weights.

    `read_checkpoint` reads the file and runs no code of it. Before a value changes, this function checks that the
    model is the one that was trained.

    Args:
        model: The model, built as before training, with the same pretrained weights in the parts that were left out.
        path: The file.
        strict: Whether names that only the model or only the file has are an error. Values that the file left out
            are compared in any case.

    Returns:
        The result of `load_state_dict`: the missing and the unexpected names.

    Raises:
        MissingCheckpointError: If there is no such file.
        BaseMismatchError: If the model is not the one that was trained; the message lists the differences.
        ValueError: If `TrainableCheckpoint` did not make the file smaller.
        RuntimeError: If saved tensors do not fit the model, as in `load_state_dict`.

    Examples:
        >>> import tempfile
        >>> from lightning_tricks.finetuning.core.trainable_weights import base_fingerprints, leave_out_base
        >>> model = nn.Linear(3, 2)
        >>> base = base_fingerprints(model)
        >>> model.bias.data.zero_()
        tensor([0., 0.])
        >>> checkpoint = {"state_dict": model.state_dict()}
        >>> leave_out_base(checkpoint, model, base)
        ['weight']
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save(checkpoint, f"{folder}/small.ckpt")
        ...     load_trainable(model, f"{folder}/small.ckpt")
        <All keys matched successfully>
    """
    checkpoint = _read(path)
    return model.load_state_dict(complete_state_dict(model, checkpoint, strict=strict), strict=strict)


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    found = read_checkpoint(path)
    if RECORD_KEY not in found.metadata:
        is_full = found.kind == "lightning"
        raise ValueError(
            f"{path} is {'a full checkpoint of the Trainer' if is_full else 'another kind of file'}: "
            "TrainableCheckpoint left nothing out of it. Load it with load_weights(model, path), or pass it to the "
            "Trainer as ckpt_path."
        )
    return {**found.metadata, "state_dict": found.state_dict}


def _recorded(checkpoint: Mapping[str, Any]) -> dict[str, dict[str, TensorRecord]]:
    """Return the record of what was left out, for each entry with weights."""
    found = checkpoint[RECORD_KEY]
    try:
        if found["format"] != FORMAT:
            raise ValueError(
                f"This checkpoint's record of what it left out has format {found['format']!r}, and this release reads "
                f"format {FORMAT}. Load it with the release that wrote it."
            )
        for key in (_ENTRIES[0], *found["left_out"]):
            checkpoint[key].keys()  # or it has no weights that could be completed
        return {
            key: {
                name: TensorRecord(tuple(record["shape"]), record["dtype"], record["fingerprint"])
                for name, record in found["left_out"][key].items()
            }
            for key in _ENTRIES
            if key in found["left_out"]
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"This checkpoint's record of what it left out is damaged ({error!r}).") from error


def _with_versions(values: Mapping[str, Any], versions: Any) -> OrderedDict[str, Any]:
    """Return values as a state dict with the versions of the modules that made it."""
    state_dict: OrderedDict[str, Any] = OrderedDict(values)
    if versions is not None:
        set_state_dict_versions(state_dict, versions)
    return state_dict


_EXTRA_STATE = "_extra_state"  # the name under which a module saves what `get_extra_state` returns
_OF_LORA = re.compile(r"(^|\.)lora_\w+\.scale$")  # the buffer of a change, which stays as it was

Key = TypeVar("Key", bound=Hashable)


class BaseMismatchError(ValueError):
    """A model that differs from the base of a smaller checkpoint; the message lists the differences."""


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
        described = [f"{name}: {now} in the model, {then} before" for name in names for now, then in [describe(name)]]
    return f"{len(names):,} {'is' if len(names) == 1 else 'are'} {what} ({list_names(described)})"


def _shape(value: Tensor) -> str:
    return "not yet known" if is_lazy(value) else format_shape(value.shape) or "a scalar"


def _dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")
