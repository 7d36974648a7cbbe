"""What counts as a change between two configurations, without a Trainer."""

import argparse
import enum
import functools
import json
import math
import sys
import time
import types
import uuid
from dataclasses import dataclass
from pathlib import Path, PurePath

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from lightning_tricks.auto_resume.core.configuration import (
    IN_USE,
    Change,
    Configuration,
    Describer,
    changes_between,
    describe_loaders,
    describe_optimizers,
    flatten,
    is_longer,
    numbered,
    own_files,
    plain,
)
from lightning_tricks.auto_resume.core.data.loader_objects import fingerprints

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(
    SCALARS, lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(), parts, max_size=3)
)


def changes(before: dict, now: dict) -> list[str]:
    return [str(one) for one in changes_between(before, now)]


@given(VALUES)
def test_a_value_that_was_saved_is_no_change(value):
    saved = json.loads(json.dumps(plain(value)))
    assert changes(dict(flatten("x", saved)), dict(flatten("x", value))) == []


@given(st.floats(1e-6, 1e6), st.floats(1.001, 10.0))
def test_another_number_is_a_change(number, factor):
    assert changes({"lr": number}, {"lr": number * factor}) == [f"lr: {number!r} -> {number * factor!r}"]


@pytest.mark.parametrize(("before", "now"), [({"units": 8}, 8), (8, {"units": 8}), ({"units": 8}, None)])
def test_another_kind_of_value_is_a_change(before, now):
    assert changes({"layers": [before]}, {"layers": [now]}) == [f"layers: [{before}] -> [{now}]"]


class Colour(enum.Enum):
    RED, BLUE = 1, 2


@dataclass
class Point:
    x: float = 1.0


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.5), 0.5),
        (torch.tensor(2), 2),
        (math.nan, "nan"),
        (Colour.RED, "RED"),
        (torch.float16, "torch.float16"),
        (torch.nn.ReLU, "ReLU"),
        (plain, "plain"),
        ((1, {"a": (2,)}), [1, {"a": [2]}]),
        ({3, 1}, [1, 3]),
        (argparse.Namespace(a=Point()), {"a": {"x": 1.0}}),
        (torch.zeros(3), "a Tensor"),
        (list(range(2000)), "a list"),
        (object(), "a object"),
        (b"bytes", "a bytes"),
    ],
)
def test_values_are_plain(value, expected):
    assert plain(value) == expected
    json.dumps(plain(value))


def of_a(factor: float, offset: float = 0.5):
    def with_closure(step: int, power: int = 2) -> float:
        raise AssertionError("it is called")

    def other(step: int) -> float:
        return with_closure(step) * factor + offset + LIMIT

    return other


def first(step):
    raise AssertionError("it is called")


def second(step):
    raise AssertionError("it is called")


LIMIT, OTHERS, INNER = 3, {"rate": 0.5, "port": 1, 7: 0.1}, types.SimpleNamespace(rate=0.5, port=1)


def helper():
    return LIMIT + OTHERS["rate"] + INNER.rate


class Free:
    """An object with any attributes, of which none is an argument."""

    def __init__(self, **options):
        vars(self).update(options)


class NamesGlobals(Free):
    def __call__(self, step):
        return helper()


class NamesThemInItsConstructor:
    def __init__(self):
        self.rate = min(LIMIT, 1)


class Image(Dataset):
    def __init__(self, root: str, crop: int = 4, transform=None, mean=(0.5, 0.5)):
        self.root, self.crop, self.transform, self.mean = root, crop, transform, mean
        self.uid, self.samples, self.epoch = uuid.uuid4().hex, [*range(9)], time.time()

    def __len__(self):
        return 9


class Lookahead(torch.optim.SGD):
    def __init__(self, inner, k):
        super().__init__(inner.param_groups, lr=9.0)
        self.inner, self.steps, self.param_groups = inner, k, inner.param_groups


def free(**options):
    return lambda: Free(**options)


def with_globals(owner=NamesGlobals, **values):
    """Return what makes an object after global variables have been set."""

    def make():
        for name, value in values.items():
            sys.modules[__name__].__dict__[name] = value
        return owner()

    return make


def new_class(name, **members):
    """Return a class of this module that nothing there has."""
    return lambda: type(name, (nn.Module,), {"__module__": __name__, **members})()


