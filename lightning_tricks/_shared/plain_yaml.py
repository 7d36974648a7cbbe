"""Read YAML files that are not trusted: only plain values, and no aliases, which can repeat values without end."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from lightning_tricks._shared.files import open_file
from lightning_tricks._shared.read_budget import Budget

_LARGEST = 1 << 20  # bytes
_TUPLE = "tag:yaml.org,2002:python/tuple"


def read_yaml(
    path: str | os.PathLike[str], *, max_depth: int, max_scalar_length: int, allow_tuples: bool = False
) -> Any:
    """Read a YAML file of at most 1 MiB without aliases, a few lines of which could fill all memory.

    Args:
        path: Path of the file.
        max_depth: Maximum depth of nested lists and dicts.
        max_scalar_length: Maximum number of characters of a scalar.
        allow_tuples: Whether `!!python/tuple`, which Lightning writes, is read; no other tag of Python is.

    Raises:
        OSError: If it does not exist or is not a file.
        ValueError: If it exceeds a limit.
        yaml.YAMLError: If it is not YAML of plain values.
    """
    import yaml

    with open_file(path) as stream:
        data = stream.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise ValueError(f"it has more than {_LARGEST:,} bytes.")
    text = data.decode("utf-8-sig")
    safe: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    _check(yaml.parse(text, safe), Budget(len(data)), max_depth, max_scalar_length)
    loader: Any = type("PlainLoader", (safe,), {})
    if allow_tuples:
        yaml.add_constructor(_TUPLE, _make_tuple, loader)
    return yaml.load(text, loader)  # noqa: S506  # a safe one


def _make_tuple(loader: Any, node: Any) -> tuple[Any, ...]:
    return tuple(loader.construct_sequence(node, deep=True))


def _check(events: Iterable[Any], budget: Budget, max_depth: int, max_scalar_length: int) -> None:
    depth = -2  # the stream and the document
    for event in events:
        budget.spend(512)
        kind = type(event).__name__
        depth += kind.endswith("StartEvent") - kind.endswith("EndEvent")
        if depth > max_depth:
            raise ValueError(f"it nests lists and mappings more than {max_depth} deep.")
        if kind == "AliasEvent":
            raise ValueError(
                "it has an alias (`*name`), which is not allowed: write the value itself, and put text "
                "with a '*' in quotes."
            )
        if kind == "ScalarEvent" and len(event.value) > max_scalar_length:
            raise ValueError(
                f"it has a scalar of {len(event.value):,} characters; at most {max_scalar_length:,} are allowed."
            )
