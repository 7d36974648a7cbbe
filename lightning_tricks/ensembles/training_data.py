"""What the members of an ensemble are trained on: shared batches, or batches that hold rows of each member's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from lightning_tricks._lightning_compat.loaders import uses_distributed_sampler
from lightning_tricks._lightning_compat.trainer import overfit_batches_of
from lightning_tricks.ensembles.core.member_batches import batch_of_member
from lightning_tricks.ensembles.core.sample_orders import is_shuffled, member_orders, sampler_of, why_not_reorder
from lightning_tricks.ensembles.core.sampling import MemberLoader


class TrainingData:
    """The training batches of an ensemble.

    Attributes:
        has_member_rows: Whether a batch holds rows of each member's own, one member after another.
    """

    def __init__(self) -> None:
        self.has_member_rows = False

    def loader(self, ensemble: Any, loaders: Any) -> Any:
        """Return the loader to train with, for the loaders that the user gave.

        Raises:
            ValueError: If the DataLoader has no batches.
        """
        _check_not_empty(ensemble, loaders)
        self.has_member_rows = False
        if overfit_batches_of(ensemble.trainer):
            return loaders  # the same batches in each epoch
        wants_own = ensemble.per_member_batches and ensemble.n_estimators > 1
        if reason := why_not_reorder(loaders):
            ensemble.on_shared_batches(reason if wants_own else "")
            return loaders
        rows = ensemble.member_rows(len(sampler_of(loaders)))
        # a loader that does not shuffle has the order that the user wants
        self.has_member_rows = wants_own and (is_shuffled(loaders) or rows is not None)
        n = ensemble.n_estimators if self.has_member_rows else 1
        trainer = ensemble.trainer
        kwargs = (trainer.distributed_sampler_kwargs or {}) if uses_distributed_sampler(trainer) else {}
        shard = kwargs.get("rank", 0), kwargs.get("num_replicas", 1)
        return MemberLoader(loaders, member_orders(loaders, n, ensemble.seed, rows and rows[:n], shard))

    def split(self, batch: Any, n_members: int) -> tuple[Sequence[Tensor], Tensor]:
        """Return the inputs of a batch and its targets for each member, (n_members, B, ...).

        Raises:
            TypeError: If the batch is no tuple of tensors.
            ValueError: If its parts do not hold the same number of rows for each member.
        """
        *inputs, target = unpack(batch)
        if not self.has_member_rows:
            return inputs, target.expand(n_members, *target.shape)
        if len(target) % n_members or any(len(value) != len(target) for value in inputs):
            sizes = ", ".join(str(len(value)) for value in (*inputs, target))
            raise ValueError(
                f"the parts of a batch have {sizes} rows, which are not those of {n_members} members: collate_fn mixes "
                "samples. Give shared_order=True."
            )
        return inputs, target.reshape(n_members, -1, *target.shape[1:])

    def batches_of_members(self, batch: Any, n_members: int, loader: Any, batch_idx: int) -> list[Any]:
        """Return the batch of each member, in the form that the loader gives."""
        if not self.has_member_rows:
            return [batch] * n_members
        rows = loader.indices_of(batch_idx).numel()
        return [batch_of_member(batch, index, n_members, rows) for index in range(n_members)]


def unpack(batch: Any) -> Sequence[Tensor]:
    """Return the tensors of a batch, of which the last one is the target.

    Raises:
        TypeError: If it is something else than two or more tensors.
    """
    if isinstance(batch, list | tuple) and len(batch) > 1 and all(isinstance(part, Tensor) for part in batch):
        return batch
    raise TypeError(
        f"a batch must be (x, y) or (x1, x2, ..., y) of tensors, got {type(batch).__name__}: let collate_fn return "
        "such a tuple. Other batches are for training alone, by the training_step of a LightningModule as estimator."
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


def _check_not_empty(ensemble: Any, loaders: Any) -> None:
    if isinstance(loaders, DataLoader) and not why_not_reorder(loaders) and not len(loaders):
        batches: Any = loaders.batch_sampler
        raise ValueError(
            f"{type(ensemble).__name__} has nothing to train with: the DataLoader has no batches "
            f"({len(batches.sampler)} samples, batch_size={batches.batch_size}, drop_last={batches.drop_last})."
        )
