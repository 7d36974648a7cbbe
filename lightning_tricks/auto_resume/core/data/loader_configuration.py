"""How loaders give their samples: what a start of a run may change, without what the data and the machine decide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import BatchSampler

from lightning_tricks.auto_resume.core.configuration import Configuration, arguments_of, plain

_SHUFFLES = {"RandomSampler": True, "SequentialSampler": False}
_OF_THE_DATA = frozenset({"num_samples", "num_replicas", "rank", "seed"})  # arguments of samplers


def describe_loaders(loaders: Sequence[Any], name: str) -> Configuration:
    """Return the batch sizes, orders and samplers of loaders, the same on any number of ranks and workers."""
    found = Configuration()
    for number, loader in enumerate(loaders):
        label = name if len(loaders) == 1 else f"{name}[{number}]"
        batch_sampler, sampler = (getattr(loader, part, None) for part in ("batch_sampler", "sampler"))
        # Lightning wraps samplers to split them among ranks
        sampler = getattr(getattr(sampler, "dataset", None), "_sampler", sampler)
        owner = batch_sampler if isinstance(batch_sampler, BatchSampler) else loader
        for option in ("batch_size", "drop_last"):
            value = plain(getattr(owner, option, None))
            if isinstance(value, int):
                found.values[f"{label}.{option}"] = value
        kind = type(sampler).__name__
        shuffle = _SHUFFLES.get(kind, getattr(sampler, "shuffle", None))
        if isinstance(shuffle, bool):
            found.values[f"{label}.shuffle"] = shuffle
        for part, value in (("sampler", sampler), ("batch_sampler", batch_sampler)):
            kind = type(value).__name__
            is_ours = type(value).__module__.startswith("lightning_tricks.")  # it depends on the stage of the fit
            if value is None or is_ours or kind.startswith("_") or kind in {*_SHUFFLES, "BatchSampler"}:
                continue
            if not isinstance(shuffle, bool) or part == "batch_sampler":
                found.kinds[f"{label}.{part}"] = kind
            size = _size(getattr(loader, "dataset", None))
            for option, given in arguments_of(value).items():
                is_of_the_data = option in _OF_THE_DATA or isinstance(plain(given), list | dict) or given == size
                if not is_of_the_data and option != "shuffle":
                    found.values[f"{label}.{part}.{option}"] = plain(given)
    return found


def _size(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception:  # not every data set has one
        return None
