"""TricksMixin in the hands of other people's modules."""

import copy
import dataclasses
import inspect
import math
import os
import pickle
import sys

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_tricks import (
    GradientClipping,
    OptimizerSpec,
    ScheduleSpec,
    SeedEverything,
    Tricks,
    TricksMixin,
    seed_everything,
)
from lightning_tricks._torch_compat.modules import loads_as_torch_does
from lightning_tricks.gradient_clipping import AGC, ClipValue
from lightning_tricks.seeding import capture_rng_state
from tests.contract.lab import SETTINGS
from tests.small import QUIET, cases, fit, loader, same

pytestmark = pytest.mark.oldest

_QUIET = {**QUIET, "num_sanity_val_steps": 2}
_BOTH = {"seed_everything": 5, "gradient_clipping": {"max_norm": 0.5, "log_norm": "all"}}
_SGD = {"name": "SGD"}


def _object_of(name, **arguments):
    return {"class_path": f"lightning_tricks.gradient_clipping.{name}", "init_args": arguments}


class LitNet(TricksMixin, LightningModule):
    def __init__(self, hidden: int = 8, tricks: Tricks | None = None):
        super().__init__(tricks=tricks)
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 10))

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _loaders():
    return loader(shuffle=True), loader()


def _fit(module, *, ckpt_path=None, max_epochs=1, **trainer):
    fitter = Trainer(max_epochs=max_epochs, **{**_QUIET, **trainer})
    fitter.fit(module, *_loaders(), ckpt_path=ckpt_path)
    return fitter


def _types(trainer):
    return [type(callback).__name__ for callback in trainer.callbacks]


@pytest.mark.trap("metrics: mixins must not inherit LightningModule")
def test_is_no_lightning_module():
    assert TricksMixin.__mro__ == (TricksMixin, object)


def test_seeds_before_the_submodules_are_made():
    one, other = LitNet(tricks=Tricks(seed_everything=5)), LitNet(tricks=Tricks(seed_everything=5))
    assert same(dict(one.state_dict()), dict(other.state_dict()))
    assert not same(dict(one.state_dict()), dict(LitNet(tricks=Tricks(seed_everything=6)).state_dict()))
    assert not same(dict(LitNet().state_dict()), dict(LitNet().state_dict()))


def test_nothing_is_on_by_default():
    assert Tricks().callbacks() == []
    trainer = _fit(LitNet())
    assert not {"SeedEverything", "GradientClipping"} & set(_types(trainer))


@cases("value", {"max_norm": 0.3, "norm_type": math.inf, "log_norm": False}, 0.3, 1, ids=["arguments", "float", "int"])
def test_a_field_takes_arguments_or_the_first_one_alone(value):
    (callback,) = Tricks(gradient_clipping=value).callbacks()
    assert callback.max_norm == (value["max_norm"] if isinstance(value, dict) else value)
    assert (callback.norm_type == math.inf) == isinstance(value, dict)


@cases(
    "fields, error, words",
    ({"seed_everything": -1}, ValueError, r"Tricks\(seed_everything=-1\): seed must be .*\[0, 2\*\*32 - 1\]"),
    ({"seed_everything": {"sed": 1}}, TypeError, r"SeedEverything takes no 'sed'\. It takes seed, .* mean 'seed'"),
    ({"gradient_clipping": 0}, ValueError, r"Tricks\(gradient_clipping=0\): max_norm must be a number > 0"),
    ({"gradient_cliping": 1.0}, TypeError, "Tricks takes no 'gradient_cliping'.* mean 'gradient_clipping'?"),
    ({"nvtx_ranges": 3}, TypeError, r"\(nvtx_ranges=3\): NvtxRanges takes no arguments: pass True or False\."),
    ({"nvtx_ranges": {"rnges": 1}}, TypeError, r"NvtxRanges takes no arguments"),
    ({"gradient_clipping": {"max_nrm": 1}}, TypeError, "GradientClipping takes no 'max_nrm'.* mean 'max_norm'?"),
    ({"optimizer": {"nme": "SGD"}}, TypeError, "OptimizerSpec takes no 'nme'.* Did you mean 'name'?"),
    ({"optimizer": {"momentum": 0.9}}, TypeError, r"The optimizer's own arguments go into kwargs=\{\.\.\.\}"),
    ({"optimizer": _SGD, "schedule": {"knd": "wsd"}}, TypeError, "ScheduleSpec takes no 'knd'.* mean 'kind'?"),
    ({"auto_resume": {"dirpath": "x", "train_time_interval": {"minuts": 1}}}, TypeError, "Did you mean 'minutes'?"),
    (
        {"metrics_monitor": {"metrics": {"task": "binary", "treshold": 1}}},
        TypeError,
        "takes no 'treshold'.* 'threshold'?",
    ),
    ({"gradient_clipping": {"method": _object_of("ACG")}}, ValueError, "got 'lightning_tricks.*ACG'.*clipping.AGC'?"),
    ({"gradient_clipping": {"groups": {"*": _object_of("AGC", clip_facto=1)}}}, TypeError, "mean 'clip_factor'?"),
    ({"gradient_clipping": {"method": {**_object_of("AGC"), "ini_args": {}}}}, TypeError, "mean 'init_args'?"),
)
def test_bad_tricks_are_refused_when_they_are_made(fields, error, words):
    with pytest.raises(error, match=words):
        Tricks(**fields)
    with pytest.raises(error, match=words):
        LitNet(tricks=fields)


