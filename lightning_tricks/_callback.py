"""What every callback of the collection shares."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

_HOOKS_OF_STEPS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_test_batch_start",
    "on_test_batch_end",
)


class TrickCallback(Callback):
    """A callback that pickles without the model and is, unless `allows_several`, the only one of its type in a Trainer.

    Attributes:
        allows_several: Whether several of its type make sense in one Trainer.
        brought_by_module: Whether a module's `TricksMixin` made it, not the user of the Trainer.
    """

    allows_several = False
    brought_by_module = False

    def before_model(self) -> None:
        """Do what must precede the creation of a module's submodules; `TricksMixin` calls it there."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a second callback of the same type, and leave out the hooks that would do nothing at each step."""
        count = sum(isinstance(callback, type(self)) for callback in trainer.callbacks)  # type: ignore[attr-defined]
        if count > 1 and not self.allows_several:
            raise MisconfigurationException(
                f"The Trainer has {count} {type(self).__name__} callbacks and needs one: each would do the other's "
                "work again. Remove one."
            )

        # Lightning passes over what cannot be called; for each of the others it enters a context of its profiler
        idle = [name for name in _HOOKS_OF_STEPS if getattr(type(self), name) is getattr(Callback, name)]
        vars(self).update(dict.fromkeys(idle))

    def __getstate__(self) -> dict[str, Any]:
        # Lightning leaves bound methods of the module here after a fit; pickled, they would carry the whole model.
        return {name: value for name, value in vars(self).items() if name not in ("log", "log_dict")}
