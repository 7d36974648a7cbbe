"""PNG files of small pictures, without a further package."""

from __future__ import annotations

import struct
import zlib

import torch
from torch import Tensor


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
