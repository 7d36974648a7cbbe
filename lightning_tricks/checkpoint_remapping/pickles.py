"""Pickles, read as data: an interpreter of their instructions that constructs plain values alone.

`pickle.load` imports what a file names and calls it. The interpreter here has no import and no call in it: what a file
names stays a `Global`, what it would construct becomes a `Placeholder`, and only plain values and tensors are made.
"""

from __future__ import annotations

import pickletools
import sys
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any

import torch

from lightning_tricks.checkpoint_remapping.errors import CheckpointError, NotACheckpointError, UnsafeCheckpointError


@dataclass(frozen=True)
class Global:
    """What a pickle names, such as a class or a function; it was neither looked up nor imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False, repr=False)
class Placeholder:
    """An object that a pickle describes and that was not constructed.

    Attributes:
        name: The qualified name of its class, or of the function that would have made it.
        args: The arguments of the call.
        state: What would have been given to its `__setstate__` or `__dict__`, None where there is nothing.
        items: Its items, where it is like a dict.
        elements: Its elements, where it is like a list.
        location: Where in the checkpoint it is, such as `hyper_parameters.root`.
    """

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)
    elements: list[Any] = field(default_factory=list)
    location: str = ""

    def __repr__(self) -> str:
        return f"<placeholder of {self.name}{' at ' * bool(self.location)}{self.location}>"


Rebuild = Callable[..., Any]


def read_pickle(
    stream: IO[bytes], rebuild: dict[str, Rebuild] | None = None, persistent: Callable[[Any], Any] | None = None
) -> Any:
    """Read one pickle of any protocol from a stream, without importing or calling anything that it names.

    Args:
        stream: Read from where it stands to the end of the pickle.
        rebuild: Functions of ours for the qualified names of functions that make tensors.
        persistent: Turns a persistent id into a value; None refuses them.

    Returns:
        Plain values as they are; everything else as `Global` and `Placeholder`.

    Raises:
        UnsafeCheckpointError: If it asks for a call that no checkpoint needs.
        NotACheckpointError: If it is no pickle or breaks off.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about escape sequences in strings of protocol 0
            return _Machine(rebuild or {}, persistent).run(pickletools.genops(stream))
    except CheckpointError:
        raise
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        raise NotACheckpointError(f"a pickle that is broken or cut off ({error})") from error


