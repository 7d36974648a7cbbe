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


def unwrapped(name: str) -> str:
    """Return a qualified name without what `torch.compile` puts into it."""
    return name.replace("_orig_mod.", "")
