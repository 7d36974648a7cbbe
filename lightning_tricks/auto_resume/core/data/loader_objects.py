"""What a DataLoader reads from, its dataset, samplers and collate function, with what they keep for themselves."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any
from weakref import ref

from torch.utils.data import DataLoader

from lightning_tricks.auto_resume.core.attributes.tracking import (
    AttributeChanges,
    AttributeTracker,
    fingerprints,
    restore_changes,
)
from lightning_tricks.auto_resume.core.data.sampling_order import value_digest

# whose objects are handles to data, which a fresh process opens again
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


def loader_parts(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return a loader's dataset, samplers and collate function, each once."""
    found: dict[str, Any] = {}
    for name in ("dataset", "collate_fn", "sampler", "batch_sampler"):
        value = getattr(loader, name, None)
        if value is not None and all(value is not other for other in found.values()):
            found[name] = value
    return found


class ObjectBaselines:
    """Knows what objects were when they were first seen, also when another loader reads from them later."""

    def __init__(self) -> None:
        self._trackers: dict[int, tuple[Any, AttributeTracker]] = {}
        self._fingerprints: dict[int, tuple[Any, dict[str, int]]] = {}

    def tracker_of(self, name: str, value: Any, other_parts: Collection[Any]) -> AttributeTracker:
        """Return what follows an object since it was first seen; `other_parts` are followed by themselves."""
        known = self._trackers.get(id(value))
        if known is not None and known[0]() is value:
            return known[1]
        try:
            reference: Any = ref(value)
        except TypeError:  # of a list, for one
            return AttributeTracker({name: value}, skipped=_skip_other_parts(other_parts))
        attributes = AttributeTracker(lambda: {name: reference()}, skipped=_skip_other_parts(other_parts))
        self._trackers[id(value)] = reference, attributes
        return attributes

    def fingerprint(self, value: Any, other_parts: Collection[Any]) -> dict[str, int]:
        """Return the digests of an object's attributes as they were when it was first asked for."""
        known = self._fingerprints.get(id(value))
        if known is not None and known[0]() is value:
            return known[1]
        found = _merged_digests(fingerprints({"dataset": value}, skipped=_skip_other_parts(other_parts)))
        try:
            self._fingerprints[id(value)] = ref(value), found
        except TypeError:
            return found
        return found


class LoaderObjects:
    """Follows the attributes of what a loader reads from.

    Args:
        loader: That is followed.
        baselines: Of the fit.

    Attributes:
        fingerprint: Of the data: path -> digest.
    """

    def __init__(self, loader: DataLoader[Any], baselines: ObjectBaselines) -> None:
        objects = loader_parts(loader)
        self._loader = ref(loader)
        self._attributes = {
            name: baselines.tracker_of(name, value, _other_parts(objects, value)) for name, value in objects.items()
        }
        self.fingerprint = baselines.fingerprint(loader.dataset, _other_parts(objects, loader.dataset))
        self._unsaved, self._reported = dict[str, str](), set[str]()

    def changes(self, names: Collection[str] = (), report_unsaved: bool = True) -> dict[str, AttributeChanges]:
        """Return what changed in the fit.

        Args:
            names: Of the objects that are meant; empty for all.
            report_unsaved: Whether what is not kept matters, and `new_unsaved` names it.
        """
        found = {
            name: attributes.changes() for name, attributes in self._attributes.items() if not names or name in names
        }
        for changes in found.values() if report_unsaved else ():
            self._unsaved |= changes["lost"]
        return {name: changes for name, changes in found.items() if changes["values"] or changes["lost"]}

    def restore_changes(self, saved: Mapping[str, Any], names: Collection[str] = ()) -> dict[str, str]:
        """Give the objects what those of the stopped run had; return path -> why one could not be put back."""
        loader, failed = self._loader(), dict[str, str]()
        objects = {} if loader is None else loader_parts(loader)
        for name, changes in saved.items():
            if name in objects and (not names or name in names):
                skipped = _skip_other_parts(_other_parts(objects, objects[name]))
                failed |= restore_changes({name: objects[name]}, changes, skipped=skipped)
        return failed

    def add_unsaved(self, unsaved: Mapping[str, str]) -> None:
        """Note what changed in a worker and is not kept."""
        self._unsaved |= {f"{path} in a worker": kind for path, kind in unsaved.items()}

    def new_unsaved(self) -> dict[str, str]:
        """Return path -> type or reason of what changed and is not kept, each once."""
        new = {
            path: kind
            for path, kind in self._unsaved.items()
            if path not in self._reported and kind.partition(".")[0] not in _DATA_HANDLE_PACKAGES
        }
        self._reported |= new.keys()
        return new


def _merged_digests(digests: dict[str, int]) -> dict[str, int]:
    """Put digests of parts together, where there are many."""
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


def changed_paths(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the paths whose values are not the same in two results of `LoaderObjects.changes`."""
    first, second = ({path: value_digest(value) for path, value in _values(changes)} for changes in (one, other))
    return sorted(path for path in first.keys() | second.keys() if first.get(path) != second.get(path))


def _values(changes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for found in changes.values():
        for path, change in found["values"].items():
            value = change["value"]
            if not (isinstance(value, dict) and value.get("kind") in ("same", "clock", "deleted", "module")):
                yield path, value


def _other_parts(objects: Mapping[str, Any], value: Any) -> list[Any]:
    return [other for other in objects.values() if other is not value]


def _skip_other_parts(other_parts: Collection[Any]) -> Any:
    """Leave out what is followed by itself, and states that say how far an iteration was: that is known exactly."""
    numbers = {id(other) for other in other_parts}  # which live as long as the loader

    def skipped(owner: Any) -> list[str]:
        try:
            held = vars(owner).items()
        except TypeError:
            return ["state_dict"]
        return ["state_dict", *(name for name, value in held if id(value) in numbers)]

    return skipped
