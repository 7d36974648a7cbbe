"""A probe for each private Lightning symbol; run with the oldest and the newest supported Lightning."""

import itertools
import signal
import types
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import patch

import lightning
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ThroughputMonitor
from lightning.pytorch.core.datamodule import LightningDataModule
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.compile import from_compiled
from torch.utils.data import DataLoader

from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat import (
    callbacks,
    checkpoints,
    ddp,
    fit,
    fit_observer,
    hyperparameters,
    loaders,
    logged_values,
    loggers,
    results,
)
from lightning_tricks._lightning_compat.trainer import is_compiled_by_lightning, model_averager
from tests.small import BATCHES, QUIET, EvaluatedNet, Hooks, Net, cases, digits, loader
from tests.small import fit as train


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


@cases(
    "options, steps",
    ({"log_every_n_steps": 3}, [2, 5, 8]),
    ({"log_every_n_steps": 0}, []),
    # after the batch that steps, not after every batch
    ({"log_every_n_steps": 2, "accumulate_grad_batches": 2}, [1, 3]),
)
def test_logs_at_this_step(options, steps):
    def ask(trainer, *_):
        seen.extend([trainer.global_step] * logged_values.logs_at_this_step(trainer))

    seen = []
    train(None, Hooks(on_before_optimizer_step=ask), **options)
    assert seen == steps


def test_hyperparameters_for_loggers():
    seen = []
    asks = Hooks(on_fit_start=lambda trainer, _: seen.append(hyperparameters.hyperparameters_for_loggers(trainer)))
    Trainer(max_epochs=1, callbacks=[asks], **QUIET).fit(_Hyper(), _Data())
    assert seen == [{"hidden": 16, "batch_size": 4}]


def test_replace_hyperparameter():
    module = _Hyper()
    hyperparameters.replace_hyperparameter(module, "hidden", {"plain": 1})
    assert module.hparams["hidden"] == module.hparams_initial["hidden"] == {"plain": 1}


@pytest.mark.parametrize(("version", "expected"), [("2.5.0", True), ("2.6.0.post0", True), ("2.6.1", False)])
def test_repeats_worker_seeds(monkeypatch, version, expected):
    monkeypatch.setattr(lightning, "__version__", version)
    assert loaders.repeats_worker_seeds() is expected


@cases(
    "call, trick",
    (lambda unknown: logged_values.logs_at_this_step(unknown), "logging at the logger's interval"),
    (lambda unknown: logged_values.log_step_values(unknown, "Trick", {}), "logging by Trick"),
    (lambda unknown: logged_values.observe_logged_values(unknown, print).__enter__(), "RunReport"),
    (lambda unknown: hyperparameters.hyperparameters_for_loggers(unknown), "SeedEverything's record"),
    (lambda unknown: hyperparameters.replace_hyperparameter(unknown, "x", 1), "TricksMixin.save_hyperparameters"),
    (
        lambda unknown: loaders.replaced_train_loaders(unknown, None, list).__enter__(),
        "an ensemble whose members see the samples",
    ),
    (lambda unknown: loaders.predict_loaders_prepared(unknown, print).__enter__(), "PredictionWriter"),
    (lambda unknown: loaders.uses_distributed_sampler(unknown), "an ensemble on multiple ranks"),
    (lambda unknown: ddp.rewrap_ddp(unknown), "a callback or an ensemble that changes which parameters train"),
    (lambda unknown: ddp.syncs_batchnorm(unknown), "an ensemble with stacked BatchNorm layers"),
    (lambda unknown: loaders.request_train_loaders(unknown), "an ensemble that looks at the data before a fit"),
    (
        lambda unknown: loaders.changing_train_loader(unknown, None, list, bool).__enter__(),
        "an ensemble that is trained in folds",
    ),
)
def test_an_unknown_lightning_is_named(call, trick):
    with pytest.raises(RuntimeError, match=f"{trick}.* does not work with lightning {lightning.__version__}.*install"):
        call(types.SimpleNamespace(lightning_module=object()))


