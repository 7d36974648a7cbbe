"""The callback `EndTogether`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import distributed

from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat.ending_loaders import loaders_ending_together
from lightning_tricks._lightning_compat.flavor import (
    LightningModule,
    MisconfigurationException,
    Trainer,
    rank_zero_info,
)
from lightning_tricks._shared.checks import check_choices
from lightning_tricks.end_together.functional import SharedEnd, has_certain_length

_NAMES = {"train": "an epoch of training", "val": "validation", "test": "test", "predict": "prediction"}


class EndTogether(TrickCallback):
    """End each epoch on all ranks where the rank with the fewest batches ends.

    Without it, ranks that read streams or files of their own train on different numbers of batches: DDP averages the
    gradients of one rank's last batches with those of another's next epoch, and the run hangs at its end. With it, the
    epoch is the one of loaders that were cut to the shortest rank: the last batch is known to be the last one, so
    accumulated gradients are stepped, and the Trainer's number of batches is the smallest.

    The lengths of DataLoaders of map-style data sets with torch's samplers are compared where an epoch begins. For all
    other loaders, such as those of an `IterableDataset`, even with a length, the ranks also ask each other at each
    batch, by one number on the CPU. With one rank it does nothing.

    Batches that only some ranks have are left out, and a line tells you how many of which ranks, once for the same
    numbers. A rank whose loader raises an error lets the others raise one as well. For several loaders the epoch of
    training ends where that of their combination does; of several validation loaders, each ends together.

    Args:
        stages: Which of "train", "val", "test" and "predict" end together. Evaluation has to only where its steps
            communicate, as under FSDP, or with `sync_dist=True` at each step; batches that are left out are not
            measured or predicted. Neutral: ().

    Raises:
        TypeError: If `stages` is a single string.
        ValueError: If it has another name.
        MisconfigurationException: In a run, if there are several ranks that torch.distributed does not connect.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[EndTogether()], accelerator="cpu", logger=False)
    """

    training_arguments = ("stages",)

    def __init__(self, stages: Sequence[Literal["train", "val", "test", "predict"]] = ("train",)) -> None:
        self.stages = check_choices("stages", stages, _NAMES)
        super().__init__()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Watch the loaders of the stages of this run, if there are several ranks."""
        super().setup(trainer, pl_module, stage)
        if trainer.world_size == 1 or not self.stages:
            return
        if not (distributed.is_available() and distributed.is_initialized()):
            raise MisconfigurationException(
                f"EndTogether: {type(trainer.strategy).__name__} has {trainer.world_size} ranks that do not "
                "communicate by torch.distributed: use another strategy, or remove this callback."
            )
        group = None
        if distributed.get_backend() != "gloo":  # the only one that communicates on the CPU
            group = distributed.new_group(backend="gloo")
            self._installed.callback(distributed.destroy_process_group, group)
        ends = {stage: SharedEnd(_NAMES[stage], group, rank_zero_info) for stage in self.stages}
        self._installed.enter_context(loaders_ending_together(trainer, ends, has_certain_length))
