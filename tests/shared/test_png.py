"""PNG files are those that Pillow reads."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_tricks.images.functional import encode_png


@pytest.mark.parametrize("channels", [1, 3])
def test_pillow_reads_the_pixels(channels):
    pixels = torch.randint(0, 256, (channels, 5, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    read = np.asarray(Image.open(io.BytesIO(encode_png(pixels))))
    assert read.reshape(5, 7, channels).tolist() == pixels.permute(1, 2, 0).tolist()


@pytest.mark.parametrize("image", [torch.zeros(1, 2, 2), torch.zeros(2, 2, 2, dtype=torch.uint8), torch.zeros(1, 0, 2)])
def test_other_images_are_refused(image):
    with pytest.raises(ValueError, match="image must be bytes"):
        encode_png(image)
