"""Ranks of one run: what should be equal and is not, what should differ and does not, and no alarm anywhere else."""

import json
import random
import time
import warnings
from datetime import timedelta
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningDataModule, Trainer, seed_everything
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed import HashStore
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, random_split

from lightning_tricks import AutoResume, RunFingerprint, RunReport
from lightning_tricks.cli import main
from lightning_tricks.ensembles import VotingClassifier
from lightning_tricks.run_fingerprint import FingerprintRecordError, compare, read_ranks
from lightning_tricks.run_fingerprint.core import ranks as core
from lightning_tricks.run_fingerprint.core.ranks import RankComparison, RankExchange, RepeatedBatches, compare_ranks
from lightning_tricks.run_fingerprint.core.record import Column
from lightning_tricks.run_report import find_all, read_record
from tests.run_fingerprint.test_callback import ConvNet, at_step, saving, stopping
from tests.small import QUIET, Hooks, Net, cases, digits, fork, ranks_agree_at_once

DDP = {"strategy": "ddp_fork", "devices": 2}
WARNED = "ignore:RunFingerprint:UserWarning"  # by rank zero, in a process of its own: the report tells what it said


class Stream(IterableDataset):
    """The same samples for each rank and each worker."""

    def __init__(self, count=60):
        self.count = count

    def __iter__(self):
        yield from (digits(self.count)[place] for place in range(self.count))


def run(folder, callbacks=(), net=Net, data=None, fingerprint=MappingProxyType({}), **trainer):
    """Train on two ranks; a warning is an error, unless the test says otherwise."""
    seed_everything(1, verbose=False)
    watch = RunFingerprint(folder / "run.jsonl", **fingerprint)
    fitter = Trainer(callbacks=[*callbacks, watch], **{**QUIET, "max_epochs": 2, **DDP, **trainer})
    fitter.fit(net(), DataLoader(digits(128), 4, shuffle=True) if data is None else data)


def found_in(folder, callbacks=(), **options):
    """Train on two ranks, and return what the report has found among them."""
    run(folder, [*callbacks, RunReport(folder / "report")], **options)
    return warned(folder)


def warned(folder):
    return [part.text for part in find_all(read_record(folder / "report")) if "rank" in part.text]


def same_in_the_files(folder, capsys):
    """What the command says of the files, in its three forms."""
    path, other = str(folder / "run.jsonl"), str(folder / "run.rank1.jsonl")
    said = []
    for command in (["ranks", path], ["ranks", str(folder)], ["diff", path, other]):
        assert main(["fingerprint", *command]) == 1
        said.append(capsys.readouterr().out.splitlines())
    assert said[0] == said[1] == said[2]
    return said[0]


def drift(module):
    with torch.no_grad():
        module.net[0].bias += 0.01


def other_rate(module):
    module.trainer.optimizers[0].param_groups[0]["lr"] *= 0.5


@pytest.mark.filterwarnings(WARNED)
@pytest.mark.trap("asked_most: weights that drift from step 5: six callbacks and the report say nothing")
@pytest.mark.parametrize(("detail", "names"), [("step", ""), ("layer", ": net.0.bias")])
def test_replicas_that_drift(tmp_path, capsys, detail, names):
    said = found_in(tmp_path, [at_step(5, drift, rank=1)], fingerprint={"detail": detail})
    assert said == same_in_the_files(tmp_path, capsys)
    assert len(said) == 1
    assert said[0].startswith(
        f"The weights of rank 1 differ from those of rank 0 after step 5 (epoch 0, batch 5){names}."
    )


@pytest.mark.filterwarnings(WARNED)
def test_another_learning_rate_on_one_rank(tmp_path, capsys):
    said = found_in(tmp_path, [at_step(6, other_rate, rank=1)])
    assert said == same_in_the_files(tmp_path, capsys)
    assert [line[:75] for line in said] == [
        "The learning rates of rank 1 differ from those of rank 0 at step 6 (epoch 0"[:75],
        "The weights of rank 1 differ from those of rank 0 after step 6 (epoch 0, ba",
    ]


