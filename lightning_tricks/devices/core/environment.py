"""What a bug report needs: versions and hardware, without names, paths and variables of the user."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from importlib import import_module, metadata
from pathlib import Path
from struct import calcsize
from typing import Any

from lightning_tricks._shared.text import format_bytes
from lightning_tricks.devices.core.gpu import driver_version, gpu_handles, read_field
from lightning_tricks.devices.core.nvml import DeviceReader, NvmlUnavailableError, open_nvml
from lightning_tricks.devices.core.utilization import allowed_cores

# Those that a report names in any case, and those that it names if they are there
PACKAGES = ("lightning_tricks", "lightning", "torchmetrics", "torchensemble", "thop", "numpy", "nvidia-ml-py")
MORE_PACKAGES = (
    "pytorch-lightning",
    "torchvision",
    "torchaudio",
    "triton",
    "transformers",
    "timm",
    "peft",
    "safetensors",
    "scikit-learn",
    "jsonargparse",
    "tensorboard",
    "rich",
    "psutil",
    "filelock",
)


def environment_report() -> dict[str, Any]:
    """Return versions and hardware; no CUDA context is created.

    Returns:
        Name -> text or None, in the order for people; "gpus" has a list of texts and "packages" a dict of versions.
        None stands for what is not there.

    Examples:
        >>> sorted(environment_report())[:4]
        ['cpu', 'cuda', 'cudnn', 'driver']
    """
    return {
        "python": f"{platform.python_version()} ({platform.python_implementation()}, {8 * calcsize('P')} bit)",
        "os": _os(),
        "cpu": _cpu(),
        "ram": _ram(),
        **_torch(),
        **_nvidia(),
        "packages": {
            name: version for name in (*PACKAGES, *MORE_PACKAGES) if (version := _version(name)) or name in PACKAGES
        },
    }


def environment_text(report: dict[str, Any]) -> str:
    """Return a report of `environment_report` as lines that need no markup, for a code block.

    Examples:
        >>> print(environment_text({"python": "3.11.7", "nccl": None, "gpus": [], "packages": {"thop": "0.1.1"}}))
        Python:  3.11.7
        NCCL:    none
        GPUs:    none
        thop:    0.1.1
        <BLANKLINE>
    """
    lines: list[tuple[str, str]] = []
    for name, value in report.items():
        if isinstance(value, dict):
            lines += [(package, version or "not installed") for package, version in value.items()]
        elif isinstance(value, list):
            lines += [(_LABELS[name] if not i else "", text) for i, text in enumerate(value or ["none"])]
        else:
            lines.append((_LABELS[name], value or "none"))
    width = max(len(name) for name, _ in lines) + 2
    return "".join(f"{name + ':' * bool(name):<{width}} {text}".rstrip() + "\n" for name, text in lines)


_LABELS = {
    "python": "Python",
    "os": "OS",
    "cpu": "CPU",
    "ram": "RAM",
    "torch": "torch",
    "cuda": "CUDA of torch",
    "rocm": "ROCm of torch",
    "cudnn": "cuDNN",
    "nccl": "NCCL",
    "driver": "NVIDIA driver",
    "gpus": "GPUs",
}


def _os() -> str:
    kernel = f"{platform.system()} {platform.release()} {platform.machine()}"
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]} {platform.machine()}"
    if sys.platform == "win32":
        return f"Windows {platform.release()} {platform.version()} {platform.machine()}"
    try:
        return f"{platform.freedesktop_os_release()['PRETTY_NAME']}, {kernel}"
    except OSError:  # there is no such file
        return kernel


def _cpu() -> str:
    logical = os.cpu_count() or 0
    usable = allowed_cores()
    physical = _try(lambda: import_module("psutil").cpu_count(logical=False))
    counts = [f"{physical} cores"] * bool(physical) + [f"{logical} threads"]
    counts += [f"{usable} of them usable"] * (usable < logical)
    return f"{_try(_cpu_model) or platform.machine() or 'unknown'} ({', '.join(counts)})"


def _cpu_model() -> str | None:
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603
    if sys.platform == "win32":
        import winreg

        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, r"HARDWARE\DESCRIPTION\System\CentralProcessor\0") as key:
            return str(winreg.QueryValueEx(key, "ProcessorNameString")[0]).strip()
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return " ".join(match[1].split()) if match else None  # ARM has none


def _ram() -> str | None:
    size = _try(lambda: import_module("psutil").virtual_memory().total)
    if size is None and sys.platform != "win32":  # psutil is in an extra
        size = _try(lambda: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return None if size is None else format_bytes(size)


def _torch() -> dict[str, str | None]:
    import torch

    found: dict[str, str | None] = {"torch": str(torch.__version__), "cuda": torch.version.cuda}
    if torch.version.hip:
        found["rocm"] = torch.version.hip
    cudnn = _try(torch.backends.cudnn.version)
    if cudnn is not None:  # 90100 is 9.1.0, and 8902, as it was before version 9, is 8.9.2
        major, rest = divmod(cudnn, 10000 if cudnn >= 90000 else 1000)
        cudnn = f"{major}.{rest // 100}.{rest % 100}"
    found["cudnn"] = cudnn
    nccl = _try(torch.cuda.nccl.version) if torch.version.cuda else None
    found["nccl"] = ".".join(map(str, nccl)) if nccl else None
    return found


def _nvidia() -> dict[str, Any]:
    try:
        with open_nvml() as nvml:
            gpus = Counter(_describe_gpu(nvml, handle) for handle in gpu_handles(nvml))
            driver, cuda = driver_version(nvml), _try(nvml.nvmlSystemGetCudaDriverVersion_v2)
    except (NvmlUnavailableError, ModuleNotFoundError) as error:
        return {"driver": f"unknown: {error}", "gpus": []}
    if driver is not None and cuda is not None:
        driver = f"{driver}, for CUDA up to {cuda // 1000}.{cuda % 1000 // 10}"
    return {"driver": driver, "gpus": [f"{count} x {gpu}" for gpu, count in gpus.items()]}


def _describe_gpu(nvml: Any, handle: Any) -> str:
    reader = DeviceReader(nvml, handle)
    try:
        if isinstance(handle, nvml.NVMLError):
            raise handle
        name, memory, mig = (read_field(reader, field) for field in ("name", "memory_total", "mig_mode"))
    except nvml.NVMLError as error:
        return f"GPU that does not answer ({error})"
    return (name or "unknown") + (f", {format_bytes(memory)}" if memory is not None else "") + ", MIG" * bool(mig)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _try(read: Callable[[], Any]) -> Any:
    """Return the result of a function, or None if it raises: a report may lack a line."""
    try:
        return read()
    except Exception:
        return None
