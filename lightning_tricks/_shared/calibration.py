"""`Calibration`: the map from a classifier's logits to calibrated probabilities, as a part of the classifier.

Below it, how far probabilities can be trusted: calibration errors, Brier score, log-likelihood, risk and coverage. No
such value depends on the order of the rows: rows of equal confidence count with the mean of what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_tricks._shared.checks import check_choice, check_names
from lightning_tricks._shared.tensors import to_double

METHODS: dict[str, tuple[str, ...]] = {  # the tensors of each, of 0, 1 and 2 dimensions
    "temperature": ("temperature",),
    "vector": ("scale", "bias"),
    "isotonic": ("thresholds", "values"),
}
_NAMES = [*(name for names in METHODS.values() for name in names), "from_probabilities"]


class Calibration(nn.Module):
    """A map, fitted by `calibrate`, from logits or probabilities to calibrated probabilities.

    If a LightningModule sets `self.calibration = Calibration()` in its `__init__`, its checkpoints contain the fitted
    calibration, and a new module loads it from them. Before it is fitted, it adds nothing to the state dict. Its
    numbers are in double precision, whatever the precision of the module.

    Attributes:
        temperature: T, for `softmax(logits / T)`.
        scale: (C,), for `softmax(scale * logits + bias)`.
        bias: (C,).
        thresholds: (C, K), probabilities of each class in ascending order.
        values: (C, K), the shares of rows of the class, with linear interpolation between them.
        from_probabilities: 1, without dimensions, if it was fitted to probabilities, which it then takes; else None.

    Examples:
        >>> calibration = Calibration()
        >>> calibration.set_values(temperature=torch.tensor(2.0))
        >>> calibration(torch.tensor([[0.0, 2.0]])).round(decimals=2)
        tensor([[0.2700, 0.7300]])
    """

    temperature: Tensor | None
    scale: Tensor | None
    bias: Tensor | None
    from_probabilities: Tensor | None
    _place: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in _NAMES:
            self.register_buffer(name, None)
        self.register_buffer("_place", torch.empty(0), persistent=False)  # moves with the module

    @property
    def method(self) -> str | None:
        """The method by which it was fitted; None before."""
        return next((method for method, names in METHODS.items() if getattr(self, names[0]) is not None), None)

    def set_values(self, **values: Tensor) -> None:
        """Set the tensors of one method, and clear all others."""
        check_names("set_values", values, _NAMES)
        for name in _NAMES:
            given = values.get(name)
            value = None if given is None else given.detach().cpu().to(torch.float64, copy=True)
            setattr(self, name, None if value is None else placed(value, self._place.device))

    def reset(self) -> None:
        """Forget what was fitted."""
        self.set_values()

    def extra_repr(self) -> str:
        """Return the method."""
        return self.method or "not fitted"

    def forward(self, logits: Tensor) -> Tensor:
        """Return calibrated probabilities in the shape of the logits.

        Args:
            logits: (B, C); of a binary classifier also (B,) or (B, 1), which gives the probabilities of class 1. If
                it was fitted to probabilities, these.

        Raises:
            RuntimeError: If it was not fitted.
            ValueError: If it was fitted to another number of classes, or there are more dimensions.
        """
        method = self.method
        if method is None:
            raise RuntimeError("The module is not calibrated: call calibrate(module, loader) with held-out data first.")
        if logits.ndim > 2:
            raise ValueError(f"logits must be (B, C), or (B,), got {tuple(logits.shape)}: flatten all but the classes.")
        columns = as_logits(to_double(logits), None if self.from_probabilities is None else "probabilities")
        first, *others = (getattr(self, name).to(columns) for name in METHODS[method])
        if first.ndim and len(first) != columns.shape[1]:
            raise ValueError(f"The calibration is for {len(first)} classes, but got logits {tuple(logits.shape)}.")
        if method == "temperature":
            found = (columns / first).softmax(-1)
        elif method == "vector":
            found = (columns * first + others[0]).softmax(-1)
        else:
            found = isotonic_probabilities(columns.softmax(-1), first, others[0])
        found = found if found.shape == logits.shape else found[:, 1].view_as(logits)
        return cast(Tensor, found.to(logits.dtype))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Follow the module to another device, but not to another precision."""
        self._place = fn(self._place)
        for name in _NAMES:
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, fn(value) if value.is_meta else placed(value, self._place.device))
        return self

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool, *problems: list[str]
    ) -> None:
        missing, unexpected, errors = problems
        given = {name: state_dict[prefix + name] for name in _NAMES if prefix + name in state_dict}
        if not given and self.method is not None:
            words = "the weights in the file are not calibrated, so the previous calibration was dropped: load again"
            missing.append(f"{prefix}{METHODS[self.method][0]} ({words}, then call calibrate)")
        unexpected += [key for key in state_dict if key.startswith(prefix) and key[len(prefix) :] not in _NAMES]
        if _are_of_one_method(given):
            self.set_values(**given)
        else:
            errors.append(f"{', '.join(prefix + name for name in given)} are not the tensors of one calibration.")


