"""`Tricks`: what `TricksMixin` switches on, as one dataclass that a checkpoint can hold as plain values."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, fields, is_dataclass
from datetime import timedelta
from difflib import get_close_matches
from typing import Any, Literal

import torch
from torchmetrics import Metric, MetricCollection

import lightning_tricks
from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat.flavor import rank_zero_warn
from lightning_tricks._shared.checks import check_choice, check_names, check_path, check_spec, suggests_argument_names
from lightning_tricks.checkpoint_remapping.load_from_checkpoint import IS_BUILT_OF_FILE
from lightning_tricks.gradient_clipping.core.methods import METHODS
from lightning_tricks.lr_schedules import OptimizerSpec, ScheduleSpec

_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "classification": {"seed_everything": 42, "gradient_clipping": 1.0, "flops_report": True, "model_report": True},
    "regression": {
        "seed_everything": 42,
        "gradient_clipping": 1.0,
        "metrics_monitor": {"metrics": {"task": "regression"}},
        "flops_report": True,
        "model_report": True,
    },
    "finetune": {
        "seed_everything": 42,
        "gradient_clipping": 1.0,
        "lora": 8,
        "trainable_checkpoint": True,
        "model_report": True,
    },
    "reproducible": {"seed_everything": {"seed": 42, "deterministic": "warn"}},
}


@suggests_argument_names()
@dataclass(frozen=True, kw_only=True)
class Tricks:
    """What `TricksMixin` switches on: one field for each callback, the optimizer and the schedule; None means off.

    The field of a callback takes a dict of the callback's arguments, or the value of its first argument alone.
    `optimizer` and `schedule` take an `OptimizerSpec` and a `ScheduleSpec`, or a dict of their arguments. True means
    all defaults, if no argument is required, and False means None. In YAML, an object such as `AGC(...)` is written as
    `{class_path: lightning_tricks.gradient_clipping.AGC, init_args: {...}}`.

    Args:
        seed_everything: `SeedEverything`: the seed, from which the initial weights and all other random numbers come.
        auto_resume: `AutoResume`: the directory from which a run is resumed that was killed.
        run_fingerprint: `RunFingerprint`: the file that tells later where two runs diverge.
        run_report: `RunReport`: the folder of a page that shows the run.
        gradient_clipping: `GradientClipping`: the largest norm of the gradients, or another method of clipping.
        microbatching: `Microbatching`: the largest number of rows of a microbatch; True finds it when memory runs out.
        spike_guard: `SpikeGuard`: "skip" or "rewind", which leave out the batches at which the loss jumps.
        exponential_moving_average: `ExponentialMovingAverage`: the decay of the average of the weights (EMA).
        checkpoint_remapping: `CheckpointRemapping`: the file from which weights of any names are loaded.
        gradual_unfreezing: `GradualUnfreezing`: which parameters train from which epoch on, as `{0: "fc.*", 5: "*"}`.
        lora: `LoRA`: the rank of the change that is trained instead of the weights.
        adapters: `Adapters`: the width of the small networks that are trained instead of the weights.
        prefix_tuning: `PrefixTuning`: the number of keys and values that are trained instead of the weights.
        trainable_checkpoint: `TrainableCheckpoint`: checkpoints that hold only what trained.
        flops_report: `FlopsReport`: the FLOPs of each module, and the utilization of the device.
        model_report: `ModelReport`: parameters, layers and memory, with the suffixes of the files of a graph.
        metrics_monitor: `MetricsMonitor`: the metrics of what the steps return, as `{"task": "binary"}`.
        image_logger: `ImageLogger`: the number of images that are logged, the most confident mistakes first.
        prediction_writer: `PredictionWriter`: the file with the predictions of all ranks and loaders.
        device_monitor: `DeviceMonitor`: the number of steps between two readings of GPUs, CPU and loaders.
        cuda_memory: `CudaMemory`: the peak of the GPU memory, and a report when memory runs out.
        nvtx_ranges: `NvtxRanges`: marks of the parts of a step for Nsight Systems.
        restore_best: `RestoreBest`: the value whose smallest one is the best; the module ends with the weights of then.
        hang_watch: `HangWatch`: after what time without a move each rank writes where it is, as `"10 minutes"`.
        end_together: `EndTogether`: True ends an epoch of training where the first rank has no more batches.
        validate_first: `ValidateFirst`: True validates once before the first step.
        optimizer: The optimizer, of a module without `configure_optimizers`.
        schedule: The learning rate schedule of this optimizer.
        verbose: Whether the callbacks print their tables. None leaves that to them, and to the variable
            `LIGHTNING_TRICKS_VERBOSE` (1 or 0).

    Raises:
        TypeError: If a field has another type, or a dict names an argument that does not exist.
        ValueError: If a callback refuses a value, or a schedule is given without an optimizer.

    Examples:
        >>> Tricks(seed_everything=42, gradient_clipping={"max_norm": 1.0, "log_layers": True}).gradient_clipping
        {'max_norm': 1.0, 'log_layers': True}
    """

    seed_everything: int | bool | dict[str, Any] | None = None
    auto_resume: str | bool | dict[str, Any] | None = None
    run_fingerprint: str | bool | dict[str, Any] | None = None
    run_report: str | bool | dict[str, Any] | None = None
    gradient_clipping: float | bool | dict[str, Any] | None = None
    microbatching: int | bool | dict[str, Any] | None = None
    spike_guard: str | bool | dict[str, Any] | None = None
    exponential_moving_average: float | bool | dict[str, Any] | None = None
    checkpoint_remapping: str | bool | dict[str, Any] | None = None
    gradual_unfreezing: bool | dict[str, Any] | None = None
    lora: int | bool | dict[str, Any] | None = None
    adapters: int | bool | dict[str, Any] | None = None
    prefix_tuning: int | bool | dict[str, Any] | None = None
    trainable_checkpoint: bool | dict[str, Any] | None = None
    flops_report: bool | dict[str, Any] | None = None
    model_report: str | bool | dict[str, Any] | None = None
    metrics_monitor: dict[str, Any] | bool | Metric | MetricCollection | None = None
    image_logger: int | bool | dict[str, Any] | None = None
    prediction_writer: str | bool | dict[str, Any] | None = None
    device_monitor: int | bool | dict[str, Any] | None = None
    cuda_memory: int | bool | dict[str, Any] | None = None
    nvtx_ranges: bool | dict[str, Any] | None = None
    restore_best: str | bool | dict[str, Any] | None = None
    hang_watch: str | bool | dict[str, Any] | None = None
    end_together: bool | list[str] | dict[str, Any] | None = None
    validate_first: bool | dict[str, Any] | None = None
    optimizer: OptimizerSpec | bool | dict[str, Any] | None = None
    schedule: ScheduleSpec | bool | dict[str, Any] | None = None
    verbose: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.verbose, bool | None):
            raise TypeError(f"Tricks(verbose=...) must be True, False or None, got {self.verbose!r}.")
        for trick in (trick for trick in fields(self) if trick.name != "verbose"):
            object.__setattr__(self, trick.name, _copied(_checked_arguments(trick, getattr(self, trick.name))))
        if IS_BUILT_OF_FILE.get():
            self._forget_paths()
        self.callbacks()  # raises where an argument is wrong
        for name, spec in (("optimizer", OptimizerSpec), ("schedule", ScheduleSpec)):
            object.__setattr__(self, name, check_spec(f"Tricks({name}=...)", getattr(self, name), spec))
        if self.schedule is not None and self.optimizer is None:
            raise ValueError("Tricks(schedule=...) needs optimizer=OptimizerSpec(...) as well.")

    def _forget_paths(self) -> None:
        """Switch off the fields that name a file or a folder: a module is being built of what a file says."""
        off = []
        for trick in fields(self):
            value = getattr(self, trick.name)
            callback = callback_of(trick.name)
            if value is None or callback is None:
                continue
            given, parameters = arguments_of(callback, value), inspect.signature(callback).parameters
            for name in callback.path_arguments:
                path = given.get(name)
                if isinstance(path, str | bytes | os.PathLike) and path != parameters[name].default:
                    off.append(f"{trick.name}.{name}={path!r}")
                    object.__setattr__(self, trick.name, None)
        if off:
            rank_zero_warn(
                "These tricks are off, as a checkpoint must not decide which files are read or written: "
                f"{', '.join(off)}. To use them, pass load_from_checkpoint(path, tricks=Tricks(...)) or all arguments "
                "of the module; or create the module yourself, and call load_weights(module, path)."
            )

    @classmethod
    def preset(
        cls,
        name: Literal["classification", "regression", "finetune", "reproducible"],
        *,
        num_classes: int | None = None,
        dirpath: str | None = None,
        **fields: Any,
    ) -> Tricks:
        """Return tricks that go well together.

        All presets seed with 42. "classification" and "regression" clip the gradient norm to 1, measure, and report
        the model and its FLOPs. "finetune" trains a low-rank change (`LoRA`) of rank 8, clips, saves what trained alone
        and reports the model. "reproducible" asks torch for deterministic algorithms, with a warning where there is
        none, and records the fingerprint of each step in `dirpath` if there is one.

        Args:
            name: The name of the preset.
            num_classes: The number of classes. "classification" without it measures the accuracy and the loss alone,
                "finetune" and "reproducible" nothing. A regression has none.
            dirpath: The directory in which the run is saved, and from which it is resumed; None for neither.
            **fields: Fields that replace those of the preset; None switches one off.

        Raises:
            TypeError: If there is no such field, or it has a wrong type.
            ValueError: If there is no such preset, or a value is wrong.

        Examples:
            >>> Tricks.preset("regression", seed_everything=7).callbacks()[0].seed
            7
        """
        check_choice("preset", name, _PRESETS)
        check_names("Tricks.preset", fields, [*inspect.signature(cls).parameters, "num_classes", "dirpath"])
        if name == "regression" and num_classes is not None:
            raise ValueError(
                f"num_classes={num_classes!r}: the preset 'regression' measures errors of numbers. Use the preset "
                "'classification', or leave num_classes out."
            )
        chosen = dict(_PRESETS[name])
        if name == "classification" or num_classes is not None:
            chosen["metrics_monitor"] = {"metrics": {"task": "multiclass", "num_classes": num_classes}}
        if dirpath is not None:
            chosen["auto_resume"] = {"dirpath": os.fspath(check_path("dirpath", dirpath, "a folder"))}
            if name == "reproducible":
                chosen["run_fingerprint"] = {"path": os.path.join(dirpath, "fingerprint.jsonl")}  # noqa: PTH118 - a str
        return cls(**{**chosen, **fields})

    def callbacks(self) -> list[TrickCallback]:
        """Return a new callback for each field that is not None."""
        callbacks = [
            _build_callback(trick.name, kind, value)
            for trick in fields(self)
            if (kind := callback_of(trick.name)) and (value := getattr(self, trick.name)) is not None
        ]
        for callback in callbacks:
            if callback.verbose is None:
                callback.verbose = self.verbose
        return callbacks

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values; `Tricks(**values)` is equal to this object."""
        specs = {name: getattr(self, name) for name in ("optimizer", "schedule")}
        values = {trick.name: getattr(self, trick.name) for trick in fields(self) if trick.name not in specs}
        if isinstance(values["metrics_monitor"], torch.nn.Module):
            values["metrics_monitor"] = {"metrics": values["metrics_monitor"]}
        return {name: _to_plain(value) for name, value in values.items()} | {
            name: spec and _to_plain(asdict(spec)) for name, spec in specs.items()
        }


