"""Attributes that no state dict holds: what of them changed in a fit, as plain data, and how another process goes on.

A LightningModule counts in `self.kl_weight`, gathers in `self.outputs`, draws from `self.rng`; a callback, a data set
and a sampler do as well. `AttributeTracker` notes what they are when a fit starts, `AttributeTracker.changes` says
what became of them, and `restore_changes` gives it to the same objects in a fresh process.
"""

from __future__ import annotations

import re
import sys
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from lightning_tricks.auto_resume.core.attributes.digests import IGNORED_TYPES, ValueDigest
from lightning_tricks.auto_resume.core.attributes.object_walk import (
    AttributeSlot,
    ObjectWalk,
    SkippedNames,
    can_be_rebuilt,
    is_walkable,
    nothing_skipped,
)
from lightning_tricks.auto_resume.core.attributes.plain_values import (
    MISSING,
    EncodeBudget,
    TooLargeError,
    encode,
    function_name,
    is_mutable,
    is_subclass,
    type_name,
)
from lightning_tricks.auto_resume.core.attributes.restoring import STATE_KEY, restore_changes
from lightning_tricks.auto_resume.core.attributes.unsaved_states import (
    InPlaceOptimizerState,
    UnsavedModuleState,
    get_state,
    has_own_state_dict,
)

MAX_BYTES = 64 * 2**20
_CLOCK_NAME = re.compile(r"time|clock|start|begin|began|since|stamp|tick|tic\b|\bt0|last|prev|_at\b", re.IGNORECASE)
_CLOCKS = (time.time, time.monotonic, time.perf_counter)


class AttributeChanges(TypedDict):
    """What changed.

    Attributes:
        values: Path -> tensors and JSON that `restore_changes` understands.
        lost: Path -> the type that is no plain data, or why the value is not kept.
    """

    values: dict[str, Any]
    lost: dict[str, str]


