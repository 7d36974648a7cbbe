"""What a run is configured with, as plain values, and what another start of it changed.

This is one of two comparisons. A `Configuration` holds what a start was given, before any hook; it is always saved, as
each later start has to be compared with the first one. The parts of a fit's state compare with the beginning of the
same start, by `ChangedValues` or `AttributeTracker`: only what hooks and training changed is saved, so that all else
may come from the script again.

Nothing of the user's is called to describe it: an object is described by its class and its plain attributes, a function
by its bytecode and the plain values that it uses.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import math
import re
import sys
import types
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import BatchSampler

from lightning_tricks._shared.patterns import strip_compile_prefix
from lightning_tricks._shared.tensors import unsharded_class
from lightning_tricks._torch_compat.modules import own_buffers
from lightning_tricks.auto_resume.core.attributes.attribute_access import remembered_by_type
from lightning_tricks.auto_resume.core.attributes.user_code import is_user_module

OBJECT = "a "  # begins the text that stands for an object that is not a plain value
ABSENT = "none"
ROOT = "module"  # how the module that is trained is called
BUFFER = "buffer of "
SCHEDULE_OPTIONS = ("interval", "frequency", "monitor", "strict")  # of Lightning's configs of schedulers
GROUP_ENTRIES = frozenset({"params", "param_names", "initial_lr", "name"})
_BYTECODE = f"bytecode {sys.implementation.cache_tag} "  # of another Python it cannot be compared
_LONGEST = 60  # characters of a value in a message
_MOST_ITEMS = 1000  # of a list or dict that is compared
_DEEPEST = 20  # containers in containers; some contain themselves
_DEEPEST_FUNCTIONS = 3  # functions that use functions
_MOST_DATASETS = 5  # data sets in data sets, such as a Subset

# What schedulers count, and what they take from the optimizer
_COUNTERS = re.compile(
    "_get_lr_called_within_step|_in_initial_step|_initial_step|_is_initial|_last_lr|_step_count|base_lrs|last_epoch|"
    "optimizer|verbose"
)
_OF_THE_MACHINE = frozenset({"capturable", "foreach", "fused"})  # which kernels make the same step
_SHUFFLES = {"RandomSampler": True, "SequentialSampler": False}
_OF_THE_DATA = frozenset({"num_samples", "num_replicas", "rank", "seed", "shuffle"})  # arguments of samplers


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
        code: Of objects of classes of the user's, the name of the class and a digest of its code.
        records: Hyper-parameters, which do not train by themselves.
        groups: For each optimizer, the names of the parameters in its groups.
        exchanged: Whether the fit exchanged its first optimizers, with which a later start cannot be compared then.
    """

    kinds: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    code: dict[str, list[str]] = field(default_factory=dict)
    records: dict[str, Any] = field(default_factory=dict)
    groups: list[list[list[str]]] = field(default_factory=list)
    exchanged: bool = False

    def add(self, other: Configuration) -> None:
        """Add what became known later."""
        for name in ("kinds", "values", "code", "records"):
            setattr(self, name, {**getattr(self, name), **getattr(other, name)})  # a save may be reading the old ones

    def forget(self, label: str) -> None:
        """Forget what is known of loaders."""
        for name in ("kinds", "values", "code"):
            held = getattr(self, name).items()
            setattr(self, name, {key: value for key, value in held if re.split(r"[.\[]", key)[0] != label})

    def add_code(self, label: str, kind: type) -> None:
        """Add the code of a class, if the user wrote it."""
        if code := class_code(kind):
            self.code[label] = [kind.__name__, code]

    def changes_to(self, now: Configuration) -> list[Change]:
        """Return what another configuration changes of what trains."""
        kinds = changes_between(self.kinds, now.kinds)  # another class of the module is told by its layers and its code
        kinds = [one for one in kinds if one.name != ROOT and not self._has_same_code(one.name, now)]
        common = [{name: of.values[name] for name in now.values if name in self.values} for of in (self, now)]
        values = changes_between(*common)
        # what a scheduler derives from its arguments, in private attributes, changes with them
        labels, names = {one.label for one in values if "._" not in one.name}, {one.name for one in values}
        values = [one for one in values if "._" not in one.name or one.label not in labels]
        return kinds + [one for one in values if _flag_around(one.name) not in names]

    def changed_code(self, now: Configuration) -> list[str]:
        """Return the names of the classes whose code another configuration changes."""
        same = [name for name in self.code.keys() & now.code.keys() if self.kinds.get(name) == now.kinds.get(name)]
        names = [name for name in now.code if name in {*same, ROOT} & self.code.keys()]
        return [*dict.fromkeys(now.code[name][0] for name in names if not self._has_same_code(name, now))]

    def _has_same_code(self, name: str, now: Configuration) -> bool:
        both = name in self.code and name in now.code
        return both and _are_equal(self.code[name][1], now.code[name][1])


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
    return vars(value) if isinstance(value, Namespace) or is_record else value


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


