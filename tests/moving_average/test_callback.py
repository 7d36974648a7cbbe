"""ExponentialMovingAverage in the Trainer: what is evaluated, saved, resumed and refused."""

from __future__ import annotations

import warnings
from functools import partial
from types import SimpleNamespace

import lightning.pytorch.callbacks as lightning_callbacks
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from timm.optim import Lookahead
from torch import nn

from lightning_tricks import (
    AutoResume,
    CheckpointRemapping,
    ExponentialMovingAverage,
    GradualUnfreezing,
    LoRA,
    RestoreBest,
    RunFingerprint,
    SpikeGuard,
    load_weights,
    read_checkpoint,
)
from lightning_tricks.checkpoint_remapping import CheckpointError
from lightning_tricks.lr_schedules import CombinedOptimizer
from lightning_tricks.moving_average import decay_at
from tests.contract.checks import Interrupts
from tests.moving_average.contract import average_of
from tests.small import QUIET, EvaluatedNet, Hooks, Net, cases, fit, loader, local_sgd, same, without_warnings
from tests.spike_guard.oracle import Rows
from tests.spike_guard.oracle import loader as loader_of_rows

EMA = partial(ExponentialMovingAverage, 0.9)
ignores_test = pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback")


class Normed(EvaluatedNet):
    """With batch normalization, and a mask of infinity, which an average would make NaN."""

    def build(self):
        self.net = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))


def made(kind=Normed, **arguments):
    torch.manual_seed(0)
    return kind(**arguments)


def copied(module):
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


class Seen(list):
    """The weights after each step of each optimizer, by name."""

    def callback(self):
        def on_train_start(trainer, module):
            for optimizer in trainer.optimizers:
                optimizer.register_step_post_hook(partial(self.note, module))

        return Hooks(on_train_start=on_train_start)

    def note(self, module, optimizer, *_):
        own = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        self.append({n: p.detach().clone() for n, p in module.named_parameters() if id(p) in own})

    def averages(self, decay=0.9):
        names = {name for step in self for name in step}
        return {name: average_of([step[name] for step in self if name in step], decay) for name in names}


def assert_average(module, seen, decay=0.9, tolerance=1e-5):
    tensors = dict(module.named_parameters())
    for name, average in seen.averages(decay).items():
        torch.testing.assert_close(tensors[name].double(), average, rtol=tolerance, atol=tolerance)


# -- what is averaged


@pytest.mark.parametrize("arguments", [{}, {"every_n_steps": 3}, {"buffers": "copy"}])
def test_a_short_run_does_not_end_with_its_initial_weights(arguments):
    """Lightning's `EMAWeightAveraging` may leave them, and counts the batches of BatchNorm wrongly."""
    before = copied(module := made())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "The '(train|val)_dataloader' does not have many workers")
        fit(module, ExponentialMovingAverage(**arguments))
    for name, value in module.named_parameters():
        assert not torch.equal(value, before[name])
    assert module.net[1].num_batches_tracked.item() == 10
    assert torch.equal(module.mask, before["mask"])


def test_a_run_that_is_too_short_for_its_decay_says_so():
    with pytest.warns(UserWarning, match=r"100% of the average are .* first update.*decay=0\.9999 and every_n_steps=1"):
        fit(made(), ExponentialMovingAverage(warmup=False))


def test_buffers_of_batch_normalization():
    ends = {rule: made() for rule in ("average", "copy")}
    for rule, module in ends.items():
        fit(module, EMA(buffers=rule), max_epochs=2)
    fit(bare := made(), max_epochs=2)
    statistics = bare.net[1].running_mean
    assert torch.equal(ends["copy"].net[1].running_mean, statistics)
    assert not torch.equal(ends["average"].net[1].running_mean, statistics)
    assert torch.equal(ends["average"].net[0].weight, ends["copy"].net[0].weight)


class Gan(Net):
    """Two optimizers of which one steps every third batch only, with batch normalization in both parts."""

    def build(self):
        self.generator = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64))
        self.discriminator = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.net = nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        fake = self.generator(torch.randn(4, 8))
        for optimizer in [first, *([second] if batch_idx % 3 == 0 else [])]:
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            target = batch[0] if optimizer is first else fake
            self.manual_backward((self.discriminator(fake if optimizer is second else target) - 1).square().mean())
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.Adam(part.parameters(), 0.01) for part in (self.discriminator, self.generator)]


