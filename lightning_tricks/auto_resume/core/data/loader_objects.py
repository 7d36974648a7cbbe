"""What a DataLoader reads from: how its objects change, the order and the samples that they give, and digests."""

from __future__ import annotations

import logging
import marshal
import random
import types
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any
from weakref import ref
from zlib import crc32

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_tricks._torch_compat.modules import module_internals
from lightning_tricks.auto_resume.core.attributes.attribute_access import attribute_dict, attributes, is_subclass
from lightning_tricks.auto_resume.core.attributes.digests import ValueDigest
from lightning_tricks.auto_resume.core.attributes.encoding import SkippedNames, nothing_skipped
from lightning_tricks.auto_resume.core.attributes.restoring import restore_changes
from lightning_tricks.auto_resume.core.attributes.tracking import AttributeChanges, AttributeTracker, all_values
from lightning_tricks.auto_resume.core.attributes.user_code import is_user_module
from lightning_tricks.auto_resume.core.attributes.value_kinds import num_bytes
from lightning_tricks.auto_resume.core.configuration import defaults_of, is_stamp
from lightning_tricks.auto_resume.core.data.rng_state import GlobalDraws

_MAX_REMEMBERED_BYTES = 2**20  # of one attribute
_MAX_OBJECTS = 200  # in the data that are compared attribute by attribute
_MAX_PARTS = 100  # of a list with such objects
_MAX_ENTRIES = 100_000  # of containers in which numbers are looked for
_NOT_WALKED = (type, Tensor, np.ndarray, random.Random, logging.Logger, *(types.ModuleType, types.FunctionType))
DATA_PARTS = ("dataset", "collate_fn")


