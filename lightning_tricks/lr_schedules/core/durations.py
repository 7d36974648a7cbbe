"""Durations of a schedule: numbers, shares of a run, and texts such as "500 steps"."""

from __future__ import annotations

import math
import re

_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(step|epoch)s?\s*")


def check_duration(name: str, value: object, *, zero: bool = False, fraction: bool = True) -> None:
    """Check a duration.

    Args:
        name: Name of the argument, for the error.
        value: A number, or a text such as "2 epochs".
        zero: Whether it may be 0.
        fraction: Whether it may be a share of the run.

    Raises:
        TypeError: If it is neither a number nor a text.
        ValueError: If it is out of range.
    """
    must = (
        f'{name} must be a whole number{" or a fraction" * fraction} > 0, or a string such as "500 steps" or "2 epochs"'
    )
    if isinstance(value, str):
        amount = parse_duration(name, value)[0]
    elif isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{must}, got {value!r} ({type(value).__name__}).")
    else:
        amount = value
        if (value < 1 and value != 0 and not fraction) or (value > 1 and value % 1):
            raise ValueError(f"{must}, got {value!r}.")
    if not 0 <= amount < math.inf or (amount == 0 and not zero):
        raise ValueError(f"{must}, got {value!r}.")


def parse_duration(name: str, duration: str) -> tuple[float, str]:
    """Return the amount and the unit, "step" or "epoch", of a duration such as "500 steps".

    Raises:
        ValueError: If the text is no duration.
    """
    match = _DURATION.fullmatch(duration)
    if match is None:
        raise ValueError(f'{name} must be a number or a string such as "500 steps" or "2 epochs", got {duration!r}.')
    return float(match[1]), match[2]
