"""EndTogether in real fits of two ranks: each is bit for bit that of loaders cut by hand to the shortest rank."""

import math
import signal

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import distributed
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from lightning_tricks import AutoResume, EndTogether, HangWatch, Microbatching
from tests.contract.checks import Interrupts
from tests.small import (
    QUIET,
    EvaluatedNet,
    Hooks,
    Net,
    cases,
    digits,
    fork,
    ranks_agree_at_once,
    real_fp16,
    same,
    without_warnings,
)

TWO = {**QUIET, "strategy": "ddp_fork", "devices": 2, "max_epochs": 2, "use_distributed_sampler": False}


class Stream(IterableDataset):
    """Digits of a rank of its own, `counts[rank]` batches of four, of all workers together."""

    def __init__(self, rank, counts, *, cut=False, shuffles=False, seed=0):
        self.rank, self.seed, self.shuffles = rank, seed, shuffles
        self.whole, self.count = 4 * counts[rank], 4 * (min(counts) if cut else counts[rank])

    def __iter__(self):
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        order = torch.arange(self.whole)
        if self.shuffles and not worker:
            generator = torch.Generator().manual_seed(self.seed)
            self.seed += 1
            order = torch.randperm(self.whole, generator=generator)
        batches = [order[4 * start : 4 * start + 4] for start in range(number, self.count // 4, workers)]
        return (digits(120)[60 * self.rank + int(index) % 60] for batch in batches for index in batch)


class Sized(Stream):
    def __len__(self):
        return self.count


class Lying(Stream):
    def __len__(self):
        return self.count + 12


def stored(rank, counts, cut=False, **_):
    """A map-style data set."""
    count = 4 * (min(counts) if cut else counts[rank])
    return TensorDataset(*(tensor[60 * rank : 60 * rank + count] for tensor in digits(120).tensors))


class Own(EvaluatedNet):
    """Makes the loaders of its rank, logs what they gave, and steps a scheduler by epochs and another by steps."""

    def __init__(self, make, val=None, **net):
        super().__init__(**{"optimization": "sgd", "dropout": 0.2, **net})
        self.make, self.val = make, val
        self.seen = []

    def train_dataloader(self):
        return self.make(self.trainer.global_rank)

    def val_dataloader(self):
        return self.val(self.trainer.global_rank) if self.val else []

    test_dataloader = predict_dataloader = val_dataloader

    def training_step(self, batch, batch_idx):
        self.seen.append(("train", batch_idx, self.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch))
        parts = list(batch.values()) if isinstance(batch, dict) else [batch]
        losses = [super(Own, self).training_step(part, batch_idx)["loss"] for part in parts if part is not None]
        return torch.stack(losses).sum()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.seen.append(("val", batch_idx, dataloader_idx, batch[1].tolist()))
        self.log("loss", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True, on_step=True)

    test_step = validation_step

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        self.validation_step = None
        self.seen.append(("predict", batch_idx, dataloader_idx, batch[1].tolist()))

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        steps = self.trainer.estimated_stepping_batches if self.trainer.max_steps == -1 else 10
        linear = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10 if math.isinf(steps) else steps)
        return [optimizer], [{"scheduler": cosine, "interval": "epoch"}, {"scheduler": linear, "interval": "step"}]


class Writes(Callback):
    training_arguments = ()

    def __init__(self, folder):
        self.folder = folder

    def teardown(self, trainer, pl_module, stage):
        progress = trainer.fit_loop.epoch_loop.batch_progress.state_dict()
        done = {
            "weights": dict(pl_module.state_dict()),
            "seen": pl_module.seen,
            "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
            "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "position": [trainer.current_epoch, trainer.global_step, progress, str(trainer.num_training_batches)],
            "limits": [str(limit) for limit in trainer.num_val_batches or []],
            "classes": type(trainer.fit_loop._combined_loader).__mro__[0] in (CombinedLoader, type(None)),
            "rng": torch.get_rng_state(),
        }
        self.folder.mkdir(exist_ok=True)
        torch.save(done, self.folder / f"{trainer.global_rank}.pt")


def run(folder, callbacks, module, stage="fit", **trainer):
    torch.manual_seed(0)
    module = module()
    with without_warnings():  # of lengths of iterable data sets, and of no validation
        runner = Trainer(callbacks=[*callbacks, Writes(folder)], **{**TWO, **trainer})
        options = {"fit": {}, "predict": {"return_predictions": False}}.get(stage, {"verbose": False})
        getattr(runner, stage)(module, **options)
    return [torch.load(file, weights_only=False) for file in sorted(folder.iterdir())]


def as_cut(tmp_path, make, callbacks=(), val=None, **options):
    """Assert that ranks end together as their loaders do when they are cut by hand; return what each did."""
    stages = ["train", "val"] if val else ["train"]

    def module(cut):
        return lambda: Own(lambda rank: make(rank, cut), val and (lambda rank: val(rank, cut)))

    cut = run(tmp_path / "cut", (), module(True), **options)
    together = run(tmp_path / "together", [EndTogether(stages), *callbacks], module(False), **options)
    assert same(together, cut)
    assert together[0]["seen"]
    assert together[0]["classes"]
    return together


DATA = {"stored": stored, "stream": Stream, "sized": Sized, "lying": Lying}
OPTIONS = {
    "plain": {},
    "accumulation": {"accumulate_grad_batches": 4},
    "limit": {"limit_train_batches": 8, "limit_val_batches": 2, "accumulate_grad_batches": 3},
    "large limit": {"limit_train_batches": 20, "accumulate_grad_batches": 4},
    "interval": {"val_check_interval": 3},
    "steps": {"max_epochs": -1, "max_steps": 13},
    "sanity check": {"num_sanity_val_steps": 3, "check_val_every_n_epoch": 2},
}


@pytest.mark.trap("asked_most: unequal ranks")
@pytest.mark.parametrize("counts", [(12, 9), (9, 12)])
@cases(
    "kind, options, workers",
    *((kind, "accumulation", 0) for kind in DATA),
    *(("stream", name, 0) for name in OPTIONS),
    ("stored", "limit", 0),
    ("sized", "interval", 0),
    ("sized", "large limit", 0),
    ("stream", "accumulation", 2),
    ("stored", "plain", 2),
)
@pytest.mark.sampled(6)
def test_a_run_is_that_of_loaders_cut_by_hand(tmp_path, kind, options, workers, counts):
    def make(rank, cut):
        persistent = {"num_workers": workers, "persistent_workers": workers > 0}
        return DataLoader(DATA[kind](rank, counts, cut=cut, shuffles=not workers), batch_size=4, **persistent)

    def val(rank, cut):
        return [DataLoader(DATA[kind](rank, parts, cut=cut), batch_size=4) for parts in ((3, 5), counts, (2, 2))]

    ranks = as_cut(tmp_path, make, val=val, **OPTIONS[options])
    trained = [[step for step in rank["seen"] if step[0] == "train"] for rank in ranks]
    assert len(trained[0]) == len(trained[1])
    if options in ("plain", "accumulation"):
        assert len(trained[0]) == 18
        assert [last for *_, last in trained[0]] == ([False] * 8 + [kind != "lying"]) * 2


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
def test_several_loaders_end_where_their_combination_does(tmp_path, mode):
    """A stream beside stored samples: the combination is cut as a whole.

    Without dropout: a loader that restarts draws a seed, which is before a step where the next batch is fetched ahead.
    """
    first, second = ((7, 12), (9, 4))
    whole = {"min_size": (7, 4), "max_size": (9, 12), "max_size_cycle": (9, 12)}[mode]

    def make(rank):
        parts = {
            "first": DataLoader(Stream(rank, first), batch_size=4),
            "second": DataLoader(stored(rank, second), batch_size=4),
        }
        return CombinedLoader(parts, mode)

    class Fixed(Own):
        def configure_optimizers(self):
            return Net.configure_optimizers(self)

    cut = run(tmp_path / "cut", (), lambda: Fixed(make, dropout=0.0), limit_train_batches=min(whole))
    together = run(tmp_path / "together", [EndTogether()], lambda: Fixed(make, dropout=0.0))
    for left, right in zip(together, cut, strict=True):
        assert all(same(left[what], right[what]) for what in ("weights", "optimizers", "seen", "rng"))
        assert len(left["seen"]) == 2 * min(whole)


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_stages_alone(tmp_path, stage):
    counts = ((5, 2), (1, 3), (4, 4))
    name = {"validate": "val"}.get(stage, stage)

    def module(cut):
        return lambda: Own(
            None, lambda rank: [DataLoader(Stream(rank, parts, cut=cut), batch_size=4) for parts in counts]
        )

    cut = run(tmp_path / "cut", (), module(True), stage)
    assert same(run(tmp_path / "together", [EndTogether([name])], module(False), stage), cut)
    others = [one for one in ("train", "val", "test", "predict") if one != name]
    if stage == "predict":  # its steps do not communicate
        apart = run(tmp_path / "apart", [EndTogether(others)], module(False), stage)
        assert [len(rank["seen"]) for rank in apart] == [10, 9]
    assert len(cut[0]["seen"]) == 7


@pytest.mark.parametrize("setting", ["fp16", "manual"])
def test_ways_to_train(tmp_path, setting):
    options = {"plugins": [real_fp16()]} if setting == "fp16" else {}
    counts = (6, 4)

    def module(cut):
        return lambda: Manual(lambda rank: DataLoader(Stream(rank, counts, cut=cut), batch_size=4))

    class Manual(Own):
        def __init__(self, make):
            super().__init__(make, optimization="manual" if setting == "manual" else "adamw")

        def training_step(self, batch, batch_idx):
            outputs = Net.training_step(self, batch, batch_idx)
            self.seen.append(batch_idx)
            return outputs

        def configure_optimizers(self):
            return Net.configure_optimizers(self)

    cut = run(tmp_path / "cut", (), module(True), **options)
    assert same(run(tmp_path / "together", [EndTogether()], module(False), **options), cut)


@pytest.mark.parametrize("together_first", [True, False])
def test_windows_weighted_by_targets(tmp_path, together_first):
    """Microbatching counts the targets of a window, the last of which is partial, before its first backward pass."""
    counts = (8, 5)

    def train(name, *callbacks):
        def module():
            return Own(lambda rank: DataLoader(Stream(rank, counts, cut=not callbacks), batch_size=4))

        both = [*callbacks, Microbatching(2, count=lambda batch: len(batch[1]))]
        return run(tmp_path / name, both if together_first else both[::-1], module, accumulate_grad_batches=2)

    assert same(train("together", EndTogether()), train("cut"))


def stopped_and_resumed(folder, make, callbacks, at, **options):
    """Run two ranks that are stopped after some batches and resumed, in processes of their own each."""

    def start(stops):
        def rank(_):
            torch.manual_seed(5 * (not stops))
            own = callbacks(folder / "run")
            others = [Interrupts(at)] if stops else []
            trainer = Trainer(callbacks=[*own, *others, Writes(folder)], **{**TWO, "strategy": "ddp", **options})
            with without_warnings():
                if not stops:
                    torch.manual_seed(0)
                trainer.fit(Own(make))

        return rank

    folder.mkdir()
    with pytest.raises(SystemExit), ranks_agree_at_once():
        fork(start(True), 2)
    fork(start(False), 2)
    return [torch.load(file, weights_only=False) for file in sorted(folder.glob("*.pt"))]


@pytest.mark.parametrize("together_first", [True, False])
@cases("kind, at, workers", ("stream", 4, 0), ("stream", 7, 2), ("stored", 4, 0), ("stream", 9, 0), ("sized", 13, 0))
@pytest.mark.sampled(4)
def test_it_resumes_in_the_middle_of_an_epoch(tmp_path, kind, at, workers, together_first):
    """Also at its last batch, and in the second one; the ranks go on with the same rows."""
    counts = (12, 9)

    def make(rank):
        return DataLoader(DATA[kind](rank, counts, shuffles=not workers), batch_size=4, num_workers=workers)

    def callbacks(folder):
        pair = [EndTogether(), AutoResume(folder, every_n_train_steps=3)]
        return pair if together_first else pair[::-1]

    options = {"accumulate_grad_batches": 1 + (at == 13)}
    whole = run(tmp_path / "whole", [EndTogether()], lambda: Own(make), **options)
    resumed = stopped_and_resumed(tmp_path / "resumed", make, callbacks, at, **options)
    for left, right in zip(resumed, whole, strict=True):
        for what in ("weights", "optimizers", "schedulers", "rng"):
            assert same(left[what], right[what]), what
        assert left["position"][:2] == right["position"][:2]
        assert left["seen"] == right["seen"][-len(left["seen"]) :]


def test_what_is_left_out_is_said_once(tmp_path, monkeypatch):
    def say(line):
        with (tmp_path / f"said by {distributed.get_rank()}").open("a") as file:
            file.write(f"{line}\n")

    def make(kind, counts):
        return lambda: Own(lambda rank: DataLoader(DATA[kind](rank, counts), batch_size=4))

    monkeypatch.setattr("lightning_tricks.end_together.callback.rank_zero_info", say)
    for number, kind in enumerate(("stored", "stream")):
        run(tmp_path / kind, [EndTogether()], make(kind, (6, 4)), max_epochs=3)
        lines = (tmp_path / "said by 0").read_text().splitlines()
        words = f"those of rank 1. Left out: {('2', 'at least 1')[number]} of rank 0."
        assert lines[number:] == [f"EndTogether: an epoch of training ends with the fewest batches, {words}"]
    run(tmp_path / "equal", [EndTogether()], make("stream", (4, 4)))
    assert len((tmp_path / "said by 0").read_text().splitlines()) == 2
    run(tmp_path / "none", [EndTogether()], make("stream", (4, 0)))
    last = (tmp_path / "said by 0").read_text().splitlines()[2:]
    assert len(last) == 1
    assert last[0].endswith("Nothing is left: give the data at least as many shards as ranks times workers.")


def test_a_second_fit_and_new_loaders_in_each_epoch(tmp_path):
    made = []

    class Reloaded(Own):
        def train_dataloader(self):
            counts = [(5, 3), (2, 4), (6, 6), (3, 4)][len(made) % 4]
            made.append(counts)
            return DataLoader(Stream(self.trainer.global_rank, counts), batch_size=4)

    def rank(number):
        callback = EndTogether()
        for _ in range(2):
            made.clear()
            module = Reloaded(None)
            options = {**TWO, "strategy": "ddp", "reload_dataloaders_every_n_epochs": 1, "max_epochs": 4}
            with without_warnings():
                trainer = Trainer(callbacks=[callback], **options)
                trainer.fit(module)
            assert len(module.seen) == 3 + 2 + 6 + 3
            assert type(trainer.fit_loop._combined_loader) is CombinedLoader

    fork(rank, 2)


def test_an_error_in_a_loader_of_one_rank_ends_all(tmp_path):
    class Breaking(Stream):
        def __iter__(self):
            yield from list(super().__iter__())[:8]
            raise ZeroDivisionError("in the data")

    def make(rank):
        return DataLoader((Breaking if rank else Stream)(rank, (9, 9)), batch_size=4)

    with pytest.raises(ProcessRaisedException, match=r"in the data|loader of another rank raised"):
        run(tmp_path / "run", [EndTogether()], lambda: Own(make))


def test_another_backend_gets_a_group_on_the_cpu(tmp_path, monkeypatch):
    """As NCCL does, which has none."""
    groups = []
    new_group, get_backend = distributed.new_group, distributed.get_backend
    monkeypatch.setattr(distributed, "get_backend", lambda *group: get_backend(*group) if group else "nccl")

    def note(**arguments):
        groups.append(arguments)
        return new_group(**arguments)

    monkeypatch.setattr(distributed, "new_group", note)
    hooks = Hooks(on_train_start=lambda *_: (tmp_path / "groups").write_text(repr(groups)))
    make = lambda rank: DataLoader(Stream(rank, (6, 4)), batch_size=4)  # noqa: E731
    ranks = run(tmp_path / "run", [EndTogether(), hooks], lambda: Own(make))
    assert (tmp_path / "groups").read_text() == "[{'backend': 'gloo'}]"
    assert len(ranks[0]["seen"]) == 8


def test_ranks_that_do_not_communicate_are_refused(monkeypatch):
    monkeypatch.setattr(Trainer, "world_size", 2)
    with pytest.raises(MisconfigurationException, match=r"has 2 ranks that do not communicate by torch\.distributed"):
        Trainer(callbacks=[EndTogether()], max_epochs=1, **QUIET).fit(Net(), DataLoader(digits(), 4))


@cases(
    "stages, error, words",
    ("train", TypeError, "stages must be a list of names, got 'train'"),
    (["valid"], ValueError, "stages must be one of train, val, test, predict, got 'valid'. Did you mean 'val'?"),
)
def test_wrong_arguments(stages, error, words):
    with pytest.raises(error) as raised:
        EndTogether(stages)
    assert words in str(raised.value)


def test_hang_watch_sees_ranks_that_end_together(tmp_path):
    make = lambda rank: DataLoader(Stream(rank, (6, 4)), batch_size=4)  # noqa: E731
    callbacks = [HangWatch("1 hour", tmp_path / "hang"), EndTogether()]
    run(tmp_path / "run", callbacks, lambda: Own(make))
    assert not list((tmp_path / "hang").glob("*"))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