def test_what_one_changes_in_its_dicts_reaches_no_other():
    Tricks.preset("reproducible").seed_everything["seed"] = 7
    assert Tricks.preset("reproducible").seed_everything["seed"] == 42
    given = {"max_norm": 1.0, "groups": {"*": 2.0}}
    tricks = Tricks(gradient_clipping=given)
    given["max_norm"] = given["groups"]["*"] = 9.0
    assert tricks.gradient_clipping == {"max_norm": 1.0, "groups": {"*": 2.0}}


@pytest.mark.parametrize(
    "field", [field for field in dataclasses.fields(Tricks) if field.name != "verbose"], ids=lambda field: field.name
)
def test_true_is_all_defaults_or_refused_and_false_is_off(field):
    beside = {"optimizer": _SGD} if field.name == "schedule" else {}
    off = Tricks(**{field.name: False})
    assert off == Tricks()
    required = {
        "auto_resume": "dirpath",
        "restore_best": "monitor",
        "metrics_monitor": "metrics",
        "run_report": "dirpath",
        "gradual_unfreezing": "schedule",
    }
    required |= dict.fromkeys(("run_fingerprint", "prediction_writer"), "path")
    if needed := required.get(field.name):
        with pytest.raises(TypeError, match=rf"Tricks\({field.name}=True\): .* has no default for {needed}: pass a"):
            Tricks(**{field.name: True})
        return
    on = Tricks(**beside, **{field.name: True})
    assert on == Tricks(**beside, **{field.name: {}}) == Tricks(**on.as_dict())
    if field.name not in ("optimizer", "schedule"):
        (callback,) = on.callbacks()
        expected = type(callback)()
        parameters = inspect.signature(type(callback)).parameters
        assert [getattr(callback, name, None) for name in parameters] == [
            getattr(expected, name, None) for name in parameters
        ]


@pytest.mark.parametrize("value", [True, False])
def test_true_and_false_in_yaml(value, monkeypatch, tmp_path):
    names = (
        "seed_everything",
        "gradient_clipping",
        "checkpoint_remapping",
        "flops_report",
        "model_report",
        "image_logger",
        "optimizer",
    )
    config = tmp_path / "config.yaml"
    config.write_text(f"model: {{tricks: {{{', '.join(f'{name}: {str(value).lower()}' for name in names)}}}}}")
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", str(config)])
    cli = LightningCLI(LitNet, run=False, save_config_callback=None, seed_everything_default=False)
    assert cli.model.tricks == Tricks(**dict.fromkeys(names, value))


def test_tricks_of_the_wrong_type_are_refused():
    with pytest.raises(TypeError, match=r"tricks must be a Tricks, a dict of its fields or None, got 42 \(int\)"):
        LitNet(tricks=42)


