"""ValidateFirst in real fits: where its values go, that nothing else changes, and when it does not run."""

import csv
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LearningRateFinder, ModelCheckpoint, RichProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_tricks import (
    AutoResume,
    HangWatch,
    ImageLogger,
    MetricsMonitor,
    RestoreBest,
    RunFingerprint,
    RunReport,
    SpikeGuard,
    ValidateFirst,
)
from tests.contract.checks import Interrupts
from tests.small import BATCHES, QUIET, EvaluatedNet, Hooks, cases, digits, loader, real_fp16, same, without_warnings


class Noisy(Dataset):
    """Digits with noise from each of the global generators, in the main process or its workers."""

    def __len__(self):
        return 4 * BATCHES

    def __getitem__(self, index):
        pixels, label = digits()[index]
        return pixels + torch.rand(()) + random.random() + np.random.rand(), label


class Scored(EvaluatedNet):
    """Logs the loss of the training and of the validation, by epoch and by step."""

    def __init__(self, **net):
        super().__init__(**{"dropout": 0.2, **net})
        self.net.insert(1, nn.BatchNorm1d(16))

    def training_step(self, batch, batch_idx):
        outputs = super().training_step(batch, batch_idx)
        self.log("train", outputs["loss"])
        return outputs

    def validation_step(self, batch, batch_idx):
        outputs = self.evaluate(batch, batch_idx)
        self.log("by", nn.functional.cross_entropy(outputs["preds"], outputs["target"]), on_step=True, on_epoch=True)
        return outputs


class Order(Callback):
    """Keeps what a fit did: batches by their sums, and the values of validations."""

    training_arguments = ()

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seen.append(batch[0].sum().item())

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if not trainer.sanity_checking:
            self.seen.append(("val", batch[0].sum().item()))

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.seen.append(("val", trainer.global_step, trainer.callback_metrics["loss"].item()))


def train(callbacks=(), folder=None, start=0, module=None, ckpt_path=None, loaders=None, **trainer):
    """Train two epochs; return the Trainer, the module, what was seen, the rows of the log and the random states."""
    random.seed(start), np.random.seed(start), torch.manual_seed(start)
    order = Order()
    logger = CSVLogger(folder, "", "") if folder else False
    options = {"max_epochs": 2, "log_every_n_steps": 2, **QUIET, "logger": logger, **trainer}
    trainer = Trainer(callbacks=[*callbacks, order], **options)
    module = Scored() if module is None else module() if isinstance(module, type) else module
    trainer.fit(module, *(loaders() if loaders else (loader(shuffle=True), loader())), ckpt_path=ckpt_path)
    rows = list(csv.DictReader((Path(folder) / "metrics.csv").read_text().splitlines())) if folder else []
    rng = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    weights = [*module.state_dict().values(), *(o.state_dict() for o in trainer.optimizers)]
    return trainer, weights, order.seen, rows, rng


def values(row):
    return {name: value for name, value in row.items() if value}


LOADERS = {
    "no workers": {},
    "workers": {"num_workers": 2},
    "persistent workers": {"num_workers": 2, "persistent_workers": True},
}


