"""What people keep in attributes, changed at each step: a resumed run has the same, or a warning names it."""

import array
import collections
import configparser
import contextvars
import ctypes
import dataclasses
import decimal
import enum
import fractions
import functools
import hashlib
import io
import itertools
import mmap
import multiprocessing
import queue
import random
import re
import sched
import sqlite3
import tempfile
import threading
import types
import uuid
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import attrs
import networkx
import numpy as np
import pandas
import pydantic
import pytest
import scipy.sparse
import torch
from lightning.pytorch import Callback
from PIL import Image
from sklearn.preprocessing import StandardScaler
from torch import nn

from lightning_tricks import AutoResume
from lightning_tricks.auto_resume.core.attributes.encoding import MAX_BYTES
from lightning_tricks.auto_resume.core.attributes.restoring import restore_changes
from lightning_tricks.auto_resume.core.attributes.tracking import AttributeTracker, summarized
from tests.auto_resume.test_callback import fit, stop
from tests.small import Net

_X, _Y = np.random.default_rng(0).normal(size=(20, 3)), np.arange(20) % 2


class Kept:
    """A user's object."""

    def __init__(self, n=0):
        self.n = n


class Draws(random.Random):
    """A user's generator, which counts."""

    draws = 0

    def random(self):
        self.draws += 1
        return super().random()


class Words(list):
    """A user's list, which has attributes as well."""


class Grid(np.ndarray):
    """A user's array."""


class Mine(torch.Tensor):
    """A user's tensor."""


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Table:
    matrix: Any


@attrs.define
class Slotted:
    n: int = 0


class Model(pydantic.BaseModel):
    n: int = 0
    _private: int = pydantic.PrivateAttr(0)


@dataclasses.dataclass
class Held:
    """A value, how it changes at the n-th step, and what is to be equal at the end."""

    make: Callable[[], Any]
    change: Callable[[Any, int], object]
    look: Callable[[Any], Any] = repr


def _dense(value):
    return repr(value.toarray() if hasattr(value, "toarray") else value.to_dense())


def _state(value):
    return repr(sorted(vars(value).items()))


def _parts(count):
    return {name: Kept(1) for name in count}


def _grow_keys(it, n):
    for number, one in enumerate(it.values()):
        one.n += n * number


