"""`lightning-tricks demo`: a small classifier on real digits, trained with every trick of the collection."""

from __future__ import annotations

import csv
import json
import logging
import platform
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

from lightning_tricks._lightning_compat.flavor import (
    LIGHTNING,
    CSVLogger,
    LightningDataModule,
    LightningModule,
    PossibleUserWarning,
    Trainer,
    lightning_version,
)
from lightning_tricks._shared.console import make_console
from lightning_tricks._shared.fitting_table import FittingTable
from lightning_tricks._shared.lightning_name import FABRIC
from lightning_tricks.demo_rooms import ROWS, demo_fields, page_path
from lightning_tricks.mixin import TricksMixin
from lightning_tricks.tricks import Tricks


class Digits(LightningDataModule):
    """The 1,797 handwritten digits of scikit-learn, 8 x 8 pixels in [0, 1], split 1,197 / 300 / 300.

    Args:
        batch_size: Images in a batch.
        num_workers: Processes that load them; 0 loads them in the process that trains.
    """

    def __init__(self, batch_size: int = 32, num_workers: int = 0) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_workers = num_workers

    def setup(self, stage: str) -> None:
        """Load and split the digits; the split does not depend on the seed."""
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        dataset = TensorDataset(images, torch.tensor(digits.target))
        self._splits = random_split(dataset, [1197, 300, 300], torch.Generator().manual_seed(0))

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the training images, shuffled."""
        return self._loader(self._splits[0], shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return the validation images."""
        return self._loader(self._splits[1])

    def test_dataloader(self) -> DataLoader[Any]:
        """Return the test images."""
        return self._loader(self._splits[2])

    def predict_dataloader(self) -> DataLoader[Any]:
        """Return the test images."""
        return self._loader(self._splits[2])

    def _loader(self, split: Dataset[Any], shuffle: bool = False) -> DataLoader[Any]:
        return DataLoader(split, batch_size=self.batch_size, shuffle=shuffle, num_workers=self.num_workers)


class DigitsNet(nn.Sequential):
    """A small convolutional net, from images (n, 1, 8, 8) to scores (n, 10).

    Args:
        width: Channels of its convolution.
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(width * 4 * 4, 64),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(64, 10),
        )


class DigitsClassifier(TricksMixin, LightningModule):
    """A classifier of 8 x 8 digits.

    Args:
        tricks: What to switch on.
    """

    def __init__(self, tricks: Tricks | None = None) -> None:
        super().__init__(tricks=tricks)
        self.save_hyperparameters()
        self.net = DigitsNet()
        self.loss = nn.CrossEntropyLoss(reduction="none")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Compute and log the loss of a batch of images (n, 1, 8, 8) and labels (n,)."""
        outputs = self.validation_step(batch, batch_idx)
        outputs["loss"] = outputs["loss"].mean()
        self.log("train/loss", outputs["loss"])
        return outputs

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Return the cross-entropy of each image, the logits and the labels."""
        images, labels = batch
        scores = self.net(images)
        return {"loss": self.loss(scores, labels), "preds": scores, "target": labels}

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the digit (n,) of each image."""
        digits: Tensor = self.net(batch[0]).argmax(1)
        return digits


def prepare(out: Path, seed: int = 42, **trainer_arguments: Any) -> tuple[Trainer, Tricks]:
    """Check the arguments, and create the report folder and the Trainer.

    Args:
        out: The report folder; it is created if it does not exist.
        seed: The seed of the run.
        **trainer_arguments: Arguments of the Trainer: `max_epochs`, `accelerator`, `devices`, `precision`.

    Returns:
        The Trainer and the tricks, for `run`.

    Raises:
        OSError: If the folder `out` cannot be created.
        MisconfigurationException, TypeError, ValueError: If the Trainer or a trick refuses an argument.
    """
    _quieten_lightning()
    tricks = Tricks(**demo_fields(seed, out))
    out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(
        logger=CSVLogger(out, name="logs"), log_every_n_steps=1, enable_model_summary=False, **trainer_arguments
    )
    return trainer, tricks


