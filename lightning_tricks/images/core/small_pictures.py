"""Small pictures of images, and their PNG files, for a page that holds them."""

from __future__ import annotations

from base64 import b64encode

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from lightning_tricks._shared.png import encode_png

_LARGEST_SIDE = 160


def shrink(images: Tensor) -> Tensor:
    """Return images as bytes on the CPU, of shape (N, 1 or 3, H, W); those with a side above 160 pixels are shrunk.

    Args:
        images: Bytes, or numbers in [0, 1], of shape (N, C, H, W) with 1 to 4 channels; the second and the fourth one
            would say how opaque a pixel is, and are left out.
    """
    images = images.detach().cpu()
    numbers = images.float() if images.is_floating_point() else images.float() / 255
    numbers = numbers[:, :3] if numbers.shape[1] > 2 else numbers[:, :1]
    side = max(numbers.shape[-2:])
    if side > _LARGEST_SIDE:
        size = [max(1, round(one * _LARGEST_SIDE / side)) for one in numbers.shape[-2:]]
        numbers = interpolate(numbers, size=size, mode="area")
    return (numbers.nan_to_num(0.0).clamp(0, 1) * 255).round().to(torch.uint8)


def png_texts(images: Tensor) -> list[str]:
    """Return the base64 of a PNG file of each image, given as `shrink` returns them.

    Examples:
        >>> png_texts(shrink(torch.zeros(1, 3, 8, 8)))[0][:11]
        'iVBORw0KGgo'
    """
    return [b64encode(encode_png(one)).decode() for one in images]
