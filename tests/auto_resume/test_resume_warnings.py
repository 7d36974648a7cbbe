"""What user code does between a save and a resume is restored, and no warning comes without a reason."""

import os
import random
import time

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, Timer
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from lightning_tricks import seed_everything
from lightning_tricks.auto_resume import AutoResume, CheckpointFolder
from lightning_tricks.auto_resume.attribute_parts import unseeded_values
from tests.auto_resume.killing import own_state
from tests.auto_resume.test_callback import fit, stop, weights
from tests.small import QUIET, Net, loader, recorded_warnings, same


def resumed_like_undisturbed(tmp_path, module, *make_callbacks):
    whole = fit(*(make() for make in make_callbacks), module=module)
    stop(AutoResume(tmp_path / "runs", every_n_train_steps=3), *(make() for make in make_callbacks), module=module)
    again = fit(AutoResume(tmp_path / "runs"), *(make() for make in make_callbacks), module=module)
    assert same(weights(again), weights(whole))
    assert [one.scheduler.state_dict() for one in again.lr_scheduler_configs] == [
        one.scheduler.state_dict() for one in whole.lr_scheduler_configs
    ]
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


class LeavesOut(Net):
    """Keeps a part out of the Trainer's checkpoints, as those do that save no backbone, and trains it nevertheless."""

    def __init__(self):
        super().__init__(dropout=0.2)
        self.strict_loading = False
        self.net.insert(1, nn.BatchNorm1d(16))

    def on_save_checkpoint(self, checkpoint):
        for name in [*checkpoint["state_dict"]]:
            if name.startswith(("net.0", "net.1")):
                del checkpoint["state_dict"][name]


class SlowWeights(torch.optim.SGD):
    """Has a copy of the weights that it was created with, to which it goes back halfway at step 15."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.05, momentum=0.9)
        self.slow = [one.detach().clone() for one in self.param_groups[0]["params"]]
        self.steps = 0

    def step(self, closure=None):
        loss = super().step(closure)
        self.steps += 1
        if self.steps == 15:
            with torch.no_grad():
                for one, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
                    one.lerp_(slow, 0.5)
        return loss


class Slow(Net):
    def configure_optimizers(self):
        return SlowWeights(self.parameters())


class Scheduled(Net):
    """Steps the schedules of two optimizers itself, where an epoch starts; one more often, and halves its moments."""

    def __init__(self):
        super().__init__(optimization="manual", dropout=0.2)

    def on_train_epoch_start(self):
        first, second = self.lr_schedulers()
        first.step()
        second.step()
        second.step()
        for state in self.trainer.optimizers[1].state.values():
            for moment in state.values():
                moment.mul_(0.5)

    def configure_optimizers(self):
        optimizers = [*super().configure_optimizers()]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(one, 0.8) for one in optimizers]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
@pytest.mark.parametrize("module", [Centering, Strange, LeavesOut, Slow, Scheduled])
def test_modules_of_strangers(tmp_path, module):
    resumed_like_undisturbed(tmp_path, module)


def test_what_a_checkpoint_has_is_not_saved_twice(tmp_path):
    def left_out(module, folder):
        fit(AutoResume(folder), module=module)
        return set(own_state(max(folder.glob(".auto_resume/0*/meta.pt")))["shared"]["left_out"])

    assert left_out(Centering, tmp_path / "a") == set()
    part = {"net.0.weight", "net.0.bias", "net.1.weight", "net.1.bias", "net.1.num_batches_tracked"}
    assert left_out(LeavesOut, tmp_path / "b") == {*part, "net.1.running_mean", "net.1.running_var"}


class Prolongs(Callback):
    """Changes how long a fit is, in the middle of it."""

    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.global_step == 12:
            trainer.fit_loop.max_epochs += 1
            trainer.check_val_every_n_epoch = 2


def test_limits_that_a_callback_changed(tmp_path):
    whole, again = resumed_like_undisturbed(tmp_path, lambda: Net(dropout=0.2), Prolongs)
    assert (whole.global_step, again.global_step, again.check_val_every_n_epoch) == (30, 30, 2)
    third = fit(AutoResume(tmp_path / "runs"), Prolongs(), module=lambda: Net(dropout=0.2))  # its end is in epoch 3
    assert (third.global_step, third.max_epochs) == (30, 3)


def test_limits_that_the_user_changed_are_taken(tmp_path):
    stop(AutoResume(tmp_path), Prolongs())
    assert fit(AutoResume(tmp_path), Prolongs(), epochs=5).global_step == 50


class Adds(Callback):
    """Gives the Trainer another callback in the middle of the fit."""

    def __init__(self, hook, **when):
        def add(trainer, *_):
            if all(getattr(trainer, name) == value for name, value in when.items()):
                trainer.callbacks.append(Watches())

        setattr(self, hook, add)


def test_a_callback_that_was_added_in_the_fit_is_named_unless_it_is_added_again(tmp_path):
    stop(AutoResume(tmp_path / "a"), Adds("on_train_epoch_start", current_epoch=1))
    fit(AutoResume(tmp_path / "a"), Adds("on_train_epoch_start", current_epoch=1))
    stop(AutoResume(tmp_path / "b"), Adds("on_train_batch_end", global_step=4))
    with pytest.raises(UserWarning, match=r"not restored: callbacks.Watches \(a callback that was added in the fit\)"):
        fit(AutoResume(tmp_path / "b"), Adds("on_train_batch_end", global_step=4))


class Watches(Callback):
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


def test_a_logger_whose_disk_is_full_ends_no_training(tmp_path):
    class Fills(CSVLogger):
        def save(self):
            if trainer.global_step == 6:
                raise OSError(28, os.strerror(28))
            super().save()

    guard = AutoResume(tmp_path / "runs", every_n_train_steps=6, every_n_epochs=None)
    options = {"logger": Fills(tmp_path / "logs"), "log_every_n_steps": 7, "max_epochs": 2}
    trainer = Trainer(callbacks=[guard], **{**QUIET, **options})
    with pytest.warns(UserWarning, match=r"step 6 could not be saved .*No space left.*Training continues"):
        trainer.fit(Net(), loader())
    assert [one.step for one in CheckpointFolder(tmp_path / "runs").manifests()] == [20, 18]


class _Pool(nn.Module):
    """Creates an object in its first call, as torchvision's pooling of regions does."""

    levels = None

    def forward(self, x, scale):
        if self.levels is None:
            self.levels = self.kind(scale)
        return x * self.levels.scale