def callback_of(field: str) -> type[TrickCallback] | None:
    """Return the callback that a field of `Tricks` switches on, whose name it is in snake case; None for the others."""
    names = {name.lower(): name for name in dir(lightning_tricks)}
    name = names.get(field.replace("_", ""))
    return getattr(lightning_tricks, name) if name else None


def _checked_arguments(trick: Field[Any], value: Any) -> Any:
    """Replace True by no arguments and False by None, and check the names of a dict of arguments."""
    if value is None or value is False:
        return None
    specs = {"optimizer": OptimizerSpec, "schedule": ScheduleSpec}
    takes: Any = specs.get(trick.name) or callback_of(trick.name)
    parameters = inspect.signature(takes).parameters
    if value is True:
        required = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
        if required:
            example = "{" + ", ".join(f"{name!r}: ..." for name in required) + "}"
            raise TypeError(
                f"Tricks({trick.name}=True): {takes.__name__} has no default for {' and '.join(required)}: pass a dict "
                f"such as {example}."
            )
        return {}
    if not parameters and value != {}:
        raise TypeError(f"Tricks({trick.name}={value!r}): {takes.__name__} takes no arguments: pass True or False.")
    if isinstance(value, Mapping) and trick.name not in specs and not _is_first_argument(takes, value):
        check_names(f"Tricks({trick.name}={value!r}): {takes.__name__}", value, parameters)  # a spec checks its own
    return value


