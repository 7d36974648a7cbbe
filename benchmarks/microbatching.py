"""A fit with microbatches against the same fit without, and against accumulation over batches of the parts' size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from _ratios import LEAN, arguments, be_quiet, measure, ratios, report, work
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_tricks import Microbatching

_STEPS, _ROWS = 20, 64
_BARE, _ACCUMULATED = "the bare Trainer", "4 batches of 16, accumulated"
_COUNTED = "4 batches of 16, accumulated by their targets"


class Net(LightningModule):
    """Layers of a width, with a loss that is a mean over the rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the loss, and log it."""
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class Clock(Callback):
    """Times the training loop from its second batch on: the first one compares."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        """Start after the first batch."""
        if trainer.global_step == 1:
            self.start = work()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop."""
        self.elapsed = work() - self.start


def _count(batch: list[Tensor]) -> Tensor:
    return (batch[1] != -100).sum()


def trainers(width: int) -> dict[str, Callable[[], float]]:
    """The same fit without, with whole batches, and with parts."""
    data = TensorDataset(torch.randn(_STEPS * _ROWS, 256), torch.randint(0, 10, (_STEPS * _ROWS,)))
    module = Net(width)

    def fit(*callbacks: Callback, parts: int = 1) -> float:
        clock = Clock()
        options = {**LEAN, "accumulate_grad_batches": parts}
        Trainer(max_epochs=1, callbacks=[clock, *callbacks], enable_checkpointing=False, **options).fit(
            module, DataLoader(data, batch_size=_ROWS // parts)
        )
        return clock.elapsed

    return {
        _BARE: lambda: fit(),
        "Microbatching(), 1 part": lambda: fit(Microbatching()),
        "Microbatching(64), 1 part": lambda: fit(Microbatching(64)),
        "Microbatching(32), 2 parts": lambda: fit(Microbatching(32)),
        "Microbatching(16), 4 parts": lambda: fit(Microbatching(16)),
        "2 batches of 32, accumulated": lambda: fit(parts=2),
        _ACCUMULATED: lambda: fit(parts=4),
        _COUNTED: lambda: fit(Microbatching(64, count=_count), parts=4),
    }


def main() -> None:
    """Measure, print and write."""
    be_quiet()
    given = arguments(default_rounds=15)
    torch.manual_seed(0)
    results = {}
    for name, width in (("small steps", 16), ("large steps", 512)):
        times = measure(trainers(width), given.rounds)
        compared = ("Microbatching(16), 4 parts", _COUNTED, _ACCUMULATED)
        parts = {contestant: times[contestant] for contestant in compared}
        results[name] = ratios(times, peer=_BARE)
        results[f"{name}, 4 parts"] = ratios(parts, peer=_ACCUMULATED)
    report("microbatching", results, given.rounds, given.out)


if __name__ == "__main__":
    main()
