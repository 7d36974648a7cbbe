"""What a run is configured with, as plain values, and what another start of it changed.

This is one of two comparisons. A `Configuration` holds what a start was given, before any hook of the fit; it is always
saved, as each later start has to be compared with the first one. The parts of a fit's state compare with the beginning
of the same start, by `ChangedValues` or `AttributeTracker`: only what hooks and training changed is saved, so that all
else may come from the script again.

Nothing of the user's is called to describe it: an object is described by its class and its plain attributes, a function
by the plain values that it holds and names. What code computes is not described; the files of its source are.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import linecache
import math
import re
import sys
import time
import types
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import BatchSampler, Dataset

from lightning_tricks._shared.patterns import strip_compile_prefix
from lightning_tricks._shared.tensors import unsharded_class
from lightning_tricks._torch_compat.modules import module_internals, own_buffers
from lightning_tricks.auto_resume.core.attributes.attribute_access import remembered_by_type
from lightning_tricks.auto_resume.core.attributes.encoding import is_clock_reading
from lightning_tricks.auto_resume.core.attributes.user_code import is_user_module, is_users_file

OBJECT = "a "  # begins the text that stands for an object that is not a plain value
ABSENT = "none"
IN_USE = "in use"  # the kind of a callback
ROOT = "module"  # how the module that is trained is called
BUFFER = "buffer of "
SCHEDULE_OPTIONS = ("interval", "frequency", "monitor", "strict")  # of Lightning's configs of schedulers
GROUP_ENTRIES = frozenset({"params", "param_names", "initial_lr", "name"})
_LONGEST = 60  # characters of a value in a message
_MOST_ITEMS = 1000  # of a list or dict that is compared
_MOST_PARTS = 100  # of a list in which each entry is described by itself
_DEEPEST = 20  # containers in containers; some contain themselves
_DEEPEST_OBJECTS = 3  # objects in objects, and functions that use functions
_MOST_DATASETS = 5  # data sets in data sets, such as a Subset
_LARGEST_SETTING = 2**32  # seeds end there; addresses, hashes and counts of nanoseconds are larger
_A_DAY = 86400.0

# What schedulers count, and what they take from the optimizer
_COUNTERS = re.compile(
    "_get_lr_called_within_step|_in_initial_step|_initial_step|_is_initial|_last_lr|_step_count|base_lrs|last_epoch|"
    "optimizer"
)
_TALKS = frozenset({"verbose"})  # the one option that torch, Lightning and most others name alike
_OF_THE_MACHINE = frozenset({"capturable", "foreach", "fused"})  # which kernels make the same step
_SHUFFLES = {"RandomSampler": True, "SequentialSampler": False}
_OF_THE_DATA = frozenset({"num_samples", "num_replicas", "rank", "seed", "shuffle"})  # arguments of samplers
# Methods that make what is described by itself, and those that no fit calls: what they name is not described
_MAKERS = re.compile(
    "__init__|setup|teardown|prepare_data|configure_.*|(train|val|test|predict)_dataloader|(on_)?(test|predict)_.*"
)


@dataclass(frozen=True)
class Change:
    """A value that another start of a run changed.

    Attributes:
        name: Its name, such as "Adam.lr".
        before: The value with which the run was started.
        now: The value of this start.
    """

    name: str
    before: Any
    now: Any

    @property
    def label(self) -> str:
        """What the value belongs to: the name up to its first dot, such as "Adam"."""
        return self.name.partition(".")[0]

    @property
    def may_be_drawn(self) -> bool:
        """Whether random numbers may have made the values: they are fractions, or lists of numbers."""
        return all(isinstance(one, float | list) and _are_numbers(one) for one in (self.before, self.now))

    def __str__(self) -> str:
        before, now = _text(self.before), _text(self.now)
        if max(len(before), len(now)) > _LONGEST:  # show where they begin to differ
            same = next((n for n, (old, new) in enumerate(zip(before, now, strict=False)) if old != new), 0)
            start = before.rfind(", ", 0, same) + 1
            before, now = (_shortened(f"...{text[start:]}" if start else text) for text in (before, now))
        return f"{self.name}: {before} -> {now}"


@dataclass
class Configuration:
    """What a run is configured with, by names such as "Adam.lr"; all values are plain.

    Attributes:
        kinds: What there is: classes of layers, optimizers, schedulers, loaders and callbacks, and buffers.
        values: Their settings. If only one of two starts has a setting, it is not the user's: libraries add defaults.
        derived: The names of those that are no arguments; a fit or another number of ranks may change them.
        told: The names of those that need not train, such as paths.
        records: Hyper-parameters, which do not train by themselves.
        origins: Where classes and functions of the user's are defined, such as "train:Net".
        files: Digests of the files with the user's code.
        groups: For each optimizer, the names of the parameters in its groups.
        exchanged: Whether the fit exchanged its first optimizers, with which a later start cannot be compared then.
    """

    kinds: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    derived: dict[str, bool] = field(default_factory=dict)
    told: dict[str, bool] = field(default_factory=dict)
    records: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    groups: list[list[list[str]]] = field(default_factory=list)
    exchanged: bool = False

    @classmethod
    def from_saved(cls, saved: Mapping[str, Any]) -> Configuration:
        """Take a configuration from a checkpoint; the release that wrote it may have described other things."""
        return cls(**{one.name: saved[one.name] for one in dataclasses.fields(cls) if one.name in saved})

    def add(self, other: Configuration) -> None:
        """Add what became known later."""
        for name in _BY_NAME:
            setattr(self, name, {**getattr(self, name), **getattr(other, name)})  # a save may be reading the old ones

    def forget(self, label: str) -> None:
        """Forget what is known of loaders."""
        for name in _BY_NAME:
            held = getattr(self, name).items()
            setattr(self, name, {key: value for key, value in held if re.split(r"[.\[]", key)[0] != label})

    def changes_to(self, now: Configuration) -> tuple[list[Change], list[Change]]:
        """Return what another configuration changes of what trains, and what it changes that need not train."""
        common = [{name: one.values[name] for name in now.values if name in self.values} for one in (self, now)]
        values = changes_between(*common)
        # what a scheduler derives from its arguments, in private attributes, changes with them
        labels, names = {one.label for one in values if "._" not in one.name}, {one.name for one in values}
        values = [one for one in values if "._" not in one.name or one.label not in labels]
        known = [{name: one.origins[name] for name in now.origins if name in self.origins} for one in (self, now)]
        kinds = changes_between(self.kinds, now.kinds)
        seen = {one.name for one in kinds} | names
        found = [*kinds, *values, *(one for one in changes_between(*known) if one.name not in seen)]
        found = [one for one in found if _flag_around(one.name) not in names]
        told = [
            one for one in found if one.name == ROOT or {one.name} & {*self.told, *now.told} or self._renames(one, now)
        ]
        records = {name: value for name, value in self.records.items() if name not in now.values}  # of another release
        return [one for one in found if one not in told], [*changes_between(records, now.records), *told]

    def changed_files(self, now: Configuration) -> list[str]:
        """Return the names of the files with code that another configuration changes."""
        return sorted(name for name, digest in now.files.items() if self.files.get(name, digest) != digest)

    def _renames(self, change: Change, now: Configuration) -> bool:
        """Whether a class or function of the user's has another name now: that of before is not there any more."""
        gone = {name for name, origin in self.origins.items() if not _exists(origin)}
        if change.now == IN_USE:  # in the place of another callback
            return any(self.kinds.get(name) == IN_USE and name not in now.kinds for name in gone)
        return change.name in gone and (change.before == IN_USE or change.name in now.origins)


