"""`find_conversion`: two projects' names for one architecture, by tables of names with numbers as variables."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

from lightning_tricks.checkpoint_remapping.core.errors import AmbiguousAlignmentError
from lightning_tricks.checkpoint_remapping.core.matching.conversion_tables import FAMILIES
from lightning_tricks.checkpoint_remapping.core.matching.matches import Match, Matching, Shape
from lightning_tricks.checkpoint_remapping.core.matching.synonyms import describe_families, is_computed

Shapes = Mapping[str, Shape]


def find_conversion(source_shapes: Shapes, target_shapes: Shapes) -> Matching | None:
    """Return the matches of two models that are one architecture under the names of two projects.

    A table is used only if it has every name of both models, and numbers and shapes agree. What a model may lack, such
    as a head, remains without a match if the other does.

    Args:
        source_shapes: Shapes of the file's tensors.
        target_shapes: Shapes of the model's tensors.

    Returns:
        The matches; None if no table fits.

    Raises:
        AmbiguousAlignmentError: If one fits but for the order of the elements.
    """
    source_names, target_names = (
        [name for name, shape in shapes.items() if not is_computed(name, shape)]
        for shapes in (source_shapes, target_shapes)
    )
    # Said only if no other table fits: names of two projects may be told apart by one optional layer.
    reordered = ""
    for family, namings in _NAMINGS.items():
        sources = _readings(namings, source_names)
        targets = _readings(namings, target_names) if sources else []
        for (target, wanted), (source, given) in product(targets, sources):
            if source is target:
                continue
            matches = _match(given, wanted, source.required | target.required, source_shapes, target_shapes)
            if matches is not None and source.order != target.order:
                queries = [tensor.name for tensor in given if {part.role for part in tensor.parts} & {"q", "k"}]
                reordered = describe_families(family, source.order, target.order, queries)
            elif matches is not None:
                why = f"the conversion of {family}"
                return Matching([replace(match, reason=why, is_conversion=True) for match in matches])
    if reordered:
        raise AmbiguousAlignmentError(reordered)
    return None


def _readings(namings: tuple[Naming, ...], names: Sequence[str]) -> list[tuple[Naming, list[Tensor]]]:
    return [(naming, tensors) for naming in namings for tensors in naming.read(names)]


def _match(
    source: list[Tensor], target: list[Tensor], required: Collection[str], source_shapes: Shapes, target_shapes: Shapes
) -> list[Match] | None:
    """Return the matches of two readings; None if anything does not fit."""
    given = {part: tensor for tensor in source for part in tensor.parts}
    wanted = {part: tensor for tensor in target for part in tensor.parts}
    # A model without its head is one of the architecture; one without a norm is another one, with the same names.
    if any(part.role in required for part in given.keys() ^ wanted.keys()):
        return None
    groups = dict.fromkeys(_groups(given, wanted))
    matches = [_match_group(*group, source_shapes, target_shapes) for group in groups]
    return [match for match in matches if match] if all(matches) else None


def _match_group(
    sources: tuple[Tensor, ...], targets: tuple[Tensor, ...], source_shapes: Shapes, target_shapes: Shapes
) -> Match | None:
    """Return the match of tensors with the same parts; None if their parts or shapes differ."""
    if _parts(sources) != _parts(targets):
        return None
    transpose = sources[0].transposed != targets[0].transposed
    given, wanted = (
        [tuple(shapes[tensor.name]) for tensor in side]
        for side, shapes in ((sources, source_shapes), (targets, target_shapes))
    )
    if transpose:
        given = [(*shape[:-2], *shape[:-3:-1]) for shape in given]
    shape = sizes = None
    if len(sources) > 1:
        # A rule joins tensors or transposes one, not both.
        fits = not transpose and _stacked(given) == wanted[0]
    elif len(targets) > 1:
        fits = _stacked(wanted) == given[0]
        sizes = tuple(part[0] for part in wanted) if len(set(wanted)) > 1 else None
    else:
        fits = [size for size in given[0] if size != 1] == [size for size in wanted[0] if size != 1]
        shape = wanted[0] if given != wanted else None
    given_names, wanted_names = (tuple(tensor.name for tensor in side) for side in (sources, targets))
    return Match(given_names, wanted_names, transpose, shape, sizes=sizes) if fits else None


def _groups(
    given: Mapping[Part, Tensor], wanted: Mapping[Part, Tensor]
) -> Iterator[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """Yield the tensors of both sides that have parts in common."""
    for part in filter(wanted.__contains__, given):
        one, other = given[part], wanted[part]
        # Query, key and value are fused on one side: it is one tensor there and several here.
        if len(one.parts) >= len(other.parts):
            yield (one,), tuple(dict.fromkeys(wanted[each] for each in one.parts if each in wanted))
        else:
            yield tuple(dict.fromkeys(given[each] for each in other.parts if each in given)), (other,)


def _parts(tensors: tuple[Tensor, ...]) -> list[Part]:
    return [part for tensor in tensors for part in tensor.parts]


def _stacked(shapes: list[Shape]) -> Shape:
    """Return the shape of tensors one below another; an empty one if they have different widths."""
    return (sum(shape[0] for shape in shapes), *shapes[0][1:]) if len({shape[1:] for shape in shapes}) == 1 else ()


# The names that a project has for the parts of an architecture, with numbers as variables

_LEAVES = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias", "scale": "weight"}
# Not `\d+`, which takes digits of other scripts, and as many as `int` refuses (over 4,300, since Python 3.11).
_PLACEHOLDERS = {"{leaf}": f"(?P<leaf>{'|'.join(_LEAVES)})", "{i}": "([0-9]{1,9})"}
_MOST_PREFIXES = 16


class Part(NamedTuple):
    """What a tensor is in every project: a role, the numbers of its layers, and the end of its name, as `weight`."""

    role: str
    numbers: tuple[int, ...]
    leaf: str


class Tensor(NamedTuple):
    """The tensor that a name stands for.

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
        # Tables are text, as a table of Python objects would be several times as long, and nobody would proofread it.
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
            # One name that is not the project's, and it is another model; two for one part, and it is unclear which
            # counts.
            if len(found) == len(names) and complete and len(set(parts)) == len(parts):
                yield found

    def _read_behind(self, prefix: str, names: Sequence[str]) -> Iterator[Tensor]:
        """Yield what names stand for, up to one that is not of this project."""
        for name in names:
            # The first strange name ends it: most files are of no table, and have thousands of names.
            tensor = self._find(name, len(prefix)) if name.startswith(prefix) else None
            if tensor is None:
                return
            yield tensor

    def _find(self, name: str, start: int) -> Tensor | None:
        for pattern in self._patterns:
            # Whole names: `head` in the middle of another name is not the head.
            if match := pattern.expression.fullmatch(name, start):
                return _tensor(pattern, match)
        return None


def _parse(roles: tuple[str, ...], name: str, optional: bool, transposed: bool) -> _Pattern:
    if name.endswith("="):
        name = name[:-1]
    elif "{leaf}" not in name:
        name += ".{leaf}"
    # Before placeholders, whose own brackets would be taken for optional text.
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
    # Each prefix reads all names once more: a name of thousands of parts would take hours.
    components = names[0].split(".")[:_MOST_PREFIXES] if names else []
    return ["".join(f"{component}." for component in components[:end]) for end in range(len(components))]


_NAMINGS = {family: tuple(Naming(*project) for project in projects) for family, projects in FAMILIES.items()}
