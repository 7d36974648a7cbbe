"""`TricksMixin`: callbacks, optimizer and schedule of the collection, switched on from inside a LightningModule."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from lightning_tricks._lightning_compat.flavor import (
    Callback,
    LightningModule,
    MisconfigurationException,
    other_flavor,
    rank_zero_info,
)
from lightning_tricks._lightning_compat.hyperparameters import replace_hyperparameter, restricted_classmethod
from lightning_tricks._lightning_compat.trainer import callbacks_of
from lightning_tricks._shared.added_parameters import RECORD_KEY
from lightning_tricks._shared.calibration import prepare_calibrations
from lightning_tricks._shared.rng import isolated_seeding
from lightning_tricks.checkpoint_remapping import CheckpointRemapping, load_weights
from lightning_tricks.checkpoint_remapping.load_from_checkpoint import (
    SafeStateDict,
    build_module,
    read_module_checkpoint,
)
from lightning_tricks.lr_schedules import OptimizerSpec, ScheduleSpec, build_optimizer, build_schedule
from lightning_tricks.tricks import Tricks, arguments_of

if TYPE_CHECKING:
    _Base = LightningModule
else:
    _Base = object


class TricksMixin(_Base):
    """Switch tricks on inside a LightningModule, so that every Trainer that runs the module uses them.

    Write `class LitNet(TricksMixin, lightning.LightningModule)` and call `super().__init__(tricks=tricks)` before the
    submodules are created: with `seed_everything` on, their initial weights are seeded (two modules with the same seed
    have equal weights). `configure_callbacks` adds the callbacks to the module's own; a callback of the same type that
    the module or the Trainer has already is kept instead, and so is the module's own `configure_optimizers` instead of
    `Tricks(optimizer=..., schedule=...)`. `save_hyperparameters()` stores the tricks as plain dicts, so that
    checkpoints load with `weights_only=True`.

    Args:
        *args: Passed to the `__init__` of the next class.
        tricks: What to switch on: a `Tricks`, the dict of one from a checkpoint, or None for nothing.
        **kwargs: Passed to the `__init__` of the next class.

    Raises:
        TypeError: If `tricks` has another type, or the mixin does not come before LightningModule.

    Examples:
        >>> from lightning.pytorch import LightningModule
        >>> class LitNet(TricksMixin, LightningModule):
        ...     def __init__(self, tricks: Tricks | None = None) -> None:
        ...         super().__init__(tricks=tricks)
        ...         self.save_hyperparameters()
        >>> LitNet(Tricks(gradient_clipping=1.0)).hparams.tricks["gradient_clipping"]
        1.0
    """

    def __init__(self, *args: Any, tricks: Tricks | Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self.tricks = _as_tricks(tricks)
        self._trick_callbacks = self.tricks.callbacks()
        for callback in self._trick_callbacks:
            callback.added_by_mixin = True
            callback.before_module_init()
        super().__init__(*args, **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check the order of the base classes, and add the tricks if `configure_callbacks` does not call `super()`."""
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if torch.nn.Module in order and order.index(torch.nn.Module) < order.index(TricksMixin):
            raise TypeError(f"TricksMixin must come first: class {cls.__name__}(TricksMixin, ...).")
        if remedy := other_flavor(cls):
            raise TypeError(f"class {cls.__name__}(TricksMixin, ...): {remedy}")
        owner = next(base for base in order if "configure_callbacks" in vars(base))
        if owner is cls or not issubclass(owner, TricksMixin):  # that of a base before the mixin hides it
            cls.configure_callbacks = _with_tricks(cls.configure_callbacks)  # type: ignore[method-assign, assignment]

    @restricted_classmethod
    def load_from_checkpoint(
        cls: Any,  # noqa: N805  # a classmethod
        checkpoint_path: str | os.PathLike[str],
        map_location: Any = None,
        hparams_file: str | os.PathLike[str] | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Load a module as Lightning does, but without running code from the file, and with weights of any names.

        The file is read by `read_checkpoint`, whatever `weights_only` is. Its weights are mapped to the module by the
        options of `Tricks(checkpoint_remapping=...)`, or by the defaults of `load_weights`; the module's `load_report`
        lists what was loaded. What `TrainableCheckpoint` left out is compared with the new module and taken from it.
        Seeding in the module's `__init__` does not change the random state of the process.

        Hyper-parameters are plain values: objects, and arguments that were not saved, have to be given; one error lists
        them all. While a module is built of hyper-parameters of a file, a `Tricks` that is made names no file or
        folder: fields that do so are off, with a warning. One of the caller (`tricks=Tricks(...)`) stays as it is.

        Args:
            checkpoint_path: A path or a URL.
            map_location: The device of the tensors; None keeps those that they were saved on, as far as they are there.
            hparams_file: Refused: give what such a file holds as arguments.
            strict: Whether weights that are missing or not used are an error; None for the module's `strict_loading`.
            weights_only: Accepted for compatibility; the file is always read without unpickling objects.
            **kwargs: Arguments of the module, which replace its hyper-parameters.

        Returns:
            The module.

        Raises:
            CheckpointError: If the file is unsafe, is not a checkpoint, or does not fit the module.
        """
        with isolated_seeding():
            read = read_module_checkpoint(checkpoint_path, map_location, hparams_file)
            return build_module(cls, read, strict, kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict as torch does; in `load_from_checkpoint`, map the names of its weights first."""
        if not isinstance(state_dict, SafeStateDict):
            return super().load_state_dict(state_dict, *args, **kwargs)
        for callback in self._trick_callbacks:
            if adapt := getattr(callback, "adapt", None):
                adapt(self)  # the file has what it adds, under names of its own
        strict = args[0] if args else kwargs.get("strict", True)
        if RECORD_KEY in state_dict.origin.metadata:  # it lacks what the module was built with
            from lightning_tricks.finetuning.core.trainable_weights import complete_state_dict

            saved = {**state_dict.origin.metadata, "state_dict": state_dict}
            state_dict = SafeStateDict(state_dict.origin, complete_state_dict(self, saved, strict=strict))
        prepare_calibrations(self, state_dict)
        remapping = CheckpointRemapping(**arguments_of(CheckpointRemapping, self.tricks.checkpoint_remapping or {}))
        options = remapping.load_options()
        if not strict:
            options |= {"allow_missing": "*", "allow_unexpected": "*"}
        weights = replace(state_dict.origin, state_dict=dict(state_dict))  # hooks of the module may have changed them
        self.load_report = load_weights(self, weights, **options)
        rank_zero_info(f"{type(self).__name__}: loaded {state_dict.origin.source}. {self.load_report}")
        return nn.Module().load_state_dict({})  # no key is missing or unexpected

    def configure_callbacks(self) -> Sequence[Callback]:
        """Return the callbacks of the next class, and those of the tricks that neither it nor the Trainer has."""
        return self._add_missing(super().configure_callbacks())

    def configure_optimizers(self) -> Any:
        """Return the optimizers of the next class or, if it does not define any, those of the tricks."""
        own = super().configure_optimizers
        if getattr(own, "__func__", None) is not LightningModule.configure_optimizers:
            return own()
        spec = cast(OptimizerSpec | None, self.tricks.optimizer)
        if spec is None:
            raise MisconfigurationException(
                f"{type(self).__name__} does not define configure_optimizers, and its tricks have no optimizer: define "
                "it, or set Tricks(optimizer=OptimizerSpec(...))."
            )
        optimizer = build_optimizer(self, spec)
        schedule = cast(ScheduleSpec | None, self.tricks.schedule)
        if schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": build_schedule(optimizer, schedule, self.trainer)}

    def save_hyperparameters(
        self, *args: Any, ignore: Sequence[str] | str | None = None, frame: FrameType | None = None, logger: bool = True
    ) -> None:
        """Save the arguments of `__init__` as Lightning does, with each `Tricks` as a plain dict."""
        caller = inspect.currentframe()
        frame = frame or (caller and caller.f_back)
        super().save_hyperparameters(*args, ignore=ignore, frame=frame, logger=logger)
        for name, value in self.hparams.items() if isinstance(self.hparams, dict) else ():  # or an OmegaConf
            plain = _with_plain_tricks(value)
            if plain is not value:
                replace_hyperparameter(self, name, plain)

    def _add_missing(self, own: Sequence[Callback] | Callback) -> list[Callback]:
        if "_trick_callbacks" not in vars(self):
            raise MisconfigurationException(
                f"{type(self).__name__}.__init__ does not call TricksMixin.__init__: "
                "add super().__init__(tricks=tricks)."
            )
        if self.tricks.optimizer is not None and _finds_own_optimizers(type(self)):
            rank_zero_info(f"{type(self).__name__} defines configure_optimizers, so Tricks(optimizer=...) is not used.")
        tricks = self._trick_callbacks
        others = [callback for callback in ([own] if isinstance(own, Callback) else own) if callback not in tricks]
        present = [*others, *self._callbacks_of_trainer()]
        return others + [trick for trick in tricks if not any(isinstance(c, type(trick)) for c in present)]

    def _callbacks_of_trainer(self) -> list[Callback]:
        """Return the Trainer's callbacks without those of another module that it fitted before."""
        try:
            callbacks: list[Callback] = callbacks_of(self.trainer)
        except RuntimeError:  # no Trainer yet
            return []
        return [c for c in callbacks if not getattr(c, "added_by_mixin", False) or c in self._trick_callbacks]


def _finds_own_optimizers(module: type[TricksMixin]) -> bool:
    owners = [base for base in module.__mro__ if "configure_optimizers" in vars(base)]
    return owners[0] is not TricksMixin or owners[1] is not LightningModule


def _as_tricks(tricks: Tricks | Mapping[str, Any] | None) -> Tricks:
    if isinstance(tricks, Tricks):
        return tricks
    if tricks is None or isinstance(tricks, Mapping):
        return Tricks(**(tricks or {}))
    raise TypeError(f"tricks must be a Tricks, a dict of its fields or None, got {tricks!r} ({type(tricks).__name__}).")


def _with_plain_tricks(value: Any, around: tuple[Any, ...] = ()) -> Any:
    """Return a value in which each `Tricks` is a plain dict, also in dicts, lists and tuples; itself if it has none.

    Args:
        value: The value.
        around: The containers around it, which are left as they are where they lie in themselves.
    """
    if isinstance(value, Tricks):
        return value.as_dict()
    if type(value) not in (dict, list, tuple) or any(value is container for container in around):
        return value
    parts = list(value.values() if type(value) is dict else value)
    plain = [_with_plain_tricks(part, (*around, value)) for part in parts]
    if all(new is old for new, old in zip(plain, parts, strict=True)):
        return value
    return dict(zip(value, plain, strict=True)) if type(value) is dict else type(value)(plain)


def _with_tricks(
    configure_callbacks: Callable[[TricksMixin], Sequence[Callback] | Callback],
) -> Callable[[TricksMixin], list[Callback]]:
    @wraps(configure_callbacks)
    def wrapper(self: TricksMixin) -> list[Callback]:
        return self._add_missing(configure_callbacks(self))

    return wrapper
