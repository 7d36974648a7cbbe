"""TrainableCheckpoint in real runs: what it saves, how that resumes, and what it refuses."""

import logging
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.multiprocessing.spawn import ProcessRaisedException
from torchmetrics.classification import MulticlassAccuracy

from lightning_tricks import AutoResume, CheckpointRemapping, Tricks, TricksMixin, load_weights
from lightning_tricks.checkpoint_remapping import CheckpointError
from lightning_tricks.finetuning import BaseMismatchError, GradualUnfreezing, TrainableCheckpoint, load_trainable
from lightning_tricks.seeding import isolated_rng
from tests.contract.checks import Interrupts
from tests.contract.lab import traces_on_trainer
from tests.small import QUIET, EvaluatedNet, loader, same


class Tuned(EvaluatedNet):
    """A frozen backbone, whose BatchNorm counts on, and a head that trains."""

    def __init__(self, seed=0, *, tied=False, compiled=False, release=None):
        self.options = {"seed": seed, "tied": tied}
        self.release = release  # the epoch in which the first layer is released
        super().__init__(optimization="adamw", compiled=compiled)

    def build(self):
        with isolated_rng(seed=self.options["seed"]):
            backbone = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16))
            self.net = nn.Sequential(backbone, nn.Linear(16, 16, bias=False), nn.Linear(16, 10))
        backbone.requires_grad_(False)
        if self.options["tied"]:
            self.net[1].weight = backbone[3].weight
        if self.compiled:
            self.net = torch.compile(self.net, backend="aot_eager")

    def on_train_epoch_start(self):
        if self.release is not None:
            self.net[0][0].requires_grad_(self.current_epoch == self.release)


_FROZEN = {f"net.0.{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias")}


def make_trainer(tmp_path, *callbacks, epochs=2, without=False, **options):
    own = [] if without or any(isinstance(c, TrainableCheckpoint) for c in callbacks) else [TrainableCheckpoint()]
    arguments = {"max_epochs": epochs, "default_root_dir": tmp_path, **QUIET, **options}
    return Trainer(callbacks=[*own, *callbacks], **arguments)


def fit(tmp_path, module, *callbacks, ckpt_path=None, **options):
    trainer = make_trainer(tmp_path, *callbacks, **options)
    with isolated_rng(seed=1):
        trainer.fit(module, loader(), loader(), ckpt_path=ckpt_path)
    return trainer


class SavesEpochs(Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.folder / f"epoch={trainer.current_epoch}.ckpt")


def read(path):
    return torch.load(path, weights_only=True)


def lacks(path, module=None):
    return (module or Tuned()).state_dict().keys() - read(path)["state_dict"].keys()


def assert_same_run(trainer, other):
    assert same(dict(trainer.lightning_module.state_dict()), dict(other.lightning_module.state_dict()))
    optimizers = ([one.state_dict() for one in each.optimizers] for each in (trainer, other))
    assert same(*optimizers)
    assert trainer.global_step == other.global_step > 0


@pytest.mark.oldest
@pytest.mark.trap("finetuning: an adapter-only save by a requires_grad filter loses BatchNorm statistics")
@pytest.mark.parametrize("options", [{}, {"tied": True}, {"release": 1}, {"release": 0}], ids=str)
def test_two_resumes_equal_the_uninterrupted_run(options, tmp_path):
    whole = fit(tmp_path, Tuned(**options), epochs=4, without=True)
    for epochs in (1, 3, 4):
        path = tmp_path / f"{epochs}.ckpt"
        resumed = fit(
            tmp_path, Tuned(**options), epochs=epochs, ckpt_path=(epochs > 1 and tmp_path / "last.ckpt") or None
        )
        resumed.save_checkpoint(path)
        resumed.save_checkpoint(tmp_path / "last.ckpt")
    assert_same_run(resumed, whole)
    assert "net.0.1.running_mean" in read(path)["state_dict"]
    released = {"net.0.0.weight", "net.0.0.bias"} if "release" in options else set()
    tied = {"net.0.3.weight"} if options.get("tied") and "net.1.weight" in read(path)["state_dict"] else set()
    assert lacks(path) == (_FROZEN - released - tied if not options.get("tied") else _FROZEN | {"net.1.weight"})
    assert lacks(tmp_path / "1.ckpt", Tuned(**options)) >= lacks(path)


