import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import Normalize
from torchvision.transforms.functional import pil_to_tensor

from lightning_tricks.images import denormalize, image_grid, to_numpy, to_pil, to_tensor
from lightning_tricks.images.functional import concat_samples, rank_predictions
from tests.small import cases

FEW = settings(max_examples=40, derandomize=True)
SIDES = st.integers(1, 9)


def pixels(height, width, channels, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


@FEW
@given(SIDES, SIDES, st.sampled_from([1, 2, 3, 4]), st.integers(0, 99))
def test_every_way_round_is_exact(height, width, channels, seed):
    array = pixels(height, width, channels, seed)
    image = to_pil(array)
    assert image.mode == {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}[channels]
    for dtype in (torch.uint8, torch.float32, torch.float64, torch.float16):
        tensor = to_tensor(array, dtype)
        assert tensor.dtype is dtype
        assert tensor.shape == (channels, height, width)
        assert (to_tensor(to_pil(tensor), torch.uint8) == to_tensor(array, torch.uint8)).all()
        assert (to_numpy(to_pil(tensor)) == array).all()
        assert torch.equal(to_tensor(to_numpy(tensor)), to_tensor(tensor))
    assert torch.equal(to_tensor(image, torch.uint8), pil_to_tensor(image))


@FEW
@given(st.integers(1, 3), SIDES, SIDES, st.sampled_from([1, 3]))
def test_several_images_are_a_batch(count, height, width, channels):
    batch = np.stack([pixels(height, width, channels, seed) for seed in range(count)])
    tensor = to_tensor(batch)
    assert tensor.shape == (count, channels, height, width)
    assert torch.equal(
        tensor, to_tensor([Image.fromarray(array.squeeze(-1) if channels == 1 else array) for array in batch])
    )
    assert (to_numpy(to_tensor(list(batch), torch.uint8)) == batch).all()
    assert (to_numpy(list(batch)) == batch).all()


def test_arrays_of_any_strides_and_kinds():
    array = pixels(4, 6, 3)
    for view in (array[::-1], array[:, ::-1], array[..., ::-1], array[::2, 1::3], np.asfortranarray(array)):
        assert (to_numpy(to_tensor(view, torch.uint8)) == view).all()
    assert to_tensor(array[..., 0]).shape == (1, 4, 6)
    sixteen = np.array([[0, 65535, 257]], dtype=np.uint16)
    assert to_tensor(sixteen).flatten().tolist() == pytest.approx([0, 1, 1 / 255])
    assert (to_tensor(sixteen, torch.uint8) == torch.tensor([[[0, 255, 1]]])).all()
    mask = np.array([[True, False]])
    assert to_tensor(mask, torch.uint8).flatten().tolist() == [255, 0]
    assert to_tensor(torch.tensor([[[True, False]]])).flatten().tolist() == [1.0, 0.0]
    frozen = array.copy()
    frozen.flags.writeable = False
    assert to_tensor(frozen).shape == (3, 4, 6)


def test_no_memory_is_shared():
    array = pixels(2, 2, 3)
    before = array.copy()
    for image in (array, torch.from_numpy(array).permute(2, 0, 1)):
        tensor = to_tensor(image, torch.uint8)
        tensor.zero_()
    tensor = torch.rand(3, 2, 2)
    kept = tensor.clone()
    to_tensor(tensor).zero_()
    to_numpy(tensor)[:] = 0
    assert (array == before).all()
    assert torch.equal(tensor, kept)


@pytest.mark.parametrize("mode", ["1", "P", "CMYK", "YCbCr", "HSV", "LA", "I;16", "RGBX"])
def test_pil_images_of_any_mode(mode):
    if mode == "I;16":
        image = Image.fromarray(np.array([[0, 65535]], dtype=np.uint16))
        assert to_tensor(image).flatten().tolist() == [0.0, 1.0]
        return
    image = Image.fromarray(pixels(4, 4, 3)).convert(mode)
    channels = {"1": 1, "LA": 2}.get(mode, 3)
    expected = image.convert({1: "L", 2: "LA", 3: "RGB"}[channels])
    assert torch.equal(to_tensor(image, torch.uint8), pil_to_tensor(expected))


def test_a_transparent_palette_keeps_its_alpha():
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 255, 0])
    image.putpixel((1, 0), 1)
    image.info["transparency"] = 0
    assert to_tensor(image, torch.uint8)[:, 0].T.tolist() == [[255, 0, 0, 0], [0, 255, 0, 255]]


