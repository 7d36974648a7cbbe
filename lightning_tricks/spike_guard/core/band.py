"""The band in which a value is usual: around the median of the last ones, as wide as they are spread."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

_SIGMA = 1.4826  # standard deviations of a normal distribution in its median absolute deviation
_LEAST_SPREAD = 0.01  # of the median: values that hardly differ would make a spike of any other


class RobustBand:
    """The values that are usual now: all up to `threshold` times the spread above the median of the last ones.

    The spread is 1.4826 times the median absolute deviation, which is the standard deviation of normally distributed
    values, and at least 1 % of the median. Spikes do not move the band, as they are not taken into it.

    Args:
        threshold: How many spreads above the median are usual, > 0; `float("inf")` for all finite values.
        window: How many of the last values count.
        warmup_steps: How many values are taken before any finite one can be a spike.

    Examples:
        >>> band = RobustBand(threshold=6.0, window=128, warmup_steps=4)
        >>> band.take([2.0, 2.2, 1.9, 2.1]), round(band.limit(), 2)
        (None, 2.94)
        >>> place, limit = band.take([2.0, 9.0, 2.1])  # none of the three is taken
        >>> place, round(limit, 2)
        (1, 2.89)
    """

    def __init__(self, threshold: float = 6.0, window: int = 128, warmup_steps: int = 64) -> None:
        self.threshold, self.warmup_steps = threshold, warmup_steps
        self._values: deque[float] = deque(maxlen=window)
        self._count = 0

    def limit(self) -> float:
        """Return the largest value that is usual now; infinity during the warm-up, and where all values are 0."""
        if self._count < self.warmup_steps:
            return math.inf
        middle = median(self._values)
        spread = _SIGMA * median(abs(value - middle) for value in self._values)
        spread = max(spread, _LEAST_SPREAD * abs(middle))
        return middle + self.threshold * spread if spread else math.inf

    def take(self, values: Sequence[float]) -> tuple[int, float] | None:
        """Take values into the band in their order; none of them if one is a spike.

        Returns:
            The place of the first spike, a value above the limit or one that is not finite, and the limit; None if
            there is none.
        """
        before = self.state_dict()
        for place, value in enumerate(values):
            limit = self.limit()
            if not (math.isfinite(value) and value <= limit):
                self.load_state_dict(before)
                return place, limit
            self._values.append(value)
            self._count += 1
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the last values, and how many there were."""
        return {"values": [*self._values], "count": self._count}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._values = deque(state_dict["values"], maxlen=self._values.maxlen)
        self._count = state_dict["count"]
