"""Attributes that no state dict holds are restored in another process, or reported as unsaved."""

import ast
import collections
import dataclasses
import datetime
import enum
import io
import itertools
import os
import pathlib
import subprocess
import sys
import time
import types
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from contextlib import redirect_stdout
from typing import ClassVar
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, Subset, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassPrecision, MulticlassRecall
from torchmetrics.wrappers import BootStrapper, ClasswiseWrapper, MetricTracker, MinMaxMetric, Running

from lightning_tricks.auto_resume.core.attributes.encoding import Decoder, Encoder
from lightning_tricks.auto_resume.core.attributes.model_structure import restore_tracker_steps, tracker_steps
from lightning_tricks.auto_resume.core.attributes.restoring import restore_changes
from lightning_tricks.auto_resume.core.attributes.tracking import AttributeTracker
from lightning_tricks.auto_resume.core.checkpoint_contents import find_objects, load_plain_data
from lightning_tricks.auto_resume.core.data.loader_objects import fingerprints

Point = namedtuple("Point", "x y")


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Words(list):
    """A user's list."""


class Ends:
    """Has a finalizer, so that no object is created from a file."""

    def __del__(self):
        pass


class Meter:
    """The factory of a defaultdict."""

    names: ClassVar[list[str]] = []
    made: ClassVar[int] = 0

    def __init__(self):
        assert not Meter.forbidden
        self.seen, self.parts = [], {}

    forbidden: ClassVar[str] = ""


class Holder:
    """A user's object."""

    def __init__(self, **values):
        vars(self).update(values)


def through_a_file(changes, path):
    torch.save({"attributes": changes}, path)
    read = load_plain_data(path)
    assert not find_objects(read)
    return read["attributes"]


def resumed(make, act, path):
    """Return the object that was changed, a fresh one with its attributes restored, and what could not be restored."""
    old, fresh = make(), make()
    attributes = AttributeTracker({"it": old})
    act(old)
    changes = attributes.changes()
    modules = [
        {name: part for name, part in getattr(one, "__dict__", {}).items() if isinstance(part, nn.Module)}
        for one in (old, fresh)
    ]
    restore_tracker_steps(modules[1], tracker_steps(modules[0]))
    failed = restore_changes({"it": fresh}, through_a_file(changes, path / "attributes.ckpt"))
    return old, fresh, {**changes["lost"], **failed}


