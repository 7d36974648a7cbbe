"""GradientClipping where the copied snippets go wrong; what every callback promises is in tests/contract."""

import csv
import math
import types
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from timm.utils import dispatch_clip_grad
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_

from lightning_tricks import GradientClipping
from tests.contract.checks import assert_same_run
from tests.contract.lab import SETTINGS, identical_copies
from tests.small import QUIET, HostReads, Net, cases, loader, recorded_warnings, same


def _steps(callback):
    return {index: counts["steps"] for index, counts in callback.state_dict()["counts"].items()}


@pytest.mark.parametrize("algorithm", ["automatic", "accumulating"])
def test_equals_the_trainers_own_clipping(lab, algorithm):
    trainer = {"accumulate_grad_batches": 3} if algorithm == "accumulating" else {}
    ours = lab.fit([GradientClipping(0.5)], **trainer)
    theirs = lab.fit([], gradient_clip_val=0.5, **trainer)
    assert_same_run(ours, theirs)


class _SkipsBatches(Net):
    """Returns None for some batches, as people do when a batch has nothing to learn from."""

    def training_step(self, batch, batch_idx):
        return None if batch_idx in (1, 4) else super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:.*returned `None`")
@pytest.mark.parametrize("setting", ["fp32", "fp16", "fp16 fused"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_batches_without_a_loss(lab, setting, accumulate):
    chosen = SETTINGS[setting]
    arguments = {"accumulate_grad_batches": accumulate, "probe": False}
    clipping, neutral = GradientClipping(0.5), GradientClipping(math.inf)
    lab.fit([clipping], chosen, module=_SkipsBatches(**chosen.net), **arguments)
    with_neutral, bare = identical_copies(_SkipsBatches, **chosen.net)
    lab.fit([neutral], chosen, module=with_neutral, **arguments)
    lab.fit([], chosen, module=bare, **arguments)
    assert same(with_neutral.state_dict(), bare.state_dict())
    # nothing to clip: no gradient at all, or, under a scaler, a step that Lightning leaves out for its last batch
    left_out = 4 if accumulate == 1 else 0 if setting == "fp32" else 2
    assert _steps(clipping) == {0: 20 // accumulate - left_out}


class _ClipsToo(Net):
    """Clips by itself, in one of the ways in which people do."""

    def __init__(self, clip, where="training_step"):
        super().__init__("manual" if where == "training_step" else "adamw")
        self.clip = clip

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        if self.automatic_optimization:
            return loss
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            self.clip(self, optimizer)
            optimizer.step()
        return None

    def configure_gradient_clipping(self, optimizer, **kwargs):
        if self.automatic_optimization:
            self.clip(self, optimizer)


def _clips_others(module, optimizer):
    other = torch.ones(2, requires_grad=True)
    other.sum().backward()
    clip_grad_norm_(other, 0.1)


_OWN_CALLS = {
    "Lightning's": lambda module, optimizer: module.clip_gradients(optimizer, 0.1, "norm"),
    "Lightning's by value": lambda module, optimizer: module.clip_gradients(optimizer, 0.1, "value"),
    "torch's": lambda module, optimizer: torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm=0.1),
    "imported before": lambda module, optimizer: clip_grad_norm_(module.parameters(), 0.1),
    "by value": lambda module, optimizer: clip_grad_value_(module.net.parameters(), clip_value=0.1),
    "by a known norm": lambda module, optimizer: clip_grads_with_norm_(module.net[0].weight, 0.1, torch.tensor(1.0)),
    "timm's": lambda module, optimizer: dispatch_clip_grad(module.parameters(), 0.1),
}
_HARMLESS_CALLS = {
    "measures": lambda module, optimizer: clip_grad_norm_(module.parameters(), math.inf),
    "others": _clips_others,
}


@pytest.mark.parametrize("where", ["training_step", "configure_gradient_clipping"])
@pytest.mark.parametrize("way", _OWN_CALLS)
def test_says_once_that_the_module_clips_too(lab, way, where):
    words = r"GradientClipping\(max_norm=0.5\) and \S+ \(\w+.py:\d+\), which clips to 0.1, .*clipped twice"
    with pytest.warns(UserWarning, match=words) as caught:
        lab.fit([GradientClipping(0.5)], module=_ClipsToo(_OWN_CALLS[way], where), probe=False)
    assert sum("clipped twice" in str(warning.message) for warning in caught) == 1
    lab.fit([GradientClipping(math.inf)], module=_ClipsToo(_OWN_CALLS[way], where), probe=False)  # it clips nothing


@pytest.mark.parametrize("way", _HARMLESS_CALLS)
def test_calls_that_do_not_clip_the_same_gradients_are_no_second_clipping(lab, way):
    lab.fit([GradientClipping(0.5)], module=_ClipsToo(_HARMLESS_CALLS[way]), probe=False)


@pytest.mark.trap("gradient_clipping: Lightning's own clip comes after: both set, both applied, so warn")
def test_warns_when_the_trainer_clips_too(lab):
    with pytest.warns(UserWarning, match=r"max_norm=0.5.*gradient_clip_val=0.1.*clipped twice"):
        (both,) = lab.fit([GradientClipping(0.5)], gradient_clip_val=0.1)
    assert both.steps[0].after == pytest.approx(0.5, rel=1e-4)
    lab.fit([GradientClipping(math.inf)], gradient_clip_val=0.1)


class _StepsOnlyTheFirst(Net):
    def training_step(self, batch, batch_idx):
        optimizer, _ = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
        optimizer.step()


class _ReadsStates(Callback):
    """Asks for the state of the optimizers as ModelParallelStrategy does where it loads a checkpoint."""

    def on_fit_start(self, trainer, pl_module):
        get_optimizer_state_dict(pl_module, trainer.optimizers[0])  # makes a step where there is no state yet


def test_lets_a_sharded_checkpoint_be_loaded(lab):
    (with_it,) = lab.fit([GradientClipping(0.5), _ReadsStates()])
    assert with_it.metrics["grad_norm/pre_clip"] > 0
    assert len(with_it.steps) == 2 * len(loader())


def test_names_the_optimizer_that_never_stepped(lab):
    with pytest.warns(UserWarning, match=r"saw no step of the optimizers \[1\] in 20 batches"):
        lab.fit([GradientClipping(0.5)], module=_StepsOnlyTheFirst("manual"), probe=False)


class _UnscalesItself(Net):
    """What people do by hand under fp16 with a fused optimizer, because Lightning does not."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
        self.trainer.precision_plugin.scaler.unscale_(optimizer.optimizer)
        optimizer.step()


def test_accepts_gradients_that_are_unscaled_already(lab):
    module = _UnscalesItself("fused")
    module.automatic_optimization = False
    (facts,) = lab.fit([GradientClipping(0.5)], SETTINGS["fp16 fused"], module=module)
    assert facts.steps[0].before > 0.5
    assert all(step.after == pytest.approx(min(0.5, step.before), rel=1e-4) for step in facts.steps)


@pytest.mark.filterwarnings("ignore:.*dataloader_iter")
def test_works_with_a_module_that_fetches_its_own_batches(lab):
    class Fetches(Net):
        def training_step(self, dataloader_iter):
            batch, batch_idx, _ = next(dataloader_iter)
            return super().training_step(batch, batch_idx)

    (facts,) = lab.fit([GradientClipping(0.5, log_norm="all")], module=Fetches())
    assert len(facts.steps) == 20
    assert facts.metrics["grad_norm/post_clip"] <= 0.5 + 1e-4


@pytest.mark.parametrize("norm_type", [1.0, math.inf])
def test_clips_by_the_norm_it_is_given(lab, norm_type):
    """One step of plain SGD with learning rate 1 shows the clipped gradient itself."""

    class Shows(Net):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1.0)

    module = Shows()
    before = [p.detach().clone() for p in module.parameters()]
    lab.fit([GradientClipping(0.01, norm_type)], module=module, max_epochs=1, limit_train_batches=1, probe=False)
    moved = torch.cat([(p.detach() - b).flatten() for p, b in zip(module.parameters(), before, strict=True)])
    assert torch.linalg.vector_norm(moved.double(), norm_type).item() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.filterwarnings("ignore:.*barebones")
def test_says_nothing_to_a_barebones_trainer():
    trainer = Trainer(barebones=True, max_epochs=1, accelerator="cpu", callbacks=[GradientClipping(0.5)])
    with recorded_warnings() as caught:
        trainer.fit(Net(), loader())
    assert not [w for w in caught if "self.log" in str(w.message)]
    assert _steps(trainer.callbacks[0]) == {0: 10}


@cases(
    "strategy, remedy",
    (FSDPStrategy, "use ModelParallelStrategy"),
    (DeepSpeedStrategy, "`gradient_clipping` in DeepSpeed's own"),
)
def test_refuses_strategies_that_hide_gradients(strategy, remedy):
    # neither strategy can be made on a machine without a GPU: the Trainer is a mock, the strategy's type is real
    trainer = types.SimpleNamespace(strategy=object.__new__(strategy), callbacks=[], gradient_clip_val=None)
    with pytest.raises(MisconfigurationException, match=f"under {strategy.__name__}: .*{remedy}"):
        GradientClipping().setup(trainer, Net(), "fit")


def test_refuses_a_second_one_from_the_module(lab):
    class Twice(Net):
        def configure_callbacks(self):
            return [GradientClipping(1.0), GradientClipping(2.0)]

    with pytest.raises(MisconfigurationException, match="2 GradientClipping callbacks and needs one"):
        lab.fit([], module=Twice(), probe=False)


class _Logging:
    """A Trainer with a CSVLogger, and what it wrote."""

    def __init__(self, callbacks, net=None, **trainer):
        self.logger = CSVLogger(Path.cwd(), name="logs")
        arguments = {**QUIET, "logger": self.logger, "log_every_n_steps": 5, **trainer}
        self.trainer = Trainer(max_epochs=2, callbacks=callbacks, **arguments)
        self.net = net or Net()

    def fit(self):
        self.trainer.fit(self.net, loader())
        with (Path(self.logger.log_dir) / "metrics.csv").open(newline="") as file:
            return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


def test_logs_layers_at_the_loggers_interval():
    net = Net()
    net.net = torch.compile(net.net, backend="eager")
    rows = _Logging([GradientClipping(0.5, log_norm="all", log_layers=True)], net).fit()
    assert [row["step"] for row in rows] == [4, 9, 14, 19]
    names = [f"net.{layer}.{kind}" for layer in (0, 1, 4) for kind in ("weight", "bias")]
    for row in rows:
        norms = [row[f"grad_norm/{name}"] for name in names]
        assert math.hypot(*norms) == pytest.approx(row["grad_norm/pre_clip"], rel=1e-5)
        assert row["grad_norm/post_clip"] == pytest.approx(min(0.5, row["grad_norm/pre_clip"]), rel=1e-4)


@pytest.mark.trap("gradient_clipping: prog_bar=True costs a host read each step")
def test_reads_the_host_only_when_the_logger_does():
    counts = []
    for callbacks in ([], [GradientClipping(0.5)]):
        logging = _Logging(callbacks)
        with HostReads() as reads:
            logging.trainer.fit(logging.net, loader())
        counts.append(reads.count)
    assert counts[1] - counts[0] == 2 * 4 + 1, "two values at each of the logger's four steps, and one at the end"


def test_counts_no_overflow_as_clipped(lab):
    """A scaler's first steps overflow by design: they are in the norm, not in the clipped steps."""

    class Overflows(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            if trainer.global_step < 2:
                pl_module.net[0].bias.grad[0] = math.inf

    callback = GradientClipping(1e-6, on_nonfinite="skip")
    lab.fit([Overflows(), callback])
    assert _steps(callback) == {0: 20}
    assert callback.report_parts(None)[0].skipped == 2
    assert callback.report_parts(None)[0].clipped == 18


@pytest.mark.parametrize("arguments", [{"max_norm": 0}, {"max_norm": -1.0}, {"norm_type": 0.0}, {"max_norm": math.nan}])
def test_refuses_bad_values_when_it_is_made(arguments):
    ((name, value),) = arguments.items()
    with pytest.raises(ValueError, match=f"{name} must be a number > 0 .*got {value}"):
        GradientClipping(**arguments)


class _Adversarial(Net):
    """Two optimizers of which one steps every other batch, as in a GAN."""

    def training_step(self, batch, batch_idx):
        slow, fast = self.optimizers()
        for optimizer in (fast, slow) if batch_idx % 2 else (fast,):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.net(batch[0]).square().mean() * 100)
            optimizer.step()
            self.untoggle_optimizer(optimizer)


@pytest.mark.trap("gradient_clipping: Lightning refuses to clip under manual optimization")
def test_optimizers_that_step_at_their_own_pace(lab):
    callback = GradientClipping(0.5)
    lab.fit([callback], module=_Adversarial("manual"), probe=False)
    assert _steps(callback) == {0: 10, 1: 20}


class _LogsBetweenSteps(Net):
    """Logs before and after the step of its optimizer, as the two halves of a GAN do."""

    def training_step(self, batch, batch_idx):
        self.log("before", torch.tensor(float(batch_idx)), on_step=True, on_epoch=True)
        super().training_step(batch, batch_idx)
        self.log("after", torch.tensor(float(batch_idx)), on_step=True, on_epoch=True)


def test_values_that_a_step_logs_before_and_after_the_optimizers_are_all_logged(tmp_path):
    """Lightning drops what a hook logged in an epoch's first batch where another hook logs before it logs again."""
    trainer = Trainer(
        max_epochs=2,
        callbacks=[GradientClipping(0.5)],
        log_every_n_steps=1,
        **{**QUIET, "logger": CSVLogger(tmp_path, name="", version="")},
    )
    trainer.fit(_LogsBetweenSteps("manual"), loader())
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for name in ("before_step", "after_step"):
        assert [float(row[name]) for row in rows if row[name]] == [*range(10), *range(10)]
    for name in ("before_epoch", "after_epoch"):
        assert [float(row[name]) for row in rows if row[name]] == [4.5, 4.5]
    for name in ("grad_norm/0/pre_clip", "grad_norm/1/pre_clip"):
        assert sum(bool(row[name]) for row in rows) == 20


class _Counting(GradientClipping):
    calls = 0

    def on_after_backward(self, trainer, pl_module):
        super().on_after_backward(trainer, pl_module)
        self.calls += 1


def test_a_hook_that_a_subclass_overrides_is_called(lab):
    callback = _Counting(0.5)
    lab.fit([callback], probe=False)
    assert callback.calls == 20
