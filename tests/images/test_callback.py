import warnings

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_tricks import ImageLogger
from tests.small import QUIET, Net, cases

PIXELS = torch.rand(24, 3, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(24) % 10


class Images(Net):
    """Images whose scores are what their first pixels say."""

    def __init__(self, scores=None):
        super().__init__()
        self.scores = scores

    def step(self, batch, batch_idx):
        images, labels = batch[0], batch[1]
        scores = self.net(images[:, 0].flatten(1)) if self.scores is None else self.scores(images, labels)
        return {"loss": nn.functional.cross_entropy(self.net(images[:, 0].flatten(1)), labels), "preds": scores,
                "target": labels}  # fmt: skip

    training_step = validation_step = test_step = step


def loader(images=PIXELS, labels=LABELS):
    return DataLoader(TensorDataset(images, labels), 4)


def trainer(images, logger, **arguments):
    return Trainer(
        callbacks=[images], **{**QUIET, "max_epochs": 2, "log_every_n_steps": 1, "logger": logger, **arguments}
    )


def pictures(folder):
    return sorted(path.name for path in folder.rglob("*.png"))


def test_each_nth_epoch_and_the_test_are_shown(tmp_path):
    fitter = trainer(ImageLogger(4, 2), CSVLogger(tmp_path), max_epochs=5, num_sanity_val_steps=1)
    fitter.fit(Images(), loader(), loader())
    assert pictures(tmp_path) == ["images_000012.png", "images_000024.png"]
    fitter.test(Images(), loader(), verbose=False)
    assert len(pictures(tmp_path)) == 3


def test_the_worst_mistakes_are_captioned_with_names(tmp_path, shown):
    def scores(images, labels):  # all right, but for two
        scores = nn.functional.one_hot(labels, 10).float() * 0.9 + 0.01
        wrong = (images[:, 0, 0, 0] == PIXELS[5, 0, 0, 0]) | (images[:, 0, 0, 0] == PIXELS[17, 0, 0, 0])
        return torch.where(wrong[:, None], scores.roll(1, 1), scores)

    names = [f"digit {number}" for number in range(10)]
    trainer(ImageLogger(3, class_names=names), CSVLogger(tmp_path)).validate(Images(scores), loader(), verbose=False)
    ((images, captions, marks),) = shown
    assert torch.equal(torch.stack(images[:2]).sort(0).values, PIXELS[[5, 17]].sort(0).values)
    assert sorted(captions[:2]) == ["digit 6 at 91%, is digit 5", "digit 8 at 91%, is digit 7"]
    assert (captions[2].endswith(" at 91%"), marks) == (True, [True, True, False])


@pytest.mark.parametrize("stage", ["train", "val"])
def test_an_epoch_shows_its_own_images_alone(tmp_path, shown, stage):
    class Brightens(Images):
        """Each epoch has other images, and is less wrong than the one before."""

        def step(self, batch, batch_idx):
            epoch = self.current_epoch
            scores = nn.functional.one_hot((batch[1] + 1) % 10, 10).float() * (10.0 - 3 * epoch)
            return {**super().step(batch, batch_idx), "images": batch[0] / 4 + epoch / 4, "preds": scores}

        training_step = validation_step = step

    images = ImageLogger(4, stages=(stage,), output_transform=lambda outputs, batch, stage: outputs)
    trainer(images, CSVLogger(tmp_path), max_epochs=3).fit(Brightens(), loader(), loader())
    assert len(shown) == 3
    for epoch, (tiles, *_) in enumerate(shown):
        assert torch.stack(tiles).min() >= epoch / 4
        assert torch.stack(tiles).max() <= (epoch + 1) / 4


def test_each_sample_is_shown_once_on_two_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "lightning_tricks.images.callback.functional.image_grid",
        lambda images, **options: torch.save(images, tmp_path / "shown.pt") or Image.new("RGB", (2, 2)),
    )

    def scores(images, labels):  # all wrong, the first one by most
        return nn.functional.one_hot((labels + 1) % 10, 10).float() * (1 - images[:, :1, 0, 0] / 2)

    images = PIXELS[:9] * 0 + torch.linspace(0, 1, 9).view(-1, 1, 1, 1)
    ranks = {"strategy": "ddp_fork", "devices": 2}
    fitter = trainer(ImageLogger(4), CSVLogger(tmp_path), **ranks)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using `DistributedSampler`")
        fitter.validate(Images(scores), loader(images, LABELS[:9]), verbose=False)
    assert torch.equal(torch.load(tmp_path / "shown.pt"), images[:4])


