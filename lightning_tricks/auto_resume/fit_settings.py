"""What a fit is configured with: its settings, where they lie, and how they are set to other values."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any
from weakref import WeakKeyDictionary

from torchmetrics import Metric, MetricCollection

from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat.fit import loop_limits, set_loop_limits
from lightning_tricks._lightning_compat.flavor import LIGHTNING, Callback, LightningModule, Trainer, import_lightning
from lightning_tricks._lightning_compat.trainer import callbacks_of, datamodule_of
from lightning_tricks._shared.tensors import unsharded_class
from lightning_tricks.auto_resume.attribute_parts import are_callbacks
from lightning_tricks.auto_resume.core.configuration import (
    ABSENT,
    Change,
    Configuration,
    arguments_of,
    flatten,
    numbered,
    plain,
)
from lightning_tricks.auto_resume.trainer_parts import SHAPING_SETTINGS

_TRAINER_SETTINGS = (*SHAPING_SETTINGS, "precision")
_callbacks = import_lightning("pytorch.callbacks")
_OBSERVERS = (
    _callbacks.BasePredictionWriter,
    _callbacks.BatchSizeFinder,
    _callbacks.Checkpoint,
    _callbacks.DeviceStatsMonitor,
    _callbacks.LearningRateFinder,
    _callbacks.LearningRateMonitor,
    _callbacks.ModelSummary,
    _callbacks.ProgressBar,
    _callbacks.ThroughputMonitor,
    _callbacks.Timer,
)
# What fits of this process began with, and what they left: owner -> name -> both. Another fit of one object, as in a
# notebook, is configured with the former, unless somebody has set something else meanwhile.
_LEFT: WeakKeyDictionary[Any, dict[str, tuple[Any, Any]]] = WeakKeyDictionary()


class FitSettings:
    """The settings of a fit, by names such as "Trainer.max_epochs", as the script has made them.

    Args:
        trainer: The Trainer of the fit.
        module: The module that is trained.

    Attributes:
        now: The settings as plain values.
        places: Where values lie that can be set: name -> owner, name in it, and the value of this start.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self.trainer, self.module = trainer, module
        self.places: dict[str, tuple[Any, str, Any]] = {}
        self._began: dict[str, Any] = {}
        self._undo = ExitStack()  # the Trainer's settings
        self.now = Configuration(arguments=dict(self._arguments()))
        seed = os.environ.get("PL_GLOBAL_SEED", "")
        self.now.values["seed"] = int(seed) if seed.isdecimal() else None
        for name in _TRAINER_SETTINGS:
            self._add_value(f"Trainer.{name}", trainer, name)
        self.now.values |= {f"Trainer.{name}": value for name, value in self._limits().items()}
        self._add_layers()
        self._add_callbacks()

    def close(self) -> None:
        """Note what the fit leaves in the attributes that are compared, and leave the Trainer as it was."""
        self._undo.close()
        for label, value in self._began.items():
            owner, name, _ = self.places[label]
            with suppress(Exception):  # not hashable, or gone
                left = plain(getattr(owner, name))
                if left != plain(value):
                    _LEFT.setdefault(owner, {})[name] = value, left

    def add(self, found: Configuration) -> None:
        """Add what became known later."""
        self.now.kinds |= found.kinds
        self.now.values |= found.values

    def set_back(self, change: Change) -> bool:
        """Set a value to what it was at the first start; return whether that is possible."""
        limit = change.name.removeprefix("Trainer.")
        if limit in self._limits():
            set_loop_limits(self.trainer, {limit: change.before})
            self._undo.callback(set_loop_limits, self.trainer, {limit: change.now})
            return True
        if change.name not in self.places or change.name == "Trainer.precision" or change.before == ABSENT:
            return False
        owner, name, value = self.places[change.name]
        if not isinstance(value, bool | int | float | str | list | tuple | None):
            return False
        before = tuple(change.before) if isinstance(value, tuple) else change.before
        with suppress(Exception):  # read-only mappings, properties
            if isinstance(owner, Mapping):
                owner[name] = before  # type: ignore[index]
            else:
                setattr(owner, name, before)
            if owner is self.trainer:
                self._undo.callback(setattr, owner, name, value)
            return True
        return False

    def _limits(self) -> dict[str, Any]:
        names = ("min_epochs", "max_epochs", "min_steps", "max_steps")
        return {name: value for name, value in loop_limits(self.trainer).items() if name in names}

    def _add_value(self, label: str, owner: Any, name: str) -> None:
        value = getattr(owner, name)
        self.places[label] = owner, name, value
        with suppress(TypeError):  # not hashable
            began, left = _LEFT.get(owner, {}).get(name, (value, value))
            value = began if plain(left) == plain(value) else value
        self.now.values |= dict(flatten(label, value))
        self._began[label] = copy.copy(value) if isinstance(value, list | dict) else value

    def _arguments(self) -> Iterator[tuple[str, Any]]:
        for prefix, owner in (("hparams", self.module), ("datamodule.hparams", datamodule_of(self.trainer))):
            if owner is None:
                continue
            for name, value in owner.hparams_initial.items():  # a search does not change these
                if are_callbacks(value):
                    continue  # they are compared by themselves
                yield from flatten(f"{prefix}.{name}", value)
                self.places[f"{prefix}.{name}"] = owner.hparams, name, value

    def _add_layers(self) -> None:
        """Add classes and arguments of all layers, as far as they show: rates of dropout, activations, sizes."""
        for path, layer in self.module.named_modules():
            name = path.replace("_orig_mod.", "").removesuffix("_orig_mod").removesuffix(".")
            name = name or unsharded_class(self.module).__name__
            if isinstance(layer, Metric | MetricCollection) or path.endswith("_orig_mod"):
                continue
            self.now.kinds[name if path else "module"] = unsharded_class(layer).__name__
            for argument in arguments_of(layer):
                if path or f"hparams.{argument}" not in self.now.arguments:
                    self._add_value(f"{name}.{argument}", layer, argument)

    def _add_callbacks(self) -> None:
        changers = [callback for callback in callbacks_of(self.trainer) if _may_change(callback)]
        for label, callback in zip(numbered(changers), changers, strict=True):
            if isinstance(callback, TrickCallback):
                self.now.kinds[label] = "in use"
                values = {name: plain(getattr(callback, name)) for name in callback.training_arguments}
                self.now.values |= {f"{label}.{name}": value for name, value in values.items()}
                continue
            if type(callback).__module__.startswith(f"{LIGHTNING}."):
                self.now.kinds[label] = "in use"
            for argument in arguments_of(callback):
                self._add_value(f"{label}.{argument}", callback, argument)


def _may_change(callback: Callback) -> bool:
    """Whether a callback may change the training."""
    if isinstance(callback, TrickCallback):
        return bool(callback.training_arguments)
    return not isinstance(callback, _OBSERVERS)
