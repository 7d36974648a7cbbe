"""Attributes that no state dict holds: what of them changed in a fit, as plain data.

A LightningModule counts in `self.kl_weight`, gathers in `self.outputs`, draws from `self.rng`; a callback, a dataset
and a sampler do so as well. `AttributeTracker` records what they are when a fit starts, `AttributeTracker.changes`
returns what became of them, and `restore_changes` restores that in the same objects of a fresh process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import CellType, ModuleType
from typing import Any, TypedDict
from weakref import ref

from torchmetrics import MetricTracker

from lightning_tricks.auto_resume.core.attributes.attribute_access import (
    IGNORED_TYPES,
    MISSING,
    SCALARS,
    attributes,
    is_subclass,
    type_name,
)
from lightning_tricks.auto_resume.core.attributes.digests import ValueDigest
from lightning_tricks.auto_resume.core.attributes.encoding import (
    MAX_BYTES,
    Encoder,
    Hole,
    SkippedNames,
    TooLargeError,
    has_identity,
    nothing_skipped,
)
from lightning_tricks.auto_resume.core.attributes.object_walk import ObjectWalk
from lightning_tricks.auto_resume.core.attributes.user_code import CALLABLES


class AttributeChanges(TypedDict):
    """The changes of attributes.

    Attributes:
        values: Path -> the change as tensors and JSON, for `restore_changes`.
        lost: Path -> the type that is not plain data, or why the value is not saved.
        unwatched: Path -> the types that cannot be pickled, so that nobody sees whether they change.
    """

    values: dict[str, Any]
    lost: dict[str, str]
    unwatched: dict[str, str]


@dataclass(slots=True)
class _Snapshot:
    """What tells later whether an attribute changed; it keeps no value alive.

    Attributes:
        location: Path of the owner, and name of the attribute.
        digest: Digest of the value.
        is_complete: Whether the digest covers the whole value.
        shared: Path of another attribute with the same value, whose identity matters; empty if there is none.
        run_identity: `id` of the value.
        reference: Weak reference to the value; None where its type allows none.
        holes: Path of what is not plain data in the value -> digest of it.
        unwatched: Types that cannot be pickled.
    """

    location: tuple[str, str]
    digest: Any
    is_complete: bool = True
    shared: str = ""
    run_identity: int = 0
    reference: Any = None
    holes: Mapping[str, int] = field(default_factory=dict)
    unwatched: str = ""

    def differs(self, now: _Snapshot, value: Any) -> bool:
        """Whether an attribute changed, which now has the given snapshot and value."""
        if self.is_complete and self.shared == now.shared:
            return bool(self.digest != now.digest)
        is_same = self.run_identity == id(value) and (self.reference is None or self.reference() is value)
        return bool(self.digest != now.digest) or not is_same  # it may look the same and be another


class AttributeTracker:
    """Tracks the attributes of objects from its creation on.

    Modules are walked with all that they register; their parameters, buffers and modes are not attributes, and what
    aliases them is left alone. Of the user's code, attributes of classes count, and the variables of closures and
    modules that methods and functions name.

    What is plain is saved: all that `VALUE_KINDS` lists, containers of it, random generators, objects of classes in
    Python with their attributes, modules that nobody else saves, and what has a `state_dict` and a `load_state_dict`.
    Of all else a digest of its pickle is kept, and it is named where that moved. A value that was the same at all calls
    is not saved, so that an edit of code or arguments between two starts takes effect.

    Args:
        roots: Objects by name, or a function that returns them.
        skipped: Returns the names of attributes to leave out of an object; `"state_dict"` among them leaves out its
            state.
        saves_unchanged: Whether to save an attribute's value that did not change as well.
        known: Returns objects that are saved elsewhere, by path.
        owns_memory: Whether memory that processes share is this process's; else it is left to the other one.

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
        known: Callable[[], Mapping[str, Any]] = dict,
        owns_memory: bool = True,
    ) -> None:
        self._roots, self._skipped, self._saves_unchanged = roots, skipped, saves_unchanged
        self._known, self._owns_memory = known, owns_memory
        walk = self._walk()
        self._snapshots = self._take_snapshots(walk, with_holes=True)
        self._kinds = {path: type_name(type(owner)) for path, owner in walk.owners.items()}
        self._modules = set(walk.modules)
        self._after_hooks: dict[str, _Snapshot] | None = None
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
        found = AttributeChanges(values={}, lost={}, unwatched={})
        copied = self._compare_modules(walk, found)
        is_first = after_hooks and self._after_hooks is None
        snapshots = self._take_snapshots(walk, with_holes=is_first)
        if is_first:
            self._after_hooks = snapshots
        found["unwatched"] = {path: now.unwatched for path, now in snapshots.items() if now.unwatched}
        changed = {path: now for path, now in snapshots.items() if self._is_saved(path, now, walk.slots[path].value)}
        encoder, sizes = self._encoder(walk, changed), dict[str, int]()
        for path, now in changed.items():
            value = walk.slots[path].value
            encoder.holes, encoder.bytes_left = {}, MAX_BYTES
            try:
                encoded = encoder.encode(value, path)
            except TooLargeError:
                found["lost"][path] = _too_large(f"over {MAX_BYTES >> 20} MiB")
                continue
            is_copied = any(path.startswith(f"{copy}.") for copy in copied)
            lost, by_hooks = ({}, {}) if is_copied else self._new_holes(path, encoder)
            found["lost"] |= lost
            is_hole = isinstance(encoded, dict) and encoded["kind"] == "hole"
            if not lost and not (now.unwatched and is_hole):  # else what opened it opens it again
                owner, name = now.location
                found["values"][path] = {"of": owner, "name": name, "value": encoded, **by_hooks}
                sizes[path] = int(MAX_BYTES - encoder.bytes_left)
        self._compare_deleted(walk, found)
        _leave_out_the_largest(found, sizes)
        return found

    def _walk(self) -> ObjectWalk:
        roots = self._roots() if callable(self._roots) else self._roots
        return ObjectWalk.from_roots(roots, self._skipped, with_code=True, known=self._known())

    def _is_saved(self, path: str, now: _Snapshot, value: Any) -> bool:
        """Whether an attribute changed, was changed and changed back, or is saved in any case."""
        before = self._snapshots.get(path)
        if before is None or before.differs(now, value):
            self._seen_changed[path] = now.location
        return path in self._seen_changed or self._saves_unchanged(value)

    def _encoder(self, walk: ObjectWalk, changed: Collection[str] = ()) -> Encoder:
        """Return an encoder that knows where a fresh process has the values of attributes that did not change."""
        places = dict[int, str]()
        for path, slot in walk.slots.items():
            if path not in changed and has_identity(type(slot.value)):
                places.setdefault(id(slot.value), path)
        return Encoder(walk.references, self._skipped, places=places, owns_memory=self._owns_memory)

    def _take_snapshots(self, walk: ObjectWalk, *, with_holes: bool) -> dict[str, _Snapshot]:
        """Return path -> snapshot of each attribute."""
        found, encoder = dict[str, _Snapshot](), self._encoder(walk)
        places = encoder.places or {}
        for path, slot in walk.slots.items():
            value, kind, location = slot.value, type(slot.value), (slot.owner_path, slot.name)
            if kind in SCALARS:
                found[path] = _Snapshot(
                    location, (kind, value.hex() if kind is float else value), run_identity=id(value)
                )
            elif not is_subclass(kind, *IGNORED_TYPES):
                digest, shared = ValueDigest.of(value, encoder), places.get(id(value), path)
                found[path] = _Snapshot(
                    location,
                    int(digest),
                    digest.is_complete,
                    "" if shared == path else shared,
                    id(value),
                    _weak_reference(value),
                    self._holes(walk, path) if with_holes and not digest.is_plain else {},
                    " and ".join(dict.fromkeys(digest.unwatched)),
                )
        return found

    def _holes(self, walk: ObjectWalk, path: str) -> dict[str, int]:
        """Return digests of what is not plain data in the value of an attribute; empty if that is too large."""
        encoder = self._encoder(walk)
        with suppress(TooLargeError):
            encoder.encode(walk.slots[path].value, path)
        return {place: self._digest(encoder, hole) for place, hole in encoder.holes.items()}

    def _digest(self, encoder: Encoder, hole: Hole) -> int:
        """Return a digest of what is not plain data; of a function it is its name, as what it holds is saved."""
        return (
            hash(hole.name) if is_subclass(type(hole.value), *CALLABLES) else int(ValueDigest.of(hole.value, encoder))
        )

    def _new_holes(self, path: str, encoder: Encoder) -> tuple[dict[str, str], dict[str, bool]]:
        """Return what is not plain data in the value of an attribute, and is not what a fresh process has there.

        Returns:
            Path -> type; and `{"by_hooks": True}` if hooks make some of it again.
        """
        before, made = self._snapshots.get(path), (self._after_hooks or {}).get(path)
        if not encoder.holes or (before is not None and not before.is_complete):
            return {}, {}
        digests = {place: self._digest(encoder, hole) for place, hole in encoder.holes.items()}
        new = {place for place, digest in digests.items() if before is None or before.holes.get(place) != digest}
        if before is None:  # a function is likely to be set again by a hook at the start of the fit
            new = {place for place in new if not is_subclass(type(encoder.holes[place].value), *CALLABLES)}
        by_hooks = {place for place in new if made is not None and made.holes.get(place) == digests[place]}
        unwatched = {place for place in new if ValueDigest.of(encoder.holes[place].value, encoder).unwatched}
        lost = {place: encoder.holes[place].name for place in new - by_hooks - unwatched}
        return lost, {"by_hooks": True} if by_hooks else {}

    def _compare_deleted(self, walk: ObjectWalk, found: AttributeChanges) -> None:
        initial = {path: snapshot.location for path, snapshot in self._snapshots.items()}
        for path, (owner, name) in {**self._seen_changed, **initial}.items():
            if path in walk.slots or owner not in walk.owners:
                continue
            held = walk.owners[owner]
            is_variable = is_subclass(type(held), type) or type(held) in (ModuleType, CellType)
            value = (vars(held) if is_subclass(type(held), type) else dict(attributes(held))).get(name, MISSING)
            if is_variable and value is not MISSING:  # a function or a class now
                found["lost"][path] = type_name(type(value))
            else:
                found["values"][path] = {"of": owner, "name": name, "value": {"kind": "deleted"}}

    def _compare_modules(self, walk: ObjectWalk, found: AttributeChanges) -> list[str]:
        """Find modules that were added and removed.

        Returns:
            Paths of metrics that a MetricTracker added as copies, which `restore_tracker_steps` makes again: what is
            not plain data in them comes from this process.
        """
        copied, lost = list[str](), found["lost"]
        for path, (parent, _) in walk.modules.items():
            kind = type_name(type(walk.owners[path]))
            if parent not in self._kinds or self._kinds.get(path) == kind:
                continue
            if is_subclass(type(walk.owners[parent]), MetricTracker) and path not in self._kinds:
                copied.append(path)
            else:
                lost[path] = f"{kind} that was {'replaced' if path in self._kinds else 'added'} in the fit"
        for path in self._modules - walk.modules.keys():
            if path.rpartition(".")[0] in walk.owners and path not in walk.owners:
                lost[path] = f"{self._kinds[path]} that was removed in the fit"
        return copied


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


def _leave_out_the_largest(found: AttributeChanges, sizes: Mapping[str, int]) -> None:
    """Move the largest changes to those that are lost, as long as all exceed the limit together."""
    total = sum(sizes.values())
    for path in sorted(sizes, key=sizes.__getitem__, reverse=True):
        if total <= MAX_BYTES:
            return
        total -= sizes[path]
        found["lost"][path] = _too_large(f"{sizes[path] / 2**20:.0f} MiB")
        del found["values"][path]


def _too_large(size: str) -> str:
    return f"{size}, with all attributes more than {MAX_BYTES >> 20} MiB"


def _weak_reference(value: Any) -> Any:
    try:
        return ref(value)
    except TypeError:
        return None
