"""Moments of a fit that no hook marks, and the methods of the loops that are overridden to report them."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from lightning_tricks._lightning_compat.flavor import import_lightning
from lightning_tricks._lightning_compat.guards import needs_private, overriding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lightning_tricks._lightning_compat.flavor import Trainer


class FitObserver:
    """What `observe_fit` calls, in this order; none of these methods does anything here."""

    def on_optimizers_created(self) -> None:
        """Called after the optimizers were created, and before the hooks of the fit's start."""

    def before_signals_registered(self) -> None:
        """Called before the Trainer notes the signal handlers that it restores at its end, and registers its own."""

    def on_signals_registered(self) -> None:
        """Called after the Trainer has registered its own signal handlers."""

    def sampler_epoch(self, epoch: int) -> int:
        """Return the epoch that the samplers are set to; the Trainer would set them to `epoch`."""
        return epoch

    def before_loaders_created(self, kind: str, epoch: int) -> int:
        """Return the epoch in which the "training" or "validation" loaders are to be created, which is `epoch`."""
        return epoch

    def after_loaders_created(self, kind: str) -> None:
        """Called after "training" or "validation" loaders were created without an error."""

    def on_train_loaders_ready(self, loaders: list[Any], all_sized: bool) -> None:
        """Called after the training loaders were created, and before their iterators are."""

    def on_validation_loaders_ready(self, loaders: list[Any], reloaded: bool) -> None:
        """Called after the validation loaders were created, and before their iterators are.

        With `reloaded`, they are others than before, as the Trainer reloads them.
        """

    def before_epoch_start_hooks(self) -> None:
        """Called before the hooks of an epoch's start."""

    def is_resuming(self) -> bool:
        """Return whether the epoch that begins resumes in the middle."""
        return False

    def before_epoch_iterators(self) -> None:
        """Called before the iterators of an epoch are created, if `on_train_loaders_ready` did not create them."""

    def before_first_batch(self, finish_batch: Callable[[], None]) -> None:
        """Called before the first batch; `finish_batch` does what follows a batch, validation included."""

    def after_batch(self) -> None:
        """Called after a batch is done and logged, and before the validation that may be due."""


@contextmanager
def observe_fit(trainer: Trainer, observer: FitObserver) -> Iterator[None]:
    """Call an observer at the moments of a fit that no hook marks, until the context is left."""
    loops = _ObservedLoops(trainer, observer)
    with ExitStack() as stack:
        for owner, methods in loops.overrides():
            stack.enter_context(overriding(owner, **methods))
        yield


