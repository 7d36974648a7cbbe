"""Boxes of detection over images: what is drawn, and which images ImageLogger shows first."""

import io
import re
from base64 import b64decode

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from PIL import Image
from torch.utils.data import DataLoader

from lightning_tricks import AutoResume, ImageLogger, MetricsMonitor, RunReport
from lightning_tricks._shared.report_parts import Pictures
from lightning_tricks.images import overlay_boxes
from lightning_tricks.images.functional import BLUE, ORANGE, concat_samples, rank_predictions, stack_boxes
from lightning_tricks.run_report import read_record
from tests.emulated_cuda.device import EmulatedCuda
from tests.images.test_callback import trainer
from tests.small import QUIET, Net, cases

pytestmark = pytest.mark.filterwarnings("ignore:Using `DistributedSampler`")
vision = pytest.importorskip("torchvision")

WHITE = (1, 1, 1)
SIDE = 16


def outlines(boxes, height, width, line):
    """The slow twin: a pixel is drawn if some box holds it, and its edge is less than `line` pixels away."""
    drawn = torch.zeros(height, width, dtype=torch.bool)
    for left, top, right, bottom in boxes.floor().tolist():
        for y in range(height):
            for x in range(width):
                if left <= x <= right and top <= y <= bottom:
                    drawn[y, x] |= min(x - left, right - x, y - top, bottom - y) < line
    return drawn


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("seed", range(5))
def test_outlines_are_those_of_torchvision(seed, width):
    """Pillow, which draws them there, lets the lines of a box that is narrower than two of them stick out."""
    corners, sizes = (torch.rand(6, 2, generator=torch.Generator().manual_seed(10 * seed + part)) for part in (0, 1))
    boxes = torch.cat([corners * 20, corners * 20 + 2 * width + sizes * 20], 1)
    image = torch.randint(0, 256, (3, 24, 40), dtype=torch.uint8)
    peer = vision.utils.draw_bounding_boxes(image, boxes, colors=[(255, 255, 255)] * 6, width=width)
    assert torch.equal(overlay_boxes(image[None], [boxes], color=WHITE, width=width)[0], peer / 255)


numbers = st.floats(-9, 20, width=32) | st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e30])


@settings(max_examples=60)
@given(st.lists(st.tuples(numbers, numbers, numbers, numbers), max_size=4), st.integers(1, 6))
def test_any_numbers_are_drawn_as_the_slow_twin_draws_them(boxes, width):
    corners = torch.tensor(boxes).reshape(-1, 4)
    drawn = overlay_boxes(torch.zeros(1, 1, 8, 12), [corners], color=WHITE, width=width)
    assert torch.equal(drawn[0, 0] > 0, outlines(corners, 8, 12, width))


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_all_that_is_no_outline_is_left_and_each_image_has_its_own_boxes(channels):
    images = torch.randint(0, 256, (3, channels, SIDE, SIDE), dtype=torch.uint8)
    boxes = [torch.tensor([[2, 3, 9, 9]]), torch.zeros(0, 4), torch.tensor([[0.0, 0.0, 15.9, 15.9], [4, 4, 6, 6]])]
    drawn = overlay_boxes(images, boxes, color=ORANGE)
    base = (images[:, :3] if channels > 2 else images[:, :1].expand(-1, 3, -1, -1)) / 255
    for one, image, own in zip(drawn, base, boxes, strict=True):
        line = outlines(own.float(), SIDE, SIDE, 1)
        assert torch.equal(one[:, ~line], image[:, ~line])
        assert torch.equal(one[:, line], torch.tensor(ORANGE)[:, None].expand(-1, int(line.sum())))
    assert torch.equal(drawn[1], base[1])


@cases(
    "boxes, options, words",
    ([torch.zeros(1, 4)], {}, r"boxes must be 2 tensors of shape \(M, 4\), got the shapes \[\(1, 4\)\]"),
    ([torch.zeros(4), torch.zeros(0, 4)], {}, r"got the shapes \[\(4,\), \(0, 4\)\]"),
    ([torch.zeros(1, 5), torch.zeros(0, 4)], {}, r"\(1, 5\)"),
    ([torch.zeros(1, 4)] * 2, {"width": 0}, "width must be a whole number >= 1"),
)
def test_what_are_no_boxes_is_refused(boxes, options, words):
    with pytest.raises(ValueError, match=words):
        overlay_boxes(torch.zeros(2, 3, 4, 4), boxes, color=WHITE, **options)


