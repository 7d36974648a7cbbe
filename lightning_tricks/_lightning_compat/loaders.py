"""The loaders of a Trainer: their iterators and positions, their workers' seeds, and samples shared out among ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version
from torch import nn

from lightning_tricks._lightning_compat.flavor import LightningModule, import_lightning, lightning_version, sized_len
from lightning_tricks._lightning_compat.guards import needs_private, overriding, set_private
from lightning_tricks._shared.dry_run.model_copy import unwrap_model

if TYPE_CHECKING:
    from lightning_tricks._lightning_compat.flavor import CombinedLoader, Trainer


def lightning_module_in(module: nn.Module) -> LightningModule | None:
    """Return the LightningModule that a module is, or wraps as its `module`, compiled or not; or None."""
    module = unwrap_model(module)
    if isinstance(module, LightningModule):
        return module
    # DDP and DataParallel keep it so, and `torch.compile` may be inside or outside of them.
    inner = getattr(module, "module", None)
    return lightning_module_in(inner) if isinstance(inner, nn.Module) else None


def transferred_batches(module: LightningModule | None, loader: Any, device: torch.device) -> Iterator[Any]:
    """Yield the batches of a loader as the hooks of a module make them for its steps, or as they are without one.

    Raises:
        TypeError: If the loader gives no batches.
        RuntimeError: If a hook asks for a Trainer that there is not.
    """
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        remedy = "must yield batches, as a DataLoader or datamodule.val_dataloader() does"
        raise TypeError(f"loader {remedy}, got {loader!r} ({type(loader).__name__}).")
    for batch in loader:
        if module is not None:
            try:
                batch = module.transfer_batch_to_device(module.on_before_batch_transfer(batch, 0), device, 0)
                batch = module.on_after_batch_transfer(batch, 0)
            except RuntimeError as error:
                # `LightningModule.trainer` (core/module.py) raises a RuntimeError of its own, which has no class to
                # tell it by.
                if "is not attached to a" not in str(error):
                    raise
                raise RuntimeError(
                    f"{error} A hook that transfers batches needs it: set module.trainer first."
                ) from error
        yield batch


@needs_private("MetricsMonitor on multiple ranks")
def evaluation_loaders(trainer: Trainer) -> list[Any]:
    """Return the loaders of the validation or test that runs; in `validate`, `val_dataloaders` are the last fit's."""
    return list(trainer._evaluation_loop._combined_loader.flattened)  # type: ignore[union-attr]


@needs_private("RunFingerprint on several ranks")
def fit_loaders(trainer: Trainer) -> dict[str, list[Any]]:
    """Return the training and validation loaders of the fit that has begun."""
    loops: dict[str, Any] = {"training": trainer.fit_loop, "validation": trainer.fit_loop.epoch_loop.val_loop}
    combined = {name: loop._combined_loader for name, loop in loops.items()}
    return {name: list(loaders.flattened) for name, loaders in combined.items() if loaders is not None}


@needs_private("MetricsMonitor with multiple loaders")
def evaluation_loader_names(trainer: Trainer) -> list[str]:
    """Return the names of the loaders of the validation or test that runs, if they were given as a dict."""
    combined = trainer._evaluation_loop._combined_loader
    given = None if combined is None else combined.iterables
    return list(map(str, given)) if isinstance(given, Mapping) else []


@contextmanager
def predict_loaders_prepared(
    trainer: Trainer, prepare: Callable[[Mapping[str, Any], list[float]], None]
) -> Iterator[None]:
    """Call a function whenever a prediction has its loaders, before anything is read from them.

    It gets the loaders by their names, or numbers if they were not given as a dict, and the number of batches of each.
    """
    with needs_private("PredictionWriter"):
        loop: Any = trainer.predict_loop
        # Before `run` makes iterators of them: a sampler that is replaced later would not be asked.
        setup_data = loop.setup_data
        loop._combined_loader  # noqa: B018  # it has to be there

    def setup_data_and_prepare() -> None:
        setup_data()
        if not loop.skip:
            loaders, given = loop._combined_loader.flattened, loop._combined_loader.iterables
            # `flattened` has lost the names; a dict within the dict has fewer of them than loaders.
            is_named = isinstance(given, Mapping) and len(given) == len(loaders)
            names = map(str, given if is_named else range(len(loaders)))
            prepare(dict(zip(names, loaders, strict=True)), loop.max_batches)

    with overriding(loop, setup_data=setup_data_and_prepare):
        yield


