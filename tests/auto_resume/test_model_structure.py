"""The structure that hooks changed: what is saved of it, and what a fresh model takes."""

import types

import torch
from torch import nn
from torch.nn.utils import prune

from lightning_tricks.auto_resume.core.attributes.model_structure import (
    resize_to_state_dict,
    restore_param_groups,
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


def test_unchanged_values_are_not_saved():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    structure = started(model, optimizer)
    assert structure.capture_shared({}) == {
        "flags": {"": {}},
        "groups": None,
        "buffers": [],
    }


def test_masks_that_the_state_dict_holds_are_loaded():
    model, fresh = Model(), Model()
    prune.l1_unstructured(model.head, "weight", amount=2)
    resize_to_state_dict(fresh, model.state_dict(), [])
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh.head.weight_mask, model.head.weight_mask)


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
    model.extra = nn.Linear(2, 2, bias=False)
    assert structure.unsaved({}) == ["the parameter head.weight_orig", "the parameter extra.weight"]


def test_groups_with_foreign_parameters_are_unchanged():
    model = Model()
    other = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([*model.head.parameters(), other], lr=0.1)
    before = [*optimizer.param_groups[0]["params"]]
    restore_param_groups(model, [optimizer], [[["head.weight"], [""]]])
    assert all(one is another for one, another in zip(optimizer.param_groups[0]["params"], before, strict=True))
