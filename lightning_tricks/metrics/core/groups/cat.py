"""Groups of metrics that need all the data: one copy of the rows of all batches, concatenated."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_tricks._shared.tensors import to_double
from lightning_tricks.metrics.core.groups.base import MetricGroup, State, set_states
from lightning_tricks.metrics.core.metric_properties import Task, task_of


class CatGroup(MetricGroup):
    """Metrics that need all the data, of which one copy is kept: the rows of all batches, by name of the argument."""

    names: tuple[str, ...]

    def __init__(self, members: Mapping[str, Metric]) -> None:
        super().__init__(members)
        self.load([])

    def update(self, inputs: Mapping[str, Any]) -> None:
        """Keep the rows of a batch."""
        for name, kept in self._rows.items():
            kept.append(self.flatten_batch(name, inputs[name]))

    def state(self) -> State:
        """Return the rows."""
        return {name: torch.cat(kept) for name, kept in self._rows.items() if kept}

    def load(self, states: Sequence[State]) -> None:
        """Replace the rows by those of several parts of the data."""
        self._rows: dict[str, list[Tensor]] = {name: [part[name] for part in states if part] for name in self.names}

    def set_member_states(self) -> None:
        """Set the states that each member would have kept: the rows that it does not ignore."""
        rows = self.state()
        for metric in self.members.values():
            set_states(metric, {name: [part] for name, part in self.member_states(metric, rows).items()})

    @abstractmethod
    def flatten_batch(self, name: str, batch: Tensor) -> Tensor:
        """Flatten an argument of a batch to one row for each prediction."""

    @abstractmethod
    def member_states(self, metric: Metric, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the states that a member would have kept."""


class RetrievalGroup(CatGroup):
    """Retrieval metrics.

    They compute from the ranks of the scores, because torchmetrics counts a relevant document as irrelevant if its
    score is not above 0, which is common for logits, distances and cosine similarities. The ranks are shares of 1, as
    scores above 1 are logits to `RetrievalAUROC`, which takes the sigmoid of them, of which high ones are all equal.
    """

    names = ("indexes", "preds", "target")

    def flatten_batch(self, name: str, batch: Tensor) -> Tensor:
        """Flatten an argument of a batch."""
        return batch.flatten()

    def member_states(self, metric: Metric, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return ranks in place of scores, and integer targets unless the metric accepts graded relevance."""
        places = torch.unique(rows["preds"], return_inverse=True)[1] + 1
        ranks = to_double(places) / max(len(places), 1)
        graded = getattr(metric, "allow_non_binary_target", False) and rows["target"].is_floating_point()
        target = rows["target"].float() if graded else rows["target"].long()
        return _drop_ignored(metric, {"indexes": rows["indexes"].long(), "preds": ranks, "target": target})


class CurveGroup(CatGroup):
    """Metrics of an exact curve, for which every score is a threshold.

    torchmetrics itself would read from the device at each batch, to see whether it holds probabilities or logits.
    """

    names = ("preds", "target")

    def __init__(self, members: Mapping[str, Metric]) -> None:
        super().__init__(members)
        self._kind = cast(Task, task_of(next(iter(members.values())))).kind

    def flatten_batch(self, name: str, batch: Tensor) -> Tensor:
        """Flatten scores (N, ...), and those of classes or labels (N, C, ...) to (rows, C)."""
        batch = batch.long() if name == "target" else batch.float() if batch.dtype.itemsize < 4 else batch
        by_class = self._kind == "multilabel" or (self._kind == "multiclass" and name == "preds")
        return batch.movedim(1, -1).flatten(0, -2) if by_class else batch.flatten()

    def member_states(self, metric: Metric, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the rows that are not ignored; with several labels, the metric itself ignores single elements."""
        return rows if self._kind == "multilabel" else _drop_ignored(metric, rows)


def _drop_ignored(metric: Metric, rows: dict[str, Tensor]) -> dict[str, Tensor]:
    ignored = getattr(metric, "ignore_index", None)
    if ignored is None:
        return rows
    counted = rows["target"] != ignored
    return {name: part[counted] for name, part in rows.items()}
