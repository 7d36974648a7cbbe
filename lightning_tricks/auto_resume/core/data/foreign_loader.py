"""A training loader whose position torch does not know: it continues at a state of its own, or is read again.

It is given the state before the batch that was trained on last, and that batch is read again. If it is another one, the
state does not hold all. An iterator that begins with its first batch, as a generator does, has then begun; and at an
epoch's end the loader is as it was after its last batch, whatever follows that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

from torch.utils.data import IterableDataset

from lightning_tricks._shared.rng import HeldRngState, capture_rng_state, loader_generators
from lightning_tricks._shared.text import list_names
from lightning_tricks._torch_compat.loaders import loader_iterator_type
from lightning_tricks.auto_resume.core.attributes.encoding import differing_paths
from lightning_tricks.auto_resume.core.attributes.restoring import restore_changes
from lightning_tricks.auto_resume.core.attributes.tracking import all_values
from lightning_tricks.auto_resume.core.attributes.user_code import is_stateful, is_user_module
from lightning_tricks.auto_resume.core.data.loader_objects import LoaderObjects, ObjectBaselines, value_digest
from lightning_tricks.auto_resume.core.data.rng_state import loader_snapshot, restore_snapshot
from lightning_tricks.auto_resume.core.data.tracked_loader import why_not_trackable

# Of which packages loaders and datasets begin at a loaded state more than once, in which attribute they keep it, and
# what it is without: litdata's loader waits for the end of an iteration, which Lightning does not read where it knows
# the length; an IterableDataset of datasets begins each iteration with the same epoch number at its state.
_LOADED_AGAIN = {"litdata": ("restore", False), "datasets": ("_starting_state_dict", None)}
_MISSING = object()
_NUM_WATCHED = 8  # batches after which a loader is known to draw from a global generator, or not to


def state_holder(loader: Any) -> Any:
    """Return what has the state of a loader's iteration: the loader, or a dataset that this process reads; or None."""
    if why_not_trackable(loader):
        return loader if is_stateful(loader) else None
    stream = loader.dataset if isinstance(loader.dataset, IterableDataset) and not loader.num_workers else None
    return stream if is_stateful(stream) else None


def is_foreign(loader: Any) -> bool:
    """Whether a loader is to be a `ForeignLoader`: torch does not know its position, or it has a state."""
    return bool(why_not_trackable(loader)) or state_holder(loader) is not None


def forget_loaded_state(loader: Any) -> None:
    """Let the next iteration begin at the start, where a library would begin at the loaded state once more."""
    for owner in (loader, getattr(loader, "dataset", None)):
        name, value = _LOADED_AGAIN.get(_package(owner), ("", None))
        if hasattr(owner, name):
            setattr(owner, name, value)


def _with_epoch(loader: Any) -> list[Any]:
    """Return the parts of a loader whose order follows from an epoch that others set."""
    batches = getattr(loader, "batch_sampler", None)
    parts = (getattr(loader, "sampler", None), getattr(batches, "sampler", None), getattr(loader, "dataset", None))
    return [one for one in parts if callable(getattr(one, "set_epoch", None)) and hasattr(one, "epoch")]


def load_state(holder: Any, state: Any) -> None:
    """Load a state, such that the next one that is asked for is right as well."""
    holder.load_state_dict(state)
    if _package(holder) == "litdata":
        # Where workers read, it keeps the first epoch in this process, and its next state would have that
        for stream in (holder.dataset, *getattr(holder.dataset, "_datasets", ())):
            stream.current_epoch = holder.current_epoch


