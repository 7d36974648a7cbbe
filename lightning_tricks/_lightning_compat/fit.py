"""The loops of a fit: the checkpoint that they resume, their position, flags and end, and what runs before them."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from lightning_tricks._lightning_compat.flavor import TrainerFn, import_lightning
from lightning_tricks._lightning_compat.guards import needs_private, overriding, set_private
from lightning_tricks._lightning_compat.sharded import is_sharding, plain_states
from lightning_tricks._lightning_compat.trainer import callbacks_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from lightning_tricks._lightning_compat.flavor import Callback, LightningModule, Trainer


class ToldBeforeLoggers:
    """A base of callbacks that are told of a fit before its loggers begin and its data are prepared.

    No hook comes as early: `setup` finds the loggers in new versions, and what another process writes in the same
    directory touched. The moment is that at which the Trainer sets `log` of each callback to the method of the module.
    """

    def before_loggers_begin(self, trainer: Trainer, module: LightningModule) -> None:
        """Called on each rank where a fit begins that is not one of a `Tuner`."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; `_attach_model_logging_functions` of the Trainer sets `log`."""
        super().__setattr__(name, value)
        # Lightning 2.6.6 (trainer/trainer.py, `_run`) attaches it before `prepare_data` and before `_call_setup_hook`
        # reads `logger.experiment`, which makes directories, and deletes the rows of a CSVLogger.
        if name == "log":
            module = value.__self__
            if module.trainer.state.fn == TrainerFn.FITTING and not is_tuning(module.trainer):
                self.before_loggers_begin(module.trainer, module)


@contextmanager
def override_resume_checkpoint(
    trainer: Trainer, select_checkpoint: Callable[[Any], tuple[Any, dict[str, Any]] | None]
) -> Iterator[None]:
    """Let a function choose the checkpoint that the next run restores, or until the context is left.

    The function is called when the model is there to compare a checkpoint with. It gets the path that was given to the
    Trainer, or None, and returns another path with the checkpoint that it read there, or None to keep what was given.
    """
    with needs_private("AutoResume"):
        # As `resume_start` does with what it reads: a checkpoint of an older Lightning would lack entries.
        migrate_checkpoint = import_lightning("pytorch.utilities.migration.utils")._pl_migrate_checkpoint
        connector: Any = trainer._checkpoint_connector
        resume_start = connector.resume_start
    override = ExitStack()

    def resume_selected(checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
        # First of all, as the function may use the Trainer, and an error must not leave the override to later runs.
        override.close()
        choice = select_checkpoint(checkpoint_path)
        if choice is None:
            if not is_sharding(trainer.strategy):  # which reads it after its setup
                resume_start(checkpoint_path, *args, **kwargs)
            return
        path, checkpoint = choice
        with needs_private("AutoResume"):
            set_private(connector, _ckpt_path=path, _loaded_checkpoint=migrate_checkpoint(checkpoint, path))

    with override:
        override.enter_context(overriding(connector, resume_start=resume_selected))
        yield


@needs_private("AutoResume")
def dump_checkpoint(trainer: Trainer) -> dict[str, Any]:
    """Return what `Trainer.save_checkpoint` would write, with plain states; every rank has to call it."""
    with plain_states(trainer.strategy):
        # Given, as Lightning since 2.6 logs a line if it is not.
        checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    # The states of loaders (`_FitLoop.on_save_checkpoint`) are those of this rank alone, and may hold any object.
    checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = []
    return checkpoint


@needs_private("AutoResume")
def repeat_epoch_start_hooks(trainer: Trainer) -> None:
    """Call `on_train_epoch_start` of callbacks and module once more, in the epoch that runs."""
    call = import_lightning("pytorch.trainer.call")
    call._call_callback_hooks(trainer, "on_train_epoch_start")
    call._call_lightning_module_hook(trainer, "on_train_epoch_start")


@needs_private("AutoResume")
def num_batches_done(trainer: Trainer) -> int:
    """Return how many batches of the epoch that runs are done."""
    # `completed` is counted after the hooks of the batch's end (training_epoch_loop.py, `advance`), in which this is
    # asked.
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.ready)


@needs_private("AutoResume or GradientClipping")
def is_last_batch(trainer: Trainer) -> bool:
    """Whether the batch that is processed, or was just done, is the last of its epoch."""
    return bool(trainer.fit_loop.epoch_loop._num_ready_batches_reached())


