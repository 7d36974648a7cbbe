"""Groups of metrics that share one statistic: counts of a confusion matrix, rows, or one metric's states."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_tricks._shared.tensors import to_double
from lightning_tricks.metrics.core.metric_properties import (
    Task,
    can_concat_batches,
    state_sharing_key,
    stores_confusion_matrix,
    task_of,
    update_arguments,
)
from lightning_tricks.metrics.core.statistics import (
    binary_cells,
    cells_to_matrix,
    count_cells_,
    count_invalid,
    count_scores_,
    merge_state,
    multiclass_cells,
    not_ignored,
    stat_scores,
    zero_counts,
)

State = Any  # of tensors, lists and dicts of tensors and whole numbers


class MetricGroup(ABC):
    """Metrics with one statistic.

    Args:
        members: The metrics, by key.

    Attributes:
        needed, taken: The names of what an update needs and takes.
        can_concat_batches: Whether batches may come together in one update.
    """

    can_concat_batches = True

    def __init__(self, members: Mapping[str, Metric]) -> None:
        self.members = dict(members)
        names = [update_arguments(metric) for metric in members.values()]
        self.needed = set().union(*(needed for needed, _ in names))
        self.taken = set().union(*(taken for _, taken in names))
        for metric in members.values():
            for part in _metrics_in(metric):
                part.distributed_available_fn = _never  # ranks are merged by `load`

    @abstractmethod
    def update(self, inputs: Mapping[str, Any]) -> None:
        """Add a batch."""

    @abstractmethod
    def state(self) -> State:
        """Return what was gathered so far."""

    @abstractmethod
    def load(self, states: Sequence[State]) -> None:
        """Replace what was gathered so far by the states of several parts, merged; by nothing where there are none."""

    @abstractmethod
    def finish(self) -> None:
        """Give the members the states of which they compute."""

    def num_invalid(self) -> Tensor | int:
        """Return how many elements could not be counted."""
        return 0


class ConfusionMatrixGroup(MetricGroup):
    """Metrics of which all depends on a confusion matrix: counted once, in whole numbers, without reads."""

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
        """Count a batch."""
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
        """Replace the counts by the sum of others."""
        self._counts = _sum(states)

    def matrix(self) -> Tensor:
        """Return the confusion matrix: rows are targets, columns predictions."""
        counts = zero_counts(self._size) if self._counts is None else self._counts
        return cells_to_matrix(counts, *self.shape)

    def finish(self) -> None:
        """Give each member what it would have counted itself."""
        matrix = self.matrix()
        of_classes = matrix[None] if self.task.kind == "binary" else matrix
        scores = dict(zip(("tp", "fp", "tn", "fn"), stat_scores(of_classes), strict=True))
        for metric in self.members.values():
            _fill(metric, {"confmat": matrix} if stores_confusion_matrix(metric) else scores)

    def num_invalid(self) -> Tensor | int:
        """Return how many elements fell into no cell."""
        return 0 if self._counts is None else count_invalid(self._counts)


class CatGroup(MetricGroup):
    """Metrics that need all the data: one copy of its rows."""

    names: tuple[str, ...]

    def __init__(self, members: Mapping[str, Metric]) -> None:
        super().__init__(members)
        self.load([])

    def update(self, inputs: Mapping[str, Any]) -> None:
        """Keep the rows of a batch."""
        for name, kept in self._rows.items():
            kept.append(self.as_rows(name, inputs[name]))

    def state(self) -> State:
        """Return the rows."""
        return {name: torch.cat(kept) for name, kept in self._rows.items() if kept}

    def load(self, states: Sequence[State]) -> None:
        """Replace the rows by those of several parts."""
        self._rows: dict[str, list[Tensor]] = {name: [part[name] for part in states if part] for name in self.names}

    def finish(self) -> None:
        """Give each member what it would have kept of the rows that are not ignored."""
        rows = self.state()
        for metric in self.members.values():
            _fill(metric, {name: [part] for name, part in self.as_kept(metric, rows).items()})

    @abstractmethod
    def as_rows(self, name: str, batch: Tensor) -> Tensor:
        """Return a batch with one row for each prediction."""

    @abstractmethod
    def as_kept(self, metric: Metric, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the rows as a member would have kept them."""


