"""The sources of rules as regular expressions: prefixes, globs, and expressions after `re:`."""

from __future__ import annotations

import re
from fnmatch import translate
from functools import lru_cache


def is_pattern(source: str) -> bool:
    """Whether a source is a glob or a regular expression, not a name or the beginning of one."""
    return source.startswith("re:") or re.search(r"[*?[]", source) is not None


@lru_cache(maxsize=4096)
def source_expression(source: str) -> re.Pattern[str]:
    """Return the regular expression for the part of a name that a rule replaces.

    Raises:
        ValueError: If the source is not a valid regular expression.
    """
    try:
        if source.startswith("re:"):
            return re.compile(source[3:])
        if is_pattern(source):
            stars = [translate(part)[:-2].removeprefix("(?s:").removesuffix(")") for part in source.split("*")]
            return re.compile("^(?:" + "(.*)".join(stars) + r")\Z", re.DOTALL)
        return re.compile("^" + re.escape(source) + ("" if source.endswith(".") else r"(?=\.|\Z)"))
    except re.error as error:
        raise ValueError(f"{source!r} is not a valid regular expression: {error}.") from error


def rename(source: str, target: str, name: str) -> str:
    """Return what a name becomes when the part that matches `source` is replaced by `target`."""
    expression = source_expression(source)
    if source.startswith("re:"):
        return expression.sub(target, name)

    def fill_stars(found: re.Match[str]) -> str:
        stars = iter(found.groups())
        return re.sub(r"\*", lambda _: next(stars), target) if found.groups() else target

    new = expression.sub(fill_stars, name, count=1)
    return new.removeprefix(".") if not target else new
