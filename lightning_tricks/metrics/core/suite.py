"""`MetricSuite`: several metrics over the same data, updated at almost no cost."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_tricks._shared.tensors import clone_tensors, detach_tensors, outside_inference_mode
from lightning_tricks._torch_compat.tensors import tree_map_only
from lightning_tricks.metrics.core import metric_groups, metric_table
from lightning_tricks.metrics.core.input_checks import check_batch
from lightning_tricks.metrics.core.own_metrics import SOFT_TARGET, CalibrationError, split_soft_target
from lightning_tricks.metrics.core.shared_state import SharedStateGroup

_MAX_ROWS = 4096
_MAX_BYTES = 4 * 2**20
_GROUPS: dict[
    str, type[metric_groups.ConfusionMatrixGroup | metric_groups.RetrievalGroup | metric_groups.CurveGroup]
] = {
    "confusion matrix": metric_groups.ConfusionMatrixGroup,
    "retrieval": metric_groups.RetrievalGroup,
    "curve": metric_groups.CurveGroup,
}


class MetricSuite:
    """Metrics over the same predictions and targets.

    Metrics that need the same statistic share it: accuracy, precision, recall, F1, specificity, kappa, MCC and
    intersection over union come from one confusion matrix, curves from one list of scores, retrieval metrics from one
    list of rows. If the result is the same, batches are copied and counted together, at most 4 MiB of them. Only the
    first batch is read from the device, to check it. The given metrics are copied, not changed.

    Args:
        metrics: A Metric, a MetricCollection, a dict of both, or the plain values of a preset,
            `{"task": "multiclass", "num_classes": 10}`.
        class_names: Names of the classes, labels or outputs. With them, averages over classes come per class too.
        curves: Whether to keep histograms of the scores, for plots.

    Raises:
        TypeError: If `metrics` is none of these.
        ValueError: If there is no metric, or the number of names is not that of the classes.

    Examples:
        >>> import torch
        >>> suite = MetricSuite({"task": "multiclass", "num_classes": 2}, class_names=["cat", "dog"])
        >>> suite.update(preds=torch.tensor([[0.9, 0.1], [0.8, 0.2]]), target=torch.tensor([0, 1]))
        >>> values = suite.compute()
        >>> values["acc"].item(), values["recall_cat"].item(), values["recall_dog"].item()
        (0.5, 1.0, 0.0)
    """

    def __init__(self, metrics: Any, class_names: Sequence[str] | None = None, *, curves: bool = False) -> None:
        entries = metric_table.metric_entries(metrics, class_names)
        self._entries = {(entry.key, entry.is_per_class): entry for entry in entries}
        with outside_inference_mode():  # states that a validation makes could be changed in inference mode alone
            groups = group_metrics({name: entry.metric for name, entry in self._entries.items()})
        self._metrics = {name: metric for group in groups for name, metric in group.members.items()}
        self._tasks: dict[str, metric_table.Task | None] = {
            entry.key: metric_table.task_of(entry.metric) for entry in entries if not entry.is_per_class
        }
        self._histogram = metric_groups.ScoreHistogram(task) if curves and (task := self.task) is not None else None
        groups += [self._histogram] if self._histogram is not None else []
        self._groups: list[metric_groups.MetricGroup] = groups
        self._splits = any(SOFT_TARGET in group.accepted_inputs for group in groups)
        required = frozenset[str]().union(*(group.required_inputs for group in groups))
        self.required_inputs = (required - {SOFT_TARGET}) | {"target"} if self._splits else required
        self._immediate = [group for group in groups if not group.can_concat_batches]
        self._buffered = [group for group in groups if group.can_concat_batches]
        self._buffer = BatchBuffer(
            self._update_buffered,
            frozenset().union(*(group.accepted_inputs for group in self._buffered)),
            clone=not all(isinstance(group, metric_groups.CountsGroup) for group in self._buffered),
        )
        self._needs_probabilities = any(task is not None and task.needs_probabilities for task in self._tasks.values())
        # a confusion matrix counts by itself what fits none of its cells
        self._counts_invalid = not all(isinstance(one, metric_groups.ConfusionMatrixGroup) for one in self._buffered)
        self._has_begun = False
        self.checked = False
        self.updates = 0
        self._num_invalid: Tensor | int = 0

    def check(self, **inputs: Any) -> None:
        """Raise an error for a batch that the metrics would misread; it reads from the device and counts nothing.

        Raises:
            ValueError: For the reasons that `check_batch` lists.
        """
        check_batch(inputs if not self._splits else split_soft_target(inputs), self._groups, self._tasks)
        self.checked = True

    def update(self, **inputs: Any) -> None:
        """Add a batch; the first one is checked.

        Args:
            **inputs: What the metrics accept, by name: `preds`, `target`, `indexes`. Other names are ignored.

        Raises:
            ValueError: If the metrics would misread the first batch.
        """
        if not self._has_begun:
            if not self.checked:
                self.check(**inputs)
            self._to(next((value.device for value in inputs.values() if isinstance(value, Tensor)), None))
            self._has_begun = True
        if self._splits:
            inputs = split_soft_target(inputs)
        self.updates += 1
        if self._immediate:
            with outside_inference_mode():
                for group in self._immediate:
                    group.update({name: clone_tensors(inputs[name]) for name in group.accepted_inputs & inputs.keys()})
        if self._buffered:
            self._buffer.add(inputs)

    def _update_buffered(self, batch: Mapping[str, Any]) -> None:
        with outside_inference_mode():
            preds = batch.get("preds") if self._counts_invalid else None
            if isinstance(preds, Tensor) and preds.is_floating_point():
                invalid = preds.isnan()
                if self._needs_probabilities:
                    invalid |= (preds < 0) | (preds > 1)
                self._num_invalid = self._num_invalid + invalid.sum()
            for group in self._buffered:
                group.update(batch)

    def num_invalid(self) -> Tensor | int:
        """Return how many predictions or targets were invalid: NaN, not probabilities, or classes out of range."""
        self._buffer.flush()
        return sum((group.num_invalid() for group in self._groups), start=self._num_invalid)

    @property
    def ordered_keys(self) -> list[str]:
        """The keys of metrics whose value depends on the order of the samples, or on which of them are in one batch."""
        return [entry.key for entry in self._entries.values() if metric_table.depends_on_order(entry.metric)]

    def compute(self) -> dict[str, Tensor]:
        """Compute the metrics of all data so far.

        Returns:
            Name -> value, a tensor without dimensions, on the device of the data. The name is that of the metric, with
            `_<element>` for the elements of a vector and `/<key>` for those of a dict. All values are NaN if some
            predictions or targets were invalid (`num_invalid`).

        Raises:
            ValueError: If two values have the same name, or one name is a folder of another.
        """
        return {name: value for name, value in self.compute_all().items() if metric_table.is_number(value)}

    def compute_all(self) -> dict[str, Any]:
        """Compute the metrics, including those whose value is not a number, such as a confusion matrix or a curve."""
        # added to each number: it makes all of them NaN without a read from the device
        nan_or_zero = torch.where(torch.as_tensor(self.num_invalid()) > 0, torch.nan, 0.0)
        values: list[tuple[str, Any]] = []
        with outside_inference_mode():
            for group in self._groups:
                group.set_member_states()
            for name, entry in self._entries.items():
                values += metric_table.named_values(entry, self._metrics[name], self._metrics[name].compute())
            metric_table.refuse_name_conflict(name for name, _ in values)
            return {
                name: value + nan_or_zero.to(value.device, value.dtype)
                if metric_table.is_number(value) and value.is_floating_point()
                else value
                for name, value in values
            }

    def confusion_matrix(self) -> Tensor | None:
        """Return the first confusion matrix that the metrics share, (C, C) or (L, 2, 2), on the CPU; or None."""
        self._buffer.flush()
        groups = (group for group in self._groups if isinstance(group, metric_groups.ConfusionMatrixGroup))
        return next((group.matrix().cpu() for group in groups), None)

    def score_histogram(self) -> Tensor | None:
        """Return the histograms of scores of shape (K, 2, bins), on the CPU, or None if none are kept."""
        self._buffer.flush()
        counts = None if self._histogram is None else self._histogram.state()
        return None if counts is None else counts.cpu()

    def reliability(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return confidence, accuracy and share of the rows of each bin of a calibration error, or None."""
        metric = next((metric for metric in self._metrics.values() if isinstance(metric, CalibrationError)), None)
        return None if metric is None or not self.updates else metric.reliability()

    @property
    def task(self) -> metric_table.Task | None:
        """The first classification among the metrics' tasks."""
        kinds = ("binary", "multiclass", "multilabel")
        return next((task for task in self._tasks.values() if task is not None and task.kind in kinds), None)

    def reset(self) -> None:
        """Drop all data so far."""
        self.load([])

    def flush(self) -> None:
        """Count the batches that wait."""
        self._buffer.flush()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all data so far, as tensors and plain values on the CPU.

        Pending batches stay pending: which of them are added up together decides the last bits of a sum, which must not
        depend on when the state is saved.
        """
        groups = [group.state() for group in self._groups]
        # "misfits" is the name of the invalid values in checkpoints
        counts = {"updates": self.updates, "misfits": self._num_invalid}
        state = {**counts, "groups": groups, "waiting": self._buffer.waiting()}
        return tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().clone(), state)  # type: ignore[no-any-return]

    def load(
        self, states: Sequence[Mapping[str, Any]], device: torch.device | str | None = None, samples: Sequence[int] = ()
    ) -> None:
        """Replace the state by the merged states of several parts of the data, such as those of all ranks.

        Args:
            states: What `state_dict()` returned; those without updates are ignored.
            device: Where the data will be.
            samples: The number of samples of each state, if ranks took turns in the dataset: equal scores of a ranking
                are then compared in its order.

        Raises:
            ValueError: If they belong to other metrics.
        """
        self._buffer.clear()
        seen = [state for state in states if state["updates"]]
        samples = [count for count, state in zip(samples, states, strict=False) if state["updates"]]
        if any(len(state["groups"]) != len(self._groups) for state in seen):
            raise ValueError("The state belongs to other metrics: use the metrics that it was saved with.")
        self._to(device)
        with outside_inference_mode():
            seen = [clone_tensors(state, device) for state in seen]
            for position, group in enumerate(self._groups):
                group.load([state["groups"][position] for state in seen], samples)
        self._num_invalid = sum(state["misfits"] for state in seen)
        self.updates = sum(state["updates"] for state in seen)
        for state in seen:
            if state.get("waiting"):
                self._buffer.add(state["waiting"])

    def _to(self, device: Any) -> None:
        if device is not None:
            with outside_inference_mode():
                for metric in self._metrics.values():
                    metric.to(device)


def group_metrics(metrics: Mapping[metric_groups.MemberKey, Metric]) -> list[metric_groups.MetricGroup]:
    """Put copies of metrics, reset, into groups that share one statistic each."""
    members_by_key: dict[Any, dict[metric_groups.MemberKey, Metric]] = {}
    for name, metric in metrics.items():
        member = copy.deepcopy(metric)
        member.reset()
        sharing_key = metric_table.state_sharing_key(metric)
        members_by_key.setdefault(("alone", name) if sharing_key is None else sharing_key, {})[name] = member
    return [_GROUPS.get(key[0], SharedStateGroup)(members) for key, members in members_by_key.items()]


class BatchBuffer:
    """Batches that wait to be counted together, at most 4 MiB of them.

    Each batch is copied, because the next step may overwrite the outputs of this one (CUDA graphs, buffers).

    Args:
        update: Is called with the concatenated batches: name -> value.
        accepted_inputs: The names that `update` accepts; others are ignored.
        clone: Whether `update` may keep or change its inputs.
    """

    def __init__(
        self, update: Callable[[Mapping[str, Any]], None], accepted_inputs: Collection[str], *, clone: bool
    ) -> None:
        self._update = update
        self._names = sorted(accepted_inputs)
        self._clone = clone
        self.clear()

    def clear(self) -> None:
        """Drop the batches that wait."""
        self._pending: list[dict[str, Tensor]] = []
        self._num_rows = self._num_bytes = 0  # of the batches that wait
        self._layout = _Layout([])

    def waiting(self) -> dict[str, Tensor]:
        """Return the batches that wait, concatenated; `add` lets them wait in another buffer."""
        names = self._pending[0] if self._pending else ()
        with outside_inference_mode():
            return {name: torch.cat([batch[name] for batch in self._pending]) for name in names}

    def add(self, inputs: Mapping[str, Any]) -> None:
        """Copy a batch; count those that wait where there are enough of them, or where this one differs from them."""
        batch = {name: inputs[name] for name in self._names if name in inputs}
        try:
            shapes = [(name, value.shape, value.dtype) for name, value in batch.items()]
        except AttributeError:  # a number, or an object
            shapes = []
        if shapes != self._layout.shapes:
            layout = _Layout(shapes)
            if layout.of_rows != self._layout.of_rows:  # an optional argument may come and go
                self.flush()
            self._layout = layout
        if not self._layout.num_bytes or self._layout.num_bytes > _MAX_BYTES:
            self.flush()
            with outside_inference_mode():
                own = clone_tensors if self._clone else detach_tensors
                self._update({name: own(value) for name, value in batch.items()})
            return
        self._pending.append(
            {name: value.detach().clone() if value.requires_grad else value.clone() for name, value in batch.items()}
        )
        self._num_rows += self._layout.num_rows
        self._num_bytes += self._layout.num_bytes
        if self._num_rows >= _MAX_ROWS or self._num_bytes >= _MAX_BYTES:
            self.flush()

    def flush(self) -> None:
        """Count the batches that wait."""
        if self._pending:
            batch = self.waiting()
            self._pending, self._num_rows, self._num_bytes = [], 0, 0
            self._update(batch)


class _Layout:
    """The shapes and the size of batches that follow one another.

    Args:
        shapes: Name, shape and type of each tensor; empty if something is no tensor.

    Attributes:
        of_rows: The same for single rows: batches of which it is equal can be concatenated.
        num_rows: The number of rows.
        num_bytes: The number of bytes; 0 if not all tensors have rows.
    """

    def __init__(self, shapes: list[tuple[str, torch.Size, torch.dtype]]) -> None:
        self.shapes = shapes
        self.of_rows = [(name, shape[1:], dtype) for name, shape, dtype in shapes if len(shape)]
        have_rows = len(self.of_rows) == len(shapes) > 0
        self.num_rows = shapes[0][1][0] if have_rows else 0
        self.num_bytes = sum(shape.numel() * dtype.itemsize for _, shape, dtype in shapes) if have_rows else 0
