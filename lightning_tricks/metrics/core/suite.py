"""`MetricSuite`: several metrics over the same data, updated at almost no cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_tricks._shared.tensors import to_double
from lightning_tricks.metrics.core.input_checks import check_batch
from lightning_tricks.metrics.core.metric_properties import Task, task_of
from lightning_tricks.metrics.core.metric_table import MetricEntry, metric_entries
from lightning_tricks.metrics.core.shared_states import ConfusionMatrixGroup, MetricGroup, ScoreHistogram, group_metrics
from lightning_tricks.metrics.core.value_names import find_name_conflict, name_conflict_message

_MAX_ROWS = 4096
_MAX_BYTES = 4 * 2**20


class MetricSuite:
    """Metrics over the same predictions and targets.

    Metrics of one declared family share one statistic: accuracy, precision, recall, F1, specificity, kappa, MCC and
    intersection over union are computed from one confusion matrix, curves from one list of scores, rankings from one
    list of rows. Where it makes no difference how the data is cut, batches are copied and counted together, at most
    4 MiB of them; nothing is read from the device but from the first batch, which is checked. The metrics that were
    given stay as they are.

    Args:
        metrics: A Metric, a MetricCollection, a dict of both, or the plain values of a preset,
            `{"task": "multiclass", "num_classes": 10}`.
        class_names: Names of the classes, labels or outputs. With them, averages over classes come for each class, too.
        curves: Whether to keep histograms of the scores, for pictures.

    Raises:
        TypeError: If `metrics` is none of these.
        ValueError: If there is no metric, or there are more or fewer classes than names.

    Example:
        >>> import torch
        >>> suite = MetricSuite({"task": "multiclass", "num_classes": 2}, class_names=["cat", "dog"])
        >>> suite.update(preds=torch.tensor([[0.9, 0.1], [0.8, 0.2]]), target=torch.tensor([0, 1]))
        >>> values = suite.compute()
        >>> values["acc"].item(), values["recall_cat"].item(), values["recall_dog"].item()
        (0.5, 1.0, 0.0)
    """

    def __init__(self, metrics: Any, class_names: Sequence[str] | None = None, *, curves: bool = False) -> None:
        self._entries = {entry.key + "/*" * entry.is_per_class: entry for entry in metric_entries(metrics, class_names)}
        with _ordinary_tensors():  # states that a validation makes could be changed in inference mode alone
            groups: list[MetricGroup] = group_metrics({name: entry.metric for name, entry in self._entries.items()})
        self._metrics = {name: metric for group in groups for name, metric in group.members.items()}
        self._tasks: dict[str, Task | None] = {
            entry.key: task_of(entry.metric) for entry in self._entries.values() if not entry.is_per_class
        }
        self._scores = ScoreHistogram(task) if curves and (task := self.task) is not None else None
        groups += [self._scores] if self._scores is not None else []
        self._groups = groups
        self.needed: frozenset[str] = frozenset().union(*(group.needed for group in groups))
        self._later = [group for group in groups if group.can_concat_batches]
        self._taken = frozenset().union(*(group.taken for group in self._later))
        self._at_once = [group for group in groups if not group.can_concat_batches]
        self._probabilities = any(task is not None and task.probabilities for task in self._tasks.values())
        self._guards = not all(
            isinstance(group, ConfusionMatrixGroup) for group in self._later
        )  # those see it themselves
        self._copies = not all(
            isinstance(group, ConfusionMatrixGroup | ScoreHistogram) for group in self._later
        )  # others may keep a batch
        self._begun = False
        self.checked = False
        self._names: list[str] = []
        self._given: frozenset[str] = frozenset()
        self.updates = 0
        self._forget()

    def _forget(self) -> None:
        self._pending: list[list[Tensor]] = []
        self._signature: list[Any] = []
        self._rows = self._rows_of_one = self._size = 0
        self._num_invalid: Tensor | int = 0

    def check(self, **inputs: Any) -> None:
        """Refuse a batch that the metrics would misunderstand; it reads from the device, and counts nothing.

        Raises:
            ValueError: Of the first of `check_batch`'s reasons that there is.
        """
        check_batch(inputs, self._groups, self._tasks)
        self.checked = True

    def update(self, **inputs: Any) -> None:
        """Add a batch; the first one is checked.

        Args:
            **inputs: What the metrics take, by name: `preds`, `target`, `indexes`. Others are passed over.

        Raises:
            ValueError: If the first batch is one that the metrics would misunderstand.
        """
        if not self._begun:
            self._begin(inputs)
        self.updates += 1
        if self._at_once:
            with _ordinary_tensors():
                for group in self._at_once:
                    group.update({name: _own(inputs[name]) for name in group.taken & inputs.keys()})
        if self._later:
            if self._taken & inputs.keys() != self._given:
                self._name(inputs)
            self._keep([inputs[name] for name in self._names])

    def _begin(self, inputs: Mapping[str, Any]) -> None:
        if not self.checked:
            self.check(**inputs)
        self._to(next((value.device for value in inputs.values() if isinstance(value, Tensor)), None))
        self._begun = True

    def _name(self, inputs: Mapping[str, Any]) -> None:
        """Note which arguments there are from now on: one that need not be given may come and go."""
        self._flush()
        self._given = self._taken & inputs.keys()
        self._names = sorted(self._given)

    def _keep(self, batch: list[Any]) -> None:
        """Copy a batch for later: what a step returned may be overwritten by the next one (CUDA graphs, buffers)."""
        try:
            signature = [(value.shape, value.dtype) for value in batch]
        except AttributeError:  # a number, or an object
            signature = []
        if signature != self._signature:
            self._change(signature, batch)
        if not self._size or self._size > _MAX_BYTES:
            self._flush()
            with _ordinary_tensors():
                own = map(_own if self._copies else _detached, batch)
                self._count(dict(zip(self._names, own, strict=True)))
            return
        self._pending.append([value.detach().clone() if value.requires_grad else value.clone() for value in batch])
        self._rows += self._rows_of_one
        if self._rows >= _MAX_ROWS or len(self._pending) * self._size >= _MAX_BYTES:
            self._flush()

    def _change(self, signature: list[Any], batch: list[Any]) -> None:
        """Note what the batches look like from now on; those before them are counted where they look too different."""
        together = [(shape[1:], dtype) for shape, dtype in signature if len(shape)]
        if together != [(shape[1:], dtype) for shape, dtype in self._signature if len(shape)]:
            self._flush()
        self._signature = signature
        whole = len(together) == len(batch) > 0
        self._size = sum(value.numel() * value.element_size() for value in batch) if whole else 0
        self._rows_of_one = len(batch[0]) if whole else 0

    def _flush(self) -> None:
        if self._pending:
            columns = zip(*self._pending, strict=True)
            with _ordinary_tensors():
                batch = {name: torch.cat(column) for name, column in zip(self._names, columns, strict=True)}
            self._pending, self._rows = [], 0
            self._count(batch)

    def _count(self, batch: Mapping[str, Any]) -> None:
        with _ordinary_tensors():
            preds = batch.get("preds") if self._guards else None
            if isinstance(preds, Tensor) and preds.is_floating_point():
                wrong = preds.isnan()
                if self._probabilities:
                    wrong |= (preds < 0) | (preds > 1)
                self._num_invalid = self._num_invalid + wrong.sum()
            for group in self._later:
                group.update(batch)

    def num_invalid(self) -> Tensor | int:
        """Return how many predictions or targets were none: NaN, no probabilities, classes out of range."""
        self._flush()
        found = self._num_invalid
        for group in self._groups:
            found = found + group.num_invalid()
        return found

    def compute(self) -> dict[str, Tensor]:
        """Compute the metrics of all data so far.

        Returns:
            Metric, or metric_part for the parts of a vector, or metric/part for those of a dict -> value, a tensor
            without dimensions, on the device of the data. All are NaN where some predictions or targets were none
            (`num_invalid`).

        Raises:
            ValueError: If two values have one name, or the name of one is a folder of the other's.
        """
        return {name: value for name, value in self.compute_all().items() if is_number(value)}

    def compute_all(self) -> dict[str, Any]:
        """Compute the metrics, those included whose value is no number, such as a confusion matrix or a curve."""
        num_invalid = self.num_invalid()
        broken = torch.where(torch.as_tensor(num_invalid) > 0, torch.nan, 0.0)
        values: dict[str, Any] = {}
        with _ordinary_tensors():
            for group in self._groups:
                group.finish()
            for name, entry in self._entries.items():
                named = _named(entry, self._metrics[name], self._metrics[name].compute())
                if twice := next((key for key, _ in named if key in values), None):
                    raise ValueError(name_conflict_message(twice, twice))
                values |= {
                    key: value + broken.to(value.device, value.dtype) if _is_real_number(value) else value
                    for key, value in named
                }
        if clash := find_name_conflict(values):
            raise ValueError(name_conflict_message(*clash))
        return values

    def confusion(self) -> Tensor | None:
        """Return the first confusion matrix that the metrics share, (C, C) or (L, 2, 2), on the CPU; or None."""
        self._flush()
        return next((group.matrix().cpu() for group in self._groups if isinstance(group, ConfusionMatrixGroup)), None)

    def scores(self) -> Tensor | None:
        """Return the histograms of scores of shape (K, 2, bins), on the CPU, or None where none are kept."""
        self._flush()
        counts = None if self._scores is None else self._scores.state()
        return None if counts is None else counts.cpu()

    @property
    def task(self) -> Task | None:
        """The first classification among the metrics' tasks."""
        kinds = ("binary", "multiclass", "multilabel")
        return next((task for task in self._tasks.values() if task is not None and task.kind in kinds), None)

    def reset(self) -> None:
        """Start anew."""
        self.load([])

    def state_dict(self) -> dict[str, Any]:
        """Return what was gathered so far, as tensors and plain values on the CPU."""
        self._flush()
        groups = [group.state() for group in self._groups]
        state = {"updates": self.updates, "misfits": self._num_invalid, "groups": groups}
        return tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().clone(), state)  # type: ignore[no-any-return]

    def load(self, states: Sequence[Mapping[str, Any]], device: torch.device | str | None = None) -> None:
        """Replace what was gathered so far by the states of several parts, such as ranks, merged.

        Args:
            states: Of `state_dict()`; those without updates do not count.
            device: Where the data will be.

        Raises:
            ValueError: If they are those of other metrics.
        """
        self._forget()
        seen = [state for state in states if state["updates"]]
        if any(len(state["groups"]) != len(self._groups) for state in seen):
            raise ValueError("The state is that of other metrics: give those that it was saved with.")
        if device is not None:
            self._to(device)
        with _ordinary_tensors():
            seen = [tree_map_only(Tensor, lambda tensor: _copied(tensor, device), state) for state in seen]
            for position, group in enumerate(self._groups):
                group.load([state["groups"][position] for state in seen])
        for state in seen:
            self._num_invalid = self._num_invalid + state["misfits"]
        self.updates = sum(state["updates"] for state in seen)

    def _to(self, device: Any) -> None:
        if device is not None:
            with _ordinary_tensors():
                for metric in self._metrics.values():
                    metric.to(device)


