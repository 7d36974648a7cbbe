"""Two ranks: the gradients of whole batches, one synchronisation, and sizes that all ranks agree on."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, Subset

from lightning_tricks import Microbatching
from lightning_tricks.microbatching.callback import waits_in_forward
from tests.microbatching.models import Memory, Net, fit, rows_of
from tests.small import QUIET, Hooks, real_fp16


class Ranked(Net):
    """Memory runs out on one rank alone; the gradients' synchronisations are counted."""

    def __init__(self, memory=None, rank=None, **net):
        super().__init__(memory, **net)
        del self.unused
        self.rank, self.syncs = rank, 0
        self.buffer_of_rank_zero = nn.Buffer(torch.zeros((), dtype=torch.float64))

    def setup(self, stage):
        if self.rank not in (None, self.global_rank):
            self.memory.rows = 1000

    def training_step(self, batch, batch_idx):
        self.buffer_of_rank_zero += self.global_rank + 1
        loss, _ = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


def saves(path, microbatching=None):
    """Counts the forward passes after which DDP averages gradients in the backward pass, and saves what a rank has."""

    def count(trainer, module):
        def see(wrapper, _):
            module.syncs += wrapper.require_backward_grad_sync

        trainer.strategy.model.register_forward_pre_hook(see)

    def save(trainer, module):
        values = {name: value for name, value in module.state_dict().items() if name != "seen"}
        facts = {"weights": values, "syncs": module.syncs, "steps": trainer.global_step}
        facts |= {"metrics": dict(trainer.callback_metrics), "seen": int(module.seen)}
        if microbatching:
            facts["size"] = microbatching.current_size
        torch.save(facts, path / f"{trainer.global_rank}.pt")

    return Hooks(on_train_start=count, on_train_end=save)


def fit_ranks(folder, module, microbatching=None, *, data=None, strategy=None, **trainer):
    folder.mkdir()
    callbacks = [saves(folder, microbatching), *([microbatching] if microbatching else [])]
    strategy = strategy or DDPStrategy(start_method="fork")
    fit(module, *callbacks, data=data or rows_of(48), strategy=strategy, devices=2, **trainer)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def assert_same_training(got, expected, tolerance=1e-12):
    for rank, whole in zip(got, expected, strict=True):
        assert rank["steps"] == whole["steps"]
        for name, value in whole["weights"].items():
            if not name.startswith("buffer"):
                assert torch.allclose(rank["weights"][name], value, rtol=tolerance, atol=tolerance), name
        for name, value in whole["metrics"].items():
            assert torch.allclose(rank["metrics"][name], value, rtol=max(tolerance, 1e-6)), name


@pytest.mark.parametrize("accumulated", [1, 2])
def test_one_synchronisation_for_each_step(accumulated, tmp_path):
    whole = fit_ranks(tmp_path / "whole", Ranked(), accumulate_grad_batches=accumulated)
    cut = fit_ranks(tmp_path / "cut", Ranked(), Microbatching(3), accumulate_grad_batches=accumulated)
    found = fit_ranks(tmp_path / "found", Ranked(Memory(3)), Microbatching(), accumulate_grad_batches=accumulated)
    for other in (cut, found):
        assert_same_training(other, whole)
        assert [rank["syncs"] for rank in other] == [rank["syncs"] for rank in whole]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_memory_runs_out_on_one_rank_alone(rank, where, tmp_path):
    whole = fit_ranks(tmp_path / "whole", Ranked(optimizer="sgd"), gradient_clip_val=0.5)
    module = Ranked(Memory(4, where), rank, optimizer="sgd")
    found = fit_ranks(tmp_path / "found", module, Microbatching(), gradient_clip_val=0.5)
    assert_same_training(found, whole)
    assert [rank["size"] for rank in found] == [3, 3]
    assert found[0]["seen"] == whole[0]["seen"]
    for name, value in found[0]["weights"].items():
        assert torch.equal(value, found[1]["weights"][name]) or name.startswith("buffer")


def test_ranks_with_unequal_batches(tmp_path):
    class Uneven(Ranked):
        def train_dataloader(self):
            rows = rows_of(48)
            parts = [Subset(rows, range(32)), Subset(rows, range(32, 48))]
            return DataLoader(parts[self.global_rank], batch_size=(8, 4)[self.global_rank])

    def trained(name, module, *microbatching):
        (tmp_path / name).mkdir()
        callbacks = [saves(tmp_path / name, *microbatching), *microbatching]
        Trainer(
            **QUIET, max_epochs=3, callbacks=callbacks, devices=2, strategy="ddp_fork", use_distributed_sampler=False
        ).fit(module)
        return [torch.load(tmp_path / name / f"{rank}.pt") for rank in range(2)]

    whole = trained("whole", Uneven())
    assert_same_training(trained("cut", Uneven(), Microbatching(3)), whole)
    assert_same_training(trained("wide", Uneven(), Microbatching(4)), whole)  # one part on rank 1, two on rank 0
    assert_same_training(trained("found", Uneven(Memory(3)), Microbatching()), whole)


def test_unused_parameters(tmp_path):
    class Branches(Ranked):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.idle = nn.Linear(2, 2).double()

        def on_before_optimizer_step(self, optimizer):
            assert self.idle.weight.grad is None

    looks = {"strategy": "ddp_fork_find_unused_parameters_true"}
    whole = fit_ranks(tmp_path / "whole", Branches(), **looks)
    assert_same_training(fit_ranks(tmp_path / "cut", Branches(), Microbatching(3), **looks), whole)
    assert_same_training(fit_ranks(tmp_path / "found", Branches(Memory(3)), Microbatching(), **looks), whole)


def test_gradients_that_are_views_of_buckets(tmp_path):
    def strategy():
        return DDPStrategy(start_method="fork", gradient_as_bucket_view=True)

    whole = fit_ranks(tmp_path / "whole", Ranked(), strategy=strategy())
    assert_same_training(fit_ranks(tmp_path / "cut", Ranked(), Microbatching(3), strategy=strategy()), whole)
    found = fit_ranks(tmp_path / "found", Ranked(Memory(3), 1), Microbatching(), strategy=strategy())
    assert_same_training(found, whole)


def test_a_static_graph_is_refused(tmp_path):
    strategy = DDPStrategy(start_method="fork", static_graph=True)
    with pytest.raises(Exception, match="does not work with DDPStrategy"):
        fit_ranks(tmp_path / "none", Ranked(), Microbatching(3), strategy=strategy)


def test_real_fp16_on_two_ranks(tmp_path):
    data = [(x.float(), y) for x, y in rows_of(48)]
    whole = fit_ranks(tmp_path / "whole", Ranked(optimizer="sgd").float(), data=data, plugins=[real_fp16()])
    cut = Ranked(Memory(3), 1, optimizer="sgd").float()
    found = fit_ranks(tmp_path / "found", cut, Microbatching(), data=data, plugins=[real_fp16()])
    assert_same_training(found, whole, tolerance=2e-3)


def test_a_row_that_fits_on_no_rank_ends_all(tmp_path):
    with pytest.raises(Exception, match="a single row runs out of memory"):
        fit_ranks(tmp_path / "none", Ranked(Memory(0), 1), Microbatching())


def test_layers_that_wait_for_other_ranks_are_found():
    assert waits_in_forward(Net(norm=nn.SyncBatchNorm(16)))
    assert not waits_in_forward(Net())
