"""Every callback on a device that is not the CPU: the promises, the bits of the CPU, and what the host waits for."""

from collections import Counter

import pytest
import torch
from lightning.pytorch import Callback

from tests.contract.cases import CASES
from tests.contract.checks import CHECKS, is_promised, resume, resume_anywhere, stages_in_turn
from tests.contract.lab import Lab
from tests.emulated_cuda.device import EmulatedCuda
from tests.emulated_cuda.waits import by_hook
from tests.small import EvaluatedNet, same, unseen
from tests.together.everything import TogetherNet, make_all, write_pretrained

_IN_CI = (resume, resume_anywhere, stages_in_turn)
_PROMISES = [
    pytest.param(case, check, id=f"{name}-{check.__name__}", marks=[] if check in _IN_CI else [pytest.mark.thorough])
    for name, case in CASES.items()
    for check in CHECKS
    if is_promised(check, case)
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("case", "check"), _PROMISES)
def test_promise(case, check, tmp_path):
    with EmulatedCuda():
        check(case, Lab(tmp_path, case.net, accelerator="cuda"))  # asserts


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_run_has_the_bits_of_the_cpu(case, tmp_path):
    (on_cpu,) = Lab(tmp_path / "cpu", case.net).fit([case.make()])
    with EmulatedCuda():
        (on_device,) = Lab(tmp_path / "device", case.net, accelerator="cuda").fit([case.make()])
    assert on_device.steps == on_cpu.steps
    for what in ("weights", "optimizers", "metrics"):
        assert same(getattr(on_device, what), getattr(on_cpu, what)), f"{what} differ"


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_it_keeps_the_bits_where_tensors_are_made_on_the_device(case, tmp_path):
    (on_cpu,) = Lab(tmp_path / "cpu", case.net).fit([case.make()])
    with EmulatedCuda(), torch.device("cuda"):
        (on_device,) = Lab(tmp_path / "device", case.net, accelerator="cuda").fit([case.make()])
    assert on_device.metrics == on_cpu.metrics


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_host_waits_for_what_is_budgeted(case, tmp_path):
    bare = waits_of(Lab(tmp_path / "bare", case.net, accelerator="cuda"), [])
    waits = waits_of(Lab(tmp_path / "with it", case.net, accelerator="cuda"), [case.make_idle()])
    left = Counter(map(_what, bare))
    more = []
    for wait in waits:
        if left[_what(wait)]:
            left[_what(wait)] -= 1
        else:
            more.append(wait)
    assert not [wait for wait in more if wait.moment == "a later batch"]
    found = by_hook(wait for wait in more if wait.hook)
    assert {hook: count for hook, count in found.items() if count > case.waits.get(hook, 0)} == {}


def test_all_together_let_no_later_batch_wait_but_where_they_write(tmp_path):
    write_pretrained(tmp_path)
    with EmulatedCuda() as device:
        callbacks = make_all(CASES, tmp_path, idle=True)
        moments = [Before(device.waits), *callbacks.values(), After(device.waits)]
        Lab(tmp_path, accelerator="cuda").fit(moments, module=TogetherNet(), probe=False)
    found = {wait.line for wait in device.waits if wait.blocks and wait.moment == "a later batch"}
    assert not [line for line in found if not any(room in line for room in ("/run_fingerprint/", "/images/"))]


def _what(wait):
    return wait.kind, wait.what, wait.line, wait.moment


def waits_of(lab, callbacks):
    """What the host waits for in two epochs of training and validation."""
    with EmulatedCuda() as device:
        first, last = Before(device.waits), After(device.waits)
        lab.fit([first, *callbacks, last], probe=False, log_every_n_steps=1, module=EvaluatedNet(**lab.net))
    return [wait for wait in device.waits if wait.blocks]


class _Moments(Callback):
    def __init__(self, waits):
        self.waits = unseen(waits)  # which AutoResume does not see


class Before(_Moments):
    """First in the list: says which batch it is that the others are about to see."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        later = "an epoch's last batch" if trainer.is_last_batch else "a later batch"
        self.waits().moment = later if trainer.fit_loop.total_batch_idx else "the first batch"


class After(_Moments):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.waits().moment = ""
