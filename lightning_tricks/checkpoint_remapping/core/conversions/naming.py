"""`Naming`: the names that a project has for the parts of an architecture, with numbers as variables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

_LEAVES = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias", "scale": "weight"}
_PLACEHOLDERS = {"{leaf}": f"(?P<leaf>{'|'.join(_LEAVES)})", "{i}": "([0-9]{1,9})"}
_MOST_PREFIXES = 16


class Part(NamedTuple):
    """What a tensor is in every project: a role, the numbers of its layers, and the end of its name, as `weight`."""

    role: str
    numbers: tuple[int, ...]
    leaf: str


class Tensor(NamedTuple):
    """What a name stands for.

    Attributes:
        name: The name.
        parts: Its parts; several are fused, one after another.
        transposed: Whether a matrix is (in, out).
    """

    name: str
    parts: tuple[Part, ...]
    transposed: bool


class _Pattern(NamedTuple):
    roles: tuple[str, ...]
    expression: re.Pattern[str]
    transposed: bool
    optional: bool


@dataclass(frozen=True)
class Naming:
    """The names of a project.

    Attributes:
        text: Lines of roles and names. Several roles, joined by commas, are fused in their order; `?` behind a role
            says that a model may lack it, `T` behind a name that its matrix is transposed. A line that begins with `/`
            has the beginning of the names below it, and that of their roles. A name stands for its weight and its bias
            (`{leaf}`, where these are not at its end), unless it ends in `=`, for a lone tensor. Text in brackets may
            be missing. Each number is `{i}`.
        order: The order of the elements in the weights, where projects differ in it; other orders are not converted.
        computed: A pattern of further tensors that a model computes for itself.
    """

    text: str
    order: str = ""
    computed: str = ""

    @cached_property
    def _patterns(self) -> tuple[_Pattern, ...]:
        patterns, path, side = [], "", ""
        for line in self.text.splitlines():
            words = line.split()
            if line.strip().startswith("/"):
                path, side = words[0][1:], "".join(words[1:])
            elif words:
                roles = tuple(side + role for role in words[0].removesuffix("?").split(","))
                patterns.append(_parse(roles, path + words[1], words[0].endswith("?"), len(words) > 2))
        return tuple(patterns)

    @cached_property
    def required(self) -> frozenset[str]:
        """The roles that every model has."""
        return frozenset(role for pattern in self._patterns if not pattern.optional for role in pattern.roles)

    def read(self, names: Sequence[str]) -> Iterator[list[Tensor]]:
        """Yield what the names stand for, if all of them are names of this project behind one prefix."""
        if self.computed:
            names = [name for name in names if not re.search(self.computed, name)]
        for prefix in _prefixes(names):
            found = list(self._read_behind(prefix, names))
            parts = [part for tensor in found for part in tensor.parts]
            complete = self.required <= {part.role for part in parts}
            if len(found) == len(names) and complete and len(set(parts)) == len(parts):
                yield found

    def _read_behind(self, prefix: str, names: Sequence[str]) -> Iterator[Tensor]:
        """Yield what names stand for, up to one that is not of this project."""
        for name in names:
            tensor = self._find(name, len(prefix)) if name.startswith(prefix) else None
            if tensor is None:
                return
            yield tensor

    def _find(self, name: str, start: int) -> Tensor | None:
        for pattern in self._patterns:
            if match := pattern.expression.fullmatch(name, start):
                return _tensor(pattern, match)
        return None


def _parse(roles: tuple[str, ...], name: str, optional: bool, transposed: bool) -> _Pattern:
    if name.endswith("="):
        name = name[:-1]
    elif "{leaf}" not in name:
        name += ".{leaf}"
    expression = name.replace(".", r"\.").replace("[", "(?:").replace("]", ")?")
    for placeholder, text in _PLACEHOLDERS.items():
        expression = expression.replace(placeholder, text)
    return _Pattern(roles, re.compile(expression), transposed, optional)


def _tensor(pattern: _Pattern, match: re.Match[str]) -> Tensor:
    """Return what a name stands for."""
    leaf_group = match.re.groupindex.get("leaf")
    numbers = tuple(int(text) for group, text in enumerate(match.groups(), 1) if group != leaf_group)
    leaf = _LEAVES[match["leaf"]] if leaf_group else "weight"
    parts = tuple(Part(role, numbers, leaf) for role in pattern.roles)
    return Tensor(match.string, parts, pattern.transposed and leaf == "weight")


def _prefixes(names: Sequence[str]) -> list[str]:
    """Return what all names may begin with: nothing, or some components of the first."""
    components = names[0].split(".")[:_MOST_PREFIXES] if names else []
    return ["".join(f"{component}." for component in components[:end]) for end in range(len(components))]