class AttributeTracker:
    """Follows the attributes of objects from now on.

    Modules are walked with all that they register; their parameters, buffers and modes are no attributes, and what
    aliases them is left alone. Objects of classes in Python are walked by their attributes, also those in lists, tuples
    and dicts: each once, at most 20,000, at most 40 deep, in containers of at most 10,000 entries. Objects of the
    standard library, of torch (but data sets, samplers and distributions), NumPy, Lightning, loggers and the like,
    DataLoaders, optimizers and schedulers are not entered; only whether they are the same objects is seen, or how far
    an iterator is.

    What is kept are numbers, texts, bytes, tensors, arrays, dates, paths, enums, containers of all of these, random
    generators, and what an object with a `state_dict` and a `load_state_dict` says of itself. A value that did not
    change is not kept, so that whoever edits code or arguments between two starts finds the edit in effect. Tensors
    over 256 KiB, arrays over 16 MiB and containers of more than 10,000 entries are compared by identity, size, version
    and a sample: a change in place that the sample does not meet is seen in tensors alone, and not through `data`.

    Args:
        roots: Objects by name, or a function that gives them.
        skipped: Gives the names of attributes to leave out of an object; `"state_dict"` among them leaves out what it
            says of itself.

    Example:
        >>> class Meter:
        ...     def __init__(self):
        ...         self.seen = []
        >>> meter, fresh = Meter(), Meter()
        >>> attributes = Attributes({"meter": meter})
        >>> meter.seen.append(3)
        >>> changes = attributes.changes()
        >>> sorted(changes["values"]), put_back({"meter": fresh}, changes), fresh.seen
        (['meter.seen'], {}, [3])
    """

    def __init__(
        self,
        roots: Callable[[], Mapping[str, Any]] | Mapping[str, Any],
        *,
        skipped: SkippedNames = nothing_skipped,
    ) -> None:
        self._roots, self._skipped = roots, skipped
        self._clocks = [clock() for clock in _CLOCKS]
        walk = self._walk()
        self._snapshots = dict(_snapshots(walk, dict(walk.paths)))
        self._state_digests = {path: _state_digest(value) for path, value in walk.stateful.items()}
        self._owners = {path: type_name(type(owner)) for path, owner in walk.owners.items()}
        self._modules, self._truncated = set(walk.modules), frozenset(walk.truncated)

    def changes(self) -> AttributeChanges:
        """Return what changed since the start."""
        walk = self._walk()
        found = _ChangeCollector(_newly_truncated(walk, self._truncated), set(walk.stateful))
        self._compare_modules(walk, found)
        # what a fresh process has as well, or will have when it comes to a later path
        known = {number: path for number, path in walk.paths.items() if path in self._owners}
        for path, snapshot in _snapshots(walk, known):
            self._compare_attribute(path, walk.slots[path], snapshot, self._encode_budget(path, walk, known), found)
        for path, snapshot in self._snapshots.items():
            owner, name = snapshot.location
            if path not in walk.slots and owner in walk.owners:
                found.add(path, AttributeSlot(None, owner, name, None), {"kind": "deleted"})
        for path, stateful in walk.stateful.items():
            self._compare_state(path, stateful, found)
        return found.within_limit(MAX_BYTES)

    def _walk(self) -> ObjectWalk:
        return ObjectWalk.from_roots(self._roots() if callable(self._roots) else self._roots, self._skipped)

    def _compare_attribute(
        self,
        path: str,
        slot: AttributeSlot,
        snapshot: _AttributeSnapshot,
        budget: EncodeBudget,
        found: _ChangeCollector,
    ) -> None:
        """Note an attribute that changed."""
        before = self._snapshots.get(path)
        kind = type(slot.value)
        if (
            is_subclass(kind, *IGNORED_TYPES)
            or has_own_state_dict(kind)
            or (before is not None and not before.differs(snapshot, slot.value))
        ):
            return
        rebound = before is None or not before.is_value(slot.value)
        alias = slot.target if slot.target != path else ""
        if not alias and rebound and not slot.target:
            alias = snapshot.shared
        if alias:
            found.add(path, slot, {"kind": "same", "path": alias})
        elif type(slot.value) is float and budget.is_clock("", slot.value):
            found.add(path, slot, {"kind": "clock", "value": slot.value})
        else:
            self._encode_change(path, slot, budget, snapshot, found)

    def _encode_change(
        self,
        path: str,
        slot: AttributeSlot,
        budget: EncodeBudget,
        snapshot: _AttributeSnapshot,
        found: _ChangeCollector,
    ) -> None:
        before, is_copied = self._snapshots.get(path), found.is_copied(slot.owner_path)
        try:
            encoded = encode(slot.value, budget)
        except TooLargeError:
            found.lost[path] = _too_large_reason(f"over {MAX_BYTES >> 20} MiB")
            return
        # what an object or a container had at the start stands in a fresh process in the same place
        expected = is_copied or bool(slot.target) or (before and not before.is_complete)
        new = set() if expected else budget.opaque_values - (before.opaque_values if before else set())
        new = {hole for hole in new if ".".join((path, *hole[0])) not in found.stateful}
        new = {hole for hole in new if not can_be_rebuilt(budget.opaque_types.get(hole[1], object), slot.owner)}
        function = function_name(slot.value) if before is None else ""
        if snapshot.is_opaque and (
            path in found.stateful or function
        ):  # a hook of the fit's start makes it in a fresh process as well
            found.add(path, slot, {"kind": "hole", "type": function or type_name(type(slot.value))})
        elif snapshot.is_opaque and not is_copied:
            found.lost[path] = type_name(type(slot.value))
        elif new:
            location, kind = min(new)
            found.lost[".".join((path, *location))] = kind if len(new) == 1 else f"{kind} and {len(new) - 1} more"
        elif not snapshot.is_opaque:
            in_place = before is not None and before.is_value(slot.value)
            found.add(path, slot, encoded, MAX_BYTES - budget.bytes_left, in_place)

    def _encode_budget(self, path: str, walk: ObjectWalk, known: Mapping[int, str]) -> EncodeBudget:
        name = path.rpartition(".")[2]
        return EncodeBudget(
            MAX_BYTES, walk.registered, known, lambda entry, value: self._is_clock(f"{name}.{entry}", value)
        )

    def _is_clock(self, name: str, value: float) -> bool:
        spans = zip(self._clocks, _CLOCKS, strict=True)
        matching = {clock for start, clock in spans if start <= value <= clock()}
        # seconds since 1970 are hardly anything else; seconds since the machine started could be a sum of losses
        return not value.is_integer() and (time.time in matching or (bool(matching) and bool(_CLOCK_NAME.search(name))))

    def _compare_state(self, path: str, stateful: Any, found: _ChangeCollector) -> None:
        state = get_state(stateful)
        if state is MISSING or state == {} or _state_digest(stateful) == self._state_digests.get(path):
            return
        is_large = isinstance(stateful, UnsavedModuleState | InPlaceOptimizerState)  # as the model itself is
        budget = EncodeBudget(sys.maxsize if is_large else MAX_BYTES)
        try:
            encoded = encode(state, budget)
        except TooLargeError:
            found.lost[f"{path}.{STATE_KEY}"] = _too_large_reason(f"over {MAX_BYTES >> 20} MiB")
            return
        if budget.opaque_values:
            found.lost |= {".".join((path, STATE_KEY, *location)): kind for location, kind in budget.opaque_values}
        else:
            size = 0 if is_large else MAX_BYTES - budget.bytes_left
            found.add(f"{path}.{STATE_KEY}", AttributeSlot(stateful, path, STATE_KEY, state), encoded, size)

    def _compare_modules(self, walk: ObjectWalk, found: _ChangeCollector) -> None:
        """Note modules that came and went. One without weights comes again as a copy of one beside it."""
        for path, (parent, name) in walk.modules.items():
            kind = type_name(type(walk.owners[path]))
            if parent not in self._owners or self._owners.get(path) == kind:
                continue
            like = self._sibling_like(walk, parent, walk.owners[path])
            if like and path not in self._owners:
                found.add(path, AttributeSlot(None, parent, name, None), {"kind": "module", "type": kind, "like": like})
                found.copied.append(path)
            else:
                found.lost[path] = f"{kind} that was {'exchanged' if path in self._owners else 'added'} in the fit"
        for path in self._modules - walk.modules.keys():
            parent = path.rpartition(".")[0]
            if parent in walk.owners and path not in walk.owners:
                found.lost[path] = f"{self._owners[path]} that was removed in the fit"

    def _sibling_like(self, walk: ObjectWalk, parent: str, module: Any) -> str:
        if any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
            return ""
        beside = ((name, path) for path, (owner, name) in walk.modules.items() if owner == parent)
        same = (name for name, path in beside if self._owners.get(path) == type_name(type(module)))
        return next(same, "")


