"""The callback against its oracle, the loader that leaves batches out."""

from itertools import product

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_tricks import AutoResume, GradientClipping, SpikeGuard
from lightning_tricks.gradient_clipping import PercentileClip, ZScoreClip
from tests.contract.checks import Interrupts
from tests.contract.lab import Lab
from tests.small import QUIET, Hooks, HostReads, same
from tests.spike_guard.oracle import Noisy, Rows, loader, run

pytestmark = pytest.mark.filterwarnings("ignore:SpikeGuard:UserWarning", "ignore:.*lr_scheduler.step:UserWarning")

NAN = float("nan")
SMALL = {"threshold": 20.0, "window": 16, "warmup_steps": 3}


def guarded(folder, guard, *, poisoned, left_out=None, factor=1e4, batches=12, others=list, one_rank=None, **options):
    """Train guarded, and without guard on what is to be left; assert that both end alike, and return the guard."""
    if left_out is None:  # all batches of a step, or of a window
        size = (guard.every_n_train_steps if guard.mode == "rewind" else 1) * options.get("accumulate_grad_batches", 1)
        left_out = {batch for batch in range(batches) if any(batch // size == spoilt // size for spoilt in poisoned)}
    rows = Rows(batches, poisoned, factor, one_rank, draws=0 not in left_out)  # an epoch's first batch is always read
    with_guard = run(folder / "guarded", loader(rows), [*others(), guard], **options)
    expected = run(folder / "oracle", loader(rows, left_out), others(), **options)
    assert len(with_guard) == len(expected) > 0
    for rank, oracle in zip(with_guard, expected, strict=True):
        for what in oracle:
            equal = same(rank[what], oracle[what])
            assert equal, f"{what} differ, with {guard.spikes}"
    return guard


@pytest.mark.parametrize(("monitor", "factor"), [("loss", 1e4), ("grad_norm", 1e6), ("loss", NAN)])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "fused", "combined"])
def test_a_skipped_batch_was_never_there(monitor, factor, optimizer, tmp_path):
    guard = SpikeGuard(monitor=monitor, **SMALL)
    guarded(tmp_path, guard, poisoned={5, 9}, factor=factor, module=lambda: Noisy(optimizer))
    assert [(spike["epoch"], spike["batch_idx"]) for spike in guard.spikes] == [(0, 5), (0, 9), (1, 5), (1, 9)]


@pytest.mark.parametrize("factor", [1e4, NAN])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "fused", "lbfgs", "combined"])
def test_rewound_batches_were_never_there(factor, optimizer, tmp_path):
    guard = SpikeGuard("rewind", every_n_train_steps=3, **SMALL)
    guarded(tmp_path, guard, poisoned={7}, factor=factor, module=lambda: Noisy(optimizer))
    assert [(spike["batch_idx"], spike["left_out"]) for spike in guard.spikes] == [(7, 3), (7, 3)]


BESIDE = ({}, {"method": ZScoreClip(warmup_steps=3)}, {"method": PercentileClip(50)})
WAYS = [
    *(({0, 1}, 1, {"factor": NAN}), ({11}, 1, {"factor": NAN}), ({4, 5, 6}, 1, {"factor": NAN})),
    *(
        (poisoned, 1, {"accumulate_grad_batches": 4, "batches": 10, "factor": NAN, "fp16": fp16})
        for poisoned, fp16 in product(({5}, {9}, {0, 9}), (False, True))
    ),
    *(
        ({7}, 2, {"fp16": True, "factor": factor, "monitor": monitor, "module": lambda kind=kind: Noisy(kind)})
        for (monitor, kind), factor in product((("loss", "adamw"), ("grad_norm", "fused")), (500.0, NAN))
    ),
    *(
        ({7}, 2, {"ranks": 2, "one_rank": 1, "factor": factor, "monitor": monitor})
        for monitor, factor in (("loss", 1e4), ("grad_norm", NAN))
    ),
    *(({5}, 2, {"module": lambda frequency=frequency: Noisy(frequency=frequency)}) for frequency in (2, 3)),
    ({5}, 4, {"max_epochs": -1, "max_steps": 20}),
    *(({7}, 2, {"others": lambda given=given: [GradientClipping(on_nonfinite="skip", **given)]}) for given in BESIDE),
]


