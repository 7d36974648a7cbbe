"""Numbers and times as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timezone
from itertools import pairwise


def format_number(value: float | None) -> str:
    """Return a number with four significant digits, or "" for None.

    Examples:
        >>> format_number(0.123456), format_number(12345.6), format_number(3.0), format_number(1.234e-7)
        ('0.1235', '12,346', '3', '1.234e-07')
    """
    if value is None:
        return ""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if abs(value) >= 1000 and abs(value) < 1e7:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def distinct_numbers(values: Sequence[float]) -> list[str]:
    """Return different numbers with as many digits as tell them apart, four at least.

    Examples:
        >>> distinct_numbers([1000.0, 2000.0]), distinct_numbers([99.9999, 100.0])
        (['1,000', '2,000'], ['99.9999', '100'])
    """
    texts = [format_number(value) for value in values]
    for digits in range(5, 18):
        if len(set(texts)) == len(texts):
            break
        texts = [f"{value:,.{digits}g}" for value in values]
    return texts


def format_percent(share: float) -> str:
    """Return a share in percent.

    Examples:
        >>> format_percent(0.384), format_percent(0.0042), format_percent(0.9996)
        ('38 %', '0.42 %', '99.96 %')
    """
    if not math.isfinite(share):
        return "unknown"
    percent = 100 * share
    if 0 < percent < 1:
        return f"{percent:.2g} %"
    return f"{percent:.4g} %" if 99 < percent < 100 else f"{percent:.0f} %"


def format_seconds(seconds: float) -> str:
    """Return a duration with its two largest units.

    Examples:
        >>> format_seconds(4.25), format_seconds(75), format_seconds(3 * 3600 + 125), format_seconds(200_000)
        ('4.2 s', '1 min 15 s', '3 h 2 min', '2 d 7 h')
    """
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 60:
        return f"{seconds:.1f} s"
    units = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))
    for (name, size), (smaller, part) in pairwise(units):
        if seconds >= size:
            return f"{int(seconds // size)} {name} {int(seconds % size // part)} {smaller}"
    return "unknown"


def format_time(seconds: float) -> str:
    """Return a moment, given in seconds since 1970, in UTC.

    Examples:
        >>> format_time(86_400.0)
        '1970-01-02 00:00 UTC'
    """
    try:
        return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M} UTC"
    except (OverflowError, OSError, ValueError):
        return "unknown"
