"""Folds of a data set: which rows members are trained on, and which rows they are held out from."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_tricks._shared.checks import check_count

Fold = tuple[Tensor, Tensor]  # rows to train on, rows held out; int64

DEFAULT_CV = 5


def check_cv(cv: Any) -> Any:
    """Check the choice of folds, as far as it can be without data.

    Args:
        cv: A number of folds >= 2, None for 5, "prefit", a list of (train, test) indices, or an object with
            `split(X, y)`.

    Returns:
        The same; 5 for None, and a list of pairs of tensors for a list.

    Raises:
        TypeError: If it has none of these forms.
        ValueError: If a number or a list cannot be folds.
    """
    if cv is None:
        return DEFAULT_CV
    if cv == "prefit" if isinstance(cv, str) else callable(getattr(cv, "split", None)):
        return cv
    if isinstance(cv, int) and not isinstance(cv, bool):
        return check_count("cv", cv, 2)
    if isinstance(cv, list | tuple):
        return _parse_folds(cv)
    raise TypeError(
        'cv must be a number of folds, "prefit", a list of (train, test) indices or an object with split(X, y), got '
        f"{cv!r}."
    )


def make_folds(cv: Any, size: int, targets: Tensor | None = None, *, stratified: bool = False) -> list[Fold]:
    """Make the folds of a data set; each row is held out once.

    Args:
        cv: The result of `check_cv`, other than "prefit".
        size: Number of rows.
        targets: Targets of the rows, which stratified folds and objects with `split` need.
        stratified: Whether a number of folds means stratified ones, for targets that are classes (size,).

    Returns:
        (rows to train on, rows held out) for each fold.

    Raises:
        ValueError: If rows are missing, held out twice or in both parts, or if there are too few of them.

    Source: scikit-learn's `KFold` and `StratifiedKFold`, without shuffling.

    Examples:
        >>> [held_out.tolist() for _, held_out in make_folds(2, 4, torch.tensor([0, 1, 1, 0]), stratified=True)]
        [[0, 1], [2, 3]]
    """
    if not isinstance(cv, list):
        is_number, stratified = isinstance(cv, int), stratified and targets is not None
        y = None if targets is None or (is_number and not stratified) else targets.numpy()
        splitter: Any = cv
        if is_number:
            from sklearn.model_selection import KFold, StratifiedKFold  # takes a second

            splitter = StratifiedKFold(cv) if stratified else KFold(cv)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The least populated class")  # it may have no row in a fold
                pairs = list(splitter.split(np.arange(size).reshape(-1, 1), y))
        except ValueError as error:
            raise ValueError(f"the {size} rows of the data do not fit cv={cv!r}, give fewer folds: {error}") from error
        cv = _parse_folds(pairs)
    _check_partition(cv, size)
    return list(cv)


def check_classes(folds: Sequence[Fold], labels: Tensor) -> None:
    """Refuse folds whose rows to train on lack a class of the data.

    Raises:
        ValueError: If there is one, or if the data have one class.
    """
    classes, counts = labels.unique(return_counts=True)
    if len(classes) < 2:
        raise ValueError(f"the targets have one class, {int(classes[0])}: a classifier needs two.")
    for index, (train, _) in enumerate(folds):
        missing = classes[~torch.isin(classes, labels[train])]
        if len(missing):
            count = int(counts[classes == missing[0]])
            raise ValueError(
                f"the rows that fold {index} trains on have no sample of class {int(missing[0])}, of which the data "
                f"have {count}: give other folds, cv=[(train, test), ...], or more samples of the class."
            )


def folds_digest(folds: Sequence[Fold]) -> str:
    """Return a digest of the rows in all folds."""
    digest = hashlib.sha256()
    for train, held_out in folds:
        for rows in (train, held_out):
            digest.update(len(rows).to_bytes(8, "little"))
            digest.update(rows.numpy().tobytes())
    return digest.hexdigest()


def _parse_folds(given: Sequence[Any]) -> list[Fold]:
    folds = []
    for index, pair in enumerate(given):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise TypeError(f"cv[{index}] must be a pair of row indices, (train, test), got {pair!r}.")
        train, held_out = (_parse_rows(f"cv[{index}][{part}]", rows) for part, rows in enumerate(pair))
        both = train[torch.isin(train, held_out)]
        if len(both):
            raise ValueError(f"cv[{index}]: row {int(both[0])} is in train and in test; leave it out of one of them.")
        folds.append((train, held_out))
    if len(folds) < 2:
        raise ValueError(f"cv must hold at least 2 folds, got {len(folds)}.")
    return folds


def _parse_rows(name: str, rows: Any) -> Tensor:
    indices = torch.as_tensor(np.asarray(rows))
    if indices.ndim != 1 or not len(indices) or indices.is_floating_point() or indices.dtype == torch.bool:
        raise ValueError(f"{name} must hold row indices, whole numbers, at least one, got {rows!r}.")
    if indices.min() < 0:
        raise ValueError(f"{name} must hold row indices >= 0, got {int(indices.min())}.")
    return indices.to(torch.int64)


def _check_partition(folds: Sequence[Fold], size: int) -> None:
    highest = max(int(rows.max()) for fold in folds for rows in fold)
    if highest >= size:
        raise ValueError(f"cv has the row index {highest}, the data have {size} rows, 0 to {size - 1}.")
    times = torch.cat([held_out for _, held_out in folds]).bincount(minlength=size)
    for count, problem in ((0, "in no test part"), (2, "in more than one test part")):
        wrong = (times == 0 if count == 0 else times >= 2).nonzero().flatten()
        if len(wrong):
            raise ValueError(f"cv: {len(wrong)} rows are {problem}, such as row {int(wrong[0])}; each must be in one.")