@pytest.mark.filterwarnings(WARNED)
@pytest.mark.trap("asked_most: same data on both ranks: six callbacks and the report say nothing")
@pytest.mark.parametrize("detail", ["step", "layer"])
def test_the_same_data_on_both_ranks(tmp_path, capsys, detail):
    said = found_in(tmp_path, data=DataLoader(Stream(), 4), fingerprint={"detail": detail})
    assert said == same_in_the_files(tmp_path, capsys)
    expected = (
        "Ranks 0, 1 read the same batches from step 0 (epoch 0, batch 0) to step 12 (epoch 0, batch 12), 13 different"
    )
    assert [line[: len(expected)] for line in said] == [expected]


class Validated(Net):
    def validation_step(self, batch, batch_idx):
        self.net(batch[0])


class Divided(LightningDataModule):
    """Is split by each rank itself, by a seed of its own or by one of all."""

    def __init__(self, seeds, as_rows=False):
        super().__init__()
        self.seeds, self.as_rows = seeds, as_rows

    def setup(self, stage):
        generator = torch.Generator().manual_seed(self.seeds[self.trainer.global_rank])
        self.parts = random_split(digits(128), [96, 32], generator)
        if self.as_rows:
            self.parts = [[part[place] for place in range(len(part))] for part in self.parts]

    def train_dataloader(self):
        return DataLoader(self.parts[0], 4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.parts[1], 4)


@pytest.mark.filterwarnings(WARNED)
@pytest.mark.parametrize("as_rows", [False, True])
def test_data_that_each_rank_has_split_by_its_own_seed(tmp_path, capsys, as_rows):
    """Rows that one rank trains on are those that the other one validates with."""
    said = found_in(tmp_path, net=Validated, data=Divided((1, 2), as_rows), max_epochs=1)
    assert said == same_in_the_files(tmp_path, capsys)
    assert [line.partition(".")[0] for line in said] == [
        "The data of rank 1 differ from those of rank 0: training, validation"
    ]


def test_a_finding_is_a_warning_at_once(tmp_path):
    """Warnings are errors here, and rank zero raises them."""
    words = r"RunFingerprint: The weights of rank 1 differ .* after step 5 \(epoch 0, batch 5\)"
    with pytest.raises(Exception, match=words):
        run(tmp_path, [at_step(5, drift, rank=1)])


class Personal(Net):
    """Has a weight of each rank's own, which DDP is told to leave alone."""

    def build(self):
        super().build()
        self.own = nn.Linear(64, 10)
        names = ["own.weight", "own.bias"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, names)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]) + self.own(batch[0]), batch[1])


class Noisy(Net):
    """Draws numbers of each rank's own, in the batch and in the model."""

    def on_train_start(self):
        torch.manual_seed(self.global_rank)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] + torch.rand_like(batch[0]), batch[1]


def constant(count=128):
    images, labels = digits(count).tensors
    return TensorDataset(torch.ones_like(images), torch.zeros_like(labels))


def few(count=128):
    """Twelve different batches, again and again, with a tail of its own."""
    images = torch.arange(12.0).repeat(12)[:count, None, None].expand(-1, 2, 64).reshape(-1, 64)
    return TensorDataset(images, torch.zeros(len(images), dtype=torch.long))


class Sgd(Net):
    def __init__(self):
        super().__init__(optimization="sgd")


HEALTHY = {
    "an even split": {},
    "an uneven split, which repeats samples": {"data": DataLoader(digits(117), 4)},
    "batches of one sample": {"data": DataLoader(digits(41), 1, shuffle=True)},
    "fewer samples than ranks": {"data": DataLoader(digits(1), 1), "max_epochs": 20},
    "by layer, with statistics of each rank": {"net": ConvNet, "fingerprint": {"detail": "layer"}},
    "statistics of each rank": {"net": ConvNet},
    "augmentation and random numbers of each rank": {"net": Noisy},
    "weights of each rank's own": {"net": Personal},
    "constant data": {"data": DataLoader(constant(), 4)},
    "constant data with a smaller last batch": {"data": DataLoader(constant(), 6)},
    "a few batches again and again": {"data": DataLoader(few(), 2), "max_epochs": 1, "use_distributed_sampler": False},
    "accumulation with a tail": {"accumulate_grad_batches": 3},
    "manual optimization": {"net": lambda: Net(optimization="manual")},
    "data that each rank splits by one seed": {"net": Validated, "data": Divided((1, 1))},
    "rows that each rank splits by one seed": {"net": Validated, "data": Divided((1, 1), as_rows=True)},
    "every third step": {"fingerprint": {"every_n_train_steps": 3}},
}