def image(**options):
    return lambda: Image(**{"root": "/tmp/a", **options})


def lookahead(k=5, lr=0.1):
    parameter = nn.Parameter(torch.zeros(1))
    return lambda: Lookahead(torch.optim.SGD([parameter], lr=lr), k)


def scheduled(kind, **options):
    def make():
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        return types.SimpleNamespace(
            scheduler=kind(optimizer, **options), interval="", frequency=1, monitor="", strict=1
        )

    return make


def power(base):
    return scheduled(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: base**step)


def several(crop):
    return lambda: ConcatDataset([Image("a"), Image("a", crop)])


def described(make):
    """Return the configuration of what is made, as a checkpoint has it."""
    made, found = make(), Configuration()
    if isinstance(made, Dataset):
        found = describe_loaders([DataLoader(made)], "data")
    elif isinstance(made, torch.optim.Optimizer):
        found = describe_optimizers([made], [], [[["x"]]])
    elif hasattr(made, "scheduler"):
        found = describe_optimizers([], [made], [])
    else:
        found.kinds["it"] = type(made).__name__
        Describer(found).add("it", made)
    return Configuration.from_saved(json.loads(json.dumps(vars(found))))


ENCODER = functools.partial(nn.TransformerEncoderLayer, 4, 2)
GLOBALS = f"globals.{__name__}"
# before, now, the names that are refused, the names that are told
EDITS = {
    "label smoothing": (
        nn.CrossEntropyLoss,
        lambda: nn.CrossEntropyLoss(label_smoothing=0.1),
        "it.label_smoothing",
        "",
    ),
    "a mode of a library": (nn.MSELoss, lambda: nn.MSELoss(reduction="sum"), "it.reduction", ""),
    "norm_first": (ENCODER, lambda: ENCODER(norm_first=True), "it.norm_first", ""),
    "padding_mode": (
        lambda: nn.Conv1d(1, 1, 1),
        lambda: nn.Conv1d(1, 1, 1, padding_mode="circular"),
        "it.padding_mode",
        "",
    ),
    "dropout of a base class": (lambda: nn.LSTM(2, 2, 2), lambda: nn.LSTM(2, 2, 2, dropout=0.1), "it.dropout", ""),
    "a number that is no argument": (free(rate=0.1), free(rate=0.2), "it.rate", ""),
    "a flag": (free(mixes=True), free(mixes=False), "it.mixes", ""),
    "none": (free(rate=None), free(rate=0.2), "it.rate", ""),
    "a member": (free(colour=Colour.RED), free(colour=Colour.BLUE), "it.colour", ""),
    "a class that is held": (free(layer=nn.ReLU), free(layer=nn.GELU), "it.layer", ""),
    "numbers": (free(sizes=[1, 2]), free(sizes=[1, 2, 3]), "it.sizes", ""),
    "an entry": (free(weights={"a": {"b": 1.0}}), free(weights={"a": {"b": 0.5}}), "it.weights.a.b", ""),
    "a new entry": (free(weights={"a": 1.0}), free(weights={"a": 1.0, "b": 0.5}), "it.weights.keys", ""),
    "an inner object": (free(loss=Free(gamma=2)), free(loss=Free(gamma=3)), "it.loss.gamma", ""),
    "objects in a list": (free(of=[Free(p=1), nn.ReLU()]), free(of=[Free(p=2), nn.ReLU()]), "it.of[0].p", ""),
    "a private number": (free(_rate=0.1), free(_rate=0.2), "", "it._rate"),
    "a text": (free(tag="a"), free(tag="b"), "", "it.tag"),
    "a new text": (free(tags={"a": "b"}), free(tags={"a": "b", "c": "d"}), "", ""),
    "a text in a config": (
        free(cfg=argparse.Namespace(tag="a", n=1)),
        free(cfg=argparse.Namespace(tag="b", n=1)),
        "",
        "it.cfg.tag",
    ),
    "a path": (free(folder=PurePath("a")), free(folder=PurePath("b")), "", "it.folder"),
    "verbose": (free(verbose=True), free(verbose=False), "", "it.verbose"),
    "a uuid": (lambda: Free(uid=uuid.uuid4().hex), lambda: Free(uid=uuid.uuid4().hex), "", "it.uid"),
    "an address": (lambda: Free(at=id(Free())), lambda: Free(at=id(EDITS)), "", "it.at"),
    "a hash": (free(seed=2**61 - 5), free(seed=-(2**60)), "", "it.seed"),
    "a clock": (lambda: Free(at=time.time()), lambda: Free(at=time.time() + 5), "", "it.at"),
    "whole seconds": (lambda: Free(at=int(time.time())), lambda: Free(at=int(time.time()) - 99), "", "it.at"),
    "a stopwatch": (lambda: Free(at=time.perf_counter()), lambda: Free(at=time.perf_counter()), "", "it.at"),
    "a constant of a class": (new_class("Net", RATE=0.1), new_class("Net", RATE=0.2), "it.RATE", ""),
    "a constant of the module": (with_globals(LIMIT=3), with_globals(LIMIT=4), f"{GLOBALS}.LIMIT", ""),
    "an entry that is named": (
        with_globals(OTHERS=OTHERS),
        with_globals(OTHERS={**OTHERS, "rate": 1}),
        f"{GLOBALS}.OTHERS.rate",
        "",
    ),
    "an entry that is not": (with_globals(OTHERS=OTHERS), with_globals(OTHERS={**OTHERS, "port": 2}), "", ""),
    "an attribute that is named": (
        with_globals(INNER=INNER),
        with_globals(INNER=types.SimpleNamespace(rate=0.1, port=2)),
        f"{GLOBALS}.INNER.rate",
        "",
    ),
    "a constant in a constructor": (
        with_globals(NamesThemInItsConstructor, LIMIT=3),
        with_globals(NamesThemInItsConstructor, LIMIT=4),
        "",
        "",
    ),
    "a partial": (
        free(f=functools.partial(torch.add, alpha=1)),
        free(f=functools.partial(torch.add, alpha=2)),
        "it.f.alpha",
        "",
    ),
    "a closure": (free(f=of_a(0.1)), free(f=of_a(0.2)), "it.f.factor", ""),
    "a default": (free(f=lambda x, p=1: x), free(f=lambda x, p=2: x), "it.f.p", ""),
    "another function": (free(f=first), free(f=second), "it.f", ""),
    "another class": (lambda: Free(), lambda: NamesGlobals(), "it", ""),
    "a class that was renamed": (new_class("Scale", p=1), new_class("Rescale", p=1), "", "it"),
    "and edited": (new_class("Scale", p=1), new_class("Rescale", p=2), "it.p", "it"),
    "the place of the data": (image(), image(root="/mnt/b"), "", "data.dataset.root"),
    "an argument of the data": (image(), image(crop=8), "data.dataset.crop", ""),
    "numbers of the data": (image(), image(mean=(0.1, 0.5)), "data.dataset.mean", ""),
    "a transform that was renamed": (
        lambda: Image("a", 4, new_class("Old", p=1)()),
        lambda: Image("a", 4, new_class("New", p=1)()),
        "",
        "data.dataset.transform",
    ),
    "a split": (lambda: Subset(Image("a"), [1, 2]), lambda: Subset(Image("a"), [3, 4]), "", ""),
    "one of several": (several(4), several(5), "data.dataset.datasets[1].crop", ""),
    "a wrapper": (lookahead(k=5), lookahead(k=6), "Lookahead.steps", ""),
    "in a wrapper": (lookahead(lr=0.1), lookahead(lr=0.2), "Lookahead.lr", ""),
    "a part of a schedule": (
        scheduled(torch.optim.lr_scheduler.StepLR, step_size=2),
        scheduled(torch.optim.lr_scheduler.StepLR, step_size=3),
        "StepLR.step_size",
        "",
    ),
    "what a schedule names": (power(0.9), power(0.8), "LambdaLR.lr_lambdas.base", ""),
}


