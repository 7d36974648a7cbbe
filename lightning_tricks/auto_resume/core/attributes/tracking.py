"""Attributes that no state dict holds: what of them changed in a fit, as plain data, and how another process goes on.

A LightningModule counts in `self.kl_weight`, gathers in `self.outputs`, draws from `self.rng`; a callback, a data set
and a sampler do as well. `Attributes` notes what they are when a fit starts, `Attributes.changes` says what became of
them, and `put_back` gives it to the same objects in a fresh process.
"""

from __future__ import annotations

import re
import sys
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from lightning_tricks.auto_resume.core.attributes.digests import IGNORED, Digest
from lightning_tricks.auto_resume.core.attributes.object_walk import (
    Skipped,
    Slot,
    Walk,
    can_be_built,
    is_entered,
    nothing_skipped,
)
from lightning_tricks.auto_resume.core.attributes.plain_values import (
    MISSING,
    Room,
    TooLargeError,
    encode,
    is_a,
    is_mutable,
    name_of,
    name_of_function,
)
from lightning_tricks.auto_resume.core.attributes.restoring import STATE, put_back
from lightning_tricks.auto_resume.core.attributes.state_dicts import HeldModule, HeldOptimizer, is_held, state_of

MOST_BYTES = 64 * 2**20
_NAME_OF_CLOCK = re.compile(r"time|clock|start|begin|began|since|stamp|tick|tic\b|\bt0|last|prev|_at\b", re.IGNORECASE)
_CLOCKS = (time.time, time.monotonic, time.perf_counter)


class Changes(TypedDict):
    """What changed.

    Attributes:
        values: Path -> tensors and JSON that `put_back` understands.
        lost: Path -> the type that is no plain data, or why the value is not kept.
    """

    values: dict[str, Any]
    lost: dict[str, str]


