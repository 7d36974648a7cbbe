"""The values that a metric computes, one by one and by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torchmetrics import CatMetric

from lightning_tricks._shared.tensors import to_double
from lightning_tricks.metrics.core.metric_table import MetricEntry


def is_number(value: Any) -> bool:
    """Whether a value is a tensor without dimensions."""
    return isinstance(value, Tensor) and value.ndim == 0


def is_floating_number(value: Any) -> bool:
    """Whether a value is a floating-point tensor without dimensions."""
    return is_number(value) and bool(value.is_floating_point())


def stack_numbers(values: Iterable[Tensor]) -> Tensor:
    """Return numbers as one tensor in double precision, on the device of the first; metrics may compute on the CPU."""
    numbers = list(map(to_double, values))
    return torch.stack([number.to(numbers[0]) for number in numbers]) if numbers else torch.empty(0)


def named_values(entry: MetricEntry, metric: Any, value: Any) -> list[tuple[str, Any]]:
    """Return the values of a metric by name.

    Args:
        entry: The key of the metric and the names of the elements of its value.
        metric: The metric.
        value: What its `compute` returned.

    Returns:
        Pairs of name and value: one for a number, one for each element of a vector (and one for their mean where they
        are outputs of a regression) and of a dict; and whatever else there is, such as a matrix or a value for each
        sample, as it is.
    """
    key = entry.key
    if isinstance(value, Mapping):
        inner_entries = ((MetricEntry(f"{key}/{name}", metric), inner) for name, inner in value.items())
        return [pair for inner_entry, inner in inner_entries for pair in named_values(inner_entry, metric, inner)]
    if isinstance(value, int | float):
        value = torch.tensor(float(value))
    if isinstance(value, tuple | list) and value and all(is_number(element) for element in value):
        value = stack_numbers(value)
    if not isinstance(value, Tensor):
        return [] if value is None else [(key, value)]
    is_per_sample = isinstance(metric, CatMetric) or getattr(metric, "multidim_average", "") == "samplewise"
    if value.numel() > 1 and (value.ndim > 1 or is_per_sample):
        return [(key, value)]
    value = value if value.is_floating_point() else value.float()
    if value.numel() == 1:
        return [(key, value.reshape(()))]
    fits = len(entry.element_names) == len(value)
    names = entry.element_names if fits else [str(number) for number in range(len(value))]
    elements = [(f"{key}_{name}", element) for name, element in zip(names, value, strict=True)]
    outputs = getattr(metric, "num_outputs", 1) == len(value) or getattr(metric, "multioutput", "") == "raw_values"
    return [(key, value.mean()), *elements] if outputs else elements
