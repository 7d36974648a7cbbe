"""Thresholds that follow the gradient norm, computed on its device without a host read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from lightning_tricks._shared.checks import check_count, check_number


class Threshold(Protocol):
    """A largest norm allowed that may depend on the norms of earlier steps."""

    def update(self, norm: Tensor) -> Tensor:
        """Update the state with a norm, shape (), and return the threshold for it, shape ()."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state."""

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Restore the state that `state_dict` returned."""


class NoThreshold:
    """An infinite threshold, for methods that need none."""

    def update(self, norm: Tensor) -> Tensor:
        """Return Inf."""
        return torch.full_like(norm, torch.inf)

    def state_dict(self) -> dict[str, Tensor]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Do nothing: there is no state."""


class PercentileThreshold:
    """The percentile of the last finite norms, including the present one (AutoClip).

    Args:
        percentile: The percentile of the last norms that is the threshold, in (0, 100]; 100 never clips.
        history: How many norms it keeps, at least 1; each takes 4 bytes.

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
        """Return the history (NaN where there is no norm yet) and the position of the next norm."""
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
    """A threshold for norms that lie far above their running mean (ZClip).

    The first `warmup_steps` norms are only used to estimate their mean and variance. From then on a norm whose z-score
    is above `z` gets the threshold mean + z^2 / score * std, which is lower the further out the norm is; any other norm
    gets Inf. Mean and variance then follow the clipped norms, as exponential moving averages.

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
