"""Which of NVML's devices a CUDA device is."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch

from lightning_tricks.devices.core.cuda_state import bare_uuid
from lightning_tricks.devices.core.gpu_reading import gpu_handles, mig_handles, read_uuid
from lightning_tricks.devices.core.nvml import DeviceReader


def find_cuda_handles(nvml: Any, indices: Iterable[int]) -> dict[int, Any]:
    """Return NVML's handles of CUDA devices by their index, without a context on them; CUDA has to be initialized.

    Devices that NVML does not know, or that do not answer, are left out.
    """
    by_uuid: dict[str, Any] = {}
    for handle in gpu_handles(nvml):
        if not isinstance(handle, nvml.NVMLError):
            with suppress(nvml.NVMLError):  # it does not answer any more
                by_uuid |= _uuids(nvml, handle)
    found = {index: by_uuid.get(bare_uuid(cuda_uuid(index))) for index in indices}
    return {index: handle for index, handle in found.items() if handle is not None}


def _uuids(nvml: Any, handle: Any) -> dict[str, Any]:
    """Return the handles of a GPU and of its MIG slices by their UUIDs, as far as these are told."""
    devices = (handle, *(part for _, part in mig_handles(DeviceReader(nvml, handle))))
    uuids = [read_uuid(DeviceReader(nvml, device)) for device in devices]
    return {bare_uuid(uuid): device for uuid, device in zip(uuids, devices, strict=True) if uuid is not None}


def cuda_uuid(index: int) -> str:
    """Return the UUID of a CUDA device."""
    return str(torch.cuda.get_device_properties(index).uuid)
