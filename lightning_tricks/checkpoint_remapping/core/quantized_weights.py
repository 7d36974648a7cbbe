"""Files of quantized weights: which of their tensors are codes, and not the numbers that a model computes with."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

import torch

from lightning_tricks._shared.text import list_names
from lightning_tricks.checkpoint_remapping.core.matching.alignment import Alignment
from lightning_tricks.checkpoint_remapping.core.remapping import strip_wrappers

_OF_LAYERS = ("weight", "bias")  # what a layer of torch has itself, and no scale


def find_codes(
    found: Alignment, file: Mapping[str, torch.Tensor], model: Mapping[str, torch.Tensor]
) -> dict[str, list[str]]:
    """Return the codes of a file by name, each with what is left over beside it, such as its scale.

    Codes are matrices of whole numbers or of 8 bits that stand where the model has, or lacks, a matrix of wider
    numbers, and beside which the file has tensors that the model does not have. A file of numbers of 8 bits with
    nothing beside them holds weights.

    Args:
        found: What was matched.
        file: The tensors of the file, by the names that the alignment has for them.
        model: The model's tensors.
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
        if has_place and others:
            codes[name] = others
    return codes


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
