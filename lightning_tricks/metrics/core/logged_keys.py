"""The keys under which values will be logged, before there is data, and the check of those that `best` asks for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchmetrics import Metric

from lightning_tricks._shared.checks import check_choice, did_you_mean
from lightning_tricks._shared.text import list_names
from lightning_tricks.metrics.core.history import History
from lightning_tricks.metrics.core.metric_table import metric_entries, names_of_values, refuse_name_conflict

STAGES = ("train", "val", "test")
_MAX_SHOWN = 20


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
class LoggedKeys:
    """The keys of the values of several stages.

    Attributes:
        names: The names of the values, as far as they are known without data: the values of a metric may also have
            names that start with that of the metric.
        prefix: The first part of each key, or None.
        stages: The measured ones of "train", "val" and "test".
        unsure: Those of `names` of metrics that may have several values, which have longer names.
    """

    names: Sequence[str]
    prefix: str | None
    stages: Sequence[str]
    unsure: Collection[str] = ()

    def key(self, folder: str, name: str) -> str:
        """Return the key of a value, where `folder` is the stage, with several loaders "<stage>/<name or number>"."""
        return "/".join(part for part in (self.prefix, folder, name) if part is not None)

    def expected(self, stage: str, loaders: Sequence[str] = ("",)) -> set[str]:
        """Return the keys that a stage is sure to log, except that of its loss, given the names of its loaders."""
        names = [name for name in self.names if name not in self.unsure]
        return {self.key(folder, name) for folder in folders_of(stage, loaders) for name in names}

    def may_contain(self, name: str) -> bool:
        """Whether there may be a value of that name."""
        starts = tuple(f"{known}{separator}" for known in self.names for separator in "_/")
        return name in (*self.names, "loss") or name.startswith(starts)


class BestKeys:
    """The keys whose best value is kept.

    Args:
        keys: The keys that are logged.
        modes: Key -> "min" or "max".

    Raises:
        ValueError: If no fit logs a key, or a mode is neither "min" nor "max".
    """

    def __init__(self, keys: LoggedKeys, modes: Mapping[str, str]) -> None:
        self._keys, self._modes = keys, dict(modes)
        measured = [stage for stage in keys.stages if stage != "test"]  # by a fit
        for key, mode in modes.items():
            check_choice(f"best[{key!r}]", mode, ("min", "max"))
            stages = [stage for stage in measured if key.startswith(keys.key(stage, ""))]
            names = [key.removeprefix(keys.key(stage, "")) for stage in stages]
            names += [name.partition("/")[2] for name in names]  # after the name of a loader
            if not any(map(keys.may_contain, names)):
                there = [keys.key(stage, name) for stage in stages or measured for name in (*keys.names, "loss")]
                raise ValueError(f"best has the key {key!r}, and what a fit logs is {_listed(key, there)}")

    def values(self, history: History) -> dict[str, tuple[float, int]]:
        """Return the best value of each key, and the optimizer steps done by then."""
        start = "" if self._keys.prefix is None else f"{self._keys.prefix}/"
        found = history.best({key.removeprefix(start): mode for key, mode in self._modes.items()})
        return {start + key: value for key, value in found.items()}

    def of_stage(self, stage: str) -> list[str]:
        """Return the keys of a stage."""
        return [key for key in self._modes if key.startswith(self._keys.key(stage, ""))]

    def check_loaders(self, stage: str, loaders: Sequence[str]) -> None:
        """Raise an error for keys without the name of a loader if there are several, or with one that is not there.

        Raises:
            ValueError: If there is such a key; the message lists the right ones.
        """
        starts = [self._keys.key(folder, "") for folder in folders_of(stage, loaders)]
        for key in self.of_stage(stage):
            if not any(key.startswith(start) and self._keys.may_contain(key.removeprefix(start)) for start in starts):
                name = key.removeprefix(self._keys.key(stage, ""))
                name = name if self._keys.may_contain(name) else name.partition("/")[2]
                there = list_names((start + name for start in starts), _MAX_SHOWN)
                raise ValueError(f"best has the key {key!r}, but {stage} has {len(loaders)} loader(s): use {there}.")

    def check_logged(self, stage: str, logged: Collection[str]) -> None:
        """Raise an error for a key that was not logged at the end of its stage, where that was not known before.

        Raises:
            ValueError: If there is such a key; the message lists those that were logged.
        """
        there = [key for key in logged if key.startswith(self._keys.key(stage, ""))]
        for key in self.of_stage(stage):
            if key not in there:
                raise ValueError(f"best has the key {key!r}, and what was logged is {_listed(key, there)}")


def _listed(key: str, keys: Sequence[str]) -> str:
    return f"{list_names(dict.fromkeys(keys), _MAX_SHOWN)}.{did_you_mean(key, keys)}"


def folders_of(stage: str, loaders: Sequence[str]) -> list[str]:
    """Return the first part of the keys of each loader of a stage."""
    return [stage] if len(loaders) == 1 else [f"{stage}/{name}" for name in loaders]


def value_names(metrics: Any, class_names: Sequence[str] | None = None) -> list[str]:
    """Return the names of the values of metrics, and those that the names of further values begin with.

    Args:
        metrics: As for `MetricSuite`.
        class_names: As for `MetricSuite`.

    Raises:
        TypeError: As `MetricSuite` does.
        ValueError: As `MetricSuite` does, and if two names are equal, or one is a folder of the other.
    """
    names: list[str] = []
    for entry in metric_entries(metrics, class_names):
        of_classes = [f"{entry.key}_{name}" for name in entry.element_names]
        names += of_classes if entry.is_per_class else names_of_values(entry.metric) or [entry.key]
    refuse_name_conflict(names)
    return names


def unsure_names(metrics: Any) -> list[str]:
    """Return the names of metrics whose value need not be one number under that name: several, or a dict of one's own.

    Args:
        metrics: As for `MetricSuite`.
    """
    return [entry.key for entry in metric_entries(metrics) if not _is_one_number(entry.metric)]


def _is_one_number(metric: Metric) -> bool:
    of = type(metric).__module__
    is_known = of.startswith(("torchmetrics.", "lightning_tricks.")) and not of.startswith("torchmetrics.wrappers")
    choices = [getattr(metric, name, "") for name in ("average", "reduction", "multidim_average", "multioutput")]
    has_several = getattr(metric, "num_outputs", 1) > 1 or {None, "none", "samplewise", "raw_values"} & {*choices}
    return is_known and not has_several
