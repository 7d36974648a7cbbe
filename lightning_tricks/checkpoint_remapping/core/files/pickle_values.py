"""Placeholders for the values and calls of a pickle that is read as data, limits on both, and the arrays in it.

NumPy arrays of numbers are made, with all arguments checked; others stay placeholders. A pickle makes an array by a
call and gives it a state, or gives a function its bytes (protocol 5). Its dtype is a `Placeholder`, of which two things
count: the name of the type, which must be in a list, and the order of the bytes.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from lightning_tricks._shared.read_budget import Budget
from lightning_tricks._shared.tensors import is_dense
from lightning_tricks._shared.text import format_shape
from lightning_tricks.checkpoint_remapping.core.errors import NotACheckpointError, UnsafeCheckpointError

MAX_NAME_LENGTH = 1000  # characters of a qualified name, of a tensor or of a class
Constructor = Callable[..., Any]
MAX_NESTING = 200  # containers in each other; pickle.dump itself gives up at some hundred
_MAX_DIMENSIONS = 64
_MAX_KEY_PARTS = 64  # parts of a tuple that is a key


@dataclass(frozen=True)
class Global:
    """A name in a pickle, such as that of a class or a function, which was not imported."""

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
        state: The argument of its `__setstate__` or the contents of its `__dict__`; None if there is none.
        items: Its items, if it is like a dict.
        elements: Its elements, if it is like a list.
        location: Its place in the checkpoint, such as `hyper_parameters.root`.
    """

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)
    elements: list[Any] = field(default_factory=list)
    location: str = ""

    def __deepcopy__(self, _: dict[int, Any]) -> Placeholder:
        return self  # chains of objects may be long

    def __repr__(self) -> str:
        place = f" at {self.location}" if self.location else ""
        return f"<placeholder of {self.name}{place}>"


def describe_value(value: Any, longest: int = 80) -> str:
    """Describe any value in a few words; `repr` of lists that share their parts can fill all memory."""
    if isinstance(value, Placeholder | Global):
        return str(value) if isinstance(value, Global) else value.name
    if isinstance(value, str | bytes | bytearray):
        return repr(value[:longest]) + ("..." if len(value) > longest else "")
    if isinstance(value, torch.Tensor):
        return f"<tensor of {format_shape(value.shape) or 'one number'}, {value.dtype}>"
    plain = value is None or isinstance(value, bool | float | complex | torch.dtype | torch.device)
    if plain or (isinstance(value, int) and value.bit_length() < 256):
        return repr(value)
    return f"a {type(value).__name__}"


