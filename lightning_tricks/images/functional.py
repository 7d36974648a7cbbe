"""Images for people: conversions between tensors, PIL images and arrays, denormalization, grids and small pictures.

Also the order in which samples are shown: the most confident mistakes first.
"""

from __future__ import annotations

import math
import struct
import zlib
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

from lightning_tricks._shared.checks import check_count
from lightning_tricks._shared.extras import import_extra

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

    ImageLike = Tensor | npt.NDArray[Any] | PILImage
else:
    PILImage = Any

_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}  # by channels
_TOLERANCE = 1e-3  # of [0, 1]: a quarter of a step of uint8
_CAPTION_HEIGHT = 14  # pixels of a grid
_LARGEST_SIDE = 160  # pixels of a small picture
ORANGE, BLUE = (0.835, 0.369, 0.0), (0.0, 0.447, 0.698)
_MOST_BOXES, _LEAST_SCORE, _LEAST_OVERLAP = 300, 0.5, 0.5  # of an image; intersection over union with the right box


def to_tensor(image: ImageLike | Sequence[ImageLike], dtype: torch.dtype = torch.float32) -> Tensor:
    """Turn images into a tensor that shares no memory with them.

    Args:
        image: A PIL image of any mode but "I" and "F"; an array (H, W), (H, W, C) or (N, H, W, C) with C of 1 to 4, of
            uint8, uint16, bool or floats in [0, 1], with any strides; a tensor, of which only the type changes; or a
            sequence of images of one size.
        dtype: A floating type, for values in [0, 1], or `torch.uint8`, for 0 to 255.

    Returns:
        A tensor (C, H, W), or (N, C, H, W) for a batch, on the CPU or on the tensor's device.

    Raises:
        TypeError: If the type is not supported.
        ValueError: If the shape, the mode or the range of values is not supported.

    Examples:
        >>> import numpy as np
        >>> to_tensor(np.full((4, 6, 3), 255, dtype=np.uint8)[::-1]).shape
        torch.Size([3, 4, 6])
    """
    if dtype is not torch.uint8 and not dtype.is_floating_point:
        raise TypeError(f"dtype must be torch.uint8 or a floating type, got {dtype}.")
    if isinstance(image, list | tuple):
        return torch.stack([to_tensor(part, dtype) for part in image])
    if isinstance(image, Tensor):
        tensor = _checked(image.detach(), "a tensor", "(C, H, W) or (N, C, H, W)", -3)
        return _scaled(tensor, dtype).contiguous().clone()
    array = image if isinstance(image, np.ndarray) else _array_of(image)
    array = array[..., None] if array.ndim == 2 else array
    array = array / np.float32(65535) if array.dtype == np.uint16 else np.array(array, order="C")
    tensor = _checked(torch.from_numpy(array), "an array", "(H, W), (H, W, C) or (N, H, W, C)", -1)
    return _scaled(tensor.movedim(-1, -3), dtype).contiguous()


def to_numpy(image: ImageLike | Sequence[ImageLike]) -> npt.NDArray[Any]:
    """Turn images into an array (H, W, C), or (N, H, W, C) for a batch: uint8 stays uint8, floats become float32.

    Args:
        image: Any value that `to_tensor` accepts.

    Raises:
        TypeError, ValueError: As for `to_tensor`.

    Examples:
        >>> import torch
        >>> to_numpy(torch.rand(3, 4, 6)).shape
        (4, 6, 3)
    """
    first = image[0] if isinstance(image, list | tuple) else image
    of_numpy = isinstance(first, np.ndarray) and first.dtype.kind == "f"
    floats = first.is_floating_point() if isinstance(first, Tensor) else of_numpy
    tensor = to_tensor(image, torch.float32 if floats else torch.uint8)
    return np.ascontiguousarray(tensor.cpu().movedim(-3, -1).numpy())


