"""CheckpointRemapping in real Trainers, and the mixin's `load_from_checkpoint`."""

import dataclasses
import functools
import os
import warnings
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import OmegaConf
from torch import nn

from lightning_tricks import CheckpointRemapping, Tricks, TricksMixin, load_weights, save_weights
from lightning_tricks.checkpoint_remapping import (
    CheckpointError,
    NothingLoadedError,
    UnsafeCheckpointError,
    max_output_difference,
)
from tests.small import QUIET, EvaluatedNet, cases, fit, fork, loader


def trainer(*callbacks, **arguments):
    return Trainer(callbacks=list(callbacks), **{"max_epochs": 1, **QUIET, **arguments})


def weights_equal(left, right):
    return all(torch.equal(value, right.state_dict()[name]) for name, value in left.state_dict().items())


class Evil:
    def __reduce__(self):
        return os.system, ("touch pwned",)


FOREIGN = ["raw.pt", "prefixed.pt", "w.safetensors", "nested.pth", "whole.pt"]


def foreign(net, name):
    """A file that Lightning itself does not take."""
    state = net.state_dict()
    if name == "prefixed.pt":
        torch.save({f"module._orig_mod.{key}": value for key, value in state.items()}, name)
    elif name == "nested.pth":
        torch.save({"epoch": 3, "model_state_dict": state, "options": Namespace(lr=0.1)}, name)
    elif name == "whole.pt":
        torch.save(net.net, name)
    else:
        save_weights(net, name)
    return name


# ckpt_path=


@pytest.mark.trap(
    "checkpoints: a raw state_dict raises KeyError 'pytorch-lightning_version', .safetensors is not taken"
)
@pytest.mark.parametrize("name", FOREIGN)
def test_every_entry_point_takes_foreign_files(name, lightning_log):
    fit(source := EvaluatedNet())
    path = foreign(source, name)
    for run in ("validate", "test", "predict"):
        net = EvaluatedNet()
        getattr(trainer(CheckpointRemapping()), run)(net, loader(), ckpt_path=path, **quiet(run))
        assert weights_equal(source, net)
    net, seen = EvaluatedNet(), []
    fitter = trainer(remapping := CheckpointRemapping(), limit_train_batches=1)
    net.on_train_start = lambda: seen.append((weights_equal(source, net), fitter.global_step, fitter.current_epoch))
    fitter.fit(net, loader(), loader(), ckpt_path=path)
    assert seen == [(True, 0, 0)]
    assert remapping.report.loaded == 6
    said = [line for _, line in lightning_log if "only the weights of" in line]
    assert len(said) == 1
    assert "starts at step 0 with new optimizers" in said[0]


def quiet(run):
    return {} if run == "predict" else {"verbose": False}


def test_its_own_checkpoints_resume_as_without_it():
    results = []
    for callbacks in ((), (CheckpointRemapping(),)):
        torch.manual_seed(0)
        fit(EvaluatedNet(), *callbacks).save_checkpoint("own.ckpt")
        resumed, second = EvaluatedNet(), trainer(*callbacks, max_epochs=2)
        second.fit(resumed, loader(), loader(), ckpt_path="own.ckpt")
        assert second.global_step == 20
        assert second.optimizers[0].state_dict()["state"][0]["step"] == 20
        results.append(resumed)
    assert weights_equal(*results)


def test_a_file_may_be_rewritten_while_a_fit_continues_from_it():
    class Overwrites(Callback):
        def on_train_start(self, trainer, pl_module):
            size = path.stat().st_size
            with path.open("r+b") as file:  # as a later checkpoint of this name would be
                file.write(b"\x3f" * size)

    path, results = Path("own.ckpt"), []
    for callbacks in ((), (Overwrites(),)):
        torch.manual_seed(0)
        fit(EvaluatedNet()).save_checkpoint(path)
        resumed = EvaluatedNet()
        trainer(CheckpointRemapping(), *callbacks, max_epochs=2).fit(resumed, loader(), loader(), ckpt_path=path)
        results.append(resumed)
    assert weights_equal(*results)


