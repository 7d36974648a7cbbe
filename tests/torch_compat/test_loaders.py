"""A probe for each private symbol of DataLoaders; run with the oldest and the newest supported torch."""

import gc
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data._utils import fetch

from lightning_tricks._torch_compat import loaders as private


def loader(num_workers=0, size=6, **options):
    return DataLoader(range(size), batch_size=2, num_workers=num_workers, **options)


def test_a_loader_creates_its_iterators_by_a_function_for_a_while():
    data = loader()
    with private.overridden_iterator_factory(data, lambda: iter("ab")):
        assert list(data) == ["a", "b"]
        assert [batch.tolist() for batch in private.class_iterator(data)] == [[0, 1], [2, 3], [4, 5]]
    assert len(list(data)) == 3


def test_a_loader_with_persistent_workers_creates_an_iterator_again():
    data = loader(num_workers=1, persistent_workers=True)
    first = iter(data)
    assert iter(data) is first is private.persistent_iterator(data)
    private.set_persistent_iterator(data, None)
    assert iter(data) is not first


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_iterator_counts_its_batches(num_workers):
    iterator = iter(loader(num_workers))
    assert issubclass(type(iterator), private.loader_iterator_type())
    next(iterator)
    assert private.num_yielded(iterator) == 1
    private.set_num_yielded(iterator, 5)
    next(iterator)
    assert private.num_yielded(iterator) == 6


def test_an_iterator_takes_its_indices_from_a_sampler():
    data = loader()
    iterator = iter(data)
    assert private.index_sampler(iterator) is data.batch_sampler
    other = BatchSampler([5, 4], 1, drop_last=False)
    private.set_index_sampler(iterator, other)
    assert private.index_sampler(iterator) is other
    assert next(private.sampler_iterator(iterator)) == [0, 1]
    private.set_sampler_iterator(iterator, iter([[1, 0]]))
    assert [batch.tolist() for batch in iterator] == [[1, 0]]


def test_an_iterator_without_workers_makes_its_batches_by_a_fetcher():
    iterator = iter(loader())
    assert private.dataset_fetcher(iterator).fetch([3]).tolist() == [3]
    private.set_dataset_fetcher(iterator, SimpleNamespace(fetch=sum))
    assert list(iterator) == [1, 5, 9]


def test_a_persistent_iterator_starts_again_by_a_function_and_without_prefetching():
    data, starts = loader(num_workers=2, persistent_workers=True), []
    iterator = iter(data)
    list(iterator)

    def reset(again, first_iter=False):
        private.reset_without_prefetching(iterator, again)
        starts.append(private.num_yielded(iterator))
        private.skip_worker(iterator)
        for _ in range(4):
            private.request_batch(iterator)

    private.override_reset(iterator, reset)
    assert [batch.tolist() for batch in data] == [[0, 1], [2, 3], [4, 5]]
    assert starts == [0]
    iterator._shutdown_workers()  # it is in a cycle, and a garbage collection waits ten seconds for its workers


def test_calls_around_a_batch():
    calls = []
    iterator = iter(loader(size=8))
    private.call_before_each_batch(iterator, lambda: calls.append("each"))
    private.call_before_next_batch(iterator, lambda: calls.append("before"))
    next(iterator), next(iterator)
    assert calls == ["before", "each", "each"]
    iterator = iter(loader())
    private.call_after_next_batch(iterator, lambda batch: calls.append(batch.tolist()))
    next(iterator), next(iterator)
    assert calls[3:] == [[0, 1]]


def test_a_call_after_a_batch_keeps_no_iterator_alive():
    gc.disable()
    try:
        iterator = iter(loader(num_workers=1))
        private.call_after_next_batch(iterator, lambda batch: None)
        workers = iterator._workers
        del iterator
        assert not any(worker.is_alive() for worker in workers)
    finally:
        gc.enable()


def test_the_start_of_an_iteration_over_an_iterable_is_seen():
    class Numbers(IterableDataset):
        def __iter__(self):
            return iter(range(2))

    data, calls = Numbers(), []
    with patch.object(fetch, "_IterableDatasetFetcher", fetch._IterableDatasetFetcher):
        private.call_on_iteration_start(data, lambda: calls.append("start"))
        assert [len(list(DataLoader(one))) for one in (data, Numbers(), data)] == [2, 2, 2]
    assert calls == ["start", "start"]


CALLS = {
    "_num_yielded": lambda bare: private.num_yielded(bare),
    "_num_yielded, set": lambda bare: private.set_num_yielded(bare, 1),
    "_index_sampler": lambda bare: private.index_sampler(bare),
    "_index_sampler, set": lambda bare: private.set_index_sampler(bare, None),
    "_sampler_iter": lambda bare: private.sampler_iterator(bare),
    "_sampler_iter, set": lambda bare: private.set_sampler_iterator(bare, None),
    "_dataset_fetcher": lambda bare: private.dataset_fetcher(bare),
    "_dataset_fetcher, set": lambda bare: private.set_dataset_fetcher(bare, None),
    "_iterator": lambda bare: private.set_persistent_iterator(bare, None),
    "_iterator, read": lambda bare: private.persistent_iterator(bare),
    "_get_iterator": lambda bare: private.overridden_iterator_factory(bare, iter).__enter__(),
    "_get_iterator, called": lambda bare: private.class_iterator(bare),
    "_reset": lambda bare: private.override_reset(bare, print),
    "_try_put_index": lambda bare: private.request_batch(bare),
    "_try_put_index, set": lambda bare: private.reset_without_prefetching(bare, None),
    "_worker_queue_idx_cycle": lambda bare: private.skip_worker(bare),
    "_next_data": lambda bare: private.call_before_each_batch(bare, print),
    "_next_data, once": lambda bare: private.call_before_next_batch(bare, print),
    "_next_data, after": lambda bare: private.call_after_next_batch(bare, print),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_renamed_symbol_is_named_and_no_attribute_is_added(name):
    bare = SimpleNamespace()
    with pytest.raises(RuntimeError, match=rf"AutoResume does not work with torch .*{name.partition(',')[0]}.*2\.6 to"):
        CALLS[name](bare)
    assert vars(bare) == {}


def test_renamed_classes_are_named(monkeypatch):
    private.loader_iterator_type.cache_clear()
    monkeypatch.delattr("torch.utils.data.dataloader._BaseDataLoaderIter")
    with pytest.raises(RuntimeError, match=r"AutoResume does not work with torch .*_BaseDataLoaderIter"):
        private.loader_iterator_type()
    monkeypatch.delattr("torch.utils.data._utils.fetch._IterableDatasetFetcher")
    with pytest.raises(RuntimeError, match=r"AutoResume does not work with torch .*_IterableDatasetFetcher"):
        private.call_on_iteration_start(None, print)


def test_errors_of_the_data_pass_through():
    class Broken(IterableDataset):
        def __iter__(self):
            return self.missing

    with pytest.raises(AttributeError, match="missing"):
        private.class_iterator(DataLoader(Broken()))