class ObjectBaselines:
    """Remembers the state of objects when they were first seen, also if another loader reads from them later."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], tuple[Any, AttributeTracker, dict[str, list[str]]]] = {}

    def of(self, name: str, value: Any, skipped: SkippedNames) -> tuple[AttributeTracker, dict[str, list[str]]]:
        """Return the tracker of an object since it was first seen, and digests of the attributes of a dataset then."""
        known, reference = self._known.get((name, id(value))), None
        if known is not None and known[0]() is value:
            return known[1:]
        with suppress(TypeError):  # an object such as a list, to which there are no weak references
            reference = ref(value)
        get = reference or (lambda: value)
        tracker = AttributeTracker(lambda: {name: get()}, skipped=skipped)
        digests = fingerprints({name: value}, skipped=skipped) if name == "dataset" else {}
        if reference is not None:
            self._known[name, id(value)] = reference, tracker, digests
        return tracker, digests


class LoaderObjects:
    """Tracks the attributes of the objects that a loader reads from.

    Args:
        loader: The loader; a weak reference is kept.
        baselines: Baselines of the objects, shared by the loaders of a fit.

    Attributes:
        fingerprint: Digests of the dataset's attributes, as `fingerprints` returns them.
        failed: Path -> why a change could not be restored when that was last tried.
        unwatched: Path -> type of what cannot be pickled, whose changes nobody sees.
    """

    def __init__(self, loader: DataLoader[Any], baselines: ObjectBaselines) -> None:
        self._loader = ref(loader)
        objects = self._objects()
        found = {name: baselines.of(name, value, _skip_other_parts(objects, value)) for name, value in objects.items()}
        self._attributes = {name: tracker for name, (tracker, _) in found.items()}
        _, self.fingerprint = found["dataset"]
        self.failed = dict[str, str]()
        self._unsaved, self._reported = dict[str, str](), set[str]()
        self.unwatched = dict[str, str]()
        self._values: dict[str, AttributeChanges] = {}  # of attributes, once they are remembered
        self._large_names = set[str]()  # of those that are too large for that

    def _objects(self) -> dict[str, Any]:
        """Return the loader's dataset, samplers and collate function, each once."""
        loader, found = self._loader(), dict[str, Any]()
        for name in ("dataset", "collate_fn", "sampler", "batch_sampler"):
            value = getattr(loader, name, None)
            if value is not None and all(value is not other for other in found.values()):
                found[name] = value
        return found

    def remember_values(self) -> None:
        """Keep copies of attributes as they are now, before anything changes them, for `undo_changes`.

        Data that take more than 1 MiB are not kept: a hook that sets them sets them before the loader is created.
        """
        objects = self._objects()
        for name, value in objects.items():
            if not is_large(value, _MAX_REMEMBERED_BYTES):
                skipped = LargeSkipped(_MAX_REMEMBERED_BYTES, _skip_other_parts(objects, value))
                self._values[name] = all_values({name: value}, skipped=skipped)
                self._large_names |= skipped.names

    def undo_changes(self, kept: Mapping[str, Any]) -> None:
        """Undo the changes since `remember_values`, except those that `changes` returned as `kept`."""
        for name, before in self._values.items():
            known = {**kept.get(name, {}).get("values", {}), **before["lost"]}
            changed = self._attributes[name].changes()["values"]
            undone = {
                path: before["values"].get(path, {**change, "value": {"kind": "deleted"}})
                for path, change in changed.items()
                if path not in known and (path in before["values"] or change["name"] not in self._large_names)
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
            self.unwatched |= changes["unwatched"]
        return {name: changes for name, changes in found.items() if changes["values"] or changes["lost"]}

    def restore_changes(self, saved: Mapping[str, Any], names: Collection[str] = ()) -> None:
        """Restore what `changes` returned in the stopped run."""
        objects = self._objects()
        for name, changes in saved.items():
            if name in objects and (not names or name in names):
                self._attributes[name].note(changes)
                skipped = _skip_other_parts(objects, objects[name])
                failed = restore_changes({name: objects[name]}, changes, skipped=skipped)
                others = {path: why for path, why in self.failed.items() if path not in changes["values"]}
                self.failed = others | failed | changes["lost"]
                self._reported.update(map(_top, self.failed))  # where the run resumes

    def add_unsaved(self, unsaved: Mapping[str, str]) -> None:
        """Add changes in a worker that cannot be saved: path -> type or reason."""
        self._unsaved |= {f"{path} in a worker": kind for path, kind in unsaved.items()}

    def new_unsaved(self) -> dict[str, str]:
        """Return changes that cannot be saved, unless others in the same attribute were returned before.

        Returns:
            Path -> type or reason.
        """
        new = {path: kind for path, kind in self._unsaved.items() if _top(path) not in self._reported}
        self._reported.update(map(_top, new))
        return new


def fingerprints(roots: Mapping[str, Any], *, skipped: SkippedNames = nothing_skipped) -> dict[str, list[str]]:
    """Return two digests of each attribute of objects and of what lies in them, the same in every process.

    The first one is that of the numbers: of numbers, arrays, tensors and containers of these, without addresses and
    readings of clocks, and of lengths. The second is that of the whole value: libraries stamp data with texts, dates
    and objects of their own, so that it may be another one though the samples are equal.

    Args:
        roots: Objects by name.
        skipped: Returns the names of attributes to leave out of an object.

    Returns:
        Path -> digests.
    """
    found, pending, seen = dict[str, list[str]](), [*roots.items()], set[int]()
    while pending and len(seen) < _MAX_OBJECTS:
        path, owner = pending.pop(0)
        if path in roots:
            with suppress(Exception):  # not every data set has a length
                found[f"len({path})"] = [str(len(owner)), ""]
        left_out = {*skipped(owner), *(module_internals() if isinstance(owner, nn.Module) else ())}
        held = [(f"{path}.{name}", name, value) for name, value in attributes(owner) if name not in left_out]
        for name, argument, value in held or [(path, "", owner)]:
            is_list = is_subclass(type(value), list, tuple) and len(value) <= _MAX_PARTS
            parts = {f"{name}[{number}]": one for number, one in enumerate(value)} if is_list else {name: value}
            once = {id(one): (place, one) for place, one in reversed(parts.items()) if _is_walked(one) and held}
            inner = {number: pair for number, pair in once.items() if number not in seen}
            seen.update(inner)
            pending += [*inner.values()][::-1]
            is_given = argument.lstrip("_") in defaults_of(type(owner))
            is_library = not is_given and not is_user_module(type(owner).__module__)
            is_scalar = isinstance(value, bool | int | float) or once
            is_told, others = is_library and is_scalar, list[type]()
            numbers = "" if is_told else _numbers_in(value, {*once}, [_MAX_ENTRIES], others)
            digest = value_digest(numbers)
            found[name] = [digest, value_digest(value) if is_told or others else digest]
    return found


def _is_walked(value: Any) -> bool:
    """Whether an object is compared attribute by attribute; the weights of a model in the data are saved elsewhere."""
    if isinstance(value, nn.Module):
        return next(value.parameters(), None) is None
    return attribute_dict(value) is not None and not isinstance(value, _NOT_WALKED)


def _numbers_in(value: Any, left_out: set[int], budget: list[int], others: list[type]) -> Any:
    """Return the numbers in a value; what is none counts for the length, and is noted by its type."""
    kind = type(value)
    budget[0] -= 1
    is_number = value is None or isinstance(value, bool | int | float | np.generic | Tensor) or kind is np.ndarray
    if is_number and not is_stamp(value):
        return value
    is_met = id(value) in left_out
    left_out = {*left_out, id(value)}  # what it holds may hold it
    if is_users := is_user_module(kind.__module__):
        value = dict(attributes(value))
    is_container = is_subclass(type(value), list, tuple, dict) and not (is_number or is_met)
    if is_users or not is_container or len(value) > budget[0]:
        others.append(kind)
    if not is_container or budget[0] < 0:
        return ""
    entries = list(islice(value, budget[0]))
    if is_subclass(type(value), dict):  # in the order of its keys, which may come from a set
        entries = [part for key in sorted(entries, key=str) for part in (key, value[key])]
    return [len(value), *(_numbers_in(one, left_out, budget, others) for one in entries)]


def value_digest(batch: Any) -> str:
    """Return a digest of a batch or another value; of a large one, a sample counts."""
    return f"{int(ValueDigest.of(batch, same_process=False)):016x}"


class OrderDigest:
    """Running digests of the indices that a sampler gave: equal digests mean equal orders.

    Examples:
        >>> first, second = OrderDigest(), OrderDigest()
        >>> for indices in ([1, 2], [3, 4]):
        ...     first.add(indices)
        >>> second.add([1, 2])
        >>> first.digest(1) == second.digest(1) != first.digest(2)
        True
    """

    def __init__(self) -> None:
        self._sums = array("L", [0])  # after each batch

    @property
    def count(self) -> int:
        """The number of batches."""
        return len(self._sums) - 1

    def add(self, indices: Any) -> None:
        """Add the indices of a batch."""
        self._sums.append(crc32(_encode_indices(indices), self._sums[-1]))

    def digest(self, count: int) -> str:
        """Return the digest of the first `count` batches; empty if there are not so many."""
        return f"{self._sums[count]:08x}" if count <= self.count else ""


def _encode_indices(indices: Any) -> bytes:
    if isinstance(indices, Tensor):
        indices = indices.tolist()
    try:
        return marshal.dumps(indices, 2)  # later versions also encode which objects are identical
    except ValueError:
        parts = indices if isinstance(indices, list | tuple) else [indices]
        return repr([part.tolist() if isinstance(part, Tensor) else type(part) for part in parts]).encode()


class _WatchedPart:
    """Calls a part of an iterator in the training process.

    Args:
        draws: Watches the calls.

    Attributes:
        exhausted: Whether it was asked for more than it had.
    """

    def __init__(self, draws: GlobalDraws) -> None:
        self._draws, self.exhausted = draws, False

    def _call(self, function: Callable[[], Any]) -> Any:
        try:
            return self._draws.call(function)
        except StopIteration:
            self.exhausted = True
            raise


class TrackedFetcher(_WatchedPart):
    """Makes batches as the given fetcher does, and reports the first one.

    Args:
        fetcher: The fetcher of the iterator.
        draws: Watches the calls.
        on_first_batch: Called with the first batch.
    """

    def __init__(self, fetcher: Any, draws: GlobalDraws, on_first_batch: Callable[[Any], object]) -> None:
        super().__init__(draws)
        self._fetcher, self._on_first_batch = fetcher, on_first_batch
        self._is_first = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fetcher, name)

    def fetch(self, indices: Any) -> Any:
        """Return the batch of some indices."""
        batch = self._call(lambda: self._fetcher.fetch(indices))
        if self._is_first:
            self._is_first = False
            self._on_first_batch(batch)
        return batch