def test_each_part_of_a_gan_is_averaged_after_its_own_steps():
    fit(module := made(Gan, optimization="manual"), EMA(), (seen := Seen()).callback(), max_epochs=2)
    assert len(seen) == 28
    assert_average(module, seen)
    assert not module.net.weight.equal(torch.zeros(()))


def overflowing(scale=2.0**40):
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale))


@pytest.mark.parametrize("optimization", ["adamw", "fused", "combined"])
@pytest.mark.parametrize("every", [1, 2])
def test_steps_that_a_scaler_skips_do_not_count(optimization, every):
    """The first steps overflow, so the initial weights must not become the first of the average."""

    class Notes(Seen):
        def note(self, module, optimizer, *_):
            if float(getattr(optimizer, "found_inf", 0.0)) == 0:
                super().note(module, optimizer)

    net = made(Net, optimization=optimization)
    fit(net, EMA(every_n_steps=every), (seen := Notes()).callback(), max_epochs=6, plugins=[overflowing()])
    assert 20 < len(seen) < 55
    seen[:] = seen[every - 1 :: every]
    assert_average(net, seen)


def test_weights_that_are_released_later():
    net = made(EvaluatedNet)
    unfreezing = GradualUnfreezing({0: "net.4.*", 1: "net.0.*"}, freeze_norm=False)
    before = copied(net)
    fit(net, EMA(), unfreezing, (seen := Seen()).callback(), max_epochs=3)
    assert_average(net, seen)
    assert torch.equal(net.net[1].weight, before["net.1.weight"])  # frozen all the time


class LookingAhead(Normed):
    def configure_optimizers(self):
        return Lookahead(super().configure_optimizers(), k=2)  # which does not call the constructor of Optimizer


def test_a_wrapper_is_averaged_from_its_first_step(monkeypatch):
    if hasattr(Lookahead.step, "hooked"):  # torch replaces it in the class when gradients are first set to zero
        monkeypatch.setattr(Lookahead, "step", Lookahead.step.__wrapped__)
    module, seen = made(LookingAhead), Seen()
    note = Hooks(on_train_batch_end=lambda trainer, *_: seen.note(module, trainer.optimizers[0]))
    fit(module, EMA(), note)
    assert_average(module, seen)


class Late(EvaluatedNet):
    def on_train_epoch_start(self):
        self.net[0].requires_grad_(self.current_epoch > 0)


def test_weights_that_the_module_freezes_where_its_first_epoch_starts():
    """Their average began with the initial weights, and without a warm-up where they were released."""
    fit(net := made(Late), ExponentialMovingAverage(0.99), (seen := Seen()).callback(), max_epochs=3)
    assert len(seen) == 30
    assert_average(net, seen, 0.99)


def test_weights_that_are_frozen_again_reach_their_value():
    class Freezes(Net):
        def on_train_epoch_start(self):
            self.net[0].requires_grad_(self.current_epoch == 0)

    ended = {}
    note = Hooks(on_train_end=lambda trainer, module: ended.update(copied(module)))
    fit(net := made(Freezes), note, ExponentialMovingAverage(0.5), max_epochs=8)
    torch.testing.assert_close(net.net[0].weight, ended["net.0.weight"], rtol=1e-6, atol=1e-7)
    assert not torch.equal(net.net[4].weight, ended["net.4.weight"])


def test_parameters_that_are_added_in_the_fit():
    class Grows(Net):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 4:
                self.added = nn.Parameter(torch.ones(10))
                self.optimizers().add_param_group({"params": [self.added]})

        def training_step(self, batch, batch_idx):
            scores = self.net(batch[0]) * getattr(self, "added", 1.0)
            return nn.functional.cross_entropy(scores, batch[1])

    fit(net := made(Grows), EMA(), (seen := Seen()).callback())
    assert len(seen) == 10
    assert_average(net, seen)


def test_low_rank_changes_alone_are_averaged(tmp_path):
    lora = LoRA(2, target_modules=["net.0"], modules_to_save="net.4")
    trainer = fit(net := made(EvaluatedNet), lora, EMA(), (seen := Seen()).callback())
    trainer.save_checkpoint(tmp_path / "lora.ckpt")
    assert_average(net, seen)
    counts = torch.load(tmp_path / "lora.ckpt", weights_only=True)["moving_average"]["counts"]
    assert counts["starts"].keys() == {name for name, value in net.named_parameters() if value.requires_grad}


