"""One way to send a picture to any logger of Lightning that can take one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


def can_log_images(loggers: Iterable[Any]) -> bool:
    """Whether one of the loggers can take a picture."""
    return any(_way_of(logger) is not None for logger in loggers)


def log_image(loggers: Iterable[Any], key: str, picture: npt.NDArray[np.uint8], step: int) -> None:
    """Send a picture to every logger that can take one; only on rank zero.

    TensorBoard, W&B, MLflow and Comet get it as their own; beside a logger that has but a folder, such as CSVLogger,
    it becomes `pictures/<key>_<step>.png` there.

    Args:
        loggers: Of a Trainer.
        key: What it shows, such as `val/confusion_matrix`.
        picture: Shape (H, W, 3).
        step: Optimizer steps done.
    """
    for logger in loggers:
        way = _way_of(logger)
        if way == "wandb":
            logger.log_image(key, [picture], step=step)
        elif way == "tensorboard":
            logger.experiment.add_image(key, picture, step, dataformats="HWC")
        elif way == "mlflow":
            logger.experiment.log_image(logger.run_id, picture, artifact_file=f"pictures/{key}_{step:06d}.png")
        elif way == "comet":
            logger.experiment.log_image(picture, name=key, step=step)
        elif way == "folder":
            from PIL import Image

            path = Path(logger.log_dir) / "pictures" / f"{key}_{step:06d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture).save(path)


def _way_of(logger: Any) -> str | None:
    experiment = getattr(logger, "experiment", None)
    if hasattr(logger, "log_image"):
        return "wandb"
    if hasattr(experiment, "add_image"):
        return "tensorboard"
    if hasattr(experiment, "log_image"):
        return "mlflow" if hasattr(logger, "run_id") else "comet"
    return "folder" if getattr(logger, "log_dir", None) is not None else None
