"""The values of a pickle that is read as data: placeholders, walks over containers, and limits on nesting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_tricks._shared.read_budget import Budget
from lightning_tricks._shared.text import format_shape
from lightning_tricks.checkpoint_remapping.core.errors import NotACheckpointError

MAX_NAME_LENGTH = 1000  # characters of a qualified name, of a tensor or of a class
MAX_NESTING = 200  # containers in each other; pickle.dump itself gives up at some hundred
_MAX_SHARED_PARTS = 1_000_000  # parts that only repeat others
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


def describe_value(value: Any, longest: int = 80) -> str:
    """Describe any value in a few words; `repr` of lists that share their parts can fill all memory."""
    if isinstance(value, Placeholder | Global):
        return str(value) if isinstance(value, Global) else value.name
    if isinstance(value, str | bytes | bytearray):
        return repr(value[:longest]) + "..." * (len(value) > longest)
    if isinstance(value, torch.Tensor):
        return f"<tensor of {format_shape(value.shape) or 'one number'}, {value.dtype}>"
    plain = value is None or isinstance(value, bool | float | complex | torch.dtype | torch.device)
    if plain or (isinstance(value, int) and value.bit_length() < 256):
        return repr(value)
    return f"a {type(value).__name__}"


def truncated_repr(value: Any, longest: int = 100) -> str:
    """Return the beginning of the `repr` of a value, without computing the rest."""
    text = ""
    for piece in _pieces(value):
        text += piece
        if len(text) > longest:
            return text[: longest - 3] + "..."
    return text


def _pieces(value: Any) -> Iterator[str]:
    if not is_container(value):
        yield repr(value) if isinstance(value, Placeholder) else describe_value(value, 100)
        return
    opening, closing = "[]" if isinstance(value, list) else "()" if isinstance(value, tuple) else "{}"
    yield opening
    for number, (key, part) in enumerate(children(value)):
        yield ", " if number else ""
        if isinstance(value, dict):
            yield from _pieces(key)
            yield ": "
        yield from _pieces(part)
    yield closing


def children(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the (key, value) pairs directly inside a container; nothing for other values."""
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from enumerate(value)


_LEAVES = frozenset({int, float, bool, str, bytes, complex, type(None), torch.Tensor})


def is_flat(value: Any) -> bool:
    """Whether a container holds nothing that a walk would enter; this takes no instructions for each part."""
    return _LEAVES.issuperset(map(type, value.values() if isinstance(value, dict) else value))


def is_container(value: Any) -> bool:
    """Whether a value can contain other values."""
    return isinstance(value, dict | list | tuple | set | frozenset)


def check_nesting(value: Any, budget: Budget) -> None:
    """Refuse containers that contain themselves, are nested too deeply, or are shared too often.

    Twenty lists that each hold the one before twice are a million lists for code that copies or prints them.
    Placeholders may refer to each other in circles, as objects do; nesting is counted from each of them.

    Raises:
        NotACheckpointError: If there are such containers.
    """
    known: dict[int, tuple[int, int] | None] = {}  # what `measure` returned; None while it walks
    roots: list[Any] = [(value,)]  # grows by the values in each placeholder
    distinct = 0

    def measure(container: Any, depth: int) -> tuple[int, int]:
        """Return the height of a container, and the number of its parts, where shared ones count each time."""
        nonlocal distinct
        found = known.get(id(container), (0, len(container)))
        if found is None:
            raise NotACheckpointError("a checkpoint with a list or dict that contains itself.")
        height, parts = found
        if depth + height > MAX_NESTING:  # before it is entered, so that the recursion ends
            raise NotACheckpointError(f"a checkpoint with lists or dicts that are nested more than {MAX_NESTING} deep.")
        if id(container) in known:
            return found
        budget.spend(112 + 8 * len(container))
        distinct += len(container)
        known[id(container)] = None
        for _, part in () if is_flat(container) else children(container):
            if is_container(part):
                inner_height, inner_parts = measure(part, depth + 1)
                height, parts = max(height, inner_height + 1), parts + inner_parts
            elif isinstance(part, Placeholder) and id(part) not in known:
                budget.spend(112)
                known[id(part)] = 0, 0
                roots.append((part.args, part.state, part.items, part.elements))
        known[id(container)] = height, parts
        return height, parts

    total = sum(measure(root, 0)[1] for root in roots)
    if total > _MAX_SHARED_PARTS + 4 * distinct:
        raise NotACheckpointError(
            "a checkpoint with lists or dicts that share their parts so often that a copy would fill the memory."
        )


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
