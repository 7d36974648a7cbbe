"""Tricks in a checkpoint's hyper-parameters: arguments that name files are dropped, unless the caller gave them."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import fields, replace
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

import lightning_tricks
from lightning_tricks._callback import TrickCallback
from lightning_tricks._shared.patterns import check_repeats
from lightning_tricks.checkpoint_remapping.hyperparameters import nested_values
from lightning_tricks.checkpoint_remapping.load_from_checkpoint import (
    STRINGS_OF_FILE,
    strings_in,
)
from lightning_tricks.tricks import Tricks, arguments_of

# The strings in the tricks that the caller of `load_from_checkpoint` gives
STRINGS_OF_CALLER: ContextVar[frozenset[str]] = ContextVar("strings of the caller's tricks", default=frozenset())


def strings_of_tricks(given: Mapping[str, Any]) -> frozenset[str]:
    """Return the strings in the tricks among the caller's arguments, at any depth."""
    names = {trick.name for trick in fields(Tricks)}
    found = [part for part in nested_values(given) if isinstance(part, Tricks)]
    tables = [part for part in nested_values(given) if isinstance(part, Mapping)]
    return strings_in([*found, *(table[name] for table in tables for name in table.keys() & names)])


def without_paths_of_checkpoint(tricks: Tricks) -> Tricks:
    """Return the tricks without arguments that name a file or a folder because the loaded checkpoint says so.

    Raises:
        ValueError: If the checkpoint holds a regular expression that could take very long to match.
    """
    texts = STRINGS_OF_FILE.get() - STRINGS_OF_CALLER.get()
    for text in strings_in(tricks) & texts:
        if text.startswith("re:"):
            check_repeats(text[3:])
    changed: dict[str, Any] = {}
    dropped = []
    for trick in fields(tricks):
        value = getattr(tricks, trick.name)
        if value is None or "callback" not in trick.metadata:
            continue
        callback: type[TrickCallback] = getattr(lightning_tricks, trick.metadata["callback"])
        arguments = arguments_of(callback, value)
        named = callback.find_path_arguments(arguments, texts)
        if named:
            dropped += [f"{trick.name}.{name}={arguments[name]!r}" for name in named]
            needed = any(callback.requires_argument(name) for name in named)
            changed[trick.name] = None if needed else {n: given for n, given in arguments.items() if n not in named}
    if not dropped:
        return tricks
    rank_zero_warn(
        f"The tricks in the checkpoint name files or folders: {', '.join(dropped)}. These arguments are ignored, "
        "because a checkpoint must not decide which files are read or written. To use them, pass the tricks yourself: "
        "load_from_checkpoint(path, tricks=Tricks(...))."
    )
    return replace(tricks, **changed)