class Attributes:
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
        skipped: Skipped = nothing_skipped,
    ) -> None:
        self._roots, self._skipped = roots, skipped
        self._clocks = [clock() for clock in _CLOCKS]
        walk = self._walk()
        self._marks = dict(_marks(walk, dict(walk.places)))
        self._states = {path: _state_mark(value) for path, value in walk.stateful.items()}
        self._owners = {path: name_of(type(owner)) for path, owner in walk.owners.items()}
        self._modules, self._cut = set(walk.modules), frozenset(walk.cut)

    def changes(self) -> Changes:
        """Return what changed since the start."""
        walk = self._walk()
        found = _Found(_newly_cut(walk, self._cut), set(walk.stateful))
        self._take_modules(walk, found)
        # what a fresh process has as well, or will have when it comes to a later path
        known = {number: path for number, path in walk.places.items() if path in self._owners}
        for path, mark in _marks(walk, known):
            self._take(path, walk.slots[path], mark, self._room(path, walk, known), found)
        for path, mark in self._marks.items():
            owner, name = mark.place
            if path not in walk.slots and owner in walk.owners:
                found.add(path, Slot(None, owner, name, None), {"kind": "deleted"})
        for path, stateful in walk.stateful.items():
            self._take_state(path, stateful, found)
        return found.within(MOST_BYTES)

    def _walk(self) -> Walk:
        return Walk.over(self._roots() if callable(self._roots) else self._roots, self._skipped)

    def _take(self, path: str, slot: Slot, mark: _Mark, room: Room, found: _Found) -> None:
        """Note an attribute that changed."""
        before = self._marks.get(path)
        kind = type(slot.value)
        if is_a(kind, *IGNORED) or is_held(kind) or (before is not None and not before.differs(mark, slot.value)):
            return
        rebound = before is None or not before.is_of(slot.value)
        alias = slot.target if slot.target != path else ""
        if not alias and rebound and not slot.target:
            alias = mark.shared
        if alias:
            found.add(path, slot, {"kind": "same", "path": alias})
        elif type(slot.value) is float and room.is_clock("", slot.value):
            found.add(path, slot, {"kind": "clock", "value": slot.value})
        else:
            self._encode(path, slot, room, mark, found)

    def _encode(self, path: str, slot: Slot, room: Room, mark: _Mark, found: _Found) -> None:
        before, is_copied = self._marks.get(path), found.is_copied(slot.owner_path)
        try:
            encoded = encode(slot.value, room)
        except TooLargeError:
            found.lost[path] = _too_large(f"over {MOST_BYTES >> 20} MiB")
            return
        # what an object or a container had at the start stands in a fresh process in the same place
        had_them = is_copied or bool(slot.target) or (before and not before.whole)
        new = set() if had_them else room.holes - (before.holes if before else set())
        new = {hole for hole in new if ".".join((path, *hole[0])) not in found.stateful}
        new = {hole for hole in new if not can_be_built(room.kinds.get(hole[1], object), slot.owner)}
        function = name_of_function(slot.value) if before is None else ""
        if mark.is_opaque and (
            path in found.stateful or function
        ):  # a hook of the fit's start makes it in a fresh process as well
            found.add(path, slot, {"kind": "hole", "type": function or name_of(type(slot.value))})
        elif mark.is_opaque and not is_copied:
            found.lost[path] = name_of(type(slot.value))
        elif new:
            place, kind = min(new)
            found.lost[".".join((path, *place))] = kind if len(new) == 1 else f"{kind} and {len(new) - 1} more"
        elif not mark.is_opaque:
            in_place = before is not None and before.is_of(slot.value)
            found.add(path, slot, encoded, MOST_BYTES - room.left, in_place)

    def _room(self, path: str, walk: Walk, known: Mapping[int, str]) -> Room:
        name = path.rpartition(".")[2]
        return Room(MOST_BYTES, walk.registered, known, lambda entry, value: self._is_clock(f"{name}.{entry}", value))

    def _is_clock(self, name: str, value: float) -> bool:
        spans = zip(self._clocks, _CLOCKS, strict=True)
        read = {clock for start, clock in spans if start <= value <= clock()}
        # seconds since 1970 are hardly anything else; seconds since the machine started could be a sum of losses
        return not value.is_integer() and (time.time in read or (bool(read) and bool(_NAME_OF_CLOCK.search(name))))

    def _take_state(self, path: str, stateful: Any, found: _Found) -> None:
        state = state_of(stateful)
        if state is MISSING or state == {} or _state_mark(stateful) == self._states.get(path):
            return
        is_large = isinstance(stateful, HeldModule | HeldOptimizer)  # as the model itself is
        room = Room(sys.maxsize if is_large else MOST_BYTES)
        try:
            encoded = encode(state, room)
        except TooLargeError:
            found.lost[f"{path}.{STATE}"] = _too_large(f"over {MOST_BYTES >> 20} MiB")
            return
        if room.holes:
            found.lost |= {".".join((path, STATE, *place)): kind for place, kind in room.holes}
        else:
            size = 0 if is_large else MOST_BYTES - room.left
            found.add(f"{path}.{STATE}", Slot(stateful, path, STATE, state), encoded, size)

    def _take_modules(self, walk: Walk, found: _Found) -> None:
        """Note modules that came and went. One without weights comes again as a copy of one beside it."""
        for path, (parent, name) in walk.modules.items():
            kind = name_of(type(walk.owners[path]))
            if parent not in self._owners or self._owners.get(path) == kind:
                continue
            like = self._like(walk, parent, walk.owners[path])
            if like and path not in self._owners:
                found.add(path, Slot(None, parent, name, None), {"kind": "module", "type": kind, "like": like})
                found.copied.append(path)
            else:
                found.lost[path] = f"{kind} that was {'exchanged' if path in self._owners else 'added'} in the fit"
        for path in self._modules - walk.modules.keys():
            parent = path.rpartition(".")[0]
            if parent in walk.owners and path not in walk.owners:
                found.lost[path] = f"{self._owners[path]} that was removed in the fit"

    def _like(self, walk: Walk, parent: str, module: Any) -> str:
        if any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
            return ""
        beside = ((name, path) for path, (owner, name) in walk.modules.items() if owner == parent)
        same = (name for name, path in beside if self._owners.get(path) == name_of(type(module)))
        return next(same, "")


