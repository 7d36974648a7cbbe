"""The fake NVML is like the real module where this package meets it."""

import inspect
import re
from pathlib import Path

import pynvml
import pytest

import lightning_tricks.devices
from lightning_tricks.devices import list_gpus
from tests.devices.fake_nvml import FakeGpu, FakeMigSlice, FakeNvml, FakeProcess

_PACKAGE = Path(lightning_tricks.devices.__file__).parent


def _called():
    """The functions of NVML that the package calls."""
    called = set()
    for path in _PACKAGE.rglob("*.py"):
        called |= set(re.findall(r"\bnvml\.(nvml[A-Z]\w+)|[\"'](nvml[A-Z]\w+)", path.read_text()))
    return sorted(one or other for one, other in called)


@pytest.mark.newest
def test_the_real_module_has_every_function_that_the_package_calls():
    assert len(_called()) > 30
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
