"""Attributes that changed in another process are given to fresh objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from torch import nn

from lightning_tricks.auto_resume.core.attributes.object_walk import (
    Skipped,
    Slot,
    Walk,
    can_be_built,
    delete_attribute,
    is_left_out,
    nothing_skipped,
    set_attribute,
)
from lightning_tricks.auto_resume.core.attributes.plain_values import (
    MISSING,
    CannotRestoreError,
    There,
    class_named,
    decode,
    is_a,
    name_of,
    replace_content,
)

STATE = "state_dict()"  # what an object says of itself, among its attributes


def put_back(
    roots: Mapping[str, Any], changes: Mapping[str, Any], *, skipped: Skipped = nothing_skipped
) -> dict[str, str]:
    """Give objects the attributes that others had in another process.

    What changed in place there changes in place here, as far as size and type allow; what was set there is set here,
    and attributes that shared a value share it again, also with what lies in a container. Two containers that share a
    part which is no attribute do not. An object that was made in the fit is made again by its attributes alone, if its
    class is plain Python, has no `__del__`, and is known in the module of the class that holds it; a metric that a list
    of modules gained comes again as a copy of the one beside it. Nothing else of the user's code is called than
    `load_state_dict`.

    Floats that were readings of a clock since the start are set only where the object has no such attribute, or the
    dict no such entry: a timer of another process is not this one's. Such are those between then and now of
    `time.time()`, and those of `time.monotonic()` and `time.perf_counter()` under a name that says so, such as `start`.

    Args:
        roots: Fresh objects, by the names that they had.
        changes: Of `Attributes.changes`, also from a file that `read_as_data` read.
        skipped: As `Attributes` had it.

    Returns:
        Path -> why it could not be put back.
    """
    values, failed = changes["values"], dict[str, str]()
    walk = Walk.over(roots, skipped)
    for path, change in values.items():
        if _kind(change) == "module" and _attempt(_grow, path, change, walk, failed):
            walk = Walk.over(roots, skipped)
    later = ("same", "module")
    for path, change in values.items():
        if change["name"] != STATE and _kind(change) not in later:
            n_built = walk.built
            _attempt(_restore, path, change, walk, failed)
            walk = Walk.over(roots, skipped) if walk.built > n_built else walk
    for path, change in values.items():
        if _kind(change) == "same":
            _attempt(_share, path, change, walk, failed)
    for path, change in values.items():
        if change["name"] == STATE:
            _attempt(_load, path, change, walk, failed)
    return failed


def _kind(change: Mapping[str, Any]) -> str:
    value = change["value"]
    return str(value.get("kind", "")) if isinstance(value, dict) else ""


def _attempt(
    act: Callable[[str, Any, Walk], object], path: str, change: Any, walk: Walk, failed: dict[str, str]
) -> bool:
    owner = change["of"]
    if any(owner == known or owner.startswith(f"{known}.") for known in failed):
        return False
    is_there = owner in walk.owners or (change["name"] == STATE and owner in walk.stateful)
    if not is_there and (change["name"] or owner not in walk.slots):
        failed[owner] = "it is not there"
        return False
    if owner in walk.owners and is_left_out(walk.owners[owner], change["name"], walk.skipped):
        failed[path] = "it is no attribute of the user's"
        return False
    try:
        act(path, change, walk)
    except Exception as error:  # the changes come from a file, and the objects are the user's
        failed[path] = f"{error}" if isinstance(error, CannotRestoreError) else f"{type(error).__name__}: {error}"
        return False
    return True


def _grow(path: str, change: Any, walk: Walk) -> None:
    modules = vars(walk.owners[change["of"]])["_modules"]
    if change["name"] in modules:
        return
    like = modules.get(change["value"]["like"])
    if not is_a(type(like), nn.Module) or name_of(type(like)) != change["value"]["type"]:
        raise CannotRestoreError(f"there is no {change['value']['type']} beside it")
    modules[change["name"]] = deepcopy(like)


def _restore(path: str, change: Any, walk: Walk) -> None:
    present = walk.slots[path].value if path in walk.slots else MISSING
    owner, name = walk.owners.get(change["of"]), change["name"]
    if _kind(change) == "deleted":
        if present is not MISSING:
            delete_attribute(owner, name)
        return
    value = decode(change["value"], present, _There(walk, owner))
    if value is present or ((change["in_place"] or not name) and replace_content(present, value)):
        return
    if not name:
        raise CannotRestoreError(f"it is a {name_of(type(present))} that cannot be filled")
    set_attribute(owner, name, value)
    walk.slots[path] = Slot(owner, change["of"], name, value)


def _share(path: str, change: Any, walk: Walk) -> None:
    value = _There(walk, None).known(change["value"]["path"])
    set_attribute(walk.owners[change["of"]], change["name"], value)


class _There(There):
    """What fresh objects have to offer."""

    def __init__(self, walk: Walk, owner: Any) -> None:
        self._walk, self._owner = walk, owner

    def known(self, path: str) -> Any:
        if path in self._walk.owners:
            return self._walk.owners[path]
        if path in self._walk.slots:
            return self._walk.slots[path].value
        return super().known(path)

    def build(self, name: str) -> Any:
        kind = class_named(name if "." in name else f"__main__.{name}", object)
        if not can_be_built(kind, self._owner):
            return super().build(name)
        self._walk.built += 1
        return object.__new__(kind)


def _load(path: str, change: Any, walk: Walk) -> None:
    walk.stateful[change["of"]].load_state_dict(decode(change["value"]))
