"""What functions keep in closures, default arguments, partials and global variables is restored, or named."""

import dataclasses
import functools
import random
import sys
import types

import numpy as np
import pytest
import torch
from torch import nn

from lightning_tricks.auto_resume.core.attributes.object_walk import ObjectWalk
from lightning_tricks.auto_resume.core.attributes.restoring import restore_changes
from lightning_tricks.auto_resume.core.attributes.tracking import AttributeTracker
from tests.auto_resume.test_attributes import Holder, resumed

COUNT, LAST, NOISE, SEEN = 0, None, np.random.default_rng(1), []
LIMIT = 4
IN_MODULES = types.SimpleNamespace(noise=random.Random(2))


def helper():
    return NOISE.normal() + IN_MODULES.noise.random()


class Counts:
    """Its method reads and sets global variables, also by way of a function."""

    def draw(self):
        global COUNT, LAST
        COUNT, LAST = COUNT + 1, float(COUNT)
        SEEN.append(min(COUNT, LIMIT))
        return COUNT, LAST, len(SEEN), helper()


def test_global_variables_are_restored():
    module = sys.modules[__name__]
    before = {"COUNT": 0, "LAST": None, "SEEN": []}
    states = NOISE.bit_generator.state, IN_MODULES.noise.getstate()
    tracker = AttributeTracker({"it": Counts()})
    old = Counts()
    old.draw()
    changes = tracker.changes()
    assert f"globals.{__name__}.LIMIT" not in changes["values"], "what did not change is not saved"
    expected = old.draw()
    vars(module).update(before)
    NOISE.bit_generator.state = states[0]
    IN_MODULES.noise.setstate(states[1])
    assert restore_changes({"it": Counts()}, changes) == {}
    assert Counts().draw() == expected
    vars(module).update(before)


def noisy(x, rng):
    return x + rng.normal()


class Augments:
    def __init__(self):
        self.rng = random.Random(3)

    def apply(self, x):
        return x + self.rng.gauss(0, 1)


def _closure():
    rng, count = torch.Generator().manual_seed(4), 0

    def draw(x):
        nonlocal count
        count += 1
        return x + count + torch.rand(1, generator=rng).item()

    return draw


def _default():
    def draw(x, rng=np.random.default_rng(5), *, seen=[]):  # noqa: B006, B008  # as people write it
        seen.append(x)
        return x + rng.normal() + len(seen)

    return draw


def _decorated():
    inner = _closure()

    @functools.wraps(inner)
    def draw(x):
        return inner(x)

    return draw


@pytest.mark.parametrize(
    "make",
    [
        _closure,
        _default,
        _decorated,
        lambda: functools.partial(noisy, rng=np.random.default_rng(6)),
        lambda: functools.partial(functools.partial(lambda rng, x: x + rng.random(), random.Random(7))),
        lambda: Augments().apply,
    ],
    ids=["closure", "default argument", "decorated", "partial", "partial of a partial", "bound method"],
)
@pytest.mark.parametrize("place", ["an attribute", "in a list", "by itself, as a loader has one to collate"])
def test_what_a_function_holds_is_restored(make, place, tmp_path):
    def holder():
        inside = {"an attribute": lambda: Holder(it=make()), "in a list": lambda: Holder(it=[make()])}
        return inside.get(place, make)()

    def draw(one):
        it = one.it if isinstance(one, Holder) else one
        return (it[0] if isinstance(it, list) else it)(1.0)

    old, fresh, failed = resumed(holder, draw, tmp_path)
    assert failed == {}
    assert [draw(old) for _ in range(3)] == [draw(fresh) for _ in range(3)]


def test_a_checkpoint_replaces_no_function_and_no_module():
    path = f"globals.{__name__}"
    change = {"of": path, "value": 1, "in_place": False}
    changes = {"values": {f"{path}.{name}": {**change, "name": name} for name in ("helper", "Augments", "np")}}
    failed = restore_changes({"it": Counts()}, {**changes, "lost": {}})
    assert set(failed.values()) == {"it is a function, a class or a module in this run"}
    assert len(failed) == 3


def test_modules_that_import_each_other(monkeypatch):
    names = ("first_module", "second_module")
    modules = [types.ModuleType(name) for name in names]
    for module, name, other in zip(modules, names, reversed(modules), strict=True):
        monkeypatch.setitem(sys.modules, name, module)
        exec("def step():\n    other.other.count += 1", vars(module))
        vars(module).update(other=other, count=0)
    held = Holder(step=modules[0].step)
    tracker = AttributeTracker({"it": held})
    held.step()
    changes = tracker.changes()
    assert changes["lost"] == {}
    assert list(changes["values"]) == ["globals.first_module.count"]


def test_a_variable_that_becomes_a_function_is_reported():
    count = 0

    def step():
        nonlocal count
        count = step

    held = Holder(step=step)
    tracker = AttributeTracker({"it": held})
    step()
    assert tracker.changes()["lost"].keys() == {"it.step.count"}


def test_functions_of_packages_are_not_walked_and_models_only_with_the_model():
    net = nn.Linear(2, 2)

    def policy(x):
        return net(torch.nn.functional.relu(x))

    data = ObjectWalk.from_roots({"data": Holder(policy=policy)}, with_code=True)
    assert not any("torch" in path for path in data.owners)
    model = nn.Sequential()
    model.policy = policy
    tracker = AttributeTracker({"module": model})
    net.weight.data += 1
    assert list(tracker.changes()["values"]) == ["module.policy"]


@dataclasses.dataclass
class Facts:
    """Its `__init__` is generated, with a closure of what dataclasses needs."""

    seen: list = dataclasses.field(default_factory=list)


def test_generated_methods_hold_nothing_of_the_user():
    holder = Holder(facts=None)
    tracker = AttributeTracker({"it": holder})
    holder.facts = Facts([1])
    assert not tracker.changes()["lost"]
    assert not any("__init__" in path for path in ObjectWalk.from_roots({"it": holder}, with_code=True).slots)
