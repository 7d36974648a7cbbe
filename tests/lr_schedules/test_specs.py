"""The specs say at construction what is wrong, and turn durations into counts."""

import dataclasses

import pytest

from lightning_tricks import OptimizerSpec, ScheduleSpec
from lightning_tricks.lr_schedules import one_cycle
from tests.small import cases


def test_defaults_are_what_the_issue_of_warm_up_needs():
    spec = ScheduleSpec()
    assert (spec.kind, spec.warmup, spec.gamma, spec.end_factor) == ("warmup_cosine", 0.03, None, 0.0)
    assert ScheduleSpec("step", step_size=1).gamma == 0.1
    assert ScheduleSpec("wsd").decay == 0.2
    assert ScheduleSpec("polynomial").power == 1
    assert ScheduleSpec("multistep", milestones=[1]).warmup == 0
    assert ScheduleSpec("one_cycle").warmup == 0.3


def test_a_spec_keeps_milestones_that_its_caller_changes():
    milestones = [1, 2]
    spec = ScheduleSpec("multistep", milestones=milestones)
    milestones.append(3)
    assert spec.milestones == (1, 2)


@cases(
    "arguments, error, words",
    ({"name": "AdmW"}, ValueError, "OptimizerSpec.name must be one of .*got 'AdmW'. Did you mean 'AdamW'?"),
    ({"name": "os.system"}, ValueError, "must be one of"),
    ({"lr": 0}, ValueError, "lr must be a number > 0.*got 0"),
    ({"lr": "0.1"}, TypeError, "lr must be a number.*'0.1'"),
    ({"weight_decay": -1}, ValueError, "weight_decay must be a finite number >= 0, got -1"),
    ({"name": "LBFGS", "weight_decay": 0.01}, ValueError, "LBFGS has no weight decay: leave out weight_decay=0.01"),
    ({"layer_decay": 0}, ValueError, "layer_decay must be a number > 0 and <= 1, got 0"),
    ({"layer_decay": 1.5}, ValueError, "layer_decay must be a number > 0 and <= 1, got 1.5"),
    ({"kwargs": {"momentun": 0.9}, "name": "SGD"}, ValueError, "no 'momentun'.*Did you mean 'momentum'"),
    ({"kwargs": {"lr": 0.9}}, ValueError, "kwargs must not hold 'lr': it is a field of OptimizerSpec"),
    ({"groups": {"net.*": {"lrr": 1}}}, ValueError, r"groups\['net.\*'\]: AdamW has no 'lrr'.*Did you mean 'lr'"),
    ({"groups": {"net.*": 0.1}}, TypeError, r"groups\['net.\*'\] must be a dict of options"),
    ({"groups": {"net.*": {"lr": -1}}}, ValueError, r"groups\['net.\*'\]\['lr'\] must be a number > 0.*got -1"),
    (
        {"groups": {"net.*": {"weight_decay": -1}}},
        ValueError,
        r"\['weight_decay'\] must be a finite number >= 0, got -1",
    ),
    ({"kwargs": [1]}, TypeError, r"kwargs must be a dict of options such as .*, got \[1\]"),
    ({"no_decay": "bias"}, TypeError, "no_decay must be a list of words and patterns, got the string 'bias'"),
    ({"no_decay": ["re:["]}, ValueError, "is not a regular expression"),
    ({"fused": "yes"}, ValueError, "fused must be True, False or \"auto\", got 'yes'"),
    (
        {"name": "LBFGS", "weight_decay": 0, "groups": {"net.*": {"lr": 0.1}}},
        ValueError,
        "LBFGS takes one group of parameters, got groups=",
    ),
    ({"name": "LBFGS", "weight_decay": 0, "layer_decay": 0.5}, ValueError, "got layer_decay=0.5: leave it out"),
    ({"name": "NAdam", "fused": True}, ValueError, "NAdam has no fused implementation"),
)
def test_an_optimizer_spec_refuses(arguments, error, words):
    with pytest.raises(error, match=words):
        OptimizerSpec(**arguments)


