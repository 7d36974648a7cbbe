"""The training batches of an ensemble: shared by its members, or with rows of each member's own."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_tricks._lightning_compat.flavor import LightningModule, rank_zero_info
from lightning_tricks._lightning_compat.loaders import empty_train_loaders, uses_distributed_sampler
from lightning_tricks._lightning_compat.trainer import overfit_batches_of
from lightning_tricks.ensembles.core import sampling


class TrainingBatches(LightningModule):
    """The part of an `Ensemble` that makes the training batches of its members.

    Attributes:
        has_member_rows: Whether a batch holds rows of each member's own, one member after another.
        own_members: The members that this rank trains, if others train the others; None if each rank trains all.
    """

    n_estimators: int
    seed: int
    has_member_rows = False
    own_members: range | None = None

    @property
    def per_member_batches(self) -> bool:
        """Whether members see the samples in orders of their own, in batches with rows of each member."""
        return False

    def member_rows(self, size: int) -> Sequence[Tensor] | None:
        """Return which of the `size` rows that the loader's sampler yields each member is trained on; None for all.

        Rows are indices below `size`, as many for each member; they may repeat.
        """
        return None

    def on_shared_batches(self, reason: str) -> None:
        """React to members sharing the batches; `reason` is not empty where that was not asked for."""
        self._log_info(f"members share the batches: {reason}" if reason else "")

    def training_loader(self, loaders: Any) -> Any:
        """Return the loader to train with, for the loaders that the user gave.

        Raises:
            ValueError: If a loader has no batches, so that epochs end at once.
        """
        for index in empty_train_loaders(self.trainer, loaders):
            raise ValueError(
                f"{type(self).__name__} has nothing to train with: loader {index} has no batches. Give it data, or a "
                "smaller batch size if drop_last drops the only batch."
            )
        self.has_member_rows = False
        if overfit_batches_of(self.trainer):
            return loaders  # the same batches in each epoch
        wants_own = self.per_member_batches and self.n_estimators > 1
        if reason := sampling.why_not_reorder(loaders):
            self.on_shared_batches(reason if wants_own else "")
            return loaders
        rows = self.member_rows(len(sampling.sampler_of(loaders)))
        # a loader that does not shuffle has the order that the user wants
        self.has_member_rows = wants_own and (sampling.is_shuffled(loaders) or rows is not None)
        members = (self.own_members or range(self.n_estimators)) if self.has_member_rows else range(1)
        is_shared_out = uses_distributed_sampler(self.trainer) and self.own_members is None
        given: Any = self.trainer.distributed_sampler_kwargs if is_shared_out else None
        shard = (given["rank"], given["num_replicas"]) if given else (0, 1)
        return sampling.MemberLoader(loaders, sampling.member_orders(loaders, members, self.seed, rows, shard))

    def split_batch(self, batch: Any, n_members: int) -> tuple[Sequence[Tensor], Tensor]:
        """Return the inputs of a batch and its targets for each member, (n_members, B, ...).

        Raises:
            TypeError: If the batch is not a tuple of tensors.
            ValueError: If its parts do not hold the same number of rows for each member.
        """
        *inputs, target = unpack(batch)
        if not self.has_member_rows:
            return inputs, target.expand(n_members, *target.shape)
        if len(target) % n_members or any(len(value) != len(target) for value in inputs):
            sizes = ", ".join(str(len(value)) for value in (*inputs, target))
            raise ValueError(
                f"the parts of a batch have {sizes} rows, not the same number for each of {n_members} members: "
                "collate_fn mixes samples. Give shared_order=True."
            )
        return inputs, target.reshape(n_members, -1, *target.shape[1:])

    def batches_of_members(self, batch: Any, n_members: int, batch_idx: int) -> list[Any]:
        """Return the batch of each member, in the form that the loader gives."""
        if not self.has_member_rows:
            return [batch] * n_members
        loader: Any = self.trainer.train_dataloader
        rows = loader.indices_of(batch_idx).numel()
        return [batch_of_member(batch, index, n_members, rows) for index in range(n_members)]

    def _log_info(self, *messages: str) -> None:
        for message in filter(None, messages):
            rank_zero_info(f"{type(self).__name__}: {message}.")


def unpack(batch: Any) -> Sequence[Tensor]:
    """Return the tensors of a batch, of which the last one is the target; one of whole numbers in 64 bits.

    Raises:
        TypeError: If it is something else than two or more tensors.
    """
    if isinstance(batch, list | tuple) and len(batch) > 1 and all(isinstance(part, Tensor) for part in batch):
        target = batch[-1]
        return [*batch[:-1], target if target.is_floating_point() else target.long()]
    raise TypeError(
        f"a batch must be (x, y) or (x1, x2, ..., y) of tensors, got {type(batch).__name__}: let collate_fn return "
        "such a tuple. Other batches only work in training, with a LightningModule as estimator."
    )


def inputs_to_predict(batch: Any) -> Sequence[Any]:
    """Return the inputs of a batch of inputs, or of inputs and a target.

    Raises:
        TypeError: If it is something else.
    """
    if isinstance(batch, Tensor):
        return [batch]
    if not isinstance(batch, list | tuple):
        raise TypeError(f"a batch to predict must be x, (x, y) or (x1, x2, ..., y), got {type(batch).__name__}.")
    return batch[:-1] if len(batch) > 1 else batch


def batch_of_member(batch: Any, index: int, n_members: int, rows: int) -> Any:
    """Return one member's part of a batch that holds the rows of all.

    Args:
        batch: Tensors, arrays and lists of `rows` entries, in tuples, lists, mappings and dataclasses of any depth;
            numbers, strings and None belong to each member.
        index: Number of the member.
        n_members: Number of members.
        rows: Number of rows of all members together.

    Raises:
        ValueError: If a part has another number of rows.
        TypeError: If a part is of a type whose rows are not known.
    """
    if batch is None or isinstance(batch, str | bytes | bool | int | float | complex | torch.device | torch.dtype):
        return batch
    if isinstance(batch, Tensor | np.ndarray):
        if batch.ndim and len(batch) != rows:
            raise ValueError(
                f"a part of the batch has {len(batch)} rows, and {n_members} members have {rows} together: collate_fn "
                "mixes samples. Give shared_order=True."
            )
        return _own_rows(batch, index, n_members, rows) if batch.ndim else batch
    if isinstance(batch, list | tuple):
        if len(batch) == rows and not any(_has_rows(part, rows) for part in batch):
            return _own_rows(batch, index, n_members, rows)  # a list of samples
        parts = [batch_of_member(part, index, n_members, rows) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if isinstance(batch, MutableMapping):
        own = copy.copy(batch)
        own.update({name: batch_of_member(part, index, n_members, rows) for name, part in batch.items()})
        return own
    if is_dataclass(batch) and not isinstance(batch, type):
        values = {field.name: getattr(batch, field.name) for field in fields(batch) if field.init}
        return replace(batch, **batch_of_member(values, index, n_members, rows))
    raise TypeError(
        f"a batch contains a {type(batch).__name__}, which cannot be split by rows among {n_members} members: pass "
        "shared_order=True, or let collate_fn return tensors in tuples, lists or dicts."
    )


def _own_rows(part: Any, index: int, n_members: int, rows: int) -> Any:
    size = rows // n_members
    return part[index * size : (index + 1) * size]


def _has_rows(part: Any, rows: int) -> bool:
    if isinstance(part, Mapping):
        return any(_has_rows(value, rows) for value in part.values())
    return isinstance(part, Tensor | np.ndarray | list | tuple) and getattr(part, "ndim", 1) > 0 and len(part) == rows
