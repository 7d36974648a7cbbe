"""`find_conversion`: two projects' names for one architecture, by tables of names with numbers as variables."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from lightning_tricks.checkpoint_remapping.core.conversions.naming import Naming, Part, Tensor
from lightning_tricks.checkpoint_remapping.core.conversions.tables import FAMILIES
from lightning_tricks.checkpoint_remapping.core.errors import AmbiguousAlignmentError
from lightning_tricks.checkpoint_remapping.core.matching.matches import CONVERSION, Match, Matching, Shape
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
    reordered = ""
    for family, namings in FAMILIES.items():
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
                return Matching([replace(match, reason=f"{CONVERSION} {family}") for match in matches])
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
        if len(one.parts) >= len(other.parts):
            yield (one,), tuple(dict.fromkeys(wanted[each] for each in one.parts if each in wanted))
        else:
            yield tuple(dict.fromkeys(given[each] for each in other.parts if each in given)), (other,)


def _parts(tensors: tuple[Tensor, ...]) -> list[Part]:
    return [part for tensor in tensors for part in tensor.parts]


def _stacked(shapes: list[Shape]) -> Shape:
    """Return the shape of tensors one below another; an empty one if they have different widths."""
    return (sum(shape[0] for shape in shapes), *shapes[0][1:]) if len({shape[1:] for shape in shapes}) == 1 else ()
