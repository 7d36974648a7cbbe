"""The methods of clipping that `GradientClipping` takes, and thresholds that follow the norms without a host read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_tricks._shared.checks import check_count, check_number
from lightning_tricks._shared.patterns import Pattern
from lightning_tricks.gradient_clipping.core import clipping


class ClipResult(NamedTuple):
    """The result of clipping a group of gradients, of which nothing is computed before it is needed.

    Attributes:
        measured: What was compared with the bound, such as the norm before clipping; shape ().
        bound: The largest value with which nothing is clipped; a number, or a tensor of shape ().
        factor: What all gradients were multiplied by, shape (); None if they were multiplied by different factors.
        norm_after: The norm after clipping, shape (); None if it is not known without another pass.
    """

    measured: Tensor
    bound: float | Tensor
    factor: Tensor | None = None
    norm_after: Tensor | None = None


class ClipMethod(ABC):
    """A method of clipping gradients.

    Attributes:
        exclude: Patterns over the qualified names of parameters that are not clipped.
    """

    exclude: str | Sequence[str] = ()

    def new_threshold(self) -> Threshold | None:
        """Return a new threshold, one per optimizer and group, or None if the method has none."""
        return None

    @abstractmethod
    def clip_(self, parameters: list[Tensor], total_norm: Tensor, norm_type: float, threshold: Any) -> ClipResult:
        """Clip the gradients of parameters in place; `total_norm` is the norm of all of them, of type `norm_type`."""


@dataclass(frozen=True)
class ClipNorm(ClipMethod):
    """Scale all gradients so that their total norm is at most `max_norm`: `clip_grad_norm_`.

    Args:
        max_norm: The largest norm allowed, > 0; `float("inf")` leaves the gradients untouched.

    Raises:
        TypeError: If the argument is not a number.
        ValueError: If the argument is not positive.
    """

    max_norm: float = 1.0

    def __post_init__(self) -> None:
        clipping.check_bound("max_norm", self.max_norm)

    def clip_(self, parameters: list[Tensor], total_norm: Tensor, norm_type: float, threshold: Any) -> ClipResult:
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
        clipping.check_bound("clip_value", self.clip_value)

    def clip_(self, parameters: list[Tensor], total_norm: Tensor, norm_type: float, threshold: Any) -> ClipResult:
        """Clamp each element."""
        largest = clipping.gradient_norms(parameters, inf).total
        clipping.clip_grad_value_(parameters, self.clip_value)
        return ClipResult(largest, self.clip_value)


@dataclass(frozen=True)
class AGC(ClipMethod):
    """Clip each unit's gradient to `clip_factor` times the norm of its weights: `adaptive_clip_grad_`.

    Args:
        clip_factor: The largest ratio of the two norms, > 0; `float("inf")` leaves the gradients untouched.
        eps: The lower bound for the norm of a unit's weights, > 0.
        exclude: Patterns over the qualified names of parameters not to clip; the paper excludes the final linear layer
            (`exclude="head.*"`).

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If a number is not positive, or a pattern is empty or not a valid regular expression.

    Source: Brock et al., arXiv 2102.06171.
    """

    clip_factor: float = 0.01
    eps: float = 1e-3
    exclude: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        clipping.check_bound("clip_factor", self.clip_factor)
        check_number("eps", self.eps, above=0)
        patterns = (self.exclude,) if isinstance(self.exclude, str) else tuple(self.exclude)
        for pattern in patterns:
            Pattern(pattern)
        object.__setattr__(self, "exclude", patterns)

    def clip_(self, parameters: list[Tensor], total_norm: Tensor, norm_type: float, threshold: Any) -> ClipResult:
        """Clip unit by unit."""
        done = clipping.adaptive_clip_grad_(parameters, self.clip_factor, self.eps)
        return ClipResult(done.num_clipped, 0, norm_after=done.norm if norm_type == 2 else None)


class _ClipToThreshold(ClipMethod):
    """Scales all gradients to a norm that follows the norms of earlier steps."""

    def __post_init__(self) -> None:
        self.new_threshold()  # raises an error for wrong values

    def clip_(self, parameters: list[Tensor], total_norm: Tensor, norm_type: float, threshold: Any) -> ClipResult:
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
    """Clip the norm of all gradients if it is an outlier among the last norms: `ZScoreThreshold` (ZClip).

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


