"""The loaders of a fit: tracked while it trains, and moved to their positions when it resumes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_tricks._lightning_compat.fit import num_batches_done
from lightning_tricks._lightning_compat.flavor import (
    LightningModule,
    MisconfigurationException,
    Trainer,
    rank_zero_warn,
)
from lightning_tricks._lightning_compat.loaders import (
    load_loader_states,
    mark_restarted_loaders,
    recreate_iterators,
    restarted_loaders,
    set_num_batches_done,
    skip_train_batches,
    train_iterators,
)
from lightning_tricks._shared.rng import isolated_rng
from lightning_tricks._shared.text import list_names
from lightning_tricks._torch_compat.loaders import num_yielded, persistent_iterator
from lightning_tricks.auto_resume.attribute_parts import say_unwatched
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


class LoaderTracker(Part):
    """Tracks the positions of the training loaders, and the state that workers of validation loaders keep.

    DataLoaders are tracked. The Trainer restores loaders with a `state_dict`. Other loaders are replayed: they are read
    again up to their position. Where the order follows from the global random state, it is that of the epoch: the
    iterators of the first epoch are created with the loaders, and those of others after the hooks of the epoch's start.

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
        self._to_replay: list[Any] = []
        self._saved_validation: Sequence[Mapping[str, Any]] = ()
        self._warnings = set[str]()
        self._iterators_pending = False  # until the hooks of the epoch's start were called again

    def close(self) -> None:
        """Leave the loaders as they were."""
        for loader in (*self._train, *self._validation):
            loader.close()

    def track_train(self, loaders: Sequence[Any], all_sized: bool, saved: Mapping[str, Any] | None) -> None:
        """Track the training loaders, whose iterators are created next; with `saved`, from the positions that it holds.

        Raises:
            MisconfigurationException: If a loader can be neither tracked, restored nor replayed.
        """
        for loader in self._train:
            loader.close()
        self._to_replay = _loaders_to_replay(loaders)
        tracked = [] if self._to_replay else [loader for loader in loaders if not why_not_trackable(loader)]
        self._train = self._track(tracked, "the training loader", prefetches=not all_sized)
        if saved is None:
            return
        self._saved_validation = saved["validation"]
        if len(saved["train"]) != len(self._train) or saved["replays"] != bool(self._to_replay):
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
        self._iterators_pending = True

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
        pending = self._create_iterators(state)
        if phase is Phase.CONTINUED:
            return
        if not self._train:
            load_loader_states(self.trainer)
        if pending and self._to_replay:
            if self.trainer.current_epoch:
                recreate_iterators(self.trainer)
            skip_train_batches(self.trainer, num_batches_done(self.trainer))
        if len(state[_RESTARTED_KEY]) == len(restarted_loaders(self.trainer)):
            mark_restarted_loaders(self.trainer, state[_RESTARTED_KEY])

    def _create_iterators(self, saved: Mapping[str, Any]) -> bool:
        """Create the iterators of tracked loaders at their positions; return whether that was still to be done."""
        pending, self._iterators_pending = self._iterators_pending, False
        if pending and self._train:
            for loader, state in zip(self._train, saved["train"], strict=True):
                loader.restore_generator_states(state["generators"])
                if state[POSITION_KEY] is None:
                    loader.objects.restore_all(state["objects"])
                loader.resume_from(state[POSITION_KEY])
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
        return pending

    def state(self, at_end: bool) -> dict[str, Any]:
        """Return the positions of all loaders as tensors and plain values; `at_end` if the epoch is over."""
        validation = [loader.state(persistent_iterator(loader.loader)) for loader in self._validation]
        train = self._train_positions(at_end)
        for loader in (*self._train, *self._validation):
            self._warn_unsaved(loader)
        for loader in self._to_replay:
            if not isinstance(loader, list | tuple):
                why = why_not_trackable(loader)
                self._warn_once(
                    f"a resumed run reads the training loader again up to its position, as {why}. That is exact if its "
                    "order only depends on the global random state. Give it a state_dict and a load_state_dict, or "
                    "use a plain DataLoader."
                )
        return {
            "epoch": self.trainer.current_epoch,
            _RESTARTED_KEY: restarted_loaders(self.trainer),
            "train": train,
            "validation": validation or [dict(state) for state in self._saved_validation],
            "replays": bool(self._to_replay),
        }

    def _train_positions(self, at_end: bool) -> list[dict[str, Any]]:
        if not self._train:
            return []
        iterators, num_prefetched = train_iterators(self.trainer)
        tracked = [iterator for iterator in iterators if is_tracked(iterator)]
        if len(tracked) != len(self._train):  # none was created, as the epoch was over when the run resumed
            return [loader.state(None) for loader in self._train]
        yielded, cycles = [num_yielded(iterator) for iterator in tracked], bool(restarted_loaders(self.trainer))
        done = max(yielded) - num_prefetched  # a loader that ended before the others is not in what was prefetched
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
        names = [name] if len(loaders) == 1 else [f"{name} {number}" for number in range(len(loaders))]
        return [
            TrackedDataLoader(
                loader,
                prefetches=prefetches,
                stop_request=self.stop_request,
                name=name,
                differences=self.data_differences,
                baselines=self._baselines,
            )
            for loader, name in zip(loaders, names, strict=True)
        ]


def _loaders_to_replay(loaders: Sequence[Any]) -> list[Any]:
    """Return the loaders that are neither tracked nor restored by the Trainer."""
    for loader in loaders:
        if type(loader).__module__.partition(".")[0] == "torchdata":
            raise MisconfigurationException(
                f"AutoResume: a torchdata {type(loader).__name__} restores its own position, and loses an epoch if "
                "it is saved at the epoch's end. Use torch.utils.data.DataLoader: AutoResume restores its position."
            )
    others = [loader for loader in loaders if why_not_trackable(loader)]
    to_replay = [loader for loader in others if not _has_state_dict(loader)]
    if to_replay and len(to_replay) < len(others):
        raise MisconfigurationException(
            "AutoResume: if several training loaders are not DataLoaders, either all or none of them must have a "
            "state_dict. Give each a state_dict and a load_state_dict, or use DataLoaders."
        )
    return to_replay


def _compare_num_workers(loader: TrackedDataLoader, before: int) -> None:
    if before != loader.loader.num_workers:
        rank_zero_warn(
            f"AutoResume: the training loader had num_workers={before} and has {loader.loader.num_workers}. The order "
            "of the samples is the same; random numbers that workers draw differ from those of the stopped run."
        )


def _has_state_dict(loader: Any) -> bool:
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))
