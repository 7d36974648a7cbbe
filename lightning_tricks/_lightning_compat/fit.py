"""The loops of a fit: what they resume, moments that no hook marks, their loaders and places."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_tricks._lightning_compat.guards import needs_private

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning.pytorch import Trainer


def override_resume_checkpoint(
    trainer: Trainer, select_checkpoint: Callable[[Any], tuple[Any, dict[str, Any]] | None]
) -> Callable[[], None]:
    """Let a function choose the checkpoint that the next run restores, when the model is there to compare it with.

    It gets the path that was given to the Trainer, or None, and returns another one with what it read from there, or
    None to leave it at that. Returns what ends this before the next run asked.
    """
    with needs_private("AutoResume"):
        from lightning.pytorch.utilities.migration.utils import _pl_migrate_checkpoint

        connector: Any = trainer._checkpoint_connector
        resume_start = connector.resume_start

    def resume_selected(checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
        close()
        choice = select_checkpoint(checkpoint_path)
        if choice is None:
            resume_start(checkpoint_path, *args, **kwargs)
        else:
            connector._ckpt_path = choice[0]
            connector._loaded_checkpoint = _pl_migrate_checkpoint(choice[1], choice[0])

    def close() -> None:
        vars(connector).pop("resume_start", None)

    connector.resume_start = resume_selected
    return close


@needs_private("AutoResume")
def dump_checkpoint(trainer: Trainer) -> dict[str, Any]:
    """Return what `Trainer.save_checkpoint` would write; every rank has to call it."""
    checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    return checkpoint


class FitObserver:
    """What `observe_fit` calls, in this order; it does nothing by itself."""

    def on_signals_registered(self) -> None:
        """The Trainer has registered its own signal handlers."""

    def sampler_epoch(self, epoch: int) -> int:
        """The epoch whose order the samplers shall give, where the Trainer thinks of `epoch`."""
        return epoch

    def before_loaders_created(self, kind: str) -> None:
        """The "training" or "validation" loaders are about to be asked for."""

    def on_train_loaders_ready(self, loaders: list[Any], all_sized: bool) -> None:
        """The training loaders are there, their iterators not yet."""

    def on_validation_loaders_ready(self, loaders: list[Any]) -> None:
        """The validation loaders are there, their iterators not yet."""

    def before_epoch_start_hooks(self) -> None:
        """The hooks of an epoch's start come next."""

    def is_resuming(self) -> bool:
        """Whether the epoch that begins goes on where another process was stopped."""
        return False

    def before_epoch_iterators(self) -> None:
        """The iterators of this epoch come next, unless they are there since `on_train_loaders_ready`."""

    def before_first_batch(self, finish_batch: Callable[[], None]) -> None:
        """The first batch comes next; `finish_batch` does what follows a batch, validation included."""

    def after_batch(self) -> None:
        """A batch is done and logged; the validation that may be due is not."""


def observe_fit(trainer: Trainer, observer: FitObserver) -> Callable[[], None]:
    """Call a watcher at the moments of a fit that no hook marks; return what ends that."""
    with needs_private("AutoResume"):
        from lightning.fabric.utilities.data import _set_sampler_epoch, sized_len

        signals, fit, epoch = trainer._signal_connector, trainer.fit_loop, trainer.fit_loop.epoch_loop
        validation = epoch.val_loop
        replaced: dict[tuple[Any, str], Any] = {
            (owner, name): getattr(owner, name)
            for owner, name in (
                (signals, "register_signal_handlers"),
                (fit, "_load_combined_loader_states"),
                (fit, "setup_data"),
                (fit, "on_advance_start"),
                (validation, "setup_data"),
                (epoch, "reset"),
                (epoch, "on_run_start"),
                (epoch, "on_advance_end"),
            )
        }
    plain = {name: function for (owner, name), function in replaced.items() if (owner, name) != (fit, "setup_data")}
    setup_train_data = replaced[fit, "setup_data"]
    in_advance_start: list[bool] = []
    seen: list[Any] = []  # the validation loaders that were followed

    def register_signal_handlers() -> None:
        plain["register_signal_handlers"]()
        observer.on_signals_registered()

    def load_combined_loader_states() -> None:
        loader: Any = fit._combined_loader
        parts = list(loader.flattened)
        number = observer.sampler_epoch(fit.epoch_progress.current.processed)  # type: ignore[attr-defined]
        for part in parts:
            _set_sampler_epoch(part, number)
        observer.on_train_loaders_ready(parts, all(sized_len(part) is not None for part in parts))
        plain["_load_combined_loader_states"]()

    def setup_data_of_fit() -> None:
        if fit._combined_loader is None or fit._should_reload_train_dl:
            observer.before_loaders_created("training")
        setup_train_data()
        if in_advance_start:
            observer.before_epoch_start_hooks()

    def on_advance_start() -> None:
        in_advance_start.append(True)
        try:
            plain["on_advance_start"]()
        finally:
            in_advance_start.clear()

    def setup_data() -> None:
        if validation._combined_loader is None or validation._should_reload_val_dl:
            observer.before_loaders_created("validation")
        plain["setup_data"]()
        loader: Any = validation._combined_loader
        if loader is not None and seen != [loader]:
            seen[:] = [loader]
            observer.on_validation_loaders_ready(list(loader.flattened))

    def reset() -> None:
        if not observer.is_resuming():
            plain["reset"]()  # which else would take the place for the middle of a step

    def on_run_start(fetcher: Any) -> None:
        observer.before_epoch_iterators()
        plain["on_run_start"](fetcher)
        observer.before_first_batch(lambda: plain["on_advance_end"](fetcher))

    def on_advance_end(fetcher: Any) -> None:
        observer.after_batch()
        plain["on_advance_end"](fetcher)

    overrides = (
        register_signal_handlers,
        load_combined_loader_states,
        setup_data_of_fit,
        on_advance_start,
        setup_data,
        reset,
        on_run_start,
        on_advance_end,
    )
    for (owner, name), function in zip(replaced, overrides, strict=True):
        setattr(owner, name, function)

    def close() -> None:
        for owner, name in replaced:
            vars(owner).pop(name, None)

    return close


