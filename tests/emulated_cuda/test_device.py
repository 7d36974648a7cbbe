"""The emulated device does what a CUDA device does, as far as its docstring says."""

import copy
import io

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.emulated_cuda.device import EmulatedCuda
from tests.small import cases

pytestmark = pytest.mark.oldest


@pytest.fixture
def device():
    with EmulatedCuda() as device:
        yield device


def kinds(device):
    """What the host waited for since it was last asked."""
    found = [wait.kind for wait in device.waits if wait.blocks]
    device.waits.clear()
    return found


def test_tensors_say_where_they_are(device):
    here, there = torch.zeros(3, device="cuda"), torch.zeros(3, device="cuda:1")
    assert (here.device, there.device) == (torch.device("cuda:0"), torch.device("cuda:1"))
    assert (here.is_cuda, here.is_cpu, here.get_device(), there.get_device()) == (True, False, 0, 1)
    assert here.type() == "torch.cuda.FloatTensor"
    assert "device='cuda:0'" in repr(here)
    assert here.untyped_storage().device == here.device
    assert type(here) is torch.Tensor
    assert torch.zeros(3).device == torch.device("cpu")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros(3, device="cuda:2")


@cases(
    "make",
    lambda x: x + 1,
    lambda x: x.view(-1)[1:],
    lambda x: torch.zeros_like(x),
    lambda x: x.new_ones(2),
    lambda x: torch.full((), 3.0, device=x.device),
    lambda x: torch.tensor([1.0], device="cuda"),
    lambda x: nn.functional.one_hot(x.long(), 4),
    lambda x: torch.func.vmap(torch.sin)(x),
    lambda x: copy.deepcopy(x),
    lambda x: nn.Linear(3, 2, device=x.device).weight,
    lambda x: nn.Linear(3, 2).to(x).weight,
    lambda x: x.cpu().cuda(),
    lambda x: torch.as_tensor(np.ones(3), device="cuda"),
    lambda x: torch.stack([x, x]).sum(0),
    lambda x: x.double().half(),
    lambda x: torch.rand(3, device="cuda", generator=torch.Generator("cuda")),
)
def test_results_are_on_the_device(device, make):
    assert make(torch.zeros(3, device="cuda")).device == torch.device("cuda:0")


@cases(
    "mix",
    lambda x: x + torch.as_tensor(np.zeros(3)),
    lambda x: torch.zeros(()).add_(x.sum()),
    lambda x: torch.zeros(3).copy_(x) + x,
    lambda x: torch.cat([x, torch.zeros(1)]),
    lambda x: torch.stack([x[0], torch.zeros(())]),
    lambda x: torch.zeros(3)[x.long()],
    lambda x: nn.Linear(3, 2)(x),
    lambda x: nn.functional.cross_entropy(x[None], torch.tensor([1])),
    lambda x: x + torch.zeros(3, device="cuda:1"),
    lambda x: torch.rand(3, device="cuda", generator=torch.Generator()),
    lambda x: torch.rand(3, generator=torch.Generator("cuda")),
    lambda x: setattr(nn.Parameter(x), "grad", torch.zeros(3)),
)
def test_devices_do_not_mix(device, mix):
    with pytest.raises(RuntimeError, match="device"):
        mix(torch.zeros(3, device="cuda"))


def test_numbers_of_the_cpu_may_be_mixed_in(device):
    x = torch.zeros(3, device="cuda")
    for mixed in (x + torch.tensor(2.0), torch.tensor(2.0) * x, torch.where(x > 0, x, torch.tensor(1.0))):
        assert mixed.is_cuda


def test_numpy_needs_a_copy(device):
    x = torch.ones(3, device="cuda")
    for read in (torch.Tensor.numpy, np.asarray):
        with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
            read(x)
    assert x.cpu().numpy().tolist() == x.numpy(force=True).tolist() == [1, 1, 1]


@cases(
    "wait, kind",
    (lambda x: x.sum().item(), "read"),
    (lambda x: bool(x.any()), "read"),
    (lambda x: float(x[0]), "read"),
    (lambda x: f"{x.sum():.3f}", "read"),
    (lambda x: x.tolist(), "read"),
    (lambda x: torch.equal(x, x), "read"),
    (lambda x: x[x > 0], "read"),
    (lambda x: x.nonzero(), "read"),
    (lambda x: x.unique(), "read"),
    (lambda x: x.masked_select(x > 0), "read"),
    (lambda x: x.cpu(), "to host"),
    (lambda x: x.to("cpu"), "to host"),
    (lambda x: torch.empty(3).copy_(x), "to host"),
    (lambda x: torch.empty(3).copy_(x, non_blocking=True), "to host"),  # its memory is not pinned
    (lambda x: torch.save(x, io.BytesIO()), "to host"),
    (lambda x: torch.ones(3).cuda(), "to device"),
    (lambda x: torch.tensor(3.0, device="cuda"), "to device"),
    (lambda x: x[torch.tensor([0, 1])], "to device"),
    (lambda x: x[[0, 1]], "to device"),
    (lambda x: torch.cuda.synchronize(), "synchronize"),
    (lambda x: torch.cuda.current_stream().synchronize(), "synchronize"),
)
def test_what_the_host_waits_for_is_counted_with_its_line(device, wait, kind):
    wait(torch.zeros(3, device="cuda"))
    assert {waited.line.rsplit(":")[0] for waited in device.waits} == {__file__}
    assert kinds(device) == [kind]


