"""A limit to the memory of a GPU that this process may use."""

from __future__ import annotations

import torch

from lightning_tricks._shared.checks import check_number


def limit_memory(fraction: float, device: int | str | torch.device | None = None) -> None:
    """Limit this process to a share of the memory of one CUDA device.

    An allocation beyond it raises `torch.OutOfMemoryError`, also where the device has more memory left. The limit holds
    for torch's allocator: the CUDA context, libraries and other processes need memory besides. It holds until the
    process ends or until another one is set.

    Before a Trainer runs, the current device of each rank of a job is the first one, so that without `device` each rank
    would limit the first GPU and use another one without a limit. With a Trainer, give the limit to
    `CudaMemory(limit=...)`, which applies it to the device of each rank.

    Args:
        fraction: The share of the device's whole memory, > 0 and <= 1. With 1.0 all of it may be used.
        device: The CUDA device. None for the current one.

    Raises:
        TypeError: If `fraction` is not a number.
        ValueError: If `fraction` is out of range, or `device` is not a CUDA device of this process.
        RuntimeError: If there is no CUDA device.

    Examples:
        >>> if torch.cuda.is_available():
        ...     limit_memory(0.5, "cuda:0")
    """
    share = check_fraction("fraction", fraction)
    if device is not None:
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if device.type != "cuda":
            raise ValueError(f'device must be a CUDA device such as "cuda:0", got {str(device)!r}.')
    if not torch.cuda.is_available():
        raise RuntimeError(
            "limit_memory needs a CUDA device, and torch finds none: check the driver (nvidia-smi), "
            "CUDA_VISIBLE_DEVICES and that torch was built with CUDA, or do not call it on this machine."
        )
    count = torch.cuda.device_count()
    if device is not None and device.index is not None and device.index >= count:
        raise ValueError(f"device must be one of cuda:0 to cuda:{count - 1}, got {str(device)!r}.")
    torch.cuda.set_per_process_memory_fraction(share, device)


def check_fraction(name: str, value: object) -> float:
    """Return `value` as a float, or raise an error if it is not a share of the memory in (0, 1]."""
    return check_number(name, value, above=0, at_most=1, note="the share of the device's memory")