def test_verbose_is_that_of_all_callbacks_that_do_not_say():
    tricks = Tricks(flops_report={"verbose": False}, model_report=True, seed_everything=1, verbose=True)
    assert {type(made).__name__: made.verbose for made in tricks.callbacks()} == {
        "FlopsReport": False, "ModelReport": True, "SeedEverything": True
    }  # fmt: skip
    assert Tricks(**tricks.as_dict()) == tricks
    with pytest.raises(TypeError, match=r"Tricks\(verbose=...\) must be True, False or None, got 'loud'"):
        Tricks(verbose="loud")


class _CallsSuper(LitNet):
    def configure_callbacks(self):
        return [*super().configure_callbacks(), LearningRateMonitor()]


class _ForgetsSuper(LitNet):
    def configure_callbacks(self):
        return LearningRateMonitor()


class _OfForgetful(_ForgetsSuper):
    def configure_callbacks(self):
        return [super().configure_callbacks()[0], EarlyStopping("grad_norm/pre_clip", check_on_train_epoch_end=True)]


class _Base(LightningModule):
    def configure_callbacks(self):
        return [LearningRateMonitor()]


class _OverABase(LitNet, _Base):
    pass


class _Forgetful:
    def configure_callbacks(self):
        return [LearningRateMonitor()]


class _BehindAForgetful(_Forgetful, LitNet):
    pass


class _BehindItAgain(_BehindAForgetful):
    pass


@cases("module_class", _CallsSuper, _ForgetsSuper, _OfForgetful, _OverABase, _BehindAForgetful, _BehindItAgain)
def test_cooperates_with_the_modules_own_callbacks(module_class):
    trainer = _fit(module_class(tricks=Tricks(**_BOTH)), logger=True, log_every_n_steps=5)
    names = _types(trainer)
    for name in ("LearningRateMonitor", "SeedEverything", "GradientClipping"):
        assert names.count(name) == 1


@pytest.mark.trap("metrics: Lightning replaces the Trainer's callbacks by those of configure_callbacks")
def test_the_users_own_instance_wins_and_so_does_the_modules():
    class Stricter(GradientClipping):
        pass

    class Own(LitNet):
        def configure_callbacks(self):
            return [*super().configure_callbacks(), GradientClipping(0.1, log_norm="all")]

    for own in (GradientClipping(0.1, log_norm="all"), Stricter(0.1, log_norm="all")):
        trainer = _fit(LitNet(tricks=Tricks(**_BOTH)), callbacks=[own])
        clipping = [c for c in trainer.callbacks if isinstance(c, GradientClipping)]
        assert clipping == [own]
        assert trainer.callback_metrics["grad_norm/post_clip"] <= 0.1 + 1e-4
    assert _fit(Own(tricks=Tricks(**_BOTH))).callback_metrics["grad_norm/post_clip"] <= 0.1 + 1e-4


def test_a_second_module_brings_its_own_tricks():
    trainer = _fit(LitNet(tricks=Tricks(seed_everything=1, gradient_clipping=0.5)))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(
        LitNet(tricks=Tricks(seed_everything=2, gradient_clipping={"max_norm": 0.01, "log_norm": "all"})), *_loaders()
    )
    assert trainer.callback_metrics["grad_norm/post_clip"] <= 0.01 + 1e-4
    (seeding,) = (c for c in trainer.callbacks if isinstance(c, SeedEverything))
    assert seeding.seed == 2


def test_loading_a_checkpoint_leaves_the_process_alone():
    tricks = Tricks(seed_everything={"seed": 5, "deterministic": True})
    _fit(LitNet(tricks=tricks)).save_checkpoint("run.ckpt")
    torch.use_deterministic_algorithms(False)
    seed_everything(99, verbose=False)
    before = capture_rng_state()
    loaded = LitNet.load_from_checkpoint("run.ckpt")
    assert loaded.tricks == tricks
    assert same(capture_rng_state(), before)
    assert os.environ["PL_GLOBAL_SEED"] == "99"
    assert not torch.are_deterministic_algorithms_enabled()


def test_loading_is_no_method_of_an_instance():
    with pytest.raises(TypeError, match="cannot be called on an instance"):
        LitNet().load_from_checkpoint("run.ckpt")


def test_the_wrong_order_of_bases_is_refused():
    with pytest.raises(TypeError, match=r"TricksMixin must come first: class Backwards\(TricksMixin, \.\.\.\)"):

        class Backwards(LightningModule, TricksMixin):
            pass