@pytest.mark.filterwarnings("ignore:.*shuffling enabled")
@pytest.mark.trap("asked_most: validation before training")
@cases(
    "options, kind",
    ({}, "no workers"),
    ({"num_sanity_val_steps": 2, "accumulate_grad_batches": 4}, "workers"),
    ({"num_sanity_val_steps": -1, "val_check_interval": 0.5}, "persistent workers"),
    ({"check_val_every_n_epoch": 2, "max_epochs": 4}, "persistent workers"),
    ({"check_val_every_n_epoch": None, "val_check_interval": 7}, "no workers"),
    ({"limit_val_batches": 3, "limit_train_batches": 0.5}, "no workers"),
    ({"check_val_every_n_epoch": 2, "reload_dataloaders_every_n_epochs": 2, "num_sanity_val_steps": 1}, "workers"),
    ({"plugins": "fp16"}, "no workers"),
    ids=lambda value: value if isinstance(value, str) else " ".join(value) or "plain",
)
def test_the_rest_of_the_run_is_bit_equal(tmp_path, kind, options):
    """Weights, optimizers, batches, validations, random states and the rows of the log."""
    shared = torch.Generator()

    def loaders():
        shared.manual_seed(5)
        train = DataLoader(Noisy(), 4, shuffle=True, generator=shared, **LOADERS[kind])
        return train, DataLoader(Noisy(), 4, shuffle=True, generator=shared, **LOADERS[kind])

    found = {}
    for callbacks in ((), (ValidateFirst(),)):
        plugins = {"plugins": [real_fp16()]} if "plugins" in options else {}
        folder = tmp_path / str(len(callbacks))
        found[len(callbacks)] = train(callbacks, folder, loaders=loaders, **{**options, **plugins})
    _, weights, seen, rows, rng = found[1]
    _, bare_weights, bare_seen, bare_rows, bare_rng = found[0]
    assert same(weights, bare_weights)
    assert same(rng, bare_rng)
    first = [step[:2] for step in seen[:11] if isinstance(step, tuple) and len(step) == 3]
    assert first[0] == ("val", 0)
    after = 1 + next(i for i, step in enumerate(seen) if isinstance(step, tuple) and len(step) == 3)
    assert after == 1 + options.get("limit_val_batches", BATCHES)
    assert seen[after:] == bare_seen
    assert [values(row) for row in rows[after:]] == [values(row) for row in bare_rows]
    last = values(rows[after - 1])
    assert (last["step"], last["epoch"], float(last["loss"])) == ("0", "0", pytest.approx(seen[after - 1][2]))


def test_it_is_what_validate_measures():
    module = Scored()
    (alone,) = Trainer(**QUIET).validate(module, loader(), verbose=False)
    _, _, seen, *_ = train([ValidateFirst()], module=module)
    assert seen[BATCHES] == ("val", 0, alone["loss"])


def test_a_second_fit_from_the_start_has_its_own_and_a_fit_that_continues_none():
    callback = ValidateFirst()
    for _ in range(2):
        trainer, _, seen, *_ = train([callback])
        assert seen[BATCHES][:2] == ("val", 0)
    order = next(c for c in trainer.callbacks if isinstance(c, Order))
    before = len(order.seen)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(trainer.lightning_module, loader(), loader())
    assert isinstance(order.seen[before], float)


def test_it_does_not_run_again_after_a_resume(tmp_path):
    _, weights, whole, *_ = train([ValidateFirst()])
    with pytest.raises(SystemExit):
        train([ValidateFirst(), AutoResume(tmp_path), Interrupts(13)])
    _, resumed, seen, *_ = train([ValidateFirst(), AutoResume(tmp_path)], start=7)
    assert same(resumed, weights)
    assert seen == whole, "AutoResume restored what was seen before the stop"


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint")
@pytest.mark.parametrize("step", [0, 4, 10])
def test_it_does_not_run_again_from_a_checkpoint(tmp_path, step):
    """Also from one that was saved before the first step."""
    path = tmp_path / "at.ckpt"

    def save(trainer, *args):
        if trainer.global_step == step and not path.exists():
            trainer.save_checkpoint(path)

    train([ValidateFirst(), Hooks(on_train_batch_start=save)])
    _, _, seen, *_ = train([ValidateFirst()], ckpt_path=path)
    assert isinstance(seen[0], float) or step == 10  # which begins with the validation of the epoch's end


