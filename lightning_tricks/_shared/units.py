"""Large numbers and sizes as people read them."""

from __future__ import annotations


def si(value: float, unit: str = "") -> str:
    """Return a number with three significant digits and a decimal prefix, such as `4.09 GMAC` or `25.6 M`."""
    if abs(value) < 1000:
        return f"{value:.4g} {unit}".rstrip()
    for prefix in "kMGTPEZY":  # noqa: B007  # the prefix that it stops at is the one
        value /= 1000
        if abs(value) < 999.5:
            break
    return f"{value:#.3g}".rstrip(".") + f" {prefix}{unit}"


def mebibytes(size: float) -> str:
    """Return a size in bytes as `512 B`, `1.5 KiB`, `97.5 MiB`, ..."""
    for unit in ("B", "KiB", "MiB", "GiB"):  # noqa: B007  # the unit that it stops at is the one
        if abs(size) < 1023.5:
            break
        size /= 1024
    else:
        unit = "TiB"
    return f"{size:.4g} {unit}" if abs(size) < 1023.5 or unit == "TiB" else f"{size:.0f} {unit}"
