"""GradualUnfreezing in real fits: what trains when, resumed anywhere, in every way to train."""

import copy
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from packaging.version import Version
from torch import nn
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.optim import SGD, AdamW
from torch.optim import lr_scheduler as lrs
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler

from lightning_tricks import Adapters, AutoResume, GradualUnfreezing, LoRA, ScheduleSpec
from lightning_tricks.finetuning import freeze_
from lightning_tricks.lr_schedules import FactorLR
from tests.contract.checks import Interrupts
from tests.finetuning.finetuned_net import FineNet, Trace, ValidatedNet, fit, flags, moved, trained, weights
from tests.small import QUIET, cases, digits, fork, loader, real_fp16, recorded_warnings, same

EPOCHS = {0: "head.*", 1: "block.*", 2: ["*"]}
STEPS = {0: "head.*", 3: "block.*", 14: ["*"]}
PARTS = ({"head"}, {"head", "block"}, {"head", "block", "stem"})


def parts(row):
    return {name.partition(".")[0] for name in row["trains"]}


def assert_same_rows(left, right):
    assert len(left) == len(right) > 0
    for number, (one, other) in enumerate(zip(left, right, strict=True)):
        for what in one:
            assert same(one[what], other[what]), f"{what} differ in row {number}"


# -- what trains when


@pytest.mark.trap("finetuning: parameters are compared by value")
def test_trains_what_the_schedule_says():
    net = FineNet()
    before = weights(net)
    rows = fit(net, GradualUnfreezing(EPOCHS))
    assert [parts(row) for row in rows] == [PARTS[0]] * 10 + [PARTS[1]] * 10 + [PARTS[2]] * 10
    assert moved(before, rows[9]["weights"]) == {"head"}, "frozen weights and statistics are bit-identical"
    assert moved(rows[9]["weights"], rows[19]["weights"]) == {"head", "block"}
    equal_to_the_heads = "block.1.weight"
    assert not torch.equal(rows[9]["weights"][equal_to_the_heads], rows[19]["weights"][equal_to_the_heads])
    assert moved(rows[19]["weights"], rows[29]["weights"]) == {"head", "block", "stem"}
    assert all(name in trained(net) for name, _ in net.named_parameters())


def test_unit_step_under_accumulation_with_a_partial_tail():
    rows = fit(
        FineNet(), GradualUnfreezing({0: "head.*", 2: "block.*", 4: "*"}, unit="step"), accumulate_grad_batches=4
    )
    # three steps in an epoch of ten batches: after batches 4, 8 and 10
    assert [parts(row) for row in rows[:14]] == [PARTS[0]] * 8 + [PARTS[1]] * 6
    assert [parts(row) for row in rows[14:]] == [PARTS[2]] * 16


def test_parameters_without_a_key_stay_frozen(capsys, caplog):
    net = FineNet()
    before = weights(net)
    with caplog.at_level("INFO"):
        fit(net, GradualUnfreezing({0: "head.*"}))
    assert moved(before, weights(net)) == {"head"}
    assert "never, as no pattern matches: 624 values in 8 tensors" in caplog.text


def test_reports_what_trains_from_when(caplog):
    net = FineNet()
    net.stem[0].bias.requires_grad_(False)
    with caplog.at_level("INFO"):
        fit(net, GradualUnfreezing({"0": "head.*", 1: ["block.*", "head.0.*"], 2: "*"}))
    (line,) = (line for line in caplog.text.splitlines() if "GradualUnfreezing" in line)
    assert line.split(maxsplit=1)[1] == (
        "from epoch 0: 106 values in 4 tensors (head.*); "
        "from epoch 1: 88 values in 4 tensors (block.*, head.0.*), 2 more that match train already; "
        "from epoch 2: 536 values in 4 tensors (*), 8 more that match train already, "
        "requires_grad was False before the fit in 1 of them"
    )
    assert caplog.text.count("GradualUnfreezing") == 1
    assert not net.stem[0].bias.requires_grad


