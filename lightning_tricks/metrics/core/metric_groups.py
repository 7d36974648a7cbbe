"""Groups of metrics that share one statistic, so that each batch is counted once for all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_tricks._shared.tensors import to_double
from lightning_tricks.metrics.core import counts, metric_table

MemberKey = tuple[str, bool]
State = Any  # of tensors, lists and dicts of tensors and whole numbers


class MetricGroup(ABC):
    """Metrics that are computed from one statistic, which is updated once for all of them.

    Args:
        members: The metrics, by key, and by whether they compute the values of single classes.

    Attributes:
        members: The metrics, by key, and by whether they compute the values of single classes.
        required_inputs: The names of the arguments that an update needs.
        accepted_inputs: The names of the arguments that an update accepts.
        can_concat_batches: Whether an update with concatenated batches gives the same result as one for each batch.
    """

    can_concat_batches = True

    def __init__(self, members: Mapping[MemberKey, Metric]) -> None:
        self.members = dict(members)
        names = [metric_table.update_arguments(metric) for metric in members.values()]
        self.required_inputs = set().union(*(required for required, _ in names))
        self.accepted_inputs = set().union(*(accepted for _, accepted in names))
        for metric in members.values():
            for part in metric_table.metrics_in(metric):
                part.distributed_available_fn = _return_false  # the states of ranks are merged by `load`

    @abstractmethod
    def update(self, inputs: Mapping[str, Any]) -> None:
        """Add a batch."""

    @abstractmethod
    def state(self) -> State:
        """Return the statistic of all data so far."""

    @abstractmethod
    def load(self, states: Sequence[State], samples: Sequence[int] = ()) -> None:
        """Replace the statistic by the merged states of several parts of the data; reset it if there are none.

        Args:
            states: The states.
            samples: How many samples each of them is of, where ranks may have taken turns; empty if they have not.
        """

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


def joined_rows(parts: Sequence[list[Any]], samples: Sequence[int]) -> list[Any]:
    """Return what several parts of the data have kept, where possible in the order of the samples.

    Args:
        parts: Entries of each part: one for each sample, or tensors with as many rows for each.
        samples: How many samples each part has, where ranks may have taken turns.
    """
    entries = [entry for part in parts for entry in part]
    order = _turns_of(samples) if samples and len(parts) > 1 and entries else None
    if order is None:
        return entries
    if [len(part) for part in parts] == list(samples):
        return [entries[place] for place in order]
    if all(isinstance(entry, Tensor) and entry.ndim for entry in entries):
        rows = [sum(map(len, part)) for part in parts]
        of_sample = rows[0] // samples[0]
        if of_sample and rows == [of_sample * count for count in samples]:
            return [torch.cat(entries).unflatten(0, (-1, of_sample))[order].flatten(0, 1)]
    return entries


def _return_false() -> bool:
    return False


class CountsGroup(MetricGroup):
    """Metrics whose statistic is one tensor of counts, or None before the first batch."""

    _counts: Tensor | None = None

    def state(self) -> State:
        """Return the counts."""
        return self._counts

    def load(self, states: Sequence[State], samples: Sequence[int] = ()) -> None:
        """Replace the counts by the sum of those of several parts."""
        known = [part for part in states if part is not None]
        self._counts = torch.stack(known).sum(0) if known else None


class ConfusionMatrixGroup(CountsGroup):
    """Metrics that are computed from one confusion matrix of whole numbers, which is counted without host reads."""

    def __init__(self, members: Mapping[MemberKey, Metric]) -> None:
        super().__init__(members)
        first = next(iter(self.members.values()))
        self.task = cast(metric_table.Task, metric_table.task_of(first))
        self._threshold = getattr(first, "threshold", 0.5)
        classes = self.task.classes or 0
        self.shape = {"binary": (2, 2), "multiclass": (classes, classes), "multilabel": (classes, 2, 2)}[self.task.kind]
        self._size = torch.Size(self.shape).numel()

    def update(self, inputs: Mapping[str, Any]) -> None:
        """Count the cells of a batch."""
        preds, target = inputs["preds"], inputs["target"]
        if self._counts is None:
            self._counts = counts.zero_counts(self._size, preds.device)
        if self.task.kind == "multiclass":
            cells = counts.multiclass_cells(self.shape[0], preds, target, self.task.ignore_index)
        else:
            labels = self.shape[0] if self.task.kind == "multilabel" else 1
            cells = counts.binary_cells(preds, target, self._threshold, self.task.ignore_index, labels)
        counts.count_cells_(self._counts, cells)

    def matrix(self) -> Tensor:
        """Return the confusion matrix: rows are targets, columns predictions."""
        found = counts.zero_counts(self._size) if self._counts is None else self._counts
        return counts.cells_to_matrix(found, *self.shape)

    def set_member_states(self) -> None:
        """Set the states that each member would have counted itself."""
        matrix = self.matrix()
        per_class = matrix[None] if self.task.kind == "binary" else matrix
        scores = dict(zip(("tp", "fp", "tn", "fn"), counts.stat_scores(per_class), strict=True))
        for metric in self.members.values():
            set_states(metric, {"confmat": matrix} if metric_table.stores_confusion_matrix(metric) else scores)

    def num_invalid(self) -> Tensor | int:
        """Return how many elements fell into no cell."""
        return 0 if self._counts is None else counts.count_invalid(self._counts)


class ScoreHistogram(CountsGroup):
    """Histograms of the scores of positives and negatives, from which curves are plotted.

    There is one for each label, or for each of the first 20 classes, and then one more, of the highest score of each
    sample and whether its class is correct.
    """

    bins = 300
    most_classes = 20

    def __init__(self, task: metric_table.Task) -> None:
        super().__init__({})
        self.required_inputs = self.accepted_inputs = {"preds", "target"}
        self.task = task
        self._logits: bool | None = None

    def update(self, inputs: Mapping[str, Any]) -> None:
        """Count the scores of a batch."""
        preds, target = inputs["preds"], inputs["target"].long()
        dimensions = 1 if self.task.kind == "binary" else 2
        if not preds.is_floating_point() or preds.ndim != dimensions or not len(preds):
            return
        counted = counts.not_ignored(target, self.task.ignore_index)
        if self.task.kind == "multiclass":
            preds, target = self._binarize(preds.float(), target)
        elif self.task.kind == "binary":
            preds, target = preds[:, None], target[:, None]
        if self._counts is None:
            shape = (preds.shape[1], 2, self.bins)
            self._counts = torch.zeros(shape, dtype=torch.int64, device=preds.device)
        counts.count_scores_(self._counts, preds, target.clamp(0, 1), counted)

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

    def set_member_states(self) -> None:
        """Do nothing: there are no members."""


class CatGroup(MetricGroup):
    """Metrics that need all the data, of which one copy is kept: the rows of all batches, by name of the argument."""

    names: tuple[str, ...]

    def __init__(self, members: Mapping[MemberKey, Metric]) -> None:
        super().__init__(members)
        self.load([])

    def update(self, inputs: Mapping[str, Any]) -> None:
        """Keep the rows of a batch."""
        for name, kept in self._rows.items():
            kept.append(self.flatten_batch(name, inputs[name]))

    def state(self) -> State:
        """Return the rows."""
        return {name: torch.cat(kept) for name, kept in self._rows.items() if kept}

    def load(self, states: Sequence[State], samples: Sequence[int] = ()) -> None:
        """Replace the rows by those of several parts of the data."""
        parts = {name: [[part[name]] if part else [] for part in states] for name in self.names}
        self._rows: dict[str, list[Tensor]] = {name: joined_rows(kept, samples) for name, kept in parts.items()}

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

    def __init__(self, members: Mapping[MemberKey, Metric]) -> None:
        super().__init__(members)
        self._kind = cast(metric_table.Task, metric_table.task_of(next(iter(members.values())))).kind

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


def _turns_of(sizes: Sequence[int]) -> list[int] | None:
    """Return the order in which a `DistributedSampler` has given out the samples of ranks that lie one after another.

    Args:
        sizes: The number of samples of each rank.

    Returns:
        The places of the samples, or None where ranks have not taken turns.

    Examples:
        >>> _turns_of([3, 2]), _turns_of([1, 3])
        ([0, 3, 1, 4, 2], None)
    """
    if list(sizes) != sorted(sizes, reverse=True) or sizes[0] - sizes[-1] > 1:
        return None
    positions = [torch.arange(size) * len(sizes) + rank for rank, size in enumerate(sizes)]
    return torch.cat(positions).argsort().tolist()