SAVED = {
    "ChainMap": Held(lambda: collections.ChainMap({}, {"b": 1}), lambda it, n: it.update(a=n)),
    "Queue": Held(queue.Queue, lambda it, n: it.put(n), lambda it: list(it.queue)),
    "array": Held(lambda: array.array("d", [1.0]), lambda it, n: it.append(n)),
    "set of tuples": Held(set, lambda it, n: it.add((n, "a")), lambda it: sorted(it)),
    "list with attributes": Held(
        Words, lambda it, n: (it.append(n), vars(it).update(note=n)), lambda it: (it[:], vars(it))
    ),
    "keys of one name": Held(
        lambda: _parts([1, "1", Colour.RED, Colour.BLUE, (1, 2), (3, 4)]),
        _grow_keys,
        lambda it: [one.n for one in it.values()],
    ),
    "shared entries": Held(
        dict,
        lambda it, n: it.update({f"a{n}": (shared := [n]), f"b{n}": shared}),
        lambda it: [one is it[name.replace("a", "b")] for name, one in it.items()],
    ),
    "shared objects": Held(
        list, lambda it, n: it.extend([Kept(n)] * 2), lambda it: [(one.n, it.index(one)) for one in it]
    ),
    **{
        f"{dtype}": Held(lambda dtype=dtype: torch.zeros(3, 2).T.to(dtype), lambda it, n: it.copy_(torch.ones(()) * n))
        for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool)
    },
    "structured array": Held(lambda: np.zeros(2, [("a", "i4"), ("b", "f8")]), lambda it, n: it["a"].__iadd__(n)),
    "bit generator": Held(lambda: np.random.PCG64(1), lambda it, n: it.random_raw(), lambda it: repr(it.state)),
    "generator that spawns": Held(
        lambda: np.random.default_rng(1), lambda it, n: it.spawn(1), lambda it: int(it.spawn(1)[0].integers(1 << 30))
    ),
    "Sobol sequence": Held(
        lambda: torch.quasirandom.SobolEngine(3, scramble=True, seed=2),
        lambda it, n: it.draw(1),
        lambda it: it.draw(1).tolist(),
    ),
    "semaphore": Held(lambda: threading.Semaphore(0), lambda it, n: it.release(), lambda it: it._value),
    "event": Held(threading.Event, lambda it, n: it.set() if n == 5 else None, lambda it: it.is_set()),
    "local of a thread": Held(threading.local, lambda it, n: setattr(it, "n", n), lambda it: it.n),
    "attribute of a function": Held(lambda: lambda: 0, lambda it, n: setattr(it, "n", n), lambda it: it.n),
    "seeds": Held(lambda: np.random.SeedSequence(1), lambda it, n: it.spawn(1)),
    "distribution": Held(lambda: torch.distributions.Normal(torch.zeros(2), 1.0), lambda it, n: it.loc.add_(n)),
    "attrs": Held(Slotted, lambda it, n: setattr(it, "n", n)),
    "pydantic": Held(
        Model, lambda it, n: (setattr(it, "n", n), setattr(it, "_private", n)), lambda it: (it.n, it._private)
    ),
    "graph": Held(
        lambda: networkx.Graph([(0, 1)]),
        lambda it, n: (it.add_edge(n, n + 1), it[0][1].update(w=n)),
        lambda it: ([*it.edges(data=True)], it[0][1] is it[1][0]),
    ),
    "csr matrix": Held(
        lambda: Table(scipy.sparse.csr_matrix(np.eye(3))),
        lambda it, n: it.matrix.data.__iadd__(n),
        lambda it: _dense(it.matrix),
    ),
    "dok matrix": Held(lambda: scipy.sparse.dok_matrix((3, 40)), lambda it, n: it.__setitem__((0, n), n), _dense),
    "scaler": Held(StandardScaler, lambda it, n: it.partial_fit(_X * n), _state),
    "views of one memory": Held(lambda: [(x := torch.zeros(4)), x[1:]], lambda it, n: it[1].add_(1)),
    "views of one array": Held(lambda: [(x := np.zeros(4)), x[::2]], lambda it, n: it[1].__iadd__(1)),
}
# Of these, a fresh process has another one in the place, which is filled
SAVED |= {
    "generator of a subclass": Held(lambda: Draws(1), lambda it, n: it.random(), lambda it: (it.draws, it.random())),
    "shared number": Held(
        lambda: multiprocessing.Value("d", 0.0), lambda it, n: setattr(it, "value", n), lambda it: it.value
    ),
    "gradient of a leaf": Held(
        lambda: torch.zeros(2, requires_grad=True), lambda it, n: (n * it).sum().backward(), lambda it: it.grad.tolist()
    ),
    "attribute of a tensor": Held(lambda: torch.zeros(2), lambda it, n: setattr(it, "note", n), lambda it: it.note),
    "optimizer beside its parameter": Held(
        lambda: [(one := nn.Parameter(torch.ones(2))), torch.optim.Adam([one])],
        lambda it, n: ((n * it[0]).sum().backward(), it[1].step()),
        lambda it: (it[0].tolist(), it[1].param_groups[0]["params"][0] is it[0], int(it[1].state[it[0]]["step"])),
    ),
}
REPLACED = {
    "Fraction": (lambda: fractions.Fraction(1, 3), lambda it, n: it / (n + 1)),
    "Decimal": (lambda: decimal.Decimal("0.1"), lambda it, n: it / 3),
    "UUID": (lambda: uuid.UUID(int=1), lambda it, n: uuid.UUID(int=it.int + n)),
    "object of attrs": (Slotted, lambda it, n: attrs.evolve(it, n=n)),
    "object of pydantic": (Model, lambda it, n: it.model_copy(update={"n": n})),
}
_opened = []


