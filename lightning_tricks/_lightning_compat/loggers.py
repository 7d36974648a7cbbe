"""Where loggers write, and how a logger continues what one of another process wrote."""

from __future__ import annotations

import csv
import locale
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_tricks._lightning_compat.flavor import import_lightning
from lightning_tricks._lightning_compat.guards import needs_private, set_private

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_tricks._lightning_compat.flavor import Logger


def logger_kind(logger: Logger) -> str:
    """Return "csv", "tensorboard", "wandb" or "mlflow"; "" for other loggers, which cannot be continued."""
    from lightning_tricks._lightning_compat.flavor import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger

    kinds = {"csv": CSVLogger, "tensorboard": TensorBoardLogger, "wandb": WandbLogger, "mlflow": MLFlowLogger}
    return next((name for name, kind in kinds.items() if isinstance(logger, kind)), "")


@needs_private("AutoResume")
def logger_version(logger: Any) -> int | str | None:
    """Return the version of a logger, or the id of its run; None if it has none yet."""
    version: int | str | None = logger._run_id if logger_kind(logger) == "mlflow" else logger.version
    return version


@needs_private("AutoResume")
def log_dir_for_version(logger: Any, version: int | str | None) -> Path:
    """Return the directory that a CSVLogger or TensorBoardLogger would have with a version."""
    before = logger._version
    # `log_dir` is computed of it, and takes no argument.
    set_private(logger, _version=version)
    try:
        return Path(os.path.abspath(logger.log_dir))  # noqa: PTH100 - resolves no links
    finally:
        set_private(logger, _version=before)


def set_logger_version(logger: Any, version: int | str) -> bool:
    """Let a logger continue a version, or a run with that id; return whether it does, as an open run stays open."""
    kind = logger_kind(logger)
    with needs_private("AutoResume", KeyError):
        # They look for the next free number only while it is None (`version` of both).
        if kind in ("csv", "tensorboard"):
            set_private(logger, _version=version)
        # `MLFlowLogger.experiment` asks the server for this run at its first use, and creates one without it.
        elif kind == "mlflow" and not logger._initialized:
            set_private(logger, _run_id=version)
        # Passed to `wandb.init` at the first use of `experiment`; an open run keeps its id.
        elif kind == "wandb" and logger._experiment is None:
            _ = logger._wandb_init["id"]  # a renamed entry is an error
            logger._wandb_init["id"] = version
            set_private(logger, _id=version)
        return logger_version(logger) == version


def open_csv_logger(logger: Any) -> Path:
    """Let a CSVLogger continue the rows in the directory of its version, on rank zero; return the path of its rows.

    Lightning would delete them.
    """
    from lightning_tricks._lightning_compat.flavor import ExperimentWriter

    with needs_private("AutoResume"):
        if logger._experiment is None:
            # `_ExperimentWriter` (Lightning's fabric/loggers/csv_logs.py, `_check_log_dir_exists`; #19446) deletes the
            # rows that it finds in its directory: it is made in an empty one, and then sent to that of the run.
            with tempfile.TemporaryDirectory() as empty:
                set_private(logger, _experiment=ExperimentWriter(empty))
        writer = logger._experiment
        path = Path(logger.log_dir, str(writer.NAME_METRICS_FILE))
        path.parent.mkdir(parents=True, exist_ok=True)
        columns: list[str] = []
        if path.is_file():
            # As the writer opens it, without an encoding. Without the columns of then, it would write the header once
            # more.
            with path.open(newline="", encoding=locale.getpreferredencoding(False)) as file:
                columns = next(csv.reader(file), [])
        set_private(writer, log_dir=logger.log_dir, metrics_file_path=str(path), metrics_keys=columns)
        return path


@needs_private("AutoResume")
def discard_unwritten_rows(logger: Any) -> None:
    """Drop the rows that a CSVLogger has not written yet."""
    set_private(logger._experiment, metrics=[])


@needs_private("AutoResume")
def close_tensorboard_logger(logger: Any) -> None:
    """Close the event file of a TensorBoardLogger; it opens another one in its directory when it logs again."""
    writer = logger._experiment
    if writer is None:
        return
    writer.close()
    # torch's SummaryWriter sets `all_writers` to None when it is closed, and opens another file at the next value
    # (`_get_file_writer`). Of other writers nothing is known: the logger makes another one.
    if hasattr(writer, "all_writers") and type(writer).__module__.startswith("torch."):
        set_private(writer, log_dir=logger.log_dir)  # it opens a file there by itself
    else:
        set_private(logger, _experiment=None)


@contextmanager
def muted_logger(logger: Any) -> Iterator[None]:
    """Let a CSVLogger or TensorBoardLogger that has not begun write nothing until the context is left."""
    if logger_kind(logger) not in ("csv", "tensorboard") or is_logger_started(logger):
        yield
        return
    with needs_private("AutoResume"):
        # What Lightning gives to ranks other than zero. A Trainer reads `experiment` in its setup, and a CSVLogger
        # would delete rows there, a TensorBoardLogger begin an event file.
        mute = import_lightning("fabric.loggers.logger")._DummyExperiment()
        set_private(logger, _experiment=mute)
    try:
        yield
    finally:
        if logger._experiment is mute:
            set_private(logger, _experiment=None)


@needs_private("AutoResume")
def is_logger_started(logger: Any) -> bool:
    """Whether a CSVLogger or TensorBoardLogger was used already, and has made the directory of its version."""
    return logger._experiment is not None
