"""The loaders of a Trainer, their workers' seeds, and how samples are shared out among ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from lightning_tricks._lightning_compat.guards import needs_private, overriding, set_private

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


@needs_private("MetricsMonitor on several ranks")
def evaluation_loaders(trainer: Trainer) -> list[Any]:
    """Return the loaders of the validation or test that runs; in `validate`, `val_dataloaders` are the last fit's."""
    return list(trainer._evaluation_loop._combined_loader.flattened)  # type: ignore[union-attr]


@needs_private("MetricsMonitor with several loaders")
def evaluation_loader_name(trainer: Trainer, index: int) -> str | None:
    """Return the key of a loader of the validation or test that runs, if its loaders were given as a dict."""
    given = trainer._evaluation_loop._combined_loader.iterables  # type: ignore[union-attr]
    return str(list(given)[index]) if isinstance(given, Mapping) and index < len(given) else None


@contextmanager
def replaced_train_loaders(trainer: Trainer, module: LightningModule, replace: Callable[[Any], Any]) -> Iterator[None]:
    """Pass what the user gave as training data through a function whenever the Trainer asks for it.

    Entered in `setup`, before the Trainer asks; it holds for fits of this module.
    """
    with needs_private("an ensemble whose members see the samples in their own orders"):
        source: Any = trainer.fit_loop._data_source
        request = type(source).dataloader  # a Trainer keeps its source from fit to fit

    def dataloader() -> Any:
        loaders = request(source)
        return replace(loaders) if trainer.lightning_module is module else loaders

    with overriding(source, dataloader=dataloader):
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
        if loop._combined_loader is not None and is_outdated():
            set_private(loop, _combined_loader=None)
        setup_data()

    with overriding(source, dataloader=dataloader), overriding(loop, setup_data=setup_data_again):
        yield


@needs_private("an ensemble on several ranks")
def uses_distributed_sampler(trainer: Trainer) -> bool:
    """Whether the Trainer gives each rank its share of the samples (`use_distributed_sampler`)."""
    return bool(trainer._accelerator_connector.use_distributed_sampler)


def repeats_worker_seeds() -> bool:
    """Whether Lightning's worker seeding gives torch the same numbers in every epoch, whatever the seed (#20412)."""
    import lightning

    return Version(lightning.__version__) < Version("2.6.1")
