"""The keys under which values are logged; errors and warnings about them and about the data.

They are about keys that others log as well, keys of `best` that no fit logs, loaders without batches, and steps without
inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchmetrics import Metric

from lightning_tricks._lightning_compat.flavor import (
    LightningModule,
    MisconfigurationException,
    Trainer,
    rank_zero_warn,
)
from lightning_tricks._lightning_compat.loaders import empty_train_loaders, evaluation_loader_names
from lightning_tricks._shared.checks import check_choice, did_you_mean
from lightning_tricks._shared.text import list_names
from lightning_tricks.metrics.core.history import History
from lightning_tricks.metrics.core.metric_table import metric_entries, names_of_values, refuse_name_conflict
from lightning_tricks.metrics.core.suite import MetricSuite

STAGES = ("train", "val", "test")
_MOST_LISTED = 20  # keys in an error
_MAX_SHOWN = 5  # keys in a warning


class Collisions:
    """Warns of keys that others log as well, of each once.

    What others log under such a key stands in the log: a value of the monitor is left out where they were first, and
    they overwrite it where they come later.

    Args:
        name: The name under which the monitor logs.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._own: set[str] = set()
        self._logged: set[str] = set()  # those of them that were not left to others
        self._warned: set[str] = set()

    def warn(self, pl_module: LightningModule, own: Collection[str], others: Mapping[str, str]) -> None:
        """Warn of keys of the monitor that others have logged.

        Args:
            pl_module: The module.
            own: The keys that the monitor is about to log; empty where it has logged already.
            others: What others have logged, before or after that: key -> hook, or source.
        """
        self._own.update(own)
        self._logged.update(key for key in own if key not in others)
        new = sorted((self._own & others.keys()) - self._warned)
        self._warned.update(new)
        for hook in dict.fromkeys(others[key] for key in new):
            keys = list_names((repr(key) for key in new if others[key] == hook), _MAX_SHOWN)
            if hook in STEPS.values():
                other = f"{type(pl_module).__name__}.{hook}"
            elif is_hook(hook):
                other = f"{hook} of {type(pl_module).__name__} or of another callback"
            else:  # the name of another monitor
                other = hook
            rank_zero_warn(
                f"{self._name} and {other} both log {keys}. Loggers and callbacks get the values of {other}; those of "
                "the monitor are in its results, its history and its table. Rename one of the values, leave out the "
                "stage (stages=...), or give the monitor another prefix, such as prefix='monitor'."
            )

    def check_ranks(self, ranks: Sequence[Mapping[str, str]]) -> None:
        """Raise a MetricsError for a key that only some ranks have logged after the monitor, which all have logged."""
        for key in sorted(self._logged):
            hooks = [of_rank[key] for of_rank in ranks if key in of_rank]
            if 0 < len(hooks) < len(ranks):
                raise MetricsError(
                    f"{self._name}: {hooks[0]} logged {key!r} on {len(hooks)} of {len(ranks)} ranks, over the value of "
                    "the monitor, so that callbacks would see another value on each rank. Log it on all ranks, or "
                    "rename it."
                )


def is_hook(name: str) -> bool:
    """Whether what has logged a value is a hook of Lightning's; all others are named by the class of the callback."""
    return hasattr(LightningModule, name)


def refuse_unordered(monitor: str, stage: str, keys: Iterable[str]) -> None:
    """Raise a MetricsError for metrics whose value depends on the order of the samples, which ranks do not know."""
    for key in keys:
        raise MetricsError(
            f"{monitor}: the value of {key!r} in {stage} depends on the order of the samples, and each rank has "
            "other batches. Measure it on one device, or choose a metric that averages (reduction='mean', "
            "multidim_average='global', MeanMetric)."
        )


def warn_of_no_validation(trainer: Trainer, monitor: str, best_keys: Sequence[str]) -> None:
    """Warn of keys of `best` that are of validation in a fit that does not validate, as a short one that is a trial."""
    every, epochs = trainer.check_val_every_n_epoch, trainer.max_epochs
    too_seldom = every is not None and epochs is not None and 0 < epochs < every
    if best_keys and (too_seldom or not trainer.enable_validation):
        rank_zero_warn(
            f"{monitor}: best has the key {best_keys[0]!r}, but this fit does not validate, so it has no value: "
            "give it validation data and a validation_step, let it validate within max_epochs, or use a key of train."
        )


STEPS = {"train": "training_step", "val": "validation_step", "test": "test_step"}


class MetricsError(MisconfigurationException, ValueError):
    """A step returned something that cannot be measured, a loader has no batches, or a key is invalid."""


def num_batches(trainer: Trainer, stage: str) -> list[int | float]:
    """Return the number of batches of each dataloader of a stage."""
    if stage == "train":
        return [trainer.num_training_batches]
    counts = trainer.num_val_batches if stage == "val" else trainer.num_test_batches
    return list(counts) if isinstance(counts, Sequence) else [counts]