def test_what_compares_validations_does_not_count_it(tmp_path):
    """The first value is the best of all: a run that learns nothing goes on as it would have."""
    found = []
    for first in ([], [ValidateFirst()]):
        stop = EarlyStopping("loss", patience=2, check_on_train_epoch_end=False)
        files = ModelCheckpoint(tmp_path / str(len(first)), monitor="loss", save_top_k=-1)
        best = RestoreBest("loss")
        callbacks = [*first, best, stop, files]
        trainer, weights, *_ = train(callbacks, module=Worse, max_epochs=9, enable_checkpointing=True)
        saved = sorted(path.name for path in (tmp_path / str(len(first))).iterdir())
        found.append((weights, trainer.current_epoch, stop.best_score, stop.wait_count, saved, best.best_step))
    assert same(*found)


class Worse(Scored):
    def evaluate(self, batch, batch_idx):
        self.log("loss", self.trainer.global_step + torch.zeros(()))
        return {"preds": self.net(batch[0]), "target": batch[1]}


def test_others_take_it_for_a_validation(tmp_path):
    """Ours and the progress bars."""
    monitor = MetricsMonitor({"task": "multiclass", "num_classes": 10})
    report = RunReport(tmp_path / "report")
    callbacks = [
        *(ValidateFirst(), monitor, report, HangWatch(dirpath=tmp_path / "hang"), SpikeGuard("rewind", warmup_steps=2)),
        *(RunFingerprint(tmp_path / "prints.jsonl"), ImageLogger(4, shape=(1, 8, 8)), AutoResume(tmp_path / "run")),
    ]
    with without_warnings():
        *_, rows, _ = train(callbacks, tmp_path)
    first = next(values(row) for row in rows if row.get("val/acc"))
    assert first["step"] == "0"
    assert sum(bool(row["val/acc"]) for row in rows) == 3


@pytest.mark.parametrize("bar", [None, pytest.param(RichProgressBar(), marks=pytest.mark.newest)])  # rich breaks it
def test_progress_bars_show_it(bar):
    train([ValidateFirst(), *([bar] if bar else [])], enable_progress_bar=True, max_epochs=1)


class Unvalidated(Scored):
    validation_step = LightningModule.validation_step


@cases(
    "options, words",
    ({"limit_val_batches": 0}, "limit_val_batches=0"),
    ({"module": Unvalidated, "loaders": lambda: (loader(),)}, "no validation_step or validation loader"),
)
def test_without_validation_it_says_why(lightning_log, options, words):
    train([ValidateFirst()], **options)
    assert any(f"runs no validation before the first step: {words}" in message for _, message in lightning_log)


@pytest.mark.filterwarnings("ignore:Total length of")
def test_empty_loaders_are_a_warning():
    with pytest.warns(UserWarning, match="ValidateFirst: the validation loaders have no batches"):
        train([ValidateFirst()], loaders=lambda: (loader(), DataLoader([])))


def test_an_error_in_it_leaves_nothing_behind():
    class Breaking(Scored):
        def validation_step(self, batch, batch_idx):
            torch.rand(5)
            raise ZeroDivisionError

    stop = EarlyStopping("loss")
    torch.manual_seed(1)
    with pytest.raises(ZeroDivisionError):
        train([ValidateFirst(), stop], module=Breaking)
    assert "on_validation_end" not in vars(stop)
    train([ValidateFirst()])


@pytest.mark.newest  # after a finder, Lightning 2.5.0 does not validate
def test_a_finder_trains_without_it():
    calls = []
    hooks = Hooks(on_validation_start=lambda trainer, module: calls.append(trainer.global_step))

    class Rated(Scored):
        lr = 0.01

    with without_warnings():
        train([ValidateFirst(), LearningRateFinder(num_training_steps=3), hooks], module=Rated, max_epochs=1)
    assert calls == [0, BATCHES]


def test_it_asks_a_datamodule_for_its_loaders_no_more_often():
    class Data(LightningDataModule):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def train_dataloader(self):
            return loader()

        def val_dataloader(self):
            self.calls += 1
            return loader()

    counts = []
    for callbacks in ([], [ValidateFirst()]):
        data = Data()
        Trainer(max_epochs=2, callbacks=callbacks, **QUIET).fit(Scored(), datamodule=data)
        counts.append(data.calls)
    assert counts == [1, 1]
