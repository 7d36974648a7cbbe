"""`MetricGroup`: what all groups of metrics with one statistic have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_tricks.metrics.core.metric_properties import update_arguments

State = Any  # of tensors, lists and dicts of tensors and whole numbers


class MetricGroup(ABC):
    """Metrics that are computed from one statistic, which is updated once for all of them.

    Args:
        members: The metrics, by key.

    Attributes:
        members: The metrics, by key.
        required_inputs: The names of the arguments that an update needs.
        accepted_inputs: The names of the arguments that an update accepts.
        can_concat_batches: Whether an update with concatenated batches gives the same result as one for each batch.
    """

    can_concat_batches = True

    def __init__(self, members: Mapping[str, Metric]) -> None:
        self.members = dict(members)
        names = [update_arguments(metric) for metric in members.values()]
        self.required_inputs = set().union(*(required for required, _ in names))
        self.accepted_inputs = set().union(*(accepted for _, accepted in names))
        for metric in members.values():
            for part in metrics_in(metric):
                part.distributed_available_fn = _return_false  # the states of ranks are merged by `load`

    @abstractmethod
    def update(self, inputs: Mapping[str, Any]) -> None:
        """Add a batch."""

    @abstractmethod
    def state(self) -> State:
        """Return the statistic of all data so far."""

    @abstractmethod
    def load(self, states: Sequence[State]) -> None:
        """Replace the statistic by the merged states of several parts of the data; reset it if there are none."""

    @abstractmethod
    def set_member_states(self) -> None:
        """Set the states of the members, from which they compute their values."""

    def num_invalid(self) -> Tensor | int:
        """Return how many elements were invalid, as far as the group counts them."""
        return 0


def set_states(metric: Metric, states: Mapping[str, Any]) -> None:
    """Set the states of a metric, from which it will compute its value."""
    # not by `setattr`: the checks of torch.nn.Module for each attribute take longer than the computation
    vars(metric).update(states, _update_count=1, _computed=None)


def metrics_in(metric: Metric) -> list[Metric]:
    """Return a metric and those that it wraps."""
    return [part for part in metric.modules() if isinstance(part, Metric)]


def _return_false() -> bool:
    return False


def sum_counts(counts: Sequence[Tensor | None]) -> Tensor | None:
    """Return the sum of the counts of several parts, or None where no part has any."""
    some = [part for part in counts if part is not None]
    return torch.stack(some).sum(0) if some else None
