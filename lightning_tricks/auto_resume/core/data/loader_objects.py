"""What a DataLoader reads from, its dataset, samplers and collate function, with what they keep for themselves."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any
from weakref import ref

from torch.utils.data import DataLoader

from lightning_tricks.auto_resume.core.attributes.tracking import Attributes, Changes, fingerprints, put_back
from lightning_tricks.auto_resume.core.data.sampling_order import digest_of

# whose objects are handles to data, which a fresh process opens again
_HANDLES = (
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
_MOST_PATHS = 500  # of a fingerprint
DATA = ("dataset", "collate_fn")


def objects_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return a loader's dataset, samplers and collate function, each once."""
    found: dict[str, Any] = {}
    for name in ("dataset", "collate_fn", "sampler", "batch_sampler"):
        value = getattr(loader, name, None)
        if value is not None and all(value is not other for other in found.values()):
            found[name] = value
    return found


class Baselines:
    """Knows what objects were when they were first seen, also when another loader reads from them later."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Attributes]] = {}
        self._fingerprints: dict[int, tuple[Any, dict[str, int]]] = {}

    def of(self, name: str, value: Any, others: Collection[Any]) -> Attributes:
        """Return what follows an object since it was first seen; `others` are followed by themselves."""
        known = self._known.get(id(value))
        if known is not None and known[0]() is value:
            return known[1]
        try:
            weakly: Any = ref(value)
        except TypeError:  # of a list, for one
            return Attributes({name: value}, skipped=_but(others))
        attributes = Attributes(lambda: {name: weakly()}, skipped=_but(others))
        self._known[id(value)] = weakly, attributes
        return attributes

    def fingerprint(self, value: Any, others: Collection[Any]) -> dict[str, int]:
        """Return the digests of an object's attributes as they were when it was first asked for."""
        known = self._fingerprints.get(id(value))
        if known is not None and known[0]() is value:
            return known[1]
        found = _folded(fingerprints({"dataset": value}, skipped=_but(others)))
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

    def __init__(self, loader: DataLoader[Any], baselines: Baselines) -> None:
        objects = objects_of(loader)
        self._loader = ref(loader)
        self._attributes = {name: baselines.of(name, value, _others(objects, value)) for name, value in objects.items()}
        self.fingerprint = baselines.fingerprint(loader.dataset, _others(objects, loader.dataset))
        self._lost, self._told = dict[str, str](), set[str]()

    def changes(self, names: Collection[str] = (), tell: bool = True) -> dict[str, Changes]:
        """Return what changed in the fit.

        Args:
            names: Of the objects that are meant; empty for all.
            tell: Whether what is not kept matters, and `newly_lost` names it.
        """
        found = {
            name: attributes.changes() for name, attributes in self._attributes.items() if not names or name in names
        }
        for changes in found.values() if tell else ():
            self._lost |= changes["lost"]
        return {name: changes for name, changes in found.items() if changes["values"] or changes["lost"]}

    def put_back(self, saved: Mapping[str, Any], names: Collection[str] = ()) -> dict[str, str]:
        """Give the objects what those of the stopped run had; return path -> why one could not be put back."""
        loader, failed = self._loader(), dict[str, str]()
        objects = {} if loader is None else objects_of(loader)
        for name, changes in saved.items():
            if name in objects and (not names or name in names):
                skipped = _but(_others(objects, objects[name]))
                failed |= put_back({name: objects[name]}, changes, skipped=skipped)
        return failed

    def note_lost(self, lost: Mapping[str, str]) -> None:
        """Note what changed in a worker and is not kept."""
        self._lost |= {f"{path} in a worker": kind for path, kind in lost.items()}

    def newly_lost(self) -> dict[str, str]:
        """Return path -> type or reason of what changed and is not kept, each once."""
        new = {
            path: kind
            for path, kind in self._lost.items()
            if path not in self._told and kind.partition(".")[0] not in _HANDLES
        }
        self._told |= new.keys()
        return new


def _folded(digests: dict[str, int]) -> dict[str, int]:
    """Put digests of parts together, where there are many."""
    depth = max((path.count(".") for path in digests), default=0)
    while len(digests) > _MOST_PATHS and depth:
        folded: dict[str, list[int]] = {}
        for path, digest in digests.items():
            folded.setdefault(".".join(path.split(".")[:depth]), []).append(digest)
        digests = {path: found[0] if len(found) == 1 else int(digest_of(found), 16) for path, found in folded.items()}
        depth -= 1
    return digests


def different(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the paths whose values are not the same in two results of `LoaderObjects.changes`."""
    first, second = ({path: digest_of(value) for path, value in _values(changes)} for changes in (one, other))
    return sorted(path for path in first.keys() | second.keys() if first.get(path) != second.get(path))


def _values(changes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for found in changes.values():
        for path, change in found["values"].items():
            value = change["value"]
            if not (isinstance(value, dict) and value.get("kind") in ("same", "clock", "deleted", "module")):
                yield path, value


def _others(objects: Mapping[str, Any], value: Any) -> list[Any]:
    return [other for other in objects.values() if other is not value]


def _but(others: Collection[Any]) -> Any:
    """Leave out what is followed by itself, and states that say how far an iteration was: that is known exactly."""
    numbers = {id(other) for other in others}  # which live as long as the loader

    def skipped(owner: Any) -> list[str]:
        try:
            held = vars(owner).items()
        except TypeError:
            return ["state_dict"]
        return ["state_dict", *(name for name, value in held if id(value) in numbers)]

    return skipped
