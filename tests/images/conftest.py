import pytest
from PIL import Image


@pytest.fixture
def shown(monkeypatch):
    """The images and the captions of each grid, which is not drawn."""
    grids = []

    def keep(images, *, captions, **options):
        grids.append(([image.clone() for image in images], list(captions)))
        return Image.new("RGB", (2, 2))

    monkeypatch.setattr("lightning_tricks.images.callback.functional.image_grid", keep)
    return grids