def loader_names(trainer: Trainer, stage: str) -> list[str]:
    """Return the names of a stage's loaders: those of a dict, or else their indices."""
    indices = list(map(str, range(len(num_batches(trainer, stage)))))
    names = [] if stage == "train" else evaluation_loader_names(trainer)
    return names if len(names) == len(indices) else indices


def check_not_empty(trainer: Trainer, function: str, stages: Sequence[str], monitor: str) -> None:
    """Refuse dataloaders without batches, unless the Trainer was told to take none (`limit_val_batches=0`).

    Args:
        trainer: The Trainer.
        function: The function of the Trainer that runs: "fit", "validate", "test" or "predict".
        stages: The stages that are measured.
        monitor: The name of the monitor, for the error.

    Raises:
        MetricsError: If a dataloader of one of the stages has no batches.
    """
    has_data = {
        "train": function == "fit" and trainer.limit_train_batches != 0,
        "val": function in ("fit", "validate") and trainer.limit_val_batches != 0,
        "test": function == "test" and trainer.limit_test_batches != 0,
    }
    for stage in (stage for stage in stages if has_data[stage]):
        empty = [index for index, count in enumerate(num_batches(trainer, stage)) if count == 0]
        for dataloader_idx in empty or (empty_train_loaders(trainer) if stage == "train" else ()):
            raise MetricsError(
                f"{monitor}: loader {dataloader_idx} of {stage} has no batches, so there is nothing to measure: "
                "give it data (or a smaller batch size if drop_last drops the only batch), or leave the stage out "
                "of stages."
            )


class UnmeasuredBatches:
    """Warns of batches that are not measured, once for each stage.

    Args:
        monitor: The name of the monitor.
        stages: The stages that are measured.
        has_transform: Whether there is an `output_transform`.
    """

    def __init__(self, monitor: str, stages: Sequence[str], *, has_transform: bool) -> None:
        self._monitor = monitor
        self._stages = stages
        self._has_transform = has_transform
        self._warned, self._warned_in_part = set[str](), set[str]()  # stages

    def report_batch(
        self, suite: MetricSuite, inputs: Any, stage: str, batch_idx: int, best_keys: Sequence[str]
    ) -> None:
        """Warn of a batch whose step did not return all that the metrics need.

        Args:
            suite: The metrics.
            inputs: The return value of the step, or of `output_transform`.
            stage: "train", "val" or "test".
            batch_idx: The index of the batch.
            best_keys: The keys of `best` that are of this stage.

        Raises:
            MetricsError: If the first batch has something else to measure, and `best` has a key of this stage.
        """
        if stage in self._warned:
            return
        self._warned.add(stage)
        source = "output_transform()" if self._has_transform else STEPS[stage]
        returned = _describe(inputs)
        required = ", ".join(sorted(suite.required_inputs))
        others = [name for name in self._stages if name != stage]
        message = (
            f"{self._monitor}: {source} returned {returned} in batch {batch_idx} of {stage}, but the metrics need "
            f"{required}. Return a dict with them (from training_step together with the loss), give "
            f"output_transform=(outputs, batch, stage) -> dict, or leave {stage!r} out: stages={others!r}."
        )
        keys = [key for key in best_keys if not key.endswith("/loss")]
        if returned != "nothing" and not suite.checked and keys:
            raise MetricsError(f"{message} This is an error because best has the key {keys[0]!r}.")
        rank_zero_warn(f"{message} Until then, only the loss of such batches is averaged.")

    def report_epoch(self, stage: str, num_unmeasured: int, num_measured: int) -> None:
        """Warn of how many batches of an epoch were not measured, if others were."""
        if num_unmeasured and num_measured and stage not in self._warned_in_part:
            self._warned_in_part.add(stage)
            rank_zero_warn(
                f"{self._monitor}: {num_unmeasured} of {num_unmeasured + num_measured} batches of {stage} returned "
                "nothing to measure, so the metrics do not include them."
            )


def _describe(inputs: Any) -> str:
    if inputs is None or (isinstance(inputs, Mapping) and not inputs):
        return "nothing"
    return f"only {', '.join(map(str, inputs))}" if isinstance(inputs, Mapping) else f"a {type(inputs).__name__}"


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
                raise ValueError(f"best has the key {key!r}, but a fit logs only {_listed(key, there)}")

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
                there = list_names((start + name for start in starts), _MOST_LISTED)
                raise ValueError(f"best has the key {key!r}, but {stage} has {len(loaders)} loader(s): use {there}.")

    def check_logged(self, stage: str, logged: Collection[str]) -> None:
        """Raise an error for a key that was not logged at the end of its stage, if that was not known before.

        Raises:
            ValueError: If there is such a key; the message lists those that were logged.
        """
        there = [key for key in logged if key.startswith(self._keys.key(stage, ""))]
        for key in self.of_stage(stage):
            if key not in there:
                raise ValueError(f"best has the key {key!r}, but the fit logged only {_listed(key, there)}")


def _listed(key: str, keys: Sequence[str]) -> str:
    return f"{list_names(dict.fromkeys(keys), _MOST_LISTED)}.{did_you_mean(key, keys)}"


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
