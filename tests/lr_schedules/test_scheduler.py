"""FactorLR: groups in mid-run, exact resume, plain state."""

import copy
import pickle

import pytest
import torch

from lightning_tricks import ScheduleSpec
from lightning_tricks.lr_schedules import FactorLR
from tests.small import cases

_SPECS = [
    ScheduleSpec("warmup_cosine", warmup=3),
    ScheduleSpec("wsd", warmup=2, decay=5),
    ScheduleSpec("one_cycle"),
    ScheduleSpec("multistep", milestones=[3, 8], warmup=2),
    ScheduleSpec("step", step_size=4),
    ScheduleSpec("exponential", gamma=0.9),
    ScheduleSpec("inverse_sqrt", warmup=2),
    ScheduleSpec("polynomial", power=2.0),
    ScheduleSpec("constant"),
    ScheduleSpec("warmup_linear", warmup="4 steps", end_factor=0.1),
]


def _parameter():
    return torch.nn.Parameter(torch.ones(2))


def _step(optimizer, scheduler):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    used = []
    hook = optimizer.register_step_post_hook(lambda *_: used.extend(float(g["lr"]) for g in optimizer.param_groups))
    optimizer.step()
    hook.remove()
    scheduler.step()
    return used


@pytest.mark.trap("gradient_clipping: adding a parameter group mid-run raises, or multiplies its rate")
@pytest.mark.parametrize("spec", _SPECS, ids=lambda spec: spec.kind)
def test_groups_added_in_mid_run_have_a_base_of_their_own(spec):
    optimizer = torch.optim.SGD([_parameter()], lr=0.1)
    factor = spec.bind(20)
    scheduler = FactorLR(optimizer, factor)
    for now in range(25):
        if now == 5:
            optimizer.add_param_group({"params": [_parameter()], "lr": 0.5})
        rates = _step(optimizer, scheduler)
        expected = [0.1 * factor(now)] + [0.5 * factor(now)] * (now >= 5)
        assert rates == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("spec", _SPECS, ids=lambda spec: spec.kind)
@pytest.mark.parametrize("stop", [0, 1, 6, 22])
@pytest.mark.sampled(3)
def test_resume_is_exact(spec, stop, tmp_path):
    def make():
        optimizer = torch.optim.AdamW([_parameter()], lr=0.1)
        return optimizer, FactorLR(optimizer, spec.bind(20))

    whole = make()
    expected = [_step(*whole) for _ in range(25)]
    first = make()
    for _ in range(stop):
        _step(*first)
    torch.save([part.state_dict() for part in first], tmp_path / "state.pt")
    second = make()
    for part, state in zip(second, torch.load(tmp_path / "state.pt", weights_only=True), strict=True):
        part.load_state_dict(state)
    assert [_step(*second) for _ in range(25 - stop)] == expected[stop:]
    assert second[1].get_last_lr() == whole[1].get_last_lr()


def test_learning_rates_that_are_tensors():
    rate = torch.tensor(0.1)
    optimizer = torch.optim.Adam([_parameter()], lr=rate, foreach=False)
    scheduler = FactorLR(optimizer, lambda step: 1 / (1 + step))
    optimizer.add_param_group({"params": [_parameter()], "lr": torch.tensor(1.0)})
    rates = [_step(optimizer, scheduler) for _ in range(3)]
    assert [rate for rate, _ in rates] == pytest.approx([0.1, 0.05, 0.1 / 3])
    assert all(isinstance(group["lr"], torch.Tensor) for group in optimizer.param_groups)


@cases(
    "lr, own, rates",
    (1.0, {}, (1 / 2, 1 / 3)),
    (0.1, {"lr": torch.tensor(1.0)}, (1 / 2, 1 / 3)),
    ids=["the tensor of the other group, now 1 / 2", "its own"],
)
def test_a_new_group_whose_rate_is_a_tensor(lr, own, rates):
    optimizer = torch.optim.Adam([_parameter()], lr=torch.tensor(lr), foreach=False)
    scheduler = FactorLR(optimizer, lambda step: 1 / (1 + step))
    _step(optimizer, scheduler)
    optimizer.add_param_group({"params": [_parameter()], **own})
    found = [_step(optimizer, scheduler) for _ in range(2)]
    assert found == [pytest.approx([lr * rate, rate]) for rate in rates]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda scheduler: pickle.loads(pickle.dumps(scheduler))])
def test_a_copy_takes_groups_in_mid_run_too(copied):
    optimizer = torch.optim.SGD([_parameter()], lr=0.1)
    scheduler = copied(FactorLR(optimizer, ScheduleSpec("wsd", warmup=3).bind(20)))
    scheduler.optimizer.add_param_group({"params": [_parameter()], "lr": 0.5})
    scheduler.optimizer.step()
    assert [group["lr"] for group in scheduler.optimizer.param_groups] == [0.025, 0.125]
    assert len(optimizer.param_groups) == 1
