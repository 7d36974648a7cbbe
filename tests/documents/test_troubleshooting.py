"""The messages of torch and Lightning in `docs/troubleshooting.md` are theirs, and what the page advises helps."""

import re
from importlib import import_module
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins import MixedPrecision
from lightning_utilities.core import rank_zero
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_tricks import (
    AutoResume,
    CheckpointRemapping,
    GradientClipping,
    MetricsMonitor,
    ScheduleSpec,
    load_weights,
    read_checkpoint,
    replace_head,
    seed_everything,
)
from lightning_tricks.metrics import multiclass_metrics
from lightning_tricks.seeding import isolated_seeding
from tests.documents.blocks import README
from tests.small import QUIET, loader

pytestmark = pytest.mark.newest  # the words of other versions differ

PAGE = README.parent / "docs" / "troubleshooting.md"
# What no CPU provokes, or what is provoked beside the trick that helps
ELSEWHERE = {
    "Must flatten tensors with uniform requires_grad": "FSDP1 needs a GPU",
    "CUDA out of memory": "tests/devices and tests/emulated_cuda try the trick",
    "CUDA-capable device(s) is/are busy or unavailable": "needs a GPU",
    "Watchdog caught collective operation timeout": "NCCL; tests/hang_watch hangs ranks of gloo",
    "parameters that were not used in producing the loss": "tests/model_report and tests/finetuning",
    "does not have many workers which may be a bottleneck": "with more than two cores; tests/devices try the verdict",
    "Received SIGTERM: 15": "tests/auto_resume/test_exit_codes.py",
}


class Net(LightningModule):
    """A linear layer on digits; `parts` are given back by its step, too."""

    def __init__(self, **options):
        super().__init__()
        self.save_hyperparameters(ignore=["spoil"])
        self.options = options
        self.net = nn.Linear(64, 10)

    def training_step(self, batch, batch_idx):
        scores = self.net(batch[0])
        return {"loss": self.options.get("spoil", lambda loss, index: loss)(
            nn.functional.cross_entropy(scores, batch[1]), batch_idx
        ), "preds": scores, "target": batch[1]}  # fmt: skip

    def validation_step(self, batch, batch_idx):
        self.log("plain", 1.0)
        return {"preds": self.net(batch[0]), "target": batch[1]}

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, fused=self.options.get("fused", False))


class Manual(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx)["loss"])
        optimizer.step()


def fit(module, *callbacks, data=None, **options):
    resumed = {"ckpt_path": options.pop("ckpt_path")} if "ckpt_path" in options else {}
    trainer = Trainer(**{**QUIET, "max_epochs": 1, **options}, callbacks=[*callbacks])
    trainer.fit(module, data or loader(), loader(), **resumed)
    return trainer


def raises(message, kind=Exception):
    return pytest.raises(kind, match=re.escape(message))


def test_each_heading_is_provoked_here():
    headings = re.findall(r"^### (.*)", PAGE.read_text("utf-8"), re.MULTILINE)
    messages = {message for heading in headings for message in re.findall(r"`([^`]+)`", heading)}
    provoked = Path(__file__).read_text("utf-8").partition("def test_each_heading")[2]
    assert len(messages) > 20
    assert {one for one in messages if one.replace("...", ".*") not in provoked} == {*ELSEWHERE}


def test_a_trainer_of_the_other_lightning():  # what the page advises is in tests/flavor
    log = rank_zero.log
    other = import_module("pytorch_lightning")
    rank_zero.log = log  # whichever package comes last takes over what both say
    with raises("Please switch to a single import style"):
        other.Trainer(**QUIET).fit(BoringModel())
    with raises("`model` must be a `LightningModule` or `torch._dynamo.OptimizedModule`, got `Net`"):
        other.Trainer(**QUIET).fit(Net(), loader())


def test_a_loss_that_becomes_nan():
    def spoil(loss, index):
        return loss + (loss * 0).sqrt() * 0 if index == 3 else loss

    with raises("returned nan values in its 0th output"):
        fit(Net(spoil=spoil), detect_anomaly=True)
    with raises("gradients are not finite"):
        fit(Net(spoil=spoil), GradientClipping(1.0, on_nonfinite="raise"))
    module = Net(spoil=spoil)
    fit(module, GradientClipping(1.0, on_nonfinite="skip", max_consecutive_skips=10))
    assert module.net.weight.isfinite().all()


def test_clipping_that_lightning_refuses():
    with raises("Automatic gradient clipping is not supported for manual optimization"):
        fit(Manual(), gradient_clip_val=1.0)
    fit(Manual(), GradientClipping(1.0))
    scaled = {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]}
    with raises("does not allow for gradient clipping because it performs unscaling of gradients internally"):
        fit(Net(fused=True), gradient_clip_val=1.0, **scaled)
    scaled = {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]}
    fit(Net(fused=True), GradientClipping(1.0), **scaled)


def test_a_schedule_that_ends_too_early():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)
    for _ in range(4):
        optimizer.step(), schedule.step()
    with pytest.raises(ValueError, match=r"Tried to step .* times"):
        schedule.step()
    builds = ScheduleSpec("warmup_cosine", warmup=2)
    assert [factor > 0 for factor in builds.factors(4)] == [True] * 4 + [False]  # the last is after the run


def test_no_gradient_behind_reentrant_checkpoints():
    frozen, head, x = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 1), torch.ones(2, 4)
    both = nn.Sequential(frozen, head)
    with raises("does not require grad and does not have a grad_fn"), pytest.warns(UserWarning, match="None of the"):
        checkpoint(both, x, use_reentrant=True).sum().backward()
    checkpoint(both, x, use_reentrant=False).sum().backward()
    assert head.weight.grad is not None