@pytest.mark.parametrize("evaluate", [True, False])
def test_tied_weights(evaluate, tmp_path):
    class Tied(EvaluatedNet):
        def build(self):
            self.net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
            self.net[2].weight = self.net[0].weight

    trainer = fit(net := made(Tied), EMA(evaluate=evaluate), (seen := Seen()).callback())
    trainer.save_checkpoint(tmp_path / "tied.ckpt")
    load_weights(loaded := made(Tied), tmp_path / "tied.ckpt", ema=True)
    assert_average(loaded, seen)
    if not evaluate:
        return
    assert net.net[2].weight is net.net[0].weight
    assert_average(net, seen)
    state = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    for name in ("state_dict", "current_model_state"):
        assert torch.equal(state[name]["net.0.weight"], state[name]["net.2.weight"])
    assert not torch.equal(state["state_dict"]["net.0.weight"], state["current_model_state"]["net.0.weight"])


def test_layers_that_are_made_in_the_first_step():
    class Lazy(Net):
        def build(self):
            self.net = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.LazyLinear(10))

    fit(net := made(Lazy, optimization="sgd"), EMA(), (seen := Seen()).callback())
    assert len(seen) == 10
    assert_average(net, seen)


class TwoSteps(torch.optim.SGD):
    """As sharpness-aware minimization is written: under manual optimization nobody calls its `step`."""

    def second_step(self):
        torch.optim.SGD(self.param_groups, lr=0.1).step()


