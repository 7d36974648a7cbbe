"""A run goes on with another number of ranks in the middle of an epoch: each sample of the epoch is trained on once."""

import json
import os
import shutil
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import post_localSGD_hook as local_sgd
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)
from torchmetrics import SumMetric

from lightning_tricks import AutoResume, seed_everything
from lightning_tricks._shared.rng import capture_rng_state
from lightning_tricks.auto_resume.core.data.loader_objects import OrderDigest
from lightning_tricks.auto_resume.model_parts import checksums
from lightning_tricks.auto_resume.moved_positions import EpochRest
from tests.auto_resume.killing import resumed_at, run
from tests.auto_resume.training import DEFAULTS, Kill
from tests.small import QUIET, cases, fork

SCRIPT: dict[str, Any] = {
    "rows": 61,
    "epochs": 2,
    "batch_size": 2,
    "ranks": 1,
    "workers": 0,
    "persistent": False,
    "drop_last": False,
    "accumulate": 1,
    "sampler": "shuffled",
    "strategy": "ddp_fork",
    "limit": 1.0,
    "on_change": "raise",
    "kill": None,
    "start": 0,
    "seed": 7,
}
OPTIONS: dict[str, Any] = {}  # of this process


class Rows(Dataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(4), index


class Stream(IterableDataset):
    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self):
        return iter([self.rows[index] for index in range(len(self.rows))])


class Backwards(Sampler):
    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self):
        return reversed(range(len(self.rows)))


class Net(LightningModule):
    """Notes for each step which rows this rank was given."""

    def __init__(self, notes: Path) -> None:
        super().__init__()
        self.net, self.notes, self.seen = nn.Linear(4, 2), notes, SumMetric()

    def train_dataloader(self):
        return loader()

    def configure_model(self):
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        noise = float(batch[0].sum()).hex()
        row = [self.trainer.current_epoch, self.trainer.global_step, batch_idx, batch[1].tolist(), noise]
        with Path(f"{self.notes}.{self.global_rank}.jsonl").open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(row)}\n")
        self.seen.update(len(batch[1]))
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        self.log("sum", float(len(batch[1])), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1] % 2)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if OPTIONS["sampler"] == "stream":  # has no length
            return optimizer
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = OneCycleLR(optimizer, 0.1, steps, cycle_momentum=False)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_start(self):
        self.first_epoch = self.trainer.current_epoch

    def on_train_epoch_end(self):
        assert self.trainer.world_size > 1 or "sum" in self.trainer.callback_metrics  # a monitor needs it
        is_resumed = self.trainer.current_epoch == self.first_epoch
        if is_resumed and OPTIONS["sampler"] not in ("own", "stream", "weighted"):  # which may read samples twice
            assert self.trainer.callback_metrics.get("seen", 0) < OPTIONS["rows"] + OPTIONS["ranks"]

    def on_train_end(self):
        if OPTIONS["sampler"] != "stream":
            schedule = self.lr_schedulers()  # which raises an error after its last step
            assert schedule.total_steps - 7 < schedule.last_epoch <= schedule.total_steps


def loader() -> DataLoader:
    """Make the loader that the options describe."""
    options = OPTIONS
    rows, own = Rows(options["rows"]), {}
    kind = options["sampler"]
    if kind == "distributed":
        share = {} if options["ranks"] > 1 else {"num_replicas": 1, "rank": 0}
        own = {"sampler": DistributedSampler(rows, seed=5, drop_last=True, **share)}
    elif kind == "stream":
        rows = Stream(rows)
    else:
        samplers = {
            "generator": lambda: RandomSampler(rows, generator=torch.Generator().manual_seed(3)),
            "weighted": lambda: WeightedRandomSampler(torch.ones(len(rows)), len(rows), replacement=False),
            "few": lambda: RandomSampler(rows, num_samples=30),  # on several ranks the Trainer takes all
            "own": lambda: Backwards(rows),
        }
        own = {"sampler": samplers[kind]()} if kind in samplers else {"shuffle": True}
    workers = {"num_workers": options["workers"], "persistent_workers": options["persistent"]}
    return DataLoader(rows, batch_size=options["batch_size"], drop_last=options["drop_last"], **own, **workers)


