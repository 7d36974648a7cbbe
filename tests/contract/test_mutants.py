"""The contract catches each broken callback by the check that is there for it, and no healthy one."""

import pytest

from tests.contract.checks import CHECKS, CHECKS_IN_SETTINGS, is_promised
from tests.contract.lab import FP32
from tests.contract.mutants import CONTROLS, MUTANTS


def _name(mutant):
    check = getattr(mutant.caught_by, "func", mutant.caught_by)
    return f"{mutant.case.callback.__name__}-{check.__name__}"


@pytest.mark.parametrize("mutant", MUTANTS, ids=_name)
@pytest.mark.filterwarnings("ignore")
def test_mutant_is_caught(mutant, lab):
    setting = [mutant.setting] if mutant.setting else []
    assert is_promised(mutant.caught_by, mutant.case, *setting)
    with pytest.raises(mutant.error):
        mutant.caught_by(mutant.case, lab, *setting)


@pytest.mark.parametrize("case", CONTROLS, ids=lambda case: case.callback.__name__)
def test_healthy_callback_passes(case, lab):
    ran = [check(case, lab) for check in CHECKS if is_promised(check, case)]
    ran += [check(case, lab, FP32) for check in CHECKS_IN_SETTINGS if is_promised(check, case, FP32)]
    assert len(ran) >= len(CHECKS)
