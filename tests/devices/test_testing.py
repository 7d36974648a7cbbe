"""The fake NVML is like the real module where users and this package meet it."""

import inspect
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pynvml
import pytest

import lightning_tricks.devices
from lightning_tricks.devices import list_gpus
from lightning_tricks.devices.testing import FakeGpu, FakeMigSlice, FakeNvml, FakeProcess
from tests.devices.boards import CONSUMER_BOARD, DRIVER_470, LOST, MIG_ENABLED, PASSIVELY_COOLED, UNIFIED_MEMORY

_PACKAGE = Path(lightning_tricks.devices.__file__).parent
_OWN = [name for name in vars(FakeNvml) if name.startswith("nvml")]


def _called():
    """The functions of NVML that the package calls."""
    called = set()
    for path in _PACKAGE.rglob("*.py"):
        if path.name != "testing.py":
            called |= set(re.findall(r"\bnvml\.(nvml[A-Z]\w+)|[\"'](nvml[A-Z]\w+)", path.read_text()))
    return sorted(one or other for one, other in called)


@pytest.fixture
def nvml():
    nvml = FakeNvml([FakeGpu(), FakeGpu(mig_mode=True, mig_slices=[FakeMigSlice("MIG-1")])])
    nvml.nvmlInit()
    return nvml


# Names


def test_the_fake_has_every_function_that_the_package_calls():
    assert len(_called()) > 30
    assert all(hasattr(FakeNvml(), name) for name in _called())


@pytest.mark.newest
def test_the_real_module_has_every_function_that_the_package_calls():
    assert [name for name in _called() if not hasattr(pynvml, name)] == []


def test_the_real_functions_take_what_the_package_gives_them():
    class Checks(FakeNvml):
        def __getattr__(self, name):
            function = super().__getattr__(name)
            if not name.startswith("nvmlDevice") or not hasattr(pynvml, name):
                return function

            def checked(*arguments, **keywords):
                inspect.signature(getattr(pynvml, name)).bind(*arguments, **keywords)
                return function(*arguments, **keywords)

            return checked

    part = FakeMigSlice("MIG-1")
    nvml = Checks([FakeGpu(), FakeGpu(mig_mode=True, mig_slices=[part], processes=[FakeProcess(1)])])
    assert list_gpus(nvml=nvml)[1].mig_slices[0].uuid == "MIG-1"
    assert len({*nvml.calls}) > 25


def test_every_name_of_a_kind_of_board_or_driver_is_a_function():
    for fails in (CONSUMER_BOARD, PASSIVELY_COOLED, UNIFIED_MEMORY, MIG_ENABLED, LOST):
        for function, error in fails.items():
            assert hasattr(FakeNvml(), function)
            assert hasattr(pynvml, f"NVML_ERROR_{error}")
    for function in DRIVER_470:
        assert function in _called() or function == "nvmlDeviceGetMemoryInfo_v2"


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="FakeNvml has no 'nvmlDeviceGetTopologyCommonAncestor'"):
        FakeNvml().nvmlDeviceGetTopologyCommonAncestor  # noqa: B018
    assert not hasattr(FakeNvml(), "NVMLError_Nothing")
    nvml = FakeNvml(init_error="NO_SUCH_ERROR")
    with pytest.raises(AttributeError, match="NO_SUCH_ERROR"):
        nvml.nvmlInit()


def test_a_gpu_that_is_not_found_is_an_error_of_older_modules_too(monkeypatch):
    monkeypatch.delattr(pynvml, "NVML_ERROR_GPU_NOT_FOUND", raising=False)
    with pytest.raises(pynvml.NVMLError) as caught:
        FakeNvml(init_error="GPU_NOT_FOUND").nvmlInit()
    assert caught.value.value == 28


def test_users_catch_what_they_catch_of_pynvml():
    with FakeNvml([FakeGpu(fails={"nvmlDeviceGetFanSpeed": "NOT_SUPPORTED"})]):
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        with pytest.raises(pynvml.NVMLError_NotSupported):
            pynvml.nvmlDeviceGetFanSpeed(handle)
        with pytest.raises(pynvml.NVMLError) as caught:
            pynvml.nvmlDeviceGetFanSpeed(handle)
        assert caught.value.value == pynvml.NVML_ERROR_NOT_SUPPORTED
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        assert (memory.total, memory.reserved) == (80 << 30, 0)
        assert not hasattr(pynvml.nvmlDeviceGetMemoryInfo(handle), "reserved")
        assert pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU) == 30
        assert pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM) == 2619


# What it does


@pytest.mark.parametrize("index", [-1, 2, 10**6])
def test_there_is_no_handle_beyond_the_last_gpu(nvml, index):
    with pytest.raises(nvml.NVMLError_InvalidArgument):
        nvml.nvmlDeviceGetHandleByIndex(index)


