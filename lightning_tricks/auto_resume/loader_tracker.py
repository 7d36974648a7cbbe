"""The loaders of a fit: tracked while it trains, and moved to their positions when it resumes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch.utils.data import IterableDataset

from lightning_tricks._lightning_compat.flavor import LightningModule, Trainer, rank_zero_warn
from lightning_tricks._lightning_compat.loaders import (
    fetches_ahead,
    iterated_as,
    mark_restarted_loaders,
    recreate_iterators,
    restarted_loaders,
    set_num_batches_done,
    train_iterators,
)
from lightning_tricks._shared.rng import isolated_rng
from lightning_tricks._shared.text import list_names
from lightning_tricks._torch_compat.loaders import num_yielded, persistent_iterator
from lightning_tricks.auto_resume.attribute_parts import say_unwatched
from lightning_tricks.auto_resume.core.attributes.user_code import is_stateful
from lightning_tricks.auto_resume.core.data.foreign_loader import ForeignLoader, is_foreign
from lightning_tricks.auto_resume.core.data.loader_objects import ObjectBaselines, has_persistent_workers
from lightning_tricks.auto_resume.core.data.tracked_loader import (
    MOVED_KEY,
    POSITION_KEY,
    TrackedDataLoader,
    is_tracked,
    why_not_trackable,
)
from lightning_tricks.auto_resume.core.signals import StopRequest
from lightning_tricks.auto_resume.parts import Part, Phase, SavedState

_RESTARTED_KEY = "begun_again"  # of a checkpoint: which loaders were restarted in the epoch; part of its format
_MAX_LISTED = 3  # names in a sentence
_LONG_REPLAY = 60.0  # seconds of an epoch after which a user wants to know that data would be read again


class LoaderTracker(Part):
    """Tracks the positions of the training loaders, and the state that workers of validation loaders keep.

    DataLoaders of torch are tracked. Others continue at a state of their own, or are read again up to their position.

    Args:
        trainer: The Trainer of the fit.
        module: The module that is trained.
        stop_request: The signals that workers ignore.

    Attributes:
        data_differences: Sentences on what is not as it was in the stopped run, for the loaders that are resumed.
    """

    name = "loaders"

    def __init__(self, trainer: Trainer, module: LightningModule, stop_request: StopRequest) -> None:
        super().__init__(trainer, module)
        self.stop_request = stop_request
        self.data_differences: list[str] = []
        self._baselines = ObjectBaselines()
        self._train: list[TrackedDataLoader] = []
        self._validation: list[TrackedDataLoader] = []
        self._foreign: list[ForeignLoader] = []
        self._iterated = ExitStack()
        self._saved_validation: Sequence[Mapping[str, Any]] = ()
        self._warnings = set[str]()
        self._epoch_began = time.monotonic()
        self._iterators_pending = False  # until the hooks of the epoch's start were called again

    def close(self) -> None:
        """Leave the loaders as they were."""
        for loader in (*self._train, *self._validation):
            loader.close()
        self._iterated.close()

    def note(self, phase: Phase) -> None:
        """Note when an epoch begins; refuse loaders whose state cannot be saved, once there are iterators."""
        if phase is not Phase.AFTER_HOOKS:
            return
        self._epoch_began = time.monotonic()
        if not self.trainer.global_step:
            for loader in self._foreign:
                loader.check_state(self._num_ahead())

    def track_train(self, loaders: Sequence[Any], all_sized: bool, saved: Mapping[str, Any] | None) -> None:
        """Track the training loaders, whose iterators are created next; with `saved`, from the positions it holds."""
        for loader in self._train:
            loader.close()
        self._iterated.close()
        tracked = [loader for loader in loaders if not is_foreign(loader)]
        self._train = self._track(tracked, "the training loader", prefetches=not all_sized)
        self._track_foreign(loaders)
        if saved is None:
            return
        self._saved_validation = saved["validation"]
        foreign = saved.get("foreign", ())
        if (len(saved["train"]), len(foreign)) != (len(self._train), len(self._foreign)):
            rank_zero_warn(
                "AutoResume: the training loaders differ from those of the stopped run, so the order of the epoch is "
                "lost. To resume exactly, pass the same loaders as before."
            )
            return
        for loader, state in zip(self._train, saved["train"], strict=True):
            _compare_num_workers(loader, state["n_workers"])
            self._compare_fingerprints(loader, state)
            loader.objects.remember_values()
            loader.defer_iterator()
        for foreign in self._foreign:
            foreign.defer_iterator()
        self._iterators_pending = True

    def _track_foreign(self, loaders: Sequence[Any]) -> None:
        """Let the training loop iterate over those that are not tracked in a way that knows their positions."""
        names = _names("the training loader", len(loaders))
        found = partial(fetches_ahead, self.trainer), self._warn_once, self.data_differences
        parts = [
            ForeignLoader(loader, name, *found) if is_foreign(loader) else loader
            for loader, name in zip(loaders, names, strict=True)
        ]
        self._foreign = [part for part in parts if isinstance(part, ForeignLoader)]

        def states() -> list[Any]:
            ahead = self._num_ahead()
            stateful = [part for part, loader in zip(parts, loaders, strict=True) if is_stateful(loader)]
            return [part.state(ahead) if isinstance(part, ForeignLoader) else part.state_dict() for part in stateful]

        if self._foreign:
            self._iterated.enter_context(iterated_as(self.trainer, parts, states))

    def set_num_batches_done(self, saved: Mapping[str, Any]) -> None:
        """Let the Trainer be at the positions that `continued_positions` returned."""
        positions = [state[POSITION_KEY] for state in saved["train"]]
        if positions and positions[0] is not None and positions[0].get(MOVED_KEY):
            set_num_batches_done(self.trainer, positions[0]["batches"], positions[0]["at_end"])

    def track_validation(self, loaders: Sequence[Any], is_saved: bool) -> None:
        """Track the validation loaders: the random state of persistent workers is part of the run's state.

        Without `is_saved`, they are others than those that were saved.
        """
        for loader in self._validation:
            loader.close()
        in_training = {id(loader.loader) for loader in self._train}
        known = [loader for loader in loaders if not why_not_trackable(loader) and id(loader) not in in_training]
        self._validation = self._track(known, "the validation loader")
        saved = self._saved_validation if is_saved else ()
        for loader, state in zip(self._validation, saved, strict=False):
            if state[POSITION_KEY] is not None and has_persistent_workers(loader.loader):
                with isolated_rng():
                    loader.resume_from(state[POSITION_KEY])
                    loader.create_persistent_iterator()
            self._compare_fingerprints(loader, state)
            loader.restore_generator_states(state["generators"])
            loader.objects.remember_values()
            loader.objects.restore_changes(state["objects"])
        self._saved_validation = ()

    def datasets(self) -> list[Any]:
        """Return the data sets of the training loaders that are tracked."""
        return [loader.loader.dataset for loader in self._train]

    def restore(self, saved: SavedState, phase: Phase) -> None:
        """Move the training loaders to their positions in the stopped run; after its end, there is no position."""
        state = saved.rank["loaders"]
        self._create_iterators(state)
        if phase is Phase.CONTINUED:
            return
        if len(state[_RESTARTED_KEY]) == len(restarted_loaders(self.trainer)):
            mark_restarted_loaders(self.trainer, state[_RESTARTED_KEY])

    def _create_iterators(self, saved: Mapping[str, Any]) -> None:
        """Create the iterators of loaders at their positions, if that is still to be done."""
        pending, self._iterators_pending = self._iterators_pending, False
        if pending:
            for loader, state in zip(self._train, saved["train"], strict=True):
                loader.restore_generator_states(state["generators"])
                if state[POSITION_KEY] is None:
                    loader.objects.restore_all(state["objects"])
                loader.resume_from(state[POSITION_KEY])
            for foreign, position in zip(self._foreign, saved.get("foreign", ()), strict=True):
                foreign.resume_from(position)
            recreate_iterators(self.trainer)
        for loader, state in zip(self._validation, saved["validation"], strict=False):
            loader.objects.restore_all(state["objects"])  # hooks that came before may have changed it
        for loader in (*self._train, *self._validation):
            if failed := loader.objects.failed:
                listed = list_names([f"{path} ({why})" for path, why in failed.items()], _MAX_LISTED)
                loader.report_difference(
                    f"differs from the stopped run, as these values were not restored: {listed}. Set them in "
                    "on_train_epoch_start, which a resumed run calls again, or keep plain values, tensors or random "
                    "generators there"
                )

    def state(self, at_end: bool) -> dict[str, Any]:
        """Return the positions of all loaders as tensors and plain values; `at_end` if the epoch is over."""
        validation = [loader.state(persistent_iterator(loader.loader)) for loader in self._validation]
        train = self._train_positions(at_end)
        for loader in (*self._train, *self._validation):
            self._warn_unsaved(loader)
        for loader in [foreign.loader for foreign in self._foreign if foreign.holder is None]:
            if not isinstance(loader, list | tuple):
                why = why_not_trackable(loader)
                self._warn_once(
                    f"a resumed run reads the training loader again up to its position, as {why}. That is exact if its "
                    "order only depends on the global random state. Give it a state_dict and a load_state_dict, or "
                    "use a plain DataLoader."
                )
        seconds = time.monotonic() - self._epoch_began
        streams = [data for data in self.datasets() if isinstance(data, IterableDataset)]
        if streams and seconds > _LONG_REPLAY:
            self._warn_once(
                f"a run that resumes in the middle of an epoch reads the {type(streams[0]).__name__} again up to the "
                f"position, which took {seconds:.0f} seconds so far. Give it a state_dict and a load_state_dict: read "
                "with num_workers=0, or by torchdata's StatefulDataLoader, it goes on there."
            )
        return {
            "epoch": self.trainer.current_epoch,
            _RESTARTED_KEY: restarted_loaders(self.trainer),
            "train": train,
            "validation": validation or [dict(state) for state in self._saved_validation],
            "foreign": [loader.position(self._num_ahead(), at_end) for loader in self._foreign],
        }

    def _num_ahead(self) -> int:
        return train_iterators(self.trainer)[1]

    def _train_positions(self, at_end: bool) -> list[dict[str, Any]]:
        if not self._train:
            return []
        iterators, num_prefetched = train_iterators(self.trainer)
        tracked = [iterator for iterator in iterators if is_tracked(iterator)]
        if len(tracked) != len(self._train):  # none was created, as the epoch was over when the run resumed
            return [loader.state(None) for loader in self._train]
        yielded, cycles = [num_yielded(iterator) for iterator in tracked], bool(restarted_loaders(self.trainer))
        furthest = max([*yielded, *(loader.num_read for loader in self._foreign)])
        done = furthest - num_prefetched  # a loader that ended before the others is not in what was prefetched
        ahead = [num_prefetched if cycles else max(0, number - done) for number in yielded]
        pairs = zip(self._train, tracked, ahead, strict=True)
        return [loader.state(iterator, number, at_end) for loader, iterator, number in pairs]

    def _warn_unsaved(self, loader: TrackedDataLoader) -> None:
        """Name what a resumed run will lack of a loader, each thing once."""
        say_unwatched(loader.objects.unwatched, self._warnings)
        if new := loader.objects.new_unsaved():
            listed = list_names([f"{path} ({kind})" for path, kind in new.items()], _MAX_LISTED)
            rank_zero_warn(
                f"AutoResume: these values of {loader.name} changed and are not saved: {listed}. A resumed run starts "
                "with their initial values, or the contents of their files. If the data depend on them, keep plain "
                "values, tensors or random generators there."
            )
        if loader.draws_in_between:
            self._warn_once(
                f"the samples or the order of {loader.name} draw from the global random state between training steps, "
                "which also draw from it. A run that resumes in the middle of an epoch reads other data. Give the "
                "dataset or the sampler its own generator, such as random.Random(seed), or read an iterable dataset "
                "with num_workers=1."
            )

    def _warn_once(self, sentence: str) -> None:
        if sentence not in self._warnings:
            self._warnings.add(sentence)
            rank_zero_warn(f"AutoResume: {sentence}")

    def _compare_fingerprints(self, loader: TrackedDataLoader, state: Mapping[str, Any]) -> None:
        """Report numbers in the data that differ from those of the stopped run, and note what else does."""
        before, now = state.get("fingerprint", {}), loader.objects.fingerprint
        known = [path for path in now if isinstance(before.get(path), list)]  # another release had one digest
        numbers = sorted(path for path in known if before[path][0] != now[path][0])
        loader.other_attributes = sorted(path for path in known if before[path][1] != now[path][1])
        if numbers:
            differ = f"{list_names(numbers, _MAX_LISTED)} differ{'' if numbers[1:] else 's'}"
            loader.report_difference(
                f"has other data than in the stopped run: {differ}. Create the data as before: split them with a "
                "generator=torch.Generator().manual_seed(...), and call seed_everything before you create them"
            )

    def _track(self, loaders: Sequence[Any], name: str, prefetches: bool = False) -> list[TrackedDataLoader]:
        return [
            TrackedDataLoader(
                loader,
                prefetches=prefetches,
                stop_request=self.stop_request,
                name=name,
                differences=self.data_differences,
                baselines=self._baselines,
            )
            for loader, name in zip(loaders, _names(name, len(loaders)), strict=True)
        ]


def _names(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name} {number}" for number in range(count)]


def _compare_num_workers(loader: TrackedDataLoader, before: int) -> None:
    if before != loader.loader.num_workers:
        rank_zero_warn(
            f"AutoResume: the training loader had num_workers={before} and has {loader.loader.num_workers}. The order "
            "of the samples is the same; random numbers that workers draw differ from those of the stopped run."
        )