@pytest.mark.parametrize("mode", ["skip", "rewind"])
@pytest.mark.parametrize(("poisoned", "every", "options"), WAYS)
def test_what_is_left_out_was_never_there_in_each_way_of_training(mode, poisoned, every, options, tmp_path):
    options = dict(options)
    guard = SpikeGuard(mode, every_n_train_steps=every, monitor=options.pop("monitor", "loss"), **SMALL)
    guarded(tmp_path, guard, poisoned=poisoned, **options)
    assert guard.spikes or "ranks" in options  # forked ones keep theirs


@pytest.mark.parametrize("every_n", [1, 2, 5])
def test_rewind_under_manual_optimization(every_n, tmp_path):
    guard = SpikeGuard("rewind", every_n_train_steps=every_n, **SMALL)
    guarded(tmp_path, guard, poisoned={7}, module=lambda: Noisy(automatic=False))


@pytest.mark.parametrize("every_n", [3, 100])
def test_validation_sees_weights_that_were_judged(every_n, tmp_path):
    seen = []
    looks = Hooks(on_validation_start=lambda _, net: seen.append(all(p.isfinite().all() for p in net.parameters())))
    guard = SpikeGuard("rewind", every_n_train_steps=every_n, **SMALL)
    run(tmp_path / "run", loader(Rows(12, {7}, NAN)), [guard, looks], val_check_interval=4)
    assert seen == [True] * 6
    assert [(spike["batch_idx"], spike["left_out"]) for spike in guard.spikes] == [(7, 1 if every_n == 3 else 4)] * 2


