"""A training script as people write them: `train(folder, options)`.

It writes each logged value to `FOLDER/logged.<rank>.jsonl` and, at its end, the digests of all that
a run leaves to `FOLDER/end.<rank>.json`. With "kill" it sends itself a signal at a moment.
"""

import hashlib
import itertools
import json
import os
import random
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torchmetrics import Accuracy

from lightning_tricks import seed_everything
from lightning_tricks._shared.tensors import local_part
from lightning_tricks.auto_resume import AutoResume
from tests.small import QUIET, fork, real_fp16, unseen

DEFAULTS: dict[str, Any] = {
    "samples": 44,  # 11 batches of 4: a partial tail under accumulation
    "epochs": 3,
    "workers": 0,
    "persistent": False,
    "iterable": "",  # "sized" or "unsized" for an IterableDataset
    "ranks": 1,
    "nodes": 1,  # which share the ranks; a process for each runs the script
    "strategy": "ddp",  # or "fsdp2", "fsdp2 meta", "fsdp2 tensor"
    "accumulate": 1,
    "validate": "epoch",  # or "none", or a number of steps
    "val_loaders": 2,
    "precision": "32-true",
    "optimization": "automatic",
    "limit": 1.0,
    "loader": "shuffled",
    "sanity": 2,
    "resume": {"every_n_train_steps": 2},
    "guarded": True,
    "address": "",  # of AutoResume; else it writes to `resume`
    "early": 0,  # patience of EarlyStopping
    "asks": False,  # for the number of steps, in configure_optimizers: as people do for OneCycleLR
    "loggers": [],  # beside the notes: "csv", "tensorboard"
    "logs": "logs",  # where they write
    "version": None,  # of these loggers
    "checkpointing": [],  # arguments of ModelCheckpoints, which write to `mine` or to the logger's directory
    "more": [],  # callbacks
    "ballast": 0,  # megabytes of a buffer that changes in each step
    "tests": False,  # the best checkpoint, after the fit
    "kill": None,  # hook or moment, which of its calls, signal, rank, "group" or "launcher"
}


class Digits(Dataset):
    """Digits, augmented with numbers from each of the global generators."""

    def __init__(self, count: int, offset: int = 0) -> None:
        data = load_digits()
        self.x = torch.tensor(data.data[offset : offset + count], dtype=torch.float32) / 16
        self.y = torch.tensor(data.target[offset : offset + count])

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = 0.1 * torch.randn(64) + 0.1 * random.gauss(0, 1)
        return self.x[index] * float(np.random.uniform(0.8, 1.2)) + noise, self.y[index]


class Stream(IterableDataset):
    """The same digits as a stream, shared out among the workers."""

    def __init__(self, data: Digits) -> None:
        self.data = data

    def __iter__(self):
        info = get_worker_info()
        part, parts = (info.id, info.num_workers) if info else (0, 1)
        return (self.data[index] for index in range(part, len(self.data), parts))


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self.data)


class StatefulBatches:
    """What is no DataLoader and keeps its own place, in an order that follows from the number of the epoch."""

    epoch = given = begun = 0

    def __init__(self, data: Digits) -> None:
        self.data = data

    @property
    def count(self) -> int:
        return len(self.data) // 4

    def __len__(self) -> int:
        return self.count

    def __iter__(self):
        start, self.begun = self.begun, 0
        order = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for given in range(start, self.count):
            self.given = given
            samples = [self.data[index] for index in order[4 * given : 4 * given + 4]]
            if given == self.count - 1:
                self.epoch += 1
            yield [torch.stack(part) for part in zip(*samples, strict=True)]

    def state_dict(self):
        done = (self.given + 1) % self.count
        return {"epoch": self.epoch, "begun": done}

    def load_state_dict(self, state):
        self.epoch, self.begun = state["epoch"], state["begun"]


class StatefulGenerator(StatefulBatches):
    """The same of an unknown length: Lightning fetches a batch ahead."""

    def __len__(self) -> int:
        raise TypeError