def is_number(value: Any) -> bool:
    """Whether a value is a tensor without dimensions."""
    return isinstance(value, Tensor) and value.ndim == 0


def _named(entry: MetricEntry, metric: Any, value: Any) -> list[tuple[str, Any]]:
    """Return the values of a metric by name: numbers, the parts of vectors and dicts, and what is neither."""
    key = entry.key
    if isinstance(value, Mapping):
        return [
            pair
            for part, inner in value.items()
            for pair in _named(MetricEntry(f"{key}/{part}", metric), metric, inner)
        ]
    if isinstance(value, int | float):
        value = torch.tensor(float(value))
    if isinstance(value, tuple | list) and value and all(is_number(part) for part in value):
        value = torch.stack([to_double(part) for part in value])
    if not isinstance(value, Tensor):
        return [] if value is None else [(key, value)]
    if value.ndim > 1 and value.numel() > 1:
        return [(key, value)]
    value = value if value.is_floating_point() else value.float()
    if value.numel() == 1:
        return [(key, value.reshape(()))]
    parts = (
        entry.element_names if len(entry.element_names) == len(value) else [str(number) for number in range(len(value))]
    )
    named = [(f"{key}_{part}", element) for part, element in zip(parts, value, strict=True)]
    outputs = getattr(metric, "num_outputs", 1) == len(value) or getattr(metric, "multioutput", "") == "raw_values"
    return [(key, value.mean()), *named] if outputs else named


def _is_real_number(value: Any) -> bool:
    return is_number(value) and bool(value.is_floating_point())


def _detached(value: Any) -> Any:
    return tree_map_only(Tensor, Tensor.detach, value)


def _own(value: Any) -> Any:
    """Copy what a metric may keep or write to: it is the step's, and of inference mode where that is on."""
    return tree_map_only(Tensor, _copied, value)


def _copied(tensor: Tensor, device: torch.device | str | None = None) -> Tensor:
    return tensor.detach().to(device, copy=True) if device is not None else tensor.detach().clone()


@contextmanager
def _ordinary_tensors() -> Iterator[None]:
    """Leave inference mode, whose tensors can be written to in no other, and record no gradients."""
    with torch.inference_mode(False), torch.no_grad():
        yield
