"""Values that the Trainer logs, and their keys."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from lightning_tricks._lightning_compat.guards import needs_private, overriding, set_private
from lightning_tricks._lightning_compat.trainer import callbacks_of, is_fast_dev_run

if TYPE_CHECKING:
    from torch import Tensor

    from lightning_tricks._lightning_compat.flavor import Trainer


@needs_private("logging at the logger's interval")
def logs_at_this_step(trainer: Trainer) -> bool:
    """Whether the Trainer sends this step's values to its loggers (`log_every_n_steps`)."""
    # As `update_train_step_metrics` (logger_connector.py) asks.
    return bool(trainer._logger_connector.should_update_logs or is_fast_dev_run(trainer))


def log_step_values(trainer: Trainer, source: str, values: Mapping[str, Tensor]) -> None:
    """Log values of a training step, which nobody changes in place, from any hook within it.

    Unlike `LightningModule.log`, this does not check the arguments anew at each step, which takes ten times as long,
    and drops nothing: in the first batch of an epoch, `log` drops what a hook has logged where another one logs in
    between, as a callback does between the two halves of a GAN's step.
    """
    with needs_private(f"logging by {source}", TypeError):
        results: Any = trainer.fit_loop.epoch_loop._results  # as `trainer._results`, which looks for the loop that runs
        for name, value in values.items():
            known = results.get(f"{source}.{name}")
            if known is not None and known.value is value and not known.has_reset:
                continue
            if known is not None and known.value.device == value.device and known.value.dtype == value.dtype:
                set_private(known, value=value, _forward_cache=value, has_reset=False)  # as `update` does with a copy
            else:
                results.log(source, name, value, on_step=True, on_epoch=False, batch_size=1)


def log_epoch_value(trainer: Trainer, source: str, name: str, value: Tensor, *, to_loggers: bool = True) -> None:
    """Log a value of an epoch that is equal on all ranks, from a callback's hook at the end of the epoch.

    `LightningModule.log` would average it with what the module logs under this name in the same hook. It would also
    warn that the value is not synchronised, or synchronise it, with a rounding error. Callbacks see it in any case.
    """
    with needs_private(f"logging by {source}", TypeError):
        results: Any = trainer._results
        # Under a hook's name, `results` would add this value to the module's (result.py: the key is hook and name).
        known = results.get(f"{source}.{name}")
        if known is not None and known.value.device == value.device:
            results.update_metrics(f"{source}.{name}", value, 1)  # takes a tenth of the time
        else:
            of_epoch = {"on_step": False, "on_epoch": True, "batch_size": 1}
            # `sync_dist` silences the warning in `_get_cache` (result.py), and with `rank_zero_only` nothing is
            # exchanged all the same (`_generate_sync_fn`).
            results.log(source, name, value, logger=to_loggers, sync_dist=True, rank_zero_only=True, **of_epoch)


def keys_logged_by_others(trainer: Trainer, source: str, *, include_reset: bool = False) -> dict[str, str]:
    """Return what others than `source` have logged in this stage: key -> hook, or source.

    The keys are those that loggers or callbacks see, with the suffixes `_step`, `_epoch` and `/dataloader_idx_<n>`.

    Args:
        trainer: The Trainer.
        source: The `source` of `log_epoch_value` that is left out.
        include_reset: Whether to include what was logged in epochs that are over.
    """
    with needs_private(f"logging by {source}"):
        keys: dict[str, str] = {}
        for item in trainer._results.values():  # type: ignore[union-attr]
            meta = item.meta
            if meta.fx == source or (item.has_reset and not include_reset):
                continue
            index = meta.dataloader_idx if meta.add_dataloader_idx else None
            suffix = "" if index is None else f"/dataloader_idx_{index}"
            # `log` (result.py) adds the number of the loader to the hook's name.
            hook = meta.fx.removesuffix(f".{index}")
            for name in (meta.name, meta.forked_name(on_step=True), meta.forked_name(on_step=False)):
                keys[name + suffix] = hook
        return keys


def drop_reset_values(trainer: Trainer, source: str, keys: Collection[str]) -> None:
    """Drop the results of others than `source` that were logged under some keys in epochs that are over."""
    with needs_private(f"logging by {source}"):
        results: Any = trainer._results
        # A key keeps its place in the dict, and of equal names the last one wins (result.py, `metrics`): others who log
        # theirs after `source` would stand before it, from the epoch before, and lose.
        outdated = [
            key for key, item in results.items() if item.has_reset and item.meta.name in keys and item.meta.fx != source
        ]
        for key in outdated:
            del results[key]


@needs_private("logging to the loggers")
def logger_step(trainer: Trainer) -> int:
    """Return the step under which the Trainer sends values to its loggers now."""
    # Not `global_step`, which with several optimizers counts each of them (logger_connector.py, `log_metrics`).
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def epoch_end_step(trainer: Trainer) -> int:
    """Return the step at which the Trainer's loggers show values of the epoch that ends, in `on_train_epoch_end`."""
    # FitLoop takes one away while it logs the values of the epoch (`on_advance_end`), after the hooks.
    return max(logger_step(trainer) - 1, 0)


@contextmanager
def observe_logged_values(trainer: Trainer, function: Callable[[Mapping[str, Any]], None]) -> Iterator[None]:
    """Call a function with all values that the Trainer sends to its loggers under a step, also if it has no logger.

    These are tensors and numbers, before they are read from the device; those of the single batches of an evaluation
    are left out, as they are not logged under a step of the fit.
    """
    with needs_private("RunReport"):
        connector = trainer._logger_connector
        # Here, and not in a logger: `log_metrics` returns early without one, and turns tensors into numbers, which
        # waits for the device.
        log_metrics = connector.log_metrics

    def observed(metrics: Any, step: int | None = None) -> None:
        if step is None:
            function(metrics)
        log_metrics(metrics, step=step)

    with overriding(connector, log_metrics=observed):
        yield


@contextmanager
def observe_log_calls(trainer: Trainer, function: Callable[[str, str], None]) -> Iterator[None]:
    """Call a function with the stage and the name of each value that is about to be logged by `log`.

    The stage is "train", "val" or "test". A value may be synchronised over the ranks right after that.
    """
    with ExitStack() as stack:
        with needs_private("HangWatch"):
            epoch: Any = trainer.fit_loop.epoch_loop
            # Each loop has its own results, and `trainer._results` names those of the loop that runs now alone.
            loops = {"train": [epoch], "val": [epoch.val_loop, trainer.validate_loop], "test": [trainer.test_loop]}
            for stage, loop in ((stage, loop) for stage, of in loops.items() for loop in of):
                results: Any = loop._results

                def log(fx: str, name: str, *args: Any, of: Any = (stage, results.log), **kwargs: Any) -> None:
                    function(of[0], name)
                    of[1](fx, name, *args, **kwargs)

                stack.enter_context(overriding(results, log=log))
        yield


def log_to_loggers(trainer: Trainer, values: dict[str, float], step: int) -> None:
    """Send values of rank zero to the loggers; unlike `LightningModule.log`, this neither copies nor synchronises.

    Callbacks with a method `on_values_sent` are told as well.
    """
    if trainer.is_global_zero and values:
        # Values in the results of the loop would be sent with those of another step, or once more.
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step)
        for callback in callbacks_of(trainer):
            if (listener := getattr(callback, "on_values_sent", None)) is not None:
                listener(trainer, values, step)