class TrackedIndices(_WatchedPart):
    """The indices that a sampler gives, whose order is recorded.

    Args:
        iterator: The iterator that gives the indices.
        draws: Watches the calls.
        order: Takes the indices.
    """

    def __init__(self, iterator: Iterator[Any], draws: GlobalDraws, order: OrderDigest) -> None:
        super().__init__(draws)
        self._iterator, self._order = iterator, order

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        indices = self._call(self._iterator.__next__)
        self._order.add(indices)
        return indices

    def skip(self, count: int) -> None:
        """Skip so many batches, or as many as there are."""
        for indices in islice(self._iterator, count):
            self._order.add(indices)


class LargeSkipped:
    """Leaves out of a walk the attributes that take more than so many bytes, and what others leave out.

    Attributes:
        names: The names of those that were too large.
    """

    def __init__(self, max_bytes: int, others: SkippedNames = nothing_skipped) -> None:
        self._max_bytes, self._others, self.names = max_bytes, others, set[str]()

    def __call__(self, owner: Any) -> list[str]:
        """Return the names of the attributes of an object to leave out."""
        large = [name for name, value in attributes(owner) if is_large(value, self._max_bytes)]
        self.names.update(large)
        return [*self._others(owner), "state_dict", *large]


def is_large(value: Any, max_bytes: int) -> bool:
    """Whether a value takes more than so many bytes, with at least 32 for each entry of a container."""
    pending = [value]
    while pending and max_bytes >= 0:
        part = pending.pop()
        kind = type(part)
        max_bytes -= 32 + num_bytes(part)
        if is_subclass(kind, list, tuple, dict, set, frozenset) and max_bytes >= 32 * len(part):
            pending += part.values() if is_subclass(kind, dict) else part
        elif is_subclass(kind, list, tuple, dict, set, frozenset):
            return True
    return max_bytes < 0


def _top(path: str) -> str:
    """Return the path of the attribute in which something lies."""
    return ".".join(path.split(".")[:2])


def changed_values(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values in a result of `LoaderObjects.changes`: path -> value."""
    return {path: change["value"] for found in changes.values() for path, change in found["values"].items()}


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


def has_persistent_workers(loader: Any) -> bool:
    """Whether a loader keeps its workers, and with them their random state, from one iteration to the next."""
    return bool(getattr(loader, "persistent_workers", False) and loader.num_workers)
