"""The facts about a run that a Trainer and a module show before it starts, and the settings that may differ later."""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lightning_tricks._lightning_compat.flavor import CombinedLoader, LightningModule, Trainer, sized_len
from lightning_tricks._lightning_compat.hyperparameters import initial_hyperparameters
from lightning_tricks._lightning_compat.loaders import ends_with_shortest_loader
from lightning_tricks._lightning_compat.trainer import callbacks_of, datamodule_of
from lightning_tricks._shared.text import counted, describe_error
from lightning_tricks.auto_resume.core.attributes.model_structure import param_group_names
from lightning_tricks.auto_resume.core.attributes.user_code import is_user_module
from lightning_tricks.auto_resume.core.configuration import (
    arguments_of,
    describe_loaders,
    describe_optimizers,
    numbered,
    plain,
)
from lightning_tricks.run_report.core.git_state import read_git_state
from lightning_tricks.run_report.core.record import RunRecord
from lightning_tricks.run_report.core.secret_values import hidden
from lightning_tricks.run_report.core.setting_texts import (
    SettingTexts,
    digest,
    other_versions,
    text_of,
    torch_settings,
    versions,
)

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


def describe_run(trainer: Trainer, module: LightningModule) -> RunRecord:
    """Return the record of a run that starts: all that does not depend on training."""
    seed = os.environ.get("PL_GLOBAL_SEED")
    seeds = [] if seed is None else [("seed", seed)]
    arguments = SettingTexts()
    for owner in (module, datamodule_of(trainer)):
        for name, value in initial_hyperparameters(owner).items():
            arguments.add(str(name), value)
    details = gather_settings(trainer, module)
    details.secrets[:0], details.types_only[:0] = arguments.secrets, arguments.types_only
    return RunRecord(
        module=type(module).__name__,
        ranks=trainer.world_size,
        is_seeded=seed is not None,
        arguments=arguments.pairs(),
        trainer=[*_trainer_facts(trainer), *_optimizer_facts(trainer), *torch_settings(), *seeds],
        data=list(_data_facts(trainer)),
        versions=versions(),
        settings=[*details.pairs(), *other_versions()],
        not_recorded=details.not_recorded(),
        git=read_git_state(Path.cwd()),
    )


def _trainer_facts(trainer: Trainer) -> Iterator[tuple[str, str]]:
    yield "strategy", f"{type(trainer.strategy).__name__}, {counted(trainer.world_size, 'rank')}"
    device = trainer.strategy.root_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    yield "device", name
    for argument in inspect.signature(Trainer.__init__).parameters:
        value = getattr(trainer, argument, None)
        if value is not None and argument not in _TOLD_ELSEWHERE:
            is_count = argument.startswith("limit_") and isinstance(value, int)
            yield argument, f"{value} batches" if is_count else text_of(hidden(argument, plain(value)))
    yield "callbacks", ", ".join(type(callback).__name__ for callback in callbacks_of(trainer))[:1000]


def _optimizer_facts(trainer: Trainer) -> Iterator[tuple[str, str]]:
    for number, optimizer in enumerate(trainer.optimizers):
        suffix = f" {number}" if len(trainer.optimizers) > 1 else ""
        yield f"optimizer{suffix}", type(optimizer).__name__
    schedulers = [type(config.scheduler).__name__ for config in trainer.lr_scheduler_configs]
    if schedulers:
        yield "schedulers", ", ".join(schedulers)


def _data_facts(trainer: Trainer) -> Iterator[tuple[str, str]]:
    for name, loaders, batches, limit in (
        ("training", trainer.train_dataloader, trainer.num_training_batches, trainer.limit_train_batches),
        ("validation", trainer.val_dataloaders, trainer.num_val_batches, trainer.limit_val_batches),
    ):
        total: Any = sum(batches) if isinstance(batches, Sequence) else batches
        if loaders is None or not total:
            continue
        sizes = [sized_len(loader) for loader in CombinedLoader(loaders, "sequential").flattened]
        known = [size for size in sizes if size is not None]
        there = sum(known) if name == "validation" else max(known, default=0)
        if name == "training" and len(known) > 1 and ends_with_shortest_loader(trainer):
            there = min(known)
        whole = f" of {there:,}" if len(known) == len(sizes) else " of unknown"
        is_limited = isinstance(limit, int) or limit != 1
        yield f"{name} batches", f"{total:,}{whole * is_limited}" if total != float("inf") else "unknown"
        for attribute, words in (("batch_size", "batch size"), ("num_workers", "workers")):
            if isinstance(number := getattr(loaders, attribute, None), int):
                yield f"{name} {words}", str(number)