def stateful_data_loader(data: Dataset, **options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    warnings.filterwarnings("ignore", ".*set_vital")
    return StatefulDataLoader(data, batch_size=4, shuffle=True, **options)


MOMENTS = ("script", "prepare_data", "configure_model", "training_step")  # that callbacks have no hook for
ON_FILES = "files"  # the moment of the n-th change of a file or folder in the directory of AutoResume


def reach(moment: str) -> None:
    """Send this rank the signal that the script is to get at this moment, for the first time that it comes there."""
    name, _, rank = os.environ.get(f"KILL_AT_{moment}", "").partition(" ")
    if name and os.environ.get("LOCAL_RANK", "0") == rank:
        del os.environ[f"KILL_AT_{moment}"]
        os.kill(os.getpid(), getattr(signal, name))


def signal_at_change(folder: Path, number: int, name: str, rank: int) -> None:
    """Send this process, if it is the rank, a signal at the n-th change of a file or a folder below a folder."""
    changes = itertools.count(1)

    def notice(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"):
            return
        reads = event == "open" and not (isinstance(arguments[1], str) and arguments[1].strip("rbt"))
        if not reads and str(arguments[0]).startswith(str(folder)) and next(changes) == number:
            os.kill(os.getpid(), getattr(signal, name))

    if int(os.environ.get("LOCAL_RANK", "0")) == rank:
        sys.addaudithook(notice)


class DigitsNet(LightningModule):
    on_meta = False  # until the strategy gives memory to the net

    def __init__(self, optimization: str, asks: bool) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = optimization == "automatic"
        self.net = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 10))
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.accuracy = Accuracy("multiclass", num_classes=10)
        self.val_accuracy = Accuracy("multiclass", num_classes=10)

    def prepare_data(self):
        reach("prepare_data")

    def configure_model(self):
        reach("configure_model")
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            self.shard(self.device_mesh)

    def reset_parameters(self):
        """What the strategy calls after it gave memory to a module, with any values in it."""
        self.seen.zero_()
        self.accuracy, self.val_accuracy = (Accuracy("multiclass", num_classes=10) for _ in range(2))

    def shard(self, mesh):
        """Shard each layer: of FSDP2, and in two dimensions with another net, as a batch norm cannot be cut."""
        if mesh.size(1) > 1:
            self.net = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
            parallelize_module(self.net, mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        elif self.on_meta:
            with torch.device("meta"):
                self.net = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))
        for layer in self.net:
            fully_shard(layer, mesh=mesh["data_parallel"])
        fully_shard(self, mesh=mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        reach("training_step")
        if isinstance(batch[0], list):  # of two loaders
            batch = [torch.cat(part) for part in zip(*batch, strict=True)]
        x, y = batch
        scores = self.net(x)
        loss = nn.functional.cross_entropy(scores, y) * (1 + 0.01 * random.random())
        self.seen += x.sum().detach()
        if "ballast" in self._buffers:
            self.ballast += 1
        self.accuracy(scores, y)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=self.trainer.world_size > 1)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        if batch_idx == 1:
            self.log("second", loss * 2, on_step=False, on_epoch=True, reduce_fx="max")
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            self.manual_backward(loss)
            if (batch_idx + 1) % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        scores = self.net(x)
        self.val_accuracy(scores, y)
        self.log("val_loss", nn.functional.cross_entropy(scores, y) + 0.01 * torch.rand(()), sync_dist=True)
        self.log("val_accuracy", self.val_accuracy, on_epoch=True)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        steps = int(self.trainer.estimated_stepping_batches) if self.hparams["asks"] else 200
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Notes(Logger):
    """Appends what is logged to a file, one JSON object a line."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.rank = 0

    name = "notes"
    version = 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: they are the options."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        line = json.dumps([step, {name: float(value).hex() for name, value in metrics.items()}])
        with (self.folder / "logged.jsonl").open("a") as file:
            file.write(f"{line}\n")


class Kill(Callback):
    """Sends a rank, its whole process group or what launched it a signal at the n-th call of a hook."""

    training_arguments = ()  # it is there once

    def __init__(self, hook: str, number: int, name: str, rank: int | str = 0) -> None:
        counter = unseen(itertools.count(1))  # no value that is saved, or the next process would continue counting

        def call(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
            if next(counter()) != number:
                return
            if rank == "group":
                os.killpg(0, getattr(signal, name))
            elif rank == "launcher":
                if trainer.global_rank == 0:
                    os.kill(os.getppid(), getattr(signal, name))
            elif trainer.global_rank == rank:
                os.kill(os.getpid(), getattr(signal, name))

        setattr(self, hook, call)


class End(Callback):
    """Writes the digests of what the run leaves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    compared = (EarlyStopping, ModelCheckpoint)

    def attributes(self, callback: Callback) -> dict[str, str]:
        left_out = ("_last_time_checked", "log", "log_dict", "_fs")  # times, and what Lightning binds
        text = {
            name: repr(value) for name, value in vars(callback).items() if name not in left_out and not callable(value)
        }
        return {name: value.replace(str(self.folder), "") for name, value in text.items()}

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        found = {
            "weights": digest(dict(sorted(pl_module.state_dict().items()))),
            "buffers": digest(dict(sorted(pl_module.named_buffers()))),
            "optimizers": digest([one.state_dict() for one in trainer.optimizers]),
            "schedulers": digest([one.scheduler.state_dict() for one in trainer.lr_scheduler_configs]),
            "scaler": digest(trainer.precision_plugin.state_dict()),
            "metrics": {name: float(value).hex() for name, value in trainer.callback_metrics.items()},
            "rng": digest([random.getstate(), np.random.get_state(), torch.get_rng_state()]),
            "steps": [trainer.global_step, trainer.current_epoch],
            "callbacks": [self.attributes(one) for one in trainer.callbacks if isinstance(one, self.compared)],
        }
        (self.folder / f"end.{trainer.global_rank}.json").write_text(json.dumps(found, indent=1))


