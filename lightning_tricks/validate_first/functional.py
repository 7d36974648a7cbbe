"""An iteration over loaders that nothing after it shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.utils.data import DataLoader

from lightning_tricks._shared.rng import isolated_rng, kept_generators
from lightning_tricks._torch_compat.loaders import persistent_iterator, set_persistent_iterator


@contextmanager
def unseen_iteration(loaders: Iterable[Any]) -> Iterator[None]:
    """Restore random states on leaving: the global ones, those of the loaders' generators and of persistent workers.

    Args:
        loaders: DataLoaders, and other iterables, of which nothing is known. One with persistent workers starts others
            in the block.

    Yields:
        Nothing. The states are restored also after an exception.

    Examples:
        >>> loader = DataLoader(range(9), shuffle=True)
        >>> with unseen_iteration([loader]):
        ...     first = [int(batch) for batch in loader]
        >>> [int(batch) for batch in loader] == first
        True
    """
    with isolated_rng(), ExitStack() as stack:
        for loader in loaders:
            stack.enter_context(kept_generators(loader))
            if isinstance(loader, DataLoader):
                stack.callback(set_persistent_iterator, loader, persistent_iterator(loader))
                set_persistent_iterator(loader, None)
        yield
