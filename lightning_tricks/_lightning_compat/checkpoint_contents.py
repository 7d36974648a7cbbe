"""What the Trainer is about to write into a checkpoint, and what it is about to restore from one."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning_tricks._lightning_compat.guards import needs_private, overriding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lightning.pytorch import Trainer


@contextmanager
def checkpoint_contents_changed(
    trainer: Trainer,
    after_dump: Callable[[dict[str, Any]], object],
    before_restore: Callable[[dict[str, Any]], object],
) -> Iterator[None]:
    """Let functions change the contents of checkpoints until the context is left, whoever writes and reads the files.

    Args:
        trainer: The Trainer.
        after_dump: Called with each checkpoint when all hooks have made their changes to it, on each rank.
        before_restore: Called with a checkpoint that was read before the module's hook sees it and its weights are
            loaded, on each rank.
    """
    with needs_private("TrainableCheckpoint"):
        connector: Any = trainer._checkpoint_connector
        dump, restore = connector.dump_checkpoint, connector.restore_model

    def dump_checkpoint(*args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint: dict[str, Any] = dump(*args, **kwargs)
        after_dump(checkpoint)
        return checkpoint

    def restore_model() -> None:
        with needs_private("TrainableCheckpoint"):
            checkpoint: dict[str, Any] = connector._loaded_checkpoint
        if checkpoint:
            before_restore(checkpoint)
        restore()

    with overriding(connector, dump_checkpoint=dump_checkpoint, restore_model=restore_model):
        yield