def _open_file():
    _opened.append(tempfile.TemporaryFile())  # noqa: SIM115  # the test closes it
    return _opened[-1]


NAMED = {
    "cache of a function": Held(lambda: functools.lru_cache(abs), lambda it, n: it(n)),
    "hash": Held(hashlib.sha256, lambda it, n: it.update(b"a")),
    "context variable": Held(lambda: contextvars.ContextVar("n"), lambda it, n: it.set(n)),
    "element of XML": Held(lambda: ElementTree.Element("a"), lambda it, n: it.set("n", str(n))),
    "open file": Held(_open_file, lambda it, n: it.write(b"a")),
    "parser of settings": Held(configparser.ConfigParser, lambda it, n: it.read_dict({"a": {"n": str(n)}})),
    "proxy of a dict": Held(lambda: types.MappingProxyType({"a": []}), lambda it, n: it["a"].append(n)),
    "array of records": Held(
        lambda: np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]), lambda it, n: it.a.__iadd__(n)
    ),
    "masked array": Held(
        lambda: np.ma.masked_array(np.arange(40), np.arange(40) % 2), lambda it, n: it.__setitem__(n, np.ma.masked)
    ),
    "array of a subclass": Held(lambda: np.zeros(3).view(Grid), lambda it, n: it.__iadd__(n)),
    "array of objects": Held(lambda: np.array([[1], "b", None], object), lambda it, n: it[0].append(n)),
    "tensor of a subclass": Held(
        lambda: torch.zeros(2).as_subclass(Mine), lambda it, n: it.add_(n), lambda it: it.tolist()
    ),
    "dict and its proxy": Held(
        lambda: [(it := {}), types.MappingProxyType(it)], lambda it, n: it[0].update({n: n}), lambda it: len(it[1])
    ),
    "sparse tensor": Held(lambda: torch.eye(2).to_sparse(), lambda it, n: it.mul_(1.5)),
    "quantized tensor": Held(
        lambda: [torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8)],
        lambda it, n: it.__setitem__(0, torch.quantize_per_tensor(torch.ones(2) * n / 10, 0.1, 0, torch.qint8)),
    ),
    "nested tensor": Held(
        lambda: [torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])],
        lambda it, n: it.__setitem__(0, it[0] + 1),
    ),
    "image": Held(lambda: Image.new("RGB", (8, 8)), lambda it, n: it.putpixel((n % 8, 0), (n, 0, 1))),
    "table": Held(lambda: pandas.DataFrame({"a": [1], "b": ["x"]}), lambda it, n: it.loc.__setitem__(n, [n, "z"])),
    "weak keys": Held(weakref.WeakKeyDictionary, lambda it, n: it.update({Kept: n})),
    "weak reference": Held(lambda: [None], lambda it, n: it.__setitem__(0, weakref.ref(Kept))),
    "context of decimals": Held(decimal.Context, lambda it, n: setattr(it, "prec", 30 + n)),
    "database in memory": Held(
        lambda: sqlite3.connect(":memory:", check_same_thread=False),
        lambda it, n: (it.execute("create table if not exists t(x)"), it.execute("insert into t values(1)")),
    ),
    "scheduler of calls": Held(sched.scheduler, lambda it, n: it.enter(n, 1, print)),
    "memory view": Held(lambda: memoryview(bytearray(4)), lambda it, n: it.__setitem__(0, n)),
    "memory map": Held(lambda: mmap.mmap(-1, 16), lambda it, n: it.__setitem__(0, n)),
    "number of C": Held(ctypes.c_int, lambda it, n: setattr(it, "value", n)),
    "buffer of text": Held(io.StringIO, lambda it, n: it.write("a")),
    "simple queue": Held(queue.SimpleQueue, lambda it, n: it.put(n)),
    "cycle": Held(lambda: itertools.cycle("abc"), lambda it, n: next(it)),
    "generator": Held(lambda: (n for n in range(99)), lambda it, n: next(it)),
    "iterator in a list": Held(lambda: [iter(range(99))], lambda it, n: next(it[0])),
    "function in a list": Held(lambda: [torch.relu], lambda it, n: it.__setitem__(0, torch.sigmoid)),
    "object in a list": Held(lambda: [re.compile("a")], lambda it, n: it.__setitem__(0, re.compile(f"b{n}"))),
    "lil matrix": Held(lambda: scipy.sparse.lil_matrix((3, 40)), lambda it, n: it.__setitem__((0, n), n)),
}


