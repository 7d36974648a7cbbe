"""What a file has in another form than the model: weight norm, codes of quantized weights, grids of positions."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_tricks._shared.text import list_names
from lightning_tricks.checkpoint_remapping.core.errors import CheckpointError
from lightning_tricks.checkpoint_remapping.core.matching.alignment import Alignment
from lightning_tricks.checkpoint_remapping.core.matching.matches import Mismatch
from lightning_tricks.checkpoint_remapping.core.remapping import strip_wrappers

# Weight norm: the length and the direction of a weight, which a file or a model keeps in two tensors

_DIRECTIONS = re.compile(r"(?P<old>.+)_v|(?P<path>|.+\.)parametrizations\.(?P<new>[^.]+)\.original1")


class NormedWeight(NamedTuple):
    """The names of the length and of the direction of a weight, and the dimension that lengths are of."""

    length: str
    direction: str
    dim: int


def _find_normed(tensors: Mapping[str, torch.Tensor]) -> dict[str, NormedWeight]:
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
    given, wanted = _find_normed(tensors), _find_normed(model)
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
    return rest | made, [] if wanted else [f"{len(given)} tensors were computed from the file's weight norm"]


# Weights that are computed of other tensors: weight norm, spectral norm, other parametrizations, pruning

_BESIDE = {"orig": ("u", "mask"), "v": ("g",)}  # how names end, and those beside them, if weights are computed


def describe_computed(file: Collection[str], model: Collection[str]) -> str:
    """Return the sentence about weights that either side computes from tensors without a match; empty if neither does.

    Args:
        file: Names of the file without a match.
        model: Names of the model without one.
    """
    sides = (
        (file, "The file", "the model with that, as when it was saved, and then remove it"),
        (model, "The model", "it without that, and apply it afterwards"),
    )
    for names, holder, how in sides:
        for name in names:
            stem, _, kind = name.rpartition("_")
            if "parametrizations." in name or not {f"{stem}_{end}" for end in _BESIDE.get(kind, ())}.isdisjoint(names):
                return (
                    f"{holder} computes weights from others, such as {name} (weight norm, spectral norm, another "
                    f"parametrization, pruning), and the other side does not: load the file into {how} "
                    "(remove_parametrizations, remove_weight_norm, remove_spectral_norm or prune.remove)."
                )
    return ""


# Files of quantized weights: which of their tensors are codes, and not the numbers that a model computes with

_DEEPEST_SCALES = 3  # dicts inside each other in which scales are searched for
_OF_LAYERS = ("weight", "bias")  # what a layer of torch has itself, and no scale


def find_codes(
    found: Alignment, file: Mapping[str, torch.Tensor], model: Mapping[str, torch.Tensor], metadata: Mapping[Any, Any]
) -> dict[str, list[str]]:
    """Return the codes of a file by name, each with what is left over beside it, such as its scale.

    Codes are matrices of whole numbers or of 8 bits that stand where the model has, or lacks, a matrix of wider
    numbers, and beside which the file has tensors that the model does not have, or an entry of another dict. A file of
    numbers of 8 bits with nothing beside them holds weights.

    Args:
        found: What was matched.
        file: The tensors of the file, by the names that the alignment has for them.
        model: The model's tensors.
        metadata: What the file has beside its weights.
    """
    targets = {source: match.targets[0] for match in found.matches for source in match.ruled}
    targets |= {mismatch.source: mismatch.target for mismatch in found.mismatched}
    beside: dict[str, list[str]] = defaultdict(list)
    for name in found.unexpected:
        for place in _places(name):
            beside[place].append(name)
    missing = strip_wrappers(name for name in found.missing if _is_wide_matrix(model[name]))
    lacking = {_layer(name) for name in missing.values() if name is not None}
    endings = lacking.union(*map(_endings, lacking))
    codes: dict[str, list[str]] = {}
    for name in (*targets, *found.unexpected):
        if name not in file or not _is_narrow(file[name]) or file[name].dim() < 2:
            continue
        layer = _layer(name)
        if name in targets:
            has_place = _is_wide_matrix(model[targets[name]])
        else:
            has_place = layer in endings or not lacking.isdisjoint(_endings(layer))
        others = [other for other in (*beside[f"{layer}."], *beside[name]) if other != name]
        if has_place and (others := others or [*_entries_for(name, file[name].shape, metadata)]):
            codes[name] = others
    return codes


def _entries_for(name: str, shape: torch.Size, values: Mapping[Any, Any], path: str = "") -> Iterator[str]:
    """Yield the paths of what dicts beside the weights have for a tensor, unless they have another one of its shape."""
    texts = {key: new or key for key, new in strip_wrappers(key for key in values if isinstance(key, str)).items()}
    tensors = [values[key].shape for key, text in texts.items() if text == name and hasattr(values[key], "shape")]
    for key, text in texts.items() if path and shape not in tensors else ():
        if {name, f"{_layer(name)}."} & {text, f"{text}.", *_places(text)} and text != f"{_layer(name)}.bias":
            yield path + key
    for key in texts if path.count(".") < _DEEPEST_SCALES else ():
        if isinstance(values[key], Mapping) and not re.search("optim", key, re.IGNORECASE):
            yield from _entries_for(name, shape, values[key], f"{path}{key}.")


def describe_codes(codes: Mapping[str, list[str]], file: Mapping[str, torch.Tensor]) -> str:
    """Return the sentences about codes, with the remedy."""
    name, beside = next(iter(codes.items()))
    more = f", as of {len(codes) - 1:,} more" if len(codes) > 1 else ""
    return (
        f"It holds codes of quantized weights: {name} is {file[name].dtype}, and {list_names(beside, 3)} beside it "
        f"says what its numbers mean{more}. Dequantize them with the library that wrote the file (in transformers, "
        "model.dequantize()), or load the file of this model that is not quantized."
    )


def is_widened(given: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether floating-point numbers of 8 bits become wider ones."""
    return given.is_floating_point() and given.dtype.itemsize == 1 < own.dtype.itemsize


