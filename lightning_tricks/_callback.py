"""What every callback of the collection shares."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lightning_tricks._lightning_compat.flavor import (
    LIGHTNING,
    Callback,
    DeepSpeedStrategy,
    FSDPStrategy,
    LightningModule,
    MisconfigurationException,
    ModelParallelStrategy,
    Trainer,
    other_flavor,
    rank_zero_info,
)
from lightning_tricks._lightning_compat.trainer import callbacks_of, callbacks_of_type
from lightning_tricks._shared.console import is_verbose, print_report
from lightning_tricks._shared.pictures import can_log_images
from lightning_tricks._shared.report_parts import ReportPart

if TYPE_CHECKING:
    import torch

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
    "on_predict_batch_start",
    "on_predict_batch_end",
)

# Each rank holds its part of the parameters; those of the first two, DeepSpeed and FSDP1, are flattened by others' code
FLATTENING = (DeepSpeedStrategy, FSDPStrategy)
SHARDING = (*FLATTENING, ModelParallelStrategy)


def is_reported(trainer: Trainer) -> bool:
    """Whether a callback of the Trainer shows what others return from `report_parts`."""
    return any(getattr(callback, "takes_report_parts", False) for callback in callbacks_of(trainer))


class TrickCallback(Callback):
    """The base of all callbacks: it pickles without the model, and a Trainer takes one of each type.

    Attributes:
        allows_several: Whether a Trainer takes several of this type.
        added_by_mixin: Whether a module's `TricksMixin` made it, not the user of the Trainer.
        path_arguments: The names of the arguments that may be a path; their values are never taken from a checkpoint.
        training_arguments: The names of the arguments that shape the training; `AutoResume` compares their values with
            those with which a run was started. Empty for a callback that only observes.
        takes_report_parts: Whether it shows what the callbacks of its Trainer return from `report_parts`.
        verbose: Whether its tables are printed; None leaves that to the variable `LIGHTNING_TRICKS_VERBOSE`.
    """

    allows_several = False
    added_by_mixin = False
    takes_report_parts = False
    path_arguments: tuple[str, ...] = ()
    training_arguments: tuple[str, ...] = ()
    verbose: bool | None = None
    _begins_before_setup = False  # as `AutoResume` does
    _lines: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._forget_run()

    @cached_property
    def _installed(self) -> ExitStack:
        """The context managers that a run has entered; where it ends they are left, the last one first."""
        return ExitStack()

    def _forget_run(self) -> None:
        """Set to its initial value what is known only while a Trainer runs, such as the module's parameters.

        It is called in `__init__`, where a run begins, where it ends, and of a copy that is to be pickled.
        """

    def _close(self) -> None:
        """End a run: undo all that was installed, even where an error is raised, and forget the run."""
        try:
            self._installed.close()
        finally:
            vars(self).pop("_installed", None)  # as before the first run
            self._forget_run()

    def before_module_init(self) -> None:
        """Do what has to happen before the submodules of a module are created; `TricksMixin` calls it."""

    def logged_keys(self, stage: str, loaders: int = 1) -> Collection[str]:
        """Return the keys that this callback is certain to log in each epoch of a stage.

        Args:
            stage: "train", "val" or "test".
            loaders: The number of dataloaders of the stage.
        """
        return ()

    def mid_epoch_state(self) -> dict[str, Any]:
        """Return the state of this rank within an epoch that is not in the state dict; `AutoResume` saves it."""
        return {}

    def load_mid_epoch_state(self, state: dict[str, Any]) -> None:
        """Restore what `mid_epoch_state` returned; the states of random number generators are restored after it."""

    def epoch_counts(self) -> dict[str, Any]:
        """Return what it counts of the training batches of an epoch, in tensors and plain values."""
        return {}

    def load_epoch_counts(self, counts: dict[str, Any], device: torch.device) -> None:
        """Go back to what `epoch_counts` returned: `SpikeGuard` takes back batches that it leaves out."""

    def resumed(self, trainer: Trainer, not_restored: Sequence[str]) -> None:
        """Be told by `AutoResume` that it has resumed a fit.

        Args:
            trainer: The Trainer.
            not_restored: What could not be restored as it was saved.
        """

    def load_pretrained(self, trainer: Trainer, pl_module: LightningModule) -> bool:
        """Load the weights that this callback loads where a fit starts, as a checkpoint lacks them; return if it did.

        It is called on each rank, on the CPU, in any stage, before the checkpoint's own weights are loaded.
        """
        return False

    def report_parts(self, trainer: Trainer) -> Sequence[ReportPart]:
        """Return what a report of the fit should show beside what is logged, as plain values.

        It is called on rank zero alone, between steps, at the end of an epoch and of the fit: it may read from the
        device, and must not communicate with other ranks.
        """
        return ()

    def changes_later(self, pl_module: LightningModule) -> Collection[str]:
        """Return the names of tensors that are frozen now and that this callback releases later in the fit.

        Names are those of the state dict, without the prefixes of `torch.compile`.
        """
        return ()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a Trainer of the other Lightning and a second callback of the type, and begin a run.

        A run that an error has kept from its end is ended, and hooks that do nothing are disabled.
        """
        if remedy := other_flavor(type(trainer)):
            raise MisconfigurationException(f"{type(self).__name__}: {remedy}")
        count = sum(isinstance(callback, type(self)) for callback in callbacks_of(trainer))
        if count > 1 and not self.allows_several:
            raise MisconfigurationException(
                f"The Trainer has {count} {type(self).__name__} callbacks and needs one: a second one "
                "would repeat the work of the first. Remove one."
            )

        if not self._begins_before_setup:
            self._close()
        self._lines = ()
        is_verbose(self.verbose)  # a wrong variable is an error now, not when there is a table
        for name in _STEP_HOOKS:
            vars(self).pop(name, None)
        self.skip_hooks(*(name for name in _STEP_HOOKS if getattr(type(self), name) is getattr(Callback, name)))

    def refuse_strategies(self, trainer: Trainer, kinds: tuple[type, ...], message: str) -> None:
        """Raise an error if the strategy of a Trainer is one of some kinds.

        Args:
            trainer: The Trainer.
            kinds: The kinds, such as `FLATTENING` or `SHARDING`.
            message: The error, with "{}" for the name of the strategy.
        """
        if isinstance(trainer.strategy, kinds):
            raise MisconfigurationException(message.format(type(trainer.strategy).__name__))

    def say(self, line: str) -> None:
        """Say something in the next block of lines: that at the start of training, or that at the end of the fit.

        A block has the lines of all tricks. What went wrong is a warning instead, and comes at once.

        Args:
            line: What is to be said, with its number, after the name of the callback; three in a fit at most.
        """
        self._lines = (*self._lines, line)

    def show_table(self, table: Any) -> None:
        """Print a table if this callback or the environment asks for tables."""
        if is_verbose(self.verbose):
            print_report(type(self).__name__, table)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print what the tricks have to say, once the last of them has started; overrides call it at their end."""
        self._print_block(trainer, "Tricks at the start:")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print what the tricks have to say, once the last of them has ended; overrides call it at their end."""
        self._print_block(trainer, "Tricks at the end:")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End the run; overrides call it at their end."""
        try:
            self._close()
        finally:
            super().teardown(trainer, pl_module, stage)  # of another callback that a subclass extends as well

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End the run, as the Trainer then calls no `teardown`; overrides call it at their end."""
        try:
            self._close()
        finally:
            super().on_exception(trainer, pl_module, exception)

    def _print_block(self, trainer: Trainer, title: str) -> None:
        tricks = callbacks_of_type(trainer, TrickCallback)
        if tricks and self is not tricks[-1]:
            return
        said = [(type(trick).__name__, line) for trick in tricks for line in trick._lines]
        for trick in tricks:
            trick._lines = ()
        if said:
            width = max(len(name) for name, _ in said)
            rank_zero_info("\n".join([title, *(f"  {name:{width}}  {line}" for name, line in said)]))

    def skip_hooks(self, *names: str) -> None:
        """Let Lightning skip hooks of a step until the next `setup`, as they have nothing to do.

        Lightning skips a hook that is not callable; for each other one it enters a context of its profiler. A hook that
        a subclass of a user overrides is not skipped.
        """
        own = ("lightning_tricks.", f"{LIGHTNING}.")
        vars(self).update(dict.fromkeys(name for name in names if getattr(type(self), name).__module__.startswith(own)))

    def __getstate__(self) -> dict[str, Any]:
        copy = object.__new__(type(self))
        vars(copy).update(vars(self))
        copy._forget_run()
        # Lightning leaves bound methods of the module here after a fit; pickled, they would carry the whole model.
        return {name: value for name, value in vars(copy).items() if name not in ("_installed", "log", "log_dict")}


