"""`small_pngs`: small PNG files of images, for a page that holds them."""

from __future__ import annotations

from base64 import b64encode

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from lightning_tricks._shared.png import encode_png

_LARGEST_SIDE = 160


def small_pngs(images: Tensor) -> list[str]:
    """Return the base64 of a PNG file of each image; those with a side above 160 pixels are made smaller.

    Args:
        images: Bytes, or numbers in [0, 1], of shape (N, C, H, W) with 1 to 4 channels; the second and the fourth one
            would say how opaque a pixel is, and are left out.

    Examples:
        >>> small_pngs(torch.zeros(1, 3, 8, 8))[0][:11]
        'iVBORw0KGgo'
    """
    images = images.detach().cpu()
    numbers = images.float() if images.is_floating_point() else images.float() / 255
    numbers = numbers[:, :3] if numbers.shape[1] > 2 else numbers[:, :1]
    side = max(numbers.shape[-2:])
    if side > _LARGEST_SIDE:
        size = [max(1, round(one * _LARGEST_SIDE / side)) for one in numbers.shape[-2:]]
        numbers = interpolate(numbers, size=size, mode="area")
    pixels = (numbers.nan_to_num(0.0).clamp(0, 1) * 255).round().to(torch.uint8)
    return [b64encode(encode_png(one)).decode() for one in pixels]
