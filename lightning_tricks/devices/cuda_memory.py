"""The callback `CudaMemory`."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat.flavor import LIGHTNING, LightningModule, Trainer, rank_zero_warn
from lightning_tricks._lightning_compat.logged_values import epoch_end_step, log_to_loggers
from lightning_tricks._lightning_compat.observers import observe_errors
from lightning_tricks._lightning_compat.trainer import callbacks_of
from lightning_tricks._shared.checks import check_optional_count, check_path, is_address
from lightning_tricks._shared.files import atomic_write
from lightning_tricks._shared.modules import takes_dataloader_iter
from lightning_tricks._shared.text import describe_error, format_bytes
from lightning_tricks._torch_compat.memory import dump_memory_snapshot, memory_that_ran_out, recording_memory_history
from lightning_tricks.devices.core.memory_figures import EpochGrowth, StagePeaks, check_fraction, limit_memory
from lightning_tricks.devices.core.memory_report import MemoryReport, memory_report
from lightning_tricks.devices.core.out_of_memory import (
    advise,
    describe_batch,
    is_of_worker,
    out_of_memory_text,
    requested_bytes,
)

_GIB = 2**30
_logger = logging.getLogger(LIGHTNING)


class CudaMemory(TrickCallback):
    """Log the peak of the GPU memory in each epoch, and write a report when memory runs out.

    At the end of each training epoch it logs, in GiB for the GPU of rank zero, `cuda_memory/train_peak_gib`,
    `cuda_memory/val_peak_gib` (without sanity checking), `cuda_memory/allocated_gib` and `cuda_memory/reserved_gib`;
    if only validation or test runs, `cuda_memory/val_peak_gib` or `cuda_memory/test_peak_gib`. For this it resets
    torch's peak (`torch.cuda.reset_peak_memory_stats`) when a stage begins and ends. If the allocated memory grew in
    each of the last four epochs, it warns once: something keeps tensors, such as a list of losses without `.detach()`
    or `.item()`. No step waits for the GPU.

    When memory runs out on any rank, `out_of_memory-rank<r>.txt` names the step, the shapes of its batch, the use of
    the memory, the largest tensors, and what to do. The error is raised again with the advice as a note (in the log
    before Python 3.11). Other ranks may wait for the failed one until their launcher ends them. Do not skip such a
    batch by returning None from `training_step` on one rank: the other ranks would wait forever.

    On a CPU, only the reports are written.

    Args:
        empty_cache_every_n_epochs: Call `torch.cuda.empty_cache` at the end of every n-th training epoch, >= 1. This
            helps other processes, not this one, and each call makes later allocations slower. None for never.
        snapshot_on_oom: Whether to write files when memory runs out. Otherwise there is only the advice.
        record_history: Whether torch records each allocation with its stack of Python calls, up to 100,000 of them, and
            writes `out_of_memory-rank<r>.pickle`, which https://pytorch.org/memory_viz shows. It makes
            allocations slower.
        limit: The share of its GPU's memory that each rank may use, > 0 and <= 1; see `limit_memory`. It remains after
            the run. None sets no limit.
        dirpath: The folder for the files, created when one is written. None for the folder of the first logger, or
            else the Trainer's `default_root_dir`.

    Attributes:
        report: The `MemoryReport` of this rank when the fit ended or memory ran out; None before. Its peak covers
            the whole fit.

    For other training loops: `lightning_tricks.devices.memory_report` and `limit_memory`.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If one is out of range.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[CudaMemory()], accelerator="cpu", logger=False)
    """

    path_arguments = ("dirpath",)

    def __init__(
        self,
        empty_cache_every_n_epochs: int | None = None,
        snapshot_on_oom: bool = True,
        *,
        record_history: bool = False,
        limit: float | None = None,
        dirpath: str | Path | None = None,
    ) -> None:
        self.empty_cache_every_n_epochs = check_optional_count("empty_cache_every_n_epochs", empty_cache_every_n_epochs)
        self.snapshot_on_oom = snapshot_on_oom
        self.record_history = record_history
        self.limit = None if limit is None else check_fraction("limit", limit)
        self.dirpath = None if dirpath is None else check_path("dirpath", dirpath, "a folder")
        if record_history and not snapshot_on_oom:
            raise ValueError("record_history=True needs snapshot_on_oom=True, which writes the record.")
        self.report: MemoryReport | None = None
        super().__init__()

    def _forget_run(self) -> None:
        self._folder: Path | None = None
        self._step: tuple[int, int, Any] | None = None  # batch_idx, dataloader_idx, batch
        self._keeps_batches = False
        self._peaks: StagePeaks | None = None  # on CUDA
        self._growth = EpochGrowth()
        self._has_warned = False
        self._has_reported = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Limit the memory of the device that this rank will use, and start the recording."""
        super().setup(trainer, pl_module, stage)
        self._folder = report_folder(trainer, self.dirpath) if self.snapshot_on_oom else None
        steps = (pl_module.training_step, pl_module.validation_step, pl_module.test_step, pl_module.predict_step)
        self._keeps_batches = not any(map(takes_dataloader_iter, steps))
        observed = observe_errors(trainer, partial(self._on_error, trainer, pl_module), "CudaMemory")
        self._installed.enter_context(observed)
        device = trainer.strategy.root_device
        if device.type != "cuda":
            self.say(f"logs, limits and records nothing on {device}; reports if memory runs out")
            return
        if self.limit is not None:
            limit_memory(self.limit, device)
        if self.record_history:
            self._installed.enter_context(recording_memory_history())
        self._peaks = StagePeaks(
            partial(torch.cuda.max_memory_allocated, device), partial(torch.cuda.reset_peak_memory_stats, device)
        )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the peak of sanity checking."""
        if self._peaks is not None:
            self._peaks.take()
        self._enter("train")  # where training resumes in the middle of an epoch, no epoch starts
        super().on_train_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to look for the peak of training."""
        self._enter("train")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the peaks of the epoch, look for growth, and empty the cache if that is due."""
        if self._peaks is None:
            return
        device = trainer.strategy.root_device
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        sizes = {f"{stage}_peak": peak for stage, peak in self._peaks.take().items()}
        _log(trainer, {**sizes, "allocated": allocated, "reserved": reserved})
        self._growth.add(allocated)
        self._warn_of_growth()
        every = self.empty_cache_every_n_epochs
        if every is not None and (trainer.current_epoch + 1) % every == 0:
            torch.cuda.empty_cache()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to look for the peak of validation."""
        self._enter("val")

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Remember the batch until the step ends."""
        self._step = batch_idx, dataloader_idx, batch if self._keeps_batches else None

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        """Forget the batch."""
        self._step = None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look for the peak of training again, or log that of validation if only validation ran."""
        if trainer.state.fn == "fit":
            self._enter("train")
        else:
            self._log_stage(trainer)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to look for the peak of test."""
        self._enter("test")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the peak of test."""
        self._log_stage(trainer)

    on_train_batch_start = on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_train_batch_end = on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the report of the fit."""
        try:
            self.report = self._make_report(trainer, pl_module, trainer.strategy.root_device)
        except Exception as problem:  # of a module or an optimizer that is unlike others: the fit itself is fine
            rank_zero_warn(f"CudaMemory could not report on the memory at the end of the fit: {problem!r}")
        if self._peaks is not None and self.report is not None and self.report.peak_allocated is not None:
            self.say(f"peak {format_bytes(self.report.peak_allocated)} of {self.report.device}")
        super().on_fit_end(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Report what the memory is used for if it has run out outside of the loops, and undo what was installed."""
        self._on_error(trainer, pl_module, exception)
        super().on_exception(trainer, pl_module, exception)

    def _on_error(self, trainer: Trainer, pl_module: LightningModule, error: BaseException) -> None:
        """Report what the memory is used for if it has run out, once; this raises nothing."""
        owner = memory_that_ran_out(error)
        if not owner or self._has_reported or not any(callback is self for callback in callbacks_of(trainer)):
            return  # a Tuner takes the callbacks away while it tries whether the memory suffices
        self._has_reported = True
        device = torch.device("cpu") if owner == "host" else trainer.strategy.root_device
        try:
            self.report = self._make_report(trainer, pl_module, device)
            note = "\n".join(self._explain(trainer, error, self.report))
            if hasattr(error, "add_note"):  # since Python 3.11
                error.add_note(note)
            else:
                _logger.error(note)
        except Exception as problem:  # it must not replace the user's error
            _logger.error("CudaMemory could not report the use of the memory that ran out: %r", problem)

    def _explain(self, trainer: Trainer, error: BaseException, report: MemoryReport) -> list[str]:
        """Write the files of this rank, and return advice. There is no communication: other ranks may hang."""
        rank, requested, precision = trainer.global_rank, requested_bytes(error), str(trainer.precision)
        is_cuda = report.device.startswith("cuda")
        stage = str(trainer.state.stage.value) if trainer.state.stage is not None else str(trainer.state.fn)
        limit = self.limit if is_cuda else None
        advice = advise(
            report, stage, requested=requested, precision=precision, limit=limit, is_of_worker=is_of_worker(error)
        )
        where = _where(trainer, stage, self._step)
        lines = [f"CudaMemory: {report.device} ran out of memory on rank {rank}, {where}.", *advice]
        if self._folder is None:
            return lines
        circumstances = [where, f"rank {rank} of {trainer.world_size}, precision {precision}"]
        if requested is not None:
            circumstances.append(f"{format_bytes(requested)} were requested")
        batch = [] if self._step is None else describe_batch(self._step[2])
        text = out_of_memory_text(error, circumstances, batch, report, advice)
        path = self._folder / f"out_of_memory-rank{rank}.txt"
        written = [path]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as staged:
                staged.write_text(text, encoding="utf-8")
            if is_cuda and self.record_history:
                written.append(path.with_suffix(".pickle"))
                with atomic_write(written[-1]) as staged:
                    dump_memory_snapshot(staged)
        except Exception as problem:
            return [*lines, f"The report could not be written to {self._folder}: {describe_error(problem)}."]
        return [*lines, f"Written: {', '.join(map(str, written))}."]

    def _enter(self, stage: str) -> None:
        if self._peaks is not None:
            self._peaks.enter(stage)

    def _log_stage(self, trainer: Trainer) -> None:
        if self._peaks is not None:
            _log(trainer, {f"{stage}_peak": peak for stage, peak in self._peaks.take().items()})

    def _make_report(self, trainer: Trainer, pl_module: LightningModule, device: torch.device) -> MemoryReport:
        report = memory_report(device, model=pl_module, optimizers=trainer.optimizers)
        if self._peaks is None or device.type != "cuda":
            return report
        self._peaks.enter("")
        return replace(report, peak_allocated=self._peaks.overall, growth_per_epoch=self._growth.per_epoch)

    def _warn_of_growth(self) -> None:
        sizes = self._growth.steady()
        if sizes and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"CudaMemory: the allocated memory grew in each of the last {len(sizes) - 1} epochs, from "
                f"{format_bytes(sizes[0])} to {format_bytes(sizes[-1])}. Something keeps tensors, such as a list of "
                "losses: append loss.detach() or loss.item(). `memory_report(model=...)` lists the largest tensors."
            )


