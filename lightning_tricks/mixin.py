"""`TricksMixin`: the rooms of the collection, switched on from inside a LightningModule."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from datetime import timedelta
from functools import wraps
from types import FrameType
from typing import IO, TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.nn.modules.module import _IncompatibleKeys
from torchmetrics import Metric, MetricCollection

import lightning_tricks
from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat.hyperparameters import replace_hyperparameter, restricted_classmethod
from lightning_tricks._lightning_compat.imports import other_import_style
from lightning_tricks._lightning_compat.trainer import callbacks_of
from lightning_tricks._shared.checks import check_choice, check_names, proposes_names
from lightning_tricks._shared.patterns import check_repeats
from lightning_tricks._shared.rng import isolated_seeding
from lightning_tricks.checkpoint_remapping import CheckpointRemapping, load_weights
from lightning_tricks.checkpoint_remapping.hyperparameters import values_in
from lightning_tricks.checkpoint_remapping.lightning_checkpoint import ReadWeights
from lightning_tricks.checkpoint_remapping.load_from_checkpoint import (
    TEXTS_OF_FILE,
    make_module,
    read_for_module,
    texts_in,
)
from lightning_tricks.gradient_clipping.core.methods import METHODS
from lightning_tricks.lr_schedules import OptimizerSpec, ScheduleSpec, build_optimizer, build_schedule

if TYPE_CHECKING:
    _Base = LightningModule
else:
    _Base = object

# The texts in the tricks that the caller of `load_from_checkpoint` gives
_TEXTS_OF_CALLER: ContextVar[frozenset[str]] = ContextVar("texts of the caller's tricks", default=frozenset())


@proposes_names()
@dataclass(frozen=True, kw_only=True)
class Tricks:
    """What `TricksMixin` switches on: one field for each room, None when it is off.

    The field of a callback takes its arguments as a dict, or its first argument alone; `optimizer` and `schedule` take
    an `OptimizerSpec` and a `ScheduleSpec`, or their arguments as a dict. True stands for all defaults, where no
    argument is required, and False for None. Where YAML needs an object of the collection, such as `AGC`, it is
    `{class_path: lightning_tricks.AGC, init_args: {...}}`.

    Raises:
        TypeError: If a field is none of these, or names an argument that there is not.
        ValueError: If a value is refused, or there is a schedule without an optimizer.

    Example:
        >>> Tricks(seeding=42, gradient_clipping={"max_norm": 1.0, "log_layers": True}).gradient_clipping
        {'max_norm': 1.0, 'log_layers': True}
    """

    seeding: int | bool | dict[str, Any] | None = field(default=None, metadata={"callback": "SeedEverything"})
    auto_resume: str | bool | dict[str, Any] | None = field(default=None, metadata={"callback": "AutoResume"})
    run_fingerprint: str | bool | dict[str, Any] | None = field(default=None, metadata={"callback": "RunFingerprint"})
    gradient_clipping: float | bool | dict[str, Any] | None = field(
        default=None, metadata={"callback": "GradientClipping"}
    )
    checkpoint_remapping: str | bool | dict[str, Any] | None = field(
        default=None, metadata={"callback": "CheckpointRemapping"}
    )
    flops: bool | dict[str, Any] | None = field(default=None, metadata={"callback": "FlopsReport"})
    model_report: str | bool | dict[str, Any] | None = field(default=None, metadata={"callback": "ModelReport"})
    metrics: dict[str, Any] | bool | Metric | MetricCollection | None = field(
        default=None, metadata={"callback": "MetricsMonitor"}
    )
    images: int | bool | dict[str, Any] | None = field(default=None, metadata={"callback": "ImageLogger"})
    optimizer: OptimizerSpec | bool | dict[str, Any] | None = None
    schedule: ScheduleSpec | bool | dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for trick in fields(self):
            object.__setattr__(self, trick.name, _arguments_or_none(trick, getattr(self, trick.name)))
        self.callbacks()  # raises where an argument is wrong
        for name, spec in (("optimizer", OptimizerSpec), ("schedule", ScheduleSpec)):
            value = getattr(self, name)
            if isinstance(value, Mapping):
                object.__setattr__(self, name, spec(**value))
            elif value is not None and not isinstance(value, spec):
                raise TypeError(f"Tricks({name}={value!r}): must be a {spec.__name__} or a dict of its arguments.")
        if self.schedule is not None and self.optimizer is None:
            raise ValueError("Tricks(schedule=...) needs optimizer=OptimizerSpec(...) beside it.")

    def callbacks(self) -> list[TrickCallback]:
        """Build the callbacks of the fields that are on."""
        return [
            _build(trick.name, getattr(lightning_tricks, trick.metadata["callback"]), value)
            for trick in fields(self)
            if "callback" in trick.metadata and (value := getattr(self, trick.name)) is not None
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, from which `Tricks(**fields)` makes the same again."""
        specs = {name: getattr(self, name) for name in ("optimizer", "schedule")}
        values = {trick.name: getattr(self, trick.name) for trick in fields(self) if trick.name not in specs}
        if isinstance(values["metrics"], torch.nn.Module):
            values["metrics"] = {"metrics": values["metrics"]}
        return {name: _plain(value) for name, value in values.items()} | {
            name: spec and {part.name: _plain(getattr(spec, part.name)) for part in fields(spec)}
            for name, spec in specs.items()
        }


