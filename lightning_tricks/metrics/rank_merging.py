"""Which part of the data each rank has seen, the values of all parts, and those that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy

from lightning_tricks._shared.ranks import gather_objects


def data_part(trainer: Trainer) -> tuple[int, int]:
    """Return which part of the data this rank sees, and the number of parts.

    Ranks that share the layers of a model see the same part.
    """
    if trainer.world_size == 1:
        return 0, 1
    arguments = cast(ParallelStrategy, trainer.strategy).distributed_sampler_kwargs
    return int(arguments["rank"]), int(arguments["num_replicas"])


def gather_parts(trainer: Trainer, value: Any) -> list[Any]:
    """Return the values of all parts of the data, one of each; every rank has to call it."""
    ranks = gather_objects((data_part(trainer)[0], value))
    return [of_part for _, of_part in sorted(dict(ranks[::-1]).items())]


class PartialEpoch:
    """What a checkpoint within an epoch holds of it: the states of each rank's dataloaders, by "<stage>/<index>".

    Args:
        state: The state in the checkpoint; an empty one for none.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.epoch: int | None = state.get("epoch")
        self.ranks: list[dict[str, Any]] = state.get("ranks", [])

    def is_of(self, trainer: Trainer) -> bool:
        """Whether it is of the epoch that runs."""
        return self.epoch == trainer.current_epoch

    def states_of(self, trainer: Trainer, stage: str, dataloader_idx: int) -> list[Any]:
        """Return the states of one dataloader that this rank has to merge; the number of ranks may have changed."""
        part, parts = data_part(trainer)
        key = f"{stage}/{dataloader_idx}"
        return [rank[key] for rank in self.ranks[part::parts] if key in rank]

    def dataloaders_of(self, trainer: Trainer, stage: str) -> list[int]:
        """Return the indices of a stage's dataloaders of which there are states, in the epoch that runs."""
        if not self.is_of(trainer):
            return []
        keys = sorted({key for states in self.ranks for key in states})
        pairs = (key.partition("/") for key in keys)
        return [int(dataloader_idx) for of_stage, _, dataloader_idx in pairs if of_stage == stage]
