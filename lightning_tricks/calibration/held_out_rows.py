"""The logits and labels of held-out data, for which a module runs and stays as it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from lightning_tricks._lightning_compat.loaders import lightning_module_in, transferred_batches
from lightning_tricks._shared.calibration import as_logits, check_outputs, logits_in
from lightning_tricks._shared.calibration_scores import are_between_0_and_1, are_probabilities
from lightning_tricks._shared.dry_run.shared_state import evaluated_unchanged
from lightning_tricks._shared.modules import explained_arguments
from lightning_tricks._shared.tensors import gather_objects
from lightning_tricks._shared.text import list_names
from lightning_tricks._torch_compat.tensors import tree_map_only

_LABELS = ("target", "targets", "label", "labels", "y")


def held_out_rows(module: nn.Module, loader: Iterable[Any], outputs: str | None = None) -> tuple[Tensor, Tensor]:
    """Run a module in evaluation mode, and return logits and labels of all rows; the module stays as it is.

    The rows of a `DistributedSampler` are gathered from all ranks, without those that it repeats.

    Args:
        module: Returns logits or probabilities, (B, C), or (B,) or (B, 1) if it is binary; if it has a method
            `uncalibrated_logits`, that does.
        loader: Batches (x, y), (x1, x2, ..., y), or a dict with the labels as `target`, `label`, `labels` or `y`.
        outputs: What the module returns, "logits" or "probabilities"; None if nobody has said it.

    Returns:
        Logits, or logarithms of probabilities, and probabilities of the labels, (N, C) each, float64, on the CPU.

    Raises:
        TypeError: If a batch or an output is of another kind.
        ValueError: If outputs are NaN, or may be either and that was not said, or labels do not fit them.
    """
    logits_of = getattr(module, "uncalibrated_logits", module)
    place = next(chain(module.parameters(), module.buffers()), torch.empty(0, device="cpu"))
    parts = []
    with evaluated_unchanged(module, loader):
        for number, batch in enumerate(transferred_batches(lightning_module_in(module), loader, place.device)):
            args, kwargs, target = tree_map_only(np.ndarray, torch.as_tensor, _split(batch))
            args, kwargs = tree_map_only(Tensor, lambda x: _as_input(x, place), (args, kwargs))
            with explained_arguments():
                logits = found_logits(logits_of(*args, **kwargs))
            try:
                target = torch.as_tensor(target)
            except (TypeError, ValueError, RuntimeError) as error:
                raise TypeError(
                    f"labels must be numbers, class indices or probabilities, got {target!r:.99}."
                ) from error
            if not 1 <= logits.ndim <= 2 or not target.ndim or len(logits) != len(target):
                given = f"logits {tuple(logits.shape)} and labels {tuple(target.shape)}"
                raise ValueError(f"Batch {number} has {given}, but must have logits (B, C) and a label for each row.")
            parts.append((logits.cpu().double(), target_probabilities(target.cpu(), logits)))
    if not sum(len(rows) for rows, _ in parts):
        raise ValueError("The loader has no rows, so there is nothing to calibrate with: give it held-out data.")
    found, target = (torch.cat(part) for part in zip(*parts, strict=True))
    found, target = _of_all_ranks(found, target, loader)
    logits = as_logits(found, outputs)
    check_outputs(outputs, are_between_0_and_1(found), are_probabilities(logits.exp()))
    if (wrong := ~logits.amax(1).isfinite()).any():
        rows = f"{int(wrong.sum())} of {len(logits)} held-out rows, the first is row {int(wrong.nonzero()[0])}"
        raise ValueError(f"The logits are NaN or infinite in {rows}: look for NaN in inputs, or an overflow in fp16.")
    return logits, target


def found_logits(output: Any) -> Tensor:
    """Return the logits in what a module returned, or raise an error if it has none."""
    found = logits_in(output)
    if not isinstance(found, Tensor):
        raise TypeError(f"the module must return a tensor of logits, got {type(output).__name__}: wrap it to do so.")
    return found


def _split(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Return the positional and the keyword arguments of the module, and the labels."""
    if isinstance(batch, Mapping):
        labels = [name for name in _LABELS if name in batch]
        inputs = {name: value for name, value in batch.items() if name not in labels}
        if len(labels) == 1 and inputs:
            args = tuple(inputs.values()) if len(inputs) == 1 else ()  # one input, whatever its name
            return args, {} if args else inputs, batch[labels[0]]
        needed = f"inputs and the labels as one of {', '.join(_LABELS)}"
        raise TypeError(f"a batch that is a dict needs {needed}, got {list_names(map(str, batch))}.")
    if isinstance(batch, list | tuple) and len(batch) > 1:
        return tuple(batch[:-1]), {}, batch[-1]
    raise TypeError(f"a batch must be (x, y), (x1, x2, ..., y) or a dict, got {type(batch).__name__}.")


def _as_input(x: Tensor, place: Tensor) -> Tensor:
    both = x.is_floating_point() and place.is_floating_point()
    return x.to(place.device, place.dtype if both else x.dtype)


def target_probabilities(target: Tensor, logits: Tensor) -> Tensor:
    """Return labels as probabilities, (B, C), for the logits that belong to them."""
    one = logits.ndim == 1 or logits.shape[1] == 1
    classes = 2 if one else logits.shape[1]
    target = target.squeeze(1) if target.ndim == 2 and target.shape[1] == 1 else target
    if target.ndim == 1 and one and target.is_floating_point():
        target = torch.stack([1 - target, target], 1)
    if target.ndim == 2 and target.shape[1] == classes:
        found = target.double()
        if are_probabilities(found).all():
            return found / found.sum(1, keepdim=True)
        raise ValueError(
            "Labels that are probabilities must be at least 0, and have the sum 1 in each row; calibrate a multi-label "
            "classifier one label at a time."
        )
    if target.ndim != 1 or target.is_floating_point():
        given = f"{tuple(target.shape)} {str(target.dtype).removeprefix('torch.')}"
        raise ValueError(
            f"Labels must be class indices (B,), such as int64, or probabilities (B, {classes}), got {given}."
        )
    if len(wrong := target[(target < 0) | (target >= classes)]):
        remedy = "correct it, or leave such rows out of the loader"
        raise ValueError(f"Label {int(wrong[0])} is not one of the {classes} classes 0 to {classes - 1}: {remedy}.")
    return nn.functional.one_hot(target.long(), classes).double()


def _of_all_ranks(logits: Tensor, target: Tensor, loader: Any) -> tuple[Tensor, Tensor]:
    """Return the rows of all ranks in the order of a DistributedSampler; other loaders give each rank all rows."""
    owners = (loader, getattr(loader, "batch_sampler", None))
    samplers = (found for owner in owners if isinstance(found := getattr(owner, "sampler", None), DistributedSampler))
    sampler = next(samplers, None)
    if sampler is None or sampler.num_replicas == 1:
        return logits, target
    size = len(sampler.dataset)  # type: ignore[arg-type]
    rows = torch.arange(len(logits), device="cpu") * sampler.num_replicas + sampler.rank
    ranks = gather_objects((rows, logits, target))
    places, logits, target = (torch.cat(parts) for parts in zip(*ranks, strict=True))
    order = places.argsort()[: int((places < size).sum())]
    return logits[order], target[order]
