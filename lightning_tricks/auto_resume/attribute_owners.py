"""The objects whose attributes are saved, and which of their attributes something else restores."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    Checkpoint,
    LearningRateFinder,
    ModelPruning,
    ModelSummary,
    ProgressBar,
    StochasticWeightAveraging,
    Timer,
)
from torch import nn

from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat.fit_end import averaged_models
from lightning_tricks._lightning_compat.results import named_callbacks
from lightning_tricks._lightning_compat.trainer import callbacks_of, datamodule_of
from lightning_tricks._torch_compat.hooks import hooks_of
from lightning_tricks.auto_resume.core.attributes.model_structure import optimizer_extras
from lightning_tricks.auto_resume.core.attributes.object_walk import ObjectWalk
from lightning_tricks.auto_resume.core.attributes.user_code import is_callable_with_state

# Their attributes belong to the process, or another part of this room restores them
_EXCLUDED_CALLBACKS = (
    BatchSizeFinder,
    Checkpoint,
    LearningRateFinder,
    ModelSummary,
    ProgressBar,
    StochasticWeightAveraging,
    Timer,
    TrickCallback,
)

# By name: its module takes long to import, and is there if the callback is
_SAVES_CONFIG = ("lightning.pytorch.cli", "SaveConfigCallback")


class AttributeOwners:
    """Lists the objects of a fit whose attributes are saved.

    Args:
        trainer: The Trainer of the fit.
        module: The module that is trained.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self.trainer, self.module = trainer, module
        self._restored_by_others: set[int] = set()  # ids of objects, gathered once for each walk

    def module_and_callbacks(self) -> dict[str, object]:
        """Return the module, the datamodule and the callbacks whose attributes are saved, by name."""
        self._update_restored_by_others()
        datamodule = datamodule_of(self.trainer)
        callbacks = {
            name: one for name, one in named_callbacks(self.trainer).items() if not isinstance(one, _EXCLUDED_CALLBACKS)
        }
        return {"module": self.module, **({} if datamodule is None else {"datamodule": datamodule}), **callbacks}

    def optimizer_attributes(self) -> dict[str, Any]:
        """Return what optimizers hold beside their state dicts, and the module, whose parameters that may be."""
        self._update_restored_by_others()
        return {"module": self.module, **optimizer_extras(self.trainer.optimizers)}

    def skipped_names(self, owner: object) -> Collection[str]:
        """Return the names of the attributes that others restore; "state_dict" if they restore the object itself."""
        is_restored = id(owner) in self._restored_by_others
        return (*_lightning_attributes(owner), *(("state_dict",) if is_restored else ()))

    def skipped_names_in_optimizers(self, owner: object) -> Collection[str]:
        """Return what `skipped_names` does, and all attributes of modules, which are saved with the modules."""
        is_module = issubclass(type(owner), nn.Module)
        return (*dir(type(owner)), *vars(owner)) if is_module else self.skipped_names(owner)

    def walk(self) -> ObjectWalk:
        """Return a walk over the module, the datamodule and the callbacks."""
        return ObjectWalk.from_roots(self.module_and_callbacks(), self.skipped_names)

    def called_in_steps(self, walk: ObjectWalk) -> list[object]:
        """Return what a training step may call: the objects with attributes, others of the Trainer, and functions."""
        trainer = self.trainer
        found = [slot.value for slot in walk.slots.values() if is_callable_with_state(type(slot.value))]
        found += [hook for part in self.module.modules() for hook in hooks_of(part)]
        for optimizer in trainer.optimizers:
            found += [*hooks_of(optimizer), optimizer.step]  # which may have been replaced
        found += [config.scheduler for config in trainer.lr_scheduler_configs]
        found += [trainer.strategy, trainer.precision_plugin, *trainer.loggers, *callbacks_of(trainer)]
        return [*walk.owners.values(), *found]

    def _update_restored_by_others(self) -> None:
        """Gather the optimizers, the schedulers and the averaged weights that Lightning saves."""
        trainer = self.trainer
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._restored_by_others = {id(one) for one in (*trainer.optimizers, *schedulers, *averaged_models(trainer))}


def _lightning_attributes(owner: object) -> Collection[str]:
    """Return the names of the attributes that are Lightning's, or callbacks, which are owners themselves."""
    kind = type(owner)  # a proxy answers `isinstance` as it likes
    if issubclass(kind, LightningModule):
        callbacks = {name for name, value in vars(owner).items() if _contains_callbacks_only(value)}
        return _default_attributes(LightningModule) | {"forward"} | callbacks  # DDP binds `forward` for each step
    if issubclass(kind, LightningDataModule):
        return _default_attributes(LightningDataModule) | {"state_dict"}
    if issubclass(kind, ModelPruning):
        return ("log", "log_dict", "state_dict", "_original_layers")
    if any((base.__module__, base.__name__) == _SAVES_CONFIG for base in kind.__mro__):
        return ("log", "log_dict", "state_dict", "parser", "config")  # of the process: some 50,000 objects
    return ("log", "log_dict", "state_dict") if issubclass(kind, Callback) else ()


def _contains_callbacks_only(value: object) -> bool:
    parts = value if isinstance(value, list | tuple) else [value]
    return bool(parts) and all(issubclass(type(part), Callback) for part in parts)


@cache
def _default_attributes(kind: type) -> frozenset[str]:
    return frozenset(vars(kind()))