def _replaced(make, change):
    return Held(lambda: [make()], lambda it, n: it.__setitem__(0, change(it[0], n)))


def _held_by(table, nested=True):
    """A module that has the values of a table, and a callback that has them in lists and changes both."""

    class Keeps(Net):
        def __init__(self):
            super().__init__(dropout=0.2)
            vars(self).update({name: held.make() for name, held in table.items()})

    class Changes(Callback):
        def __init__(self):
            self.steps, self.nested = 0, {name: [held.make()] for name, held in table.items() if nested}

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.steps += 1
            for name, held in table.items():
                for it in (vars(pl_module)[name], *self.nested.get(name, ())):
                    held.change(it, self.steps)

    def looks(trainer):
        nested = next(one for one in trainer.callbacks if isinstance(one, Changes)).nested
        return {
            name: [held.look(it) for it in (vars(trainer.lightning_module)[name], *nested[name])]
            for name, held in table.items()
        }

    return Keeps, Changes, looks


@pytest.mark.parametrize("step", [10, 13])
def test_what_is_made_of_plain_data_is_restored(tmp_path, step):
    table = {**SAVED, **{name: _replaced(*one) for name, one in REPLACED.items()}}
    module, changes, looks = _held_by(table)
    whole = looks(fit(changes(), module=module))
    stop(AutoResume(tmp_path), changes(), module=module, step=step)
    again = looks(fit(AutoResume(tmp_path), changes(), module=module))
    assert {name for name in table if whole[name] != again[name]} == set()


@pytest.mark.filterwarnings(
    "ignore:the matrix subclass",
    "ignore:Sparse CSR tensor support is in beta",
    "ignore:The PyTorch API of nested tensors",
    "ignore:torch.quantize_per_tensor",
)
@pytest.mark.parametrize("names", [[*NAMED][start : start + 5] for start in range(0, len(NAMED), 5)], ids=str)
def test_what_changes_in_place_and_is_no_data_is_named_at_the_save(tmp_path, names, caplog):
    module, changes, _ = _held_by({name: NAMED[name] for name in names}, nested=False)
    with warnings.catch_warnings(record=True) as told, caplog.at_level("INFO"):
        warnings.simplefilter("always")
        stop(AutoResume(tmp_path), changes(), module=module)
    while _opened:
        _opened.pop().close()
    words = " ".join(text for text in (*(str(one.message) for one in told), caplog.text) if "saved" in text)
    assert [name for name in names if f"module.{name} " not in words and f"module.{name}.*" not in words] == []


class Averages:
    """Has the means of parameters by the parameters, and by their addresses, as averages of weights do."""

    def __init__(self, module):
        self.means = {one: one.detach().clone() for one in module.parameters()}
        self.by_id = {id(one): mean * 0 for one, mean in self.means.items()}

    def update(self):
        for one, mean in self.means.items():
            mean.lerp_(one.detach(), 0.1)
            self.by_id[id(one)].add_(mean)


