"""Large numbers and sizes with the prefixes of their units."""

from __future__ import annotations


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
