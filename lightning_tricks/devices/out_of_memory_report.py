"""What `CudaMemory` does when memory has run out: files for this rank, and advice on the error."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from lightning_tricks._shared.checks import is_address
from lightning_tricks._shared.units import format_bytes
from lightning_tricks.devices.core.memory_advice import OutOfMemory, advise
from lightning_tricks.devices.core.memory_report import MemoryReport
from lightning_tricks.devices.core.out_of_memory import describe_batch, is_of_worker, requested_bytes
from lightning_tricks.devices.core.out_of_memory_file import out_of_memory_text, write_files

_log = logging.getLogger("lightning.pytorch")


@dataclass(frozen=True)
class RunningStep:
    """The step that runs.

    Attributes:
        batch_idx: The index of its batch.
        dataloader_idx: The index of the dataloader.
        batch: The batch; None if the step fetches batches itself.
    """

    batch_idx: int
    dataloader_idx: int
    batch: Any


def report_folder(trainer: Trainer, dirpath: str | os.PathLike[str] | None) -> Path:
    """Return the folder for reports: `dirpath`, else that of the logger, else the Trainer's; each rank has to call it.

    A folder that is not on a local disk, such as "s3://...", is passed over.
    """
    folders = (trainer.log_dir, trainer.default_root_dir) if dirpath is None else (dirpath,)
    local = (folder for folder in folders if folder is not None and not is_address(folder))
    return Path(os.path.abspath(next(local, os.curdir)))  # noqa: PTH100 - the working directory may change later


def report_out_of_memory(
    trainer: Trainer,
    error: BaseException,
    report: MemoryReport,
    *,
    step: RunningStep | None,
    limit: float | None,
    folder: Path | None,
    dump_snapshot: Callable[[Path], None] | None,
) -> None:
    """Write the files of this rank, and add advice to the error. There is no communication: other ranks may hang.

    Args:
        trainer: The Trainer.
        error: The error that is about to be raised again.
        report: What the memory is used for.
        step: The step that failed; None if it was none.
        limit: The share of the device's memory that this process may use; None for all.
        folder: The folder for the files; None for none.
        dump_snapshot: Writes torch's snapshot to a path; None for none.
    """
    stage = str(trainer.state.stage.value) if trainer.state.stage is not None else str(trainer.state.fn)
    precision, requested = str(trainer.precision), requested_bytes(error)
    advice = advise(OutOfMemory(report, stage, requested, precision, limit, is_of_worker(error)))
    where = _where(trainer, stage, step)
    note = [f"CudaMemory: memory of {report.device} ran out on rank {trainer.global_rank}, {where}.", *advice]
    if folder is not None:
        lines = [where, f"rank {trainer.global_rank} of {trainer.world_size}, precision {precision}"]
        if requested is not None:
            lines.append(f"{format_bytes(requested)} were asked for")
        batch = [] if step is None else describe_batch(step.batch)
        text = out_of_memory_text(error, lines, batch, report, advice)
        try:
            written = write_files(folder, trainer.global_rank, text, dump_snapshot)
            note.append(f"Written: {', '.join(map(str, written))}.")
        except Exception as problem:
            note.append(f"The report could not be written to {folder}: {type(problem).__name__}: {problem}.")
    _add_note(error, "\n".join(note))


def _where(trainer: Trainer, stage: str, step: RunningStep | None) -> str:
    where = f"stage {stage}, epoch {trainer.current_epoch}"
    if step is None:
        return f"{where}, outside of a step"
    loader = f" of dataloader {step.dataloader_idx}" if step.dataloader_idx else ""
    return f"{where}, batch {step.batch_idx}{loader}"


def _add_note(error: BaseException, text: str) -> None:
    if hasattr(error, "add_note"):  # since Python 3.11
        error.add_note(text)
    else:
        _log.error(text)
