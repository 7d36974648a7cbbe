"""Which GPUs this process sees, by CUDA's rules for CUDA_VISIBLE_DEVICES, and under which numbers.

Sources: "CUDA Environment Variables" in the CUDA Programming Guide, "CUDA Device Enumeration" in the MIG User Guide.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from lightning_tricks._shared.text import list_names
from lightning_tricks.devices.core.gpu import Gpu, MigSlice, list_gpus

VARIABLE = "CUDA_VISIBLE_DEVICES"
_ORDER_VARIABLE, _PCI_ORDER = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
_NO_GPU = ("", "-1", "NoDevFiles")  # the last is what SLURM writes for a job without GPUs


@dataclass(frozen=True)
class VisibleDevice:
    """A GPU, or a slice of one in MIG mode, that CUDA takes for a device.

    Attributes:
        gpu: The GPU.
        part: The slice; None for the whole GPU.
    """

    gpu: Gpu
    part: MigSlice | None = None

    @property
    def uuid(self) -> str | None:
        """The UUID that CUDA_VISIBLE_DEVICES takes."""
        return self.gpu.uuid if self.part is None else self.part.uuid

    @property
    def key(self) -> str:
        """What tells it from all others of the machine; the UUID, if the driver tells it."""
        return self.uuid or self.gpu.bus_id or str(self.gpu.index)

    @property
    def label(self) -> str:
        """What it is, for people."""
        name = f"GPU {self.gpu.index}" + (f", MIG slice {self.part.index}" if self.part else "")
        kind = (self.part and self.part.name) or self.gpu.name
        return f"{name} ({kind})" if kind else name


def visible_devices(value: str | None, gpus: Sequence[Gpu]) -> list[VisibleDevice]:
    """Return what a value of CUDA_VISIBLE_DEVICES lets CUDA see, in CUDA's order.

    CUDA ignores whatever it does not understand: it drops a wrong part with all that follow it, and sees nothing at
    all if a device is named twice. Here both are errors.

    Args:
        value: The value; None if the variable is not set.
        gpus: All GPUs of the machine, in the order of the PCI bus.

    Returns:
        The devices. A GPU in MIG mode that is named itself stands for all of its slices.

    Raises:
        ValueError: If CUDA would drop a part of the value.

    Examples:
        >>> gpus = [Gpu(index=0, uuid="GPU-ab"), Gpu(index=1, uuid="GPU-cd")]
        >>> [device.gpu.index for device in visible_devices("1,0", gpus)]
        [1, 0]
    """
    if value is None:
        return [VisibleDevice(gpu) for gpu in gpus]
    if value.strip() in _NO_GPU:
        return []
    found: list[VisibleDevice] = []
    kind = _kind(value)
    for part in value.split(","):
        matches = list(kind.matches(part, gpus)) if _kind(part) == kind else []
        if len(matches) != 1:
            _refuse(value, part, *_what_is_wrong(part, kind, matches, found), gpus)
        if matches[0] in found:
            _refuse(value, part, f"names {matches[0].label} again", _would_see([]), gpus)
        found.append(matches[0])
    return found


def _kind(part: str) -> _Kind:
    return {"GPU-": _GPU, "MIG-": _SLICE}.get(part[:4], _INDEX)


def _by_index(part: str, gpus: Sequence[Gpu]) -> Iterator[VisibleDevice]:
    if re.fullmatch(r"\s*[0-9]+\s*", part):
        yield from (VisibleDevice(gpu) for gpu in gpus if gpu.index == int(part))


def _by_uuid(part: str, gpus: Sequence[Gpu]) -> Iterator[VisibleDevice]:
    exact = [gpu for gpu in gpus if gpu.uuid == part]
    yield from map(VisibleDevice, exact or (gpu for gpu in gpus if gpu.uuid and gpu.uuid.startswith(part)))


def _by_slice(part: str, gpus: Sequence[Gpu]) -> Iterator[VisibleDevice]:
    for gpu in gpus:
        for piece in gpu.mig_slices:
            # drivers before 470 named slices by their GPU: MIG-GPU-<uuid>/<GPU instance>/<compute instance>
            old_name = f"MIG-{gpu.uuid}/{piece.gpu_instance}/{piece.compute_instance}"
            if part in (piece.uuid, old_name):
                yield VisibleDevice(gpu, piece)


class _Kind(NamedTuple):
    """How a part of the variable names a device: in words, and by which devices it finds."""

    words: str
    matches: Callable[[str, Sequence[Gpu]], Iterator[VisibleDevice]]


_INDEX, _GPU = _Kind("an index", _by_index), _Kind("a UUID of a GPU", _by_uuid)
_SLICE = _Kind("a UUID of a MIG slice", _by_slice)


def _what_is_wrong(
    part: str, kind: _Kind, matches: Sequence[VisibleDevice], before: Sequence[VisibleDevice]
) -> tuple[str, str]:
    """Return the problem with a part, and what CUDA would do."""
    if matches:
        names = " and ".join(match.label for match in matches)
        return f"is ambiguous, as the UUIDs of {names} begin with it", _would_see(before)
    if _kind(part) != kind:
        return f"is not {kind.words}, as the first part is", _would_see(before)
    number = re.match(r"\s*\+?[0-9]+", part)
    if kind is _INDEX and number is None:
        return "is neither an index nor a UUID", _would_see(before)
    if kind is _INDEX and number and not part.strip().isdecimal():
        return "is not an index", f"read it as {int(number[0])}"
    return "is not a GPU of this machine", _would_see(before)


def _would_see(devices: Sequence[VisibleDevice]) -> str:
    return f"see {' and '.join(device.label for device in devices) or 'no GPU'}"


def _refuse(value: str, part: str, problem: str, consequence: str, gpus: Sequence[Gpu]) -> NoReturn:
    known = list_names((f"{gpu.index} {_name(gpu)}" for gpu in gpus), most=16)
    raise ValueError(
        f"{VARIABLE}={value!r}: the part {part!r} {problem}. CUDA would silently {consequence}. Name each GPU once, "
        f"all by their indices or all by their UUIDs (here, {known}), write -1 for no GPU, or unset the variable."
    )


def _name(gpu: Gpu) -> str:
    if gpu.error is not None:
        return f"does not answer ({gpu.error})"
    slices = list_names((part.uuid or "a slice without a UUID" for part in gpu.mig_slices), most=8)
    return f"is {gpu.uuid or 'a GPU without a UUID'}" + (f" with {slices}" if gpu.mig_slices else "")


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
    # CUDA has read its variables, and later changes do not matter; unless NVML is a fake that tells of another machine
    if seen is not None and any(uuid in known for uuid in seen):
        numbered = [(number, known[uuid]) for number, uuid in enumerate(seen) if uuid in known]
        devices = [device for _, device in numbered]
        return Machine(gpus, devices, {device.key: number for number, device in numbered}, True)
    visible = visible_devices(value, gpus)
    by_index = value is None or _kind(value) is _INDEX
    _number_gpus_by_bus(len(gpus), order_matters=bool(visible) and by_index)
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


def uuids_seen_by_cuda() -> list[str] | None:
    """Return the UUIDs of the devices of this process in CUDA's order, or None if CUDA is not initialized.

    CUDA reads its environment variables once, when anything initializes it, `torch.cuda.is_available()` included, which
    `torch.cuda.is_initialized()` does not tell. The driver itself does, and creates no context for it.

    Returns:
        UUIDs without "GPU-" or "MIG-" in front.
    """
    driver = _loaded_driver()
    count = ctypes.c_int()
    if driver is None or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return None
    return [_uuid_of_ordinal(driver, ordinal) for ordinal in range(count.value)]


def bare_uuid(uuid_: str) -> str:
    """Return a UUID without "GPU-" or "MIG-" in front, as CUDA and torch tell it."""
    return uuid_.removeprefix("MIG-").removeprefix("GPU-").lower()


def _uuid_of_ordinal(driver: Any, ordinal: int) -> str:
    device, found = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    driver.cuDeviceGet(ctypes.byref(device), ordinal)
    driver.cuDeviceGetUuid_v2(ctypes.byref(found), device)  # that of the slice, on a GPU in MIG mode
    return str(uuid.UUID(bytes=bytes(found)))


def _loaded_driver() -> Any:
    """Return the CUDA driver if this process has loaded it."""
    if sys.platform == "win32":
        kernel = ctypes.windll.kernel32
        kernel.GetModuleHandleW.restype = ctypes.c_void_p
        handle = kernel.GetModuleHandleW("nvcuda.dll")
        return ctypes.WinDLL("nvcuda.dll", handle=handle) if handle else None
    try:
        return ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except (OSError, AttributeError):  # not loaded; macOS has no driver
        return None


def _number_gpus_by_bus(gpu_count: int, order_matters: bool) -> None:
    """Let CUDA number the GPUs as NVML does, by the PCI bus; for a process in which CUDA is not initialized.

    Args:
        gpu_count: The number of GPUs of the machine.
        order_matters: Whether CUDA_VISIBLE_DEVICES leaves the order to CUDA_DEVICE_ORDER.

    Raises:
        ValueError: If CUDA_DEVICE_ORDER asks for another order.
    """
    order = os.environ.get(_ORDER_VARIABLE)
    if not order:
        os.environ[_ORDER_VARIABLE] = _PCI_ORDER
    elif order != _PCI_ORDER and order_matters and gpu_count > 1:
        raise ValueError(
            f"{_ORDER_VARIABLE}={order!r}: CUDA would number the {gpu_count} GPUs in another order than NVML, "
            f"which select_gpus reads, and only CUDA knows this order. Unset it, or set it to {_PCI_ORDER}."
        )
