"""The loaders of a fit: followed while it trains, and taken to their places when it goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_tricks._lightning_compat.fit import num_batches_done
from lightning_tricks._lightning_compat.fit_loaders import (
    load_loader_states,
    mark_restarted_loaders,
    recreate_iterators,
    restarted_loaders,
    skip_train_batches,
    train_iterators,
)
from lightning_tricks._shared.rng import isolated_rng
from lightning_tricks.auto_resume.core.data.loader_objects import ObjectBaselines
from lightning_tricks.auto_resume.core.data.loader_position import has_persistent_workers, position_of
from lightning_tricks.auto_resume.core.data.rng_state import pack_rng_state, unpack_rng_state
from lightning_tricks.auto_resume.core.data.tracked_loader import TrackedDataLoader, why_not_trackable
from lightning_tricks.auto_resume.core.signals import StopRequest


class LoaderTracker:
    """Knows where the training loaders stand, and what the workers of validation loaders remember.

    DataLoaders are followed. Loaders with a `state_dict` are the Trainer's to restore. Others are read anew from the
    streams that their epoch began with, up to where they were.

    Args:
        stop_request: Whose signals the workers pass over.

    Attributes:
        differences: Sentences on what is not as it was in the stopped run, as far as the loaders are taken up.
    """

    def __init__(self, stop_request: StopRequest) -> None:
        self.stop_request = stop_request
        self.differences: list[str] = []
        self._baselines = ObjectBaselines()
        self._train: list[TrackedDataLoader] = []
        self._validation: list[TrackedDataLoader] = []
        self._replays = False
        # when loaders that are read anew were asked for an iterator, and for their first batch
        self._rng_states: dict[str, torch.Tensor] = {}
        self._saved_validation: Sequence[Mapping[str, Any]] = ()
        self._iterators_pending = False  # with the iterators, until the hooks of the epoch's start were called again

    def close(self) -> None:
        """Leave the loaders as they were."""
        for loader in (*self._train, *self._validation):
            loader.close()

    def track_train(self, loaders: Sequence[Any], all_sized: bool, saved: Mapping[str, Any] | None) -> None:
        """Follow the training loaders, whose iterators are made next; with `saved`, at the places that it holds.

        Raises:
            MisconfigurationException: If nobody can take a loader to its place.
        """
        for loader in self._train:
            loader.close()
        to_replay = _loaders_to_replay(loaders)
        self._replays = bool(to_replay)
        tracked = [] if to_replay else [loader for loader in loaders if not why_not_trackable(loader)]
        self._train = self._track(tracked, "the training loader", prefetches=not all_sized)
        self.record_rng_state("iterator")
        if saved is None:
            return
        self._saved_validation = saved["validation"]
        if len(saved["train"]) != len(self._train) or saved["replays"] != self._replays:
            rank_zero_warn("AutoResume: the training loaders are others than before; the epoch's order is lost.")
            return
        if self._replays:
            self._rng_states = dict(saved["streams"])
        for loader, state in zip(self._train, saved["train"], strict=True):
            _compare_num_workers(loader, state["n_workers"])
            self._compare_fingerprints(loader, state)
            loader.defer_iterator()
        self._iterators_pending = True

    def track_validation(self, loaders: Sequence[Any]) -> None:
        """Follow the validation loaders: the streams of workers that live on are part of where the run is."""
        for loader in self._validation:
            loader.close()
        in_training = {id(loader.loader) for loader in self._train}
        known = [one for one in loaders if not why_not_trackable(one) and id(one) not in in_training]
        self._validation = self._track(known, "the validation loader")
        for loader, state in zip(self._validation, self._saved_validation, strict=False):
            if state["place"] is not None and has_persistent_workers(loader.loader):
                with isolated_rng():
                    loader.resume_from(state["place"])
                    loader.loader._iterator = loader.loader._get_iterator()
            self._compare_fingerprints(loader, state)
            loader.restore_generator_states(state["generators"])
            loader.objects.restore_changes(state["objects"])
        self._saved_validation = ()

    def record_rng_state(self, moment: str) -> None:
        """Note the streams from which loaders of an unknown kind make their order: "iterator" or "batch" comes next."""
        if self._replays:
            self._rng_states[moment] = pack_rng_state()

    def create_iterators(self, trainer: Trainer, saved: Mapping[str, Any]) -> bool:
        """Make the iterators of followed loaders at their places; return whether that was still to be done."""
        pending, self._iterators_pending = self._iterators_pending, False
        if pending and self._train:
            for loader, state in zip(self._train, saved["train"], strict=True):
                loader.restore_generator_states(state["generators"])
                if state["place"] is None:
                    loader.objects.restore_changes(state["objects"])
                loader.resume_from(state["place"])
            recreate_iterators(trainer)
        return pending

    def restore_positions(self, trainer: Trainer, saved: Mapping[str, Any]) -> None:
        """Take the training loaders to where they were when the run was stopped."""
        pending = self.create_iterators(trainer, saved)
        if not self._train:
            load_loader_states(trainer)
        if pending and self._replays:
            unpack_rng_state(self._rng_states["iterator"])
            recreate_iterators(trainer)
            unpack_rng_state(self._rng_states["batch"])
            skip_train_batches(trainer, num_batches_done(trainer))
        if len(saved["begun_again"]) == len(restarted_loaders(trainer)):
            mark_restarted_loaders(trainer, saved["begun_again"])

    def state(self, trainer: Trainer, at_end: bool) -> dict[str, Any]:
        """Return the places of all loaders, as tensors and plain values; `at_end` says that the epoch is over."""
        validation = [_loader_state(one, vars(one.loader).get("_iterator")) for one in self._validation]
        train = self._train_positions(trainer, at_end)
        for loader in (*self._train, *self._validation):
            self._warn_unsaved(loader)
        return {
            "epoch": trainer.current_epoch,
            "begun_again": restarted_loaders(trainer),
            "train": train,
            "validation": validation or [dict(state) for state in self._saved_validation],
            "replays": self._replays,
            "streams": self._rng_states,
        }

    def _train_positions(self, trainer: Trainer, at_end: bool) -> list[dict[str, Any]]:
        if not self._train:
            return []
        iterators, num_prefetched = train_iterators(trainer)
        tracked = [iterator for iterator in iterators if position_of(iterator) is not None]
        if len(tracked) != len(self._train):  # spared: the epoch was over when the run was taken up
            return [_loader_state(loader, None) for loader in self._train]
        pairs = zip(self._train, tracked, strict=True)
        return [_loader_state(loader, iterator, num_prefetched, at_end) for loader, iterator in pairs]

    def _warn_unsaved(self, loader: TrackedDataLoader) -> None:
        for path, kind in loader.objects.new_unsaved().items():
            rank_zero_warn(
                f"AutoResume: {path} of {loader.name} changed and is not saved ({kind}): a resumed run begins with a "
                "fresh one. Keep plain values, tensors or random generators there, where the data depend on it."
            )

    def _compare_fingerprints(self, loader: TrackedDataLoader, state: Mapping[str, Any]) -> None:
        """Say where the data are others than those of the stopped run."""
        before, now = state.get("fingerprint", {}), loader.objects.fingerprint
        others = sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path))
        if before and others:
            more = f" and {len(others) - 1} more attributes differ" if others[1:] else " differs"
            loader.report_difference(
                f"has other data than in the stopped run: {others[0]}{more}. Make them as before: split them with a "
                "generator=torch.Generator().manual_seed(...), and call seed_everything before they are made"
            )

    def _track(self, loaders: Sequence[Any], name: str, prefetches: bool = False) -> list[TrackedDataLoader]:
        names = [name] if len(loaders) == 1 else [f"{name} {number}" for number in range(len(loaders))]
        return [
            TrackedDataLoader(
                loader,
                prefetches=prefetches,
                signals=self.stop_request.signal_numbers,
                stopping=self.stop_request.stopping,
                name=name,
                differences=self.differences,
                baselines=self._baselines,
            )
            for loader, name in zip(loaders, names, strict=True)
        ]


def _loaders_to_replay(loaders: Sequence[Any]) -> list[Any]:
    """Return the loaders that neither we nor the Trainer take to their places."""
    for loader in loaders:
        if type(loader).__module__.partition(".")[0] == "torchdata":
            raise MisconfigurationException(
                f"AutoResume: a torchdata {type(loader).__name__} restores its own place, and loses an epoch when it "
                "is saved at the epoch's end. Use torch.utils.data.DataLoader: AutoResume takes it to its place."
            )
    others = [loader for loader in loaders if why_not_trackable(loader)]
    to_replay = [loader for loader in others if not _has_state_dict(loader)]
    if to_replay and len(to_replay) < len(others):
        raise MisconfigurationException(
            "AutoResume: of several training loaders that are no DataLoaders either all or none can have a state_dict "
            "of their own."
        )
    for loader in to_replay:
        if getattr(loader, "in_order", True) is False:
            rank_zero_warn(
                "AutoResume: DataLoader(in_order=False) lets the workers' speed decide about the order of the batches, "
                "so that no two runs are the same. Leave it out for an exact resume."
            )
    return to_replay


def _compare_num_workers(loader: TrackedDataLoader, before: int) -> None:
    if before != loader.loader.num_workers:
        rank_zero_warn(
            f"AutoResume: the training loader had num_workers={before} and has {loader.loader.num_workers}. The order "
            "of the samples is the same; random numbers drawn in workers are others than they would have been."
        )


def _loader_state(
    loader: TrackedDataLoader, iterator: Any, num_prefetched: int = 0, at_end: bool = True
) -> dict[str, Any]:
    position = None if iterator is None else position_of(iterator, num_prefetched, at_end)
    objects = loader.objects.changes() if position is None else position["objects"]
    return {
        "n_workers": loader.loader.num_workers,
        "generators": loader.generator_states(),
        "objects": objects,
        "fingerprint": loader.objects.fingerprint,
        "place": position,
    }


def _has_state_dict(loader: Any) -> bool:
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))
