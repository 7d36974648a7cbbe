"""Read pickles as data: an interpreter of their instructions that constructs only plain values.

`pickle.load` imports and calls what a file names. This interpreter imports and calls nothing: a name stays a `Global`,
an object becomes a `Placeholder`, and only plain values and tensors are constructed. Each instruction is charged to a
`Budget`, so that a small file cannot take much memory or time.
"""

from __future__ import annotations

import pickletools
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import IO, Any

import torch

from lightning_tricks._shared.read_budget import Budget, OverBudgetError
from lightning_tricks._torch_compat.modules import set_state_dict_versions
from lightning_tricks.checkpoint_remapping.core.errors import (
    CheckpointError,
    NotACheckpointError,
    UnsafeCheckpointError,
)
from lightning_tricks.checkpoint_remapping.core.files.pickle_calls import (
    CODE_RUNNERS,
    Calls,
    Constructor,
    check_keys,
    is_never_needed,
    plain_constructors,
    update_in_chunks,
    update_method,
)
from lightning_tricks.checkpoint_remapping.core.files.pickle_plain_values import Window, run_plain_values
from lightning_tricks.checkpoint_remapping.core.files.pickle_values import (
    MAX_NAME_LENGTH,
    Global,
    Placeholder,
    check_nesting,
    describe_value,
)


