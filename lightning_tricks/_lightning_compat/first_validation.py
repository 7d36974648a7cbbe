"""A validation between the start of a fit and its first epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from lightning_tricks._lightning_compat.flavor import Callback, Trainer
from lightning_tricks._lightning_compat.guards import needs_private, overriding, set_private


@needs_private("ValidateFirst")
def validate_unseen(trainer: Trainer, unaware: Iterable[Callback], around: Callable[[list[Any]], Any]) -> bool:
    """Run a whole validation within a fit, after which the loops and loaders are as before; return if it had batches.

    Args:
        trainer: The Trainer, between two epochs.
        unaware: The callbacks that are not told of its end.
        around: Makes a context manager of the loaders, in which the validation runs.
    """
    loop: Any = trainer.fit_loop.epoch_loop.val_loop
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
