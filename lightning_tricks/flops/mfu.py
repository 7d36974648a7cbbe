"""Model FLOPs utilization (MFU) of a training run: FLOPs of the training steps, by time, by the peak of the device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from lightning_tricks._lightning_compat.callbacks import device_peak_flops
from lightning_tricks._lightning_compat.flavor import Trainer
from lightning_tricks._shared.text import format_si


class MfuMeter:
    """Measures the utilization between the steps at which the Trainer logs.

    Args:
        peak_flops: The peak of one device, in FLOPs per second.
        flops_per_batch: The FLOPs of one training step.
        step: The Trainer's global step at the start.

    Attributes:
        step: The Trainer's global step at the last reading.
    """

    def __init__(self, peak_flops: float, flops_per_batch: float, step: int) -> None:
        self._seconds_of_batch = flops_per_batch / peak_flops
        self._batches = 0
        self.step = step
        self._start = self._paused_at = time.perf_counter()

    def count_batch(self) -> None:
        """Count one training step."""
        self._batches += 1

    def read(self, step: int) -> float:
        """Return the utilization since the last reading, in [0, 1], by the clock of the host.

        It does not wait for the device: the host is ahead of it by about as much at one reading as at the next, since
        loggers read the values of each step at which this is called.

        Args:
            step: The Trainer's global step.
        """
        now = time.perf_counter()
        utilization = self._batches * self._seconds_of_batch / (now - self._start)
        self._batches, self._start, self.step = 0, now, step
        return utilization

    def pause(self) -> None:
        """Stop the clock."""
        self._paused_at = time.perf_counter()

    def resume(self) -> None:
        """Start the clock again."""
        self._start += time.perf_counter() - self._paused_at


def start_meter(
    trainer: Trainer, flops_per_batch: float, peak_flops: float | None, say: Callable[[str], None]
) -> MfuMeter | None:
    """Return a running meter for this rank's device, and say which peak it uses.

    Args:
        trainer: The Trainer.
        flops_per_batch: The FLOPs of one training step.
        peak_flops: The peak of the device, in FLOPs per second; None for that in Lightning's table.
        say: Is called with the sentence.

    Returns:
        The meter; None on other ranks than zero, in barebones mode, or if the peak is unknown.
    """
    if trainer.barebones or not trainer.is_global_zero:
        return None
    device = trainer.strategy.root_device
    peak, origin = peak_flops, "as given"
    if peak is None:
        peak, origin = device_peak_flops(trainer), "by Lightning's table"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device.type)
    if peak is None:
        say(f"no flops/mfu, as the peak FLOP/s of {name} is not known: pass peak_flops to log it")
        return None
    say(f"flops/mfu is relative to {format_si(peak, 'FLOP/s')} of {name} in {trainer.precision}, {origin}")
    return MfuMeter(float(peak), flops_per_batch, trainer.global_step)
