"""One fit of a stacking ensemble: its data, its folds, the length of its stages, and the features gathered so far."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_tricks._lightning_compat.flavor import MisconfigurationException, Trainer
from lightning_tricks._lightning_compat.loaders import request_train_loaders, uses_distributed_sampler
from lightning_tricks._lightning_compat.trainer import is_fast_dev_run, overfit_batches_of
from lightning_tricks._shared.rng import isolated_rng
from lightning_tricks.ensembles.core import sampling
from lightning_tricks.ensembles.core.folds import Fold, check_classes, folds_digest, make_folds
from lightning_tricks.ensembles.stages import stage_of_epoch
from lightning_tricks.ensembles.training_data import unpack


class StackingRun:
    """The data, the folds and the progress of one fit.

    Args:
        trainer: The Trainer of the fit.
        loader: The user's training loader.
        folds: The folds; none if the members are trained already.
        epochs: Epochs of each stage: the folds, the refit and, for a meta-learner that is trained by gradient, that.

    Attributes:
        features: Features of the meta-learner for each row, (N, F); None before the first fold's end.
        targets: Targets of the rows, (N, ...).
        loader_stage: The stage of the loader that the Trainer has.
    """

    def __init__(self, trainer: Trainer, loader: DataLoader[Any], folds: list[Fold], epochs: list[int]) -> None:
        self.trainer, self.loader, self.folds, self.epochs = trainer, loader, folds, epochs
        self.size = len(loader.dataset)  # type: ignore[arg-type]
        self.features: Tensor | None = None
        self.targets: Tensor | None = None
        self.loader_stage = 0

    def next_stage(self) -> int:
        """Return the stage of the epoch that runs or comes next."""
        progress: Any = self.trainer.fit_loop.epoch_progress.current
        return stage_of_epoch(self.epochs, progress.processed)

    def description(self, trains_final: bool) -> str:
        """Return a description of the stages of the fit."""
        epochs, n_folds = self.epochs, len(self.folds)
        parts = [f"{n_folds} folds of {epochs[0]} epochs and a refit of {epochs[n_folds]} epochs"] if n_folds else []
        parts += [f"{epochs[-1]} epochs of the meta-learner"] if trains_final else []
        return f"{', then '.join(parts)}: {sum(epochs)} epochs in all" if parts else "only the meta-learner is fitted"

    def keep(self, rows: Tensor, features: Tensor, targets: Tensor) -> None:
        """Keep the features and targets of some rows; those of rank 0."""
        features, targets = self.trainer.strategy.broadcast((features, targets))
        if self.features is None or self.targets is None:
            self.features = features.new_zeros(self.size, *features.shape[1:])
            self.targets = targets.new_zeros(self.size, *targets.shape[1:])
        self.features[rows], self.targets[rows] = features, targets

    def loader_for_members(self, stage: int) -> DataLoader[Any]:
        """Return the loader of the rows that members are trained on in a stage."""
        if stage >= len(self.folds):
            return self.loader
        return subset_loader(self.loader, self.folds[stage][0], sampling.is_shuffled(self.loader))

    def loader_for_final(self) -> DataLoader[Any]:
        """Return the loader of the features, in batches as large as those of the user."""
        given, features, targets = self.loader, self.features, self.targets
        if features is None or targets is None:
            raise MisconfigurationException("the features of the meta-learner do not exist yet.")
        dataset = TensorDataset(features, targets)
        return DataLoader(
            dataset,
            given.batch_size,
            sampling.is_shuffled(given),
            drop_last=given.drop_last,
            pin_memory=given.pin_memory,
        )

    # --- the checkpoint

    def state(self) -> dict[str, Any]:
        """Return the state that a resumed fit needs, beside the epochs of its stages."""
        return {"folds": folds_digest(self.folds), "features": self.features, "targets": self.targets}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue with the features that a stopped fit has gathered.

        Raises:
            MisconfigurationException: If it had other stages or other folds.
        """
        if state["epochs"] != self.epochs:
            raise MisconfigurationException(
                f"The checkpoint is of a fit with stages of {state['epochs']} epochs, this one has {self.epochs}: "
                "resume with the cv=, epochs_per_fold=, final_estimator= and max_epochs that it had."
            )
        if "folds" not in state:  # it was saved after the fit
            return
        if state["folds"] != folds_digest(self.folds):
            raise MisconfigurationException(
                f"The checkpoint is of a fit with other folds than the {len(self.folds)} of this one: resume with the "
                "data and the cv= that it had (an object that shuffles needs a random_state)."
            )
        self.features, self.targets = state["features"], state["targets"]


def plan_run(ensemble: Any) -> StackingRun:
    """Check the Trainer and the training data of a fit, and make its folds; nothing is changed.

    Raises:
        MisconfigurationException: If members cannot be trained in folds of these data.
    """
    trainer = ensemble.trainer
    given = request_train_loaders(trainer)
    try:
        epochs = _epochs(ensemble)
        loader = check_row_loader(given)
        folds = [] if ensemble.cv == "prefit" else _folds(ensemble, loader)
    except (TypeError, ValueError) as error:
        raise MisconfigurationException(f"{type(ensemble).__name__}: {error}") from error
    member_epochs = [ensemble.epochs_per_fold or epochs] * len(folds) + [epochs] * bool(folds)
    return StackingRun(trainer, loader, folds, member_epochs + [epochs] * ensemble.trains_final_by_gradient)


