"""Patterns that match qualified names: globs or, with the prefix `re:`, regular expressions."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import translate
from typing import Any

LIST_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # in a qualified name, of a part of a list: the 3 of `blocks.3.norm1`


@dataclass(frozen=True)
class Pattern:
    """A pattern that matches qualified names.

    Args:
        text: A glob that must match the whole name, in which `*` also matches dots (`backbone.*`); or `re:` followed by
            a regular expression, which may match anywhere in the name (`re:^backbone.layer[12]`).

    Raises:
        TypeError: If the pattern is not a string.
        ValueError: If the pattern is empty or not a regular expression.
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
            raise ValueError(f"pattern {self.text!r} is not a regular expression: {error}.") from error

    def matches(self, name: str) -> bool:
        """Whether the pattern matches a qualified name."""
        expression = self._expression()
        return (expression.search if self.text.startswith("re:") else expression.match)(name) is not None

    def _expression(self) -> re.Pattern[str]:
        return re.compile(self.text[3:] if self.text.startswith("re:") else translate(self.text))


def as_patterns(argument: str, given: str | Sequence[str]) -> list[Pattern]:
    """Return patterns from an argument that takes one or several.

    Raises:
        TypeError: If the argument is neither a string nor a list of strings.
        ValueError: If a pattern is empty or not a regular expression.
    """
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, list | tuple):
        raise TypeError(f"{argument} must be a pattern or a list of patterns, got {given!r} ({type(given).__name__}).")
    try:
        return [Pattern(text) for text in given]
    except (TypeError, ValueError) as error:
        raise type(error)(f"{argument}: {error}") from error


def parse_patterns(argument: str, given: str | Iterable[str]) -> list[Pattern]:
    """Return the patterns of an argument that takes any iterable of them, too.

    Raises:
        TypeError, ValueError: As in `as_patterns`.
    """
    several = isinstance(given, Iterable) and not isinstance(given, str)
    return as_patterns(argument, list(given) if several else given)  # type: ignore[arg-type]


_TOKENS = re.compile(
    r"""
    \\. | \[\^?\]?(?:\\.|[^\]\\])*\]          # escapes and character sets
    | \(\?(?:[:=!]|<=|<!|P<\w+>|P=)            # the beginnings of groups, except those that set flags
    | [*+?] | \{\d*,?\d*\}                    # repeats
    | .
    """,
    re.DOTALL | re.VERBOSE,
)
_REPEATS = re.compile(r"[*+?]|\{.+")
MAX_REPEATS = 3


def check_repeats(expression: str) -> None:
    r"""Raise an error for a regular expression whose search could take very long.

    This is for expressions from files, which are not trusted. With at most three repeats, none of which repeats a
    group, the time of a search grows polynomially with the length of the name, never exponentially.

    Args:
        expression: The regular expression, without `re:`.

    Raises:
        ValueError: If the expression has more than three repeats, or repeats a group.

    Examples:
        >>> check_repeats(r"^layer(\d+)\.(.*)$")
        >>> check_repeats("(a+)+$")
        Traceback (most recent call last):
        ValueError: '(a+)+$' repeats a group, which can take very long: rewrite it without.
    """
    repeats, before = 0, ""
    for part in _TOKENS.findall(expression):
        if part == "?" and before == "(":
            raise ValueError(f"{expression[:80]!r} has a kind of group that is not allowed in files.")
        if _REPEATS.fullmatch(part) and not _REPEATS.fullmatch(
            before
        ):  # after a repeat it makes the repeat lazy or possessive
            repeats += 1
            if before == ")" and part != "?":
                raise ValueError(f"{expression[:80]!r} repeats a group, which can take very long: rewrite it without.")
        before = part
    if repeats > MAX_REPEATS:
        raise ValueError(
            f"{expression[:80]!r} has {repeats} repeats (* + ? {{), but at most {MAX_REPEATS} are allowed in files, "
            "because more can take very long."
        )


def strip_compile_prefix(name: str) -> str:
    """Return a qualified name without the prefixes that `torch.compile` inserts."""
    return name.replace("_orig_mod.", "")


def name_as_in_(values: dict[str, Any], own: Collection[str]) -> None:
    """Rename what was saved of a model, in place, where names differ from its own in prefixes of `torch.compile` alone.

    Args:
        values: Qualified name -> value; the order stays.
        own: The names that the model has now.
    """
    plain = {strip_compile_prefix(name): name for name in own}
    for name in list(values):
        new = name if name in own else plain.get(strip_compile_prefix(name), name)
        values[new] = values.pop(name)
