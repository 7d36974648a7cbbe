"""`DeviceMonitor`: the callback that logs what the devices do while a Trainer runs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal

from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat.flavor import CombinedLoader, LightningModule, Trainer, rank_zero_info
from lightning_tricks._lightning_compat.logged_values import log_to_loggers, logger_step
from lightning_tricks._shared.checks import check_choices, check_count, check_number
from lightning_tricks._shared.report_parts import DeviceUse
from lightning_tricks._shared.tensors import gather_objects
from lightning_tricks.devices.core.device_summary import (
    LOGGED_KEYS,
    DeviceSummary,
    check_keys,
    describe_devices,
    device_report,
    device_use,
    generic_key,
)
from lightning_tricks.devices.monitored_run import MonitoredRun

_STAGES = ("train", "val", "test", "predict")


class DeviceMonitor(TrickCallback):
    """Log a few readable values about GPUs, CPU and dataloaders, and report the bottleneck at the end.

    A thread measures the devices every `interval` seconds, so no step waits for it; the values since the last log are
    logged every `every_n_train_steps` steps:

    * `gpu0/utilization` (%) and `gpu0/memory_used_gib` (all processes), for each GPU of the Trainer on rank zero's
      machine, by CUDA's index;
    * `host/cpu_utilization` (%) and `host/data_wait`: the share of time, in %, in which rank zero waited for batches,
      except for the very first batch, and for worker processes to start.

    Values of other `stages` are logged at their end, as `gpu0/val_utilization` and so on. Values that the driver does
    not report are left out.

    At the end of a fit, a line gives the energy in kWh and a verdict: whether the loader was the bottleneck, with the
    number of workers that would keep up, and whether heat or a power limit slowed GPUs down. A table, also shown by
    `RunReport`, has the mean and maximum of each rank, including `gpu0/peak_memory_gib` (tensors of this process),
    `gpu0/temperature` (°C), `gpu0/power_w` and `host/ram_used_gib`. On a GPU, the verdict counts the time in which the
    device was idle while the host waited, measured by CUDA events without synchronization.

    Needs the extra `devices`. Without a GPU, only the keys of the host are logged.

    Args:
        every_n_train_steps: Log every n-th optimizer step, at the end of its batch; at least 1.
        log_keys: "default", or a list of names that are logged and shown: those above, written "gpu/utilization", and
            "gpu/data_wait" (% of time in which the GPU was idle, waiting for data), "gpu/throttled" (% of the time),
            "gpu/memory_utilization", "gpu/sm_clock_mhz", "gpu/fan" and "host/process_ram_gib".
        warn_temperature: Warn once about each GPU that reaches this temperature in degrees Celsius; None never warns.
        interval: The seconds between two measurements, > 0.
        stages: Which of "train", "val", "test" and "predict" are logged.
        verbose: Whether to print the table. None uses the environment variable `LIGHTNING_TRICKS_VERBOSE` (1 or 0).

    Attributes:
        summary: The `DeviceSummary` of each rank after a run, on all ranks; only of this rank if the run was
            interrupted; None before.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If one is out of range or unknown.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[DeviceMonitor(log_keys=["gpu/power_w", "host/data_wait"])], accelerator="cpu")
    """

    def __init__(
        self,
        every_n_train_steps: int = 50,
        *,
        log_keys: Literal["default"] | list[str] = "default",
        warn_temperature: float | None = 85,
        interval: float = 1.0,
        stages: Sequence[str] = ("train",),
        verbose: bool | None = None,
    ) -> None:
        self.every_n_train_steps = check_count("every_n_train_steps", every_n_train_steps)
        self.log_keys = log_keys
        check_keys(log_keys)
        self.warn_temperature = warn_temperature
        if warn_temperature is not None:
            check_number("warn_temperature", warn_temperature, above=0)
        self.interval = check_number("interval", interval, above=0, at_most=3600)
        self.stages = check_choices("stages", stages, _STAGES)
        self.verbose = verbose
        self.summary: list[DeviceSummary] | None = None
        super().__init__()

    def _forget_run(self) -> None:
        self._run: MonitoredRun | None = None
        self._last_step = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start measuring."""
        super().setup(trainer, pl_module, stage)
        self.summary = None
        self._run = MonitoredRun(trainer, check_keys(self.log_keys), self.interval, self.warn_temperature)
        self._installed.callback(self._run.close)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure training from now on: where it resumes in the middle of an epoch, no epoch starts."""
        self._last_step = trainer.global_step
        self._running.wait.enter("train")
        super().on_train_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure training from now on."""
        self._running.wait.enter("train")

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Log the measurements since the last log, if it is time."""
        step = trainer.global_step
        is_due = step // self.every_n_train_steps > self._last_step // self.every_n_train_steps
        self._last_step = step  # a batch may have several, as with several optimizers
        if is_due:
            self._log(trainer, "train")
        self._tell_alerts()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Do not measure the time between epochs."""
        self._running.wait.leave("train")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the table."""
        self._finish(trainer, "train")
        super().on_fit_end(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure validation, the test or the prediction from now on; the time of training stands still."""
        if not trainer.sanity_checking:
            self._running.wait.enter(_stage_of(trainer))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the measurements."""
        if trainer.sanity_checking:
            return
        stage = _stage_of(trainer)
        self._running.wait.leave(stage)
        self._log(trainer, stage)
        if trainer.state.fn != "fit":
            self._finish(trainer, stage)

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop measuring, and show the table of this rank if the run was interrupted on purpose."""
        run = self._run
        try:
            if run is not None and not isinstance(exception, Exception) and "train" in run.wait.totals:
                self.summary = [run.summarize(trainer, "train", [])]
                if trainer.is_global_zero:
                    self.show_table(device_report(self.summary))
                rank_zero_info(f"DeviceMonitor: {describe_devices(self.summary)}")
        finally:
            super().on_exception(trainer, pl_module, exception)

    def report_parts(self, trainer: Trainer) -> list[DeviceUse]:
        """Return the summary of each rank, once the fit is over."""
        return [device_use(summary) for summary in self.summary or () if summary.stage == "train"]

    @property
    def _running(self) -> MonitoredRun:
        if self._run is None:
            raise RuntimeError("DeviceMonitor measures only while a Trainer runs.")
        return self._run

    def _log(self, trainer: Trainer, stage: str) -> None:
        logged = LOGGED_KEYS if self.log_keys == "default" else self.log_keys
        values = {key: value for key, value in self._running.take(stage).items() if generic_key(key) in logged}
        if stage not in self.stages:
            return
        if stage != "train":
            values = {key.replace("/", f"/{stage}_"): value for key, value in values.items()}
        log_to_loggers(trainer, values, logger_step(trainer))

    def _tell_alerts(self) -> None:
        alerts = self._running.alerts
        while alerts:
            warnings.warn(alerts.popleft(), stacklevel=2)

    def _finish(self, trainer: Trainer, stage: str) -> None:
        if stage not in self._running.wait.totals:  # no epoch ran, on no rank
            self._tell_alerts()
            return
        given = trainer.train_dataloader if stage == "train" else getattr(trainer, f"{stage}_dataloaders")
        own = self._running.summarize(trainer, stage, CombinedLoader(given, "sequential").flattened)
        self.summary = gather_objects(own)
        if stage == "train" and trainer.is_global_zero:
            self.show_table(device_report(self.summary))
            if line := describe_devices(self.summary):
                self.say(line)
        self._tell_alerts()


def _stage_of(trainer: Trainer) -> str:
    stage = trainer.state.stage
    return str(stage.dataloader_prefix) if stage else ""