def fingerprints(roots: Mapping[str, Any], *, skipped: SkippedNames = nothing_skipped) -> dict[str, int]:
    """Return a digest of each attribute that is the same in every process: path -> 64 bits.

    What is no plain data, and random generators, count by their types; of what is over 1 MiB, and of containers with
    more than 10,000 entries, a sample counts.

    Args:
        roots: Objects by name.
        skipped: Gives the names of attributes to leave out of an object.
    """
    walk = ObjectWalk.from_roots(roots, skipped)
    return {path: int(_digest(slot.value, walk, same_process=False)) for path, slot in walk.slots.items()}


@dataclass
class _AttributeSnapshot:
    """What tells later whether an attribute changed; it keeps no value alive."""

    location: tuple[str, str]
    digest: int
    is_complete: bool
    opaque_values: set[tuple[tuple[str, ...], str]]
    target: str
    shared: str
    run_identity: int
    reference: Any

    @classmethod
    def of(cls, slot: AttributeSlot, walk: ObjectWalk, shared: str) -> _AttributeSnapshot:
        value, digest = slot.value, _digest(slot.value, walk)
        location = slot.owner_path, slot.name
        return cls(
            location,
            int(digest),
            digest.is_complete,
            digest.opaque_values,
            slot.target,
            shared,
            id(value),
            _reference(value),
        )

    @property
    def is_opaque(self) -> bool:
        return any(location == () for location, _ in self.opaque_values) and not self.target

    def is_value(self, value: Any) -> bool:
        return self.run_identity == id(value) and (self.reference is None or self.reference() is value)

    def differs(self, now: _AttributeSnapshot, value: Any) -> bool:
        if self.target or now.target:
            return (self.target, self.digest) != (now.target, now.digest)
        is_other = not self.is_complete or self.shared != now.shared  # it may look the same and be another
        return self.digest != now.digest or (is_other and not self.is_value(value))


