"""Restores changed attributes of another process in fresh objects."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn

from lightning_tricks._torch_compat.modules import module_internals
from lightning_tricks.auto_resume.core.attributes.attribute_access import (
    MISSING,
    CannotRestoreError,
    delete_attribute,
    find_class,
    is_subclass,
    set_attribute,
    type_name,
)
from lightning_tricks.auto_resume.core.attributes.encoding import Decoder
from lightning_tricks.auto_resume.core.attributes.object_walk import (
    STATE_KEY,
    AttributeSlot,
    ObjectWalk,
    SkippedNames,
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
    entry which is not an attribute do not. An object that was created in the fit is created again from its attributes,
    if its class is plain Python, has no `__del__`, and is known in the module of the class that holds it. Of the user's
    code only `load_state_dict` is called.

    Where both processes keep what a clock showed since they began, each keeps its own: a timer of another process is
    not this one's. Such are readings of `time.time()`, `time.monotonic()` and `time.perf_counter()`.

    Args:
        roots: Fresh objects, by the names that they had.
        changes: What `AttributeTracker.changes` returned, possibly saved and read by `load_plain_data`.
        skipped: What `AttributeTracker` was given.

    Returns:
        Path -> why the attribute could not be restored.
    """
    values, restoration = changes["values"], _Restoration(roots, skipped)
    own_states = [path for path, change in values.items() if change["name"] == STATE_KEY]
    kinds = {path: "" if path in own_states else _kind(change) for path, change in values.items()}
    others = [path for path in values if path not in own_states and kinds[path] != "same"]
    # in this order: values; what shares a value; states of whole objects
    for restore, paths in (
        (restoration.set_value, sorted(others, key=lambda path: _refers(values[path]["value"], values))),
        (restoration.share_value, [path for path in values if kinds[path] == "same"]),
        (restoration.load_state, own_states),
    ):
        for path in paths:
            restoration.attempt(restore, path, values[path])
    return restoration.failed


def _refers(encoded: Any, paths: Collection[str]) -> bool:
    """Whether a container shares an entry with an attribute of some paths, which has to be restored before it."""
    if isinstance(encoded, Mapping):
        is_reference = encoded.get("kind") == "same" and encoded["path"] in paths
        return is_reference or any(_refers(part, paths) for part in encoded.values())
    return isinstance(encoded, list | tuple) and any(_refers(part, paths) for part in encoded)


def _kind(change: Mapping[str, Any]) -> str:
    value = change["value"]
    return str(value.get("kind", "")) if isinstance(value, dict) else ""


class _Restoration(Decoder):
    """Restores changes one after another, and finds the values that they refer to in this process.

    Attributes:
        walk: A walk over the objects as they are now.
        failed: Path -> why the attribute could not be restored.
    """

    def __init__(self, roots: Mapping[str, Any], skipped: SkippedNames) -> None:
        super().__init__()
        self._roots, self._skipped = roots, skipped
        self._owner: Any = None
        self.walk, self._is_outdated = ObjectWalk.from_roots(roots, skipped, with_code=True), False
        self.names = self.walk.references
        self.failed = dict[str, str]()

    def attempt(self, restore: Callable[[str, Any], None], path: str, change: Any) -> None:
        """Restore a change, or note in `failed` why that is not possible."""
        owner, walk = change["of"], self.walk
        if any(owner == known or owner.startswith(f"{known}.") for known in self.failed):
            return
        slot = walk.slots.get(path)
        flag = slot if slot is not None and slot.is_flag and change["name"] == slot.name else None
        is_there = flag or owner in walk.owners or (change["name"] == STATE_KEY and owner in walk.stateful)
        if not is_there and (change["name"] or owner not in walk.slots):
            self.failed[owner] = "it does not exist in this run"
            return
        self._owner = flag.owner if flag else walk.owners.get(owner)
        internals = module_internals() if is_subclass(type(self._owner), nn.Module) else ()
        if owner in walk.owners and change["name"] in (*self._skipped(self._owner), *internals) and not flag:
            self.failed[path] = "it is an internal attribute of its class"
            return
        try:
            restore(path, change)
        except CannotRestoreError as error:
            self.failed[path] = f"{error}"
        except Exception as error:  # the changes come from a file, and the objects run user code
            self.failed[path] = f"{type(error).__name__}: {error}"
        if self._is_outdated:
            self.walk, self._is_outdated = ObjectWalk.from_roots(self._roots, self._skipped, with_code=True), False

    def set_value(self, path: str, change: Any) -> None:
        """Fill, set or delete the value of an attribute."""
        walk, name = self.walk, change["name"]
        slot = walk.slots.get(path)
        present = MISSING if slot is None else slot.value
        if _kind(change) == "initial":
            return
        if _kind(change) == "deleted":
            if present is not MISSING:
                delete_attribute(self._owner, name)
            return
        value = self.decode(change["value"], present, path)
        if slot is not None and slot.is_flag:  # which parameters and compiled modules keep elsewhere
            setattr(slot.owner, slot.name, bool(value))
            return
        if value is present or ((change["in_place"] or not name) and replace_contents(present, value)):
            return
        if not name:
            raise CannotRestoreError(f"it is a {type_name(type(present))} that cannot be replaced in place")
        set_attribute(self._owner, name, value)
        walk.slots[path] = AttributeSlot(self._owner, change["of"], name, value)

    def share_value(self, path: str, change: Any) -> None:
        """Set an attribute to the value of another one."""
        set_attribute(self._owner, change["name"], self.known(change["value"]["path"]))

    def load_state(self, path: str, change: Any) -> None:
        """Load the state of a whole object."""
        self.walk.stateful[change["of"]].load_state_dict(Decoder().decode(change["value"]))

    def known(self, path: str) -> Any:
        """Return the value that a change refers to by its path."""
        for known in (self.made, self.walk.owners, self.walk.tensors):
            if path in known:
                return known[path]
        return self.walk.slots[path].value if path in self.walk.slots else super().known(path)

    def rebuild(self, name: str) -> Any:
        """Return a new object of a class that the module of its owner knows."""
        kind = find_class(name if "." in name else f"__main__.{name}", object)
        if not can_be_rebuilt(kind, self._owner):
            return super().rebuild(name)
        self._is_outdated = True
        return object.__new__(kind)

    def note_made(self) -> None:
        """Walk over the objects again before the next change."""
        self._is_outdated = True