def some_boxes(generator, most=5):
    """Objects, and detections near some of them and elsewhere, with scores on both sides of a half."""
    count = int(torch.randint(0, most, (), generator=generator))
    corner, size = (torch.rand(count, 2, generator=generator) for _ in range(2))
    true = torch.cat([corner * 8, corner * 8 + 1 + size * 6], 1)
    labels = torch.randint(0, 2, (count,), generator=generator)
    moved = true + torch.rand(count, 4, generator=generator) - 0.5
    extra = torch.tensor([[9.0, 9.0, 15.0, 15.0]])
    scores = torch.rand(count + 1, generator=generator)
    preds = {"boxes": torch.cat([moved, extra]), "labels": torch.cat([labels, labels.new_zeros(1)]), "scores": scores}
    return preds, {"boxes": true, "labels": labels}


def share_of_wrong(preds, target):
    """The slow twin of the order: boxes of either kind without one of the other kind, of their class, near them."""
    kept = preds["scores"] >= 0.5
    boxes, labels = preds["boxes"][kept], preds["labels"][kept]
    near = vision.ops.box_iou(boxes, target["boxes"]) >= 0.5
    right = near & (labels[:, None] == target["labels"][None])
    wrong = (~right.any(1)).sum() + (~right.any(0)).sum()
    return float(wrong) / max(len(boxes) + len(target["boxes"]), 1)


def test_images_are_ranked_by_their_share_of_wrong_boxes():
    generator = torch.Generator().manual_seed(0)
    pairs = [some_boxes(generator) for _ in range(60)]
    preds, target = (stack_boxes([pair[place] for pair in pairs]) for place in (0, 1))
    images = torch.zeros(60, 1, 2, 2)
    ranked = rank_predictions(images, preds, target, boxes=True)
    torch.testing.assert_close(ranked.score, torch.tensor([share_of_wrong(*pair) for pair in pairs]))
    assert 0 < ranked.score.min() + 0.2 < ranked.score.max()


def test_stacked_boxes_are_the_most_confident_ones():
    many = {"boxes": torch.rand(900, 4), "labels": torch.arange(900), "scores": torch.linspace(1, 0, 900).roll(7)}
    none = {"boxes": torch.tensor([]), "labels": torch.tensor([], dtype=torch.long), "scores": torch.tensor([])}
    found = stack_boxes([many, none])
    assert found.shape == (2, 300, 6)
    assert found[0, :, 1].tolist() == list(range(7, 307))
    assert not found[1].any()
    assert stack_boxes([none]).shape == (1, 0, 6)
    low = {"boxes": torch.ones(2, 4), "labels": torch.tensor([1, 2]), "scores": torch.tensor([0.49, 0.5])}
    assert stack_boxes([low])[0].tolist() == [[0.5, 2, 1, 1, 1, 1], [0] * 6]


def of_image(number):
    """The first of the true boxes is found; the others, `number` of them, are not."""
    true = torch.tensor([[1.0, 1, 6, 6]] + [[8.0, 8, 9 + place % 5, 12] for place in range(number)])
    target = {"boxes": true, "labels": torch.tensor([1] + [0] * number)}
    scores = torch.tensor([0.25, 0.875])
    preds = {
        "boxes": torch.tensor([[0.0, 0, 15, 15], [1, 1, 6, 6.5]]),
        "labels": torch.tensor([0, 1]),
        "scores": scores,
    }
    return preds, target


class Detects(Net):
    as_list = False

    def step(self, batch, batch_idx):
        images, numbers = batch
        flat = torch.stack([image[0, :8, :8].flatten() for image in images])
        preds, target = zip(*(of_image(int(number)) for number in numbers), strict=True)
        loss = self.net(flat).mean()
        return {"loss": loss, "preds": list(preds), "target": list(target)}

    training_step = validation_step = test_step = step


