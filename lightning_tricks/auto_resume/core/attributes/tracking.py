"""Attributes that no state dict holds: what of them changed in a fit, as plain data.

A LightningModule counts in `self.kl_weight`, gathers in `self.outputs`, draws from `self.rng`; a callback, a dataset
and a sampler do so as well. `AttributeTracker` records what they are when a fit starts, `AttributeTracker.changes`
returns what became of them, and `restore_changes` restores that in the same objects of a fresh process.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypedDict

from torchmetrics import MetricTracker

from lightning_tricks.auto_resume.core.attributes.attribute_access import (
    MISSING,
    SCALARS,
    attributes,
    function_name,
    is_subclass,
    type_name,
)
from lightning_tricks.auto_resume.core.attributes.digests import IGNORED_TYPES, MAX_BYTES, ValueDigest, content_digest
from lightning_tricks.auto_resume.core.attributes.encoding import EncodeBudget, TooLargeError, encode, is_clock_reading
from lightning_tricks.auto_resume.core.attributes.object_walk import (
    STATE_KEY,
    InPlaceOptimizerState,
    ObjectWalk,
    SkippedNames,
    UnsavedModuleState,
    get_state,
    has_own_state_dict,
    nothing_skipped,
)
from lightning_tricks.auto_resume.core.attributes.user_code import can_be_rebuilt, is_walkable
from lightning_tricks.auto_resume.core.attributes.value_kinds import is_mutable, kind_of

Hole = tuple[tuple[str, ...], str]  # the keys that lead to what is not plain data, and its type


class AttributeChanges(TypedDict):
    """The changes of attributes.

    Attributes:
        values: Path -> the change as tensors and JSON, for `restore_changes`.
        lost: Path -> the type that is not plain data, or why the value is not saved.
    """

    values: dict[str, Any]
    lost: dict[str, str]


@dataclass(slots=True)
class _Snapshot:
    """What tells later whether an attribute changed; it keeps no value alive.

    Attributes:
        location: Path of the owner, and name of the attribute.
        digest: Digest of the value.
        is_complete: Whether the digest covers the whole value.
        is_plain: Whether all of the value is plain data, or objects that are walked.
        target: Path of the object that the attribute holds, if that is walked.
        shared: Path of an attribute with the same mutable value; empty if there is none.
        run_identity: `id` of the value.
        reference: Weak reference to the value; None where its type allows none.
        contents: Location and type of each part of the value that is not plain data -> a digest of it, where known.
    """

    location: tuple[str, str]
    digest: Any
    is_complete: bool = True
    is_plain: bool = True
    target: str = ""
    shared: str = ""
    run_identity: int = 0
    reference: Any = None
    contents: dict[Hole, int] = field(default_factory=dict)

    def is_value(self, value: Any) -> bool:
        """Whether a value is the same object as at the snapshot."""
        return self.run_identity == id(value) and (self.reference is None or self.reference() is value)

    def differs(self, now: _Snapshot, value: Any) -> bool:
        """Whether an attribute changed, which now has the given snapshot and value."""
        if self.target or now.target:
            return (self.target, self.digest) != (now.target, now.digest)
        is_other = not self.is_complete or self.shared != now.shared  # it may look the same and be another
        return bool(self.digest != now.digest) or (is_other and not self.is_value(value))


def _take_snapshots(walk: ObjectWalk, known: dict[int, str]) -> dict[str, _Snapshot]:
    """Return path -> snapshot of each attribute.

    Args:
        walk: The walk that found the attributes.
        known: `id` of each value -> path under which it was seen first; the attributes are added to it.
    """
    found = dict[str, _Snapshot]()
    for path, slot in walk.slots.items():
        value, kind, location = slot.value, type(slot.value), (slot.owner_path, slot.name)
        if kind in SCALARS:
            found[path] = _Snapshot(location, (kind, value.hex() if kind is float else value), run_identity=id(value))
            continue
        digest = walk.digest(value)
        shared = known.setdefault(id(value), path) if is_mutable(kind) else path
        try:
            reference: Any = weakref.ref(value)
        except TypeError:
            reference = None
        found[path] = _Snapshot(
            location,
            int(digest),
            digest.is_complete,
            digest.is_plain,
            slot.target,
            "" if shared == path else shared,
            id(value),
            reference,
        )
    return found


def _contents(holes: Mapping[Hole, Any]) -> dict[Hole, int]:
    """Return digests of what is not plain data; objects that are walked are compared by their attributes."""
    return {hole: 0 if is_walkable(type(value)) else content_digest(value) for hole, value in holes.items()}


def _state_digest(stateful: Any) -> int | None:
    """Return a digest of a state, None without one; of a module, the identities of its tensors count, and samples."""
    state = stateful.tensors() if is_subclass(type(stateful), UnsavedModuleState) else get_state(stateful)
    return None if state is MISSING else int(ValueDigest.of(state))


@dataclass
class _FoundChanges:
    """The changes of attributes as they are found.

    Attributes:
        walk: A walk over the objects as they are now.
        lost: Path -> why a change cannot be saved.
        known: `id` of values that a fresh process has, or has restored before it comes to a later path -> path.
        values: Path -> change.
        sizes: Path -> size of the change in bytes.
        copied: Paths of modules that are restored as copies of others.
        places: `id` of objects and of entries that were encoded -> path.
    """

    walk: ObjectWalk
    lost: dict[str, str]
    known: dict[int, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    copied: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.places, self._taken = dict(self.walk.paths), {*self.walk.paths.values()}
        self._memory = list[tuple[int, int]]()

    def add(
        self, path: str, location: tuple[str, str], value: Any, size: int = 0, in_place: bool = False, **by_hooks: bool
    ) -> None:
        """Add the new value of an attribute, encoded as plain data, with holes that hooks fill if `by_hooks=True`."""
        owner, name = location
        self.values[path] = {"of": owner, "name": name, "value": value, "in_place": in_place, **by_hooks}
        self.sizes[path] = size

    def budget(self, path: str) -> EncodeBudget:
        """Return the budget of an attribute's value."""
        return EncodeBudget(MAX_BYTES, self.walk.registered, self.known, path, self.places, self._taken, self._memory)

    def contents(self, path: str) -> dict[Hole, int]:
        """Return digests of what is not plain data in the value of an attribute; empty if that is too large."""
        budget = self.budget(path)
        with suppress(TooLargeError):
            encode(self.walk.slots[path].value, budget)
        return _contents(budget.opaque_values)

    def encode(self, path: str, value: Any, budget: EncodeBudget) -> Any:
        """Return an encoded value; `MISSING`, and why it cannot be saved in `lost`, if it is too large."""
        try:
            return encode(value, budget)
        except TooLargeError:
            self.lost[path] = _too_large(f"over {MAX_BYTES >> 20} MiB")
            return MISSING

    def is_copied(self, path: str) -> bool:
        """Whether an object belongs to a module that is restored as a copy."""
        return any(path == copy or path.startswith(f"{copy}.") for copy in self.copied)

    def within_limit(self) -> AttributeChanges:
        """Return the changes, without the largest ones as long as they exceed the limit together."""
        total = sum(self.sizes.values())
        for path in sorted(self.sizes, key=self.sizes.__getitem__, reverse=True):
            if total <= MAX_BYTES:
                break
            total -= self.sizes[path]
            self.lost[path] = _too_large(f"{self.sizes[path] / 2**20:.0f} MiB")
            del self.values[path]
        return {"values": self.values, "lost": self.lost}


