"""Text for people: tables without colour, lists of names, shapes, numbers with units, and times."""

from __future__ import annotations

import io
import math
import traceback
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any


def render_text(renderable: Any) -> str:
    """Return an object as rich prints it: in 120 columns, without colour and without trailing blanks."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=120, color_system=None, force_jupyter=False)
    with console.capture() as capture:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def printable(text: str) -> str:
    r"""Return text that others wrote, such as the name of a process, in one line, without what a terminal would act on.

    Examples:
        >>> printable("python train.py\x1b[2J")
        'python train.py\\x1b[2J'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def list_names(names: Iterable[str], most: int = 4) -> str:
    """Return the first few names, and how many more there are.

    Examples:
        >>> list_names(["mean", "std", "min"], most=1)
        'mean and 2 more'
    """
    names = list(names)
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "nothing") + more


def counted(count: int, noun: str) -> str:
    """Return a number with its noun.

    Examples:
        >>> counted(1, "tensor"), counted(1200, "tensor")
        ('1 tensor', '1,200 tensors')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_shape(shape: Iterable[int]) -> str:
    """Return a shape with its sizes joined by "x".

    Examples:
        >>> format_shape((2, 3, 224))
        '2x3x224'
    """
    return "x".join(map(str, shape))


def describe_error(error: BaseException) -> str:
    """Return an error's type and message or, if it has no message, where it was raised.

    Examples:
        >>> describe_error(ValueError("too long"))
        'ValueError: too long'
    """
    return f"{type(error).__name__}: {str(error).strip() or where_raised(error)}"


def where_raised(error: BaseException) -> str:
    """Return the file, the line and the code that raised an error, as a message for an error that has none."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "no message"
    last = frames[-1]
    return f"no message; raised in {last.name} ({Path(last.filename).name}:{last.lineno}): {last.line}"


def format_si(value: float, unit: str = "") -> str:
    """Return a number with three significant digits and a decimal prefix.

    Examples:
        >>> format_si(4_089_184_256, "MAC"), format_si(25_557_032), format_si(999_600), format_si(128)
        ('4.09 GMAC', '25.6 M', '1.00 M', '128')
    """
    if abs(value) < 1000:
        return f"{value:.4g} {unit}".rstrip()
    for prefix in "kMGTPEZY":  # noqa: B007  # the prefix of the last round is the result
        value /= 1000
        if abs(value) < 999.5:
            break
    return f"{value:#.3g}".rstrip(".") + f" {prefix}{unit}"


def format_bytes(size: float) -> str:
    """Return a size in bytes with a binary prefix.

    Examples:
        >>> format_bytes(512), format_bytes(1536), format_bytes(100 * 2**20)
        ('512 B', '1.5 KiB', '100 MiB')
    """
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1023.5:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"


def format_number(value: float | None) -> str:
    """Return a number with four significant digits, or "" for None.

    Examples:
        >>> format_number(0.123456), format_number(12345.6), format_number(3.0), format_number(1.234e-7)
        ('0.1235', '12,346', '3', '1.234e-07')
        >>> format_number(math.nan), format_number(-math.inf), format_number(None)
        ('NaN', '-inf', '')
    """
    if value is None:
        return ""
    if not math.isfinite(value):
        return str(value).replace("nan", "NaN")  # a log on Windows has no sign of infinity
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


def format_time(seconds: float, zone: str = " UTC") -> str:
    """Return a moment, given in seconds since 1970, in UTC, with what is said of that.

    Examples:
        >>> format_time(86_400.0)
        '1970-01-02 00:00 UTC'
    """
    try:
        return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M}{zone}"
    except (OverflowError, OSError, ValueError):
        return "unknown"
