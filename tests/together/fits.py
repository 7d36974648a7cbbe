"""A fit with any callbacks, and everything that it leaves on each rank."""

from __future__ import annotations

import csv
import os
import pickle
import random
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from tests.contract.cases import CASES
from tests.contract.lab import attributes, full, traces, unscaled
from tests.small import QUIET, Hooks, digits, fork, real_fp16, unseen
from tests.together.everything import NORM_TYPE

VALIDATED = 38  # on two ranks, one sample is repeated
_READINGS = ("host/", "gpu", "flops/mfu")  # keys that tell of the machine, not of the run


@dataclass
class Left:
    weights: dict[str, Tensor]
    optimizers: list[Any]
    metrics: dict[str, float]
    rng: tuple[Any, ...]
    attributes: dict[str, Any]
    traces: dict[str, Any]
    new_threads: int
    norms: dict[int, list[float]]
    logged_norms: dict[int, list[float]]
    seen: dict[str, list[Any]]


class First(Callback):
    """First in the list: the norm of each gradient before anybody changes it."""

    def __init__(self) -> None:
        norms: dict[int, list[float]] = {}
        self.norms = unseen(norms)  # which AutoResume does not see

    def setup(self, trainer, pl_module, stage):
        threads = threading.active_count()
        self.num_threads = lambda: threads

    def on_train_start(self, trainer, pl_module):
        if trainer.world_size > 1:
            random.seed(0)  # Lightning's fork launcher draws from it, now more, now less

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        gradients = [full(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if gradients:  # there is none where all is frozen
            norm = _norm(trainer, optimizer, gradients)
            self.norms().setdefault(trainer.optimizers.index(optimizer), []).append(norm)


def _norm(trainer: Trainer, optimizer: torch.optim.Optimizer, gradients: list[Tensor]) -> float:
    """The reference implementation, in float64: unscaled, whoever is to unscale it."""
    norm = sum(gradient.double().abs().pow(NORM_TYPE).sum().item() for gradient in gradients) ** (1 / NORM_TYPE)
    return unscaled(norm, trainer, optimizer)


class Last(Callback):
    """Last in the list: what was logged and seen on the way, and what is left when all others are done."""

    def __init__(self, first: First, folder: Path, watched: Mapping[str, Callback]) -> None:
        logged: dict[int, list[float]] = {}
        seen: dict[str, list[Any]] = {}
        self.kept = unseen((first, folder, watched, logged, seen))  # which AutoResume does not see

    def on_train_epoch_start(self, trainer, pl_module):
        self.kept()[4]["train"] = []

    def on_validation_epoch_start(self, trainer, pl_module):
        self.kept()[4]["val"] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        first, _, _, logged, seen = self.kept()
        _see(seen["train"], outputs)
        for index, norms in first.norms().items():
            name = "grad_norm" if len(trainer.optimizers) == 1 else f"grad_norm/{index}"
            if len(norms) > len(logged.setdefault(index, [])):
                logged[index].append(trainer.callback_metrics[f"{name}/pre_clip"].item())

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        _see(self.kept()[4]["val"], outputs)

    def on_train_end(self, trainer, pl_module):
        weights = {name: full(value) for name, value in pl_module.state_dict().items()}
        optimizers = [_full_state(optimizer.state_dict()) for optimizer in trainer.optimizers]
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        self.end = lambda: (weights, optimizers, {k: v for k, v in metrics.items() if not k.startswith(_READINGS)})

    def on_fit_end(self, trainer, pl_module):
        rng = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())
        self.rng = lambda: rng

    def teardown(self, trainer, pl_module, stage):
        if not hasattr(self, "rng"):
            return
        first, folder, watched, logged, seen = self.kept()
        own = {name: _own_attributes(name, callback) for name, callback in watched.items()}
        threads = threading.active_count() - first.num_threads()
        left = Left(*self.end(), self.rng(), own, traces(pl_module), threads, first.norms(), logged, seen)
        torch.save(left, folder / f"rank{trainer.global_rank}.pt")


def _see(rows: list[Any], outputs: Mapping[str, Tensor]) -> None:
    rows.append((outputs["preds"].detach().float(), outputs["target"]))


def _full_state(state: Any) -> Any:
    if isinstance(state, Tensor):
        return full(state)
    if isinstance(state, dict):
        return {key: _full_state(value) for key, value in state.items()}
    return [_full_state(value) for value in state] if isinstance(state, list) else state


def _own_attributes(name: str, callback: Callback) -> dict[str, Any]:
    """A callback's own attributes, as they are in a copy, but those that tell of one fit."""
    case = CASES.get(name)
    ignored = (*case.of_one_fit, *case.callback.path_arguments) if case else ()
    return {k: v for k, v in attributes(pickle.loads(pickle.dumps(callback))).items() if k not in ignored}


def stops_at(batch: int, number: int = signal.SIGTERM) -> Hooks:
    """Send the last rank a signal after one of its batches, counted from its start."""

    def stop(trainer: Trainer, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == batch and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), number)

    return Hooks(on_train_batch_end=stop)


