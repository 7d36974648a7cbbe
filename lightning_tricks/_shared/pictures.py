"""Pictures for loggers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt


def can_log_images(loggers: Iterable[Any]) -> bool:
    """Whether one of the loggers can log images."""
    return any(_image_api(logger) is not None for logger in loggers)


def log_image(loggers: Iterable[Any], key: str, image: npt.NDArray[np.uint8], step: int) -> None:
    """Send an image to every logger that can log images; call it on rank zero only.

    TensorBoard, W&B, MLflow and Comet log it themselves. For a logger that only has a folder, such as CSVLogger, the
    image is saved there as `pictures/<key>_<step>.png`.

    Args:
        loggers: The loggers of a Trainer.
        key: The name of the image, such as `val/confusion_matrix`.
        image: The pixels, of shape (H, W, 3).
        step: The number of optimizer steps done.
    """
    for logger in loggers:
        api = _image_api(logger)
        if api == "wandb":
            logger.log_image(key, [image], step=step)
        elif api == "tensorboard":
            logger.experiment.add_image(key, image, step, dataformats="HWC")
        elif api == "mlflow":
            logger.experiment.log_image(logger.run_id, image, artifact_file=f"pictures/{key}_{step:06d}.png")
        elif api == "comet":
            logger.experiment.log_image(image, name=key, step=step)
        elif api == "folder":
            from fsspec.core import url_to_fs
            from PIL import Image

            files, folder = url_to_fs(str(logger.log_dir))  # it may be an address
            path = f"{folder}/pictures/{key}_{step:06d}.png"
            files.makedirs(path.rpartition("/")[0], exist_ok=True)
            with files.open(path, "wb") as file:
                Image.fromarray(image).save(file, "png")


def _image_api(logger: Any) -> str | None:
    experiment = getattr(logger, "experiment", None)
    if hasattr(logger, "log_image"):
        return "wandb"
    if hasattr(experiment, "add_image"):
        return "tensorboard"
    if hasattr(experiment, "log_image"):
        return "mlflow" if hasattr(logger, "run_id") else "comet"
    return "folder" if getattr(logger, "log_dir", None) is not None else None
