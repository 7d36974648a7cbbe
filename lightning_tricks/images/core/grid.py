"""`image_grid`: images side by side, each with a caption below."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from lightning_tricks._shared.checks import check_count
from lightning_tricks.images.core.conversion import import_pillow, to_pil

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

    from lightning_tricks.images.core.conversion import ImageLike
else:
    PILImage = Any

_CAPTION_HEIGHT = 14


def image_grid(
    images: ImageLike | Sequence[ImageLike],
    *,
    columns: int | None = None,
    captions: Sequence[str] | None = None,
    padding: int = 2,
    least_side: int = 64,
) -> PILImage:
    """Put images side by side, row after row, each with a caption below.

    Args:
        images: A tensor (N, C, H, W), an array (N, H, W, C), or a sequence of images of any kinds and sizes.
        columns: How many in a row; None makes the grid about as wide as high.
        captions: A line for each image; a line that starts with "!" is red, and shown without the "!".
        padding: Pixels between them.
        least_side: Smaller images are enlarged by a whole factor to at least so many pixels.

    Returns:
        A PIL image, "RGB"; transparent pixels are white.

    Raises:
        TypeError, ValueError: Those of `to_tensor`; if there are no images, or not as many captions.

    Examples:
        >>> import torch
        >>> image_grid(torch.rand(6, 1, 8, 8), columns=3).size
        (200, 134)
    """
    tiles = [_as_rgb(to_pil(one), least_side) for one in cast(Any, images)]
    if not tiles:
        raise ValueError("There are no images to put into a grid.")
    if captions is not None and len(captions) != len(tiles):
        raise ValueError(f"{len(tiles)} images need as many captions, got {len(captions)}.")
    columns = math.ceil(math.sqrt(len(tiles))) if columns is None else check_count("columns", columns)
    columns = min(columns, len(tiles))
    width = max(tile.width for tile in tiles)
    if captions is not None:
        width = max(width, *(int(_font().getlength(caption)) + 2 for caption in captions))
    height = max(tile.height for tile in tiles) + (_CAPTION_HEIGHT if captions is not None else 0)
    rows = math.ceil(len(tiles) / columns)
    size = columns * width + (columns + 1) * padding, rows * height + (rows + 1) * padding
    grid = import_pillow().new("RGB", size, "white")
    for number, tile in enumerate(tiles):
        left = padding + number % columns * (width + padding)
        top = padding + number // columns * (height + padding)
        grid.paste(tile, (left + (width - tile.width) // 2, top))
        if captions is not None:
            _draw_caption(grid, captions[number], left + width / 2, top + height - _CAPTION_HEIGHT / 2)
    return cast(PILImage, grid)


def _draw_caption(grid: Any, caption: str, x: float, y: float) -> None:
    from PIL import ImageDraw

    color = "firebrick" if caption.startswith("!") else "black"
    ImageDraw.Draw(grid).text((x, y), caption.removeprefix("!"), fill=color, anchor="mm", font=_font())


def _font() -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(11)


def _as_rgb(image: Any, least_side: int) -> Any:
    Image = import_pillow()  # noqa: N806
    image = image.convert("RGBA")
    flat = Image.new("RGB", image.size, "white")
    flat.paste(image, mask=image.getchannel("A"))
    factor = math.ceil(least_side / max(1, min(flat.size)))
    return flat.resize((flat.width * factor, flat.height * factor), Image.Resampling.NEAREST) if factor > 1 else flat
