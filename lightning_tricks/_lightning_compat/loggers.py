"""Where loggers write, and how one goes on where another process left it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_tricks._lightning_compat.guards import needs_private

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger


def logger_kind(logger: Logger) -> str:
    """Return "csv", "tensorboard", "wandb" or "mlflow"; nothing for others, which begin anew at each start."""
    from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger

    kinds = {"csv": CSVLogger, "tensorboard": TensorBoardLogger, "wandb": WandbLogger, "mlflow": MLFlowLogger}
    return next((name for name, kind in kinds.items() if isinstance(logger, kind)), "")


@needs_private("AutoResume")
def logger_version(logger: Any) -> int | str | None:
    """Return the version, or the id of the run, that a logger has; None where it has none yet."""
    version: int | str | None = logger._run_id if logger_kind(logger) == "mlflow" else logger.version
    return version


@needs_private("AutoResume")
def log_dir_for_version(logger: Any, version: int | str | None) -> Path:
    """Return the directory that a logger of files would have with a version."""
    before, logger._version = logger._version, version
    try:
        return Path(os.path.abspath(logger.log_dir))  # noqa: PTH100 - resolves no links
    finally:
        logger._version = before


def set_logger_version(logger: Any, version: int | str) -> bool:
    """Let a logger go on with a version, or a run's id; return whether it does: a run that is open stays what it is."""
    kind = logger_kind(logger)
    with needs_private("AutoResume", KeyError):
        if kind in ("csv", "tensorboard"):
            logger._version = version
        elif kind == "mlflow" and not logger._initialized:
            logger._run_id = version
        elif kind == "wandb" and logger._experiment is None:
            logger._id = logger._wandb_init["id"] = version
        return logger_version(logger) == version


def open_csv_logger(logger: Any, header: list[str] | None = None) -> Path:
    """Let a CSVLogger write to the directory of its version without deleting what is there; return the file's path.

    Args:
        logger: Of CSV; on rank zero.
        header: The columns of what is there; None leaves what the logger knows of them.
    """
    from lightning.pytorch.loggers.csv_logs import ExperimentWriter

    with needs_private("AutoResume"):
        if logger._experiment is None:
            with tempfile.TemporaryDirectory() as empty:
                logger._experiment = ExperimentWriter(empty)
        writer = logger._experiment
        writer.log_dir = logger.log_dir
        path = Path(str(writer.log_dir), str(writer.NAME_METRICS_FILE))
        writer.metrics_file_path = str(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if header is not None:
            writer.metrics_keys = list(header)
        return path


@needs_private("AutoResume")
def discard_unwritten_rows(logger: Any) -> None:
    """Let a CSVLogger forget the rows that it has not written yet."""
    logger._experiment.metrics = []


def move_csv_logger(logger: Any, new_dir: Path | None) -> Path:
    """`open_csv_logger` for a logger that may have begun in a fresh directory: its hyper-parameters go along."""
    hparams = getattr(logger._experiment, "hparams", None)
    if new_dir is not None and hparams:
        (new_dir / logger._experiment.NAME_HPARAMS_FILE).unlink(missing_ok=True)
    path = open_csv_logger(logger)
    if hparams:
        logger._experiment.log_hparams({})  # writes all that it was given
    return path


@needs_private("AutoResume")
def close_tensorboard_logger(logger: Any) -> None:
    """Close what a TensorBoardLogger writes to; it opens another file in the directory of its version when it logs."""
    writer = logger._experiment
    if writer is None:
        return
    writer.close()
    if hasattr(writer, "all_writers") and type(writer).__module__.startswith("torch."):
        writer.log_dir = logger.log_dir  # opens by itself what was closed
    else:
        logger._experiment = None


def mute_logger(logger: Any) -> None:
    """Let a logger of files that has not begun write nothing from here on."""
    from lightning.fabric.loggers.logger import _DummyExperiment

    if logger_kind(logger) in ("csv", "tensorboard") and not is_logger_started(logger):
        logger._experiment = _DummyExperiment()


def unmute_logger(logger: Any) -> None:
    """Let a logger that was kept still write again."""
    from lightning.fabric.loggers.logger import _DummyExperiment

    if isinstance(getattr(logger, "_experiment", None), _DummyExperiment):
        logger._experiment = None


def is_logger_started(logger: Any) -> bool:
    """Whether a logger of files was used before the fit, and has made the directory of its version."""
    return getattr(logger, "_experiment", None) is not None