def alike(one, other):
    """Whether two values and their types are equal, bit by bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and _bits(one) == _bits(other)
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            alike(a, b) for pair in zip(one.items(), other.items(), strict=True) for a, b in zip(*pair, strict=True)
        )
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float):
        return np.float64(one).tobytes() == np.float64(other).tobytes()
    return one == other


def _bits(value):
    return value.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).tolist()


def there_and_back(value, path):
    encoder = Encoder()
    encoded = encoder.encode(value)
    assert not encoder.holes
    torch.save({"value": encoded}, path)
    read = load_plain_data(path)
    assert not find_objects(read)
    return Decoder().decode(read["value"])


KINDS = [
    *(None, True, 3, -(2**70), 2**2000, 0.1, -0.0, float("nan"), float("inf"), 1 + 2j, "ä\ud800", b"\x00\xff", b""),
    *(bytearray(b"ab"), torch.Size([2, 3]), torch.bfloat16, torch.device("cpu"), Colour.RED, Level.LOW),
    *(datetime.datetime(2020, 1, 2, 3, tzinfo=datetime.timezone.utc), datetime.timedelta(1, 2, 3)),
    *(datetime.date(2020, 1, 2), datetime.time(3, 4)),
    *(pathlib.Path("a/b"), pathlib.PureWindowsPath("c"), range(1, 9, 2)),
    *(Point(1, [2]), [1, [2.0, "a"]], (1, (2,)), {1: "a", "1": {2: 3}, (1, 2): None}, {3, 4}),
    *(frozenset({"a"}), OrderedDict(b=1, a=2), Counter("aab"), deque([1, 2], maxlen=2), deque(), Words([1])),
    *(torch.zeros(0, 3), torch.eye(3, dtype=torch.bfloat16), torch.tensor(1j).conj(), torch.arange(9)[::2]),
    torch.tensor(True),
    *(np.arange(6).reshape(2, 3).T, np.float32(0.1), np.array(["ab", "c"]), np.zeros((0, 2), bool), np.int64(3)),
    np.datetime64("2020-01-02"),
]


@pytest.mark.parametrize("value", KINDS, ids=lambda value: f"{type(value).__name__}")
def test_each_type_is_restored(value, tmp_path):
    assert alike(there_and_back(value, tmp_path / "value.ckpt"), value)


_LEAVES = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(allow_nan=False), st.text()),
    *(st.binary(), st.datetimes(), st.timedeltas(), st.sampled_from([Colour.RED, torch.float16, range(3)])),
    st.lists(st.floats(width=32), max_size=3).map(torch.tensor),
    st.lists(st.integers(-9, 9), max_size=3).map(np.array),
)
_KEYS = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.tuples(st.integers(), st.text()))
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        *(st.lists(inner, max_size=4), st.lists(inner, max_size=3).map(tuple)),
        *(st.lists(inner, max_size=3).map(deque), st.sets(st.integers(), max_size=4)),
        st.dictionaries(_KEYS, inner, max_size=4),
        st.dictionaries(st.text(), inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=12,
)


@settings(max_examples=100)
@given(before=_VALUES, after=_VALUES)
def test_any_value_is_restored_in_a_fresh_object(before, after, tmp_path_factory):
    old, fresh = Holder(it=before), Holder(it=before)
    attributes = AttributeTracker({"old": old})
    old.it = after
    changes = attributes.changes()
    assert not changes["lost"]
    assert bool(changes["values"]) != alike(before, after)
    path = tmp_path_factory.getbasetemp() / "changes.ckpt"
    assert not restore_changes({"old": fresh}, through_a_file(changes, path))
    assert alike(fresh.it, after)


def test_unchanged_values_are_not_saved():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), nn.BatchNorm1d(2), nn.LSTM(2, 2))
    model.register_buffer("buffer", torch.zeros(2))
    model.weights_again, model.buffer_again, model.queue = [model[0].weight], model.buffer, torch.zeros(3)
    model.kl_weight, model.outputs, model.loss = 0.0, [], nn.functional.mse_loss
    model.meters = {"loss": Holder(total=0.0, seen=deque(maxlen=2))}
    attributes = AttributeTracker({"model": model})
    model(torch.randn(4, 2))[0].sum().backward()
    model.eval()
    assert attributes.changes() == {"values": {}, "lost": {}, "unwatched": {}}


def test_what_was_changed_back_is_restored_too(tmp_path):
    """Hooks change the fresh object as they did the first one, and those that changed it back are not called."""

    def change(it):
        it.level, it.rate, it.new = 3, 0.5, "only for a while"
        it.history.append(2)
        it.part.count = 5
        it.says.load_state_dict({"position": 7})

    old, fresh = (
        Holder(level=0, rate=0.0, history=[1], part=Holder(count=1), says=Says(), shows=print) for _ in range(2)
    )
    part, attributes = old.part, AttributeTracker({"it": old})
    change(old)
    attributes.changes()
    old.part = old.shows = None
    attributes.changes()
    old.level, old.rate, old.history, old.part, old.shows = 0, 0.0, [1], part, print
    part.count = 1
    old.says.load_state_dict({"position": 0})
    del old.new
    changes = attributes.changes()
    change(fresh)
    assert restore_changes({"it": fresh}, through_a_file(changes, tmp_path / "attributes.ckpt")) == {}
    assert not changes["lost"]
    assert (fresh.level, fresh.rate, fresh.history, fresh.part.count, fresh.shows) == (0, 0.0, [1], 1, print)
    assert fresh.says.state_dict() == {"position": 0}
    assert not hasattr(fresh, "new")


class Steady(Holder):
    """A user's object of another class."""


