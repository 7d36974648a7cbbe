"""Sizes of memory, as a user writes them."""

from __future__ import annotations

import math
import re
from decimal import Decimal

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", 1):
    _UNITS |= {f"{_letter}B": 1000**_power, f"{_letter}iB": 1024**_power, _letter: 1024**_power}
_UNITS |= {unit.lower(): size for unit, size in _UNITS.items()}


def parse_size(name: str, value: object) -> int:
    """Return a size in bytes from a number of bytes, or text such as "8GiB", "500 MB" or "8G" (binary).

    Args:
        name: The name of the argument, for the error.
        value: The size.

    Raises:
        TypeError: If the value is neither a number nor text.
        ValueError: If it is negative, or no size.

    Examples:
        >>> parse_size("size", "1.5 GiB"), parse_size("size", "2GB"), parse_size("size", 512)
        (1610612736, 2000000000, 512)
    """
    must = f"{name} must be a number of bytes, or text such as '8GiB' or '500MB'"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(f"{must}, got {value!r}.")
    if not isinstance(value, str) and 0 <= value < math.inf:
        return round(value)
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", str(value).strip())
    unit = match and (_UNITS.get(match[2]) or _UNITS.get(match[2].lower()))
    if not match or not unit or not isinstance(value, str):
        raise ValueError(f"{must}, got {value!r}.")
    return round(Decimal(match[1]) * unit)
