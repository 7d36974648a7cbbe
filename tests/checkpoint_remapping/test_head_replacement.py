"""`replace_head`: all names of a head, several heads, and what else knows the number of classes."""

import warnings

import pytest
import torch
import transformers
from lightning.pytorch import LightningModule
from torch import nn
from torchvision import models

from lightning_tricks import replace_head
from lightning_tricks.checkpoint_remapping import CheckpointError


class Aliased(LightningModule):
    """The usual module around a net, whose last layer has a second name."""

    def __init__(self, num_classes=5):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.ModuleDict({"body": nn.Linear(8, 8), "fc": nn.Linear(8, num_classes)})
        self.head, self.num_classes = self.net["fc"], num_classes
        self.accuracy = nn.Module()
        self.accuracy.num_classes = num_classes

    def forward(self, x):
        return self.head(self.net["body"](x))


@pytest.mark.parametrize("name", ["auto", "head", "net.fc"])
def test_all_names_of_a_head_get_the_new_one(name):
    model = Aliased()
    with pytest.warns(
        UserWarning, match=r"classes, 5, stays in 2 places: hparams\.num_classes, accuracy\.num_classes\."
    ):
        new = replace_head(model, 3, name)
    assert model(torch.ones(4, 8)).shape == (4, 3)
    assert model.head is model.net["fc"] is new
    assert (model.num_classes, model.accuracy.num_classes, model.hparams.num_classes) == (3, 5, 5)


def test_a_head_that_is_compiled_by_itself_is_refused():
    model = Aliased()
    model.head = torch.compile(model.head, backend="eager")
    with pytest.raises(CheckpointError, match=r"net\.fc is compiled by itself: replace it first"):
        replace_head(model, 3)
    assert model.net["fc"].out_features == 5


def _with(**parts):
    model = nn.Module()
    for name, part in {"body": nn.Linear(8, 8), **parts}.items():
        model.add_module(name, part)
    return model


def _two(box, *outputs):
    return box([nn.Linear(8, count) for count in outputs])


def _named(layers):
    return nn.ModuleDict(dict(zip(("cat", "dog"), layers, strict=True)))


def _deep(outputs):
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, outputs))


SEVERAL = {
    "a list": (lambda: _with(heads=_two(nn.ModuleList, 5, 5)), "heads.0, heads.1 all"),
    "of other numbers": (lambda: _with(heads=_two(nn.ModuleList, 5, 7)), "heads.0, heads.1 all"),
    "of one width": (lambda: _with(heads=_two(nn.ModuleList, 8, 8)), "heads.0, heads.1 all"),
    "a dict": (lambda: _with(heads=_two(_named, 5, 5)), "heads.cat, heads.dog all"),
    "of deep heads": (lambda: _with(heads=_named([_deep(5), nn.Linear(8, 7)])), "heads.cat.2, heads.dog all"),
    "of other inputs": (lambda: _with(heads=nn.ModuleList([nn.Linear(64, 5), nn.Linear(128, 5)])), "heads.0, heads.1"),
    "no known word": (lambda: _with(tasks=_two(_named, 5, 5)), r"such as name='tasks.cat' or name='tasks.dog'"),
    "attributes": (lambda: _with(class_head=nn.Linear(8, 5), box_head=nn.Linear(8, 4)), "class_head, box_head all"),
    "that are alike": (lambda: _with(policy=nn.Linear(8, 5), fc=nn.Linear(8, 5)), "policy, fc all"),
}


@pytest.mark.parametrize("kind", SEVERAL)
def test_of_several_heads_it_asks_which(kind):
    make, words = SEVERAL[kind]
    model = make()
    before = str(model)
    with pytest.raises(CheckpointError, match=words):
        replace_head(model, 3)
    assert str(model) == before


@pytest.mark.parametrize(
    "layers",
    [
        {"layers": nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)])},
        {"layers": nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 5)])},
        {"fc": nn.Linear(8, 8), "classifier": nn.Linear(8, 5)},
        {"fc": nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 5))},
    ],
)
def test_layers_that_feed_the_last_one_are_no_heads(layers):
    model = _with(**layers)
    last = list(model.modules())[-1]
    new = replace_head(model, 3)
    assert last not in list(model.modules())
    assert list(model.modules())[-1] is new


@pytest.mark.parametrize(
    ("name", "words"), [("googlenet", r"2 places: aux1\.fc2, aux2\.fc2"), ("inception_v3", r"1 place: AuxLogits\.fc")]
)
def test_auxiliary_heads_are_named(name, words):
    with torch.device("meta"):
        model = models.get_model(name, weights=None, init_weights=False)
    with pytest.warns(UserWarning, match=f"the old number of classes, 1000, stays in {words}"):
        assert replace_head(model, 3) is model.fc


class Fixed(nn.Module):
    """Its number of classes cannot be set."""

    num_classes = property(lambda self: 5)

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 5)


def test_a_number_that_cannot_be_set_is_named():
    model = Fixed()
    model.config = {"num_labels": 5}
    with pytest.warns(UserWarning, match=r"5, stays in 2 places: num_classes, config\.num_labels\. Change"):
        replace_head(model, 3)


def bert(labels, problem=None):
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=24, num_labels=labels, problem_type=problem)
    return transformers.BertForSequenceClassification(config)


@pytest.mark.parametrize(
    ("before", "problem", "after", "expected"),
    [
        (5, None, 4, None),
        (5, "multi_label_classification", 4, "multi_label_classification"),
        (3, "regression", 4, "regression"),
        (1, "regression", 4, None),
        (4, "single_label_classification", 1, None),
    ],
)
def test_a_model_of_transformers_trains_with_labels(before, problem, after, expected):
    model = bert(before, problem)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        replace_head(model, after)
    said = [str(warning.message) for warning in caught]
    assert any("problem_type was" in line for line in said) == (problem != expected)
    assert (model.num_labels, model.config.num_labels, model.config.problem_type) == (after, after, expected)
    if expected is None:
        labels = torch.tensor([3, 0, 1]) if after == 4 else torch.tensor([0.5, 1.0, 2.0])
        out = model.eval()(torch.ones(3, 7, dtype=torch.long), labels=labels)
        loss = nn.functional.cross_entropy if after == 4 else nn.functional.mse_loss
        torch.testing.assert_close(out.loss, loss(out.logits.squeeze(1) if after == 1 else out.logits, labels))
