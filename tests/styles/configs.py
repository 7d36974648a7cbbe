"""Runs that are described by files: Hydra's `_target_`, as its templates are laid out, and LightningCLI."""

import sys
from pathlib import Path
from unittest.mock import patch

import hydra
import yaml
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningCLI
from omegaconf import OmegaConf
from torch.utils.data import DataLoader

from tests.styles.batches import CLASSES, Classifier
from tests.styles.frame import Job, points, style


class Data(LightningDataModule):
    """Points in batches.

    Args:
        batch_size: How many points are in a batch.
    """

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> DataLoader:
        return DataLoader(points(), batch_size=self.hparams["batch_size"], shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(points(12, 2), batch_size=self.hparams["batch_size"])


@style(metrics=CLASSES)
def hydra_targets(job: Job) -> None:
    """Hydra instantiates all of it; configs, not lists and dicts, are what the callbacks are given."""
    new = {name: {"_target_": f"lightning_tricks.{name}", **given} for name, given in job.added.items()}
    config = OmegaConf.create(
        {
            "seed": 1,
            "data": {"_target_": f"{__name__}.Data", "batch_size": 4},
            "model": {"_target_": f"{__name__}.Classifier"},
            "callbacks": new,
            "logger": {
                "_target_": "lightning.pytorch.loggers.CSVLogger",
                "save_dir": str(job.folder),
                "name": "logs",
            },
            "trainer": {"_target_": "lightning.Trainer", **job.settings()},
        }
    )
    callbacks = [hydra.utils.instantiate(callback) for callback in config.callbacks.values()]
    trainer = hydra.utils.instantiate(
        config.trainer,
        callbacks=[*callbacks, *job.probes()],
        logger=hydra.utils.instantiate(config.logger),
    )
    trainer.fit(hydra.utils.instantiate(config.model), datamodule=hydra.utils.instantiate(config.data))


@style(metrics=CLASSES)
def lightning_cli(job: Job) -> None:
    """A YAML file names the callbacks; the command line is `fit --config`."""
    new = [{"class_path": f"lightning_tricks.{name}", "init_args": given} for name, given in job.added.items()]
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": str(job.folder)}}
    logger["init_args"]["name"] = "logs"
    config = {
        "seed_everything": 1,
        "trainer": {**job.settings(), "callbacks": new, "logger": logger},
        "data": {"batch_size": 4},
    }
    file = Path(job.folder, "config.yaml")
    file.write_text(yaml.safe_dump(config))
    with patch.object(sys, "argv", ["train.py", "fit", "--config", str(file)]):
        LightningCLI(Classifier, Data, save_config_callback=None, trainer_defaults={"callbacks": job.probes()})