def _package(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def encode_state(state: Any, name: str) -> dict[str, Any]:
    """Return a state as tensors and plain values, from which `decode_state` makes an equal one.

    Raises:
        TypeError: If it holds what cannot be made again; the message begins with the name of what has the state.
    """
    encoded = {**all_values({name: SimpleNamespace(state_dict=state)})}
    decode_state(encoded, name)
    return encoded


def decode_state(encoded: Mapping[str, Any], name: str) -> Any:
    """Return a state that is equal to the one that was given to `encode_state`."""
    holder = SimpleNamespace(state_dict=None)
    if failed := {**encoded["lost"], **restore_changes({name: holder}, encoded)}:
        listed = list_names([f"{path} ({why})" for path, why in failed.items()], 3)
        raise TypeError(
            f"AutoResume: the state of {name} cannot be saved: {listed}. Let its state_dict return plain values and "
            "tensors."
        )
    return holder.state_dict


class ForeignLoader:
    """A loader as the training loop iterates over it, which knows the position in its iteration.

    Args:
        loader: The loader.
        name: What it is called in messages.
        is_ahead: Whether the batch that is fetched next is fetched before training on the one before.
        warn: Takes a sentence on what the loader does wrong.
        differences: Takes a sentence for a difference that a resumed iteration finds.

    Attributes:
        holder: What has the state of its iteration.
        objects: What it reads from, where that is the user's code and has the state.
        draws: Whether its batches are known to draw from the global random state.
    """

    def __init__(
        self,
        loader: Any,
        name: str,
        is_ahead: Callable[[], bool],
        warn: Callable[[str], object],
        differences: list[str],
    ) -> None:
        self.loader, self.name, self.holder = loader, name, state_holder(loader)
        self.is_ahead, self._warn, self._differences = is_ahead, warn, differences
        self.draws = False
        # of what a library keeps in its dataset, its state is all that another process may be given
        is_users = self.holder not in (None, loader) and is_user_module(type(self.holder).__module__)
        self.objects = LoaderObjects(loader, ObjectBaselines()) if is_users else None
        if self.objects is not None:
            self.objects.remember_values()
        self._iteration: _Iteration | None = None
        self._position: Mapping[str, Any] | None = None  # that of the last resume, or where an iteration was left
        self._is_deferred = self._resumes = False
        # of an iteration after a state was loaded: its batches if it begins there as well
        self._repeated: int | None = None

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if self._is_deferred:
            return iter(())
        if self._resumes and self._position is not None:
            self._resumes = False
            return self._resumed(self._position)
        left = self._iteration
        self._repeated = None
        if left is None and self._position is not None:
            self._repeated = -1  # not known
        elif left is not None and left.first:
            self._repeated = left.batches - left.first if left.ended else -1
        if left is not None:
            self._position = self.position(num_ahead=0, at_end=True)
        forget_loaded_state(self.loader)
        self._iteration = _Iteration(self)
        return self._iteration

    def defer_iterator(self) -> None:
        """Let the next iterator be an empty one, until `resume_from` is called."""
        self._is_deferred = True

    def resume_from(self, position: Mapping[str, Any] | None) -> None:
        """Let the next iterator continue at what `position` returned; None for the start of an epoch."""
        self._is_deferred, self._resumes, self._position = False, position is not None, position

    def state(self, num_ahead: int) -> Any:
        """Return the loader's state after the batch that was trained on last; None before it was iterated over."""
        if self._iteration is None:
            saved = self._position and self._position["state"]
            return decode_state(saved, self.name) if saved else None
        return self._iteration.trained(num_ahead)["state"]

    def position(self, num_ahead: int, at_end: bool) -> Mapping[str, Any] | None:
        """Return what another process needs to continue; its keys are a format. None before the first iteration.

        - "created" and "started": `loader_snapshot`s before the iterator was created, and before its first batch.
        - "epochs": those that samplers and the dataset were set to.
        - "state": the loader's state, encoded; None for a loader without one.
        - "again": how many batches are read again from there, or from the start; "batches": those of the iteration.
        - "since": a snapshot before the last of these, if the iterator had begun by then; "gave": a digest of that
          batch, empty where it may be another one.
        - "now": a snapshot after these; "ahead": whether a batch was fetched since then.
        - "ended": whether the loader has said that it has no more.
        - "asks": whether it is asked for one more batch then, which is dropped.
        - "left": whether the epoch is over, however much of the loader is left.
        - "before": in place of a state from before the first batch, where the iteration before was left.

        Args:
            num_ahead: Batches that were fetched and not yet trained on, at most one.
            at_end: Whether the epoch is over.

        Raises:
            TypeError: If the loader's state cannot be saved.
        """
        iteration = self._iteration
        if iteration is None:
            return self._position
        now = iteration.trained(num_ahead)
        state, again, before, base = None, now["batches"], None, now
        if now["state"] is not None:
            base = next((one for one in iteration.moments if one["batches"] == again - 1), now)
            # else epochs of one batch would each hold the position of the epoch before, and so on
            is_nested = self._position is not None and self._position["before"] is not None
            if base["batches"] or (again and is_nested):
                state, again = encode_state(base["state"], self.name), again - base["batches"]
            else:  # it may still be that of the iteration before
                before = self._position
        return {
            "created": iteration.created,
            "started": iteration.started,
            "epochs": iteration.epochs,
            "state": state,
            "again": again,
            "batches": now["batches"],
            "since": None if iteration.is_lazy or base is now else _snapshot(base),
            "gave": "" if base is now else base["gave"],
            "now": _snapshot(now),
            "ahead": bool(num_ahead),
            "ended": now["ended"],
            # an iterator that was left in the middle has begun, which a generator has not before it is asked
            "asks": not base["ended"] if now["ended"] else at_end and not again,
            "left": at_end,
            "before": before,
        }

    def _resumed(self, saved: Mapping[str, Any]) -> Iterator[Any]:
        owners = _with_epoch(self.loader)
        now = [owner.epoch for owner in owners]
        for owner, epoch in zip(owners, saved["epochs"], strict=False):
            owner.set_epoch(epoch)
        iterator = self._in_its_epoch(saved)
        for owner, epoch in zip(owners, now, strict=True):
            owner.set_epoch(epoch)
        return iterator

    def _in_its_epoch(self, saved: Mapping[str, Any]) -> Iterator[Any]:
        if saved["before"] is not None:
            self._resumed(saved["before"])
            forget_loaded_state(self.loader)
            self._repeated = -1
        is_over = saved["left"] or saved["ended"]
        self._iteration = None
        state = None if saved["state"] is None else decode_state(saved["state"], self.name)
        if state is not None:
            load_state(self.holder, deepcopy(state))
        elif is_over and self.holder is None:
            return iter(())
        iteration = self._begun(saved, saved["batches"] - saved["again"])
        iteration.loaded = state
        self.draws |= bool(saved["again"] and not saved["gave"])
        is_same = iteration.read_again(saved)
        if not is_same and state is not None:  # such as one without its shuffle buffer
            forget_loaded_state(self.loader)
            if self.objects is not None:
                self.objects.restore_all(saved["created"]["objects"])
            iteration = self._begun(saved, 0)
            is_same = iteration.read_again(saved)
            self._warn(
                f"{self.name} was read again up to its position, as it gave other batches after its state was loaded. "
                "Let its state_dict hold all that they follow from, such as a shuffle buffer."
            )
        if not is_same:
            self._differences.append(
                f"{self.name} gives other batches than before. Let its state_dict hold all that they follow from, such "
                "as a shuffle buffer; random numbers that its workers draw may be in none"
            )
        restore_snapshot(saved["now"], self.loader)
        if self.objects is not None:
            self.objects.restore_all(saved["now"]["objects"])  # and undo what load_state_dict leaves in it
        if is_over:
            return iter(())
        iteration.before_next = saved["now"] if saved["ahead"] else None
        self._iteration = iteration
        return iteration

    def _begun(self, saved: Mapping[str, Any], first: int) -> _Iteration:
        """Return an iteration that is created in the random state of a saved one."""
        restore_snapshot(saved["created"], self.loader)
        iteration = _Iteration(self, first)
        iteration.created, iteration.started, iteration.epochs = saved["created"], saved["started"], saved["epochs"]
        return iteration

    def check_state(self, num_ahead: int) -> None:
        """Raise an error before the first batch, and not at the first save.

        Raises:
            TypeError: If the loader's state cannot be saved.
        """
        if self._iteration is not None and self.holder is not None:
            encode_state(self._iteration.trained(num_ahead)["state"], self.name)

    @property
    def num_read(self) -> int:
        """The batches of its iteration that were read."""
        return 0 if self._iteration is None else self._iteration.batches

    def note_end(self, batches: int, length: int) -> None:
        """Say it if the iteration after a resumed one is too short; called where one has ended."""
        if self._repeated is not None and (batches == self._repeated or batches < length):
            self._warn(
                f"{self.name} gave {batches} batches in the epoch after the one that was resumed, as if it began at "
                "the loaded state again. Let it forget what load_state_dict was given when an iteration begins."
            )


class _Iteration:
    """An iterator of a loader.

    Args:
        owner: The loader.
        first: The batches of this iteration that are not read from this iterator.

    Attributes:
        created: The snapshot before the iterator was created.
        epochs: Those that samplers and the dataset had then.
        started: That before its first batch.
        before_next: That to restore before the next batch.
        loaded: The state that was loaded, until the first batch: asked before it, litdata's loader changes its state.
        batches: The number of batches so far.
        ended: Whether the loader has no more.
        is_lazy: Whether it may begin with its first batch.
        moments: Those before the last two calls of `next`, where they are needed.
    """

    def __init__(self, owner: ForeignLoader, first: int = 0) -> None:
        self._owner, self.first, self.batches, self.ended = owner, first, first, False
        self.moments = deque[dict[str, Any]](maxlen=2)
        self._rng_state: HeldRngState | None = None  # the last one
        self.loaded: Any = None
        self.started: Mapping[str, Any] | None = None
        self.before_next: Mapping[str, Any] | None = None
        self.created: Mapping[str, Any] = loader_snapshot(owner.loader, owner.objects, report_unsaved=False)
        self.epochs = [int(part.epoch) for part in _with_epoch(owner.loader)]
        self._iterator = iter(owner.loader)
        self.is_lazy = owner.holder is not owner.loader or not isinstance(self._iterator, loader_iterator_type())
        try:
            self._length = len(owner.loader)
        except (TypeError, NotImplementedError):
            self._length = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.before_next is not None:
            restore_snapshot(self.before_next, self._owner.loader)
            self.before_next = None
        if self.started is None:
            self.started = loader_snapshot(self._owner.loader)
        is_kept = self._owner.holder is not None or self._owner.is_ahead()
        if is_kept:
            self.moments.append(self._moment())
        try:
            batch = next(self._iterator)
        except StopIteration:
            self.ended = True
            self._owner.note_end(self.batches, self._length)
            raise
        if is_kept and self._owner.holder is not None:
            if self.is_lazy and 0 < self.batches < _NUM_WATCHED and not self._owner.draws:
                before = self.moments[-1]["process"]()
                self._owner.draws = any(True for _ in differing_paths(before, capture_rng_state()))
            self.moments[-1]["gave"] = "" if self.is_lazy and self._owner.draws else value_digest(batch)
        self.loaded = None
        self.batches += 1
        return batch

    def trained(self, num_ahead: int) -> dict[str, Any]:
        """Return the moment after the batch that was trained on last."""
        return self.moments[-1] if num_ahead else self._moment()

    def _moment(self) -> dict[str, Any]:
        owner, state = self._owner, self.loaded
        if state is None and owner.holder is not None:
            state = owner.holder.state_dict()
        self._rng_state = HeldRngState(self._rng_state)
        return {
            "state": deepcopy(state),  # a copy, as a loader may go on to change what it returned
            "process": self._rng_state,
            "generators": [generator.get_state() for generator in loader_generators(owner.loader)],
            "objects": {} if owner.objects is None else owner.objects.changes(report_unsaved=False),
            "batches": self.batches,
            "ended": self.ended,
        }

    def read_again(self, saved: Mapping[str, Any]) -> bool:
        """Read the batches up to a saved position; return whether the last one is as it was, as far as that is known.

        Raises:
            RuntimeError: If there are not so many, and no state was loaded that may lead to another place.
        """
        loader, is_loaded, batch = self._owner.loader, self.loaded is not None, None
        if self.started is not None:
            restore_snapshot(self.started, loader)
        for number in range(self.batches, saved["batches"]):
            if saved["since"] is not None and number + 1 == saved["batches"]:
                restore_snapshot(saved["since"], loader)
            batch = next(self._iterator, _MISSING)
            if batch is _MISSING:
                break
            self.batches += 1
            self.loaded = None
        if batch is _MISSING and not (is_loaded or saved["gave"]):
            raise RuntimeError(
                f"the run was stopped after {saved['batches']} batches of an epoch, but {self._owner.name} now has "
                f"{self.batches}. Pass the same loader as before, or choose another dirpath to start a new run."
            )
        if saved["asks"]:
            next(self._iterator, None)
            self.loaded = None
        return batch is not _MISSING and saved["gave"] in ("", value_digest(batch))


def _snapshot(moment: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `loader_snapshot` would have returned at a moment."""
    return {**{name: moment[name] for name in ("generators", "objects")}, "process": moment["process"]()}
