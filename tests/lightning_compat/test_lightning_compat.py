"""A probe for each private Lightning symbol; run with the oldest and the newest supported Lightning."""

import types
from unittest.mock import patch

import lightning
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.core.datamodule import LightningDataModule
from torch.utils.data import DataLoader

from lightning_tricks import _lightning_compat as compat
from lightning_tricks._callback import TrickCallback
from tests.contract.lab import BATCHES, QUIET, Net, digits, loader


class _Hyper(Net):
    def __init__(self, hidden=16):
        super().__init__(hidden=hidden)
        self.save_hyperparameters()


class _Data(LightningDataModule):
    def __init__(self, batch_size=4):
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        return DataLoader(digits(), self.hparams.batch_size)


class _Asks(lightning.pytorch.Callback):
    def __init__(self):
        self.logged_at, self.hyperparameters = [], {}

    def on_fit_start(self, trainer, pl_module):
        self.hyperparameters = compat.hyperparameters_for_loggers(trainer)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if compat.logs_at_this_step(trainer):
            self.logged_at.append(trainer.global_step)


def _fit(**arguments):
    asks = _Asks()
    trainer = Trainer(max_epochs=1, callbacks=[asks], **QUIET, **arguments)
    trainer.fit(_Hyper(), _Data())
    return asks


def test_logs_at_this_step():
    assert _fit(log_every_n_steps=3).logged_at == [2, 5, 8]
    assert _fit(log_every_n_steps=0).logged_at == []
    # after the batch that steps, not after every batch
    assert _fit(log_every_n_steps=2, accumulate_grad_batches=2).logged_at == [1, 3]


def test_hyperparameters_for_loggers():
    assert _fit().hyperparameters == {"hidden": 16, "batch_size": 4}


def test_replace_hyperparameter():
    module = _Hyper()
    compat.replace_hyperparameter(module, "hidden", {"plain": 1})
    assert module.hparams["hidden"] == module.hparams_initial["hidden"] == {"plain": 1}


@pytest.mark.parametrize(("version", "expected"), [("2.5.0", True), ("2.6.0.post0", True), ("2.6.1", False)])
def test_repeats_worker_streams(monkeypatch, version, expected):
    monkeypatch.setattr(lightning, "__version__", version)
    assert compat.repeats_worker_streams() is expected


@pytest.mark.parametrize(
    ("call", "trick"),
    [
        (lambda unknown: compat.logs_at_this_step(unknown), "logging at the logger's interval"),
        (lambda unknown: compat.hyperparameters_for_loggers(unknown), "SeedEverything's record"),
        (lambda unknown: compat.replace_hyperparameter(unknown, "x", 1), "TricksMixin.save_hyperparameters"),
        (
            lambda unknown: compat.replace_train_loaders(unknown, None, list),
            "an ensemble whose members see the samples",
        ),
        (lambda unknown: compat.shares_out_samples(unknown), "an ensemble on several ranks"),
    ],
)
def test_an_unknown_lightning_is_named(call, trick):
    with pytest.raises(RuntimeError, match=f"{trick}.* does not work with lightning {lightning.__version__}.*install"):
        call(types.SimpleNamespace(lightning_module=object()))


def test_peak_flops_of():
    assert compat.peak_flops_of(Trainer(**QUIET)) is None, "Lightning's table has no CPU"
    with patch("lightning.fabric.utilities.throughput.get_available_flops", side_effect=lambda device, dtype: (dtype,)):
        for precision, dtype in (("32-true", torch.float32), ("bf16-mixed", torch.bfloat16)):
            assert compat.peak_flops_of(Trainer(**QUIET, precision=precision)) == (dtype,)


def test_forget_module_flops():
    monitor, net = ThroughputMonitor(lambda batch: 4, window_size=2), Net()
    net.flops_per_batch = 7
    Trainer(max_epochs=1, callbacks=[monitor], **QUIET).fit(net, loader())
    compat.forget_module_flops(monitor)
    with pytest.warns(UserWarning, match="flops_per_batch"):
        Trainer(max_epochs=1, callbacks=[monitor], **QUIET).fit(Net(), loader())


