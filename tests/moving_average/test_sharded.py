"""ExponentialMovingAverage where each rank holds shards of the weights: equal to the average of the whole by hand."""

from __future__ import annotations

import warnings
from math import prod

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from packaging.version import Version
from torch import nn

from lightning_tricks import AutoResume, ExponentialMovingAverage, load_weights
from lightning_tricks.auto_resume import CheckpointFolder
from tests.contract.checks import Interrupts
from tests.contract.lab import full
from tests.small import QUIET, EvaluatedNet, cases, fork, loader, ranks_agree_at_once, same, unseen

pytestmark = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.7"), reason="FSDP2 of torch 2.6 needs an accelerator"
)
DECAY = 0.9
MESHES = {"two": (2, 1), "four": (4, 1), "in two dimensions": (2, 2)}  # data parallel, tensor parallel


class Scaled(nn.Module):
    """Of two numbers the first one, which rank zero has, does not change."""

    def __init__(self):
        super().__init__()
        self.scales = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return x * self.scales[1]


class Uneven(EvaluatedNet):
    """Rows that ranks cannot share evenly, fewer rows than ranks, tied and frozen weights, batch normalization."""

    def build(self):
        layers = [nn.Linear(64, 6), nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 1), nn.Linear(1, 10)]
        self.net = nn.Sequential(*layers, nn.Linear(10, 10), nn.Linear(10, 10), Scaled())
        self.net[6].weight = self.net[5].weight
        self.net[4].requires_grad_(False)

    def configure_model(self):
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        if self.device_mesh["tensor_parallel"].size() > 1:
            plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)
        fully_shard(self.net[3], mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class SavesBeforeTraining(Callback):
    """A file of whole tensors, while the average is still in the module."""

    def on_train_start(self, trainer, pl_module):
        trainer.save_checkpoint("early.ckpt")


class ByHand(Callback):
    """The whole average, after each step; it knows whether each validation has it."""

    def __init__(self, evaluate=True):
        self.evaluate = evaluate
        self.averages = unseen({})  # not a part of a checkpoint
        self.steps = 0

    def on_train_start(self, trainer, pl_module):
        for optimizer in trainer.optimizers:
            optimizer.register_step_post_hook(lambda *_: self.note(pl_module))

    def note(self, module):
        decay = min(DECAY, (1 + self.steps) / (10 + self.steps)) if self.steps else 0.0
        for name, value in module.named_parameters():
            if value.requires_grad:
                self.averages().setdefault(name, torch.zeros(value.shape)).lerp_(full(value).float(), 1 - decay)
        self.steps += 1

    def on_validation_epoch_end(self, trainer, pl_module):
        if self.averages() and not trainer.sanity_checking:
            assert self.evaluate is all(same(full(each), self.averages()[name]) for name, each in trained(pl_module))

    def state_dict(self):
        return {"averages": dict(self.averages()), "steps": self.steps}

    def load_state_dict(self, state_dict):
        self.averages().update(state_dict["averages"])
        self.steps = state_dict["steps"]


def trained(module):
    return [(name, value) for name, value in module.named_parameters() if value.requires_grad]


def train(folder, mesh, *callbacks, rank=0, evaluate=True, epochs=2, path=None, whole=False, **options):
    """Fit, and write what this rank has at the end: whole weights, its buffers, and what was averaged by hand."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    saves = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=3, save_on_train_epoch_end=False)
    trainer = Trainer(
        callbacks=[*callbacks, ExponentialMovingAverage(DECAY, evaluate=evaluate), hand := ByHand(evaluate), saves],
        strategy=ModelParallelStrategy(*MESHES[mesh], save_distributed_checkpoint=not whole),
        devices=prod(MESHES[mesh]),
        **{**QUIET, "enable_checkpointing": True, "max_epochs": epochs, "val_check_interval": 2, **options},
    )
    trainer.fit(module := Uneven(), loader(), loader(), ckpt_path=path)
    trainer.save_checkpoint(folder / "end.ckpt")
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    torch.save(({n: full(t) for n, t in tensors.items()}, hand.averages()), folder / f"rank{rank}.pt")


def run(folder, mesh, *callbacks, **options):
    """Return what each rank wrote."""
    folder.mkdir(exist_ok=True)
    fork(lambda rank: train(folder, mesh, *callbacks, rank=rank, **options), prod(MESHES[mesh]))
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(prod(MESHES[mesh]))]


@cases("mesh, whole, evaluate", ("two", False, False), ("two", True, False), ("in two dimensions", True, True))
def test_training_goes_on_from_a_checkpoint_of_lightning(mesh, whole, evaluate, tmp_path):
    """A folder of shards, or one file; from the middle and from one that was saved after a fit."""
    options = {"evaluate": evaluate, "whole": whole}
    expected = run(tmp_path / "run", mesh, **options)
    run(tmp_path / "first", mesh, epochs=1, **options)
    for path in (tmp_path / "first/end.ckpt", tmp_path / "run/step=3.ckpt"):
        assert path.is_file() is whole
        ended = run(tmp_path / "resumed", mesh, path=path, **options)
        assert whole_average(tmp_path / "resumed/end.ckpt", ended)
        if path.stem == "end":  # in the middle of an epoch, Lightning begins with its first batch
            assert all(same(*map(without_statistics, pair)) for pair in zip(ended, expected, strict=True))


def whole_average(path, ended):
    """Whether a checkpoint has the average by hand."""
    load_weights(model := Uneven(), path, ema=True)
    return all(torch.equal(value, averages[name]) for _, averages in ended for name, value in trained(model))


def without_statistics(ended):
    """Of several ranks, Lightning keeps those of one."""
    return [{name: value for name, value in values.items() if "net.2" not in name} for values in ended]


@pytest.mark.parametrize("mesh", MESHES)
def test_auto_resume_goes_on_bit_for_bit(mesh, tmp_path):
    """To the average of the whole weights, and of each rank's own statistics; its folder is read as a file is."""
    expected = run(tmp_path / "whole", mesh)
    for tensors, averages in expected:
        assert averages.keys() == {name for name, _ in trained(Uneven())}
        assert all(torch.equal(tensors[name], average) for name, average in averages.items())
    assert not torch.equal(expected[0][0]["net.2.running_mean"], expected[-1][0]["net.2.running_mean"])
    resumes = [AutoResume(tmp_path / "resume")]
    with pytest.raises(SystemExit), ranks_agree_at_once():
        run(tmp_path / "killed", mesh, *resumes, Interrupts(4))
    ended = run(tmp_path / "killed", mesh, *resumes, SavesBeforeTraining(), whole=True)
    early = torch.load("early.ckpt", weights_only=True)
    assert {type(value) for value in early["current_model_state"].values()} == {torch.Tensor}
    assert not same(early["current_model_state"], early["state_dict"])
    assert all(same(now, before) for now, before in zip(ended, expected, strict=True))
    folder = CheckpointFolder(tmp_path / "resume")
    assert whole_average(folder.path_of(folder.manifests()[0]), expected)


@cases("before, now", ("two", "four"), ("four", "two"))
def test_another_number_of_ranks(before, now, tmp_path):
    """Averages go on from where they were, as weights and moments do."""
    with pytest.raises(SystemExit), ranks_agree_at_once():
        run(tmp_path / "run", before, AutoResume(tmp_path / "resume"), Interrupts(3))
    ended = run(tmp_path / "run", now, AutoResume(tmp_path / "resume"))
    assert whole_average(tmp_path / "run/end.ckpt", ended)
