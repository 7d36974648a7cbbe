"""FlopsReport in real fits: what it counts and logs, ThroughputMonitor, MFU, and errors."""

import csv
import json
import pickle

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lightning_tricks import FlopsReport
from lightning_tricks.ensembles import FusionClassifier, SoftGradientBoostingClassifier, VotingClassifier
from tests.contract.lab import SETTINGS
from tests.flops.contract import BACKWARD_MACS, FORWARD_MACS
from tests.small import QUIET, EvaluatedNet, Hooks, Net, cases, loader

STEP = 2 * (FORWARD_MACS + BACKWARD_MACS)


def fit(callbacks, module=None, **arguments):
    trainer = Trainer(callbacks=callbacks, **{"max_epochs": 2, **QUIET, **arguments})
    module = module or Net()
    trainer.fit(module, loader(), loader() if hasattr(module, "evaluate") else None)
    return trainer


class Forwards(Net):
    def forward(self, x):
        return self.net(x)


def test_the_first_batch_is_counted_and_not_consumed(capsys):
    class Batches(Net):
        seen = 0

        def training_step(self, batch, batch_idx):
            self.seen += 1
            return super().training_step(batch, batch_idx)

    report, module = FlopsReport(log_totals=True, verbose=True), Batches()
    trainer = fit([report], module)
    assert module.seen == 20
    assert report.count.macs == FORWARD_MACS
    text = capsys.readouterr().out
    assert text.count("FLOPs of Batches") == 1
    totals = {"flops/forward": 2 * FORWARD_MACS, "params/total": 1242, "params/trainable": 1242}
    for fitted in (trainer, fit([report])):
        assert {name: value.item() for name, value in fitted.callback_metrics.items()} == totals
    (part,) = report.report_parts(trainer)
    assert [name for name, _ in part.facts] == ["forward", "parameters"]


@pytest.mark.parametrize("kind", [VotingClassifier, FusionClassifier, SoftGradientBoostingClassifier])
def test_the_members_of_an_ensemble_count_by_themselves(kind):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    report = FlopsReport(backward=True)
    fit([report], kind(net, 3, seed=0))
    assert report.count.flops == 3 * 2 * len(next(iter(loader()))[0]) * (64 * 8 + 8 * 10)
    assert report.count.train_step_flops > 2 * report.count.flops
    assert not report.count.notes  # it needed no data


def test_example_input_array_comes_first(capsys):
    module = Forwards()
    module.example_input_array = torch.zeros(7, 64)
    report = FlopsReport(backward=True, log_totals=True)
    trainer = fit([report], module)
    assert report.count.macs == 7 / 4 * FORWARD_MACS
    assert trainer.callback_metrics["flops/train_step"] == 7 / 4 * STEP
    given = FlopsReport(torch.zeros(1, 64), depth=0)
    fit([given], module)
    assert given.count.macs == FORWARD_MACS / 4


class Samples(Forwards):
    """As modules of forecasts do, it predicts without gradients."""

    example_input_array = torch.zeros(7, 64)

    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


def test_an_example_without_gradients_is_left_for_the_training_step():
    report = FlopsReport(backward=True)
    fit([report], Samples())
    assert (report.count.macs, report.count.train_step_flops) == (FORWARD_MACS, STEP)
    with pytest.raises(ValueError, match="what forward returned"):
        fit([FlopsReport(inputs=torch.zeros(7, 64), backward=True)], Samples())


def test_wrong_inputs_stop_the_fit_before_it_starts():
    module = Forwards()
    module.example_input_array = torch.zeros(7, 63)
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied(.|\n)*from example_input_array"):
        fit([FlopsReport()], module)
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied(.|\n)*from FlopsReport\(inputs=...\)"):
        fit([FlopsReport(torch.zeros(7, 62))], module)
    assert module.trainer.global_step == 0


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
def test_a_batch_that_cannot_be_counted_is_a_warning():
    class Iterates(Net):
        def training_step(self, dataloader_iter):
            batch, batch_idx, _ = next(dataloader_iter)
            return super().training_step(batch, batch_idx)

    report = FlopsReport(backward=True)
    with pytest.warns(UserWarning, match="FlopsReport could not count a training step.*dataloader_iter"):
        trainer = fit([report], Iterates())
    assert trainer.global_step == 20
    assert report.count is None


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path):
    (tmp_path / "file").touch()
    report = FlopsReport(path=tmp_path / "file" / "flops.csv")
    with pytest.warns(UserWarning, match=r"FlopsReport wrote no file: path='.*flops\.csv' cannot be written"):
        trainer = fit([report])
    assert trainer.global_step == 20
    assert report.count.macs == FORWARD_MACS


