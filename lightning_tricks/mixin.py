"""`TricksMixin`: the rooms of the collection, switched on from inside a LightningModule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import wraps
from types import FrameType
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback

from lightning_tricks._lightning_compat import replace_hyperparameter
from lightning_tricks.gradient_clipping import GradientClipping
from lightning_tricks.seeding import SeedEverything

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule as _Base
else:
    _Base = object


@dataclass(frozen=True, kw_only=True)
class Tricks:
    """What `TricksMixin` switches on: one field for each room, None when it is off.

    A field takes the callback's arguments as a dict, or its first argument alone.

    Args:
        seeding: The seed, or the arguments of `SeedEverything`.
        gradient_clipping: The largest norm, or the arguments of `GradientClipping`.

    Raises:
        TypeError: If a field is neither, or names an argument that the callback does not have.
        ValueError: If the callback refuses a value.

    Example:
        >>> Tricks(seeding=42, gradient_clipping={"max_norm": 1.0, "log_layers": True}).gradient_clipping
        {'max_norm': 1.0, 'log_layers': True}
    """

    seeding: int | dict[str, Any] | None = field(default=None, metadata={"callback": SeedEverything})
    gradient_clipping: float | dict[str, Any] | None = field(default=None, metadata={"callback": GradientClipping})

    def __post_init__(self) -> None:
        self.callbacks()  # raises where an argument is wrong

    def callbacks(self) -> list[Callback]:
        """Build the callbacks of the fields that are on."""
        return [
            _build(trick.name, trick.metadata["callback"], value)
            for trick in fields(self)
            if (value := getattr(self, trick.name)) is not None
        ]


def _build(name: str, callback: type[Callback], value: Any) -> Callback:
    parameters = inspect.signature(callback).parameters
    arguments = value if isinstance(value, Mapping) else {next(iter(parameters)): value}
    try:
        return callback(**arguments)
    except (TypeError, ValueError) as error:
        known = f"{callback.__name__} takes {', '.join(parameters)}."
        raise type(error)(f"Tricks({name}={value!r}): {error} {known}") from error


class TricksMixin(_Base):
    """Switch tricks on from inside a LightningModule, so that every Trainer and every user of it gets them.

    Write `class LitNet(TricksMixin, lightning.LightningModule)` and call `super().__init__(tricks=tricks)` before the
    submodules are created: with `seeding` on, their initial weights are seeded. The callbacks come through
    `configure_callbacks`, beside the module's own; a callback of the same type that the user gave to the Trainer wins.
    `save_hyperparameters()` stores the tricks as plain dicts, so that checkpoints load with `weights_only=True`.

    Args:
        *args: Go on to the next class.
        tricks: What to switch on: a `Tricks`, the dict that a checkpoint holds of one, or None for nothing.
        **kwargs: Go on to the next class.

    Raises:
        TypeError: If `tricks` is none of these.

    Example:
        >>> from lightning.pytorch import LightningModule
        >>> class LitNet(TricksMixin, LightningModule):
        ...     def __init__(self, tricks: Tricks | None = None) -> None:
        ...         super().__init__(tricks=tricks)
        ...         self.save_hyperparameters()
        >>> LitNet(Tricks(gradient_clipping=1.0)).hparams
        "tricks": {'seeding': None, 'gradient_clipping': 1.0}
    """

    def __init__(self, *args: Any, tricks: Tricks | Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self.tricks = _as_tricks(tricks)
        self._trick_callbacks = self.tricks.callbacks()
        for callback in self._trick_callbacks:
            if isinstance(callback, SeedEverything):
                callback.apply()
        super().__init__(*args, **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep the tricks when a module defines `configure_callbacks` without calling `super()`."""
        super().__init_subclass__(**kwargs)
        if "configure_callbacks" in vars(cls):
            cls.configure_callbacks = _with_tricks(cls.configure_callbacks)  # type: ignore[method-assign, assignment]

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
        callbacks = [own] if isinstance(own, Callback) else list(own)
        try:
            present = [*callbacks, *self.trainer.callbacks]  # type: ignore[attr-defined]
        except RuntimeError:  # no Trainer yet
            present = callbacks
        missing = [trick for trick in self._trick_callbacks if not any(isinstance(c, type(trick)) for c in present)]
        return callbacks + missing


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
