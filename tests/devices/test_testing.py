"""The fake NVML is like the real module where users and this package meet it."""

import inspect
import pickle
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import lightning_tricks.devices
from lightning_tricks.devices import list_gpus, testing
from lightning_tricks.devices.fake_errors import CONSTANTS, ERRORS, FakeNvmlError
from lightning_tricks.devices.fake_readings import READINGS
from lightning_tricks.devices.testing import DRIVER_470, FakeGpu, FakeMigSlice, FakeNvml, FakeProcess

# What nvidia-ml-py 12.535 lacks
_NEWER = (
    "nvmlDeviceGetComputeRunningProcesses_v2",
    "nvmlDeviceGetGraphicsRunningProcesses_v2",
    "nvmlDeviceGetTemperatureV",
    "NVML_ERROR_GPU_NOT_FOUND",
)
_CORE = Path(lightning_tricks.devices.__file__).parent / "core"


@pytest.fixture
def real():
    return pytest.importorskip("pynvml")


@pytest.fixture
def nvml():
    nvml = FakeNvml([FakeGpu(), FakeGpu(mig_mode=True, mig_slices=[FakeMigSlice("MIG-1")])])
    nvml.nvmlInit()
    return nvml


def _own_functions():
    return [name for name in vars(FakeNvml) if name.startswith("nvml")]


# Names, parameters and codes


@pytest.mark.parametrize("name", [*_own_functions(), *READINGS])
def test_the_real_module_has_the_function_with_the_same_parameters(name, real):
    if not hasattr(real, name):
        assert name in _NEWER
        pytest.skip("a newer nvidia-ml-py is needed")
    parameters = list(inspect.signature(getattr(real, name)).parameters.values())
    fakes = list(inspect.signature(READINGS.get(name) or getattr(FakeNvml, name)).parameters.values())
    fakes = fakes[1:]  # the fake itself
    assert len(fakes) == len(parameters)
    for fake, parameter in zip(fakes, parameters, strict=True):
        assert (fake.default is fake.empty) == (parameter.default is parameter.empty)
        if parameter.default is not parameter.empty:  # those may be given by name
            assert fake.name == parameter.name


def test_the_fake_has_every_function_that_the_package_calls():
    called = set()
    for path in [*_CORE.rglob("*.py"), *_CORE.parent.glob("*.py")]:
        if path.name not in ("testing.py", "fake_errors.py", "fake_readings.py"):
            called |= set(re.findall(r"\bnvml\.(nvml[A-Z]\w+)|[\"'](nvml[A-Z]\w+)", path.read_text()))
    names = {one or other for one, other in called}
    assert len(names) > 20
    assert all(hasattr(FakeNvml(), name) for name in names), names


def test_every_name_of_a_kind_of_board_or_driver_is_a_function():
    boards = (testing.CONSUMER_BOARD, testing.PASSIVELY_COOLED, testing.UNIFIED_MEMORY, testing.MIG_ENABLED)
    for fails in (*boards, testing.LOST):
        for function, error in fails.items():
            assert hasattr(FakeNvml(), function)
            assert error in ERRORS
    for function in DRIVER_470:
        assert function in READINGS or function == "nvmlDeviceGetMemoryInfo_v2"


@pytest.mark.parametrize("name", [name for name in CONSTANTS if not name.startswith("NVMLError_")])
def test_constants_are_those_of_the_real_module(name, real):
    assert getattr(FakeNvml(), name) == CONSTANTS[name]
    if hasattr(real, name):
        assert getattr(real, name) == CONSTANTS[name]
    else:
        assert name in _NEWER


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="FakeNvml has no 'nvmlDeviceGetTopologyCommonAncestor'"):
        FakeNvml().nvmlDeviceGetTopologyCommonAncestor  # noqa: B018
    assert not hasattr(FakeNvml(), "NVMLError_Nothing")


@pytest.mark.parametrize("name", [name for name in ERRORS if f"NVML_ERROR_{name}" not in _NEWER])
def test_errors_are_like_those_of_the_real_module(name, real):
    code, words = ERRORS[name]
    assert getattr(real, f"NVML_ERROR_{name}") == code
    theirs, ours = real.NVMLError(code), FakeNvmlError(code)
    assert type(theirs).__name__ == type(ours).__name__
    assert str(theirs) == str(ours) == words
    assert (theirs.value, theirs.args) == (ours.value, ours.args)
    assert type(FakeNvmlError(name)) is type(ours) is getattr(FakeNvml(), type(theirs).__name__)
    alone = type(ours)()
    assert (alone.value, str(alone)) == (code, words)
    again = pickle.loads(pickle.dumps(ours))
    assert (type(again), again.value, str(again)) == (type(ours), code, words)


def test_an_error_that_nobody_knows(real):
    assert str(real.NVMLError(77)) == str(FakeNvmlError(77)) == "NVML Error with code 77"
    assert type(FakeNvmlError(77)) is FakeNvmlError


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


@pytest.mark.parametrize("name", [*_own_functions(), *READINGS])
def test_nothing_works_before_init(name):
    nvml = FakeNvml([FakeGpu()])
    if name == "nvmlInit":
        return
    given = [FakeGpu()] if name in READINGS else [0] * (name == "nvmlDeviceGetHandleByIndex")
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
    nvml.gpus[0].fails = testing.LOST
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
        assert NVMLError is FakeNvmlError
