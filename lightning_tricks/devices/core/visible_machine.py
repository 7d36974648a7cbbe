"""The GPUs of the machine as this process sees them, and how it names those that it is to use."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_tricks.devices.core.cuda_state import bare_uuid, number_gpus_by_bus, uuids_seen_by_cuda
from lightning_tricks.devices.core.gpu import Gpu
from lightning_tricks.devices.core.gpu_reading import list_gpus
from lightning_tricks.devices.core.visible_devices import VARIABLE, VisibleDevice, named_by_index, visible_devices


@dataclass(frozen=True)
class Machine:
    """What this process sees of the machine.

    Attributes:
        gpus: All GPUs of the machine.
        devices: What can be selected: GPUs, and the slices of GPUs in MIG mode.
        numbers: CUDA's index of each, by `VisibleDevice.key`.
        cuda_initialized: Whether CUDA has read its environment variables in this process.
    """

    gpus: Sequence[Gpu]
    devices: Sequence[VisibleDevice]
    numbers: dict[str, int]
    cuda_initialized: bool

    def address(self, chosen: Sequence[VisibleDevice]) -> tuple[list[int], str | None]:
        """Return the indices under which CUDA finds devices, and what CUDA_VISIBLE_DEVICES has to be for it.

        Where it is not certain how CUDA counts, the variable names the chosen ones: CUDA sees a single slice of all
        GPUs in MIG mode, and no other GPU then; and a GPU that does not answer may be left out.

        Returns:
            The indices, and the value, or None if the variable stays as it is.
        """
        uncertain = any(gpu.error is not None or gpu.mig_mode for gpu in self.gpus)
        uuids = [device.uuid for device in chosen if device.uuid is not None]
        if uncertain and not self.cuda_initialized and len(uuids) == len(chosen):
            return list(range(len(chosen))), ",".join(uuids)
        return [self.numbers[device.key] for device in chosen], None


def see_machine(value: str | None, nvml: Any = None) -> Machine:
    """Return what this process sees of the machine, creating no CUDA context.

    Args:
        value: The value of CUDA_VISIBLE_DEVICES.
        nvml: What is used as the module `pynvml`.

    Raises:
        NvmlUnavailableError: If there is no working driver.
        ValueError: If CUDA would not understand CUDA_VISIBLE_DEVICES, or would number the GPUs in another order.
    """
    gpus = list_gpus(nvml=nvml)
    seen = uuids_seen_by_cuda()
    known = {bare_uuid(device.uuid): device for device in _slices(map(VisibleDevice, gpus)) if device.uuid}
    # CUDA has read its variables, and they do not matter any more; unless NVML, a fake, tells of another machine
    if seen is not None and any(uuid in known for uuid in seen):
        numbered = [(number, known[uuid]) for number, uuid in enumerate(seen) if uuid in known]
        devices = [device for _, device in numbered]
        return Machine(gpus, devices, {device.key: number for number, device in numbered}, True)
    visible = visible_devices(value, gpus)
    number_gpus_by_bus(len(gpus), order_matters=bool(visible) and named_by_index(value))
    numbers = {device.key: number for number, device in enumerate(visible)}
    devices = list(_slices(visible))
    return Machine(gpus, devices, {**dict.fromkeys((device.key for device in devices), 0), **numbers}, False)


def hidden_gpus(machine: Machine) -> str:
    """Return a remark on the GPUs that this process does not see, or an empty string."""
    seen = {device.gpu.index for device in machine.devices}
    hidden = [str(gpu.index) for gpu in machine.gpus if gpu.index not in seen]
    value = os.environ.get(VARIABLE)
    if not hidden or (value is None and not machine.cuda_initialized):
        return ""
    return f" This process does not see GPU {', '.join(hidden)} of the machine ({VARIABLE}={value or ''!r})."


def _slices(devices: Iterable[VisibleDevice]) -> Iterator[VisibleDevice]:
    for device in devices:
        if device.part is None and device.gpu.mig_slices:
            yield from (VisibleDevice(device.gpu, part) for part in device.gpu.mig_slices)
        else:
            yield device
