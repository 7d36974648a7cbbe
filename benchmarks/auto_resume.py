"""What AutoResume costs: in a step between two saves, in a save, and until the first step of a run that resumes."""

from __future__ import annotations

import io
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from _ratios import LEAN, arguments, be_quiet, measure, now, ratios, report
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_tricks import AutoResume, seed_everything
from lightning_tricks.auto_resume.core.attributes.restoring import restore_changes
from lightning_tricks.auto_resume.core.attributes.tracking import AttributeTracker
from lightning_tricks.auto_resume.resumable_fit import ResumableFit

SAMPLES, BATCH_SIZE, STEPS, SAVES, TRANSITIONS = 100_000, 32, 300, 20, 50_000


class Classifier(LightningModule):
    """A multilayer perceptron on vectors of 64."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.head = nn.Linear(hidden, 10)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the cross-entropy."""
        return nn.functional.cross_entropy(self.head(self.net(batch[0])), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters())


class Timer(Callback):
    """Notes when the first batch came, and how long the batches after the first 20 took."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Note the time."""
        at = now()
        self.first = getattr(self, "first", at)
        self.count = getattr(self, "count", 0) + 1
        if self.count == 21:
            self.from_21 = at
        self.last = at


def loader() -> DataLoader[Any]:
    """Return 100,000 random samples, shuffled."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(SAMPLES, 64, generator=generator), torch.randint(10, (SAMPLES,), generator=generator)
    return DataLoader(TensorDataset(x, y), BATCH_SIZE, shuffle=True)


def steps(hidden: int, data: DataLoader[Any], rounds: int) -> dict[str, dict[str, float]]:
    """Time steps with and without AutoResume, and what of them passes inside it."""
    inside: list[float] = []

    def fit(guarded: bool) -> float:
        seed_everything(1, verbose=False)
        timer = Timer()
        plain, spent = ResumableFit.after_batch, [0.0]

        def after_batch(self: ResumableFit) -> None:
            start = time.perf_counter()
            plain(self)
            spent[0] += time.perf_counter() - start

        with tempfile.TemporaryDirectory() as folder, patch.object(ResumableFit, "after_batch", after_batch):
            guards = [AutoResume(folder, every_n_epochs=None)] if guarded else []
            trainer = Trainer(max_steps=STEPS, callbacks=[*guards, timer], enable_checkpointing=False, **LEAN)
            trainer.fit(Classifier(hidden), data)
        elapsed = timer.last - timer.from_21
        if guarded:
            inside.append(1 + spent[0] / STEPS * (STEPS - 21) / elapsed)
        return elapsed

    times = measure({"without": lambda: fit(False), "with AutoResume": lambda: fit(True)}, rounds)
    found = ratios(times, "without")
    ordered = sorted(inside[-rounds:])
    found["1 + inside AutoResume"] = {
        "median": round(ordered[rounds // 2], 5),
        "q1": round(ordered[rounds // 4], 5),
        "q3": round(ordered[3 * rounds // 4], 5),
        "peer": "without",
    }
    return found


def rows_loader() -> DataLoader[Any]:
    """Return 1,500 random samples, a list of tuples of small tensors."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(1500, 64, generator=generator), torch.randint(10, (1500,), generator=generator)
    return DataLoader([(one * 1.0, label) for one, label in zip(x, y, strict=True)], BATCH_SIZE)  # type: ignore[arg-type]


