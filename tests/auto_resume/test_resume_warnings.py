"""What user code does between a save and a resume is restored, and no warning comes without a reason."""

import os
import random
import time
import warnings

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.loggers import CSVLogger

from lightning_tricks import seed_everything
from lightning_tricks.auto_resume import AutoResume, CheckpointFolder
from lightning_tricks.auto_resume.core.attributes.drawable_values import drawable_values
from tests.auto_resume.test_callback import fit, stop, weights
from tests.contract.lab import Net, same


def resumed_like_undisturbed(tmp_path, module, *make_callbacks):
    whole = fit(*(make() for make in make_callbacks), module=module)
    stop(AutoResume(tmp_path / "runs", every_n_train_steps=3), *(make() for make in make_callbacks), module=module)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="AutoResume")
        again = fit(AutoResume(tmp_path / "runs"), *(make() for make in make_callbacks), module=module)
    assert same(weights(again), weights(whole))
    return whole, again


class Centering(Net):
    """Binds a buffer anew in each step, which often gets the place in memory that an old one had."""

    def __init__(self):
        super().__init__(dropout=0.2)
        self.register_buffer("mean", torch.zeros(()), persistent=False)

    def training_step(self, batch, batch_idx):
        outputs = super().training_step(batch, batch_idx)
        self.mean = 0.9 * self.mean + 0.1 * outputs["loss"].detach()
        return {**outputs, "loss": outputs["loss"] * (1 + self.mean)}


class Gathering(Net):
    """Lets gradients add up over four batches, as code from before `accumulate_grad_batches` does."""

    def __init__(self):
        super().__init__(dropout=0.2)

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if batch_idx % 4 == 0:
            optimizer.zero_grad()


class Strange(Net):
    """Keeps what refers to itself, and what refuses to be looked at."""

    def __init__(self):
        super().__init__(dropout=0.2)
        self.circle = {}
        self.circle["itself"] = self.circle
        self.closed = Closed()


class Closed(dict):
    def items(self):
        raise ValueError("it is closed")


@pytest.mark.parametrize("module", [Centering, Gathering, Strange])
def test_modules_of_strangers(tmp_path, module):
    resumed_like_undisturbed(tmp_path, module)


class Watches(Callback):
    """Keeps readings of clocks."""

    def on_train_start(self, trainer, pl_module):
        self.start = self.start_of_epoch = time.monotonic()

    def on_train_epoch_start(self, trainer, pl_module):
        self.start_of_epoch, self.last = time.time(), time.perf_counter()


def test_clocks_are_no_difference(tmp_path):
    resumed_like_undisturbed(tmp_path, lambda: Net(dropout=0.2), Watches, lambda: Timer(duration="00:01:00:00"))


class Draws(Callback):
    """Draws where a checkpoint is written, as what picks samples to save does."""

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["picked"] = 7 + 0 * float(torch.rand(()))


def test_what_hooks_of_a_save_draw_changes_nothing(tmp_path):
    whole = fit(Draws())
    guarded = fit(Draws(), AutoResume(tmp_path, every_n_train_steps=2))
    assert same(weights(guarded), weights(whole))


def test_a_second_fit_after_one_that_had_ended(tmp_path):
    def script(name):
        trainers = []
        for _ in range(2):
            trainer, module = fit(AutoResume(tmp_path / name)), None
            module = trainer.lightning_module
            trainer.fit_loop.max_epochs = 4
            trainer.fit(module, trainer.train_dataloader)
            trainers.append(weights(trainer))
        return trainers

    first, second = script("a")
    assert same(first, second)


class Full(CSVLogger):
    full = False

    def save(self):
        if self.full:
            raise OSError(28, os.strerror(28))
        super().save()


def test_a_logger_whose_disk_is_full_ends_no_training(tmp_path):
    class Fills(Callback):
        def on_train_batch_end(self, trainer, *args):
            trainer.logger.full = trainer.global_step == 6

    logger = Full(tmp_path / "logs")
    guard = AutoResume(tmp_path / "runs", every_n_train_steps=6, every_n_epochs=None)
    with pytest.warns(UserWarning, match=r"step 6 could not be saved .*No space left.*Training continues"):
        trainer = fit(guard, Fills(), logger=logger, log_every_n_steps=1)
    assert isinstance(trainer, Trainer)
    assert [one.step for one in CheckpointFolder(tmp_path / "runs").manifests()] == [20, 18]


class _Drawing(Net):
    """Holds what was drawn when it was created, and does not change in a fit."""

    def __init__(self):
        super().__init__(dropout=0.2)
        self.validation_z = torch.randn(4)
        self.offset = random.random()
        self.order = random.sample(range(20), 20)
        self.generator = np.random.default_rng(random.getrandbits(32))  # drawn from at the end of an epoch alone
        self.parts = {"noise": [np.random.rand(3)]}
        self.register_buffer("scale", torch.rand(()), persistent=False)
        self.kept = torch.rand(3)
        self.created, self.since, self.name, self.version = time.time(), time.perf_counter(), str(random.random()), 3

    def on_train_batch_start(self, batch, batch_idx):
        self.kept += 1  # is saved and restored, as it changes


_DRAWN = ("generator", "offset", "order", "parts", "scale", "validation_z")


@pytest.mark.parametrize("seeded", [True, False])
def test_what_was_drawn_without_a_seed_is_named(tmp_path, seeded):
    def module():
        if seeded:
            seed_everything(1, verbose=False)
        else:
            random.seed(), np.random.seed(), torch.seed()
        return _Drawing()

    stop(AutoResume(tmp_path, every_n_train_steps=3), module=module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(AutoResume(tmp_path), module=module)
    words = [str(one.message) for one in caught if "had other values" in str(one.message)]
    assert len(words) == (not seeded)
    if not seeded:
        named = words[0].partition("run: ")[2].partition(". They")[0]
        assert set(named.replace(" and 1 more", "").replace("module.", "").replace(",", "").split()) < set(_DRAWN)
        assert "seed_everything" in words[0]


def test_drawable_values_are_of_the_kinds_that_random_numbers_make():
    module = _Drawing()
    found = drawable_values({"module": module}, skipped=lambda owner: ("shape", "optimization"))
    own = {path.removeprefix("module.") for path in found if path.count(".") == 1}
    assert own - {"automatic_optimization"} == {*_DRAWN, "kept"}
    assert found == drawable_values({"module": module}, skipped=lambda owner: ("shape", "optimization"))
    before = found["module.generator"]
    module.generator.random()
    assert drawable_values({"module": module})["module.generator"] != before
