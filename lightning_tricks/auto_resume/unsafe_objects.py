"""Which hook or object put something into a checkpoint that cannot be read as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat.trainer import callbacks_of, datamodule_of

_TRAINER_ENTRIES = {
    "state_dict": "the state_dict of {module}",
    "optimizer_states": "the state_dict of an optimizer",
    "lr_schedulers": "the state_dict of a learning rate scheduler",
    "loops": "the state_dict of a data loader",
}


def describe_object(trainer: Trainer, module: LightningModule, key_path: Sequence[str], kind: str) -> str:
    """Return a phrase such as "the state_dict of X saved a Y (checkpoint['a'])" about an object in a checkpoint."""
    subscripts = "".join(f"[{key!r}]" for key in key_path)
    return f"{_describe_owner(trainer, module, key_path)} saved a {kind} (checkpoint{subscripts})"


def _describe_owner(trainer: Trainer, module: LightningModule, key_path: Sequence[str]) -> str:
    key = key_path[0]
    if key in _TRAINER_ENTRIES:
        return _TRAINER_ENTRIES[key].format(module=type(module).__name__)
    callbacks = callbacks_of(trainer)
    if key == "callbacks":
        owners = [type(callback).__name__ for callback in callbacks if callback.state_key == key_path[1]]
        return f"the state_dict of {' or '.join(owners) or key_path[1]}"
    datamodule = datamodule_of(trainer)
    if datamodule is not None and key == type(datamodule).__qualname__:
        return f"the state_dict of {key}"
    hook_owners: list[Any] = [
        part for part in (module, datamodule) if part is not None and is_overridden("on_save_checkpoint", part)
    ]
    hook_owners += [
        one for one in callbacks if is_overridden("on_save_checkpoint", one) and not isinstance(one, TrickCallback)
    ]
    return f"on_save_checkpoint of {' or '.join(type(part).__name__ for part in hook_owners) or 'a hook'}"