@pytest.mark.parametrize("kept", [lambda it: it.part, lambda it: it.parts[0]], ids=["attribute", "entry"])
def test_an_object_of_another_class_is_created_with_all_attributes(kept, tmp_path):
    def act(it):
        it.part, it.parts[0] = Steady(level=1), Steady(level=1)

    _, fresh, lost = resumed(lambda: Holder(part=Holder(level=1), parts=[Holder(level=1)]), act, tmp_path)
    assert not lost
    assert type(kept(fresh)) is Steady
    assert vars(kept(fresh)) == {"level": 1}


def test_in_place_changes_stay_in_place(tmp_path):
    def act(holder):
        holder.a.append(1)
        holder.tensor[0] = 5
        holder.table["k"] = 2
        holder.seen.add(3)
        holder.array[0] = 4

    def make():
        a, tensor = [], torch.zeros(2)
        return Holder(a=a, b=a, tensor=tensor, again=tensor, table={}, seen=set(), array=np.zeros(2), fixed=(a,))

    fresh = make()
    before = dict(vars(fresh))
    old = make()
    attributes = AttributeTracker({"it": old})
    act(old)
    assert not restore_changes({"it": fresh}, attributes.changes())
    assert all(vars(fresh)[name] is value for name, value in before.items() if name != "fixed")
    assert fresh.a == [1]
    assert fresh.fixed[0] is fresh.a
    assert fresh.again[0] == 5
    assert (fresh.table, fresh.seen, fresh.array.tolist()) == ({"k": 2}, {3}, [4, 0])


def test_a_new_value_is_set_and_stays_shared(tmp_path):
    def act(holder):
        holder.a = holder.b = [1]
        holder.tensor = torch.ones(2)

    default = torch.zeros(2)
    _, fresh, lost = resumed(lambda: Holder(a=[0], b=[0], tensor=default, default=default), act, tmp_path)
    assert not lost
    assert fresh.a is fresh.b
    assert fresh.default is default
    assert default.tolist() == [0, 0]
    assert fresh.tensor.tolist() == [1, 1]


def test_a_factory_is_taken_from_the_present_object(tmp_path):
    def act(holder):
        holder.known["a"].append(1)
        holder.own["b"] += 1

    _, fresh, lost = resumed(lambda: Holder(known=defaultdict(list), own=defaultdict(lambda: 5)), act, tmp_path)
    assert not lost
    assert fresh.known["a"] == [1]
    assert fresh.own["b"] == 6
    assert fresh.own["c"] == 5


@dataclasses.dataclass(frozen=True)
class Frozen:
    count: int = 0


@dataclasses.dataclass
class Slotted:
    __slots__ = ("count",)
    count: int


class Guarded(nn.Module):
    """Refuses that attributes are set, as a property does."""

    def __init__(self):
        super().__init__()
        self.__dict__["count"] = 0

    @property
    def total(self):
        raise RuntimeError("asked")

    def __setattr__(self, name, value):
        if name == "count":
            raise RuntimeError("refused")
        super().__setattr__(name, value)


@pytest.mark.parametrize("make", [Frozen, lambda: Slotted(0), Guarded, lambda: types.SimpleNamespace(count=0)])
def test_attributes_are_set_without_calling_the_class(make, tmp_path):
    def act(thing):
        if isinstance(thing, nn.Module):
            vars(thing)["count"] = 3
        else:
            object.__setattr__(thing, "count", 3)

    _, fresh, lost = resumed(make, act, tmp_path)
    assert not lost
    assert fresh.count == 3


class Says:
    """Has a state that is no attribute in Python."""

    def __init__(self):
        position = [0]
        self.take = lambda: position.__setitem__(0, position[0] + 1)
        self._at = lambda: position

    def state_dict(self):
        return {"position": self._at()[0]}

    def load_state_dict(self, state):
        self._at()[0] = state["position"]


