"""SeedEverything where the copied snippets go wrong; what every callback promises is in tests/contract."""

import itertools
import os
import random
from pathlib import Path

import lightning
import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader, Dataset, Sampler, SubsetRandomSampler, WeightedRandomSampler

from lightning_tricks import SeedEverything, seed_everything
from lightning_tricks._lightning_compat.loaders import repeats_worker_seeds
from tests.contract.lab import SETTINGS
from tests.small import QUIET, Net, cases, digits, recorded_warnings, same

_ELSEWHERE = itertools.count(1000)
_WORKERS = [
    0,
    pytest.param(
        2,
        marks=pytest.mark.skipif(
            repeats_worker_seeds(), reason="Lightning before 2.6.1 repeats the workers' seeds: SeedEverything warns"
        ),
    ),
]


class _Indexed(Dataset):
    """Digits that say which they are, with noise of all three libraries, as augmentation has it."""

    def __init__(self, count=40):
        self.digits, self.count = digits(), count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        noise = torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])
        return (*self.digits[index], index, noise)


class _Witness(Callback):
    """Writes down each rank's samples, noise and dropout."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.samples, self.noise, self.dropout = [], [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.samples.append(batch[2].tolist())
        self.noise.append(batch[3])
        torch_state = torch.get_rng_state()
        self.dropout.append(torch.rand(4))
        torch.set_rng_state(torch_state)

    def on_train_end(self, trainer, pl_module):
        weights = {name: value.clone() for name, value in pl_module.state_dict().items()}
        record = {"samples": self.samples, "noise": self.noise, "dropout": self.dropout, "weights": weights}
        torch.save(record, self.folder / f"witness{trainer.global_rank}.pt")


def _fit(callback, *, workers=0, ckpt_path=None, epochs=2, save_to=None, net=None, **trainer):
    torch.manual_seed(next(_ELSEWHERE))  # the random state differs before each fit
    witness = _Witness(".")
    arguments = {**QUIET, **trainer}
    fitter = Trainer(max_epochs=epochs, callbacks=[callback, witness], **arguments)
    # Before 3.12 CPython can deadlock in a fork while another thread runs, and a rank that trains has such threads:
    # its workers are forked once, before the first step
    persistent = workers > 0 and "strategy" in trainer
    loader = DataLoader(_Indexed(), batch_size=4, shuffle=True, num_workers=workers, persistent_workers=persistent)
    fitter.fit(net or Net(built_late=True, dropout=0.2), loader, ckpt_path=ckpt_path)
    if save_to:
        fitter.save_checkpoint(save_to)
    return [torch.load(file) for file in sorted(Path().glob("witness*.pt"))]


@pytest.mark.parametrize("workers", _WORKERS)
def test_order_augmentation_and_dropout_repeat(workers):
    assert same(_fit(SeedEverything(3), workers=workers), _fit(SeedEverything(3), workers=workers))
    assert not same(_fit(SeedEverything(3), workers=workers), _fit(SeedEverything(4), workers=workers))


@pytest.mark.parametrize("workers", _WORKERS)
def test_every_sample_has_numbers_of_its_own(workers):
    (witness,) = _fit(SeedEverything(3), workers=workers)
    noise = torch.cat(witness["noise"])
    for library in range(3):
        assert len(noise[:, library].unique()) == 80, "every sample of both epochs has noise of its own"


@pytest.mark.trap("resume: seeding seed + rank in setup makes ranks draw overlapping samples")
@pytest.mark.parametrize("workers", _WORKERS)
def test_per_rank_seeds_keep_weights_and_sharding(workers):
    ranks = _fit(SeedEverything(3, per_rank=True), workers=workers, **SETTINGS["DDP"].trainer)
    assert len(ranks) == 2
    assert same(ranks[0]["weights"], ranks[1]["weights"])
    for epoch in (slice(0, 5), slice(5, 10)):
        read = [index for rank in ranks for batch in rank["samples"][epoch] for index in batch]
        assert sorted(read) == list(range(40)), "each sample exactly once an epoch"
    for one, other in zip(ranks[0]["dropout"], ranks[1]["dropout"], strict=True):
        assert not torch.equal(one, other)
    # the first batch of an epoch is made before the ranks part; workers add the rank themselves
    later = [i for i in range(10) if workers or i % 5]
    noise = torch.cat([rank["noise"][i] for rank in ranks for i in later])
    assert len(noise.unique()) == noise.numel()
    again = _fit(SeedEverything(3, per_rank=True), workers=workers, **SETTINGS["DDP"].trainer)
    assert same(again, ranks)


@pytest.mark.parametrize("workers", [0, 1])
def test_warns_when_lightning_repeats_the_workers_seeds(monkeypatch, workers):
    monkeypatch.setattr(lightning, "__version__", "2.6.0")
    with recorded_warnings() as caught:
        _fit(SeedEverything(3), workers=workers, epochs=1)
    said = [str(w.message) for w in caught if "same random numbers in every epoch" in str(w.message)]
    assert len(said) == workers
    assert all("Install lightning>=2.6.1, or set workers=False" in words for words in said)


class _OwnSampler(Sampler):
    """A sampler of the user's own, that divides by rank itself and draws from the global stream."""

    def __init__(self, rank=0, world=1):
        self.rank, self.world = rank, world

    def __iter__(self):
        return iter(torch.randperm(40)[self.rank :: self.world].tolist())

    def __len__(self):
        return 40 // self.world