def script(folder: Path, options: dict[str, Any]) -> None:
    """Fit, as the options say, in a process of its own."""
    OPTIONS.update(options)

    def fit(rank: int = 0) -> None:
        warnings.filterwarnings("ignore", module=r"lightning\.")
        os.environ.pop("PL_GLOBAL_SEED", None)
        if options["seed"] is not None:
            seed_everything(options["seed"], verbose=False)
        ranks, strategy = options["ranks"], options["strategy"]
        callbacks = [
            AutoResume(folder / "resume", every_n_train_steps=2, asynchronous=False, on_change=options["on_change"])
        ]
        if options["kill"]:
            callbacks.append(Kill(*options["kill"]))
        is_sharded = strategy == "fsdp2"
        trainer = Trainer(
            devices=ranks,
            strategy=ModelParallelStrategy(ranks, 1) if is_sharded else strategy if ranks > 1 else "auto",
            max_epochs=options["epochs"],
            accumulate_grad_batches=options["accumulate"],
            limit_train_batches=options["limit"],
            callbacks=callbacks,
            **QUIET,
        )
        trainer.fit(Net(folder / f"notes.{options['start']}"))

    if options["strategy"] == "fsdp2":
        fork(fit, options["ranks"])
    else:
        fit()


def chain(folder: Path, starts: list[dict[str, Any]], first: int = 0, **shared: Any) -> list[list[Any]]:
    """Start the script once for each of the options; return the rows of the steps that count, of all ranks."""
    found: list[tuple[int, list[Any]]] = []
    for number, own in enumerate(starts, first):
        options = {**SCRIPT, **shared, **own, "start": number}
        before = len(resumed_at(folder)) if (folder / "output.txt").exists() else 0
        status = run(folder, options, script=script)
        assert (status == 0) == (options["kill"] is None), (folder / "output.txt").read_text()
        if number:
            (step,) = set(resumed_at(folder)[before:])
            found = [(start, row) for start, row in found if row[1] < step]
        for rank in range(options["ranks"]):
            lines = (folder / f"notes.{number}.{rank}.jsonl").read_text(encoding="utf-8").splitlines()
            found += [(number, json.loads(line)) for line in lines]
    return [row for _, row in found]


def times(rows: list[list[Any]], epoch: int) -> Counter[int]:
    return Counter(index for row in rows if row[0] == epoch for index in row[3])


def stop(ranks: int, batches: int, name: str = "", **options: Any) -> dict[str, Any]:
    """The options of a start that is stopped in one of its batches; ranks agree on a signal too late for short runs."""
    name = name or ("SIGKILL" if ranks > 1 else "SIGTERM")
    return {"ranks": ranks, "kill": ["on_train_batch_end", batches, name, "group" if ranks > 1 else 0], **options}


def assert_each_once(rows: list[list[Any]], starts: list[dict[str, Any]], count: int = 61) -> None:
    """Each row was trained on in both epochs; once, but for those that fill the last batches of some ranks."""
    for epoch in (0, 1):
        found = times(rows, epoch)
        assert set(found) == set(range(count))
        assert found.total() < count + max(start["ranks"] for start in starts)


