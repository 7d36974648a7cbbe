"""`ConfusionMatrixGroup`: metrics that are computed from one confusion matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_tricks.metrics.core.confusion_counts import (
    binary_cells,
    cells_to_matrix,
    count_cells_,
    count_invalid,
    multiclass_cells,
    stat_scores,
    zero_counts,
)
from lightning_tricks.metrics.core.groups.base import MetricGroup, State, set_states, sum_counts
from lightning_tricks.metrics.core.metric_properties import Task, stores_confusion_matrix, task_of


class ConfusionMatrixGroup(MetricGroup):
    """Metrics that are computed from one confusion matrix of whole numbers, which is counted without host reads."""

    def __init__(self, members: Mapping[str, Metric]) -> None:
        super().__init__(members)
        first = next(iter(self.members.values()))
        self.task = cast(Task, task_of(first))
        self._threshold = getattr(first, "threshold", 0.5)
        classes = self.task.classes or 0
        self.shape = {"binary": (2, 2), "multiclass": (classes, classes), "multilabel": (classes, 2, 2)}[self.task.kind]
        self._size = torch.Size(self.shape).numel()
        self._counts: Tensor | None = None

    def update(self, inputs: Mapping[str, Any]) -> None:
        """Count the cells of a batch."""
        preds, target = inputs["preds"], inputs["target"]
        if self._counts is None:
            self._counts = zero_counts(self._size, preds.device)
        if self.task.kind == "multiclass":
            cells = multiclass_cells(self.shape[0], preds, target, self.task.ignore_index)
        else:
            labels = self.shape[0] if self.task.kind == "multilabel" else 1
            cells = binary_cells(preds, target, self._threshold, self.task.ignore_index, labels)
        count_cells_(self._counts, cells)

    def state(self) -> State:
        """Return the counts."""
        return self._counts

    def load(self, states: Sequence[State]) -> None:
        """Replace the counts by the sum of those of several parts."""
        self._counts = sum_counts(states)

    def matrix(self) -> Tensor:
        """Return the confusion matrix: rows are targets, columns predictions."""
        counts = zero_counts(self._size) if self._counts is None else self._counts
        return cells_to_matrix(counts, *self.shape)

    def set_member_states(self) -> None:
        """Set the states that each member would have counted itself."""
        matrix = self.matrix()
        per_class = matrix[None] if self.task.kind == "binary" else matrix
        scores = dict(zip(("tp", "fp", "tn", "fn"), stat_scores(per_class), strict=True))
        for metric in self.members.values():
            set_states(metric, {"confmat": matrix} if stores_confusion_matrix(metric) else scores)

    def num_invalid(self) -> Tensor | int:
        """Return how many elements fell into no cell."""
        return 0 if self._counts is None else count_invalid(self._counts)
