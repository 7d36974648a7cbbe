"""What a Trainer and a module tell about a run before it starts, as names and texts."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader

from lightning_tricks._lightning_compat.trainer import callbacks_of, datamodule_of
from lightning_tricks.auto_resume.core.configuration import plain
from lightning_tricks.run_report.core.environment import other_versions, torch_settings, versions
from lightning_tricks.run_report.core.git_state import read_git_state
from lightning_tricks.run_report.core.record import RunRecord
from lightning_tricks.run_report.core.secret_values import hidden
from lightning_tricks.run_report.core.setting_texts import SettingTexts, text_of
from lightning_tricks.run_report.run_settings import gather_settings

_TOLD_ELSEWHERE = frozenset({"accelerator", "barebones", "callbacks", "fast_dev_run", "logger", "strategy"})


def describe_run(trainer: Trainer, module: LightningModule) -> RunRecord:
    """Return the record of a run that starts: all that does not depend on training."""
    seed = os.environ.get("PL_GLOBAL_SEED")
    settings = torch_settings()
    arguments = SettingTexts()
    for owner in (module, datamodule_of(trainer)):
        for name, value in (owner.hparams_initial if owner is not None else {}).items():
            if name != "_class_path":
                arguments.add(str(name), value)
    details = gather_settings(trainer, module)
    details.secrets, details.types_only = (
        arguments.secrets + details.secrets,
        arguments.types_only + details.types_only,
    )
    return RunRecord(
        module=type(module).__name__,
        is_seeded=seed is not None,
        arguments=arguments.pairs(),
        trainer=[*_trainer_facts(trainer), *_optimizer_facts(trainer), *settings, *_seed_facts(seed)],
        data=list(_data_facts(trainer)),
        versions=versions(),
        settings=[*details.pairs(), *other_versions()],
        not_recorded=details.not_recorded(),
        git=read_git_state(Path.cwd()),
    )


def _seed_facts(seed: str | None) -> list[tuple[str, str]]:
    return [] if seed is None else [("seed", seed)]


def _trainer_facts(trainer: Trainer) -> Iterator[tuple[str, str]]:
    yield "strategy", f"{type(trainer.strategy).__name__}, {trainer.world_size} rank{'s' * (trainer.world_size > 1)}"
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
        whole = f" of {there:,}" if len(known) == len(sizes) else " of unknown"
        is_limited = isinstance(limit, int) or limit != 1
        yield f"{name} batches", f"{total:,}{whole * is_limited}" if total != float("inf") else "unknown"
        batch_size = getattr(loaders, "batch_size", None)
        if isinstance(batch_size, int):
            yield f"{name} batch size", str(batch_size)
        workers = getattr(loaders, "num_workers", None)
        if isinstance(workers, int):
            yield f"{name} workers", str(workers)


def learning_rates(trainer: Trainer) -> dict[str, Any]:
    """Return the learning rate of each parameter group, of the first 20."""
    rates: dict[str, Any] = {}
    for number, optimizer in enumerate(trainer.optimizers):
        for place, group in enumerate(optimizer.param_groups):
            rates[f"{number}.{place}"] = group["lr"] if "lr" in group else float("nan")
    if len(rates) == 1:
        return {"learning_rate": next(iter(rates.values()))}
    return {f"learning_rate/{name}": value for name, value in list(rates.items())[:20]}
