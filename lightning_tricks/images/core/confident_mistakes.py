"""The order in which samples are shown: the most confident mistakes first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class RankedSamples:
    """Samples with the score by which they are ranked.

    Attributes:
        images: The images, of shape (N, C, H, W).
        score: The rank score of each sample, of shape (N,); samples with a high score are shown first.
        predicted: The predicted classes or values, of shape (N,).
        target: The true classes or values, of shape (N,).
        confidence: The confidence of each prediction, of shape (N,); for values, the absolute error.
    """

    images: Tensor
    score: Tensor
    predicted: Tensor
    target: Tensor
    confidence: Tensor

    def top(self, count: int) -> RankedSamples:
        """Return the `count` samples with the highest scores, in this order."""
        chosen = self.score.topk(min(count, len(self.score))).indices
        return self._each(lambda part: part[chosen])

    def cpu(self) -> RankedSamples:
        """Return them on the CPU."""
        return self._each(lambda part: part.cpu())

    def _each(self, function: Callable[[Tensor], Tensor]) -> RankedSamples:
        return replace(self, **{name: function(part) for name, part in vars(self).items()})


def concat_samples(parts: Sequence[RankedSamples]) -> RankedSamples:
    """Concatenate the samples of all parts whose images have the same shape as those of the last part."""
    alike = [part for part in parts if part.images.shape[1:] == parts[-1].images.shape[1:]]
    return RankedSamples(**{name: torch.cat([vars(part)[name] for part in alike]) for name in vars(parts[0])})


def rank_predictions(
    images: Tensor, preds: Tensor, target: Tensor, *, logits: bool = False, values: bool = False
) -> RankedSamples:
    """Score predictions by how worth showing they are, without a read from the device.

    Mistakes come first, in order of decreasing confidence, then correct predictions in order of increasing confidence.
    For values, the largest errors come first.

    Args:
        images: The images, of shape (N, C, H, W).
        preds: Scores of shape (N, C), probabilities of 1 or classes of shape (N,), or values where `target` has values.
        target: Classes or values of shape (N,).
        logits: Whether the scores are logits.
        values: Whether values are predicted, not classes.
    """
    if values:
        error = (preds - target).abs().float()
        return RankedSamples(images, error, preds, target, error)
    if preds.ndim == 2:
        confidence, predicted = (preds.float().softmax(1) if logits else preds.float()).max(1)
    elif preds.is_floating_point():
        one = preds.float().sigmoid() if logits else preds.float()
        predicted = (one > 0.5).long()
        confidence = torch.where(predicted == 1, one, 1 - one)
    else:
        predicted, confidence = preds, torch.ones_like(preds, dtype=torch.float32)
    wrong = predicted != target
    return RankedSamples(images, torch.where(wrong, 1 + confidence, -confidence), predicted, target, confidence)
