"""Find GPUs by what people call them."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_tricks.devices.core.gpu import Gpu


def pick_gpus(gpus: Sequence[Gpu], ids: str) -> list[Gpu]:
    """Return those GPUs that are named, in the order of the names, each once.

    Args:
        gpus: All GPUs of the machine.
        ids: Names with commas between them: indices, PCI bus addresses, UUIDs or their beginnings. The UUID of a MIG
            slice stands for its GPU.

    Raises:
        ValueError: If there is no name, or one that no GPU or more than one has; the message names it.

    Examples:
        >>> [gpu.index for gpu in pick_gpus([Gpu(index=0, uuid="GPU-8f6d"), Gpu(index=1, uuid="GPU-77aa")], "gpu-7,0")]
        [1, 0]
    """
    names = [name.strip() for name in ids.split(",") if name.strip()]
    if not names:
        raise ValueError(f"id must be indices or UUIDs of GPUs, such as '0,1', got {ids!r}.")
    picked: dict[int, Gpu] = {}
    for name in names:
        found = [gpu for gpu in gpus if _is_called(gpu, name.lower())]
        if not found:
            known = ", ".join(f"{gpu.index} ({gpu.uuid})" if gpu.uuid else str(gpu.index) for gpu in gpus)
            raise ValueError(f"id must name GPUs of this machine, got {name!r}. It has {known or 'none'}.")
        if len(found) > 1:
            fitting = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in found)
            raise ValueError(f"id must name one GPU each, got {name!r}, which fits {fitting}. Give more of the UUID.")
        picked[found[0].index] = found[0]
    return list(picked.values())


def _is_called(gpu: Gpu, name: str) -> bool:
    if name.isdecimal():
        return gpu.index == int(name)
    if gpu.bus_id is not None and gpu.bus_id.lower() == name:
        return True
    uuids = [gpu.uuid, *(part.uuid for part in gpu.mig_slices)]
    return any(uuid.lower().startswith(name) for uuid in uuids if uuid is not None)