class SteppedInAnotherWay(EvaluatedNet):
    def training_step(self, batch, batch_idx):
        one, other = self.optimizers()
        self.zero_grad()
        self.manual_backward(nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
        one.optimizer.second_step()
        other.step()

    def configure_optimizers(self):
        return TwoSteps(self.net[0].parameters(), 0.1), torch.optim.SGD(self.net[1:].parameters(), 0.1)


def test_what_no_step_is_seen_of_keeps_the_weights_of_training(tmp_path):
    """They were replaced by the initial ones."""
    with pytest.warns(UserWarning, match=r"TwoSteps made no step\(\), so what it trains is not averaged"):
        trainer = fit(module := made(SteppedInAnotherWay, optimization="manual"), EMA(), max_epochs=2)
    fit(bare := made(SteppedInAnotherWay, optimization="manual"), max_epochs=2)
    assert torch.equal(module.net[0].weight, bare.net[0].weight)
    assert not torch.equal(module.net[4].weight, bare.net[4].weight)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    saved = torch.load(tmp_path / "end.ckpt", weights_only=True)
    assert torch.equal(saved["state_dict"]["net.0.weight"], bare.net[0].weight)


def test_a_combined_optimizer():
    fit(net := made(Net, optimization="combined"), EMA(), (seen := Seen()).callback())
    assert isinstance(net.trainer.optimizers[0], CombinedOptimizer)
    assert len(seen) == 10
    assert_average(net, seen)


# -- what is evaluated


class Looks(Normed):
    """Notes the weights in all hooks of a validation, and around it."""

    def __init__(self):
        self.notes = {}
        super().__init__()

    def note(self, name):
        self.notes.setdefault(name, []).append(copied(self))

    def on_validation_start(self):
        self.note("start")

    def on_validation_epoch_end(self):  # where samples are drawn
        self.note("epoch end")

    def on_validation_end(self):
        self.note("end")

    def on_train_batch_end(self, *_):
        self.note("train")

    def on_train_epoch_end(self):
        self.note("train")


@pytest.mark.parametrize("evaluate", [True, False])
def test_all_hooks_of_a_validation_see_the_average(evaluate):
    module, bare = made(Looks), made(Looks)
    fit(module, ExponentialMovingAverage(0.9, evaluate=evaluate), max_epochs=2, val_check_interval=5)
    fit(bare, max_epochs=2, val_check_interval=5)
    assert same(module.notes["train"], bare.notes["train"])  # training is that of the bare Trainer, bit for bit
    assert len(module.notes["start"]) == 4
    for name in ("start", "epoch end", "end"):
        assert same(module.notes[name], module.notes["start"])
        assert same(module.notes[name], bare.notes[name]) is not evaluate
    end = copied(module)
    assert same(end, module.notes["end"][-1] if evaluate else bare.notes["train"][-1])


@pytest.mark.filterwarnings("ignore:.*fit\\(ckpt_path=")
def test_the_weights_of_training_are_back_after_an_error(tmp_path):
    class Breaks(Normed):
        def validation_step(self, batch, batch_idx):
            if self.trainer.current_epoch == 1:
                raise ZeroDivisionError
            super().evaluate(batch, batch_idx)

    saves = OnExceptionCheckpoint(tmp_path)
    with pytest.raises(ZeroDivisionError):
        fit(module := made(Breaks), EMA(), saves, max_epochs=2, enable_checkpointing=True)
    fit(bare := made(), max_epochs=2)
    assert same(copied(module), copied(bare))
    saved = torch.load(tmp_path / "on_exception.ckpt", weights_only=True)
    assert same(dict(saved["current_model_state"]), copied(bare))
    fit(whole := made(), EMA(), max_epochs=2)
    assert same(dict(saved["state_dict"]), copied(whole))


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_checkpoint_has_the_weights_of_its_metric(weights_only, tmp_path):
    saves = ModelCheckpoint(tmp_path, "{loss:.9f}", monitor="loss", save_top_k=-1, save_weights_only=weights_only)
    steps = ModelCheckpoint(tmp_path / "steps", every_n_train_steps=5, save_top_k=-1, save_weights_only=weights_only)
    trainer = fit(made(), EMA(), saves, steps, max_epochs=3, enable_checkpointing=True)
    assert len(saves.best_k_models) == 3
    for path, value in saves.best_k_models.items():
        loaded = Normed.load_from_checkpoint(path)
        (now,) = Trainer(**QUIET).validate(loaded, loader(), verbose=False)
        assert now["loss"] == value.item()
        (now,) = trainer.test(made(), loader(), ckpt_path=path, verbose=False)
        assert now["loss"] == value.item()
    whole = Normed.load_from_checkpoint(tmp_path / "steps" / "epoch=1-step=20.ckpt").state_dict()
    validated = next(path for path in saves.best_k_models if torch.load(path, weights_only=True)["global_step"] == 20)
    assert same(dict(whole), dict(Normed.load_from_checkpoint(validated).state_dict()))


@pytest.mark.parametrize("comes_first", [True, False])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_restore_best_has_the_average_of_the_best_validation(comes_first, mode):
    callbacks = [best := RestoreBest("loss", mode), EMA()]
    trainer = fit(module := made(), *(callbacks if comes_first else callbacks[::-1]), max_epochs=3)
    (now,) = trainer.validate(module, loader(), verbose=False)
    assert now["loss"] == best.best_value
    assert best.best_epoch == (2 if mode == "min" else 0)


# -- what is resumed

WAYS = {
    "plain": {},
    "evaluate=False": {"evaluate": False},
    "every 2": {"every_n_steps": 2, "buffers": "copy"},
    "bf16-true": {"precision": "bf16-true"},
    "64-true": {"precision": "64-true"},
    "fused fp16": {"fp16": "fused"},
    "compiled": {"compiled": True},
    "accumulation": {"accumulate_grad_batches": 3},
}


def train(folder, way, *others, epochs=3, path=None, **trainer):
    options = dict(WAYS[way])
    arguments = {name: options.pop(name) for name in ("evaluate", "every_n_steps", "buffers") if name in options}
    net = {"optimization": options.pop("fp16", "adamw"), "compiled": options.pop("compiled", False)}
    plugins = {"plugins": [overflowing()]} if net["optimization"] == "fused" else {}
    kind = Net if net["compiled"] else Normed
    kind = EvaluatedNet if net["compiled"] else kind
    saves = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=4, save_on_train_epoch_end=False)
    best = ModelCheckpoint(folder, "validated {step}", monitor="loss", save_top_k=-1)
    fitter = Trainer(
        callbacks=[EMA(**arguments), *others, saves, best],
        **{
            **QUIET,
            "enable_checkpointing": True,
            "max_epochs": epochs,
            "val_check_interval": 5,
            **options,
            **plugins,
            **trainer,
        },
    )
    fitter.fit(module := made(kind, **net), loader(), loader(), ckpt_path=path)
    fitter.save_checkpoint(folder / "end.ckpt")
    return copied(module)


