"""The axes of a picture: scales from values to pixels, and round numbers on them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """A linear or logarithmic scale from values to pixels.

    Attributes:
        low: The value at `start`.
        high: The value at `end`.
        start: The pixel of the lowest value.
        end: The pixel of the highest value.
        is_log: Whether it is logarithmic.
    """

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel of a value; values outside lie on the edge."""
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = (math.log10(max(one, 1e-300)) for one in (value, low, high))
        if math.isnan(value):
            return self.start
        share = min(max((value - low) / (high - low), 0.0), 1.0)
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int) -> list[float]:
        """Return at most about `most` round numbers on the scale."""
        return _log_ticks(self.low, self.high, most) if self.is_log else _linear_ticks(self.low, self.high, most)


def make_scale(values: Iterable[float], start: float, end: float, *, may_be_log: bool = False) -> Scale:
    """Return a scale on which all finite values lie, with a margin; logarithmic where they span three decades.

    Args:
        values: The values.
        start: The pixel of the lowest value.
        end: The pixel of the highest value.
        may_be_log: Whether the scale may be logarithmic.
    """
    finite = [value for value in values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    if may_be_log and low > 0 and high / low >= 1000:
        return Scale(low / 1.3, high * 1.3, start, end, is_log=True)
    if high == low:
        margin = abs(low) / 10 or 0.5
    elif math.isfinite(high - low):
        margin = 0.05 * (high - low)
    else:  # of the largest numbers there are
        low, high, margin = low / 4, high / 4, 0.0
    bottom = 0.0 if 0 <= low <= 0.3 * (high - low) else low - margin  # a scale from zero is easier to read
    return Scale(bottom, high + margin, start, end)


def _linear_ticks(low: float, high: float, most: int) -> list[float]:
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    for factor in (1, 2, 5, 10):
        if (high - low) / (step * factor) <= most:
            step *= factor
            break
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    return [(first + number) * step if first + number else 0.0 for number in range(max(count, 0))]


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    every = max(1, math.ceil((last - first + 1) / most))
    return [10.0**power for power in range(first, last + 1, every)]