class Refers(Net):
    """Has what refers to its layers, and what a hook creates that is no data."""

    def __init__(self):
        super().__init__(dropout=0.2)
        self.order, self.averages, self.unseeded = [self.net[0].weight, self.net[0].bias], None, np.random.default_rng()
        self.counts, self.seen, self.ids = {}, set(), set()

    def on_fit_start(self):
        self.stream, self.kind = io.StringIO(), np.float32
        self.table = {"act": torch.relu, "out": io.BytesIO(), "n": 0}

    def training_step(self, batch, batch_idx):
        if self.averages is None:
            self.averages = Averages(self)
        layer = self.net[0]
        self.averages.update()
        self.order.reverse()
        self.counts[layer] = self.counts.get(layer, 0) + 1
        self.seen.add(layer)
        self.ids.add(id(layer))
        self.table["n"] += 1
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("step", [10, 13])
def test_references_are_restored_and_what_hooks_create_is_no_reason_to_warn(tmp_path, step):
    def state(trainer):
        net = trainer.lightning_module
        assert all(one is own for one, own in zip(net.averages.means, net.parameters(), strict=True))
        means = [(mean.tolist(), net.averages.by_id[id(one)].tolist()) for one, mean in net.averages.means.items()]
        keyed = net.counts[net.net[0]], net.seen == {net.net[0]}, net.ids == {id(net.net[0])}
        return means, keyed, net.order[0] is net.net[0].weight, net.table["n"]

    whole = state(fit(module=Refers))
    stop(AutoResume(tmp_path), module=Refers, step=step)
    again = state(fit(AutoResume(tmp_path), module=Refers))
    assert again == whole


class Teaches(Net):
    """Has a net in a list, which is frozen, and evaluates, from the fourth step on."""

    def __init__(self):
        super().__init__(dropout=0.2)
        self.teachers = [nn.Sequential(nn.Linear(64, 4), nn.Dropout(0.5), nn.Linear(4, 1))]
        self.teachers[0][2].requires_grad_(False)

    def training_step(self, batch, batch_idx):
        (teacher,) = self.teachers
        if self.global_step == 3:
            teacher[0].bias.requires_grad_(False)
            teacher[1].eval()
        if self.global_step == 15:
            teacher[2].requires_grad_(True)
        teacher(batch[0].flatten(1)).mean().backward()
        with torch.no_grad():
            for parameter in filter(lambda one: one.requires_grad, teacher.parameters()):
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("step", [10, 13])
def test_what_trains_of_a_module_in_a_list_is_restored(tmp_path, step):
    def state(trainer):
        (teacher,) = trainer.lightning_module.teachers
        flags = [(one.requires_grad, one.tolist(), vars(one)) for one in teacher.parameters()]
        return flags, [part.training for part in teacher.modules()]

    whole = state(fit(module=Teaches))
    stop(AutoResume(tmp_path), module=Teaches, step=step)
    again = state(fit(AutoResume(tmp_path), module=Teaches))
    assert again == whole
    assert [flag for flag, *_ in whole[0]] == [True, False, True, True]


