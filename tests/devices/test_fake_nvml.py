"""The fake NVML is like the real module where this package meets it."""

import inspect
import re
import sys
from contextlib import suppress
from pathlib import Path

import pynvml
import pytest

import lightning_tricks.devices
from lightning_tricks.devices import list_gpus
from tests.devices.boards import CONSUMER_BOARD, DRIVER_470, LOST, MIG_ENABLED, PASSIVELY_COOLED, UNIFIED_MEMORY
from tests.devices.fake_nvml import FakeGpu, FakeMigSlice, FakeNvml, FakeProcess

_PACKAGE = Path(lightning_tricks.devices.__file__).parent


def _called():
    """The functions of NVML that the package calls."""
    called = set()
    for path in _PACKAGE.rglob("*.py"):
        called |= set(re.findall(r"\bnvml\.(nvml[A-Z]\w+)|[\"'](nvml[A-Z]\w+)", path.read_text()))
    return sorted(one or other for one, other in called)


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


def test_a_gpu_that_is_not_found_is_an_error_of_older_modules_too(monkeypatch):
    monkeypatch.delattr(pynvml, "NVML_ERROR_GPU_NOT_FOUND", raising=False)
    with pytest.raises(pynvml.NVMLError) as caught:
        FakeNvml(init_error="GPU_NOT_FOUND").nvmlInit()
    assert caught.value.value == 28


@pytest.mark.parametrize("before", ["imported", "not to be imported", "not imported"])
def test_it_leaves_the_modules_as_they_were(before, monkeypatch):
    if before != "not imported":
        monkeypatch.setitem(sys.modules, "pynvml", object() if before == "imported" else None)
    else:
        monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    modules = dict(sys.modules)
    one, other = FakeNvml(), FakeNvml([FakeGpu()])
    with suppress(ZeroDivisionError), one:
        with other, other, one:
            assert list_gpus() == []
        assert sys.modules["pynvml"] is one
        raise ZeroDivisionError
    assert dict(sys.modules) == modules
