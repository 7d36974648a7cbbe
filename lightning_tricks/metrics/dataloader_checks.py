"""How many batches the dataloaders of a run have, and whether a fit validates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning.pytorch import Trainer

from lightning_tricks.metrics.key_conflicts import MetricsError


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
