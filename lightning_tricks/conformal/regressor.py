"""Intervals that hold the true value with a chosen probability."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_tricks._shared.checks import check_choice
from lightning_tricks.conformal.functional import interval_scores, widened
from lightning_tricks.conformal.predictor import ConformalPredictor


class ConformalRegressor(ConformalPredictor):
    """Predict an interval that contains the true value with a probability of at least 1 - alpha.

    It is a LightningModule around a trained module. `conformal.predict(x)`, `conformal(x)` and `trainer.predict` return
    lower and upper ends, (N, 2); the module always runs in evaluation mode, without gradients.

    Args:
        module: A trained module with one output for each row, (N,) or (N, 1). For several outputs, make one
            ConformalRegressor each.
        loader: Calibration data, which the module was not trained on: batches (x, y) or (x1, x2, ..., y) with values y,
            (N,) or (N, 1). None if you load a state dict, or call `calibrate(loader)` later.
        alpha: The share of intervals that may miss the true value, in (0, 1).
        score: "absolute" is the residual, with intervals of one width. "normalised" is the residual divided by the
            standard deviation of the row, with wider intervals for uncertain rows: it comes from `predict_uncertainty`
            of an ensemble (the root of `total`), or the module returns (mean, scale), (N, 2) or a tuple; a row with a
            scale of 0 or less gets NaN ends. "quantile" needs a module that returns a lower and an upper quantile,
            (N, 2) or a tuple, and widens or narrows that interval; one that would be empty becomes its middle.
        groups: None for one quantile. A function of the inputs of a batch that returns the group of each row, whole
            numbers (N,), for one per group, which `coverage` reports; a row of a group without calibration data has an
            infinite interval.

    Raises:
        TypeError: If an argument, or a batch of the loader, is of the wrong kind.
        ValueError: If an argument is out of range, there are too few rows for `alpha` (ceil(1 / alpha) - 1, in each
            group), the module returns something else than `score` needs, or a score is NaN or infinite.

    Source: Lei et al., arXiv 1604.04173 ("absolute", "normalised"); Romano, Patterson and Candes, arXiv 1905.03222
    ("quantile"); Vovk, arXiv 1209.2673 (groups).

    Examples:
        >>> x = torch.arange(20.0)
        >>> ConformalRegressor(nn.Identity(), [(x, x + 1)]).predict(torch.tensor([5.0]))
        tensor([[4.0000, 6.0000]])
    """

    def __init__(
        self,
        module: nn.Module,
        loader: Iterable[Any] | None = None,
        alpha: float = 0.1,
        score: Literal["absolute", "normalised", "quantile"] = "absolute",
        *,
        groups: Callable[..., Tensor] | None = None,
    ) -> None:
        check_choice("score", score, ("absolute", "normalised", "quantile"))
        if groups is not None and not callable(groups):
            raise TypeError(f"groups must be a function of the inputs of a batch, got {groups!r}.")
        super().__init__(module, alpha, score, groups, {})
        if loader is not None:
            self.calibrate(loader)

    def prediction(self, inputs: Sequence[Any]) -> Tensor:
        """Return lower and upper ends of a batch, (N, 2)."""
        lower, upper, width = self._band(inputs)
        return widened(lower, upper, width, self.row_quantiles(inputs, lower))

    def covers(self, predicted: Tensor, target: Tensor) -> Tensor:
        """Return which intervals contain the true value, their ends included, (N,)."""
        truth = target.reshape(-1)
        return (predicted[:, 0] <= truth) & (truth <= predicted[:, 1])

    def calibration_rows(self, inputs: Sequence[Any], target: Tensor, draws: torch.Generator) -> tuple[Tensor, ...]:
        """Return score and group of each row."""
        lower, upper, width = self._band(inputs)
        (truth,) = _columns([target.to(lower.dtype)], 1, "targets must be")
        if truth.shape != lower.shape:
            raise ValueError(f"the module returns {len(lower)} values for {len(truth)} targets.")
        return interval_scores(lower, upper, width, truth), self.group_ids(inputs, lower)

    def _band(self, inputs: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Return lower and upper end, and the width that a score of 1 adds on both sides, (N,) each."""
        uncertainty: Any = getattr(self.module, "predict_uncertainty", None) if self.score == "normalised" else None
        outputs: Any = (uncertainty or self.module)(*inputs)
        if uncertainty is not None:
            outputs = outputs.mean, outputs.total.sqrt()
        if self.score == "absolute":
            (mean,) = _columns([outputs], 1, "module must return")
            return mean, mean, torch.ones_like(mean)
        if isinstance(outputs, Tensor) and outputs.shape[1:] == (2,):
            outputs = outputs.unbind(1)
        first, second = _columns(outputs, 2, f'for score="{self.score}", module must return')
        if self.score == "quantile":
            return first, second, torch.ones_like(first)
        return first, first, second.where(second > 0, torch.nan)


def _columns(values: Any, n: int, must: str) -> list[Tensor]:
    """Return n tensors (N,) in single precision at least, given as (N,) or (N, 1)."""
    parts = values if isinstance(values, list | tuple) else [values]
    if len(parts) != n or not all(isinstance(p, Tensor) and (p.ndim == 1 or p.shape[1:] == (1,)) for p in parts):
        got = ", ".join(str(tuple(p.shape)) if isinstance(p, Tensor) else type(p).__name__ for p in parts)
        what = "one number for each row, (N,) or (N, 1)" if n == 1 else "two numbers for each row, (N, 2) or a tuple"
        raise ValueError(f"{must} {what}, got {got}: use a separate ConformalRegressor for each output.")
    return [part.reshape(-1).to(torch.promote_types(part.dtype, torch.float32)) for part in parts]