def _is_narrow(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of whole numbers or of floating-point numbers of 8 bits."""
    whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    return whole or tensor.dtype.itemsize == 1


def _is_wide_matrix(tensor: torch.Tensor) -> bool:
    return tensor.dim() > 1 and tensor.is_floating_point() and tensor.dtype.itemsize > 1


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def _endings(layer: str) -> list[str]:
    """Return what the name of a layer is behind each of its dots, as parts in front of it may differ."""
    return [layer[found.end() :] for found in re.finditer(r"[.]", layer)]


def _places(name: str) -> list[str]:
    """Return what a tensor may belong to: the tensors above it, and the layer that holds it or that it is named after.

    The weight `fc.weight` may have `fc.weight_scale`, `fc.weight.absmax` or `fc_scale` beside it.
    """
    if name.rpartition(".")[2] in _OF_LAYERS:
        return []
    layers = {f"{_layer(name)}.", f"{name.rpartition('_')[0]}."}
    return [*layers, *(name[: found.start()] for found in re.finditer(r"[.]", name))]


# Position embeddings of another number of positions


def resize_positions(mismatch: Mismatch, tensor: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """Resize position embeddings bicubically, as timm does.

    The grid of the model is that of its patches, where a module beside or around the embeddings says it, or a square;
    that of the file is a square.

    Args:
        mismatch: The old and the new shape: (1, tokens + H * W, C), (1, C, H, W) or Swin's ((2H-1) * (2W-1), heads).
        tensor: The embeddings of the file.
        module: The model.

    Raises:
        CheckpointError: If it is a linear layer's, the shapes are not those of a grid of positions, or a grid is not
            known.
    """
    old, new = mismatch.source_shape, mismatch.target_shape
    owner = dict(module.named_modules()).get(mismatch.target.rpartition(".")[0])
    if isinstance(owner, nn.Linear):
        raise CheckpointError(
            f"{mismatch} belongs to a linear layer, which has no positions: interpolate names it, too."
        )
    if len(old) == len(new) == 4 and old[:2] == new[:2]:
        return _bicubic(tensor, new[2:])
    flat = {len(old), len(new)} <= {2, 3} and math.prod(old[:-2]) == math.prod(new[:-2]) == 1
    if flat and old[-1] == new[-1]:
        rows, length = tensor.reshape(old[-2], old[-1]), new[-2]
        known = _grids_of(module, mismatch.target)
        for extra in range(3):  # class and distillation tokens come first
            grid, side = _square(len(rows) - extra), _square(length - extra)
            squares = [(side, side)] if side and not known else []
            sizes = [size for size in known if math.prod(size) == length - extra] or squares
            if grid and sizes:
                cells = rows[extra:].T.reshape(1, -1, grid, grid)
                resized = _bicubic(cells, sizes[0]).reshape(old[-1], -1).T
                return torch.cat([rows[:extra], resized.to(rows.dtype)]).reshape(new)
    raise CheckpointError(
        f"{mismatch} cannot be interpolated: it is not a square grid of positions in the file, or the model does not "
        f"say its grid of patches. Resize the tensor yourself: load_weights(model, {{**weights, {mismatch.target!r}: "
        "resized}), where weights = read_checkpoint(path).state_dict."
    )


def _square(count: int) -> int:
    """Return the side of a square of so many positions, 0 if there is none."""
    side = math.isqrt(max(count, 0))
    return side if side * side == count else 0


def _grids_of(module: nn.Module, name: str) -> list[tuple[int, int]]:
    """Return the grids of patches that modules around a tensor say, as timm's and those of transformers do."""
    modules = dict(module.named_modules(remove_duplicate=False))
    parts = name.split(".")
    for length in reversed(range(len(parts))):
        around = modules.get(".".join(parts[:length]), nn.Module())
        if found := [size for inside in around.modules() for size in _grid_said_by(inside)]:
            return list(dict.fromkeys(found))
    return []


def _grid_said_by(module: nn.Module) -> list[tuple[int, int]]:
    values = [getattr(module, name, None) for name in ("grid_size", "window_size", "image_size", "patch_size")]
    grid, window, image, patch = map(_pair, values)
    if grid:
        return [grid]
    if window:
        return [(2 * window[0] - 1, 2 * window[1] - 1)]
    return [(image[0] // patch[0], image[1] // patch[1])] if image and patch else []


def _pair(value: object) -> tuple[int, int] | None:
    """Return a positive size as height and width."""
    pair = (value, value) if type(value) is int else value
    if isinstance(pair, tuple | list) and len(pair) == 2 and all(type(side) is int and side > 0 for side in pair):
        return int(pair[0]), int(pair[1])
    return None


def _bicubic(grid: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    resized = nn.functional.interpolate(grid.float(), list(size), mode="bicubic", antialias=True, align_corners=False)
    return resized.to(grid.dtype)