def test_an_init_that_does_not_reach_the_mixin_is_named():
    class Skips(LitNet):
        def __init__(self):
            LightningModule.__init__(self)

    words = r"Skips.__init__ does not call TricksMixin.__init__: add super\(\)"
    with pytest.raises(MisconfigurationException, match=words):
        Skips().configure_callbacks()


def test_instances_are_reused_by_a_second_fit():
    module = LitNet(tricks=Tricks(**_BOTH))
    first = _fit(module)
    clipping = next(c for c in first.callbacks if isinstance(c, GradientClipping))
    first.fit_loop.max_epochs = 2
    first.fit(module, *_loaders())
    second = _fit(module)
    for trainer in (first, second):
        assert [c for c in trainer.callbacks if isinstance(c, GradientClipping)] == [clipping]
        assert sum(isinstance(c, SeedEverything) for c in trainer.callbacks) == 1


@pytest.mark.trap("metrics: a dataclass in save_hyperparameters makes the checkpoint unloadable under weights_only")
def test_checkpoints_load_with_weights_only(tmp_path):
    module = LitNet(hidden=4, tricks=Tricks(seed_everything={"seed": 5, "workers": False}, gradient_clipping=0.5))
    _fit(module).save_checkpoint("run.ckpt")
    plain = dataclasses.asdict(module.tricks)
    assert plain["seed_everything"] == {"seed": 5, "workers": False}
    checkpoint = torch.load("run.ckpt", weights_only=True)
    assert checkpoint["hyper_parameters"] == {"hidden": 4, "tricks": plain}

    loaded = LitNet.load_from_checkpoint("run.ckpt", weights_only=True)
    assert loaded.tricks == module.tricks
    assert loaded.hparams == module.hparams
    assert same(dict(loaded.state_dict()), dict(module.state_dict()))
    other = LitNet.load_from_checkpoint("run.ckpt", tricks=Tricks(gradient_clipping=2.0))
    assert other.tricks == Tricks(gradient_clipping=2.0)

    resumed = _fit(LitNet(hidden=4, tricks=module.tricks), ckpt_path="run.ckpt", max_epochs=2)
    assert resumed.global_step == 20
    validated = Trainer(**_QUIET).validate(loaded, loader(), ckpt_path="run.ckpt", verbose=False)
    assert validated[0]["val/loss"] > 0


def test_tricks_inside_of_another_argument_are_saved_as_plain_values():
    class Configured(TricksMixin, LightningModule):
        training_step, validation_step = LitNet.training_step, LitNet.validation_step
        configure_optimizers = LitNet.configure_optimizers

        def __init__(self, config):
            super().__init__(tricks=config["tricks"])
            self.save_hyperparameters()
            self.net = torch.nn.Sequential(torch.nn.Linear(64, 10))

    config = {"tricks": Tricks(**_BOTH), "more": [Tricks(seed_everything=1), (2,)]}
    module = Configured(config)
    assert config["tricks"] == module.tricks
    _fit(module).save_checkpoint("run.ckpt")
    saved = torch.load("run.ckpt", weights_only=True)["hyper_parameters"]["config"]
    assert saved == {"tricks": Tricks(**_BOTH).as_dict(), "more": [Tricks(seed_everything=1).as_dict(), (2,)]}
    assert Configured.load_from_checkpoint("run.ckpt").tricks == module.tricks


def test_save_hyperparameters_takes_what_lightnings_takes():
    class Picky(TricksMixin, LightningModule):
        def __init__(self, width, depth=2, settings=None):
            super().__init__(tricks=settings)
            self.save_hyperparameters("depth", "settings")

    class Ignoring(TricksMixin, LightningModule):
        def __init__(self, width, tricks=None):
            super().__init__(tricks=tricks)
            self.save_hyperparameters(ignore=["tricks"], logger=False)

    class Grandchild(LitNet):
        def __init__(self, extra=3, **kwargs):
            super().__init__(**kwargs)
            self.save_hyperparameters()

    plain = dataclasses.asdict(Tricks(seed_everything=1))
    assert LitNet(tricks=Tricks(seed_everything=1)).hparams_initial["tricks"] == plain
    assert Picky(8, settings=Tricks(seed_everything=1)).hparams == {"depth": 2, "settings": plain}
    assert Ignoring(8, tricks=Tricks(seed_everything=1)).hparams == {"width": 8}
    grandchild = Grandchild(tricks=Tricks(seed_everything=1))
    assert grandchild.hparams["tricks"] == plain
    assert (grandchild.hparams["extra"], grandchild.hparams["hidden"]) == (3, 8)