@contextmanager
def batch_sampler_replaced(loader: Any, replace: Callable[[Any], Any]) -> Iterator[Any]:
    """Replace the batch sampler of a prediction's loader by what a function makes of it, which is yielded.

    None is yielded where the loader has none, and Lightning does not know the indices of its samples either.
    """
    with needs_private("PredictionWriter"):
        kind = import_lightning("pytorch.overrides.distributed")._IndexBatchSamplerWrapper
        # Lightning wraps the sampler of a prediction to know its indices (utilities/data.py); inside of that it is
        # replaced, since a DataLoader refuses another `batch_sampler` once it is made (torch's dataloader.py,
        # `__setattr__`).
        wrapper = getattr(loader, "batch_sampler", None)
        sampler = wrapper._batch_sampler if isinstance(wrapper, kind) else None
    if sampler is None:
        yield None
        return
    replaced = replace(sampler)
    set_private(wrapper, _batch_sampler=replaced)
    try:
        yield replaced
    finally:
        set_private(wrapper, _batch_sampler=sampler)


@needs_private("RunReport with multiple training loaders")
def ends_with_shortest_loader(trainer: Trainer) -> bool:
    """Whether an epoch of training ends with the shortest of its loaders, not with the longest."""
    combined = trainer.fit_loop._combined_loader
    return combined is not None and combined._mode == "min_size"


@needs_private("a check that training loaders have batches")
def empty_train_loaders(trainer: Trainer, loaders: Any = None) -> list[int]:
    """Return which training loaders have no batches and end each epoch at once: all but those of a `max_size`.

    Args:
        trainer: The Trainer of a fit.
        loaders: What the user gave; None for what the Trainer has.
    """
    combined: Any = trainer.fit_loop._combined_loader if loaders is None else _combined(loaders)
    # utilities/combined_loader.py: "max_size" fills up with None; in other modes `next` of an empty iterator ends the
    # epoch for all, without a word.
    if combined is None or combined._mode == "max_size":
        return []
    return [index for index, loader in enumerate(combined.flattened) if sized_len(loader) == 0]


@contextmanager
def replaced_train_loaders(trainer: Trainer, module: LightningModule, replace: Callable[[Any], Any]) -> Iterator[None]:
    """Pass what the user gave as training data through a function whenever the Trainer asks for it.

    Entered in `setup`, before the Trainer asks; it holds for fits of this module. Loaders that a schedule has asked for
    before the Trainer has restored its loops get the states of a checkpoint as well.
    """
    with needs_private("an ensemble whose members see the samples in their own orders"):
        loop: Any = trainer.fit_loop
        source, setup_data, load_states = loop._data_source, loop.setup_data, loop._load_combined_loader_states
        request = type(source).dataloader  # a Trainer keeps its source from fit to fit

    def setup_data_and_load_states() -> None:
        setup_data()
        # `setup_data` returns early if there are loaders already, and their saved states would never be loaded
        # (#20550).
        load_states()

    def dataloader() -> Any:
        loaders = request(source)
        return replace(loaders) if trainer.lightning_module is module else loaders

    with overriding(source, dataloader=dataloader), overriding(loop, setup_data=setup_data_and_load_states):
        yield


@needs_private("an ensemble that looks at the data before a fit")
def request_train_loaders(trainer: Trainer) -> Any:
    """Return what the user gave as training data; in `setup`, before the Trainer asks."""
    return trainer.fit_loop._data_source.dataloader()


@contextmanager
def changing_train_loader(
    trainer: Trainer, module: LightningModule, make: Callable[[], Any], is_outdated: Callable[[], bool]
) -> Iterator[None]:
    """Let a function make the training loader of a fit, and again at the start of an epoch for which it is outdated.

    Entered in `setup`, before the Trainer asks; it holds for fits of this module. The Trainer sets up again what
    follows from the loader, such as the number of batches.
    """
    with needs_private("an ensemble that is trained in folds"):
        loop: Any = trainer.fit_loop
        source: Any = loop._data_source
        request, setup_data = type(source).dataloader, loop.setup_data
        loop._combined_loader  # noqa: B018  # it has to be there

    def dataloader() -> Any:
        return make() if trainer.lightning_module is module else request(source)

    def setup_data_again() -> None:
        # `setup_data` makes loaders only where there are none, or `reload_dataloaders_every_n_epochs` is due.
        if loop._combined_loader is not None and is_outdated():
            set_private(loop, _combined_loader=None)
        setup_data()

    with overriding(source, dataloader=dataloader), overriding(loop, setup_data=setup_data_again):
        yield


@needs_private("an ensemble on multiple ranks")
def uses_distributed_sampler(trainer: Trainer) -> bool:
    """Whether the Trainer gives each rank its share of the samples (`use_distributed_sampler`)."""
    return bool(trainer._accelerator_connector.use_distributed_sampler)


def repeats_worker_seeds() -> bool:
    """Whether Lightning's worker seeding gives torch the same numbers in every epoch, whatever the seed (#20412)."""
    # Mended by #21399, from which on `_generate_seed_sequence` gives other seeds.
    return Version(lightning_version()) < Version("2.6.1")


@needs_private("AutoResume")
def recreate_iterators(trainer: Trainer) -> None:
    """Create the iterators of the training loaders once more, at the same position of the epoch."""
    fetcher: Any = trainer.fit_loop._data_fetcher
    # `iter` of a fetcher sets it to 0 (loops/fetchers.py, `reset`), and the epoch would last as many batches longer.
    fetched = fetcher.fetched
    iter(fetcher)
    set_private(fetcher, fetched=fetched)