PIXELS = torch.rand(12, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
NUMBERS = torch.randperm(12, generator=torch.Generator().manual_seed(1))


def loader(pixels=PIXELS, numbers=NUMBERS, collate=None):
    return DataLoader(list(zip(pixels, numbers, strict=True)), 4, collate_fn=collate)


def expected(image, number):
    preds, target = of_image(number)
    drawn = overlay_boxes(image[None], [target["boxes"]], color=BLUE, width=2)
    return overlay_boxes(drawn, [preds["boxes"][1:]], color=ORANGE)[0]


def test_the_worst_detections_are_first_with_names_and_scores(tmp_path, shown):
    images = ImageLogger(3, class_names=["cat", "dog"])
    trainer(images, CSVLogger(tmp_path)).validate(Detects(), loader(), verbose=False)
    ((tiles, captions, _),) = shown
    assert captions == [
        *(f"dog at 88% (orange), is dog, cat, cat, cat and {number - 3} more (blue)" for number in (11, 10, 9))
    ]
    for tile, number in zip(tiles, (11, 10, 9), strict=True):
        torch.testing.assert_close(tile, expected(PIXELS[int((number == NUMBERS).nonzero())], number))


def test_without_names_labels_are_shown_and_what_is_empty_is_called_nothing(tmp_path, shown):
    empty = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long), "scores": torch.zeros(0)}

    def outputs(outputs, batch, stage):
        preds, target = outputs["preds"], outputs["target"]
        return {"preds": [empty, *preds[1:]], "target": [*target[:-1], {**empty}]}

    images = ImageLogger(4, output_transform=outputs)
    trainer(images, CSVLogger(tmp_path)).validate(Detects(), loader(PIXELS[:4], torch.zeros(4).long()), verbose=False)
    ((_, captions, _),) = shown
    assert sorted(captions) == [
        *("1 at 88% (orange), is 1 (blue)", "1 at 88% (orange), is 1 (blue)"),
        *("1 at 88% (orange), is nothing (blue)", "nothing (orange), is 1 (blue)"),
    ]


@pytest.mark.parametrize("given_by_step", [False, True])
def test_images_of_any_size_are_a_list(tmp_path, shown, given_by_step):
    pixels = [torch.rand(3, 16 + number, 30 - number) for number in range(12)]
    read = (lambda outputs, batch, stage: {**outputs, "images": batch[0]}) if given_by_step else None
    batches = loader(pixels, collate=lambda rows: tuple(zip(*rows, strict=True)))
    trainer(ImageLogger(12, output_transform=read), CSVLogger(tmp_path)).validate(Detects(), batches, verbose=False)
    ((tiles, *_),) = shown
    assert len(tiles) == 12
    assert {tile.shape for tile in tiles} == {(3, 27, 30)}
    for tile, number in zip(tiles, range(11, -1, -1), strict=True):
        image = pixels[int((number == NUMBERS).nonzero())]
        padded = torch.nn.functional.pad(image, (0, 30 - image.shape[2], 0, 27 - image.shape[1]))
        torch.testing.assert_close(tile, expected(padded, number))


@pytest.mark.parametrize("inference_mode", [True, False])
def test_a_run_report_and_metrics_of_the_same_steps(tmp_path, inference_mode):
    pytest.importorskip("pycocotools")
    callbacks = [
        ImageLogger(3, class_names=["cat", "dog"]),
        MetricsMonitor({"task": "detection", "num_classes": 2}, stages=["val"], log_plots=False),
        RunReport(tmp_path / "run"),
    ]
    fitter = Trainer(callbacks=callbacks, max_epochs=1, inference_mode=inference_mode, **QUIET)
    fitter.fit(Detects(), loader(), loader())
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "Largest errors (val)" in page
    assert "dog at 88% (orange), is dog, cat, cat, cat and 8 more (blue)" in page
    assert "val/map_50" in read_record(tmp_path / "run").logged_keys()


def test_lines_can_be_seen_on_large_images_that_are_shrunk(tmp_path):
    def enlarged(outputs, batch, stage):
        return {name: [{**one, "boxes": one["boxes"] * 50} for one in outputs[name]] for name in ("preds", "target")}

    callbacks = [ImageLogger(1, output_transform=enlarged), RunReport(tmp_path / "run")]
    large = loader(torch.ones(12, 3, 800, 800) / 2)
    Trainer(callbacks=callbacks, max_epochs=1, **QUIET).fit(Detects(), loader(), large)
    (part,) = read_record(tmp_path / "run").parts_of(Pictures)
    image = Image.open(io.BytesIO(b64decode(part.pictures[0])))
    pixels = np.asarray(image).reshape(-1, 3) / 255
    assert image.size == (160, 160)
    for color in (BLUE, ORANGE):
        assert (np.abs(pixels - np.array(color)).max(1) < 0.05).sum() > 20


