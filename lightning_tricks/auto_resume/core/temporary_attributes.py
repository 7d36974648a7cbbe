"""Attributes of an object that are replaced for the length of a block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def patched(owner: Any, replaced: Mapping[str, Any]) -> Iterator[None]:
    """Replace attributes of an object for the length of a block, without calling its `__setattr__`."""
    own = vars(owner)
    before = {name: own[name] for name in replaced if name in own}
    own.update(replaced)
    try:
        yield
    finally:
        for name in replaced:
            own.pop(name, None)
        own.update(before)