def placed(value: Tensor, device: torch.device) -> Tensor:
    """Move a tensor to a device, in single precision if the device has no double."""
    return (value.float() if device.type == "mps" and value.is_floating_point() else value).to(device)


def _are_of_one_method(given: Mapping[str, Any]) -> bool:
    """Whether values from a file are those of a method, or none."""
    given = {name: value for name, value in given.items() if name != "from_probabilities"}
    shapes = [tuple(value.shape) for value in given.values() if isinstance(value, Tensor) and value.is_floating_point()]
    dims = {names: number for number, names in enumerate(METHODS.values())}.get(tuple(given))
    fits = len(shapes) == len(given) and len({*shapes}) == 1 and len(shapes[0]) == dims and 0 not in shapes[0]
    return fits or not given


def calibration_of(module: nn.Module) -> Calibration | None:
    """Return the `Calibration` that a module has as a direct part, or None."""
    return next((part for part in module.children() if isinstance(part, Calibration)), None)


def prepare_calibrations(module: nn.Module, weights: Mapping[str, Any]) -> None:
    """Give each `Calibration` in a module the tensors of a file, so that the module has all of their names."""
    for prefix, part in module.named_modules():
        if isinstance(part, Calibration):
            part.set_values(**{name: weights[key] for name in _NAMES if (key := f"{prefix}.{name}") in weights})


def stated_outputs(module: nn.Module, outputs: str | None) -> str | None:
    """Return what a module returns, by its attribute `outputs_kind` or by the caller; None if neither says it.

    Raises:
        ValueError: If they differ, or the caller gives something else than "logits" or "probabilities".
    """
    own = getattr(module, "outputs_kind", None)
    if outputs is not None and own in (None, check_choice("outputs", outputs, ("logits", "probabilities"))):
        return outputs
    if outputs is not None:
        raise ValueError(f"outputs={outputs!r}, but {type(module).__name__} returns {own}: leave outputs out.")
    return own


def check_outputs(outputs: str | None, between: Tensor, sums_to_one: Tensor) -> None:
    """Ask whether rows are logits or probabilities where that was not said and they could be either.

    Args:
        outputs: What was said, or None.
        between: Whether each row is between 0 and 1, (N,).
        sums_to_one: Whether each row is one of probabilities, (N,).

    Raises:
        ValueError: If it has to be said, or rows are no probabilities although they should be.
    """
    if outputs is None and between.all():
        raise ValueError(
            f"All {len(between):,} rows that the module returns are between 0 and 1, so they may be logits or "
            'probabilities. Pass outputs="probabilities" if it ends with softmax or sigmoid, else '
            'outputs="logits".'
        )
    if outputs == "probabilities" and (wrong := int((~sums_to_one).sum())):
        raise ValueError(
            f'outputs="probabilities", but {wrong:,} of the {len(between):,} rows that the module returns are not '
            'probabilities, from 0 to 1 and with the sum 1: pass outputs="logits", or return the output of softmax.'
        )


def logits_in(output: Any) -> Any:
    """Return the attribute or entry `logits` of what a module returned, or else all of it."""
    return output.get("logits", output) if isinstance(output, Mapping) else getattr(output, "logits", output)


def as_logits(outputs: Tensor, kind: str | None) -> Tensor:
    """Return logits, or the logarithms of "probabilities", as (B, C); one number for each row is that of class 1."""
    columns = as_columns(outputs)
    if kind != "probabilities":
        return columns
    return (columns if columns is outputs else torch.stack([1 - columns[:, 1], columns[:, 1]], 1)).log()


def as_columns(logits: Tensor) -> Tensor:
    """Return logits as (B, C): the one logit of a binary classifier, (B,) or (B, 1), becomes 0 and itself."""
    if logits.ndim == 2 and logits.shape[1] > 1:
        return logits
    one = logits.reshape(-1)
    return torch.stack([torch.zeros_like(one), one], 1)


def isotonic_probabilities(probabilities: Tensor, thresholds: Tensor, values: Tensor) -> Tensor:
    """Map each class by its isotonic regression, and give the classes the sum 1.

    Args:
        probabilities: (B, C).
        thresholds: (C, K), ascending; the last one may repeat.
        values: (C, K).

    Returns:
        Probabilities, (B, C); equal ones where all regressions give 0.

    Source: scikit-learn's `CalibratedClassifierCV(method="isotonic")`.
    """
    given = probabilities.T.contiguous().clamp(thresholds[:, :1], thresholds[:, -1:])
    upper = torch.searchsorted(thresholds.contiguous(), given, right=True).clamp(1, thresholds.shape[1] - 1)
    (x0, x1), (y0, y1) = ([part.gather(1, upper - 1), part.gather(1, upper)] for part in (thresholds, values))
    share = torch.where(x1 > x0, (given - x0) / (x1 - x0), 1.0)
    found = (y0 + share * (y1 - y0)).T
    total = found.sum(1, keepdim=True)
    return torch.where(total == 0, 1 / found.shape[1], found / total)  # NaN stays


