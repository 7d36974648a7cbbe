"""What the report of real fits says, and what it leaves unsaid."""

import csv
import re
import time
import warnings
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader

from lightning_tricks import DeviceMonitor, GradientClipping, ImageLogger, RunReport, ValidateFirst
from lightning_tricks._shared.report_parts import ClippedSteps, DeviceUse, Pictures
from lightning_tricks.run_report import find_all, read_record
from tests.run_report.test_callback import train
from tests.small import QUIET, EvaluatedNet, Hooks, Net, cases, digits, loader

CONSTANT = "The learning rate was 0.01 in all steps: a schedule"


def fit(module, *callbacks, **options):
    seed_everything(0, verbose=False)
    Trainer(**{"max_epochs": 4, "log_every_n_steps": 1, **QUIET, **options}, callbacks=list(callbacks)).fit(
        module, loader()
    )


def sentences(folder):
    """The findings, without those about the checkout that the tests run in."""
    return [finding.text for finding in find_all(read_record(folder)) if "from commit" not in finding.text]


@cases(
    "options, words",
    ({"limit_train_batches": 1000, "limit_val_batches": 10}, []),
    ({"limit_train_batches": 9}, ["Only a part of the data was used in training (limit_train_batches=9 batches)."]),
    ({"limit_val_batches": 0.5}, ["Only a part of the data was used in validation (limit_val_batches=0.5)."]),
    ({"limit_val_batches": 0}, []),
    ({"overfit_batches": 3}, ["Only a part of the data was used in training and validation (overfit_batches=3)."]),
)
def test_a_limit_that_took_nothing_away_is_none(tmp_path, options, words):
    train([RunReport(tmp_path)], **options)
    assert [text for text in sentences(tmp_path) if not text.startswith(CONSTANT)] == words


def test_what_a_callback_sends_to_the_loggers_itself_is_recorded(tmp_path):
    logger = CSVLogger(tmp_path / "csv")
    monitor = DeviceMonitor(every_n_train_steps=4, interval=0.01)
    train([RunReport(tmp_path / "a"), monitor], logger=logger)
    with Path(logger.log_dir, "metrics.csv").open(newline="") as file:
        written = [
            (int(row["step"]), float(row["host/data_wait"])) for row in csv.DictReader(file) if row["host/data_wait"]
        ]
    record = read_record(tmp_path / "a")
    assert [(point.step, point.value) for point in record.curve("host/data_wait")] == written
    assert len(written) == 5
    (part,) = record.parts_of(DeviceUse)
    assert part.rank == 0


def test_facts_are_those_of_the_run(tmp_path):
    class Facts(Net):
        def __init__(self):
            super().__init__()
            self.save_hyperparameters(
                {"a": {"b": {"c": {"d": {"e": {"f": 1}}}}}, "rate": 0.1, "half": Fraction(1, 2), "none": None}
            )

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), 0.5, momentum=0.25, nesterov=True)
            return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer)]

    began = time.time()
    fit(
        Facts(),
        RunReport(tmp_path),
        accumulate_grad_batches=2,
        gradient_clip_val=3.0,
        max_epochs=1,
        limit_train_batches=6,
    )
    record = read_record(tmp_path)
    arguments, facts, data = dict(record.arguments), dict(record.trainer), dict(record.data)
    assert arguments["a.b.c.d.e.f"] == "1"
    assert (arguments["rate"], arguments["half"], arguments["none"]) == ("0.1", "a Fraction", "None")
    expected = {"strategy": "SingleDeviceStrategy, 1 rank", "device": "cpu", "max_epochs": "1", "precision": "32-true"}
    expected |= {"accumulate_grad_batches": "2", "gradient_clip_val": "3", "overfit_batches": "0"}
    expected |= {"limit_train_batches": "6 batches", "limit_val_batches": "1", "optimizer": "SGD", "seed": "0"}
    assert expected.items() <= facts.items()
    group = {"lr": "0.5", "momentum": "0.25", "nesterov": "True", "maximize": "False"}
    settings = dict(record.settings)
    assert {name: settings[f"{name} of optimizer 0"] for name in group} == group
    assert data == {"training batches": "6 of 10", "training batch size": "4", "training workers": "0"}
    assert (record.module, record.step, record.epochs, record.is_seeded) == ("Facts", 3, 1, True)
    assert began <= record.started <= record.started + record.seconds <= record.written + 1 <= time.time() + 1


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from (digits()[place] for place in range(40))


def test_a_limit_of_a_stream_is_how_long_an_epoch_is(tmp_path):
    module = Net()
    module.train_dataloader = lambda: DataLoader(Stream(), 4)
    seed_everything(0, verbose=False)
    Trainer(max_epochs=1, limit_train_batches=5, log_every_n_steps=1, callbacks=[RunReport(tmp_path)], **QUIET).fit(
        module
    )
    assert dict(read_record(tmp_path).data)["training batches"] == "5 of unknown"
    assert sentences(tmp_path) == []


