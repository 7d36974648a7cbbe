"""Common mistakes of shapes and types: what the error of the first batch says names what to write instead."""

import re

import pytest
import torch
from torch import nn

from lightning_tricks import MetricsMonitor
from tests.metrics.tables import Trained, loader_of, trainer

_GENERATOR = torch.Generator().manual_seed(0)
SCORES, MAPS = torch.rand(8, 5, generator=_GENERATOR), torch.rand(8, 5, 4, 3, generator=_GENERATOR)
CLASSES, BITS = torch.arange(8) % 5, torch.arange(8) % 2
FIVE, BINARY = {"task": "multiclass", "num_classes": 5}, {"task": "binary"}
LABELS, REGRESSION = {"task": "multilabel", "num_labels": 5}, {"task": "regression"}
TWO, TRUST = {"task": "segmentation", "num_classes": 2}, {"task": "calibration", "num_classes": 2}
PIXELS = (MAPS[:, 0] > 0.5).long()


def _with(value):
    return torch.where(torch.arange(8) == 3, value, CLASSES)


# metrics, predictions, targets, and what to write instead: a function of both, or an option of the metrics
MISTAKES = {
    "soft": (FIVE, SCORES, SCORES.softmax(1), "target.argmax(dim=1)"),
    "one-hot": (FIVE, SCORES, nn.functional.one_hot(CLASSES, 5), "target.argmax(dim=1)"),
    "one-hot of maps": (FIVE, MAPS, MAPS, "target.argmax(dim=1)"),
    "one-hot, predicted classes": (FIVE, CLASSES, nn.functional.one_hot(CLASSES, 5), "target.argmax(dim=1)"),
    "a column": (FIVE, SCORES, CLASSES[:, None], "target.squeeze(1)"),
    "a channel": (FIVE, MAPS, MAPS.argmax(1, keepdim=True), "target.squeeze(1)"),
    "channels last": (FIVE, MAPS.movedim(1, -1), MAPS.argmax(1), "preds.movedim(-1, 1)"),
    "tokens": (FIVE, torch.rand(8, 6, 5), torch.zeros(8, 6, dtype=torch.long), "preds.movedim(-1, 1)"),
    "classes as floats": (FIVE, CLASSES.float(), CLASSES, "preds.long()"),
    "padding": (FIVE, SCORES, _with(-100), "ignore_index=-100"),
    "a void class": (FIVE, SCORES, _with(255), "ignore_index=255"),
    "from one": (FIVE, SCORES, CLASSES + 1, "target - 1"),
    "more classes": (FIVE, torch.rand(8, 7), CLASSES, "num_classes=7"),
    "fewer classes": (FIVE, SCORES[:, :3], CLASSES % 3, "num_classes=3"),
    "list": (FIVE, SCORES, CLASSES.tolist(), "torch.as_tensor(target)"),
    "array": (FIVE, SCORES.numpy(), CLASSES, "torch.as_tensor(preds)"),
    "a dict": (FIVE, {"out": MAPS, "aux": MAPS}, MAPS.argmax(1), "preds['out']"),
    "one logit": (TWO, MAPS[:, :1] - 0.5, PIXELS, "torch.cat([torch.zeros_like(preds), preds], dim=1)"),
    "one probability": (TWO, MAPS[:, 0], PIXELS, "torch.stack([1 - preds, preds], dim=1)"),
    "one calibrated": (TRUST, SCORES[:, :1], BITS, "torch.cat([1 - preds, preds], dim=1)"),
    "counts of members": ({"task": "ood"}, CLASSES, BITS, "preds.float()"),
    "unseen classes": ({"task": "ood"}, SCORES[:, 0], CLASSES, "(target > 0).long()"),
    "binary, a column": (BINARY, SCORES[:, :1], BITS, "preds.squeeze(-1)"),
    "binary, a column of targets": (BINARY, SCORES[:, 0], BITS[:, None], "target.squeeze(-1)"),
    "binary, two columns": (BINARY, SCORES[:, :2], BITS, "preds[..., 1]"),
    "binary, soft": (BINARY, SCORES[:, 0], SCORES[:, 1], "(target > 0.5).long()"),
    "binary, signs": (BINARY, SCORES[:, 0], BITS * 2 - 1, "(target + 1) // 2"),
    "binary, logits": (BINARY, SCORES[:, 0] * 9 - 4, BITS, "torch.sigmoid(logits)"),
    "labels, soft": (LABELS, SCORES, SCORES, "(target > 0.5).long()"),
    "labels, classes": (LABELS, SCORES, CLASSES, "torch.nn.functional.one_hot(target, 5)"),
    "regression, a column": (REGRESSION, SCORES[:, :1], SCORES[:, 0], "preds.squeeze(-1)"),
}


def _fit(metrics, preds, target):
    class Returns(Trained):
        def training_step(self, batch, batch_idx):
            return {"loss": (self.weight * 0).sum(), "preds": preds, "target": target}

    fitter = trainer(MetricsMonitor(metrics))
    fitter.fit(Returns(), loader_of(torch.zeros(8, 1), batch_size=8))
    return fitter.callback_metrics


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_remedy_is_named_and_works(mistake):
    metrics, preds, target, remedy = MISTAKES[mistake]
    with pytest.raises(ValueError, match=f"MetricsMonitor, first batch of train: .*{re.escape(remedy)}"):
        _fit(metrics, preds, target)
    if re.fullmatch(r"\w+=-?\d+", remedy):
        name, value = remedy.split("=")
        metrics = {**metrics, name: int(value)}
    else:
        known = {"torch": torch, "preds": preds, "target": target, "logits": preds}
        value = eval(remedy, known)
        preds, target = (preds, value) if "target" in remedy else (value, target)
    assert _fit(metrics, preds, target)