_BY_NAME = tuple(one.name for one in dataclasses.fields(Configuration) if one.default_factory is dict)


def changes_between(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Return the values that differ, or that only one has."""
    pairs = {name: (before.get(name, ABSENT), now.get(name, ABSENT)) for name in {**before, **now}}
    return [Change(name, *pair) for name, pair in pairs.items() if not _are_equal(*pair)]


def plain(value: Any, depth: int = 0) -> Any:
    """Return a value as JSON has it: a scalar, a list or a dict; of any other object the name of its type."""
    if isinstance(value, np.generic) or (
        isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type != "meta"
    ):
        value = value.item()
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, PurePath):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value if value == value else "nan"  # which equals nothing, not even itself
    if isinstance(value, type) or hasattr(value, "__code__"):
        return value.__name__
    value, is_small = _as_mapping(value), depth < _DEEPEST
    with suppress(Exception):  # values of configs may be missing, or computed
        if isinstance(value, Mapping) and len(value) <= _MOST_ITEMS and is_small:
            return {str(name): plain(part, depth + 1) for name, part in value.items()}
        if isinstance(value, Set) and is_small:
            return sorted((plain(part, depth + 1) for part in value), key=repr)
        is_list = isinstance(value, Sequence) and not isinstance(value, bytes | bytearray)
        if is_list and len(value) <= _MOST_ITEMS and is_small:
            return [plain(part, depth + 1) for part in value]
    if isinstance(value, torch.dtype):
        return str(value)
    return f"{OBJECT}{type(value).__qualname__}"


def flatten(prefix: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the plain values of nested mappings, namespaces and dataclasses under names that are joined by dots."""
    value = _as_mapping(value)
    try:
        parts = list(value.items()) if isinstance(value, Mapping) and depth < _DEEPEST else None
    except Exception:  # values of configs may be missing, or computed
        parts = None
    if parts is None:
        yield prefix, plain(value)
    for name, part in parts or ():
        yield from flatten(f"{prefix}.{name}", part, depth + 1)


def _as_mapping(value: Any) -> Any:
    is_record = dataclasses.is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__")
    return vars(value) if isinstance(value, Namespace | types.SimpleNamespace) or is_record else value


def is_comparable(value: Any) -> bool:
    """Whether a plain value stands for no object."""
    if isinstance(value, list):
        return all(is_comparable(part) for part in value)
    if isinstance(value, dict):
        return all(is_comparable(part) for part in value.values())
    return not (isinstance(value, str) and value.startswith(OBJECT))


@remembered_by_type
def defaults_of(kind: Any) -> dict[str, Any]:
    """Return the default of each argument of a class, `inspect.Parameter.empty` where it has none."""
    with suppress(TypeError, ValueError):
        return {name: one.default for name, one in inspect.signature(kind.__init__).parameters.items()}
    return {}


def arguments_of(instance: object) -> dict[str, Any]:
    """Return the arguments of an object's constructor that it stores under their names."""
    held = getattr(instance, "__dict__", {})
    return {name: held[name] for name in defaults_of(type(instance)) if name in held}


def own_files() -> dict[str, str]:
    """Return a digest of each file with code of the user's that is imported, by its name below its folder."""
    found = {}
    for name in sys.modules.keys() - _of_packages:  # of thousands, of which almost none are the user's
        module = sys.modules.get(name)
        file, own_name = getattr(module, "__file__", None), str(getattr(module, "__name__", name))
        # a package may offer a module under other names, of which the depth says nothing of its folder
        if isinstance(file, str) and not is_users_file(own_name, file):
            _of_packages.add(name)
        elif isinstance(file, str) and file.endswith(".py"):
            path = Path(file)
            folders = own_name.split(".")[: -1 if path.stem != "__init__" else None]
            with suppress(OSError):  # of a module in an archive
                found["/".join([*folders, path.name])] = _file_digest(path, path.stat().st_mtime_ns)
    return found


_of_packages = set[str]()  # names of modules whose files own_files has met, and which are not the user's


@functools.lru_cache(10_000)
def _file_digest(path: Path, changed_at: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def is_stamp(value: Any) -> bool:
    """Whether a value is or holds an address, a hash or a reading of a clock: each process has others of these."""
    if isinstance(value, list | tuple):
        return any(map(is_stamp, value))
    is_address = isinstance(value, int) and abs(value) > _LARGEST_SETTING
    is_reading = isinstance(value, int | float) and 0 <= time.time() - value < _A_DAY
    return is_address or is_reading or (isinstance(value, float) and is_clock_reading(value))


def _origin(value: Any) -> str:
    """Return where a class or function of the user's is defined; empty for others."""
    return f"{value.__module__}:{value.__qualname__}" if is_user_module(value.__module__) else ""


def _exists(origin: str) -> bool:
    module, _, path = origin.partition(":")
    found: Any = sys.modules.get(module)
    for name in path.split("."):
        found = vars(found).get(name) if hasattr(found, "__dict__") else None
    return found is not None


@dataclass(frozen=True)
class Rule:
    """What a change of a setting means.

    Attributes:
        is_given: Whether it is an argument.
        texts_train: Whether its texts choose what trains, as the modes of libraries do.
        is_told: Whether it need not train.
    """

    is_given: bool = True
    texts_train: bool = False
    is_told: bool = False


class Describer:
    """Adds to a configuration what objects are, each object once; it calls nothing of the user's.

    Args:
        found: The configuration.
        known: Objects that are described elsewhere.
        only_arguments: Whether attributes that are no arguments are left out, as they may be of another epoch.
    """

    def __init__(self, found: Configuration, known: Sequence[object] = (), *, only_arguments: bool = False) -> None:
        self.found, self._known, self._only_arguments = found, known, only_arguments
        self._seen = {id(one) for one in known}
        self._codes = set[types.CodeType]()

    def add(
        self, label: str, owner: Any, skipped: Set[str] = frozenset(), depth: int = 0, is_told: bool = False
    ) -> None:
        """Add the attributes of an object, and what the methods of its class name; `is_told` if it need not train."""
        self._seen.add(id(owner))
        kind = unsharded_class(owner) if isinstance(owner, nn.Module) else type(owner)
        self.found.origins |= {label: origin} if (origin := _origin(kind)) else {}
        left_out = {*skipped, *(module_internals() if isinstance(owner, nn.Module) else _content(owner))}
        for name, value in {**self._of_class(kind, is_told), **getattr(owner, "__dict__", {})}.items():
            is_given = name.lstrip("_") in defaults_of(kind)
            is_private = name.startswith("_") and not is_given
            is_method = callable(getattr(kind, name, None))  # which a library has wrapped, as schedulers do
            is_left_out = name in left_out or is_method
            if not is_left_out and (is_given or not self._only_arguments) and (_is_data(value) or not is_private):
                rule = Rule(is_given, texts_train=not origin, is_told=is_told or is_private or name in _TALKS)
                self.add_value(f"{label}.{name}", value, rule, depth)

    def add_value(self, name: str, value: Any, rule: Rule, depth: int = 0) -> None:
        """Add a value of any kind."""
        function = getattr(value, "__func__", None) if isinstance(value, types.MethodType) else value
        parts: Mapping[str, Any] = {}
        if isinstance(function, types.FunctionType):
            origin = _origin(function)
            self._put(name, "function" if origin else function.__name__, rule)
            self.found.origins |= {name: origin} if origin else {}
            parts = _held_by(function)
            self._add_globals(inspect.unwrap(function), rule.is_told, depth)
        elif isinstance(value, functools.partial):
            parts = {
                "func": value.func,
                **{str(number): one for number, one in enumerate(value.args)},
                **value.keywords,
            }
        elif _is_described(value):
            self._put(name, type(value).__name__, rule)
            layers = value.named_modules() if isinstance(value, nn.Module) else [("", value)]
            if id(value) not in self._seen and depth < _DEEPEST_OBJECTS:
                for path, layer in layers:
                    self.add(f"{name}.{path}" if path else name, layer, depth=depth + 1)
        elif depth < _DEEPEST:
            self._add_plain(name, value, rule, depth)
        for part, held in parts.items() if depth < _DEEPEST_OBJECTS else ():
            self.add_value(f"{name}.{part}", held, rule, depth + 1)

    def _add_plain(self, name: str, value: Any, rule: Rule, depth: int) -> None:
        """Add a plain value, or each entry of a container by itself if not all are numbers."""
        entries, found = _as_mapping(value), plain(value)
        with suppress(Exception):  # values of configs may be missing, or computed
            if isinstance(entries, Mapping) and len(entries) <= _MOST_ITEMS:
                entries = {key: one for key, one in entries.items() if _is_data(key) and not is_stamp(plain(key))}
                keys = sorted(str(key) for key, one in entries.items() if not isinstance(one, str))
                self._put(f"{name}.keys", keys, rule)  # an entry that only one start has would be no change
                for key, one in entries.items():
                    self.add_value(f"{name}.{key}", one, rule, depth + 1)
                return
            if isinstance(value, list | tuple) and len(value) <= _MOST_PARTS and not all(map(_is_data, value)):
                if any(one is known for one in value for known in self._known):  # such as the Trainer's callbacks
                    return
                for number, one in enumerate(value):
                    self.add_value(f"{name}[{number}]" if value[1:] else name, one, rule, depth + 1)
                self._put(f"{name}.length", len(value), rule)
                return
        if is_comparable(found):
            texts = [value] if not isinstance(value, list | tuple) else value
            is_text = bool(texts) and all(
                isinstance(one, str | PurePath) and not isinstance(one, Enum) for one in texts
            )
            is_told = is_stamp(found) or (is_text and not (rule.texts_train and not all(map(is_place, texts))))
            self._put(name, found, dataclasses.replace(rule, is_told=rule.is_told or is_told))

    def _put(self, name: str, value: Any, rule: Rule) -> None:
        is_new = name not in self.found.values
        self.found.values[name] = value
        if not rule.is_told:
            self.found.told.pop(name, None)  # two classes may name one variable
            self.found.derived |= {} if rule.is_given else {name: True}
        elif is_new:
            self.found.told[name] = True

    def _of_class(self, kind: type, is_told: bool) -> dict[str, Any]:
        """Return the plain values of the user's classes, after adding what their methods name."""
        found: dict[str, Any] = {}
        for base in reversed(kind.__mro__):
            for name, member in vars(base).items() if is_user_module(base.__module__) else ():
                function = inspect.unwrap(getattr(member, "__func__", getattr(member, "fget", member)))
                if not isinstance(function, types.FunctionType) and name[:2] != "__" and _is_data(member):
                    found[name] = member
                elif not _MAKERS.fullmatch(name):
                    self._add_globals(function, is_told)
        return found

    def _add_globals(self, function: Any, is_told: bool, depth: int = 0) -> None:
        """Add the plain global variables that a function of the user's names, and those that it calls."""
        code, module = getattr(function, "__code__", None), str(getattr(function, "__module__", ""))
        if code is None or code in self._codes or not is_user_module(module):
            return
        self._codes.add(code)
        if not getattr(sys.modules.get(module), "__file__", None):  # of a notebook, whose cells have no files
            lines = "".join(linecache.getlines(code.co_filename)).encode()
            self.found.files[f"{module}.{function.__qualname__}"] = hashlib.sha256(lines).hexdigest()[:16]
        names = _names_in(code)
        for name in names & function.__globals__.keys():
            value, label = function.__globals__[name], f"globals.{module}.{name}"
            entries = _as_mapping(value)
            if isinstance(value, types.FunctionType):
                if depth < _DEEPEST_OBJECTS:
                    self._add_globals(inspect.unwrap(value), is_told, depth + 1)
                continue
            if isinstance(value, types.ModuleType | type):
                owner = value.__name__ if isinstance(value, types.ModuleType) else str(value.__module__)
                entries = vars(value) if is_user_module(owner) else {}
            elif _is_described(value):
                entries = vars(value)
            if not isinstance(entries, Mapping):
                entries, label = {name: value}, f"globals.{module}"
            for part in names & entries.keys() or (entries.keys() if entries is value else ()):
                if _is_data(entries[part]):
                    self._add_plain(f"{label}.{part}", entries[part], Rule(is_given=False, is_told=is_told), depth=0)


def _content(dataset: Any) -> set[str]:
    """Return the names of the attributes of a data set that have an entry for each sample."""
    is_dataset = isinstance(dataset, Dataset)
    with suppress(Exception):  # not every data set has a length
        size, held = len(dataset) if is_dataset else -1, vars(dataset).items()
        return {name for name, one in held if isinstance(one, list | tuple | dict) and len(one) == size}
    return set()


def _names_in(code: types.CodeType) -> set[str]:
    """Return the names and keys that code uses, also in functions within it."""
    nested = [_names_in(one) for one in code.co_consts if isinstance(one, types.CodeType)]
    return {*code.co_names, *(one for one in code.co_consts if isinstance(one, str))}.union(*nested)


def _is_described(value: Any) -> bool:
    """Whether an object is described by its attributes: the user's, layers, data sets, and what is called."""
    if isinstance(value, type | Enum | Optimizer | torch.Tensor) or not hasattr(value, "__dict__"):
        return False
    is_known = isinstance(value, nn.Module | Dataset) or callable(value)
    return is_known or (is_user_module(type(value).__module__) and _as_mapping(value) is value)


def _is_data(value: Any) -> bool:
    """Whether a value is a number, a text, or a container of these."""
    known = (bool, int, float, str, PurePath, Enum, list, tuple, set, frozenset, dict, np.generic, type(None))
    return isinstance(value, known) and is_comparable(plain(value))


def _held_by(function: types.FunctionType) -> dict[str, Any]:
    """Return the defaults and the variables of the closure of a function."""
    code, defaults = function.__code__, function.__defaults__ or ()
    arguments = code.co_varnames[: code.co_argcount]
    found = dict(zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True))
    found |= function.__kwdefaults__ or {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it is empty
            found[name] = cell.cell_contents
    return found


def is_place(value: Any) -> bool:
    """Whether a value is a path, or a text whose outermost folder exists: where something lies does not train."""
    if not isinstance(value, str) or "\0" in value or not re.search(r"[/\\]", value):
        return isinstance(value, PurePath)
    path = Path(value).expanduser()
    return Path(*path.parts[: 1 + path.is_absolute()]).is_dir()


def numbered(objects: Sequence[object]) -> list[str]:
    """Return a name for each object: that of its class, from the second one of a class on with its number."""
    kinds = [type(instance).__name__ for instance in objects]
    counts = [kinds[:place].count(kind) for place, kind in enumerate(kinds)]
    return [f"{kind}[{count}]" if count else kind for kind, count in zip(kinds, counts, strict=True)]


def describe_layers(found: Configuration, describer: Describer, module: nn.Module, skipped: tuple[type, ...]) -> None:
    """Add classes and attributes of all layers, buffers, and what is frozen or evaluates.

    Args:
        found: The configuration.
        describer: Describes the layers.
        module: The module that is trained.
        skipped: Classes of layers whose arguments do not train, such as metrics.
    """
    layers = {_label(path): layer for path, layer in module.named_modules() if not path.endswith("_orig_mod")}
    for label, layer in layers.items():
        if isinstance(layer, skipped):
            continue
        found.kinds[label] = unsharded_class(layer).__name__
        if layer is not module:
            describer.add(label, layer)
        for name, buffer in own_buffers(layer).items():
            shape = "any shape" if buffer is None or is_lazy(buffer) else f"shape {list(buffer.shape)}"
            found.kinds[f"{label}.{name}" if layer is not module else name] = BUFFER + shape
        found.values |= _flags("" if layer is module else label, layer)


def _label(path: str) -> str:
    return strip_compile_prefix(f"{path}.").removesuffix(".") or ROOT


def _flags(path: str, layer: nn.Module) -> dict[str, bool]:
    """Return whether anything in a layer trains and has gradients, and which of its own parameters have."""
    found = {f"{_label(path)}.training": any(one.training for one in layer.modules())}
    if parameters := list(layer.parameters()):
        found[f"{_label(path)}.requires_grad"] = any(one.requires_grad for one in parameters)
    own = layer.named_parameters(path, recurse=False)
    return found | {f"{_label(name)}.requires_grad": one.requires_grad for name, one in own}


def _flag_around(name: str) -> str:
    """Return the name of a flag such as "net.0.training" in what is around it, which changes with it; or nothing."""
    path, _, flag = name.rpartition(".")
    if flag not in ("requires_grad", "training") or path == ROOT:
        return ""
    return f"{path.rpartition('.')[0] or ROOT}.{flag}"


def describe_optimizers(
    optimizers: Sequence[Any], configs: Sequence[Any], names: Sequence[Any], known: Sequence[object] = ()
) -> Configuration:
    """Return what optimizers and schedulers were created with.

    Args:
        optimizers: The optimizers, before their states are loaded.
        configs: Lightning's configs of the schedulers.
        names: What `param_group_names` returns.
        known: Objects that are described elsewhere.
    """
    found = Configuration(groups=[[list(group) for group in groups] for groups in names])
    schedulers, groups_seen = [config.scheduler for config in configs], set[int]()
    describer = Describer(found, [*known, *optimizers, *schedulers])
    for number, (label, optimizer) in enumerate(zip(numbered(optimizers), optimizers, strict=True)):
        groups = found.groups[number]
        digest = hashlib.sha256(repr([sorted(map(str, group)) for group in groups]).encode()).hexdigest()[:6]
        sizes = ", ".join(str(len(group)) for group in groups)
        found.values[f"{label}.groups"] = f"parameters: {sizes} ({digest})"
        found.kinds[f"optimizer {number}"] = type(optimizer).__name__
        _add_optimizer(describer, label, optimizer, groups_seen)
    for number, (label, config) in enumerate(zip(numbered(schedulers), configs, strict=True)):
        found.kinds[f"scheduler {number}"] = type(config.scheduler).__name__
        found.values |= {f"{label}.{name}": plain(getattr(config, name)) for name in SCHEDULE_OPTIONS}
        _add_scheduler(describer, label, config.scheduler)
    return found


def _add_optimizer(describer: Describer, label: str, optimizer: Any, groups_seen: set[int]) -> None:
    """Add the attributes and the groups of an optimizer, and of those in it."""
    inner = {name: value for name, value in vars(optimizer).items() if isinstance(value, Optimizer)}
    for prefix, group in zip(group_labels(label, optimizer.param_groups), optimizer.param_groups, strict=True):
        options = {name: plain(value) for name, value in group.items() if name not in GROUP_ENTRIES | _OF_THE_MACHINE}
        options["lr"] = plain(group.get("initial_lr", group.get("lr")))  # a schedule has begun to change the latter
        if id(group) not in groups_seen:  # a wrapper has those of another one
            describer.found.values |= {f"{prefix}.{name}": one for name, one in options.items() if is_comparable(one)}
        groups_seen.add(id(group))
    private = [name for name in vars(optimizer) if name.startswith("_")]
    elsewhere = {"param_groups", "state", "defaults", *getattr(optimizer, "defaults", ()), *inner, *private}
    describer.add(label, optimizer, elsewhere)
    for name, value in inner.items():
        if value is not optimizer:
            _add_optimizer(describer, f"{label}.{name.lstrip('_')}", value, groups_seen)


def group_labels(label: str, groups: Sequence[Any]) -> list[str]:
    """Return a name for each parameter group of an optimizer: that of the optimizer if there is one group."""
    return [f"{label}.groups[{number}]" for number in range(len(groups))] if len(groups) != 1 else [label]


def _add_scheduler(describer: Describer, label: str, scheduler: Any) -> None:
    """Add what a scheduler was created with, and those in it."""
    for name, value in getattr(scheduler, "__dict__", {}).items():
        parts = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(part, LRScheduler) for part in parts):
            for number, part in enumerate(parts):
                _add_scheduler(describer, f"{label}.{name.lstrip('_')}[{number}]", part)
        elif not _COUNTERS.fullmatch(name):
            describer.add_value(f"{label}.{name}", value, Rule(texts_train=True, is_told=name in _TALKS))


def describe_loaders(loaders: Sequence[Any], name: str, known: Sequence[object] = ()) -> Configuration:
    """Return batch sizes, orders, samplers and data sets of loaders, the same on any number of ranks and workers.

    Of samplers and data sets only arguments are described: the epoch may be another attribute. What else is in the data
    is compared by `fingerprints`, and in samplers by the order that they give.

    Args:
        loaders: The loaders.
        name: How they are called.
        known: Objects that are described elsewhere.
    """
    found = Configuration()
    describer = Describer(found, known, only_arguments=True)
    for number, loader in enumerate(loaders):
        label = name if len(loaders) == 1 else f"{name}[{number}]"
        batch_sampler, sampler = (getattr(loader, part, None) for part in ("batch_sampler", "sampler"))
        # Lightning wraps samplers to split them among ranks
        sampler = getattr(getattr(sampler, "dataset", None), "_sampler", sampler)
        owner = batch_sampler if isinstance(batch_sampler, BatchSampler) else loader
        for option in ("batch_size", "drop_last"):
            value = plain(getattr(owner, option, None))
            if isinstance(value, int):
                found.values[f"{label}.{option}"] = value
        kind = type(sampler).__name__
        shuffle = _SHUFFLES.get(kind, getattr(sampler, "shuffle", None))
        if isinstance(shuffle, bool):
            found.values[f"{label}.shuffle"] = shuffle
        _add_datasets(describer, f"{label}.dataset", getattr(loader, "dataset", None))
        size = found.values.get(f"{label}.dataset.length")
        describer.add_value(f"{label}.collate_fn", getattr(loader, "collate_fn", None), Rule())
        for part, value in (("sampler", sampler), ("batch_sampler", batch_sampler)):
            kind = type(value).__name__
            is_ours = type(value).__module__.startswith("lightning_tricks.")  # it depends on the stage of the fit
            if value is None or is_ours or kind.startswith("_") or kind == "BatchSampler":
                continue
            if not isinstance(shuffle, bool) or part == "batch_sampler":
                found.kinds[f"{label}.{part}"] = kind
            held = getattr(value, "__dict__", {}).items()
            of_size = {name for name, one in held if isinstance(one, list) or (isinstance(one, int) and one == size)}
            describer.add(f"{label}.{part}", value, _OF_THE_DATA | of_size | {"sampler", "data_source", "dataset"})
    return found


def _add_datasets(describer: Describer, label: str, dataset: Any) -> None:
    """Add class, length and arguments of a data set and of those in it."""
    for _ in range(_MOST_DATASETS):
        if dataset is None:
            return
        with suppress(Exception):  # not every data set has a length
            describer.found.values[f"{label}.length"] = len(dataset)
        describer.found.kinds[label] = type(dataset).__name__
        describer.add(label, dataset, {"dataset"})
        label, dataset = f"{label}.dataset", getattr(dataset, "dataset", None)


def is_longer(before: Any, now: Any) -> bool:
    """Whether a limit of epochs or steps allows more than another one; None and -1 are not limits."""
    return _as_limit(now) > _as_limit(before)


def _as_limit(limit: Any) -> float:
    return math.inf if limit in (None, -1) else float(limit)


def _are_equal(before: Any, now: Any) -> bool:
    """Whether two plain values are equal; floats as far as the last bits, in which machines differ."""
    if isinstance(before, list) and isinstance(now, list):
        return len(before) == len(now) and all(map(_are_equal, before, now))
    if isinstance(before, dict) and isinstance(now, dict):
        return before.keys() == now.keys() and all(_are_equal(before[name], now[name]) for name in before)
    if isinstance(before, float) and isinstance(now, int | float):
        return math.isclose(before, now, rel_tol=1e-9)
    if f"{BUFFER}any shape" in (before, now):
        return all(isinstance(value, str) and value.startswith(BUFFER) for value in (before, now))
    return bool(before == now)


def _are_numbers(value: Any) -> bool:
    return all(map(_are_numbers, value)) if isinstance(value, list) else isinstance(value, int | float)


def _text(value: Any) -> str:
    return value if isinstance(value, str) and value.isidentifier() else repr(value)


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
