"""Checks of the predictions and targets of the first batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_tricks.metrics.core.counts import not_ignored
from lightning_tricks.metrics.core.metric_groups import MetricGroup
from lightning_tricks.metrics.core.metric_table import Task


def check_batch(inputs: Mapping[str, Any], groups: Sequence[MetricGroup], tasks: Mapping[str, Task | None]) -> None:
    """Raise an error for a batch that metrics would misunderstand; this reads values from the device.

    Args:
        inputs: The arguments of the metrics.
        groups: The groups of metrics.
        tasks: The task of each metric, by key.

    Raises:
        ValueError: If a name is missing, there is no batch dimension, shapes or classes do not fit, predictions are
            NaN, or are logits where probabilities are needed.
    """
    for group in groups:
        missing = sorted(group.required_inputs - inputs.keys())
        if missing:
            keys = dict.fromkeys(repr(key) for key, _ in group.members)
            needs = f"{', '.join(keys) or 'the curves'} {'needs' if len(keys) == 1 else 'need'}"
            raise ValueError(
                f"{needs} {_listed(missing)}, but got "
                f"{_listed(inputs) or 'nothing'}. Return a dict with it from the step, or give "
                "output_transform=(outputs, batch, stage) -> dict."
            )
    for group in groups:
        for metric in group.members.values():
            check: Any = getattr(metric, "check_inputs", None)  # of our own metrics
            if check is not None:
                check(inputs)
    known = any(task is not None for task in tasks.values())
    for name in ("preds", "target"):
        if known and not isinstance(inputs.get(name, torch.empty(0)), Tensor):
            found = inputs[name]
            remedy = (
                f"{name}[{next(iter(found))!r}]" if isinstance(found, Mapping) and found else f"torch.as_tensor({name})"
            )
            raise ValueError(f"{name} must be a tensor, got {type(found).__name__}: return {remedy}.")
    preds, target = inputs.get("preds"), inputs.get("target")
    if not isinstance(preds, Tensor) or not isinstance(target, Tensor):
        return
    checked = set[Task]()
    for key, task in tasks.items():
        if task is not None and task not in checked:
            checked.add(task)
            try:
                _check(preds, target, task)
            except ValueError as error:
                shapes = f"{_shown('preds', preds)}, {_shown('target', target)}"
                raise ValueError(f"{key!r}: {str(error).rstrip('.')} ({shapes}).") from None
    if preds.is_floating_point() and (broken := int(preds.isnan().sum())):
        raise ValueError(
            f"{broken} of {preds.numel()} predictions are NaN ({_shown('preds', preds)}): look for NaN in the inputs, "
            "for a division by zero, and for an overflow in fp16."
        )


def _check(preds: Tensor, target: Tensor, task: Task) -> None:
    is_scores = preds.is_floating_point() and task.kind == "multiclass"
    classes = task.classes
    if preds.ndim == 0 or (is_scores and preds.ndim == 1 and preds.shape[0] == classes and target.ndim < 2):
        shape = "(N, C, ...) with scores or (N, ...) with classes" if task.kind == "multiclass" else "(N, ...)"
        raise ValueError(f"the predictions have no batch dimension: they need the shape {shape}.")
    if is_scores:
        shapes_fit = preds.ndim == target.ndim + 1 and preds.shape[2:] == target.shape[1:] and len(preds) == len(target)
        if not shapes_fit or (classes == 2 and preds.shape[1] == 1):
            remedy = _remedy_for_scores(preds, target, classes)
            raise ValueError(f"scores of the shape (N, C, ...) need targets of the shape (N, ...): {remedy}.")
        if classes is not None and preds.shape[1] != classes:
            raise ValueError(
                f"the metric has {classes} classes, but the predictions have {preds.shape[1]}: give the metric "
                f"num_classes={preds.shape[1]}, or return {classes} scores for each sample."
            )
    elif preds.shape != target.shape:
        remedy = _remedy_for_shapes(preds, target, task)
        raise ValueError(f"predictions and targets must have the same shape: {remedy}.")
    if task.kind == "multilabel" and (preds.ndim < 2 or preds.shape[1] != classes):
        raise ValueError(f"the metric has {classes} labels: predictions need the shape (N, {classes}).")
    if task.needs_scores and not preds.is_floating_point():
        remedy = "preds.float()" if task.kind == "ood" else "the scores, without argmax"
        raise ValueError(f"the metric needs scores, but the predictions are classes: return {remedy}.")
    if task.kind in ("binary", "multiclass", "multilabel", "ood"):
        _check_classes("targets", target, task)
        if not preds.is_floating_point() and preds.dtype is not torch.bool:
            counted = preds[not_ignored(target, task.ignore_index)]
            _check_classes("predictions", counted, replace(task, ignore_index=None))
    if task.needs_probabilities and preds.is_floating_point():
        _check_probabilities(preds, task)


def _remedy_for_scores(preds: Tensor, target: Tensor, classes: int | None) -> str:
    """Say how to make targets fit scores."""
    has_column = preds.ndim > 1 and preds.shape[1] == 1
    of_class_1 = has_column or preds.ndim == 1 or (preds.shape == target.shape and preds.shape[1] != 2)
    if classes == 2 and of_class_1 and not torch.equal(preds, preds.round()):
        join, is_share = "cat" if has_column else "stack", ((preds >= 0) & (preds <= 1)).all()
        return f"return torch.{join}([{'1 - preds' if is_share else 'torch.zeros_like(preds)'}, preds], dim=1)"
    if preds.ndim == 1 or (preds.shape == target.shape and classes is not None and preds.shape[1] != classes):
        return "predictions that are classes need a type of whole numbers, preds.long()"
    if preds.shape == target.shape:
        return (
            "return target.argmax(dim=1) for targets that are one-hot or soft, or give multiclass_metrics "
            "soft_targets=True"
        )
    if len(preds) != len(target):
        return f"there are {len(preds)} predictions and {len(target)} targets, so return those of one batch"
    if preds.ndim == target.ndim and 1 in (target.shape[1], target.shape[-1]):
        return f"return target.squeeze({1 if target.shape[1] == 1 else -1})"
    if preds.shape[:-1] == target.shape:
        return "the second dimension must be that of the classes, as in preds.movedim(-1, 1)"
    return "return one class for each place that has scores"


def _remedy_for_shapes(preds: Tensor, target: Tensor, task: Task) -> str:
    """Say how to give predictions and targets the same shape."""
    if preds.ndim == target.ndim + 1 and preds.shape[-1] == 1:
        return "use preds.squeeze(-1)"
    if target.ndim == preds.ndim + 1 and target.shape[-1] == 1:
        return "use target.squeeze(-1)"
    if task.kind == "multilabel" and preds.shape[:-1] == target.shape:
        return f"for targets that are classes use torch.nn.functional.one_hot(target, {preds.shape[-1]})"
    if task.kind == "binary" and preds.ndim == target.ndim + 1 and preds.shape[-1] == 2:
        return "use the probability of 1, preds[..., 1]"
    if task.kind == "multiclass" and target.ndim == preds.ndim + 1:
        return "return target.argmax(dim=1) for targets that are one-hot or soft"
    return "return one prediction for each target"


def _check_classes(name: str, values: Tensor, task: Task) -> None:
    classes = task.classes if task.kind == "multiclass" else 2
    wrong = values < 0 if classes is None else (values < 0) | (values >= classes)
    if values.is_floating_point():
        wrong |= values != values.round()
    if task.ignore_index is not None:
        wrong &= values != task.ignore_index
    if not wrong.any():  # the only read of the device where all is well
        return
    counted = values if task.ignore_index is None else values[values != task.ignore_index]
    if values.is_floating_point() and not torch.equal(counted, counted.round()):
        remedy = "whole numbers" if task.kind == "multiclass" else "(target > 0.5).long() for targets that are soft"
        raise ValueError(f"{name} must be classes, got {counted[counted != counted.round()][0]:g}: return {remedy}.")
    outside = values[wrong]
    allowed = f"0 to {classes - 1}" if classes is not None else "at least 0"
    aside = "" if task.ignore_index is None else f" or ignore_index={task.ignore_index}"
    found = ", ".join(f"{value:g}" for value in outside.unique().tolist()[:5])
    remedy = f": {_remedy_for_classes(counted, outside, classes, task)}" if name == "targets" else ""
    raise ValueError(f"{name} must be {allowed}{aside}, got {found}{remedy}.")


def _remedy_for_classes(target: Tensor, outside: Tensor, classes: int | None, task: Task) -> str:
    """Say what to do about targets that are not classes of the metric."""
    wrong = outside.unique()
    if classes == 2 and target.unique().tolist() == [-1, 1]:
        return "return (target + 1) // 2"
    if task.kind == "ood" or (task.kind == "binary" and len(wrong) > 1):
        return "return 1 for one class and 0 for all others, such as (target > 0).long()"
    if classes is not None and wrong.tolist() == [classes] and target.min() > 0:
        return "if they count from 1, return target - 1"
    if len(wrong) == 1:
        return f"if it marks elements that do not count, give the metrics ignore_index={wrong[0].item():g}"
    return "give the metrics a larger num_classes, or ignore_index for elements that do not count"


def _check_probabilities(preds: Tensor, task: Task) -> None:
    wrong = ((preds < 0) | (preds > 1)).any()
    if task.kind == "multiclass":
        wrong |= ~((preds.sum(1) - 1).abs() < 1e-2).all()
    if wrong:
        remedy = "torch.softmax(logits, dim=1)" if task.kind == "multiclass" else "torch.sigmoid(logits)"
        low, high = preds.min().item(), preds.max().item()
        raise ValueError(
            f"the metric needs probabilities, but the predictions look like logits, from {low:.3g} to {high:.3g}: "
            f"return {remedy}."
        )


def _listed(names: Any) -> str:
    return ", ".join(sorted(names))


def _shown(name: str, tensor: Tensor) -> str:
    return f"{name}: {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