@pytest.mark.filterwarnings("ignore:Checkpoint directory", "ignore:Be aware that when using", "ignore:The dirpath has")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("way", WAYS)
def test_a_resume_from_any_file_is_exact(way, tmp_path):
    """Files of the middle of an epoch and of a validation, and one that is saved after a fit."""
    expected = train(tmp_path / "whole", way)
    train(tmp_path / "first", way, epochs=1)
    steps = [file for file in (tmp_path / "whole").glob("validated*") if file.stem.endswith(("=10", "=20", "=4", "=8"))]
    for path in [tmp_path / "first" / "end.ckpt", *steps]:
        ended = train(tmp_path / "resumed", way, path=path)
        assert same(ended, expected), path
        kept = [
            torch.load(folder / "end.ckpt", weights_only=True) for folder in (tmp_path / "whole", tmp_path / "resumed")
        ]
        for name in {"current_model_state", "moving_average", "state_dict", "optimizer_states"} & kept[0].keys():
            assert same(kept[0][name], kept[1][name]), name
    assert len(steps) > 0


@pytest.mark.filterwarnings("ignore:.*made no step", "ignore:Detected call of")
def test_a_file_from_before_the_first_step_that_was_not_skipped(tmp_path):
    """It has counts, and no averages."""
    saves = Hooks(on_train_epoch_end=lambda trainer, _: trainer.save_checkpoint(tmp_path / "skipped.ckpt"))
    fit(made(), EMA(), saves, plugins=[overflowing()], max_epochs=1)
    trainer = Trainer(callbacks=[EMA(), (seen := Seen()).callback()], **{**QUIET, "max_epochs": 2})
    trainer.fit(module := made(), loader(), loader(), ckpt_path=tmp_path / "skipped.ckpt")
    assert_average(module, seen)


@pytest.mark.filterwarnings("ignore:Checkpoint directory", "ignore:The dirpath has")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_the_rest_of_an_epoch_that_lightning_resumes_is_averaged(tmp_path):
    """No hook of its start is called there."""
    train(tmp_path, "plain", epochs=1)
    saved = torch.load(tmp_path / "step=4.ckpt", weights_only=True)["state_dict"]
    module = train(tmp_path, "plain", (seen := Seen()).callback(), epochs=1, path=tmp_path / "step=4.ckpt")
    assert len(seen) == 6
    for number, step in enumerate(seen, 4):
        for name, value in step.items():
            saved[name].lerp_(value, 1 - decay_at(number, 0.9))
    assert all(torch.equal(module[name], saved[name]) for name in seen[0])


@pytest.mark.filterwarnings("ignore:Checkpoint directory", "ignore:The dirpath has changed")
@pytest.mark.parametrize(("way", "step"), [("plain", 3), ("plain", 5), *((way, 17) for way in WAYS)])
def test_auto_resume_anywhere(way, step, tmp_path):
    expected = train(tmp_path / "whole", way)
    with pytest.raises(SystemExit):
        train(tmp_path / "run", way, AutoResume(tmp_path / "resume"), Interrupts(step))
    ended = train(tmp_path / "run", way, AutoResume(tmp_path / "resume"))
    assert same(ended, expected)
    kept = [torch.load(tmp_path / name / "end.ckpt", weights_only=True) for name in ("whole", "run")]
    for name in {"current_model_state", "moving_average", "state_dict", "optimizer_states"} & kept[0].keys():
        assert same(kept[0][name], kept[1][name]), name
    again = train(tmp_path / "run", way, AutoResume(tmp_path / "resume"))  # the run had finished
    assert same(again, expected)
    if way != "plain":
        return
    longer = train(tmp_path / "run", way, AutoResume(tmp_path / "resume"), epochs=4)
    assert same(longer, train(tmp_path / "whole", way, epochs=4))


def test_a_file_without_an_average_begins_a_new_one(tmp_path, caplog):
    trainer = fit(bare := made())
    trainer.save_checkpoint(tmp_path / "bare.ckpt")
    with caplog.at_level("INFO"):
        trainer = Trainer(callbacks=[EMA(), (seen := Seen()).callback()], **{**QUIET, "max_epochs": 2})
        trainer.fit(module := made(), loader(), loader(), ckpt_path=tmp_path / "bare.ckpt")
    assert_average(module, seen)
    assert "the checkpoint has no average of this callback: a new one begins" in caplog.text
    assert not same(copied(module), copied(bare))


