"""RunFingerprint in real fits: faults are named, resumed runs leave one file, and training continues in any case."""

import os
import resource
import signal
from itertools import groupby

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_tricks import AutoResume, FlopsReport, RunFingerprint
from lightning_tricks.run_fingerprint import compare, read_ranks
from lightning_tricks.seeding import isolated_rng
from tests.small import QUIET, Hooks, HostReads, Net, digits, ranks_agree_at_once

DDP = {"strategy": "ddp_fork", "devices": 2}


class ConvNet(Net):
    """Convolutions, batch norm and dropout on 8 x 8 pixels."""

    def build(self):
        self.net = nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(288, 10),
        )


def record(
    path, callbacks=(), net=ConvNet, seed=1, data=None, detail="layer", ckpt_path=None, shuffle=False, **trainer
):
    """Train two epochs of ten batches and return what was recorded."""
    seed_everything(seed, verbose=False)
    module, dataset = net(), data or digits()
    arguments = {"max_epochs": 2, **QUIET, **trainer}
    fitter = Trainer(callbacks=[RunFingerprint(path, detail=detail), *callbacks], **arguments)
    fitter.fit(module, DataLoader(dataset, batch_size=4, shuffle=shuffle), ckpt_path=ckpt_path)
    return read_ranks(path)


def rows(run):
    return [[(row.key, row.as_dict()) for row in part] for part in run]


def at_step(step, act, hook="on_train_batch_start", rank=0):
    def look(trainer, module, *_):
        if trainer.global_step == step and trainer.global_rank == rank:
            act(module)

    return Hooks(**{hook: look})


def stopping(*steps, rank=0):
    """Send a signal after the batches that lead to these steps."""

    def stop(trainer, *_):
        if trainer.global_step in steps and trainer.global_rank == rank:
            os.kill(os.getpid(), signal.SIGTERM)

    return Hooks(on_train_batch_end=stop)


def saving(path, step):
    return Hooks(on_train_batch_end=lambda trainer, *_: trainer.global_step == step and trainer.save_checkpoint(path))


def flip_bit(module):
    module.net[1].weight.detach().view(torch.int32)[0, 0, 1, 1] ^= 1 << 8


def permute_weight(module):
    weight = module.net[1].weight.detach()
    weight.copy_(weight.flatten()[torch.arange(weight.numel()).roll(1)].view_as(weight))


def draw(module):
    torch.rand(1)


def change_gradient(module):
    module.net[2].weight.grad[1] *= -1


def change_rate(module):
    module.trainer.optimizers[0].param_groups[0]["lr"] *= 1.0001


def lose_state(module):
    module.trainer.optimizers[0].state.clear()


def changed_sample(images, labels):
    images[37, 3] = torch.nextafter(images[37, 3], torch.tensor(9.0))


def changed_label(images, labels):
    labels[37] = 9 - labels[37]


def swapped_samples(images, labels):
    images[[37, 38]], labels[[37, 38]] = images[[38, 37]], labels[[38, 37]]


def faulty_data(fault):
    images, labels = (each.clone() for each in digits().tensors)
    fault(images, labels)
    return TensorDataset(images, labels)


UPDATE = "on_before_optimizer_step"
FAULTS = {
    "another seed": ({"seed": 2}, 0, "start", "net.1.weight"),
    "another seed for the order alone": ({"callbacks": [at_step(0, lambda m: None)], "shuffle": True}, 0, "data", "0"),
    "one changed sample": ({"data": faulty_data(changed_sample)}, 9, "data", "0"),
    "one changed label": ({"data": faulty_data(changed_label)}, 9, "data", "1"),
    "two swapped samples": ({"data": faulty_data(swapped_samples)}, 9, "data", "0"),
    "one flipped bit of one weight": ({"callbacks": [at_step(7, flip_bit)]}, 7, "forward", "net.1"),
    "a permuted weight": ({"callbacks": [at_step(13, permute_weight)]}, 13, "forward", "net.1"),
    "a random number drawn in between": ({"callbacks": [at_step(5, draw)]}, 5, "forward", "net.5"),
    "one changed gradient": ({"callbacks": [at_step(6, change_gradient, UPDATE)]}, 6, "update", "net.2.weight"),
    "another learning rate": ({"callbacks": [at_step(6, change_rate, UPDATE)]}, 6, "update", "net.1.weight"),
    "a lost optimizer state": ({"callbacks": [at_step(11, lose_state, UPDATE)]}, 11, "update", "net.1.weight"),
}


