"""Attributes that no state dict holds: what of them changed in a fit, as plain data, and how another process goes on.

A LightningModule counts in `self.kl_weight`, gathers in `self.outputs`, draws from `self.rng`; a callback, a data set
and a sampler do as well. `Attributes` notes what they are when a fit starts, `Attributes.changes` says what became of
them, and `put_back` gives it to the same objects in a fresh process.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, TypedDict

from torch import nn

from lightning_tricks.auto_resume.digests import IGNORED, Digest
from lightning_tricks.auto_resume.object_walk import (
    Slot,
    Walk,
    can_be_built,
    delete_attribute,
    is_entered,
    set_attribute,
)
from lightning_tricks.auto_resume.plain_values import (
    MISSING,
    CannotRestoreError,
    Room,
    There,
    TooLargeError,
    class_named,
    decode,
    encode,
    is_a,
    is_mutable,
    name_of,
    replace_content,
)

MOST_BYTES = 64 * 2**20
_STATE = "state_dict()"
_CLOCKS = (time.time, time.monotonic, time.perf_counter)

Skipped = Callable[[Any], Collection[str]]


class Changes(TypedDict):
    """What changed.

    Attributes:
        values: Path -> tensors and JSON that `put_back` understands.
        lost: Path -> the type that is no plain data, or why the value is not kept.
    """

    values: dict[str, Any]
    lost: dict[str, str]


def nothing_skipped(_: Any) -> Collection[str]:
    """Leave no attribute out."""
    return ()


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
        self._modules = set(walk.modules)

    def changes(self) -> Changes:
        """Return what changed since the start."""
        walk = self._walk()
        found = _Found(dict.fromkeys(walk.cut, "it is one object too many, or lies too deep"))
        self._take_modules(walk, found)
        # what a fresh process has as well, or will have when it comes to a later path
        known = {number: path for number, path in walk.places.items() if path in self._owners}
        for path, mark in _marks(walk, known):
            self._take(path, walk.slots[path], mark, Room(MOST_BYTES, walk.registered, known), found)
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
        if is_a(type(slot.value), *IGNORED) or (before is not None and not before.differs(mark, slot.value)):
            return
        rebound = before is None or not before.is_of(slot.value)
        alias = slot.target if slot.target != path else ""
        if not alias and rebound and not slot.target:
            alias = mark.shared
        if alias:
            found.add(path, slot, {"kind": "same", "path": alias})
        elif type(slot.value) is float and self._is_clock(slot.value):
            found.add(path, slot, {"kind": "clock", "value": slot.value})
        else:
            self._encode(path, slot, room, mark, found)

    def _encode(self, path: str, slot: Slot, room: Room, mark: _Mark, found: _Found) -> None:
        before, is_copied = self._marks.get(path), any(slot.owner_path.startswith(copy) for copy in found.copied)
        try:
            encoded = encode(slot.value, room)
        except TooLargeError:
            found.lost[path] = _too_large(f"over {MOST_BYTES >> 20} MiB")
            return
        # what an object or a container had at the start stands in a fresh process in the same place
        had_them = is_copied or bool(slot.target) or (before and not before.whole)
        new = set() if had_them else room.holes - (before.holes if before else set())
        new = {hole for hole in new if not can_be_built(room.kinds.get(hole[1], object), slot.owner)}
        if mark.is_opaque and not is_copied:
            found.lost[path] = name_of(type(slot.value))
        elif new:
            place, kind = min(new)
            found.lost[".".join((path, *place))] = kind if len(new) == 1 else f"{kind} and {len(new) - 1} more"
        elif not mark.is_opaque:
            in_place = before is not None and before.is_of(slot.value)
            found.add(path, slot, encoded, MOST_BYTES - room.left, in_place)

    def _is_clock(self, value: float) -> bool:
        spans = zip(self._clocks, _CLOCKS, strict=True)
        return not value.is_integer() and any(start <= value <= clock() for start, clock in spans)

    def _take_state(self, path: str, stateful: Any, found: _Found) -> None:
        state = _state_of(stateful)
        if state is MISSING or _digest_of(state) == self._states.get(path):
            return
        room = Room(MOST_BYTES)
        try:
            encoded = encode(state, room)
        except TooLargeError:
            found.lost[f"{path}.{_STATE}"] = _too_large(f"over {MOST_BYTES >> 20} MiB")
            return
        if room.holes:
            found.lost |= {".".join((path, _STATE, *place)): kind for place, kind in room.holes}
        else:
            found.add(f"{path}.{_STATE}", Slot(stateful, path, _STATE, state), encoded, MOST_BYTES - room.left)

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


def put_back(
    roots: Mapping[str, Any], changes: Mapping[str, Any], *, skipped: Skipped = nothing_skipped
) -> dict[str, str]:
    """Give objects the attributes that others had in another process.

    What changed in place there changes in place here, as far as size and type allow; what was set there is set here,
    and attributes that shared a value share it again, also with what lies in a container. Two containers that share a
    part which is no attribute do not. Floats that were
    readings of a clock are set only where the object has no such attribute: a timer of another process is not this
    one's. Nothing of the user's code is called but `load_state_dict`.

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
        if change["name"] != _STATE and _kind(change) not in later:
            n_built = walk.built
            _attempt(_restore, path, change, walk, failed)
            walk = Walk.over(roots, skipped) if walk.built > n_built else walk
    for path, change in values.items():
        if _kind(change) == "same":
            _attempt(_share, path, change, walk, failed)
    for path, change in values.items():
        if change["name"] == _STATE:
            _attempt(_load, path, change, walk, failed)
    return failed


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
    values: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    copied: list[str] = field(default_factory=list)  # modules that come again as copies

    def add(self, path: str, slot: Slot, value: Any, size: int = 0, in_place: bool = False) -> None:
        self.values[path] = {"of": slot.owner_path, "name": slot.name, "value": value, "in_place": in_place}
        self.sizes[path] = size

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


def _state_of(stateful: Any) -> Any:
    try:
        return stateful.state_dict()
    except Exception:  # it is the user's
        return MISSING


def _state_mark(stateful: Any) -> int | None:
    state = _state_of(stateful)
    return None if state is MISSING else _digest_of(state)


def _kind(change: Mapping[str, Any]) -> str:
    value = change["value"]
    return str(value.get("kind", "")) if isinstance(value, dict) else ""


def _attempt(
    act: Callable[[str, Any, Walk], object], path: str, change: Any, walk: Walk, failed: dict[str, str]
) -> bool:
    owner = change["of"]
    if any(owner == known or owner.startswith(f"{known}.") for known in failed):
        return False
    if owner not in walk.owners and (change["name"] or owner not in walk.slots):
        failed[owner] = "it is not there"
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
    if _kind(change) == "clock":
        if type(present) is not float:
            set_attribute(owner, name, change["value"]["value"])
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