@contextmanager
def max_epochs_of(trainer: Trainer, epochs: int) -> Iterator[None]:
    """Let the Trainer run for so many epochs in all, until the context is left."""
    loop = trainer.fit_loop
    before, loop.max_epochs = loop.max_epochs, epochs
    try:
        yield
    finally:
        if loop.max_epochs == epochs:
            loop.max_epochs = before


def _epochs(ensemble: Any) -> int:
    trainer = ensemble.trainer
    if is_fast_dev_run(trainer):
        return 1
    if overfit_batches_of(trainer):
        raise ValueError(
            f"overfit_batches={trainer.overfit_batches} repeats the same batches, so that no rows can be held out: "
            "leave it out."
        )
    if trainer.reload_dataloaders_every_n_epochs:
        raise ValueError(
            f"reload_dataloaders_every_n_epochs={trainer.reload_dataloaders_every_n_epochs} may change the rows, which "
            "the folds are made of: leave it out."
        )
    epochs = trainer.max_epochs
    if epochs is None or epochs < 1:
        raise ValueError(f"max_epochs={epochs} is not the length of a fold: give Trainer(max_epochs=...), at least 1.")
    return int(epochs)


def check_row_loader(loader: Any) -> DataLoader[Any]:
    """Return a loader of rows each of which can be held out.

    Raises:
        ValueError: If it is another one, with the reason.
    """
    reason = sampling.why_not_reorder(loader)
    if not reason:
        sampler = sampling.sampler_of(loader)
        if not sampling.yields_all_once(sampler) or len(sampler) != len(loader.dataset):
            reason = f"a {type(sampler).__name__} chooses rows: give a Subset of them"
    if reason:
        raise ValueError(f"folds need a DataLoader with shuffle=... whose dataset has a length, and {reason}.")
    if not len(loader.dataset):
        raise ValueError("the training data have no samples.")
    return cast(DataLoader[Any], loader)


def _folds(ensemble: Any, loader: DataLoader[Any]) -> list[Fold]:
    size = len(loader.dataset)  # type: ignore[arg-type]
    needs_targets = ensemble.is_classifier or not isinstance(ensemble.cv, int | list)
    targets = read_targets(loader) if needs_targets else None
    if ensemble.is_classifier and targets is not None and (targets.ndim != 1 or targets.is_floating_point()):
        raise ValueError(f"targets must be class indices (N,), got {targets.dtype} {tuple(targets.shape)}.")
    if ensemble.is_classifier and targets is not None and targets.min() < 0:
        raise ValueError(f"targets must be class indices >= 0, got {int(targets.min())}.")
    with isolated_rng():
        folds = make_folds(ensemble.cv, size, targets, stratified=ensemble.is_classifier)
    folds = list(ensemble.trainer.strategy.broadcast(folds))
    if ensemble.is_classifier and targets is not None:
        check_classes(folds, targets)
    world = ensemble.trainer.world_size if uses_distributed_sampler(ensemble.trainer) else 1
    for index, (train, _) in enumerate(folds):
        if loader.drop_last and -(-len(train) // world) < (loader.batch_size or 1):
            raise ValueError(
                f"fold {index} trains on {len(train)} rows, which drop_last=True leaves out: they are less than "
                f"batch_size={loader.batch_size}. Give smaller batches or drop_last=False."
            )
    return folds


def read_targets(loader: DataLoader[Any]) -> Tensor:
    """Return the targets of all rows of a loader's data set, (N, ...); the global random state does not change."""
    size = len(loader.dataset)  # type: ignore[arg-type]
    tensors = sampling.tensors_in_memory(loader)
    if tensors is not None and len(tensors[0]) > 1:
        target = tensors[0][-1]
        return (target if tensors[1] is None else target[tensors[1]]).detach().cpu()
    with isolated_rng(0):
        batches = subset_loader(loader, torch.arange(size), shuffle=False, seed=0)
        targets = torch.cat([unpack(batch)[-1].detach().cpu() for batch in batches])
    if len(targets) != size:
        raise ValueError(f"the data have {size} rows, and batches hold {len(targets)} targets: collate_fn drops some.")
    return targets


def subset_loader(given: DataLoader[Any], rows: Tensor, shuffle: bool, seed: int | None = None) -> DataLoader[Any]:
    """Return a loader of some rows with the settings of the given one.

    With a seed, it yields all of them in their order, and the seeds of its workers follow from the seed alone.
    """
    batches: Any = given.batch_sampler
    generator = getattr(batches.sampler, "generator", None) if seed is None else torch.Generator().manual_seed(seed)
    dataset: Any = given.dataset
    is_whole = hasattr(dataset, "__len__") and torch.equal(rows, torch.arange(len(dataset)))
    return DataLoader(
        dataset if is_whole else Subset(dataset, rows.tolist()),
        batches.batch_size,
        shuffle,
        num_workers=given.num_workers,
        collate_fn=given.collate_fn,
        pin_memory=given.pin_memory,
        drop_last=batches.drop_last and seed is None,
        timeout=given.timeout,
        worker_init_fn=given.worker_init_fn,
        multiprocessing_context=given.multiprocessing_context,
        generator=generator if isinstance(generator, torch.Generator) else given.generator,
        prefetch_factor=given.prefetch_factor,
        persistent_workers=given.persistent_workers and seed is None,
    )