def run(trainer: Trainer, tricks: Tricks, out: Path) -> None:
    """Train, test, print a table of what each trick did, and write the report.

    Writes `report.json`, the page about the run in `run/`, and its logs and checkpoint under `logs/`. A run that was
    stopped is resumed when this is called again.
    """
    unfinished = out / "resume"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PossibleUserWarning)  # the loaders need no workers
        warnings.filterwarnings("ignore", message=".*LeafSpec.*")
        warnings.filterwarnings("ignore", message="The dirpath has changed")  # a resumed run logs to a new folder
        model, data = DigitsClassifier(tricks), Digits()
        folder = Path(str(trainer.log_dir))  # all ranks must ask: it is a broadcast
        if trainer.is_global_zero:
            unfinished.mkdir(exist_ok=True)
            with (unfinished / "logs.txt").open("a", encoding="utf-8") as names:
                names.write(f"{folder}\n")
        trainer.fit(model, data)
        values = dict(trainer.callback_metrics)
        trainer.test(model, data, verbose=False)
        values |= trainer.callback_metrics
        if trainer.is_global_zero:
            folders = (unfinished / "logs.txt").read_text(encoding="utf-8").splitlines()
            report = _report(trainer, _read_history(folders), {k: v.item() for k, v in values.items()})
            _print_and_write(report, out)
            shutil.rmtree(unfinished)  # the next run starts anew


def _report(
    trainer: Trainer, history: Sequence[Mapping[str, float]], values: Mapping[str, float]
) -> dict[str, dict[str, str]]:
    losses = [step["train/loss"] for step in history if "train/loss" in step]
    report: dict[str, dict[str, str]] = {
        "training": {
            "steps": f"{trainer.global_step} in {trainer.current_epoch} epochs, {trainer.precision}, "
            f"{trainer.world_size} x {type(trainer.accelerator).__name__}",
            "train loss": f"{losses[0]:.3f} at the first step, {losses[-1]:.3f} at the last",
            "loss": f"val {values['val/loss']:.3f}, test {values['test/loss']:.3f}",
            "accuracy": f"val {values['val/acc']:.1%}, test {values['test/acc']:.1%}",
        }
    }
    return report | {room: rows(trainer, history) for room, rows in ROWS.items()}


def print_paths(trainer: Trainer, out: Path) -> None:
    """Say where the run is to be looked at."""
    console = make_console(soft_wrap=True, highlight=False)
    logs = getattr(trainer.logger, "log_dir", "")
    console.print(f"\nLogs and checkpoint: {logs}; the table as data: {out / 'report.json'}")
    console.print(f"The page about this run, to open in a browser: {page_path(out).resolve()}")


def _print_and_write(report: Mapping[str, Mapping[str, str]], out: Path) -> None:
    table = FittingTable(
        "trick", "what", "in this run", drop=["trick"], title="1,797 digits, one small net, every trick"
    )
    for room, rows in report.items():
        for position, (what, text) in enumerate(rows.items()):
            table.add_row(room if position == 0 else "", what, text, end_section=position == len(rows) - 1)
    make_console().print(table)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "lightning": lightning_version()}
    (out / "report.json").write_text(json.dumps({"versions": versions, **report}, indent=2) + "\n", encoding="utf-8")


def _read_history(folders: Sequence[str]) -> list[dict[str, float]]:
    """Return the logged values of each step; a resumed run has several folders, of which the last one counts."""
    steps: dict[float, dict[str, float]] = {}
    for folder in folders:
        path, fresh = Path(folder) / "metrics.csv", set()
        if not path.exists():
            continue
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                values = {key: float(value) for key, value in row.items() if value}
                step = values["step"]
                steps[step] = {**(steps.get(step, {}) if step in fresh else {}), **values}
                fresh.add(step)
    return [steps[step] for step in sorted(steps)]


def _quieten_lightning() -> None:
    """Show only the progress bar and the table: no tips for other products, no list of devices."""
    for name in (LIGHTNING, FABRIC[LIGHTNING]):
        logging.getLogger(name).setLevel(logging.WARNING)
