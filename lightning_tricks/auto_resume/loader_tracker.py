"""The loaders of a fit: followed while it trains, and taken to their places when it goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_tricks._lightning_compat.fit import (
    batches_done,
    begun_again,
    load_states_of_loaders,
    make_iterators_again,
    mark_begun_again,
    skip_train_batches,
    train_iterators,
)
from lightning_tricks._shared.rng import isolated_rng
from lightning_tricks.auto_resume.core.data.loader_objects import Baselines
from lightning_tricks.auto_resume.core.data.loader_position import is_persistent, place_of
from lightning_tricks.auto_resume.core.data.rng_state import pack_streams, unpack_streams
from lightning_tricks.auto_resume.core.data.tracked_loader import FollowedLoader, objection_to_following
from lightning_tricks.auto_resume.core.signals import StopRequest


class LoadersOfFit:
    """Knows where the training loaders stand, and what the workers of validation loaders remember.

    DataLoaders are followed. Loaders with a `state_dict` are the Trainer's to restore. Others are read anew from the
    streams that their epoch began with, up to where they were.

    Args:
        request: Whose signals the workers pass over.

    Attributes:
        differences: Sentences on what is not as it was in the stopped run, as far as the loaders are taken up.
    """

    def __init__(self, request: StopRequest) -> None:
        self.request = request
        self.differences: list[str] = []
        self._baselines = Baselines()
        self._train: list[FollowedLoader] = []
        self._validation: list[FollowedLoader] = []
        self._replays = False
        # when loaders that are read anew were asked for an iterator, and for their first batch
        self._streams: dict[str, torch.Tensor] = {}
        self._saved_validation: Sequence[Mapping[str, Any]] = ()
        self._waits = False  # with the iterators, until the hooks of the epoch's start were called again

    def release(self) -> None:
        """Leave the loaders as they were."""
        for loader in (*self._train, *self._validation):
            loader.release()

    def follow(self, loaders: Sequence[Any], all_sized: bool, saved: Mapping[str, Any] | None) -> None:
        """Follow the training loaders, whose iterators are made next; with `saved`, at the places that it holds.

        Raises:
            MisconfigurationException: If nobody can take a loader to its place.
        """
        for loader in self._train:
            loader.release()
        unknown = _unknown(loaders)
        self._replays = bool(unknown)
        followed = [] if unknown else [loader for loader in loaders if not objection_to_following(loader)]
        self._train = self._followed(followed, "the training loader", reads_ahead=not all_sized)
        self.note("iterator")
        if saved is None:
            return
        self._saved_validation = saved["validation"]
        if len(saved["train"]) != len(self._train) or saved["replays"] != self._replays:
            rank_zero_warn("AutoResume: the training loaders are others than before; the epoch's order is lost.")
            return
        if self._replays:
            self._streams = dict(saved["streams"])
        for loader, state in zip(self._train, saved["train"], strict=True):
            _compare_workers(loader, state["n_workers"])
            self._compare_data(loader, state)
            loader.spare()
        self._waits = True

    def follow_validation(self, loaders: Sequence[Any]) -> None:
        """Follow the validation loaders: the streams of workers that live on are part of where the run is."""
        for loader in self._validation:
            loader.release()
        in_training = {id(loader.loader) for loader in self._train}
        known = [one for one in loaders if not objection_to_following(one) and id(one) not in in_training]
        self._validation = self._followed(known, "the validation loader")
        for loader, state in zip(self._validation, self._saved_validation, strict=False):
            if state["place"] is not None and is_persistent(loader.loader):
                with isolated_rng():
                    loader.resume(state["place"])
                    loader.loader._iterator = loader.loader._get_iterator()
            self._compare_data(loader, state)
            loader.restore_generators(state["generators"])
            loader.objects.put_back(state["objects"])
        self._saved_validation = ()

    def note(self, moment: str) -> None:
        """Note the streams from which loaders of an unknown kind make their order: "iterator" or "batch" comes next."""
        if self._replays:
            self._streams[moment] = pack_streams()

    def make_iterators(self, trainer: Trainer, saved: Mapping[str, Any]) -> bool:
        """Make the iterators of followed loaders at their places; return whether that was still to be done."""
        waits, self._waits = self._waits, False
        if waits and self._train:
            for loader, state in zip(self._train, saved["train"], strict=True):
                loader.restore_generators(state["generators"])
                if state["place"] is None:
                    loader.objects.put_back(state["objects"])
                loader.resume(state["place"])
            make_iterators_again(trainer)
        return waits

    def return_to_places(self, trainer: Trainer, saved: Mapping[str, Any]) -> None:
        """Take the training loaders to where they were when the run was stopped."""
        waits = self.make_iterators(trainer, saved)
        if not self._train:
            load_states_of_loaders(trainer)
        if waits and self._replays:
            unpack_streams(self._streams["iterator"])
            make_iterators_again(trainer)
            unpack_streams(self._streams["batch"])
            skip_train_batches(trainer, batches_done(trainer))
        if len(saved["begun_again"]) == len(begun_again(trainer)):
            mark_begun_again(trainer, saved["begun_again"])

    def state(self, trainer: Trainer, at_end: bool) -> dict[str, Any]:
        """Return the places of all loaders, as tensors and plain values; `at_end` says that the epoch is over."""
        validation = [_state_of(one, vars(one.loader).get("_iterator")) for one in self._validation]
        train = self._places(trainer, at_end)
        for loader in (*self._train, *self._validation):
            self._tell_what_is_lost(loader)
        return {
            "epoch": trainer.current_epoch,
            "begun_again": begun_again(trainer),
            "train": train,
            "validation": validation or [dict(state) for state in self._saved_validation],
            "replays": self._replays,
            "streams": self._streams,
        }

    def _places(self, trainer: Trainer, at_end: bool) -> list[dict[str, Any]]:
        if not self._train:
            return []
        iterators, read_ahead = train_iterators(trainer)
        followed = [iterator for iterator in iterators if place_of(iterator) is not None]
        if len(followed) != len(self._train):  # spared: the epoch was over when the run was taken up
            return [_state_of(loader, None) for loader in self._train]
        pairs = zip(self._train, followed, strict=True)
        return [_state_of(loader, iterator, read_ahead, at_end) for loader, iterator in pairs]

    def _tell_what_is_lost(self, loader: FollowedLoader) -> None:
        for path, kind in loader.objects.newly_lost().items():
            rank_zero_warn(
                f"AutoResume: {path} of {loader.name} changed and is not saved ({kind}): a resumed run begins with a "
                "fresh one. Keep plain values, tensors or random generators there, where the data depend on it."
            )

    def _compare_data(self, loader: FollowedLoader, state: Mapping[str, Any]) -> None:
        """Say where the data are others than those of the stopped run."""
        before, now = state.get("fingerprint", {}), loader.objects.fingerprint
        others = sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path))
        if before and others:
            more = f" and {len(others) - 1} more attributes differ" if others[1:] else " differs"
            loader.differs(
                f"has other data than in the stopped run: {others[0]}{more}. Make them as before: split them with a "
                "generator=torch.Generator().manual_seed(...), and call seed_everything before they are made"
            )

    def _followed(self, loaders: Sequence[Any], name: str, reads_ahead: bool = False) -> list[FollowedLoader]:
        names = [name] if len(loaders) == 1 else [f"{name} {number}" for number in range(len(loaders))]
        return [
            FollowedLoader(
                loader,
                reads_ahead=reads_ahead,
                signals=self.request.numbers,
                stopping=self.request.stopping,
                name=name,
                differences=self.differences,
                baselines=self._baselines,
            )
            for loader, name in zip(loaders, names, strict=True)
        ]


def _unknown(loaders: Sequence[Any]) -> list[Any]:
    """Return the loaders that neither we nor the Trainer take to their places."""
    for loader in loaders:
        if type(loader).__module__.partition(".")[0] == "torchdata":
            raise MisconfigurationException(
                f"AutoResume: a torchdata {type(loader).__name__} restores its own place, and loses an epoch when it "
                "is saved at the epoch's end. Use torch.utils.data.DataLoader: AutoResume takes it to its place."
            )
    others = [loader for loader in loaders if objection_to_following(loader)]
    unknown = [loader for loader in others if not _is_stateful(loader)]
    if unknown and len(unknown) < len(others):
        raise MisconfigurationException(
            "AutoResume: of several training loaders that are no DataLoaders either all or none can have a state_dict "
            "of their own."
        )
    for loader in unknown:
        if getattr(loader, "in_order", True) is False:
            rank_zero_warn(
                "AutoResume: DataLoader(in_order=False) lets the workers' speed decide about the order of the batches, "
                "so that no two runs are the same. Leave it out for an exact resume."
            )
    return unknown


def _compare_workers(loader: FollowedLoader, before: int) -> None:
    if before != loader.loader.num_workers:
        rank_zero_warn(
            f"AutoResume: the training loader had num_workers={before} and has {loader.loader.num_workers}. The order "
            "of the samples is the same; random numbers drawn in workers are others than they would have been."
        )


def _state_of(loader: FollowedLoader, iterator: Any, read_ahead: int = 0, at_end: bool = True) -> dict[str, Any]:
    place = None if iterator is None else place_of(iterator, read_ahead, at_end)
    objects = loader.objects.changes() if place is None else place["objects"]
    return {
        "n_workers": loader.loader.num_workers,
        "generators": loader.generator_states(),
        "objects": objects,
        "fingerprint": loader.objects.fingerprint,
        "place": place,
    }


def _is_stateful(loader: Any) -> bool:
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))