class Wide(EvaluatedNet):
    def __init__(self, classes=3, **options):
        super().__init__(**options)
        self.more = nn.Linear(4, classes)


class CountsBatches(Callback):
    batches = 0

    def on_train_batch_end(self, *_):
        self.batches += 1


@cases(
    "change, options, resumes",
    ("none", {}, True),
    ("compiled", {}, True),
    ("another shape", {"allow_mismatched": "more.*"}, False),
    ("another kind", {"allow_mismatched": "more.*"}, False),
    ("a tensor less in the module", {"allow_unexpected": "more.*"}, False),
    ("a tensor more in the module", {"allow_missing": "more.*"}, False),
)
def test_only_a_checkpoint_of_the_same_model_continues(change, options, resumes):
    """The states of its optimizers belong to tensors of other shapes, or to others, where something differs."""
    file, model = Wide(compiled=change == "compiled"), Wide(5 if change == "another shape" else 3)
    if change == "a tensor less in the module":
        model = EvaluatedNet()
    fit(EvaluatedNet() if change == "a tensor more in the module" else file).save_checkpoint("own.ckpt")
    if change == "another kind":
        checkpoint = torch.load("own.ckpt")
        checkpoint["state_dict"]["more.weight"] = checkpoint["state_dict"]["more.weight"].to(torch.int8)
        torch.save(checkpoint, "own.ckpt")
    counter = CountsBatches()
    second = trainer(CheckpointRemapping(**options), counter, max_epochs=2)
    second.fit(model, loader(), loader(), ckpt_path="own.ckpt")
    assert counter.batches == (10 if resumes else 20)
    assert second.optimizers[0].state_dict()["state"][0]["step"] == 20


def test_honest_hyperparameters_do_not_stop_a_resume():
    fit(EvaluatedNet()).save_checkpoint("own.ckpt")
    checkpoint = torch.load("own.ckpt")
    checkpoint["hyper_parameters"] = {"root": Path("data"), "options": Namespace(lr=0.1)}
    torch.save(checkpoint, "honest.ckpt")
    second = trainer(CheckpointRemapping(), max_epochs=2)
    second.fit(EvaluatedNet(), loader(), loader(), ckpt_path="honest.ckpt")
    assert second.global_step == 20
    checkpoint["mine"] = {"root": Path("data")}
    torch.save(checkpoint, "honest.ckpt")
    with pytest.raises(CheckpointError, match=r"honest.ckpt cannot be resumed: mine.root is a pathlib"):
        trainer(CheckpointRemapping(), max_epochs=2).fit(EvaluatedNet(), loader(), loader(), ckpt_path="honest.ckpt")
    trainer(CheckpointRemapping()).validate(EvaluatedNet(), loader(), ckpt_path="honest.ckpt", verbose=False)


@pytest.mark.parametrize("run", ["fit", "validate", "test", "predict"])
def test_unsafe_and_unfit_files_are_refused_and_the_trainer_stays_as_it_was(run):
    net = EvaluatedNet()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    torch.save({"state_dict": net.state_dict(), "pytorch-lightning_version": "2.6.0", "x": Evil()}, "evil.ckpt")
    torch.save({"other": torch.zeros(3)}, "other.pt")
    for name, error in (("evil.ckpt", UnsafeCheckpointError), ("other.pt", NothingLoadedError)):
        runner = trainer(CheckpointRemapping())
        with pytest.raises(error):
            getattr(runner, run)(net, *[loader()] * (1 + (run == "fit")), ckpt_path=name)
        assert "load_checkpoint" not in vars(runner.strategy)
        assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert not Path("pwned").exists()


