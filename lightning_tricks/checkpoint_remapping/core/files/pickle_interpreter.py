"""Read pickles as data: an interpreter of their instructions that constructs only plain values.

`pickle.load` imports and calls what a file names. This interpreter imports and calls nothing: a name stays a `Global`,
an object becomes a `Placeholder`, and only plain values and tensors are constructed. Each instruction is charged to a
`Budget`, so that a small file cannot take much memory or time.

Why it is not a subclass of `pickle._Unpickler`, the interpreter in Python of the standard library: a subclass refuses
the same hostile files in the same time and memory, but calls several functions for each value. A list of a million
numbers then takes 3.5 times as long, and 20,000 tensors take 1.13 times as long. All instructions that call, look up a
name or fill a container would be replaced in any case, as would the frames and the readers of lengths.
"""

from __future__ import annotations

import pickletools
import struct
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable
from functools import partialmethod
from mmap import mmap
from typing import Any

import torch

from lightning_tricks._shared.read_budget import Budget, OverBudgetError
from lightning_tricks._torch_compat.modules import set_state_dict_versions
from lightning_tricks.checkpoint_remapping.core.errors import (
    CheckpointError,
    NotACheckpointError,
    UnsafeCheckpointError,
)
from lightning_tricks.checkpoint_remapping.core.files.pickle_values import (
    CODE_RUNNERS,
    MAX_NAME_LENGTH,
    Calls,
    Constructor,
    Global,
    Placeholder,
    check_nesting,
    describe_value,
    fill,
    is_never_needed,
)

UNCHARGED_BYTES = 1 << 14  # bytes whose plain values are charged together: they make a few hundred KiB at most


class Cursor:
    """The bytes of a file, and the position of the next one that is read."""

    def __init__(self, data: bytes | mmap) -> None:
        self.data = data
        self.position = 0

    def read(self, size: int) -> bytes:
        """Return the next bytes, fewer where the file ends."""
        start = self.position
        self.position = min(start + size, len(self.data))
        return self.data[start : self.position]

    def readline(self) -> bytes:
        """Return the bytes up to the end of the line."""
        end = self.data.find(b"\n", self.position)
        return self.read((end + 1 or len(self.data)) - self.position)


def read_pickle(
    cursor: Cursor,
    budget: Budget,
    constructors: dict[str, Constructor] | None = None,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Read one pickle of any protocol, without importing or calling anything that it names.

    Args:
        cursor: The bytes, which are read from its position to the end of the pickle.
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
            value = _Machine(cursor, Calls(constructors or {}, budget), persistent, budget).run()
    except (CheckpointError, OverBudgetError):
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        RuntimeError,
        TypeError,
        ValueError,
        struct.error,
    ) as error:
        raise NotACheckpointError(f"a pickle that is corrupt or truncated ({str(error)[:200]})") from error
    check_nesting(value, budget)
    return value