def _cli(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    trainer = {**_QUIET, "max_epochs": 1}
    return LightningCLI(
        LitNet, run=False, save_config_callback=None, seed_everything_default=False, trainer_defaults=trainer
    )


def test_lightning_cli_sets_every_field(monkeypatch, tmp_path):
    model = _cli(monkeypatch, "--model.tricks.seed_everything", "1", "--model.tricks.gradient_clipping", "0.25").model
    assert model.tricks == Tricks(seed_everything=1, gradient_clipping=0.25)

    arguments = "{max_norm: 0.25, norm_type: .inf, log_norm: true}"
    cli = _cli(
        monkeypatch, "--model.tricks.gradient_clipping", arguments, "--model.tricks.seed_everything", "{seed: 2}"
    )
    expected = Tricks(
        seed_everything={"seed": 2}, gradient_clipping={"max_norm": 0.25, "norm_type": math.inf, "log_norm": True}
    )
    assert cli.model.tricks == expected

    cli.trainer.fit(cli.model, *_loaders())
    cli.trainer.save_checkpoint("cli.ckpt")
    assert torch.load("cli.ckpt", weights_only=True)["hyper_parameters"]["tricks"]["seed_everything"] == {"seed": 2}
    assert LitNet.load_from_checkpoint("cli.ckpt", weights_only=True).tricks == expected

    dotted = [f"--model.tricks.gradient_clipping.{pair}" for pair in ("max_norm=0.5", "norm_type=.inf")]
    expected = Tricks(gradient_clipping={"max_norm": 0.5, "norm_type": math.inf})
    assert _cli(monkeypatch, *dotted).model.tricks == expected

    (tmp_path / "config.yaml").write_text("model:\n  tricks:\n    seed_everything: 3\n    gradient_clipping: 0.5\n")
    assert _cli(monkeypatch, "--config", "config.yaml").model.tricks == Tricks(seed_everything=3, gradient_clipping=0.5)


def test_lightning_cli_names_a_bad_field(monkeypatch, capsys):
    with pytest.raises((SystemExit, ValueError)) as error:  # jsonargparse 4.50 and later raises
        _cli(monkeypatch, "--model.tricks.seed_everything", "-1")
    assert "seed must be an integer in [0, 2**32 - 1]" in f"{error.value}{capsys.readouterr().err}"


def test_copies_and_pickles_with_its_tricks():
    module = LitNet(tricks=Tricks(**_BOTH))
    _fit(module)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        copied.trainer = None
        assert {"SeedEverything", "GradientClipping"} <= set(_types(_fit(copied)))


def test_works_in_two_ranks():
    trainer = _fit(LitNet(tricks=Tricks(**_BOTH)), **SETTINGS["DDP"].trainer)
    assert trainer.callback_metrics["grad_norm/post_clip"] <= 0.5 + 1e-4


def test_seeding_through_the_mixin_needs_no_note(lightning_log):
    _fit(LitNet(tricks=Tricks(seed_everything=77)))
    assert not [message for _, message in lightning_log if "not covered" in message]
    assert [message for _, message in lightning_log if "seed 77" in message]


class _Specified(TricksMixin, LightningModule):
    def __init__(self, tricks: Tricks | None = None):
        super().__init__(tricks=tricks)
        self.save_hyperparameters()
        self.net = torch.nn.Linear(64, 10)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])


_SPECS = {
    "optimizer": OptimizerSpec("SGD", lr=0.1, kwargs={"momentum": 0.9}),
    "schedule": ScheduleSpec("wsd", warmup=2, decay=0.5),
}