def digest(value: Any) -> str:
    """The SHA-256 of nested plain values and tensors."""
    hashing = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            part = local_part(part)
            flat = part.detach().cpu().contiguous().reshape(-1)
            hashing.update(f"{part.dtype}{tuple(part.shape)}".encode() + flat.view(torch.uint8).numpy().tobytes())
        elif isinstance(part, np.ndarray):
            hashing.update(part.tobytes())
        elif isinstance(part, dict):
            for name in part:
                add(str(name))
                add(part[name])
        elif isinstance(part, list | tuple):
            hashing.update(b"[")
            for one in part:
                add(one)
        else:
            hashing.update(repr(part).encode())

    add(value)
    return hashing.hexdigest()


def loaders(options: dict[str, Any]) -> tuple[DataLoader, list[DataLoader]]:
    workers = {"num_workers": options["workers"]}
    if options["workers"]:
        workers["persistent_workers"] = options["persistent"]
    data: Any = Digits(options["samples"] * options["ranks"])
    if options["iterable"]:
        data = (SizedStream if options["iterable"] == "sized" else Stream)(data)
        train: Any = DataLoader(data, batch_size=4, **workers)
    elif options["loader"] == "generator":
        train = DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5), **workers)
    elif options["loader"] == "streams":  # the shorter one is begun again within an epoch, and nobody knows the lengths
        parts = [DataLoader(Stream(part), batch_size=4, **workers) for part in (data, Digits(20, 300))]
        train = CombinedLoader(parts, "max_size_cycle")
    elif options["loader"] == "stateful":
        train = StatefulBatches(data)
    elif options["loader"] == "stateful generator":
        train = StatefulGenerator(data)
    elif options["loader"] == "torchdata":
        train = stateful_data_loader(data, **workers)
    elif options["loader"] == "mixed":  # each goes on in its own way; the second and third begin again in an epoch
        parts = [StatefulBatches(data), DataLoader(Digits(20, 300), batch_size=4, shuffle=True, **workers)]
        train = CombinedLoader([*parts, stateful_data_loader(Digits(12, 400), **workers)], "max_size_cycle")
    else:
        train = DataLoader(data, batch_size=4, shuffle=True, **workers)
    held_out = [DataLoader(Digits(12, 200 + 20 * i), batch_size=5, **workers) for i in range(options["val_loaders"])]
    return train, held_out


