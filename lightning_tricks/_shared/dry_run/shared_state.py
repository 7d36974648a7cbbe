"""Restore what the run of a model, or of a copy that shares something with it and with the program, has changed."""

from __future__ import annotations

import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tricks._shared.modules import eval_mode
from lightning_tricks._shared.rng import isolated_rng, kept_generators
from lightning_tricks._shared.tensors import local_part

# whose objects keep no values of a model's steps, or are restored elsewhere
_LIBRARIES = frozenset(["builtins", "lightning", "lightning_fabric", "lightning_tricks", "numpy", "pytorch_lightning"])
_LIBRARIES |= {"torch", "torchmetrics", "typing"}
_CONTAINERS: tuple[Any, ...] = (list, deque, OrderedDict, dict, set)  # an OrderedDict before what it is as well
_MOST_ELEMENTS = 1000  # of a container whose elements are looked at: a larger one holds data
_MOST_VALUES = 5000  # the nearest


@contextmanager
def evaluated_unchanged(module: nn.Module, loader: Any) -> Iterator[None]:
    """Put a module into evaluation mode, and restore its tensors, attributes and modes, and generators, on leaving."""
    tensors = [local_part(tensor).detach() for tensor in chain(module.parameters(), module.buffers())]
    before = [(tensor, tensor.to("cpu", copy=True)) for tensor in tensors]
    try:
        with isolated_rng(), kept_generators(loader), restored_state(module), eval_mode(module):
            yield
    finally:
        for tensor, values in before:
            if not torch.equal(tensor.cpu(), values):
                tensor.copy_(values)


@contextmanager
def restored_state(*roots: Any) -> Iterator[None]:
    """Restore, on leaving, what is reached from some objects: their attributes, and the contents of containers.

    What a function of a class that is found refers to is reached as well: class attributes, what functions close over,
    their defaults, and the global variables that they name. Tensors keep what a block writes into them, and so do
    generators and files.

    Args:
        *roots: The objects.
    """
    walk = _Walk(roots)
    walk.run()
    try:
        yield
    finally:
        for restore in walk.restores:
            restore()


class _Walk:
    """Visits the objects that are reached, and notes how to restore them."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self.pending = deque(roots)
        self.restores: list[Callable[[], None]] = []
        self._seen: dict[int, Any] = {}  # with the values, whose ids would be used again else

    def run(self) -> None:
        """Visit each value once."""
        while self.pending and len(self._seen) < _MOST_VALUES:
            value = self.pending.popleft()
            if id(value) not in self._seen and not isinstance(value, Tensor | str | bytes | int | float | None):
                self._seen[id(value)] = value
                self._visit(value)

    def _visit(self, value: Any) -> None:
        kind = next((kind for kind in _CONTAINERS if isinstance(value, kind)), None)
        if kind is not None:
            self._note(value, kind)
        elif isinstance(value, tuple | frozenset):
            self._add(value)
        elif isinstance(value, types.FunctionType):
            self._visit_function(value)
        elif isinstance(value, types.MethodType):
            self._add((value.__self__, value.__func__))
        elif isinstance(value, partial):
            self._add((value.func, value.args, value.keywords))
        elif isinstance(value, staticmethod | classmethod):
            self._add((value.__func__,))
        elif isinstance(value, property):
            self._add((value.fget, value.fset))
        elif isinstance(value, type):
            self._visit_class(value)
        elif not isinstance(value, types.ModuleType) and hasattr(value, "__dict__"):
            if isinstance(vars(value), dict) and (isinstance(value, nn.Module) or not _is_of_library(type(value))):
                self._note(vars(value), dict)
            self._add(type(value).__mro__)

    def _note(self, container: Any, kind: Any) -> None:
        keys, values = _contents(container, kind)

        def restore() -> None:
            now_keys, now_values = _contents(container, kind)
            now = zip(now_keys + now_values, keys + values, strict=True)
            if len(now_keys) != len(keys) or any(new is not old for new, old in now):
                kind.clear(container)
                for key, value in zip(keys, values, strict=True):
                    if isinstance(container, dict):
                        kind.__setitem__(container, key, value)
                    else:
                        (kind.add if kind is set else kind.append)(container, value)

        self.restores.append(restore)
        self._add(values)

    def _add(self, elements: Any) -> None:
        if len(elements) <= _MOST_ELEMENTS:
            self.pending.extend(elements)

    def _visit_class(self, cls: type) -> None:
        if _is_of_library(cls):
            return
        for name, value in list(vars(cls).items()):
            if not (name.startswith("__") and name.endswith("__")) or isinstance(value, types.FunctionType):
                self.pending.append(value)
        before = {name: value for name, value in vars(cls).items() if not name.startswith("__")}

        def restore() -> None:
            now = {name: value for name, value in vars(cls).items() if not name.startswith("__")}
            for name in now.keys() - before.keys():
                delattr(cls, name)
            for name, value in before.items():
                if now.get(name) is not value:
                    setattr(cls, name, value)

        self.restores.append(restore)

    def _visit_function(self, function: types.FunctionType) -> None:
        if str(function.__module__).partition(".")[0] in _LIBRARIES:
            return
        self._add((function.__defaults__ or (), function.__kwdefaults__ or {}, vars(function)))
        for cell in function.__closure__ or ():
            try:
                self.restores.append(partial(setattr, cell, "cell_contents", cell.cell_contents))
            except ValueError:  # it is empty
                continue
            self.pending.append(cell.cell_contents)
        used = function.__globals__
        for name in _names_in(function.__code__):
            value = used.get(name)
            if name in used and not isinstance(value, types.ModuleType):
                self.restores.append(partial(used.__setitem__, name, value))
                self.pending.append(value)


def _names_in(code: types.CodeType) -> set[str]:
    """Return the names that a function, and those that it defines, may look up among global variables."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


def _contents(container: Any, kind: Any) -> tuple[list[Any], list[Any]]:
    """Return the keys and the values of a dict, whatever a subclass makes of a value that is asked for.

    Of another container they are its elements, both times.
    """
    keys = [*kind.__iter__(container)]
    return keys, [dict.__getitem__(container, key) for key in keys] if isinstance(container, dict) else keys


def _is_of_library(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in _LIBRARIES
