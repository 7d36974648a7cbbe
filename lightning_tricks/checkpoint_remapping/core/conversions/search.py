"""`find_conversion`: the matches of two projects' names for one architecture, or none if anything does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from lightning_tricks.checkpoint_remapping.core.conversions import (
    convolutions,
    decoders,
    diffusion,
    encoders,
    multimodal,
)
from lightning_tricks.checkpoint_remapping.core.conversions.naming import Naming, Part, Tensor
from lightning_tricks.checkpoint_remapping.core.matching.layer_grouping import Shape
from lightning_tricks.checkpoint_remapping.core.matching.matches import CONVERSION, Match, Matching
from lightning_tricks.checkpoint_remapping.core.matching.synonyms import is_computed

Shapes = Mapping[str, Shape]
FAMILIES: dict[str, tuple[Naming, ...]] = {
    **convolutions.FAMILIES,
    **decoders.FAMILIES,
    **encoders.FAMILIES,
    **multimodal.FAMILIES,
    **diffusion.FAMILIES,
}


def find_conversion(source_shapes: Shapes, target_shapes: Shapes) -> Matching | None:
    """Return the matches of two models that are one architecture under the names of two projects.

    A table is used only if it has every name of both models, numbers and shapes agree, and both keep the elements of
    their weights in the same order. What a model may lack, such as a head, remains without a match if the other does.

    Args:
        source_shapes: Shapes of the file's tensors.
        target_shapes: Shapes of the model's tensors.

    Returns:
        The matches; None if no table fits.
    """
    source_names, target_names = (
        [name for name, shape in shapes.items() if not is_computed(name, shape)]
        for shapes in (source_shapes, target_shapes)
    )
    for family, namings in FAMILIES.items():
        sources = _readings(namings, source_names)
        if sources:
            for target, wanted in _readings(namings, target_names):
                for source, given in sources:
                    if source is not target and source.order == target.order:
                        found = _Conversion(family, source, target, source_shapes, target_shapes).match(given, wanted)
                        if found:
                            return found
    return None


def _readings(namings: tuple[Naming, ...], names: Sequence[str]) -> list[tuple[Naming, list[Tensor]]]:
    return [(naming, tensors) for naming in namings for tensors in naming.read(names)]


class _Conversion:
    """The names of one project for the tensors of another."""

    def __init__(
        self, family: str, source: Naming, target: Naming, source_shapes: Shapes, target_shapes: Shapes
    ) -> None:
        self.reason = f"{CONVERSION} {family}"
        self.required = source.required | target.required
        self.source_shapes, self.target_shapes = source_shapes, target_shapes

    def match(self, source: list[Tensor], target: list[Tensor]) -> Matching | None:
        """Return the matches of two readings; None if anything does not fit."""
        given = {part: tensor for tensor in source for part in tensor.parts}
        wanted = {part: tensor for tensor in target for part in tensor.parts}
        if any(part.role in self.required for part in given.keys() ^ wanted.keys()):
            return None
        groups = dict.fromkeys(_groups(given, wanted))
        matches = [self._match(sources, targets) for sources, targets in groups]
        return Matching([match for match in matches if match]) if all(matches) else None

    def _match(self, sources: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> Match | None:
        """Return the match of tensors with the same parts; None if their parts or shapes differ."""
        if _parts(sources) != _parts(targets):
            return None
        transpose = sources[0].transposed != targets[0].transposed
        given = [self._shape(self.source_shapes, tensor, transpose) for tensor in sources]
        wanted = [tuple(self.target_shapes[tensor.name]) for tensor in targets]
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
        return Match(given_names, wanted_names, transpose, shape, self.reason, sizes=sizes) if fits else None

    @staticmethod
    def _shape(shapes: Shapes, tensor: Tensor, transpose: bool) -> Shape:
        shape = tuple(shapes[tensor.name])
        return (*shape[:-2], *shape[:-3:-1]) if transpose else shape


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
