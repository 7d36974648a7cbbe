"""What every style has in common: the callbacks that are added, the runs with and without them, what is compared."""

from __future__ import annotations

import csv
import itertools
import json
import os
import random
import re
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import TensorDataset

import lightning_tricks
from tests.auto_resume.training import End
from tests.small import recorded_warnings, unseen

SEED = 7
BATCHES = 9  # of an epoch
STOPS = (("an error", 5), ("SIGTERM", 6))  # how the first two processes of a run end, and after how many batches
UNMEASURED = r"MetricsMonitor: .* returned "
_OF_OTHERS = re.compile("LeafSpec|JsonargparseDeprecationWarning|was deprecated in v4")  # as in pyproject.toml
STYLES: dict[str, Style] = {}


class StoppedError(Exception):
    """The error that ends a process in the middle of an epoch."""


@dataclass(frozen=True)
class Style:
    """A training script in a style in which people write, and what the callbacks may say in it.

    Args:
        script: It trains with the callbacks of a `Job`.
        metrics: What MetricsMonitor measures; None where the steps return nothing to measure, which it says.
        says: Regular expressions of other warnings that the callbacks owe in this style.
        left_out: Callback -> words in which it refuses this style, and without which the others are run.
        resumed: Regular expressions of what AutoResume owes at a resume.
    """

    script: Callable[[Job], None]
    metrics: Mapping[str, Any] | None = None
    says: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    resumed: tuple[str, ...] = ()

    def expected(self) -> list[str]:
        return [*self.says, *([] if self.metrics else [UNMEASURED])]

    def added(self, folder: Path) -> dict[str, dict[str, Any]]:
        """What `callbacks=[...]` gains: those that look, and those that change a run, where they change nothing."""
        return {name: given for name, given in added(folder, self.metrics).items() if name not in self.left_out}


def style(**about: Any) -> Callable[[Callable[[Job], None]], Callable[[Job], None]]:
    def enter(script: Callable[[Job], None]) -> Callable[[Job], None]:
        if script.__name__ in STYLES:
            raise ValueError(f"two styles are called {script.__name__}.")
        STYLES[script.__name__] = Style(script, **about)
        return script

    return enter


