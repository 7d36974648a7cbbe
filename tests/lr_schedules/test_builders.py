"""Optimizers and schedules in real runs: the Trainer's own steps are the oracle of their number."""

import datetime
import sys

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BaseFinetuning, GradientAccumulationScheduler, LearningRateMonitor
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, IterableDataset

from lightning_tricks import OptimizerSpec, ScheduleSpec
from lightning_tricks.lr_schedules import build_optimizer, build_schedule, total_steps
from tests.small import QUIET, Hooks, Net, cases, digits, loader, same

pytestmark = pytest.mark.oldest

_SGD = OptimizerSpec("SGD", lr=0.1, weight_decay=0.01)


class _Scheduled(Net):
    """Remembers the rate of every step, and how many steps were predicted."""

    def __init__(self, schedule=None, optimizer=_SGD, optimization="adamw"):
        super().__init__(optimization)
        self.specs = optimizer, schedule or ScheduleSpec("warmup_linear", warmup=1)
        self.rates, self.predicted = [], None

    def configure_optimizers(self):
        optimizer = build_optimizer(self, self.specs[0])
        if self.specs[1].needs_total and self.specs[1].total is None:
            self.predicted = total_steps(self.trainer)
        return [optimizer], [build_schedule(optimizer, self.specs[1], self.trainer)]

    def on_before_optimizer_step(self, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])


def _fit(module, data=None, **trainer):
    fitter = Trainer(**{**QUIET, "max_epochs": 3, **trainer})
    fitter.fit(module, loader() if data is None else data)
    return fitter


@pytest.mark.trap("gradient_clipping: estimated_stepping_batches is wrong for GradientAccumulationScheduler")
@cases(
    "arguments",
    {},
    {"accumulate_grad_batches": 4},
    {"callbacks": lambda: [GradientAccumulationScheduler({0: 1, 1: 4})]},
    {"callbacks": lambda: [GradientAccumulationScheduler({1: 3})], "max_steps": 12},
    {"limit_train_batches": 3},
    {"limit_train_batches": 0.5, "accumulate_grad_batches": 2},
    {"max_steps": 7},
    {"max_steps": 7, "max_epochs": -1},
    {"max_steps": 1000},
    {"overfit_batches": 2},
    ids=lambda arguments: ", ".join(arguments) or "nothing",
)
@pytest.mark.filterwarnings("ignore:.*overfit")
def test_predicts_the_steps(arguments):
    callbacks = arguments.get("callbacks", list)()
    module = _Scheduled()
    trainer = _fit(module, **{**arguments, "callbacks": callbacks})
    assert module.predicted == trainer.global_step == len(module.rates) > 0
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    assert scheduler.last_epoch == module.predicted
    assert scheduler.get_last_lr()[0] == 0.0, "the fall ends with the run"
    assert module.rates[-1] > 0


def test_predicts_the_steps_of_ranks(tmp_path):
    class Writes(_Scheduled):
        def on_train_end(self):
            if self.global_rank == 0:
                torch.save((self.predicted, self.trainer.global_step), tmp_path / "steps.pt")

    _fit(Writes(), strategy="ddp_fork", devices=2)
    assert torch.load(tmp_path / "steps.pt") == (15, 15)


class _Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield digits()[0]


@pytest.mark.trap("gradient_clipping: IterableDataset without max_steps gives -1")
@cases(
    "arguments, data, reason",
    ({"max_epochs": 3}, lambda: DataLoader(_Endless(), 4), "no length.*IterableDataset.*max_steps"),
    ({"max_epochs": -1}, loader, "the run has no end"),
    ({"max_epochs": None, "max_time": datetime.timedelta(seconds=5)}, loader, "max_time does not tell"),
)
def test_says_why_the_steps_are_unknown(arguments, data, reason):
    with pytest.raises(MisconfigurationException, match=rf"needs the number of steps, and .*{reason}"):
        _fit(_Scheduled(), data(), **arguments)


def test_an_iterable_dataset_with_max_steps_or_a_total():
    module = _Scheduled()
    _fit(module, DataLoader(_Endless(), 4), max_steps=6)
    assert module.predicted == 6
    module = _Scheduled(ScheduleSpec("warmup_linear", warmup=1, total=5))
    _fit(module, DataLoader(_Endless(), 4), max_epochs=1, limit_train_batches=8)
    assert module.rates == pytest.approx([0.05, 0.1, 0.075, 0.05, 0.025, 0, 0, 0])


def test_says_that_max_time_may_end_before(lightning_log):
    _fit(_Scheduled(), max_time="00:01:00:00")
    assert any("max_time may end the run before the schedule does, which has 30 steps" in m for _, m in lightning_log)