@pytest.mark.trap("checkpoints: two fits nest the wrapper unless it is removed")
def test_the_wrapper_comes_and_goes():
    class Probe(TorchCheckpointIO):
        loads = 0

        def load_checkpoint(self, *arguments, **keywords):
            self.loads += 1
            return super().load_checkpoint(*arguments, **keywords)

    probe = Probe()
    fitter = trainer(CheckpointRemapping(), plugins=[probe])
    depths = []
    net = EvaluatedNet()
    net.on_train_start = lambda: depths.append("load_checkpoint" in vars(fitter.strategy))
    for epochs in (1, 2):
        fitter.fit_loop.max_epochs = epochs
        fitter.fit(net, loader(), loader())
        assert "load_checkpoint" not in vars(fitter.strategy)
    net.on_train_start = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        fit(net, CheckpointRemapping(), plugins=[probe])
    assert depths == [True, True]
    assert probe.loads == 0


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_model_checkpoint_keeps_its_work(tmp_path):
    saver = ModelCheckpoint(tmp_path / "runs", save_last=True)
    fitter = trainer(CheckpointRemapping(clean_on_save=True), saver, max_epochs=3, enable_checkpointing=True)
    fitter.fit(EvaluatedNet(compiled=True), loader(), loader())
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["epoch=2-step=30.ckpt", "last.ckpt"]
    assert set(torch.load(saver.best_model_path)["state_dict"]) == set(EvaluatedNet().state_dict())
    resumed = trainer(
        CheckpointRemapping(), ModelCheckpoint(tmp_path / "runs"), max_epochs=4, enable_checkpointing=True
    )
    resumed.fit(EvaluatedNet(compiled=True), loader(), loader(), ckpt_path=saver.best_model_path)
    assert resumed.global_step == 40


# path=


def test_a_path_is_loaded_once_and_a_resume_is_left_alone(lightning_log):
    fit(source := EvaluatedNet())
    path = foreign(source, "prefixed.pt")
    net, starts = EvaluatedNet(), []
    net.on_train_start = lambda: starts.append(weights_equal(source, net))
    fitter = trainer(remapping := CheckpointRemapping(path))
    fitter.fit(net, loader(), loader())
    fitter.save_checkpoint("own.ckpt")
    fitter.fit_loop.max_epochs = 2
    fitter.fit(net, loader(), loader())
    assert starts == [True, False]
    assert remapping.report.loaded == 6
    trained = EvaluatedNet()
    trained.on_train_start = lambda: starts.append(weights_equal(net, trained) or fitter.global_step)
    resumed = trainer(CheckpointRemapping(path), max_epochs=2)
    resumed.fit(trained, loader(), loader(), ckpt_path="own.ckpt")
    assert resumed.global_step == 20
    assert any("is not loaded: the fit resumes from own.ckpt" in line for _, line in lightning_log)
    assert any(f"loaded {path}. 6/6 tensors" in line for _, line in lightning_log)


def test_options_reach_the_loading():
    class Pair(EvaluatedNet):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(3, 2)

    fit(source := EvaluatedNet())
    state = {name.removeprefix("net."): value for name, value in source.state_dict().items()}
    torch.save(state | {"extra": torch.zeros(1)}, "w.pt")
    net, seen = Pair(), []
    net.on_train_start = lambda: seen.append(all(torch.equal(v, net.net.state_dict()[k]) for k, v in state.items()))
    fit(net, CheckpointRemapping("w.pt", submodule="net", allow_unexpected="extra"))
    assert seen == [True]
    with pytest.raises(CheckpointError, match=r"1 tensor is left over in the file: extra"):
        fit(Pair(), CheckpointRemapping("w.pt", submodule="net"))
    with pytest.raises(MisconfigurationException, match=r"CheckpointRemapping\(submodule='nothing'\)"):
        fit(Pair(), CheckpointRemapping("w.pt", submodule="nothing"))
    with pytest.raises(TypeError, match="path must be the path of a file, or its address, got 3"):
        CheckpointRemapping(3)


class Counting(EvaluatedNet):
    """It has a value of its own in its state dict, and a tensor that its state dict copies."""

    def __init__(self, steps=0):
        super().__init__()
        self.steps = steps
        self.seen = torchmetrics.SumMetric()
        self.seen.persistent(True)
        self.seen.update(steps)

    def get_extra_state(self):
        return {"steps": self.steps}

    def set_extra_state(self, state):
        self.steps = state["steps"]


