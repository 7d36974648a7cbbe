"""Opening NVML, reading what there is, and saying why not."""

import pytest

from lightning_tricks.devices import NvmlUnavailableError, list_gpus
from tests.devices.fake_nvml import FakeGpu, FakeNvml
from tests.small import cases


@cases(
    "error, words",
    ("LIBRARY_NOT_FOUND", "has no NVIDIA driver, or the container was started without its GPUs"),
    ("DRIVER_NOT_LOADED", "is installed, but not loaded"),
    ("LIB_RM_VERSION_MISMATCH", "was updated while it was loaded; the machine has to be restarted"),
    ("NO_PERMISSION", "has no permission to use the NVIDIA driver"),
    ("UNKNOWN", r"\(Unknown Error\): see nvidia-smi"),
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
