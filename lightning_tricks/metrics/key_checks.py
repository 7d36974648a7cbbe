"""Errors of data and keys: loaders without batches, steps without inputs, keys that others log or that no fit logs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from lightning_tricks._lightning_compat.flavor import (
    LightningModule,
    MisconfigurationException,
    Trainer,
    rank_zero_warn,
)
from lightning_tricks._lightning_compat.loaders import empty_train_loaders, evaluation_loader_names
from lightning_tricks._lightning_compat.logged_values import drop_reset_values, keys_logged_by_others
from lightning_tricks._shared.tensors import gather_objects
from lightning_tricks.metrics.core.history import History
from lightning_tricks.metrics.core.logged_keys import LoggedKeys
from lightning_tricks.metrics.core.metric_table import find_name_conflict
from lightning_tricks.metrics.core.suite import MetricSuite


class KeyConflicts:
    """Compares the keys of one run of a monitor with those that the module and other callbacks log.

    Args:
        name: The name under which the monitor logs.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._logged: dict[str, set[str]] = {}
        self._compared: set[str] = set()

    def logged_by_others(self, trainer: Trainer) -> dict[str, str]:
        """Return the keys that others have logged on this rank so far in the current stage: key -> hook."""
        return keys_logged_by_others(trainer, self.name)

    def compare_in_first_batch(
        self, trainer: Trainer, pl_module: LightningModule, stage: str, expected: set[str]
    ) -> None:
        """Compare keys with those that the module's step has logged.

        In an evaluation on several ranks, one may have no batch: there all compare when the evaluation ends.
        """
        if stage in self._compared:
            return
        self._compared.add(stage)
        if trainer.world_size == 1:
            self.refuse(pl_module, expected, self.logged_by_others(trainer))
        elif stage == "train":
            self.refuse(pl_module, expected, merge_logged_keys(gather_objects(self.logged_by_others(trainer))))

    def note_logged(self, trainer: Trainer, stage: str, keys: set[str]) -> None:
        """Remember the keys of the monitor at the end of a stage, to find out who logs the same after it."""
        drop_reset_values(trainer, self.name, keys)
        self._logged[stage] = self._logged.get(stage, set()) | keys

    def compare_afterwards(
        self, trainer: Trainer, pl_module: LightningModule, stage: str, expected: set[str] | None = None
    ) -> None:
        """Compare the keys that the monitor has logged, or will log, with those that others have logged after it."""
        own = self._logged.pop(stage, set()) if expected is None else expected
        if not own:
            return
        # a training epoch's values are reset before any hook comes; those of an evaluation are not yet
        others = keys_logged_by_others(trainer, self.name, include_reset=stage == "train")
        if trainer.world_size > 1:
            others = merge_logged_keys(gather_objects({key: hook for key, hook in others.items() if key in own}))
        self.refuse(pl_module, own, others)

    def refuse(self, pl_module: LightningModule, own: set[str], others: Mapping[str, str]) -> None:
        """Raise a MetricsError if others log one of the keys."""
        for key in sorted(own & others.keys()):
            hook, module = others[key], type(pl_module).__name__
            other = f"{module}.{hook}" if hook in STEPS.values() else f"{hook} of {module} or of another callback"
            other = hook if hook.startswith("MetricsMonitor") else other
            raise MetricsError(
                f"{self.name} and {other} both log {key!r}, and one value would overwrite the other: rename one of "
                f"the values, leave out the stage (stages=...), or give {self.name.partition('(')[0]} a prefix, such "
                "as prefix='monitor'."
            )


