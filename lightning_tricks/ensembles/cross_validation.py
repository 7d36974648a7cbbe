"""Cross-validation of any LightningModule: a fit for each fold, out-of-fold predictions and scores."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_tricks._lightning_compat.flavor import LightningModule, Trainer, is_overridden
from lightning_tricks._shared.checks import check_count
from lightning_tricks._shared.rng import check_seed, isolated_rng
from lightning_tricks.ensembles.core.folds import Fold, check_cv, make_folds
from lightning_tricks.ensembles.core.sampling import CROSS_VALIDATION, is_shuffled, purpose_seed
from lightning_tricks.ensembles.stacking_run import check_row_loader, read_targets, subset_loader


@dataclass(frozen=True)
class CrossValidation:
    """The result of `cross_validate`.

    Attributes:
        predictions: The output of `predict_step` for each row, from the module that was not trained on it, (N, ...),
            on the CPU.
        scores: For each fold, what its module logged when it validated the held-out rows, by name.
        mean: The mean of each score over the folds that have it.
        std: The population standard deviation of each score over these folds.
        folds: (rows to train on, rows held out) of each fold.
        modules: The trained module of each fold; empty without `keep_modules`.
    """

    predictions: Tensor
    scores: list[dict[str, float]]
    mean: dict[str, float]
    std: dict[str, float]
    folds: list[Fold]
    modules: list[LightningModule]


def cross_validate(
    make_module: Callable[[], LightningModule],
    data: Dataset[Any] | DataLoader[Any] | Sequence[Tensor],
    trainer_factory: Callable[[], Trainer],
    cv: Any = 5,
    *,
    batch_size: int | None = None,
    stratified: bool | None = None,
    keep_modules: bool = False,
    seed: int = 0,
) -> CrossValidation:
    """Train a new module in each fold, and validate and predict the rows that the fold leaves out.

    No validation runs while a fold trains, so nothing sees the rows left out before its fit has ended, and callbacks
    have no validation metric to monitor. Each fold has its own seed, so its result does not depend on earlier folds.
    The global random state is restored afterwards.

    Args:
        make_module: Makes a new LightningModule; for example a class without arguments. Its validation, if any,
            provides the scores, and its `predict_step` the predictions, a tensor (B, ...) for each batch.
        data: A dataset with a length; a tuple of tensors (x, ..., y); or a DataLoader, whose settings are kept:
            training batches are shuffled if it shuffles. Instead of your own sampler, pass a `Subset`.
        trainer_factory: Makes a new Trainer for each fold.
        cv: The number of folds >= 2, not shuffled; a list of (train, test) indices, whose test parts contain each row
            once; or an object with `split(X, y)`, which gets row numbers as X.
        batch_size: Rows of a batch, if `data` is not a DataLoader; 32 by default. Training batches are shuffled.
        stratified: Whether a number of folds means stratified folds; by default, if the targets are class indices:
            whole numbers (N,).
        keep_modules: Whether the trained modules are returned.
        seed: Seed of the folds' random numbers, in [0, 2**32 - 1].

    Raises:
        TypeError: If an argument is of the wrong kind, or `predict_step` does not return a tensor.
        ValueError: If the folds do not fit the data, or `predict_step` does not return a row for each sample.

    Source: scikit-learn's `cross_validate` and `cross_val_predict`.

    Examples:
        >>> import warnings
        >>> from functools import partial
        >>> from torch import nn
        >>> from lightning_tricks.ensembles import VotingRegressor
        >>> x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
        >>> make = partial(VotingRegressor, nn.Linear, 2, {"in_features": 4, "out_features": 1})
        >>> quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        >>> trainer = partial(Trainer, max_epochs=2, accelerator="cpu", logger=False, **quiet)
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")
        ...     result = cross_validate(make, (x, x.sum(1, keepdim=True)), trainer, cv=3)
        >>> result.predictions.shape, len(result.scores), sorted(result.mean)
        (torch.Size([30, 1]), 3, ['val/loss'])
    """
    check_seed(seed)
    cv = check_cv(cv)
    if cv == "prefit":
        raise ValueError('cv="prefit" is for StackingClassifier: give a number of folds or a list of them.')
    loader = check_row_loader(_as_loader(data, batch_size))
    folds = _make_folds(cv, loader, stratified)
    parts = [
        _run_fold(make_module, trainer_factory, loader, fold, purpose_seed(seed, CROSS_VALIDATION, index))
        for index, fold in enumerate(folds)
    ]
    predictions = torch.cat([prediction for _, _, prediction in parts])
    in_order = torch.empty_like(predictions)
    in_order[torch.cat([held_out for _, held_out in folds])] = predictions
    scores = [of_fold for _, of_fold, _ in parts]
    means, deviations = _mean_and_std(scores)
    modules = [module for module, _, _ in parts] if keep_modules else []
    return CrossValidation(in_order, scores, means, deviations, folds, modules)


def _run_fold(
    make_module: Callable[[], Any], trainer_factory: Callable[[], Any], loader: DataLoader[Any], fold: Fold, seed: int
) -> tuple[LightningModule, dict[str, float], Tensor]:
    train, held_out = fold
    with isolated_rng(seed):
        module, trainer = make_module(), trainer_factory()
        for name, made, kind in (("make_module", module, LightningModule), ("trainer_factory", trainer, Trainer)):
            if not isinstance(made, kind):
                raise TypeError(f"{name} must make a {kind.__name__}, it made {made!r}.")
        if trainer.world_size > 1:
            raise ValueError(
                f"trainer_factory made a Trainer of {trainer.world_size} devices: give one device, so that each fold's "
                "predictions are in one process."
            )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You defined a `validation_step` but have no")  # it comes after the fit
            trainer.fit(module, subset_loader(loader, train, is_shuffled(loader)))
        in_order = subset_loader(loader, held_out, shuffle=False, seed=seed)
        validates = is_overridden("validation_step", module)
        scores = trainer.validate(module, in_order, verbose=False) if validates else []
        batches = trainer.predict(module, in_order)
    values = {name: float(value) for part in scores for name, value in part.items()}
    return module, values, _joined(module, batches, len(held_out))


def _joined(module: LightningModule, batches: Any, size: int) -> Tensor:
    """Return the predictions of a fold's batches, (size, ...), on the CPU."""
    name = f"{type(module).__name__}.predict_step"
    if not batches or not all(isinstance(batch, Tensor) for batch in batches):
        kind = type(batches[0]).__name__ if batches else "nothing"
        raise TypeError(f"{name} must return a tensor for each batch, got {kind}.")
    joined = torch.cat([batch.detach().cpu() for batch in batches])
    if len(joined) != size:
        raise ValueError(f"{name} must return a row for each of the {size} held-out samples, got {len(joined)} rows.")
    return joined