def _snapshots(walk: ObjectWalk, known: dict[int, str]) -> Iterator[tuple[str, _AttributeSnapshot]]:
    """Yield path and mark of each attribute, and let `known` know where its value is for those that come later."""
    for path, slot in walk.slots.items():
        mutable = is_mutable(type(slot.value))
        yield path, _AttributeSnapshot.of(slot, walk, known.get(id(slot.value), "") if mutable else "")
        if mutable:
            known.setdefault(id(slot.value), path)


@dataclass
class _ChangeCollector:
    lost: dict[str, str]
    stateful: set[str]  # paths
    values: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    copied: list[str] = field(default_factory=list)  # modules that come again as copies

    def add(self, path: str, slot: AttributeSlot, value: Any, size: int = 0, in_place: bool = False) -> None:
        self.values[path] = {"of": slot.owner_path, "name": slot.name, "value": value, "in_place": in_place}
        self.sizes[path] = size

    def is_copied(self, path: str) -> bool:
        """Whether an object is one of a copied module."""
        return any(path == copy or path.startswith(f"{copy}.") for copy in self.copied)

    def within_limit(self, max_bytes: int) -> AttributeChanges:
        """Return all, without the largest where they are too much."""
        total = sum(self.sizes.values())
        for path in sorted(self.sizes, key=self.sizes.__getitem__, reverse=True):
            if total <= max_bytes:
                break
            total -= self.sizes[path]
            self.lost[path] = _too_large_reason(f"{self.sizes[path] / 2**20:.0f} MiB")
            del self.values[path]
        return {"values": self.values, "lost": self.lost}


def _too_large_reason(size: str) -> str:
    return f"{size}, with all attributes more than {MAX_BYTES >> 20} MiB"


def _digest(value: Any, walk: ObjectWalk, *, same_process: bool = True) -> ValueDigest:
    digest = ValueDigest(walk.registered, same_process, lambda part: is_walkable(type(part)))
    digest.feed(value)
    return digest


def _digest_in_process(state: Any) -> int:
    digest = ValueDigest()
    digest.feed(state)
    return int(digest)


def _reference(value: Any) -> Any:
    try:
        return weakref.ref(value)
    except TypeError:
        return None


def _state_digest(stateful: Any) -> int | None:
    """Return what tells whether a state changed; a module's is its tensors themselves, which stay the same objects."""
    state = stateful.tensors() if is_subclass(type(stateful), UnsavedModuleState) else get_state(stateful)
    return None if state is MISSING else _digest_in_process(state)


def _newly_truncated(walk: ObjectWalk, before: Collection[str]) -> dict[str, str]:
    """Say that there is more now than is looked at; what always was too much may never change."""
    new = [path for path in walk.truncated if path not in before]
    more = f", and {len(new) - 1} more" if new[1:] else ""
    return {new[0]: f"one object too many, or too deep{more}"} if new else {}


__all__ = ["AttributeChanges", "AttributeTracker", "fingerprints", "restore_changes"]
