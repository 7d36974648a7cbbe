"""What memory is used for: sizes, tensors and their names."""

import gc
import json
import warnings
import weakref
from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

from lightning_tricks.devices import memory_report

MIB = 2**20


def mib(count=1):
    """A tensor of some MiB."""
    return torch.zeros(count * MIB // 4)


def largest(**arguments):
    return memory_report("cpu", n_largest=1, **arguments).largest[0]


def named(report):
    return {one.name: one for one in report.largest if one.name}


def test_a_new_tensor_is_found_and_a_dead_one_is_not():
    before = memory_report("cpu").found
    tensor = mib(3)
    assert memory_report("cpu").found - before == 3 * MIB
    assert memory_report("cpu").allocated - before == 3 * MIB
    one = largest()
    assert (one.shape, one.dtype, one.bytes, one.name) == (tuple(tensor.shape), "float32", 3 * MIB, "")
    del tensor
    assert memory_report("cpu").found == before


@given(st.lists(st.integers(1, 2000), max_size=6), st.data())
def test_storages_are_counted_once(sizes, data):
    before = memory_report("cpu").found
    tensors = [torch.zeros(size, dtype=torch.int16) for size in sizes]
    views = []
    for tensor in tensors:
        start = data.draw(st.integers(0, len(tensor) - 1))
        views += [tensor[start:], tensor.view(torch.uint8), tensor.expand(3, -1), nn.Parameter(tensor, False)]
    assert memory_report("cpu").found - before == sum(2 * size for size in sizes)


def test_a_view_keeps_its_whole_storage():
    view = torch.zeros(0).set_(mib(5).untyped_storage(), 0, (1, 3))
    one = largest()
    assert (one.shape, one.bytes) == ((1, 3), 5 * MIB)
    del view


def test_the_tensor_with_a_name_describes_its_storage():
    flat, module = mib(3), nn.Module()
    module.weight = nn.Parameter(flat[:100].view(10, 10))
    one = largest(model=module)
    assert (one.shape, one.bytes, one.name) == ((10, 10), 3 * MIB, "weight")


def test_an_expanded_tensor_does_not():
    tensor = mib(3)
    wide = tensor.expand(7, -1)
    assert largest().shape == tuple(tensor.shape)
    del wide


def test_a_parameter_that_is_no_leaf():
    """torch warns where its gradient is asked for, and a warning is an error here."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(600, 600), requires_grad=False)
    module.weight.add_(torch.ones((), requires_grad=True))
    assert not module.weight.is_leaf
    assert largest(model=module).name == "weight"


def test_names_of_a_training_step():
    model = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(4, 300)).sum().backward()
    optimizer.step()
    model.losses = [torch.zeros(2), torch.ones(3)]
    model[1].seen = {"last": deque([torch.zeros(5)])}
    report = memory_report("cpu", model=model, optimizers=optimizer, n_largest=10_000)
    found = named(report)
    expected = {*model.state_dict(), "losses[0]", "losses[1]", "1.seen['last'][0]"}
    for name, _ in model.named_parameters():
        expected |= {f"gradient of {name}", f"exp_avg of {name}", f"exp_avg_sq of {name}", f"step of {name}"}
    assert found.keys() == expected
    assert found["exp_avg of 0.weight"].shape == (300, 300)
    assert found["exp_avg of 0.weight"].bytes == 300 * 300 * 4
    parameters = sum(parameter.numel() for parameter in model.parameters())
    kinds = report.found_by_kind
    assert kinds["parameters"] == kinds["gradients"] == 4 * parameters
    assert kinds["optimizer states"] == 2 * 4 * parameters + 4 * len(list(model.parameters()))
    assert kinds["buffers"] == 2 * 300 * 4 + 8
    assert kinds["attributes"] == 4 * (2 + 3 + 5)
    assert sum(kinds.values()) == report.found


def test_tied_weights_have_both_names():
    model = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200))
    model[1].weight = model[0].weight
    report = memory_report("cpu", model=model, n_largest=1)
    assert report.largest[0].name == "0.weight, 1.weight"
    assert report.found_by_kind["parameters"] == 4 * (200 * 200 + 2 * 200)


def test_names_without_a_model_and_of_other_optimizers():
    weight = nn.Parameter(torch.rand(500, 100))
    optimizer = torch.optim.LBFGS([weight], max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    names = named(memory_report("cpu", optimizers=[optimizer], n_largest=10_000))
    assert {"parameter 0 of group 0", "gradient of parameter 0 of group 0", "d of parameter 0 of group 0"} <= {
        part for name in names for part in name.split(", ")
    }
    assert optimizer.state.keys() == {weight}, "asking for a state must not create one"


def test_compiled_models_keep_their_names():
    model = torch.compile(nn.Linear(600, 600), backend="eager")
    assert largest(model=model).name == "weight"


def test_tensors_that_are_frozen_by_the_garbage_collector_are_found_by_name():
    model = nn.Linear(700, 700)
    gc.collect()
    gc.freeze()
    try:
        assert "weight" not in named(memory_report("cpu"))
        assert largest(model=model).name == "weight"
    finally:
        gc.unfreeze()
        gc.collect()
        gc.freeze()


def test_what_belongs_to_a_graph():
    before = memory_report("cpu").in_graph
    weight = nn.Parameter(torch.rand(1000))
    assert memory_report("cpu").in_graph == before
    kept = (weight * 2)[:10]
    assert memory_report("cpu").in_graph - before == 4000
    kept = kept.detach()
    assert memory_report("cpu").in_graph == before


class Wrapper(torch.Tensor):
    """Claims a storage that it does not have, and refuses all that is asked of it."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise ZeroDivisionError

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise ZeroDivisionError


class Refuses(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise ZeroDivisionError


class Hostile:
    """An object whose every attribute raises."""

    def __getattribute__(self, name):
        raise KeyboardInterrupt(name)


class Pretender:
    """A lazy proxy, which loads something when it is asked for its class."""

    loaded = False

    @property
    def __class__(self):
        type(self).loaded = True
        return torch.Tensor


def compressed():
    return torch.sparse_csr_tensor(torch.arange(257), torch.arange(256), torch.ones(256), (256, 256))


def strange_tensors():
    yield "meta", lambda: torch.zeros(MIB, device="meta"), 0
    yield "a wrapper, of which only the inner counts", lambda: Wrapper(mib()), MIB
    yield "a subclass", lambda: torch.zeros(1024).as_subclass(Refuses), 4096
    yield "sparse", lambda: torch.eye(256).to_sparse(), 256 * (4 + 16)
    yield "compressed", compressed, 8 * (257 + 256) + 4 * 256
    yield "nested", lambda: torch.nested.nested_tensor([torch.zeros(512), torch.zeros(512)]), 4096
    yield "a buffer", lambda: nn.Buffer(torch.zeros(1024)), 4096
    yield "uninitialised", nn.UninitializedParameter, 0
    yield "empty", lambda: torch.zeros(0), 0


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested", "ignore:.*nested")
@pytest.mark.parametrize(("make", "size"), [pytest.param(*rest, id=name) for name, *rest in strange_tensors()])
def test_strange_tensors(make, size):
    module = nn.Module()
    before = memory_report("cpu").found
    module.tensor = make()
    found = memory_report("cpu", model=module, n_largest=10_000)
    # what torch makes beside a tensor, such as the sizes of a nested one, is small
    assert size <= found.found - before <= size + 256


def test_fake_tensors_hold_nothing_and_are_not_asked_for_data(recwarn):
    before = memory_report("cpu").found
    warns_always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    warnings.simplefilter("always")  # an error would be suppressed
    try:
        with FakeTensorMode():
            fake = mib()
            assert memory_report("cpu").found - before < 1024
    finally:
        torch.set_warn_always(warns_always)
    assert fake.shape == (MIB // 4,)
    assert not [str(one.message) for one in recwarn if "data pointer" in str(one.message)]


def test_sharded_tensors_count_what_this_rank_holds():
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = nn.Module()
        before = memory_report("cpu").found
        model.weight = nn.Parameter(distribute_tensor(torch.zeros(512, 512), mesh, [Shard(0)]))
        report = memory_report("cpu", model=model, n_largest=10_000)
        assert named(report)["weight"].bytes == 512 * 512 * 4
        assert MIB <= report.found - before < 2 * MIB
    finally:
        torch.distributed.destroy_process_group()


def test_nothing_else_is_touched():
    """Objects are asked for nothing but their type; a loaded proxy or a raised error would show it."""
    gone = Pretender()
    reference = weakref.proxy(gone)
    kept = [Hostile(), Pretender(), reference]
    del gone
    module = nn.Module()
    module.kept = kept
    memory_report("cpu", model=module)
    assert not Pretender.loaded


def test_nothing_is_kept_alive_or_changed():
    model = nn.Linear(100, 100)
    tensor = mib()
    reference, version = weakref.ref(tensor), tensor._version
    gc.collect()
    gc.disable()  # what would be kept in a circle must not be collected in time
    try:
        report = memory_report("cpu", model=model)
        assert tensor._version == version
        del tensor
        assert reference() is None
    finally:
        gc.enable()
    assert report.largest


def test_no_operator_runs():
    from tests.small import HostReads

    model = nn.Linear(100, 100)
    with HostReads() as reads, torch.autograd.profiler.profile() as profile:
        memory_report("cpu", model=model)
    assert (reads.count, len(profile.function_events)) == (0, 0)


def test_sizes_of_a_process():
    psutil = pytest.importorskip("psutil")
    report = memory_report("cpu")
    assert report.total == psutil.virtual_memory().total
    assert 0 < report.free <= report.total
    assert 50 * MIB < report.reserved <= report.total
    assert report.peak_reserved > 50 * MIB
    assert report.peak_allocated is None
    assert report.growth_per_epoch is None


def test_without_psutil_sizes_are_unknown(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "psutil", None)
    report = memory_report("cpu")
    assert (report.reserved, report.free, report.total) == (None, None, None)
    assert report.allocated > 0
    assert "resident: unknown (peak " in str(report)


def test_as_text_and_json():
    model = nn.Linear(400, 400)
    report = memory_report("cpu", model=model, n_largest=2)
    text = str(report)
    for word in ("Memory of cpu", "weight", "400x400", "625 KiB", "parameters"):
        assert word in text
    data = json.loads(report.to_json())
    assert data["largest"][0] == {"shape": [400, 400], "dtype": "float32", "bytes": 640_000, "name": "weight"}
    assert data["found"] == report.found
    assert len(data["largest"]) == 2
    assert memory_report("cpu", n_largest=0).largest == ()


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="n_largest must be a whole number >= 0, got -1"):
        memory_report(n_largest=-1)
    with pytest.raises(TypeError, match="n_largest must be a whole number"):
        memory_report(n_largest=1.5)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match=r'device="cuda:3"\) needs a CUDA device'):
            memory_report(3)


def test_another_device_is_counted_by_its_tensors():
    tensor = torch.zeros(MIB, device="meta")
    report = memory_report("meta")
    assert report.allocated == report.found == 4 * MIB
    assert (report.reserved, report.total) == (None, None)
    del tensor


class FakeCuda:
    """The figures of two GPUs, and the devices of which free memory was asked, which creates a context there."""

    def __init__(self, monkeypatch, **reserved):
        self.asked = []
        patches = {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "current_device": lambda: 1,
            "memory_allocated": lambda device: 10,
            "memory_reserved": lambda device: reserved.get(f"cuda{device.index}", 0),
            "max_memory_allocated": lambda device: 20,
            "max_memory_reserved": lambda device: reserved.get(f"cuda{device.index}", 0),
            "mem_get_info": lambda device: self.asked.append(device.index) or (300, 400),
        }
        for name, function in patches.items():
            monkeypatch.setattr(torch.cuda, name, function)


def test_no_context_is_created_on_other_gpus(monkeypatch):
    cuda = FakeCuda(monkeypatch, cuda1=30)
    report = memory_report()
    assert (report.device, report.allocated, report.reserved, report.free, report.total) == ("cuda:1", 10, 30, 300, 400)
    other = memory_report("cuda:0")
    assert (other.free, other.total, other.peak_allocated) == (None, None, 20)
    assert cuda.asked == [1]
    assert memory_report("cuda").device == "cuda:1"
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)  # as after empty_cache
    assert (memory_report("cuda:1").free, memory_report("cuda:0").free) == (300, None)


@pytest.mark.gpu
def test_on_a_gpu():
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.reset_peak_memory_stats(device)
    model = nn.Linear(1024, 1024, bias=False, device=device)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(8, 1024, device=device)).sum().backward()
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")  # nothing waits for it
    try:
        report = memory_report(model=model, optimizers=optimizer)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert report.device == str(device)
    assert report.allocated == torch.cuda.memory_allocated(device) >= report.found
    assert report.peak_allocated >= report.allocated
    assert report.reserved >= report.allocated
    assert 0 < report.free < report.total
    assert {"weight", "gradient of weight", "exp_avg of weight", "exp_avg_sq of weight"} <= named(report).keys()


def test_optimizers_whose_states_are_no_dicts():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.state[model.weight] = torch.zeros(1000, 1000)
    report = memory_report("cpu", model=model, optimizers=optimizer)
    assert report.found_by_kind["optimizer states"] == 4_000_000
    assert report.largest[0].name == "state of weight"