@pytest.mark.parametrize("name", HEALTHY)
def test_no_alarm(tmp_path, capsys, name):
    run(tmp_path, **HEALTHY[name])
    assert main(["fingerprint", "ranks", str(tmp_path / "run.jsonl")]) == 0
    assert capsys.readouterr().out.startswith("No difference among 2 ranks: compared ")


def test_no_alarm_where_weights_are_shards(tmp_path):
    """The ranks have different weights and equal learning rates, and only data and rates are compared."""

    def train(rank):
        seed_everything(1, verbose=False)
        watch = RunFingerprint(tmp_path / "run.jsonl", detail="layer")
        Trainer(callbacks=[watch], devices=2, strategy=ModelParallelStrategy(2, 1), max_epochs=2, **QUIET).fit(
            Net(built_late=True), DataLoader(digits(128), 4)
        )
        assert not watch._found

    fork(train, 2)
    assert compare_ranks(read_ranks(tmp_path / "run.jsonl")).compared == {
        "data": 32,
        "rate": 32,
        "replicated": 0,
        "dataset": 1,
    }


def test_no_alarm_where_ranks_train_tensors_in_parallel(tmp_path):
    """Then all of them read the same batches, as they should."""

    def train(rank):
        seed_everything(1, verbose=False)
        watch = RunFingerprint(tmp_path / "run.jsonl")
        Trainer(callbacks=[watch], devices=2, strategy=ModelParallelStrategy(1, 2), max_epochs=2, **QUIET).fit(
            Unsharded(), DataLoader(digits(128), 4)
        )
        assert not watch._found

    class Unsharded(Net):
        def configure_model(self):
            pass

    fork(train, 2)
    with pytest.raises(FingerprintRecordError, match="There is nothing to compare"):
        compare_ranks(read_ranks(tmp_path / "run.jsonl"))


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_no_alarm_where_ranks_train_members_of_an_ensemble(tmp_path):
    ensemble = VotingClassifier(lambda: nn.Linear(64, 10), 2, members="sharded")
    run(tmp_path, net=lambda: ensemble, data=DataLoader(digits(128), 4))
    with pytest.raises(FingerprintRecordError, match="There is nothing to compare"):
        compare_ranks(read_ranks(tmp_path / "run.jsonl"))


def test_nothing_is_compared_where_that_is_off(tmp_path):
    run(tmp_path, [at_step(5, drift, rank=1)], fingerprint={"compare_ranks": False})
    assert {column.kind for column in read_ranks(tmp_path / "run.jsonl")[0].blocks[-1][0]} == {
        *("data", "loss", "gradient", "weights")
    }


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
def test_a_finding_outlives_a_resume_and_is_warned_of_once(tmp_path):
    def train(epochs, *callbacks, **options):
        seed_everything(1, verbose=False)
        callbacks = [RunFingerprint(tmp_path / "run.jsonl"), RunReport(tmp_path / "report"), *callbacks]
        Trainer(callbacks=callbacks, max_epochs=epochs, **QUIET).fit(
            Net(), DataLoader(Stream(), 4, num_workers=2), **options
        )
        return [part.text for part in find_all(read_record(tmp_path / "report")) if "different batches" in part.text]

    with pytest.warns(UserWarning, match="In epoch 0, 15 different batches"):
        before = train(2, saving(tmp_path / "mid.ckpt", 40))
    assert len(before) == 1
    assert train(3, ckpt_path=tmp_path / "mid.ckpt") == before, "a second warning would be an error"


def test_a_finding_outlives_a_stop_of_two_ranks(tmp_path):
    def start(*callbacks):
        # rank zero has the rows of the other one that were written at the save before, if no later ones
        resume = AutoResume(tmp_path / "saved", every_n_train_steps=3)
        return found_in(tmp_path, [resume, at_step(5, drift, rank=1), *callbacks])

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "RunFingerprint")
        with pytest.raises(SystemExit), ranks_agree_at_once():
            start(stopping(9, rank=0))
    after = start()
    assert len(after) == 1, "a second warning would have been an error"
    assert after[0].startswith("The weights of rank 1 differ from those of rank 0 after step 5 (epoch 0, batch 5).")