def test_compare_and_thop(capsys, tmp_path):
    fit([FlopsReport(compare=True, verbose=True, backward=True, path=tmp_path / "flops.json")])
    assert "thop's MACs" in capsys.readouterr().out
    assert json.loads((tmp_path / "flops.json").read_text())["train_step_flops"] == STEP
    report = FlopsReport(backend="thop")
    fit([report])
    assert report.count.backend == "thop"


class RecordsFlops(Hooks):
    """Records what ThroughputMonitor reads in each training and validation batch."""

    def __init__(self):
        training, validation = self.seen = [], []
        super().__init__(
            on_train_batch_end=lambda _, module, *__: training.append(module.flops_per_batch),
            on_validation_batch_end=lambda _, module, *__: validation.append(module.flops_per_batch),
        )


def logged(folder, name):
    (file,) = folder.glob("**/metrics.csv")
    rows = csv.DictReader(file.read_text().splitlines())
    return [float(row[name]) for row in rows if row.get(name)]


@pytest.mark.trap("flops: MFU needs flops_per_batch by hand")
@pytest.mark.parametrize("first", [True, False])
def test_throughput_monitor_gets_its_flops(tmp_path, first):
    report, recorder = FlopsReport(backward=True, peak_flops=1e12), RecordsFlops()
    monitor = ThroughputMonitor(lambda batch: len(batch[0]), window_size=3)
    module = EvaluatedNet()
    callbacks = [report, monitor, recorder] if first else [monitor, report, recorder]
    fit(callbacks, module, logger=CSVLogger(tmp_path), log_every_n_steps=2)
    assert recorder.seen == ([STEP] * 20, [None] * 20)
    assert not hasattr(module, "flops_per_batch")
    per_second = logged(tmp_path, "train/device/flops_per_sec")
    batches = logged(tmp_path, "train/device/batches_per_sec")
    assert len(per_second) > 5
    assert per_second == pytest.approx([STEP * rate for rate in batches])
    assert not logged(tmp_path, "validate/device/flops_per_sec")

    with pytest.warns(UserWarning, match="flops_per_batch"):
        fit([monitor], module)


def test_a_modules_own_flops_per_batch_wins():
    module, recorder = Net(), RecordsFlops()
    module.flops_per_batch = 7
    fit([FlopsReport(backward=True), ThroughputMonitor(lambda batch: 4, window_size=2), recorder], module)
    assert recorder.seen[0] == [7] * 20
    assert module.flops_per_batch == 7


def test_nothing_is_left_after_an_exception():
    class Breaks(Net):
        def training_step(self, batch, batch_idx):
            if batch_idx == 3:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    module = Breaks()
    with pytest.raises(ZeroDivisionError):
        fit([FlopsReport(backward=True), ThroughputMonitor(lambda batch: 4)], module)
    assert not hasattr(module, "flops_per_batch")


class TestUtilization:
    @pytest.fixture
    def clock(self, monkeypatch):
        """Time that passes in training and validation batches alone: two seconds in each."""

        ticks = [50]
        monkeypatch.setattr("lightning_tricks.flops.callback.time.perf_counter", lambda: 2.0 * len(ticks))
        return Hooks(**dict.fromkeys(("on_train_batch_start", "on_validation_batch_start"), lambda *_: ticks.append(0)))

    @pytest.mark.parametrize("accumulate", [1, 4])
    def test_is_that_of_the_training_batches(self, tmp_path, clock, accumulate, lightning_log):
        report = FlopsReport(backward=True, peak_flops=1e6)
        logger = CSVLogger(tmp_path)
        arguments = {"log_every_n_steps": 1, "accumulate_grad_batches": accumulate, "val_check_interval": 5}
        fit([report, clock], EvaluatedNet(), logger=logger, **arguments)
        values = logged(tmp_path, "flops/mfu")
        steps = {1: 20, 4: 6}[accumulate]
        assert len(values) == steps
        assert values[1:] == pytest.approx([STEP / 2 / 1e6] * (steps - 1))
        words = "flops/mfu is relative to 1.00 MFLOP/s of cpu in 32-true, as given"
        assert sum(words in message for _, message in lightning_log) == 1

    def test_without_a_known_peak_is_not_logged(self, lightning_log):
        trainer = fit([FlopsReport(backward=True)])
        assert "flops/mfu" not in trainer.callback_metrics
        words = "no flops/mfu, as the peak FLOP/s of cpu is not known: pass peak_flops to log it"
        assert sum(words in message for _, message in lightning_log) == 1

    @pytest.mark.gpu
    def test_on_a_gpu(self, capsys):
        trainer = fit([FlopsReport(backward=True)], accelerator="cuda", devices=1, log_every_n_steps=2)
        assert 0 < trainer.callback_metrics["flops/mfu"] < 1


