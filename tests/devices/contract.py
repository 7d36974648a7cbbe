"""What the callbacks about devices promise."""

from tests.devices.cases_cuda_memory import CASE as CUDA_MEMORY
from tests.devices.cases_device_monitor import CASE as DEVICE_MONITOR
from tests.devices.cases_nvtx_ranges import CASE as NVTX_RANGES

CASES = (CUDA_MEMORY, DEVICE_MONITOR, NVTX_RANGES)
