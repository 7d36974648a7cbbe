"""Masks of classes over images: what is drawn, and which images ImageLogger shows first."""

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from PIL import Image

from lightning_tricks import ImageLogger, RunReport
from lightning_tricks.images import overlay_masks
from lightning_tricks.images.functional import class_colors
from tests.images.test_callback import Images, loader, trainer
from tests.small import QUIET, cases

pytestmark = pytest.mark.filterwarnings("ignore:Using `DistributedSampler`")

_PIXELS = torch.rand(24, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def _voc_palette(classes):
    """The colour map of the devkit of Pascal VOC, bit by bit."""
    palette = np.zeros((classes, 3), int)
    for label in range(classes):
        rest = label
        for place in range(8):
            for channel in range(3):
                palette[label, channel] |= ((rest >> channel) & 1) << (7 - place)
            rest >>= 3
    return palette


def test_colors_are_those_of_voc_and_differ():
    colors = (class_colors(torch.arange(256)) * 255).round().long()
    assert colors[1:].tolist() == _voc_palette(256)[1:].tolist()
    assert len({tuple(color) for color in colors.tolist()}) == 256


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("opacity", [0.0, 0.6, 1.0])
def test_each_pixel_is_mixed_with_its_color(channels, opacity):
    images = torch.rand(2, channels, 4, 6)
    masks = torch.randint(0, 5, (2, 4, 6))
    masks[0, 0], masks[1, 1] = 4, -1
    drawn = overlay_masks(images, masks, ignore_index=4, opacity=opacity)
    base = images[:, :3] if channels > 2 else images[:, :1].expand(-1, 3, -1, -1)
    for image in range(2):
        for row in range(4):
            for column in range(6):
                label, pixel = int(masks[image, row, column]), base[image, :, row, column]
                if label not in (4, -1):
                    pixel = (1 - opacity) * pixel + opacity * class_colors(torch.tensor(label))
                torch.testing.assert_close(drawn[image, :, row, column], pixel)


def test_bytes_and_masks_of_another_size():
    images = torch.randint(0, 256, (1, 3, 6, 4), dtype=torch.uint8)
    small = torch.tensor([[[1, 2], [3, 255]]], dtype=torch.uint8)
    whole = torch.nn.functional.interpolate(small[:, None].float(), (6, 4))[:, 0].long()
    expected = overlay_masks(images / 255, whole, ignore_index=255)
    assert torch.equal(overlay_masks(images, small, ignore_index=255), expected)


@cases(
    "masks, options, words",
    (torch.zeros(2, 8, 8), {}, r"masks must be 2 times classes of shape \(H, W\), got float32 \(2, 8, 8\)"),
    (torch.zeros(3, 8, 8, dtype=torch.long), {}, r"got int64 \(3, 8, 8\)"),
    (torch.zeros(2, 1, 8, 8, dtype=torch.long), {}, r"got int64 \(2, 1, 8, 8\)"),
    (torch.zeros(2, 8, 8, dtype=torch.long), {"opacity": 2}, "opacity must be in"),
)
def test_what_is_no_mask_is_refused(masks, options, words):
    with pytest.raises(ValueError, match=words):
        overlay_masks(_PIXELS[:2], masks, **options)


class Masks(Images):
    """Predicts class 1 for the first pixels, one more for each image; the truth is 0, and the last rows are void."""

    kind = "classes"

    def step(self, batch, batch_idx):
        images, labels = batch
        result = super().step((images, labels % 10), batch_idx)
        target = torch.zeros(len(images), 8, 8, dtype=torch.long)
        target[:, 6:] = 255
        predicted = (torch.arange(64).reshape(8, 8) < labels[:, None, None]).long()
        predicted[:, 6:] = 1
        scores = torch.nn.functional.one_hot(predicted, 3).movedim(-1, 1).float()
        shown = {"classes": predicted, "logits": 9 * scores - 4, "one channel": predicted[:, None].float()}[self.kind]
        if self.kind == "one channel":
            target = target[:, None].float()  # as a loss for one output needs it
        return {**result, "preds": shown, "target": target}

    training_step = validation_step = test_step = step


@pytest.mark.parametrize("kind", ["classes", "logits", "one channel"])
def test_the_worst_masks_are_first_and_void_pixels_do_not_count(kind, tmp_path, shown):
    labels = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    module = Masks()
    module.kind = kind
    names = ["road", "tree", "sky"]
    images = ImageLogger(3, class_names=names, ignore_index=255)
    trainer(images, CSVLogger(tmp_path)).validate(module, loader(_PIXELS, labels), verbose=False)
    ((tiles, captions, _),) = shown
    worst = labels.argsort(descending=True)[:3]
    shares = [f"{wrong / 48:.1%} of the pixels are wrong" for wrong in labels[worst].tolist()]
    assert captions == [*shares, "road", "tree"]
    for tile, index in zip(tiles, worst, strict=False):
        image = _PIXELS[index]
        alone, gap, predicted, _, true = tile.split([8, 2, 8, 2, 8], -1)
        assert gap.min() == 1
        assert torch.equal(alone, image)
        assert torch.equal(true[:, 6:], image[:, 6:])  # void pixels are transparent
        mask = (torch.arange(64).reshape(1, 8, 8) < labels[index]).long()
        mask[:, 6:] = 1
        assert torch.equal(predicted, overlay_masks(image[None], mask)[0])
        assert torch.equal(true[:, :6], overlay_masks(image[None], 0 * mask)[0][:, :6])


def test_several_ranks_show_the_masks_of_all(tmp_path):
    torch.set_num_threads(1)
    ranks = {"strategy": "ddp_fork", "devices": 2}
    fitter = trainer(ImageLogger(2, ignore_index=255), CSVLogger(tmp_path), max_epochs=1, **ranks)
    fitter.fit(Masks(), loader(_PIXELS, torch.arange(24)), loader(_PIXELS, torch.arange(24)))
    (path,) = tmp_path.rglob("*.png")
    with Image.open(path) as grid:
        assert grid.width > 2 * 3 * 64  # two images, each of which three times


def test_masks_that_do_not_fit_are_refused(tmp_path):
    class Wrong(Masks):
        def step(self, batch, batch_idx):
            return {**super().step(batch, batch_idx), "preds": torch.zeros(len(batch[0]), 3, 4, 4)}

        training_step = validation_step = test_step = step

    with pytest.raises(MisconfigurationException, match=r"or masks, scores \(N, C, H, W\).*preds \(4, 3, 4, 4\)"):
        trainer(ImageLogger(2), CSVLogger(tmp_path)).validate(Wrong(), loader(_PIXELS, torch.arange(24)))


def test_a_run_report_shows_them(tmp_path):
    module = Masks()
    labels = torch.arange(24)
    fitter = Trainer(callbacks=[ImageLogger(3, ignore_index=255), RunReport(tmp_path / "run")], max_epochs=1, **QUIET)
    fitter.fit(module, loader(_PIXELS, labels), loader(_PIXELS, labels))
    (file,) = (tmp_path / "run").rglob("*.html")
    page = file.read_text(encoding="utf-8")
    assert "Largest errors (val)" in page
    assert f"{23 / 48:.1%} of the pixels are wrong" in page