@pytest.mark.parametrize("detail", ["step", "layer"])
@pytest.mark.parametrize("fault", FAULTS)
def test_injected_faults_are_named(tmp_path, fault, detail):
    changes, step, kind, layer = FAULTS[fault]
    whole = record(tmp_path / "whole.jsonl", detail=detail)
    comparison = compare(whole, record(tmp_path / "again.jsonl", detail=detail))
    assert (comparison.divergence, comparison.equal_batches) == (None, 20)
    divergence = compare(whole, record(tmp_path / "faulty.jsonl", detail=detail, **changes)).divergence
    assert divergence.step == step
    if detail == "layer":
        assert (divergence.kind, divergence.layer) == (kind, layer)
    else:  # one bit may not reach the rounded loss, but it reaches the weights
        assert divergence.kind in (kind, "gradient", "update")
        assert divergence.layer is None


class Backward(torch.autograd.Function):
    """The identity, with a gradient that is off by one rounding where it is told to."""

    wrong = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 + 2**-22) if Backward.wrong else gradient


def test_a_backward_that_differs_is_named_at_the_layer_nearest_to_the_loss(tmp_path, monkeypatch):
    class Inexact(ConvNet):
        def training_step(self, batch, batch_idx):
            features = Backward.apply(self.net[:4](batch[0]))
            return nn.functional.cross_entropy(self.net[4:](features), batch[1])

    whole = record(tmp_path / "a.jsonl", net=Inexact)
    monkeypatch.setattr(Backward, "wrong", False)
    faulty = at_step(4, lambda module: monkeypatch.setattr(Backward, "wrong", True))
    divergence = compare(whole, record(tmp_path / "b.jsonl", [faulty], net=Inexact)).divergence
    assert (divergence.step, divergence.kind, divergence.layer) == (4, "gradient", "net.2.bias")
    assert (divergence.num_differing, divergence.num_compared) == (4, 6)


class Adversaries(Net):
    """A generator and a discriminator, one after the other in a step."""

    raw = False

    def build(self):
        self.generator, self.discriminator = nn.Linear(8, 64), nn.Sequential(nn.Linear(64, 16), nn.Linear(16, 1))
        self.net = self.generator

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.discriminator, self.generator)]

    def training_step(self, batch, batch_idx):
        noise = torch.ones(4, 8)
        for sign, optimizer in zip((1, -1), self.optimizers(), strict=True):
            optimizer.zero_grad()
            fakes = self.discriminator(self.generator(noise)).mean()
            loss = sign * (fakes - self.discriminator(batch[0]).mean())
            loss.backward() if self.raw else self.manual_backward(loss)
            optimizer.step()
        return {"loss": loss} if self.raw else None


def test_several_optimizers_in_a_step_are_seen_in_their_order(tmp_path):
    """The second forward pass differs because the first gradient did: that comes first."""

    def make():
        return Adversaries(optimization="manual")

    def spoil(module):
        module.discriminator[0].weight.grad[0, 0] += 1.0

    whole = record(tmp_path / "a.jsonl", net=make)
    wrong = at_step(6, spoil, "on_after_backward")
    divergence = compare(whole, record(tmp_path / "b.jsonl", [wrong], net=make)).divergence
    assert (divergence.step, divergence.kind, divergence.layer) == (6, "gradient", "discriminator.0.weight")
    kinds = [kind for kind, _ in groupby(column.kind for column in whole[0].blocks[-1][0])]
    assert kinds == ["data", *["forward", "loss", "gradient"] * 2, "weights"]


