"""Weight norm: the length and the direction of a weight, which a file or a model keeps in two tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch

_DIRECTIONS = re.compile(r"(?P<old>.+)_v|(?P<path>|.+\.)parametrizations\.(?P<new>[^.]+)\.original1")


class NormedWeight(NamedTuple):
    """The names of the length and of the direction of a weight, and the dimension that lengths are of."""

    length: str
    direction: str
    dim: int


def find_normed(tensors: Mapping[str, torch.Tensor]) -> dict[str, NormedWeight]:
    """Return what either `weight_norm` of torch made two tensors of, by the names of the weights."""
    found: dict[str, NormedWeight] = {}
    for name, direction in tensors.items():
        parts = _DIRECTIONS.fullmatch(name)
        if parts is None:
            continue
        length = f"{name[:-1]}g" if parts["old"] else f"{name[:-1]}0"
        dim = _dim(tensors[length].shape, direction.shape) if length in tensors else None
        if dim is not None:
            found[parts["old"] or f"{parts['path']}{parts['new']}"] = NormedWeight(length, name, dim)
    return found


def _dim(lengths: torch.Size, shape: torch.Size) -> int | None:
    """Return the dimension of a weight along which it has lengths, -1 if it has one; None if they are none of it."""
    if not lengths and shape:
        return -1
    fits = [dim for dim in range(len(shape)) if [*lengths] == [n if i == dim else 1 for i, n in enumerate(shape)]]
    return fits[0] if fits else None


def normed_as_in(
    tensors: dict[str, torch.Tensor], model: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the tensors of a file with weight norm as the model has it, and what should be said.

    A model without weight norm gets the weights that a model with it computes; one with it gets both tensors under its
    own names.
    """
    given, wanted = find_normed(tensors), find_normed(model)
    kinds = [{normed.direction.endswith("_v") for normed in side.values()} for side in (given, wanted)]
    if not given or kinds[0] == kinds[1]:
        return tensors, []
    made: dict[str, torch.Tensor] = {}
    for weight, (length, direction, dim) in given.items():
        path, _, leaf = weight.rpartition(".")
        stem = f"{path}.parametrizations.{leaf}.original".lstrip(".")
        names = (f"{weight}_g", f"{weight}_v") if True in kinds[1] else (f"{stem}0", f"{stem}1")
        if wanted:
            made |= zip(names, (tensors[length], tensors[direction]), strict=True)
        else:
            lengths = torch.norm_except_dim(tensors[direction], 2, dim)
            made[weight] = tensors[direction] * (tensors[length] / lengths)
    used = {name for normed in given.values() for name in (normed.length, normed.direction)}
    rest = {name: tensor for name, tensor in tensors.items() if name not in used}
    return rest | made, [] if wanted else [f"{len(given)} tensors were computed of the file's weight norm"]
