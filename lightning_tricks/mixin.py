"""`TricksMixin`: the rooms of the collection, switched on from inside a LightningModule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import wraps
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lightning_tricks
from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat import replace_hyperparameter, restricted_classmethod
from lightning_tricks.seeding import isolated_seeding

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule as _Base
else:
    _Base = object


@dataclass(frozen=True, kw_only=True)
class Tricks:
    """What `TricksMixin` switches on: one field for each room, None when it is off.

    A field takes the arguments of the room's callback as a dict, or its first argument alone.

    Raises:
        TypeError: If a field is neither, or names an argument that the callback does not have.
        ValueError: If the callback refuses a value.

    Example:
        >>> Tricks(seeding=42, gradient_clipping={"max_norm": 1.0, "log_layers": True}).gradient_clipping
        {'max_norm': 1.0, 'log_layers': True}
    """

    seeding: int | dict[str, Any] | None = field(default=None, metadata={"callback": "SeedEverything"})
    gradient_clipping: float | dict[str, Any] | None = field(default=None, metadata={"callback": "GradientClipping"})

    def __post_init__(self) -> None:
        self.callbacks()  # raises where an argument is wrong

    def callbacks(self) -> list[TrickCallback]:
        """Build the callbacks of the fields that are on."""
        return [
            _build(trick.name, getattr(lightning_tricks, trick.metadata["callback"]), value)
            for trick in fields(self)
            if (value := getattr(self, trick.name)) is not None
        ]


def _build(name: str, callback: type[TrickCallback], value: Any) -> TrickCallback:
    parameters = inspect.signature(callback).parameters
    arguments = value if isinstance(value, Mapping) else {next(iter(parameters)): value}
    try:
        return callback(**arguments)
    except (TypeError, ValueError) as error:
        reason = str(error).rstrip(".")
        known = f"{callback.__name__} takes {', '.join(parameters)}."
        raise type(error)(f"Tricks({name}={value!r}): {reason}. {known}") from error


class TricksMixin(_Base):
    """Switch tricks on from inside a LightningModule, so that every Trainer and every user of it gets them.

    Write `class LitNet(TricksMixin, lightning.LightningModule)` and call `super().__init__(tricks=tricks)` before the
    submodules are created: with `seeding` on, their initial weights are seeded (and those of two modules with one seed
    are equal). The callbacks come through `configure_callbacks`, beside the module's own; a callback of the same type
    that the module or the user of the Trainer brings wins. `save_hyperparameters()` stores the tricks as plain dicts:
    checkpoints load with `weights_only=True`.

    Args:
        *args: For the next class's `__init__`.
        tricks: What to switch on: a `Tricks`, the dict that a checkpoint holds of one, or None for nothing.
        **kwargs: For the next class's `__init__`.

    Raises:
        TypeError: If `tricks` is none of these, or the mixin does not come before LightningModule.

    Example:
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
            callback.brought_by_module = True
            callback.before_model()
        super().__init__(*args, **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse the wrong order of bases, and keep the tricks when `configure_callbacks` does not call `super()`."""
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if torch.nn.Module in order and order.index(torch.nn.Module) < order.index(TricksMixin):
            raise TypeError(f"TricksMixin must come first: class {cls.__name__}(TricksMixin, ...).")
        if "configure_callbacks" in vars(cls):
            cls.configure_callbacks = _with_tricks(cls.configure_callbacks)  # type: ignore[method-assign, assignment]

    @restricted_classmethod
    def load_from_checkpoint(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Load as Lightning does; the seeding of the loaded module leaves no trace in the process."""
        with isolated_seeding():
            return super().load_from_checkpoint(*args, **kwargs)

    def configure_callbacks(self) -> Sequence[Callback]:
        """Return the next class's callbacks and those of the tricks that neither it nor the Trainer has."""
        return self._add_missing(super().configure_callbacks())

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: Sequence[str] | str | None = None,
        frame: FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Save the arguments of `__init__` as Lightning does, a `Tricks` among them as a plain dict."""
        caller = inspect.currentframe()
        frame = frame or (caller and caller.f_back)
        super().save_hyperparameters(*args, ignore=ignore, frame=frame, logger=logger)
        for name, value in self.hparams.items():
            if isinstance(value, Tricks):
                replace_hyperparameter(self, name, asdict(value))

    def _add_missing(self, own: Sequence[Callback] | Callback) -> list[Callback]:
        if "_trick_callbacks" not in vars(self):
            raise MisconfigurationException(
                f"{type(self).__name__}.__init__ did not reach TricksMixin: call super().__init__(tricks=tricks) in it."
            )
        tricks = self._trick_callbacks
        others = [callback for callback in ([own] if isinstance(own, Callback) else own) if callback not in tricks]
        present = [*others, *self._callbacks_of_trainer()]
        return others + [trick for trick in tricks if not any(isinstance(c, type(trick)) for c in present)]

    def _callbacks_of_trainer(self) -> list[Callback]:
        """Return the Trainer's callbacks but those of a module that it fitted before, which ours shall replace."""
        try:
            callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        except RuntimeError:  # no Trainer yet
            return []
        return [c for c in callbacks if not getattr(c, "brought_by_module", False) or c in self._trick_callbacks]


def _as_tricks(tricks: Tricks | Mapping[str, Any] | None) -> Tricks:
    if isinstance(tricks, Tricks):
        return tricks
    if tricks is None or isinstance(tricks, Mapping):
        return Tricks(**(tricks or {}))
    raise TypeError(f"tricks must be a Tricks, a dict of its fields or None, got {tricks!r} ({type(tricks).__name__}).")


def _with_tricks(
    configure_callbacks: Callable[[TricksMixin], Sequence[Callback] | Callback],
) -> Callable[[TricksMixin], list[Callback]]:
    @wraps(configure_callbacks)
    def wrapper(self: TricksMixin) -> list[Callback]:
        return self._add_missing(configure_callbacks(self))

    return wrapper