class StepsCallback(TrickCallback):
    """The base of callbacks that use what the steps of training, validation and test return."""

    _function = ""  # the function of the Trainer that runs: "fit", "validate", "test" or "predict"
    _is_sanity_checking = False

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
        """Process what a step returned, in sanity checking too.

        Args:
            trainer: The Trainer.
            pl_module: The module that was called.
            stage: "train", "val" or "test".
            dataloader_idx: The index of the dataloader.
            outputs: What the step returned; an empty dict if a training step returned None.
            batch: The batch.
            batch_idx: The index of the batch in the epoch of its dataloader.
        """
        raise NotImplementedError

    def on_stage_end(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Process the end of an epoch of a stage; it is not called after sanity checking."""
        raise NotImplementedError

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remember which function of the Trainer runs."""
        super().setup(trainer, pl_module, stage)
        self._function = str(getattr(stage, "value", stage))
        self._is_sanity_checking = False

    def has_image_logger(self, trainer: Trainer) -> bool:
        """Whether a logger of rank zero can log images; on the other ranks Lightning has dummy loggers."""
        return bool(trainer.strategy.broadcast(can_log_images(trainer.loggers)))

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember that sanity checking has started."""
        self._is_sanity_checking = True

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember that sanity checking has ended."""
        self._is_sanity_checking = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Call `on_step_end`, except of a batch that was left out."""
        is_empty = isinstance(outputs, dict) and not outputs
        if not (is_empty and any(getattr(c, "has_left_out_batch", False) for c in callbacks_of(trainer))):
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
        """Call `on_step_end`."""
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
        """Call `on_step_end`."""
        self.on_step_end(trainer, pl_module, "test", dataloader_idx, outputs, batch, batch_idx)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Call `on_stage_end`."""
        self.on_stage_end(trainer, pl_module, "train")

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Call `on_stage_end`, except after sanity checking."""
        if not self._is_sanity_checking:
            self.on_stage_end(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Call `on_stage_end`."""
        self.on_stage_end(trainer, pl_module, "test")
