"""All callbacks of the collection in one Trainer: what they are given, and what they train."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import nn

from lightning_tricks.seeding import isolated_rng
from tests.contract.cases import CASES
from tests.small import EvaluatedNet

STOPPED = 75  # what AutoResume exits with
NORM_TYPE = CASES["GradientClipping"].arguments["norm_type"]

# What a callback is given here and not in its case, so that each acts on the same net in the same run
_BESIDE_OTHERS: dict[str, dict[str, Any]] = {
    "AutoResume": {"signals": ["SIGTERM"], "every_n_train_steps": None, "exit_code": STOPPED},
    "CheckpointRemapping": {"path": "pretrained.pt"},
    "MetricsMonitor": {"stages": ["train", "val"]},
    "RunFingerprint": {"every_n_train_steps": 1},
}


def changers(names: Sequence[str]) -> list[str]:
    """Those that change what training does: CheckpointRemapping as well, as it is given a file here."""
    return [name for name in names if CASES[name].kind != "observer" or name == "CheckpointRemapping"]


def make_all(names: Sequence[str], folder: Path, *, idle: bool = False) -> dict[str, Callback]:
    """The callbacks as their cases make them, with files of their own in `folder`."""
    made = {}
    for name in names:
        case = CASES[name]
        given = {**case.arguments, **(case.when_idle if idle else {}), **_BESIDE_OTHERS.get(name, {})}
        paths = [key for key in case.callback.path_arguments if isinstance(given.get(key), str)]
        made[name] = case.callback(**{**given, **{key: str(folder / given[key]) for key in paths}})
    return made


def write_pretrained(folder: Path) -> None:
    """Write the file that CheckpointRemapping loads: the weights of another net, under another name."""
    with isolated_rng(seed=7):
        weights = TogetherNet().state_dict()
    torch.save({f"module.model{name[3:]}": value for name, value in weights.items()}, folder / "pretrained.pt")


class TogetherNet(EvaluatedNet):
    """The contract's net with attention, trained by one optimizer or, by hand, by two, and validated."""

    def __init__(self, *, manual: bool = False, dropout: float = 0.0, accumulation: int = 1) -> None:
        super().__init__("manual" if manual else "adamw", dropout, attention=True)
        self.accumulation = accumulation  # by hand

    def training_step(self, batch, batch_idx):
        if self.automatic_optimization:
            return super().training_step(batch, batch_idx)
        scores = self.net(batch[0])
        loss = nn.functional.cross_entropy(scores, batch[1])
        self.manual_backward(loss / self.accumulation)
        if (batch_idx + 1) % self.accumulation == 0 or self.trainer.is_last_batch:
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()
        return {"loss": loss.detach(), "preds": scores.detach(), "target": batch[1]}

    def validation_step(self, batch, batch_idx):
        scores = self.net(batch[0])
        self.log("loss", nn.functional.cross_entropy(scores, batch[1]), sync_dist=True)
        return {"preds": scores, "target": batch[1]}

    def configure_optimizers(self):
        if self.automatic_optimization:
            return torch.optim.AdamW(self.parameters(), lr=0.01)
        parts: tuple[list[Any], list[Any]] = [], []
        for name, parameter in self.named_parameters():
            parts[name.endswith("bias")].append(parameter)
        return torch.optim.SGD(parts[0], lr=0.1, momentum=0.9), torch.optim.AdamW(parts[1], lr=0.01)
