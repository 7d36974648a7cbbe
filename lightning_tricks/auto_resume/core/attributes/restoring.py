"""Restores changed attributes of another process in fresh objects."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from typing import Any

from torch import nn

from lightning_tricks._torch_compat.modules import own_modules
from lightning_tricks.auto_resume.core.attributes.attribute_access import (
    MISSING,
    CannotRestoreError,
    delete_attribute,
    find_class,
    is_subclass,
    set_attribute,
    type_name,
)
from lightning_tricks.auto_resume.core.attributes.encoding import ObjectResolver, decode
from lightning_tricks.auto_resume.core.attributes.object_walk import (
    STATE_KEY,
    AttributeSlot,
    ObjectWalk,
    SkippedNames,
    is_skipped,
    nothing_skipped,
)
from lightning_tricks.auto_resume.core.attributes.user_code import can_be_rebuilt
from lightning_tricks.auto_resume.core.attributes.value_kinds import replace_contents


def restore_changes(
    roots: Mapping[str, Any], changes: Mapping[str, Any], *, skipped: SkippedNames = nothing_skipped
) -> dict[str, str]:
    """Restore in objects the attributes that their equals had in another process.

    What changed in place there changes in place here, as far as size and type allow; what was set there is set here,
    and attributes that shared a value share it again, also with an entry of a container. Two containers that share an
    entry which is no attribute do not. An object that was created in the fit is created again from its attributes, if
    its class is plain Python, has no `__del__`, and is known in the module of the class that holds it; a metric that a
    list of modules gained is restored as a copy of its sibling. Of the user's code only `load_state_dict` is called.

    Where both processes keep what a clock showed since they began, each keeps its own: a timer of another process is
    not this one's. Such are readings of `time.time()`, `time.monotonic()` and `time.perf_counter()`.

    Args:
        roots: Fresh objects, by the names that they had.
        changes: What `AttributeTracker.changes` returned, possibly saved and read by `load_plain_data`.
        skipped: What `AttributeTracker` was given.

    Returns:
        Path -> why the attribute could not be restored.
    """
    values, failed = changes["values"], dict[str, str]()
    # in this order: modules, as others' attributes lie in them; values; what shares a value; states of whole objects
    made = dict[str, Any]()

    def fresh_walk() -> ObjectWalk:
        walk = ObjectWalk.from_roots(roots, skipped, with_code=True)
        walk.made = made
        return walk

    walk = fresh_walk()
    for path, change in values.items():
        if _kind(change) == "module" and _try_restore(_restore_module_copy, path, change, walk, failed):
            walk = fresh_walk()
    later = ("same", "module")
    for path, change in sorted(values.items(), key=lambda item: _refers(item[1]["value"], values)):
        if change["name"] != STATE_KEY and _kind(change) not in later:
            num_before = walk.num_built
            _try_restore(_restore_value, path, change, walk, failed)
            walk = fresh_walk() if walk.num_built > num_before else walk
    for path, change in values.items():
        if _kind(change) == "same":
            _try_restore(_restore_shared, path, change, walk, failed)
    for path, change in values.items():
        if change["name"] == STATE_KEY:
            _try_restore(_restore_state, path, change, walk, failed)
    return failed


def _refers(encoded: Any, paths: Collection[str]) -> bool:
    """Whether a container shares an entry with an attribute of some paths, which has to be restored before it."""
    if isinstance(encoded, Mapping):
        is_reference = encoded.get("kind") == "same" and encoded["path"] in paths
        return is_reference or any(_refers(part, paths) for part in encoded.values())
    return isinstance(encoded, list | tuple) and any(_refers(part, paths) for part in encoded)


def _kind(change: Mapping[str, Any]) -> str:
    value = change["value"]
    return str(value.get("kind", "")) if isinstance(value, dict) else ""


def _try_restore(
    restore: Callable[[str, Any, ObjectWalk], object], path: str, change: Any, walk: ObjectWalk, failed: dict[str, str]
) -> bool:
    owner = change["of"]
    if any(owner == known or owner.startswith(f"{known}.") for known in failed):
        return False
    is_there = owner in walk.owners or (change["name"] == STATE_KEY and owner in walk.stateful)
    if not is_there and (change["name"] or owner not in walk.slots):
        failed[owner] = "it does not exist here"
        return False
    if owner in walk.owners and is_skipped(walk.owners[owner], change["name"], walk.skipped):
        failed[path] = "it is an internal attribute of its class"
        return False
    try:
        restore(path, change, walk)
    except Exception as error:  # the changes come from a file, and the objects run user code
        failed[path] = f"{error}" if isinstance(error, CannotRestoreError) else f"{type(error).__name__}: {error}"
        return False
    return True


def _restore_module_copy(path: str, change: Any, walk: ObjectWalk) -> None:
    modules = own_modules(walk.owners[change["of"]])
    if change["name"] in modules:
        return
    template = modules.get(change["value"]["like"])
    if not is_subclass(type(template), nn.Module) or type_name(type(template)) != change["value"]["type"]:
        raise CannotRestoreError(f"it has no sibling of type {change['value']['type']}")
    modules[change["name"]] = deepcopy(template)


def _restore_value(path: str, change: Any, walk: ObjectWalk) -> None:
    present = walk.slots[path].value if path in walk.slots else MISSING
    owner, name = walk.owners.get(change["of"]), change["name"]
    if _kind(change) == "initial":
        return
    if _kind(change) == "deleted":
        if present is not MISSING:
            delete_attribute(owner, name)
        return
    value = decode(change["value"], present, _WalkResolver(walk, owner), path)
    if value is present or ((change["in_place"] or not name) and replace_contents(present, value)):
        return
    if not name:
        raise CannotRestoreError(f"it is a {type_name(type(present))} that cannot be replaced in place")
    set_attribute(owner, name, value)
    walk.slots[path] = AttributeSlot(owner, change["of"], name, value)


def _restore_shared(path: str, change: Any, walk: ObjectWalk) -> None:
    value = _WalkResolver(walk, None).known(change["value"]["path"])
    set_attribute(walk.owners[change["of"]], change["name"], value)


class _WalkResolver(ObjectResolver):
    """Finds values among those that a walk over fresh objects found."""

    def __init__(self, walk: ObjectWalk, owner: Any) -> None:
        super().__init__(walk.made)
        self._walk, self._owner = walk, owner

    def known(self, path: str) -> Any:
        if path in self.made:
            return self.made[path]
        if path in self._walk.owners:
            return self._walk.owners[path]
        if path in self._walk.slots:
            return self._walk.slots[path].value
        found = self._walk.tensor(path)
        return super().known(path) if found is MISSING else found

    def rebuild(self, name: str) -> Any:
        kind = find_class(name if "." in name else f"__main__.{name}", object)
        if not can_be_rebuilt(kind, self._owner):
            return super().rebuild(name)
        self._walk.num_built += 1
        return object.__new__(kind)

    def note_made(self) -> None:
        self._walk.num_built += 1


def _restore_state(path: str, change: Any, walk: ObjectWalk) -> None:
    walk.stateful[change["of"]].load_state_dict(decode(change["value"]))