@needs_private("AutoResume")
def is_at_step_boundary(trainer: Trainer) -> bool:
    """Whether the batch that was just done ended with an optimizer step, and another batch or epoch follows."""
    loop = trainer.fit_loop.epoch_loop
    return not (loop._should_accumulate() or 0 <= loop.max_steps <= loop.global_step)


def slurm_requeue_signal(trainer: Trainer) -> str | None:
    """Return the name of the signal on which Lightning lets SLURM requeue the job, or None where it does not."""
    from lightning_tricks._lightning_compat.flavor import SLURMEnvironment

    with needs_private("AutoResume"):
        # Lightning then handles this signal itself (signal_connector.py): it saves within the handler, and requeues.
        environment = trainer._accelerator_connector.cluster_environment
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return None
    return environment.requeue_signal.name if environment.requeue_signal is not None else "SIGUSR1"


@needs_private("AutoResume")
def is_tuning(trainer: Trainer) -> bool:
    """Whether the Trainer's `Tuner` runs, which looks for a learning rate or a batch size and then leaves the fit."""
    finders: list[Any] = _finders(trainer)
    # Set by tuner/tuning.py, and by nobody else, on the callback that it adds to the Trainer for the search.
    return any(finder._early_exit for finder in finders)


@contextmanager
def disable_finders(trainer: Trainer) -> Iterator[None]:
    """Keep callbacks from looking for a learning rate or a batch size once more, until the context is left."""
    with ExitStack() as stack:
        for finder in _finders(trainer):
            # Where they search: a resumed fit would be trained for some steps, and have another learning rate at the
            # end.
            stack.enter_context(overriding(finder, on_fit_start=lambda *_: None))
        yield


def _finders(trainer: Trainer) -> list[Callback]:
    from lightning_tricks._lightning_compat.flavor import BatchSizeFinder, LearningRateFinder

    return [
        callback for callback in callbacks_of(trainer) if isinstance(callback, LearningRateFinder | BatchSizeFinder)
    ]


@needs_private("AutoResume")
def skip_sanity_check(trainer: Trainer) -> None:
    """Let the fit that is about to run begin without a sanity check, as a restored fit does."""
    # What `_run_sanity_check` (trainer/trainer.py) asks: the run had its check at its start, and callbacks would count
    # another.
    set_private(trainer.fit_loop.epoch_loop.val_loop, _restarting=True)


@needs_private("AutoResume")
def clear_restart_flags(trainer: Trainer) -> None:
    """Let the loops continue as if they had never been restored."""
    fit = trainer.fit_loop
    parts = (fit.epoch_loop.automatic_optimization, fit.epoch_loop.manual_optimization)
    for loop in (fit, fit.epoch_loop, fit.epoch_loop.val_loop, *parts):
        # Past the property: with `max_steps`, that of FitLoop (loops/fit_loop.py, `restarting`) turns False into True.
        set_private(loop, _restarting=False, _loaded_from_state_dict=False)
        # While it is set, `on_run_start` of an epoch makes no iterators (#20775).
        if _FLAG_SINCE_2_5_3 in vars(loop):
            set_private(loop, **{_FLAG_SINCE_2_5_3: False})
    # A memory of its own beside the flags: `reset` of the epoch's loop (training_epoch_loop.py) would count the last
    # batch as completed once more.
    for loop in (fit.epoch_loop, fit.epoch_loop.val_loop):
        loop.reset_restart_stage()


_FLAG_SINCE_2_5_3 = "_resuming_from_checkpoint"


@contextmanager
def call_after_train_hook(trainer: Trainer, when: str, function: Callable[[], None]) -> Iterator[None]:
    """Call a function after the `on_train_start` or `on_train_end` of all callbacks and the module.

    It is called until the context is left. Some callbacks change the weights in `on_train_end`, such as those that
    average them, and no hook comes after all of them.

    Args:
        trainer: The Trainer.
        when: "start" or "end".
        function: What is called.
    """
    name = f"on_run_{when}"
    with needs_private("AutoResume or ValidateFirst"):
        plain: Callable[[], None] = getattr(trainer.fit_loop, name)

    def run_then_call() -> None:
        plain()
        function()

    with overriding(trainer.fit_loop, **{name: run_then_call}):
        yield


