"""Resize position embeddings to another number of positions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from lightning_tricks.checkpoint_remapping.core.errors import CheckpointError
from lightning_tricks.checkpoint_remapping.core.matching.matches import Mismatch


def resize_positions(mismatch: Mismatch, tensor: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """Resize position embeddings bicubically, as timm does.

    The grid of the model is that of its patches, where a module beside or around the embeddings says it, or a square;
    that of the file is a square.

    Args:
        mismatch: The old and the new shape: (1, tokens + H * W, C), (1, C, H, W) or Swin's ((2H-1) * (2W-1), heads).
        tensor: The embeddings of the file.
        module: The model.

    Raises:
        CheckpointError: If it is a linear layer's, the shapes are not those of a grid of positions, or a grid is not
            known.
    """
    old, new = mismatch.source_shape, mismatch.target_shape
    owner = dict(module.named_modules()).get(mismatch.target.rpartition(".")[0])
    if isinstance(owner, nn.Linear):
        raise CheckpointError(
            f"{mismatch} belongs to a linear layer, which has no positions: interpolate names it, too."
        )
    if len(old) == len(new) == 4 and old[:2] == new[:2]:
        return _bicubic(tensor, new[2:])
    flat = {len(old), len(new)} <= {2, 3} and math.prod(old[:-2]) == math.prod(new[:-2]) == 1
    if flat and old[-1] == new[-1]:
        rows, length = tensor.reshape(old[-2], old[-1]), new[-2]
        known = _grids_of(module, mismatch.target)
        for extra in range(3):  # class and distillation tokens come first
            grid, side = _square(len(rows) - extra), _square(length - extra)
            squares = [(side, side)] if side and not known else []
            sizes = [size for size in known if math.prod(size) == length - extra] or squares
            if grid and sizes:
                cells = rows[extra:].T.reshape(1, -1, grid, grid)
                resized = _bicubic(cells, sizes[0]).reshape(old[-1], -1).T
                return torch.cat([rows[:extra], resized.to(rows.dtype)]).reshape(new)
    raise CheckpointError(
        f"{mismatch} cannot be interpolated: it is not a square grid of positions in the file, or the model does not "
        f"say its grid of patches. Resize the tensor yourself: load_weights(model, {{**weights, {mismatch.target!r}: "
        "resized}), where weights = read_checkpoint(path).state_dict."
    )


def _square(count: int) -> int:
    """Return the side of a square of so many positions, 0 if there is none."""
    side = math.isqrt(max(count, 0))
    return side if side * side == count else 0


def _grids_of(module: nn.Module, name: str) -> list[tuple[int, int]]:
    """Return the grids of patches that modules around a tensor say, as timm's and those of transformers do."""
    modules = dict(module.named_modules(remove_duplicate=False))
    parts = name.split(".")
    for length in reversed(range(len(parts))):
        around = modules.get(".".join(parts[:length]), nn.Module())
        if found := [size for inside in around.modules() for size in _grid_said_by(inside)]:
            return list(dict.fromkeys(found))
    return []


def _grid_said_by(module: nn.Module) -> list[tuple[int, int]]:
    values = [getattr(module, name, None) for name in ("grid_size", "window_size", "image_size", "patch_size")]
    grid, window, image, patch = map(_pair, values)
    if grid:
        return [grid]
    if window:
        return [(2 * window[0] - 1, 2 * window[1] - 1)]
    return [(image[0] // patch[0], image[1] // patch[1])] if image and patch else []


def _pair(value: object) -> tuple[int, int] | None:
    """Return a positive size as height and width."""
    pair = (value, value) if type(value) is int else value
    if isinstance(pair, tuple | list) and len(pair) == 2 and all(type(side) is int and side > 0 for side in pair):
        return int(pair[0]), int(pair[1])
    return None


def _bicubic(grid: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    resized = nn.functional.interpolate(grid.float(), list(size), mode="bicubic", antialias=True, align_corners=False)
    return resized.to(grid.dtype)