def read_pickle(
    stream: IO[bytes],
    budget: Budget,
    constructors: dict[str, Constructor] | None = None,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Read one pickle of any protocol from a stream, without importing or calling anything that it names.

    Args:
        stream: The stream, which is read from its position to the end of the pickle.
        budget: Limits on memory and time.
        constructors: Our functions by the qualified names of the functions that they stand for.
        persistent: Converts a persistent id into a value; None refuses persistent ids.

    Returns:
        Plain values; everything else as `Global` and `Placeholder`. No container contains itself or is nested deeply.

    Raises:
        UnsafeCheckpointError: If it asks for a call that no checkpoint needs.
        NotACheckpointError: If it is not a pickle or is truncated.
        OverBudgetError: If it exceeds the budget.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about escape sequences in strings of protocol 0
            value = _Machine(constructors or {}, persistent, budget).run(Window(stream))
    except (CheckpointError, OverBudgetError):
        raise
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        raise NotACheckpointError(f"a pickle that is corrupt or truncated ({str(error)[:200]})") from error
    check_nesting(value, budget)
    return value


# Instructions that push the value of their argument
_LITERALS = frozenset(
    """
    INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING BINBYTES
    SHORT_BINBYTES BINBYTES8 UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8
    """.split()  # noqa: SIM905  # a list of words
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
# Bytes that instructions take, beside what is in their arguments; those that are not here take 64
_COSTS = {
    **dict.fromkeys((*_LITERALS, *_CONSTANTS, "DUP", "GET", "BINGET", "LONG_BINGET"), 16),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "DICT", "EMPTY_DICT", "EMPTY_LIST"), 96),
    **dict.fromkeys(("EMPTY_SET", "FROZENSET"), 256),
    **dict.fromkeys(("GLOBAL", "STACK_GLOBAL"), 512),
}
_OPCODES: dict[bytes, Any] = {opcode.code.encode("latin-1"): opcode for opcode in pickletools.opcodes}
_DTYPES = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class _Machine:
    """The stack, the memo, and one method for each family of instructions."""

    def __init__(
        self, constructors: dict[str, Constructor], persistent: Callable[[Any], Any] | None, budget: Budget
    ) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []  # where MARK was
        self.memo: dict[int, Any] = {}
        self.calls = Calls(plain_constructors(budget) | constructors, budget)
        self.persistent = persistent
        self.budget = budget

    def run(self, window: Window) -> Any:
        handlers: dict[bytes, tuple[int, Callable[..., None], Callable[[Any], Any] | None]] = {}
        while True:
            run_plain_values(window, self.stack, self.marks, self.memo, self.budget)
            code = window.read(1)
            if code == b".":  # STOP
                window.give_back()
                return self.stack.pop()
            if code not in handlers:
                opcode = _OPCODES.get(code)
                if opcode is None:
                    raise NotACheckpointError("a pickle that is corrupt or truncated")
                reader = opcode.arg.reader if opcode.arg is not None else None
                handlers[code] = _COSTS.get(opcode.name, 64), self._handler_of(opcode.name), reader
            cost, handle, read_argument = handlers[code]
            if read_argument is None:
                self.budget.spend(cost)
                handle()
            else:
                argument = read_argument(window)
                self.budget.spend(cost)
                handle(argument)

    def _handler_of(self, name: str) -> Callable[..., None]:
        """Return the function that executes an instruction."""
        if name in _CONSTANTS:
            return partial(self.stack.append, _CONSTANTS[name])
        if name in _LITERALS:
            return self.stack.append if name == "BININT1" else self._literal  # there is one of each small number
        if name in ("PROTO", "FRAME"):
            return lambda _: None
        handler: Callable[..., None] | None = getattr(self, f"_{name.lower()}", None)
        if handler is None:
            raise UnsafeCheckpointError(f"a pickle with the instruction {name}, which no checkpoint needs")
        return handler

    def _literal(self, value: Any) -> None:
        self.budget.spend(sys.getsizeof(value))
        self.stack.append(value)

    # the stack and the memo

    def _mark(self) -> None:
        self.marks.append(len(self.stack))

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

    def _put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    _binput = _long_binput = _put

    def _memoize(self) -> None:
        self._put(len(self.memo))

    def _get(self, index: int) -> None:
        self.stack.append(self.memo[index])

    _binget = _long_binget = _get

    # containers

    def _empty_dict(self) -> None:
        self.stack.append({})

    def _empty_list(self) -> None:
        self.stack.append([])

    def _empty_set(self) -> None:
        self.stack.append(set())

    def _bytearray8(self, value: bytes) -> None:
        self.budget.spend(len(value))
        self.stack.append(bytearray(value))

    def _dict(self) -> None:
        values = self._to_mark()
        self._empty_dict()
        self._set(values[::2], values[1::2])

    def _list(self) -> None:
        self.stack.append(self._to_mark())

    def _tuple(self) -> None:
        self.stack.append(tuple(self._to_mark()))

    def _frozenset(self) -> None:
        self.stack.append(self.calls.constructors["builtins.frozenset"](self._to_mark()))

    def _tuple_of(self, count: int) -> None:
        values = tuple(self.stack[-count:])
        del self.stack[-count:]
        self.stack.append(values)

    def _tuple1(self) -> None:
        self._tuple_of(1)

    def _tuple2(self) -> None:
        self._tuple_of(2)

    def _tuple3(self) -> None:
        self._tuple_of(3)

    def _set(self, keys: list[Any], values: list[Any]) -> None:
        target = self.stack[-1]
        items = target.items if isinstance(target, Placeholder) else target
        if not isinstance(items, dict):
            raise TypeError(f"it adds items to a {type(items).__name__}")
        check_keys(keys)
        update_in_chunks(update_method(items), zip(keys, values, strict=True), self.budget)

    def _setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key], [value])

    def _setitems(self) -> None:
        values = self._to_mark()
        self._set(values[::2], values[1::2])

    def _extend(self, values: list[Any]) -> None:
        target = self.stack[-1]
        elements = target.elements if isinstance(target, Placeholder) else target
        if not isinstance(elements, list):
            raise TypeError(f"it adds elements to a {type(elements).__name__}")
        elements.extend(values)

    def _append(self) -> None:
        self._extend([self.stack.pop()])

    def _appends(self) -> None:
        self._extend(self._to_mark())

    def _additems(self) -> None:
        values = self._to_mark()
        target = self.stack[-1]
        if not isinstance(target, set):
            raise TypeError(f"it adds elements to a {type(target).__name__}")
        check_keys(values)
        update_in_chunks(target.update, values, self.budget)

    # names and calls

    def _global(self, argument: str) -> None:
        self._name(*argument.split(" ", 1))

    def _stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self._name(module, name)

    def _name(self, module: str, name: str) -> None:
        if not (isinstance(module, str) and isinstance(name, str)) or len(module) + len(name) > MAX_NAME_LENGTH:
            raise NotACheckpointError("a pickle with a class whose name is not text")
        found = Global({"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module), name)
        if found.name in CODE_RUNNERS and is_never_needed(found):
            raise UnsafeCheckpointError(f"a pickle that names {found}")
        self.stack.append(_DTYPES.get(str(found), found))

    def _inst(self, argument: str) -> None:
        arguments = self._to_mark()
        self._global(argument)
        self.stack.append(self.calls.call(self.stack.pop(), tuple(arguments)))

    def _obj(self) -> None:
        function, *arguments = self._to_mark()
        self.stack.append(self.calls.call(function, tuple(arguments)))

    def _reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        self.stack.append(self.calls.call(function, arguments))

    _newobj = _reduce

    def _newobj_ex(self) -> None:
        keywords, arguments, function = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self.calls.charge(arguments)
        self.stack.append(self.calls.call(function, (*arguments, *([keywords] if keywords else ()))))

    def _build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Placeholder):
            target.state = state
        elif isinstance(target, OrderedDict):
            if isinstance(state, dict) and "_metadata" in state:
                set_state_dict_versions(target, state["_metadata"])
        elif not isinstance(target, torch.Tensor):
            raise UnsafeCheckpointError(f"a pickle that asks for changes to {describe_value(target)}")

    # values outside the pickle

    def _persid(self, identifier: str) -> None:
        self.stack.append(identifier)
        self._binpersid()

    def _binpersid(self) -> None:
        if self.persistent is None:
            raise NotACheckpointError("a pickle that refers to data outside of it")
        self.stack.append(self.persistent(self.stack.pop()))