class Migrated(Normed):
    """Its hook changes the copies of a file that it is told to."""

    copies = ()

    def on_load_checkpoint(self, checkpoint):
        for copy in self.copies:
            checkpoint[copy].pop("mask")
            checkpoint[copy]["net.0.bias"].zero_()
            checkpoint[copy]["net.3.bias"] = checkpoint[copy]["net.3.bias"] + 1


def resumed(module, path, *callbacks):
    Trainer(callbacks=[*callbacks], **{**QUIET, "max_epochs": 2}).fit(module, loader(), loader(), ckpt_path=path)
    return copied(module)


@pytest.mark.parametrize(
    "copies", [(), ("state_dict",), ("current_model_state",), ("state_dict", "current_model_state")]
)
def test_a_hook_that_changes_the_average_alone_is_an_error(copies, tmp_path):
    """Training would go on from what it was to migrate, without a word."""
    fit(made(), EMA()).save_checkpoint(path := tmp_path / "a.ckpt")
    module = made(Migrated)
    module.copies, module.strict_loading = copies, False
    if copies == ("state_dict",):
        words = r"changed mask, net\.0\.bias, net\.3\.bias in state_dict, .* and not in current_model_state"
        with pytest.raises(MisconfigurationException, match=words):
            resumed(module, path, EMA())
        return
    unchanged = same(resumed(module, path, EMA()), resumed(made(), path, EMA()))
    assert unchanged is not copies


class Renamed(EvaluatedNet):
    def build(self):
        super().build()
        self.net = nn.Sequential(self.net)

    def on_load_checkpoint(self, checkpoint):
        if getattr(self, "renames", False):
            for copy in ("state_dict", "current_model_state"):
                checkpoint[copy] = {name.replace("net.", "net.0."): value for name, value in checkpoint[copy].items()}


@pytest.mark.parametrize("evaluate", [True, False])
def test_renamed_layers(evaluate, tmp_path):
    """CheckpointRemapping renames all copies; what a hook has not renamed is named."""
    average = partial(EMA, evaluate=evaluate)
    fit(made(EvaluatedNet), average()).save_checkpoint(path := tmp_path / "a.ckpt")
    expected = resumed(made(EvaluatedNet), path, average())
    found = resumed(made(Renamed), path, average(), CheckpointRemapping())
    assert same(list(found.values()), list(expected.values()))
    if evaluate:
        (module := made(Renamed)).renames = True
        with pytest.raises(MisconfigurationException, match=r"counts steps of net\.0\.weight, .* rename them"):
            resumed(module, path, average())


def test_another_number_of_steps_between_updates_averages_what_began_late(tmp_path):
    """Counted in updates, their average would have begun again many steps later."""

    fit(made(Late), EMA(), max_epochs=2).save_checkpoint(tmp_path / "1.ckpt")
    trained = Hooks(on_train_end=lambda _, module: ended.update(copied(module)))
    trainer = Trainer(callbacks=[trained, EMA(every_n_steps=5)], **{**QUIET, "max_epochs": 4})
    ended = {}
    trainer.fit(net := made(Late), loader(), loader(), ckpt_path=tmp_path / "1.ckpt")
    for name, value in net.named_parameters():
        assert not torch.equal(value, ended[name]), name


@ignores_test
@pytest.mark.filterwarnings("ignore:Be aware that when using")
@pytest.mark.skipif(not hasattr(lightning_callbacks, "EMAWeightAveraging"), reason="Lightning 2.6 brings it")
def test_training_continues_from_a_file_of_lightnings_ema(tmp_path):
    trainer = fit(
        made(),
        lightning_callbacks.EMAWeightAveraging(decay=0.9),
        ModelCheckpoint(tmp_path, "{step}"),
        enable_checkpointing=True,
    )
    path = tmp_path / "step=10.ckpt"
    trained = torch.load(path, weights_only=True)["current_model_state"]
    start = {}
    trainer = Trainer(
        callbacks=[EMA(), Hooks(on_train_epoch_start=lambda _, m: start.update(copied(m)))],
        **{**QUIET, "max_epochs": 2},
    )
    trainer.fit(made(), loader(), loader(), ckpt_path=path)
    assert same(start, dict(trained))


# -- beside others