def test_builds_the_optimizer_and_the_schedule():
    trainer = fit(_Specified(Tricks(**_SPECS)))
    (optimizer,), (config,) = trainer.optimizers, trainer.lr_scheduler_configs
    assert type(optimizer) is torch.optim.SGD
    assert [group["momentum"] for group in optimizer.param_groups] == [0.9]  # one group, without decay
    assert (config.interval, config.scheduler.last_epoch) == ("step", 10)
    assert optimizer.param_groups[0]["lr"] == 0
    trainer = fit(_Specified(Tricks(optimizer=_SPECS["optimizer"])))
    assert not trainer.lr_scheduler_configs


@pytest.mark.parametrize("place", ["subclass", "base"])
def test_own_configure_optimizers_wins_and_that_is_logged(place, lightning_log):
    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters())

    if place == "subclass":
        own = type("Own", (_Specified,), {"configure_optimizers": configure_optimizers})
    else:
        base = type("Base", (LightningModule,), {"configure_optimizers": configure_optimizers})
        own = type("Own", (_Specified, base), {})
    trainer = fit(own(Tricks(**_SPECS)))
    assert type(trainer.optimizers[0]) is torch.optim.Adagrad
    assert any(
        "Own defines configure_optimizers, so Tricks(optimizer=...) is not used" in message
        for _, message in lightning_log
    )


def test_no_optimizer_anywhere_is_refused():
    words = "_Specified does not define configure_optimizers, and its tricks have no"
    with pytest.raises(MisconfigurationException, match=words):
        fit(_Specified())


def test_a_schedule_needs_an_optimizer():
    with pytest.raises(ValueError, match=r"Tricks\(schedule=...\) needs optimizer=OptimizerSpec"):
        Tricks(schedule=ScheduleSpec())
    wanted = r"Tricks\(optimizer=...\) must be OptimizerSpec\(...\) or a dict of its arguments, got 0.1"
    with pytest.raises(TypeError, match=wanted):
        Tricks(optimizer=0.1)


def test_specs_and_methods_survive_a_checkpoint(tmp_path):
    clipping = {"method": AGC(0.02, exclude="net.bias"), "groups": {"net.weight": ClipValue(0.5)}}
    tricks = Tricks(gradient_clipping=clipping, **_SPECS)
    assert Tricks(**tricks.as_dict()).as_dict() == tricks.as_dict()
    trainer = fit(_Specified(tricks))
    trainer.save_checkpoint(tmp_path / "specs.ckpt")
    torch.load(tmp_path / "specs.ckpt", weights_only=True)
    loaded = _Specified.load_from_checkpoint(tmp_path / "specs.ckpt", weights_only=True)
    assert (loaded.tricks.optimizer, loaded.tricks.schedule) == (_SPECS["optimizer"], _SPECS["schedule"])
    (callback,) = loaded.tricks.callbacks()
    assert callback.method == clipping["method"]
    assert callback.groups == clipping["groups"]


def test_specs_in_yaml(monkeypatch, tmp_path):
    text = """
    model:
      tricks:
        optimizer: {name: SGD, lr: 0.1, weight_decay: 5.0e-4, no_decay: [], kwargs: {momentum: 0.9}}
        schedule: {kind: multistep, milestones: [100, 140, 240], interval: epoch}
        gradient_clipping:
          method: {class_path: lightning_tricks.gradient_clipping.AGC, init_args: {clip_factor: 0.02}}
    """
    (tmp_path / "config.yaml").write_text(text)
    arguments = ["--config", "config.yaml", "--model.tricks.schedule.warmup=2 epochs"]
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        cli = LightningCLI(_Specified, run=False, save_config_callback=None, seed_everything_default=False)
        tricks = cli.model.tricks
        assert tricks.optimizer.kwargs == {"momentum": 0.9}
        assert list(tricks.schedule.milestones) == [100, 140, 240]
        assert tricks.schedule.warmup == "2 epochs"
        assert tricks.callbacks()[0].method == AGC(0.02)
        cli.parser.save(cli.config, "config.yaml", overwrite=True)
        arguments = ["--config", "config.yaml"]


def test_loading_needs_no_second_copy_of_the_weights():
    class Own(LitNet):
        def load_state_dict(self, *args, **kwargs):
            return super().load_state_dict(*args, **kwargs)

    assert loads_as_torch_does(LitNet()), "so that nothing has to be brought back"
    assert not loads_as_torch_does(Own())