def test_where_both_processes_have_read_a_clock_each_keeps_its_own(tmp_path):
    """A clock is known by what it shows; what this process has not read is restored, as a sum of losses is."""
    own = []

    def make():
        own.append((time.time(), time.perf_counter()))
        wall, started = own[-1]
        return Holder(wall=wall, started=started, rate=0.1, loss=0.0, times={"a": wall})

    def act(holder):
        time.sleep(0.01)
        holder.wall, holder.started, holder.late = time.time(), time.perf_counter(), time.monotonic()
        holder.rate, holder.loss = 0.5, time.perf_counter()
        holder.times = {"a": time.time(), "b": time.time(), "n": 2}

    old, fresh, lost = resumed(make, act, tmp_path)
    assert not lost
    assert (fresh.wall, fresh.started) == own[1]
    assert (fresh.rate, fresh.late, fresh.loss) == (0.5, old.late, old.loss)
    assert fresh.times == {"a": own[1][0], "b": old.times["b"], "n": 2}


class Strange:
    """Raises at any access."""

    def __getattr__(self, name):
        raise RuntimeError(name)

    def __eq__(self, other):
        return np.zeros(3) == 0

    __hash__ = None


class Pretends:
    """Claims to be of another class."""

    @property
    def __class__(self):
        return torch.Tensor

    @property
    def __dict__(self):
        raise RuntimeError("asked")


def test_strange_objects_do_no_harm(tmp_path):
    def make():
        circle = [1]
        circle.append(circle)
        return Holder(
            *(), circle=circle, strange=Strange(), pretends=Pretends(), mock=MagicMock(), file=io.StringIO(),
            lambdas=[lambda: 3], objects=np.array([object()]), sparse=torch.eye(2).to_sparse(), kind=dict, mod=np,
            count=0,
            meta=torch.empty(2, device="meta"), count_from=itertools.count(), ring=None, partial=collections.ChainMap(),
        )  # fmt: skip

    old, fresh = make(), make()
    old.ring, fresh.ring = old, fresh
    attributes = AttributeTracker({"it": old})
    assert fingerprints({"it": old}) == fingerprints({"it": fresh})
    assert attributes.changes() == {"values": {}, "lost": {}, "unwatched": {}}
    old.count = 1
    changes = attributes.changes()
    assert list(changes["values"]) == ["it.count"]
    assert not restore_changes({"it": fresh}, changes)
    for name in ("circle", "strange"):
        setattr(old, name, make().__dict__[name])
    old.file.write("x")
    old.meta = torch.empty(3, device="meta")
    next(old.count_from)
    lost = attributes.changes()["lost"]
    assert lost["it.file"] == "_io.StringIO"
    assert lost["it.meta"] == "torch.Tensor"
    assert lost["it.count_from"] == "itertools.count"


def test_the_largest_changes_beyond_the_limit_are_reported():
    holder = Holder()
    attributes = AttributeTracker({"it": holder})
    holder.small, holder.large, holder.huge = torch.zeros(2), torch.zeros(10 * 2**20), torch.zeros(17 * 2**20)
    holder.half = torch.zeros(7 * 2**20)
    changes = attributes.changes()
    assert set(changes["values"]) == {"it.small", "it.half"}
    assert set(changes["lost"]) == {"it.large", "it.huge"}
    assert changes["lost"]["it.large"].startswith("40 MiB")


def test_a_view_is_saved_without_its_storage():
    holder = Holder()
    attributes = AttributeTracker({"it": holder})
    holder.view = torch.zeros(2**20)[:3]
    data = attributes.changes()["values"]["it.view"]["value"]["data"]
    assert data.untyped_storage().nbytes() == 12


