"""What DeviceMonitor adds to a step, beside Lightning's DeviceStatsMonitor: CPU time, operators and host reads."""

from __future__ import annotations

import io
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from functools import partial
from typing import Any

import torch
from _ratios import ACCELERATOR, arguments, be_quiet, measure, ratios, report
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import DeviceStatsMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_tricks import DeviceMonitor, seed_everything

LEAN = {"accelerator": ACCELERATOR, "devices": 1, "enable_progress_bar": False, "enable_model_summary": False}
STEPS = 1000
MAKE: dict[str, Callable[[], list[Callback]]] = {
    "without": list,
    "DeviceMonitor()": lambda: [DeviceMonitor()],
    "DeviceMonitor(interval=0.1)": lambda: [DeviceMonitor(interval=0.1)],
    "DeviceStatsMonitor()": lambda: [DeviceStatsMonitor()],
}


class Classifier(LightningModule):
    """A perceptron with ten scores."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the cross-entropy."""
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), 0.01)


class Count(TorchDispatchMode):
    """Counts operators, and those that read a value on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.host_reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one."""
        self.operators += 1
        self.host_reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def fit(width: int, name: str, counted: bool = False) -> tuple[float, Count]:
    """Train so many steps; return the CPU time of all threads of the process, and what was counted."""
    seed_everything(1, verbose=False)
    batch = torch.rand(32, 64), torch.randint(10, (32,))
    count = Count()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        logger = CSVLogger(folder)
        trainer = Trainer(max_epochs=1, callbacks=MAKE[name](), enable_checkpointing=False, logger=logger, **LEAN)
        start = time.process_time()
        with count if counted else nullcontext():
            trainer.fit(Classifier(width), DataLoader([batch] * STEPS, batch_size=None))
        return time.process_time() - start, count


def main() -> None:
    """Measure and report."""
    given = arguments(15)
    torch.set_num_threads(1)
    be_quiet()
    results = {}
    for width in (64, 2048):
        times = measure({name: partial(lambda w, n: fit(w, n)[0], width, name) for name in MAKE}, given.rounds)
        results[f"CPU time of a fit, {width} hidden units, over a fit without"] = ratios(times, "without")
    counts = {name: fit(64, name, counted=True)[1] for name in MAKE}
    for what in ("operators", "host_reads"):
        more = {
            name: (getattr(count, what) - getattr(counts["without"], what)) / STEPS for name, count in counts.items()
        }
        results[f"more {what.replace('_', ' ')} in a step"] = {
            name: {"median": value, "q1": value, "q3": value, "peer": "without, a difference"}
            for name, value in more.items()
            if name != "without"
        }
    report("devices", results, given.rounds, given.out)


if __name__ == "__main__":
    main()