def children(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the (key, value) pairs directly inside a value that was read; a placeholder's arguments come by number."""
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
    elif isinstance(value, Placeholder):
        yield from enumerate((*value.args, *value.elements))
        yield from value.items.items()
        for part in value.state if isinstance(value.state, tuple) else (value.state,):
            yield from children(part)


_MARK = object()
# Instructions that push the value of their argument
_LITERALS = frozenset(
    """
    INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING BINBYTES
    SHORT_BINBYTES BINBYTES8 UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8
    """.split()  # noqa: SIM905  # a list of words
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_DTYPES = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class _Machine:
    """The stack, the memo, and one method for each family of instructions."""

    def __init__(self, rebuild: dict[str, Rebuild], persistent: Callable[[Any], Any] | None) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.rebuild = rebuild
        self.persistent = persistent

    def run(self, instructions: Iterator[tuple[Any, Any, int | None]]) -> Any:
        for opcode, argument, _ in instructions:
            name = opcode.name
            if name in _LITERALS:
                self.stack.append(argument)
            elif name in _CONSTANTS:
                self.stack.append(_CONSTANTS[name])
            elif name == "STOP":
                return self.stack.pop()
            elif name not in ("PROTO", "FRAME"):
                handle = getattr(self, f"_{name.lower()}", None)
                if handle is None:
                    raise UnsafeCheckpointError(f"a pickle with the instruction {name}, which no checkpoint needs")
                handle() if argument is None else handle(argument)
        raise NotACheckpointError("a pickle that is cut off")

    # the stack and the memo

    def _mark(self) -> None:
        self.stack.append(_MARK)

    def _to_mark(self) -> list[Any]:
        position = max(index for index, value in enumerate(self.stack) if value is _MARK)
        values = self.stack[position + 1 :]
        del self.stack[position:]
        return values

    def _pop(self) -> None:
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
        self.stack.append(bytearray(value))

    def _dict(self) -> None:
        values = self._to_mark()
        self.stack.append(dict(zip(values[::2], values[1::2], strict=True)))

    def _list(self) -> None:
        self.stack.append(self._to_mark())

    def _tuple(self) -> None:
        self.stack.append(tuple(self._to_mark()))

    def _frozenset(self) -> None:
        self.stack.append(frozenset(self._to_mark()))

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

    def _set(self, pairs: Iterator[tuple[Any, Any]]) -> None:
        target = self.stack[-1]
        items = target.items if isinstance(target, Placeholder) else target
        if not isinstance(items, dict):
            raise TypeError(f"items for {type(items).__name__}")
        items.update(pairs)

    def _setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set(iter([(key, value)]))

    def _setitems(self) -> None:
        values = self._to_mark()
        self._set(zip(values[::2], values[1::2], strict=True))

    def _extend(self, values: list[Any]) -> None:
        target = self.stack[-1]
        elements = target.elements if isinstance(target, Placeholder) else target
        if not isinstance(elements, list):
            raise TypeError(f"elements for {type(elements).__name__}")
        elements.extend(values)

    def _append(self) -> None:
        self._extend([self.stack.pop()])

    def _appends(self) -> None:
        self._extend(self._to_mark())

    def _additems(self) -> None:
        values = self._to_mark()
        target = self.stack[-1]
        if not isinstance(target, set):
            raise TypeError(f"elements for {type(target).__name__}")
        target.update(values)

    # names and calls

    def _global(self, argument: str) -> None:
        self._name(*argument.split(" ", 1))

    def _stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self._name(module, name)

    def _name(self, module: str, name: str) -> None:
        module = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, str(module))
        found = Global(module, str(name))
        if found.name in _RUNNERS and _is_dangerous(found):
            raise UnsafeCheckpointError(f"a pickle that names {found}")
        self.stack.append(_DTYPES.get(str(found), found))

    def _inst(self, argument: str) -> None:
        arguments = self._to_mark()
        self._global(argument)
        self.stack.append(self._call(self.stack.pop(), tuple(arguments)))

    def _obj(self) -> None:
        function, *arguments = self._to_mark()
        self.stack.append(self._call(function, tuple(arguments)))

    def _reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        self.stack.append(self._call(function, arguments))

    _newobj = _reduce

    def _newobj_ex(self) -> None:
        keywords, arguments, function = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self.stack.append(self._call(function, (*arguments, *([keywords] if keywords else ()))))

    def _call(self, function: Any, arguments: Any) -> Any:
        if not isinstance(function, Global):
            raise UnsafeCheckpointError(f"a pickle that asks for a call of {_described(function)}")
        if not isinstance(arguments, tuple):
            raise TypeError(f"a call of {function} without a tuple of arguments")
        name = str(function)
        if name in ("copyreg.__newobj__", "copyreg._reconstructor", "copyreg.__newobj_ex__"):
            return self._call(arguments[0], _constructor_arguments(function.name, arguments[1:]))
        make = self.rebuild.get(name) or _PLAIN.get(name)
        if make is not None:
            return make(*arguments)
        if _is_dangerous(function):
            raise UnsafeCheckpointError(f"a pickle that asks for a call of {name}")
        return Placeholder(name, arguments)

    def _build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Placeholder):
            target.state = state
        elif isinstance(target, OrderedDict):
            target.__dict__.update({k: v for k, v in dict(state or {}).items() if k == "_metadata"})
        elif not isinstance(target, torch.Tensor):
            raise UnsafeCheckpointError(f"a pickle that asks for changes to {_described(target)}")

    # values outside the pickle

    def _persid(self, identifier: str) -> None:
        self.stack.append(identifier)
        self._binpersid()

    def _binpersid(self) -> None:
        if self.persistent is None:
            raise NotACheckpointError("a pickle that refers to data outside of it")
        self.stack.append(self.persistent(self.stack.pop()))


def _described(value: Any) -> str:
    return value.name if isinstance(value, Placeholder) else str(value)[:80]


