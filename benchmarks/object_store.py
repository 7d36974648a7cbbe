"""For how long a save to an object store keeps training waiting, how long a fit waits for its last save, and requests.

The store is moto's S3 on this machine, which takes in 60 MB a second (`_s3_server.py`). ModelCheckpoint writes to its
address through fsspec. A save begins when the one before has been sent.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from _ratios import LEAN, arguments, be_quiet, measure, ratios, report
from asynchronous_saves import Large
from fsspec.config import conf
from fsspec.core import url_to_fs
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_tricks import AutoResume, seed_everything
from lightning_tricks.auto_resume.resumable_fit import ResumableFit

RATE, MEGABYTES = 60e6, 104
WORK, SAVES = 10, 3  # steps between two saves, and saves
WARMUP = 1
DIRECT = "ModelCheckpoint"
KINDS = (DIRECT, "AutoResume", "AutoResume, asynchronous")
ADDRESS = "s3://bench/run"


@contextmanager
def server() -> Iterator[Path]:
    """Start the store, tell fsspec where it is, and yield the log of its requests."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "requests")
        command = [sys.executable, str(Path(__file__).with_name("_s3_server.py")), str(RATE), str(log)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            try:
                address = f"http://127.0.0.1:{int(process.stdout.readline())}"
                conf["s3"] = {"key": "bench", "secret": "bench", "endpoint_url": address}
                yield log
            finally:
                process.kill()


class Sent(Callback):
    """Waits before a save until the one before has been sent, and notes when the last step ended."""

    def __init__(self, guard: Callback, log: Path) -> None:
        self.guard, self.server_log = guard, log
        self.requests: list[int] = []  # up to each save

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Wait in the last step before a save."""
        if batch_idx % WORK == WORK - 1:
            if isinstance(self.guard, AutoResume) and batch_idx >= WORK:
                self.guard._fit.writer.wait()
                folder = self.guard._run_files.folder
                while folder.read_private("mirror.json").get("newest") != folder.manifests()[0].file:
                    time.sleep(0.05)
                time.sleep(0.5)  # it may still remove the one before
            self.requests.append(len(self.server_log.read_bytes().splitlines()))

    def on_train_batch_end(self, *unused: Any) -> None:
        """Read the clock."""
        self.end = time.perf_counter()


def saving(kind: str, scratch: str) -> Callback:
    """Return what saves every so many steps."""
    if kind == DIRECT:
        return ModelCheckpoint(ADDRESS, every_n_train_steps=WORK)
    options = {"every_n_train_steps": WORK, "every_n_epochs": None, "scratch": scratch}
    return AutoResume(ADDRESS, asynchronous="asynchronous" in kind, **options)


def spread(counts: list[int]) -> dict[str, float]:
    """Return the median and the quartiles."""
    low, median, high = statistics.quantiles(counts, n=4)
    return {"median": median, "q1": low, "q3": high}


def main() -> None:
    """Measure and report."""
    given = arguments(15)
    torch.set_num_threads(1)
    be_quiet()
    waits: dict[str, list[float]] = defaultdict(list)
    ends: dict[str, list[float]] = defaultdict(list)
    requests: dict[str, list[int]] = defaultdict(list)
    rows = WORK * SAVES * 64
    loader = DataLoader(TensorDataset(torch.rand(rows, 256), torch.randint(10, (rows,))), 64)

    def run(kind: str, log: Path) -> float:
        """Return how long the second save took: the first takes new memory, the last is that of the end."""
        files, root = url_to_fs(ADDRESS)
        files.mkdirs(root.partition("/")[0], exist_ok=True)
        owner, name = (ModelCheckpoint, "_save_checkpoint") if kind == DIRECT else (ResumableFit, "_save")
        plain, spent = getattr(owner, name), []

        def timed(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = plain(*args, **options)
            spent.append(time.perf_counter() - start)
            return result

        seed_everything(1, verbose=False)
        with tempfile.TemporaryDirectory() as scratch, patch.object(owner, name, timed):
            clock = Sent(guard := saving(kind, scratch), log)
            own = {"max_steps": WORK * SAVES, "enable_checkpointing": kind == DIRECT, **LEAN}
            Trainer(callbacks=[clock, guard], **own).fit(Large(MEGABYTES, 512), loader)
            ends[kind].append(time.perf_counter() - clock.end)
        requests[kind].append(clock.requests[2] - clock.requests[1])
        files.invalidate_cache()
        files.rm(root, recursive=True)
        return spent[1]

    with server() as log:
        waits.update(measure({kind: lambda kind=kind: run(kind, log) for kind in KINDS}, given.rounds, WARMUP))
    ends = {kind: times[WARMUP:] for kind, times in ends.items()}
    results = {
        "a save of 104 MB": ratios(waits, DIRECT),
        "the last save of 104 MB and the end of the fit": ratios(ends, DIRECT),
        "requests of a save": {kind: spread(found[WARMUP:]) for kind, found in requests.items()},
    }
    report("object_store", results, given.rounds, given.out)


if __name__ == "__main__":
    main()