@cases(
    "arguments, error, words",
    ({"kind": "warm_up_cosine"}, ValueError, "ScheduleSpec.kind must be one of .*Did you mean 'warmup_cosine'?"),
    ({"interval": "steps"}, ValueError, "interval must be one of step, epoch.*Did you mean 'step'?"),
    ({"warmup": -1}, ValueError, "warmup must be .*got -1"),
    ({"warmup": 1.5}, ValueError, "warmup must be a whole number or a fraction.*got 1.5"),
    ({"warmup": "5 stops"}, ValueError, "warmup must be a number or a string such as \"500 steps\".*'5 stops'"),
    ({"warmup": float("inf")}, ValueError, "warmup must be .*got inf"),
    ({"warmup": float("nan")}, ValueError, "warmup must be .*got nan"),
    ({"warmup": True}, TypeError, "warmup must be"),
    ({"total": 0}, ValueError, "total must be a whole number > 0.*got 0"),
    ({"total": 0.5}, ValueError, "total must be a whole number > 0.*got 0.5"),
    ({"kind": "multistep", "milestones": "100"}, TypeError, "milestones must be a list of durations.*'100'"),
    ({"kind": "multistep"}, ValueError, 'kind="multistep" needs milestones'),
    ({"milestones": [1, 2]}, ValueError, 'kind="warmup_cosine" has no milestones, got'),
    ({"kind": "multistep", "milestones": [5, 3]}, ValueError, r"milestones must increase, got \[5, 3\]"),
    ({"kind": "multistep", "milestones": [5, 5]}, ValueError, "milestones must increase"),
    ({"kind": "multistep", "milestones": [0, 5]}, ValueError, "milestones must be .*got 0"),
    ({"kind": "step"}, ValueError, 'kind="step" needs step_size'),
    ({"kind": "step", "step_size": 0}, ValueError, "step_size must be"),
    ({"kind": "exponential"}, ValueError, 'kind="exponential" needs gamma'),
    ({"kind": "exponential", "gamma": 0}, ValueError, "gamma must be a number > 0, got 0"),
    ({"end_factor": 2}, ValueError, r"end_factor must be in \[0, 1\], got 2"),
    ({"kind": "polynomial", "power": 0}, ValueError, "power must be a number > 0, got 0"),
    ({"kind": "one_cycle", "start_factor": 0}, ValueError, "start_factor must be a number > 0 and <= 1"),
)
def test_a_schedule_spec_refuses(arguments, error, words):
    with pytest.raises(error, match=words):
        ScheduleSpec(**arguments)


_VALUES = {"milestones": [5], "gamma": 0.1, "step_size": 2, "power": 1.0, "decay": 0.2, "start_factor": 0.04}
_FIELDS_OF_KIND = {**_VALUES, "end_factor": 0.0}
_TAKES = {
    "warmup_cosine": {"end_factor"},
    "warmup_linear": {"end_factor"},
    "wsd": {"decay", "end_factor"},
    "inverse_sqrt": set(),
    "one_cycle": {"start_factor", "end_factor"},
    "polynomial": {"power", "end_factor"},
    "multistep": {"milestones", "gamma"},
    "step": {"step_size", "gamma"},
    "exponential": {"gamma"},
    "constant": set(),
}