def to_pil(image: ImageLike) -> PILImage:
    """Turn one image into a PIL image: "L", "LA", "RGB" or "RGBA" for 1 to 4 channels.

    Floats are rounded, not truncated, so uint8 -> float -> PIL is exact.

    Args:
        image: Any single image that `to_tensor` accepts.

    Raises:
        TypeError, ValueError: As for `to_tensor`.
        ModuleNotFoundError: If Pillow is missing; the message names the extra.

    Examples:
        >>> import torch
        >>> to_pil(torch.zeros(1, 4, 6)).size
        (6, 4)
    """
    Image = _import_pillow()  # noqa: N806
    if isinstance(image, Image.Image):
        return cast(PILImage, image.copy())
    tensor = to_tensor(image, torch.uint8)
    if tensor.ndim == 4:
        raise ValueError(
            f"to_pil takes one image, got {len(tensor)} of them: to_pil(images[0]), or image_grid(images)."
        )
    array = tensor.cpu().movedim(0, -1).numpy()
    array = np.ascontiguousarray(array.squeeze(-1) if array.shape[-1] == 1 else array)
    return cast(PILImage, Image.fromarray(array))


def denormalize(images: Tensor, mean: Sequence[float] | float, std: Sequence[float] | float) -> Tensor:
    """Undo `(images - mean) / std`, channel by channel, as `torchvision.transforms.Normalize` does it.

    Args:
        images: Floats of shape (..., C, H, W).
        mean: For each channel, or for all of them.
        std: For each channel, or for all of them, above 0.

    Returns:
        A new tensor of the same shape, type and device.

    Raises:
        TypeError: If the images are not floats.
        ValueError: If the number of values differs from the number of channels, or `std` is not above 0.

    Examples:
        >>> import torch
        >>> denormalize(torch.zeros(3, 2, 2), mean=[0.5, 0.4, 0.3], std=0.2)[:, 0, 0]
        tensor([0.5000, 0.4000, 0.3000])
    """
    if not images.is_floating_point():
        raise TypeError(f"images must have a floating-point dtype, as normalized images do, got {images.dtype}.")
    parts = []
    for name, value in (("mean", mean), ("std", std)):
        numbers = torch.as_tensor(value, dtype=torch.float64).reshape(-1)
        if len(numbers) not in (1, images.shape[-3]):
            raise ValueError(f"{name} must have one number for each of the {images.shape[-3]} channels, got {value!r}.")
        parts.append(numbers.to(images.device, images.dtype).reshape(-1, 1, 1))
    if not bool((parts[1] > 0).all()):
        raise ValueError(f"std must be above 0, got {std!r}.")
    return images * parts[1] + parts[0]


def overlay_masks(images: Tensor, masks: Tensor, *, ignore_index: int | None = None, opacity: float = 0.6) -> Tensor:
    """Draw the classes of pixels over images, each class in its own color, the same in every image.

    The colors are those of Pascal VOC; class 0, which is black there, is gray.

    Args:
        images: Bytes, or floats in [0, 1], of shape (N, C, H, W) with 1 to 4 channels; an alpha channel (the second of
            two, or the fourth) is left out.
        masks: Classes of shape (N, H, W); another height and width is scaled to that of the images.
        ignore_index: A class that is not drawn; negative classes are not drawn either.
        opacity: From 0 (only the images) to 1 (only the classes).

    Returns:
        Floats in [0, 1] of shape (N, 3, H, W), on the device of the images.

    Raises:
        TypeError, ValueError: As for `to_tensor`; if masks and images differ in number, masks contain no classes, or
            `opacity` is not in [0, 1].

    Examples:
        >>> import torch
        >>> drawn = overlay_masks(torch.ones(1, 1, 2, 2), torch.tensor([[[1, 255], [255, 255]]]), ignore_index=255)
        >>> drawn[0, :, 0, 0], drawn[0, :, 1, 1]
        (tensor([0.7012, 0.4000, 0.4000]), tensor([1., 1., 1.]))
    """
    if not 0 <= opacity <= 1:
        raise ValueError(f"opacity must be in [0, 1], got {opacity!r}.")
    shown = to_tensor(images)
    if masks.ndim != 3 or len(masks) != len(shown) or masks.is_floating_point():
        found = f"{str(masks.dtype).removeprefix('torch.')} {tuple(masks.shape)}"
        raise ValueError(f"masks must be {len(shown)} times classes of shape (H, W), got {found}.")
    shown = _as_three_channels(shown)
    rows, columns = (
        torch.arange(size, device=masks.device) * old // size
        for size, old in zip(shown.shape[-2:], masks.shape[-2:], strict=True)
    )
    classes = masks[:, rows[:, None], columns].long().to(shown.device)
    is_drawn = classes >= 0 if ignore_index is None else (classes >= 0) & (classes != ignore_index)
    colors = class_colors(classes.clamp(min=0)).movedim(-1, 1)
    return torch.where(is_drawn[:, None], (1 - opacity) * shown + opacity * colors, shown)