def test_normalized_images_and_values(tmp_path):
    mean, std = [0.4, 0.5, 0.6], [0.2, 0.2, 0.2]
    normalized = (PIXELS - torch.tensor(mean)[:, None, None]) / 0.2
    with pytest.raises(MisconfigurationException, match=r"cannot show the images of val: .* denormalize"):
        trainer(ImageLogger(), CSVLogger(tmp_path / "a")).validate(Images(), loader(normalized), verbose=False)
    logger = CSVLogger(tmp_path / "b")
    trainer(ImageLogger(mean=mean, std=std), logger).validate(Images(), loader(normalized), verbose=False)
    (file,) = (tmp_path / "b").rglob("*.png")
    grid = np.asarray(Image.open(file)).astype(float)
    given = [image.permute(1, 2, 0).numpy() * 255 for image in PIXELS]  # one of them is at the top left
    left = [np.abs(grid[2:66, x : x + 64][::8, ::8] - image).max() for x in range(2, 30) for image in given]
    assert min(left) <= 1

    class Regression(Images):
        def validation_step(self, batch, batch_idx):
            return {"preds": batch[1] * 2, "target": batch[1]}

    logger = CSVLogger(tmp_path / "c")
    trainer(ImageLogger(), logger).validate(Regression(), loader(labels=LABELS.float()), verbose=False)
    assert pictures(tmp_path / "c")


def test_without_a_logger_nothing_is_done():
    images = ImageLogger()
    trainer(images, False).validate(Images(), loader(), verbose=False)
    assert not images._kept


class _Returns(Images):
    def __init__(self, outputs):
        super().__init__()
        self.outputs = outputs

    def validation_step(self, batch, batch_idx):
        return self.outputs


@cases(
    "outputs, images, words",
    ({"preds": 1}, PIXELS, "needs preds and target of each step of val, but got preds: return a dict"),
    (
        {"preds": LABELS[:4], "target": LABELS[:4]},
        PIXELS[:, 0, 0],
        r"no images of shape .* which holds \(4, 8\), \(4,\)",
    ),
    ({"preds": LABELS[:3], "target": LABELS[:4]}, PIXELS, r"one prediction for each image.*preds \(3,\)"),
    ({"preds": LABELS[:4], "target": LABELS[:4]}, PIXELS * 300, "divide by 255|denormalize"),
)
def test_a_bad_first_batch_is_refused_in_words(tmp_path, outputs, images, words):
    with pytest.raises(MisconfigurationException, match=words):
        trainer(ImageLogger(), CSVLogger(tmp_path)).validate(_Returns(outputs), loader(images), verbose=False)


@pytest.mark.parametrize(("outputs", "what"), [(None, "nothing"), ({"loss": 1}, "loss"), (torch.ones(()), "a Tensor")])
def test_a_step_that_returns_nothing_to_show_warns_once(tmp_path, outputs, what):
    with pytest.warns(UserWarning, match=f"but got {what}: return a dict.*or leave 'val' out") as told:
        trainer(ImageLogger(), CSVLogger(tmp_path)).validate(_Returns(outputs), loader(), verbose=False)
    assert len([warning for warning in told if "ImageLogger" in str(warning.message)]) == 1
    assert not pictures(tmp_path)


@cases(
    "arguments, error, words",
    ({"n": 0}, ValueError, "n must be a whole number >= 1, got 0"),
    ({"every_n_epochs": 1.5}, TypeError, "every_n_epochs must be a whole number"),
    ({"mean": [0.5]}, ValueError, "mean and std belong together"),
    ({"shape": [8, 8]}, ValueError, r"shape must be \(channels, height, width\)"),
    ({"stages": "val"}, TypeError, "stages must be a list of names, got 'val'"),
    ({"stages": ["valid"]}, ValueError, "stages must be one of train, val, test"),
    ({"output_transform": 3}, TypeError, "output_transform must be a function"),
)
def test_wrong_arguments_are_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        ImageLogger(**arguments)


@pytest.mark.parametrize("is_value", [False, True])
def test_one_output_may_have_a_column_of_its_own(tmp_path, shown, is_value):
    """The softmax of one score is always 1, and its class 0."""
    for column in (True, False):

        def output(outputs, batch, stage, column=column):
            preds = batch[0][:, 0, 0, 0] * 4 - 2
            target = batch[1] * 1.5 if is_value else batch[1] % 2
            return {"preds": preds[:, None] if column else preds, "target": target[:, None] if column else target}

        logger = CSVLogger(tmp_path / str(column))
        trainer(ImageLogger(24, output_transform=output), logger).validate(Images(), loader(), verbose=False)
    (_, captions, _), (_, others, _) = shown
    assert captions == others
    assert len(set(captions)) > 12