class RetrievalGroup(CatGroup):
    """Metrics of retrieval.

    They get ranks in place of scores: torchmetrics takes a relevant document for an irrelevant one where its score is
    not above 0, as logits, distances and cosines often are.
    """

    names = ("indexes", "preds", "target")

    def as_rows(self, name: str, batch: Tensor) -> Tensor:
        """Return a batch flattened."""
        return batch.flatten()

    def as_kept(self, metric: Metric, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return ranks, and whole-numbered targets where the metric knows no grades."""
        ranks = to_double(torch.unique(rows["preds"], return_inverse=True)[1] + 1)
        graded = getattr(metric, "allow_non_binary_target", False) and rows["target"].is_floating_point()
        target = rows["target"].float() if graded else rows["target"].long()
        return _counted(metric, {"indexes": rows["indexes"].long(), "preds": ranks, "target": target})


class CurveGroup(CatGroup):
    """Metrics of a curve with every score as a threshold.

    torchmetrics would look at each batch, with a read from the device, whether it holds probabilities or logits.
    """

    names = ("preds", "target")

    def __init__(self, members: Mapping[str, Metric]) -> None:
        super().__init__(members)
        self._kind = cast(Task, task_of(next(iter(members.values())))).kind

    def as_rows(self, name: str, batch: Tensor) -> Tensor:
        """Return scores (N, ...) flattened, those of classes or labels (N, C, ...) as (rows, C)."""
        batch = batch.long() if name == "target" else batch.float() if batch.dtype.itemsize < 4 else batch
        by_class = self._kind == "multilabel" or (self._kind == "multiclass" and name == "preds")
        return batch.movedim(1, -1).flatten(0, -2) if by_class else batch.flatten()

    def as_kept(self, metric: Metric, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the rows that are not ignored; of several labels, the metric leaves out single elements itself."""
        return rows if self._kind == "multilabel" else _counted(metric, rows)


class SharedStateGroup(MetricGroup):
    """A metric that updates itself, and others of its family that compute from its states."""

    def __init__(self, members: Mapping[str, Metric]) -> None:
        super().__init__(members)
        self._leader = next(iter(self.members.values()))
        self._task = task_of(self._leader)
        self.can_concat_batches = can_concat_batches(self._leader)
        self._exact = False
        for metric in self.members.values():
            for part in _metrics_in(metric):
                part.validate_args = False  # the first batch is checked apart

    def update(self, inputs: Mapping[str, Any]) -> None:
        """Update the leader."""
        given = {name: self._converted(name, inputs[name]) for name in self.taken if name in inputs}
        self._leader.update(**given)

    def state(self) -> State:
        """Return the leader's states and those of the metrics that it wraps."""
        return [
            {"updates": part.update_count, "states": {name: getattr(part, name) for name in part._defaults}}
            for part in _metrics_in(self._leader)
        ]

    def load(self, states: Sequence[State]) -> None:
        """Replace the leader's states by those of several parts, merged as its `dist_reduce_fx` say."""
        self._leader.reset()
        for position, part in enumerate(_metrics_in(self._leader)):
            seen = [state[position] for state in states if state[position]["updates"]]
            if not seen:
                continue
            for name, reduction in part._reductions.items():
                merged = merge_state([of_part["states"][name] for of_part in seen], reduction)  # type: ignore[arg-type]
                setattr(part, name, merged)
            part._update_count, part._computed = sum(of_part["updates"] for of_part in seen), None

    def finish(self) -> None:
        """Give the other members the leader's states."""
        states = {name: getattr(self._leader, name) for name in self._leader._defaults}
        for metric in self.members.values():
            if metric is not self._leader:
                _fill(metric, states)

    def _converted(self, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if name == "target" and self._task is not None and self._task.kind in ("binary", "multiclass", "multilabel"):
            return value.long()
        if not value.is_floating_point():
            return value
        if self._task is not None and self._task.kind == "regression" and value.device.type != "mps":
            if not self._exact:
                self._leader.set_dtype(torch.float64)  # sums that do not depend on how the data is cut
                self._exact = True
            return value.double()
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


class ScoreHistogram(MetricGroup):
    """Histograms of the scores of positives and negatives, for pictures of curves.

    The curves are those of each class or label; for several classes there is one more, of the highest score and
    whether it is right.
    """

    bins = 300

    def __init__(self, task: Task) -> None:
        super().__init__({})
        self.needed = self.taken = {"preds", "target"}
        self.task = task
        self._counts: Tensor | None = None
        self._logits: bool | None = None

    def update(self, inputs: Mapping[str, Any]) -> None:
        """Count the scores of a batch."""
        preds, target = inputs["preds"], inputs["target"].long()
        if not preds.is_floating_point() or preds.ndim != (1 if self.task.kind == "binary" else 2):
            return
        counted = not_ignored(target, self.task.ignore_index)
        if self.task.kind == "multiclass":
            preds, target = self._one_against_rest(preds.float(), target)
        elif self.task.kind == "binary":
            preds, target = preds[:, None], target[:, None]
        if self._counts is None:
            shape = (preds.shape[1], 2, self.bins)
            self._counts = torch.zeros(shape, dtype=torch.int64, device=preds.device)
        count_scores_(self._counts, preds, target.clamp(0, 1), counted)

    def _one_against_rest(self, preds: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        if self._logits is None:  # asked of the first batch alone
            sums = preds.sum(1)
            self._logits = not bool(((preds >= 0).all() & (sums - 1).abs().amax().lt(1e-2)).item())
        if self._logits:
            preds = preds.softmax(1)
        highest, chosen = preds.max(1, keepdim=True)
        is_class = target[:, None] == torch.arange(preds.shape[1], device=preds.device)
        return torch.cat([preds, highest], 1), torch.cat([is_class, chosen == target[:, None]], 1)

    def state(self) -> State:
        """Return the counts."""
        return self._counts

    def load(self, states: Sequence[State]) -> None:
        """Replace the counts by the sum of others."""
        self._counts = _sum(states)

    def finish(self) -> None:
        """Do nothing: there are no members."""


def group_metrics(metrics: Mapping[str, Metric]) -> list[MetricGroup]:
    """Put metrics into groups; each gets a copy of its own, at its start."""
    families: dict[Any, dict[str, Metric]] = {}
    for key, metric in metrics.items():
        own = copy.deepcopy(metric)
        own.reset()
        family = state_sharing_key(metric)
        families.setdefault(key if family is None else ("family", family), {})[key] = own
    return [_group(family, members) for family, members in families.items()]


def _group(family: Any, members: dict[str, Metric]) -> MetricGroup:
    sort = family[1][0] if isinstance(family, tuple) else ""
    sorts: dict[str, type[ConfusionMatrixGroup | RetrievalGroup | CurveGroup]] = {
        "counts": ConfusionMatrixGroup,
        "ranking": RetrievalGroup,
        "curve": CurveGroup,
    }
    return sorts[sort](members) if sort in sorts else SharedStateGroup(members)


def _fill(metric: Metric, states: Mapping[str, Any]) -> None:
    # what torch.nn.Module looks for in each value that is set takes longer than to compute with it
    vars(metric).update(states, _update_count=1, _computed=None)


def _counted(metric: Metric, rows: dict[str, Tensor]) -> dict[str, Tensor]:
    ignored = getattr(metric, "ignore_index", None)
    if ignored is None:
        return rows
    counted = rows["target"] != ignored
    return {name: part[counted] for name, part in rows.items()}


def _sum(counts: Sequence[Tensor | None]) -> Tensor | None:
    some = [part for part in counts if part is not None]
    return torch.stack(some).sum(0) if some else None


def _metrics_in(metric: Metric) -> list[Metric]:
    return [part for part in metric.modules() if isinstance(part, Metric)]


def _never() -> bool:
    return False