@pytest.mark.parametrize("strategy", ["auto", "ddp_fork"])
def test_a_path_loads_what_only_load_state_dict_takes(strategy):
    source = Counting(steps=7)
    torch.save(source.state_dict(), "w.pt")
    net = Counting()

    def check():
        assert (net.steps, net.seen.sum_value.item()) == (7, 7)
        assert torch.equal(net.state_dict()["net.0.weight"].cpu(), source.state_dict()["net.0.weight"])

    net.on_train_start = check
    ranks = {"strategy": strategy, "devices": {"auto": 1, "ddp_fork": 2}[strategy]}
    fit(net, CheckpointRemapping("w.pt"), max_steps=1, **ranks)
    torch.save({"other": torch.zeros(3)}, "w.pt")
    with pytest.raises(Exception, match=r"No tensor of w.pt fits EvaluatedNet"):
        fit(EvaluatedNet(), CheckpointRemapping("w.pt"), **ranks)


@pytest.mark.trap("checkpoints: ModelParallelStrategy bypasses checkpoint_io")
def test_model_parallel_refuses_foreign_ckpt_paths_in_words():
    foreign(EvaluatedNet(), "raw.pt")

    def run(rank):
        strategy = ModelParallelStrategy(2, tensor_parallel_size=1)
        fitter = trainer(CheckpointRemapping(), strategy=strategy, devices=2)
        words = r"raw.pt is not a checkpoint of the Trainer, and ModelParallelStrategy"
        with pytest.raises(CheckpointError, match=words):
            fitter.fit(EvaluatedNet(built_late=True), loader(), loader(), ckpt_path="raw.pt")
        assert "load_checkpoint" not in vars(strategy)

    fork(run, 2)


# load_from_checkpoint


class Lit(TricksMixin, LightningModule):
    def __init__(self, width=4, root="data", tricks=None):
        super().__init__(tricks=tricks)
        self.save_hyperparameters()
        self.net = nn.Linear(3, width)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0][:, :3]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def saved(module, path="own.ckpt", **more):
    fit(module, max_steps=1).save_checkpoint(path)
    torch.save({**torch.load(path, weights_only=False), **more}, path)
    return path


def test_own_checkpoints_load_with_their_hyperparameters(lightning_log):
    module = Lit(width=5, tricks=Tricks(seed_everything=3))
    loaded = Lit.load_from_checkpoint(saved(module))
    assert loaded.hparams.width == 5
    assert weights_equal(module, loaded)
    assert loaded.load_report.loaded == 2
    assert any("Lit: loaded own.ckpt. 2/2 tensors" in line for _, line in lightning_log)
    with open("own.ckpt", "rb") as stream, pytest.raises(TypeError, match="must be the path"):  # noqa: PTH123
        Lit.load_from_checkpoint(stream)


@pytest.mark.parametrize("name", ["raw.pt", "prefixed.pt", "w.safetensors", "nested.pth"])
def test_foreign_weights_load_with_given_arguments(name):
    module = Lit(width=5)
    loaded = Lit.load_from_checkpoint(foreign(module, name), width=5)
    assert weights_equal(module, loaded)
    with pytest.raises(CheckpointError, match=r"2 tensors are of other shapes or kinds: net"):
        Lit.load_from_checkpoint(name)


def test_strict_and_the_options_of_the_tricks():
    module = Lit()
    torch.save({"net.weight": module.net.weight.detach(), "old": torch.zeros(1)}, "w.pt")
    with pytest.raises(CheckpointError, match=r"1 tensor is missing in the file: net.bias"):
        Lit.load_from_checkpoint("w.pt")
    assert Lit.load_from_checkpoint("w.pt", strict=False).load_report.missing == ["net.bias"]
    allowed = Tricks(checkpoint_remapping={"allow_missing": "net.bias", "allow_unexpected": "old"})
    assert torch.equal(Lit.load_from_checkpoint("w.pt", tricks=allowed).net.weight, module.net.weight)
    torch.save({"old": torch.zeros(1)}, "w.pt")
    with pytest.raises(NothingLoadedError):
        Lit.load_from_checkpoint("w.pt", strict=False)