def test_a_backward_past_lightning(tmp_path):
    class Raw(Adversaries):
        raw = True

    (run,) = record(tmp_path / "a.jsonl", net=lambda: Raw(optimization="manual"), detail="step")
    assert [column.kind for column in run.blocks[-1][0]] == ["data", "gradient", "gradient", "loss", "weights"]


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
@pytest.mark.trap("resume: plain + any of shuffle, augmentation, dropout: differs")
def test_a_resume_that_is_not_exact_is_found(tmp_path):
    whole = record(tmp_path / "a.jsonl", [saving(tmp_path / "mid.ckpt", 13)])
    (tmp_path / "b.jsonl").write_bytes((tmp_path / "a.jsonl").read_bytes())
    resumed = record(tmp_path / "b.jsonl", seed=5, ckpt_path=tmp_path / "mid.ckpt")
    assert len(resumed[0]) == 21, "the rows up to the checkpoint, and those of the resumed run"
    assert compare(whole, resumed).divergence.step == 13
    elsewhere = record(tmp_path / "c.jsonl", seed=5, ckpt_path=tmp_path / "mid.ckpt")
    comparison = compare(whole, elsewhere)
    assert comparison.divergence.kind in ("data", "forward"), (
        "the weights with which it began are those of the checkpoint"
    )
    assert comparison.divergence.step == 13


@pytest.mark.parametrize("every", [1, 3])
def test_an_exact_resume_leaves_the_file_of_one_run(tmp_path, every):
    def run(path, *callbacks):
        seed_everything(1, verbose=False)
        seen = RunFingerprint(path, detail="layer", every_n_train_steps=every)
        trainer = Trainer(callbacks=[seen, *callbacks], **{"max_epochs": 2, **QUIET})
        trainer.fit(ConvNet(), DataLoader(digits(), batch_size=4, shuffle=True))
        return rows(read_ranks(path))

    whole = run(tmp_path / "whole.jsonl")
    with pytest.raises(SystemExit):
        run(tmp_path / "killed.jsonl", AutoResume(tmp_path / "saved"), stopping(13))
    assert run(tmp_path / "killed.jsonl", AutoResume(tmp_path / "saved")) == whole
    assert run(tmp_path / "killed.jsonl", AutoResume(tmp_path / "saved")) == whole, "nothing was left to do"


@pytest.mark.filterwarnings("ignore:AutoResume:UserWarning")  # which is about what the file says
def test_what_a_resume_could_not_restore_is_recorded(tmp_path):
    class Weighted(ConvNet):
        def __init__(self):
            super().__init__()
            self.weights = iter([0.5**n for n in range(99)])

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx)["loss"] * next(self.weights)

        def on_train_epoch_start(self):
            self.weights = iter([0.5**n for n in range(99)])

    def run(name, *callbacks):
        return record(tmp_path / name, callbacks, Weighted, detail="step", shuffle=True)

    whole = run("whole.jsonl")
    for _ in range(2):
        with pytest.raises(SystemExit):
            run("killed.jsonl", AutoResume(tmp_path / "saved"), stopping(13, 16))
    resumed = run("killed.jsonl", AutoResume(tmp_path / "saved"))
    comparison = compare(whole, resumed)
    assert comparison.divergence.step == 13
    assert comparison.divergence.kind == "forward"
    assert "\nRun B was resumed at step 13 without restoring: module.weights (list_iterator).\n" in str(comparison)
    assert [resume.step for resume in resumed[0].incomplete_resumes] == [13, 16]


def test_an_exact_resume_on_two_ranks_leaves_both_files(tmp_path):
    whole = record(tmp_path / "whole.jsonl", **DDP)
    with pytest.raises(SystemExit), ranks_agree_at_once():
        record(tmp_path / "killed.jsonl", [AutoResume(tmp_path / "saved"), stopping(7, rank=1)], **DDP)
    assert rows(record(tmp_path / "killed.jsonl", [AutoResume(tmp_path / "saved")], **DDP)) == rows(whole)


def test_rows_are_flushed_at_checkpoints_and_at_the_end(tmp_path):
    sizes = []

    looks = Hooks(on_train_batch_start=lambda *_: sizes.append(len(read_ranks(tmp_path / "a.jsonl")[0])))
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=5, save_top_k=-1)
    record(tmp_path / "a.jsonl", [looks, saves], enable_checkpointing=True)
    assert sizes[:12] == [0, 1, 1, 1, 1, 6, 6, 6, 6, 6, 11, 11]


