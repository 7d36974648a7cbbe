"""What watching for spikes costs a step: fits with SpikeGuard against the bare Trainer's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from _ratios import LEAN, arguments, be_quiet, measure, ratios, report, work
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_tricks import SpikeGuard

_STEPS = 100  # "rewind" judges them at once


class Net(LightningModule):
    """Three layers with batch statistics, some milliseconds a step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(layer for _ in range(3) for layer in (nn.Linear(512, 512), nn.BatchNorm1d(512), nn.ReLU()))
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return a loss that has no spikes."""
        return (self.net(batch) - 1).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Clock(Callback):
    """Times the training loop alone."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start."""
        self.start = work()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop."""
        self.elapsed = work() - self.start


def fit(make: Callable[[], list[Callback]]) -> float:
    """Return how long a fit takes."""
    clock = Clock()
    loader = DataLoader(torch.rand(_STEPS * 128, 512), batch_size=128)
    Trainer(max_epochs=1, callbacks=[clock, *make()], enable_checkpointing=False, **LEAN).fit(Net(), loader)
    return clock.elapsed


def main() -> None:
    """Measure, print and write."""
    be_quiet()
    given = arguments(default_rounds=15)
    torch.manual_seed(0)
    contestants: dict[str, Callable[[], list[Callback]]] = {
        "bare Trainer": list,
        'SpikeGuard("skip")': lambda: [SpikeGuard("skip")],
        'SpikeGuard("skip", monitor="grad_norm")': lambda: [SpikeGuard("skip", monitor="grad_norm")],
        'SpikeGuard("rewind")': lambda: [SpikeGuard("rewind")],
        'SpikeGuard("rewind", every_n_train_steps=5)': lambda: [SpikeGuard("rewind", every_n_train_steps=5)],
    }
    times = measure({name: lambda make=make: fit(make) for name, make in contestants.items()}, given.rounds, warmup=1)
    results = {f"{_STEPS} steps": ratios(times, peer="bare Trainer")}
    report("spike_guard", results, given.rounds, given.out)


if __name__ == "__main__":
    main()
