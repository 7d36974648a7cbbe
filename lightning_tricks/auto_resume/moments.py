"""What an iterator of a DataLoader is made from: random streams and generators, at one moment."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from lightning_tricks.auto_resume.streams import pack_streams, unpack_streams


class Moment:
    """The process' random streams and a loader's generators at one moment; packed when they are asked for.

    Args:
        loader: Whose generators they are.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._packed: torch.Tensor | None = None
        self._raw: Any = (random.getstate(), np.random.get_state(), torch.get_rng_state())
        self.generators = [generator.get_state() for generator in generators_of(loader)]

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Moment:
        """Return what `as_dict` was made of."""
        moment = cls.__new__(cls)
        moment._packed, moment._raw, moment.generators = saved["process"], None, saved["generators"]
        return moment

    def as_dict(self) -> dict[str, Any]:
        """Return the moment as tensors and plain values."""
        if self._packed is None:
            now = pack_streams()
            _set_raw(self._raw)
            self._packed = pack_streams()
            unpack_streams(now)
        return {"process": self._packed, "generators": self.generators}

    def restore(self, loader: DataLoader[Any]) -> None:
        """Put streams and generators back to that moment."""
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