def test_only_every_nth_step_and_whole_accumulations(tmp_path):
    seen = RunFingerprint(tmp_path / "a.jsonl", every_n_train_steps=2)
    trainer = Trainer(callbacks=[seen], accumulate_grad_batches=3, **{"max_epochs": 2, **QUIET})
    trainer.fit(ConvNet(), DataLoader(digits(), batch_size=4))
    found = [(row.step, row.epoch, row.batch_idx, len(row.as_dict())) for row in read_ranks(tmp_path / "a.jsonl")[0]]
    first = [(0, 0, -1, 1), (0, 0, 0, 2), (0, 0, 1, 2), (0, 0, 2, 4), (2, 0, 6, 2), (2, 0, 7, 2), (2, 0, 8, 4)]
    assert found == [*first, (4, 1, 0, 2), (4, 1, 1, 2), (4, 1, 2, 4), (6, 1, 6, 2), (6, 1, 7, 2), (6, 1, 8, 4)]
    (part,) = seen.report_parts(trainer)
    assert ("batches", "12") in part.facts


@pytest.mark.filterwarnings("ignore:RunFingerprint:UserWarning")  # of the ranks, which differ by then
def test_the_batches_of_each_rank_are_compared(tmp_path):
    def change(module):
        module.net[1].bias.detach()[0] += 1

    whole = record(tmp_path / "a.jsonl", **DDP)
    assert (len(whole), [len(each) for each in whole]) == (2, [11, 11])
    assert compare(whole, record(tmp_path / "b.jsonl", **DDP)).divergence is None
    divergence = compare(whole, record(tmp_path / "c.jsonl", [at_step(3, change, rank=1)], **DDP)).divergence
    assert (divergence.rank, divergence.step, divergence.kind, divergence.layer) == (1, 3, "forward", "net.1")


def test_the_interrupted_step_is_recorded(tmp_path):
    class Fails(ConvNet):
        def on_before_optimizer_step(self, optimizer):
            if self.global_step == 4:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        record(tmp_path / "a.jsonl", net=Fails)
    recorded = list(read_ranks(tmp_path / "a.jsonl")[0])
    assert [row.step for row in recorded] == [0, 0, 1, 2, 3, 4]
    assert {column.kind for column in recorded[-1].as_dict()} == {"data", "forward", "loss", "gradient"}


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_skipped_step_has_only_data(tmp_path):
    class Skips(ConvNet):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 2 else super().training_step(batch, batch_idx)

        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 7 else None

    (run,) = record(tmp_path / "a.jsonl", net=Skips, detail="step")
    assert [row.batch_idx for row in run] == [-1, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5, 6]
    assert "loss" not in {column.kind for column in list(run)[3].as_dict()}


def test_a_full_disk_stops_the_recording_and_not_the_training(tmp_path):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def fill(module):
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limit[1]))

    try:
        with pytest.warns(UserWarning, match=r"stops recording: .*a.jsonl cannot be written \(.*too large"):
            record(tmp_path / "a.jsonl", [at_step(3, fill)], max_epochs=14)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, ignored)
    assert len(read_ranks(tmp_path / "a.jsonl")[0]) in (1, 2)


def test_paths_that_cannot_be_written_are_refused_before_training(tmp_path):
    (tmp_path / "file").touch()
    for path, words in ((tmp_path, "it is a directory"), (tmp_path / "file" / "a.jsonl", "Not a directory|exists")):
        with pytest.raises(MisconfigurationException, match=rf"cannot write .*({words}).*Choose another path"):
            record(path)
    for wrong in ("", None, 3):
        with pytest.raises(TypeError, match=r"path must be the path of a file"):
            RunFingerprint(wrong)
    with pytest.raises(ValueError, match=r"detail must be one of step, layer, got 'layers'. Did you mean 'layer'"):
        RunFingerprint("a", detail="layers")
    with pytest.raises(ValueError, match="every_n_train_steps"):
        RunFingerprint("a", every_n_train_steps=0)