@cases(
    "run",
    lambda x: (x * 2).sum().sqrt(),
    lambda x: torch.ones(3).to("cuda", non_blocking=True),
    lambda x: x.copy_(torch.ones(3), non_blocking=True),
    lambda x: torch.empty(3, pin_memory=True).copy_(x, non_blocking=True),
    lambda x: x.to("cpu", non_blocking=True),
    lambda x: torch.full((), 3.0, device="cuda"),
    lambda x: x.masked_fill(x > 0, 1.0),
    lambda x: torch.cuda.Event().query(),
    lambda x: nn.utils.clip_grad_norm_([nn.Parameter(x)], 1.0),
)
def test_what_runs_on_is_no_wait(device, run):
    run(torch.zeros(3, device="cuda"))
    assert kinds(device) == []


def test_a_copy_that_does_not_block_arrives_when_it_is_waited_for(device):
    x, pinned = torch.full((3,), 7.0, device="cuda"), torch.empty(3, pin_memory=True)
    pinned.copy_(x, non_blocking=True)
    moved = x.to("cpu", non_blocking=True)
    assert pinned.tolist() == moved.tolist() == [1, 1, 1]
    torch.cuda.current_stream().synchronize()
    assert pinned.tolist() == moved.tolist() == [7, 7, 7]


def test_gradients_go_the_way_back(device):
    x = torch.ones(3, requires_grad=True)
    (2 * x.cuda()).sum().backward()
    assert x.grad.device == torch.device("cpu")
    assert x.grad.tolist() == [2, 2, 2]


def test_files_remember_the_device(device):
    file, net = io.BytesIO(), nn.Linear(3, 2).cuda()
    torch.save(net.state_dict(), file)
    for location, expected in ((None, "cuda:0"), ("cpu", "cpu"), ("cuda:1", "cuda:1")):
        file.seek(0)
        loaded = torch.load(file, map_location=location, weights_only=True)
        assert {str(value.device) for value in loaded.values()} == {expected}


def test_a_device_has_random_numbers_of_its_own(device):
    torch.manual_seed(1)
    first, on_cpu = torch.rand(3, device="cuda"), torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), on_cpu), "the device drew from the CPU's generator"
    state = torch.cuda.get_rng_state()
    assert torch.equal(torch.rand(3, device="cuda"), first)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="cuda"), first)


def test_default_devices(device):
    with torch.device("cuda:1"):
        assert nn.Linear(2, 2).weight.device == torch.device("cuda:1")
        assert torch.zeros(2, device="cpu").device == torch.device("cpu")
    with torch.cuda.device(1):
        assert torch.zeros(1).cuda().device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}, {"capturable": True}])
def test_autocast_and_a_scaler_compute_in_real_fp16(device, options):
    net, scaler = nn.Linear(3, 2).cuda(), torch.amp.GradScaler("cuda", init_scale=1024.0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, **options)
    before, scales = net.weight.detach().clone(), []
    for factor in (1.0, 1e8):  # the second overflows
        with torch.autocast("cuda", torch.float16):
            assert torch.is_autocast_enabled("cuda")
            scores = net(torch.ones(1, 3, device="cuda"))
            assert scores.dtype is torch.float16
        optimizer.zero_grad()
        scaler.scale(scores.float().sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [1024.0, 512.0]
    assert (before - net.weight).abs().max().item() == pytest.approx(0.1, abs=0.01)
    assert optimizer.state[net.weight]["exp_avg"].is_cuda
    assert optimizer.state[net.weight]["step"].is_cuda == bool({"fused", "capturable"} & options.keys())


def test_pinned_loaders(device):
    loader = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2, pin_memory=True)
    assert all(batch.is_pinned() for (batch,) in loader)
    assert not torch.ones(2).is_pinned()


def test_memory_is_that_of_living_tensors(device):
    before = torch.cuda.memory_allocated()
    kept = torch.zeros(1000, device="cuda")
    assert torch.cuda.memory_allocated() - before == 4000
    del kept
    assert torch.cuda.memory_allocated() == before
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 131072\.00 GiB"):
        torch.empty(1 << 45, device="cuda")


def test_outside_all_is_as_before():
    with EmulatedCuda():
        kept = torch.zeros(3, device="cuda")
    assert kept.device == torch.device("cpu")
    assert kept.numpy().tolist() == [0, 0, 0]
    assert not torch.cuda.is_initialized()
    assert "device" not in vars(torch.Tensor)
    assert torch.Generator is torch._C.Generator