def test_released_in_the_middle_and_frozen_again(tmp_path):
    """What was released in the second epoch and is frozen in the third stays in the files, also after a resume."""
    fit(tmp_path, Tuned(release=1), SavesEpochs(tmp_path), epochs=3)
    first = {"net.0.0.weight", "net.0.0.bias"}
    assert lacks(tmp_path / "epoch=0.ckpt") == _FROZEN
    assert lacks(tmp_path / "epoch=1.ckpt") == lacks(tmp_path / "epoch=2.ckpt") == _FROZEN - first
    resumed = fit(tmp_path, Tuned(), epochs=4, ckpt_path=tmp_path / "epoch=2.ckpt")
    resumed.save_checkpoint(tmp_path / "later.ckpt")
    assert lacks(tmp_path / "later.ckpt") == _FROZEN - first


@pytest.mark.parametrize("tied", [False, True])
def test_an_early_checkpoint_is_tested_in_the_module_of_the_fit(tied, tmp_path):
    """As by `ckpt_path="best"`: GradualUnfreezing has since released what was frozen in the first epoch."""
    unfreezing = GradualUnfreezing({0: "net.2.*", 1: ["net.0.1.*", "net.1.*"]})
    trainer = fit(tmp_path, Tuned(tied=tied), unfreezing, SavesEpochs(tmp_path), epochs=2)
    (result,) = trainer.test(trainer.lightning_module, loader(), ckpt_path=tmp_path / "epoch=0.ckpt", verbose=False)
    (expected,) = make_trainer(tmp_path, SavesEpochs(tmp_path)).test(
        Tuned(tied=tied), loader(), ckpt_path=tmp_path / "epoch=0.ckpt", verbose=False
    )
    assert result == expected
    never = {"net.0.0.weight", "net.0.0.bias", "net.0.3.weight", "net.0.3.bias"} - (
        {"net.0.3.weight"} if tied else set()
    )
    assert lacks(tmp_path / "epoch=0.ckpt", Tuned(tied=tied)) == never
    assert lacks(tmp_path / "epoch=1.ckpt", Tuned(tied=tied)) == never


@pytest.mark.parametrize("weights_only", [False, True])
def test_every_file_of_the_trainer_is_small(weights_only, tmp_path):
    saving = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_last=True, save_weights_only=weights_only)

    class Saves(Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "by hand.ckpt", weights_only=weights_only)

    trainer = fit(tmp_path, Tuned(), saving, Saves(), enable_checkpointing=True)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    files = sorted(tmp_path.glob("*.ckpt"))
    assert len(files) == 5
    for path in files:
        assert lacks(path) == _FROZEN
    (result,) = trainer.test(Tuned(), loader(), ckpt_path=tmp_path / "epoch=1.ckpt", verbose=False)
    (expected,) = trainer.test(trainer.lightning_module, loader(), verbose=False)
    assert result == expected