def described_arguments(label: str, instance: object, skipped: Set[str] = frozenset()) -> dict[str, Any]:
    """Return the comparable values of an object's arguments, by names such as "Noise.scale"."""
    arguments = arguments_of(instance)
    names = [name for name in arguments if name not in skipped]
    return {path: value for name in names for path, value in describe(f"{label}.{name}", arguments[name])}


def describe(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the comparable values of an argument by name: of a function its bytecode and what it uses, uncalled."""
    held: Mapping[str, Any] = {}
    function = getattr(value, "__func__", None) if isinstance(value, types.MethodType) else value
    if isinstance(function, types.FunctionType):
        is_users = is_user_module(function.__module__)
        yield name, "function" if is_users else function.__name__
        if is_users:
            yield f"{name}.code", _digest(_code_texts(inspect.unwrap(function)))
        held = _used_by(function, with_globals=is_users)
    elif isinstance(value, functools.partial):
        held = {"func": value.func, **{str(number): part for number, part in enumerate(value.args)}, **value.keywords}
    elif callable(value) and not isinstance(value, type | nn.Module) and (code := class_code(type(value))):
        yield name, type(value).__name__
        yield f"{name}.code", code
        held = getattr(value, "__dict__", {})
    else:
        yield from ((path, part) for path, part in flatten(name, value) if is_comparable(part))
    for part_name, part in held.items() if depth < _DEEPEST_FUNCTIONS else ():
        yield from describe(f"{name}.{part_name}", part, depth + 1)


def _used_by(function: types.FunctionType, *, with_globals: bool) -> dict[str, Any]:
    """Return the defaults, the variables of the closure, and the numbers, texts and functions of the module."""
    code, defaults = function.__code__, function.__defaults__ or ()
    arguments = code.co_varnames[: code.co_argcount]
    found = dict(zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True))
    found |= function.__kwdefaults__ or {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it is empty
            found[name] = cell.cell_contents
    known: Mapping[str, Any] = function.__globals__ if with_globals else {}
    kinds = bool | int | float | str | types.FunctionType
    return found | {name: known[name] for name in code.co_names if isinstance(known.get(name), kinds)}


@remembered_by_type
def class_code(kind: type) -> str:
    """Return a digest of the methods and plain values of a class, as far as classes of the user's define them."""
    texts = []
    for base in kind.__mro__:
        for name, member in vars(base).items() if is_user_module(base.__module__) else ():
            function = getattr(member, "__func__", member.fget if isinstance(member, property) else member)
            if isinstance(function, types.FunctionType):
                texts += [name, *_code_texts(inspect.unwrap(function))]
            elif isinstance(member, bool | int | float | str) and not name.startswith("__"):
                texts += [name, repr(member)]
    return _digest(texts) if texts else ""


def _code_texts(function: Any) -> Iterator[str]:
    """Yield what code computes, without comments, docstrings, line numbers, and the names of files and variables."""
    pending = [function.__code__] if isinstance(function, types.FunctionType) else []
    while pending:
        code = pending.pop()
        yield from (code.co_code.hex(), repr(code.co_names))
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                pending.append(constant)
            elif not isinstance(constant, str) or (constant != function.__doc__ and ".<locals>." not in constant):
                yield repr(sorted(constant, key=repr) if isinstance(constant, frozenset) else constant)


def _digest(texts: Iterator[str] | Sequence[str]) -> str:
    return _BYTECODE + hashlib.sha256("\0".join(texts).encode("utf-8", "surrogatepass")).hexdigest()[:8]


def numbered(objects: Sequence[object]) -> list[str]:
    """Return a name for each object: that of its class, from the second one of a class on with its number."""
    kinds = [type(instance).__name__ for instance in objects]
    counts = [kinds[:place].count(kind) for place, kind in enumerate(kinds)]
    return [f"{kind}[{count}]" if count else kind for kind, count in zip(kinds, counts, strict=True)]


def describe_layers(module: nn.Module, skipped: tuple[type, ...], recorded: Set[str]) -> Configuration:
    """Return classes and arguments of all layers, as far as they show, buffers, and what is frozen or evaluates.

    Args:
        module: The module that is trained.
        skipped: Classes of layers whose arguments do not train, such as metrics.
        recorded: The arguments of the module itself that are hyper-parameters.
    """
    found = Configuration()
    for path, layer in module.named_modules():
        if isinstance(layer, skipped) or path.endswith("_orig_mod"):
            continue
        label, kind = _label(path), unsharded_class(layer)
        found.kinds[label] = kind.__name__
        found.add_code(label, kind)
        found.values |= described_arguments(label, layer, frozenset() if path else recorded)
        for name, buffer in own_buffers(layer).items():
            shape = "any shape" if buffer is None or is_lazy(buffer) else f"shape {list(buffer.shape)}"
            found.kinds[f"{label}.{name}" if path else name] = BUFFER + shape
        found.values |= _flags(path, layer)
    return found


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


def describe_optimizers(optimizers: Sequence[Any], configs: Sequence[Any], names: Sequence[Any]) -> Configuration:
    """Return what optimizers and schedulers were created with.

    Args:
        optimizers: The optimizers, before their states are loaded.
        configs: Lightning's configs of the schedulers.
        names: What `param_group_names` returns.
    """
    found = Configuration(groups=[[list(group) for group in groups] for groups in names])
    for number, (label, optimizer) in enumerate(zip(numbered(optimizers), optimizers, strict=True)):
        groups = found.groups[number]
        digest = hashlib.sha256(repr([sorted(map(str, group)) for group in groups]).encode()).hexdigest()[:6]
        sizes = ", ".join(str(len(group)) for group in groups)
        found.values[f"{label}.groups"] = f"parameters: {sizes} ({digest})"
        found.kinds[f"optimizer {number}"] = type(optimizer).__name__
        for prefix, group in zip(group_labels(label, optimizer.param_groups), optimizer.param_groups, strict=True):
            options = {
                name: plain(value) for name, value in group.items() if name not in GROUP_ENTRIES | _OF_THE_MACHINE
            }
            options["lr"] = plain(group.get("initial_lr", group.get("lr")))  # a schedule has begun to change the latter
            found.values |= {f"{prefix}.{name}": value for name, value in options.items() if is_comparable(value)}
    schedulers = [config.scheduler for config in configs]
    for number, (label, config) in enumerate(zip(numbered(schedulers), configs, strict=True)):
        found.kinds[f"scheduler {number}"] = type(config.scheduler).__name__
        found.values |= {f"{label}.{name}": plain(getattr(config, name)) for name in SCHEDULE_OPTIONS}
        found.values |= dict(describe_scheduler(label, config.scheduler))
    return found


def group_labels(label: str, groups: Sequence[Any]) -> list[str]:
    """Return a name for each parameter group of an optimizer: that of the optimizer if there is one group."""
    return [f"{label}.groups[{number}]" for number in range(len(groups))] if len(groups) != 1 else [label]


def describe_scheduler(label: str, scheduler: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a scheduler was created with, by name."""
    for name, value in getattr(scheduler, "__dict__", {}).items():
        parts = value if isinstance(value, list | tuple) else [value]
        if _COUNTERS.fullmatch(name) or not parts:
            continue
        if all(isinstance(part, LRScheduler) for part in parts):
            for number, part in enumerate(parts):
                yield from describe_scheduler(f"{label}.{name.lstrip('_')}[{number}]", part)
        elif all(callable(part) for part in parts):
            for number, part in enumerate(parts):
                if getattr(part, "__self__", None) is not scheduler:
                    yield from describe(f"{label}.{name}[{number}]" if len(parts) > 1 else f"{label}.{name}", part)
        elif is_comparable(plain(value)):
            yield f"{label}.{name}", plain(value)


def describe_loaders(loaders: Sequence[Any], name: str) -> Configuration:
    """Return batch sizes, orders, samplers and data sets of loaders, the same on any number of ranks and workers."""
    found = Configuration()
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
        size = _add_datasets(found, label, getattr(loader, "dataset", None))
        for part, value in (("sampler", sampler), ("batch_sampler", batch_sampler)):
            kind = type(value).__name__
            is_ours = type(value).__module__.startswith("lightning_tricks.")  # it depends on the stage of the fit
            if value is None or is_ours or kind.startswith("_") or kind == "BatchSampler":
                continue
            if not isinstance(shuffle, bool) or part == "batch_sampler":
                found.kinds[f"{label}.{part}"] = kind
            given = described_arguments(f"{label}.{part}", value, _OF_THE_DATA)
            found.values |= {name: one for name, one in given.items() if not isinstance(one, list) and one != size}
    return found


def _add_datasets(found: Configuration, label: str, dataset: Any) -> int | None:
    """Add class, length and plain arguments of a data set and of those in it; return the length of the first."""
    sizes: list[int | None] = []
    while dataset is not None and len(sizes) < _MOST_DATASETS:
        label, kind = f"{label}.dataset", type(dataset)
        found.kinds[label] = kind.__name__
        found.add_code(label, kind)
        sizes.append(None)
        with suppress(Exception):  # not every data set has a length
            sizes[-1] = found.values[f"{label}.length"] = len(dataset)
        found.values |= {} if kind.__module__.startswith("torch.") else described_arguments(label, dataset)
        dataset = getattr(dataset, "dataset", None)
    return sizes[0] if sizes else None


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
    if isinstance(before, str) and isinstance(now, str) and before.startswith("bytecode ") and before != now:
        return now.startswith("bytecode ") and not before.startswith(_BYTECODE)
    return bool(before == now)


def _text(value: Any) -> str:
    return value if isinstance(value, str) and value.isidentifier() else repr(value)


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