def _too_large(size: str) -> str:
    return f"{size}, with all attributes more than {MAX_BYTES >> 20} MiB"


class AttributeTracker:
    """Tracks the attributes of objects from its creation on.

    Modules are walked with all that they register; their parameters, buffers and modes are not attributes, and what
    aliases them is left alone. Of modules that no other one registers, modes and `requires_grad` count as attributes,
    and the tensors as a state. Objects of classes in Python are walked by their attributes, also those in lists, tuples
    and dicts: each once, at most 20,000, at most 40 deep, in containers of at most 10,000 entries. Objects of the
    standard library, of torch (except datasets, samplers and distributions), NumPy, Lightning, loggers and the like,
    DataLoaders, optimizers and schedulers are not walked: of them only the identity is compared, and the position of
    an iterator. What functions of the user's code keep values in is: bound objects, closures, default arguments, and
    the global variables that they name.

    Saved is all that `VALUE_KINDS` lists: numbers, strings, bytes, tensors, arrays, dates, paths, enums, containers of
    all of these, random generators, and the state of an object with a `state_dict` and a `load_state_dict`. A value
    that was the same at all calls is not saved, so that an edit of code or arguments between two starts takes effect.
    How values are compared says `ValueDigest`.

    Args:
        roots: Objects by name, or a function that returns them.
        skipped: Returns the names of attributes to leave out of an object; `"state_dict"` among them leaves out its
            state.
        saves_unchanged: Whether to save an attribute's value that did not change as well.

    Examples:
        >>> from lightning_tricks.auto_resume.core.attributes.restoring import restore_changes
        >>> class Meter:
        ...     def __init__(self):
        ...         self.seen = []
        >>> meter, fresh = Meter(), Meter()
        >>> tracker = AttributeTracker({"meter": meter})
        >>> meter.seen.append(3)
        >>> changes = tracker.changes()
        >>> sorted(changes["values"]), restore_changes({"meter": fresh}, changes), fresh.seen
        (['meter.seen'], {}, [3])
    """

    def __init__(
        self,
        roots: Callable[[], Mapping[str, Any]] | Mapping[str, Any],
        *,
        skipped: SkippedNames = nothing_skipped,
        saves_unchanged: Callable[[Any], bool] = lambda value: False,
    ) -> None:
        self._roots, self._skipped, self._saves_unchanged = roots, skipped, saves_unchanged
        walk = self._walk()
        self._snapshots = _take_snapshots(walk, dict(walk.paths))
        for path, snapshot in self._snapshots.items():
            if not snapshot.is_plain:
                snapshot.contents = _FoundChanges(walk, {}, dict(walk.references)).contents(path)
        self._state_digests = {path: _state_digest(value) for path, value in walk.stateful.items()}
        self._owners = {path: type_name(type(owner)) for path, owner in walk.owners.items()}
        self._modules, self._truncated = set(walk.modules), frozenset(walk.truncated)
        self._made_by_hooks: dict[str, _Snapshot] | None = None
        self._seen_changed = dict[str, tuple[str, str]]()  # path -> path of the owner, and name

    def note(self, changes: Mapping[str, Any]) -> None:
        """Count the `changes` of another process, which are restored here, as changes of this one."""
        for path, change in changes["values"].items():
            if path not in self._modules:
                self._seen_changed[path] = change["of"], change["name"]

    def changes(self, *, after_hooks: bool = False) -> AttributeChanges:
        """Return the attributes that differ from when the tracker was created, or did at an earlier call.

        Args:
            after_hooks: Whether just the hooks were called that a resumed fit calls again before attributes are
                restored. What is not plain data now is expected there as well, where it stays as it is at the first
                such call.
        """
        walk = self._walk()
        found = _FoundChanges(walk, _newly_truncated(walk, self._truncated))
        self._compare_modules(found)
        self._forget_exchanged(walk)
        known = self._owners.keys()
        found.known |= {number: path for number, path in walk.paths.items() if path in known}
        found.known |= {number: path for number, path in walk.registered.items() if path.rpartition(".")[0] in known}
        snapshots = _take_snapshots(walk, found.known)
        if after_hooks and self._made_by_hooks is None:
            self._made_by_hooks = {path: now for path, now in snapshots.items() if now.target or not now.is_plain}
            for path, now in self._made_by_hooks.items():
                now.contents = _FoundChanges(walk, {}, found.known).contents(path)
        for path, snapshot in snapshots.items():
            self._compare_attribute(path, snapshot, found)
        self._compare_deleted(found)
        for path in walk.stateful:
            self._compare_state(path, found)
        return found.within_limit()

    def _forget_exchanged(self, walk: ObjectWalk) -> None:
        """Forget the objects whose place others of another class have taken: all of these is saved."""
        for path, owner in walk.owners.items():
            if path in self._owners and path not in walk.modules and self._owners[path] != type_name(type(owner)):
                del self._owners[path]
                self._state_digests.pop(path, None)
                others = {other: kept for other, kept in self._snapshots.items() if kept.location[0] != path}
                self._snapshots = others

    def _walk(self) -> ObjectWalk:
        roots = self._roots() if callable(self._roots) else self._roots
        return ObjectWalk.from_roots(roots, self._skipped, with_code=True)

    def _compare_attribute(self, path: str, now: _Snapshot, found: _FoundChanges) -> None:
        """Add an attribute to the changes if it changed, or was changed and changed back."""
        before, slot = self._snapshots.get(path), found.walk.slots[path]
        value, kind = slot.value, type(slot.value)
        if is_subclass(kind, *IGNORED_TYPES) or has_own_state_dict(kind):
            return
        if before is None or before.differs(now, value):
            self._seen_changed[path] = now.location
        elif path not in self._seen_changed and not self._saves_unchanged(value):
            return
        elif slot.target == path or not (slot.target or kind in SCALARS or kind_of(value)):
            found.add(path, now.location, {"kind": "initial"})  # an object that a fresh process has as well
            return
        is_rebound = before is None or not before.is_value(value)
        alias = now.shared if is_rebound and not slot.target else slot.target
        if alias and alias != path:
            found.add(path, now.location, {"kind": "same", "path": alias})
        elif kind is float and is_clock_reading(value):
            found.add(path, now.location, {"kind": "clock", "value": value})
        else:
            self._encode_change(path, now, found)

    def _encode_change(self, path: str, now: _Snapshot, found: _FoundChanges) -> None:
        before, slot, budget = self._snapshots.get(path), found.walk.slots[path], found.budget(path)
        is_copied, made = found.is_copied(slot.owner_path), (self._made_by_hooks or {}).get(path)
        encoded = found.encode(path, slot.value, budget)
        if encoded is MISSING:
            return
        holes, contents = budget.opaque_values, _contents(budget.opaque_values)
        is_opaque = not slot.target and any(not location for location, _ in holes)
        # holes are filled with what a fresh process has in the same place: only a new one is a loss
        is_expected = is_copied or bool(slot.target) or (before and not before.is_complete)
        kept = before.contents.items() & contents.items() if before else ()
        new = set() if is_expected else holes.keys() - {hole for hole, _ in kept}
        by_hooks = {hole for hole in new if made and made.contents.get(hole) == contents[hole]}
        new = {hole for hole in new - by_hooks if ".".join((path, *hole[0])) not in found.walk.stateful}
        new = {hole for hole in new if not can_be_rebuilt(type(holes[hole]), slot.owner)}
        filled_by_hooks = {"by_hooks": True} if by_hooks else {}
        function = function_name(slot.value) if before is None else ""
        # a function or a stateful object is likely to be set again by a hook at the start of the fit
        if is_opaque and (path in found.walk.stateful or function or (made and made.digest == now.digest)):
            hole = {"kind": "hole", "type": function or type_name(type(slot.value))}
            found.add(path, now.location, hole, **filled_by_hooks)
        elif is_opaque and not is_copied:
            found.lost[path] = next(name for location, name in holes if not location)
        elif new:
            locations, kinds = zip(*sorted(new), strict=True)
            found.lost[".".join((path, *locations[0]))] = f"{kinds[0]}{' and others' if kinds[1:] else ''}"
        elif not is_opaque:
            in_place = before is not None and before.is_value(slot.value)
            found.add(path, now.location, encoded, MAX_BYTES - budget.bytes_left, in_place, **filled_by_hooks)

    def _compare_deleted(self, found: _FoundChanges) -> None:
        walk, initial = found.walk, {path: snapshot.location for path, snapshot in self._snapshots.items()}
        for path, (owner, name) in {**self._seen_changed, **initial}.items():
            if path in walk.slots or owner not in walk.owners or name == STATE_KEY:
                continue
            replaced = _replaced_variable(walk.owners[owner], name)
            if replaced is MISSING:
                found.add(path, (owner, name), {"kind": "deleted"})
            else:
                found.lost[path] = type_name(type(replaced))

    def _compare_state(self, path: str, found: _FoundChanges) -> None:
        stateful, state_path = found.walk.stateful[path], f"{path}.{STATE_KEY}"
        state = get_state(stateful)
        if state is MISSING:
            return
        if state != {} and _state_digest(stateful) != self._state_digests.get(path):
            self._seen_changed[state_path] = path, STATE_KEY
        elif state_path not in self._seen_changed:
            return
        is_large = is_subclass(type(stateful), UnsavedModuleState, InPlaceOptimizerState)  # as the model itself is
        budget = EncodeBudget(sys.maxsize if is_large else MAX_BYTES)
        encoded = found.encode(state_path, state, budget)
        if budget.opaque_values:
            found.lost |= {".".join((path, STATE_KEY, *location)): kind for location, kind in budget.opaque_values}
        elif encoded is not MISSING:
            found.add(state_path, (path, STATE_KEY), encoded, 0 if is_large else MAX_BYTES - budget.bytes_left)

    def _compare_modules(self, found: _FoundChanges) -> None:
        """Find modules that were added and removed.

        A metric that a MetricTracker added is made as a copy: what is not plain data in it comes from this process.
        """
        walk = found.walk
        for path, (parent, _) in walk.modules.items():
            kind = type_name(type(walk.owners[path]))
            if parent not in self._owners or self._owners.get(path) == kind:
                continue
            if is_subclass(type(walk.owners[parent]), MetricTracker) and path not in self._owners:
                found.copied.append(path)  # `restore_tracker_steps` makes it again
            else:
                found.lost[path] = f"{kind} that was {'replaced' if path in self._owners else 'added'} in the fit"
        for path in self._modules - walk.modules.keys():
            if path.rpartition(".")[0] in walk.owners and path not in walk.owners:
                found.lost[path] = f"{self._owners[path]} that was removed in the fit"


