"""Groups that are split after the scheduler exists have the learning rates of groups that were made by hand."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import SWALR

from lightning_tricks.finetuning.core.group_splitting import split_groups_
from lightning_tricks.lr_schedules import FactorLR

M = 0.25  # exact in binary, so that scaling before and after gives the same bits
LR = 0.5


def _sequential(optimizer, r):
    parts = [lrs.LinearLR(optimizer, 0.5, total_iters=3), lrs.LambdaLR(optimizer, lambda step: 0.5**step)]
    return lrs.SequentialLR(optimizer, parts, milestones=[3])


def _chained(optimizer, r):
    return lrs.ChainedScheduler([_sequential(optimizer, r), lrs.MultiplicativeLR(optimizer, lambda step: 0.5)])


# each takes the optimizer and a function that gives one value for each group: the value, times M for the second
SCHEDULERS = {
    "StepLR": lambda o, r: lrs.StepLR(o, 2, 0.5),
    "CosineAnnealingLR": lambda o, r: lrs.CosineAnnealingLR(o, 8),
    "CosineAnnealingWarmRestarts": lambda o, r: lrs.CosineAnnealingWarmRestarts(o, 4),
    "LinearLR": lambda o, r: lrs.LinearLR(o, 0.5),
    "OneCycleLR": lambda o, r: lrs.OneCycleLR(o, r(2.0), total_steps=40),
    "CyclicLR": lambda o, r: lrs.CyclicLR(o, r(0.25), r(1.0), step_size_up=3),
    "LambdaLR": lambda o, r: lrs.LambdaLR(o, lambda step: 0.5**step),
    "MultiplicativeLR": lambda o, r: lrs.MultiplicativeLR(o, lambda step: 0.5),
    "ReduceLROnPlateau": lambda o, r: lrs.ReduceLROnPlateau(o, patience=0, factor=0.5, min_lr=r(0.125), eps=0),
    "SequentialLR": _sequential,
    "ChainedScheduler": _chained,
    "SWALR": lambda o, r: SWALR(o, r(0.125), anneal_epochs=4),
    "FactorLR": lambda o, r: FactorLR(o, lambda step: 1 / (1 + step)),
}


def _walk(optimizer, scheduler, steps=12):
    rates = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, lrs.ReduceLROnPlateau) else []))
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        rates.append([group.get("momentum", 0) for group in optimizer.param_groups])
        rates.append([float(rate) for rate in scheduler.get_last_lr()])
    return rates


def _parameters():
    head, body = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    head.grad, body.grad = torch.ones(2), torch.ones(2)
    return head, body


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.trap("finetuning: unfreezing crashes OneCycleLR, LambdaLR, ReduceLROnPlateau(min_lr=[..])")
@pytest.mark.trap("finetuning: splitting groups breaks LambdaLR and SequentialLR")
def test_equals_groups_made_by_hand(make, before):
    head, body = _parameters()
    optimizer = SGD([head, body], lr=LR, momentum=0.5)
    scheduler = make(optimizer, lambda rate: [rate])
    walked = _walk(optimizer, scheduler, before)
    assert split_groups_(optimizer, {body: M}, [scheduler]) == 1
    mine = _walk(optimizer, scheduler)

    head, body = _parameters()
    by_hand = SGD([{"params": [head], "lr": LR}, {"params": [body], "lr": LR * M}], lr=LR, momentum=0.5)
    scheduler = make(by_hand, lambda rate: [rate, rate * M])
    for one, two in zip(walked, _walk(by_hand, scheduler, before), strict=True):
        assert one == two[:1]
    assert mine == _walk(by_hand, scheduler)


TIMMS = {
    "cosine": lambda timm, o: timm.CosineLRScheduler(o, 8, warmup_t=3, warmup_lr_init=0.125),
    "without a warm-up": lambda timm, o: timm.CosineLRScheduler(o, 8),
    "step": lambda timm, o: timm.StepLRScheduler(o, 4, warmup_t=2),
    "polynomial": lambda timm, o: timm.PolyLRScheduler(o, 8, warmup_t=2, warmup_prefix=True),
}


@pytest.mark.parametrize("make", TIMMS.values(), ids=TIMMS)
def test_schedulers_of_timm_with_a_warm_up(make):
    timm = pytest.importorskip("timm.scheduler")
    head, body = _parameters()
    optimizer = SGD([head, body], lr=LR)
    scheduler = make(timm, optimizer)
    split_groups_(optimizer, {body: M}, [scheduler])
    by_hand = SGD([{"params": [head]}, {"params": [body], "lr": LR * M}], lr=LR)
    other = make(timm, by_hand)
    for epoch in range(1, 12):
        scheduler.step(epoch)
        other.step(epoch)
        rates, expected = ([group["lr"] for group in one.param_groups] for one in (optimizer, by_hand))
        assert rates == pytest.approx(expected), f"epoch {epoch}"


def test_names_options_and_tensor_rates():
    a, b, c = (nn.Parameter(torch.ones(1)) for _ in range(3))
    groups = [{"params": [a, b], "name": "body", "weight_decay": 0.5}, {"params": [c], "name": "head"}]
    optimizer = AdamW(groups, lr=torch.tensor(1.0), foreach=False)
    assert split_groups_(optimizer, {b: 0.5, c: 3.0}) == 1
    assert [group["name"] for group in optimizer.param_groups] == ["body", "head", "body x0.5"]
    assert [group["params"] for group in optimizer.param_groups] == [[a], [c], [b]]
    assert [group["lr"].item() for group in optimizer.param_groups] == [1, 3, 0.5]
    assert [group["weight_decay"] for group in optimizer.param_groups][::2] == [0.5, 0.5]
    assert len({id(group["lr"]) for group in optimizer.param_groups}) == 3, "one scheduler step would change all"


def test_named_parameters():
    model = nn.Linear(2, 2)
    optimizer = SGD(list(model.named_parameters()), lr=1.0)
    split_groups_(optimizer, {model.bias: 0.5})
    if "param_names" in optimizer.param_groups[0]:  # torch keeps them since 2.6
        assert [group["param_names"] for group in optimizer.param_groups] == [["weight"], ["bias"]]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.param_groups[1]["params"] == [model.bias]


def test_splits_once():
    head, body = _parameters()
    optimizer = SGD([head, body], lr=LR)
    scheduler = lrs.StepLR(optimizer, 1)
    assert split_groups_(optimizer, {body: M}, [scheduler]) == 1
    assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
    assert split_groups_(optimizer, {body: M}, [scheduler]) == 0
    assert [group["lr"] for group in optimizer.param_groups] == [LR, LR * M]
    assert split_groups_(optimizer, {body: 2 * M}, [scheduler]) == 0
    assert [group["lr"] for group in optimizer.param_groups] == [LR, LR * 2 * M]
    assert scheduler.base_lrs == [LR, LR * 2 * M]


def test_a_group_that_was_split_before_is_split_by_what_it_has_already():
    a, b, c = (nn.Parameter(torch.ones(1)) for _ in range(3))
    optimizer = SGD([a, b, c], lr=LR)
    scheduler = lrs.StepLR(optimizer, 1)
    assert split_groups_(optimizer, {b: M, c: M}, [scheduler]) == 1
    assert split_groups_(optimizer, {b: M, c: 2 * M}, [scheduler]) == 1
    rates = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert rates == {a: LR, b: LR * M, c: LR * 2 * M}
    assert scheduler.base_lrs == [LR, LR * M, LR * 2 * M]


@pytest.mark.parametrize("by_index", [False, True])
def test_refuses_a_scheduler_with_a_list_of_its_own(by_index):
    """Its first step fails with the words of `zip`, or, in older releases of torch, leaves the new groups out."""

    class Own(lrs.LRScheduler):
        def __init__(self, optimizer, peaks):
            self.peaks, self.calls = peaks, 0
            super().__init__(optimizer)

        def get_lr(self):
            self.calls += 1
            peaks = [self.peaks[i] for i in range(len(self.optimizer.param_groups))] if by_index else self.peaks
            return [peak / (1 + self.last_epoch) for peak in peaks]

    class Based(Own):
        def get_lr(self):
            self.calls += 1
            return [rate / (1 + self.last_epoch) for rate in self.base_lrs]

    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = SGD([a, b], lr=LR)
    with pytest.raises(ValueError, match="Own does not return a learning rate for each of 2 parameter groups"):
        split_groups_(optimizer, {b: M}, [Own(optimizer, [LR])])
    optimizer = SGD([a, b], lr=LR)
    scheduler = Based(optimizer, [LR])
    calls = scheduler.calls
    split_groups_(optimizer, {b: M}, [scheduler])
    assert scheduler.calls == calls
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [LR / 2, M * LR / 2]


def test_refuses_what_it_cannot_split():
    head, body = _parameters()
    with pytest.raises(ValueError, match="LBFGS takes one"):
        split_groups_(torch.optim.LBFGS([head, body]), {body: 0.5})
    optimizer = SGD([head, body], lr=LR)

    class Own:
        def __init__(self):
            self.optimizer = optimizer

    with pytest.raises(ValueError, match="Own is not an LRScheduler"):
        split_groups_(optimizer, {body: 0.5}, [Own()])
    scheduler = lrs.StepLR(optimizer, 1)
    scheduler.base_lrs = [1.0, 2.0]
    with pytest.raises(ValueError, match="StepLR has 2 base_lrs for 1 parameter groups"):
        split_groups_(optimizer, {body: 0.5}, [scheduler])
    assert [group["params"] for group in optimizer.param_groups] == [[head, body]], "nothing was changed"


@settings(max_examples=50)
@given(st.lists(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=1, max_size=4), min_size=1, max_size=3))
def test_every_parameter_stays_once_with_its_rate(factors):
    groups = [[nn.Parameter(torch.ones(1)) for _ in some] for some in factors]
    wanted = {p: f for some, group in zip(factors, groups, strict=True) for f, p in zip(some, group, strict=True)}
    optimizer = SGD([{"params": group, "lr": 2.0**i} for i, group in enumerate(groups)], lr=1.0)
    bases = {p: 2.0**i for i, group in enumerate(groups) for p in group}
    scheduler = lrs.LambdaLR(optimizer, [lambda step: 1.0 for _ in groups])
    split_groups_(optimizer, wanted, [scheduler])
    seen = [(p, group["lr"]) for group in optimizer.param_groups for p in group["params"]]
    assert len(seen) == len(wanted) == len({p for p, _ in seen})
    assert all(rate == bases[p] * wanted[p] for p, rate in seen)
    assert len(scheduler.lr_lambdas) == len(scheduler.base_lrs) == len(optimizer.param_groups)