def test_a_missing_object_is_reported():
    old = Holder(inner=Holder(x=1), other=Holder(y=1), z=1)
    attributes = AttributeTracker({"it": old, "gone": Holder()})
    old.inner.x = old.other.y = old.z = 2
    fresh = Holder(inner=None, other=Holder(y=1), z=1)
    gone = {"of": "gone", "name": "x", "value": 1}
    changes = attributes.changes()
    changes["values"]["gone.x"] = gone
    assert restore_changes({"it": fresh}, changes) == {"gone": "it does not exist in this run"}
    assert (fresh.inner.x, fresh.other.y, fresh.z) == (2, 2, 2)


def test_names_can_be_left_out():
    def skipped(value):
        return ("secret", "state_dict") if isinstance(value, Holder) else ()

    old = Holder(secret=1, shown=1)
    attributes = AttributeTracker(lambda: {"it": old}, skipped=skipped)
    old.secret = old.shown = 2
    changes = attributes.changes()
    assert list(changes["values"]) == ["it.shown"]


def test_the_tracker_keeps_nothing_alive():
    import weakref

    holder = Holder(tensor=torch.zeros(3), array=np.zeros(3), inner=Holder(), kept={"a": torch.zeros(3)})
    references = [weakref.ref(value) for value in (holder.tensor, holder.array, holder.inner, holder.kept["a"])]
    attributes = AttributeTracker({"it": holder})
    vars(holder).clear()
    assert [reference() for reference in references] == [None] * 4
    assert {change["value"]["kind"] for change in attributes.changes()["values"].values()} == {"deleted"}


def _collection():
    return MetricCollection([MulticlassPrecision(3), MulticlassRecall(3), MulticlassAccuracy(3, average="micro")])


METRICS = {
    "min and max": lambda: MinMaxMetric(MulticlassAccuracy(3)),
    "running": lambda: Running(MulticlassAccuracy(3), window=3),
    "tracker": lambda: MetricTracker(MulticlassAccuracy(3)),
    "tracker of a collection": lambda: MetricTracker(_collection(), maximize=[True, True, True]),
    "collection": _collection,
    "class-wise": lambda: ClasswiseWrapper(MulticlassAccuracy(3, average=None)),
    "bootstrap": lambda: BootStrapper(MulticlassAccuracy(3), num_bootstraps=3),
    "list": lambda: MulticlassAUROC(3),
}


def _feed(metric, batch):
    torch.manual_seed(batch)
    if isinstance(metric, MetricTracker) and batch % 2 == 0:
        metric.increment()
    scores, targets = torch.rand(8, 3).softmax(-1), torch.randint(3, (8,))
    return metric(scores, targets) if batch % 3 else metric.update(scores, targets)


@pytest.mark.parametrize("batches", [1, 3, 4])
@pytest.mark.parametrize("name", METRICS)
@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_metrics_are_restored(name, batches, tmp_path):
    def act(holder):
        for batch in range(batches):
            _feed(holder.metric, batch)
        if batches == 3:
            holder.metric.compute()

    old, fresh, lost = resumed(lambda: Holder(metric=METRICS[name]()), act, tmp_path)
    assert not lost
    for batch in range(batches, 8):
        assert str(_feed(fresh.metric, batch)) == str(_feed(old.metric, batch))
        assert str(fresh.metric.compute()) == str(old.metric.compute())
    if isinstance(old.metric, MetricTracker):
        assert fresh.metric.n_steps == old.metric.n_steps
        assert str(fresh.metric.compute_all()) == str(old.metric.compute_all())
        assert fresh.metric.best_metric(return_step=True) == old.metric.best_metric(return_step=True)
    old.metric.reset()
    fresh.metric.reset()
    assert str(_feed(fresh.metric, 8)) == str(_feed(old.metric, 8))


@dataclasses.dataclass
class Transition:
    state: torch.Tensor
    reward: float = 0.0


