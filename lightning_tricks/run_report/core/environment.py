"""What a run depends on beside its code: versions, and torch's settings."""

from __future__ import annotations

import os
import platform
import re
import sys
from contextlib import suppress
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


def other_versions() -> list[tuple[str, str]]:
    """Return the versions of all other packages that are installed, by the names of their folders."""
    found: dict[str, str] = {}
    for folder in sys.path:
        with suppress(OSError):
            for entry in os.listdir(folder or os.curdir):  # noqa: PTH208 - a Path for each takes ten times as long
                parts = re.fullmatch(r"(.+?)-([^-]+)(-py[\d.]+)?\.(dist|egg)-info", entry)
                if parts is not None:
                    found.setdefault(parts[1].replace("_", "-").lower(), parts[2])
    return [(f"version of {name}", version) for name, version in sorted(found.items()) if name not in _PACKAGES]


def torch_settings() -> list[tuple[str, str]]:
    """Return torch's settings that decide whether a run can be repeated, and how fast it is."""
    return [
        ("deterministic algorithms", _on_off(torch.are_deterministic_algorithms_enabled())),
        ("cudnn.benchmark", _on_off(torch.backends.cudnn.benchmark)),
        ("cudnn.deterministic", _on_off(torch.backends.cudnn.deterministic)),
        ("float32 matmul precision", torch.get_float32_matmul_precision()),
        ("cudnn.allow_tf32", _on_off(torch.backends.cudnn.allow_tf32)),
        ("anomaly detection", _on_off(torch.is_anomaly_enabled())),
        ("default dtype", str(torch.get_default_dtype())),
        ("threads of torch", str(torch.get_num_threads())),
    ]


def _on_off(is_on: bool) -> str:
    return "on" if is_on else "off"