def _copied(value: Any) -> Any:
    """Return a value whose dicts and lists belong to no one else, such as a preset."""
    if type(value) is dict:
        return {name: _copied(part) for name, part in value.items()}
    return [_copied(part) for part in value] if type(value) is list else value


def _build_callback(name: str, callback: type[TrickCallback], value: Any) -> TrickCallback:
    parameters = inspect.signature(callback).parameters
    arguments = arguments_of(callback, value)
    try:
        return callback(**{argument: _from_plain(given) for argument, given in arguments.items()})
    except (TypeError, ValueError) as error:
        known = f"{callback.__name__} takes {', '.join(parameters)}."
        raise type(error)(f"Tricks({name}={value!r}): {_sentence(error)} {known}") from error


def _sentence(error: Exception) -> str:
    return str(error) if str(error).endswith((".", "?")) else f"{error}."


def arguments_of(callback: type[TrickCallback], value: Any) -> Mapping[str, Any]:
    """Return the arguments of a callback from a field's value: a dict of them, or its first argument alone."""
    if isinstance(value, Mapping) and not _is_first_argument(callback, value):
        return value
    return {next(iter(inspect.signature(callback).parameters)): value}


def _is_first_argument(callback: type[TrickCallback], value: Mapping[Any, Any]) -> bool:
    """Whether a dict is a callback's first argument, not a dict of its arguments: no key is like the name of one."""
    parameters = inspect.signature(callback).parameters
    if not value or not parameters:
        return False
    first = next(iter(parameters.values()))
    takes_dict = "dict" in str(first.annotation) or first.annotation == "Any"
    return takes_dict and not any(get_close_matches(str(key), parameters, cutoff=0.8) for key in value)