def test_changing_train_loader():
    """The number of batches changes in mid run; other modules, and later fits, have their own data."""
    lengths, made = [], []
    counts = Hooks(on_train_epoch_start=lambda trainer, _: lengths.append(trainer.num_training_batches))

    class Changing(Net):
        def setup(self, stage):
            assert loaders.request_train_loaders(self.trainer) is given
            epoch = self.trainer.fit_loop.epoch_progress.current

            def make():
                made.append(epoch.processed)
                return DataLoader(digits(), 4 * (1 + epoch.processed // 2))

            self.change = loaders.changing_train_loader(
                self.trainer, self, make, lambda: epoch.processed // 2 != made[-1] // 2
            )
            self.change.__enter__()

        def teardown(self, stage):
            self.change.__exit__(None, None, None)

    given = loader()
    trainer = train(Changing(), counts, data=given, max_epochs=4)
    assert (lengths, made) == ([10, 10, 5, 5], [0, 2])
    assert not {"dataloader", "setup_data"} & {*vars(trainer.fit_loop), *vars(trainer.fit_loop._data_source)}
    train(Net(), counts, data=given)
    assert lengths[4:] == [10]


def test_peak_flops_of():
    assert callbacks.device_peak_flops(Trainer(**QUIET)) is None, "Lightning's table has no CPU"
    with patch("lightning.fabric.utilities.throughput.get_available_flops", side_effect=lambda device, dtype: (dtype,)):
        for precision, dtype in (("32-true", torch.float32), ("bf16-mixed", torch.bfloat16)):
            assert callbacks.device_peak_flops(Trainer(**QUIET, precision=precision)) == (dtype,)


def test_forget_module_flops():
    monitor, net = ThroughputMonitor(lambda batch: 4, window_size=2), Net()
    net.flops_per_batch = 7
    train(net, monitor)
    callbacks.reset_module_flops(monitor)
    with pytest.warns(UserWarning, match="flops_per_batch"):
        train(Net(), monitor)


class _LogsToo(Net):
    def training_step(self, batch, batch_idx):
        self.log("own", 3.0, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.log("both", 2.0)


class _LogsInAllStages(EvaluatedNet):
    """Logs in steps and epochs of training, and in single batches of validation."""

    def training_step(self, batch, batch_idx):
        self.log("own", float(batch_idx), on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("val", 2.0, on_step=True, on_epoch=True)


@pytest.mark.parametrize("logger", [False, True])
def test_observe_logged_values(tmp_path, logger):
    """What goes to loggers is seen, with a logger and without; not what is logged in sanity checking."""
    seen, observed = [], ExitStack()

    def observe(trainer, _):
        observed.enter_context(logged_values.observe_logged_values(trainer, lambda values: seen.append(dict(values))))

    observes = Hooks(on_train_start=observe, teardown=lambda *_, **__: observed.close())
    options = {"log_every_n_steps": 5, "limit_val_batches": 2, "logger": CSVLogger(tmp_path) if logger else False}
    trainer = train(_LogsInAllStages(), observes, **options)
    assert [{key: float(value) for key, value in values.items()} for values in seen] == [
        {"own_step": 4.0},
        {"own_step": 9.0},
        {"val_epoch": 2.0},
        {"own_epoch": 4.5},
    ]
    assert "log_metrics" not in vars(trainer._logger_connector)


class _LogsOfLoaders(Net):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("each", 1.0, on_step=True, on_epoch=True)
        self.log(f"own {dataloader_idx}", 1.0, add_dataloader_idx=False)


def test_log_epoch_value_and_keys_logged_by_others():
    by_others, ever, suffixed = [], [], []

    def log(trainer, _):
        by_others.append(logged_values.keys_logged_by_others(trainer, "Trick"))
        ever.append(logged_values.keys_logged_by_others(trainer, "Trick", include_reset=True).keys())
        logged_values.drop_reset_values(trainer, "Trick", {"both"})
        logged_values.log_epoch_value(trainer, "Trick", "value", torch.tensor(float(trainer.current_epoch)))
        logged_values.log_epoch_value(trainer, "Trick", "both", torch.tensor(1.0))

    def look(trainer, _):
        suffixed.append(logged_values.keys_logged_by_others(trainer, "Trick"))

    trainer = train(_LogsToo(), Hooks(on_train_epoch_end=log, on_validation_epoch_end=look), max_epochs=3)
    assert trainer.callback_metrics == {"own": 3.0, "value": 2.0, "both": 2.0}  # the module comes last
    assert by_others == [{"own": "training_step"}] * 3
    assert ever == [{"own"}, {"own", "both"}, {"own", "both"}]
    assert trainer.fit_loop.epoch_loop._results.keys() >= {"on_train_epoch_end.both", "Trick.both"}
    trainer.validate(_LogsOfLoaders(), [loader()] * 2, verbose=False)
    suffixes = [f"{name}/dataloader_idx_{index}" for index in (0, 1) for name in ("each", "each_step", "each_epoch")]
    assert suffixed == [dict.fromkeys([*suffixes, "own 0", "own 1"], "validation_step")]


def test_evaluation_loaders():
    def look(trainer, _):
        sizes = [item.batch_size for item in loaders.evaluation_loaders(trainer)]
        seen.append((sizes, loaders.evaluation_loader_names(trainer)))

    class Evaluated(Net):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            pass

        test_step = validation_step

    seen = []
    trainer = Trainer(max_epochs=1, callbacks=[Hooks(on_validation_start=look, on_test_start=look)], **QUIET)
    trainer.fit(Evaluated(), loader(), [DataLoader(digits(), 2), DataLoader(digits(), 3)])
    trainer.validate(Evaluated(), DataLoader(digits(), 5), verbose=False)
    trainer.test(Evaluated(), DataLoader(digits(), 6), verbose=False)
    trainer.validate(Evaluated(), {"easy": loader(), "hard": loader()}, verbose=False)
    assert seen == [([2, 3], []), ([5], []), ([6], []), ([4, 4], ["easy", "hard"])]


def test_predict_loaders_prepared_and_batch_sampler_replaced():
    class OfSeveralLoaders(EvaluatedNet):
        def predict_step(self, batch, batch_idx, dataloader_idx=0):
            return len(batch[0])

    class Prepares(lightning.pytorch.Callback):
        def setup(self, trainer, pl_module, stage):
            self.prepared = loaders.predict_loaders_prepared(trainer, self.prepare)
            self.prepared.__enter__()

        def prepare(self, found, limits):
            self.found = [*found], limits
            replaced = [loaders.batch_sampler_replaced(part, lambda sampler: [[0, 1, 2]]) for part in found.values()]
            self.replaced = [context.__enter__() for context in replaced]
            self.contexts = [self.prepared, *replaced]

        def teardown(self, trainer, pl_module, stage):
            self.samplers = [
                getattr(part, "batch_sampler", None) for part in trainer.predict_loop._combined_loader.flattened
            ]
            for context in self.contexts:
                context.__exit__(None, None, None)

    prepares = Prepares()
    trainer = Trainer(callbacks=[prepares], limit_predict_batches=2, **QUIET)
    returned = trainer.predict(OfSeveralLoaders(), {"a": loader(), "b": DataLoader(digits(), batch_size=None)})
    assert prepares.found[0] == ["a", "b"]
    assert prepares.replaced == [[[0, 1, 2]], None]
    assert returned[0] == [3]
    assert [len(sampler) for sampler in prepares.samplers if sampler is not None] == [BATCHES], "it is as it was"


@pytest.mark.parametrize(("mode", "expected"), [("min_size", True), ("max_size", False), (None, False)])
def test_ends_with_shortest_loader(mode, expected):
    class OfTwo(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch["long"], batch_idx)

    found, data = [], {"long": loader(), "short": DataLoader(digits(), 10)}
    look = Hooks(on_train_start=lambda trainer, _: found.append(loaders.ends_with_shortest_loader(trainer)))
    train(OfTwo(), look, data=data if mode is None else CombinedLoader(data, mode), limit_train_batches=2)
    assert found == [expected]


def test_hooks_that_would_do_nothing_are_passed_over():
    class Counts(TrickCallback):
        count = 0

        def on_after_backward(self, trainer, pl_module):
            super().on_after_backward(trainer, pl_module)
            self.count += 1

    counts = Counts()
    train(Net(), counts)
    assert counts.count == BATCHES
    assert counts.on_before_backward is None
    assert callable(type(counts).on_before_backward)


class _ReplacesLoaders(Net):
    def setup(self, stage):
        self.replacement = loaders.replaced_train_loaders(self.trainer, self, self.replaced)
        self.replacement.__enter__()

    def teardown(self, stage):
        self.replacement.__exit__(None, None, None)
        assert "dataloader" not in vars(self.trainer.fit_loop._data_source)

    def replaced(self, loaders):
        self.given.append(loaders)
        return DataLoader(loaders.dataset, batch_size=16)


@pytest.mark.parametrize("by_module", [False, True])
def test_replaced_train_loaders(by_module):
    net, given = _ReplacesLoaders(), loader()
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
    assert loaders.uses_distributed_sampler(Trainer(use_distributed_sampler=shares_out, **QUIET)) == shares_out


class _Freezes(Net):
    """Trains its first layer in one epoch, and its last one in the other."""

    def setup(self, stage):
        self.train_layer(0)

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.train_layer(-1)
            ddp.rewrap_ddp(self.trainer)

    def train_layer(self, index):
        layers = [layer for layer in self.net.modules() if isinstance(layer, torch.nn.Linear)]
        for layer in layers:
            layer.requires_grad_(layer is layers[index])

    def on_before_optimizer_step(self, optimizer):
        gradients = torch.cat([p.grad.flatten() for p in self.parameters() if p.requires_grad])
        assert gradients.any()
        assert torch.equal(self.trainer.strategy.broadcast(gradients), gradients), "DDP averages them"


@pytest.mark.parametrize("options", [{}, {"strategy": "ddp_fork", "devices": 2}])
def test_rewrap_ddp(options):
    net = _Freezes()
    before = [parameter.detach().clone() for parameter in net.parameters()]
    train(net, max_epochs=2, **options)
    assert not any(map(torch.equal, before, net.parameters()))


@cases(
    "options, stops",
    ({}, False),
    ({"strategy": "ddp_fork", "devices": 2}, True),
    ({"strategy": "ddp_fork", "devices": 2, "accumulate_grad_batches": 100, "limit_train_batches": 3}, True),
    ({"strategy": "ddp_fork_find_unused_parameters_true", "devices": 2}, False),
)
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
def test_stops_at_unused_parameters(options, stops, tmp_path):
    def ask(trainer, *_):
        assert (ddp.ddp_wrapper(trainer) is None) == (trainer.world_size == 1)
        (tmp_path / f"{trainer.global_rank}").write_text(str(ddp.stops_at_unused_parameters(trainer)))

    train(Net(), Hooks(on_before_backward=ask), **options)
    assert (tmp_path / "0").read_text() == str(stops)


@cases(
    "options, syncs",
    ({"strategy": "ddp", "sync_batchnorm": True}, True),
    ({"strategy": "ddp"}, False),
    ({"sync_batchnorm": True}, False),  # of one rank
)
def test_syncs_batchnorm(options, syncs):
    assert ddp.syncs_batchnorm(Trainer(**{**QUIET, **options})) is syncs


def test_value_in_a_checkpoint(tmp_path):
    torch.save({"x": 3}, tmp_path / "file.ckpt")
    assert checkpoints.value_in_checkpoint(tmp_path / "file.ckpt", "x") == 3
    assert checkpoints.value_in_checkpoint(tmp_path / "file.ckpt", "y") is None
    assert checkpoints.value_in_checkpoint(tmp_path / "missing.ckpt", "x") is None
    torch.save({"x": 3, "hyper": _Data()}, tmp_path / "objects.ckpt")
    assert checkpoints.value_in_checkpoint(tmp_path / "objects.ckpt", "x") is None
    folder = tmp_path / "shards.ckpt"
    folder.mkdir()
    torch.save({"x": 4}, folder / "meta.pt")
    assert checkpoints.value_in_checkpoint(folder, "x") == 4


class _Observer(fit_observer.FitObserver):
    def __init__(self):
        self.calls, self.given = [], {}
        for name in (
            *("on_optimizers_created", "on_signals_registered", "on_train_loaders_ready"),
            *("on_validation_loaders_ready", "is_resuming", "before_epoch_iterators"),
            *("before_first_batch", "after_batch"),
        ):
            setattr(self, name, partial(self.note, name))

    def note(self, name, *given):
        self.calls.append(name)
        self.given[name] = given


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_observe_fit():
    for validates in (False, True):
        trainer, observer = Trainer(max_epochs=2, **QUIET), _Observer()
        with fit_observer.observe_fit(trainer, observer):
            trainer.fit(EvaluatedNet(), loader(), *[loader()] * validates)
        epoch = ["is_resuming", "before_epoch_iterators", "before_first_batch", *["after_batch"] * BATCHES]
        ready = "on_validation_loaders_ready"
        began = ["on_optimizers_created", "on_signals_registered", "on_train_loaders_ready"]
        assert [call for call in observer.calls if call != ready] == [*began, *epoch, *epoch]
        assert observer.calls.count(ready) == validates
        assert not validates or len(observer.given[ready][0]) == 1
        (loaders_ready, all_sized), (finish_batch,) = map(observer.given.get, (began[-1], "before_first_batch"))
        assert ([type(one) for one in loaders_ready], all_sized) == ([DataLoader], True)
        assert callable(finish_batch)
        trainer.fit_loop.max_epochs = 3
        before = len(observer.calls)
        trainer.fit(EvaluatedNet(), loader(), *[loader()] * validates)
        assert len(observer.calls) == before


def test_capture_and_restore_loop_state():
    class Logs(Net):
        def training_step(self, batch, batch_idx):
            outputs = super().training_step(batch, batch_idx)
            self.log("loss", outputs["loss"], on_step=True, on_epoch=True)
            if batch_idx == 0:
                self.log("first", 1.0 + self.current_epoch, reduce_fx="max")
            return outputs

    def ask(trainer, *_):
        """For the place after each batch's last hook."""
        if trainer.global_step > 0:
            (iterator,), ahead = loaders.train_iterators(trainer)
            state = results.capture_loop_state(trainer)
            places.append((iterator._num_yielded, ahead, fit.num_batches_done(trainer), state))

    places = []
    trainer = train(Logs(), Hooks(on_train_batch_start=ask))
    assert [place[:3] for place in places] == [(count, 0, count) for count in range(2, BATCHES + 1)]
    state = places[-1][-1]
    assert [item["key"] for item in state["results"]] == ["training_step.loss", "training_step.first"]
    other = Trainer(max_epochs=1, **QUIET)
    results.restore_loop_state(other, state)
    again = results.capture_loop_state(other)
    assert again["logged"].keys() == state["logged"].keys()
    for left, right in zip(again["results"], state["results"], strict=True):
        assert left["value"] == right["value"]
        assert left["meta"] == right["meta"]
    assert fit.is_at_step_boundary(trainer)
    assert fit.is_last_batch(trainer)


def test_override_resume_checkpoint(tmp_path):
    trainer = train()
    checkpoint = fit.dump_checkpoint(trainer)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    assert checkpoint.keys() == torch.load(tmp_path / "saved.ckpt", weights_only=False).keys()
    given = []
    for choice in (None, ("memory", checkpoint)):
        other, module = Trainer(max_epochs=1, **QUIET), Net()
        with fit.override_resume_checkpoint(other, lambda path, choice=choice: given.append(path) or choice):
            other.fit(module, loader(), ckpt_path=tmp_path / "saved.ckpt")
            assert "resume_start" not in vars(other._checkpoint_connector), "it holds for one run"
        assert other.global_step == BATCHES
        assert torch.equal(module.net[0].weight, checkpoint["state_dict"]["net.0.weight"])
        assert "resume_start" not in vars(other._checkpoint_connector)
    assert given == [tmp_path / "saved.ckpt"] * 2
    with fit.override_resume_checkpoint(other, lambda path: pytest.fail("the context was left")):
        pass
    other.fit_loop.max_epochs = 2
    other.fit(Net(), loader())


def test_checkpoint_contents_changed(tmp_path):
    trainer, module, restored = Trainer(max_epochs=1, **QUIET), Net(), []
    path = tmp_path / "saved.ckpt"

    def dumped(checkpoint):
        assert checkpoint["optimizer_states"]
        checkpoint["state_dict"]["net.4.bias"] = torch.zeros(10)

    with checkpoints.checkpoint_contents_changed(trainer, dumped, restored.append):
        trainer.fit(module, loader())
        trainer.save_checkpoint(path)
        assert restored == []
        trainer.fit(module, loader(), ckpt_path=path)
    assert not torch.load(path, weights_only=True)["state_dict"]["net.4.bias"].any()
    assert [list(checkpoint) for checkpoint in restored] == [list(torch.load(path, weights_only=True))]
    assert not {"dump_checkpoint", "restore_model"} & vars(trainer._checkpoint_connector).keys()


def test_given_train_loaders_and_the_number_of_their_batches():
    class Looks(fit_observer.FitObserver):
        def on_optimizers_created(self):
            seen.append(loaders.given_train_loaders(trainer))

        def before_epoch_iterators(self):
            loaders.set_num_batches_done(trainer, 2, at_end)

    class Own(Net):
        def train_dataloader(self):
            return plain

    class OfTwo(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch["a"] if isinstance(batch, dict) else batch[0], batch_idx)

    plain, other = loader(), loader()
    given = ((plain,), ({"a": plain, "b": other},), (CombinedLoader([plain, other]),), ())
    for at_end, data in itertools.product((False, True), given):
        seen: list = []
        trainer = Trainer(max_epochs=1, **QUIET)
        net = Own() if not data else Net() if data == given[0] else OfTwo()
        with fit_observer.observe_fit(trainer, Looks()):
            trainer.fit(net, *data)
        expected = [] if not data else [plain] if data == given[0] else [plain, other]
        assert [id(one) for one in seen[0]] == [id(one) for one in expected]
        assert trainer.global_step == (0 if at_end else BATCHES - 2)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_a_callback_is_told_of_a_fit_before_the_loggers_begin(tmp_path):
    class Notes(fit.ToldBeforeLoggers, lightning.pytorch.Callback):
        def before_loggers_begin(self, trainer, module):
            begun.append((trainer.lightning_module is module, logger._experiment is not None))

        def setup(self, trainer, pl_module, stage):
            begun.append(stage)

    begun, module, notes = [], EvaluatedNet(), Notes()
    for logger in (CSVLogger(tmp_path), CSVLogger(tmp_path)):
        trainer = Trainer(max_epochs=1, log_every_n_steps=1, callbacks=[notes], **{**QUIET, "logger": logger})
        if not begun:
            trainer.validate(module, loader(), verbose=False)
        else:
            trainer.fit(module, loader())
    assert begun == ["validate", (True, False), "fit"]


def test_close_workers():
    def end(trainer, *_):
        (iterator,), _ = loaders.train_iterators(trainer)
        workers.extend(iterator._workers)
        del iterator
        loaders.close_workers(trainer)
        assert not any(worker.is_alive() for worker in workers)
        raise KeyboardInterrupt

    workers = []
    with pytest.raises(SystemExit):
        train(Net(), Hooks(on_train_batch_end=end), data=DataLoader(digits(), 4, num_workers=2))
    assert len(workers) == 2


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_skip_sanity_check_and_clear_restart_flags():
    def start(trainer, _):
        fit.clear_restart_flags(trainer)
        assert not trainer.fit_loop.epoch_loop.val_loop.restarting

    class Skips(fit_observer.FitObserver):
        def on_signals_registered(self):
            fit.skip_sanity_check(trainer)

    for skips in (False, True):
        checks = []
        counts = Hooks(on_sanity_check_start=lambda *_, checks=checks: checks.append(1), on_train_start=start)
        trainer = Trainer(max_epochs=1, callbacks=[counts], **{**QUIET, "num_sanity_val_steps": 2})
        with fit_observer.observe_fit(trainer, Skips()) if skips else nullcontext():
            trainer.fit(EvaluatedNet(), loader(), loader())
        assert len(checks) == (not skips)


def test_call_after_teardown():
    def stop(trainer, *_):
        assert signal.getsignal(signal.SIGTERM) != before
        fit.call_after_teardown(trainer, lambda: calls.append(signal.getsignal(signal.SIGTERM)))
        raise ZeroDivisionError

    calls, before = [], signal.getsignal(signal.SIGTERM)
    trainer = Trainer(max_epochs=1, callbacks=[hooks := Hooks(on_train_batch_end=stop)], **QUIET)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Net(), loader())
    del hooks.on_train_batch_end
    trainer.fit(Net(), loader())
    assert calls == [before], "once"


def test_slurm_requeue_signal(monkeypatch):
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    assert fit.slurm_requeue_signal(Trainer(**QUIET)) is None
    for name in ("NTASKS", "JOB_ID"):
        monkeypatch.setenv(f"SLURM_{name}", "1")
    for name in ("JOB_NAME", "PROCID", "LOCALID", "NODEID"):
        monkeypatch.setenv(f"SLURM_{name}", "0")
    asked = [
        fit.slurm_requeue_signal(Trainer(plugins=[SLURMEnvironment(**options)], **QUIET))
        for options in ({}, {"auto_requeue": False}, {"requeue_signal": signal.SIGUSR2})
    ]
    assert asked == ["SIGUSR1", None, "SIGUSR2"]


def test_restarted_loaders():
    def ask(trainer, module, outputs, batch, batch_idx):
        seen.append(loaders.restarted_loaders(trainer))
        if batch_idx == 3:
            loaders.mark_restarted_loaders(trainer, [True, True])
            assert loaders.restarted_loaders(trainer) == [True, True]

    class Takes(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch[0], batch_idx)

    seen = []
    given = [DataLoader(digits(), 4), DataLoader(digits(8), 4)]
    train(Takes(), Hooks(on_train_batch_end=ask), data=given, limit_train_batches=4)
    assert seen == [[False, False], [False, False], [False, True], [False, True]]


class _Wrapping(TorchCheckpointIO):
    def __init__(self, inner):
        self.inner = inner


def test_a_checkpoint_io_is_inserted_for_a_while():
    inner = TorchCheckpointIO()
    strategy = Trainer(plugins=[AsyncCheckpointIO(inner)], **QUIET).strategy
    outer, durable = strategy.checkpoint_io, TorchCheckpointIO()
    assert checkpoints.checkpoint_ios(strategy) == [outer, inner]
    with checkpoints.checkpoint_io_inserted(strategy, lambda replaced: durable, innermost=True):
        assert checkpoints.checkpoint_ios(strategy) == [outer, durable]
    assert checkpoints.checkpoint_ios(strategy) == [outer, inner]

    def fails():
        with checkpoints.checkpoint_io_inserted(strategy, _Wrapping):
            wrapping, *wrapped = checkpoints.checkpoint_ios(strategy)
            assert isinstance(wrapping, _Wrapping)
            assert wrapped == [outer, inner]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert checkpoints.checkpoint_ios(strategy) == [outer, inner]

    (created,) = checkpoints.checkpoint_ios(Trainer(**QUIET).strategy)
    assert type(created) is TorchCheckpointIO


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_checkpoint_ios_are_taken_out_in_any_order(order):
    strategy = Trainer(**QUIET).strategy
    own = strategy.checkpoint_io
    contexts = [
        checkpoints.checkpoint_io_inserted(strategy, _Wrapping),
        checkpoints.checkpoint_io_inserted(strategy, lambda replaced: TorchCheckpointIO(), innermost=True),
        checkpoints.checkpoint_io_inserted(strategy, _Wrapping),
    ]
    for context in contexts:
        context.__enter__()
    assert len(checkpoints.checkpoint_ios(strategy)) == 3
    for number in order:
        contexts[number].__exit__(None, None, None)
    assert checkpoints.checkpoint_ios(strategy) == [own]


def test_a_checkpoint_io_that_somebody_took_out_is_left_alone():
    strategy = Trainer(**QUIET).strategy
    with checkpoints.checkpoint_io_inserted(strategy, _Wrapping):
        other = strategy.checkpoint_io = TorchCheckpointIO()
    assert strategy.checkpoint_io is other


def test_a_csv_logger_that_resumes_deletes_nothing(tmp_path):
    first = CSVLogger(tmp_path, version=2)
    first.log_metrics({"a": 1.0}, 0)
    first.save()
    again = CSVLogger(tmp_path)
    assert (loggers.logger_kind(again), loggers.logger_version(again)) == ("csv", 3)
    assert not loggers.is_logger_started(again)
    assert loggers.set_logger_version(again, 2)
    assert loggers.log_dir_for_version(again, 3).name == "version_3"
    path = loggers.open_csv_logger(again)
    assert loggers.is_logger_started(again)
    again.log_metrics({"a": 5.0}, 7)
    loggers.discard_unwritten_rows(again)
    again.log_metrics({"a": 2.0}, 1)
    again.save()
    assert path.read_text().split() == ["a,step", "1.0,0", "2.0,1"]


def test_a_tensorboard_logger_opens_what_was_closed(tmp_path):
    logger = TensorBoardLogger(tmp_path, version=1)
    logger.log_metrics({"a": 1.0}, 0)
    loggers.close_tensorboard_logger(logger)
    assert loggers.set_logger_version(logger, 0)
    loggers.close_tensorboard_logger(logger)
    logger.log_metrics({"a": 1.0}, 0)
    logger.save()
    assert len(list(loggers.log_dir_for_version(logger, 0).glob("*tfevents*"))) == 1
    assert len(list(loggers.log_dir_for_version(logger, 1).glob("*tfevents*"))) == 1


def test_a_muted_logger(tmp_path):
    logger = CSVLogger(tmp_path / "logs")
    with loggers.muted_logger(logger):
        logger.log_metrics({"a": 1.0}, 0)
        logger.finalize("failed")
        assert not (tmp_path / "logs").exists()
    logger.log_metrics({"a": 1.0}, 0)
    logger.save()
    assert (Path(logger.log_dir) / "metrics.csv").exists()


def test_the_memory_of_a_model_checkpoint(tmp_path):
    callback, other = ModelCheckpoint(tmp_path, every_n_train_steps=4), ModelCheckpoint(tmp_path)
    train(Net(), callback, enable_checkpointing=True)
    memory = checkpoints.checkpoint_callback_state(callback)
    checkpoints.restore_checkpoint_callback_state(other, memory)
    assert checkpoints.checkpoint_callback_state(other) == memory
    assert memory["_last_global_step_saved"] == 8


class _LogsTwice(Net):
    def training_step(self, batch, batch_idx):
        self.log("before", 1.0)
        super().training_step(batch, batch_idx)
        self.log("after", 1.0)


@pytest.mark.parametrize("quick", [True, False])
def test_log_step_values_drops_nothing(quick):
    def log(trainer, module, _):
        """In the middle of a training step, in the way that Lightning knows or in ours."""
        if quick:
            logged_values.log_step_values(trainer, "Trick", {"callback": torch.tensor(1.0)})
        else:
            module.log("callback", 1.0)

    trainer = train(_LogsTwice("manual"), Hooks(on_before_optimizer_step=log), limit_train_batches=1)
    assert {*trainer.callback_metrics} == {"after", "callback", *(["before"] if quick else [])}


class _LogsItself(EvaluatedNet):
    def training_step(self, batch, batch_idx):
        outputs = super().training_step(batch, batch_idx)
        self.log("own", outputs["loss"].detach(), on_step=True, on_epoch=True)
        return outputs


@pytest.mark.parametrize("accumulate", [1, 4])
def test_log_step_values_logs_what_log_dict_logs(tmp_path, accumulate):
    def log(trainer, module, _):
        values = {"a/step": torch.tensor(float(trainer.global_step)), "a/other": torch.tensor(1.5)}
        if quick:
            logged_values.log_step_values(trainer, "Trick", values)
        else:
            module.log_dict(values, batch_size=1)
        module.log("a/mean", float(trainer.global_step), on_step=False, on_epoch=True, batch_size=1)
        see(trainer)

    def see(trainer, *_):
        seen.append({name: value.item() for name, value in trainer.callback_metrics.items()})

    runs, logs = [], Hooks(on_before_optimizer_step=log, on_train_epoch_end=see)
    for quick in (True, False):
        seen, folder = [], tmp_path / str(quick)
        torch.manual_seed(0)
        options = {"logger": CSVLogger(folder), "log_every_n_steps": 2, "accumulate_grad_batches": accumulate}
        trainer = train(_LogsItself(), logs, max_epochs=3, **options)
        (rows,) = folder.rglob("metrics.csv")
        runs.append((seen, rows.read_text()))
    assert runs[0] == runs[1]
    assert runs[0][0][-1]["a/step"] == trainer.global_step - 1


def test_the_averager_of_replicas_is_an_attribute_of_the_strategy():
    strategy = DDPStrategy()
    assert strategy._model_averager is None, "a strategy declares it, and local SGD sets it"
    strategy._model_averager = averager = object()
    assert model_averager(types.SimpleNamespace(strategy=strategy)) is averager
    assert model_averager(Trainer(**QUIET)) is None


def test_a_compiled_module_is_known():
    plain = LightningModule()
    assert not is_compiled_by_lightning(plain)
    assert is_compiled_by_lightning(from_compiled(torch.compile(plain, backend="eager")))


@pytest.mark.parametrize("saves", [True, False])
def test_writes_folders(saves):
    assert checkpoints.writes_folders(ModelParallelStrategy(save_distributed_checkpoint=saves)) is saves
