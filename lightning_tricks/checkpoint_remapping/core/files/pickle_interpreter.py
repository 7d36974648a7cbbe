"""Read pickles as data: an interpreter of their instructions that constructs only plain values.

`pickle.load` imports and calls what a file names. This interpreter imports and calls nothing: a name stays a `Global`,
an object becomes a `Placeholder`, and only plain values and tensors are constructed. Each instruction is charged to a
`Budget`, so that a small file cannot take much memory or time.

Why it is not a subclass of `pickle._Unpickler`, the interpreter in Python of the standard library: its instructions
that call, look up a name, fill a container or change an object (by BUILD a file can rewrite what we have made), its
frames and its readers of lengths would all be replaced, and what is left of it are a few lines.
"""

from __future__ import annotations

import pickletools
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable
from functools import partial, partialmethod
from itertools import islice
from typing import Any

import torch

from lightning_tricks._shared.read_budget import Budget, OverBudgetError
from lightning_tricks._torch_compat.modules import set_state_dict_versions
from lightning_tricks.checkpoint_remapping.core.errors import (
    CheckpointError,
    NotACheckpointError,
    UnsafeCheckpointError,
)
from lightning_tricks.checkpoint_remapping.core.files import pickle_values


def read_pickle(
    stream: Any,
    budget: Budget,
    constructors: dict[str, pickle_values.Constructor] | None = None,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Read one pickle of any protocol, without importing or calling anything that it names.

    Args:
        stream: A `BytesIO` or a `mmap`, which is read from its position to the end of the pickle.
        budget: Limits on memory and time.
        constructors: Our functions by the qualified names of the functions that they stand for.
        persistent: Converts a persistent id into a value; None refuses persistent ids.

    Returns:
        Plain values; everything else as `Global` and `Placeholder`. Containers may contain themselves.

    Raises:
        UnsafeCheckpointError: If it requests a call that no checkpoint needs.
        NotACheckpointError: If it is not a pickle or is truncated.
        OverBudgetError: If it exceeds the budget.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about escape sequences in strings of protocol 0
            return _Machine(pickle_values.Calls(constructors or {}, budget), persistent, budget).run(stream)
    except (CheckpointError, OSError, OverBudgetError):
        raise
    except Exception as error:  # of an instruction that does not fit what is on the stack, or of wrong arguments
        raise NotACheckpointError(f"a pickle that is corrupt or truncated ({str(error)[:200]})") from error


# Instructions that push the value of their argument
_LITERALS = frozenset(
    """
    INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES
    BINBYTES8 BYTEARRAY8 UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8
    """.split()  # noqa: SIM905  # a list of words
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_EMPTY = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set}
_SAME = {  # instructions that differ in their arguments alone
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), "PUT"),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), "GET"),
    "NEWOBJ": "REDUCE",
}
# Bytes that instructions take, beside what is in their arguments; those that are not here take 64
_COSTS = {
    **dict.fromkeys((*_LITERALS, *_CONSTANTS, "GET"), 16),
    **dict.fromkeys(("PUT", "MEMOIZE", "DICT", "EMPTY_LIST", "EMPTY_DICT"), 96),
    **dict.fromkeys(("EMPTY_SET", "FROZENSET"), 256),
    **dict.fromkeys(("GLOBAL", "STACK_GLOBAL"), 512),
}
_DTYPES = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_MOST_KEPT_IN_A_STATE = 32  # values of the memo that the state of an array adds