def overlay_boxes(images: Tensor, boxes: Sequence[Tensor], *, color: Sequence[float], width: int = 1) -> Tensor:
    """Draw the outlines of boxes over images; what lies outside an image is not drawn.

    Args:
        images: Bytes, or floats in [0, 1], of shape (N, C, H, W) with 1 to 4 channels, as for `overlay_masks`.
        boxes: For each image its boxes, of shape (M, 4): left, top, right and bottom in pixels, as torchvision has
            them. The pixels that hold the corners are part of the outline.
        color: Red, green and blue, in [0, 1].
        width: The width of the lines in pixels, which lie inside the box.

    Returns:
        Floats in [0, 1] of shape (N, 3, H, W), on the device of the images.

    Raises:
        TypeError, ValueError: Those of `to_tensor`; if there are not as many tensors of boxes as images, one has
            another shape, or `width` is not at least 1.

    Examples:
        >>> import torch
        >>> drawn = overlay_boxes(torch.zeros(1, 1, 4, 4), [torch.tensor([[0, 1, 2, 3]])], color=(1, 1, 1))
        >>> drawn[0, 0].int().tolist()
        [[0, 0, 0, 0], [1, 1, 1, 0], [1, 0, 1, 0], [1, 1, 1, 0]]
    """
    check_count("width", width)
    shown = _as_three_channels(to_tensor(images))
    if len(boxes) != len(shown) or any(one.ndim != 2 or one.shape[1] != 4 for one in boxes):
        shapes = [tuple(one.shape) for one in boxes]
        raise ValueError(f"boxes must be {len(shown)} tensors of shape (M, 4), got the shapes {shapes}.")
    paint, drawn = shown.new_tensor(color)[:, None, None], []
    for image, corners in zip(shown, boxes, strict=True):
        left, top, right, bottom = corners.to(image).floor().T[..., None]
        y, x = (torch.arange(size, device=image.device) for size in image.shape[1:])
        outer, inner = (  # how many boxes hold each pixel, and how many hold it within their outline
            ((y >= top + by) & (y <= bottom - by)).float().T @ ((x >= left + by) & (x <= right - by)).float()
            for by in (0, width)
        )
        drawn.append(torch.where(outer > inner, paint, image))
    return torch.stack(drawn)


def _as_three_channels(images: Tensor) -> Tensor:
    return (images[:, :3] if images.shape[1] > 2 else images[:, :1]).expand(-1, 3, -1, -1)


def class_colors(classes: Tensor) -> Tensor:
    """Return the colour of each class, in [0, 1] and in a new last dimension of size 3: bits of the class, as in VOC.

    Examples:
        >>> import torch
        >>> (class_colors(torch.tensor([1, 2, 15])) * 255).long().tolist()
        [[128, 0, 0], [0, 128, 0], [192, 128, 128]]
    """
    bits = [sum(((classes >> (3 * place + channel)) & 1) << (7 - place) for place in range(8)) for channel in range(3)]
    return torch.where((classes == 0)[..., None], 80, torch.stack(cast(Any, bits), -1)) / 255


def _import_pillow() -> Any:
    return import_extra("PIL.Image", "reports", "PIL images need Pillow")


def _array_of(image: Any) -> npt.NDArray[Any]:
    """Return the pixels of a PIL image: uint8, or uint16 with 16 bits."""
    if not isinstance(image, _import_pillow().Image):
        raise TypeError(f"An image must be a tensor, an array or a PIL image, got {image!r} ({type(image).__name__}).")
    mode = image.mode
    if mode.startswith("I;16"):
        return np.asarray(image).astype(np.uint16)
    if mode in ("I", "F"):
        raise ValueError(
            f"A PIL image of mode {mode!r} does not define which value is white. Scale it to 0 to 255, and convert it "
            "to mode 'L'."
        )
    if mode == "P" or mode == "PA":
        image = image.convert("RGBA" if "transparency" in image.info or mode == "PA" else "RGB")
    elif mode == "1":
        image = image.convert("L")
    elif mode not in _MODES.values():
        image = image.convert("RGB")  # CMYK, YCbCr, HSV, LAB, RGBX, ...
    return np.array(image)