def all_values(roots: Mapping[str, Any], *, skipped: SkippedNames = nothing_skipped) -> AttributeChanges:
    """Return the values of all attributes of objects, as `AttributeTracker.changes` does if all of them changed."""
    present: dict[str, Any] = {}
    tracker = AttributeTracker(lambda: present, skipped=skipped)
    present.update(roots)
    return tracker.changes()


def summarized(lost: Mapping[str, str]) -> dict[str, str]:
    """Return what is lost without what lies inside of it, and with one name for all entries of a container."""
    found = dict[str, str]()
    for path, why in lost.items():
        parts = path.split(".")
        if not any(".".join(parts[:length]) in lost for length in range(1, len(parts))):
            found.setdefault(".".join("*" if part.isdecimal() else part for part in parts), why)
    return found


def _replaced_variable(owner: Any, name: str) -> Any:
    """Return the value that a class, a module or a closure has under a name that is no longer tracked."""
    if is_subclass(type(owner), type):
        return vars(owner).get(name, MISSING)
    is_variable = type(owner) in (types.ModuleType, types.CellType)
    return dict(attributes(owner)).get(name, MISSING) if is_variable else MISSING


def _newly_truncated(walk: ObjectWalk, before: Collection[str]) -> dict[str, str]:
    """Report objects beyond the bounds of the walk; those that were beyond them before may never change."""
    new = [path for path in walk.truncated if path not in before]
    more = f", and {len(new) - 1} more" if new[1:] else ""
    return {new[0]: f"an object beyond the limits on the number and depth of objects{more}"} if new else {}
