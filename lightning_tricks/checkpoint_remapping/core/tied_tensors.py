"""Tensors that a model has under several names, such as the embedding of a language model and its output."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn

from lightning_tricks.checkpoint_remapping.core.errors import CheckpointError
from lightning_tricks.checkpoint_remapping.core.remapping import strip_wrappers


def tied_names(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Return the groups of names that stand for one tensor."""
    names_of: dict[int, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        names_of[id(tensor)].append(name)
    return [names for names in names_of.values() if len(names) > 1]


def find_aliases(groups: list[list[str]], in_file: Collection[str]) -> dict[str, str]:
    """Return the names of tied tensors that the file does not have, with the names that stand for them.

    Args:
        groups: What `tied_names` returned for the model.
        in_file: Names of the model that the file has, whatever stands in front of them there.
    """
    aliases: dict[str, str] = {}
    for names in groups:
        named = [name for name in names if name in in_file]
        first = (named or names)[0]
        aliases |= {name: first for name in names if name != first and name not in named}
    return aliases


def repeated_tensors(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Return the groups of names in a file that stand for the same memory."""
    names_at: dict[object, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.numel() and tensor.layout == torch.strided and not tensor.is_meta:
            names_at[tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype].append(name)
    return [sorted(names) for names in names_at.values() if len(names) > 1]


def with_names_of_header(
    tensors: Mapping[str, torch.Tensor], header: Mapping[str, Any], model_names: Iterable[str]
) -> dict[str, torch.Tensor]:
    """Return tensors with the names that a .safetensors left out and the model has, whatever stands in front of them.

    The header names the tensor that each is tied to.
    """
    left_out = {name: tensors[kept] for name, kept in header.items() if isinstance(kept, str) and kept in tensors}
    wanted = [f".{name}" for name in strip_wrappers(model_names).values() if name]
    clean = {name: f".{new}" for name, new in strip_wrappers(left_out).items() if new}
    endings = {name: [own for own in wanted if own.endswith(new) or new.endswith(own)] for name, new in clean.items()}
    return {name: left_out[name] for name, found in endings.items() if found} | dict(tensors)


def check_tied(model_tensors: Mapping[str, torch.Tensor], loaded: Mapping[str, Any]) -> None:
    """Check that the names of one tied tensor get equal values.

    Raises:
        CheckpointError: If they do not.
    """
    first: dict[int, str] = {}
    for name in loaded:
        other = first.setdefault(id(model_tensors[name]), name)
        if other != name and not torch.equal(loaded[name], loaded[other]):
            raise CheckpointError(
                f"{other} and {name} are one tensor in the model and two different ones in the checkpoint: untie them, "
                "or drop one with a rule."
            )


def tie_again(module: nn.Module, groups: list[list[str]], loaded: Collection[str]) -> None:
    """Give the names of a group one tensor again, after those that were loaded have replaced some of them."""
    own = _tensors_of(module) if groups else {}
    for names in groups:
        first = next((own[name] for name in names if name in loaded), None)
        for name in names:
            if first is not None and own[name] is not first:
                owner, _, leaf = name.rpartition(".")
                setattr(module.get_submodule(owner), leaf, first)


def tied_in(module: nn.Module) -> list[list[str]]:
    """Return the groups of names under which modules hold one parameter or one buffer."""
    return tied_names(_tensors_of(module))


def _tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    parameters = module.named_parameters(remove_duplicate=False)
    return dict(chain(parameters, module.named_buffers(remove_duplicate=False)))
