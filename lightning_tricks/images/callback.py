"""The callback `ImageLogger`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_tricks._callback import StepsCallback, is_reported
from lightning_tricks._lightning_compat.flavor import (
    LightningModule,
    MisconfigurationException,
    Trainer,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_tricks._lightning_compat.own_samples import OwnSamples
from lightning_tricks._shared.checks import check_choices, check_count, check_output_transform
from lightning_tricks._shared.pictures import can_log_images, log_image
from lightning_tricks._shared.report_parts import Pictures
from lightning_tricks._shared.tensors import gather_objects, tensors_in
from lightning_tricks._shared.text import list_names
from lightning_tricks.images import functional

_STAGES = ("train", "val", "test")
_MOST_REPORTED = 24
_GAP = 2  # white columns between an image and its masks


class ImageLogger(StepsCallback):
    """Log a grid of inputs with predicted and true labels, the most confident mistakes first.

    The steps return `{"preds": ..., "target": ...}`, as for `MetricsMonitor`; the images are the batch's first tensor
    of shape (N, C, H, W), either uint8 or floats that are in [0, 1] after denormalization. If batches differ in image
    size, images of the last size are shown. The captions of mistakes are red.

    If `target` is a mask (N, H, W) of classes, and `preds` are masks or scores (N, C, H, W), each image is shown three
    times: plain, with the predicted classes and with the true classes drawn over it. Images with the largest share of
    wrong pixels come first.

    If both are lists with a dict for each image, of `boxes` (M, 4), `labels` (M,) and, for predictions, `scores` (M,),
    as `detection_metrics` takes them, predicted boxes with a score of at least 0.5 are drawn in orange and true boxes
    in blue. Boxes are left, top, right and bottom in pixels, and images may be a list of any sizes. Images with the
    largest share of wrong boxes come first.

    Each rank keeps at most `n` images at a time, and no samples that a DistributedSampler repeats. Only the first batch
    is read from the device before the end of the epoch. TensorBoard, W&B, MLflow and Comet get the grid as
    `<stage>/images`; a CSVLogger gets a PNG file in its folder. `RunReport` shows the images of the last epoch. Without
    a `RunReport` and such a logger, the callback does nothing. It needs the extra `reports`.

    Args:
        n: The number of images to show.
        every_n_epochs: The number of epochs of a fit from one grid to the next. A test or a validation outside a fit
            always logs a grid.
        class_names: The names of the classes; None shows their indices. With masks, tiles in the colors of the
            visible classes, with these names, follow the images.
        mean: The mean of each channel that was subtracted from the images.
        std: The standard deviation of each channel by which the images were divided.
        shape: The shape (C, H, W) of one image, if the batch has the pixels in another shape.
        stages: The stages to log: "train", "val" and "test".
        output_transform: A function of a step's outputs, the batch and the stage that returns a dict of `images`,
            `preds` and `target`, for modules whose steps return something else.
        ignore_index: A class of masks, such as 255, that is not drawn; pixels with this true class do not count.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is out of range, or one of `mean` and `std` is missing.
        MisconfigurationException: In the first batch, if it has no images, or images that cannot be shown. If a step
            returns neither predictions nor targets, the batch is skipped with a warning.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> images = ImageLogger(n=9, mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
        >>> trainer = Trainer(callbacks=[images], accelerator="cpu", logger=False)
    """

    def __init__(
        self,
        n: int = 16,
        every_n_epochs: int = 1,
        *,
        class_names: Sequence[str] | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        shape: Sequence[int] | None = None,
        stages: Sequence[str] = ("val", "test"),
        output_transform: Callable[[Any, Any, str], Mapping[str, Any]] | None = None,
        ignore_index: int | None = None,
    ) -> None:
        self.n = check_count("n", n)
        self.every_n_epochs = check_count("every_n_epochs", every_n_epochs)
        self.class_names = class_names
        self.mean = mean
        self.std = std
        self.shape = shape
        self.stages = check_choices("stages", stages, _STAGES)
        self.output_transform = output_transform
        self.ignore_index = ignore_index
        if (mean is None) != (std is None):
            raise ValueError(f"mean and std belong together, got mean={mean!r} and std={std!r}.")
        if shape is not None and (len(shape) != 3 or any(check_count("shape", side) < 1 for side in shape)):
            raise ValueError(f"shape must be (channels, height, width), got {shape!r}.")
        check_output_transform(output_transform)
        self._active = self._is_reported = False
        self._reset()

    def _reset(self) -> None:
        self._kept: dict[str, functional.RankedSamples] = {}
        # epoch, captions and images of each stage, and how many are mistakes; None where an error ranks them
        self._reported: dict[str, tuple[int, list[str], Tensor, int | None]] = {}
        self._prediction_kinds: dict[str, dict[str, bool]] = {}
        self._warned: set[str] = set()
        self._own_samples = OwnSamples(None)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find out whether a logger or a report takes images."""
        super().setup(trainer, pl_module, stage)
        self._reset()
        self._is_reported = is_reported(trainer)
        self._active = self.has_image_logger(trainer) or self._is_reported

    def on_step_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        stage: str,
        dataloader_idx: int,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Keep the samples that rank highest; in sanity checking, only check the batch."""
        if not self._is_due(trainer, stage):
            return
        inputs = self._read_outputs(outputs, batch, stage)
        if inputs is None:
            return
        if stage not in self._prediction_kinds:
            self._prediction_kinds[stage] = self._kind(**inputs, stage=stage)
        if self._is_sanity_checking:
            return
        own, _ = self._own_samples.take(trainer, stage, dataloader_idx, batch_idx, inputs)
        with torch.inference_mode(False), torch.no_grad():
            kind: Any = {**self._prediction_kinds[stage], "ignore_index": self.ignore_index}
            samples = functional.rank_predictions(**own, **kind).top(self.n)
            self._kept[stage] = functional.concat_samples([*self._samples_of(stage), samples]).top(self.n)

    def on_stage_end(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Log the images of an epoch."""
        if not self._is_due(trainer, stage):
            return
        own = [samples.cpu() for samples in self._samples_of(stage)]
        self._kept.pop(stage, None)
        ranks = [samples for rank in gather_objects(own) for samples in rank]
        if not trainer.is_global_zero or not ranks:
            return
        samples = functional.concat_samples(ranks).top(self.n).cpu()
        shown = self._shown(samples.images)
        shown = shown.clamp(0, 1) if shown.is_floating_point() else shown
        values = self._prediction_kinds[stage]["values"]
        captions = self._captions(samples, values)
        legend, names, has_share = list[Tensor](), list[str](), samples.target.ndim == 3
        has_classes = not (values or has_share or samples.has_boxes)
        mistakes = (samples.predicted != samples.target).tolist() if has_classes else [False] * len(captions)
        if samples.has_boxes:
            for part, color, wide in ((samples.target, functional.BLUE, 2), (samples.predicted, functional.ORANGE, 1)):
                boxes, width = [rows[rows[:, 0] > 0, 2:] for rows in part], wide * (1 + max(shown.shape[-2:]) // 160)
                shown = functional.overlay_boxes(shown, boxes, color=color, width=width)
        elif has_share:
            seen = torch.cat([samples.predicted.flatten(), samples.target.flatten()]).unique().tolist()
            seen = [label for label in seen if self.class_names and label >= 0 and label != self.ignore_index]
            names = [self._name(label) for label in seen]
            legend = list(functional.class_colors(torch.tensor(seen, dtype=torch.int64, device="cpu"))[..., None, None])
            masks = (torch.full_like(samples.target, -1), samples.predicted, samples.target)
            drawn = [functional.overlay_masks(shown, mask, ignore_index=self.ignore_index) for mask in masks]
            shown = torch.cat([pad(part, (0, _GAP), value=1.0) for part in drawn], -1)[..., :-_GAP]
        if self._is_reported:
            few = slice(_MOST_REPORTED)
            count = None if has_share or values else sum(mistakes[few])
            self._reported[stage] = trainer.current_epoch, captions[few], functional.shrink(shown[few]), count
        if not can_log_images(trainer.loggers):
            return
        try:
            marks = [*mistakes, *(False for _ in names)]
            tiles = [*shown, *legend] if names else shown
            grid = functional.image_grid(tiles, captions=[*captions, *names], mistakes=marks)
        except ModuleNotFoundError as error:
            rank_zero_info(f"ImageLogger logs no images: {error}")
            return
        log_image(trainer.loggers, f"{stage}/images", np.asarray(grid), trainer.global_step)

    def epoch_counts(self) -> dict[str, Any]:
        """Return the samples of training that are kept."""
        return {stage: dict(vars(samples)) for stage, samples in self._kept.items() if stage == "train"}

    def load_epoch_counts(self, counts: dict[str, Any], device: torch.device) -> None:
        """Go back to what `epoch_counts` returned."""
        self._kept.pop("train", None)
        self._kept |= {stage: functional.RankedSamples(**samples) for stage, samples in counts.items()}

    def report_parts(self, trainer: Trainer) -> list[Pictures]:
        """Return the mistakes, or of values the largest errors, of the last epoch of each stage."""
        parts = []
        for stage, (epoch, captions, images, mistakes) in self._reported.items():
            count = len(captions) if mistakes is None else mistakes
            when = "" if stage == "test" else f"Epoch {epoch}. "
            some = "" if count == len(captions) else f"There are no {'more' if count else 'mistakes'}."
            title = f"{'Largest errors' if mistakes is None else 'Most confident mistakes'} ({stage})"
            shown = {"captions": captions[:count], "pictures": functional.png_texts(images[:count])}
            marks = [True] * (mistakes or 0)
            parts.append(Pictures(title=title, note=(when + some).strip(), mistakes=marks, **shown))
        return parts

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Drop the images."""
        self._reset()
        super().teardown(trainer, pl_module, stage)

    def _is_due(self, trainer: Trainer, stage: str) -> bool:
        if not self._active or stage not in self.stages:
            return False
        return self._function != "fit" or (trainer.current_epoch + 1) % self.every_n_epochs == 0

    def _samples_of(self, stage: str) -> list[functional.RankedSamples]:
        return [self._kept[stage]] if stage in self._kept else []

    def _read_outputs(self, outputs: Any, batch: Any, stage: str) -> dict[str, Any] | None:
        """Return images, predictions and targets of a batch; None where a step returned neither of the last two."""
        returned = outputs if self.output_transform is None else self.output_transform(outputs, batch, stage)
        names = set(returned) if isinstance(returned, Mapping) else set()
        if not {"preds", "target"} <= names:
            there = ", ".join(map(str, returned)) if isinstance(returned, Mapping) else f"a {type(returned).__name__}"
            message = (
                f"ImageLogger needs preds and target of each step of {stage}, but got "
                f"{'nothing' if returned is None else there or 'nothing'}: return a dict with them, give "
                "output_transform=(outputs, batch, stage) -> dict"
            )
            if names & {"preds", "target"}:
                raise MisconfigurationException(f"{message}.")
            if stage not in self._warned:
                self._warned.add(stage)
                rank_zero_warn(f"{message}, or leave {stage!r} out of stages. Until then, such batches are not shown.")
            return None
        boxes = all(map(_are_boxes, (returned["preds"], returned["target"])))
        for name in ("preds", "target"):
            if not boxes and not isinstance(returned[name], Tensor):
                raise MisconfigurationException(
                    f"ImageLogger shows classes, values, masks and boxes, and {name} of {stage} is a "
                    f"{type(returned[name]).__name__}: return a tensor, or dicts with boxes and labels, or give "
                    "output_transform=(outputs, batch, stage) -> dict."
                )
        there = batch if returned.get("images") is None else returned["images"]
        images = self._images_in(there, len(returned["preds"]) if boxes else 0)
        if self.shape is not None:
            images = images.reshape(-1, *self.shape)
        read: Any = functional.stack_boxes if boxes else _without_column
        try:
            preds, target = (read(returned[name]) for name in ("preds", "target"))
        except (TypeError, RuntimeError) as error:
            if not boxes:
                raise
            raise MisconfigurationException(
                f"ImageLogger needs tensors for each image of {stage}: boxes (M, 4), labels (M,) and, for predictions, "
                f"scores (M,). Return these, or give output_transform=(outputs, batch, stage) -> dict. ({error})"
            ) from error
        return {"images": images.detach(), "preds": preds.detach(), "target": target.detach(), "boxes": boxes}

    def _images_in(self, batch: Any, count: int) -> Tensor:
        """Return the images of a batch; with boxes, its first tensors, padded, if these are as many single images."""
        tensors = list(tensors_in(batch))
        if self.shape is not None and tensors:
            return tensors[0]
        for tensor in tensors:
            if tensor.ndim == 4 and tensor.shape[1] in (1, 2, 3, 4):
                return tensor
        if count and sum(one.ndim == 3 and one.shape[0] in (1, 2, 3, 4) for one in tensors[:count]) == count:
            return functional.cat_padded([one[None] for one in tensors[:count]])
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise MisconfigurationException(
            f"ImageLogger found no images of shape (N, C, H, W) in the batch, which holds {shapes or 'no tensors'}: "
            "give shape=(C, H, W), or output_transform=(outputs, batch, stage) -> dict with images."
        )

    def _kind(self, images: Tensor, preds: Tensor, target: Tensor, boxes: bool, stage: str) -> dict[str, bool]:
        """Check that a first batch can be shown; return whether its predictions are logits, and its targets values."""
        rows = {"images": len(images), "preds": len(preds), "target": len(target)}
        classes = (target == 0) | (target == 1) | (target == (0 if self.ignore_index is None else self.ignore_index))
        values = target.is_floating_point() and not boxes and not bool(classes.all().item())
        dimensions = preds.ndim - target.ndim if target.ndim == 1 or (target.ndim == 3 and not values) else None
        sizes = {part.shape[-2:] for part in (preds, target) if target.ndim == 3 and not boxes}
        if len(set(rows.values())) > 1 or dimensions not in (0, 1) or len(sizes) > 1:
            shapes = f"images {tuple(images.shape)}, preds {tuple(preds.shape)}, target {tuple(target.shape)}"
            raise MisconfigurationException(
                "ImageLogger needs one prediction for each image: scores of shape (N, C), or classes or values of "
                f"shape (N,); or masks, scores (N, C, H, W) or classes (N, H, W) for classes (N, H, W), got {shapes}."
            )
        try:
            functional.to_tensor(self._shown(images))
        except (TypeError, ValueError) as error:
            raise MisconfigurationException(f"ImageLogger cannot show the images of {stage}: {error}") from error
        logits = False
        if preds.is_floating_point() and not values and not boxes:
            outside = (preds < 0) | (preds > 1)
            sums = (preds.sum(1) - 1).abs() > 1e-2 if preds.ndim == target.ndim + 1 else outside
            logits = bool((outside.any() | sums.any()).item())
        return {"logits": logits, "values": values}

    def _shown(self, images: Tensor) -> Tensor:
        if self.mean is None or self.std is None:
            return images
        return functional.denormalize(images.float(), self.mean, self.std)

    def _captions(self, samples: functional.RankedSamples, values: bool) -> list[str]:
        if samples.has_boxes:
            pairs = zip(samples.predicted.tolist(), samples.target.tolist(), strict=True)
            named = [(self._box_names(boxes, " at {:.0%}"), self._box_names(true, "")) for boxes, true in pairs]
            return [f"{predicted} (orange), is {true} (blue)" for predicted, true in named]
        if samples.target.ndim == 3:
            return [f"{share:.1%} of the pixels are wrong" for share in samples.confidence.tolist()]
        rows = zip(samples.predicted.tolist(), samples.target.tolist(), samples.confidence.tolist(), strict=True)
        if values:
            return [f"{predicted:.3g}, is {target:.3g}" for predicted, target, _ in rows]
        return [
            f"{self._name(predicted)} at {confidence:.0%}, is {self._name(target)}"
            if predicted != target
            else f"{self._name(predicted)} at {confidence:.0%}"
            for predicted, target, confidence in rows
        ]

    def _box_names(self, boxes: list[list[float]], score_format: str) -> str:
        return list_names([self._name(label) + score_format.format(score) for score, label, *_ in boxes if score > 0])

    def _name(self, label: float) -> str:
        number = int(label)
        names = self.class_names
        return names[number] if names is not None and 0 <= number < len(names) else str(number)


def _are_boxes(value: Any) -> bool:
    """Whether a value has a dict for each image, as torchmetrics has boxes."""
    is_list = isinstance(value, list | tuple) and len(value) > 0
    return is_list and all(isinstance(one, Mapping) and {"boxes", "labels"} <= one.keys() for one in value)


def _without_column(values: Tensor) -> Tensor:
    """Return what a net with one output returns, of shape (N, 1), in the shape (N,); masks likewise."""
    return values.squeeze(1) if values.ndim in (2, 4) and values.shape[1] == 1 else values
