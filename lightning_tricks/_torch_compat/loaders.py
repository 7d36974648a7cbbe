"""DataLoaders and their iterators.

An attribute that torch renamed is never added as a new one that nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import ref

from torch.utils.data import DataLoader

from lightning_tricks._torch_compat.guards import needs_private, set_private

_RESUME = "AutoResume"


# -- a DataLoader


@contextmanager
def overridden_iterator_factory(loader: DataLoader[Any], factory: Callable[[], Any]) -> Iterator[None]:
    """Let a loader make its iterators by a function, for a while."""
    with needs_private(_RESUME):
        _ = type(loader)._get_iterator
    # Lightning (fabric/utilities/data.py, `_wrap_attr_method`) notes what is set while loaders are asked for, and sets
    # it on loaders that it makes anew: these would have iterators of the first one.
    vars(loader)["_get_iterator"] = factory  # past the loader's `__setattr__`, which Lightning replaces
    reference = ref(loader)
    del loader, factory  # whoever keeps this open may be kept by them
    try:
        yield
    finally:
        remaining = reference()
        if remaining is not None:
            vars(remaining).pop("_get_iterator", None)


def class_iterator(loader: DataLoader[Any]) -> Any:
    """Return a new iterator, made by the loader's class also within `overridden_iterator_factory`."""
    with needs_private(_RESUME):
        # Of the class: the object's attribute may be the override, which calls this.
        factory = type(loader)._get_iterator
    return factory(loader)


def persistent_iterator(loader: DataLoader[Any]) -> Any:
    """Return the iterator that a loader with persistent workers uses again; None for none."""
    with needs_private(_RESUME):
        # `DataLoader.__iter__` (torch/utils/data/dataloader.py) resets and returns it, where workers are persistent.
        return loader._iterator


def set_persistent_iterator(loader: DataLoader[Any], iterator: Any) -> None:
    """Set the iterator that a loader with persistent workers uses again; None makes it create one."""
    with needs_private(_RESUME):
        set_private(loader, _iterator=iterator)


# -- an iterator of a DataLoader


@cache
def loader_iterator_type() -> type:
    """Return the base class of the iterators of DataLoaders."""
    with needs_private(_RESUME):
        from torch.utils.data.dataloader import _BaseDataLoaderIter
    return _BaseDataLoaderIter


def num_yielded(iterator: Any) -> int:
    """Return how many batches an iterator has given."""
    with needs_private(_RESUME):
        # torch counts it to warn of an IterableDataset that is longer than it says.
        return int(iterator._num_yielded)


def set_num_yielded(iterator: Any, count: int) -> None:
    """Set how many batches an iterator has given."""
    with needs_private(_RESUME):
        set_private(iterator, _num_yielded=count)


def index_sampler(iterator: Any) -> Any:
    """Return the sampler that an iterator asks for its next iteration: of batches, or of samples without batching."""
    with needs_private(_RESUME):
        # An iterator keeps the sampler that it was made with, and asks it again in each `_reset`: replacing that of the
        # loader would change nothing for persistent workers.
        return iterator._index_sampler


def set_index_sampler(iterator: Any, sampler: Any) -> None:
    """Set the sampler that an iterator asks for its next iteration."""
    with needs_private(_RESUME):
        set_private(iterator, _index_sampler=sampler)


def sampler_iterator(iterator: Any) -> Any:
    """Return the iterator of the sampler from which an iterator takes its indices."""
    with needs_private(_RESUME):
        # `iter` of the sampler in the constructor draws the order of the epoch; what was drawn is known here alone.
        return iterator._sampler_iter


def set_sampler_iterator(iterator: Any, indices: Any) -> None:
    """Set from what an iterator takes its indices."""
    with needs_private(_RESUME):
        set_private(iterator, _sampler_iter=indices)


def dataset_fetcher(iterator: Any) -> Any:
    """Return what makes the batches of an iterator without workers."""
    with needs_private(_RESUME):
        return iterator._dataset_fetcher


