"""The scores that trained members give the training rows, computed once instead of in every epoch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_tricks._lightning_compat.guards import overriding
from lightning_tricks._lightning_compat.trainer import datamodule_of
from lightning_tricks.ensembles.core.combination import at_least_single
from lightning_tricks.ensembles.core.members import own_inputs
from lightning_tricks.ensembles.core.sampling import MemberLoader

_Data = tuple[tuple[Tensor, ...], Tensor | None]  # tensors, and the rows of a subset of them
_BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class CachedPredictions:
    """The summed outputs of the members of earlier stages for all rows of a data set of tensors in memory.

    They hold for a batch only if it consists of the very tensors that the loader gave: where a hook of the module or of
    its data module, or a callback, has put others in their place or has changed them, there are none.

    Attributes:
        of_batch: Those of the batch that is trained on, (B, ...), or None where they are not known.
    """

    def __init__(self) -> None:
        self.of_batch: Tensor | None = None
        self._sums: Tensor | None = None  # (rows, ...)
        self._n_members = 0  # whose outputs are in the sums
        self._given: list[tuple[Tensor, int]] = []
        self._data: _Data | None = None
        self._versions: list[int] = []  # of its tensors

    @contextmanager
    def watch_batches(self, trainer: Trainer) -> Iterator[None]:
        """Note the tensors of each training batch as the loader gave them, once they are on the device."""
        strategy = trainer.strategy
        to_device = strategy.batch_to_device

        def to_device_and_note(batch: Any, *args: Any, **kwargs: Any) -> Any:
            batch = to_device(batch, *args, **kwargs)
            parts = batch if trainer.training and isinstance(batch, list | tuple) else ()
            self._given = [(part, part._version) for part in parts if isinstance(part, Tensor)]
            return batch

        with overriding(strategy, batch_to_device=to_device_and_note):
            yield

    def look_up(self, ensemble: Any, batch: Any, batch_idx: int) -> None:
        """Set `of_batch`.

        Args:
            ensemble: The `StagedEnsemble` in its fit.
            batch: The batch.
            batch_idx: Its index in the epoch.
        """
        given, self._given, self.of_batch = self._given, [], None
        loader = ensemble.trainer.train_dataloader
        if not isinstance(loader, MemberLoader) or not _consists_of(batch, given) or _has_batch_hooks(ensemble):
            return
        data, rows = loader.data, loader.indices_of(batch_idx)[0]
        if data is None or len(rows) != len(batch[-1]):
            return
        self._forget_unless_of(data)
        for index in range(self._n_members, ensemble.stage):
            outputs = _outputs_of_member(ensemble, index, *data, loader.batch_size)
            self._sums = outputs if self._sums is None else self._sums + outputs
            self._n_members += 1
        if self._sums is not None:
            self.of_batch = self._sums[rows.to(self._sums.device)]

    def _forget_unless_of(self, data: _Data) -> None:
        """Start anew where an epoch has other data than the one before, or its values were changed."""
        versions = [tensor._version for tensor in data[0]]
        if versions != self._versions or (data is not self._data and not _is_same(data, self._data)):
            self._sums, self._n_members = None, 0
        self._data, self._versions = data, versions


@torch.no_grad()
def _outputs_of_member(
    ensemble: Any, index: int, tensors: tuple[Tensor, ...], subset: Tensor | None, batch_size: int
) -> Tensor:
    """Return the outputs of a member for all rows, in single precision at least."""
    member, precision = ensemble.estimators_.member(index), ensemble.trainer.precision_plugin
    parts = []
    for start in range(0, len(tensors[0] if subset is None else subset), batch_size):
        rows = slice(start, start + batch_size)
        inputs = [tensor[rows if subset is None else subset[rows]] for tensor in tensors[:-1]]
        with precision.forward_context():
            outputs = member(*own_inputs([precision.convert_input(value.to(ensemble.device)) for value in inputs]))
        parts.append(at_least_single(outputs))
    return torch.cat(parts)


def _is_same(data: _Data, other: _Data | None) -> bool:
    """Whether two epochs have the same tensors in memory, and the same rows of them."""
    if other is None or list(map(id, data[0])) != list(map(id, other[0])):
        return False
    rows, known = data[1], other[1]
    return rows is known if rows is None or known is None else torch.equal(rows, known)


def _consists_of(batch: Any, given: list[tuple[Tensor, int]]) -> bool:
    if not isinstance(batch, list | tuple) or not 0 < len(given) == len(batch):
        return False
    pairs = zip(batch, given, strict=True)
    return all(part is tensor and part._version == version for part, (tensor, version) in pairs)


def _has_batch_hooks(ensemble: Any) -> bool:
    datamodule = datamodule_of(ensemble.trainer)
    return any(
        is_overridden(hook, ensemble)
        or (datamodule is not None and is_overridden(hook, datamodule, LightningDataModule))
        for hook in _BATCH_HOOKS
    )
