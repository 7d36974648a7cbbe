"""The fine-tuning of the demo."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_tricks.finetuning.core.lora_injection import add_lora, merge
from lightning_tricks.finetuning.core.lora_layers import LoRASettings


def specs(seed: int, out: Path) -> dict[str, Any]:
    """Return the fields of `Tricks` that this room fills in the demo: none, as its model is trained from scratch."""
    return {}


def rows(trainer: Trainer, history: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Prepare a copy of the trained net for fine-tuning, and say what would be trained and what merging changes."""
    net: Any = copy.deepcopy(trainer.lightning_module.net)
    net.cpu().eval()
    report = add_lora(net, LoRASettings(rank=4))
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name.endswith(".B"):
                parameter.fill_(0.01)
        images = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        before, after = net(images), merge(net)(images)
    share = f"{report.trainable:,} of {report.total:,} values ({report.trainable / report.total:.1%})"
    difference = (before - after).abs().max()
    return {"LoRA of rank 4": f"would train {share}; merged into the weights, outputs differ by {difference:.6f}"}