def test_spike_guard_takes_back_averages(tmp_path):
    """Also in the first steps, and of weights that were released just before."""

    def train(left_out, *callbacks):
        data = loader_of_rows(Rows(12, {0, 7}, float("nan"), draws=False), left_out)
        unfreezing = GradualUnfreezing({0: "net.3.*", 1: "net.0.*"}, freeze_norm=False)
        with without_warnings():
            trainer = fit(module := made(), EMA(), unfreezing, *callbacks, data=data, max_epochs=2, limit_val_batches=0)
        state = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        return copied(module), state["current_model_state"], state["moving_average"]

    for mode, left_out in (("skip", {0, 7}), ("rewind", {0, 1, 6, 7})):
        guard = SpikeGuard(mode, threshold=1e9, window=8, warmup_steps=1, every_n_train_steps=2)
        assert same(train((), guard), train(left_out)), mode
        assert guard.spikes


def test_a_fingerprint_is_that_of_training(tmp_path):
    for name, callbacks in (("with", [EMA()]), ("without", [])):
        fit(made(), RunFingerprint(tmp_path / f"{name}.jsonl"), *callbacks, max_epochs=2, val_check_interval=5)
    with_it, without = ((tmp_path / f"{name}.jsonl").read_text().splitlines()[1:] for name in ("with", "without"))
    assert with_it == without
    assert len(with_it) > 2


def test_a_second_fit_and_a_second_trainer():
    average = EMA()
    trainer = fit(module := made(), average)
    first = copied(module)
    trainer.fit_loop.max_epochs = 2
    begins = {}
    trainer.callbacks.append(Hooks(on_train_start=lambda _, m: begins.update(copied(m))))
    trainer.fit(module, loader(), loader())
    assert same(begins, first)
    fit(fresh := made(), average)
    assert same(copied(fresh), first)


# -- load_weights


def test_load_weights_takes_the_average(tmp_path):
    for name, arguments in (("evaluated", {}), ("beside", {"evaluate": False})):
        fit(module := made(), EMA(**arguments)).save_checkpoint(tmp_path / f"{name}.ckpt")
    fit(trained := made())
    fit(averaged := made(), EMA())
    for name in ("evaluated", "beside"):
        load_weights(module := made(), tmp_path / f"{name}.ckpt", ema=True)
        assert same(copied(module), copied(averaged)), name
        values = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)
        load_weights(module := made(), values, ema=True)
        assert same(copied(module), copied(averaged)), name
    load_weights(module, tmp_path / "beside.ckpt")
    assert same(copied(module), copied(trained))


def test_load_weights_takes_what_was_changed_after_the_fit(tmp_path):
    """Statistics that were computed again, and the average of the best validation."""
    trainer = fit(module := made(), EMA(), max_epochs=2)
    torch.optim.swa_utils.update_bn([batch for batch, _ in loader()], module.net)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    load_weights(loaded := made(), tmp_path / "end.ckpt", ema=True)
    assert same(copied(loaded), copied(module))
    trainer = fit(module := made(), EMA(), RestoreBest("loss", "max"), max_epochs=2)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    load_weights(loaded := made(), tmp_path / "end.ckpt", ema=True)
    assert same(copied(loaded), copied(module))


@pytest.mark.parametrize("evaluate", [True, False])
def test_load_weights_takes_the_average_of_a_file_with_weights_alone(evaluate, tmp_path):
    saves = ModelCheckpoint(tmp_path, "{step}", save_weights_only=True)
    fit(made(), EMA(evaluate=evaluate), saves, enable_checkpointing=True)
    fit(averaged := made(), EMA())
    load_weights(module := made(), tmp_path / "step=10.ckpt", ema=True)
    assert same(copied(module), copied(averaged))
    assert "optimizer_states" not in torch.load(tmp_path / "step=10.ckpt", weights_only=True)


def test_load_weights_takes_float32_of_half_precision(tmp_path):
    with without_warnings():
        trainer = fit(made(), EMA(), precision="bf16-true")
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    load_weights(module := made(), tmp_path / "half.ckpt", ema=True)
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)
    weight = module.net[0].weight
    assert not torch.equal(weight, weight.bfloat16().float())
    assert torch.equal(weight.bfloat16(), saved["state_dict"]["net.0.weight"])