def test_an_optimizer_without_gradients_under_fp16():
    net, scaler = nn.Linear(4, 1).requires_grad_(False), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    loss = (nn.Parameter(torch.ones(1)) * net(torch.ones(1, 4))).sum()
    scaler.scale(loss).backward()
    with raises("No inf checks were recorded for this optimizer"):
        scaler.step(optimizer)
    net.requires_grad_(True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(net(torch.ones(1, 4)).sum()).backward()
    scaler.step(optimizer)


def test_an_operation_that_is_not_deterministic():
    def operate():
        nn.functional.max_unpool2d(torch.ones(1, 1, 2, 2), torch.zeros(1, 1, 2, 2, dtype=torch.long), 2)

    with isolated_seeding():
        seed_everything(1, verbose=False, deterministic=True)
        with raises("does not have a deterministic implementation"):
            operate()
        seed_everything(1, verbose=False, deterministic="warn")
        with pytest.warns(UserWarning, match="does not have a deterministic implementation"):
            operate()


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_resume_in_the_middle_of_an_epoch(tmp_path):
    def script(*callbacks, **options):
        seed_everything(1, verbose=False)
        module = Net()
        fit(module, *callbacks, data=loader(shuffle=True), max_epochs=2, **options)
        return module.net.weight

    def stop(loss, index):
        if index == 6:
            raise KeyError("killed")
        return loss

    whole = script()
    seed_everything(1, verbose=False)
    saved = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_last=True)
    with raises("killed", KeyError):
        fit(Net(spoil=stop), saved, enable_checkpointing=True)
    with pytest.warns(UserWarning, match="You're resuming from a checkpoint that ended before the epoch ended"):
        script(
            ModelCheckpoint(tmp_path, every_n_train_steps=3),
            ckpt_path=tmp_path / "last.ckpt",
            enable_checkpointing=True,
        )
    seed_everything(1, verbose=False)
    with raises("killed", KeyError):
        resumed = AutoResume(tmp_path / "resume", every_n_train_steps=3)
        fit(Net(spoil=stop), resumed, data=loader(shuffle=True), max_epochs=2)
    guard = AutoResume(tmp_path / "resume", every_n_train_steps=3, ignore="module.options.keys")
    assert torch.equal(script(guard), whole)


def test_keys_and_sizes_that_differ(tmp_path):
    net, other = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    torch.save(nn.DataParallel(net).state_dict(), tmp_path / "net.pt")
    for message in ("Missing key(s) in state_dict", "Unexpected key(s) in state_dict"):
        with raises(message):
            net.load_state_dict(torch.load(tmp_path / "net.pt"))
    load_weights(net, tmp_path / "net.pt")
    with raises("size mismatch for"):
        other.load_state_dict(net.state_dict(), strict=False)
    load_weights(other, tmp_path / "net.pt", allow_mismatched="1.*")
    replace_head(net, 3)
    assert net[1].out_features == 3


def test_a_checkpoint_with_an_object(tmp_path):
    trainer = fit(Net(path=Path("data")), ModelCheckpoint(tmp_path / "plain"), enable_checkpointing=True)
    with raises("Weights only load failed"):
        torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)
    load_weights(Net(), trainer.checkpoint_callback.best_model_path)
    with raises("Weights only load failed"):
        trainer.test(dataloaders=loader(), ckpt_path="best")
    callbacks = [ModelCheckpoint(tmp_path / "read"), CheckpointRemapping()]
    trainer = fit(Net(path=Path("data")), *callbacks, enable_checkpointing=True)
    trainer.test(dataloaders=loader(), ckpt_path="best")


def test_files_that_are_no_checkpoints(tmp_path):
    whole = tmp_path / "net.pt"
    torch.save(nn.Linear(64, 64).state_dict(), whole)
    (cut := tmp_path / "cut.pt").write_bytes(whole.read_bytes()[:900])
    (empty := tmp_path / "empty.pt").touch()
    (page := tmp_path / "page.pt").write_text("<!DOCTYPE html><html></html>")
    for path, message in ((cut, "PytorchStreamReader failed"), (page, "Unsupported operand")):
        with raises(message):
            torch.load(path, weights_only=True)
        with raises(path.name):
            read_checkpoint(path)
    with pytest.raises(EOFError):  # `EOFError`
        torch.load(empty, weights_only=True)
    with raises("empty"):
        read_checkpoint(empty)


def test_weights_alone_as_a_checkpoint(tmp_path):
    torch.save(Net().state_dict(), tmp_path / "weights.pt")
    with pytest.raises(KeyError, match="pytorch-lightning_version"):  # `KeyError: 'pytorch-lightning_version'`
        fit(Net(), ckpt_path=tmp_path / "weights.pt")
    fit(Net(), CheckpointRemapping(tmp_path / "weights.pt"))


def test_a_metric_that_is_not_found(tmp_path):
    with raises("Early stopping conditioned on metric"):
        fit(Net(), EarlyStopping("val_acc"))
    with raises("could not find the monitored key"):
        fit(Net(), ModelCheckpoint(tmp_path, monitor="val_acc"), enable_checkpointing=True)
    metrics = MetricsMonitor(multiclass_metrics(10))
    callbacks = [metrics, EarlyStopping("val/acc"), ModelCheckpoint(tmp_path, monitor="val/acc")]
    fit(Net(), *callbacks, enable_checkpointing=True)