def check_method(method: ClipMethod | None, max_norm: float | None) -> ClipMethod | None:
    """Return `method`, or raise an error if it is no ClipMethod, or if `max_norm` is given, too."""
    if method is None:
        return None
    if not isinstance(method, ClipMethod):
        raise TypeError(
            "method must be a ClipMethod such as AGC(0.01) or ClipValue(0.5), got "
            f"{method!r} ({type(method).__name__})."
        )
    if max_norm is not None:
        raise ValueError(f"max_norm={max_norm!r} and method={method!r} are both given: choose one.")
    return method


def check_groups(groups: Mapping[str, float | ClipMethod] | None) -> dict[str, ClipMethod]:
    """Return pattern -> method, with `ClipNorm` for a number, or raise an error that names the wrong value."""
    if groups is not None and not isinstance(groups, Mapping):
        raise TypeError(f"groups must be a dict of pattern -> max_norm or method, got {groups!r}.")
    methods = {}
    for pattern, how in (groups or {}).items():
        if not isinstance(how, ClipMethod):
            how = ClipNorm(check_number(f"groups[{pattern!r}]", how, above=0, note="or a ClipMethod such as AGC(0.01)"))
        methods[pattern] = how
    return methods


def _clip_to_norm_(parameters: list[Tensor], max_norm: float | Tensor, total_norm: Tensor) -> ClipResult:
    applied = max_norm
    if isinstance(max_norm, Tensor):
        applied = torch.where(total_norm > max_norm, max_norm, torch.inf)  # at its own threshold it stays bit-identical
    return ClipResult(total_norm, max_norm, clipping.clip_grads_with_norm_(parameters, applied, total_norm))