AT_AN_END = {"ranks": 2, "kill": ["on_train_epoch_end", 1, "SIGKILL", "group"]}  # its last batch was saved
WAYS = {
    "four to two to one to three": ([stop(4, 3), stop(2, 3), stop(1, 5), {"ranks": 3}], {}),
    "two to one to two in the same epoch, and back": ([stop(2, 3), stop(1, 4), stop(2, 3), {"ranks": 1}], {}),
    "workers": ([stop(2, 5, workers=2), stop(1, 4, workers=1), {"ranks": 2, "workers": 0}], {}),
    "workers that persist": ([stop(2, 20), stop(1, 4), {"ranks": 2}], {"workers": 2, "persistent": True}),
    "at an epoch's end": ([AT_AN_END, {"ranks": 1}], {}),
    "at an epoch's end, more ranks": ([{**AT_AN_END, "ranks": 1}, {"ranks": 2}], {"rows": 60, "workers": 1}),
    "at an epoch's start": ([stop(2, 17, "SIGKILL"), {"ranks": 1}], {}),
    "a generator": ([stop(1, 5), stop(2, 3), {"ranks": 1}], {"sampler": "generator"}),
    "no seed": ([stop(2, 5), {"ranks": 1}], {"seed": None}),  # Lightning shuffles with seed 0, which is known
    "accumulation": ([stop(2, 5), {"ranks": 1}], {"accumulate": 2}),
    "other batches": (
        [stop(2, 5), stop(1, 3, batch_size=3, on_change="new"), {"ranks": 2, "batch_size": 4, "on_change": "new"}],
        {},
    ),
    "shards": ([stop(2, 5), {"ranks": 1}], {"strategy": "fsdp2"}),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
def test_each_sample_of_the_epoch_is_trained_on_once(tmp_path, way):
    starts, shared = WAYS[way]
    rows = chain(tmp_path, starts, **shared)
    assert_each_once(rows, starts, shared.get("rows", 61))
    output = (tmp_path / "output.txt").read_text()
    assert "cannot be shared out" not in output
    assert "another order" not in output


def test_a_schedule_of_a_longer_run_on_other_ranks(tmp_path):
    assert run(tmp_path, {**SCRIPT, "rows": 21, "ranks": 2}, script=script) == 0
    longer = {"rows": 21, "epochs": 3, "start": 1, "on_change": "new"}
    assert run(tmp_path, {**SCRIPT, **longer}, script=script) == 0, (tmp_path / "output.txt").read_text()


@settings(max_examples=60)
@given(data=st.data(), count=st.integers(1, 40), size=st.integers(1, 5), shuffle=st.booleans(), drops=st.booleans())
def test_what_is_left_is_what_nobody_has_read(data, count, size, shuffle, drops):
    """For any number of samples, batches and ranks, with torch's own loaders."""
    rows, read, position, left = Rows(count), list[int](), None, None
    for ranks in data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=4)):
        samplers = [DistributedSampler(rows, ranks, rank, shuffle, seed=3) for rank in range(ranks)]
        loaders = [DataLoader(rows, size, sampler=sampler, drop_last=drops) for sampler in samplers]
        rest = None
        if position is None:
            left = [list(one.batch_sampler) for one in loaders]
        else:
            rest = EpochRest.after(position, batch_size=size, epoch=0)
            left = [rest.batches(one, rank, ranks) for rank, one in enumerate(loaders)]
        assert len({len(batches) for batches in left}) == 1
        if len(left[0]) < 2:
            break
        done = data.draw(st.integers(1, len(left[0]) - 1))
        read += [index for batches in left for batch in batches[:done] for index in batch]
        digest = OrderDigest()
        for batch in left[0][:done]:
            digest.add(batch)
        before = len(loaders[0]) - len(left[0])
        position = {
            "batches": before + done,
            "created": {"process": capture_rng_state(), "generators": [], "objects": {}},
            "started": None,
            "order": digest.digest(done),
            "shares": ranks,
            "rest": rest and rest.as_dict(before),
        }
        left = [batches[done:] for batches in left]
    assert len(set(read)) == len(read)  # what fills up a batch comes last
    others = [index for batches in left for batch in batches for index in batch]
    if not drops:
        assert set(read) | set(others) == set(range(count))
        assert len(read) + len(others) < count + 5


def test_a_sampler_that_drops_gives_no_sample_twice(tmp_path):
    rows = chain(tmp_path, [stop(3, 4), {"ranks": 2}], sampler="distributed", rows=59)
    assert max(times(rows, 0).values()) == 1
    assert times(rows, 0).total() == 58


def test_the_last_batch_that_a_loader_drops_ends_the_epoch(tmp_path):
    rows = chain(tmp_path, [stop(1, 1), {"ranks": 2}], rows=10, batch_size=4, drop_last=True)
    assert times(rows, 0).total() == 4  # each rank would have 3 of the other 6
    assert times(rows, 1).total() == 8
    assert [row[0] for row in rows] == [0, 1, 1]


def test_another_process_with_the_same_ranks_goes_on_as_the_one_before(tmp_path):
    """An epoch that was shared out anew is resumed like any other: bit for bit."""
    chain(tmp_path / "whole", [stop(2, 5)])
    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    whole = chain(tmp_path / "whole", [{"ranks": 1}], first=1)
    stopped = chain(tmp_path / "stopped", [stop(1, 3), stop(1, 4, "SIGKILL"), {"ranks": 1}], first=1)
    assert sorted(stopped) == sorted(whole)
    assert (tmp_path / "stopped" / "output.txt").read_text().count(
        " had 2 ranks and resumes with 1. Weights, optimizer and position"
    ) == 1


@cases(
    "options, why",
    ({"sampler": "own"}, "a Backwards chooses its samples"),
    ({"sampler": "weighted"}, "a WeightedRandomSampler chooses its samples"),
    ({"sampler": "few"}, "the sampler now yields another number of samples"),
    ({"limit": 0.9}, "limit_train_batches=0.9 leaves out different batches"),
    ({"limit": 12}, "limit_train_batches=12 leaves out different batches"),
    ids=["sampler", "weights", "samples", "fraction", "number"],
)
def test_what_cannot_be_shared_out_is_said(tmp_path, options, why):
    chain(tmp_path, [stop(2, 5), {"ranks": 1}], **options)
    assert f"cannot be redistributed among the ranks, as {why}" in (tmp_path / "output.txt").read_text()