class Gan(LightningModule):
    """Steps the discriminator in each batch, and the generator in every second one."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = nn.Linear(8, 64), nn.Linear(64, 1)

    def training_step(self, batch, batch_idx):
        both, (images, _) = self.optimizers(), batch
        made, ones = self.generator(torch.randn(len(images), 8)), torch.ones(len(images), 1)
        for number in (1, 0)[: 1 + (batch_idx % 2 == 0)]:
            loss = binary_cross_entropy_with_logits(self.discriminator(made), ones * (1 - number))
            if number:
                loss = loss + binary_cross_entropy_with_logits(self.discriminator(images), ones)
            both[number].zero_grad()
            self.manual_backward(loss, retain_graph=bool(number))
            both[number].step()
            self.log(f"loss_{number}", loss.detach())

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.generator, self.discriminator)], []


def test_steps_of_two_optimizers_agree_with_the_axes(tmp_path):
    fit(Gan(), RunReport(tmp_path), GradientClipping(1e-3))
    record, page = read_record(tmp_path), (tmp_path / "report.html").read_text(encoding="utf-8")
    assert {part.optimizer: part.steps for part in record.parts_of(ClippedSteps)} == {0: 20, 1: 40}
    assert record.step == 40 == 1 + max(row.step for row in record.rows if row.kind == "step")
    assert {"optimizer 0": "SGD", "optimizer 1": "SGD"}.items() <= dict(record.trainer).items()
    assert "<b>40</b><span>steps</span>" in page
    for number, steps in ((0, 20), (1, 40)):
        assert f"{steps} of {steps} steps of optimizer {number} clipped." in page
        assert f"100 % of {steps} steps of optimizer {number} were clipped: max_norm=0.001 is below" in page


class Knows(EvaluatedNet):
    """Predicts all but some digits rightly."""

    wrong = 0

    def validation_step(self, batch, batch_idx):
        preds = nn.functional.one_hot(batch[1], 10).float() * 0.6 + 0.04
        if batch_idx == 0:
            preds[: self.wrong] = preds[: self.wrong].roll(1, 1)
        return {"preds": preds, "target": batch[1]}


@cases(
    "wrong, mark, note",
    (0, "", "Epoch 1. There are no mistakes."),
    (3, "", "Epoch 1. There are no more."),
    (2, "!", "Epoch 1. There are no more."),  # names of classes that begin as the captions of mistakes do
)
def test_mistakes_are_mistakes(tmp_path, wrong, mark, note):
    module = Knows()
    module.wrong = wrong
    images = ImageLogger(6, shape=[1, 8, 8], class_names=[f"{mark}{number}" for number in range(10)])
    train([RunReport(tmp_path), images], module)
    (part,) = read_record(tmp_path).parts_of(Pictures)
    assert (part.title, part.note) == ("Most confident mistakes (val)", note)
    assert len(part.pictures) == len(part.captions) == sum(part.mistakes) == wrong
    assert all(re.fullmatch(rf"{mark}\d at 64%, is {mark}\d", caption) for caption in part.captions)


class Promises(Stream):
    """A stream of 40 rows, whose length is wrong."""

    def __len__(self):
        return 90


class Scheduled(EvaluatedNet):
    """Logs a loss of validation, under a scheduler."""

    def __init__(self, make=None):
        super().__init__()
        self.make = make

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.01)
        return optimizer if self.make is None else {"optimizer": optimizer, "lr_scheduler": self.make(optimizer)}


def every_step(scheduler):
    return {"scheduler": scheduler, "interval": "step"}


def plateau(optimizer, **more):
    return {"scheduler": schedules.ReduceLROnPlateau(optimizer), "monitor": "val/loss", "strict": False, **more}


def checkpoint(folder, **arguments):
    return ModelCheckpoint(folder / "checkpoints", monitor="val/loss", **arguments)


# what the report says, if anything, of a fit of three epochs of ten batches
UNSEEN = {
    "a loader that promises more": (
        {"data": lambda: DataLoader(Promises(), 4)},
        "Validation never ran: an epoch had 10 batches, and validation waits for the last of the 23 that the length of "
        "the training loader promises. Correct that length.",
    ),
    "validation after the end": (
        {"check_val_every_n_epoch": 5, "num_sanity_val_steps": 1},
        "Validation never ran: 3 epochs with check_val_every_n_epoch=5 and val_check_interval=1.",
    ),
    "validation after the end, and one before the first step": (
        {"check_val_every_n_epoch": 5, "callbacks": lambda folder: [ValidateFirst()]},
        "Validation never ran: 3 epochs with check_val_every_n_epoch=5 and val_check_interval=1.",
    ),
    "validation after the end, without a sanity check": (
        {"check_val_every_n_epoch": 5},
        "Validation never ran: 3 epochs with check_val_every_n_epoch=5 and val_check_interval=1.",
    ),
    "a monitor that no logger was sent yet": (
        {
            "make": lambda optimizer: plateau(optimizer, monitor="norm", interval="step", frequency=5),
            "callbacks": lambda folder: [Hooks(on_train_batch_end=lambda _, module, *__: module.log("norm", 1.0))],
            "log_every_n_steps": 50,
        },
        None,
    ),
    "validation in time": ({"check_val_every_n_epoch": 3}, None),
    "no validation": ({"limit_val_batches": 0}, None),
    "more than an epoch": (
        {"accumulate_grad_batches": 16},
        "accumulate_grad_batches=16 is more than the 10 batches of an epoch, which ends with a step: no step was of "
        "that many.",
    ),
    "a whole epoch": ({"accumulate_grad_batches": 10}, None),
    "the last step of few": ({"accumulate_grad_batches": 4, "max_steps": 1, "max_epochs": -1}, None),
    "a misspelt monitor": (
        {"callbacks": lambda folder: [EarlyStopping("val_los", strict=False)]},
        "EarlyStopping monitors 'val_los', which was never logged: it had no effect. Keys that were logged: "
        "learning_rate, val/loss.",
    ),
    "a misspelt monitor of a scheduler": (
        {"make": lambda optimizer: plateau(optimizer, monitor="val_los")},
        "ReduceLROnPlateau monitors 'val_los', which was never logged: it had no effect. Keys that were logged: "
        "learning_rate, val/loss.",
    ),
    "saved between validations": (
        {"callbacks": lambda folder: [checkpoint(folder, every_n_train_steps=3)], "enable_checkpointing": True},
        "ModelCheckpoint decided 7 times by 'val/loss', of which there were 3 values: it compared old ones again. Let "
        "it decide after each validation alone.",
    ),
    "saved after validations": (
        {"callbacks": lambda folder: [checkpoint(folder, every_n_train_steps=10)], "enable_checkpointing": True},
        None,
    ),
    "a plateau between validations": (
        {"make": plateau, "check_val_every_n_epoch": 2, "max_epochs": 6},
        "ReduceLROnPlateau decided 5 times by 'val/loss', of which there were 3 values: it compared old ones again. "
        "Let it decide after each validation alone.",
    ),
    "a plateau in time": ({"make": lambda each: plateau(each, frequency=2), "check_val_every_n_epoch": 2}, None),
    "a cosine of epochs, by steps": (
        {"make": lambda optimizer: every_step(schedules.CosineAnnealingLR(optimizer, 3))},
        "CosineAnnealingLR went past its T_max=3 to 30 steps: the learning rate rose again. Set T_max to the number of "
        "steps.",
    ),
    "a cosine of epochs": ({"make": lambda optimizer: schedules.CosineAnnealingLR(optimizer, 3)}, None),
    "a cosine of steps": ({"make": lambda optimizer: every_step(schedules.CosineAnnealingLR(optimizer, 30))}, None),
    "a cosine after a warm-up": (
        {
            "make": lambda optimizer: schedules.SequentialLR(
                optimizer,
                [schedules.LinearLR(optimizer, total_iters=1), schedules.CosineAnnealingLR(optimizer, 2)],
                [1],
            )
        },
        None,
    ),
    "a cycle of steps, by epochs": (
        {"make": lambda optimizer: schedules.OneCycleLR(optimizer, 0.1, total_steps=30)},
        'OneCycleLR made 3 of its 30 steps, one each epoch. Return it with "interval": "step" to step it after each '
        "optimizer step.",
    ),
}


@pytest.mark.trap("asked_most: validation that never ran, accumulation without effect, stale monitor: nothing is found")
@pytest.mark.parametrize("name", UNSEEN)
def test_what_nobody_sees(tmp_path, name):
    options, expected = UNSEEN[name]
    given = {"data": loader, "callbacks": lambda folder: [], "make": None, "max_epochs": 3, **options}
    seed_everything(0, verbose=False)
    data, callbacks, module = given.pop("data")(), given.pop("callbacks")(tmp_path), Scheduled(given.pop("make"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ReduceLROnPlateau cond|Early stopping cond|Your `IterableDataset` has")
        Trainer(**{**QUIET, "log_every_n_steps": 1, **given, "callbacks": [RunReport(tmp_path), *callbacks]}).fit(
            module, data, loader()
        )
    usual = ("The learning rate was", "val/loss was best at the end")
    assert [text for text in sentences(tmp_path) if not text.startswith(usual)] == ([expected] if expected else [])
