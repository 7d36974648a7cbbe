"""The objects that a DataLoader reads from (dataset, samplers, collate function), and how their attributes change."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar
from weakref import ref

from torch.utils.data import DataLoader

from lightning_tricks.auto_resume.core.attributes.digests import ValueDigest
from lightning_tricks.auto_resume.core.attributes.object_walk import ObjectWalk, SkippedNames, nothing_skipped
from lightning_tricks.auto_resume.core.attributes.restoring import restore_changes
from lightning_tricks.auto_resume.core.attributes.tracking import AttributeChanges, AttributeTracker, all_values

# packages whose objects are handles to data, which a fresh process opens again
_DATA_HANDLE_PACKAGES = (
    "h5py",
    "lmdb",
    "zarr",
    "PIL",
    "pandas",
    "pyarrow",
    "polars",
    "cv2",
    "fsspec",
    "s3fs",
    "boto3",
    "sqlalchemy",
)
_MAX_PATHS = 500  # of a fingerprint
DATA_PARTS = ("dataset", "collate_fn")
Kept = TypeVar("Kept")


def loader_parts(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return a loader's dataset, samplers and collate function, each once."""
    found: dict[str, Any] = {}
    for name in ("dataset", "collate_fn", "sampler", "batch_sampler"):
        value = getattr(loader, name, None)
        if value is not None and all(value is not other for other in found.values()):
            found[name] = value
    return found


class ObjectBaselines:
    """Remembers the state of objects when they were first seen, also if another loader reads from them later."""

    def __init__(self) -> None:
        self._trackers: dict[int, tuple[Any, AttributeTracker]] = {}
        self._fingerprints: dict[int, tuple[Any, dict[str, int]]] = {}

    def tracker_of(self, name: str, value: Any, skipped: SkippedNames) -> AttributeTracker:
        """Return the tracker of an object since it was first seen."""

        def make(get: Callable[[], Any]) -> AttributeTracker:
            return AttributeTracker(lambda: {name: get()}, skipped=skipped)

        return _remembered(self._trackers, value, make)

    def fingerprint(self, value: Any, skipped: SkippedNames) -> dict[str, int]:
        """Return the digests of an object's attributes when it was first seen: path -> digest."""
        return _remembered(
            self._fingerprints, value, lambda _: _merged_digests(fingerprints({"dataset": value}, skipped=skipped))
        )


def _remembered(known: dict[int, tuple[Any, Kept]], value: Any, make: Callable[[Callable[[], Any]], Kept]) -> Kept:
    """Return what was made for an object before, or make it, given what returns the object."""
    reference, kept = known.get(id(value), (None, None))
    if reference is not None and reference() is value:
        return kept  # type: ignore[return-value]
    try:
        reference = ref(value)
    except TypeError:  # an object such as a list, to which there are no weak references
        return make(lambda: value)
    known[id(value)] = reference, make(reference)
    return known[id(value)][1]


