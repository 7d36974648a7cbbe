"""The parts of a fit's state: what each of them can do, when they are restored, and the saved state of all of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

import torch

from lightning_tricks._lightning_compat.flavor import LightningModule, ParallelStrategy, Trainer, rank_zero_warn
from lightning_tricks._lightning_compat.results import merged_result
from lightning_tricks._shared.host_copies import stage_on_host
from lightning_tricks._shared.tensors import replace_tensors
from lightning_tricks.auto_resume.core.attributes.encoding import differing_paths
from lightning_tricks.auto_resume.core.attributes.object_walk import ObjectWalk
from lightning_tricks.auto_resume.core.checkpoint_folder import CHECKPOINT_KEY, Manifest


@dataclass(frozen=True)
class Settings:
    """The choices of the user, as they are when a fit begins; see the arguments of `AutoResume`.

    Attributes:
        dirpath: The directory or the address of the run.
        every_n_train_steps: Number of optimizer steps between two saves.
        every_n_epochs: Number of epochs between two saves.
        seconds_between_saves: The `train_time_interval`; infinity without one.
        keep_last: Number of checkpoints to keep.
        exit_code: Exit status after a signal.
        on_change: What to do if the script changed the training since the run started.
        ignore: Patterns over the names of changes that take effect.
        on_failed_save: What to do if a save fails.
        asynchronous: Whether training continues while a checkpoint is written.
        seconds_to_send: The `send_timeout`.
        allow_pickle: Whether objects in a checkpoint are restored.
    """

    dirpath: str | os.PathLike[str]
    every_n_train_steps: int | None
    every_n_epochs: int | None
    seconds_between_saves: float
    keep_last: int
    exit_code: int
    on_change: str
    ignore: Sequence[str]
    on_failed_save: str
    asynchronous: bool | None
    seconds_to_send: float
    allow_pickle: bool


class SavePoint(Enum):
    """A moment of a fit at which it is saved; the values are those in checkpoints."""

    AFTER_BATCH = "after a batch"
    EPOCH_START = "at an epoch's start"
    FIT_END = "at the end"


class Phase(Enum):
    """A moment of a fit at which parts of its state are noted or restored."""

    FIT_START = auto()  # the optimizers were created, and the Trainer loads their states next
    LIMITS_GIVEN = auto()  # all hooks before the first epoch were called
    LOADERS_CREATED = auto()  # the training loaders
    RESULTS = auto()  # right after LIMITS_GIVEN, where the fit had finished
    RESULTS_WITH_LOADERS = auto()  # each time that loaders were created, where the fit had finished
    CONTINUED = auto()  # before the first epoch of a fit that had finished and is extended
    BEFORE_HOOKS = auto()  # of the start of the epoch that is resumed
    AFTER_HOOKS = auto()  # of the start of any epoch
    BEFORE_BATCH = auto()  # the next one of the epoch that is resumed
    COMPARED = auto()  # after all differences were found
    FIT_END = auto()  # where the fit had finished and is not extended


@dataclass(frozen=True)
class SavedState:
    """What is restored of a checkpoint beside the Trainer's own part, when the fit is where it was saved.

    Attributes:
        manifest: The manifest of the checkpoint.
        path: The path of the checkpoint.
        save_point: The moment at which it was saved.
        rank: The state of this rank.
        rank_zero: The state of rank zero of then.
        shared: The state that is the same on all ranks.
        world_size: The number of ranks that saved it.
        world_size_changed: Whether that is another one than now.
        weights: The tensors of its state dict, if some of them have another precision than the module's.
    """

    manifest: Manifest
    path: Path
    save_point: SavePoint
    rank: Mapping[str, Any]
    rank_zero: Mapping[str, Any]
    shared: Mapping[str, Any]
    world_size: int
    world_size_changed: bool
    weights: Mapping[str, torch.Tensor]

    @classmethod
    def from_checkpoint(
        cls, manifest: Manifest, path: Path, checkpoint: Mapping[str, Any], trainer: Trainer, module: LightningModule
    ) -> SavedState:
        """Take from a checkpoint what this rank restores."""
        entry = checkpoint[CHECKPOINT_KEY]
        ranks: Sequence[Mapping[str, Any]] = entry["ranks"]
        rank = ranks[trainer.global_rank % len(ranks)]
        world_size_changed = len(ranks) != trainer.world_size
        if world_size_changed:
            of_ranks = [one["trainer"]["results"] for one in ranks[trainer.global_rank :: trainer.world_size]]
            # what one process logs does not tell whether sync_dist=True was given, which may not differ
            known = rank["trainer"]["results"] if len(ranks) > 1 else []
            is_distributed = isinstance(trainer.strategy, ParallelStrategy)
            results = [merged_result(item, of_ranks, is_distributed) for item in known]
            rank = {**rank, "rank_tensors": {}, "trainer": {**rank["trainer"], "results": results}}
            rank_zero_warn(
                f"AutoResume: the run had {len(ranks)} ranks and resumes with {trainer.world_size}. Weights, "
                "optimizer and position are restored. Ranks draw other random numbers than without the change, and "
                "means of this epoch may lack values that were logged before the stop."
            )
        own, saved = state_dict_tensors(module.state_dict()), state_dict_tensors(checkpoint["state_dict"])
        other_precision = any(name in own and own[name].dtype != value.dtype for name, value in saved.items())
        return cls(
            manifest=manifest,
            path=path,
            save_point=SavePoint(entry["moment"]),
            rank=rank,
            rank_zero=ranks[0],
            shared=entry["shared"],
            world_size=len(ranks),
            world_size_changed=world_size_changed,
            weights=saved if other_precision else {},
        )


class Part:
    """A part of the state of a fit that a checkpoint of the Trainer does not hold.

    What has changed is relative to the creation of the part, or to what `note` found later.

    Args:
        trainer: The Trainer of the fit.
        module: The module that is trained.

    Attributes:
        name: Its name in the order of a restore; of a `ComparedPart`, the key of its entry as well.
    """

    name = ""

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self.trainer, self.module = trainer, module

    def note(self, phase: Phase) -> None:
        """Note what there is now: what changes are relative to, or what has changed up to here."""

    def capture(self, walk: ObjectWalk) -> dict[str, Any]:
        """Return the entries in the state of this rank, as tensors on the CPU and plain values; all ranks call it.

        Args:
            walk: A walk over the module, the datamodule and the callbacks; it takes long, and is made once.
        """
        return {}

    def capture_shared(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries that are the same on all ranks; called on rank zero.

        Args:
            checkpoint: The Trainer's checkpoint to which they are added.
        """
        return {}

    def unsaved(self, captured: Mapping[str, Any]) -> list[str]:
        """Return the names of what changed and cannot be saved, given the state of this rank."""
        return []

    def restore(self, saved: SavedState, phase: Phase) -> None:
        """Restore what belongs to a phase."""

    def differences(self, saved: SavedState, now: Mapping[str, Any]) -> Iterable[str]:
        """Return the key paths of what is not as it was saved; `now` is the state of this rank, captured again."""
        return ()


