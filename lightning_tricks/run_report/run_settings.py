"""The facts about a run that a Trainer and a module show before it starts, and the settings that may differ later."""

from __future__ import annotations

import hashlib
import inspect
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from lightning_tricks._lightning_compat.callbacks import every_n_train_steps
from lightning_tricks._lightning_compat.flavor import CombinedLoader, LightningModule, Trainer, sized_len
from lightning_tricks._lightning_compat.hyperparameters import initial_hyperparameters
from lightning_tricks._lightning_compat.loaders import ends_with_shortest_loader
from lightning_tricks._lightning_compat.trainer import callbacks_of, datamodule_of
from lightning_tricks._shared.text import counted, describe_error, list_names
from lightning_tricks._torch_compat.optimizers import inner_schedulers
from lightning_tricks.auto_resume.core import configuration
from lightning_tricks.auto_resume.core.attributes.model_structure import param_group_names
from lightning_tricks.auto_resume.core.attributes.user_code import is_user_module
from lightning_tricks.run_report.core.curves import label_of_rate
from lightning_tricks.run_report.core.git_state import read_git_state
from lightning_tricks.run_report.core.record import RunRecord, RunSetup
from lightning_tricks.run_report.core.secret_values import HIDDEN, hidden, is_secret

_TOLD_ELSEWHERE = frozenset({"accelerator", "barebones", "callbacks", "fast_dev_run", "logger", "strategy"})

_ENVIRONMENT = (  # beginnings of the names of variables that are recorded
    *("ACCELERATE", "AMP_", "ATEN_", "CUBLAS", "CUDA", "CUDNN", "FSDP_", "GLOO_", "GOMP_", "HSA_", "KMP_", "MKL_"),
    *("NCCL_", "NVIDIA_TF32", "OMP_", "PL_", "PYTHONHASHSEED", "PYTORCH_", "ROCM", "TORCH", "TRITON_", "XLA_"),
)
_LOADER_ARGUMENTS = (
    *("collate_fn", "num_workers", "persistent_workers", "pin_memory"),
    *("prefetch_factor", "timeout", "worker_init_fn"),
)
_MOST_FILES = 500
_DECIDING = ("accumulate_grad_batches", "max_epochs", "overfit_batches", "precision")  # arguments of the Trainer
_PACKAGES = ("torch", "lightning", "lightning-tricks", "torchmetrics", "torchvision", "transformers", "timm", "numpy")
_LONGEST_TEXT = 300
_MOST_ITEMS = 100_000  # of a list whose content is recorded
_MOST_SETTINGS = 3000


def describe_run(trainer: Trainer, module: LightningModule) -> RunRecord:
    """Return the record of a run that starts: all that does not depend on training."""
    seed = os.environ.get("PL_GLOBAL_SEED")
    seeds = [] if seed is None else [("seed", seed)]
    arguments = SettingTexts()
    for owner in (module, datamodule_of(trainer)):
        for name, value in initial_hyperparameters(owner).items():
            arguments.add(str(name), value, default=configuration.defaults_of(type(owner)).get(name))
    details, setup = gather_settings(trainer, module), _setup_of(trainer)
    details.secrets[:0], details.types_only[:0] = arguments.secrets, arguments.types_only
    return RunRecord(
        module=type(module).__name__,
        ranks=trainer.world_size,
        is_seeded=seed is not None,
        arguments=arguments.pairs(),
        trainer=[*_trainer_facts(trainer), *torch_settings(), *seeds],
        data=list(_data_facts(trainer, setup)),
        setup=setup,
        versions=versions(),
        settings=[*details.pairs(), *other_versions()],
        defaults=[f"{name} (hyper-parameter)" for name in arguments.defaults[:_MOST_SETTINGS]]
        + details.defaults[:_MOST_SETTINGS],
        not_recorded=details.not_recorded(),
        git=read_git_state(Path.cwd()),
    )


