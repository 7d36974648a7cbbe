"""`FlopsReport`: the callback that counts the FLOPs of the model that a Trainer trains; its utilization (MFU)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat.callbacks import (
    device_peak_flops,
    providing_flops_per_batch,
    set_flops_per_batch,
)
from lightning_tricks._lightning_compat.flavor import LightningModule, ThroughputMonitor, Trainer, rank_zero_warn
from lightning_tricks._lightning_compat.logged_values import logs_at_this_step
from lightning_tricks._lightning_compat.trainer import callbacks_of_type
from lightning_tricks._shared.checks import check_count, check_number
from lightning_tricks._shared.dry_run.model_call import ModelCall, find_call, training_step_call
from lightning_tricks._shared.dry_run.runner import NoGradientError
from lightning_tricks._shared.report_parts import Facts
from lightning_tricks._shared.text import describe_error, format_si
from lightning_tricks.flops.core.flops_count import FlopsCount, check_report_path
from lightning_tricks.flops.core.model_flops import check_backend, count_call


class FlopsReport(TrickCallback):
    """Count the FLOPs of each module and, with `backward=True`, log the model FLOPs utilization (MFU).

    The FLOPs are counted once per fit: for a call of the model with `inputs` or the module's `example_input_array`, or
    else for its `training_step` with the first batch, which is not consumed. Training stays bit-identical. If the call
    with `inputs` or the example fails, the error stops the fit before it starts; if the training step cannot be
    counted, a warning is given and training continues.

    With `backward=True` the training step with the first batch is always measured, and

    * Lightning's `ThroughputMonitor`, if there is one, gets the result as `flops_per_batch`, unless the module has an
      attribute of this name. It then reports FLOPs per second and MFU without any code in the module. Validation
      batches count as no FLOPs.
    * `flops/mfu`, the model FLOPs utilization of rank zero's device since the last log, is logged every
      `log_every_n_steps`: the FLOPs of the training steps, divided by the time without validation and by `peak_flops`.

    For the count itself, see `lightning_tricks.count_flops`.

    Args:
        inputs: The inputs of the model, as for `count_flops`. None uses `example_input_array` or a batch.
        backend: "torch" or "thop", see `count_flops`.
        backward: Whether to measure the whole training step; needs `backend="torch"`.
        depth: The depth of the deepest modules in the table, >= 0; 0 shows only the totals.
        path: A file for the counts, with the suffix `.csv`, `.json`, `.md` or `.html`. None writes no file.
        compare: Whether to show the counts of the other backend too.
        peak_flops: The peak of one device, in FLOPs per second, > 0; needs `backward=True`. None takes the peak from
            Lightning's table of devices and precisions. The peak used is logged.
        log_totals: Whether to log, once, `flops/forward` and, with `backward=True`, `flops/train_step`, both for one
            call on one rank, and `params/total` and `params/trainable`.
        verbose: Whether to print the table. None leaves that to the variable `LIGHTNING_TRICKS_VERBOSE` (1 or 0).

    Attributes:
        count: The `FlopsCount` of the last fit; None before the first.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is out of range or unknown, or if two contradict each other.

    Examples:
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
        log_totals: bool = False,
        verbose: bool | None = None,
    ) -> None:
        self.inputs = inputs
        self.backend = backend
        self.backward = backward
        self.depth = check_count("depth", depth, minimum=0)
        self.path = path
        self.compare = compare
        self.log_totals = log_totals
        self.verbose = verbose
        self.peak_flops = None if peak_flops is None else check_number("peak_flops", peak_flops, above=0)

        check_backend(backend, backward)
        if path is not None:
            check_report_path(path)
        if peak_flops is not None and not backward:
            raise ValueError(f"peak_flops={peak_flops!r} needs backward=True: MFU is about training steps.")
        self.count: FlopsCount | None = None
        super().__init__()

    def report_parts(self, trainer: Trainer) -> list[Facts]:
        """Return the totals of the count."""
        count = self.count
        if count is None:
            return []
        return [Facts(title="FLOPs", facts=_totals(count), sentences=list(count.notes)[:10], section="cost")]

    def _forget_run(self) -> None:
        self._provides_flops = False
        self._flops_per_batch: float | None = None
        self._saw_first_batch = self._has_logged_totals = False
        self._meter: MfuMeter | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the call with `inputs` or with the example, if there are any."""
        self.count = None
        call = find_call(pl_module, self.inputs, "FlopsReport(inputs=...)")
        if call is not None:
            try:
                self.count = self._count(trainer, pl_module, call)
            except NoGradientError:
                if self.inputs is not None:
                    raise
                return  # the example shows how the module predicts, as by sampling: the training step is counted
            self._report(trainer)

    def mid_epoch_state(self) -> dict[str, Any]:
        """Return whether the totals have been logged."""
        return {"has_logged_totals": self._has_logged_totals}

    def load_mid_epoch_state(self, state: dict[str, Any]) -> None:
        """Restore what `mid_epoch_state` returned."""
        self._has_logged_totals = state["has_logged_totals"]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Count the training step with the first batch, if that is needed, and start to measure the utilization."""
        if self._saw_first_batch:
            return
        self._saw_first_batch = True
        self.skip_hooks("on_train_batch_start")
        if self.count is None or self.backward:
            try:
                count = self._count(trainer, pl_module, training_step_call(pl_module, batch, batch_idx=batch_idx))
            except Exception as error:
                rank_zero_warn(f"FlopsReport could not count a training step: {describe_error(error)}")
            else:
                self._flops_per_batch = count.train_step_flops
                if self.count is None:
                    self.count = count
                    self._report(trainer)
        self._log_totals(trainer, pl_module)
        if self._flops_per_batch is not None:
            monitors = callbacks_of_type(trainer, ThroughputMonitor)
            if monitors and not hasattr(pl_module, "flops_per_batch"):
                self._installed.enter_context(providing_flops_per_batch(pl_module, self._flops_per_batch, monitors))
                self._provides_flops = True
            self._meter = self._start_meter(trainer, self._flops_per_batch)
        if self._meter is None:
            self.skip_hooks("on_train_batch_end")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the utilization at the steps at which the Trainer logs."""
        if self._meter is None:
            return
        self._meter.count_batch()
        if logs_at_this_step(trainer) and trainer.global_step != self._meter.step:
            mfu = torch.tensor(self._meter.read(trainer.global_step))  # a number would be copied to the device
            pl_module.log("flops/mfu", mfu, on_step=True, on_epoch=False, batch_size=1, rank_zero_only=True)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock, and let monitors count no FLOPs in validation."""
        if self._provides_flops:
            set_flops_per_batch(pl_module, None)
        if self._meter is not None:
            self._meter.pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock again, and let monitors count the FLOPs of training steps."""
        if self._provides_flops:
            set_flops_per_batch(pl_module, self._flops_per_batch)
        if self._meter is not None:
            self._meter.resume()

    def _count(self, trainer: Trainer, pl_module: LightningModule, call: ModelCall) -> FlopsCount:
        # on a copy: a dispatch mode around the real step would change its bits, as in the backward pass of `prod`
        with trainer.precision_plugin.forward_context():
            compare = self.compare and self.count is None  # a second count is only used for its training step
            return count_call(pl_module, call, backend=self.backend, backward=self.backward, compare=compare)

    def _report(self, trainer: Trainer) -> None:
        if not trainer.is_global_zero or self.count is None:
            return

        self.show_table(self.count.table(self.depth))
        self.say(", ".join(f"{name} {number}" for name, number in _totals(self.count)))
        if self.path is not None:
            try:
                self.count.write(self.path)
            except OSError as error:
                rank_zero_warn(f"FlopsReport wrote no file: path={str(self.path)!r} cannot be written ({error}).")

    def _log_totals(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.log_totals or self.count is None or trainer.barebones or self._has_logged_totals:
            return
        self._has_logged_totals = True
        step = self.count.train_step_flops if self.count.train_step_flops is not None else self._flops_per_batch
        totals = {
            "flops/forward": self.count.flops,
            "flops/train_step": step,
            "params/total": self.count.params,
            "params/trainable": self.count.trainable_params,
        }
        # float32 would round the counts, but MPS has no float64
        dtype = torch.float32 if pl_module.device.type == "mps" else torch.float64
        values = {name: torch.tensor(value, dtype=dtype) for name, value in totals.items() if value is not None}
        # without communication: a rank that failed to count would not take part in it
        pl_module.log_dict(values, on_step=False, on_epoch=True, batch_size=1, sync_dist=True, rank_zero_only=True)

    def _start_meter(self, trainer: Trainer, flops_per_batch: float) -> MfuMeter | None:
        """Return a running meter for this rank's device, and say which peak it uses.

        Args:
            trainer: The Trainer.
            flops_per_batch: The FLOPs of one training step.

        Returns:
            The meter; None on other ranks than zero, in barebones mode, or if the peak is unknown.
        """
        if trainer.barebones or not trainer.is_global_zero:
            return None
        device = trainer.strategy.root_device
        peak, origin = self.peak_flops, "as given"
        if peak is None:
            peak, origin = device_peak_flops(trainer), "by Lightning's table"
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device.type)
        if peak is None:
            self.say(f"no flops/mfu, as the peak FLOP/s of {name} is not known: pass peak_flops to log it")
            return None
        self.say(f"flops/mfu is relative to {format_si(peak, 'FLOP/s')} of {name} in {trainer.precision}, {origin}")
        return MfuMeter(float(peak), flops_per_batch, trainer.global_step)


def _totals(count: FlopsCount) -> list[tuple[str, str]]:
    totals = [("forward", format_si(count.flops, "FLOP")), ("parameters", format_si(count.params))]
    if count.train_step_flops is not None:
        totals.insert(1, ("training step", format_si(count.train_step_flops, "FLOP")))
    if count.trainable_params != count.params:
        totals.append(("trainable at the start", format_si(count.trainable_params)))
    return totals


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