def added(folder: Path, metrics: Mapping[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    """Name -> arguments of the callbacks that fit every module."""
    return {
        "SeedEverything": {"seed": SEED},
        "GradientClipping": {"max_norm": float("inf")},
        "MetricsMonitor": {"metrics": dict(metrics or {"task": "multiclass", "num_classes": 3})},
        "FlopsReport": {"backward": True},
        "ModelReport": {"dirpath": str(folder / "model"), "graph": False},
        "AutoResume": {"dirpath": str(folder / "resume"), "every_n_train_steps": 2},
        "RunFingerprint": {"path": str(folder / "fingerprint.jsonl"), "detail": "layer"},
        "RunReport": {"dirpath": str(folder / "report")},
        "DeviceMonitor": {"every_n_train_steps": 4},
        "CudaMemory": {},
        "NvtxRanges": {},
    }


class Seeds(Callback):
    """In the bare run: seeds where SeedEverything does, in Lightning's own way."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        lightning.seed_everything(SEED, workers=True, verbose=False)


class Stops(Callback):
    """Ends a process when it has trained some batches."""

    training_arguments = ()  # it is there once

    def __init__(self, how: str, batches: int) -> None:
        counter = unseen(itertools.count(1))  # no value that is saved, or the next process would continue counting

        def on_train_batch_end(*args: Any) -> None:
            if next(counter()) == batches:
                if how == "an error":
                    raise StoppedError
                os.kill(os.getpid(), getattr(signal, how))

        self.on_train_batch_end = on_train_batch_end

    # Some modules keep the arguments of their Trainer as hyper-parameters, which are copied and saved

    def __deepcopy__(self, memo: object) -> Stops:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {}


class Ends(End):
    """Writes where each process starts, what the run leaves as digests, and the plain values that its module keeps."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with (self.folder / "starts").open("a") as file:
            file.write(f"{trainer.global_step}\n")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_end(trainer, pl_module)
        file = self.folder / f"end.{trainer.global_rank}.json"
        plain = (bool, int, float, str, list, tuple, dict, set, deque)
        own = {k: repr(v) for k, v in vars(pl_module).items() if isinstance(v, plain) and not k.startswith("_")}
        kept = {k: v.replace(str(self.folder), "") for k, v in own.items() if " at 0x" not in v}
        found = json.loads(file.read_text()) | {"attributes": kept}
        file.write_text(json.dumps(found, indent=1))


@dataclass
class Job:
    """One process that runs a script.

    Args:
        folder: Where it writes.
        added: Name of a callback -> its arguments; empty in the bare run.
        stop: How it ends before its time, and after how many batches.
    """

    folder: Path
    added: Mapping[str, Mapping[str, Any]]
    stop: tuple[str, int] | None = None

    def probes(self) -> list[Callback]:
        """What is there in the bare run as well, behind what is added."""
        seeds = [] if self.added else [Seeds()]
        return [*seeds, Ends(self.folder), *([Stops(*self.stop)] if self.stop else [])]

    def settings(self) -> dict[str, Any]:
        """Arguments of a Trainer that make it small and quiet."""
        return {
            "accelerator": "cpu",
            "max_epochs": 2,
            "log_every_n_steps": 1,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(self.folder),
        }

    def logger(self) -> CSVLogger:
        return CSVLogger(self.folder, name="logs")

    def arguments(self, *callbacks: Callback, **arguments: Any) -> dict[str, Any]:
        """Arguments of a Trainer with the script's own callbacks and, as the only change, those that are added."""
        new = [getattr(lightning_tricks, name)(**given) for name, given in self.added.items()]
        return {
            "callbacks": [*callbacks, *new, *self.probes()],
            "logger": self.logger(),
            **self.settings(),
            **arguments,
        }

    def trainer(self, *callbacks: Callback, **arguments: Any) -> Trainer:
        return Trainer(**self.arguments(*callbacks, **arguments))

    def fit(
        self, module: LightningModule, *data: Any, datamodule: Any = None, callbacks: Any = (), **arguments: Any
    ) -> None:
        self.trainer(*callbacks, **arguments).fit(module, *data, datamodule=datamodule)


@dataclass
class Run:
    """What a run left: digests, what it logged, and the warnings of its processes."""

    end: dict[str, Any]
    logged: dict[tuple[int, str], list[str]]
    warnings: list[str]
    starts: list[int]


def begin_process(number: int) -> None:
    """Set the random numbers with which a new process begins: they are its own."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def train(
    script: Callable[[Job], None], folder: Path, added: Mapping[str, Any], stops: Any = (), first: int = 0
) -> Run:
    """Run a script in as many processes as it takes when the first ones are stopped.

    Args:
        script: The script.
        folder: Where it writes.
        added: The callbacks that are added, see `Job`.
        stops: How all processes but the last end.
        first: The number of the first process: 0, unless others have run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    for number, stop in enumerate([*stops, None], first):
        begin_process(number)
        with recorded_warnings() as caught:
            ended = _end_of(script, Job(folder, added, stop))
        assert ended == {"an error": StoppedError, "SIGTERM": 75, None: None}[stop and stop[0]], f"{stop}: {ended}"
        lines += [str(warning.message) for warning in caught]
    end = json.loads((folder / "end.0.json").read_text())
    return Run(end, logged(folder), lines, [int(line) for line in (folder / "starts").read_text().split()])


def _end_of(script: Callable[[Job], None], job: Job) -> Any:
    """Return how a process ends: a stop's error or exit status, or None."""
    try:
        script(job)
    except StoppedError:
        return StoppedError
    except SystemExit as left:
        return left.code
    return None


def logged(folder: Path) -> dict[tuple[int, str], list[str]]:
    """What the loggers wrote: (step, name) -> values in their order."""
    found: dict[tuple[int, str], list[str]] = {}
    for file in sorted(folder.glob("logs/**/metrics.csv")):
        with file.open(newline="") as rows:
            for row in csv.DictReader(rows):
                for name, value in row.items():
                    if name not in ("step", "epoch") and value:
                        found.setdefault((int(row["step"]), name), []).append(value)
    return found


def differences(run: Run, bare: Run) -> list[str]:
    found = [name for name in bare.end if name != "metrics" and bare.end[name] != run.end[name]]
    metrics = bare.end["metrics"]
    found += [f"metric {name}" for name in metrics if metrics[name] != run.end["metrics"].get(name)]
    names = {name for _, name in bare.logged}
    keys = sorted({*bare.logged} | {key for key in run.logged if key[1] in names})
    return found + [
        f"logged {n} at {step}" for step, n in keys if bare.logged.get((step, n)) != run.logged.get((step, n))
    ]


def new_warnings(run: Run, bare: Run) -> list[str]:
    """The warnings that come from what was added, each once."""
    return [line for line in dict.fromkeys(run.warnings) if line not in bare.warnings and not _OF_OTHERS.search(line)]


def is_expected(line: str, expected: Sequence[str]) -> bool:
    return any(re.search(words, line) for words in expected)


def points(count: int = 4 * BATCHES, seed: int = 1) -> TensorDataset:
    """Points in six dimensions, of three classes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator)
    return TensorDataset(x, (x[:, :3] + 0.5 * torch.randn(count, 3, generator=generator)).argmax(1))
