"""The keys under which values will be logged, before there is data, and the check of those that `best` asks for."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_tricks._shared.checks import check_choice, did_you_mean
from lightning_tricks._shared.text import list_names
from lightning_tricks.metrics.core.metric_properties import Task, task_of
from lightning_tricks.metrics.core.metric_table import (
    MetricEntry,
    find_name_conflict,
    metric_entries,
    name_conflict_message,
)
from lightning_tricks.metrics.core.suite import MetricSuite

STAGES = ("train", "val", "test")
_MAX_SHOWN = 20
_MAX_CLASSES = 512  # above which no confusion matrix is made to find names


def check_prefix(prefix: Any) -> None:
    """Raise an error for a prefix that would make ambiguous keys."""
    if prefix is None:
        return
    if not isinstance(prefix, str):
        raise TypeError(f"prefix must be a string such as 'ema', or None, got {prefix!r} ({type(prefix).__name__}).")
    if not prefix or "" in prefix.split("/") or prefix != prefix.strip():
        raise ValueError(f"prefix must be a name such as 'ema', which logs 'ema/val/acc', got {prefix!r}.")
    if prefix.split("/")[0] in STAGES:
        raise ValueError(
            f"prefix must not begin with a stage, got {prefix!r}, which would log '{prefix}/val/acc'. Choose "
            "another name."
        )


@dataclass(frozen=True)
class ExpectedNames:
    """The names of the values of some metrics.

    Attributes:
        known: The names that are certain.
        undetermined: The keys of metrics whose values only data can show: a number of that name, or several whose
            names start with it.
    """

    known: tuple[str, ...]
    undetermined: tuple[str, ...]

    def may_contain(self, name: str) -> bool:
        """Whether a value of that name is certain or possible."""
        return name in self.known or any(
            name == root or name.startswith((f"{root}_", f"{root}/")) for root in self.undetermined
        )


@dataclass(frozen=True)
class LoggedKeys:
    """The keys of the values of several stages.

    Attributes:
        names: The names of the values.
        prefix: The first part of each key, or None.
        stages: The measured ones of "train", "val" and "test".
    """

    names: ExpectedNames
    prefix: str | None
    stages: Sequence[str]

    def key(self, folder: str, name: str) -> str:
        """Return the key of a value, where `folder` is the stage, with several loaders "<stage>/<name or number>"."""
        return "/".join(part for part in (self.prefix, folder, name) if part is not None)

    def expected(self, stage: str, loaders: Sequence[str] = ("",)) -> set[str]:
        """Return the keys that a stage is certain to log, except that of its loss, given the names of its loaders."""
        return {self.key(folder, name) for folder in folders_of(stage, loaders) for name in self.names.known}

    def check_best(self, best: Mapping[str, str]) -> None:
        """Raise an error for keys that no stage of a fit logs.

        Raises:
            ValueError: If there is such a key; the message proposes the nearest one.
        """
        for key, mode in best.items():
            check_choice(f"best[{key!r}]", mode, ("min", "max"))
            stage, name = self._split(key)
            if stage == "test" and stage in self.stages:
                raise ValueError(f"best has the key {key!r}, but a fit does not test: use a key of train or val.")
            if stage not in self.stages:
                forgotten = self.prefix is not None and self._may_log(
                    *LoggedKeys(self.names, None, self.stages)._split(key)
                )
                starts = " or ".join(self.key(stage, "") for stage in self.stages if stage != "test")
                meant = f" Did you mean {self.key(key, '')[:-1]!r}?" if forgotten else ""
                rule = f"a key must start with {starts}" if starts else "stages holds neither train nor val"
                raise ValueError(f"best has the key {key!r}, but {rule}.{meant}")
            if not self._may_log(stage, name):
                raise ValueError(f"best has the key {key!r}, {self.describe_alternatives(key, stage)}")

    def check_loaders(self, best: Iterable[str], stage: str, loaders: Sequence[str]) -> None:
        """Raise an error for keys of `best` without the name of a loader if there are several, or with a wrong name.

        Raises:
            ValueError: If there is such a key; the message lists the right ones.
        """
        for key in best:
            of_stage, name = self._split(key)
            loader, _, rest = name.partition("/")
            if of_stage != stage or not loaders:
                continue
            names_loader = not self._is_value_name(name)
            if names_loader != (len(loaders) > 1) or (names_loader and loader not in loaders):
                rest = rest if names_loader else name
                there = (self.key(folder, rest) for folder in folders_of(stage, loaders))
                raise ValueError(
                    f"best has the key {key!r}, but {stage} has {len(loaders)} loader(s): use one of "
                    f"{list_names(there, _MAX_SHOWN)}."
                )

    def keys_of_stage(self, best: Iterable[str], stage: str) -> list[str]:
        """Return the keys of `best` that belong to a stage."""
        return [key for key in best if self._split(key)[0] == stage]

    def describe_alternatives(self, key: str, stage: str, there: Iterable[str] | None = None) -> str:
        """Return the end of an error message: which keys exist instead of `key`."""
        listed = [*self.names.known, *self.names.undetermined, "loss"]
        keys = list(dict.fromkeys(self.key(stage, name) for name in listed)) if there is None else list(there)
        named = list_names(keys, _MAX_SHOWN) if keys else "not logged at all"
        return f"but the keys are {named}.{did_you_mean(key, keys)}"

    def _split(self, key: str) -> tuple[str, str]:
        """Return stage and name of a key; the stage is empty if the prefix is missing."""
        if self.prefix is not None:
            if not key.startswith(f"{self.prefix}/"):
                return "", key
            key = key.removeprefix(f"{self.prefix}/")
        stage, _, name = key.partition("/")
        return stage, name

    def _may_log(self, stage: str, name: str) -> bool:
        rest = name.partition("/")[2]  # after the name of a loader
        return stage in self.stages and (self._is_value_name(name) or self._is_value_name(rest))

    def _is_value_name(self, name: str) -> bool:
        return name == "loss" or self.names.may_contain(name)


def folders_of(stage: str, loaders: Sequence[str]) -> list[str]:
    """Return the first part of the keys of each loader of a stage."""
    return [stage] if len(loaders) == 1 else [f"{stage}/{name}" for name in loaders]


_STAGE_WORDS = {
    "train": {"train", "training"},
    "val": {"val", "valid", "validation", "eval", "dev"},
    "test": {"test", "testing"},
}
_OTHER_WORDS = {"step", "epoch", "dataloader", "idx", "total", "mean", "avg", "metrics", "ptl"}  # of any loss


def is_loss_of(stage: str, key: str) -> bool:
    """Whether a key is that of the loss of a stage, however it is spelled.

    Examples:
        >>> is_loss_of("val", "valid_loss/dataloader_idx_0"), is_loss_of("val", "val_box_loss")
        (True, False)
        >>> is_loss_of("val", "valLoss"), is_loss_of("val", "metrics/val_total_loss")
        (True, True)
    """
    words = {word.lower() for word in re.findall("[A-Z]?[a-z]+|[A-Z]+", key)} - _OTHER_WORDS
    return "loss" in words and words <= {"loss", *_STAGE_WORDS[stage]}


def expected_names(metrics: Any, class_names: Sequence[str] | None = None) -> ExpectedNames:
    """Return the names of the values of metrics, which are computed for four made-up samples.

    Args:
        metrics: As for `MetricSuite`.
        class_names: As for `MetricSuite`.

    Raises:
        TypeError: As `MetricSuite` does.
        ValueError: As `MetricSuite` does, and if two names are equal, or one is a folder of the other.
    """
    known: list[str] = []
    undetermined: list[str] = []
    for entry in metric_entries(metrics, class_names):
        if not entry.is_per_class:  # its values come with the metric of the same key
            found = _names_for_samples(entry)
            known += found or []
            undetermined += [entry.key] if found is None else []
    conflict = find_name_conflict(known)
    if conflict is not None:
        raise ValueError(name_conflict_message(*conflict))
    return ExpectedNames(tuple(known), tuple(undetermined))


def _names_for_samples(entry: MetricEntry) -> list[str] | None:
    """Return the names of the numbers that a metric computes for some samples, or None if they cannot be computed."""
    module = f"{type(entry.metric).__module__}."
    if not module.startswith(("torchmetrics.", "lightning_tricks.")):
        return None  # a custom metric may have side effects
    task = task_of(entry.metric)
    inputs = None if task is None else _make_samples(task, entry.metric)
    if inputs is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            suite = MetricSuite({entry.key: entry.metric}, entry.element_names or None)
            suite.update(**inputs)
            return list(suite.compute())
        except Exception:  # the samples may be invalid for the metric
            return None


def _make_samples(task: Task, metric: Any) -> dict[str, Tensor] | None:
    rows = torch.arange(4)
    classes = task.classes or 4  # where a metric does not say, any number will do
    if classes > _MAX_CLASSES or getattr(metric, "multioutput", "") == "raw_values":
        return None
    if task.kind in ("binary", "ood"):
        return {"preds": torch.tensor([0.1, 0.8, 0.6, 0.3]), "target": rows % 2}
    if task.kind == "multiclass":
        return {"preds": torch.eye(classes)[rows % classes], "target": rows % classes}
    if task.kind == "multilabel":
        target = (rows[:, None] + torch.arange(classes)) % 2
        return {"preds": 0.2 + 0.5 * target, "target": target}
    if task.kind == "retrieval":
        return {"preds": torch.tensor([0.1, 0.8, 0.6, 0.3]), "target": rows % 2, "indexes": rows // 2}
    outputs = getattr(metric, "num_outputs", 1)
    values = torch.tensor([0.5, 1.0, 2.0, 4.0])
    values = values[:, None].repeat(1, outputs) if outputs > 1 else values
    return {"preds": values, "target": values.flip(0)}