def test_two_ranks_print_once(lab, capfd):
    report = FlopsReport(backward=True, peak_flops=1e12, log_totals=True, verbose=True)
    ranks = lab.fit([report], SETTINGS["DDP"], log_every_n_steps=1)
    assert len(ranks) == 2
    assert capfd.readouterr().out.count("FLOPs of Net") == 1
    assert ranks[0].metrics["flops/train_step"] == STEP
    assert 0 < ranks[0].metrics["flops/mfu"] < 1


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_gather is deprecated")
def test_a_step_with_collectives(lab):
    ranks = lab.fit([FlopsReport(log_totals=True)], SETTINGS["DDP"], module=Gathers())
    (plain,) = lab.fit([FlopsReport(log_totals=True)], module=Gathers())
    assert ranks[0].metrics["flops/forward"] == plain.metrics["flops/forward"]


class Gathers(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(10)

    def training_step(self, batch, batch_idx):
        scores = self.norm(self.net(batch[0]))
        everywhere = self.all_gather(scores.detach())
        self.log("spread", everywhere.std(), sync_dist=True)
        return nn.functional.cross_entropy(scores, batch[1])


def test_a_step_that_uses_its_trainer_acts_once(tmp_path):
    class Busy(Net):
        def training_step(self, batch, batch_idx):
            with self.trainer.profiler.profile("step"):
                loss = super().training_step(batch, batch_idx)
            self.trainer.save_checkpoint(tmp_path / f"{batch_idx}-{len(list(tmp_path.iterdir()))}.ckpt")
            self.trainer.strategy.barrier()
            assert len(self.trainer.optimizers) == len(self.optimizers()) == 2
            assert self.trainer.is_last_batch == (batch_idx == 1)
            for optimizer in self.trainer.optimizers:
                optimizer.zero_grad()
            return loss

    report = FlopsReport(backward=True)
    fit([report], Busy(optimization="manual"), limit_train_batches=2, max_epochs=1)
    assert report.count.train_step_flops == STEP
    assert len(list(tmp_path.iterdir())) == 2


def test_barebones_and_fast_dev_run(capsys):
    report = FlopsReport(backward=True, peak_flops=1e9, log_totals=True, verbose=True)
    Trainer(barebones=True, max_epochs=1, callbacks=[report], accelerator="cpu").fit(Net(), loader())
    assert "FLOPs of Net" in capsys.readouterr().out
    fit([report], fast_dev_run=True)


@pytest.mark.trap("flops: a mode that sees operators lets torch take other formulas, also in another's training")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_training_is_bit_identical_where_torch_looks_for_a_mode(precision):
    """The gradient of `prod` does, and with autocast so do bilinear layers: a real step cannot be counted in place."""

    class Multiplies(Net):
        def __init__(self):
            torch.manual_seed(0)
            super().__init__()
            self.pairs = nn.Bilinear(10, 10, 4)

        def training_step(self, batch, batch_idx):
            scores = self.net(batch[0]).float()
            return (1 + self.pairs(scores, scores).tanh() / 8).prod() + scores.square().mean()

    plain, counted, report = Multiplies(), Multiplies(), FlopsReport(backward=True)
    fit([], plain, precision=precision)
    fit([report], counted, precision=precision)
    assert report.count.train_step_flops > report.count.flops
    assert all(map(torch.equal, plain.parameters(), counted.parameters()))


def test_pickles_in_the_middle_of_a_fit():
    report, sizes = FlopsReport(backward=True, peak_flops=1e9), []
    fit([report, Hooks(on_train_batch_end=lambda *_: sizes.append(len(pickle.dumps(report))))])
    assert max(sizes) < 10_000


@cases(
    "arguments, words",
    ({"backend": "thopp"}, "backend must be one of torch, thop, got 'thopp'. Did you mean 'thop'"),
    ({"backend": "thop", "backward": True}, 'backward=True needs backend="torch"'),
    ({"depth": -1}, "depth must be a whole number >= 0, got -1"),
    ({"path": "flops.txt"}, "the suffix of path must be one of .csv, .json, .md, .html, got '.txt'"),
    ({"peak_flops": 1e12}, "peak_flops=1000000000000.0 needs backward=True"),
    ({"peak_flops": 0, "backward": True}, "peak_flops must be a number > 0, got 0"),
)
def test_bad_arguments(arguments, words):
    with pytest.raises(ValueError, match=words):
        FlopsReport(**arguments)