def test_gradients_from_before_the_fit_are_dropped():
    """With a gradient of zeros, momentum and weight decay would move what is frozen."""

    class Looks(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            assert all(one.grad is None for one in pl_module.parameters() if not one.requires_grad)

    net = FineNet()
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    fit(net, GradualUnfreezing(EPOCHS), Looks(), max_epochs=3)


def test_tied_parameters_train_from_the_earliest_key():
    net = FineNet()
    net.head[0].weight = net.block[1].weight
    rows = fit(net, GradualUnfreezing({0: ["head.*"], 2: "*"}))
    assert "block.1.weight" in rows[0]["trains"]
    assert "block.1.bias" not in rows[0]["trains"]


# -- normalisation


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.trap("finetuning: with train_bn=False frozen BN uses batch statistics in train mode")
def test_frozen_norm_is_the_same_in_train_and_eval(affine):
    net = FineNet(affine=affine)
    x = 3 + torch.randn(6, 64)
    seen = []

    class Looks(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            with torch.no_grad():
                pl_module.train()  # as many do in their own hooks
                in_train = pl_module.stem(x)
                seen.append(torch.equal(in_train, copy.deepcopy(pl_module.stem).eval()(x)))

    fit(net, GradualUnfreezing(EPOCHS), Looks())
    assert seen == [True] * 20 + [False] * 10
    assert net.stem[1].training
    assert flags(net) == flags(FineNet(affine=affine))


def test_norm_may_be_left_alone():
    net = FineNet()
    rows = fit(net, GradualUnfreezing(EPOCHS, freeze_norm=False))
    assert not torch.equal(rows[0]["weights"]["stem.1.running_mean"], rows[9]["weights"]["stem.1.running_mean"])


def test_what_was_frozen_before_the_fit_is_so_after_it():
    net = FineNet()
    freeze_(net, "stem.*")
    net.block[2].eval()
    before = flags(net)
    with pytest.warns(UserWarning, match="in eval mode at the start"):
        fit(net, GradualUnfreezing({0: "head.*", 1: "*"}))
    assert flags(net) == before


def test_norm_that_lightning_replaces_at_the_end_of_a_fit_is_released():
    """SyncBatchNorm becomes BatchNorm again, in the mode that it had, before the callbacks are torn down."""

    class Replaces(Callback):
        def on_fit_end(self, trainer, pl_module):
            pl_module.stem[1] = nn.BatchNorm1d(8).train(pl_module.stem[1].training)

    net = FineNet()
    fit(net, GradualUnfreezing({0: "head.*"}), Replaces())
    assert net.stem[1].training


# -- resume


def _one_cycle(optimizer):
    return {"scheduler": lrs.OneCycleLR(optimizer, 0.2, total_steps=31), "interval": "step"}


def _sequence(optimizer):
    warmup, decay = lrs.LinearLR(optimizer, 0.5, total_iters=4), lrs.CosineAnnealingLR(optimizer, 27)
    return {"scheduler": lrs.SequentialLR(optimizer, [warmup, decay], [4]), "interval": "step"}


def _plateau(optimizer):
    return {"scheduler": lrs.ReduceLROnPlateau(optimizer, patience=0, min_lr=[1e-3], threshold=9), "monitor": "loss"}


def _ours(optimizer):
    factor = ScheduleSpec("warmup_cosine", warmup=6).bind(30)
    return {"scheduler": FactorLR(optimizer, factor), "interval": "step"}


SCHEDULERS = {
    "OneCycleLR": _one_cycle,
    "LambdaLR": lambda optimizer: {"scheduler": lrs.LambdaLR(optimizer, lambda s: 0.9**s), "interval": "step"},
    "SequentialLR": _sequence,
    "ReduceLROnPlateau": _plateau,
    "ours": _ours,
}


def _unfreezing(unit):
    return GradualUnfreezing(
        EPOCHS if unit == "epoch" else STEPS, lr_multipliers={"stem.*": 0.5, "head.*": 2}, unit=unit
    )


class EndsAfter(Callback):
    def __init__(self, epochs):
        self.epochs = epochs

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = trainer.current_epoch + 1 >= self.epochs


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("unit", ["epoch", "step"])
@pytest.mark.sampled(2)
@pytest.mark.trap("finetuning: resuming after the unfreeze epoch leaves the backbone frozen to the end")
def test_resume_at_an_epochs_end(scheduler, unit, tmp_path):
    """Of the learning rates, too: LambdaLR, SequentialLR, ... have the groups that the multipliers made."""
    long = fit(FineNet(scheduler), _unfreezing(unit))
    assert long[0]["rates"][0] == pytest.approx(2 * long[0]["rates"][1]) or len(set(long[0]["rates"])) == 3
    for epochs in (1, 2):
        first = fit(FineNet(scheduler), _unfreezing(unit), EndsAfter(epochs), save_to=tmp_path / "x.ckpt")
        net = FineNet(scheduler)
        resumed = fit(net, _unfreezing(unit), ckpt_path=tmp_path / "x.ckpt")
        assert_same_rows(first, long[: 10 * epochs])
        assert_same_rows(resumed, long[10 * epochs :])
        assert len(trained(net)) == 12


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
@cases("unit, stop", ("epoch", 9), ("epoch", 10), ("epoch", 14), ("step", 2), ("step", 3), ("step", 14))
@pytest.mark.sampled(5)
def test_resume_anywhere(scheduler, unit, stop, tmp_path):
    long = fit(FineNet(scheduler), _unfreezing(unit))
    with pytest.raises(SystemExit):
        fit(FineNet(scheduler), _unfreezing(unit), AutoResume(tmp_path), Interrupts(stop))
    net = FineNet(scheduler)
    resumed = fit(net, _unfreezing(unit), AutoResume(tmp_path))
    assert_same_rows(resumed, long[stop:])
    assert flags(net) == flags(FineNet())


# -- ways to train


def test_learning_rates_are_multiplied(tmp_path):
    rows = fit(
        FineNet(lambda o: lrs.StepLR(o, 1, 0.5)),
        GradualUnfreezing(EPOCHS, lr_multipliers={"stem.*": 0.1, "head.*": 2}),
        LearningRateMonitor(),
        logger=CSVLogger(tmp_path),
        log_every_n_steps=5,
    )
    assert rows[0]["rates"] == pytest.approx([0.1, 0.01, 0.2])
    assert rows[-2]["rates"] == pytest.approx([0.025, 0.0025, 0.05])


OPTIMIZERS = {
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda p: AdamW(p, lr=0.01),
    "fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.05, max_iter=2),
}


class ManualNet(FineNet):
    """Two optimizers, the first for the block and the stem."""

    def __init__(self, toggles=False):
        super().__init__()
        self.automatic_optimization = False
        self.toggles = toggles

    def configure_optimizers(self):
        body = [*self.stem.parameters(), *self.block.parameters()]
        return SGD(body, lr=0.1, momentum=0.9), AdamW(self.head.parameters(), lr=0.01)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            if self.toggles:
                self.toggle_optimizer(optimizer)
            optimizer.step()
            if self.toggles:
                self.untoggle_optimizer(optimizer)


@pytest.mark.parametrize("toggles", [False, True])
def test_manual_optimization_with_two_optimizers(toggles):
    """Each of them counts a step."""
    rows = fit(ManualNet(toggles), GradualUnfreezing({0: "head.*", 6: "block.*", 40: "*"}, unit="step"))
    assert [parts(row) for row in rows] == [PARTS[0]] * 3 + [PARTS[1]] * 17 + [PARTS[2]] * 10


def test_refuses_an_optimizer_that_a_scaler_would_fail_on():
    with pytest.raises(MisconfigurationException, match=r"optimizer 0 are frozen at epoch 0.*No inf checks"):
        fit(ManualNet(), GradualUnfreezing(EPOCHS), plugins=[real_fp16()])


def test_beside_weight_averaging():
    net = FineNet()
    before = weights(net)
    fit(net, GradualUnfreezing({0: "head.*", 1: "block.*"}), WeightAveraging())
    assert moved(before, weights(net)) == {"head", "block"}


def test_beside_stochastic_weight_averaging():
    with pytest.raises(MisconfigurationException, match=r"statistics of all BatchNorm to zero.*stem.1"):
        fit(FineNet(), GradualUnfreezing({0: "head.*"}), StochasticWeightAveraging(0.1, swa_epoch_start=1))
    net = FineNet()
    averaging = StochasticWeightAveraging(0.1, swa_epoch_start=1)
    with recorded_warnings():
        fit(net, GradualUnfreezing({0: "head.*", 1: "*"}, lr_multipliers={"stem.*": 0.5}), averaging)
    assert net.stem[1].running_mean.abs().sum() > 0


# -- a second fit, an exception, copies


def test_an_optimizer_that_outlives_the_fit_is_split_once():
    class Keeps(FineNet):
        def configure_optimizers(self):
            if self.optimizer is None:
                self.optimizer = super().configure_optimizers()
            return self.optimizer

    net = Keeps()
    for _ in range(2):
        rows = fit(net, GradualUnfreezing(EPOCHS, lr_multipliers={"stem.*": 0.5}))
        assert rows[-1]["rates"] == [0.05, 0.1] or rows[-1]["rates"] == [0.1, 0.05]


def test_a_longer_second_fit_of_the_trainer_goes_on():
    trace, net = Trace(), FineNet()
    trainer = Trainer(callbacks=[GradualUnfreezing({0: "head.*", 1: "block.*"}), trace], max_epochs=2, **QUIET)
    trainer.fit(net, loader())
    trainer.fit_loop.max_epochs = 3
    trainer.fit(net, loader())
    assert [parts(row) for row in trace.rows()] == [PARTS[0]] * 10 + [PARTS[1]] * 20


@pytest.mark.parametrize("stage", ["training_step", "validation_step"])
def test_an_exception_puts_everything_back(stage):
    def broken(self, batch, batch_idx):
        if self.global_step > 12:
            raise ZeroDivisionError
        return getattr(ValidatedNet, stage)(self, batch, batch_idx)

    module = type("Broken", (ValidatedNet,), {stage: broken})()
    module.stem[0].weight.requires_grad_(False)
    before = flags(module)
    trainer = Trainer(max_epochs=2, callbacks=[GradualUnfreezing({0: "head.*", 1: "*"})], val_check_interval=4, **QUIET)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(module, loader(), loader())
    module.train()
    assert flags(module) == before


# -- ranks


def _two_ranks(tmp_path, run):
    def rank(index):
        torch.save(run(), tmp_path / f"{index}.pt")

    fork(rank, 2)
    return [torch.load(tmp_path / f"{index}.pt", weights_only=False) for index in range(2)]


class LayerNet(FineNet):
    """No statistics of a batch: a batch on two ranks is the same batch on one."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.stem[1] = nn.LayerNorm(8)

    def train_dataloader(self):
        ranks = self.trainer.world_size
        sampler = DistributedSampler(digits(), ranks, self.trainer.global_rank, shuffle=False)
        return DataLoader(digits(), batch_size=8 // ranks, sampler=sampler)


ON_RANKS = QUIET | {"use_distributed_sampler": False}


def _close(one, other):
    return all(torch.allclose(one[name], other[name], atol=1e-5) for name in other)


@pytest.mark.trap("finetuning: DDP ranks diverge silently after unfreezing")
@pytest.mark.parametrize("unit", ["epoch", "step"])
def test_ddp_equals_one_process(tmp_path, unit):
    schedule = EPOCHS if unit == "epoch" else {0: "head.*", 3: "block.*", 6: "*"}

    def run(**options):
        return fit(LayerNet(), GradualUnfreezing(schedule, unit=unit), use_distributed_sampler=False, **options)

    alone = run()
    left, right = _two_ranks(tmp_path, lambda: run(strategy="ddp", devices=2))
    assert_same_rows(left, right)
    assert len(left) == len(alone) == 15
    for row, expected in zip(left, alone, strict=True):
        assert row["trains"] == expected["trains"]
        assert _close(row["weights"], expected["weights"])


class ShardedNet(LayerNet):
    """The root shards the stem, and keeps it whole after a pass without gradients."""

    def configure_model(self):
        from torch.distributed.fsdp import fully_shard

        for part in (self.block, self.head, self):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])


@pytest.mark.skipif(Version(torch.__version__) < Version("2.7"), reason="FSDP2 of torch 2.6 needs an accelerator")
@pytest.mark.parametrize(("epochs", "shards"), [(1, True), (2, False)])
@pytest.mark.sampled(2)
def test_fsdp2_resumes(tmp_path, epochs, shards):
    """Torch loads the optimizer's state of exactly those parameters that require gradients, and fails otherwise."""

    def run(*callbacks, ckpt_path=None, save_to=None):
        trace = Trace()
        strategy = ModelParallelStrategy(2, tensor_parallel_size=1, save_distributed_checkpoint=shards)
        callbacks = [GradualUnfreezing(EPOCHS, lr_multipliers={"stem.*": 0.5}), *callbacks, trace]
        trainer = Trainer(max_epochs=3, devices=2, strategy=strategy, callbacks=callbacks, **ON_RANKS)
        trainer.fit(ShardedNet(optimizer=OPTIMIZERS["AdamW"]), ckpt_path=ckpt_path)
        if save_to is not None:
            trainer.save_checkpoint(save_to)
        return trace.rows()

    path = tmp_path / "x.ckpt"
    long, _ = _two_ranks(tmp_path, run)
    first, _ = _two_ranks(tmp_path, lambda: run(EndsAfter(epochs), save_to=path))
    resumed, _ = _two_ranks(tmp_path, lambda: run(ckpt_path=path))
    assert_same_rows([*first, *resumed], long)


def test_refuses_flattened_parameters():
    trainer = Trainer(max_epochs=1, **QUIET)
    trainer.strategy.__class__ = type("Flat", (FSDPStrategy,), {})
    trainer.strategy.kwargs = {"use_orig_params": False}
    with pytest.raises(MisconfigurationException, match="Must flatten tensors with uniform"):
        GradualUnfreezing(EPOCHS).setup(trainer, FineNet(), "fit")


# -- parameters without a gradient


class WithUnused(FineNet):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(2, 2)


@pytest.mark.trap("finetuning: the unused-parameter error of DDP names nobody")
def test_ddp_names_the_parameters_without_a_gradient():
    trainer = Trainer(
        max_epochs=1, strategy="ddp_fork", devices=2, callbacks=[GradualUnfreezing({0: ["head.*", "spare.*"]})], **QUIET
    )
    words = r"on rank \d, 2 trainable .*spare.weight, spare.bias.*find_unused"
    with pytest.raises(ProcessRaisedException, match=words):
        trainer.fit(WithUnused(), loader())


def test_warns_about_parameters_without_a_gradient():
    with pytest.warns(UserWarning, match=r"2 trainable parameters got no gradient: spare.weight, spare.bias") as caught:
        fit(WithUnused(), GradualUnfreezing({0: "head.*", 1: "*"}))
    assert sum("no gradient" in str(one.message) for one in caught) == 1


class Recomputed(FineNet):
    """Its block is recomputed in the backward pass, and so is its head, if all of it is."""

    def __init__(self, use_reentrant, everything=False):
        super().__init__()
        self.use_reentrant, self.everything = use_reentrant, everything

    def forward(self, x):
        y = checkpoint(self.block, self.stem(x), use_reentrant=self.use_reentrant)
        return checkpoint(self.head, y, use_reentrant=self.use_reentrant) if self.everything else self.head(y)


_REENTRANT = {
    "unfreezing": lambda: GradualUnfreezing({0: ["head.*", "block.*"]}),
    "LoRA": lambda: LoRA(2, target_modules="block.*", modules_to_save="head"),
    "Adapters": lambda: Adapters(2, target_modules="block.*", modules_to_save="head"),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("trick", _REENTRANT)
def test_reentrant_checkpointing_behind_frozen_layers_is_named(trick):
    """It gives the layers inside no gradient where no input requires one; the other kind does."""
    words = r"trainable parameters got no gradient: block.*use_reentrant=True\) gives .* pass use_reentrant=False"
    with pytest.warns(UserWarning, match=words):
        fit(Recomputed(use_reentrant=True), _REENTRANT[trick]())
    fit(Recomputed(use_reentrant=False), _REENTRANT[trick]())
    says_why = pytest.warns(UserWarning, match="the loss has no gradient.*pass use_reentrant=False")
    with pytest.raises(RuntimeError, match="does not require grad"), says_why:
        fit(Recomputed(use_reentrant=True, everything=True), _REENTRANT[trick]())


# -- input that cannot work


@cases(
    "arguments, error, words",
    ({"schedule": {1: "*"}}, ValueError, r"must have the key 0, got \[1\]: something has to train from the start"),
    ({"schedule": {0: "*", -1: "x"}}, ValueError, "whole number >= 0, got -1"),
    ({"schedule": {0: "*", 1.5: "x"}}, TypeError, r"whole number >= 0, got 1.5 \(float\)"),
    ({"schedule": {0: "*", True: "x"}}, TypeError, "got True"),
    ({"schedule": {0: "*", "x": "x"}}, TypeError, "got 'x'"),
    ({"schedule": {0: "*", "0": "x"}}, ValueError, "key 0 twice"),
    ({"schedule": ["*"]}, TypeError, "schedule must be a dict"),
    ({"schedule": {0: []}}, ValueError, r"schedule\[0\] must have at least one pattern"),
    ({"schedule": {0: 3}}, TypeError, r"schedule\[0\] must be a pattern or a list"),
    ({"schedule": {0: ["re:("]}}, ValueError, r"schedule\[0\]: pattern 're:\(' is not a regular expression"),
    ({"schedule": {0: "*"}, "unit": "batch"}, ValueError, "unit must be one of epoch, step"),
    ({"schedule": {0: "*"}, "freeze_norm": 1}, TypeError, "freeze_norm must be True or False"),
    ({"schedule": {0: "*"}, "lr_multipliers": {"*": 0}}, ValueError, r"lr_multipliers\['\*'\] must be a finite .*> 0"),
    ({"schedule": {0: "*"}, "lr_multipliers": {"*": float("nan")}}, ValueError, "got nan"),
    ({"schedule": {0: "*"}, "lr_multipliers": {"*": float("inf")}}, ValueError, "got inf"),
    ({"schedule": {0: "*"}, "lr_multipliers": {"*": "2"}}, TypeError, r"got '2' \(str\)"),
    ({"schedule": {0: "*"}, "lr_multipliers": 2}, TypeError, "lr_multipliers must be a dict"),
)
def test_refuses_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        GradualUnfreezing(**arguments)


@cases(
    "arguments, trainer, words",
    ({"schedule": {0: "haed.*"}}, {}, r"schedule\[0\]: the pattern 'haed.\*' matches none.*Did you mean 'head.\*'"),
    (
        {"schedule": {0: "*", 2: "head.*"}},
        {},
        r"schedule\[2\] = \['head.\*'\] releases nothing: .* released earlier, at 0",
    ),
    ({"schedule": {0: "*"}, "lr_multipliers": {"haed.*": 2}}, {}, "lr_multipliers: the pattern 'haed"),
    (
        {"schedule": {0: "*"}, "lr_multipliers": {"head.*": 2, "*.bias": 3}},
        {},
        r"the patterns 'head.\*' and '\*.bias' both match 'head.0.bias'",
    ),
)
def test_refuses_what_a_run_shows(arguments, trainer, words):
    net = FineNet()
    before = flags(net)
    with pytest.raises(MisconfigurationException, match=words):
        fit(net, GradualUnfreezing(**arguments), **trainer)
    assert flags(net) == before


def test_refuses_parameters_that_no_optimizer_has():
    class Filters(FineNet):
        def configure_optimizers(self):
            return SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    net = Filters()
    net.stem.requires_grad_(False)
    words = r"4 parameters .* in no optimizer.*stem.0.weight.*without filter"
    with pytest.raises(MisconfigurationException, match=words):
        fit(net, GradualUnfreezing(EPOCHS))
    fit(net, GradualUnfreezing({0: "head.*", 1: "block.*"}))


def test_other_schedulers_are_refused_with_multipliers_only():
    class Net(FineNet):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            own = SimpleNamespace(optimizer=optimizer, step=lambda: None, state_dict=dict, load_state_dict=dict)
            return [optimizer], [own]

        def lr_scheduler_step(self, scheduler, metric):
            scheduler.step()

    fit(Net(), GradualUnfreezing(EPOCHS))
    with pytest.raises(MisconfigurationException, match="SimpleNamespace is not an LRScheduler"):
        fit(Net(), GradualUnfreezing(EPOCHS, lr_multipliers={"stem.*": 2}))


@cases(
    "key, unit, trainer, words",
    (3, "epoch", {}, r"keys \[3\], but the run has 3 epochs"),
    (1, "epoch", {"max_epochs": 1}, r"keys \[1\], but the run has 1 epochs"),
    (30, "step", {}, r"keys \[30\], but the run has 30 steps"),
    (5, "step", {"max_steps": 5}, r"keys \[5\], but the run has 5 steps"),
    (6, "step", {"limit_train_batches": 1}, r"keys \[6\], but the run has 3 steps"),
)
def test_a_key_beyond_a_short_run_is_a_warning(key, unit, trainer, words):
    with pytest.warns(UserWarning, match=words):
        rows = fit(FineNet(), GradualUnfreezing({0: "head.*", key: "*"}, unit=unit), **trainer)
    assert parts(rows[-1]) == {"head"}


def test_a_fast_dev_run_is_told_and_goes_on(caplog):
    with caplog.at_level("INFO"):
        rows = fit(FineNet(), GradualUnfreezing(EPOCHS), fast_dev_run=2)
    assert parts(rows[-1]) == {"head"}
    assert "keys [1, 2], but the run has 1 epochs, counted from 0: what they release stays frozen" in caplog.text


@pytest.mark.parametrize("options", [{"max_steps": 12}, {"callbacks": 1}])
def test_a_run_that_ends_early_says_what_never_trained(options, caplog):
    stops = [EarlyStopping("loss", patience=1, check_on_train_epoch_end=True, min_delta=9)] * options.pop(
        "callbacks", 0
    )
    with caplog.at_level("INFO"):
        fit(FineNet(), GradualUnfreezing(EPOCHS), *stops, **options)
    assert "the run ended before epoch 2, so 536 values in 4 tensors never trained" in caplog.text


def test_whole_numbers_never_train():
    net = FineNet()
    net.table = nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
    fit(net, GradualUnfreezing({0: "head.*", 1: "*"}))
    assert not net.table.requires_grad