class Threshold(Protocol):
    """A largest norm allowed that may depend on the norms of earlier steps."""

    def update(self, norm: Tensor) -> Tensor:
        """Update the state with a norm, shape (), and return the threshold for it, shape ()."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state."""

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Restore the state that `state_dict` returned."""


class PercentileThreshold:
    """The percentile of the last finite norms, including the present one (AutoClip).

    Args:
        percentile: The percentile of the last norms that is the threshold, in (0, 100]; 100 never clips.
        history: The number of norms to keep, at least 1; each takes 4 bytes.

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If one is out of range.

    Source: Seetharaman et al., arXiv 2007.14469, whose history is unlimited.

    Examples:
        >>> threshold = PercentileThreshold(percentile=50)
        >>> [threshold.update(torch.tensor(norm)).item() for norm in (1.0, 3.0, float("nan"), 9.0)]
        [1.0, 2.0, 2.0, 3.0]
    """

    def __init__(self, percentile: float = 10.0, history: int = 1000) -> None:
        self.percentile = check_number("percentile", percentile, above=0, at_most=100)
        self.history = check_count("history", history)
        self._norms: Tensor | None = None
        self._position = torch.zeros(1, dtype=torch.int64)

    @torch.no_grad()
    def update(self, norm: Tensor) -> Tensor:
        """Add a norm to the history, unless it is NaN or Inf, and return the threshold.

        Args:
            norm: Shape (), fp32 or fp64.

        Returns:
            The threshold, shape (), on the norm's device; Inf before the first finite norm.
        """
        if self._norms is None:
            self._norms = norm.new_full((self.history,), torch.nan)
        self._norms, self._position = self._norms.to(norm), self._position.to(norm.device)
        # A ring buffer without a host read: a norm that is not finite writes back what is in its place, and the
        # position does not move.
        finite = norm.isfinite()
        kept = torch.where(finite, norm, self._norms[self._position])
        self._norms = self._norms.index_copy(0, self._position, kept)  # not in place: a state dict shares the tensor
        self._position = (self._position + finite) % self.history
        threshold = torch.nanquantile(self._norms, self.percentile / 100)
        return torch.where(threshold.isnan(), torch.inf, threshold)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the history (NaN for norms that are not there yet) and the position of the next norm."""
        if self._norms is None:
            return {}
        return {"norms": self._norms.cpu(), "position": self._position.cpu()}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Restore the state that `state_dict` returned.

        Raises:
            ValueError: If the state has another `history`.
        """
        norms = state_dict.get("norms")
        if norms is not None and len(norms) != self.history:
            raise ValueError(
                f"The checkpoint holds {len(norms)} gradient norms, but history is {self.history}: set history="
                f"{len(norms)} to resume from it."
            )
        self._norms = None if norms is None else norms.clone()
        self._position = state_dict.get("position", torch.zeros(1, dtype=torch.int64)).clone()


class ZScoreThreshold:
    """A threshold for norms far above their running mean (ZClip).

    The first `warmup_steps` norms only estimate mean and variance. From then on a norm with a z-score above `z` gets
    the threshold mean + z^2 / score * std, which is lower the further out the norm is; any other norm gets Inf. Mean
    and variance then follow the clipped norms, as exponential moving averages.

    Args:
        z: The largest z-score that is not clipped, > 0.
        decay: The decay of the moving averages, in (0, 1]; ZClip's alpha.
        warmup_steps: How many norms are used before clipping starts, at least 1.

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If one is out of range.

    Source: Kumar et al., arXiv 2504.02507.

    Examples:
        >>> threshold = ZScoreThreshold(z=2.0, warmup_steps=2)
        >>> [round(threshold.update(torch.tensor(norm)).item(), 3) for norm in (1.0, 3.0, 4.0, 9.0)]
        [inf, inf, inf, 2.684]
    """

    def __init__(self, z: float = 2.5, decay: float = 0.97, warmup_steps: int = 25) -> None:
        self.z = check_number("z", z, above=0)
        self.decay = check_number("decay", decay, above=0, at_most=1)
        self.warmup_steps = check_count("warmup_steps", warmup_steps)
        self._moments = torch.zeros(3)  # how many norms, their mean, their variance

    @torch.no_grad()
    def update(self, norm: Tensor) -> Tensor:
        """Update mean and variance with a norm, unless it is NaN or Inf, and return the threshold.

        Args:
            norm: Shape (), fp32 or fp64.

        Returns:
            The threshold, shape (), on the norm's device.
        """
        # All branches are computed and chosen by torch.where, so that nothing is read back to the host.
        self._moments = self._moments.to(norm)
        count, mean, variance = self._moments.unbind()
        std = variance.sqrt()
        score = (norm - mean) / (std + 1e-6)
        is_warmup = count < self.warmup_steps
        threshold = torch.where(is_warmup | ~(score > self.z), torch.inf, mean + self.z**2 / score * std)

        effective = torch.minimum(norm, threshold)
        weight = torch.where(is_warmup, 1 / (count + 1), 1 - self.decay)
        new_mean = mean + weight * (effective - mean)
        # the population's variance during the warm-up (Welford), ZClip's own average from then on
        spread = torch.where(is_warmup, effective - mean, effective - new_mean) * (effective - new_mean)
        moments = torch.stack([count + 1, new_mean, variance + weight * (spread - variance)])
        self._moments = torch.where(norm.isfinite(), moments, self._moments)
        return threshold

    def state_dict(self) -> dict[str, Tensor]:
        """Return the number of norms, their mean and their variance; shape (3,)."""
        return {"moments": self._moments.cpu()}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Restore the state that `state_dict` returned."""
        self._moments = state_dict["moments"].clone()