def _to_plain(value: Any) -> Any:
    """Replace objects of the collection by dicts of plain values, at any depth."""
    if is_dataclass(value) and not isinstance(value, type):
        if METHODS.get(type(value).__name__) is not type(value):
            raise TypeError(
                f"Tricks(...) contains a {type(value).__name__}, which cannot be saved as plain values in a "
                f"checkpoint; only {', '.join(METHODS)} can. Pass the callback that takes this object to the Trainer "
                "instead."
            )
        arguments = {part.name: _to_plain(getattr(value, part.name)) for part in fields(value)}
        return {"class_path": f"lightning_tricks.gradient_clipping.{type(value).__name__}", "init_args": arguments}
    if isinstance(value, Mapping):
        return {name: _to_plain(part) for name, part in value.items()}
    if isinstance(value, torch.nn.Module):
        if not hasattr(value, "spec"):
            raise TypeError(
                f"Tricks(metrics_monitor=...) contains a {type(value).__name__}, which cannot be saved as plain "
                "values in a checkpoint: name a preset, such as {'task': 'binary'}, or pass MetricsMonitor to the "
                "Trainer."
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
    known = {f"lightning_tricks.gradient_clipping.{name}": method for name, method in METHODS.items()}
    method = known[check_choice("class_path", value["class_path"], known)]
    arguments = value.get("init_args") or {}
    check_names(method.__name__, arguments, inspect.signature(method).parameters)
    return method(**arguments)
