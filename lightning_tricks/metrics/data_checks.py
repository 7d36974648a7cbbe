"""Checks of the data: dataloaders must have batches, and steps must return the inputs of the metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_tricks.metrics.core.suite import MetricSuite

STEPS = {"train": "training_step", "val": "validation_step", "test": "test_step"}


class MetricsError(MisconfigurationException, ValueError):
    """A step returned something that cannot be measured, a loader has no batches, or a key is wrong or logged twice."""


def num_batches(trainer: Trainer, stage: str) -> list[int | float]:
    """Return the number of batches of each dataloader of a stage."""
    if stage == "train":
        return [trainer.num_training_batches]
    counts = trainer.num_val_batches if stage == "val" else trainer.num_test_batches
    return list(counts) if isinstance(counts, Sequence) else [counts]


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
        for dataloader_idx, count in enumerate(num_batches(trainer, stage)):
            if count == 0 and stage in stages:
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