class Fused(nn.Module):
    """Has an optimizer for each parameter, as a step that is fused into the backward pass."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 2)
        self.optimizers = {one: torch.optim.Adam([one]) for one in self.net.parameters()}

    def step(self):
        self.net(torch.ones(1, 3)).sum().backward()
        for optimizer in self.optimizers.values():
            optimizer.step()


def test_optimizers_by_parameter_are_restored_whatever_their_order():
    old, fresh = Fused(), Fused()
    fresh.optimizers = dict(reversed(fresh.optimizers.items()))
    tracker = AttributeTracker({"module": old})
    old.step()
    assert restore_changes({"module": fresh}, tracker.changes()) == {}
    for ours, other in zip(old.net.parameters(), fresh.net.parameters(), strict=True):
        assert torch.equal(old.optimizers[ours].state[ours]["exp_avg"], fresh.optimizers[other].state[other]["exp_avg"])


def test_a_dict_with_some_ids_of_parameters_is_named():
    net = nn.Linear(2, 2)
    net.counts = {}
    tracker = AttributeTracker({"net": net})
    net.counts.update({id(net.weight): 1, 3: 2})
    changes = tracker.changes()
    assert (changes["values"], changes["lost"]) == ({}, {"net.counts": "dict with the ids of objects"})


def test_one_changed_string_of_many_is_found():
    kept = Kept([f"word {number}" for number in range(100_000)])
    tracker = AttributeTracker({"it": kept})
    assert tracker.changes() == {"values": {}, "lost": {}, "unwatched": {}}
    kept.n[77_777] = "another"
    assert [*tracker.changes()["values"]] == ["it.n"]


def test_what_lies_behind_the_bytes_that_are_read_is_compared_by_identity():
    kept = Kept(np.zeros(MAX_BYTES + 1, np.uint8))
    tracker = AttributeTracker({"it": kept})
    kept.n[-1] = 1
    assert tracker.changes() == {"values": {}, "lost": {}, "unwatched": {}}, "as the page says"
    kept.n[0] = 1
    assert [*tracker.changes()["lost"]] == ["it.n"]


def test_averages_that_are_updated_through_data_are_found():
    kept = Kept([torch.zeros(2**17)])
    tracker = AttributeTracker({"it": kept})
    kept.n[0].data.lerp_(torch.ones(2**17), 0.5)
    assert [*tracker.changes()["values"]] == ["it.n"]


def test_a_replay_buffer_is_restored_with_what_shares_it():
    def transitions():
        return deque(
            (torch.full((4,), float(n)), torch.tensor(n), n, torch.zeros(2 + n % 2), n % 2 == 0) for n in range(50)
        )

    kept, fresh = Kept(deque()), Kept(deque())
    tracker = AttributeTracker({"it": kept})
    kept.n.extend(transitions())
    kept.first, kept.last, kept.again = kept.n[2][0], kept.n[3][0], deque((n, one[0]) for n, one in enumerate(kept.n))
    assert restore_changes({"it": fresh}, tracker.changes()) == {}
    assert repr(fresh.n) == repr(kept.n)
    assert fresh.last is fresh.n[3][0]
    assert all(one is row[0] for (_, one), row in zip(fresh.again, fresh.n, strict=True))
    assert fresh.n[0][0].untyped_storage().nbytes() == 16, "else one that is left keeps all in memory"


def test_memory_that_processes_share_is_left_to_the_process_that_owns_it():
    kept = Kept([torch.zeros(2).share_memory_(), torch.zeros(2)])
    tracker = AttributeTracker({"it": kept}, owns_memory=False)
    kept.n[0].add_(1)
    assert tracker.changes() == {"values": {}, "lost": {}, "unwatched": {}}
    kept.n[1].add_(1)
    fresh = Kept([torch.ones(2), torch.zeros(2)])
    assert restore_changes({"it": fresh}, tracker.changes()) == {}
    assert [one.tolist() for one in fresh.n] == [[1, 1], [1, 1]]


def test_values_that_shared_a_default_and_differ_now_are_filled_apart():
    def make():
        default = torch.zeros(2)
        return types.SimpleNamespace(first=default, second=default, default=default)

    old, fresh = make(), make()
    tracker = AttributeTracker({"it": old})
    old.first, old.second = torch.ones(2), torch.full((2,), 2.0)
    assert restore_changes({"it": fresh}, tracker.changes()) == {}
    assert [one[0].item() for one in (fresh.first, fresh.second, fresh.default)] == [1, 2, 0]


def test_entries_of_one_container_are_named_once():
    lost = {f"data.made.{n}": "io.StringIO" for n in range(9)} | {f"data.made.{n}.x": "function" for n in range(9)}
    assert summarized(lost) == {"data.made.*": "io.StringIO"}
