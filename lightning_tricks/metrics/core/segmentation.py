"""How well predicted and true regions of each class overlap."""

from __future__ import annotations

from typing import Literal

import torch
import torchmetrics.classification as tm
from torch import Tensor

from lightning_tricks._shared.tensors import to_double


class RegionOverlap(tm.MulticlassConfusionMatrix):
    """Intersection over union, Dice coefficient, or recall of each class, over all pixels of the data set.

    A class that occurs neither in the targets nor in the predictions, and the one that is ignored, have no value.

    Args:
        num_classes: C, the number of classes.
        measure: Which of them.
        average: `"macro"` for the mean over the classes that have a value; `"frequency"` for one that is weighted with
            their pixels; `"none"` for a value of each class, NaN where there is none.
        ignore_index: A class of the target whose pixels do not count.
    """

    def __init__(
        self,
        num_classes: int,
        measure: Literal["iou", "dice", "recall"],
        average: Literal["macro", "frequency", "none"] = "macro",
        ignore_index: int | None = None,
    ) -> None:
        super().__init__(num_classes=num_classes, ignore_index=ignore_index)
        self.measure, self.average = measure, average

    def compute(self) -> Tensor:
        """Return the mean, or a tensor of shape (C,)."""
        matrix = to_double(self.confmat)
        both, predicted, target = matrix.diagonal(), matrix.sum(0), matrix.sum(1)
        whole = {"iou": predicted + target - both, "dice": (predicted + target) / 2, "recall": target}[self.measure]
        is_ignored = torch.arange(len(both), device=both.device) == (
            -1 if self.ignore_index is None else self.ignore_index
        )
        values = torch.where((whole > 0) & ~is_ignored, both / whole, torch.nan).float()
        if self.average == "frequency":
            return (values.nan_to_num() * target).sum().float() / target.sum().float()
        return values if self.average == "none" else values.nanmean()
