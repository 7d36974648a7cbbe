"""What a run depends on beside its code: versions, and torch's settings."""

from __future__ import annotations

import platform
from importlib import metadata

import torch

_PACKAGES = ("torch", "lightning", "lightning-tricks", "torchmetrics", "torchvision", "transformers", "timm", "numpy")


def versions() -> list[tuple[str, str]]:
    """Return the versions of Python, the system and the libraries that are installed."""
    found = [("python", platform.python_version())]
    for name in _PACKAGES:
        try:
            found.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found.append(("CUDA", torch.version.cuda))
    return [*found, ("system", platform.platform())]


def torch_settings() -> list[tuple[str, str]]:
    """Return torch's settings that decide whether a run can be repeated, and how fast it is."""
    return [
        ("deterministic algorithms", _on_off(torch.are_deterministic_algorithms_enabled())),
        ("cudnn.benchmark", _on_off(torch.backends.cudnn.benchmark)),
        ("cudnn.deterministic", _on_off(torch.backends.cudnn.deterministic)),
        ("float32 matmul precision", torch.get_float32_matmul_precision()),
        ("threads of torch", str(torch.get_num_threads())),
    ]


def _on_off(is_on: bool) -> str:
    return "on" if is_on else "off"