def test_objects_created_in_the_fit_are_created_again_without_running_code(tmp_path, monkeypatch):
    def act(holder):
        holder.meters["loss"].seen.append(0.5)
        holder.meters["loss"].parts["inner"] = Transition(torch.ones(2))
        holder.replay.extend(Transition(torch.full((2,), float(step)), step) for step in range(4))
        holder.best = holder.meters["loss"]
        monkeypatch.setattr(Meter, "forbidden", "yes")

    _, fresh, lost = resumed(
        lambda: Holder(meters=defaultdict(Meter), replay=deque(maxlen=3), best=None), act, tmp_path
    )
    assert not lost
    assert type(fresh.meters["loss"]) is Meter
    assert fresh.meters["loss"].seen == [0.5]
    assert fresh.meters["loss"].parts["inner"].state.tolist() == [1, 1]
    assert [(step.state.tolist(), step.reward) for step in fresh.replay] == [([n, n], n) for n in (1, 2, 3)]
    assert fresh.best is fresh.meters["loss"]


def test_a_checkpoint_creates_no_class_unknown_to_the_owner():
    holder = Holder(x=1)
    attributes = AttributeTracker({"it": holder})
    holder.x = 2
    changes = attributes.changes()
    for name in ("tempfile._TemporaryFileCloser", "subprocess.Popen", f"{__name__}.Ends", "torchmetrics.MeanMetric"):
        changes["values"]["it.x"]["value"] = {"kind": "hole", "type": name}
        assert list(restore_changes({"it": holder}, changes)) == ["it.x"]
        assert holder.x == 2


def test_class_attributes_are_restored(monkeypatch):
    old = Meter()
    attributes = AttributeTracker({"it": old})
    old.names.append("loss")
    Meter.made += 2
    changes = attributes.changes()
    old.names.clear()
    Meter.made = 0
    assert not restore_changes({"it": Meter()}, changes)
    assert (Meter.names, Meter.made) == (["loss"], 2)
    Meter.names.clear()
    Meter.made = 0


_DIGESTS = """
import numpy as np, torch
from torch.utils.data import TensorDataset, random_split
from lightning_tricks.auto_resume.core.data.loader_objects import fingerprints
class Words:
    def __init__(self, first):
        self.words = {first, "b", "c"}
        self.table = {"x": np.arange(10**6), "f": print, "o": object()}
        self.rng = np.random.default_rng()
for seed, first in ((1, "a"), (2, "z")):
    parts = random_split(TensorDataset(torch.arange(100)), [90, 10], torch.Generator().manual_seed(seed))
    print(fingerprints({"words": Words(first), "train": parts[0]}))
"""


def test_fingerprints_are_the_same_in_every_process():
    environment = {**os.environ, "PYTHONHASHSEED": "1"}  # which decides about the order of sets
    there = subprocess.run(
        [sys.executable, "-c", _DIGESTS], capture_output=True, text=True, check=True, env=environment
    )
    with redirect_stdout(io.StringIO()) as here:
        exec(_DIGESTS, {"__name__": "__main__"})
    assert here.getvalue() == there.stdout
    first, other = map(ast.literal_eval, there.stdout.splitlines())
    assert {path for path in first if first[path] != other[path]} == {"words.words", "train.indices"}
    assert "train.dataset" in first


def test_loaders_are_not_walked_and_datasets_are():
    data = Subset(TensorDataset(torch.arange(10)), [1, 2, 3])
    loader = DataLoader(data, sampler=RandomSampler(data, generator=torch.Generator()))
    attributes = AttributeTracker({"loader": loader, "train": data, "sampler": loader.sampler})
    data.indices[0] = 5
    list(loader)
    assert set(attributes.changes()["values"]) == {"train.indices", "sampler.generator"}


def test_added_modules_with_weights_are_reported():
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(2, 2)])
    model.head = nn.Linear(2, 2)
    attributes = AttributeTracker({"model": model})
    model.layers.append(nn.Linear(2, 2))
    model.head = nn.Identity()
    assert attributes.changes()["lost"] == {
        "model.layers.1": "torch.nn.modules.linear.Linear that was added in the fit",
        "model.head": "torch.nn.modules.linear.Identity that was replaced in the fit",
    }


