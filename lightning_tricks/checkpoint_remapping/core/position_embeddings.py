"""Resize position embeddings to another number of positions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from lightning_tricks.checkpoint_remapping.core.errors import CheckpointError
from lightning_tricks.checkpoint_remapping.core.matching.alignment import Mismatch


def resize_positions(mismatch: Mismatch, tensor: torch.Tensor) -> torch.Tensor:
    """Resize position embeddings bicubically, as timm does.

    Args:
        mismatch: The old and the new shape: (1, tokens + n^2, C), (1, C, H, W) or Swin's ((2n-1)^2, heads).
        tensor: The embeddings of the file.

    Raises:
        CheckpointError: If the shapes are not those of a grid of positions.
    """
    old, new = mismatch.source_shape, mismatch.target_shape
    if len(old) == len(new) == 4 and old[:2] == new[:2]:
        return _bicubic(tensor, new[2:])
    if len(old) == len(new) in (2, 3) and old[-1] == new[-1] and math.prod(old[:-2]) == math.prod(new[:-2]) == 1:
        rows, length = tensor.reshape(old[-2], old[-1]), new[-2]
        for extra in range(3):  # class and distillation tokens come first
            sides = [math.isqrt(max(count - extra, 0)) for count in (len(rows), length)]
            if [side * side + extra for side in sides] == [len(rows), length] and min(sides) > 0:
                grid = rows[extra:].T.reshape(1, -1, sides[0], sides[0])
                resized = _bicubic(grid, (sides[1], sides[1])).reshape(old[-1], -1).T
                return torch.cat([rows[:extra], resized.to(rows.dtype)]).reshape(new)
    raise CheckpointError(f"{mismatch} cannot be interpolated: it is not a square grid of positions.")


def _bicubic(grid: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    resized = nn.functional.interpolate(grid.float(), list(size), mode="bicubic", antialias=True, align_corners=False)
    return resized.to(grid.dtype)