def test_several_ranks_show_the_worst_of_all(tmp_path):
    torch.set_num_threads(1)
    callbacks = [ImageLogger(2), RunReport(tmp_path / "run")]
    ranks = {"strategy": "ddp_fork", "devices": 2, "max_epochs": 1, **QUIET}
    Trainer(callbacks=callbacks, **ranks).fit(Detects(), loader(), loader())
    (part,) = read_record(tmp_path / "run").parts_of(Pictures)
    assert [re.findall(r"and (\d+) more", caption) for caption in part.captions] == [["8"], ["7"]]


@cases(
    "changed, words",
    ({"preds": [{}] * 4}, "preds of val is a list: return a tensor, or dicts with boxes and labels, or give output"),
    ({"target": [{"boxes": torch.zeros(1, 4)}] * 4}, "preds of val is a list"),
    ({"preds": torch.zeros(4)}, "target of val is a list"),
    (
        {"preds": [{**of_image(0)[0], "boxes": torch.zeros(2, 5)}] * 4},
        r"boxes \(M, 4\), labels \(M,\) and.* give output_transform",
    ),
    ({"preds": [{**of_image(0)[0], "labels": torch.zeros(3)}] * 4}, r"for each image of val: boxes \(M, 4\)"),
    ({"target": [{"boxes": [[0, 0, 1, 1]], "labels": [1]}] * 4}, "ImageLogger needs tensors for each image of val"),
    ({"preds": [of_image(0)[0]] * 3}, r"one prediction for each image.*images \(4, 3, 16, 16\), preds \(3, 2, 6\)"),
)
def test_what_are_no_boxes_of_images_is_refused_with_the_remedy(tmp_path, changed, words):
    read = ImageLogger(2, output_transform=lambda outputs, batch, stage: {**outputs, **changed})
    with pytest.raises(MisconfigurationException, match=words):
        trainer(read, CSVLogger(tmp_path)).validate(Detects(), loader(), verbose=False)


class Stops(Detects):
    """Is stopped in the middle of the epoch, if it is told so."""

    stops = False

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1 and self.stops:
            raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_training_that_is_resumed_within_an_epoch_shows_the_same(tmp_path, shown):
    """The boxes that were kept are in the checkpoint."""

    def fit(folder, stops):
        module = Stops()
        module.stops = stops
        guard = AutoResume(tmp_path / folder, every_n_train_steps=1, ignore="module.stops")
        callbacks = [ImageLogger(3, stages=["train"]), guard]
        options = {**QUIET, "max_epochs": 1, "logger": CSVLogger(tmp_path / "logs"), "log_every_n_steps": 1}
        Trainer(callbacks=callbacks, **options).fit(module, loader())

    fit("whole", False)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit("resumed", True)
    fit("resumed", False)
    whole, resumed = shown
    assert whole[1] == resumed[1]
    assert all(torch.equal(*pair) for pair in zip(whole[0], resumed[0], strict=True))


def test_a_step_reads_nothing_from_the_device():
    with EmulatedCuda() as device:
        preds, target = zip(*(of_image(number) for number in range(4)), strict=True)
        preds, target = ([{k: v.cuda() for k, v in one.items()} for one in of_all] for of_all in (preds, target))
        images = PIXELS[:4].cuda()
        device.waits.clear()
        stacked = [stack_boxes(of_all) for of_all in (preds, target)]
        ranked = concat_samples([rank_predictions(images, *stacked, boxes=True)] * 2).top(3)
        assert not [wait for wait in device.waits if wait.blocks]
        assert ranked.predicted.shape == (3, 2, 6)
        drawn = overlay_boxes(images, [one["boxes"] for one in target], color=BLUE)
        assert drawn.device == images.device
    expected = overlay_boxes(PIXELS[:4], [of_image(number)[1]["boxes"] for number in range(4)], color=BLUE)
    assert torch.equal(drawn.cpu(), expected)
