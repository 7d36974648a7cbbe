"""`Tricks`: what `TricksMixin` switches on, as one dataclass that a checkpoint can hold as plain values."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from datetime import timedelta
from typing import Any

import torch
from torchmetrics import Metric, MetricCollection

import lightning_tricks
from lightning_tricks._callback import TrickCallback
from lightning_tricks._shared.checks import check_choice, check_names, suggests_argument_names
from lightning_tricks.gradient_clipping.core.methods import METHODS
from lightning_tricks.lr_schedules import OptimizerSpec, ScheduleSpec


@suggests_argument_names()
@dataclass(frozen=True, kw_only=True)
class Tricks:
    """What `TricksMixin` switches on: one field for each callback, the optimizer and the schedule; None means off.

    The field of a callback takes a dict of the callback's arguments, or the value of its first argument alone.
    `optimizer` and `schedule` take an `OptimizerSpec` and a `ScheduleSpec`, or a dict of their arguments. True means
    all defaults, if no argument is required, and False means None. In YAML, an object such as `AGC(...)` is written as
    `{class_path: lightning_tricks.AGC, init_args: {...}}`.

    Raises:
        TypeError: If a field has another type, or a dict names an argument that does not exist.
        ValueError: If a callback refuses a value, or a schedule is given without an optimizer.

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
    gradual_unfreezing: bool | dict[str, Any] | None = field(default=None, metadata={"callback": "GradualUnfreezing"})
    lora: int | bool | dict[str, Any] | None = field(default=None, metadata={"callback": "LoRA"})
    adapters: int | bool | dict[str, Any] | None = field(default=None, metadata={"callback": "Adapters"})
    prefix_tuning: int | bool | dict[str, Any] | None = field(default=None, metadata={"callback": "PrefixTuning"})
    trainable_checkpoint: bool | dict[str, Any] | None = field(
        default=None, metadata={"callback": "TrainableCheckpoint"}
    )
    flops: bool | dict[str, Any] | None = field(default=None, metadata={"callback": "FlopsReport"})
    model_report: str | bool | dict[str, Any] | None = field(default=None, metadata={"callback": "ModelReport"})
    metrics: dict[str, Any] | bool | Metric | MetricCollection | None = field(
        default=None, metadata={"callback": "MetricsMonitor"}
    )
    images: int | bool | dict[str, Any] | None = field(default=None, metadata={"callback": "ImageLogger"})
    device_monitor: int | bool | dict[str, Any] | None = field(default=None, metadata={"callback": "DeviceMonitor"})
    cuda_memory: int | bool | dict[str, Any] | None = field(default=None, metadata={"callback": "CudaMemory"})
    nvtx_ranges: bool | dict[str, Any] | None = field(default=None, metadata={"callback": "NvtxRanges"})
    optimizer: OptimizerSpec | bool | dict[str, Any] | None = None
    schedule: ScheduleSpec | bool | dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for trick in fields(self):
            object.__setattr__(self, trick.name, _checked_arguments(trick, getattr(self, trick.name)))
        self.callbacks()  # raises where an argument is wrong
        for name, spec in (("optimizer", OptimizerSpec), ("schedule", ScheduleSpec)):
            value = getattr(self, name)
            if isinstance(value, Mapping):
                object.__setattr__(self, name, spec(**value))
            elif value is not None and not isinstance(value, spec):
                raise TypeError(
                    f"Tricks({name}=...) must be {spec.__name__}(...) or a dict of its arguments, got {value!r}."
                )
        if self.schedule is not None and self.optimizer is None:
            raise ValueError("Tricks(schedule=...) needs optimizer=OptimizerSpec(...) beside it.")

    def callbacks(self) -> list[TrickCallback]:
        """Return a new callback for each field that is not None."""
        return [
            _build_callback(trick.name, getattr(lightning_tricks, trick.metadata["callback"]), value)
            for trick in fields(self)
            if "callback" in trick.metadata and (value := getattr(self, trick.name)) is not None
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values; `Tricks(**values)` is equal to this object."""
        specs = {name: getattr(self, name) for name in ("optimizer", "schedule")}
        values = {trick.name: getattr(self, trick.name) for trick in fields(self) if trick.name not in specs}
        if isinstance(values["metrics"], torch.nn.Module):
            values["metrics"] = {"metrics": values["metrics"]}
        return {name: _to_plain(value) for name, value in values.items()} | {
            name: spec and {part.name: _to_plain(getattr(spec, part.name)) for part in fields(spec)}
            for name, spec in specs.items()
        }


def _checked_arguments(trick: Field[Any], value: Any) -> Any:
    """Replace True by no arguments and False by None, and check the names of a dict of arguments."""
    if value is None or value is False:
        return None
    specs = {"optimizer": OptimizerSpec, "schedule": ScheduleSpec}
    takes = specs.get(trick.name) or getattr(lightning_tricks, trick.metadata["callback"])
    parameters = inspect.signature(takes).parameters
    if value is True:
        required = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
        if required:
            example = "{" + ", ".join(f"{name!r}: ..." for name in required) + "}"
            first = next(iter(parameters.values()))
            alone = "" if str(first.annotation).startswith("dict") else f", or the value of {first.name} alone"
            raise TypeError(
                f"Tricks({trick.name}=True): {takes.__name__} has no default for {' and '.join(required)}: pass a dict "
                f"such as {example}{alone}."
            )
        return {}
    if isinstance(value, Mapping) and trick.name not in specs:  # a spec checks its own
        check_names(f"Tricks({trick.name}={value!r}): {takes.__name__}", value, parameters)
    return value


def _build_callback(name: str, callback: type[TrickCallback], value: Any) -> TrickCallback:
    parameters = inspect.signature(callback).parameters
    arguments = arguments_of(callback, value)
    try:
        return callback(**{argument: _from_plain(given) for argument, given in arguments.items()})
    except (TypeError, ValueError) as error:
        reason = str(error).rstrip(".")
        known = f"{callback.__name__} takes {', '.join(parameters)}."
        raise type(error)(f"Tricks({name}={value!r}): {reason}. {known}") from error


def arguments_of(callback: type[TrickCallback], value: Any) -> Mapping[str, Any]:
    """Return the arguments of a callback from a field's value: a dict of them, or its first argument alone."""
    return value if isinstance(value, Mapping) else {next(iter(inspect.signature(callback).parameters)): value}


def _to_plain(value: Any) -> Any:
    """Replace objects of the collection by dicts of plain values, at any depth."""
    if is_dataclass(value) and not isinstance(value, type):
        if METHODS.get(type(value).__name__) is not type(value):
            raise TypeError(
                f"Tricks(...) holds a {type(value).__name__}, which cannot be saved as plain values in a checkpoint; "
                f"only {', '.join(METHODS)} can. Pass the callback that takes this object to the Trainer instead."
            )
        arguments = {part.name: _to_plain(getattr(value, part.name)) for part in fields(value)}
        return {"class_path": f"lightning_tricks.{type(value).__name__}", "init_args": arguments}
    if isinstance(value, Mapping):
        return {name: _to_plain(part) for name, part in value.items()}
    if isinstance(value, torch.nn.Module):
        if not hasattr(value, "spec"):
            raise TypeError(
                f"Tricks(metrics=...) holds a {type(value).__name__}, which cannot be saved as plain values in a "
                "checkpoint: name a preset, such as {'task': 'binary'}, or pass MetricsMonitor to the Trainer."
            )
        return _to_plain(value.spec)
    if isinstance(value, timedelta):
        return {"seconds": value.total_seconds()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return [_to_plain(part) for part in value] if isinstance(value, list | tuple) else value


def _from_plain(value: Any) -> Any:
    """Build the objects that `_to_plain` replaced; only those of `METHODS`, as the dict may be from a checkpoint."""
    if not isinstance(value, Mapping):
        return value
    if "class_path" not in value:
        return {name: _from_plain(part) for name, part in value.items()}
    check_names("an object with a class_path", value, ("class_path", "init_args"))
    known = {f"lightning_tricks.{name}": method for name, method in METHODS.items()}
    method = known[check_choice("class_path", value["class_path"], known)]
    arguments = value.get("init_args") or {}
    check_names(method.__name__, arguments, inspect.signature(method).parameters)
    return method(**arguments)
