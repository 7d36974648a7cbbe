"""The emulation finds what people write without a GPU: each of these callbacks has one fault, and is found by it."""

import pytest
import torch
from lightning.pytorch import Callback

from tests.contract.lab import Lab
from tests.emulated_cuda.device import EmulatedCuda
from tests.emulated_cuda.test_callbacks import waits_of
from tests.small import same


class Observer(Callback):
    """Keeps the sum of the losses as it should."""

    def __init__(self):
        self.total = None

    def look(self, trainer, pl_module, loss, scores, target):
        self.total = loss if self.total is None else self.total + loss

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.look(trainer, pl_module, outputs["loss"].detach(), outputs["preds"].detach(), outputs["target"])

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state_dict):
        self.total = state_dict["total"].cuda()


def observer(look):
    return type(look.__name__, (Observer,), {"look": look})


def adds_to_a_tensor_without_device(self, trainer, pl_module, loss, scores, target):
    self.total = torch.zeros(()) if self.total is None else self.total
    self.total += loss


def reads_an_item(self, trainer, pl_module, loss, scores, target):
    self.total = loss.item()


def asks_whether_it_is_cuda(self, trainer, pl_module, loss, scores, target):
    if loss.is_cuda:
        pl_module.net[0].bias.data.mul_(0.9)


def test_another_device_is_an_error(tmp_path):
    with EmulatedCuda(), pytest.raises(RuntimeError, match=r"device|cuda:"):
        Lab(tmp_path, accelerator="cuda").fit([observer(adds_to_a_tensor_without_device)()])


def test_a_wait_in_a_batch_is_seen(tmp_path):
    waits = waits_of(Lab(tmp_path, accelerator="cuda"), [observer(reads_an_item)()])
    found = [wait for wait in waits if wait.moment in ("a later batch", "an epoch's last batch")]
    assert len(found) >= 19
    assert {wait.line.rsplit(":")[0] for wait in found} == {__file__}


def test_a_branch_that_changes_values_has_other_bits(tmp_path):
    (on_cpu,) = Lab(tmp_path / "cpu").fit([observer(asks_whether_it_is_cuda)()])
    with EmulatedCuda():
        (on_device,) = Lab(tmp_path / "device", accelerator="cuda").fit([observer(asks_whether_it_is_cuda)()])
    assert not same(on_device.weights, on_cpu.weights)


def test_the_healthy_one_passes_all(tmp_path):
    (on_cpu,) = Lab(tmp_path / "cpu").fit([Observer()])
    with EmulatedCuda():
        lab = Lab(tmp_path / "device", accelerator="cuda")
        (on_device,) = lab.fit([Observer()])
        lab.fit([Observer()], max_epochs=1, save_to=tmp_path / "one.ckpt")
        lab.fit([Observer()], ckpt_path=tmp_path / "one.ckpt")
    assert same(on_device.weights, on_cpu.weights)
    waits = waits_of(Lab(tmp_path / "waits", accelerator="cuda"), [Observer()])
    assert not [wait for wait in waits if wait.moment in ("a later batch", "an epoch's last batch")]