def _checked(tensor: Tensor, what: str, shapes: str, channels: int) -> Tensor:
    if tensor.ndim not in (3, 4) or tensor.shape[channels] not in _MODES:
        other = -1 if channels == -3 else -3
        hint = ""
        if tensor.ndim in (3, 4) and tensor.shape[other] in _MODES:
            change = "permute(2, 0, 1)" if channels == -3 else "transpose(1, 2, 0)"
            hint = f" The channels seem to be in another dimension: call {change}."
        raise ValueError(
            f"Images in {what} must have the shape {shapes} with C from 1 to 4, got {tuple(tensor.shape)}.{hint}"
        )
    if tensor.numel() == 0:
        raise ValueError(f"An image must have at least one pixel, got the shape {tuple(tensor.shape)}.")
    if tensor.is_floating_point():
        low, high = (value.item() for value in tensor.aminmax())
        if not (low >= -_TOLERANCE and high <= 1 + _TOLERANCE):  # NaN is not
            remedy = "divide by 255" if low >= 0 and high <= 255 else "denormalize(images, mean, std)"
            raise ValueError(f"Floating-point images must be in [0, 1], got {low:.4g} to {high:.4g}: {remedy}.")
        return tensor.clamp(0, 1)
    if tensor.dtype in (torch.uint8, torch.bool):
        return tensor
    name = str(tensor.dtype).removeprefix("torch.")
    raise TypeError(
        f"Images must be uint8, bool or floating point in [0, 1], got {name}: convert them with .to(torch.uint8)."
    )