def merge_logged_keys(ranks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the keys that are logged on any of the ranks: key -> hook."""
    return {key: hook for of_rank in ranks for key, hook in of_rank.items()}


def refuse_same_keys(monitor: str, keys: LoggedKeys, other: str, other_keys: LoggedKeys) -> None:
    """Raise a MetricsError for two monitors that would log under the same keys."""
    for stage in {*keys.stages} & {*other_keys.stages}:
        conflict = find_name_conflict([*keys.expected(stage), *other_keys.expected(stage)])
        if keys.prefix == other_keys.prefix or conflict:
            key = conflict[0] if conflict else keys.key(stage, "loss")
            raise MetricsError(
                f"{monitor} and {other} would both log {key!r}: give one of them a prefix of its own, such as "
                "prefix='ema', or different stages."
            )


def refuse_unordered(monitor: str, stage: str, keys: Iterable[str], reason: str) -> None:
    """Raise a MetricsError for metrics whose value depends on the order of the samples, where ranks do not know it.

    Args:
        monitor: The name of the monitor.
        stage: "train", "val" or "test".
        keys: The keys of the metrics.
        reason: Why the order is not known.
    """
    for key in keys:
        raise MetricsError(
            f"{monitor}: the value of {key!r} in {stage} depends on the order of the samples, which is not known on "
            f"several ranks: {reason}. Measure it on one device, or choose a metric that averages (reduction='mean', "
            "multidim_average='global', MeanMetric)."
        )


class BestKeys:
    """The keys whose best value is kept.

    Args:
        monitor: The name of the monitor, for errors.
        keys: The keys that it logs.
        modes: Key -> "min" or "max".

    Raises:
        ValueError: If no stage logs a key, or a mode is neither "min" nor "max".
    """

    def __init__(self, monitor: str, keys: LoggedKeys, modes: Mapping[str, str]) -> None:
        keys.check_best(dict(modes))
        self._name, self._keys, self._modes = monitor, keys, modes

    def values(self, history: History) -> dict[str, tuple[float, int]]:
        """Return the best value of each key, and the optimizer steps done by then."""
        start = "" if self._keys.prefix is None else f"{self._keys.prefix}/"
        found = history.best({key.removeprefix(start): mode for key, mode in self._modes.items()})
        return {start + key: value for key, value in found.items()}

    def of_stage(self, stage: str) -> list[str]:
        """Return the keys of a stage."""
        return self._keys.keys_of_stage(self._modes, stage)

    def check_fit(self, trainer: Trainer) -> None:
        """Warn of a key of validation in a fit that does not validate, as a short one that tries whether all works."""
        if not will_validate(trainer) and (keys := self.of_stage("val")):
            rank_zero_warn(
                f"{self._name}: best has the key {keys[0]!r}, but this fit does not validate, so that it has no value: "
                "give it validation data and a validation_step, let it validate within max_epochs, or use a key of "
                "train."
            )

    def check_dataloaders(self, trainer: Trainer) -> None:
        """Refuse keys that name a dataloader where there is one, or none where there are several."""
        try:
            self._keys.check_loaders(self._modes, "train", [""])
            self._keys.check_loaders(self._modes, "val", loader_names(trainer, "val"))
        except ValueError as error:
            raise MetricsError(f"{self._name}: {error}") from error

    def check_logged(self, stage: str, logged_keys: Collection[str], has_unmeasured: bool) -> None:
        """Refuse a key that was not logged at the end of its stage, where that was not known before."""
        start = self._keys.key(stage, "")
        logged = [key for key in logged_keys if key.startswith(start)]
        for key in self.of_stage(stage):
            if (logged or has_unmeasured) and key not in logged:
                alternatives = self._keys.describe_alternatives(key, stage, logged)
                raise MetricsError(f"{self._name}: best has the key {key!r}, {alternatives}")


STEPS = {"train": "training_step", "val": "validation_step", "test": "test_step"}


class MetricsError(MisconfigurationException, ValueError):
    """A step returned something that cannot be measured, a loader has no batches, or a key is wrong or logged twice."""


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


def will_validate(trainer: Trainer) -> bool:
    """Whether a fit will validate, as far as that is known at its start."""
    every, epochs = trainer.check_val_every_n_epoch, trainer.max_epochs
    too_seldom = every is not None and epochs is not None and 0 < epochs < every
    return trainer.enable_validation and not too_seldom


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
    for stage in _stages_with_data(trainer, function):
        empty = [index for index, count in enumerate(num_batches(trainer, stage)) if count == 0]
        for dataloader_idx in empty or (empty_train_loaders(trainer) if stage == "train" else ()):
            if stage in stages:
                raise MetricsError(
                    f"{monitor}: loader {dataloader_idx} of {stage} has no batches, so there is nothing to measure: "
                    "give it data (or a smaller batch size if drop_last drops the only batch), or leave the stage out "
                    "of stages."
                )


def _stages_with_data(trainer: Trainer, function: str) -> Iterator[str]:
    if function == "fit" and trainer.limit_train_batches != 0:
        yield "train"
    if function in ("fit", "validate") and trainer.limit_val_batches != 0:
        yield "val"
    if function == "test" and trainer.limit_test_batches != 0:
        yield "test"


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