@pytest.mark.parametrize("kind", _TAKES)
def test_a_kind_refuses_what_it_does_not_take(kind):
    own = {name: _FIELDS_OF_KIND[name] for name in _TAKES[kind]}
    spec = ScheduleSpec(kind, warmup=2, total=10, interval="step", **own)
    assert ScheduleSpec(**dataclasses.asdict(spec)) == spec, "what a checkpoint holds makes the same again"
    factors = spec.factors(10)
    for name in _FIELDS_OF_KIND.keys() - own.keys():
        with pytest.raises(ValueError, match=rf'kind="{kind}" has no {name}, got .*: it takes warmup, total, interval'):
            ScheduleSpec(kind, **own, **{name: _FIELDS_OF_KIND[name]})
    for name, changed in {**_FIELDS_OF_KIND, "gamma": 0.5, "milestones": [3], "power": 2.0, "end_factor": 0.5}.items():
        if name in own and changed != own[name]:
            assert ScheduleSpec(kind, warmup=2, total=10, **{**own, name: changed}).factors(10) != factors


@cases(
    "arguments, words",
    ({"warmup": "500 steps"}, "warmup='500 steps' are longer than the schedule: 500 > 100 steps"),
    ({"kind": "wsd", "warmup": 0.9}, "warmup=0.9 and decay=0.2 are longer than the schedule: 110 > 100 steps"),
    ({"kind": "multistep", "milestones": ["50 steps", 0.2]}, "milestones must increase"),
    ({"kind": "step", "step_size": 0.001}, "step_size=0.001 is less than one step of 100"),
    ({"warmup": "2 epochs"}, "needs the steps of an epoch"),
)
def test_a_run_refuses(arguments, words):
    with pytest.raises(ValueError, match=words):
        ScheduleSpec(**arguments).bind(100)


def test_durations():
    def peak(spec, **arguments):
        factors = spec.factors(100, **arguments)
        return factors.index(max(factors))

    assert peak(ScheduleSpec(warmup=0.096)) == 10
    assert peak(ScheduleSpec(warmup=20)) == 20
    assert peak(ScheduleSpec(warmup="1 step")) == 1
    assert peak(ScheduleSpec(warmup="2 epochs"), steps_per_epoch=7) == 14
    assert peak(ScheduleSpec(warmup="0.5 epochs"), steps_per_epoch=10) == 5
    assert peak(ScheduleSpec(warmup=2, interval="epoch"), steps_per_epoch=10) == 20
    assert peak(ScheduleSpec(warmup="25 steps", interval="epoch"), steps_per_epoch=10) == 30
    by_epoch = ScheduleSpec("warmup_linear", warmup=0, interval="epoch").factors(5, steps_per_epoch=2)
    assert by_epoch == pytest.approx([1, 1, 2 / 3, 2 / 3, 1 / 3, 1 / 3])
    assert ScheduleSpec("one_cycle").factors(25)[3] == one_cycle(3, 25, 7.5), "as torch's, which does not round"
    assert ScheduleSpec(total=50).factors(100)[50:] == [0.0] * 51
    assert ScheduleSpec("constant", warmup=0.5).factors(4) == ScheduleSpec(warmup=2, end_factor=1).factors(4)
    assert ScheduleSpec("multistep", milestones=[0.5, 0.75]).factors(100)[49:51] == [1.0, 0.1]


def test_a_warm_up_before_kinds_that_have_none():
    factors = ScheduleSpec("multistep", milestones=[5], warmup=3).factors(8)
    assert factors == pytest.approx([0.25, 0.5, 0.75, 1, 1, 0.1, 0.1, 0.1, 0.1])


def test_only_what_depends_on_the_run_needs_its_length():
    for spec in (
        ScheduleSpec("multistep", milestones=[1, 3]),
        ScheduleSpec("step", step_size=1, gamma=0.9),
        ScheduleSpec("exponential", gamma=0.9),
        ScheduleSpec("inverse_sqrt", warmup=1),
        ScheduleSpec("constant"),
    ):
        assert not spec.needs_total
        assert 0 < spec.bind(None)(50) <= 1
    assert ScheduleSpec("inverse_sqrt").needs_total
    assert ScheduleSpec("multistep", milestones=[0.5]).needs_total
    with pytest.raises(ValueError, match=r"needs the length of the run: give ScheduleSpec\(total"):
        ScheduleSpec().bind(None)