@pytest.mark.trap("checkpoints: load_from_checkpoint runs pickles from addresses; weights_only=False runs all")
@pytest.mark.parametrize("weights_only", [None, True, False])
def test_load_from_checkpoint_runs_nothing(weights_only):
    path = saved(Lit(), x=Evil())
    with pytest.raises(UnsafeCheckpointError):
        Lit.load_from_checkpoint(path, weights_only=weights_only)
    assert not Path("pwned").exists()


@pytest.mark.trap("checkpoints: CVE-2026-58659, _class_path is imported in spite of weights_only=True")
def test_class_paths_are_not_imported():
    Path("evil_module.py").write_text("import pathlib; pathlib.Path('pwned').touch()\nclass Net: pass\n")
    hyper_parameters = {"_instantiator": "lightning.pytorch.cli.instantiate_module", "_class_path": "evil_module.Net"}
    path = saved(Lit(), hyper_parameters=hyper_parameters)
    words = r"asks for 'evil_module.Net', which is not an imported subclass of Lit"
    with pytest.raises(UnsafeCheckpointError, match=words):
        Lit.load_from_checkpoint(path)
    Lit.load_from_checkpoint(saved(Lit(), hyper_parameters={"_instantiator": "evil_module.Net"}))
    assert not Path("pwned").exists()


class Objects(TricksMixin, LightningModule):
    training_step, configure_optimizers = Lit.training_step, Lit.configure_optimizers

    def __init__(self, config, loss, backbone, other=None):
        super().__init__()
        self.save_hyperparameters(ignore="backbone")
        self.net = nn.Linear(3, 5)


class Whole(Objects):
    def __init__(self, config):
        super(Objects, self).__init__()
        self.save_hyperparameters(config)
        self.net = nn.Linear(3, config["width"])


@dataclasses.dataclass
class Config:
    width: int = 5


def _configs():
    inside = OmegaConf.create({"width": 5, "deep": [1, {"same": "${width}", "none": "${nowhere}", "asked": "???"}]})
    structured = OmegaConf.structured(Config)
    return {
        "OmegaConf": inside,
        "list": OmegaConf.create([1, [2]]),
        "in a dict": {"width": 5, "part": [inside, structured]},
        "namespace": Namespace(width=5, root=Path("data")),
    }


@pytest.mark.parametrize("name", _configs())
def test_objects_are_asked_for_all_at_once_and_taken_as_they_are(name):
    loss = functools.partial(nn.functional.cross_entropy, label_smoothing=0.1)  # once in the file, under two names
    module = Objects(_configs()[name], loss, nn.Linear(1, 1), other=loss)
    path = saved(module, datamodule_hyper_parameters={"root": Path("data")})
    call = r"load_from_checkpoint\(path, config=..., loss=..., other=..., backbone=...\)"
    kinds = r"config \(a .*, loss \(a functools.partial\), other \(a functools.partial\), backbone \(not in the file\)"
    with pytest.raises(CheckpointError, match=rf"Give these arguments: {call}.* run code of the file: {kinds}\.$"):
        Objects.load_from_checkpoint(path)
    given = {"config": _configs()[name], "loss": loss, "other": loss, "backbone": nn.Linear(1, 1)}
    loaded = Objects.load_from_checkpoint(path, **given)
    assert weights_equal(module, loaded)
    assert loaded.hparams.config is given["config"]
    with pytest.raises(TypeError, match="unexpected keyword argument 'confg'"):
        Objects.load_from_checkpoint(path, **given, confg=1)


@pytest.mark.parametrize("config", [OmegaConf.create({"width": 5}), {"width": 5, "root": Path("data")}])
def test_a_config_that_is_all_hyperparameters_is_asked_for_by_its_name(config):
    path = saved(Whole(config))
    with pytest.raises(CheckpointError, match=r"Give these arguments: load_from_checkpoint\(path, config=...\)"):
        Whole.load_from_checkpoint(path)
    assert Whole.load_from_checkpoint(path, config=config).hparams == config


def test_values_of_the_caller_win():
    path = saved(Whole({"width": 5, "rate": Path("data"), "_target_": "os.system"}))
    loaded = Whole.load_from_checkpoint(path, rate=2)
    assert loaded.hparams == {"width": 5, "rate": 2, "_target_": "os.system"}
    loaded = Lit.load_from_checkpoint(saved(Lit(width=5)), root="mine")
    assert loaded.hparams == {"width": 5, "root": "mine", "tricks": None}