@pytest.mark.filterwarnings("ignore:.*configure_optimizers. returned .None")
def test_a_module_without_weights(tmp_path):
    class Counting(LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.register_buffer("total", torch.zeros(64))

        def training_step(self, batch, batch_idx):
            self.total += batch[0].mean(0)
            return batch[0].mean()

        def configure_optimizers(self):
            return None

    module, guard = Counting(), SpikeGuard("rewind", every_n_train_steps=2, **SMALL)
    Trainer(**QUIET, max_epochs=1, callbacks=[guard]).fit(module, loader(Rows(12, {7}, NAN)))
    assert [spike["left_out"] for spike in guard.spikes] == [2]
    assert module.total.isfinite().all()


class Averaged(Noisy):
    """Averages its weights where Lightning's documentation does."""

    def __init__(self):
        super().__init__()
        self.average = torch.optim.swa_utils.AveragedModel(self.net)

    def on_before_zero_grad(self, optimizer):
        self.average.update_parameters(self.net)


def test_an_average_in_the_module_goes_back_as_well(tmp_path):
    guard = SpikeGuard("rewind", every_n_train_steps=2, **SMALL)
    guarded(tmp_path, guard, poisoned={7}, module=Averaged)


@pytest.mark.parametrize("order", ["first", "last"])
def test_a_fit_that_is_stopped_ends_with_weights_that_were_judged(order, tmp_path):
    guard = SpikeGuard("rewind", every_n_train_steps=100, **SMALL)

    def stop(trainer, module, outputs, batch, batch_idx):
        if trainer.current_epoch == 1 and batch_idx == 8:
            trainer.should_stop = True

    callbacks = [guard, Hooks(on_train_batch_end=stop)][:: 1 if order == "first" else -1]
    (end,) = run(tmp_path / "run", loader(Rows(12, {7}, NAN)), callbacks, limit_val_batches=0)
    assert all(tensor.isfinite().all() for tensor in end["tensors"].values())
    assert [spike["left_out"] for spike in guard.spikes] == [12, 9]
    assert end["global_step"] == 0


@pytest.mark.parametrize("mode", ["skip", "rewind"])
def test_shuffled_batches(mode, tmp_path):
    rows = Rows(12, draws=False)
    torch.manual_seed(0)
    ends = []
    for left_out, callbacks in (((), [SpikeGuard(mode, every_n_train_steps=1, **SMALL)]), ({0, 5}, [])):
        # batches 0 and 5 of the order that is drawn are spoilt by the module, which sees their index
        data, spoilt = loader(rows, left_out, shuffle=True), not left_out
        ends += run(tmp_path / str(len(ends)), data, callbacks, module=lambda spoilt=spoilt: SpoiltByIndex(spoilt))
    for what in ends[0]:
        equal = same(ends[0][what], ends[1][what])
        assert equal, f"{what} differ"


class SpoiltByIndex(Noisy):
    def __init__(self, spoilt):
        super().__init__()
        self.spoilt = spoilt

    def training_step(self, batch, batch_idx):
        if self.spoilt and batch_idx in (0, 5):
            batch = batch[0] * float("nan"), batch[1]
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("mode", ["skip", "rewind"])
def test_too_many_in_a_row_end_the_fit_in_words(mode, tmp_path):
    guard = SpikeGuard(mode, every_n_train_steps=1, max_consecutive=2, **SMALL)
    with pytest.raises(RuntimeError, match=r"a value not finite, at batch 7 .* 3 spikes in a row, more than max_cons"):
        run(tmp_path / "run", loader(Rows(12, {5, 6, 7}, NAN)), [guard])
    assert [spike["batch_idx"] for spike in guard.spikes] == [5, 6, 7]


def test_an_average_of_the_weights_goes_back_as_well(tmp_path):
    averaging = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging")
    guard = SpikeGuard("rewind", every_n_train_steps=2, **SMALL)
    guarded(tmp_path, guard, poisoned={7}, others=lambda: [averaging.EMAWeightAveraging(decay=0.9)])


@pytest.mark.parametrize("mode", ["skip", "rewind"])
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("stopped", [5, 8, 9])
def test_resumed_in_the_middle_it_ends_as_one_run(mode, accumulated, stopped, tmp_path):
    def train(folder, *others):
        guard = SpikeGuard(mode, every_n_train_steps=3, **SMALL)
        data = loader(Rows(12, {7}, 1e4))
        return guard, run(folder, data, [guard, *others], accumulate_grad_batches=accumulated)

    whole, expected = train(tmp_path / "whole")
    with pytest.raises(SystemExit):
        train(tmp_path / "stopped", AutoResume(tmp_path / "resume"), Interrupts(stopped))
    resumed, ends = train(tmp_path / "resumed", AutoResume(tmp_path / "resume"))
    for what in expected[0]:
        equal = same(ends[0][what], expected[0][what])
        assert equal, f"{what} differ"
    assert resumed.spikes == whole.spikes
    assert len(whole.spikes) == 2
    assert same(resumed.state_dict(), whole.state_dict())


@pytest.mark.parametrize(("mode", "more"), [("skip", 1), ("rewind", 0)])
def test_host_reads_of_a_step(mode, more, tmp_path):
    counts = {}
    for batches in (4, 10):
        for callbacks in ([], [SpikeGuard(mode, threshold=float("inf"))]):
            lab = Lab(tmp_path / f"{batches}{len(callbacks)}")
            with HostReads() as reads:
                lab.fit(callbacks, probe=False, limit_train_batches=batches, max_epochs=1)
            counts[batches, len(callbacks)] = reads.count
    assert counts[10, 1] - counts[4, 1] - (counts[10, 0] - counts[4, 0]) == more * 6


def test_refusals_name_the_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"mode must be one of skip, rewind, got 'rewnd'\..* Did you mean 'rewind'"):
        SpikeGuard("rewnd")
    with pytest.raises(ValueError, match="threshold must be"):
        SpikeGuard(threshold=0)
    for module, words in ((Noisy(automatic=False), "manual optimization"), (Noisy("lbfgs"), "LBFGS")):
        needs = ', and return the loss, .* from training_step, or give monitor="grad_norm"' * (words[0] == "m")
        with pytest.raises(MisconfigurationException, match=rf'under {words}.*: use "rewind"{needs}'):
            run(tmp_path / words, loader(Rows(4)), [SpikeGuard()], module=lambda module=module: module)

    class Silent(Noisy):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)

    with pytest.raises(
        MisconfigurationException, match=r'training_step returned NoneType: return the loss.*"grad_norm"'
    ):
        run(tmp_path / "silent", loader(Rows(4)), [SpikeGuard("rewind")], module=lambda: Silent(automatic=False))


def test_manual_accumulation_is_continued_where_it_was(tmp_path):
    class Accumulating(Noisy):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.manual_backward(loss)
            self.seen += 1
            if self.seen % 2 == 0:
                for optimizer in self.optimizers():
                    optimizer.step()
                    optimizer.zero_grad()
            return loss

        def __init__(self):
            super().__init__(automatic=False)
            self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    guarded(tmp_path, SpikeGuard("rewind", every_n_train_steps=1, **SMALL), poisoned={7}, module=Accumulating)
