"""CUDA_VISIBLE_DEVICES: which GPUs a process sees, by CUDA's rules.

Sources: "CUDA Environment Variables" in the CUDA Programming Guide, "CUDA Device Enumeration" in the MIG User Guide.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from lightning_tricks._shared.text import list_names
from lightning_tricks.devices.core.gpu import Gpu, MigSlice

VARIABLE = "CUDA_VISIBLE_DEVICES"
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

    CUDA takes no notice of what it does not understand: it drops a wrong part with all that follow it, and sees
    nothing at all if a device is named twice. Here this is an error.

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
        matches = list(_MATCHES[kind](part, gpus)) if _kind(part) == kind else []
        if len(matches) != 1:
            _refuse(value, part, *_what_is_wrong(part, kind, matches, found), gpus)
        if matches[0] in found:
            _refuse(value, part, f"names {matches[0].label} again", _would_see([]), gpus)
        found.append(matches[0])
    return found


def named_by_index(value: str | None) -> bool:
    """Return whether the order of the GPUs of the machine decides what CUDA sees."""
    return value is None or _kind(value) == "an index"


def _kind(part: str) -> str:
    prefix = part[:4]
    return {"GPU-": "a UUID of a GPU", "MIG-": "a UUID of a MIG slice"}.get(prefix, "an index")


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


_MATCHES: dict[str, Callable[[str, Sequence[Gpu]], Iterator[VisibleDevice]]] = {
    "an index": _by_index,
    "a UUID of a GPU": _by_uuid,
    "a UUID of a MIG slice": _by_slice,
}


def _what_is_wrong(
    part: str, kind: str, matches: Sequence[VisibleDevice], before: Sequence[VisibleDevice]
) -> tuple[str, str]:
    """Return the problem with a part, and what CUDA would do."""
    if matches:
        names = " and ".join(match.label for match in matches)
        return f"is ambiguous, as the UUIDs of {names} begin with it", _would_see(before)
    if _kind(part) != kind:
        return f"is not {kind}, as the first part is", _would_see(before)
    number = re.match(r"\s*\+?[0-9]+", part)
    if kind == "an index" and number is None:
        return "is neither an index nor a UUID", _would_see(before)
    if kind == "an index" and number and not part.strip().isdecimal():
        return "is no index", f"read it as {int(number[0])}"
    return "is no GPU of this machine", _would_see(before)


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