def test_says_once_how_much_it_saves(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        fit(tmp_path, Tuned(), SavesEpochs(tmp_path))
    (line,) = (record.message for record in caplog.records if "TrainableCheckpoint" in record.message)
    assert "saves 6 of 12 tensors, 1.797 KiB of 7.047 KiB; the others come from the module that loads it" in line
    caplog.clear()
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        fit(tmp_path, Tuned(), TrainableCheckpoint("*"), SavesEpochs(tmp_path)).save_checkpoint(tmp_path / "whole.ckpt")
    assert "saves all 12 tensors, as none stays frozen and unchanged" in caplog.text
    assert not lacks(tmp_path / "whole.ckpt")
    assert "trainable_checkpoint" not in read(tmp_path / "whole.ckpt")


def test_another_base_is_refused_before_anything_changes(tmp_path):
    fit(tmp_path, Tuned()).save_checkpoint(tmp_path / "small.ckpt")
    other = Tuned()
    other.net[0][3].weight.data[2, 1] += 2**-20
    before = {name: value.clone() for name, value in other.state_dict().items()}
    trainer = make_trainer(tmp_path)
    with pytest.raises(BaseMismatchError, match=r"1 is of other values \(net\.0\.3\.weight\)"):
        trainer.fit(other, loader(), loader(), ckpt_path=tmp_path / "small.ckpt")
    assert same(dict(other.state_dict()), before)
    without = make_trainer(tmp_path, without=True)
    with pytest.raises(RuntimeError, match="load it with TrainableCheckpoint among the Trainer's callbacks"):
        without.fit(other, loader(), loader(), ckpt_path=tmp_path / "small.ckpt")
    assert traces_on_trainer(trainer) == traces_on_trainer(without)


def test_a_full_checkpoint_resumes_and_the_next_one_is_small(tmp_path):
    whole = fit(tmp_path, Tuned(), epochs=2, without=True)
    fit(tmp_path, Tuned(), epochs=1, without=True).save_checkpoint(tmp_path / "full.ckpt")
    resumed = fit(tmp_path, Tuned(), ckpt_path=tmp_path / "full.ckpt")
    assert_same_run(resumed, whole)
    resumed.save_checkpoint(tmp_path / "small.ckpt")
    assert lacks(tmp_path / "small.ckpt") == _FROZEN
    fit(tmp_path, Tuned(seed=1), epochs=3, ckpt_path=tmp_path / "full.ckpt").save_checkpoint(tmp_path / "of other.ckpt")
    # A module that is built like this one has the ones and zeros of BatchNorm, and none of its other weights
    assert lacks(tmp_path / "of other.ckpt") == {"net.0.1.weight", "net.0.1.bias"}


def test_a_second_fit_keeps_the_base(tmp_path):
    """What a first fit trained and a second one froze is not what a new module is built with."""
    module = Tuned()
    fit(tmp_path, module)
    module.requires_grad_(False)
    module.net[2].bias.requires_grad_(True)
    fit(tmp_path, module).save_checkpoint(tmp_path / "small.ckpt")
    assert lacks(tmp_path / "small.ckpt") == _FROZEN
    loaded = Tuned()
    load_trainable(loaded, tmp_path / "small.ckpt")
    assert same(dict(loaded.state_dict()), dict(module.state_dict()))


@pytest.mark.oldest
@pytest.mark.parametrize(("options", "asynchronous"), [({}, False), ({"release": 1}, False), ({}, True)], ids=str)
def test_auto_resume_anywhere(options, asynchronous, tmp_path):
    whole = fit(tmp_path, Tuned(**options), without=True)
    guard = tmp_path / "guard"
    with pytest.raises(SystemExit):
        fit(tmp_path, Tuned(**options), AutoResume(guard, asynchronous=asynchronous), Interrupts(13))
    released = {"net.0.0.weight", "net.0.0.bias"} if "release" in options else set()
    for path in (files := list(guard.glob(".auto_resume/0*/meta.pt"))):
        assert lacks(path) == _FROZEN - released
    assert files
    resumed = fit(tmp_path, Tuned(**options), AutoResume(guard, asynchronous=asynchronous))
    assert_same_run(resumed, whole)
    with pytest.raises(BaseMismatchError, match="are of other values"):
        fit(tmp_path, Tuned(**{**options, "seed": 1}), AutoResume(guard), epochs=3)


class WithMetric(Tuned):
    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(10)

    def training_step(self, batch, batch_idx):
        result = super().training_step(batch, batch_idx)
        self.accuracy(result["preds"], batch[1])
        self.log("accuracy", self.accuracy, on_epoch=True)
        return result


class Edits(Tuned):
    """Keeps a part out of the file by itself, adds a name, and takes both back."""

    def on_save_checkpoint(self, checkpoint):
        checkpoint["state_dict"]["stored elsewhere"] = checkpoint["state_dict"].pop("net.0.0.weight")

    def on_load_checkpoint(self, checkpoint):
        assert "net.0.0.bias" in checkpoint["state_dict"], "the hook does not see the whole"
        checkpoint["state_dict"]["net.0.0.weight"] = checkpoint["state_dict"].pop("stored elsewhere")


@pytest.mark.parametrize("kind", [WithMetric, Edits])
def test_modules_with_states_and_hooks_of_their_own(kind, tmp_path):
    whole = fit(tmp_path, kind(), without=True)
    path = tmp_path / "epoch=0.ckpt"
    fit(tmp_path, kind(), SavesEpochs(tmp_path), epochs=1)
    resumed = fit(tmp_path, kind(), ckpt_path=path)
    assert_same_run(resumed, whole)
    assert resumed.callback_metrics.keys() == whole.callback_metrics.keys()
    assert same(dict(resumed.callback_metrics), dict(whole.callback_metrics))
    assert len(read(path)["state_dict"]) < len(kind().state_dict())
    for name in ("after", "again"):
        resumed.save_checkpoint(tmp_path / f"{name}.ckpt")
        assert read(tmp_path / f"{name}.ckpt")["state_dict"].keys() == read(path)["state_dict"].keys()
    assert "save_checkpoint" not in vars(resumed.strategy)


@pytest.mark.parametrize("first", [True, False])
def test_with_pretrained_weights_of_checkpoint_remapping(first, tmp_path):
    """The base is what the file brings, also where Lightning resumes or tests, which load no such file."""
    torch.save({f"module.{name}": value for name, value in Tuned().state_dict().items()}, tmp_path / "pretrained.pt")

    def callbacks():
        pair = [TrainableCheckpoint(), CheckpointRemapping(str(tmp_path / "pretrained.pt"), clean_on_save=True)]
        return pair if first else pair[::-1]

    whole = fit(tmp_path, Tuned(seed=1), *callbacks(), SavesEpochs(tmp_path))
    assert lacks(tmp_path / "epoch=0.ckpt") == _FROZEN
    for compiled in (False, True):
        module = Tuned(seed=2, compiled=compiled)
        assert_same_run_of_other_names(fit(tmp_path, module, *callbacks(), ckpt_path=tmp_path / "epoch=0.ckpt"), whole)
    trainer = make_trainer(tmp_path, *callbacks())
    (result,) = trainer.test(Tuned(seed=3), loader(), ckpt_path=tmp_path / "epoch=1.ckpt", verbose=False)
    assert [result] == whole.test(whole.lightning_module, loader(), verbose=False)
    alone = make_trainer(tmp_path, CheckpointRemapping(), without=True)
    with pytest.raises(RuntimeError, match="load it with TrainableCheckpoint among the Trainer's callbacks"):
        alone.test(Tuned(seed=1), loader(), ckpt_path=tmp_path / "epoch=1.ckpt", verbose=False)


def assert_same_run_of_other_names(trainer, other):
    names = (each.lightning_module.state_dict() for each in (trainer, other))
    left, right = ({name.replace("_orig_mod.", ""): value for name, value in one.items()} for one in names)
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name])