def test_the_record_of_another_run_is_moved_aside(tmp_path, lightning_log):
    record(tmp_path / "a.jsonl", seed=1)
    assert not any("of another run" in line for _, line in lightning_log)
    first = (tmp_path / "a.jsonl").read_bytes()
    record(tmp_path / "a.jsonl", seed=2)
    assert (tmp_path / "a.earlier-1.jsonl").read_bytes() == first
    moved = f"a.jsonl to {tmp_path / 'a.earlier-1.jsonl'}"
    assert sum(moved in line for _, line in lightning_log) == 1


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resume_finds_its_rows_where_another_run_has_moved_them(tmp_path, ranks):
    options, path = DDP if ranks == 2 else {}, tmp_path / "a.jsonl"
    whole = record(path, [saving(tmp_path / "mid.ckpt", 4)], max_epochs=1, **options)
    others = record(path, seed=2, max_epochs=1, **options)  # as many rows
    resumed = record(path, seed=5, max_epochs=1, ckpt_path=tmp_path / "mid.ckpt", **options)

    assert [part[:5] for part in rows(resumed)] == [part[:5] for part in rows(whole)]
    assert rows(read_ranks(tmp_path / "a.earlier-1.jsonl")) == rows(whole)
    assert rows(read_ranks(tmp_path / "a.earlier-2.jsonl")) == rows(others)


def test_a_fit_within_a_fit_does_not_mix_its_rows_with_those_of_the_outer_one(tmp_path):
    path = tmp_path / "a.jsonl"
    alone = record(tmp_path / "alone.jsonl", max_epochs=1)

    def fit_another(module):
        with isolated_rng():
            record(path, seed=2, max_epochs=1)

    record(path, [at_step(3, fit_another)], max_epochs=1)
    assert rows(read_ranks(tmp_path / "a.earlier-1.jsonl")) == rows(alone)
    assert len(read_ranks(path)[0]) == len(alone[0])


@pytest.mark.filterwarnings("ignore:.*logger.*:UserWarning")
def test_a_fast_dev_run_leaves_the_record_of_a_real_one(tmp_path):
    record(tmp_path / "a.jsonl")
    before = (tmp_path / "a.jsonl").read_bytes()
    record(tmp_path / "a.jsonl", fast_dev_run=2)
    assert (tmp_path / "a.jsonl").read_bytes() == before


def test_blocks_are_fetched_once(tmp_path):
    """A fit of 260 steps fetches the first weights, two full blocks and the rest."""

    def reads(callbacks):
        with HostReads() as reads:
            trainer = Trainer(callbacks=callbacks, **{"max_epochs": 26, **QUIET})
            trainer.fit(ConvNet(), DataLoader(digits(), batch_size=4))
        return reads.count

    fetches = reads([RunFingerprint(tmp_path / "a.jsonl", detail="layer")]) - reads([])
    assert fetches == 2 * 4, "one `.cpu()` and one `.numpy()` each"


def test_a_model_that_is_counted_on_a_copy_is_not_seen_twice(tmp_path):
    """FlopsReport runs a copy of the model, hooks and all, in the first batch."""
    whole = record(tmp_path / "a.jsonl")
    assert compare(whole, record(tmp_path / "b.jsonl", [FlopsReport(backward=True)])).divergence is None


def test_activation_checkpointing_shows_layers_twice(tmp_path):
    class Checkpointed(ConvNet):
        def training_step(self, batch, batch_idx):
            features = checkpoint(self.net[:5], batch[0], use_reentrant=False)
            return nn.functional.cross_entropy(self.net[5:](features), batch[1])

    whole = record(tmp_path / "a.jsonl", net=Checkpointed)
    assert compare(whole, record(tmp_path / "b.jsonl", net=Checkpointed)).divergence is None
    calls = [c.call for c in whole[0].blocks[-1][0] if (c.kind, c.name) == ("forward", "net.1")]
    assert calls == [1, 2]


def test_frozen_transformers_keep_their_fast_path(tmp_path):
    """In evaluation torch takes another path where a hook is on one of their modules."""

    class Distilled(Net):
        def build(self):
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
            self.teacher = nn.TransformerEncoder(layer, 1).requires_grad_(False)
            self.net = nn.Sequential(nn.Linear(64, 10))

        def training_step(self, batch, batch_idx):
            with torch.no_grad():
                target = self.teacher.eval()(batch[0].view(4, 8, 8))
            return (self.net(batch[0]).sum() - target.sum()).square()

    (run,) = record(tmp_path / "a.jsonl", net=Distilled)
    assert [column.name for column in run.blocks[-1][0] if column.kind == "forward"] == ["net.0"]
