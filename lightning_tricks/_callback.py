"""What every callback of the collection shares."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException


class TrickCallback(Callback):
    """A callback that pickles without the model and, unless it says otherwise, is one of its type in a Trainer."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a second callback of the same type."""
        count = sum(type(callback) is type(self) for callback in trainer.callbacks)  # type: ignore[attr-defined]
        if count > 1:
            raise MisconfigurationException(
                f"The Trainer has {count} {type(self).__name__} callbacks and needs one: each would do the other's "
                "work again. Remove one (TricksMixin leaves its own out when the Trainer has one)."
            )

    def __getstate__(self) -> dict[str, Any]:
        # Lightning leaves bound methods of the module here after a fit; pickled, they would carry the whole model.
        return {name: value for name, value in vars(self).items() if name not in ("log", "log_dict")}
