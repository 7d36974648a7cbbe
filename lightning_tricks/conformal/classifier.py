"""Sets of classes that hold the true one with a chosen probability."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_tricks._shared import calibration
from lightning_tricks._shared.checks import check_choice, check_not_negative, check_optional_count
from lightning_tricks._shared.tensors import to_double
from lightning_tricks.conformal.functional import ROUNDING, choose_penalty, needed_rows, rank_penalty, ranked_scores
from lightning_tricks.conformal.predictor import ConformalPredictor


class ConformalClassifier(ConformalPredictor):
    """Predict a set of classes that contains the true one with a probability of at least 1 - alpha.

    It is a LightningModule around a trained module. `conformal.predict(x)`, `conformal(x)` and `trainer.predict` return
    boolean masks (N, C), True for the classes of the set; the module always runs in evaluation mode, without gradients.

    A set of "aps" or "raps" contains the most probable classes: the fewest with probabilities that sum to more than the
    quantile. Without a `generator`, it is deterministic and has at least one class, so it covers more than 1 - alpha if
    the most probable class already does. With a `generator`, it is randomized: its last class is left out at random, so
    it covers exactly 1 - alpha and may be empty. A row with NaN outputs has all classes.

    Args:
        module: A trained module that returns logits or probabilities, (N, C), of at least two classes, or a dict or an
            object with them as `logits`.
        loader: Calibration data, which the module was not trained on: batches (x, y) or (x1, x2, ..., y) with class
            indices y, (N,). None if you load a state dict, or call `calibrate(loader)` later.
        alpha: The share of sets that may miss the true class, in (0, 1).
        score: "lac" is one minus the probability, with the smallest sets on average; "aps" is the sum of the
            probabilities of the more probable classes, with larger sets for difficult rows; "raps" is "aps" with a
            penalty on unlikely classes, with smaller sets if there are many classes.
        outputs: What the module returns, "logits" or "probabilities". Leave it None for an ensemble or a
            `CalibratedClassifier`, and for a module with outputs below 0 or above 1, which must be logits.
        groups: None for one quantile. "class-conditional" for one per class, so that the guarantee applies to each;
            `coverage` reports it. A function of the inputs of a batch that returns the group of each row, whole numbers
            (N,), for one per group; a row of a group without calibration data has all classes.
        allow_empty: Whether sets may be empty, which happens with "lac" and randomized sets if no class is likely;
            False adds the most probable class.
        generator: Draws the random numbers of randomized "aps" and "raps", in calibration and in each prediction; None
            for deterministic sets.
        lambda_reg: The penalty of "raps" for each rank above `k_reg`; None to choose it on a random fifth of the
            calibration rows, which then do not calibrate. `penalty` contains the choice.
        k_reg: The number of the most probable classes that "raps" does not penalize; None to choose it on these rows.

    Raises:
        TypeError: If an argument, or a batch of the loader, is of the wrong kind.
        ValueError: If an argument is out of range, there are too few rows for `alpha` (ceil(1 / alpha) - 1, in each
            group), labels are not classes, outputs are NaN or contradict `outputs`, or all are between 0 and 1 and
            `outputs` is None.

    Source: Sadinle, Lei and Wasserman, arXiv 1609.00451 ("lac"); Romano, Sesia and Candes, arXiv 2006.02544 ("aps");
    Angelopoulos et al., arXiv 2009.14193 ("raps"); Vovk, arXiv 1209.2673 (classes and groups).

    Examples:
        >>> logits, labels = torch.eye(3).repeat(10, 1) * 2, torch.arange(3).repeat(10)
        >>> ConformalClassifier(nn.Identity(), [(logits, labels)]).predict(torch.tensor([[4.0, 0, 0], [1.0, 1, 0]]))
        tensor([[ True, False, False],
                [False, False, False]])
    """

    def __init__(
        self,
        module: nn.Module,
        loader: Iterable[Any] | None = None,
        alpha: float = 0.1,
        score: Literal["lac", "aps", "raps"] = "lac",
        *,
        outputs: Literal["logits", "probabilities"] | None = None,
        groups: Literal["class-conditional"] | Callable[..., Tensor] | None = None,
        allow_empty: bool = True,
        generator: torch.Generator | None = None,
        lambda_reg: float | None = None,
        k_reg: int | None = None,
    ) -> None:
        check_choice("score", score, ("lac", "aps", "raps"))
        if groups is not None and not callable(groups):
            check_choice("groups", groups, ("class-conditional",))
        if score != "raps" and (lambda_reg, k_reg) != (None, None):
            raise ValueError(f'lambda_reg and k_reg belong to score="raps", got score={score!r}.')
        if generator is not None and (score == "lac" or not isinstance(generator, torch.Generator)):
            raise ValueError(f'generator must be a torch.Generator, for score="aps" or "raps", got {generator!r}.')
        lambda_reg = None if lambda_reg is None else check_not_negative("lambda_reg", lambda_reg)
        k_reg = check_optional_count("k_reg", k_reg, minimum=0)
        self._kind = calibration.stated_outputs(module, outputs)
        own = {"outputs": self._kind or "logits", "lambda_reg": lambda_reg, "k_reg": k_reg}
        super().__init__(module, alpha, score, groups, own | {"randomized": bool(generator)}, allow_empty=allow_empty)
        self.outputs, self.allow_empty, self.generator = outputs, allow_empty, generator
        self.lambda_reg, self.k_reg, self._by_class = lambda_reg, k_reg, groups == "class-conditional"
        self._tuning_share = 0.2 if score == "raps" and None in (lambda_reg, k_reg) else 0
        if loader is not None:
            self.calibrate(loader)

    def covers(self, predicted: Tensor, target: Tensor) -> Tensor:
        """Return which sets contain the true class, (N,)."""
        return predicted.gather(1, target.long().unsqueeze(1))[:, 0]

    def prediction(self, inputs: Sequence[Any]) -> Tensor:
        """Return the sets of a batch as boolean masks, (N, C)."""
        order, scores = self._ranked_scores(calibration.logits_in(self.module(*inputs)))
        penalties = rank_penalty(torch.arange(1, scores.shape[1] + 1, device=scores.device), self.penalty)
        limits = self.quantiles[order] if self._by_class else self.row_quantiles(inputs, order).unsqueeze(1)
        chosen = ~(scores + penalties > limits + ROUNDING * (1 - scores))  # a row of NaN has all classes
        if not self.allow_empty:
            chosen[:, 0] |= ~chosen.any(1)
        return torch.empty_like(chosen).scatter_(1, order, chosen)

    def calibration_rows(self, inputs: Sequence[Any], target: Tensor, draws: torch.Generator) -> tuple[Tensor, ...]:
        """Return score, group, rank and kind of each row, whether it tunes, and scores that tune."""
        outputs = calibration.logits_in(self.module(*inputs))
        order, scores = self._ranked_scores(outputs)
        n, classes = scores.shape
        if target.is_floating_point() or target.shape != (n,):
            raise ValueError(f"targets must be class indices, ({n},), got {tuple(target.shape)} of {target.dtype}.")
        target = target.long()
        if len(wrong := target[(target < 0) | (target >= classes)]):
            remedy = f"0 to {classes - 1}: correct it, or leave such rows out of the loader."
            raise ValueError(f"class {int(wrong[0])} is not one of the module's {classes} classes, {remedy}")
        place = (order == target.unsqueeze(1)).int().argmax(1, keepdim=True)
        groups = target if self._by_class else self.group_ids(inputs, target)
        kinds = torch.stack([calibration.are_between_0_and_1(outputs), calibration.are_probabilities(outputs)], 1)
        tunes = (torch.rand(n, generator=draws, device=draws.device) < self._tuning_share).to(scores.device)
        return scores.gather(1, place)[:, 0], groups, place[:, 0] + 1, kinds, tunes, scores[tunes]

    def finish_calibration(self, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return scores (n,), groups (n,), all groups (G,), and penalty (2,), which is chosen here."""
        scores, ids, ranks, kinds, tunes, tuning = rows
        calibration.check_outputs(self._kind, *kinds.T)
        penalty = torch.zeros(2, device=scores.device)
        if self.score == "raps":
            n, needed = len(tuning), needed_rows(self.alpha)
            if self._tuning_share and min(n, len(scores) - n) < needed:
                raise ValueError(
                    f"alpha={self.alpha:g} needs at least {needed} rows to calibrate, and as many (a fifth of all) to "
                    f"choose the penalty, got {len(scores) - n} and {n}: give more rows, or lambda_reg and k_reg."
                )
            penalty = choose_penalty(tuning, ranks[tunes], self.alpha, self.lambda_reg, self.k_reg)
        groups = torch.arange(tuning.shape[1], device=ids.device) if self._by_class else ids.unique()
        return (scores + rank_penalty(ranks, penalty))[~tunes], ids[~tunes], groups, penalty

    def _ranked_scores(self, outputs: Any) -> tuple[Tensor, Tensor]:
        if not isinstance(outputs, Tensor) or outputs.ndim != 2 or outputs.shape[1] < 2:
            got = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            remedy = "for a single logit return torch.nn.functional.pad(logits.view(-1, 1), (1, 0))"
            raise ValueError(
                f"module must return a number for each of two or more classes, (N, C), got {got}: {remedy}."
            )
        outputs = to_double(outputs)  # in single precision, all classes below a probability of 1e-7 are alike
        u = None
        if self.generator is not None:
            u = torch.rand(len(outputs), generator=self.generator, device=self.generator.device).to(outputs.device)
        return ranked_scores(outputs if self._kind == "probabilities" else outputs.softmax(1), self.score, u)
