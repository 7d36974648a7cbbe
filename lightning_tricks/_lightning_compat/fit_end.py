"""The end of training, and what callbacks that average weights make of it."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from lightning_tricks._lightning_compat.guards import needs_private, overriding, set_private
from lightning_tricks._lightning_compat.trainer import callbacks_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import StochasticWeightAveraging


@contextmanager
def call_after_train_end(trainer: Trainer, function: Callable[[], None]) -> Iterator[None]:
    """Call a function after the `on_train_end` of all callbacks and the module, until the context is left.

    Some of them change the weights there, such as those that average them, and no hook comes after all of them.
    """
    with needs_private("AutoResume"):
        fit: Any = trainer.fit_loop
        on_run_end = fit.on_run_end

    def on_run_end_then_call() -> None:
        on_run_end()
        function()

    with overriding(fit, on_run_end=on_run_end_then_call):
        yield


@contextmanager
def closed_on_exception(trainer: Trainer, stack: ExitStack) -> Iterator[None]:
    """Close a stack when the Trainer is interrupted, until the context is left.

    For modules: Lightning calls their `teardown` only after a fit that ends.
    """
    strategy = trainer.strategy
    on_exception = strategy.on_exception

    def close_first(exception: BaseException) -> None:
        stack.close()
        on_exception(exception)

    with overriding(strategy, on_exception=close_first):
        yield


def restore_swa_scheduler(trainer: Trainer, swa: StochasticWeightAveraging) -> None:
    """Give a fit that had ended the scheduler of weight averaging, which is otherwise created at an epoch's start."""
    import torch
    from lightning.pytorch.utilities.types import LRSchedulerConfig
    from torch.optim.swa_utils import SWALR

    with needs_private("AutoResume"):
        state = swa._scheduler_state
        if state is None or swa._swa_scheduler is not None:
            return
        optimizer = trainer.optimizers[0]
        before = [
            {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
        ]
        scheduler = SWALR(optimizer, swa_lr=state["base_lrs"])
        scheduler.load_state_dict(state)
        set_private(swa, _swa_scheduler=scheduler)
        if swa.n_averaged is None:
            swa.n_averaged = torch.tensor(swa._init_n_averaged)
        for group, values in zip(optimizer.param_groups, before, strict=True):
            group.update(values)  # a new scheduler sets the learning rate
        trainer.lr_scheduler_configs.append(LRSchedulerConfig(scheduler))


@needs_private("AutoResume")
def averaged_models(trainer: Trainer) -> list[Any]:
    """Return the averaged models that callbacks of the type WeightAveraging hold and save; None before they do."""
    import lightning.pytorch.callbacks

    averaging = getattr(lightning.pytorch.callbacks, "WeightAveraging", ())  # since Lightning 2.6
    callbacks: list[Any] = [callback for callback in callbacks_of(trainer) if isinstance(callback, averaging)]
    return [callback._average_model for callback in callbacks]


@needs_private("AutoResume")
def restore_swa_max_epochs(trainer: Trainer, swa: StochasticWeightAveraging) -> None:
    """Undo the epoch that weight averaging adds for batch statistics, in a fit that had ended and was not trained."""
    if swa._model_contains_batch_norm and swa._max_epochs != -1:
        trainer.fit_loop.max_epochs = swa._max_epochs