class ComparedPart(Part):
    """A part of the state of a rank that is after a resume, bit for bit, what it was at the save."""

    def differences(self, saved: SavedState, now: Mapping[str, Any]) -> Iterable[str]:
        """Return the key paths of what is not as it was saved."""
        return differing_paths({self.name: saved.rank[self.name]} if self.name in saved.rank else {}, now)


class ChangedValues:
    """Finds which of some named values are, or were when they were looked at, other than at first.

    One that was changed back counts as well: the hooks of a process that resumes may change it again, and not back.

    Args:
        initial: The values at first, by name.

    Attributes:
        initial: The values at first.

    Examples:
        >>> clipping = ChangedValues({"max_norm": 1.0, "norm_type": 2.0})
        >>> clipping.changes({"max_norm": 0.1, "norm_type": 2.0})
        {'max_norm': 0.1}
        >>> clipping.changes({"max_norm": 1.0, "norm_type": 2.0})
        {'max_norm': 1.0}
    """

    def __init__(self, initial: Mapping[str, Any]) -> None:
        self.initial = dict(initial)
        self._names = set[str]()

    def changes(self, now: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of the present values that are, or were once, others."""
        self.note(name for name, value in now.items() if name not in self.initial or self.initial[name] != value)
        return {name: value for name, value in now.items() if name in self._names}

    def note(self, names: Iterable[str]) -> None:
        """Count values as changed, such as those that had changed in the process that is resumed."""
        self._names.update(names)


def state_dict_tensors(state_dict: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a state dict, which may also hold what `get_extra_state` returns."""
    return {name: value for name, value in state_dict.items() if isinstance(value, torch.Tensor)}


def move_to_device(value: Any, device: torch.device | str) -> Any:
    """Return a copy of plain containers in which tensors are detached and on a device."""
    staged = stage_on_host(value) if device == "cpu" else value
    return replace_tensors(staged, lambda _, tensor: tensor.detach().to(device))