def callbacks_of(options: dict[str, Any], folder: Path) -> list[Callback]:
    found: list[Callback] = []
    if options["early"]:
        found.append(EarlyStopping("val_loss/dataloader_idx_0", patience=options["early"]))
    for arguments in options["checkpointing"]:
        place = {"dirpath": folder / arguments["dirpath"]} if "dirpath" in arguments else {}
        found.append(ModelCheckpoint(**{**arguments, **place}))
    if options["guarded"]:
        found.append(AutoResume(options["address"] or folder / "resume", **options["resume"]))
    found += [*options["more"], End(folder)]
    if options["kill"] and options["kill"][0] not in (*MOMENTS, ON_FILES):
        found.append(Kill(*options["kill"]))
    return found


def loggers_of(options: dict[str, Any], folder: Path) -> list[Logger]:
    kinds = {"csv": CSVLogger, "tensorboard": TensorBoardLogger}
    named = [
        kinds[name](folder / options["logs"], name=name, version=options["version"]) for name in options["loggers"]
    ]
    return [*named, Notes(folder)]


def train(folder: Path, options: dict[str, Any]) -> Trainer | None:
    """Fit, as the options say; with FSDP2, in forks that the Trainer takes for ranks that another program started."""
    options = {**DEFAULTS, **options}
    if not options["strategy"].startswith("fsdp2"):
        return fit(folder, options)
    fork(lambda rank: fit(folder, options), options["ranks"])
    return None


def fit(folder: Path, options: dict[str, Any]) -> Trainer:
    warnings.filterwarnings("ignore", module=r"lightning\.")
    seed_everything(7, verbose=False)
    module = DigitsNet(options["optimization"], options["asks"])
    if options["ballast"]:
        module.register_buffer("ballast", torch.zeros(options["ballast"] * 250_000))
    strategy: Any = options["strategy"] if options["ranks"] > 1 else "auto"
    if options["strategy"].startswith("fsdp2"):
        in_tensor = 2 if "tensor" in options["strategy"] else 1
        strategy = ModelParallelStrategy(options["ranks"] // in_tensor, in_tensor)
        module.on_meta = "meta" in options["strategy"]
    fp16 = options["precision"] == "16-mixed"
    given = {**QUIET, "logger": loggers_of(options, folder), "num_sanity_val_steps": options["sanity"]}
    given["enable_checkpointing"] = bool(options["checkpointing"])
    if options["validate"] == "none":
        given["limit_val_batches"] = 0
    elif options["validate"] != "epoch":
        given |= {"val_check_interval": options["validate"], "check_val_every_n_epoch": None}
    trainer = Trainer(
        devices=options["ranks"] // options["nodes"],
        num_nodes=options["nodes"],
        strategy=strategy,
        max_epochs=options["epochs"],
        accumulate_grad_batches=options["accumulate"],
        precision=None if fp16 else options["precision"],
        plugins=[real_fp16()] if fp16 else None,
        callbacks=callbacks_of(options, folder),
        limit_train_batches=options["limit"],
        log_every_n_steps=1,
        default_root_dir=folder / "root",
        **given,
    )
    if options["kill"] and options["kill"][0] in MOMENTS:
        moment, _, name, rank = options["kill"]
        os.environ[f"KILL_AT_{moment}"] = f"{name} {rank}"
    if options["kill"] and options["kill"][0] == ON_FILES:
        signal_at_change(folder / "resume", *options["kill"][1:])
    reach("script")
    train_loader, held_out = loaders(options)
    trainer.fit(module, train_loader, held_out)
    if options["tests"]:
        trainer.test(module, held_out[0], ckpt_path="best", verbose=False)
    return trainer