@cases(
    "image, error, words",
    (
        torch.rand(5, 6, 3),
        ValueError,
        r"got \(5, 6, 3\)\. The channels seem to be in another dimension: call permute\(2, 0, 1\)",
    ),
    (np.zeros((3, 4, 6), np.uint8), ValueError, r"in another dimension: call transpose\(1, 2, 0\)"),
    (torch.rand(4, 6), ValueError, r"Images in a tensor must have the shape \(C, H, W\)"),
    (torch.rand(3, 0, 4), ValueError, "An image must have at least one pixel"),
    (torch.rand(3, 4, 4) * 255, ValueError, r"to 2\d.*: divide by 255"),
    (torch.linspace(-1, 1, 48).view(3, 4, 4), ValueError, r"got -1 to 1: denormalize"),
    (torch.randn(3, 9, 9), ValueError, r"in \[0, 1\], got -.* denormalize\(images, mean, std\)"),
    (torch.full((3, 4, 4), torch.nan), ValueError, r"in \[0, 1\], got nan"),
    (torch.zeros(3, 4, 4, dtype=torch.int64), TypeError, r"got int64: convert them with \.to\(torch\.uint8\)"),
    (Image.new("F", (2, 2)), ValueError, "mode 'F' does not define which value is white"),
    ("cat.png", TypeError, "must be a tensor, an array or a PIL image, got 'cat.png'"),
    (3, TypeError, r"got 3 \(int\)"),
)
def test_what_is_no_image_is_refused_in_words(image, error, words):
    with pytest.raises(error, match=words):
        to_tensor(image)


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match=r"dtype must be torch\.uint8 or a floating type, got torch\.int64"):
        to_tensor(torch.rand(3, 2, 2), torch.int64)
    with pytest.raises(ValueError, match=r"one image, got 2 of them: to_pil\(images\[0\]\), or image_grid"):
        to_pil(torch.rand(2, 3, 4, 4))
    with pytest.raises(ValueError, match="3 channels, got"):
        denormalize(torch.rand(3, 2, 2), [0.5, 0.5], [0.5, 0.5])
    with pytest.raises(ValueError, match=r"std must be above 0, got 0\.0"):
        denormalize(torch.rand(3, 2, 2), 0.5, 0.0)
    with pytest.raises(TypeError, match="images must have a floating-point dtype"):
        denormalize(torch.zeros(3, 2, 2, dtype=torch.uint8), 0.5, 0.5)
    with pytest.raises(ValueError, match="no images"):
        image_grid([])
    with pytest.raises(ValueError, match="2 images need as many captions, got 1"):
        image_grid(torch.rand(2, 3, 4, 4), captions=["one"])
    with pytest.raises(ValueError, match="2 images need as many mistakes, got 1"):
        image_grid(torch.rand(2, 3, 4, 4), mistakes=[True])


@pytest.mark.parametrize("shape", [(3, 4, 5), (2, 3, 4, 5)])
def test_denormalize_undoes_torchvisions_normalize(shape):
    images = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    torch.testing.assert_close(denormalize(Normalize(mean, std)(images), mean, std), images)


def test_a_grid_holds_each_image_in_its_place():
    images = torch.stack([torch.full((3, 8, 8), shade) for shade in (0.0, 0.2, 0.4, 0.6, 0.8)])
    grid = np.asarray(image_grid(images, columns=3, padding=1, least_side=16))
    assert grid.shape == (2 * 16 + 3, 3 * 16 + 4, 3)
    for number, shade in enumerate((0, 51, 102, 153, 204)):
        top, left = 1 + number // 3 * 17, 1 + number % 3 * 17
        assert (grid[top : top + 16, left : left + 16] == shade).all()
    assert (grid[18:, 35:] == 255).all()


def test_a_grid_of_all_kinds_and_sizes():
    images = [pixels(8, 8, 3), to_pil(pixels(20, 30, 4)), torch.rand(1, 5, 9)]
    grid = image_grid(images, captions=["one", "wrong", ""], mistakes=[False, True, False])
    assert grid.mode == "RGB"
    red = (np.asarray(grid).astype(int) @ [1, -1, 0]) > 100
    assert red.any()
    plain = np.asarray(image_grid([pixels(8, 8, 1)], captions=["one"]))
    assert (plain[..., 0] == plain[..., 1]).all()


def test_captions_stand_in_the_middle_below_their_images():
    captions = ["", "one", "two", "III", "", "a longer one"]
    grid = np.asarray(image_grid([np.full((64, 64), 255, np.uint8)] * 6, columns=3, captions=captions)).astype(int)
    height, width = 64 + 14, (grid.shape[1] - 4 * 2) // 3
    for number, caption in enumerate(captions):
        top, left = 2 + number // 3 * (height + 2), 2 + number % 3 * (width + 2)
        rows, columns = np.nonzero(grid[top : top + height, left : left + width].sum(-1) < 500)
        assert len(rows) > 0 if caption else len(rows) == 0
        if caption:
            assert 64 <= rows.min() < rows.max() < height
            assert abs((rows.min() + rows.max()) / 2 - (64 + 6.5)) <= 2
            assert abs((columns.min() + columns.max()) / 2 - (width - 1) / 2) <= 2


def test_confident_mistakes_come_first():
    scores = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.45, 0.55]])
    target = torch.tensor([0, 0, 1, 1])  # the second and the third one are wrong
    images = torch.arange(4.0).reshape(4, 1, 1, 1).expand(4, 1, 2, 2)
    for preds, logits in ((scores, False), (scores.log(), True)):
        best = rank_predictions(images, preds, target, logits=logits).top(4)
        assert best.images[:, 0, 0, 0].tolist() == [1, 2, 3, 0]
        assert best.confidence.tolist() == pytest.approx([0.8, 0.6, 0.55, 0.9])
        assert best.predicted.tolist() == [1, 0, 1, 0]
    binary = rank_predictions(images, scores[:, 1], target).top(4)
    assert binary.images[:, 0, 0, 0].tolist() == [1, 2, 3, 0]
    halves = [rank_predictions(images[part], scores[part], target[part]) for part in (slice(0, 2), slice(2, 4))]
    assert concat_samples(halves).top(2).images[:, 0, 0, 0].tolist() == [1, 2]
    larger = rank_predictions(images.repeat(1, 1, 2, 2), scores, target)
    assert concat_samples([halves[0], larger]).images.shape == (4, 1, 4, 4)
    values = rank_predictions(
        images, torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.5, 5.0, 3.0, 3.9]), values=True
    ).top(2)
    assert values.images[:, 0, 0, 0].tolist() == [1, 0]
    classes = rank_predictions(images, torch.tensor([0, 1, 1, 1]), target).top(1)
    assert classes.images[:, 0, 0, 0].tolist() == [1]
