"""Choose idle GPUs, watch them while they train, say why a run is slow or out of memory, and report the environment.

When to use it: on machines that people or jobs share (`select_gpus`, `lightning-tricks gpus`), and if a run is slower
or needs more memory than it should (`DeviceMonitor`, `CudaMemory`, `NvtxRanges`).

Unlike nvidia-smi and Lightning, a selection takes a lock, so two jobs that start together get different GPUs; it
honors CUDA_VISIBLE_DEVICES and creates no CUDA context on unused GPUs; the monitor logs a few keys with units,
sampled beside the steps, and reports the bottleneck at the end.

Caveats: NVIDIA GPUs only, as NVML reports no others. Locks work between processes that share their folder:
/tmp/lightning-tricks-gpus, or the path in LIGHTNING_TRICKS_LOCK_DIR. Containers have to mount it.
This package never changes persistence mode or compute mode.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_tricks.devices.core.device_summary import DeviceSummary as DeviceSummary
    from lightning_tricks.devices.core.gpu import Gpu as Gpu
    from lightning_tricks.devices.core.gpu import GpuProcess as GpuProcess
    from lightning_tricks.devices.core.gpu import MigSlice as MigSlice
    from lightning_tricks.devices.core.gpu import list_gpus as list_gpus
    from lightning_tricks.devices.core.gpu_locks import GpuLockError as GpuLockError
    from lightning_tricks.devices.core.memory_figures import limit_memory as limit_memory
    from lightning_tricks.devices.core.memory_report import MemoryReport as MemoryReport
    from lightning_tricks.devices.core.memory_report import TensorMemory as TensorMemory
    from lightning_tricks.devices.core.memory_report import memory_report as memory_report
    from lightning_tricks.devices.core.nvml import NvmlUnavailableError as NvmlUnavailableError
    from lightning_tricks.devices.core.result import NoGpuAvailableError as NoGpuAvailableError
    from lightning_tricks.devices.core.result import RankError as RankError
    from lightning_tricks.devices.core.result import Selection as Selection
    from lightning_tricks.devices.core.select import select_gpus as select_gpus
    from lightning_tricks.devices.cuda_memory import CudaMemory as CudaMemory
    from lightning_tricks.devices.device_monitor import DeviceMonitor as DeviceMonitor
    from lightning_tricks.devices.nvtx_ranges import NvtxRanges as NvtxRanges
else:  # or a type checker would take any name for one of the package
    from lightning_tricks._lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
