"""The state from which a DataLoader creates an iterator: global random state, generators and the loader's objects."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from lightning_tricks.auto_resume.core.data.loader_objects import LoaderObjects
from lightning_tricks.auto_resume.core.data.rng_state import pack_rng_state, unpack_rng_state


class LoaderSnapshot:
    """The global random state of the process, a loader's generators and its objects, at one moment.

    Args:
        loader: The loader whose generators are captured.
        objects: The objects of the loader; None leaves them out.
        report_unsaved: See `LoaderObjects.changes`.
    """

    def __init__(
        self, loader: DataLoader[Any], objects: LoaderObjects | None = None, report_unsaved: bool = True
    ) -> None:
        self._packed: torch.Tensor | None = None
        self._global_states: Any = (random.getstate(), np.random.get_state(), torch.get_rng_state())
        self.generators = [generator.get_state() for generator in loader_generators(loader)]
        self.objects: Mapping[str, Any] = {} if objects is None else objects.changes(report_unsaved=report_unsaved)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> LoaderSnapshot:
        """Return the snapshot that `as_dict` wrote."""
        snapshot = cls.__new__(cls)
        snapshot._packed, snapshot._global_states, snapshot.generators = saved["process"], None, saved["generators"]
        snapshot.objects = saved.get("objects", {})
        return snapshot

    def as_dict(self) -> dict[str, Any]:
        """Return the snapshot as tensors and plain values."""
        if self._packed is None:  # packed only if the snapshot is saved: few of the snapshots of an epoch are
            now = pack_rng_state()
            _set_global_states(self._global_states)
            self._packed = pack_rng_state()
            unpack_rng_state(now)
        return {"process": self._packed, "generators": self.generators, "objects": self.objects}

    def restore(self, loader: DataLoader[Any], objects: LoaderObjects | None = None) -> None:
        """Restore the global random state, the generators and, if they are given, the objects."""
        if objects is not None:
            objects.restore_changes(self.objects)
        if self._packed is None:
            _set_global_states(self._global_states)
        else:
            unpack_rng_state(self._packed)
        for generator, state in zip(loader_generators(loader), self.generators, strict=False):
            generator.set_state(state)


def loader_generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    """Return the generators from which a loader and its samplers draw, each once."""
    batches = loader.batch_sampler
    owners = (loader, loader.sampler, batches, getattr(batches, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def _set_global_states(states: Any) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