@pytest.mark.parametrize("name", EDITS)
def test_what_counts_as_a_change(name, monkeypatch):
    for known in ("LIMIT", "OTHERS", "INNER"):
        monkeypatch.setattr(sys.modules[__name__], known, globals()[known])
    *makers, refused, told = EDITS[name]
    before, now = map(described, makers)
    assert [[one.name for one in kind] for kind in before.changes_to(now)] == [
        [one] * bool(one) for one in (refused, told)
    ]
    assert before.changes_to(before) == ([], [])


def test_a_callback_that_was_renamed_or_exchanged():
    def with_callback(name):
        return Configuration(kinds={name: IN_USE}, origins={name: f"{__name__}:{name}"})

    gone, here, other = map(with_callback, ("Gone", "Free", "Point"))
    assert [list(map(str, kind)) for kind in gone.changes_to(here)] == [
        [],
        ["Gone: 'in use' -> none", "Free: none -> 'in use'"],
    ]
    assert len(here.changes_to(other)[0]) == 2


@pytest.mark.parametrize(
    ("options", "differing"),
    [
        ({}, []),
        ({"root": "/mnt/b"}, []),
        ({"crop": 5}, ["it.crop"]),
        ({"mean": [np.zeros(2)]}, ["it.mean"]),
        ({"transform": Free(rate=0.1, at=id(st))}, ["it.transform.rate"]),
        ({"transform": [Free(pairs=[("a", 1), ("b", 2)])] * 2}, ["it.transform[0].pairs"]),
    ],
)
def test_numbers_of_data_are_compared_and_stamps_are_not(options, differing):
    usual = {"root": "a", "transform": Free(rate=0.2, at=id(np))}
    usual |= {"transform": [Free(pairs=[("c", 2), ("d", 1)])] * 2} if isinstance(options.get("transform"), list) else {}
    before, now = fingerprints({"it": Image(**usual)}), fingerprints({"it": Image(**{**usual, **options})})
    assert [path for path in before if before[path][0] != now[path][0]] == differing
    assert before["it.uid"][1] != now["it.uid"][1]