def _mean_and_std(scores: Sequence[dict[str, float]]) -> tuple[dict[str, float], dict[str, float]]:
    names = dict.fromkeys(name for fold in scores for name in fold)
    values = {name: torch.tensor([one[name] for one in scores if name in one], dtype=torch.float64) for name in names}
    means = {name: float(value.mean()) for name, value in values.items()}
    return means, {name: float(value.std(unbiased=False)) for name, value in values.items()}


def _as_loader(data: Any, batch_size: int | None) -> DataLoader[Any]:
    if isinstance(data, DataLoader):
        if batch_size is not None:
            raise ValueError(f"batch_size={batch_size} is not used: data is a DataLoader, whose batches are kept.")
        return data
    if isinstance(data, list | tuple) and data and all(isinstance(part, Tensor) for part in data):
        lengths = [len(part) for part in data]
        if len(set(lengths)) > 1:
            raise ValueError(f"data: tensors must have one length, got {', '.join(map(str, lengths))}.")
        data = TensorDataset(*data)
    if not isinstance(data, Dataset) or not hasattr(data, "__len__"):
        raise TypeError(f"data must be a data set with a length, tensors (x, y) or a DataLoader, got {data!r}.")
    return DataLoader(data, 32 if batch_size is None else check_count("batch_size", batch_size), shuffle=True)


def _make_folds(cv: Any, loader: DataLoader[Any], stratified: bool | None) -> list[Fold]:
    size = len(loader.dataset)  # type: ignore[arg-type]
    targets = None if isinstance(cv, list) or (isinstance(cv, int) and stratified is False) else read_targets(loader)
    if stratified is None:
        stratified = targets is not None and targets.ndim == 1 and not targets.is_floating_point()
    with isolated_rng():
        return make_folds(cv, size, targets, stratified=stratified)