def _arguments_or_none(trick: Field[Any], value: Any) -> Any:
    """Return what a field is given, with True and False as what they stand for; misspelled names are found."""
    if value is None or value is False:
        return None
    specs = {"optimizer": OptimizerSpec, "schedule": ScheduleSpec}
    takes = specs.get(trick.name) or getattr(lightning_tricks, trick.metadata["callback"])
    parameters = inspect.signature(takes).parameters
    if value is True:
        required = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
        if required:
            example = "{" + ", ".join(f"{name!r}: ..." for name in required) + "}"
            raise TypeError(
                f"Tricks({trick.name}=True): {takes.__name__} has no default for {' and '.join(required)}: give a dict "
                f"such as {example}, or the value of {next(iter(parameters))} alone."
            )
        return {}
    if isinstance(value, Mapping) and trick.name not in specs:  # a spec checks its own
        check_names(f"Tricks({trick.name}={value!r}): {takes.__name__}", value, parameters)
    return value


def _build(name: str, callback: type[TrickCallback], value: Any) -> TrickCallback:
    parameters = inspect.signature(callback).parameters
    arguments = _arguments(callback, value)
    try:
        return callback(**{argument: _object(given) for argument, given in arguments.items()})
    except (TypeError, ValueError) as error:
        reason = str(error).rstrip(".")
        known = f"{callback.__name__} takes {', '.join(parameters)}."
        raise type(error)(f"Tricks({name}={value!r}): {reason}. {known}") from error


