"""The end of training, and what callbacks that average weights make of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_tricks._lightning_compat.guards import needs_private

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import StochasticWeightAveraging


def call_after_train_end(trainer: Trainer, function: Callable[[], None]) -> Callable[[], None]:
    """Call a function after the `on_train_end` of all callbacks and the module; return what ends that.

    Some of them change the weights there, such as those that average them, and no hook comes after all of them.
    """
    with needs_private("AutoResume"):
        fit: Any = trainer.fit_loop
        on_run_end = fit.on_run_end

    def on_run_end_then_call() -> None:
        on_run_end()
        function()

    fit.on_run_end = on_run_end_then_call

    def close() -> None:
        vars(fit).pop("on_run_end", None)

    return close


def restore_swa_scheduler(trainer: Trainer, swa: StochasticWeightAveraging) -> None:
    """Let an ended fit have the scheduler of weight averaging, which is else made at the start of an epoch only."""
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
        swa._swa_scheduler = SWALR(optimizer, swa_lr=state["base_lrs"])
        swa._swa_scheduler.load_state_dict(state)
        for group, values in zip(optimizer.param_groups, before, strict=True):
            group.update(values)  # a new scheduler sets the learning rate
        trainer.lr_scheduler_configs.append(LRSchedulerConfig(swa._swa_scheduler))


@needs_private("AutoResume")
def restore_swa_max_epochs(trainer: Trainer, swa: StochasticWeightAveraging) -> None:
    """Take back the epoch that it adds for batch statistics, in a fit that had ended and was not trained again."""
    if swa._model_contains_batch_norm and swa._max_epochs != -1:
        trainer.fit_loop.max_epochs = swa._max_epochs
