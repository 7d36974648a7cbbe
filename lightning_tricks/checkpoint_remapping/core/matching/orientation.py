"""Which way round matrices are: (out, in) as a Linear keeps them, or (in, out) as Paddle, Keras and a Conv1D do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

from lightning_tricks._shared.patterns import LIST_NUMBER, MAX_REPEATS
from lightning_tricks._shared.text import list_names
from lightning_tricks.checkpoint_remapping.core.errors import AmbiguousAlignmentError
from lightning_tricks.checkpoint_remapping.core.matching.matches import Match, Matching, Shape
from lightning_tricks.checkpoint_remapping.core.matching.synonyms import is_computed

Shapes = Mapping[str, Shape]
_MOST_KINDS = 4  # of matrices for which a message shows rules


def is_turned(source: str, target: str, sources: Shapes, targets: Shapes) -> bool:
    """Whether a matrix of the file is that of the model with rows and columns exchanged, which no bias denies."""
    if not (source.endswith("weight") and target.endswith("weight")):
        return False  # a table of another size, not the matrix of a layer
    biases = _bias_of(source, sources), _bias_of(target, targets)
    if None not in biases and biases[0] != biases[1]:
        return False
    shape = sources[source]
    return len(shape) == 2 and shape != targets[target] == shape[::-1]


def _bias_of(weight: str, shapes: Shapes) -> Shape | None:
    return shapes.get(f"{weight.removesuffix('weight')}bias")


def turn_squares(found: Matching, ruled: list[Match], sources: Shapes, targets: Shapes) -> Matching:
    """Return the matches, those of square matrices transposed where all other matrices of their kind are.

    Of the same kind are the layers of the blocks of one list or, where none of these is oblong, of the whole model. A
    layer with a bias, which no embedding has, follows those with a bias.

    Args:
        found: The matches.
        ruled: What rules transposed, which says the same of the others.
        sources: Shapes of the file's tensors.
        targets: Those of the model's.

    Raises:
        AmbiguousAlignmentError: If some matrices are transposed, and those of a square one's kind do not agree.
    """
    squares = _SquareMatrices([*found.matches, *ruled], sources, targets)
    if not squares.some_are_turned:
        return found
    unclear = [match for match in found.matches if squares.turned(match) is None]
    if unclear:
        raise AmbiguousAlignmentError(squares.question(unclear))
    matches = [replace(match, transpose=True) if squares.turned(match) else match for match in found.matches]
    return Matching([match for match in matches if not squares.is_turned_kernel(match)], found.ambiguous)


class _SquareMatrices:
    """Which square matrices are transposed, from the oblong ones of the same kind."""

    def __init__(self, matches: list[Match], sources: Shapes, targets: Shapes) -> None:
        self.sources, self.targets = sources, targets
        self.oblong: dict[str, list[tuple[bool, bool]]] = defaultdict(list)  # whether it has a bias, and is transposed
        self.turned_names = [match.sources[0] for match in matches if match.transpose and self._is_oblong(match)]
        self.some_are_turned = bool(self.turned_names)
        biases = ((sources[name][1:], _bias_of(name, sources)) for name in self.turned_names)
        self._file_is_turned = any(bias == width for width, bias in biases)
        for match in matches if self.some_are_turned else ():
            if self._is_oblong(match):
                for kind in _kinds(match.targets[0]):
                    self.oblong[kind].append((self._has_bias(match), match.transpose))

    def _shapes(self, match: Match) -> set[Shape]:
        return {self.sources[match.sources[0]], self.targets[match.targets[0]]}

    def _is_oblong(self, match: Match) -> bool:
        shape = self.sources[match.sources[0]]
        return match.targets[0].endswith("weight") and len(shape) == 2 and len({*shape}) == 2

    def _has_bias(self, match: Match) -> bool:
        return _bias_of(match.targets[0], self.targets) is not None

    def turned(self, match: Match) -> bool | None:
        """Whether a match is one of a square matrix that is transposed; None if nothing says so."""
        name, shapes = match.targets[0], self._shapes(match)
        shape = next(iter(shapes))
        if len(shapes) > 1 or len(shape) != 2 or len({*shape}) == 2 or is_computed(name, shape) or shape[0] == 1:
            return False
        return self._is_turned_kind(match) if name.endswith("weight") else None

    def _is_turned_kind(self, match: Match) -> bool | None:
        has_bias = self._has_bias(match)
        for kind in _kinds(match.targets[0]):
            if not kind and not has_bias:
                break  # it may be an embedding
            known = self.oblong.get(kind, [])
            if has_bias:
                known = [pair for pair in known if pair[0]] or known
            ways = {turned for _, turned in known}
            if len(ways) > 1:
                break
            if ways == {True} or (ways and any(biased for biased, _ in known)):
                return True in ways
        return None

    def is_turned_kernel(self, match: Match) -> bool:
        """Whether a square matrix that is (in, out) becomes a kernel of ones or is made of one."""
        shapes = [self.sources[match.sources[0]], self.targets[match.targets[0]]]
        matrix = shapes[0] if self._file_is_turned else shapes[1]
        kernel = shapes[1] if self._file_is_turned else shapes[0]
        fits = len(matrix) == 2 and len({*matrix}) == 1 and kernel == (*matrix, *[1] * (len(kernel) - 2))
        return fits and len(kernel) > 2 and self._is_turned_kind(match) is not False

    def question(self, unclear: list[Match]) -> str:
        """Return the sentence that asks which of these matrices are transposed, with the rules for either answer."""
        names = list(dict.fromkeys(_glob(match.sources[0], match.targets[0]) for match in unclear))
        rules = [{"from": source, "to": target, "transpose": True} for source, target in names[:_MOST_KINDS]]
        more = f" (and so on for {len(names) - _MOST_KINDS} more)" if len(names) > _MOST_KINDS else ""
        return (
            f"it is ambiguous whether the square {list_names(source for source, _ in names)} are transposed, as other "
            f"matrices of the file are ({list_names(self.turned_names)}): their shapes do not say it, and what is like "
            f"them differs or is not there. If they are, give rules={rules}{more}; instead of the rule of one that is "
            f"not, give a pair such as {names[0]}, which takes it as it is."
        )


def _kinds(name: str) -> Iterator[str]:
    """Yield the blocks that a tensor is in, without their numbers, from the innermost; the model is an empty one."""
    layer = name.rpartition(".")[0]
    ends = [found.end() for found in LIST_NUMBER.finditer(layer) if found.end() < len(layer)]
    yield from (LIST_NUMBER.sub("#", name[:end]) for end in reversed(ends))
    yield ""


def _glob(source: str, target: str) -> tuple[str, str]:
    """Return the names with a star for each number of a list, where one rule does for all blocks."""
    numbers = LIST_NUMBER.findall(source)
    if numbers != LIST_NUMBER.findall(target) or len(numbers) > MAX_REPEATS:
        return source, target
    return LIST_NUMBER.sub("*", source), LIST_NUMBER.sub("*", target)
