"""The structure that hooks changed is restored in a fresh model: frozen parameters, modes, groups, masks."""

import copy
import types

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torchmetrics import MeanMetric, MetricCollection, MetricTracker

from lightning_tricks.auto_resume.core.attributes.model_structure import (
    resize_to_state_dict,
    restore_flags,
    restore_param_groups,
    restore_pruning_masks,
    restore_tracker_steps,
    tracker_steps,
)
from lightning_tricks.auto_resume.model_parts import Structure
from lightning_tricks.auto_resume.parts import Phase


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
        self.head = nn.Linear(3, 2)
        self.register_buffer("queue", torch.zeros(0, 3))
        self.register_buffer("seen", None)

    def forward(self, x):
        return self.head(self.body(x))


def started(model, *optimizers):
    """The structure of a model, as it is noted at the start of a fit."""
    structure = Structure(types.SimpleNamespace(optimizers=[*optimizers], callbacks=[]), model)
    structure.note(Phase.FIT_START)
    return structure


def trained():
    """A model whose structure changed, and the changes that were recorded."""
    torch.manual_seed(3)
    model = Model()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9)
    structure = started(model, optimizer)
    model.body[0].weight.requires_grad_(False)
    model.body[1].eval()
    optimizer.add_param_group({"params": [*model.body.parameters()], "lr": 0.01})
    prune.l1_unstructured(model.head, "weight", amount=2)
    model(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    return model, optimizer, structure.capture_shared({})


def resumed(changes, model, optimizer):
    fresh = Model()
    copied = torch.optim.SGD(fresh.head.parameters(), lr=0.1, momentum=0.9)
    resize_to_state_dict(fresh, model.state_dict(), changes["buffers"])
    fresh.load_state_dict(model.state_dict())
    restore_param_groups(fresh, [copied], changes["groups"])
    copied.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    restore_pruning_masks(fresh, changes["masks"])
    restore_flags({"": fresh}, changes["flags"])
    return fresh, copied


def test_a_fresh_model_trains_like_the_changed_one():
    model, optimizer, changes = trained()
    fresh, copied = resumed(copy.deepcopy(changes), model, optimizer)
    assert [one.training for one in fresh.modules()] == [one.training for one in model.modules()]
    for each, its_optimizer in ((model, optimizer), (fresh, copied)):
        torch.manual_seed(4)
        for _ in range(3):
            its_optimizer.zero_grad()
            each(torch.randn(5, 4)).square().sum().backward()
            its_optimizer.step()
    assert [name for name, one in fresh.named_parameters() if one.grad is None] == ["body.0.weight"]
    for name, value in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value), name
    assert float(fresh.head.weight.eq(0).sum()) == 2


def test_unchanged_values_are_not_saved():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    structure = started(model, optimizer)
    assert structure.capture_shared({}) == {
        "flags": {"": {}},
        "groups": None,
        "masks": {},
        "buffers": [],
        "trackers": {},
    }


@pytest.mark.parametrize("strict", [True, False])
def test_masks_that_the_state_dict_holds_and_masks_that_it_does_not(strict):
    """ModelPruning saves masked weights as plain ones, unless make_pruning_permanent=False."""
    model, _, changes = trained()
    weights = model.state_dict()
    if not strict:
        plain = {"head.weight": weights.pop("head.weight_orig") * weights.pop("head.weight_mask")}
        weights = {**weights, **plain}
    fresh = Model()
    resize_to_state_dict(fresh, weights, changes["buffers"])
    fresh.load_state_dict(weights)
    restore_pruning_masks(fresh, changes["masks"])
    assert torch.equal(fresh.head.weight_orig, model.head.weight_orig)
    assert torch.equal(fresh.head.weight_mask, model.head.weight_mask)
    assert torch.equal(fresh.head.weight, model.head.weight_orig * model.head.weight_mask)


def test_buffers_that_grew_or_were_added_or_none_are_loaded():
    model = Model()
    model.queue = torch.randn(7, 3)
    model.seen = torch.tensor(5)
    model.body.register_buffer("new", torch.ones(2))
    fresh = Model()
    shared = fresh.body
    fresh.again = nn.Identity()
    fresh.again._buffers["queue"] = fresh.queue  # bound twice, as a part that another part uses
    resize_to_state_dict(fresh, model.state_dict(), ["body.new"])
    fresh.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(fresh.queue, model.queue)
    assert fresh.again.queue is fresh.queue
    assert int(fresh.seen) == 5
    assert torch.equal(shared.new, torch.ones(2))


def test_added_parameters_are_named():
    model = Model()
    structure = started(model)
    prune.random_unstructured(model.head, "weight", amount=1)
    assert structure.unsaved({}) == [], "masked parameters are made again"
    model.extra = nn.Linear(2, 2)
    assert structure.unsaved({}) == ["the parameter extra.weight", "the parameter extra.bias"]


def test_groups_with_foreign_parameters_are_unchanged():
    model = Model()
    other = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([*model.head.parameters(), other], lr=0.1)
    before = [*optimizer.param_groups[0]["params"]]
    restore_param_groups(model, [optimizer], [[["head.weight"], [""]]])
    assert all(one is another for one, another in zip(optimizer.param_groups[0]["params"], before, strict=True))


def tracked(metric, count):
    tracker = MetricTracker(metric, maximize=True)
    for _ in range(count):
        tracker.increment()
    return {"": nn.ModuleDict({"tracker": tracker})}


@pytest.mark.parametrize("metric", [MeanMetric(), MetricCollection([MeanMetric()])])
@pytest.mark.parametrize("count", [0, 1, 4])
def test_a_tracker_has_as_many_metrics_as_it_had(metric, count):
    fresh = tracked(metric, count)
    restore_tracker_steps(fresh, tracker_steps(tracked(metric, 3)))
    assert tracker_steps(fresh) == {":tracker": 3}
    assert len({id(part) for part in fresh[""]["tracker"]}) == 4
