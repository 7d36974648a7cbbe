"""Every way in which optimizers are stepped under Lightning: clipped once by the right norm, or refused in words."""

import math

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import LBFGS, SGD, Optimizer
from torch.utils.data import DataLoader

from lightning_tricks import GradientClipping
from lightning_tricks.gradient_clipping import skip_step_
from tests.small import QUIET

_DIRECTION = torch.tensor([3.0, 4.0])  # the gradient has the norm 5, whatever the weights are


class _Once(SGD):
    def step(self, closure=None):
        return super().step(closure)


class _Twice(_Once):
    def step(self, closure=None):
        return super().step(closure)


class _CallsItFirst(SGD):
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        super().step()
        return loss


class _CountsAfterwards(SGD):
    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return loss


class _Forgets(SGD):
    def step(self, closure=None):
        super().step()


class _Wraps(Optimizer):
    """As Lookahead is often written: it never calls `Optimizer.__init__`."""

    def __init__(self, params, **options):
        self.inner = SGD(params, **options)
        self.param_groups, self.state, self.defaults = self.inner.param_groups, self.inner.state, self.inner.defaults

    def step(self, closure=None):
        return self.inner.step(closure)

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)


class _WrapsInGroups(Optimizer):
    def __init__(self, params, **options):
        super().__init__(params, options)
        self.inner = SGD(self.param_groups, **options)

    def step(self, closure=None):
        return self.inner.step(closure)


class _Shows:
    """No Optimizer at all: it shows the attributes of the one that it wraps."""

    def __init__(self, params, **options):
        self.inner = SGD(params, **options)

    def __getattr__(self, name):
        return getattr(vars(self)["inner"], name)

    param_groups, state, defaults, step, zero_grad, state_dict, load_state_dict = (
        property(lambda self, name=name: getattr(self.inner, name))
        for name in ("param_groups", "state", "defaults", "step", "zero_grad", "state_dict", "load_state_dict")
    )


class _EvaluatesTwice(SGD):
    """As sharpness-aware minimization does."""

    def step(self, closure=None):
        torch.enable_grad()(closure)()
        return super().step(closure)


class _Automatic(LightningModule):
    def __init__(self, make=SGD, options=None, optimizers=1, scheduled=False):
        super().__init__()
        self.make, self.options, self.scheduled = make, options or {"lr": 1.0}, scheduled
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(2)) for _ in range(optimizers)])

    def loss(self, batch, which=0):
        return self.weights[which] @ _DIRECTION * batch.mean()

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        made = [self.make([weight], **self.options) for weight in self.weights]
        return made, [torch.optim.lr_scheduler.LambdaLR(one, lambda _: 1.0) for one in made if self.scheduled]


class _StepsByItself(_Automatic):
    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        optimizer.step(closure=closure)


class _CallsClosureFirst(_Automatic):
    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        closure()
        optimizer.step()


class _StepsEverySecondBatch(_Automatic):
    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        if batch_idx % 2:
            super().optimizer_step(epoch, batch_idx, optimizer, closure)
        else:
            closure()


class _ForgetsClosure(_Automatic):
    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        optimizer.step()


class _Unwraps(_Automatic):
    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        optimizer.optimizer.step(closure)


class _StepsInItsTrainingStep(_Automatic):
    def training_step(self, batch, batch_idx):
        self.loss(batch).backward()
        self.optimizers(use_pl_optimizer=False).step()
        return self.loss(batch)


class _HasHooks(_Automatic):
    def configure_optimizers(self):
        optimizer = SGD(self.weights, lr=1.0)
        for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
            register(lambda *_: None)
        return optimizer


class _Manual(_Automatic):
    def __init__(self, **how):
        super().__init__(**how)
        self.automatic_optimization = False

    def all_optimizers(self, **kwargs):
        found = self.optimizers(**kwargs)
        return found if isinstance(found, list) else [found]

    def step(self, optimizer, batch, which):
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch, which))
        optimizer.step()

    def training_step(self, batch, batch_idx):
        for which, optimizer in enumerate(self.all_optimizers()):
            self.step(optimizer, batch, which)


class _WithClosure(_Manual):
    def step(self, optimizer, batch, which):
        def closure():
            optimizer.zero_grad()
            loss = self.loss(batch, which)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


class _Accumulates(_Manual):
    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch) / 2)
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


class _StepsRaw(_Manual):
    def all_optimizers(self):
        return super().all_optimizers(use_pl_optimizer=False)


class _StepsTheSecondRaw(_Manual):
    def all_optimizers(self):
        return [super().all_optimizers()[0], self.trainer.optimizers[1]]


class _StepsAtBatchEnd(_Manual):
    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch))

    def on_train_batch_end(self, *_):
        self.trainer.optimizers[0].step()


class _StepsAtEpochEnd(_Manual):
    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch) / 4)

    def on_train_epoch_end(self):
        self.optimizers().step()


class _StepsSomethingElse(_Manual):
    def step(self, optimizer, batch, which):
        other = torch.zeros(2, requires_grad=True)
        other.sum().backward()
        SGD([other], lr=1.0).step()
        super().step(optimizer, batch, which)