def saves(hidden: int, data: DataLoader[Any], rounds: int) -> dict[str, dict[str, float]]:
    """Time saves that training waits for, after each step; ModelCheckpoint does not flush its files to the disk."""
    spent: dict[str, list[float]] = {}

    def timed(name: str, plain: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            start = now()
            try:
                return plain(*args, **options)
            finally:
                spent[name].append(now() - start)

        return call

    flushes: list[float] = []  # in the save of the median

    def fit(guarded: bool) -> float:
        seed_everything(1, verbose=False)
        spent.update(save=[], flush=[])
        owner, name = (ResumableFit, "after_batch") if guarded else (ModelCheckpoint, "on_train_batch_end")
        with (
            tempfile.TemporaryDirectory() as folder,
            patch.object(owner, name, timed("save", getattr(owner, name))),
            patch.object(os, "fsync", timed("flush", os.fsync)),
        ):
            waits = {"asynchronous": False} if guarded else {}
            callback = (AutoResume if guarded else ModelCheckpoint)(folder, every_n_train_steps=1, **waits)
            trainer = Trainer(max_steps=SAVES, callbacks=[callback], enable_checkpointing=not guarded, **LEAN)
            trainer.fit(Classifier(hidden), data)
        if guarded:
            flushes.append(sum(spent["flush"]) / SAVES)
        return statistics.median(spent["save"][3:])

    times = measure({"ModelCheckpoint": lambda: fit(False), "AutoResume": lambda: fit(True)}, rounds)
    pairs = zip(times["AutoResume"], flushes[-rounds:], strict=True)
    times["AutoResume, without its flushes"] = [own - flushed for own, flushed in pairs]
    return ratios(times, "ModelCheckpoint")


class Memory:
    """A replay buffer."""

    def __init__(self) -> None:
        self.transitions: deque[tuple[Any, ...]] = deque(maxlen=TRANSITIONS)


def replay_buffer(rounds: int) -> dict[str, dict[str, float]]:
    """Time a save and a load of a buffer of transitions, each the two states, action, reward and end."""
    memory, generator = Memory(), torch.Generator().manual_seed(0)
    tracker = AttributeTracker({"memory": memory})
    states = [state.clone() for state in torch.rand(TRANSITIONS + 1, 4, generator=generator)]
    for number in range(TRANSITIONS):
        action = torch.tensor(number % 3)
        memory.transitions.append((states[number], action, number / 7, states[number + 1], number % 9 == 0))

    def plain() -> None:
        stream = io.BytesIO()
        torch.save(list(memory.transitions), stream)
        stream.seek(0)
        torch.load(stream, weights_only=True)

    def ours() -> None:
        stream = io.BytesIO()
        torch.save(tracker.changes(), stream)
        stream.seek(0)
        restored = Memory()
        failed = restore_changes({"memory": restored}, torch.load(stream, weights_only=True))
        if failed or len(restored.transitions) != TRANSITIONS:
            raise RuntimeError(failed)

    contestants = {"torch.save and torch.load": lambda: timed(plain), "AutoResume": lambda: timed(ours)}
    return ratios(measure(contestants, rounds), "torch.save and torch.load")


def timed(function: Callable[[], None]) -> float:
    """Return how long a function takes."""
    start = now()
    function()
    return now() - start


def taking_up(share: float, data: DataLoader[Any], rounds: int) -> dict[str, dict[str, float]]:
    """Time a resumed fit until its first step, in the middle of an epoch; Lightning's begins the epoch again."""
    at = int(SAMPLES / BATCH_SIZE * share)
    folder = Path(tempfile.mkdtemp())

    class Stops(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == at:
                trainer.save_checkpoint(folder / "lightning.ckpt")
            if trainer.global_step == at + 1:
                raise RuntimeError

    seed_everything(1, verbose=False)
    guard = AutoResume(folder / "runs", every_n_train_steps=at, every_n_epochs=None)
    with suppress(RuntimeError):
        Trainer(max_epochs=1, callbacks=[guard, Stops()], enable_checkpointing=False, **LEAN).fit(Classifier(64), data)

    class First(Callback):
        def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
            self.at = now()
            raise RuntimeError

    def first_step(guarded: bool) -> float:
        seed_everything(1, verbose=False)
        first = First()
        guards = [AutoResume(folder / "runs", every_n_epochs=None)] if guarded else []
        trainer = Trainer(max_epochs=1, callbacks=[*guards, first], enable_checkpointing=False, **LEAN)
        module = Classifier(64)
        start = now()
        with suppress(RuntimeError):
            trainer.fit(module, data, ckpt_path=None if guarded else folder / "lightning.ckpt")
        return first.at - start

    contestants = {"Lightning": lambda: first_step(False), "AutoResume": lambda: first_step(True)}
    found = ratios(measure(contestants, rounds), "Lightning")
    opened.clear()
    first_step(True)
    own = len(opened)
    first_step(False)
    read = own / (len(opened) - own)
    found["AutoResume, reads of the checkpoint"] = {"median": read, "q1": read, "q3": read, "peer": "Lightning"}
    return found


def note_checkpoints(event: str, args: tuple[Any, ...]) -> None:
    """Note the checkpoints that are opened to be read."""
    if event == "open" and str(args[0]).endswith((".ckpt", "meta.pt")) and (args[1] or "r").startswith("r"):
        opened.append(str(args[0]))


opened: list[str] = []


def main() -> None:
    """Measure and report."""
    given = arguments(15)
    torch.set_num_threads(1)
    be_quiet()
    data = loader()
    results = {f"a step, hidden {hidden}": steps(hidden, data, given.rounds) for hidden in (64, 1024)}
    results |= {f"a save, hidden {hidden}": saves(hidden, data, given.rounds) for hidden in (64, 1024)}
    results["a save, hidden 64, a dataset of 3,000 tensors"] = saves(64, rows_loader(), given.rounds)
    results["a replay buffer of 50,000 tuples"] = replay_buffer(max(3, given.rounds // 5))
    sys.addaudithook(note_checkpoints)
    for share in (0.1, 0.9):
        results[f"to the first step, at {share:.0%} of an epoch"] = taking_up(share, data, given.rounds)
    report("auto_resume", results, given.rounds, given.out)


if __name__ == "__main__":
    main()