class _SetsSampler(Net):
    def __init__(self, make_sampler, own):
        super().__init__(built_late=True)
        self.make_sampler, self.own = make_sampler, own

    def train_dataloader(self):
        place = (self.trainer.global_rank, self.trainer.world_size) if self.own else ()
        return DataLoader(_Indexed(), batch_size=4, sampler=self.make_sampler(*place))


@pytest.mark.parametrize("reload", [0, 1])
@cases(
    "make_sampler, own",
    (_OwnSampler, True),
    (lambda: SubsetRandomSampler(range(40)), False),
    (lambda: WeightedRandomSampler(torch.ones(40), 40, replacement=False), False),
    ids=["own", "subset", "weighted"],
)
def test_per_rank_seeds_keep_the_sharding_of_any_sampler(make_sampler, own, reload):
    witness = _Witness(".")
    Trainer(
        max_epochs=3, callbacks=[SeedEverything(3, per_rank=True), witness], use_distributed_sampler=not own,
        reload_dataloaders_every_n_epochs=reload, **QUIET, **SETTINGS["DDP"].trainer,
    ).fit(_SetsSampler(make_sampler, own))  # fmt: skip
    ranks = [torch.load(f"witness{rank}.pt") for rank in range(2)]
    for epoch in (slice(0, 5), slice(5, 10), slice(10, 15)):
        read = [index for rank in ranks for batch in rank["samples"][epoch] for index in batch]
        assert sorted(read) == list(range(40)), "each sample exactly once an epoch"
    assert not any(same(a, b) for a, b in zip(ranks[0]["dropout"], ranks[1]["dropout"], strict=True))


def test_says_that_per_rank_workers_need_their_seeding(monkeypatch):
    _fit(SeedEverything(3, per_rank=True, workers=False), workers=1, epochs=1)  # one rank alone: a warning is an error
    # an error, as in other tests, would leave a rank waiting for its worker, which has the handler of SIGTERM, too
    monkeypatch.setattr("lightning_tricks.seeding.callback.rank_zero_warn", Path("said.txt").write_text)
    _fit(SeedEverything(3, per_rank=True, workers=False), workers=1, **SETTINGS["DDP"].trainer)
    assert "workers of all 2 ranks draw the same numbers. Set workers=True" in Path("said.txt").read_text()


