"""Every public callback keeps the contract."""

import inspect
from contextlib import nullcontext
from itertools import permutations

import pytest
from lightning.pytorch import Callback

import lightning_tricks
from tests.contract.cases import CASES
from tests.contract.checks import CHECKS, CHECKS_IN_SETTINGS, is_promised, trainer_as_it_was, works
from tests.contract.lab import SETTINGS
from tests.emulated_cuda.device import EmulatedCuda
from tests.small import PUBLIC

_NUMBERS = {name: number for number, name in enumerate([*CASES, *SETTINGS])}


def _marks(*, with_oldest):
    return [] if with_oldest else [pytest.mark.newest]


def _is_odd(one, other):
    """Whether a combination is in the half of them that runs with the oldest versions, in which each name occurs."""
    return (_NUMBERS[one] + _NUMBERS[other]) % 2 == 1


_PROMISES = [
    pytest.param(
        case,
        check,
        id=f"{name}-{check.__name__}",
        marks=_marks(with_oldest=(_NUMBERS[name] + CHECKS.index(check)) % 2 == 1),
    )
    for name, case in CASES.items()
    for check in CHECKS
    if is_promised(check, case)
]
_PAIRS = [
    pytest.param(
        CASES[one],
        CASES[other],
        id=f"{one}-{other}",
        marks=_marks(with_oldest=_is_odd(one, other) == (_NUMBERS[one] < _NUMBERS[other])),  # in one of two orders
    )
    for one, other in permutations(CASES, 2)
]
_PROMISES_IN_SETTINGS = [
    pytest.param(
        case,
        check,
        setting,
        id=f"{name}-{check.__name__}-{setting.name}",
        marks=[
            *_marks(with_oldest=_is_odd(name, setting.name)),
            *([pytest.mark.thorough] if check is not works and (_NUMBERS[name] + _NUMBERS[setting.name]) % 3 else []),
            *([pytest.mark.gpu("`emulated` is the same without one")] if setting.accelerator == "cuda" else []),
        ],
    )
    for name, case in CASES.items()
    for check in CHECKS_IN_SETTINGS
    for setting in SETTINGS.values()
    if is_promised(check, case, setting)
]


def test_cases_are_the_public_callbacks():
    callbacks = {value.__name__ for value in PUBLIC.values() if inspect.isclass(value) and issubclass(value, Callback)}
    assert callbacks == CASES.keys() <= {*lightning_tricks.__all__}


@pytest.mark.parametrize(("case", "check"), _PROMISES)
def test_promise(case, check, lab):
    lab.net = case.net
    check(case, lab)  # asserts


@pytest.mark.parametrize(("case", "check", "setting"), _PROMISES_IN_SETTINGS)
def test_promise_in_setting(case, check, setting, lab):
    lab.net = case.net
    with EmulatedCuda() if setting.accelerator == "emulated" else nullcontext():
        check(case, lab, setting)  # asserts


@pytest.mark.parametrize(("case", "other"), _PAIRS)
@pytest.mark.sampled(5)
def test_trainer_is_as_it_was(case, other, lab):
    lab.net = {**case.net, **other.net}
    trainer_as_it_was(case, lab, other)  # asserts
