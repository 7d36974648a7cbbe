"""Opening NVML, reading what there is, and saying why not."""

import sys

import pytest

from lightning_tricks._shared.extras import import_extra
from lightning_tricks.devices import NvmlUnavailableError, list_gpus
from tests.devices.fake_nvml import FakeGpu, FakeNvml


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("LIBRARY_NOT_FOUND", "has no NVIDIA driver, or the container was started without its GPUs"),
        ("DRIVER_NOT_LOADED", "is installed, but not loaded"),
        ("LIB_RM_VERSION_MISMATCH", "was updated while it was loaded; the machine has to be restarted"),
        ("NO_PERMISSION", "has no permission to use the NVIDIA driver"),
        ("UNKNOWN", r"\(Unknown Error\): see nvidia-smi"),
    ],
)
def test_it_says_why_nvml_does_not_start(error, words):
    nvml = FakeNvml(init_error=error)
    with pytest.raises(NvmlUnavailableError, match=words):
        list_gpus(nvml=nvml)
    assert nvml.calls == ["nvmlInit"], "what was not started is not shut down"


def test_the_real_module_without_a_driver_says_the_same():
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        with pytest.raises(NvmlUnavailableError, match="this machine has no NVIDIA driver"):
            list_gpus()
    else:
        pynvml.nvmlShutdown()
        pytest.skip("this machine has a driver")


@pytest.mark.parametrize(("module", "package"), [("pynvml", "nvidia-ml-py"), ("psutil", "psutil")])
def test_a_missing_package_is_named_with_its_extra(module, package, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=rf'needs {package}, from the extra .*pip install "nvidia-ml-py'):
        import_extra(module, "devices", f"This needs {package}")


def test_what_a_package_itself_misses_is_not_taken_for_the_package(monkeypatch, tmp_path):
    (tmp_path / "half_installed.py").write_text("import nowhere_to_be_found")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="nowhere_to_be_found"):
        import_extra("half_installed", "devices", "This needs half-installed")


def test_it_is_shut_down_as_often_as_it_is_started():
    nvml = FakeNvml([FakeGpu()])
    nvml.nvmlInit()
    list_gpus(nvml=nvml)
    assert nvml.nvmlDeviceGetCount() == 1, "that of others is left open"
    nvml.nvmlShutdown()
    with pytest.raises(nvml.NVMLError_Uninitialized):
        nvml.nvmlDeviceGetCount()


def test_it_is_shut_down_after_an_exception_which_a_failing_shutdown_does_not_hide():
    class Breaks(FakeNvml):
        def nvmlSystemGetDriverVersion(self):  # noqa: N802
            raise ZeroDivisionError

    nvml = Breaks(fails={"nvmlShutdown": "UNKNOWN"})
    with pytest.raises(ZeroDivisionError):
        list_gpus(nvml=nvml)
    assert nvml.calls == ["nvmlInit", "nvmlShutdown"]


def test_count_that_fails_is_an_error_in_words():
    with pytest.raises(NvmlUnavailableError, match=r"how many GPUs there are \(Unknown Error\)"):
        list_gpus(nvml=FakeNvml([FakeGpu()], fails={"nvmlDeviceGetCount": "UNKNOWN"}))


def test_a_problem_is_listed_once_and_ends_the_search():
    gpu = FakeGpu(fails={"nvmlDeviceGetCurrentClocksEventReasons": "NO_PERMISSION"}, throttle_reasons=4)
    (found,) = list_gpus(nvml=FakeNvml([gpu]))
    assert found.unreadable == ("throttle reasons: Insufficient Permissions",)
    assert found.throttle_reasons is None


@pytest.mark.parametrize("error", ["GPU_IS_LOST", "RESET_REQUIRED", "GPU_NOT_FOUND"])
def test_a_device_that_is_gone_is_not_read_any_further(error):
    nvml = FakeNvml([FakeGpu(fails={"nvmlDeviceGetName": error})])
    (found,) = list_gpus(nvml=nvml)
    assert found.error
    assert nvml.calls[-2:] == ["nvmlDeviceGetName", "nvmlShutdown"]


@pytest.mark.parametrize("value", [0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF])
def test_not_available_is_none(value):
    gpus = list_gpus(nvml=FakeNvml([FakeGpu(ecc_errors=value), FakeGpu(ecc_errors=value - 1)]))
    assert [gpu.ecc_errors for gpu in gpus] == [None, value - 1]


def test_text_that_is_no_utf8_is_kept_as_far_as_it_is():
    class Odd(FakeNvml):
        @staticmethod
        def nvmlDeviceGetName(handle):  # noqa: N802
            return b"NVIDIA \xff42".decode()  # as pynvml does

    assert list_gpus(nvml=Odd([FakeGpu()]))[0].name == "NVIDIA \ufffd42"
