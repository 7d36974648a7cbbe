import pytest
from PIL import Image


@pytest.fixture
def shown(monkeypatch):
    """The images, the captions and the marks of mistakes of each grid, which is not drawn."""
    grids = []

    def keep(images, *, captions, mistakes, **options):
        grids.append(([image.clone() for image in images], list(captions), list(mistakes)))
        return Image.new("RGB", (2, 2))

    monkeypatch.setattr("lightning_tricks.images.callback.functional.image_grid", keep)
    return grids
