"""Patterns over qualified names: globs, or, with `re:` in front, regular expressions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import translate


@dataclass(frozen=True)
class Pattern:
    """A test of qualified names.

    Args:
        text: A glob over the whole name, in which `*` goes past dots (`backbone.*`), or `re:` and a regular expression
            that is searched for anywhere in the name (`re:^backbone.layer[12]`).

    Raises:
        TypeError: If it is no string.
        ValueError: If it is empty or no regular expression.
    """

    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(f"a pattern must be a string, got {self.text!r} ({type(self.text).__name__}).")
        if self.text in ("", "re:"):
            raise ValueError(f"a pattern must not be empty, got {self.text!r}.")
        try:
            self._expression()
        except re.error as error:
            raise ValueError(f"pattern {self.text!r} is no regular expression: {error}.") from error

    def matches(self, name: str) -> bool:
        """Whether a qualified name matches."""
        return self._expression().search(name) is not None

    def _expression(self) -> re.Pattern[str]:
        return re.compile(self.text[3:] if self.text.startswith("re:") else translate(self.text))


_TOKENS = re.compile(
    r"""
    \\. | \[\^?\]?(?:\\.|[^\]\\])*\]          # escapes and sets of characters
    | \(\?(?:[:=!]|<=|<!|P<\w+>|P=)            # the beginnings of groups, but those that set flags
    | [*+?] | \{\d*,?\d*\}                    # repeats
    | .
    """,
    re.DOTALL | re.VERBOSE,
)
_REPEATS = re.compile(r"[*+?]|\{.+")
MAX_REPEATS = 3


def check_repeats(expression: str) -> None:
    r"""Refuse a regular expression that could take very long: one with many repeats, or with one inside another.

    For expressions out of files. With at most three repeats, none of which repeats a group, the time that a search
    takes grows as a power of the length of the name, never exponentially.

    Args:
        expression: Without `re:`.

    Raises:
        ValueError: If it is one.

    Example:
        >>> check_repeats(r"^layer(\d+)\.(.*)$")
        >>> check_repeats("(a+)+$")
        Traceback (most recent call last):
        ValueError: '(a+)+$' repeats a group, which can take very long: write it without.
    """
    repeats, before = 0, ""
    for part in _TOKENS.findall(expression):
        if part == "?" and before == "(":
            raise ValueError(f"{expression[:80]!r} has a group of a kind that is not taken from files.")
        if _REPEATS.fullmatch(part) and not _REPEATS.fullmatch(before):  # behind a repeat it says how much is taken
            repeats += 1
            if before == ")" and part != "?":
                raise ValueError(f"{expression[:80]!r} repeats a group, which can take very long: write it without.")
        before = part
    if repeats > MAX_REPEATS:
        raise ValueError(
            f"{expression[:80]!r} has {repeats} repeats (* + ? {{), of which {MAX_REPEATS} are taken from files, as "
            "more can take very long."
        )


def strip_compile_prefix(name: str) -> str:
    """Return a qualified name without what `torch.compile` puts into it."""
    return name.replace("_orig_mod.", "")
