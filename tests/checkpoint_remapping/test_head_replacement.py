"""`replace_head`: all names of a head, several heads, and what else knows the number of classes."""

import pytest
import timm
import torch
import transformers
from lightning.pytorch import LightningModule
from torch import nn
from torchvision import models

from lightning_tricks import replace_head
from lightning_tricks.checkpoint_remapping import CheckpointError
from tests.small import cases, recorded_warnings


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
    words = r"classes, 5, stays in 2 places: hparams\.num_classes, accuracy\.num_classes\."
    with pytest.warns(UserWarning, match=words):
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


@cases(
    "layers",
    {"layers": nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)])},
    {"layers": nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 5)])},
    {"fc": nn.Linear(8, 8), "classifier": nn.Linear(8, 5)},
    {"fc": nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 5))},
)
def test_layers_that_feed_the_last_one_are_no_heads(layers):
    model = _with(**layers)
    last = list(model.modules())[-1]
    new = replace_head(model, 3)
    assert last not in list(model.modules())
    assert list(model.modules())[-1] is new


@cases(
    "make, words",
    (models.detection.maskrcnn_resnet50_fpn, r"box_predictor.cls_score, roi_heads.mask_predictor.mask_fcn_logits all"),
    (
        models.detection.fasterrcnn_mobilenet_v3_large_fpn,
        r"box_predictor.cls_score, roi_heads.box_predictor.bbox_pred a",
    ),
)
def test_one_of_several_predictors_is_not_picked(make, words):
    with torch.device("meta"):
        model = make(weights=None, weights_backbone=None)
    with pytest.raises(CheckpointError, match=words):
        replace_head(model, 3)


@cases("kind, size", (nn.Conv1d, 1), (nn.Conv3d, 3))
def test_a_convolution_of_any_dimensions_is_replaced(kind, size):
    model = _with(classifier=kind(4, 5, 1, bias=False))
    new = replace_head(model, 3)
    assert type(new) is kind
    assert new(torch.ones(2, 4, *[2] * size)).shape[1] == 3


@cases("name, words", ("googlenet", r"2 places: aux1\.fc2, aux2\.fc2"), ("inception_v3", r"1 place: AuxLogits\.fc"))
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


@cases(
    "before, problem, after, expected",
    (5, None, 4, None),
    (5, "multi_label_classification", 4, "multi_label_classification"),
    (3, "regression", 4, "regression"),
    (1, "regression", 4, None),
    (4, "single_label_classification", 1, None),
)
def test_a_model_of_transformers_trains_with_labels(before, problem, after, expected):
    model = bert(before, problem)
    with recorded_warnings() as caught:
        replace_head(model, after)
    said = [str(warning.message) for warning in caught]
    assert any("problem_type was" in line for line in said) == (problem != expected)
    assert (model.num_labels, model.config.num_labels, model.config.problem_type) == (after, after, expected)
    if expected is None:
        labels = torch.tensor([3, 0, 1]) if after == 4 else torch.tensor([0.5, 1.0, 2.0])
        out = model.eval()(torch.ones(3, 7, dtype=torch.long), labels=labels)
        loss = nn.functional.cross_entropy if after == 4 else nn.functional.mse_loss
        torch.testing.assert_close(out.loss, loss(out.logits.squeeze(1) if after == 1 else out.logits, labels))


def small():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 5))


@cases(
    "make, layer",
    (lambda: models.resnet18(), "fc"),
    (lambda: models.squeezenet1_0(), "classifier.1"),
    (lambda: timm.create_model("vit_tiny_patch16_224"), "head"),
    (lambda: transformers.ViTForImageClassification(transformers.ViTConfig(num_hidden_layers=1)), "classifier"),
    (lambda: small(), "3"),
    (lambda: nn.DataParallel(small()), "module.3"),
)
def test_heads_are_found(make, layer):
    with torch.device("meta"):
        model = make()
    old = model.get_submodule(layer)
    new = replace_head(model, 7)
    assert model.get_submodule(layer) is new is not old
    assert isinstance(old, type(new))  # timm has a Linear of its own
    assert new.weight.shape == (7, *old.weight.shape[1:])
    classes = [getattr(model, "num_classes", None), getattr(getattr(model, "config", None), "num_labels", None)]
    assert {count for count in classes if count} <= {7}


def test_a_layer_of_another_depth_is_no_second_head():
    model = nn.Sequential()
    model.aux = nn.ModuleDict({"head": nn.Linear(4, 5)})
    model.head = nn.Linear(4, 5)
    with pytest.warns(UserWarning, match=r"the old number of classes, 5, stays in 1 place.*: aux\.head\."):
        assert replace_head(model, 7) is model.head
    assert model.aux["head"].out_features == 5


def test_unclear_heads_are_refused():
    deit = timm.create_model("deit_tiny_distilled_patch16_224")
    with pytest.raises(CheckpointError, match=r"head, head_dist all look like heads: replace each by its name"):
        replace_head(deit, 7)
    with pytest.warns(UserWarning, match=r"the old number of classes, 1000, stays in 1 place.*: head\."):
        assert replace_head(deit, 7, name="head_dist") is deit.head_dist
    config = transformers.BertConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=32)
    with pytest.raises(CheckpointError, match=r"the last layer, pooler.dense \(Linear\), is not known to be a head"):
        replace_head(transformers.BertModel(config), 3)
    with pytest.raises(CheckpointError, match="has no Linear and no convolution to replace"):
        replace_head(nn.ReLU(), 3)
    with pytest.raises(CheckpointError, match=r"1 is a BatchNorm2d, not a Linear or a convolution: name='1' cannot"):
        replace_head(small(), 3, name="1")
    with pytest.raises(ValueError, match="num_classes must be a whole number >= 1, got 0"):
        replace_head(small(), 0)


@pytest.mark.parametrize("name", ["auto", ""])
def test_a_model_that_is_itself_a_layer_has_no_head(name):
    model = nn.Linear(4, 5)
    with pytest.raises(CheckpointError, match="the model is itself a Linear, in no other module"):
        replace_head(model, 3, name)
    assert list(model.children()) == []


def test_a_model_without_a_head_is_not_told_to_replace_its_last_convolution():
    with pytest.raises(CheckpointError) as caught:
        replace_head(timm.create_model("resnet10t", num_classes=0), 7)
    assert str(caught.value) == (
        "the last layer, layer4.0.downsample.2 (BatchNorm2d), is not known to be a head: name the layer that outputs "
        "the scores."
    )
    with pytest.raises(CheckpointError, match=r"2 \(BatchNorm1d\), is not known .* scores, such as name='1'"):
        replace_head(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Linear(4, 5), nn.BatchNorm1d(5)), 7)


def test_a_new_head_trains_in_a_frozen_model():
    model = small().requires_grad_(False)
    assert all(parameter.requires_grad for parameter in replace_head(model, 7).parameters())


def test_a_new_convolution_has_all_options_of_the_old_one():
    model = nn.Sequential(nn.Conv2d(4, 6, 3, padding=2, dilation=2, groups=2, padding_mode="reflect"))
    image = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    expected = model(image).shape
    new = replace_head(model, 8, name="0")
    assert model(image).shape == (1, 8, *expected[2:])
    assert (new.dilation, new.groups, new.padding_mode) == ((2, 2), 2, "reflect")