def _constructor_arguments(function: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    if function == "__newobj__":
        return arguments
    if function == "__newobj_ex__":
        return (*arguments[0], arguments[1])
    return tuple(part for part in arguments[1:] if part is not None)  # _reconstructor(class, base, state of base)


def _encode(text: str, encoding: str = "utf-8") -> bytes:
    if encoding not in ("latin1", "latin-1", "utf-8"):
        raise ValueError(f"text in {encoding!r}")
    return text.encode(encoding)


def _bytearray(value: bytes | str = b"", encoding: str = "latin-1") -> bytearray:
    return bytearray(value if isinstance(value, bytes) else _encode(value, encoding))


def _layout(name: str) -> Any:
    return {str(layout): layout for layout in vars(torch).values() if isinstance(layout, torch.layout)}[name]


# Constructors of plain values, as they are: none of them runs code of its arguments.
_PLAIN: dict[str, Rebuild] = {
    "_codecs.encode": _encode,
    "builtins.bytearray": _bytearray,
    "builtins.bytes": lambda *parts: bytes(_bytearray(*parts)),
    "builtins.complex": complex,
    "builtins.dict": dict,
    "builtins.frozenset": frozenset,
    "builtins.list": list,
    "builtins.set": set,
    "builtins.tuple": tuple,
    "collections.Counter": Counter,
    "collections.OrderedDict": OrderedDict,
    "torch.Size": torch.Size,
    "torch.device": torch.device,
    "torch.serialization._get_layout": _layout,
    # TorchScript's lists, and the types that it notes beside dicts and lists
    "torch.jit._pickle.build_boollist": list,
    "torch.jit._pickle.build_doublelist": list,
    "torch.jit._pickle.build_intlist": list,
    "torch.jit._pickle.build_tensorlist": list,
    "torch.jit._pickle.restore_type_tag": lambda value, _: value,
}

# Objects that people keep among hyper-parameters although a lower-case name makes them
_HONEST_CALLS = {
    "argparse.Namespace",
    "array._array_reconstructor",
    "array.array",
    "builtins.getattr",  # how Python 3.11 stores the members of an enumeration
    "builtins.object",
    "builtins.range",
    "builtins.slice",
    "collections.defaultdict",
    "collections.deque",
    "datetime.date",
    "datetime.datetime",
    "datetime.time",
    "datetime.timedelta",
    "datetime.timezone",
    "functools.partial",
    "logging.getLogger",
    "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
    "numpy._core.numeric._frombuffer",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy.core.numeric._frombuffer",
    "numpy.dtype",
    "operator.attrgetter",
    "operator.itemgetter",
    "re._compile",
    "zoneinfo.ZoneInfo._unpickle",
}
# Standard modules whose very classes reach the system
_SYSTEM = frozenset(
    """
    _ctypes _io _pickle _posixsubprocess _thread asyncio bdb builtins cProfile code codeop concurrent ctypes
    distutils doctest ensurepip fileinput ftplib gc http imaplib imp importlib inspect io linecache lib2to3
    marshal mmap multiprocessing nt ntpath os pdb pickle pip pkgutil platform poplib posix posixpath profile pty
    pydoc runpy sched shelve shutil signal site smtplib socket socketserver sqlite3 ssl subprocess sys tarfile
    telnetlib tempfile threading timeit trace types unittest urllib venv webbrowser xmlrpc zipfile zipimport
    """.split()  # noqa: SIM905  # a list of words
)
_LIBRARIES = {"jsonargparse", "lightning", "lightning_fabric", "numpy", "pytorch_lightning", "torch", "torchvision"}
_RUNNERS = frozenset(
    """
    call check_call check_output delattr eval exec execfile getattr import_module load loads open popen Popen
    run run_module run_path runstring setattr spawn system urlopen urlretrieve __import__
    """.split()  # noqa: SIM905  # a list of words
)


def _is_dangerous(function: Global) -> bool:
    """Whether no honest checkpoint asks for this call. Nothing depends on it: no call is made, whatever the answer."""
    package = function.module.partition(".")[0]
    if str(function) in _HONEST_CALLS or str(function).startswith(("numpy.random.", "torch._utils._rebuild_")):
        return False
    looks_like_a_function = function.name.lstrip("_")[:1].islower()
    if package in sys.stdlib_module_names:
        known = {"SimpleNamespace", "MappingProxyType"} if package == "types" else set()
        in_system = package in _SYSTEM and function.name not in known
        return in_system or looks_like_a_function or "." in function.name
    if package in _LIBRARIES and looks_like_a_function:
        return True
    return function.name.rpartition(".")[2] in _RUNNERS
