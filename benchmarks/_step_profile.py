"""What one training step of `collection.py` does for each callback, beyond the bare Trainer's.

`python benchmarks/_step_profile.py [--gan] [NAME ...]` prints calls of Python and C functions, operators, host reads
and microseconds of CPU time; all but the last are exact, however busy the machine is.
"""

from __future__ import annotations

import io
import sys
import tempfile
import time
from collections import Counter
from contextlib import redirect_stdout
from typing import Any

import collection
import torch
from _ratios import LEAN, be_quiet
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_tricks import seed_everything

FIRST, LAST = 150, 450  # batches of an epoch; everything has started by then
WAYS = ("calls", "operators", "time")


class Operators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operator."""
        self.counts[function._schema.name] += 1
        return function(*args, **(kwargs or {}))


class Probe(Callback):
    """Counts, in one of the ways, what happens between two batches."""

    def __init__(self, way: str) -> None:
        self.way, self.operators, self.calls, self.seconds = way, Operators(), Counter[str](), 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Begin, or end."""
        if batch_idx not in (FIRST, LAST):
            return
        is_first = batch_idx == FIRST
        self.seconds = time.process_time() - self.seconds
        if self.way == "calls":
            sys.setprofile(self._count if is_first else None)
        elif self.way == "operators":
            self.operators.__enter__() if is_first else self.operators.__exit__(None, None, None)
        trainer.should_stop = not is_first

    def _count(self, frame: object, event: str, argument: object) -> None:
        self.calls[event] += 1


def run(names: list[str], way: str, *, gan: bool) -> Probe:
    """Train with some callbacks, and return the probe."""
    seed_everything(1, verbose=False)
    model, made, data, batch_size = collection.parts_of(collection.gan if gan else collection.mlp)
    probe = Probe(way)
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        callbacks = [probe, *(made[name](folder) for name in names)]
        options = {**LEAN, "logger": CSVLogger(folder), "enable_checkpointing": False}
        trainer = Trainer(max_epochs=1, limit_train_batches=LAST + 5, callbacks=callbacks, **options)
        trainer.fit(model, DataLoader(data, batch_size=batch_size))
    return probe


def profile(names: list[str], *, gan: bool) -> list[float]:
    """Return calls of Python and C functions, operators, host reads and the least microseconds of a step."""
    calls, operators = (run(names, way, gan=gan) for way in WAYS[:2])
    seconds = min(run(names, "time", gan=gan).seconds for _ in range(3))
    counts = operators.operators.counts
    found = [calls.calls["call"], calls.calls["c_call"], counts.total(), counts["aten::_local_scalar_dense"]]
    return [number / (LAST - FIRST) for number in (*found, seconds * 1e6)]


def main() -> None:
    """Print the table."""
    gan, names = "--gan" in sys.argv, [name for name in sys.argv[1:] if name != "--gan"]
    be_quiet()
    torch.set_num_threads(1)
    eight = [*collection.SIX, "RunFingerprint", "SpikeGuard"]
    together = {"six": collection.SIX, "eight": eight, "nine": list(collection.MAKE)}
    cases = {name: [name] for name in names or collection.MAKE} | ({} if names else together)
    bare = profile([], gan=gan)
    print(f"{'':18}{'Python':>8}{'C':>8}{'operators':>11}{'reads':>7}{'us':>8}")
    for name, row in {"bare": bare, **{name: profile(case, gan=gan) for name, case in cases.items()}}.items():
        beyond = row if name == "bare" else [own - other for own, other in zip(row, bare, strict=True)]
        print("{:18}{:8.1f}{:8.1f}{:11.1f}{:7.2f}{:8.0f}".format(name, *beyond))


if __name__ == "__main__":
    main()