def call_after_teardown(trainer: Trainer, function: Callable[[], None]) -> None:
    """Call a function once, after the next teardown of the Trainer, when signal handlers are as they were before.

    A Trainer that raises is torn down, too, after `on_exception` of all callbacks and the end of its loggers.
    """
    with needs_private("AutoResume"):
        # Its teardown is the last thing in `Trainer._teardown`, which `_call_and_handle_interrupt` (trainer/call.py)
        # also calls after an error; a process that is left earlier would have Lightning's handlers.
        signals: Any = trainer._signal_connector
        teardown = signals.teardown
    override = ExitStack()

    def tear_down_then_call() -> None:
        override.close()
        teardown()
        function()

    override.enter_context(overriding(signals, teardown=tear_down_then_call))


@contextmanager
def closed_on_exception(trainer: Trainer, stack: ExitStack) -> Iterator[None]:
    """Close a stack when the Trainer is interrupted, until the context is left.

    For modules: Lightning calls their `teardown` only after a fit that ends.
    """
    # Asked in `_interrupt` (trainer/call.py) behind the callbacks and the datamodule; a module has no `on_exception`.
    strategy = trainer.strategy
    on_exception = strategy.on_exception

    def close_first(exception: BaseException) -> None:
        stack.close()
        on_exception(exception)

    with overriding(strategy, on_exception=close_first):
        yield


@needs_private("ValidateFirst")
def validate_unseen(trainer: Trainer, unaware: Iterable[Callback], around: Callable[[list[Any]], Any]) -> bool:
    """Run a whole validation within a fit, after which the loops and loaders are as before; return if it had batches.

    Args:
        trainer: The Trainer, between two epochs.
        unaware: The callbacks that are not told of its end.
        around: Makes a context manager of the loaders, in which the validation runs.
    """
    loop: Any = trainer.fit_loop.epoch_loop.val_loop
    # Left as they are then, they would count this validation as the first one of the epoch: loaders would be reloaded
    # an epoch later, and loggers would get the values of batches under other steps.
    before = {name: getattr(loop, name) for name in ("_combined_loader", "_max_batches", "_last_val_dl_reload_epoch")}
    before["_seen_batches_per_dataloader"] = loop._seen_batches_per_dataloader.copy()
    progress = loop.batch_progress.state_dict()
    trainer.validating = True  # as the training loop does around a validation
    if loop._combined_loader is not None:  # it is used, even if it is about to be reloaded
        set_private(loop, _last_val_dl_reload_epoch=trainer.current_epoch)
    loop.setup_data()
    with ExitStack() as stack:
        for callback in unaware:
            stack.enter_context(overriding(callback, on_validation_end=None))  # the Trainer calls what is callable
        stack.enter_context(around(loop._combined_loader.flattened))
        outputs = loop.run()
        if loop._data_fetcher is not None:
            loop._data_fetcher.teardown()  # ends the workers
            set_private(loop, _data_fetcher=None)
    trainer.training = True
    loop.batch_progress.load_state_dict(progress)
    set_private(loop, **before)
    return bool(outputs)


# The limits of the loops that callbacks may change while a fit runs
_FIT_LIMITS, _EPOCH_LIMITS = ("min_epochs", "max_epochs", "max_batches"), ("min_steps", "max_steps")
LOADER_LIMITS = ("max_batches", "val_check_batch")  # those that the Trainer sets when it creates training loaders


@needs_private("AutoResume")
def loop_limits(trainer: Trainer) -> dict[str, Any]:
    """Return how many epochs and steps a fit has at least and at most, and how many batches until what is due."""
    # A checkpoint has the progress of the loops (loops/loop.py, `state_dict`), and no limits: those that a callback
    # changed would be lost.
    fit = trainer.fit_loop
    limits = {name: getattr(fit, name) for name in _FIT_LIMITS}
    limits |= {name: getattr(fit.epoch_loop, name) for name in _EPOCH_LIMITS}
    return limits | {"val_check_batch": getattr(trainer, "val_check_batch", None)}  # set with the loaders before 2.6


@needs_private("AutoResume")
def set_loop_limits(trainer: Trainer, limits: dict[str, Any]) -> None:
    """Set what `loop_limits` returns, or a part of it."""
    fit = trainer.fit_loop
    # `min_steps` and `max_steps` are held by the inner loop; FitLoop shows them without a setter.
    owners = dict.fromkeys(_FIT_LIMITS, fit) | dict.fromkeys(_EPOCH_LIMITS, fit.epoch_loop)
    for name in limits.keys() & {*owners, "val_check_batch"}:
        set_private(owners.get(name, trainer), **{name: limits[name]})