class _ObservedLoops:
    """Methods that call an observer, and the method of the loop that each of them overrides."""

    def __init__(self, trainer: Trainer, observer: FitObserver) -> None:
        self._observer = observer
        with needs_private("AutoResume"):
            data = import_lightning("fabric.utilities.data")
            self._set_sampler_epoch, self._sized_len = data._set_sampler_epoch, data.sized_len
            self._strategy: Any = trainer.strategy
            self._signals: Any = trainer._signal_connector
            self._fit: Any = trainer.fit_loop
            self._epoch: Any = trainer.fit_loop.epoch_loop
            self._validation: Any = trainer.fit_loop.epoch_loop.val_loop
            self._plain_strategy, self._plain_signals, self._plain_fit, self._plain_validation, self._plain_epoch = [
                {name: getattr(owner, name) for name in methods}  # looked up before they are overridden
                for owner, methods in self.overrides()
            ]
        # Whether `on_advance_start` runs: it calls `setup_data` first and the epoch's hooks next, with nothing to
        # override in between (loops/fit_loop.py).
        self._in_advance_start = False
        self._seen_validation_loader: Any = None

    def overrides(self) -> list[tuple[Any, dict[str, Callable[..., Any]]]]:
        """Return the parts of the Trainer with the methods that override theirs, by name."""
        return [
            (self._strategy, {"setup_optimizers": self._setup_optimizers}),
            (self._signals, {"register_signal_handlers": self._register_signal_handlers}),
            (
                self._fit,
                {
                    "_load_combined_loader_states": self._load_combined_loader_states,
                    "setup_data": self._setup_train_data,
                    "on_advance_start": self._on_advance_start,
                },
            ),
            (self._validation, {"setup_data": self._setup_validation_data}),
            (
                self._epoch,
                {"reset": self._reset, "on_run_start": self._on_run_start, "on_advance_end": self._on_advance_end},
            ),
        ]

    def _setup_optimizers(self, trainer: Trainer) -> None:
        self._plain_strategy["setup_optimizers"](trainer)
        self._observer.on_optimizers_created()

    def _register_signal_handlers(self) -> None:
        self._observer.before_signals_registered()
        self._plain_signals["register_signal_handlers"]()
        self._observer.on_signals_registered()

    def _load_combined_loader_states(self) -> None:
        parts = _parts_of(_combined_loader(self._fit))
        epoch = self._observer.sampler_epoch(self._fit.epoch_progress.current.processed)
        # Lightning does so in `on_advance_start`, after the first iterators are made: in a resumed run, these would
        # draw the order of another epoch.
        for part in parts:
            self._set_sampler_epoch(part, epoch)
        self._observer.on_train_loaders_ready(parts, all(self._sized_len(part) is not None for part in parts))
        self._plain_fit["_load_combined_loader_states"]()

    def _setup_train_data(self) -> None:
        # The condition on which `setup_data` returns early, as it tells nobody whether it did anything.
        is_due = _combined_loader(self._fit) is None or _reloads(self._fit, "_should_reload_train_dl")
        with self._created_in_its_epoch("training") if is_due else nullcontext():
            self._plain_fit["setup_data"]()
        if self._in_advance_start:
            self._observer.before_epoch_start_hooks()

    @contextmanager
    def _created_in_its_epoch(self, kind: str) -> Iterator[None]:
        """Let `trainer.current_epoch` be the one in which loaders were created first, while they are created."""
        # `train_dataloader` may read `trainer.current_epoch`, for a seed or a curriculum, and is called in a later
        # epoch by a resumed run.
        progress = self._fit.epoch_progress.current
        epoch = progress.completed  # which `current_epoch` returns
        progress.completed = self._observer.before_loaders_created(kind, epoch)
        try:
            yield
        finally:
            progress.completed = epoch
        self._observer.after_loaders_created(kind)

    def _on_advance_start(self) -> None:
        self._in_advance_start = True
        try:
            self._plain_fit["on_advance_start"]()
        finally:
            self._in_advance_start = False

    def _setup_validation_data(self) -> None:
        # Before the original, which notes the epoch, so that the answer would be another one after it.
        reloaded = _reloads(self._validation, "_should_reload_val_dl")
        is_due = _combined_loader(self._validation) is None or reloaded
        with self._created_in_its_epoch("validation") if is_due else nullcontext():
            self._plain_validation["setup_data"]()
        loader = _combined_loader(self._validation)
        if loader is not None and loader is not self._seen_validation_loader:
            self._seen_validation_loader = loader
            self._observer.on_validation_loaders_ready(_parts_of(loader), reloaded)

    def _reset(self) -> None:
        if not self._observer.is_resuming():
            self._plain_epoch["reset"]()  # it would take the restored position for the middle of a step

    def _on_run_start(self, fetcher: Any) -> None:
        # From the second epoch on, `on_run_start` makes the iterators, which draws from torch's global generator.
        self._observer.before_epoch_iterators()
        self._plain_epoch["on_run_start"](fetcher)
        self._observer.before_first_batch(lambda: self._plain_epoch["on_advance_end"](fetcher))

    def _on_advance_end(self, fetcher: Any) -> None:
        self._observer.after_batch()
        self._plain_epoch["on_advance_end"](fetcher)


@needs_private("AutoResume")
def _combined_loader(loop: Any) -> Any:
    return loop._combined_loader


@needs_private("AutoResume")
def _parts_of(combined_loader: Any) -> list[Any]:
    return list(combined_loader.flattened)


@needs_private("AutoResume")
def _reloads(loop: Any, flag: str) -> bool:
    return bool(getattr(loop, flag))