@needs_private("AutoResume")
def repeat_epoch_start_hooks(trainer: Trainer) -> None:
    """Call the hooks of an epoch's start, of callbacks and module, in the epoch that runs."""
    from lightning.pytorch.trainer import call

    call._call_callback_hooks(trainer, "on_train_epoch_start")
    call._call_lightning_module_hook(trainer, "on_train_epoch_start")


@needs_private("AutoResume")
def recreate_iterators(trainer: Trainer) -> None:
    """Ask the training loaders for their iterators once more, at the same place of the epoch."""
    fetcher: Any = trainer.fit_loop._data_fetcher
    fetched = fetcher.fetched
    iter(fetcher)
    fetcher.fetched = fetched


@needs_private("AutoResume")
def train_iterators(trainer: Trainer) -> tuple[list[Any], int]:
    """Return the iterators of the training loaders, and how many batches were fetched but not trained on."""
    fetcher: Any = trainer.fit_loop._data_fetcher
    return list(fetcher.combined_loader._iterator.iterators), len(getattr(fetcher, "batches", ()))


@needs_private("AutoResume")
def restarted_loaders(trainer: Trainer) -> list[bool]:
    """Return which of the training loaders were at their end in this epoch already, and began again."""
    fetcher: Any = trainer.fit_loop._data_fetcher
    return list(getattr(fetcher.combined_loader._iterator, "_consumed", ()))


def mark_restarted_loaders(trainer: Trainer, which: list[bool]) -> None:
    """Take loaders for such that were at their end in this epoch already."""
    fetcher: Any = trainer.fit_loop._data_fetcher
    if restarted_loaders(trainer):
        fetcher.combined_loader._iterator._consumed = list(which)


@needs_private("AutoResume")
def load_loader_states(trainer: Trainer) -> None:
    """Let loaders with a `state_dict` take up their saved states, if they were made before these were there.

    Where `configure_optimizers` asks for `estimated_stepping_batches`, that makes the loaders before the Trainer
    restores its loops.
    """
    fit: Any = trainer.fit_loop
    states, fit._combined_loader_states_to_load = fit._combined_loader_states_to_load, []
    if states:
        fit._combined_loader._load_state_dicts(states)
        recreate_iterators(trainer)


@needs_private("AutoResume")
def skip_train_batches(trainer: Trainer, count: int) -> None:
    """Fetch batches for nothing."""
    fetcher: Any = trainer.fit_loop._data_fetcher
    fetched, fetcher.fetched = fetcher.fetched, 0
    for _ in range(count):
        next(fetcher)
    fetcher.fetched = fetched
    if fetcher.length is not None:
        fetcher.done = fetched >= fetcher.length


@needs_private("AutoResume")
def num_batches_done(trainer: Trainer) -> int:
    """Return how many batches of the epoch that runs are done."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.ready)


@needs_private("AutoResume")
def close_workers(trainer: Trainer) -> None:
    """End the workers of a fit's loaders, which the fit will not ask again."""
    trainer.fit_loop.teardown()


@needs_private("AutoResume")
def is_last_batch(trainer: Trainer) -> bool:
    """Whether the batch that was just done is the last of its epoch."""
    return bool(trainer.fit_loop.epoch_loop._num_ready_batches_reached())


def slurm_requeue_signal(trainer: Trainer) -> str | None:
    """Return the name of the signal on which Lightning has SLURM requeue the job, or None where it does not."""
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    with needs_private("AutoResume"):
        environment = trainer._accelerator_connector.cluster_environment
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return None
    return environment.requeue_signal.name if environment.requeue_signal is not None else "SIGUSR1"


@needs_private("AutoResume")
def is_at_step_boundary(trainer: Trainer) -> bool:
    """Whether the batch that was just done ended with an optimizer step, and another batch or epoch follows."""
    loop = trainer.fit_loop.epoch_loop
    return not (loop._should_accumulate() or 0 <= loop.max_steps <= loop.global_step)


def is_tuning(trainer: Trainer) -> bool:
    """Whether the Trainer's `Tuner` runs, which looks for a learning rate or a batch size and then leaves the fit."""
    return any(getattr(callback, "_early_exit", False) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def disable_finders(trainer: Trainer) -> Callable[[], None]:
    """Keep callbacks from looking for a learning rate or a batch size once more; return what ends that."""
    from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder

    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    finders = [one for one in callbacks if isinstance(one, LearningRateFinder | BatchSizeFinder)]
    for finder in finders:
        vars(finder)["on_fit_start"] = lambda *_: None

    def close() -> None:
        for finder in finders:
            vars(finder).pop("on_fit_start", None)

    return close


def skip_sanity_check(trainer: Trainer) -> None:
    """Let the fit that is about to run begin without one, as a restored fit does."""
    trainer.fit_loop.epoch_loop.val_loop._restarting = True


def clear_restart_flags(trainer: Trainer) -> None:
    """Let the loops go on as if they had never been restored."""
    fit = trainer.fit_loop
    parts = (fit.epoch_loop.automatic_optimization, fit.epoch_loop.manual_optimization)
    for loop in (fit, fit.epoch_loop, fit.epoch_loop.val_loop, *parts):
        loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    for loop in (fit.epoch_loop, fit.epoch_loop.val_loop):
        loop.reset_restart_stage()
