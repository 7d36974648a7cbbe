"""What a fit counts and schedules by steps, and the places around which steps are judged and left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_tricks._lightning_compat.guards import needs_private, overriding, set_private

if TYPE_CHECKING:
    from lightning_tricks._lightning_compat.flavor import Trainer

Around = Callable[[Callable[[], Any]], Any]  # is given what it wraps, and returns what that returns


@needs_private("SpikeGuard")
def step_progress(trainer: Trainer) -> list[dict[str, Any]]:
    """Return the counts of steps, of which `global_step` is one, as plain values."""
    return [_counts(part) for part in _progresses(trainer)]


@needs_private("SpikeGuard")
def restore_step_progress(trainer: Trainer, progress: list[dict[str, Any]]) -> None:
    """Restore what `step_progress` returned."""
    for part, state in zip(_progresses(trainer), progress, strict=True):
        part.load_state_dict(state)


def _counts(part: Any) -> dict[str, Any]:
    """Return what `state_dict` of a progress does, which calls `dataclasses.asdict`, in a tenth of the time."""
    held = vars(part)
    return dict(held) if "ready" in held else {name: _counts(value) for name, value in held.items()}


def _progresses(trainer: Trainer) -> list[Any]:
    loop: Any = trainer.fit_loop.epoch_loop
    automatic, manual = loop.automatic_optimization, loop.manual_optimization
    # `global_step` is the first with automatic, the second with manual optimization (training_epoch_loop.py).
    return [automatic.optim_progress, manual.optim_step_progress, loop.scheduler_progress]


@needs_private("SpikeGuard or Microbatching")
def ends_step(trainer: Trainer) -> bool:
    """Whether the batch that is processed, or was just done, is the last one of those of an optimizer step."""
    # Manual optimization ignores `accumulate_grad_batches`: each batch is one by itself.
    return not (trainer.lightning_module.automatic_optimization and trainer.fit_loop.epoch_loop._should_accumulate())


@needs_private("SpikeGuard")
def is_without_steps(trainer: Trainer) -> bool:
    """Whether this is the epoch in which StochasticWeightAveraging only recomputes the statistics of batch norms."""
    return bool(trainer.fit_loop._skip_backward)


@needs_private("SpikeGuard")
def hook_setter(trainer: Trainer) -> Callable[[], None]:
    """Return a function that lets the module be in the hook of now again, after an error within another one."""
    # Lightning (trainer/call.py) sets the name before a hook and puts the last one back after it, but not where the
    # hook raises: `log` would then be refused, or be taken for that of another hook.
    module: Any = trainer.lightning_module
    return partial(set_private, module, _current_fx_name=module._current_fx_name)


@contextmanager
def around_steps(
    trainer: Trainer,
    *,
    training_step: Around,
    batch: Around,
    epoch: Around,
    validation: Around,
    batches_left_out: Callable[[], int | None],
) -> Iterator[None]:
    """Wrap functions around parts of a fit, until the context is left.

    Args:
        trainer: The Trainer.
        training_step: Wrapped around the module's `training_step` alone.
        batch: Wrapped around the training step of each batch with its optimizer step.
        epoch: Wrapped around all batches of an epoch, before the hooks of its end.
        validation: Wrapped around each validation within the fit.
        batches_left_out: Returns how many batches of the epoch do not count for schedulers that are stepped by steps;
            None where the present one does not, of which nothing is sent to loggers either.
    """
    with ExitStack() as stack:
        with needs_private("SpikeGuard"):
            loop: Any = trainer.fit_loop.epoch_loop
            # Schedulers with `frequency` follow the number of the batch, which counts batches that were left out too.
            plain, connector = loop._update_learning_rates, trainer._logger_connector
            update_loggers = connector.update_train_step_metrics

            def update_learning_rates(interval: str, update_plateau_schedulers: bool) -> None:
                left_out = batches_left_out() if interval == "step" else 0
                if left_out is not None:
                    loop.batch_progress.current.ready -= left_out  # which a scheduler's `frequency` follows
                    try:
                        plain(interval=interval, update_plateau_schedulers=update_plateau_schedulers)
                    finally:
                        loop.batch_progress.current.ready += left_out

            def update_train_step_metrics() -> None:
                if batches_left_out() is not None:  # or loggers would get the values of the step before once more
                    update_loggers()

            stack.enter_context(overriding(loop, _update_learning_rates=update_learning_rates))
            stack.enter_context(overriding(connector, update_train_step_metrics=update_train_step_metrics))
            for owner, name, around in (
                (loop, "run", epoch),
                (loop.automatic_optimization, "run", batch),
                (loop.manual_optimization, "run", batch),
                (loop.val_loop, "run", validation),
                (trainer.strategy, "training_step", training_step),
            ):
                stack.enter_context(overriding(owner, **{name: _wrapped(getattr(owner, name), around)}))
        yield


def _wrapped(plain: Callable[..., Any], around: Around) -> Callable[..., Any]:
    def run_around(*args: Any, **kwargs: Any) -> Any:
        return around(partial(plain, *args, **kwargs))

    return run_around
