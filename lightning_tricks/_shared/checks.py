"""Checks of arguments. The errors name the argument, the value received and what to give instead."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
TIMEDELTA_UNITS = ("weeks", "days", "hours", "minutes", "seconds", "milliseconds", "microseconds")
# What to do where a fit was to write to an address, for `check_path`
SENT_BY_AUTO_RESUME = (
    "Mount that storage and give the path there, or give a path below AutoResume's scratch folder, whose files are "
    "sent with the checkpoints."
)
_SEPARATOR = r"[/\\]"
# A scheme has more than the one letter of a drive of Windows; `simplecache::s3://...` is a chain of fsspec
_ADDRESS = re.compile(rf"\s*(?:\.{_SEPARATOR})*(?:\w[\w+.-]+::)*[a-z][\w+.-]+:{_SEPARATOR}", re.IGNORECASE)


def check_number(
    name: str, value: object, *, above: float = -math.inf, at_most: float = math.inf, note: str = ""
) -> float:
    """Return `value` as a float in (above, at_most]; NaN is never in the range.

    Args:
        name: The name of the argument, for the error message.
        value: The value that was given for it.
        above: The bound that the value must exceed.
        at_most: The largest value allowed.
        note: A remark on the range, for the error message.

    Raises:
        TypeError: If the value is not a number.
        ValueError: If it is out of range.
    """
    if type(value) is float and above < value <= at_most:
        return value  # in a step, a moment counts
    limits = [f"> {above:g}"] * (above > -math.inf) + [f"<= {at_most:g}"] * (at_most < math.inf)
    must = f"{name} must be a number {' and '.join(limits)}".rstrip() + (f" ({note})" if note else "")
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{must}, got {value!r} ({type(value).__name__}).")
    number = float(value)
    if not above < number <= at_most:
        raise ValueError(f"{must}, got {value!r}.")
    return number


def check_not_negative(name: str, value: object) -> float:
    """Return `value` as a float, or raise an error if it is not a finite number >= 0."""
    number = check_number(name, value)
    if not 0 <= number < math.inf:
        raise ValueError(f"{name} must be a finite number >= 0, got {value!r}.")
    return number


def check_fraction(name: str, value: object) -> float:
    """Return `value` as a float, or raise an error if it is not a number >= 0 and < 1."""
    number = check_number(name, value)
    if not 0 <= number < 1:
        raise ValueError(f"{name} must be a number >= 0 and < 1, got {value!r}.")
    return number


def check_count(name: str, value: object, minimum: int = 1) -> int:
    """Return `value`, or raise an error if it is not a whole number >= `minimum`."""
    must = f"{name} must be a whole number >= {minimum}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{must}, got {value!r} ({type(value).__name__}).")
    if value < minimum:
        raise ValueError(f"{must}, got {value!r}.")
    return value


def check_optional_count(name: str, value: object, minimum: int = 1) -> int | None:
    """Return None, or `value` if it is a whole number >= `minimum`, or raise an error."""
    return None if value is None else check_count(name, value, minimum)


def check_duration(name: str, value: object) -> float:
    """Return the seconds of a timedelta, or of a dict of its arguments such as `{"minutes": 10}`.

    Raises:
        TypeError: If the value is neither, or the dict has other keys or values.
        ValueError: If the duration is not positive, or NaN.
    """
    requirement = f"{name} must be a timedelta or a dict of its arguments such as {{'minutes': 10}}"
    if isinstance(value, Mapping):
        check_names(name, value, TIMEDELTA_UNITS)
        try:
            value = timedelta(**value)
        except (TypeError, ValueError, OverflowError) as error:  # such as of NaN
            raise type(error)(f"{requirement}, got {value!r} ({error}).") from error
    if not isinstance(value, timedelta):
        raise TypeError(f"{requirement}, got {value!r}.")
    if value <= timedelta(0):
        raise ValueError(f"{name} must be positive, got {value!r}.")
    return value.total_seconds()


def check_choice(name: str, value: object, known: Iterable[str]) -> str:
    """Return `value`, or raise a ValueError with the most similar choice if it is not one of `known`."""
    known = list(known)
    if isinstance(value, str) and value in known:
        return value
    raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}.{did_you_mean(value, known)}")


def check_choices(name: str, values: Sequence[str], known: Iterable[str]) -> Sequence[str]:
    """Return a list of choices, or raise a TypeError for a single string, and a ValueError as `check_choice`."""
    if isinstance(values, str):
        raise TypeError(f"{name} must be a list of names, got {values!r}.")
    known = list(known)
    for value in values:
        check_choice(name, value, known)
    return values


def check_output_transform(transform: object) -> None:
    """Raise a TypeError for an `output_transform` that is neither None nor a function."""
    if transform is not None and not callable(transform):
        raise TypeError(f"output_transform must be a function of (outputs, batch, stage), got {transform!r}.")


def is_address(path: object) -> bool:
    """Whether a path is an address such as `s3://bucket/run`, of which `pathlib` makes `s3:/bucket/run`."""
    if _ADDRESS.match(str(path)):
        return True  # some objects would download the file when they are asked for its path
    return isinstance(path, os.PathLike) and _ADDRESS.match(os.fsdecode(path)) is not None


def check_path(
    name: str,
    value: object,
    what: str,
    *,
    remedy: str = "Mount that storage and give the path there, or copy the files with a tool of that storage.",
    takes_address: bool = False,
) -> str | os.PathLike[str]:
    """Return `value`, or raise an error if it cannot be the path of `what`, such as "a file", on a disk.

    Args:
        name: The name of the argument, for the error message.
        value: The value that was given for it.
        what: What has the path, for the error message.
        remedy: What to do about an address, for the error message.
        takes_address: Whether an address is allowed, as a string that still is one.

    Raises:
        TypeError: If the value is not a path.
        ValueError: If it is an address, which would become the name of a local folder.
    """
    text = str(value)
    if is_address(value) and not (takes_address and "://" in text):
        where = "" if takes_address else " on a local or mounted disk"
        if takes_address:
            remedy = "Give an address as a string, as pathlib drops one of its slashes."
        elif text.lower().startswith("file:"):
            remedy = f"Give the path without {text[:5]}//."
        local = "" if "://" in text else " If it is a local path, give it as an absolute one."
        raise ValueError(
            f"{name} must be the path of {what}{where}, got {text!r}, which is an address. {remedy}{local}"
        )
    if isinstance(value, str | os.PathLike) and str(value):
        return value
    raise TypeError(f"{name} must be the path of {what}, got {value!r}.")


def path_argument(text: str) -> Path:
    """Return the path that a command was given, as the `type` of argparse, which names the argument in an error."""
    from argparse import ArgumentTypeError

    try:
        return Path(check_path("it", text, "a file or folder"))
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(str(error)) from error


def file_argument(text: str) -> str:
    """Return the path or the address of a file that a command was given, as the `type` of argparse."""
    return text


def check_spec(name: str, value: object, kind: type[T]) -> T | None:
    """Return a value of a class of specs, made of a dict of its arguments if it is one; None for None."""
    if isinstance(value, Mapping):
        return kind(**value)
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name} must be {kind.__name__}(...) or a dict of its arguments, got {value!r}.")
    return value


def check_names(what: str, given: Iterable[object], known: Iterable[str], remark: str = "") -> None:
    """Raise a TypeError with the most similar name if one of the `given` names is not among those that `what` takes."""
    known = list(known)
    for name in given:
        if name not in known:
            raise TypeError(
                f"{what} takes no {name!r}. It takes {', '.join(known)}.{did_you_mean(name, known)}{remark}"
            )


def suggests_argument_names(remark: str = "") -> Callable[[type[T]], type[T]]:
    """Decorate a class so that the error for an unknown argument suggests the most similar one, and adds a remark."""

    def decorate(cls: type[T]) -> type[T]:
        init: Any = cls.__init__
        known = list(signature(cls).parameters)

        @wraps(init)
        def __init__(self: Any, *args: Any, **given: Any) -> None:  # noqa: N807
            check_names(cls.__name__, given, known, remark)
            init(self, *args, **given)

        cls.__init__ = __init__  # type: ignore[method-assign]
        return cls

    return decorate


def did_you_mean(value: object, known: Iterable[str]) -> str:
    """Return " Did you mean ...?" with the one of `known` that is most similar to `value`, or an empty string."""
    folded = {word.lower(): word for word in known}
    close = get_close_matches(str(value).lower(), folded, n=1)
    return f" Did you mean {folded[close[0]]!r}?" if close else ""
