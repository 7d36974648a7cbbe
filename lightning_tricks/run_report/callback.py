"""The callback `RunReport`."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat.flavor import LightningModule, MisconfigurationException, Trainer
from lightning_tricks._lightning_compat.logged_values import logger_step, logs_at_this_step, observe_logged_values
from lightning_tricks._lightning_compat.trainer import callbacks_of_type, is_fast_dev_run
from lightning_tricks._shared.checks import check_path
from lightning_tricks._shared.files import find_write_problem
from lightning_tricks._shared.report_parts import ReportPart, part_name
from lightning_tricks._shared.tensors import clone_tensors
from lightning_tricks._shared.text import describe_error
from lightning_tricks.run_report.core.record import PAGE_FILE, Position, Resume, RunRecord, Status
from lightning_tricks.run_report.core.run_writer import RunWriter
from lightning_tricks.run_report.run_settings import describe_run, learning_rates, monitors_of, schedules_of


class RunReport(TrickCallback):
    """Write one HTML page about a fit: findings, curves, and everything you need to repeat the run.

    The page needs no network and no script. It is written at the end of each epoch and of the fit, after an exception
    too, and shows the values that the module and the callbacks log, with or without a logger: losses and metrics of
    training and validation together, learning rates, norms of gradients. Other callbacks of this package add their
    data: clipped and skipped steps, confusion matrix, reliability, the most confident mistakes, FLOPs, devices, seed,
    resumes. Sections without data are left out. Findings come first, such as "62 % of 1,200 steps were clipped". A
    `trainer.test` after the fit, in the same process, adds its results.

    The folder `dirpath` contains the page, `report.html`, and its record, `run.json` and `values.jsonl`.
    `lightning-tricks report DIR` makes the page again, and `lightning-tricks report A B` makes one that compares two
    runs. A fit that is resumed by `ckpt_path` or `AutoResume` continues the record from the checkpoint. If the folder
    contains the record of another fit, or rows of this one that it will not log again, these files move to `earlier-1`
    in it; if another fit writes to it, this one writes to `at-once-1` in it. A message tells you.

    Values are recorded as the Trainer sends them to loggers, every `log_every_n_steps`. They stay on the device until
    an epoch ends, a checkpoint is saved or 256 of them wait. Above 20,000 logged steps, neighbors are merged into their
    mean, minimum and maximum. Under DDP rank zero writes. Values sent to a logger directly, by
    `self.logger.log_metrics`, are not seen. The page and the record contain the differences to the git commit of the
    working folder. Values whose names mark them as secret, such as `api_key`, and passwords in addresses are left out,
    in texts too; other secrets are not recognized: read the page before you publish it.

    Args:
        dirpath: The folder of the report; it is created if it does not exist.

    Raises:
        TypeError: If `dirpath` is not a path.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[RunReport("runs/a")], accelerator="cpu", logger=False)
    """

    path_arguments = ("dirpath",)
    takes_report_parts = True

    def __init__(self, dirpath: str | os.PathLike[str]) -> None:
        self.dirpath = check_path("dirpath", dirpath, "a folder")
        self._position = Position()
        self._position_to_keep: Position | None = None  # of the record that a resumed fit continues
        # The folder of its record, the id of its rows, and the names of its parts
        self._last_fit: tuple[Path, str, list[tuple[str, str]]] | None = None
        super().__init__()

    def _forget_run(self) -> None:
        self._writer: RunWriter | None = None  # on rank zero, from the start of training on
        self._rates: dict[str, Any] = {}
        self._ends_epoch = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise an error if the folder cannot be written."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        self._position_to_keep, self._position, self._last_fit = None, Position(), None
        writes = trainer.is_global_zero and not is_fast_dev_run(trainer)
        if writes and (problem := find_write_problem(Path(self.dirpath), is_folder=True)):
            raise MisconfigurationException(
                f"RunReport cannot write to {self.dirpath}: {problem}. Choose another dirpath."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the record, or continue it after a resume, and observe what is logged."""
        if is_fast_dev_run(trainer):
            self.say("does not report on a fast_dev_run")
        if is_fast_dev_run(trainer) or not trainer.is_global_zero:
            self.skip_hooks("on_train_batch_start", "on_train_batch_end")
        else:
            with self._stops_on_error():
                record = describe_run(trainer, pl_module)
                writer = self._writer = RunWriter(Path(self.dirpath), record, trainer.train_dataloader)
                self._installed.callback(writer.close)
                if self._position_to_keep is None:
                    writer.start()
                else:
                    now = Resume(_steps_done(trainer), trainer.current_epoch, time.time())
                    writer.resume(self._position_to_keep, now)
                for sentence in writer.said:
                    self.say(sentence)
                self._position = writer.position()
            self._observe(trainer)
        super().on_train_start(trainer, pl_module)

    def resumed(self, trainer: Trainer, not_restored: Sequence[str]) -> None:
        """Record what `AutoResume` could not restore."""
        if self._writer is not None and self._writer.record.resumes:
            self._writer.record.resumes[-1].not_restored = [str(name)[:200] for name in not_restored[:100]]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Note the learning rates that the step uses, if it is one that is logged."""
        if self._writer is not None and logs_at_this_step(trainer):
            self._rates = clone_tensors(learning_rates(trainer))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the samples of the batch, by its shapes."""
        if self._writer is not None:
            self._writer.meter.add(batch, batch_idx)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the time in validation."""
        if self._writer is not None:
            self._writer.meter.begin_validation()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the page anew in the middle of an epoch, unless that was done a moment ago."""
        if self._writer is not None:
            self._writer.meter.end_validation()
        if not trainer.sanity_checking and self._writer is not None and self._writer.is_page_due():
            self._write(trainer, "running")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that the next values are those of the epoch."""
        self._ends_epoch = True

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Collect the report parts of the callbacks, before they drop their data."""
        if self._writer is not None:
            with self._stops_on_error():
                self._writer.record.add_parts(self._parts(trainer))
            self.say(f"page {self._writer.folder / PAGE_FILE}")
        super().on_fit_end(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Continue the record of the fit before, to add what the test logs."""
        if self._last_fit is not None and not is_fast_dev_run(trainer):
            with self._stops_on_error():
                folder, rows_id, _ = self._last_fit
                writer = RunWriter(folder, RunRecord())
                self._installed.callback(writer.close)
                if writer.folder == folder and writer.reopen(rows_id):
                    self._writer = writer
                    self._observe(trainer)
                else:
                    self._installed.close()  # another run may write there while this test runs

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the page of the fit and of the test."""
        if self._writer is not None and self._last_fit is not None:
            of_fit, record = self._last_fit[2], self._writer.record
            with self._stops_on_error():
                parts = [part for part in self._parts(trainer) if part_name(part) not in of_fit]
                self._writer.write(record.status, parts, record.message)
                self._position = self._writer.position()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write the page of the fit so far."""
        is_error = isinstance(exception, Exception)
        if not trainer.testing:
            self._write(trainer, "failed" if is_error else "stopped", describe_error(exception) if is_error else "")
        self._note_fit()
        super().on_exception(trainer, pl_module, exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the page at the end of a fit, after all callbacks."""
        if stage == "fit":
            self._write(trainer, "finished")
        self._note_fit()
        super().teardown(trainer, pl_module, stage)

    def state_dict(self) -> dict[str, Any]:
        """Write the values logged so far, and return the position in the record."""
        if self._writer is not None:
            with self._stops_on_error():
                self._position = self._writer.position()
        return {name: value for name, value in self._position._asdict().items() if value != ""}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Remember the row at which to continue the record."""
        position = Position(str(state_dict.get("id", "")), int(state_dict["rows"]))
        self._position_to_keep = self._position = position

    def _observe(self, trainer: Trainer) -> None:
        self._installed.enter_context(observe_logged_values(trainer, lambda values: self._on_values(trainer, values)))

    def _on_values(self, trainer: Trainer, values: Mapping[str, Any]) -> None:
        """Record what the Trainer sends to its loggers, whether it has any or not."""
        if self._writer is None:
            return
        is_epoch, self._ends_epoch = self._ends_epoch or not trainer.training, False
        known = {name: value for name, value in values.items() if name not in ("step", "epoch")}
        if not is_epoch:
            known = {**self._rates, **known}
        with self._stops_on_error():
            kind: Literal["step", "epoch"] = "epoch" if is_epoch else "step"
            self._writer.values.add(kind, logger_step(trainer), trainer.current_epoch, known)
        if is_epoch and trainer.training and self._writer is not None and self._writer.is_page_due():
            self._write(trainer, "running")

    def on_values_sent(self, trainer: Trainer, values: Mapping[str, float], step: int) -> None:
        """Record what another callback has sent to the loggers itself."""
        if self._writer is not None:
            with self._stops_on_error():
                self._writer.values.add("epoch", step, trainer.current_epoch, values)

    def _write(self, trainer: Trainer, status: Status, message: str = "") -> None:
        writer = self._writer
        if writer is None:
            return
        writer.record.step, writer.record.epochs = _steps_done(trainer), trainer.current_epoch
        with self._stops_on_error():
            if status == "finished":
                writer.record.monitors, writer.record.schedules = monitors_of(trainer), schedules_of(trainer)
            writer.write(status, self._parts(trainer), message)
            self._position = writer.position()

    def _parts(self, trainer: Trainer) -> list[ReportPart]:
        tricks = callbacks_of_type(trainer, TrickCallback)
        return [part for trick in tricks for part in trick.report_parts(trainer)]

    @contextmanager
    def _stops_on_error(self) -> Iterator[None]:
        """Whatever goes wrong in the report, such as a full disk or a lost device, training continues without it."""
        try:
            yield
        except Exception as error:
            warnings.warn(f"RunReport stops writing {self.dirpath}: {describe_error(error)}", stacklevel=2)
            self._close()

    def _note_fit(self) -> None:
        """Remember whose the record is."""
        if self._writer is not None and self._last_fit is None:
            record = self._writer.record
            names = [part_name(part) for part in record.parts]
            self._last_fit = self._writer.folder, record.segments()[-1][0], names


def _steps_done(trainer: Trainer) -> int:
    """Return the steps done as loggers count them: batches, where a batch may have several."""
    return trainer.global_step if trainer.lightning_module.automatic_optimization else logger_step(trainer)