@pytest.mark.parametrize("name", [*_OWN, *(name for name in _called() if name not in _OWN)])
def test_nothing_works_before_init(name):
    nvml = FakeNvml([FakeGpu()])
    if name == "nvmlInit":
        return
    given = [0] * (name == "nvmlDeviceGetHandleByIndex") if name in _OWN else [FakeGpu()]
    with pytest.raises(nvml.NVMLError_Uninitialized):
        getattr(nvml, name)(*given)
    assert nvml.calls == [name], "calls are kept with their names"


@pytest.mark.parametrize("name", ["nvmlDeviceGetPowerUsage", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetMigMode"])
def test_a_mig_slice_does_not_tell_what_its_gpu_does(nvml, name):
    part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(nvml.gpus[1], 0)
    assert nvml.nvmlDeviceGetUUID(part) == "MIG-1"
    with pytest.raises(nvml.NVMLError_NotSupported):
        getattr(nvml, name)(part)
    with pytest.raises(nvml.NVMLError_NotFound):
        nvml.nvmlDeviceGetMigDeviceHandleByIndex(nvml.gpus[1], 1)
    with pytest.raises(nvml.NVMLError_InvalidArgument):
        nvml.nvmlDeviceGetGpuInstanceId(nvml.gpus[1])


def test_functions_that_the_driver_lacks():
    nvml = FakeNvml([FakeGpu()], missing=DRIVER_470)
    nvml.nvmlInit()
    for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetComputeRunningProcesses_v3"):
        with pytest.raises(nvml.NVMLError_FunctionNotFound):
            getattr(nvml, name)(nvml.gpus[0])
    with pytest.raises(nvml.NVMLError_FunctionNotFound):
        nvml.nvmlDeviceGetMemoryInfo(nvml.gpus[0], version=nvml.nvmlMemory_v2)
    assert nvml.nvmlDeviceGetMemoryInfo(nvml.gpus[0]).total == 80 << 30


def test_a_field_may_change_and_equal_gpus_are_two():
    nvml = FakeNvml([FakeGpu(), FakeGpu()])
    nvml.gpus[1].temperature = 88
    first, second = list_gpus(nvml=nvml)
    assert (first.temperature, second.temperature) == (30, 88)
    assert first.uuid != second.uuid
    assert first.bus_id != second.bus_id


def test_a_gpu_may_be_lost_later_and_come_back():
    nvml = FakeNvml([FakeGpu()])
    nvml.gpus[0].fails = LOST
    assert list_gpus(nvml=nvml)[0].error == "GPU is lost"
    nvml.gpus[0].fails = {}
    assert list_gpus(nvml=nvml)[0].error is None


def test_processes_by_kind(nvml):
    nvml.gpus[0].processes = [
        FakeProcess(1, "1GiB"),
        FakeProcess(2, None, "C+G", gpu_instance=3),
        FakeProcess(3, 0, "G"),
    ]
    compute = nvml.nvmlDeviceGetComputeRunningProcesses_v3(nvml.gpus[0])
    assert [(p.pid, p.usedGpuMemory, p.gpuInstanceId) for p in compute] == [(1, 1 << 30, 0xFFFFFFFF), (2, None, 3)]
    assert [p.pid for p in nvml.nvmlDeviceGetGraphicsRunningProcesses_v2(nvml.gpus[0])] == [2, 3]


# In the place of the module


@pytest.fixture(params=["imported", "not to be imported", "not imported"])
def modules(request, monkeypatch):
    if request.param != "not imported":
        monkeypatch.setitem(sys.modules, "pynvml", object() if request.param == "imported" else None)
    else:
        monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    return dict(sys.modules)


def test_it_leaves_the_modules_as_they_were(modules):
    with FakeNvml([FakeGpu()]) as nvml:
        assert sys.modules["pynvml"] is nvml
        assert list_gpus()[0].utilization == 0
    assert dict(sys.modules) == modules


def test_also_after_an_exception(modules):
    with pytest.raises(ZeroDivisionError), FakeNvml():
        raise ZeroDivisionError
    assert dict(sys.modules) == modules


def test_also_nested_the_same_and_another(modules):
    one, other = FakeNvml(), FakeNvml([FakeGpu()])
    with one:
        with other, other, one:
            assert list_gpus() == []
        assert sys.modules["pynvml"] is one
    assert dict(sys.modules) == modules


def test_also_if_somebody_else_removed_it(modules):
    with FakeNvml():
        del sys.modules["pynvml"]
    assert dict(sys.modules) == modules


def test_it_is_found_as_a_module():
    with FakeNvml():
        assert find_spec("pynvml").name == "pynvml"
        from pynvml import NVMLError, nvmlDeviceGetCount, nvmlInit

        nvmlInit()
        assert nvmlDeviceGetCount() == 0
        assert NVMLError is pynvml.NVMLError