def _scaled(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype is torch.bool:
        tensor = tensor.to(torch.uint8) * 255
    if tensor.dtype is torch.uint8:
        return tensor if dtype is torch.uint8 else (tensor.to(torch.float32) / 255).to(dtype)
    return (tensor.float() * 255).round().to(torch.uint8) if dtype is torch.uint8 else tensor.to(dtype)


def image_grid(
    images: ImageLike | Sequence[ImageLike],
    *,
    columns: int | None = None,
    captions: Sequence[str] | None = None,
    mistakes: Sequence[bool] | None = None,
    padding: int = 2,
    least_side: int = 64,
) -> PILImage:
    """Put images side by side, row after row, each with a caption below.

    Args:
        images: A tensor (N, C, H, W), an array (N, H, W, C), or a sequence of images of any kinds and sizes.
        columns: The number of images in a row; None makes the grid about square.
        captions: A line for each image.
        mistakes: For each image, whether its caption is red, as that of a mistake.
        padding: Pixels between them.
        least_side: Smaller images are enlarged by an integer factor to at least this many pixels.

    Returns:
        A PIL image, "RGB"; transparent pixels are white.

    Raises:
        TypeError, ValueError: As for `to_tensor`; if there are no images, or not as many captions or mistakes.

    Examples:
        >>> import torch
        >>> image_grid(torch.rand(6, 1, 8, 8), columns=3).size
        (200, 134)
    """
    tiles = [_as_rgb(to_pil(image), least_side) for image in cast(Any, images)]
    if not tiles:
        raise ValueError("There are no images to put into a grid.")
    for name, given in (("captions", captions), ("mistakes", mistakes)):
        if given is not None and len(given) != len(tiles):
            raise ValueError(f"{len(tiles)} images need as many {name}, got {len(given)}.")
    columns = math.ceil(math.sqrt(len(tiles))) if columns is None else check_count("columns", columns)
    columns = min(columns, len(tiles))
    width = max(tile.width for tile in tiles)
    if captions is not None:
        width = max(width, *(int(_font().getlength(caption)) + 2 for caption in captions))
    height = max(tile.height for tile in tiles) + (_CAPTION_HEIGHT if captions is not None else 0)
    rows = math.ceil(len(tiles) / columns)
    size = columns * width + (columns + 1) * padding, rows * height + (rows + 1) * padding
    grid = _import_pillow().new("RGB", size, "white")
    for number, tile in enumerate(tiles):
        left = padding + number % columns * (width + padding)
        top = padding + number // columns * (height + padding)
        grid.paste(tile, (left + (width - tile.width) // 2, top))
        if captions is not None:
            place, color = (left + width / 2, top + height - _CAPTION_HEIGHT / 2), "black"
            if mistakes is not None and mistakes[number]:
                color = "firebrick"
            _draw_caption(grid, captions[number], place, color)
    return cast(PILImage, grid)


def _draw_caption(grid: Any, caption: str, place: tuple[float, float], color: str) -> None:
    from PIL import ImageDraw

    ImageDraw.Draw(grid).text(place, caption, fill=color, anchor="mm", font=_font())


def _font() -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(11)


def _as_rgb(image: Any, least_side: int) -> Any:
    Image = _import_pillow()  # noqa: N806
    image = image.convert("RGBA")
    flat = Image.new("RGB", image.size, "white")
    flat.paste(image, mask=image.getchannel("A"))
    factor = math.ceil(least_side / max(1, min(flat.size)))
    return flat.resize((flat.width * factor, flat.height * factor), Image.Resampling.NEAREST) if factor > 1 else flat


def shrink(images: Tensor) -> Tensor:
    """Return images as bytes on the CPU, of shape (N, 1 or 3, H, W); those with a side above 160 pixels are shrunk.

    Args:
        images: Bytes, or numbers in [0, 1], of shape (N, C, H, W) with 1 to 4 channels; the second and the fourth one
            would say how opaque a pixel is, and are left out.
    """
    images = images.detach().cpu()
    numbers = images.float() if images.is_floating_point() else images.float() / 255
    numbers = numbers[:, :3] if numbers.shape[1] > 2 else numbers[:, :1]
    largest = max(numbers.shape[-2:])
    if largest > _LARGEST_SIDE:
        size = [max(1, round(side * _LARGEST_SIDE / largest)) for side in numbers.shape[-2:]]
        numbers = interpolate(numbers, size=size, mode="area")
    return (numbers.nan_to_num(0.0).clamp(0, 1) * 255).round().to(torch.uint8)


def png_texts(images: Tensor) -> list[str]:
    """Return the base64 of a PNG file of each image, given as `shrink` returns them.

    Examples:
        >>> png_texts(shrink(torch.zeros(1, 3, 8, 8)))[0][:11]
        'iVBORw0KGgo'
    """
    return [b64encode(encode_png(image)).decode() for image in images]


@dataclass(frozen=True)
class RankedSamples:
    """Samples with the score by which they are ranked.

    Attributes:
        images: The images, of shape (N, C, H, W).
        score: The rank score of each sample, of shape (N,); samples with a high score are shown first.
        predicted: The predicted classes or values, of shape (N,); for masks, (N, H, W); for boxes, as `stack_boxes`
            returns them.
        target: The true classes or values, in the same shape.
        confidence: The confidence of each prediction, of shape (N,); for values, the absolute error; for masks, the
            share of wrong pixels; for boxes, that of wrong boxes.
    """

    images: Tensor
    score: Tensor
    predicted: Tensor
    target: Tensor
    confidence: Tensor

    @property
    def has_boxes(self) -> bool:
        """Whether boxes are predicted; masks are whole numbers."""
        return self.target.ndim == 3 and self.target.is_floating_point()

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
    """Concatenate the samples of all parts whose images, and masks, have the same shape as those of the last part.

    Images with boxes may have any size: they are padded below and on the right.
    """
    if parts[0].has_boxes:
        return RankedSamples(**{name: cat_padded([vars(part)[name] for part in parts]) for name in vars(parts[0])})
    shapes = [[value.shape[1:] for value in vars(part).values()] for part in parts]
    alike = [part for part, shape in zip(parts, shapes, strict=True) if shape == shapes[-1]]
    return RankedSamples(**{name: torch.cat([vars(part)[name] for part in alike]) for name in vars(parts[0])})


def cat_padded(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors along the first dimension, each padded with zeros to the largest of the other dimensions."""
    sizes = [max(sides) for sides in zip(*(tensor.shape[:0:-1] for tensor in tensors), strict=True)]
    sides = [[n for size, own in zip(sizes, one.shape[:0:-1], strict=True) for n in (0, size - own)] for one in tensors]
    return torch.cat([pad(tensor, missing) for tensor, missing in zip(tensors, sides, strict=True)])


def stack_boxes(items: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Return the boxes of images in one tensor, without a read from the device.

    Args:
        items: For each image a dict of `boxes` (M, 4), `labels` (M,) and perhaps `scores` (M,), as torchmetrics has it.

    Returns:
        Floats of shape (N, most boxes, 6): score, label and corners of each box, the highest scores first; all zeros
        where there is none, or one with a score below 0.5. At most 300 boxes of an image are kept.
    """
    stacked = []
    for item in items:
        scores = item.get("scores", torch.ones_like(item["labels"]))
        rows = torch.column_stack((scores, item["labels"], item["boxes"].float().reshape(-1, 4)))
        order = rows[:, 0].sort(descending=True, stable=True).indices[:_MOST_BOXES]
        stacked.append(torch.where(rows[:, :1] >= _LEAST_SCORE, rows, 0.0)[order][None])
    return cat_padded(stacked)


def _share_of_wrong_boxes(predicted: Tensor, target: Tensor) -> Tensor:
    """Return how many of the boxes of each image, predicted and true ones, have no counterpart of their class."""
    a, b = predicted[:, :, None], target[:, None]
    common = (torch.minimum(a[..., 4:], b[..., 4:]) - torch.maximum(a[..., 2:4], b[..., 2:4])).clamp(min=0).prod(-1)
    union = sum((part[..., 4:] - part[..., 2:4]).prod(-1) for part in (a, b)) - common
    is_right = (common >= _LEAST_OVERLAP * union) & (union > 0) & (a[..., 1] == b[..., 1])
    count = (predicted[..., 0] > 0).sum(1) + (target[..., 0] > 0).sum(1)
    return (count - is_right.any(2).sum(1) - is_right.any(1).sum(1)) / count.clamp(min=1)


def rank_predictions(
    images: Tensor,
    preds: Tensor,
    target: Tensor,
    *,
    logits: bool = False,
    values: bool = False,
    ignore_index: int | None = None,
    boxes: bool = False,
) -> RankedSamples:
    """Score predictions by how worth showing they are, without a read from the device.

    Mistakes come first, in order of decreasing confidence, then correct predictions in order of increasing confidence.
    For values, the largest errors come first; for masks, those with the largest share of wrong pixels; for boxes, of
    wrong boxes: those without a counterpart of their class that they overlap by half of the union.

    Args:
        images: The images, of shape (N, C, H, W).
        preds: Scores of shape (N, C), probabilities of 1 or classes of shape (N,), or values where `target` has values;
            for masks, each with (H, W) behind it.
        target: Classes or values of shape (N,), or masks (N, H, W).
        logits: Whether the scores are logits.
        values: Whether values are predicted, not classes.
        ignore_index: A class of masks whose pixels do not count.
        boxes: Whether predictions and targets are boxes, as `stack_boxes` returns them.
    """
    if boxes:
        share = _share_of_wrong_boxes(preds, target)
        return RankedSamples(images, share, preds, target, share)
    if values:
        error = (preds - target).abs().float()
        return RankedSamples(images, error, preds, target, error)
    if preds.ndim == target.ndim + 1:
        confidence, predicted = (preds.float().softmax(1) if logits else preds.float()).max(1)
    elif preds.is_floating_point():
        probability = preds.float().sigmoid() if logits else preds.float()
        predicted = (probability > 0.5).long()
        confidence = torch.where(predicted == 1, probability, 1 - probability)
    else:
        predicted, confidence = preds, torch.ones_like(preds, dtype=torch.float32)
    wrong = predicted != target
    if target.ndim == 3:
        counted = torch.ones_like(wrong) if ignore_index is None else target != ignore_index
        share = (wrong & counted).sum((1, 2)) / counted.sum((1, 2)).clamp(min=1)
        return RankedSamples(images, share, predicted.int(), target.int(), share)
    return RankedSamples(images, torch.where(wrong, 1 + confidence, -confidence), predicted, target, confidence)


def encode_png(image: Tensor) -> bytes:
    """Return the PNG file of an image.

    Args:
        image: Bytes of shape (C, H, W), with 1 (grey) or 3 (RGB) channels.

    Raises:
        ValueError: If it has another dtype or shape.

    Examples:
        >>> encode_png(torch.zeros(1, 2, 2, dtype=torch.uint8))[1:4]
        b'PNG'
    """
    if image.dtype != torch.uint8 or image.ndim != 3 or image.shape[0] not in (1, 3) or not image.numel():
        raise ValueError(f"image must be bytes of shape (1 or 3, H, W), got {image.dtype} of {tuple(image.shape)}.")
    channels, height, width = image.shape
    rows = image.permute(1, 2, 0).reshape(height, width * channels).cpu()
    lines = torch.cat([torch.zeros(height, 1, dtype=torch.uint8), rows], dim=1)  # each row begins with its filter: none
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.numpy().tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
