"""The band in which a value is usual: around the median of the last ones, as wide as they are spread."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SIGMA = 1.4826  # standard deviations of a normal distribution in its median absolute deviation
_LEAST_SPREAD = 0.01  # values that hardly differ would make a spike of any other
_TAIL = 2.5  # times the distance of the largest value from the median, within which others are usual
_OWN_SCALE = 3  # times as many spreads are usual without a logarithm, which shortens tails
_LARGEST = 700.0  # of which `exp` is finite


class RobustBand:
    """The band of usual values: all that are not `threshold` spreads above the last ones, by each of two spreads.

    Values are compared by their logarithms, because losses and norms vary by factors; zeros, to which a small loss is
    rounded, count as the smallest of the others. If some values are negative, such as densities, all are compared as
    they are, with three times the threshold. The robust spread is 1.4826 times the median absolute deviation from the
    median, which is the standard deviation of normally distributed values; the plain one is the standard deviation,
    from the mean. A value is also usual if it is not 2.5 times as far above the median as the largest of the last ones:
    the tails of some runs are much longer than both spreads show. Spikes do not enter the band.

    Args:
        threshold: The usual number of spreads above the last values, > 0; `float("inf")` accepts all finite values.
        window: The number of last values that count.
        warmup_steps: The number of values before any finite one can be a spike.

    Examples:
        >>> band = RobustBand(threshold=8.0, window=128, warmup_steps=4)
        >>> band.take([2.0, 2.2, 1.9, 2.1]), round(band.limit(), 2)
        (None, 3.61)
        >>> band.take([2.0, 9.0, 2.1])  # none of the three is taken: the place of the spike, and the limit
        (1, 3.567401857184211)
    """

    def __init__(self, threshold: float = 8.0, window: int = 128, warmup_steps: int = 128) -> None:
        self.threshold, self.warmup_steps = threshold, warmup_steps
        self._values: deque[float] = deque(maxlen=window)
        self._count = 0

    def limit(self) -> float:
        """Return the largest usual value; infinity in the warm-up, and if half of the values are 0."""
        if self._count < max(self.warmup_steps, 1) or math.isinf(self.threshold):
            return math.inf
        values = np.array(self._values)
        is_positive = bool((values >= 0).all())
        if is_positive:
            if not _median(values):
                return math.inf
            values = np.log(values.clip(values[values > 0].min()))
        middle = _median(values)
        least = _LEAST_SPREAD * (1 if is_positive else abs(middle))
        robust = max(_SIGMA * _median(abs(values - middle)), least)
        threshold = self.threshold * (1 if is_positive else _OWN_SCALE)
        by_spread = middle + threshold * robust, values.mean() + threshold * max(values.std(), least)
        limit = max(*by_spread, middle + _TAIL * (values.max() - middle))
        if not robust:
            return math.inf
        return math.exp(min(limit, _LARGEST)) if is_positive else float(limit)

    def take(self, values: Sequence[float]) -> tuple[int, float] | None:
        """Add values to the band in order, or none of them if one is a spike.

        Returns:
            The place of the first spike, which is a value above the limit or not finite, and the limit; None if there
            is none.
        """
        before, count = self._values.copy(), self._count
        for place, value in enumerate(values):
            # the limit takes much longer, and is never below the largest of the last values
            is_within = value <= max(self._values, default=-math.inf) or value <= self.limit()
            if not (math.isfinite(value) and is_within):
                limit = self.limit()
                self._values, self._count = before, count
                return place, limit
            self._values.append(value)
            self._count += 1
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the last values, and their number."""
        return {"values": [*self._values], "count": self._count}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._values = deque(state_dict["values"], maxlen=self._values.maxlen)
        self._count = state_dict["count"]


def _median(values: NDArray[np.float64]) -> float:
    """Return the median, as `np.median` does in five times the time."""
    ordered = np.sort(values)
    return float(ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
