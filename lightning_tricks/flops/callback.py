"""The Lightning shell of the flops room."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat.logged_values import logs_at_this_step
from lightning_tricks._lightning_compat.throughput import device_peak_flops, reset_module_flops
from lightning_tricks._lightning_compat.trainer import callbacks_of
from lightning_tricks._shared.checks import check_count, check_number
from lightning_tricks._shared.dry_run.model_call import ModelCall, find_call, training_step_call
from lightning_tricks._shared.units import format_si
from lightning_tricks.flops.core.flops_count import FlopsCount, check_path
from lightning_tricks.flops.core.model_flops import check_backend, count_call


class FlopsReport(TrickCallback):
    """Print what each module costs in FLOPs, log the totals and, with `backward=True`, how much of the peak is used.

    It counts once in a fit: the call of the model with `inputs` or the module's `example_input_array`, or else its
    `training_step` with the first batch, which is not consumed. Training stays bit-identical. An error in the first
    case stops the fit before it starts; in the second it becomes a warning, and training goes on.

    Logs, once, `flops/forward` and, with `backward=True`, `flops/train_step`, both of one call on one rank, as well as
    `params/total` and `params/trainable`. With `backward=True` the first batch's training step is measured, too, and

    * Lightning's `ThroughputMonitor`, where there is one, gets it as `flops_per_batch`, unless the module has an
      attribute of this name, and so reports FLOPs per second and MFU without any code in the module. Validation counts
      as no FLOPs.
    * `flops/mfu`, the model FLOPs utilization of rank zero's device since the last log, is logged every
      `log_every_n_steps`: FLOPs of the training steps, by time without validation, by `peak_flops`.

    Args:
        inputs: What to call the model with, as `count_flops` takes it. None for `example_input_array` or a batch.
        backend: "torch" or "thop", see `count_flops`.
        backward: Whether to measure the whole training step; needs `backend="torch"`.
        depth: How deep the modules in the table may lie, 0 for the totals alone.
        path: Where to write the counts, too: a file `.csv`, `.json`, `.md` or `.html`.
        compare: Whether to show the other backend's counts, too.
        peak_flops: Of one device, in FLOPs per second; needs `backward=True`. None for Lightning's table of devices
            and precisions. The peak that is used is printed.

    The counting itself: `lightning_tricks.count_flops`.

    Attributes:
        count: The `FlopsCount` of the last fit.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If one is out of range or unknown, or two contradict each other.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[FlopsReport(backward=True)], accelerator="cpu", logger=False)
    """

    path_arguments = ("path",)

    def __init__(
        self,
        inputs: Any = None,
        *,
        backend: Literal["torch", "thop"] = "torch",
        backward: bool = False,
        depth: int = 3,
        path: str | Path | None = None,
        compare: bool = False,
        peak_flops: float | None = None,
    ) -> None:
        self.inputs = inputs
        self.backend = backend
        self.backward = backward
        self.depth = check_count("depth", depth, minimum=0)
        self.path = path
        self.compare = compare
        self.peak_flops = None if peak_flops is None else check_number("peak_flops", peak_flops, above=0)

        check_backend(backend, backward)
        if path is not None:
            check_path(path)
        if peak_flops is not None and not backward:
            raise ValueError(f"peak_flops={peak_flops!r} needs backward=True: MFU is about training steps.")
        self.count: FlopsCount | None = None
        self._reset()

    def _reset(self) -> None:
        """Let go of what belongs to one fit."""
        self._filled_monitors = False
        self._flops_per_batch: float | None = None
        self._saw_first_batch = False
        self._meter: MfuMeter | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count with the inputs that are known."""
        self.count = None
        self._reset()
        call = find_call(pl_module, self.inputs, "FlopsReport(inputs=...)")
        if call is not None:
            self.count = self._count(trainer, pl_module, call)
            self._report(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Look at the first batch."""
        if self._saw_first_batch:
            return
        self._saw_first_batch = True
        if self.count is None or self.backward:
            try:
                count = self._count(trainer, pl_module, training_step_call(pl_module, batch, batch_idx=batch_idx))
            except Exception as error:
                rank_zero_warn(f"FlopsReport could not count a training step: {type(error).__name__}: {error}")
            else:
                self._flops_per_batch = count.train_step_flops
                if self.count is None:
                    self.count = count
                    self._report(trainer)
        self._log_totals(trainer, pl_module)
        if self._flops_per_batch is not None:
            self._set_flops_per_batch(trainer, pl_module)
            self._start_meter(trainer, self._flops_per_batch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the utilization where the Trainer logs."""
        if self._meter is None:
            return
        self._meter.batches += 1
        if logs_at_this_step(trainer) and trainer.global_step != self._meter.step:
            mfu = self._meter.read(trainer)
            pl_module.log("flops/mfu", mfu, on_step=True, on_epoch=False, batch_size=1, rank_zero_only=True)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock; and validation is no training."""
        if self._filled_monitors:
            pl_module.flops_per_batch = None  # type: ignore[assignment]
        if self._meter is not None:
            self._meter.pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on."""
        if self._filled_monitors:
            pl_module.flops_per_batch = self._flops_per_batch  # type: ignore[assignment]
        if self._meter is not None:
            self._meter.resume()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave nothing behind."""
        self._close(trainer, pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave nothing behind."""
        self._close(trainer, pl_module)

    def _close(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._filled_monitors:
            del pl_module.flops_per_batch
            for monitor in _throughput_monitors(trainer):
                reset_module_flops(monitor)
        self._reset()

    def _count(self, trainer: Trainer, pl_module: LightningModule, call: ModelCall) -> FlopsCount:
        with trainer.precision_plugin.forward_context():
            compare = self.compare and self.count is None  # a second count is of the training step alone
            return count_call(pl_module, call, backend=self.backend, backward=self.backward, compare=compare)

    def _report(self, trainer: Trainer) -> None:
        if not trainer.is_global_zero or self.count is None:
            return
        from rich.console import Console

        Console().print(self.count.table(self.depth))
        if self.path is not None:
            self.count.write(self.path)

    def _log_totals(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.count is None or trainer.barebones:
            return
        step = self.count.train_step_flops if self.count.train_step_flops is not None else self._flops_per_batch
        totals = {
            "flops/forward": self.count.flops,
            "flops/train_step": step,
            "params/total": self.count.params,
            "params/trainable": self.count.trainable_params,
        }
        dtype = torch.float32 if pl_module.device.type == "mps" else torch.float64  # float32 would round them
        values = {name: torch.tensor(value, dtype=dtype) for name, value in totals.items() if value is not None}
        # of this rank alone: another may have failed to count, and would wait for none of these
        pl_module.log_dict(values, on_step=False, on_epoch=True, batch_size=1, sync_dist=True, rank_zero_only=True)

    def _set_flops_per_batch(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if _throughput_monitors(trainer) and not hasattr(pl_module, "flops_per_batch"):
            pl_module.flops_per_batch = self._flops_per_batch  # type: ignore[assignment]
            self._filled_monitors = True

    def _start_meter(self, trainer: Trainer, flops_per_batch: float) -> None:
        if trainer.barebones or not trainer.is_global_zero:
            return
        device = trainer.strategy.root_device
        peak, origin = self.peak_flops, "as given"
        if peak is None:
            peak, origin = device_peak_flops(trainer), "by Lightning's table"
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device.type)
        if peak is None:
            rank_zero_info(f"FlopsReport knows no peak of {name}, so no flops/mfu: give it as peak_flops.")
            return
        rank_zero_info(
            f"FlopsReport: flops/mfu is relative to {format_si(peak, 'FLOP/s')} of {name} in {trainer.precision}, "
            f"{origin}."
        )
        self._meter = MfuMeter(float(peak), flops_per_batch, trainer.global_step)


class MfuMeter:
    """Feeds Lightning's `Throughput` wherever the Trainer logs.

    Args:
        peak: Of one device, in FLOPs per second.
        flops_per_batch: FLOPs of one training step.
        step: The Trainer's global step.
    """

    def __init__(self, peak: float, flops_per_batch: float, step: int) -> None:
        self._throughput = Throughput(available_flops=peak, window_size=2)
        self._throughput.update(time=0.0, batches=0, samples=0, flops=0)
        self._flops_per_batch = flops_per_batch
        self._fed = self.batches = 0
        self.step = step
        self._start = self._paused = time.perf_counter()

    def read(self, trainer: Trainer) -> float:
        """Return the utilization since the last call."""
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        self._throughput.update(
            time=time.perf_counter() - self._start,
            batches=self.batches,
            samples=self.batches,
            flops=int(self._flops_per_batch * (self.batches - self._fed)),
        )
        self._fed, self.step = self.batches, trainer.global_step
        return float(self._throughput.compute()["device/mfu"])

    def pause(self) -> None:
        """Stop the clock."""
        self._paused = time.perf_counter()

    def resume(self) -> None:
        """Start it again."""
        self._start += time.perf_counter() - self._paused


def _throughput_monitors(trainer: Trainer) -> list[ThroughputMonitor]:
    callbacks = callbacks_of(trainer)
    return [callback for callback in callbacks if isinstance(callback, ThroughputMonitor)]