@cases(
    "schedule",
    ScheduleSpec(warmup="500 steps"),
    ScheduleSpec(warmup="20000 steps"),
    ScheduleSpec(warmup="500 steps", total="100 epochs"),
    ScheduleSpec(warmup=5, interval="epoch"),
    ScheduleSpec("multistep", milestones=["500 steps", "100 epochs"]),
    ScheduleSpec("step", step_size=0.01),
    ids=str,
)
def test_fast_dev_run_takes_any_schedule(schedule, lightning_log):
    module = _Scheduled(schedule)
    _fit(module, fast_dev_run=True)
    assert module.rates == [0.1]
    assert any("stays constant in this run" in message for _, message in lightning_log)


def test_no_batches_are_no_steps():
    assert _fit(_Scheduled(ScheduleSpec()), limit_train_batches=0).global_step == 0


@cases(
    "schedule, arguments, words",
    ({"warmup": "500 steps"}, {}, "warmup='500 steps' are longer than the schedule: 500 > 30 steps"),
    ({"warmup": "5 epochs"}, {"max_epochs": 1}, "warmup='5 epochs' are longer than the schedule: 50 > 10 steps"),
    ({"kind": "wsd", "warmup": 0.5, "decay": "9 steps"}, {"max_steps": 4}, "longer than the schedule: 11 > 4 steps"),
    ({"kind": "step", "step_size": 0.1}, {"limit_train_batches": 1}, "step_size=0.1 is less than one step of 3"),
    ids=str,
)
def test_a_run_that_is_too_short_for_its_schedule_is_a_warning(schedule, arguments, words):
    module = _Scheduled(ScheduleSpec(**schedule))
    with pytest.warns(UserWarning, match=f"stays constant in this run, which is too short for its schedule: .*{words}"):
        _fit(module, **arguments)
    assert set(module.rates) == {0.1}


@cases("schedule", {"warmup": "500 steps", "total": "30 steps"}, {"kind": "wsd", "warmup": 0.9, "decay": 0.2}, ids=str)
def test_a_schedule_that_no_run_holds_is_refused(schedule):
    with pytest.raises(ValueError, match="are longer than the schedule"):
        _fit(_Scheduled(ScheduleSpec(**schedule)))


class _Two(Net):
    """Two optimizers that both step in each batch, by hand."""

    def __init__(self, n_optimizers, **schedule):
        super().__init__("manual")
        self.n_optimizers, self.spec = n_optimizers, ScheduleSpec("warmup_linear", **{"warmup": 1, **schedule})

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self):
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net[0], self.net[4])]
        of = {"trainer": self.trainer, "n_optimizers": self.n_optimizers}
        return optimizers, [build_schedule(optimizer, self.spec, **of) for optimizer in optimizers]


@pytest.mark.trap("gradient_clipping: estimated_stepping_batches is wrong for two manual optimizers")
@pytest.mark.parametrize("arguments", [{"max_epochs": 2}, {"max_epochs": -1, "max_steps": 13}], ids=str)
def test_several_optimizers(arguments):
    trainer = _fit(_Two(2), **arguments)
    for config in trainer.lr_scheduler_configs:
        assert config.scheduler.last_epoch == trainer.global_step / 2
        assert config.scheduler.get_last_lr() == [0.0]
        assert config.scheduler.factor(config.scheduler.last_epoch - 1) > 0


def test_epochs_of_several_optimizers():
    """40 steps of both are 20 batches, in 2 epochs."""
    trainer = _fit(_Two(2, warmup=0, interval="epoch"), max_epochs=9, max_steps=40)
    for config in trainer.lr_scheduler_configs:
        assert [config.scheduler.factor(epoch) for epoch in range(3)] == [1.0, 0.5, 0.0]


def test_says_that_max_steps_counts_all_optimizers():
    with pytest.warns(UserWarning, match="max_steps=12 counts the steps of all optimizers.*n_optimizers"):
        _fit(_Two(None), max_steps=12)


def test_epochs():
    module = _Scheduled(ScheduleSpec("warmup_linear", warmup="1 epoch", interval="epoch"))
    _fit(module, max_epochs=4)
    assert module.rates[::10] == pytest.approx([0.05, 0.1, 0.1 * 2 / 3, 0.1 / 3])
    module = _Scheduled(ScheduleSpec("warmup_linear", warmup="1.28 epochs"))  # 2 steps, and 2.8 of the 10 that follow
    _fit(module, callbacks=[GradientAccumulationScheduler({0: 5, 1: 1})])
    assert module.rates[:6] == pytest.approx([0.1 * step / 6 for step in range(1, 7)])


