"""Moments of a run that no hook marks: batches are fetched, errors are raised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from lightning_tricks._lightning_compat.guards import needs_private, overriding

if TYPE_CHECKING:
    from lightning_tricks._lightning_compat.flavor import Trainer


@contextmanager
def observe_fetches(
    trainer: Trainer, started: Callable[[str], None], ended: Callable[[str], None], trick: str
) -> Iterator[None]:
    """Call functions right before and after a batch is fetched from the loaders, until the context is left.

    Both are called with the stage: "train", "val", "test" or "predict". `ended` is also called if fetching raises, and
    where the loaders are exhausted.

    Args:
        trainer: The Trainer; it must not have started an epoch yet.
        started: Called before a batch is fetched.
        ended: Called after a batch was fetched.
        trick: The name of the trick, for the error if Lightning has changed.
    """
    with ExitStack() as stack:
        with needs_private(trick):
            epoch: Any = trainer.fit_loop.epoch_loop
            # Each gives the two methods to its fetcher as `_start_profiler` and `_stop_profiler` when an epoch begins
            # (`on_run_start`, `reset`): an override after that is not called.
            loops = (
                ("train", epoch),
                ("val", epoch.val_loop),
                ("val", trainer.validate_loop),
                ("test", trainer.test_loop),
                ("predict", trainer.predict_loop),
            )
            for stage, loop in loops:
                methods = _reporting(loop, stage, started, ended)
                stack.enter_context(overriding(loop, **methods))
        yield


@contextmanager
def observe_iterators(
    trainer: Trainer, started: Callable[[str], None], ended: Callable[[str], None], trick: str
) -> Iterator[None]:
    """Call functions right before and after the loaders' iterator for an epoch of a fit is made.

    That is where worker processes start. A batch may be fetched in advance meanwhile. For the very first epoch it may
    happen earlier, with nothing between the two calls. Arguments are those of `observe_fetches`.
    """
    with ExitStack() as stack:
        with needs_private(trick):
            epoch: Any = trainer.fit_loop.epoch_loop
            # These call `iter(data_fetcher)`, except for the first epoch, whose iterators `setup_data` makes.
            for stage, loop, name in (("train", epoch, "on_run_start"), ("val", epoch.val_loop, "reset")):
                stack.enter_context(overriding(loop, **{name: _calling(getattr(loop, name), stage, started, ended)}))
        yield


def _calling(
    plain: Callable[..., Any], stage: str, started: Callable[[str], None], ended: Callable[[str], None]
) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        started(stage)
        try:
            return plain(*args)
        # Workers that fail to start are an end as well: who waits for one would report a hang.
        finally:
            ended(stage)

    return call


def _reporting(
    loop: Any, stage: str, started: Callable[[str], None], ended: Callable[[str], None]
) -> dict[str, Callable[[], None]]:
    plain_before, plain_after = loop._on_before_fetch, loop._on_after_fetch

    def on_before_fetch() -> None:
        plain_before()
        started(stage)

    def on_after_fetch() -> None:
        # Within the profiler's span, which begins before and ends behind it.
        ended(stage)
        plain_after()

    return {"_on_before_fetch": on_before_fetch, "_on_after_fetch": on_after_fetch}


@contextmanager
def observe_validation_ends(trainer: Trainer, function: Callable[[str], None]) -> Iterator[None]:
    """Call a function with "val" when all batches of a validation of a fit are done, before the hooks of its end.

    It is called in the sanity check as well. Hooks may put other weights into the module for the time of a validation,
    and take them out again in `on_validation_epoch_end`.
    """
    with needs_private("RestoreBest"):
        # Its `_on_evaluation_epoch_end` calls the hooks of all callbacks in a row, and WeightAveraging swaps weights
        # back in one of them: who comes behind it would see the weights of training.
        loop: Any = trainer.fit_loop.epoch_loop.val_loop
        end = _calling(loop._on_evaluation_epoch_end, "val", function, lambda _: None)
    with overriding(loop, _on_evaluation_epoch_end=end):
        yield


@contextmanager
def around_validations(trainer: Trainer, around: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
    """Let a function call each validation within a fit, with all of its hooks, until the context is left.

    The function is called in the sanity check as well.
    """
    with needs_private("ExponentialMovingAverage"):
        # No two hooks are around all the others: those of some callbacks come before and after, and an error leaves out
        # the second.
        loop: Any = trainer.fit_loop.epoch_loop.val_loop
        run = loop.run
    with overriding(loop, run=lambda: around(run)):
        yield


@contextmanager
def observe_errors(trainer: Trainer, on_error: Callable[[Exception], None], trick: str) -> Iterator[None]:
    """Call a function with each error that leaves a loop of a Trainer or the setup of its strategy.

    `on_exception` is not called in processes that were forked or spawned, where the error leaves the process. An error
    that passes several loops is reported by each, the innermost first. The error is raised again.

    Args:
        trainer: The Trainer.
        on_error: What is called, on the rank on which the error was raised.
        trick: The name of the trick, for the error if Lightning has changed.
    """
    with ExitStack() as stack:
        with needs_private(trick):
            # `_call_and_handle_interrupt` (trainer/call.py), which calls `on_exception`, is around the launcher: in a
            # process that it starts, the function runs without it (strategies/launchers/multiprocessing.py).
            fit: Any = trainer.fit_loop
            loops = (fit, fit.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
            for owner, name in (*((loop, "run") for loop in loops), (trainer.strategy, "setup")):
                stack.enter_context(overriding(owner, **{name: _reporting_errors(getattr(owner, name), on_error)}))
        yield


def _reporting_errors(plain: Callable[..., Any], on_error: Callable[[Exception], None]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return plain(*args, **kwargs)
        # Not KeyboardInterrupt and SystemExit, by which a run is stopped on purpose.
        except Exception as error:
            on_error(error)
            raise

    return call