def learning_rates(trainer: Trainer) -> dict[str, Any]:
    """Return the learning rate of each parameter group, of the first 20."""
    rates: dict[str, Any] = {}
    for number, optimizer in enumerate(trainer.optimizers):
        for place, group in enumerate(optimizer.param_groups):
            rates[f"{number}.{place}"] = group["lr"] if "lr" in group else float("nan")
    if len(rates) == 1:
        return {"learning_rate": next(iter(rates.values()))}
    return {f"learning_rate/{name}": value for name, value in list(rates.items())[:20]}


def gather_settings(trainer: Trainer, module: LightningModule) -> SettingTexts:
    """Return the settings of callbacks, layers, optimizers, schedulers, loaders, environment and code."""
    found = SettingTexts()
    for topic, add in (
        ("callbacks", _add_callbacks),
        ("layers", _add_layers),
        ("optimizers", _add_optimizers),
        ("data", _add_data),
    ):
        try:
            add(found, trainer, module)
        except Exception as error:  # objects of users may do anything when they are asked
            found.unknown.append(f"{topic} ({describe_error(error)[:200]})")
    for variable, value in sorted(os.environ.items()):
        if variable.startswith(_ENVIRONMENT):
            found.add(variable, value, "environment")
    for path in _user_files(module):
        with suppress(OSError):
            found.texts[f"code of {_short(path)}"] = f"SHA-256 {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
    found.unknown += ["plugins and use_distributed_sampler of Trainer", "environment variables of other libraries"]
    return found


def _add_callbacks(found: SettingTexts, trainer: Trainer, module: LightningModule) -> None:
    callbacks = [callback for callback in callbacks_of(trainer) if not getattr(callback, "takes_report_parts", False)]
    for objects in (callbacks, trainer.loggers):
        for label, instance in zip(numbered(objects), objects, strict=True):
            found.add("type", type(instance).__qualname__, label)
            found.add_arguments(label, instance)


def _add_layers(found: SettingTexts, trainer: Trainer, module: LightningModule) -> None:
    hparams = module.hparams_initial
    for path, layer in module.named_modules():
        if path.endswith("_orig_mod"):
            continue
        known = {name: plain(value) for name, value in arguments_of(layer).items() if path or name not in hparams}
        label = f"layer {path.replace('_orig_mod.', '')}" if path else "module"
        for name, value in known.items():
            found.add(name, value, label)
        found.add("type", type(layer).__qualname__, label)
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    found.add("trained parameters", f"{len(trained):,} tensors ({digest(sorted(trained))})")


def _add_optimizers(found: SettingTexts, trainer: Trainer, module: LightningModule) -> None:
    optimizers, configs = trainer.optimizers, trainer.lr_scheduler_configs
    described = describe_optimizers(optimizers, configs, param_group_names(module, optimizers))
    for name, value in {**described.kinds, **described.values}.items():
        found.add(name, value)


def _add_data(found: SettingTexts, trainer: Trainer, module: LightningModule) -> None:
    if (datamodule := datamodule_of(trainer)) is not None:
        found.add("type", type(datamodule).__qualname__, "datamodule")
        found.add_arguments("datamodule", datamodule)
    for name, loaders in (("train_dataloader", trainer.train_dataloader), ("val_dataloaders", trainer.val_dataloaders)):
        _add_loaders(found, name, [] if loaders is None else CombinedLoader(loaders, "sequential").flattened)


def _add_loaders(found: SettingTexts, name: str, loaders: list[Any]) -> None:
    described = describe_loaders(loaders, name)
    for setting, value in {**described.kinds, **described.values}.items():
        found.add(setting, value)
    for number, loader in enumerate(loaders):
        label = name if len(loaders) == 1 else f"{name}[{number}]"
        for argument in _LOADER_ARGUMENTS:
            if hasattr(loader, argument):
                found.add(argument, getattr(loader, argument), label)
        data, depth = getattr(loader, "dataset", None), 0
        while data is not None and depth < 5:  # data sets in data sets, such as a Subset
            label, depth = f"{label}.dataset", depth + 1
            found.add("type", type(data).__qualname__, label)
            with suppress(Exception):  # not each has a length
                found.add("length", len(data), label)
            found.add_arguments(label, data)
            data = getattr(data, "dataset", None)


def _user_files(module: LightningModule) -> list[Path]:
    """Return the files of the user's code that are imported, the script and the module's first."""
    names = ["__main__", type(module).__module__, *sys.modules]
    files = [getattr(sys.modules.get(name), "__file__", None) for name in dict.fromkeys(names) if is_user_module(name)]
    found = dict.fromkeys(Path(file) for file in files if isinstance(file, str) and file.endswith(".py"))
    return list(found)[:_MOST_FILES]


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
