"""The ensemble of the demo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_tricks._lightning_compat.trainer import datamodule_of
from lightning_tricks.ensembles.voting import VotingClassifier

_MEMBERS = 5


def specs(seed: int, out: Path) -> dict[str, Any]:
    """Return the fields of `Tricks` that this room fills in the demo: none."""
    return {}


def rows(trainer: Trainer, history: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Train five members like the demo's model, and say what they gain together."""
    model: Any = trainer.lightning_module
    data: Any = datamodule_of(trainer)
    ensemble = VotingClassifier(
        model.net, _MEMBERS, optimizer=model.tricks.optimizer, lr_scheduler=model.tricks.schedule, seed=0
    )
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary"), False)
    own = Trainer(max_epochs=trainer.max_epochs, accelerator="cpu", devices=1, enable_progress_bar=False, **quiet)
    data.setup("fit")
    own.fit(ensemble, data.train_dataloader(), data.val_dataloader())
    images, labels = (torch.cat(parts) for parts in zip(*data.test_dataloader(), strict=True))
    with torch.no_grad():
        singles = ensemble.eval().member_outputs(images).argmax(-1)
    mean, together = (
        (singles == labels).double().mean(),
        (ensemble.predict(images).argmax(-1) == labels).double().mean(),
    )
    noise = torch.rand(images.shape, generator=torch.Generator().manual_seed(0))
    unknown = ensemble.predict_uncertainty(noise).epistemic.mean()
    known = ensemble.predict_uncertainty(images).epistemic.mean()
    return {
        f"{_MEMBERS} members": f"test accuracy {together:.1%}; one alone {mean:.1%} on average",
        "disagreement": f"{unknown / known:.0f} times as large on noise as on digits",
    }
