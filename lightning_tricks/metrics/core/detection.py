"""Average precision and recall of detected objects, as COCO defines them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchmetrics.detection import MeanAveragePrecision

_NUMBERS = ("detection_box", "detection_scores", "groundtruth_box")  # states


class DetectionPrecision(MeanAveragePrecision):
    """torchmetrics' MeanAveragePrecision for a known number of classes, for each of them, and in mixed precision.

    What is undefined, as no object of the class or size is there, is NaN and not -1. The value depends on the images
    alone, not on their order: COCO ranks equal scores of several images by it, and ranks gather in another one.
    Thresholds are in double precision, as COCO's: torchmetrics' own, in single precision, miss recalls such as 0.7.

    Args:
        num_classes: C, the number of classes.
        **arguments: Those of MeanAveragePrecision.

    Attributes:
        names_of_values: The keys of the value, which are names by themselves, without that of the metric.
    """

    names_of_values = (
        *("map", "map_50", "map_75", "mar_1", "mar_10", "mar_100"),
        *(f"{kind}_{size}" for kind in ("map", "mar") for size in ("small", "medium", "large")),
    )

    def __init__(self, num_classes: int, **arguments: Any) -> None:
        iou, recall = np.linspace(0.5, 0.95, 10).tolist(), np.linspace(0, 1, 101).tolist()
        super().__init__(class_metrics=True, iou_thresholds=iou, rec_thresholds=recall, **arguments)
        self.num_classes = num_classes

    def check_inputs(self, inputs: Mapping[str, Any]) -> None:
        """Raise an error for a first batch that the metric would misunderstand; nothing is counted.

        Raises:
            ValueError: If a key is missing, a shape or a type does not fit, a label is no class, or a number is NaN.
        """
        preds, target = inputs["preds"], inputs["target"]
        if "segm" in self.iou_type:
            _check_masks(preds, target)
        trial: Any = self.clone()
        trial.update(preds, target)
        self._check_labels([item["labels"] for items in (preds, target) for item in items])
        if broken := trial.num_invalid():
            remedy = "look for NaN in the inputs, and for an overflow in fp16"
            raise ValueError(f"{broken} numbers of boxes and scores are NaN or infinite: {remedy}.")
        boxes = [item["boxes"] for item in target if len(item["boxes"])] if "bbox" in self.iou_type else []
        if self.box_format == "xyxy" and any((box[:, 2:] < box[:, :2]).any() for box in boxes):
            raise ValueError(
                'Boxes of the target end before they begin: give the preset box_format="xywh" or "cxcywh".'
            )

    def update(self, preds: Sequence[Mapping[str, Tensor]], target: Sequence[Mapping[str, Tensor]]) -> None:
        """Add the objects of images, one dict for each, with floats in single precision."""
        super().update(*(_in_single_precision(items) for items in (preds, target)))
        if "segm" in self.iou_type:  # or what is found in an image without objects would not count as false
            self.groundtruth_box += [torch.zeros(len(item["labels"]), 4, device="cpu") for item in target]

    def num_invalid(self) -> int:
        """Return how many numbers are NaN or infinite: to pycocotools, a box of them is like any other."""
        parts = [part.reshape(-1) for name in _NUMBERS for part in getattr(self, name, ())]
        return int((~torch.cat(parts).isfinite()).sum()) if parts else 0

    def compute(self) -> dict[str, Tensor]:
        """Return the values by name, those of classes with the ending `_per_class` and of shape (C,)."""
        self._check_labels([*self.detection_labels, *self.groundtruth_labels])
        self._sort_images()
        values: dict[str, Tensor] = super().compute()
        classes = values.pop("classes").reshape(-1).long()
        for name, value in values.items():
            defined = torch.where(value < 0, torch.nan, value.float())
            if name.endswith("_per_class"):
                of_known = defined.reshape(-1)[: len(classes)]
                defined = torch.full((self.num_classes,), torch.nan, device="cpu").index_copy(
                    0, classes.cpu(), of_known.cpu()
                )
            values[name] = defined
        return values

    def _sort_images(self) -> None:
        parts = {name: part for name in self._defaults if (part := getattr(self, name))}
        plain = [[value.tolist() if isinstance(value, Tensor) else value for value in part] for part in parts.values()]
        order = sorted(range(len(self.detection_scores)), key=list(zip(*plain, strict=True)).__getitem__)
        for name, part in parts.items():
            setattr(self, name, [part[image] for image in order])

    def _check_labels(self, labels: list[Tensor]) -> None:
        found = torch.cat(labels).unique().tolist() if labels else []
        if wrong := [label for label in found if not 0 <= label < self.num_classes]:
            raise ValueError(
                f"labels must be 0 to {self.num_classes - 1}, got {', '.join(map(str, wrong[:5]))}: give the preset a "
                "larger num_classes, which counts the background if it has a label."
            )


def _check_masks(preds: Any, target: Any) -> None:
    for ours, theirs in zip(preds, target, strict=False):
        masks = [item["masks"] for item in (ours, theirs) if isinstance(item, Mapping) and "masks" in item]
        for mask in masks:
            if mask.ndim != 3 or mask.dtype not in (torch.bool, torch.uint8) or mask.shape[1:] != masks[0].shape[1:]:
                found = f"{str(mask.dtype).removeprefix('torch.')} {tuple(mask.shape)}"
                raise ValueError(
                    f"masks must be bool or uint8 of shape (M, H, W), of one size in an image, got {found}: for the "
                    "masks of torchvision's models, give (masks > 0.5).squeeze(1)."
                )


def _in_single_precision(items: Any) -> Any:
    if not isinstance(items, list | tuple) or not all(isinstance(item, Mapping) for item in items):
        return items  # which torchmetrics refuses
    return [{name: value.float() if _is_half(value) else value for name, value in item.items()} for item in items]


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