BINS = 15


def reliability_bins(confidence: Tensor, correct: Tensor, bins: int = BINS) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean confidence, share of correct rows and share of the rows, of equally wide bins that have rows.

    A bin includes its lower end, the last one 1 as well.

    Args:
        confidence: Probabilities, (N,).
        correct: What they are probabilities of, (N,): 0, 1, or a share.
        bins: The number of bins of [0, 1].
    """
    inner = torch.linspace(0, 1, bins + 1, dtype=confidence.dtype, device=confidence.device)[1:-1]
    return _means(torch.bucketize(confidence.detach().contiguous(), inner, right=True), confidence, correct, bins)


def calibration_error(confidence: Tensor, correct: Tensor, bins: int = BINS) -> Tensor:
    """Return the expected calibration error (ECE): the mean distance of confidence and accuracy over equally wide bins.

    Source: Guo et al., arXiv 1706.04599.

    Examples:
        >>> calibration_error(torch.tensor([0.75, 0.75]), torch.tensor([1.0, 0.0]))
        tensor(0.2500)
    """
    return _error(*reliability_bins(confidence, correct, bins))


def adaptive_calibration_error(confidence: Tensor, correct: Tensor, bins: int = BINS) -> Tensor:
    """Return the calibration error over bins of equally many rows (but for one row), in the order of their confidence.

    Source: Nixon et al., arXiv 1904.01685; Mukhoti et al., arXiv 2002.09437.
    """
    confidence, correct = _by_confidence(confidence, correct)
    bins = max(1, min(bins, len(confidence)))
    places = torch.arange(len(confidence), device=confidence.device) * bins // max(1, len(confidence))
    return _error(*_means(places, confidence, correct, bins))


def risk_coverage_area(confidence: Tensor, correct: Tensor) -> Tensor:
    """Return the area under the risk-coverage curve (AURC): the mean error rate of the k most confident rows, over k.

    Source: Geifman and El-Yaniv, arXiv 1805.08206.

    Examples:
        >>> risk_coverage_area(torch.tensor([0.9, 0.6]), torch.tensor([1.0, 0.0]))
        tensor(0.2500)
    """
    wrong = 1 - _by_confidence(confidence, correct)[1].flip(0)
    return (wrong.cumsum(0) / torch.arange(1, len(wrong) + 1, device=wrong.device)).mean()


def brier_scores(probabilities: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error of the probability of each class, (C,), halved if there are two classes.

    Their sum is the Brier score, by scikit-learn's `brier_score_loss`.
    """
    scores = (probabilities - target).square().mean(0)
    return scores / 2 if len(scores) == 2 else scores


def negative_log_likelihoods(probabilities: Tensor, target: Tensor) -> Tensor:
    """Return the negative log-likelihood of each row, (N,): infinite where what is so was given the probability 0."""
    return -torch.xlogy(target, probabilities).sum(1)


def classification_scores(probabilities: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Return `nll`, `ece`, `adaptive_ece` and `brier` of probabilities and targets, both (N, C)."""
    confidence, chosen = probabilities.max(1)
    correct = target.gather(1, chosen[:, None]).squeeze(1)
    return {
        "nll": negative_log_likelihoods(probabilities, target).mean(),
        "ece": calibration_error(confidence, correct),
        "adaptive_ece": adaptive_calibration_error(confidence, correct),
        "brier": brier_scores(probabilities, target).sum(),
    }


def _by_confidence(confidence: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in ascending order of the confidence; of rows with equal confidence, the mean of all."""
    levels, of_row, counts = confidence.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros_like(levels).index_add_(0, of_row, correct.to(levels))
    return levels.repeat_interleave(counts), (sums / counts).repeat_interleave(counts)


def _means(places: Tensor, confidence: Tensor, correct: Tensor, bins: int) -> tuple[Tensor, Tensor, Tensor]:
    columns = torch.stack([torch.ones_like(confidence), confidence, correct.to(confidence)], 1)
    count, total, right = columns.new_zeros(bins, 3).index_add_(0, places, columns).T
    some = count > 0
    return total[some] / count[some], right[some] / count[some], count[some] / count.sum()


def _error(confidence: Tensor, accuracy: Tensor, weight: Tensor) -> Tensor:
    return ((confidence - accuracy).abs() * weight).sum() if len(weight) else confidence.new_tensor(torch.nan)


def are_probabilities(rows: Tensor) -> Tensor:
    """Return whether each row (N, C), perhaps once rounded to bfloat16, holds the probabilities of C classes, (N,)."""
    sums = (rows.float() if rows.itemsize < 4 else rows).sum(1)
    return (rows >= 0).all(1) & ((sums - 1).abs() < 1e-2)


def are_between_0_and_1(rows: Tensor) -> Tensor:
    """Return whether all numbers of each row (N, ...) are from 0 to 1, but for rounding to bfloat16, (N,)."""
    return ((rows[:, None].flatten(1) - 0.5).abs() <= 0.51).all(1)