def children(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the (key, value) pairs directly inside a container; nothing for other values."""
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from enumerate(value)


def is_container(value: Any) -> bool:
    """Whether a value can contain other values."""
    return isinstance(value, dict | list | tuple | set | frozenset)


def find_placeholders(value: Any, budget: Budget) -> list[Placeholder]:
    """Return the objects that were not constructed, with their locations; not those inside another one.

    Each container is charged wherever it is: twenty lists that each hold the one before twice are a million lists for
    code that copies or prints them. Objects may refer to each other in circles; nesting is counted from each of them.

    Raises:
        NotACheckpointError: If containers are nested too deeply, as those that contain themselves are.
    """
    found: list[Placeholder] = []
    known: dict[int, Placeholder] = {}
    queue: list[tuple[Any, str | None]] = [(value, "")]  # grows by what is in objects, which has no location

    def walk(part: Any, location: str | None, depth: int) -> None:
        if isinstance(part, Global):
            part = Placeholder(str(part))
        if isinstance(part, Placeholder):
            if id(part) in known:
                return
            known[id(part)] = part
            queue.append(((part.args, part.state, part.items, part.elements), None))
            if location is not None:
                part.location = location
                found.append(part)
        elif is_container(part):
            budget.spend(112 + 8 * len(part))
            if depth > MAX_NESTING:
                raise NotACheckpointError(
                    f"a checkpoint with lists or dicts that are nested more than {MAX_NESTING} deep, or in themselves."
                )
            for name, inside in children(part):
                if isinstance(inside, Global | Placeholder) or is_container(inside):
                    text = name[:MAX_NAME_LENGTH] if isinstance(name, str) else describe_value(name)
                    budget.spend(256 + len(location or "") + len(text))
                    walk(inside, None if location is None else f"{location}.{text}".lstrip("."), depth + 1)

    for part, location in queue:
        walk(part, location, 0)
    return found


def check_key(key: Any) -> None:
    """Refuse a key whose hash could take long: a large number, or tuples that share their parts.

    Raises:
        NotACheckpointError: If it is such a key.
    """
    parts = [key]
    for count, part in enumerate(parts):  # which grows
        if isinstance(part, tuple | frozenset):
            if len(part) > _MAX_KEY_PARTS or count > _MAX_KEY_PARTS:
                raise NotACheckpointError(f"a checkpoint with a dict key of more than {_MAX_KEY_PARTS} parts.")
            parts.extend(part)
        elif isinstance(part, int) and part.bit_length() > 1024:
            raise NotACheckpointError("a checkpoint with a dict key that is an integer of more than 1,024 bits.")


def check_tensor(is_valid: bool) -> None:
    """Refuse what a file says about a tensor.

    Raises:
        NotACheckpointError: If it is not valid.
    """
    if not is_valid:
        raise NotACheckpointError("a checkpoint with a tensor whose data, shape or strides are invalid.")


def checked_sizes(values: Any) -> tuple[int, ...]:
    """Return sizes or strides, checked."""
    check_tensor(isinstance(values, list | tuple) and len(values) <= _MAX_DIMENSIONS)
    check_tensor(all(type(number) is int and 0 <= number < 1 << 63 for number in values))
    return tuple(values)


# Calls: constructors of plain values, reimplemented, placeholders, and what is refused

_SIZED = frozenset({list, tuple, dict, OrderedDict, Counter, set, frozenset, str, bytes, bytearray, torch.Size})


def fill(container: dict[Any, Any] | set[Any], parts: Iterable[Any], budget: Budget) -> None:
    """Add elements to a set, or (key, value) pairs to a dict, whose keys are checked before they are hashed.

    The budget is checked after each thousand: a file can choose numbers whose hashes all collide.
    """
    parts = list(parts)
    for key in (key for key, _ in parts) if isinstance(container, dict) else parts:
        if type(key) is not str:
            check_key(key)
    # the `update` of a Counter would count the pairs
    add = partial(dict.update, container) if isinstance(container, Counter) else container.update
    for start in range(0, len(parts), 1000):
        chunk = parts[start : start + 1000]
        budget.spend(128 * len(chunk))
        add(chunk)


def plain_constructors(budget: Budget) -> dict[str, Constructor]:
    """Return the constructors of plain values by qualified name; none of them runs code of its arguments."""

    def set_of(values: Any = ()) -> set[Any]:
        made: set[Any] = set()
        fill(made, values, budget)
        return made

    def dict_of(kind: type[dict[Any, Any]], items: Any = ()) -> dict[Any, Any]:
        made = kind()
        fill(made, items.items() if isinstance(items, dict) else items, budget)
        return made

    return {
        "_codecs.encode": _encode,
        "builtins.bytearray": _bytearray,
        "builtins.bytes": lambda *parts: bytes(_bytearray(*parts)),
        "builtins.complex": complex,
        "builtins.dict": lambda *items: dict_of(dict, *items),
        "builtins.frozenset": lambda *values: frozenset(set_of(*values)),
        "builtins.list": list,
        "builtins.set": set_of,
        "builtins.tuple": tuple,
        "collections.Counter": lambda *items: dict_of(Counter, *items),
        "collections.OrderedDict": lambda *items: dict_of(OrderedDict, *items),
        "torch.Size": torch.Size,
        "torch.device": _device,
        # TorchScript's lists, and the types that it stores with dicts and lists
        **{f"torch.jit._pickle.build_{kind}list": list for kind in ("bool", "double", "int", "tensor")},
        "torch.jit._pickle.restore_type_tag": lambda value, _: value,
    }


def _encode(text: str, encoding: str = "utf-8") -> bytes:
    if encoding not in ("latin1", "latin-1", "utf-8"):
        raise ValueError(f"its text has the encoding {describe_value(encoding)}")
    return text.encode(encoding)


def _bytearray(value: bytes | str = b"", encoding: str = "latin-1") -> bytearray:
    return bytearray(value if isinstance(value, bytes) else _encode(value, encoding))


def _device(kind: str, *index: int) -> torch.device:
    if not isinstance(kind, str) or len(kind) > 40:
        raise TypeError(f"it names the device {describe_value(kind)}")
    return torch.device(kind, *index)


# Standard modules that act on the system, and what of them is common among hyper-parameters; Python 3.11 stores the
# members of an enumeration by getattr
_SYSTEM = frozenset(
    """
    _ctypes _io _pickle _posixsubprocess _thread asyncio bdb builtins cProfile code codeop concurrent ctypes
    distutils doctest ensurepip fileinput ftplib gc http imaplib imp importlib inspect io linecache lib2to3
    marshal mmap multiprocessing nt ntpath os pdb pickle pip pkgutil platform poplib posix posixpath profile pty
    pydoc runpy sched shelve shutil signal site smtplib socket socketserver sqlite3 ssl subprocess sys tarfile
    telnetlib tempfile threading timeit trace types unittest urllib venv webbrowser xmlrpc zipfile zipimport
    """.split()  # noqa: SIM905  # a list of words
)
_HARMLESS = {
    *(f"builtins.{name}" for name in ("getattr", "object", "range", "slice", "xrange")),
    *("types.MappingProxyType", "types.SimpleNamespace"),
}


def _is_never_needed(function: Global) -> bool:
    """Whether no checkpoint needs this call. It decides only what is refused: no call is made in either case."""
    return function.module.partition(".")[0] in _SYSTEM and str(function) not in _HARMLESS


class Calls:
    """Handles the calls that a pickle asks for: a plain value, a `Placeholder`, or an error.

    Args:
        constructors: Our functions by the qualified names of the functions that they stand for, beside those of
            plain values.
        budget: Limits on memory and time.
    """

    def __init__(self, constructors: dict[str, Constructor], budget: Budget) -> None:
        self.constructors = plain_constructors(budget) | constructors
        self.budget = budget

    def call(self, function: Any, arguments: Any) -> Any:
        """Return what stands for the result of a call."""
        if isinstance(function, Placeholder) and function.name == "builtins.getattr":
            self.budget.spend(512)
            name = ".".join(describe_value(part).strip("'") for part in function.args)
            return Placeholder(name, arguments)  # of a class inside of a class
        if not isinstance(function, Global):
            raise UnsafeCheckpointError(f"a pickle that asks to call {describe_value(function)}")
        if not isinstance(arguments, tuple):
            raise TypeError(f"it calls {function} without a tuple of arguments")
        self.charge(arguments)
        name = str(function)
        if name == "copyreg._reconstructor":  # of a class, its base and the state of this
            return self.call(arguments[0], tuple(part for part in arguments[2:] if part is not None))
        make = self.constructors.get(name)
        if make is not None:
            for part in arguments:
                self.charge(part)
            return make(*arguments)
        if _is_never_needed(function):
            raise UnsafeCheckpointError(f"a pickle that asks to call {name}")
        self.budget.spend(512)
        return Placeholder(name, arguments)

    def charge(self, value: Any) -> None:
        """Charge a copy of a value: one value of the memo can be an argument of any number of calls."""
        if type(value) in _SIZED and len(value) > 32:
            self.budget.spend(sys.getsizeof(value))


ARRAY = "numpy.ndarray"  # the name of the placeholder of an array
_NUMBERS = frozenset({"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"})


def array_constructors(budget: Budget) -> dict[str, Constructor]:
    """Return our functions by the qualified names of those of NumPy 1 and 2 that make arrays and numbers."""

    def of_buffer(*arguments: Any) -> Any:
        array = _array(budget, *arguments)
        return Placeholder(ARRAY, arguments) if array is None else array

    def number(dtype: Any, data: Any = b"") -> Any:
        array = _array(budget, data, dtype, ())
        return Placeholder("numpy.generic", (dtype, data)) if array is None else array[()]

    constructors: dict[str, Constructor] = {}
    for core in ("numpy.core", "numpy._core"):
        constructors[f"{core}.multiarray._reconstruct"] = lambda kind, *_: Placeholder(describe_value(kind))
        constructors[f"{core}.multiarray.scalar"] = number
        constructors[f"{core}.numeric._frombuffer"] = of_buffer
    return constructors


def array_of_state(state: Any, budget: Budget) -> np.ndarray[Any, Any] | None:
    """Return the array that a state describes; None if it is not one of numbers.

    Raises:
        NotACheckpointError: If its shape is not that of its bytes.
    """
    if not isinstance(state, tuple) or len(state) != 5:
        return None
    _, shape, dtype, in_columns, data = state
    return _array(budget, data, dtype, shape, "F" if in_columns else "C")


def _array(
    budget: Budget, data: Any, dtype: Any, shape: Any, order: Any = "C", axes: Any = None
) -> np.ndarray[Any, Any] | None:
    """Return a copy of bytes as an array in the byte order of this machine; None if they are no numbers."""
    code = _code(dtype)
    if code not in _NUMBERS:
        return None
    bytes_order = dtype.state[1] if isinstance(dtype.state, tuple) else None
    check_tensor(bytes_order in ("<", ">", "|", "="))
    stored = np.dtype(bytes_order + code)
    data = data.encode("latin-1") if isinstance(data, str) else data  # as Python 2 stored bytes
    shape = checked_sizes(shape)
    check_tensor(isinstance(data, bytes | bytearray) and math.prod(shape) * stored.itemsize == len(data))
    check_tensor(axes is None or sorted(checked_sizes(axes)) == [*range(len(shape))])
    budget.spend(512 + len(data))
    array: np.ndarray[Any, Any] = np.ndarray(shape, stored, data, order="F" if order == "F" else "C").astype(
        stored.newbyteorder("=")
    )
    return array if axes is None else array.transpose(axes)


def _code(dtype: Any) -> Any:
    """Return the name of a type that a pickle describes, such as "f4"; of none of NumPy's, what it is."""
    is_dtype = isinstance(dtype, Placeholder) and dtype.name == "numpy.dtype" and dtype.args
    code = dtype.args[0] if is_dtype else dtype
    return code if isinstance(code, str) else describe_value(code)


def is_array(value: Any) -> bool:
    """Whether a value is an array of numbers that torch has."""
    return isinstance(value, np.ndarray) and f"{value.dtype.kind}{value.dtype.itemsize}" in _NUMBERS


def tensor_of(value: Any) -> Any:
    """Return an array as a tensor; other values as they are."""
    if not is_array(value):
        return value
    return torch.from_numpy(np.require(value, value.dtype.newbyteorder("="), ["C", "W"]))


def are_copies(*dicts: dict[str, Any]) -> bool:
    """Whether all have the same names, and under each of them tensors of one type with equal numbers."""
    return all(_are_equal([tensor_of(each.get(name)) for each in dicts]) for name in set().union(*dicts))


def _are_equal(values: list[Any]) -> bool:
    tensors = [each for each in values if isinstance(each, torch.Tensor) and is_dense(each) and not each.is_meta]
    alike = len(tensors) == len(values) and len({(each.dtype, each.device) for each in tensors}) == 1
    return alike and all(torch.equal(tensors[0], each) for each in tensors)
