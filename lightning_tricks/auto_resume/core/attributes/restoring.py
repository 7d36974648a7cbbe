"""Restores changed attributes of another process in fresh objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_tricks._torch_compat.modules import module_internals
from lightning_tricks.auto_resume.core.attributes.attribute_access import (
    MISSING,
    SCALARS,
    CannotRestoreError,
    attribute_dict,
    attributes,
    delete_attribute,
    find_class,
    is_subclass,
    labelled,
    set_attribute,
    type_name,
)
from lightning_tricks.auto_resume.core.attributes.encoding import (
    STATE_KEY,
    Decoder,
    SkippedNames,
    content_of,
    is_held_object,
    load_state,
    nothing_skipped,
)
from lightning_tricks.auto_resume.core.attributes.object_walk import ObjectWalk
from lightning_tricks.auto_resume.core.attributes.user_code import CALLABLES, can_be_rebuilt, held_parts
from lightning_tricks.auto_resume.core.attributes.value_kinds import container_kind, is_mutable


def restore_changes(
    roots: Mapping[str, Any],
    changes: Mapping[str, Any],
    *,
    skipped: SkippedNames = nothing_skipped,
    known: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """Restore in objects the attributes that their equals had in another process.

    What this process has is filled in place, as far as size and type allow, so attributes, views and optimizers that
    share it see the change; unless something that keeps its value shares it, too. Attributes that came to share a value
    share it again, also with an entry of a container. An object that was created in the fit is created again from its
    attributes, if its class is plain Python, has no `__del__`, and is known in the module of the class that holds it.
    Of the user's code only `load_state_dict` is called.

    Where both processes keep what a clock showed since they began, each keeps its own: a timer of another process is
    not this one's. Such are readings of `time.time()`, `time.monotonic()` and `time.perf_counter()`.

    Args:
        roots: Fresh objects, by the names that they had.
        changes: What `AttributeTracker.changes` returned, possibly saved and read by `load_plain_data`.
        skipped: What `AttributeTracker` was given.
        known: Objects that are saved elsewhere, by path.

    Returns:
        Path -> why the attribute could not be restored.
    """
    failed, values = dict[str, str](), changes["values"]
    for _ in range(2):  # what is restored may bring classes and functions with variables of their own
        restoration = _Restoration(ObjectWalk.from_roots(roots, skipped, with_code=True, known=known), values)
        for path, change in values.items():
            restoration.attempt(path, change)
        failed |= restoration.failed
        values = restoration.left
        if not values:
            break
    return failed | {change["of"]: "it does not exist in this run" for change in values.values()}


class _Restoration:
    """Restores changes one after another, and finds the values that they refer to in this process.

    Args:
        walk: A walk over the objects of this process.
        values: Path -> change.

    Attributes:
        failed: Path -> why the attribute could not be restored.
        left: Path -> change of an object that this process does not have.
    """

    def __init__(self, walk: ObjectWalk, values: Mapping[str, Any]) -> None:
        self.walk, self._values = walk, values
        self.failed, self.left = dict[str, str](), dict[str, Any]()
        self._kept = _identities_in([slot.value for path, slot in walk.slots.items() if path not in values])
        self._decoder = Decoder(self._find, self._may_fill, _rebuild, walk.skipped, walk.references)

    def attempt(self, path: str, change: Any) -> None:
        """Restore a change, or note in `failed` why that is not possible."""
        owner_path, name = change["of"], change["name"]
        try:
            owner = self._owner(owner_path, name)
        except CannotRestoreError:
            self.left[path] = change
            return
        internals = module_internals() if is_subclass(type(owner), nn.Module) else ()
        if name in (*self.walk.skipped(owner), *internals) and name != "training":
            self.failed[path] = "it is an internal attribute of its class"
            return
        try:
            self._restore(path, owner, name, change["value"])
        except CannotRestoreError as error:
            self.failed[path] = f"{error}"
        except Exception as error:  # the changes come from a file, and the objects run user code
            self.failed[path] = f"{type(error).__name__}: {error}"

    def _owner(self, path: str, name: str) -> Any:
        """Return the object that has an attribute; None for a value that no attribute holds.

        Raises:
            CannotRestoreError: If this process has none.
        """
        if path in self.walk.owners:
            return self.walk.owners[path]
        slot = self.walk.slots.get(path)
        return None if slot is not None and not name else self._find(path)

    def _restore(self, path: str, owner: Any, name: str, encoded: Any) -> None:
        if name == STATE_KEY:  # in a checkpoint of an earlier format
            load_state(owner, Decoder().decode(encoded))
            return
        slot = self.walk.slots.get(path)
        present = slot.value if slot is not None else dict(attributes(owner)).get(name, MISSING)
        kind = encoded.get("kind") if isinstance(encoded, dict) else ""
        if kind == "deleted":
            if present is not MISSING:
                delete_attribute(owner, name)
            return
        if kind == "initial":  # likewise
            return
        self._decoder.owners[:] = [owner]
        value = self._decoder.decode(encoded, present, path)
        if value is present:
            return
        if not name:
            raise CannotRestoreError(f"it is a {type_name(type(present))} that cannot be replaced in place")
        set_attribute(owner, name, value)

    def _may_fill(self, value: Any) -> bool:
        return id(value) not in self._kept

    def _find(self, path: str) -> Any:
        """Return the value at a path of this process.

        Raises:
            CannotRestoreError: If there is none.
        """
        for known in (self.walk.owners, self.walk.tensors, self.walk.known):
            if path in known:
                return known[path]
        if path in self.walk.slots:
            slot = self.walk.slots[path]  # which may have been restored
            return slot.value if slot.owner is None else dict(attributes(slot.owner)).get(slot.name, slot.value)
        outer = max((known for known in self.walk.slots if path.startswith(f"{known}.")), key=len, default="")
        if outer:
            return _inside(self._find(outer), path[len(outer) + 1 :], self.walk.references)
        raise CannotRestoreError(f"it refers to {path}, which does not exist")


def _inside(value: Any, path: str, names: Mapping[int, str]) -> Any:
    """Return what lies in a value under a path; labels may have dots."""
    for label, part in _parts_of(value, names):
        if label == path:
            return part
        if path.startswith(f"{label}."):
            return _inside(part, path[len(label) + 1 :], names)
    raise CannotRestoreError(f"it refers to {path}, which does not exist")


def _parts_of(value: Any, names: Mapping[int, str]) -> list[tuple[str, Any]]:
    """Return what lies in a container, an object or a function, by the labels that `Encoder` gives."""
    kind = type(value)
    if (found := container_kind(kind)) is not None:
        pairs = list(found.entries(value))
        labels = labelled((key for key, _ in pairs), names) if found.is_keyed else map(str, range(len(pairs)))
        return [(label, part) for label, (_, part) in zip(labels, pairs, strict=True)] if found.has_order else []
    if is_subclass(kind, *CALLABLES):
        return [(name, content_of(part)) for name, part in held_parts(value)]
    if is_subclass(kind, nn.Module):
        parts = {**dict(value.named_parameters()), **dict(value.named_buffers()), **dict(value.named_modules())}
        return [*parts.items(), *attributes(value)]
    return attributes(value) if is_held_object(kind) else []


def _identities_in(values: list[Any]) -> set[int]:
    """Return the ids of all mutable values that some values hold, and of themselves."""
    seen, pending = set[int](), values
    while pending:
        value = pending.pop()
        kind = type(value)
        if kind in SCALARS or id(value) in seen:
            continue
        if is_mutable(kind) or is_held_object(kind):
            seen.add(id(value))
        found = container_kind(kind)
        if found is not None:
            if not SCALARS.issuperset(map(type, found.container.__iter__(value))) or found.is_keyed:
                pending += [part for _, part in found.entries(value)]
        elif is_held_object(kind):
            pending += (attribute_dict(value) or {}).values()
    return seen


def _rebuild(name: str, owners: list[Any]) -> Any:
    """Return a new object of a class that the module of an owner knows.

    Raises:
        CannotRestoreError: If that is not possible without running code of the class.
    """
    kind = find_class(name if "." in name else f"__main__.{name}", object)
    if not can_be_rebuilt(kind, owners):
        raise CannotRestoreError(f"it contains a {name}, which is not plain data")
    return object.__new__(kind)