def test_epochs_of_a_run_by_steps():
    module = _Scheduled(ScheduleSpec("warmup_linear", warmup=0, interval="epoch"))
    _fit(module, max_epochs=-1, max_steps=20, callbacks=[GradientAccumulationScheduler({0: 1, 1: 4})])
    epochs = [0] * 10 + [1] * 3 + [2] * 3 + [3] * 3 + [4]
    assert module.rates == pytest.approx([0.1 * (1 - epoch / 5) for epoch in epochs])


class _Specified(_Scheduled):
    def __init__(self, optimizer: OptimizerSpec = _SGD, schedule: ScheduleSpec | None = None):
        super().__init__(schedule, optimizer)


@pytest.mark.trap("gradient_clipping: LightningCLI gives schedulers the epoch interval")
def test_lightning_cli_leaves_the_interval(monkeypatch):
    arguments = ["--model.optimizer.lr=0.5", "--model.schedule.kind=wsd", "--model.schedule.warmup=1 epoch"]
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    cli = LightningCLI(
        _Specified,
        run=False,
        trainer_defaults={**QUIET, "max_epochs": 3},
        save_config_callback=None,
        seed_everything_default=False,
    )
    cli.trainer.fit(cli.model, loader())
    (config,) = cli.trainer.lr_scheduler_configs
    assert (config.interval, config.scheduler.last_epoch) == ("step", 30)
    assert cli.model.rates[9:12] == pytest.approx([0.5 * 10 / 11, 0.5, 0.5])


def test_a_group_that_is_unfrozen_in_mid_run():
    class Unfreezing(BaseFinetuning):
        def freeze_before_training(self, pl_module):
            self.freeze(pl_module.net[0])

        def finetune_function(self, pl_module, epoch, optimizer):
            if epoch == 2:
                self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.5)

    class Watched(_Scheduled):
        def on_before_optimizer_step(self, optimizer):
            self.rates.append([group["lr"] for group in optimizer.param_groups])

    module = Watched(ScheduleSpec("warmup_cosine"))
    trainer = _fit(module, callbacks=[Unfreezing()])
    factor = trainer.lr_scheduler_configs[0].scheduler.factor
    bases = [[0.1, 0.1] + [0.5] * (step >= 20) for step in range(30)]
    assert module.rates == [[base * factor(step) for base in bases[step]] for step in range(30)]


def test_a_recipe_of_old_code():
    class Old(Net):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
            return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2, 4], 0.1)]

    spec = OptimizerSpec("SGD", lr=0.1, weight_decay=5e-4, no_decay=(), kwargs={"momentum": 0.9})
    torch.manual_seed(0)
    new = _Scheduled(ScheduleSpec("multistep", milestones=[1, 2, 4], interval="epoch"), spec)
    torch.manual_seed(0)
    old = Old()
    _fit(new, max_epochs=6)
    _fit(old, max_epochs=6)
    assert same(dict(new.state_dict()), dict(old.state_dict()))


@pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint that ended before the epoch")
def test_resume_in_the_middle_of_an_epoch(tmp_path):
    def save(trainer, *_):
        if trainer.global_step == 13:
            trainer.save_checkpoint(tmp_path / "middle.ckpt")

    spec = ScheduleSpec("wsd", warmup=0.2, decay=0.4)
    torch.manual_seed(0)
    whole = _Scheduled(spec, OptimizerSpec(lr=0.1))
    _fit(whole, callbacks=[Hooks(on_train_batch_end=save)])
    resumed = _Scheduled(spec, OptimizerSpec(lr=0.1))
    trainer = Trainer(**QUIET, max_epochs=3)
    trainer.fit(resumed, loader(), ckpt_path=tmp_path / "middle.ckpt")
    torch.load(tmp_path / "middle.ckpt", weights_only=True)
    assert resumed.rates == whole.rates[13:]
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0


def test_learning_rate_monitor_shows_the_groups(tmp_path):
    logger = CSVLogger(tmp_path)
    module = _Scheduled(optimizer=OptimizerSpec(groups={"net.4.*": {"lr": 1e-4}}))
    _fit(module, logger=logger, callbacks=[LearningRateMonitor()], log_every_n_steps=1)
    logged = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text()
    assert "net.4.*, no decay" in logged


@pytest.mark.gpu
def test_fused_by_itself_on_a_gpu():
    linear = torch.nn.Linear(2, 2, device="cuda")
    assert build_optimizer(linear, OptimizerSpec()).param_groups[0]["fused"]
    assert not build_optimizer(torch.nn.Linear(2, 2), OptimizerSpec()).param_groups[0]["fused"]
    net = Net().cuda()
    net.trainer = Trainer(**QUIET, gradient_clip_val=1.0)
    assert not build_optimizer(net, OptimizerSpec()).param_groups[0]["fused"], "Lightning refuses to clip its gradients"
