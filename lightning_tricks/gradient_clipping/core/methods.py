"""The methods of clipping that `GradientClipping` takes: small dataclasses that validate their values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_tricks._shared.checks import check_number
from lightning_tricks._shared.patterns import Pattern
from lightning_tricks.gradient_clipping.core.adaptive_thresholds import (
    NoThreshold,
    PercentileThreshold,
    Threshold,
    ZScoreThreshold,
)
from lightning_tricks.gradient_clipping.core.clipping import (
    check_clip_value,
    check_max_norm,
    clip_grad_value_,
    clip_grads_with_norm_,
    gradient_norms,
)
from lightning_tricks.gradient_clipping.core.unit_clipping import adaptive_clip_grad_, check_clip_factor


class ClipResult(NamedTuple):
    """The result of clipping a group of gradients.

    Attributes:
        norm_after: The norm of the gradients after clipping, shape (); None if it takes another pass to compute it.
        was_clipped: Whether anything was clipped, a bool, shape ().
    """

    norm_after: Tensor | None
    was_clipped: Tensor


class ClipMethod(ABC):
    """A method of clipping gradients.

    Attributes:
        exclude: Patterns over the qualified names of parameters that are not clipped.
    """

    exclude: str | Sequence[str] = ()

    def new_threshold(self) -> Threshold:
        """Return a new threshold; each optimizer and group has its own."""
        return NoThreshold()

    @abstractmethod
    def clip_(self, parameters: list[Tensor], total_norm: Tensor, norm_type: float, threshold: Threshold) -> ClipResult:
        """Clip the gradients of parameters in place; `total_norm` is the norm of all of them, of type `norm_type`."""


@dataclass(frozen=True)
class ClipNorm(ClipMethod):
    """Scale all gradients so that the norm of all of them is at most `max_norm`: `clip_grad_norm_`.

    Args:
        max_norm: The largest norm allowed, > 0; `float("inf")` leaves the gradients untouched.

    Raises:
        TypeError: If the argument is not a number.
        ValueError: If the argument is not positive.
    """

    max_norm: float = 1.0

    def __post_init__(self) -> None:
        check_max_norm(self.max_norm)

    def clip_(self, parameters: list[Tensor], total_norm: Tensor, norm_type: float, threshold: Threshold) -> ClipResult:
        """Clip to `max_norm`."""
        return _clip_to_norm_(parameters, self.max_norm, total_norm)


@dataclass(frozen=True)
class ClipValue(ClipMethod):
    """Clamp each element of the gradients to [-clip_value, clip_value]: `clip_grad_value_`.

    Args:
        clip_value: The largest absolute value allowed, > 0; `float("inf")` leaves the gradients untouched.

    Raises:
        TypeError: If the argument is not a number.
        ValueError: If the argument is not positive.
    """

    clip_value: float

    def __post_init__(self) -> None:
        check_clip_value(self.clip_value)

    def clip_(self, parameters: list[Tensor], total_norm: Tensor, norm_type: float, threshold: Threshold) -> ClipResult:
        """Clamp each element."""
        was_clipped = gradient_norms(parameters, inf).total > self.clip_value
        clip_grad_value_(parameters, self.clip_value)
        return ClipResult(None, was_clipped)


@dataclass(frozen=True)
class AGC(ClipMethod):
    """Clip each unit's gradient to `clip_factor` times the norm of its weights: `adaptive_clip_grad_`.

    Args:
        clip_factor: The largest ratio of the two norms, > 0; `float("inf")` leaves the gradients untouched.
        eps: The lower bound for the norm of a unit's weights, > 0.
        exclude: Patterns over the qualified names of parameters that are not clipped; the paper excludes the final
            linear layer (`exclude="head.*"`).

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If a number is not positive, or a pattern is empty or not a valid regular expression.

    Source: Brock et al., arXiv 2102.06171.
    """

    clip_factor: float = 0.01
    eps: float = 1e-3
    exclude: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        check_clip_factor(self.clip_factor)
        check_number("eps", self.eps, above=0)
        patterns = (self.exclude,) if isinstance(self.exclude, str) else tuple(self.exclude)
        for pattern in patterns:
            Pattern(pattern)
        object.__setattr__(self, "exclude", patterns)

    def clip_(self, parameters: list[Tensor], total_norm: Tensor, norm_type: float, threshold: Threshold) -> ClipResult:
        """Clip unit by unit."""
        done = adaptive_clip_grad_(parameters, self.clip_factor, self.eps)
        return ClipResult(done.norm if norm_type == 2 else None, done.num_clipped > 0)


class _ClipToThreshold(ClipMethod):
    """Scales all gradients to a norm that follows the norms of earlier steps."""

    def __post_init__(self) -> None:
        self.new_threshold()  # raises an error for wrong values

    def clip_(self, parameters: list[Tensor], total_norm: Tensor, norm_type: float, threshold: Threshold) -> ClipResult:
        """Clip to the threshold for this norm."""
        return _clip_to_norm_(parameters, threshold.update(total_norm), total_norm)


@dataclass(frozen=True)
class PercentileClip(_ClipToThreshold):
    """Clip the norm of all gradients to a percentile of the last norms: `PercentileThreshold` (AutoClip).

    Args:
        percentile: The percentile of the last norms that is the threshold, in (0, 100]; 100 never clips.
        history: How many norms it keeps, at least 1.

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If an argument is out of range.

    Source: Seetharaman et al., arXiv 2007.14469.
    """

    percentile: float = 10.0
    history: int = 1000

    def new_threshold(self) -> PercentileThreshold:
        """Return a new threshold; each optimizer and group has its own."""
        return PercentileThreshold(self.percentile, self.history)


@dataclass(frozen=True)
class ZScoreClip(_ClipToThreshold):
    """Clip the norm of all gradients where it is an outlier among the last norms: `ZScoreThreshold` (ZClip).

    Args:
        z: The largest z-score that is not clipped, > 0.
        decay: The decay of the running mean and variance, in (0, 1].
        warmup_steps: How many steps are used before clipping starts, at least 1.

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If an argument is out of range.

    Source: Kumar et al., arXiv 2504.02507.
    """

    z: float = 2.5
    decay: float = 0.97
    warmup_steps: int = 25

    def new_threshold(self) -> ZScoreThreshold:
        """Return a new threshold; each optimizer and group has its own."""
        return ZScoreThreshold(self.z, self.decay, self.warmup_steps)


# What a checkpoint or YAML may describe by name
METHODS = {method.__name__: method for method in (AGC, ClipNorm, ClipValue, PercentileClip, ZScoreClip)}


def check_method(method: ClipMethod | None, max_norm: float) -> ClipMethod | None:
    """Return `method`, or raise an error if it is no ClipMethod, or if `max_norm` is given, too."""
    if method is None:
        return None
    if not isinstance(method, ClipMethod):
        raise TypeError(
            "method must be a ClipMethod such as AGC(0.01) or ClipValue(0.5), got "
            f"{method!r} ({type(method).__name__})."
        )
    if max_norm != 1.0:
        raise ValueError(f"max_norm={max_norm!r} and method={method!r} are both given: choose one.")
    return method


def check_groups(groups: Mapping[str, float | ClipMethod] | None) -> dict[str, ClipMethod]:
    """Return pattern -> method, where a number stands for `ClipNorm`, or raise an error that names the wrong value."""
    if groups is not None and not isinstance(groups, Mapping):
        raise TypeError(f"groups must be a dict of pattern -> max_norm or method, got {groups!r}.")
    methods = {}
    for pattern, how in (groups or {}).items():
        if not isinstance(how, ClipMethod):
            how = ClipNorm(check_number(f"groups[{pattern!r}]", how, above=0, note="or a ClipMethod such as AGC(0.01)"))
        methods[pattern] = how
    return methods


def _clip_to_norm_(parameters: list[Tensor], max_norm: float | Tensor, total_norm: Tensor) -> ClipResult:
    above = total_norm > max_norm
    if isinstance(max_norm, Tensor):
        max_norm = torch.where(above, max_norm, torch.inf)  # a norm at its own threshold stays bit-identical
    factor = clip_grads_with_norm_(parameters, max_norm, total_norm)
    return ClipResult(total_norm * factor, above)