def _trainer_facts(trainer: Trainer) -> Iterator[tuple[str, str]]:
    yield "strategy", f"{type(trainer.strategy).__name__}, {counted(trainer.world_size, 'rank')}"
    device = trainer.strategy.root_device
    yield "device", torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    for argument in inspect.signature(Trainer.__init__).parameters:
        value = getattr(trainer, argument, None)
        if value is not None and argument not in _TOLD_ELSEWHERE:
            is_count = argument.startswith("limit_") and isinstance(value, int)
            yield argument, f"{value} batches" if is_count else text_of(hidden(argument, configuration.plain(value)))
    yield "callbacks", ", ".join(type(callback).__name__ for callback in callbacks_of(trainer))[:1000]
    for number, optimizer in enumerate(trainer.optimizers):
        suffix = f" {number}" if len(trainer.optimizers) > 1 else ""
        yield f"optimizer{suffix}", type(optimizer).__name__
    schedulers = [type(config.scheduler).__name__ for config in trainer.lr_scheduler_configs]
    if schedulers:
        yield "schedulers", ", ".join(schedulers)


def _setup_of(trainer: Trainer) -> RunSetup:
    """Return what findings decide by, without the facts about the data."""
    configs = trainer.lr_scheduler_configs
    every = {label: every_n_train_steps(callback) for label, callback in _labelled_callbacks(trainer)}
    given = {name: getattr(trainer, name, None) for name in _DECIDING}
    return RunSetup(
        callbacks=[type(callback).__name__ for callback in callbacks_of(trainer)],
        optimizers=[type(optimizer).__name__ for optimizer in trainer.optimizers],
        schedulers=[type(config.scheduler).__name__ for config in configs],
        waits_for_plateau=any(config.reduce_on_plateau for config in configs),
        trainer={name: value for name, value in given.items() if isinstance(value, int | float | str)},
        every_n_train_steps={label: number for label, number in every.items() if isinstance(number, int)},
    )


def _data_facts(trainer: Trainer, setup: RunSetup) -> Iterator[tuple[str, str]]:
    for name, loaders, batches, argument in (
        ("training", trainer.train_dataloader, trainer.num_training_batches, "limit_train_batches"),
        ("validation", trainer.val_dataloaders, trainer.num_val_batches, "limit_val_batches"),
    ):
        limit = getattr(trainer, argument)
        total: Any = sum(batches) if isinstance(batches, Sequence) else batches
        if loaders is None and name == "validation" and trainer.enable_validation:
            setup.has_validation = True
            yield "validation batches", "unknown"  # they are loaded where the first validation begins
        if loaders is None or not total:
            continue
        sizes = [sized_len(loader) for loader in CombinedLoader(loaders, "sequential").flattened]
        known = [size for size in sizes if size is not None]
        there = sum(known) if name == "validation" else max(known, default=0)
        if name == "training" and len(known) > 1 and ends_with_shortest_loader(trainer):
            there = min(known)
        is_known, is_limited = len(known) == len(sizes), isinstance(limit, int) or limit != 1
        if name == "training":
            setup.training_batches = total if isinstance(total, int) else None
        setup.has_validation |= name == "validation"
        if is_limited and is_known and total != there:
            setup.left_out[argument] = name
        whole = f" of {there:,}" if is_known else " of unknown"
        yield f"{name} batches", f"{total:,}{whole if is_limited else ''}" if total != float("inf") else "unknown"
        for attribute, words in (("batch_size", "batch size"), ("num_workers", "workers")):
            if isinstance(number := getattr(loaders, attribute, None), int):
                yield f"{name} {words}", str(number)


def learning_rates(trainer: Trainer, most: int = 20) -> dict[str, Any]:
    """Return the learning rate of each parameter group, of the first 20.

    A group without a name, or with that of an earlier one, is called by its numbers: "0.1", or "1" if it is the only
    one of its optimizer.
    """
    rates: dict[str, Any] = {}
    for number, optimizer in enumerate(trainer.optimizers):
        for place, group in enumerate(optimizer.param_groups[: most - len(rates)]):
            key = f"learning_rate/{group.get('name')}"
            is_name = isinstance(group.get("name"), str) and re.search(r"[^\d.]", key[14:]) and key not in rates
            numbers = f"{number}.{place}" if len(optimizer.param_groups) > 1 else f"{number}"
            rates[key if is_name else f"learning_rate/{numbers}"] = group.get("lr", float("nan"))
    return {"learning_rate": next(iter(rates.values()))} if len(rates) == 1 else rates