class _Lazy(Net):
    """Keeps what a file cannot hold; `moves` decides whether it is the same one after each step."""

    def __init__(self, moves):
        super().__init__(dropout=0.2)
        self.pool, self.moves = _Pool(), moves
        kind = type("Levels", (), {"__init__": lambda own, scale: setattr(own, "scale", scale)})
        kind.__module__ = "strange_library"  # which is not imported, so that nobody creates one from a file
        self.pool.kind = kind

    def training_step(self, batch, batch_idx):
        outputs = super().training_step(batch, batch_idx)
        loss = self.pool(outputs["loss"], 0.5)
        self.pool.levels.scale += 0.01 * self.moves
        return {**outputs, "loss": loss}


@pytest.mark.parametrize("moves", [False, True])
def test_an_object_that_is_created_again_alike_is_no_difference(tmp_path, moves):
    stop(AutoResume(tmp_path), module=lambda: _Lazy(moves))
    with recorded_warnings() as caught:
        fit(AutoResume(tmp_path), module=lambda: _Lazy(moves))
    said = [str(one.message) for one in caught if "not restored" in str(one.message)]
    assert len(said) == moves
    assert all(words.count("module.pool.levels") == 1 for words in said)


class _Graph:
    def __init__(self, x):
        self.x, self.lines = x, iter("abc")


class _Cached(torch.utils.data.Dataset):
    """Keeps the samples that it made, with what no checkpoint holds."""

    def __init__(self):
        self.made = [None] * 80

    def __len__(self):
        return len(self.made)

    def __getitem__(self, index):
        self.made[index] = self.made[index] or _Graph(torch.rand(64))
        return self.made[index].x, index % 10


def test_what_many_samples_lost_is_one_sentence(tmp_path):
    found = []
    for run in (stop, fit):
        with recorded_warnings() as caught:
            run(AutoResume(tmp_path, every_n_train_steps=3), data=DataLoader(_Cached(), batch_size=4))
        found.append([str(one.message) for one in caught if "AutoResume" in str(one.message)])
    assert [len(words) for words in found] == [1, 1]
    assert all(" more. " in words[0] for words in found)


class _Fails(Net):
    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 13 and not hasattr(self, "opened"):
            raise RuntimeError("it is not open")
        self.opened = self.net.register_forward_hook(lambda *_: None)
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:AutoResume.*cannot be saved")
def test_what_was_not_restored_is_said_where_the_first_step_fails(tmp_path):
    stop(AutoResume(tmp_path), module=_Fails)
    with (
        pytest.warns(UserWarning, match=r"not restored: .*module\.opened"),
        pytest.raises(RuntimeError, match="not open"),
    ):
        fit(AutoResume(tmp_path), module=_Fails)


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
    with recorded_warnings() as caught:
        fit(AutoResume(tmp_path), module=module)
    words = [str(one.message) for one in caught if "had other values" in str(one.message)]
    assert len(words) == (not seeded)
    if not seeded:
        named = words[0].partition("run: ")[2].partition(". They")[0]
        assert set(named.replace(" and 1 more", "").replace("module.", "").replace(",", "").split()) < set(_DRAWN)
        assert "seed_everything" in words[0]


def test_drawable_values_are_of_the_kinds_that_random_numbers_make():
    module = _Drawing()
    found = unseeded_values({"module": module}, skipped=lambda owner: ("shape", "optimization"))
    own = {path.removeprefix("module.") for path in found if path.count(".") == 1}
    assert own - {"automatic_optimization"} == {*_DRAWN, "kept"}
    assert found == unseeded_values({"module": module}, skipped=lambda owner: ("shape", "optimization"))
    before = found["module.generator"]
    module.generator.random()
    assert unseeded_values({"module": module})["module.generator"] != before


class _Normalized(Net):
    def __init__(self):
        super().__init__(dropout=0.2)
        self.net.insert(1, nn.BatchNorm1d(16))


class _Dies(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == (2, 3):
            raise RuntimeError("gone")


@pytest.mark.filterwarnings("ignore:Swapping scheduler", "ignore:.*anneal_func")
def test_the_epoch_for_batch_statistics_ends_with_the_step_that_it_had(tmp_path):
    def averages():
        return StochasticWeightAveraging(0.02, swa_epoch_start=1)

    whole = fit(averages(), module=_Normalized)
    guard = {"allow_pickle": True}  # the scheduler of torch 2.6 saves a function
    with pytest.raises(RuntimeError, match="gone"):
        fit(AutoResume(tmp_path, **guard), averages(), _Dies(), module=_Normalized)
    assert same(weights(fit(AutoResume(tmp_path, **guard), averages(), module=_Normalized)), weights(whole))