@pytest.mark.parametrize(
    "wrapped",
    [
        nn.Sequential,
        lambda net: torch.compile(net, backend="eager"),
        lambda net: nn.Sequential(torch.jit.script(net)),
        lambda net: nn.Sequential(net, torch.jit.freeze(torch.jit.script(nn.Dropout().eval()))),
    ],
    ids=["plain", "compiled", "a script", "a frozen script, which has no mode"],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated")
def test_the_modes_and_the_frozen_parameters_of_a_module_in_a_list_are_restored(tmp_path, wrapped):
    def make():
        return Holder(kept=[wrapped(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))])

    def freeze(it):
        it.kept[0].eval().requires_grad_(False)

    _, fresh, lost = resumed(make, freeze, tmp_path)
    assert not lost
    assert not any(part.training for part in fresh.kept[0].modules())
    assert not any(parameter.requires_grad for parameter in fresh.kept[0].parameters())


def test_registered_names_are_not_shadowed():
    old, fresh = nn.Module(), nn.Module()
    old.queue = torch.zeros(2)
    fresh.register_buffer("queue", torch.zeros(2))
    attributes = AttributeTracker({"model": old})
    old.queue = torch.ones(2)
    assert restore_changes({"model": fresh}, attributes.changes()) == {
        "model.queue": "it is a parameter, buffer or submodule in this run"
    }
    assert "queue" not in vars(fresh)


@pytest.mark.parametrize("name", ["__class__", "forward", "twice", "made", "size"])
def test_methods_are_never_set(name):
    class Does(nn.Module):
        def forward(self, x):
            return x

        @staticmethod
        def twice(x):
            return 2 * x

        @classmethod
        def made(cls):
            return cls()

        @property
        def size(self):
            return 3

    fresh = Does()
    for place in ("root", "root.Does"):
        changes = {
            "values": {f"{place}.{name}": {"of": place, "name": name, "value": 1, "in_place": False}},
            "lost": {},
        }
        assert restore_changes({"root": fresh}, changes)
    assert fresh.forward(1) == 1
    assert fresh.size == 3
    assert type(fresh) is Does
    assert Does.twice(2) == 4


def rows_of_tensors():
    return [(torch.full((2,), float(number)), torch.arange(1.0 + number), number) for number in range(6)]


def other_lengths(rows):
    """Of the same numbers in a row."""
    rows[2:4] = [(rows[2][0], torch.arange(4.0), 2), (rows[3][0], torch.arange(3.0), 3)]


# rows that are alike -> a change of one of them
ROWS = {
    "in place": lambda rows: rows[4][0].data.fill_(9),  # which no version counts
    "another order": lambda rows: rows.insert(2, rows.pop(4)),
    "other lengths": other_lengths,
    "another dtype": lambda rows: rows.__setitem__(3, (rows[3][0].double(), *rows[3][1:])),
    "a bool for a number": lambda rows: rows.__setitem__(1, (*rows[1][:2], True)),
    "requires grad": lambda rows: rows[0][0].requires_grad_(),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_change_in_rows_that_are_alike_is_found_and_restored(tmp_path, name):
    old, fresh, lost = resumed(lambda: Holder(rows=rows_of_tensors()), lambda it: ROWS[name](it.rows), tmp_path)
    assert not lost
    assert alike(old.rows, fresh.rows)
    assert [row[0].requires_grad for row in old.rows] == [row[0].requires_grad for row in fresh.rows]


def test_a_buffer_among_rows_stays_a_reference():
    module = nn.Module()
    module.register_buffer("table", torch.zeros(2))
    module.rows = [module.table, torch.zeros(2)]
    tracker = AttributeTracker({"module": module})
    module.table.add_(1)
    assert tracker.changes()["values"] == {}