# Instructions that push the value of their argument, beside those that `_run_plain_values` executes
_LITERALS = frozenset(
    """
    INT LONG LONG1 LONG4 FLOAT STRING BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 UNICODE BINUNICODE8
    """.split()  # noqa: SIM905  # a list of words
)
_EMPTY = {"EMPTY_LIST": list, "EMPTY_SET": set}
# Bytes that instructions take, beside what is in their arguments; those that are not here take 64
_COSTS = {
    **dict.fromkeys((*_LITERALS, "DUP", "GET"), 16),
    **dict.fromkeys(("PUT", "DICT", "EMPTY_LIST"), 96),
    **dict.fromkeys(("EMPTY_SET", "FROZENSET"), 256),
    **dict.fromkeys(("GLOBAL", "STACK_GLOBAL"), 512),
}
_OPCODES: dict[bytes, Any] = {opcode.code.encode("latin-1"): opcode for opcode in pickletools.opcodes}
_CONSTANTS = {0x4E: None, 0x88: True, 0x89: False, 0x29: ()}  # NONE, NEWTRUE, NEWFALSE, EMPTY_TUPLE
_INT32, _UINT32, _FLOAT64 = struct.Struct("<i"), struct.Struct("<I"), struct.Struct(">d")
_DTYPES = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class _Machine:
    """The stack, the memo, and one method for each instruction or family of them."""

    def __init__(self, cursor: Cursor, calls: Calls, persistent: Callable[[Any], Any] | None, budget: Budget) -> None:
        self.cursor = cursor
        self.stack: list[Any] = []
        self.marks: list[int] = []  # where MARK was
        self.memo: dict[int, Any] = {}
        self.calls = calls
        self.persistent = persistent
        self.budget = budget

    def run(self) -> Any:
        handlers: dict[bytes, tuple[int, Callable[..., None], Callable[[Any], Any] | None]] = {}
        while True:
            self._run_plain_values()
            code = self.cursor.read(1)
            if code == b".":  # STOP
                return self.stack.pop()
            if code not in handlers:
                opcode = _OPCODES.get(code)
                if opcode is None:
                    raise NotACheckpointError("a pickle that is corrupt or truncated")
                reader = opcode.arg.reader if opcode.arg is not None else None
                handlers[code] = _COSTS.get(opcode.name, 64), self._handler_of(opcode.name), reader
            cost, handle, read_argument = handlers[code]
            arguments = () if read_argument is None else (read_argument(self.cursor),)
            self.budget.spend(cost)
            handle(*arguments)

    def _handler_of(self, name: str) -> Callable[..., None]:
        """Return the function that executes an instruction."""
        if name in _LITERALS:
            return self._literal
        if name in _EMPTY:
            return lambda: self.stack.append(_EMPTY[name]())
        if name in ("PROTO", "FRAME"):
            return lambda _: None
        handler: Callable[..., None] | None = getattr(self, f"_{name.lower()}", None)
        if handler is None:
            raise UnsafeCheckpointError(f"a pickle with the instruction {name}, which no checkpoint needs")
        return handler

    def _run_plain_values(self) -> None:
        """Execute instructions up to the first that does more than make a plain value or use the memo.

        They make most of a file, and are charged together. This is one loop without calls, as each of a million values
        passes through it; the order of the branches is that of their frequency. Where the file ends too early, reading
        beyond its end raises an IndexError or a struct.error.
        """
        data, position = self.cursor.data, self.cursor.position
        stack, marks, memo = self.stack, self.marks, self.memo
        push, int32, uint32, float64 = stack.append, _INT32.unpack_from, _UINT32.unpack_from, _FLOAT64.unpack_from
        cost, next_charge = 0, position + UNCHARGED_BYTES
        while True:
            if position >= next_charge:
                self.budget.spend(cost)
                cost, next_charge = 0, position + UNCHARGED_BYTES
            code = data[position]
            if code == 0x4A:  # BININT
                push(int32(data, position + 1)[0])
                position += 5
                cost += 48
            elif code == 0x4B:  # BININT1: there is one of each small number
                push(data[position + 1])
                position += 2
                cost += 16
            elif code == 0x4D:  # BININT2
                push(data[position + 1] | data[position + 2] << 8)
                position += 3
                cost += 44
            elif code == 0x47:  # BINFLOAT
                push(float64(data, position + 1)[0])
                position += 9
                cost += 40
            elif code == 0x71:  # BINPUT
                memo[data[position + 1]] = stack[-1]
                position += 2
                cost += 96
            elif code == 0x72:  # LONG_BINPUT
                memo[uint32(data, position + 1)[0]] = stack[-1]
                position += 5
                cost += 96
            elif code == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
                position += 1
                cost += 96
            elif code == 0x58 or code == 0x8C:  # BINUNICODE, SHORT_BINUNICODE
                start = position + (5 if code == 0x58 else 2)
                position = start + (uint32(data, position + 1)[0] if code == 0x58 else data[position + 1])
                if position > len(data):
                    raise ValueError("a string goes on beyond the end")
                text = str(data[start:position], "utf-8", "surrogatepass")
                push(text)
                cost += 16 + sys.getsizeof(text)
            elif code == 0x68:  # BINGET
                push(memo[data[position + 1]])
                position += 2
                cost += 16
            elif code == 0x6A:  # LONG_BINGET
                push(memo[uint32(data, position + 1)[0]])
                position += 5
                cost += 16
            elif code == 0x28:  # MARK
                marks.append(len(stack))
                position += 1
                cost += 64
            elif code == 0x7D:  # EMPTY_DICT
                push({})
                position += 1
                cost += 96
            elif code == 0x86:  # TUPLE2
                stack[-2:] = ((stack[-2], stack[-1]),)
                position += 1
                cost += 64
            elif code in _CONSTANTS:
                push(_CONSTANTS[code])
                position += 1
                cost += 16
            else:
                break
        self.cursor.position = position
        self.budget.spend(cost)

    def _literal(self, value: Any) -> None:
        self.budget.spend(sys.getsizeof(value))
        self.stack.append(value)

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

    def _put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def _get(self, index: int) -> None:
        self.stack.append(self.memo[index])

    # containers

    def _bytearray8(self, value: bytes) -> None:
        self.budget.spend(len(value))
        self.stack.append(bytearray(value))

    def _list(self) -> None:
        self.stack.append(self._to_mark())

    def _tuple(self) -> None:
        self.stack.append(tuple(self._to_mark()))

    def _tuple_of(self, count: int) -> None:
        values = tuple(self.stack[-count:])
        del self.stack[-count:]
        self.stack.append(values)

    _tuple1 = partialmethod(_tuple_of, 1)
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
        fill(self._top("items", dict), zip(items[::2], items[1::2], strict=True), self.budget)

    def _append(self) -> None:
        value = self.stack.pop()
        self._top("elements", list).append(value)

    def _appends(self) -> None:
        values = self._to_mark()
        self._top("elements", list).extend(values)

    def _additems(self) -> None:
        values = self._to_mark()
        fill(self._top("elements", set), values, self.budget)

    def _top(self, part: str, kind: type) -> Any:
        """Return the container on top of the stack, or that of the placeholder there."""
        target = self.stack[-1]
        container = getattr(target, part) if isinstance(target, Placeholder) else target
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