@ignores_test
@pytest.mark.skipif(not hasattr(lightning_callbacks, "EMAWeightAveraging"), reason="Lightning 2.6 brings it")
def test_load_weights_takes_the_average_of_lightning(tmp_path):
    averaging = lightning_callbacks.EMAWeightAveraging(decay=0.9)
    fit(made(), averaging, ModelCheckpoint(tmp_path, "{step}"), enable_checkpointing=True)
    load_weights(module := made(), tmp_path / "step=10.ckpt", ema=True)
    assert same(copied(module), copied(averaging._average_model.module))


def test_load_weights_takes_the_average_of_timm(tmp_path):
    utils = pytest.importorskip("timm.utils")
    net = nn.Linear(2, 2)
    average = utils.ModelEmaV3(net, decay=0.5)
    nn.init.zeros_(net.weight)
    saver = utils.CheckpointSaver(
        net,
        torch.optim.SGD(net.parameters(), 0.1),
        args=SimpleNamespace(model="m"),
        model_ema=average,
        checkpoint_dir=str(tmp_path),
        recovery_dir=str(tmp_path),
    )
    saver.save_checkpoint(0, metric=1.0)
    (path, *_) = sorted(tmp_path.glob("checkpoint-0*"))
    load_weights(other := nn.Linear(2, 2), path, ema=True)
    assert torch.equal(other.weight, average.module.weight)
    with pytest.raises(CheckpointError, match=r"several sets of weights\. Choose one with key=: .*state_dict_ema"):
        load_weights(other, path)


def test_load_weights_says_where_there_is_no_average(tmp_path):
    torch.save({"model": nn.Linear(2, 2).state_dict()}, path := tmp_path / "plain.pt")
    words = r"plain.pt is a checkpoint without an average of its weights, which are at model"
    with pytest.raises(CheckpointError, match=words):
        load_weights(nn.Linear(2, 2), path, ema=True)
    fit(made()).save_checkpoint(tmp_path / "bare.ckpt")
    with pytest.raises(CheckpointError, match="without an average of its weights, which are at state_dict: leave out"):
        load_weights(made(), tmp_path / "bare.ckpt", ema=True)
    torch.save(nn.Linear(2, 2).state_dict(), path)
    with pytest.raises(CheckpointError, match="without an average of its weights, which are at the top: leave"):
        load_weights(nn.Linear(2, 2), path, ema=True)
    for source, options in ((path, {"key": "model"}), (read_checkpoint(path), {})):
        words = r"ema=True chooses the weights of a file, and so does (key='model'|a Checkp)"
        with pytest.raises(ValueError, match=words):
            load_weights(nn.Linear(2, 2), source, ema=True, **options)


# -- what is refused


class Unstepped(Net):
    def configure_optimizers(self):
        return None


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
@cases(
    "words, module, options",
    ("follows the steps of optimizers: return those", Unstepped, {}),
    ("StochasticWeightAveraging would replace", Net, {"callbacks": [StochasticWeightAveraging(0.1)]}),
)
def test_refusals(words, module, options):
    callbacks = [EMA(), *options.pop("callbacks", ())]
    with pytest.raises(MisconfigurationException, match=words):
        fit(made(module), *callbacks, **options)


@pytest.mark.skipif(not hasattr(lightning_callbacks, "EMAWeightAveraging"), reason="Lightning 2.6 brings it")
def test_lightnings_average_beside_it_is_refused():
    words = "WeightAveraging would replace the weights as well: remove one"
    with pytest.raises(MisconfigurationException, match=words):
        fit(made(), EMA(), lightning_callbacks.EMAWeightAveraging())


@pytest.mark.parametrize("strategy", [FSDPStrategy, DeepSpeedStrategy])
def test_flattened_shards_are_refused(strategy):
    # not each can be made on a machine without a GPU: the Trainer is a mock, the strategy's type is real
    trainer = SimpleNamespace(strategy=object.__new__(strategy), callbacks=[])
    with pytest.raises(MisconfigurationException, match=f"shards of {strategy.__name__}: use ModelP"):
        EMA().setup(trainer, Net(), "fit")


def test_local_sgd_is_refused():
    with pytest.raises(Exception, match="leave out the `model_averaging_period` of DDPStrategy"):
        fit(made(), EMA(), strategy=local_sgd(), devices=2)


def test_a_wrong_rule_for_buffers():
    with pytest.raises(ValueError, match=r"buffers must be .*average.*copy.*recompute"):
        EMA(buffers="recompute")