_PAST = r"cannot clip optimizer 0: it was stepped without Lightning.*use_pl_optimizer=True"
_UNHEARD = "cannot clip optimizer 0: _Forgets.step did not call its `closure`.*super"
_LIGHTNINGS = "The closure hasn't been executed. HINT: did you call `optimizer_closure"
_WRAPPERS = (_Wraps, _WrapsInGroups, _Shows)
_SUBCLASSES = (_Once, _Twice, _CallsItFirst, _CountsAfterwards)
# class of the module, its options, and how many steps are clipped or what the error says
_WAYS = [
    *((way, {}, 4) for way in (_Automatic, _StepsByItself, _CallsClosureFirst, _HasHooks)),
    *((way, {}, 4) for way in (_Manual, _WithClosure, _StepsSomethingElse)),
    *((way, {"optimizers": 2}, 4) for way in (_Manual, _WithClosure)),
    *((way, {"make": one}, 4) for way in (_Automatic, _Manual, _WithClosure) for one in (*_SUBCLASSES, *_WRAPPERS)),
    *((_Automatic, {"make": one, "scheduled": True}, 4) for one in (SGD, _Twice)),
    (_StepsEverySecondBatch, {}, 2),
    (_Accumulates, {}, 2),
    (_StepsAtEpochEnd, {}, 1),
    *((way, {"make": LBFGS, "options": {"max_iter": 1}}, 4) for way in (_Automatic, _WithClosure)),
    *((way, {"make": _EvaluatesTwice}, 8) for way in (_Automatic, _WithClosure)),
    *((way, {}, _PAST) for way in (_Unwraps, _StepsInItsTrainingStep, _StepsAtBatchEnd, _StepsRaw)),
    (_StepsTheSecondRaw, {"optimizers": 2}, _PAST.replace("0", "1")),
    *((_StepsRaw, {"make": one}, _PAST) for one in (_Twice, *_WRAPPERS)),
    (_ForgetsClosure, {}, _LIGHTNINGS),
    (_Automatic, {"make": _Forgets}, _LIGHTNINGS),
    (_Manual, {"make": _Forgets}, _UNHEARD),
]


def _label(value):
    parts = value.values() if isinstance(value, dict) else [value]
    return " ".join(getattr(part, "__name__", str(part)) for part in parts)[:40] or "SGD"


@pytest.fixture(params=["fresh", "used"])
def process(request, monkeypatch):
    """A process in which torch has put its hooks into the classes that the optimizers extend, or has not yet."""
    for one in (SGD, LBFGS, *_SUBCLASSES, _Forgets):
        if getattr(one.step, "hooked", False) and "step" in vars(one):
            monkeypatch.setattr(one, "step", one.step.__wrapped__)
    if request.param == "used":
        for one in (SGD, LBFGS, _Once):
            one([torch.zeros(1, requires_grad=True)])


def _fit(way, options, batches, **clipping):
    module, callback = way(**options), GradientClipping(1.0, **clipping)
    trainer = Trainer(max_epochs=1, callbacks=[callback], **QUIET)
    trainer.fit(module, DataLoader(torch.tensor(batches)[:, None], batch_size=1))
    return module, callback, trainer


def _lbfgs_in_a_loop():
    weight = torch.zeros(2, requires_grad=True)
    optimizer = LBFGS([weight], max_iter=1)

    def closure():
        optimizer.zero_grad()
        (weight @ _DIRECTION).backward()
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
        return weight @ _DIRECTION

    for _ in range(4):
        optimizer.step(closure)
    return weight.detach()


@pytest.mark.trap("gradient_clipping: torch runs an optimizer's hooks once more for the step of its base class")
@pytest.mark.parametrize(("way", "options", "expected"), _WAYS, ids=_label)
def test_steps_are_clipped_once_or_refused(process, way, options, expected):
    if isinstance(expected, str):
        with pytest.raises(MisconfigurationException, match=expected):
            _fit(way, options, [1.0] * 4)
        return
    module, callback, trainer = _fit(way, options, [1.0] * 4)
    counts = callback.state_dict()["counts"]
    assert {index: count["steps"] for index, count in counts.items()} == dict.fromkeys(
        range(len(module.weights)), expected
    )
    before = {value.item() for name, value in trainer.callback_metrics.items() if name.endswith("pre_clip")}
    assert before == {5.0} or way is _StepsAtEpochEnd  # Lightning logs no step there
    make = options.get("make")
    steps = expected / 2 if make is _EvaluatesTwice else expected
    moved = _lbfgs_in_a_loop() if make is LBFGS else -_DIRECTION / 5 * steps
    for weight in module.weights:
        torch.testing.assert_close(weight.detach(), moved)


@pytest.mark.parametrize("process", ["used"], indirect=True)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("make", [SGD, *_SUBCLASSES, *_WRAPPERS])
@pytest.mark.parametrize("way", [_Automatic, _WithClosure])
def test_steps_are_skipped_as_if_their_batch_were_not_there(process, way, make, fused):
    options = {"make": make, "options": {"lr": 1.0, "fused": fused}}
    module, _, trainer = _fit(way, options, [1.0, math.inf, 1.0, 1.0], on_nonfinite="skip")
    torch.testing.assert_close(module.weights[0].detach(), -_DIRECTION / 5 * 3)
    assert trainer.callback_metrics["grad_norm/skipped_steps"] == 1
    if not fused:  # a fused kernel hides from the host whether it was skipped
        assert trainer.optimizers[0].param_groups[0].get("k", 3) == 3


@pytest.mark.parametrize("way", [_Automatic, _WithClosure])
def test_steps_that_evaluate_their_closure_twice_are_not_skipped(way):
    with pytest.raises(MisconfigurationException, match=r"cannot skip a step of _EvaluatesTwice: .*several times"):
        _fit(way, {"make": _EvaluatesTwice}, [1.0] * 4, on_nonfinite="skip")


def test_a_loop_of_ones_own_skips_the_step_of_a_base_class_too(process):
    optimizer = _CountsAfterwards([{"params": [torch.zeros(2, requires_grad=True)], "k": 0}], lr=1.0)
    for _ in range(2):
        skip_step_(optimizer)
        optimizer.step()
    assert optimizer.param_groups[0]["k"] == 0
    assert not optimizer._optimizer_step_post_hooks
