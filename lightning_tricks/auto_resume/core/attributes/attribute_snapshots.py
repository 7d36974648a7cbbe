"""What tells later whether an attribute changed, without keeping its value alive."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_tricks.auto_resume.core.attributes.digests import ValueDigest
from lightning_tricks.auto_resume.core.attributes.object_walk import (
    AttributeSlot,
    ObjectWalk,
    SkippedNames,
    nothing_skipped,
)
from lightning_tricks.auto_resume.core.attributes.unsaved_states import UnsavedModuleState, get_state
from lightning_tricks.auto_resume.core.attributes.value_parts import is_mutable
from lightning_tricks.auto_resume.core.attributes.value_types import MISSING, is_subclass
from lightning_tricks.auto_resume.core.attributes.walkable_types import is_walkable


@dataclass
class AttributeSnapshot:
    """What tells later whether an attribute changed; it keeps no value alive.

    Attributes:
        location: Path of the owner, and name of the attribute.
        digest: Digest of the value.
        is_complete: Whether the digest covers the whole value.
        opaque_values: Locations of what is no data in the value, with the names of their types -> what they contain.
        target: Path of the object that the attribute holds, if that is walked.
        shared: Path of an attribute with the same mutable value; empty if there is none.
        run_identity: `id` of the value.
        reference: Weak reference to the value; None where its type allows none.
    """

    location: tuple[str, str]
    digest: int
    is_complete: bool
    opaque_values: dict[tuple[tuple[str, ...], str], int]
    target: str
    shared: str
    run_identity: int
    reference: Any

    @classmethod
    def of(cls, slot: AttributeSlot, walk: ObjectWalk, shared: str) -> AttributeSnapshot:
        """Return the snapshot of an attribute."""
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
        """Whether the value is neither data nor an object that is walked."""
        return any(location == () for location, _ in self.opaque_values) and not self.target

    def is_value(self, value: Any) -> bool:
        """Whether a value is the same object as at the snapshot."""
        return self.run_identity == id(value) and (self.reference is None or self.reference() is value)

    def differs(self, now: AttributeSnapshot, value: Any) -> bool:
        """Whether an attribute changed, which now has the given snapshot and value."""
        if self.target or now.target:
            return (self.target, self.digest) != (now.target, now.digest)
        is_other = not self.is_complete or self.shared != now.shared  # it may look the same and be another
        return self.digest != now.digest or (is_other and not self.is_value(value))


def take_snapshots(walk: ObjectWalk, known: dict[int, str]) -> Iterator[tuple[str, AttributeSnapshot]]:
    """Yield path and snapshot of each attribute.

    Args:
        walk: The walk that found the attributes.
        known: `id` of each value -> path under which it was seen first; the attributes are added to it.
    """
    for path, slot in walk.slots.items():
        mutable = is_mutable(type(slot.value))
        yield path, AttributeSnapshot.of(slot, walk, known.get(id(slot.value), "") if mutable else "")
        if mutable:
            known.setdefault(id(slot.value), path)


def state_digest(stateful: Any) -> int | None:
    """Return a digest of a state, None without one; of a module, the identities of its tensors count, and samples."""
    state = stateful.tensors() if is_subclass(type(stateful), UnsavedModuleState) else get_state(stateful)
    return None if state is MISSING else _digest_in_process(state)


def fingerprints(roots: Mapping[str, Any], *, skipped: SkippedNames = nothing_skipped) -> dict[str, int]:
    """Return a digest of each attribute that is the same in every process.

    What is no plain data, and random generators, count by their types; of values over 1 MiB, and of containers with
    more than 10,000 entries, a sample counts.

    Args:
        roots: Objects by name.
        skipped: Returns the names of attributes to leave out of an object.

    Returns:
        Path -> digest of 64 bits.
    """
    walk = ObjectWalk.from_roots(roots, skipped)
    return {path: int(_digest(slot.value, walk, same_process=False)) for path, slot in walk.slots.items()}


def _digest(value: Any, walk: ObjectWalk, *, same_process: bool = True) -> ValueDigest:
    digest = ValueDigest(walk.references, same_process, lambda part: is_walkable(type(part)))
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
