"""What a bug report needs: torch's own report, and the versions of this package and of those that it works with."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import torch
from torch.utils.collect_env import get_env_info, pretty_str

# Those that a report names in any case, and those that it names if they are there
PACKAGES = ("lightning_tricks", "lightning", "torchmetrics", "torchensemble", "thop", "numpy", "nvidia-ml-py")
MORE_PACKAGES = (
    "pytorch-lightning",
    "torchvision",
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
    """Return versions of packages by name as "packages", and what torch reports about all else as "collect_env".

    torch asks programs such as pip, nvidia-smi and lscpu, which takes seconds, and initializes CUDA.
    """
    try:
        cudnn = torch.backends.cudnn.version()
        found = get_env_info()._replace(cudnn_version=cudnn and str(cudnn))  # instead of the paths of its files
        text = pretty_str(found)
    except Exception as error:  # in some versions of torch, where pip is not installed
        text = f"torch.utils.collect_env fails: {error!r}"
    return {"packages": _versions(), "collect_env": text}


def environment_text(report: dict[str, Any]) -> str:
    """Return a report of `environment_report` as lines that need no markup, for a code block.

    Examples:
        >>> print(environment_text({"packages": {"numpy": "2.4.6", "thop": None}, "collect_env": "OS: Debian"}))
        numpy: 2.4.6
        thop: not installed
        <BLANKLINE>
        OS: Debian
        <BLANKLINE>
    """
    versions = "".join(f"{name}: {version or 'not installed'}\n" for name, version in report["packages"].items())
    return f"{versions}\n{report['collect_env']}\n"


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in (*PACKAGES, *MORE_PACKAGES):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