def _log(trainer: Trainer, sizes: dict[str, int]) -> None:
    """Log sizes in GiB, without the synchronisation and the copies of `LightningModule.log`."""
    values = {f"cuda_memory/{name}_gib": size / _GIB for name, size in sizes.items()}
    log_to_loggers(trainer, values, epoch_end_step(trainer))


def report_folder(trainer: Trainer, dirpath: str | os.PathLike[str] | None) -> Path:
    """Return the folder for reports: `dirpath`, else that of the logger, else the Trainer's; each rank has to call it.

    A folder that is not on a local disk, such as "s3://...", is passed over.
    """
    folders = (trainer.log_dir, trainer.default_root_dir) if dirpath is None else (dirpath,)
    local = (folder for folder in folders if folder is not None and not is_address(folder))
    return Path(os.path.abspath(next(local, os.curdir)))  # noqa: PTH100 - the working directory may change later


def _where(trainer: Trainer, stage: str, step: tuple[int, int, Any] | None) -> str:
    where = f"stage {stage}, epoch {trainer.current_epoch}"
    if step is None:
        return f"{where}, outside of a step"
    batch_idx, dataloader_idx, _ = step
    loader = f" of dataloader {dataloader_idx}" if dataloader_idx else ""
    return f"{where}, batch {batch_idx}{loader}"
