"""Errors and warnings of data and keys: loaders without batches, steps without inputs, keys that others log as well."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from lightning_tricks._lightning_compat.flavor import (
    LightningModule,
    MisconfigurationException,
    Trainer,
    rank_zero_warn,
)
from lightning_tricks._lightning_compat.loaders import empty_train_loaders, evaluation_loader_names
from lightning_tricks._shared.text import list_names
from lightning_tricks.metrics.core.suite import MetricSuite

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
            elif hook.islower():
                other = f"{hook} of {type(pl_module).__name__} or of another callback"
            else:  # the name of another monitor
                other = hook
            rank_zero_warn(
                f"{self._name} and {other} both log {keys}. Loggers and callbacks get the values of {other}; those of "
                "the monitor are in its results, its history and its table. Rename one of the values, leave out the "
                "stage (stages=...), or give the monitor another prefix, such as prefix='monitor'."
            )

    def check_ranks(self, ranks: Sequence[Mapping[str, str]]) -> None:
        """Raise a MetricsError for a key that some ranks have logged alone after the monitor, which all have logged."""
        for key in sorted(self._logged):
            hooks = [of_rank[key] for of_rank in ranks if key in of_rank]
            if 0 < len(hooks) < len(ranks):
                raise MetricsError(
                    f"{self._name}: {hooks[0]} logged {key!r} on {len(hooks)} of {len(ranks)} ranks, over the value of "
                    "the monitor, so that callbacks would see another value on each rank. Log it on all ranks, or "
                    "rename it."
                )


def merge_logged_keys(ranks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the keys that are logged on any of the ranks: key -> hook."""
    return {key: hook for of_rank in ranks for key, hook in of_rank.items()}


def refuse_unordered(monitor: str, stage: str, keys: Iterable[str]) -> None:
    """Raise a MetricsError for metrics whose value depends on the order of the samples, which ranks do not know."""
    for key in keys:
        raise MetricsError(
            f"{monitor}: the value of {key!r} in {stage} depends on the order of the samples, and several ranks have "
            "batches of their own. Measure it on one device, or choose a metric that averages (reduction='mean', "
            "multidim_average='global', MeanMetric)."
        )


def warn_of_no_validation(trainer: Trainer, monitor: str, best_keys: Sequence[str]) -> None:
    """Warn of keys of `best` that are of validation in a fit that does not validate, as a short one that is a trial."""
    every, epochs = trainer.check_val_every_n_epoch, trainer.max_epochs
    too_seldom = every is not None and epochs is not None and 0 < epochs < every
    if best_keys and (too_seldom or not trainer.enable_validation):
        rank_zero_warn(
            f"{monitor}: best has the key {best_keys[0]!r}, but this fit does not validate, so that it has no value: "
            "give it validation data and a validation_step, let it validate within max_epochs, or use a key of train."
        )


STEPS = {"train": "training_step", "val": "validation_step", "test": "test_step"}


class MetricsError(MisconfigurationException, ValueError):
    """A step returned something that cannot be measured, a loader has no batches, or a key is wrong."""


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
        self._warned: set[str] = set()

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
        if num_unmeasured and num_measured and f"{stage} in part" not in self._warned:
            self._warned.add(f"{stage} in part")
            rank_zero_warn(
                f"{self._monitor}: {num_unmeasured} of {num_unmeasured + num_measured} batches of {stage} returned "
                "nothing to measure, so the metrics do not include them."
            )


def _describe(inputs: Any) -> str:
    if inputs is None or (isinstance(inputs, Mapping) and not inputs):
        return "nothing"
    return f"{', '.join(map(str, inputs))} alone" if isinstance(inputs, Mapping) else f"a {type(inputs).__name__}"