def fingerprints(roots: Mapping[str, Any], *, skipped: Skipped = nothing_skipped) -> dict[str, int]:
    """Return a digest of each attribute that is the same in every process: path -> 64 bits.

    What is no plain data, and random generators, count by their types; of what is over 1 MiB, and of containers with
    more than 10,000 entries, a sample counts.

    Args:
        roots: Objects by name.
        skipped: Gives the names of attributes to leave out of an object.
    """
    walk = Walk.over(roots, skipped)
    return {path: int(_digest(slot.value, walk, here=False)) for path, slot in walk.slots.items()}


@dataclass
class _Mark:
    """What tells later whether an attribute changed; it keeps no value alive."""

    place: tuple[str, str]
    digest: int
    whole: bool
    holes: set[tuple[tuple[str, ...], str]]
    target: str
    shared: str
    identity: int
    reference: Any

    @classmethod
    def of(cls, slot: Slot, walk: Walk, shared: str) -> _Mark:
        value, digest = slot.value, _digest(slot.value, walk)
        place = slot.owner_path, slot.name
        return cls(place, int(digest), digest.whole, digest.holes, slot.target, shared, id(value), _reference(value))

    @property
    def is_opaque(self) -> bool:
        return any(place == () for place, _ in self.holes) and not self.target

    def is_of(self, value: Any) -> bool:
        return self.identity == id(value) and (self.reference is None or self.reference() is value)

    def differs(self, now: _Mark, value: Any) -> bool:
        if self.target or now.target:
            return (self.target, self.digest) != (now.target, now.digest)
        is_other = not self.whole or self.shared != now.shared  # it may look the same and be another
        return self.digest != now.digest or (is_other and not self.is_of(value))


def _marks(walk: Walk, known: dict[int, str]) -> Iterator[tuple[str, _Mark]]:
    """Yield path and mark of each attribute, and let `known` know where its value is for those that come later."""
    for path, slot in walk.slots.items():
        mutable = is_mutable(type(slot.value))
        yield path, _Mark.of(slot, walk, known.get(id(slot.value), "") if mutable else "")
        if mutable:
            known.setdefault(id(slot.value), path)


@dataclass
class _Found:
    lost: dict[str, str]
    stateful: set[str]  # paths
    values: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    copied: list[str] = field(default_factory=list)  # modules that come again as copies

    def add(self, path: str, slot: Slot, value: Any, size: int = 0, in_place: bool = False) -> None:
        self.values[path] = {"of": slot.owner_path, "name": slot.name, "value": value, "in_place": in_place}
        self.sizes[path] = size

    def is_copied(self, path: str) -> bool:
        """Whether an object is one of a copied module."""
        return any(path == copy or path.startswith(f"{copy}.") for copy in self.copied)

    def within(self, most: int) -> Changes:
        """Return all, without the largest where they are too much."""
        whole = sum(self.sizes.values())
        for path in sorted(self.sizes, key=self.sizes.__getitem__, reverse=True):
            if whole <= most:
                break
            whole -= self.sizes[path]
            self.lost[path] = _too_large(f"{self.sizes[path] / 2**20:.0f} MiB")
            del self.values[path]
        return {"values": self.values, "lost": self.lost}


def _too_large(size: str) -> str:
    return f"{size}, with all attributes more than {MOST_BYTES >> 20} MiB"


def _digest(value: Any, walk: Walk, *, here: bool = True) -> Digest:
    digest = Digest(walk.registered, here, lambda part: is_entered(type(part)))
    digest.feed(value)
    return digest


def _digest_of(state: Any) -> int:
    digest = Digest()
    digest.feed(state)
    return int(digest)


def _reference(value: Any) -> Any:
    try:
        return weakref.ref(value)
    except TypeError:
        return None


def _state_mark(stateful: Any) -> int | None:
    """Return what tells whether a state changed; a module's is its tensors themselves, which stay the same objects."""
    state = stateful.tensors() if is_a(type(stateful), HeldModule) else state_of(stateful)
    return None if state is MISSING else _digest_of(state)


def _newly_cut(walk: Walk, before: Collection[str]) -> dict[str, str]:
    """Say that there is more now than is looked at; what always was too much may never change."""
    new = [path for path in walk.cut if path not in before]
    more = f", and {len(new) - 1} more" if new[1:] else ""
    return {new[0]: f"one object too many, or too deep{more}"} if new else {}


__all__ = ["Attributes", "Changes", "fingerprints", "put_back"]