@dataclass(frozen=True)
class Way:
    precision: str = "fp32"
    ranks: str = "1 process"
    accumulation: int = 1
    manual: bool = False

    @property
    def num_ranks(self) -> int:
        return 1 if self.ranks == "1 process" else 2

    @property
    def is_sharded(self) -> bool:
        return self.ranks == "FSDP2"

    def arguments(self) -> dict[str, Any]:
        given: dict[str, Any] = {"devices": self.num_ranks}
        if self.precision == "bf16-mixed":
            given["precision"] = "bf16-mixed"
        if self.precision == "real fp16":
            given["plugins"] = [real_fp16()]
        if self.ranks == "DDP":
            given["strategy"] = "ddp_fork"
        if self.is_sharded:
            given["strategy"] = ModelParallelStrategy(2, tensor_parallel_size=1)
        if not self.manual:
            given["accumulate_grad_batches"] = self.accumulation
        return given


@dataclass
class Fits:
    folder: Path
    count: int = field(default=0)

    def fit(
        self,
        way: Way,
        module: LightningModule,
        callbacks: Sequence[Callback],
        *,
        watched: Mapping[str, Callback] | None = None,
        log_to: Path | None = None,
        start: int = 0,
        ckpt_path: Path | None = None,
        probe: bool = True,
        **trainer: Any,
    ) -> list[Left]:
        """Train two epochs and return what is left on each rank; `start` is where the random state stands before.

        `probe=False` leaves out what finds that, and returns nothing.
        """
        self.count += 1
        folder = self.folder / f"left {self.count}"
        folder.mkdir(parents=True)

        def run(rank: int = 0) -> None:
            random.seed(start)
            np.random.seed(start)
            torch.manual_seed(start)
            first = First()
            last = Last(first, folder, watched or {})
            logger = CSVLogger(log_to, version=0, flush_logs_every_n_steps=1) if log_to else False
            given = {**QUIET, "max_epochs": 2, "log_every_n_steps": 1, "logger": logger, **way.arguments(), **trainer}
            data = digits()
            loaders = [DataLoader(data, 4, shuffle=True), DataLoader(Subset(data, range(VALIDATED)), 4)]
            everybody = [first, *callbacks, last] if probe else [*callbacks]
            Trainer(callbacks=everybody, **given).fit(module, *loaders, ckpt_path=ckpt_path)

        if way.is_sharded:
            fork(run, way.num_ranks)
        else:
            run()
        return [torch.load(file, weights_only=False) for file in sorted(folder.glob("rank*.pt"))]


def logged_rows(folder: Path) -> list[dict[str, str]]:
    """What the CSVLogger wrote, without the readings of the machine."""
    (file,) = folder.rglob("metrics.csv")
    with file.open() as lines:
        rows = [{k: v for k, v in row.items() if v and not k.startswith(_READINGS)} for row in csv.DictReader(lines)]
    return [row for row in rows if row.keys() - {"step", "epoch"}]