def test_what_lies_in_itself_is_saved_as_it_is():
    loop = [Tricks(seed_everything=1)]
    loop.append(loop)
    assert Objects({"loop": loop, "x": [1]}, 1, 2).hparams.config["loop"][0] == Tricks(seed_everything=1).as_dict()


def test_loading_hooks():
    class Hooked(Lit):
        def on_load_checkpoint(self, checkpoint):
            checkpoint["state_dict"] = {name.replace("old", "net"): t for name, t in checkpoint["state_dict"].items()}

    module = Lit(width=6)
    torch.save({f"old.{name}": t for name, t in module.net.state_dict().items()}, "w.pt")
    with pytest.raises(CheckpointError, match=r"hparams_file='hparams.yaml' is not read. Give its values"):
        Hooked.load_from_checkpoint("w.pt", hparams_file="hparams.yaml")
    loaded = Hooked.load_from_checkpoint("w.pt", width=6)
    assert max_output_difference(module.net, loaded.net, torch.ones(1, 3)) == 0


def test_what_a_constructor_loads_is_its_own_affair():
    teacher = Lit()

    class Student(Lit):
        def __init__(self, width=4, root="data", tricks=None):
            super().__init__(width, root, tricks)
            self.teacher = Lit()
            self.teacher.load_state_dict(teacher.state_dict())
            self.first = Lit.load_from_checkpoint("teacher.ckpt")

    saved(teacher, "teacher.ckpt")
    student = Student()
    torch.save({"state_dict": {**student.state_dict(), "teacher.net.bias": torch.ones(4)}}, "student.ckpt")
    loaded = Student.load_from_checkpoint("student.ckpt")
    assert torch.equal(loaded.teacher.net.bias, torch.ones(4))
    assert weights_equal(loaded.first, teacher)
    assert loaded.load_report.loaded == 6
    assert loaded.first.load_report.loaded == 2


def test_a_module_from_a_checkpoint_keeps_its_weights(lightning_log):
    pretrained = Lit()
    save_weights(pretrained, "pretrained.pt")
    starts = []

    class Watched(Lit):
        def on_train_start(self):
            starts.append(weights_equal(self, pretrained))

    module = Watched(tricks=Tricks(checkpoint_remapping="pretrained.pt"))
    fit(Watched.load_from_checkpoint(saved(module, "tuned.ckpt"), tricks=module.tricks), max_steps=1)
    assert starts[0]
    assert not starts[-1]
    assert any("the module comes from load_from_checkpoint" in line for _, line in lightning_log)


class Versioned(nn.Module):
    """Doubles the weights of files that are older than its second version."""

    _version = 2

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        if (local_metadata.get("version") or 1) < 2:
            state_dict[f"{prefix}weight"] = 2 * state_dict[f"{prefix}weight"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def test_modules_with_versions_do_not_take_their_own_weights_for_old_ones():
    class Versions(Lit):
        def __init__(self):
            super().__init__()
            self.part = Versioned()

        def test_step(self, batch, batch_idx):
            self.log("weight", self.part.weight.sum())

    path = saved(Versions())
    for callbacks in ([], [CheckpointRemapping()]):
        runner = Trainer(callbacks=callbacks, **QUIET)
        assert runner.test(Versions(), loader(), ckpt_path=path, verbose=False) == [{"weight": 2.0}]
    assert Versions.load_from_checkpoint(path).part.weight.sum() == 2


def test_weights_without_versions_are_taken_as_of_the_modules_own():
    part = Versioned()
    load_weights(part, {"weight": torch.full((2,), 3.0)})
    assert part.weight.tolist() == [3.0, 3.0]


def test_loaded_tensors_do_not_hang_on_the_file():
    module = Lit()
    path = saved(module)
    loaded = Lit.load_from_checkpoint(path)
    Path(path).write_bytes(b"")
    assert weights_equal(module, loaded)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded.load_state_dict(module.state_dict())