def test_module_from_checkpoint():
    source = Net(hidden=8)
    checkpoint = {
        "pytorch-lightning_version": lightning.__version__,
        "state_dict": source.state_dict(),
        "hyper_parameters": {"hidden": 8},
    }
    made = compat.module_from_checkpoint(Net, dict(checkpoint), None, {"dropout": 0.5})
    assert made.shape == (8, 0.5)
    assert all(torch.equal(value, made.state_dict()[name]) for name, value in source.state_dict().items())
    empty = types.ModuleType("lightning.pytorch.core.saving")
    with (
        patch.dict("sys.modules", {empty.__name__: empty}),
        pytest.raises(RuntimeError, match="load_from_checkpoint does"),
    ):
        compat.module_from_checkpoint(Net, checkpoint, None, {})


class _LogsAtTheEnd(lightning.pytorch.Callback):
    def __init__(self):
        self.by_module = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.by_module.append(compat.names_logged_by_module(trainer, "Trick"))
        compat.log_epoch_value(trainer, "Trick", "value", torch.tensor(float(trainer.current_epoch)))
        compat.log_epoch_value(trainer, "Trick", "both", torch.tensor(1.0))


class _LogsToo(Net):
    def training_step(self, batch, batch_idx):
        self.log("own", 3.0, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.log("both", 2.0)


def test_log_epoch_value_and_names_logged_by_module():
    logs = _LogsAtTheEnd()
    trainer = Trainer(max_epochs=3, callbacks=[logs], **QUIET)
    trainer.fit(_LogsToo(), loader())
    assert trainer.callback_metrics == {"own": 3.0, "value": 2.0, "both": 2.0}  # the module comes last
    assert logs.by_module == [{"own"}] * 3


def test_evaluation_loaders():
    seen = {}

    class Look(lightning.pytorch.Callback):
        def on_validation_start(self, trainer, pl_module):
            seen["val"] = [item.batch_size for item in compat.evaluation_loaders(trainer)]

        def on_test_start(self, trainer, pl_module):
            seen["test"] = [item.batch_size for item in compat.evaluation_loaders(trainer)]

    class Evaluated(Net):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            pass

        test_step = validation_step

    trainer = Trainer(max_epochs=1, callbacks=[Look()], **QUIET)
    trainer.fit(Evaluated(), loader(), [DataLoader(digits(), 2), DataLoader(digits(), 3)])
    assert seen["val"] == [2, 3]
    trainer.validate(Evaluated(), DataLoader(digits(), 5), verbose=False)
    assert seen["val"] == [5]
    trainer.test(Evaluated(), DataLoader(digits(), 6), verbose=False)
    assert seen["test"] == [6]


def test_hooks_that_would_do_nothing_are_passed_over():
    class Counts(TrickCallback):
        count = 0

        def on_after_backward(self, trainer, pl_module):
            super().on_after_backward(trainer, pl_module)
            self.count += 1

    counts = Counts()
    Trainer(max_epochs=1, callbacks=[counts], **QUIET).fit(Net(), loader())
    assert counts.count == BATCHES
    assert counts.on_before_backward is None
    assert callable(type(counts).on_before_backward)


class _Replaces(Net):
    def setup(self, stage):
        compat.replace_train_loaders(self.trainer, self, self.replaced)

    def replaced(self, loaders):
        self.given.append(loaders)
        return DataLoader(loaders.dataset, batch_size=16)


@pytest.mark.parametrize("by_module", [False, True])
def test_replace_train_loaders(by_module):
    net, given = _Replaces(), loader()
    net.given = []
    if by_module:
        net.train_dataloader = lambda: given
    trainer = Trainer(max_epochs=2, reload_dataloaders_every_n_epochs=1, **QUIET)
    trainer.fit(net, *([] if by_module else [given]))
    assert net.given == [given] * 2
    assert trainer.global_step == 6
    trainer.fit_loop.max_epochs = 3
    trainer.fit(net, *([] if by_module else [given]))
    assert net.given == [given] * 3, "once in each epoch, also in a second fit of the Trainer"
    trainer.fit_loop.max_epochs = 4
    trainer.fit(Net(), given)
    assert net.given == [given] * 3, "another module has its own data"


@pytest.mark.parametrize("shares_out", [True, False])
def test_shares_out_samples(shares_out):
    assert compat.shares_out_samples(Trainer(use_distributed_sampler=shares_out, **QUIET)) == shares_out