class _Machine:
    """The stack, the memo, and one method for each instruction or family of them."""

    def __init__(self, calls: pickle_values.Calls, persistent: Callable[[Any], Any] | None, budget: Budget) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []  # where MARK was
        self.memo: dict[int, Any] = {}
        self.calls = calls
        self.persistent = persistent
        self.budget = budget

    def run(self, stream: Any) -> Any:
        handlers: dict[str, tuple[int, Callable[..., None]]] = {}
        for opcode, argument, _ in pickletools.genops(stream):
            name = opcode.name
            if name == "STOP":
                break
            if name not in handlers:
                handlers[name] = self._handler_of(_SAME.get(name, name))
            cost, handle = handlers[name]
            self.budget.spend(cost)
            if argument is None:
                handle()
            else:
                handle(argument)
        return self.stack.pop()

    def _handler_of(self, name: str) -> tuple[int, Callable[..., None]]:
        """Return the cost of an instruction, and the function that executes it."""
        handler: Callable[..., None] | None = getattr(self, f"_{name.lower()}", None)
        if name in _LITERALS:
            handler = self._literal
        elif name in _CONSTANTS:
            handler = partial(self.stack.append, _CONSTANTS[name])
        elif name in _EMPTY:
            handler = partial(self._empty, _EMPTY[name])
        if handler is None:
            raise UnsafeCheckpointError(f"a pickle with the instruction {name}, which no checkpoint needs")
        return _COSTS.get(name, 64), handler

    def _literal(self, value: Any) -> None:
        self.budget.spend(sys.getsizeof(value))
        self.stack.append(value)

    def _proto(self, _: int) -> None:
        """Pass over the version, and over the lengths of frames."""

    _frame = _proto

    # the stack and the memo

    def _to_mark(self) -> list[Any]:
        position = self.marks.pop()
        values = self.stack[position:]
        del self.stack[position:]
        return values

    def _pop(self) -> None:
        if self.marks and self.marks[-1] >= len(self.stack):
            self.marks.pop()
        else:
            self.stack.pop()

    def _pop_mark(self) -> None:
        self._to_mark()

    def _dup(self) -> None:
        self.stack.append(self.stack[-1])

    def _mark(self) -> None:
        self.marks.append(len(self.stack))

    def _put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def _get(self, index: int) -> None:
        self.stack.append(self.memo[index])

    def _memoize(self) -> None:
        self._put(len(self.memo))

    # containers

    def _empty(self, kind: type) -> None:
        self.stack.append(kind())

    def _list(self) -> None:
        self.stack.append(self._to_mark())

    def _tuple(self) -> None:
        self.stack.append(tuple(self._to_mark()))

    def _tuple_of(self, count: int) -> None:
        values = tuple(self.stack[-count:])
        del self.stack[-count:]
        self.stack.append(values)

    _tuple1 = partialmethod(_tuple_of, 1)
    _tuple2 = partialmethod(_tuple_of, 2)
    _tuple3 = partialmethod(_tuple_of, 3)

    def _frozenset(self) -> None:
        self.stack.append(self.calls.constructors["builtins.frozenset"](self._to_mark()))

    def _dict(self) -> None:
        items = self._to_mark()
        self.stack.append({})
        self._set(items)

    def _setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def _setitems(self) -> None:
        self._set(self._to_mark())

    def _set(self, items: list[Any]) -> None:
        """Add keys and values, which take turns, to the dict on top of the stack."""
        pickle_values.fill(self._top("items", dict), zip(items[::2], items[1::2], strict=True), self.budget)

    def _append(self) -> None:
        value = self.stack.pop()
        self._top("elements", list).append(value)

    def _appends(self) -> None:
        values = self._to_mark()
        self._top("elements", list).extend(values)

    def _additems(self) -> None:
        values = self._to_mark()
        pickle_values.fill(self._top("elements", set), values, self.budget)

    def _top(self, part: str, kind: type) -> Any:
        """Return the container on top of the stack, or that of the placeholder there."""
        target = self.stack[-1]
        container = getattr(target, part) if isinstance(target, pickle_values.Placeholder) else target
        if not isinstance(container, kind):
            raise TypeError(f"it adds {part} to a {type(container).__name__}")
        return container

    # names and calls

    def _global(self, argument: str) -> None:
        self._name(*argument.split(" ", 1))

    def _stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self._name(module, name)

    def _name(self, module: str, name: str) -> None:
        if (
            not (isinstance(module, str) and isinstance(name, str))
            or len(module) + len(name) > pickle_values.MAX_NAME_LENGTH
        ):
            raise NotACheckpointError("a pickle with a class whose name is not text")
        found = pickle_values.Global({"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module), name)
        self.stack.append(_DTYPES.get(str(found), found))

    def _reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        self.stack.append(self.calls.call(function, arguments))

    def _newobj_ex(self) -> None:
        keywords, arguments, function = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self.calls.charge(arguments)
        self.stack.append(self.calls.call(function, (*arguments, *([keywords] if keywords else ()))))

    def _build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, pickle_values.Placeholder):
            target.state = state
            if target.name == pickle_values.ARRAY:
                self._build_array(target)
        elif isinstance(target, OrderedDict):
            if isinstance(state, dict) and "_metadata" in state:
                set_state_dict_versions(target, state["_metadata"])
        elif not isinstance(target, torch.Tensor):
            raise UnsafeCheckpointError(f"a pickle that asks to change {pickle_values.describe_value(target)}")

    def _build_array(self, described: pickle_values.Placeholder) -> None:
        """Put an array in the place of its description, on the stack and in the memo, if it is one of numbers."""
        array = pickle_values.array_of_state(described.state, self.budget)
        if array is None:
            return
        self.stack[-1] = array
        for index, value in islice(reversed(self.memo.items()), _MOST_KEPT_IN_A_STATE):
            if value is described:
                self.memo[index] = array

    # values outside the pickle

    def _persid(self, identifier: str) -> None:
        self.stack.append(identifier)
        self._binpersid()

    def _binpersid(self) -> None:
        if self.persistent is None:
            raise NotACheckpointError("a pickle that refers to data outside of it")
        self.stack.append(self.persistent(self.stack.pop()))
