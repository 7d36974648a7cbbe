"""`ScoreHistogram`: histograms of scores, from which curves are plotted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_tricks.metrics.core.confusion_counts import not_ignored
from lightning_tricks.metrics.core.groups.base import MetricGroup, State, sum_counts
from lightning_tricks.metrics.core.metric_properties import Task
from lightning_tricks.metrics.core.score_curves import count_scores_


class ScoreHistogram(MetricGroup):
    """Histograms of the scores of positives and negatives, from which curves are plotted.

    There is one for each label, or for each of the first 20 classes, and then one more, of the highest score of each
    sample and whether its class is correct.
    """

    bins = 300
    most_classes = 20

    def __init__(self, task: Task) -> None:
        super().__init__({})
        self.required_inputs = self.accepted_inputs = {"preds", "target"}
        self.task = task
        self._counts: Tensor | None = None
        self._logits: bool | None = None

    def update(self, inputs: Mapping[str, Any]) -> None:
        """Count the scores of a batch."""
        preds, target = inputs["preds"], inputs["target"].long()
        if not preds.is_floating_point() or preds.ndim != (1 if self.task.kind == "binary" else 2):
            return
        if not len(preds):
            return
        counted = not_ignored(target, self.task.ignore_index)
        if self.task.kind == "multiclass":
            preds, target = self._binarize(preds.float(), target)
        elif self.task.kind == "binary":
            preds, target = preds[:, None], target[:, None]
        if self._counts is None:
            shape = (preds.shape[1], 2, self.bins)
            self._counts = torch.zeros(shape, dtype=torch.int64, device=preds.device)
        count_scores_(self._counts, preds, target.clamp(0, 1), counted)

    def _binarize(self, preds: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        if self._logits is None:  # read from the device at the first batch alone
            sums = preds.sum(1, keepdim=True)
            are_probabilities = (preds >= 0) & ((sums - 1).abs() < 1e-2)
            self._logits = not bool((are_probabilities | sums.isnan()).all().item())
        if self._logits:
            preds = preds.softmax(1)
        highest, chosen = preds.max(1, keepdim=True)
        preds = preds[:, : self.most_classes]
        is_class = target[:, None] == torch.arange(preds.shape[1], device=preds.device)
        return torch.cat([preds, highest], 1), torch.cat([is_class, chosen == target[:, None]], 1)

    def state(self) -> State:
        """Return the counts."""
        return self._counts

    def load(self, states: Sequence[State]) -> None:
        """Replace the counts by the sum of those of several parts."""
        self._counts = sum_counts(states)

    def set_member_states(self) -> None:
        """Do nothing: there are no members."""
