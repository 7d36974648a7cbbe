"""Targets that are probabilities of the classes, as from mixup, label smoothing and distillation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_tricks._shared.calibration_scores import are_probabilities
from lightning_tricks._shared.tensors import to_double
from lightning_tricks.metrics.core.counts import not_ignored

_Value = Literal["cross_entropy", "brier", "expected_acc"]
SOFT_TARGET_VALUES: tuple[_Value, ...] = ("cross_entropy", "brier", "expected_acc")
SOFT_TARGET = "soft_target"  # the argument of metrics that compare with the probabilities, not with the likeliest class
_NO_CLASS = -(2**31)  # the class of targets that are no probabilities; a confusion matrix counts it as invalid


def is_soft(inputs: Mapping[str, Any]) -> bool:
    """Whether the target holds floats of the shape of the scores, (N, C, ...)."""
    preds, target = inputs.get("preds"), inputs.get("target")
    both = isinstance(preds, Tensor) and isinstance(target, Tensor)
    return both and target.is_floating_point() and target.ndim == preds.ndim > 1  # type: ignore[union-attr]


def split_soft_target(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs with the target as `soft_target`, and its likeliest class, the first of several, as `target`.

    A target that holds classes is both as it is.
    """
    if "target" not in inputs or SOFT_TARGET in inputs:
        return dict(inputs)
    target = inputs["target"]
    if not is_soft(inputs):
        return {**inputs, SOFT_TARGET: target}
    classes = target.argmax(1)
    return {**inputs, SOFT_TARGET: target, "target": torch.where(are_probabilities(target), classes, _NO_CLASS)}


class SoftTargetScore(Metric):
    """A mean over the samples of what compares probabilities with soft targets; 64-bit sums without host reads.

    Args:
        value: What to compute: `"cross_entropy"`, -sum t log p; `"brier"`, sum (p - t)^2; or `"expected_acc"`, the
            target's probability of the predicted class.
        from_logits: Whether scores are logits, not probabilities.
        ignore_index: A class whose rows do not count, where targets are classes.
    """

    full_state_update = False

    def __init__(self, value: _Value, from_logits: bool = True, ignore_index: int | None = None) -> None:
        super().__init__()
        self.value, self.from_logits, self.ignore_index = value, from_logits, ignore_index
        self.sums: Tensor
        self.add_state("sums", torch.zeros(len(SOFT_TARGET_VALUES) + 1), dist_reduce_fx="sum")

    def check_inputs(self, inputs: Mapping[str, Any]) -> None:
        """Raise an error for a first batch whose scores or targets are not what the metric takes them for.

        Raises:
            ValueError: If the predictions are no scores, or are probabilities in place of logits or the reverse; if
                soft targets have another shape than they, or do not sum up to 1.
        """
        preds, target = inputs["preds"], inputs[SOFT_TARGET]
        if not isinstance(preds, Tensor) or not isinstance(target, Tensor):
            return  # which other metrics refuse
        if not preds.is_floating_point() or preds.ndim < 2:
            raise ValueError("soft_targets=True needs scores of shape (N, C, ...): return them, without argmax.")
        if preds.isfinite().all() and self.from_logits == bool(are_probabilities(preds).all()):
            found, wanted = ("probabilities", "False") if self.from_logits else ("logits", "True")
            raise ValueError(f"the predictions look like {found}: give the preset from_logits={wanted}.")
        if not is_soft({"preds": preds, "target": target}):
            return
        if preds.shape != target.shape:
            shapes = f"{tuple(preds.shape)}, got {tuple(target.shape)}"
            raise ValueError(f"soft targets need the shape of the scores, {shapes}.")
        if not are_probabilities(target).all():
            sums = target.float().sum(1)
            raise ValueError(
                "soft targets must be probabilities that sum up to 1 over the classes, got sums from "
                f"{sums.min().item():.3g} to {sums.max().item():.3g}: divide them by target.sum(1, keepdim=True), or "
                "take softmax of a teacher's logits."
            )

    def update(self, preds: Tensor, soft_target: Tensor) -> None:
        """Add scores of shape (N, C, ...), and probabilities of the same shape or classes of shape (N, ...)."""
        scores = preds.float()
        log = scores.log_softmax(1) if self.from_logits else scores.log()
        probabilities = log.exp() if self.from_logits else scores
        if is_soft({"preds": preds, "target": soft_target}):
            target, counted = soft_target.float(), torch.ones_like(log[:, 0], dtype=torch.bool)
        else:
            classes, counted = soft_target.long(), not_ignored(soft_target, self.ignore_index)
            place = classes.clamp(0, preds.shape[1] - 1).unsqueeze(1)
            target = torch.zeros_like(log).scatter_(1, place, 1.0)
        terms = [
            -torch.where(target > 0, target * log, 0.0).sum(1),
            (probabilities - target).square().sum(1),
            target.gather(1, scores.max(1, keepdim=True).indices).squeeze(1),
            counted.float(),
        ]
        values = to_double(torch.where(counted, torch.stack(terms), 0.0))
        self.sums = self.sums + values.flatten(1).sum(1)

    def compute(self) -> Tensor:
        """Return the mean; NaN without samples."""
        return (self.sums[SOFT_TARGET_VALUES.index(self.value)] / self.sums[-1]).float()