@pytest.mark.parametrize("stops", [0, 1])
def test_no_rank_waits_for_one_that_has_failed(tmp_path, stops):
    """The error of one rank ends the fit; the others wait for nothing that it would have sent."""

    def fail(trainer, *_):
        if trainer.global_rank == stops and trainer.global_step == 9:
            raise ZeroDivisionError

    begun = time.monotonic()
    with pytest.raises(Exception, match=r"ZeroDivisionError|Connection|closed|gloo"):
        run(tmp_path, [Hooks(on_train_batch_end=fail)])
    assert time.monotonic() - begun < 60


# -- the core


KEYS = [(step, step // 20, step % 20) for step in range(60)]
COLUMNS = (Column("data"), Column("loss"), Column("rate"), Column("replicated", "a"), Column("replicated", "b"))


def rows(data, keys=KEYS, rate=lambda step: 1, weights=lambda step: (1, 2)):
    return np.array([[*key, data(key[0]), 5, rate(key[0]), *weights(key[0])] for key in keys], np.int64)


def compared(*tables, block=7):
    """Compare tables of ranks that come in pieces of their own sizes."""
    comparison = RankComparison(range(len(tables)))
    pieces = [
        [table[at : at + block + rank] for at in range(0, len(table), block + rank)]
        for rank, table in enumerate(tables)
    ]
    order = [rank for rank, some in enumerate(pieces) for _ in some]
    random.Random(0).shuffle(order)
    for rank in order:
        comparison.add(rank, COLUMNS, pieces[rank].pop(0))
    return comparison


def test_groups_are_named_and_the_many_are_right():
    odd = rows(lambda step: 1000 + step, weights=lambda step: (1, 3 if step > 30 else 2))
    usual = [rows(lambda step, rank=rank: 5000 * rank + step + 1) for rank in range(3)]
    (said,) = compared(odd, *usual).found.values()
    assert said.startswith(
        "The weights of rank 0 differ from those of ranks 1, 2, 3 after step 31 (epoch 1, batch 11): b."
    )


def test_only_the_ranks_that_share_batches_are_named():
    found = compared(*(rows(lambda step, own=own: 1000 * own + step) for own in (1, 2, 1, 3, 2))).found
    assert found["data"].startswith("Ranks 0, 2, and ranks 1, 4 read the same batches from step 0 ")


@settings(max_examples=60)
@given(st.integers(1, 40), st.integers(0, 60), st.integers(1, 3))
def test_the_same_batches_are_proven_by_thirteen_different_ones(different, begun, passes):
    """The oracle counts what is equal in a row, by hand."""
    first = rows(lambda step: 1 + step // passes % different)
    second = rows(lambda step: 1 + step // passes % different + 1000 * (step < begun))
    shared = {1 + step // passes % different for step in range(begun, 60)}
    said = compared(first, second).found
    assert ("data" in said) == (len(shared) >= 13)
    if said:
        assert f"from step {begun} " in said["data"]


def test_rows_that_only_one_rank_has_are_let_go(monkeypatch):
    monkeypatch.setattr(core, "_MOST_WAITING", 5)
    comparison = RankComparison(range(2))
    comparison.add(0, COLUMNS, rows(lambda step: step + 1))
    assert len(comparison._waiting[0]) == 5
    comparison.add(1, COLUMNS, rows(lambda step: 1, KEYS[-3:], weights=lambda step: (9, 9)))
    assert "after step 57 " in comparison.found["replicated"]


@pytest.mark.parametrize("pieces", [1, 6])
def test_the_store_is_left_empty(monkeypatch, pieces):
    monkeypatch.setattr(core, "_MOST_BYTES", 60 * 64 // pieces)
    store = HashStore()
    exchanges = [RankExchange(store, rank, 2) for rank in range(2)]
    for rank in (1, 0, 1, 0):
        exchanges[rank].watch(COLUMNS, rows(lambda step, rank=rank: step + 1 + 500 * rank))
    exchanges[1].finish()
    assert store.num_keys() == 1
    exchanges[0].finish()
    assert exchanges[0].compared == {"data": 120, "rate": 120, "replicated": 120, "dataset": 0}
    assert (exchanges[0].found, store.num_keys()) == ({}, 1)


def test_the_end_waits_for_a_late_rank_only_some_time(monkeypatch):
    monkeypatch.setattr(core, "_AT_THE_END", timedelta(seconds=0.2))
    exchange = RankExchange(HashStore(), 0, 2)
    exchange.watch(COLUMNS, rows(lambda step: step))
    exchange.finish()
    assert exchange.compared["data"] == 0


def test_what_is_no_run_of_several_ranks_is_refused(tmp_path, capsys):
    seed_everything(1, verbose=False)
    for name in ("a", "b"):
        Trainer(callbacks=[RunFingerprint(tmp_path / f"{name}.jsonl")], max_epochs=1, **QUIET).fit(
            Net(), DataLoader(digits(), 4)
        )
    assert {"rate", "replicated"}.isdisjoint(
        column.kind for columns, _ in read_ranks(tmp_path / "a.jsonl")[0].blocks for column in columns
    )
    for path in (tmp_path, tmp_path / "a.jsonl"):
        with pytest.raises(SystemExit):
            main(["fingerprint", "ranks", str(path)])
        assert "has no record of several ranks: pass the file of rank 0" in capsys.readouterr().err


def test_two_runs_are_compared_rank_by_rank_and_rates_are_named(tmp_path, capsys):
    for name, callbacks in (("a", []), ("b", [at_step(6, other_rate, rank=0), at_step(6, other_rate, rank=1)])):
        (tmp_path / name).mkdir()
        run(tmp_path / name, callbacks, fingerprint={"detail": "layer"})
    divergence = compare(*(read_ranks(tmp_path / name / "run.jsonl") for name in "ab")).divergence
    assert (divergence.step, divergence.kind) == (6, "rate")
    assert "rate. The learning rates differ.\nLook at the scheduler" in str(divergence)
    assert main(["fingerprint", "diff", *(str(tmp_path / name / "run.rank1.jsonl") for name in "ab")]) == 1
    assert "at step 6, in epoch 0, batch 6 on rank 1: rate." in capsys.readouterr().out
    assert main(["fingerprint", "ranks", str(tmp_path / "a"), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out).values()
    assert found == {"found": {}, "compared": {"data": 32, "rate": 32, "replicated": 33, "dataset": 1}}
    cut = tmp_path / "b" / "run.rank1.jsonl"
    cut.write_text(cut.read_text().partition("\n")[0] + "\n")
    for command in (["ranks", str(tmp_path / "b")], ["diff", str(tmp_path / "b" / "run.jsonl"), str(cut)]):
        with pytest.raises(SystemExit) as left:
            main(["fingerprint", *command])
        assert left.value.code == 2
        assert "run.jsonl: the ranks have no row in common, nothing was compared" in capsys.readouterr().err


# -- batches that come again


@pytest.mark.filterwarnings(WARNED)
@pytest.mark.parametrize("limit", [1.0, 57])
def test_a_stream_that_each_worker_reads_as_a_whole(tmp_path, limit):
    seed_everything(1, verbose=False)
    callbacks = [RunFingerprint(tmp_path / "run.jsonl"), RunReport(tmp_path / "report")]
    words = "In epoch 0, (15|29) different batches came 2 times each, one after the other"
    with pytest.warns(UserWarning, match=words):
        Trainer(callbacks=callbacks, max_epochs=1, limit_train_batches=limit, **QUIET).fit(
            Net(), DataLoader(Stream(120 if limit == 57 else 60), 4, num_workers=2)
        )
    (said,) = [part.text for part in find_all(read_record(tmp_path / "report")) if "different batches" in part.text]
    assert said.endswith("Divide an iterable data set among its workers, by torch.utils.data.get_worker_info().")


@cases(
    "batches, is_found",
    ([step // 3 for step in range(60)], True),
    ([step // 3 for step in range(58)], True),
    (list(range(60)), False),
    ([step % 20 for step in range(60)], False),  # an endless stream
    ([step // 3 % 10 for step in range(60)], False),
    ([0] * 60, False),
    ([*range(14), 14, 14], False),
    ([step // 5 for step in range(60)], False),  # twelve
)
def test_only_batches_that_all_come_again_at_once_are_told(batches, is_found):
    for block in (1, 7, 60):
        watcher = RepeatedBatches()
        table = rows(lambda step: batches[step] + 1, [(step, 0, step) for step in range(len(batches))])
        for at in range(0, len(table), block):
            watcher.watch(COLUMNS, table[at : at + block])
        watcher.watch(COLUMNS, rows(lambda step: 1, [(99, 1, 0)]))
        assert bool(watcher.found) is is_found