def _arguments(callback: type[TrickCallback], value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {next(iter(inspect.signature(callback).parameters)): value}


def _plain(value: Any) -> Any:
    """Turn objects of the collection into dicts of plain values, at any depth."""
    if is_dataclass(value) and not isinstance(value, type):
        if METHODS.get(type(value).__name__) is not type(value):
            raise TypeError(
                f"Tricks(...) holds a {type(value).__name__}, which a checkpoint cannot describe: it knows "
                f"{', '.join(METHODS)}. Give the callback that takes it to the Trainer."
            )
        arguments = {part.name: _plain(getattr(value, part.name)) for part in fields(value)}
        return {"class_path": f"lightning_tricks.{type(value).__name__}", "init_args": arguments}
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, torch.nn.Module):
        if not hasattr(value, "spec"):
            raise TypeError(
                f"Tricks(metrics=...) holds a {type(value).__name__}, of which there are no plain values to save: name "
                "a preset, such as {'task': 'binary'}, or give MetricsMonitor to the Trainer."
            )
        return _plain(value.spec)
    if isinstance(value, timedelta):
        return {"seconds": value.total_seconds()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def _object(value: Any) -> Any:
    """Turn such dicts into objects again; only the listed descriptions, so that a checkpoint builds nothing else."""
    if not isinstance(value, Mapping):
        return value
    if "class_path" not in value:
        return {name: _object(part) for name, part in value.items()}
    check_names("an object of class_path", value, ("class_path", "init_args"))
    known = {f"lightning_tricks.{name}": method for name, method in METHODS.items()}
    method = known[check_choice("class_path", value["class_path"], known)]
    arguments = value.get("init_args") or {}
    check_names(method.__name__, arguments, inspect.signature(method).parameters)
    return method(**arguments)


class TricksMixin(_Base):
    """Switch tricks on from inside a LightningModule, so that every Trainer and every user of it gets them.

    Write `class LitNet(TricksMixin, lightning.LightningModule)` and call `super().__init__(tricks=tricks)` before the
    submodules are created: with `seeding` on, their initial weights are seeded (and those of two modules with one seed
    are equal). The callbacks come through `configure_callbacks`, beside the module's own; a callback of the same type
    that the module or the user of the Trainer brings wins, as does a `configure_optimizers` of the module over
    `Tricks(optimizer=..., schedule=...)`. `save_hyperparameters()` stores the tricks as plain dicts:
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
        self.tricks = _without_files_of_checkpoint(_as_tricks(tricks))
        self._trick_callbacks = self.tricks.callbacks()
        for callback in self._trick_callbacks:
            callback.added_by_mixin = True
            callback.before_module_init()
        super().__init__(*args, **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse the wrong order of bases, and keep the tricks when `configure_callbacks` does not call `super()`."""
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if torch.nn.Module in order and order.index(torch.nn.Module) < order.index(TricksMixin):
            raise TypeError(f"TricksMixin must come first: class {cls.__name__}(TricksMixin, ...).")
        if remedy := other_import_style(cls):
            raise TypeError(f"class {cls.__name__}(TricksMixin, ...): {remedy}")
        if "configure_callbacks" in vars(cls):
            cls.configure_callbacks = _with_tricks(cls.configure_callbacks)  # type: ignore[method-assign, assignment]

    @restricted_classmethod
    def load_from_checkpoint(
        cls: Any,  # noqa: N805  # a classmethod
        checkpoint_path: str | os.PathLike[str] | IO[bytes],
        map_location: Any = None,
        hparams_file: str | os.PathLike[str] | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Load as Lightning does, but run no code of the file, and take weights of any names and formats.

        The file is read by `read_checkpoint`, whatever `weights_only` says, and its weights are mapped as
        `Tricks(checkpoint_remapping=...)` says, or as `load_weights` does by itself; `load_report` says what was done.
        The seeding of the loaded module leaves no trace in the process.

        Hyper-parameters are plain values: objects that LightningCLI would build from the class paths in them have to be
        given as arguments. Of the tricks among them, what names a file or a folder is left out with a warning, and
        `auto_resume` with it, unless the caller gives it (`tricks=...`).

        Raises:
            CheckpointError: Of the room `checkpoint_remapping`, if the file is unsafe, is none, or does not fit.
        """
        with isolated_seeding():
            checkpoint, beside = read_for_module(checkpoint_path, map_location, hparams_file)
            token = _TEXTS_OF_CALLER.set(_texts_of_tricks(kwargs))
            try:
                return make_module(cls, checkpoint, beside, strict, kwargs)
            finally:
                _TEXTS_OF_CALLER.reset(token)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load as torch does; inside `load_from_checkpoint`, what `checkpoint_remapping` makes of the file."""
        if not isinstance(state_dict, ReadWeights):
            return super().load_state_dict(state_dict, *args, **kwargs)
        remapping = CheckpointRemapping(**_arguments(CheckpointRemapping, self.tricks.checkpoint_remapping or {}))
        options = remapping.options()
        if not (args[0] if args else kwargs.get("strict", True)):
            options |= {"allow_missing": "*", "allow_unexpected": "*"}
        self.load_report = load_weights(self, state_dict.as_checkpoint(), **options)
        rank_zero_info(f"{type(self).__name__}: loaded {state_dict.origin.source}. {self.load_report}")
        return _IncompatibleKeys([], [])

    def configure_callbacks(self) -> Sequence[Callback]:
        """Return the next class's callbacks and those of the tricks that neither it nor the Trainer has."""
        return self._add_missing(super().configure_callbacks())

    def configure_optimizers(self) -> Any:
        """Return the next class's optimizers or, where it has none of its own, those of the tricks."""
        own = super().configure_optimizers
        if getattr(own, "__func__", None) is not LightningModule.configure_optimizers:
            return own()
        spec = cast(OptimizerSpec | None, self.tricks.optimizer)
        if spec is None:
            raise MisconfigurationException(
                f"{type(self).__name__} has no configure_optimizers, and its tricks no optimizer: write one, or set "
                "Tricks(optimizer=OptimizerSpec(...))."
            )
        optimizer = build_optimizer(self, spec)
        schedule = cast(ScheduleSpec | None, self.tricks.schedule)
        if schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": build_schedule(optimizer, schedule, self.trainer)}

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
                replace_hyperparameter(self, name, value.as_dict())

    def _add_missing(self, own: Sequence[Callback] | Callback) -> list[Callback]:
        if "_trick_callbacks" not in vars(self):
            raise MisconfigurationException(
                f"{type(self).__name__}.__init__ did not reach TricksMixin: call super().__init__(tricks=tricks) in it."
            )
        if self.tricks.optimizer is not None and _finds_own_optimizers(type(self)):
            rank_zero_info(
                f"{type(self).__name__} has a configure_optimizers of its own: it decides, not Tricks(optimizer=...)."
            )
        tricks = self._trick_callbacks
        others = [callback for callback in ([own] if isinstance(own, Callback) else own) if callback not in tricks]
        present = [*others, *self._callbacks_of_trainer()]
        return others + [trick for trick in tricks if not any(isinstance(c, type(trick)) for c in present)]

    def _callbacks_of_trainer(self) -> list[Callback]:
        """Return the Trainer's callbacks but those of a module that it fitted before, which ours shall replace."""
        try:
            callbacks: list[Callback] = callbacks_of(self.trainer)
        except RuntimeError:  # no Trainer yet
            return []
        return [c for c in callbacks if not getattr(c, "added_by_mixin", False) or c in self._trick_callbacks]


def _texts_of_tricks(given: Mapping[str, Any]) -> frozenset[str]:
    """Return the texts of the tricks among the arguments of a caller, wherever they lie."""
    names = {trick.name for trick in fields(Tricks)}
    found = [part for part in values_in(given) if isinstance(part, Tricks)]
    tables = [part for part in values_in(given) if isinstance(part, Mapping)]
    return texts_in([*found, *(table[name] for table in tables for name in table.keys() & names)])


def _without_files_of_checkpoint(tricks: Tricks) -> Tricks:
    """Return tricks that name no file or folder which the checkpoint that is being loaded names.

    Raises:
        ValueError: If it holds a regular expression that could take very long.
    """
    texts = TEXTS_OF_FILE.get() - _TEXTS_OF_CALLER.get()
    for text in texts_in(tricks) & texts:
        if text.startswith("re:"):
            check_repeats(text[3:])
    changed: dict[str, Any] = {}
    dropped = []
    for trick in fields(tricks):
        value = getattr(tricks, trick.name)
        if value is None or "callback" not in trick.metadata:
            continue
        callback: type[TrickCallback] = getattr(lightning_tricks, trick.metadata["callback"])
        arguments = _arguments(callback, value)
        named = callback.paths_among(arguments, texts)
        if named:
            dropped += [f"{trick.name}.{name}={arguments[name]!r}" for name in named]
            needed = any(callback.needs(name) for name in named)
            changed[trick.name] = None if needed else {n: given for n, given in arguments.items() if n not in named}
    if not dropped:
        return tricks
    rank_zero_warn(
        f"The checkpoint's tricks name files or folders: {', '.join(dropped)}. A checkpoint does not decide what is "
        "read, written or resumed here, and they are left out. If you want them, give the tricks yourself: "
        "load_from_checkpoint(path, tricks=Tricks(...))."
    )
    return replace(tricks, **changed)


def _finds_own_optimizers(module: type[TricksMixin]) -> bool:
    owners = [base for base in module.__mro__ if "configure_optimizers" in vars(base)]
    return owners[0] is not TricksMixin or owners[1] is not LightningModule


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
