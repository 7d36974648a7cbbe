"""What every callback of the collection shares."""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_tricks._lightning_compat.imports import other_import_style
from lightning_tricks._lightning_compat.trainer import callbacks_of
from lightning_tricks._shared.logger_images import can_log_images

_STEP_HOOKS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_test_batch_start",
    "on_test_batch_end",
)


def _normalized(path: str | os.PathLike[str]) -> str:
    return os.path.normpath(os.path.expanduser(path))  # noqa: PTH111 - Path's raises where there is no home


class TrickCallback(Callback):
    """A callback that pickles without the model and is, unless `allows_several`, the only one of its type in a Trainer.

    Attributes:
        allows_several: Whether several of its type make sense in one Trainer.
        added_by_mixin: Whether a module's `TricksMixin` made it, not the user of the Trainer.
        path_arguments: Names of the arguments that may name a file or a folder, which no checkpoint may do.
    """

    allows_several = False
    added_by_mixin = False
    path_arguments: tuple[str, ...] = ()

    @classmethod
    def find_path_arguments(cls, arguments: Mapping[str, Any], texts: Collection[str]) -> list[str]:
        """Return the names of the arguments that name one of `texts`, or what lies in it, as a file or a folder."""
        named = {_normalized(text) for text in texts} - {os.curdir}
        return [
            name
            for name in cls.path_arguments
            if isinstance(given := arguments.get(name), str | os.PathLike)
            and given != inspect.signature(cls).parameters[name].default
            and named.intersection(map(str, (path := Path(_normalized(given)), *path.parents)))
        ]

    @classmethod
    def requires_argument(cls, argument: str) -> bool:
        """Whether an argument has no default."""
        return inspect.signature(cls).parameters[argument].default is inspect.Parameter.empty

    def before_module_init(self) -> None:
        """Do what must precede the creation of a module's submodules; `TricksMixin` calls it there."""

    def logged_keys(self, stage: str, loaders: int = 1) -> Collection[str]:
        """Return the keys of values that this callback is sure to log of an epoch of "train", "val" or "test"."""
        return ()

    def mid_epoch_state(self) -> dict[str, Any]:
        """Return what this rank remembers in the middle of an epoch, beside the state dict; `AutoResume` saves it."""
        return {}

    def load_mid_epoch_state(self, state: dict[str, Any]) -> None:
        """Take up what `mid_epoch_state` returned; the random streams are about to be restored, too."""

    def resumed(self, trainer: Trainer, not_restored: Sequence[str]) -> None:
        """Hear from `AutoResume`, when it has resumed a fit, which places are other than they were saved."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse another Lightning and a second callback of the type; leave out the hooks that would do nothing."""
        if remedy := other_import_style(type(trainer)):
            raise MisconfigurationException(f"{type(self).__name__}: {remedy}")
        count = sum(isinstance(callback, type(self)) for callback in callbacks_of(trainer))
        if count > 1 and not self.allows_several:
            raise MisconfigurationException(
                f"The Trainer has {count} {type(self).__name__} callbacks and needs one: each would do the other's "
                "work again. Remove one."
            )

        # Lightning passes over what cannot be called; for each of the others it enters a context of its profiler
        idle = [name for name in _STEP_HOOKS if getattr(type(self), name) is getattr(Callback, name)]
        vars(self).update(dict.fromkeys(idle))

    def __getstate__(self) -> dict[str, Any]:
        # Lightning leaves bound methods of the module here after a fit; pickled, they would carry the whole model.
        return {name: value for name, value in vars(self).items() if name not in ("log", "log_dict")}


class StepsCallback(TrickCallback):
    """A callback that looks at what the steps of training, validation and test return."""

    _function = ""  # of the Trainer that runs: "fit", "validate", "test" or "predict"
    _is_sanity_checking = False  # in sanity checking

    def on_step_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        stage: str,
        dataloader_idx: int,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Look at what a step returned.

        Args:
            trainer: The Trainer.
            pl_module: The module that was called.
            stage: "train", "val" or "test".
            dataloader_idx: The index of the loader.
            outputs: What the step returned; an empty dict if a training step returned None.
            batch: The batch.
            batch_idx: Its index in the epoch of its loader.
        """
        raise NotImplementedError

    def on_stage_end(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Say what was seen in an epoch of a stage."""
        raise NotImplementedError

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Note what runs."""
        super().setup(trainer, pl_module, stage)
        self._function = str(getattr(stage, "value", stage))
        self._is_sanity_checking = False

    def has_image_logger(self, trainer: Trainer) -> bool:
        """Whether a logger can take a picture; other ranks' loggers stand for rank zero's, and take anything."""
        return bool(trainer.strategy.broadcast(can_log_images(trainer.loggers)))

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count nothing from here on."""
        self._is_sanity_checking = True

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count again."""
        self._is_sanity_checking = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look at a batch."""
        self.on_step_end(trainer, pl_module, "train", 0, outputs, batch, batch_idx)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Look at a batch."""
        self.on_step_end(trainer, pl_module, "val", dataloader_idx, outputs, batch, batch_idx)

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Look at a batch."""
        self.on_step_end(trainer, pl_module, "test", dataloader_idx, outputs, batch, batch_idx)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what was seen in training."""
        self.on_stage_end(trainer, pl_module, "train")

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what was seen in validation."""
        if not self._is_sanity_checking:
            self.on_stage_end(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what was seen in testing."""
        self.on_stage_end(trainer, pl_module, "test")