def test_sets_the_environment_and_the_switches():
    _fit(SeedEverything(3, workers=False, benchmark=True, deterministic=False))
    assert (os.environ["PL_GLOBAL_SEED"], os.environ["PL_SEED_WORKERS"]) == ("3", "0")
    assert torch.backends.cudnn.benchmark
    _fit(SeedEverything(4, benchmark=False))
    assert (os.environ["PL_GLOBAL_SEED"], os.environ["PL_SEED_WORKERS"]) == ("4", "1")
    assert not torch.backends.cudnn.benchmark


def test_a_common_random_state_by_default():
    ranks = _fit(SeedEverything(3), **SETTINGS["DDP"].trainer)
    assert same(ranks[0]["dropout"], ranks[1]["dropout"])


@pytest.mark.parametrize("workers", _WORKERS)
@pytest.mark.parametrize("per_rank", [False, True])
def test_a_resumed_run_repeats_itself_and_not_its_beginning(workers, per_rank):
    def callback():
        return SeedEverything(3, per_rank=per_rank)

    (begun,) = _fit(callback(), workers=workers, epochs=1, save_to="one.ckpt")
    (resumed,) = _fit(callback(), workers=workers, ckpt_path="one.ckpt")
    (again,) = _fit(callback(), workers=workers, ckpt_path="one.ckpt")
    assert same(resumed, again)
    assert resumed["samples"] != begun["samples"]
    assert not set(torch.cat(resumed["noise"]).flatten().tolist()) & set(torch.cat(begun["noise"]).flatten().tolist())
    assert not same(resumed["dropout"], begun["dropout"])


@pytest.mark.parametrize("per_rank", [False, True])
def test_each_resume_has_the_random_state_of_its_step(per_rank):
    def fitted(epochs, **more):
        (witness,) = _fit(SeedEverything(3, per_rank=per_rank), epochs=epochs, **more)
        return {tuple(numbers.tolist()) for numbers in witness["dropout"]}

    first = fitted(1, save_to="one.ckpt")
    second = fitted(2, ckpt_path="one.ckpt", save_to="two.ckpt")
    third = fitted(3, ckpt_path="two.ckpt")
    assert len(first | second | third) == 30, "no batch of three runs in a row has the numbers of another"


class _SharesSamples(DDPStrategy):
    """Two ranks that read the same samples, as those of tensor parallelism do."""

    @property
    def distributed_sampler_kwargs(self):
        return {"num_replicas": 1, "rank": 0}


def test_ranks_that_share_samples_share_their_random_state():
    arguments = {**SETTINGS["DDP"].trainer, "strategy": _SharesSamples(start_method="fork")}
    one, other = _fit(SeedEverything(3, per_rank=True), **arguments)
    assert one["samples"] == other["samples"]
    assert same(one["noise"], other["noise"])
    assert same(one["dropout"], other["dropout"])


@pytest.mark.parametrize("workers", _WORKERS[1:])
def test_workers_of_ranks_draw_their_own_numbers_in_each_epoch(workers):
    ranks = _fit(SeedEverything(3), workers=workers, **SETTINGS["DDP"].trainer)
    noise = torch.stack([torch.cat(rank["noise"]) for rank in ranks])
    for library in range(3):
        assert len(noise[..., library].unique()) == 80, "two epochs of 20 samples on each of two ranks"


def test_one_trainer_that_fits_again_draws_new_numbers():
    witness = _Witness(".")
    trainer = Trainer(max_epochs=1, callbacks=[SeedEverything(3), witness], **QUIET)
    net, loader = Net(), DataLoader(_Indexed(), batch_size=4, shuffle=True)
    trainer.fit(net, loader)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(net, loader)
    assert len(witness.samples) == 20
    assert witness.samples[:10] != witness.samples[10:]