def set_dataset_fetcher(iterator: Any, fetcher: Any) -> None:
    """Set what makes the batches of an iterator without workers."""
    with needs_private(_RESUME):
        set_private(iterator, _dataset_fetcher=fetcher)


def override_reset(iterator: Any, reset: Callable[..., object]) -> None:
    """Let an iterator with persistent workers start its next iteration by a function."""
    with needs_private(_RESUME):
        set_private(iterator, _reset=reset)


def reset_without_prefetching(iterator: Any, loader: DataLoader[Any]) -> None:
    """Start the next iteration of an iterator with persistent workers, and give the workers no batches yet."""
    with needs_private(_RESUME):
        # `_reset` (`_MultiProcessingDataLoaderIter`) ends with `prefetch_factor * num_workers` of these calls: workers
        # would draw random numbers and read samples before their state is restored.
        set_private(iterator, _try_put_index=lambda: None)
        reset = type(iterator)._reset
    try:
        reset(iterator, loader)
    finally:
        # Not set back: a bound method in the object is a cycle, which keeps the workers until Python collects it.
        del vars(iterator)["_try_put_index"]


def request_batch(iterator: Any) -> None:
    """Give the next indices to the worker whose turn it is."""
    with needs_private(_RESUME):
        request = iterator._try_put_index
    request()


def skip_worker(iterator: Any) -> None:
    """Let the next worker be the one whose turn it is."""
    with needs_private(_RESUME):
        # `_reset` starts at worker 0; in the middle of an epoch another one is next, which holds its part of an
        # IterableDataset and its own random state.
        next(iterator._worker_queue_idx_cycle)


def call_before_each_batch(iterator: Any, call: Callable[[], object]) -> None:
    """Call a function whenever an iterator is about to fetch a batch."""
    # `__next__` calls `_next_data`, of which both kinds of iterators have their own; `__next__` itself is looked up in
    # the class.
    fetch = _fetch_next(iterator)

    def fetch_after_call() -> Any:
        call()
        return fetch()

    vars(iterator)["_next_data"] = fetch_after_call


def call_before_next_batch(iterator: Any, call: Callable[[], object]) -> None:
    """Call a function once, before an iterator fetches its next batch."""
    _fetch_next(iterator)
    own = vars(iterator)
    # Another function may be there for each batch, and stays; this one is called once, and takes itself away before it
    # fetches.
    replaced = own.get("_next_data")

    def fetch_after_call() -> Any:
        call()
        del own["_next_data"]
        if replaced is not None:
            own["_next_data"] = replaced
        return iterator._next_data()

    own["_next_data"] = fetch_after_call


def call_after_next_batch(iterator: Any, call: Callable[[Any], object]) -> None:
    """Call a function once, with the batch that an iterator fetches next."""
    _fetch_next(iterator)
    own = vars(iterator)
    reference: Any = ref(iterator)  # a cycle of references would keep the workers alive

    def fetch_and_call() -> Any:
        del own["_next_data"]
        batch = reference()._next_data()
        call(batch)
        return batch

    own["_next_data"] = fetch_and_call


def _fetch_next(iterator: Any) -> Callable[[], Any]:
    with needs_private(_RESUME):
        fetch: Callable[[], Any] = iterator._next_data
    return fetch


def call_on_iteration_start(dataset: Any, call: Callable[[], object]) -> None:
    """Call a function in a worker whenever it is about to ask its iterable dataset for an iterator."""
    with needs_private(_RESUME):
        from torch.utils.data._utils import fetch

        fetcher: Any = fetch._IterableDatasetFetcher

    # A worker makes a fetcher, and with it `iter(dataset)`, at its start and at each `_ResumeIteration`
    # (utils/data/_utils/worker.py), and calls `worker_init_fn` at its start alone.
    class Fetcher(fetcher):  # type: ignore[misc]  # torch's own
        def __init__(self, which: Any, *args: Any, **kwargs: Any) -> None:
            if which is dataset:
                call()
            super().__init__(which, *args, **kwargs)

    set_private(fetch, _IterableDatasetFetcher=Fetcher)  # in the worker's process alone
