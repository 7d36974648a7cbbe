"""What is still to be restored of a checkpoint after the Trainer has restored its own part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_tricks.auto_resume.core.manifests import CHECKPOINT_KEY, FORMAT, Manifest


class SavePoint(Enum):
    """A moment of a fit at which it is saved; the values are those in checkpoints."""

    AFTER_BATCH = "after a batch"
    EPOCH_START = "at an epoch's start"
    FIT_END = "at the end"


@dataclass(frozen=True)
class PendingResume:
    """The part of a checkpoint that is restored when the fit is where the checkpoint was saved.

    Attributes:
        manifest: The manifest of the checkpoint.
        path: The path of the checkpoint.
        save_point: The moment at which it was saved.
        rank_state: The state of this rank.
        shared_state: The state that is the same on all ranks.
        world_size_changed: Whether another number of ranks saved it.
        saved_weights: The tensors of its state dict, if some of them have another precision than the module's.
    """

    manifest: Manifest
    path: Path
    save_point: SavePoint
    rank_state: Mapping[str, Any]
    shared_state: Mapping[str, Any]
    world_size_changed: bool
    saved_weights: Mapping[str, torch.Tensor]

    @classmethod
    def from_checkpoint(
        cls, manifest: Manifest, path: Path, checkpoint: Mapping[str, Any], trainer: Trainer, module: LightningModule
    ) -> PendingResume:
        """Take from a checkpoint what this rank restores.

        Raises:
            MisconfigurationException: If the checkpoint has another format.
        """
        part = checkpoint[CHECKPOINT_KEY]
        if part["format"] != FORMAT:
            raise MisconfigurationException(
                f"AutoResume: the checkpoints in {path.parent} have format {part['format']}, and this release writes "
                f"format {FORMAT}. Choose another dirpath, or finish the run with the release that started it."
            )
        ranks: Sequence[Mapping[str, Any]] = part["ranks"]
        rank_state = ranks[trainer.global_rank % len(ranks)]
        world_size_changed = len(ranks) != trainer.world_size
        if world_size_changed:
            rank_state = {**rank_state, "buffers": {}, "trainer": {**rank_state["trainer"], "results": []}}
            rank_zero_warn(
                f"AutoResume: the run had {len(ranks)} ranks and resumes with {trainer.world_size}. Weights, optimizer "
                "and position are restored. Each rank sees other samples and draws other random numbers than it would "
                "have, and the means of this epoch lack what was logged before."
            )
        own, saved = state_dict_tensors(module.state_dict()), state_dict_tensors(checkpoint["state_dict"])
        other_precision = any(name in own and own[name].dtype != value.dtype for name, value in saved.items())
        return cls(
            manifest=manifest,
            path=path,
            save_point=SavePoint(part["moment"]),
            rank_state=rank_state,
            shared_state=part["shared"],
            world_size_changed=world_size_changed,
            saved_weights=saved if other_precision else {},
        )


def state_dict_tensors(state_dict: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a state dict, which may also hold what `get_extra_state` returns."""
    return {name: value for name, value in state_dict.items() if isinstance(value, torch.Tensor)}
