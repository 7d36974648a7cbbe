"""What the demo shows of checkpoint remapping."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_tricks.checkpoint_remapping.core.files.reading import read_checkpoint
from lightning_tricks.checkpoint_remapping.core.files.saving import save_weights
from lightning_tricks.checkpoint_remapping.core.matching.alignment_search import align


def specs(seed: int, out: Path) -> dict[str, Any]:
    """Return the fields of `Tricks` that this room fills in the demo."""
    return {"checkpoint_remapping": {"clean_on_save": True}}


def rows(trainer: Trainer, history: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Say what comes back of the trained weights, saved as people find them."""
    module = trainer.lightning_module
    wrapped = torch.nn.DataParallel(module, device_ids=[]).state_dict()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.safetensors"
        save_weights(wrapped, path, clean=False)
        found = align(module, read_checkpoint(path))
    return {"from DataParallel": f"{found.loaded} of {found.total} tensors found in a .safetensors, by themselves"}
