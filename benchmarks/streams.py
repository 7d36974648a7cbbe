"""How long a resumed process takes to the first batch of a stream, at positions up to a million samples.

The peer is the same loader at 100 samples. It prints how many samples are read again as well.
"""

from __future__ import annotations

import time
import types
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from _ratios import arguments, be_quiet, measure, ratios, report
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_tricks.auto_resume.core.data.foreign_loader import ForeignLoader
from lightning_tricks.auto_resume.core.data.tracked_loader import TrackedDataLoader, position_of

_COUNTS: Any = types.ModuleType("counts")  # whose contents a resume does not restore
_BATCH, _POSITIONS = 20, (100, 10_000, 1_000_000)


class _Stream(IterableDataset[torch.Tensor]):
    """A million samples and some more; knows its order alone."""

    def __init__(self) -> None:
        self.next = 0
        self.samples = torch.arange(2.0**10)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.next < 1_001_000:
            self.next += 1
            _COUNTS.read += 1
            yield self.samples[self.next % 1024]


class _StatefulStream(_Stream):
    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.next = state["next"]


_Loader = Callable[[], DataLoader[torch.Tensor]]
_LOADERS: dict[str, _Loader] = {
    "DataLoader, no state": lambda: DataLoader(_Stream(), _BATCH),
    "DataLoader, state": lambda: DataLoader(_StatefulStream(), _BATCH),
    "StatefulDataLoader": lambda: StatefulDataLoader(_StatefulStream(), _BATCH),
}


def _foreign(loader: DataLoader[torch.Tensor]) -> ForeignLoader:
    return ForeignLoader(loader, "the loader", lambda: False, print, [])


def _saved(make: _Loader, samples: int) -> Any:
    """Return the position of a loader that was read so far."""
    loader, _COUNTS.read = make(), 0
    tracked = TrackedDataLoader(loader) if type(loader.dataset) is _Stream else _foreign(loader)
    iterator = iter(loader if isinstance(tracked, TrackedDataLoader) else tracked)
    for _ in range(samples // _BATCH):
        next(iterator)
    if isinstance(tracked, TrackedDataLoader):
        position = position_of(iterator)
        tracked.close()
        return position
    return tracked.position(0, at_end=False)


def _seconds(make: _Loader, position: Any, samples: int, read: dict[str, int], name: str) -> float:
    """Return the seconds until a new loader gives the batch after a position."""
    loader, _COUNTS.read = make(), 0
    start = time.perf_counter()
    if type(loader.dataset) is _Stream:
        tracked = TrackedDataLoader(loader)
        tracked.resume_from(position)
        next(iter(loader))
        tracked.close()
    else:
        foreign = _foreign(loader)
        foreign.resume_from(position)
        next(iter(foreign))
    taken = time.perf_counter() - start
    read[name] = _COUNTS.read - _BATCH
    return taken


def main() -> None:
    """Measure, print and write."""
    be_quiet()
    given = arguments(default_rounds=9)
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for kind, make in _LOADERS.items():
        read: dict[str, int] = {}
        contestants = {
            f"at {samples:,}": partial(_seconds, make, _saved(make, samples), samples, read, f"at {samples:,}")
            for samples in _POSITIONS
        }
        results[kind] = ratios(measure(contestants, given.rounds, warmup=1), peer=f"at {_POSITIONS[0]:,}")
        print(kind, "reads again", read)
    report("streams", results, given.rounds, given.out)


if __name__ == "__main__":
    main()
