"""What an iterator of a DataLoader is made from, at one moment: streams, generators, and the loader's objects."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from lightning_tricks.auto_resume.core.data.loader_objects import LoaderObjects
from lightning_tricks.auto_resume.core.data.rng_state import pack_streams, unpack_streams


class Moment:
    """The process' random streams, a loader's generators and what it reads from; packed when they are asked for.

    Args:
        loader: Whose generators they are.
        objects: Of the loader; None leaves them out.
        tell: See `LoaderObjects.changes`.
    """

    def __init__(self, loader: DataLoader[Any], objects: LoaderObjects | None = None, tell: bool = True) -> None:
        self._packed: torch.Tensor | None = None
        self._raw: Any = (random.getstate(), np.random.get_state(), torch.get_rng_state())
        self.generators = [generator.get_state() for generator in generators_of(loader)]
        self.objects: Mapping[str, Any] = {} if objects is None else objects.changes(tell=tell)

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Moment:
        """Return what `as_dict` was made of."""
        moment = cls.__new__(cls)
        moment._packed, moment._raw, moment.generators = saved["process"], None, saved["generators"]
        moment.objects = saved.get("objects", {})
        return moment

    def as_dict(self) -> dict[str, Any]:
        """Return the moment as tensors and plain values."""
        if self._packed is None:
            now = pack_streams()
            _set_raw(self._raw)
            self._packed = pack_streams()
            unpack_streams(now)
        return {"process": self._packed, "generators": self.generators, "objects": self.objects}

    def restore(self, loader: DataLoader[Any], objects: LoaderObjects | None = None) -> None:
        """Put streams, generators and objects back to that moment."""
        if objects is not None:
            objects.put_back(self.objects)
        if self._packed is None:
            _set_raw(self._raw)
        else:
            unpack_streams(self._packed)
        for generator, state in zip(generators_of(loader), self.generators, strict=False):
            generator.set_state(state)


def generators_of(loader: DataLoader[Any]) -> list[torch.Generator]:
    """Return the generators that a loader and its samplers draw from, each once."""
    batches = loader.batch_sampler
    owners = (loader, loader.sampler, batches, getattr(batches, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def _set_raw(raw: Any) -> None:
    random.setstate(raw[0])
    np.random.set_state(raw[1])
    torch.set_rng_state(raw[2])