def test_says_when_the_checkpoint_had_another_seed():
    _fit(SeedEverything(3), epochs=1, save_to="one.ckpt")
    with pytest.warns(UserWarning, match="run was seeded with 3, but this one continues with 4"):
        _fit(SeedEverything(4), ckpt_path="one.ckpt")


def test_testing_a_checkpoint_uses_the_plain_seed(monkeypatch):
    class Tests(Net):
        def test_step(self, batch, batch_idx):
            drawn.append(torch.rand(()).item())

    drawn = []
    _fit(SeedEverything(3), epochs=1, save_to="one.ckpt", net=Tests())
    for ckpt_path in (None, "one.ckpt"):
        trainer = Trainer(callbacks=[SeedEverything(3)], **QUIET)
        trainer.test(Tests(), DataLoader(_Indexed(), batch_size=40), ckpt_path=ckpt_path, verbose=False)
    assert drawn[0] == drawn[1]


class _SavesHyperparameters(Net):
    def __init__(self, hidden=16):
        super().__init__(hidden=hidden)
        self.save_hyperparameters()


@pytest.mark.parametrize("make_logger", [CSVLogger, TensorBoardLogger])
def test_seed_and_switches_are_on_record(make_logger):
    logger = make_logger(".", name="logs")
    callback = SeedEverything(3, deterministic="warn", per_rank=True)
    net = _SavesHyperparameters()
    _fit(callback, logger=logger, enable_checkpointing=True, log_every_n_steps=5, net=net)
    record = yaml.safe_load((Path(logger.log_dir) / "hparams.yaml").read_text())
    assert record["seeding/seed"] == 3
    assert record["seeding/per_rank"] is True
    assert record["seeding/deterministic_algorithms"] is True
    assert record["hidden"] == 16, "the module's own hyper-parameters are still there"
    if make_logger is TensorBoardLogger:
        events = EventAccumulator(logger.log_dir).Reload()
        shown = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
        assert b"seeding/seed" in shown
        assert b"hidden" in shown
    (checkpoint,) = Path(logger.log_dir).glob("checkpoints/*.ckpt")
    state = torch.load(checkpoint, weights_only=True)["callbacks"]["SeedEverything"]
    assert state["seed"] == 3
    assert state["deterministic_warn_only"] is True


def _notes(log):
    return [message for _, message in log if "do not depend on it" in message]


def test_one_note_when_weights_exist_already(lightning_log):
    callback = SeedEverything(11)
    _fit(callback, net=Net())
    _fit(callback, net=Net())
    (note,) = _notes(lightning_log)
    assert "seed 11; 6 parameter tensors existed before" in note
    assert "seed_everything(11) before building the model" in note


def test_no_note_when_the_weights_are_covered(lightning_log):
    _fit(SeedEverything(12))  # built in configure_model
    seed_everything(13, verbose=False)
    Trainer(max_epochs=1, callbacks=[SeedEverything(13)], **QUIET).fit(Net(), DataLoader(digits(), batch_size=40))
    assert not _notes(lightning_log)


def test_no_note_where_the_weights_come_from_a_file(lightning_log):
    _fit(SeedEverything(14), epochs=1, save_to="one.ckpt")
    lightning_log.clear()
    _fit(SeedEverything(14), net=Net(), ckpt_path="one.ckpt")
    assert not _notes(lightning_log)


def test_existing_weights_are_left_alone():
    net = Net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    trainer = Trainer(max_epochs=0, callbacks=[SeedEverything(1)], **QUIET)
    trainer.fit(net, DataLoader(digits(), batch_size=40))
    assert same(dict(net.state_dict()), before)


@pytest.mark.parametrize("arguments", [{"seed": -1}, {"seed": 2**32}, {"deterministic": "maybe"}])
def test_refuses_bad_values_when_it_is_made(arguments):
    ((_, value),) = arguments.items()
    with pytest.raises(ValueError, match=f"got {value!r}"):
        SeedEverything(**arguments)