def test_addresses_are_no_settings_wherever_they_stand():
    def with_addresses(first, second, k=1):
        return described(lambda: Free(rate={id(first): 1, ("a", id(second)): 2, "k": k}, at={id(first), id(second)}))

    before, now = with_addresses(np, st), with_addresses(st, np)
    assert not before.changes_to(now)[0]
    assert [one.name for one in before.changes_to(with_addresses(st, np, k=2))[0]] == ["it.rate.k"]


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8])
def test_large_data_are_compared_to_the_last_number_and_in_order(dtype):
    def digest(change=lambda rows: rows):
        rows = (np.arange(600_001) % 251).astype(dtype)
        return fingerprints({"it": Free(rate=change(rows))})["it.rate"]

    changes = {
        "the last number": lambda rows: np.concatenate([rows[:-1], rows[:1] + 1]),
        "two neighbours": lambda rows: np.concatenate([rows[1:2], rows[:1], rows[2:]]),
        "two blocks": lambda rows: np.concatenate([rows[131072:262144], rows[:131072], rows[262144:]]),
        "backwards": lambda rows: rows[::-1],
    }
    assert digest() == digest(np.copy)
    assert len({*map(str, (digest(), *map(digest, changes.values())))}) == len(changes) + 1


@pytest.mark.oldest  # of which Lightning offers modules under other names
def test_files_of_the_user_are_compared_and_no_others(tmp_path, monkeypatch):
    module, path = types.ModuleType("of_a_user"), tmp_path / "of_a_user.py"
    path.write_text("x = 1")
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "of_a_user", module)
    before = Configuration(files=own_files())
    assert {"of_a_user.py", "tests/auto_resume/test_configuration.py"} <= before.files.keys()
    assert not [name for name in before.files if name.startswith(("torch", "lightning", "json", "_pytest"))]
    path.write_text("x = 22")
    assert before.changed_files(Configuration(files=own_files())) == ["of_a_user.py"]


def test_limits():
    assert is_longer(3, 10)
    assert is_longer(3, -1)
    assert is_longer(3, None)
    assert not is_longer(-1, 3)
    assert not is_longer(None, -1)
    assert not is_longer(3, 3)


def test_a_path_is_text():
    assert plain(Path("a")) == "a"
    assert numbered([1, "a", 2]) == ["int", "str", "int[1]"]


def test_configs_that_contain_themselves_and_tensors_without_data_have_an_end():
    config: dict = {"lr": 0.1, "meta": torch.empty(1, device="meta")}
    config["parent"] = config
    assert changes(dict(flatten("x", config)), dict(flatten("x", config))) == []
    point = Point()
    point.x = point
    assert dict(flatten("x", point))


def test_a_long_value_is_shown_where_it_changed():
    before, now = ([0.5 + number / 1000 for number in range(50)] for _ in range(2))
    now[40] = 0.25
    assert "0.25" in str(Change("x", before, now))