def monitors_of(trainer: Trainer) -> list[tuple[str, str, bool, int]]:
    """Return what monitors a value, its key, whether that was logged, and, of a scheduler, its steps."""
    callbacks, known = _labelled_callbacks(trainer), trainer.callback_metrics
    found = [(label, getattr(callback, "monitor", None), 0) for label, callback in callbacks]
    plateaus = [config for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
    found += [(type(one.scheduler).__name__, one.monitor, one.scheduler.last_epoch) for one in plateaus]
    return [(label, key, key in known, steps) for label, key, steps in found if isinstance(key, str)]


def schedules_of(trainer: Trainer) -> list[tuple[str, str, int, int]]:
    """Return the classes of schedulers that have an end, when they step, their steps, and those to the end."""
    return [
        (type(one).__name__, config.interval, one.last_epoch, total)
        for config in trainer.lr_scheduler_configs
        for one in (config.scheduler, *inner_schedulers(config.scheduler))
        if isinstance(total := getattr(one, "T_max", getattr(one, "total_steps", None)), int)
    ]


def gather_settings(trainer: Trainer, module: LightningModule) -> SettingTexts:
    """Return the settings of callbacks, layers, optimizers, schedulers, loaders, environment and code."""
    found = SettingTexts()
    adders = {"callbacks": _add_callbacks, "layers": _add_layers, "optimizers": _add_optimizers, "data": _add_data}
    for what, add in adders.items():
        try:
            add(found, trainer, module)
        except Exception as error:  # objects of users may do anything when they are asked
            found.unknown.append(f"{what} ({describe_error(error)[:200]})")
    for variable, value in sorted(os.environ.items()):
        if variable.startswith(_ENVIRONMENT):
            found.add(variable, value, "environment")
    for path in _user_files(module):
        with suppress(OSError):
            shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
            found.texts[f"code of {shown}"] = f"SHA-256 {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
    found.unknown += ["plugins and use_distributed_sampler of Trainer", "environment variables of other libraries"]
    return found


def _add_callbacks(found: SettingTexts, trainer: Trainer, module: LightningModule) -> None:
    loggers = zip(configuration.numbered(trainer.loggers), trainer.loggers, strict=True)
    for label, instance in (*_labelled_callbacks(trainer), *loggers):
        found.add_object(label, instance)


def _labelled_callbacks(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    callbacks = [callback for callback in callbacks_of(trainer) if not getattr(callback, "takes_report_parts", False)]
    return zip(configuration.numbered(callbacks), callbacks, strict=True)


def _add_layers(found: SettingTexts, trainer: Trainer, module: LightningModule) -> None:
    hparams = module.hparams_initial
    for path, layer in module.named_modules():
        if path.endswith("_orig_mod"):
            continue
        label = f"layer {path.replace('_orig_mod.', '')}" if path else "module"
        for name, value in configuration.arguments_of(layer).items():
            if path or name not in hparams:
                found.add(name, configuration.plain(value), label, configuration.defaults_of(type(layer))[name])
        found.add("type", type(layer).__qualname__, label)
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    found.add("trained parameters", f"{len(trained):,} tensors ({digest(sorted(trained))})")


def _add_optimizers(found: SettingTexts, trainer: Trainer, module: LightningModule) -> None:
    optimizers, configs = trainer.optimizers, trainer.lr_scheduler_configs
    described = configuration.describe_optimizers(optimizers, configs, param_group_names(module, optimizers))
    owners = dict(zip(configuration.numbered(optimizers), optimizers, strict=True))
    labels = [label for name, one in owners.items() for label in configuration.group_labels(name, one.param_groups)]
    groups = zip(labels, map(label_of_rate, learning_rates(trainer, len(labels))), strict=True)
    names = dict(groups) | {label: f"optimizer {number}" for number, label in enumerate(owners)}
    for name, value in {**described.kinds, **described.values}.items():
        label, _, option = name.rpartition(".")
        owner = owners.get(name.partition(".")[0])
        # what its class sets is no argument of its constructor
        defaults = {**getattr(owner, "defaults", {}), **configuration.defaults_of(type(owner))}
        found.add(f"{option} of {names[label]}" if label in names else name, value, default=defaults.get(option))


def _add_data(found: SettingTexts, trainer: Trainer, module: LightningModule) -> None:
    if (datamodule := datamodule_of(trainer)) is not None:
        found.add_object("datamodule", datamodule)
    for name, loaders in (("train_dataloader", trainer.train_dataloader), ("val_dataloaders", trainer.val_dataloaders)):
        _add_loaders(found, name, [] if loaders is None else CombinedLoader(loaders, "sequential").flattened)


def _add_loaders(found: SettingTexts, name: str, loaders: list[Any]) -> None:
    described = configuration.describe_loaders(loaders, name)
    for setting, value in {**described.kinds, **described.values}.items():
        found.add(setting, value)
    for number, loader in enumerate(loaders):
        label = name if len(loaders) == 1 else f"{name}[{number}]"
        found.add("type", type(loader).__qualname__, label, "DataLoader")
        for argument in _LOADER_ARGUMENTS:
            if hasattr(loader, argument):
                found.add(argument, getattr(loader, argument), label)
        data, depth = getattr(loader, "dataset", None), 0
        while data is not None and depth < 5:  # data sets in data sets, such as a Subset
            label, depth = f"{label}.dataset", depth + 1
            with suppress(Exception):  # not each has a length; an argument of this name replaces it
                found.add("length", len(data), label)
            found.add_object(label, data)
            data = getattr(data, "dataset", None)


def _user_files(module: LightningModule) -> list[Path]:
    """Return the files of the user's code that are imported, the script and the module's first."""
    names = ["__main__", type(module).__module__, *sys.modules]
    files = [getattr(sys.modules.get(name), "__file__", None) for name in dict.fromkeys(names) if is_user_module(name)]
    found = dict.fromkeys(Path(file) for file in files if isinstance(file, str) and file.endswith(".py"))
    return list(found)[:_MOST_FILES]


@dataclass
class SettingTexts:
    """Gathers names and texts of settings.

    Attributes:
        texts: Name -> text.
        types_only: The names of those of which only the type was recorded.
        secrets: The names of those whose values were left out, as they may be secret.
        unknown: Other settings that exist and were not recorded, in words.
        defaults: The names of those that have the default of their argument, or None.
    """

    texts: dict[str, str] = field(default_factory=dict)
    types_only: list[str] = field(default_factory=list)
    secrets: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    defaults: list[str] = field(default_factory=list)

    def add_object(self, label: str, instance: object) -> None:
        """Add an object's type, and those arguments of its constructor that it stores as `name` or `_name`."""
        self.add("type", type(instance).__qualname__, label)
        try:
            parameters = inspect.signature(type(instance).__init__).parameters
        except (TypeError, ValueError):
            return
        held, lost = getattr(instance, "__dict__", {}), []
        for name, parameter in list(parameters.items())[1:]:
            # to the first two names, Lightning binds methods of the module
            stored = next((key for key in (name, f"_{name}") if key in held and key not in ("log", "log_dict")), None)
            if stored is not None:
                self.add(name, held[stored], label, parameter.default)
            elif parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                lost.append(name)
        if lost:
            self.unknown.append(f"{', '.join(lost)} of {label}")

    def not_recorded(self) -> list[str]:
        """Return which settings were not recorded, in words."""
        words = {
            "values that may be secret: ": self.secrets,
            "more than the type of ": self.types_only,
            "arguments that objects do not store: ": self.unknown,
        }
        return [text + list_names(names, 20) for text, names in words.items() if names]

    def add(self, name: str, value: Any, owner: str = "", default: Any = None) -> None:
        """Add a value; of mappings, namespaces and dataclasses each part, under names that are joined by dots."""
        parts, usual = list(configuration.flatten(name, value)), dict(configuration.flatten(name, default))
        if isinstance(value, list | tuple) and len(value) > 1000:  # whose items `plain` leaves out
            parts = [(name, [configuration.plain(item) for item in value[:_MOST_ITEMS]])]
        for path, part in parts:
            is_default = usual.get(path) == part
            words = [name, *(path.removeprefix(f"{name}.").split(".") if path != name else ())]
            secret = next((place for place, word in enumerate(words) if is_secret(word)), None)
            path = path if secret is None else ".".join(words[: secret + 1])
            path = f"{owner}.{path}" if owner else path
            shown = hidden(words[-1 if secret is None else secret], part)
            if shown is HIDDEN:
                self.secrets += [path] if path not in self.secrets else []
            elif not configuration.is_comparable(shown):
                self.types_only.append(path)
            elif is_default:
                self.defaults.append(path[:_LONGEST_TEXT])
            if self.texts.get(path) is not HIDDEN:
                self.texts[path[:_LONGEST_TEXT]] = text_of(shown)

    def pairs(self) -> list[tuple[str, str]]:
        """Return names and texts; of those beyond the first 3,000 a digest."""
        pairs = list(self.texts.items())
        others = pairs[_MOST_SETTINGS:]
        return pairs[:_MOST_SETTINGS] + ([(f"{len(others):,} more", digest(map(repr, others)))] if others else [])


def text_of(value: Any) -> str:
    """Return a plain value as text; of a long one the beginning, and a digest of the whole.

    Examples:
        >>> text_of(0.1), text_of(1.0), text_of(0.30000004), text_of("sgd"), text_of([1, "a"])
        ('0.1', '1', '0.30000004', 'sgd', "[1, 'a']")
    """
    text = value if isinstance(value, str) else repr(value)
    if isinstance(value, float) and float(f"{value:g}") == value:
        text = f"{value:g}"
    if len(text) <= _LONGEST_TEXT:
        return text
    return f"{text[:_LONGEST_TEXT]}… ({len(text):,} characters, SHA-256 {digest([text])})"


def digest(texts: Iterable[str]) -> str:
    """Return the first 12 digits of a digest of texts."""
    found = hashlib.sha256()
    for text in texts:
        found.update(text.encode("utf-8", "surrogatepass") + b"\0")
    return found.hexdigest()[:12]


def versions() -> list[tuple[str, str]]:
    """Return the versions of Python, the system and the libraries that are installed."""
    found = [("python", platform.python_version())]
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found.append((name, metadata.version(name)))
    if torch.version.cuda:
        found.append(("CUDA", torch.version.cuda))
    return [*found, ("system", platform.platform())]


def other_versions() -> list[tuple[str, str]]:
    """Return the versions of all other packages that are installed, by the names of their folders."""
    found: dict[str, str] = {}
    for folder in sys.path:
        with suppress(OSError):
            for entry in os.listdir(folder or os.curdir):  # noqa: PTH208 - a Path for each takes ten times as long
                parts = re.fullmatch(r"(.+?)-([^-]+)(-py[\d.]+)?\.(dist|egg)-info", entry)
                if parts is not None:
                    found.setdefault(parts[1].replace("_", "-").lower(), parts[2])
    return [(f"version of {name}", version) for name, version in sorted(found.items()) if name not in _PACKAGES]


def torch_settings() -> list[tuple[str, str]]:
    """Return torch's settings that decide whether a run can be repeated, and how fast it is."""
    return [
        ("deterministic algorithms", _on_off(torch.are_deterministic_algorithms_enabled())),
        ("cudnn.benchmark", _on_off(torch.backends.cudnn.benchmark)),
        ("cudnn.deterministic", _on_off(torch.backends.cudnn.deterministic)),
        ("float32 matmul precision", torch.get_float32_matmul_precision()),
        ("cudnn.allow_tf32", _on_off(torch.backends.cudnn.allow_tf32)),
        ("anomaly detection", _on_off(torch.is_anomaly_enabled())),
        ("default dtype", str(torch.get_default_dtype())),
        ("threads of torch", str(torch.get_num_threads())),
    ]


def _on_off(is_on: bool) -> str:
    return "on" if is_on else "off"