@needs_private("AutoResume")
def train_iterators(trainer: Trainer) -> tuple[list[Any], int]:
    """Return the iterators of the training loaders, and how many batches were fetched but not trained on."""
    fetcher: Any = trainer.fit_loop._data_fetcher
    if fetcher is None or fetcher.combined_loader._iterator is None:  # before the first, and after the last epoch
        return [], 0
    # A loader without a length is read one batch ahead, to know which one is the last (`_PrefetchDataFetcher`).
    return list(fetcher.combined_loader._iterator.iterators), len(fetcher.batches)


@contextmanager
def iterated_as(trainer: Trainer, parts: Sequence[Any], states: Callable[[], list[Any]]) -> Iterator[None]:
    """Let the training loop iterate over other objects than its loaders, which remain what everybody else sees.

    Args:
        trainer: The Trainer, whose loaders were just created.
        parts: An object for each loader.
        states: Returns the states of loaders for a checkpoint of the Trainer, which would ask the loaders for them.
    """
    with needs_private("AutoResume"):
        combined: Any = trainer.fit_loop._combined_loader
        combined._flattened  # noqa: B018  # it has to be there
    kind, iterated = type(combined), [*parts]

    class Iterated(kind):  # type: ignore[misc, valid-type]
        def __iter__(self) -> Any:
            own = self._flattened
            # Python looks `__iter__` up in the class; what it makes (`_ModeIterator`) keeps the list that it was given.
            set_private(self, _flattened=[*iterated] or own)
            try:
                return super().__iter__()
            finally:
                set_private(self, _flattened=own)

    Iterated.__name__ = Iterated.__qualname__ = kind.__qualname__
    combined.__class__ = Iterated
    try:
        with overriding(combined, _state_dicts=states):
            yield
    finally:
        iterated.clear()
        if type(combined) is Iterated:  # else another subclass was made of it, which its maker takes away
            combined.__class__ = kind


@needs_private("AutoResume")
def fetches_ahead(trainer: Trainer) -> bool:
    """Whether batches are fetched before the one before is trained on, as where nobody knows how many there are."""
    fetcher: Any = trainer.fit_loop._data_fetcher
    return fetcher.length is None


@needs_private("AutoResume")
def restarted_loaders(trainer: Trainer) -> list[bool]:
    """Return for each training loader whether it was exhausted in this epoch and restarted; [] if loaders never are."""
    iterator = _cycling_iterator(trainer)
    return [] if iterator is None else list(iterator._consumed)


@needs_private("AutoResume")
def mark_restarted_loaders(trainer: Trainer, which: list[bool]) -> None:
    """Mark training loaders as exhausted in this epoch and restarted, as `restarted_loaders` returned them."""
    iterator = _cycling_iterator(trainer)
    if iterator is not None:
        set_private(iterator, _consumed=list(which))


def _cycling_iterator(trainer: Trainer) -> Any:
    """Return the iterator over all training loaders, if shorter ones restart until the longest is exhausted."""
    fetcher: Any = trainer.fit_loop._data_fetcher
    iterator = fetcher.combined_loader._iterator
    # The epoch ends when all parts were exhausted once; without these marks, a resumed one would begin to count anew.
    cycle = import_lightning("pytorch.utilities.combined_loader")._MaxSizeCycle
    return iterator if isinstance(iterator, cycle) else None


@needs_private("AutoResume")
def given_train_loaders(trainer: Trainer) -> list[Any]:
    """Return the training loaders that were given to `fit`; none if the module or a datamodule creates them."""
    source: Any = trainer.fit_loop._data_source
    # Asking a module would call its `train_dataloader` once more than the Trainer does.
    if source.is_module() or source.instance is None:
        return []
    return list(_combined(source.instance).flattened)


@needs_private("AutoResume")
def set_num_batches_done(trainer: Trainer, count: int, at_end: bool) -> None:
    """Set how many batches of the epoch are done, before it begins; all of them if it has no more."""
    # Of a loader without a length, `is_last_batch` alone ends the epoch (`_num_ready_batches_reached`).
    if at_end and trainer.fit_loop.max_batches != float("inf"):
        count = int(trainer.fit_loop.max_batches)
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    set_private(progress.current, ready=count, started=count, processed=count, completed=count)
    set_private(progress, is_last_batch=at_end)


def _combined(loaders: Any) -> CombinedLoader:
    from lightning_tricks._lightning_compat.flavor import CombinedLoader

    return loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "max_size_cycle")


@needs_private("AutoResume")
def close_workers(trainer: Trainer) -> None:
    """Stop the worker processes of a fit's loaders, which the fit does not read again."""
    # It tears the fetcher down, which resets the CombinedLoader: that ends persistent workers too, which else wait for
    # the process's end.
    trainer.fit_loop.teardown()