@pytest.mark.parametrize("change", ["ranks", "workers"])
def test_a_stream_is_refused_in_the_middle_of_an_epoch(tmp_path, change):
    first, now = {"ranks": 2, "workers": 2}, {"ranks": 2, "workers": 2, change: 1}
    options = {**SCRIPT, "sampler": "stream", "rows": 20}
    assert run(tmp_path, {**options, **first, **stop(2, 4)}, script=script) != 0
    assert run(tmp_path, {**options, **now, "start": 1}, script=script) == 1
    output = (tmp_path / "output.txt").read_text()
    assert f"an epoch that it read with 2 {change}, not 1, and only the Stream knows" in output
    assert run(tmp_path, {**options, **now, "start": 2, "on_change": "new"}, script=script) == 0


def test_a_loader_with_a_state_is_refused_in_the_middle_of_an_epoch(tmp_path):
    options = {**DEFAULTS, "loader": "stateful", "strategy": "ddp_fork", "validate": "none", "epochs": 2, "samples": 20}
    now = {**options, "ranks": 1, "resume": {**DEFAULTS["resume"], "on_change": "new"}}
    assert run(tmp_path, {**options, "ranks": 2, "kill": ["on_train_batch_start", 9, "SIGKILL", 0]}) != 0
    assert run(tmp_path, {**options, "ranks": 1}) == 1
    output = (tmp_path / "output.txt").read_text()
    assert "an epoch that it read with 2 ranks, not 1, and only the StatefulBatches knows" in output
    assert run(tmp_path, now) == 0
    assert "the StatefulBatches is that of 2 ranks and is not restored" in (tmp_path / "output.txt").read_text()


def test_a_stream_goes_on_at_an_epochs_end(tmp_path):
    options = {**SCRIPT, "sampler": "stream", "rows": 20}
    assert run(tmp_path, {**options, **AT_AN_END}, script=script) != 0
    assert run(tmp_path, {**options, "start": 1}, script=script) == 0
    lines = (tmp_path / "notes.1.0.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)[3] for line in lines] == [[row, row + 1] for row in range(0, 20, 2)]


class Replicas(LightningModule):
    """Trains weights that are others on each rank: one that DDP ignores, or all between two averages."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.shared, self.personal, self.kind = nn.Linear(6, 1), nn.Linear(6, 1), kind
        if kind == "ignored":
            names = ["personal.weight", "personal.bias"]
            nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, names)

    def on_fit_start(self):
        model = self.trainer.model
        if self.kind == "local SGD":
            alone = torch.distributed.new_subgroups(1)[0]
            model.register_comm_hook(post_localSGD_hook.PostLocalSGDState(None, alone, 3, False), local_sgd)
            self.averager = PeriodicModelAverager(period=4, warmup_steps=3)
        elif self.kind == "PowerSGD":
            model.register_comm_hook(powerSGD_hook.PowerSGDState(None, 1, 2), powerSGD_hook.powerSGD_hook)

    def training_step(self, x, batch_idx):
        return (self.shared(x) + self.personal(x) - x.sum(1, keepdim=True)).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.kind == "local SGD":
            self.averager.average_parameters(self.parameters())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.05)


class Leaves(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_fit_end(self, trainer, pl_module):
        self.folder.mkdir(exist_ok=True)
        torch.save(pl_module.state_dict(), self.folder / f"{trainer.global_rank}")


class Dies(Callback):
    training_arguments = ()  # it is there once

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.global_step == self.step:
            raise RuntimeError("gone")


@pytest.mark.parametrize(("kind", "step"), [("ignored", 4), ("local SGD", 8), ("local SGD", 9), ("PowerSGD", 4)])
def test_weights_that_each_rank_trains_for_itself(tmp_path, kind, step):
    def train(name: str, *callbacks: Callback) -> None:
        seed_everything(1, verbose=False)
        given = {"max_epochs": 2, "devices": 2, "strategy": "ddp_fork", **QUIET}
        trainer = Trainer(callbacks=[Leaves(tmp_path / name), *callbacks], **given)
        trainer.fit(Replicas(kind), DataLoader(torch.randn(50, 6), 4, shuffle=True))

    guard = partial(AutoResume, tmp_path / "runs", every_n_train_steps=1)
    if kind == "PowerSGD":
        with pytest.raises(Exception, match="cannot be saved: the PowerSGDState of a communication hook"):
            train("named", guard())
        return
    train("whole")
    with pytest.raises(Exception, match="gone"):
        train("stopped", guard(), Dies(step))
    train("again", guard())
    for rank in range(2):
        whole, again = (torch.load(tmp_path / name / f"{rank}") for name in ("whole", "again"))
        assert all(torch.equal(again[name], value) for name, value in whole.items())


@cases("dtype", torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.bool, torch.int64)
def test_a_checksum_tells_apart_which_rank_is_marked(dtype):
    marks = torch.eye(3).to(dtype)
    assert len({checksums({"mark": mark})["mark"] for mark in marks}) == 3
    assert checksums({"mark": marks[1]}) == checksums({"mark": marks[1].clone()})