class LoaderObjects:
    """Tracks the attributes of the objects that a loader reads from.

    Args:
        loader: The loader; a weak reference is kept.
        baselines: Baselines of the objects, shared by the loaders of a fit.

    Attributes:
        fingerprint: Digests of the dataset's attributes: path -> digest.
        failed: Path -> why a change could not be restored when that was last tried.
    """

    def __init__(self, loader: DataLoader[Any], baselines: ObjectBaselines) -> None:
        objects = loader_parts(loader)
        self._loader = ref(loader)
        self._attributes = {
            name: baselines.tracker_of(name, value, _skip_other_parts(objects, value))
            for name, value in objects.items()
        }
        self.fingerprint = baselines.fingerprint(loader.dataset, _skip_other_parts(objects, loader.dataset))
        self.failed = dict[str, str]()
        self._unsaved, self._reported = dict[str, str](), set[str]()
        self._values: dict[str, AttributeChanges] = {}  # of all attributes, once they are remembered

    def remember_values(self) -> None:
        """Keep copies of all attributes as they are now, before anything changes them, for `undo_changes`."""
        loader = self._loader()
        objects = {} if loader is None else loader_parts(loader)
        for name, value in objects.items():
            skipped = _skip_other_parts(objects, value)
            self._values[name] = all_values({name: value}, skipped=skipped)

    def undo_changes(self, kept: Mapping[str, Any]) -> None:
        """Undo the changes since `remember_values`, except those that `changes` returned as `kept`."""
        for name, before in self._values.items():
            known = {**kept.get(name, {}).get("values", {}), **before["lost"]}
            changed = self._attributes[name].changes()["values"]
            undone = {
                path: before["values"].get(path, {**change, "value": {"kind": "deleted"}})
                for path, change in changed.items()
                if path not in known
            }
            if undone:
                self.restore_changes({name: {"values": undone, "lost": {}}})

    def restore_all(self, saved: Mapping[str, Any]) -> None:
        """Restore what `changes` returned in the stopped run, and undo all other changes since `remember_values`."""
        self.undo_changes(kept=saved)
        self.restore_changes(saved)

    def changes(self, names: Collection[str] = (), report_unsaved: bool = True) -> dict[str, AttributeChanges]:
        """Return what changed in the fit: name of the object -> changes.

        Args:
            names: Names of the objects; empty for all of them.
            report_unsaved: Whether `new_unsaved` reports changes that cannot be saved.
        """
        found = {
            name: attributes.changes() for name, attributes in self._attributes.items() if not names or name in names
        }
        for changes in found.values() if report_unsaved else ():
            self._unsaved |= changes["lost"]
        return {name: changes for name, changes in found.items() if changes["values"] or changes["lost"]}

    def restore_changes(self, saved: Mapping[str, Any], names: Collection[str] = ()) -> None:
        """Restore what `changes` returned in the stopped run."""
        loader = self._loader()
        objects = {} if loader is None else loader_parts(loader)
        for name, changes in saved.items():
            if name in objects and (not names or name in names):
                self._attributes[name].note(changes)
                skipped = _skip_other_parts(objects, objects[name])
                failed = restore_changes({name: objects[name]}, changes, skipped=skipped)
                others = {path: why for path, why in self.failed.items() if path not in changes["values"]}
                self.failed = others | failed | _without_handles(changes["lost"])

    def add_unsaved(self, unsaved: Mapping[str, str]) -> None:
        """Add changes in a worker that cannot be saved: path -> type or reason."""
        self._unsaved |= {f"{path} in a worker": kind for path, kind in unsaved.items()}

    def new_unsaved(self) -> dict[str, str]:
        """Return changes that cannot be saved and were not returned before: path -> type or reason."""
        new = {path: kind for path, kind in _without_handles(self._unsaved).items() if path not in self._reported}
        self._reported |= new.keys()
        return new


def fingerprints(roots: Mapping[str, Any], *, skipped: SkippedNames = nothing_skipped) -> dict[str, int]:
    """Return a digest of each attribute that is the same in every process.

    What is not plain data, and random generators, count by their types; of values over 1 MiB, and of containers with
    more than 10,000 entries, a sample counts.

    Args:
        roots: Objects by name.
        skipped: Returns the names of attributes to leave out of an object.

    Returns:
        Path -> digest of 64 bits.
    """
    walk = ObjectWalk.from_roots(roots, skipped)
    return {path: int(walk.digest(slot.value, same_process=False)) for path, slot in walk.slots.items()}


def value_digest(batch: Any) -> str:
    """Return a digest of a batch or another value; of a large one, a sample counts."""
    return f"{int(ValueDigest.of(batch, same_process=False)):016x}"


def _without_handles(lost: Mapping[str, str]) -> dict[str, str]:
    """Leave out what reads the data: the first sample opens it again."""
    return {path: kind for path, kind in lost.items() if kind.partition(".")[0] not in _DATA_HANDLE_PACKAGES}


def _merged_digests(digests: dict[str, int]) -> dict[str, int]:
    """Merge digests with a common beginning of their paths until there are at most 500."""
    depth = max((path.count(".") for path in digests), default=0)
    while len(digests) > _MAX_PATHS and depth:
        merged: dict[str, list[int]] = {}
        for path, digest in digests.items():
            merged.setdefault(".".join(path.split(".")[:depth]), []).append(digest)
        digests = {
            path: found[0] if len(found) == 1 else int(value_digest(found), 16) for path, found in merged.items()
        }
        depth -= 1
    return digests


def changed_paths(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the paths whose values differ between two results of `LoaderObjects.changes`."""
    first, second = ({path: value_digest(value) for path, value in _values(changes)} for changes in (before, now))
    return sorted(path for path in first.keys() | second.keys() if first.get(path) != second.get(path))


def _values(changes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for found in changes.values():
        for path, change in found["values"].items():
            value = change["value"]
            if not (isinstance(value, dict) and value.get("kind") in ("same", "clock", "deleted", "module")):
                yield path, value


def _skip_other_parts(objects: Mapping[str, Any], value: Any) -> SkippedNames:
    """Return what skips parts with trackers of their own, and `state_dict`: the position is known without it."""
    numbers = {id(other) for other in objects.values() if other is not value}  # they live as long as the loader

    def skipped(owner: Any) -> list[str]:
        try:
            held = vars(owner).items()
        except TypeError:
            return ["state_dict"]
        return ["state_dict", *(name for name, value in held if id(value) in numbers)]

    return skipped