class LitTuned(TricksMixin, Tuned):
    def __init__(self, seed: int = 0, tricks: Tricks | None = None):
        super().__init__(seed=seed, tricks=tricks)
        self.save_hyperparameters()


def test_load_from_checkpoint_of_the_mixin(tmp_path):
    module = LitTuned()
    fit(tmp_path, module).save_checkpoint(tmp_path / "small.ckpt")
    loaded = LitTuned.load_from_checkpoint(tmp_path / "small.ckpt")
    assert same(dict(loaded.state_dict()), dict(module.state_dict()))
    with pytest.raises(BaseMismatchError, match=r"4 are of other values .* Build the model with the same pretrained"):
        LitTuned.load_from_checkpoint(tmp_path / "small.ckpt", seed=1)


def test_lightnings_load_from_checkpoint_and_load_weights_name_the_remedy(tmp_path):
    fit(tmp_path, Tuned()).save_checkpoint(tmp_path / "small.ckpt")
    with pytest.raises(RuntimeError, match="with load_trainable"):
        Tuned.load_from_checkpoint(tmp_path / "small.ckpt")
    with pytest.raises(CheckpointError, match="load_trainable"):
        load_weights(Tuned(), tmp_path / "small.ckpt")


def test_extra_patterns(tmp_path):
    fit(tmp_path, Tuned(), TrainableCheckpoint(["net.0.0.*", "re:^net.0.3.b"])).save_checkpoint(tmp_path / "small.ckpt")
    assert lacks(tmp_path / "small.ckpt") == {"net.0.1.weight", "net.0.1.bias", "net.0.3.weight"}
    with pytest.raises(MisconfigurationException, match=r"pattern 'backbone\.\*' matches none of the 12 names"):
        fit(tmp_path, Tuned(), TrainableCheckpoint("backbone.*"))
    with pytest.raises(ValueError, match="a pattern must not be empty"):
        TrainableCheckpoint("")
    with pytest.raises(TypeError, match="a pattern must be a string, got 3"):
        TrainableCheckpoint([3])


def test_strategies_that_write_files_of_their_own_are_refused():
    trainer = SimpleNamespace(strategy=FSDPStrategy(), callbacks=[])  # a Trainer with it needs a GPU
    with pytest.raises(MisconfigurationException, match="anything out of the files that FSDPStrategy writes by itself"):
        TrainableCheckpoint().setup(trainer, Tuned(), "fit")


def test_async_checkpoint_io(tmp_path):
    fit(tmp_path, Tuned(), SavesEpochs(tmp_path), plugins=[AsyncCheckpointIO()])
    assert lacks(tmp_path / "epoch=0.ckpt") == _FROZEN
    whole = fit(tmp_path, Tuned(), without=True)
    assert_same_run(fit(tmp_path, Tuned(), ckpt_path=tmp_path / "epoch=0.ckpt"), whole)


def test_a_rank_with_another_base_is_refused(tmp_path):
    class OtherBaseOnRankOne(Tuned):
        def setup(self, stage):
            if self.global_rank == 1:
                self.net[0][0].weight.data.add_(1)

    fit(tmp_path, Tuned(), SavesEpochs(tmp_path), epochs=1)
    ddp = {"strategy": "ddp_fork", "devices": 2, "limit_val_batches": 0}
    with pytest.raises(ProcessRaisedException, match="BaseMismatchError"):
        fit(tmp_path, OtherBaseOnRankOne(), ckpt_path=tmp_path / "epoch=0.ckpt", **ddp)
