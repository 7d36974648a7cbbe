"""Thresholds that follow the gradient norm: small states that live on its device and never read it back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from lightning_tricks._shared.checks import check_count, check_number


class Threshold(Protocol):
    """The largest norm allowed, which may depend on the norms before."""

    def update(self, norm: Tensor) -> Tensor:
        """Learn from a norm, shape (), and return the threshold for it, shape ()."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return what was learnt."""

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Go on where `state_dict` was taken."""


class NoThreshold:
    """Infinity, for methods that have none."""

    def update(self, norm: Tensor) -> Tensor:
        """Return Inf."""
        return torch.full_like(norm, torch.inf)

    def state_dict(self) -> dict[str, Tensor]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Take nothing."""


class PercentileThreshold:
    """The p-th percentile of the last finite norms, the present one among them (AutoClip).

    Args:
        percentile: In (0, 100]; 100 never clips.
        history: How many norms it remembers, at least 1; 4 bytes each.

    Raises:
        TypeError: If an argument is no number.
        ValueError: If one is out of range.

    Source: Seetharaman et al., arXiv 2007.14469, whose history is unlimited.

    Example:
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
        """Remember a norm, unless it is NaN or Inf, and return the threshold.

        Args:
            norm: Shape (), fp32 or fp64.

        Returns:
            The threshold, shape (), on the norm's device; Inf as long as there was no finite norm.
        """
        if self._norms is None:
            self._norms = norm.new_full((self.history,), torch.nan)
        self._norms, self._position = self._norms.to(norm), self._position.to(norm.device)
        finite = norm.isfinite()
        kept = torch.where(finite, norm, self._norms[self._position])
        self._norms = self._norms.index_copy(0, self._position, kept)  # not in place: a state_dict shares it
        self._position = (self._position + finite) % self.history
        threshold = torch.nanquantile(self._norms, self.percentile / 100)
        return torch.where(threshold.isnan(), torch.inf, threshold)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the remembered norms (NaN where there is none yet) and where the next one goes."""
        if self._norms is None:
            return {}
        return {"norms": self._norms.cpu(), "position": self._position.cpu()}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            ValueError: If it was taken with another `history`.
        """
        norms = state_dict.get("norms")
        if norms is not None and len(norms) != self.history:
            raise ValueError(
                f"The checkpoint remembers {len(norms)} gradient norms, history is {self.history}: set history="
                f"{len(norms)} to go on with it."
            )
        self._norms = None if norms is None else norms.clone()
        self._position = state_dict.get("position", torch.zeros(1, dtype=torch.int64)).clone()


class ZScoreThreshold:
    """A threshold for norms that lie far above their running mean (ZClip).

    For `warmup_steps` norms it only learns their mean and variance. From then on a norm whose z-score is above `z` gets
    the threshold mean + z^2 / score * std, which is the lower, the further out the norm is; any other norm gets Inf.
    Mean and variance then follow what the step will have, the clipped norm, as exponential moving averages.

    Args:
        z: The largest z-score that is left alone, > 0.
        decay: Of the moving averages, in (0, 1]; ZClip's alpha.
        warmup_steps: How many norms it learns from before it clips, at least 1.

    Raises:
        TypeError: If an argument is no number.
        ValueError: If one is out of range.

    Source: Kumar et al., arXiv 2504.02507.

    Example:
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
        """Learn from a norm, unless it is NaN or Inf, and return the threshold.

        Args:
            norm: Shape (), fp32 or fp64.

        Returns:
            The threshold, shape (), on the norm's device.
        """
        self._moments = self._moments.to(norm)
        count, mean, variance = self._moments.unbind()
        std = variance.sqrt()
        score = (norm - mean) / (std + 1e-6)
        learning = count < self.warmup_steps
        threshold = torch.where(learning | ~(score > self.z), torch.inf, mean + self.z**2 / score * std)

        effective = torch.minimum(norm, threshold)
        weight = torch.where(learning, 1 / (count + 1), 1 - self.decay)
        new_mean = mean + weight * (effective - mean)
        # the population's variance while learning (Welford), ZClip's own average from then on
        spread = torch.where(learning, effective - mean, effective - new_mean) * (effective - new_mean)
        moments = torch.stack([count + 1, new_mean, variance + weight * (spread - variance)])
        self._moments = torch.where(norm.isfinite(), moments, self._moments)
        return threshold

    def state_dict(self) -> dict[str, Tensor]:
        """Return how many norms there were, their mean and their variance; shape (3,)."""
        return {"moments": self._moments.cpu()}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Go on where `state_dict` was taken."""
        self._moments = state_dict["moments"].clone()
