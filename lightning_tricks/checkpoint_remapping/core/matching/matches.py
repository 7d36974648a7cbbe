"""Matches: which tensors of a file become which of a model; and the rules and patterns that errors propose."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, islice, product
from typing import Any, Literal, NamedTuple

import torch

from lightning_tricks._shared.patterns import LIST_NUMBER, MAX_REPEATS, Pattern
from lightning_tricks._shared.text import format_shape, list_names
from lightning_tricks.checkpoint_remapping.core.errors import CheckpointError
from lightning_tricks.checkpoint_remapping.core.matching.synonyms import (
    describe_fused,
    describe_orders,
    orders_differ,
    words_of,
)
from lightning_tricks.checkpoint_remapping.core.remapping import FUSION, remap_keys
from lightning_tricks.checkpoint_remapping.core.rules import RemapRule

Shape = tuple[int, ...]
Prefixes = tuple[str, str]  # of the names in the file, and of those in the model; without the dot
SAME_NAME = "the same name"
FUSED = "taken to be query, key and value, one after another"


@dataclass(frozen=True)
class Match:
    """Which tensors of a file become which of a model.

    Attributes:
        sources: Names in the file; several are fused.
        targets: Names in the model; several are made by a split.
        transpose: Whether the last two dimensions are swapped.
        shape: The new shape, None where it does not change; before a split and behind a fusion.
        sizes: The lengths of the parts of a split, None where they are equal.
        reason: Why these tensors belong together.
        strength: `"strong"` is evidence, which cannot be otherwise: rules, equal names, conversions, words of one
            meaning, sizes that no other layer has, and numbers and neighbors in the trunk; `"weak"` is a suggestion:
            lists beside the trunk, sizes alone, numbers behind different words, and layouts taken for granted.
        is_plain: Whether a rule, or the same name, is all that there is to say.
        is_conversion: Whether a table of names made it, and no rule beside it.
        is_fused: Whether query, key and value are taken to be one after another.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    transpose: bool = False
    shape: Shape | None = None
    reason: str = ""
    strength: Literal["strong", "weak"] = "strong"
    sizes: tuple[int, ...] | None = None
    is_plain: bool = False
    is_conversion: bool = False
    is_fused: bool = False
    _ruled: tuple[str, ...] = field(default=(), repr=False)  # the names that rules made of the sources

    @property
    def ruled(self) -> tuple[str, ...]:
        """The names of the sources after the caller's rules, which are those in the file where no rule changed them."""
        return self._ruled or self.sources

    def with_names_in_file(self, origins: Mapping[str, str]) -> Match:
        """Return the match with the names in the file as sources, of those that rules made."""
        if origins.keys().isdisjoint(self.sources):
            return self
        # A rule that fuses gives one name for several of the file, joined by this sign.
        names = tuple(origin for source in self.sources for origin in origins.get(source, source).split(FUSION))
        reason = "a rule" if self.is_plain else f"a rule, then {self.reason}"
        return replace(self, sources=names, reason=reason, is_conversion=False, _ruled=self.sources)


@dataclass(frozen=True)
class Mismatch:
    """A tensor of the file whose name fits one of the model and whose shape, or kind of numbers, does not."""

    source: str
    source_shape: Shape
    target: str
    target_shape: Shape
    kinds: tuple[str, str] | None = None  # of the file and the model, where these differ

    def __str__(self) -> str:
        if self.kinds is not None:
            return f"{self.target} ({self.kinds[1]} in the model, {self.kinds[0]} in the file)"
        shapes = f"{format_shape(self.target_shape)} in the model, {format_shape(self.source_shape)} in the file"
        return f"{self.target} ({shapes})"


@dataclass
class Matching:
    """All matches of a file and a model.

    Attributes:
        matches: What was matched.
        ambiguous: (names in the file, names in the model) that could be matched in several ways.
    """

    matches: list[Match] = field(default_factory=list)
    ambiguous: list[tuple[list[str], list[str]]] = field(default_factory=list)

    def sources(self) -> set[str]:
        """Return the names in the file that have a match."""
        return {name for match in self.matches for name in match.sources}

    def targets(self) -> set[str]:
        """Return the names in the model that have a match."""
        return {name for match in self.matches for name in match.targets}


Proposal = tuple[str, str] | dict[str, Any]
_MOST_TRIED = 8  # pairs of layers for which a rule is tried, and parts of which some may be one tensor


@dataclass(frozen=True)
class Proposals:
    """Rules that lead from tensors of a file without a match to those of a model without one.

    Attributes:
        sources: Shapes of the tensors in the file that have no match.
        targets: Those in the model.
    """

    sources: Mapping[str, Shape]
    targets: Mapping[str, Shape]

    def for_layers(self, sources: Iterable[str], targets: Iterable[str]) -> Proposal | None:
        """Return a rule that takes one of some layers, or of some parts written as `part.*`, as one of the model's."""
        pairs = islice(product(sources, targets), _MOST_TRIED)
        return next((rule for pair in pairs if (rule := self._for_layer(*pair))), None)

    def _for_layer(self, source: str, target: str) -> Proposal | None:
        if "*" in (source[-1:], target[-1:]):
            return ("*", target) if source == "*" else (source.removesuffix("*"), target.removesuffix("*"))
        endings = [
            {name.removeprefix(path) for name in names if is_at(name, path)}
            for names, path in ((self.sources, source), (self.targets, target))
        ]
        if endings[0] == endings[1] and endings[0] and all(ending[:1] in ("", ".") for ending in endings[0]):
            return self._widest(source, target)
        if len(endings[0]) == len(endings[1]) == 1:
            return self._widest(source + endings[0].pop(), target + endings[1].pop())
        # As `in_proj_weight` and `in_proj_bias` of nn.MultiheadAttention, whose layer has no dot.
        return self._widest(f"{source}_*", f"{target}_*") if endings[0] == endings[1] and endings[0] else None

    def for_the_rest(self) -> Proposal | None:
        """Return a rule for the tensors of one shape that are left on both sides and have most words in common."""
        pairs = [
            (len(words_of(source) & words_of(target)), source, target)
            for target, wanted in self.targets.items()
            for source, shape in self.sources.items()
            if shape == wanted
        ]
        if not pairs:
            return None
        _, source, target = max(pairs, key=lambda pair: pair[0])
        # A rule for a layer takes its bias along.
        endings = [name.rpartition(".") for name in (source, target)]
        if endings[0][0] and endings[0][2] == endings[1][2] and (rule := self._for_layer(endings[0][0], endings[1][0])):
            return rule
        return self._widest(source, target)

    def for_parts(self) -> str:
        """Return the sentence about a tensor as large as several of the other side together; empty if there is none.

        It has the rule that cuts the one or joins the others, if it is clear which these are.
        """
        unclear = ""
        for found in (*_wholes(self.sources, self.targets, True), *_wholes(self.targets, self.sources, False)):
            parts, *others = found.candidates
            absent = next((part for part in parts if part not in {**self.sources, **self.targets}), "")
            if others:
                texts = ", or of ".join(" + ".join(each) for each in found.candidates)
                unclear = unclear or (
                    f"{found.whole} has the size of {texts}: a RemapRule with {found.whole!r} and a tuple of the right "
                    "ones, in their order, takes them"
                )
            elif absent and not found.is_split:
                return (
                    f"{found.whole} has the size of {list_names(part for part in parts if part != absent)} and of "
                    f"{absent}, which the file lacks: if the layer has none, add zeros, by load_weights(model, "
                    f"{{**weights, {absent!r}: torch.zeros({found.sizes[parts.index(absent)]})}})"
                )
            elif rule := self._widest_of_parts(found, {absent} - {""}):
                order = "as its name says" if found.is_said else "but nothing says that it is this one"
                rest = f"; the model lacks {absent}, so allow its name with allow_unexpected" if absent else ""
                return (
                    f"{found.whole} has the size of {list_names(parts)} together: rules=[{rule!r}] "
                    f"{'cuts it' if found.is_split else 'joins them'} in this order, {order}{rest}. Some projects keep "
                    "parts head by head: compare outputs with max_output_difference after that"
                )
        return unclear

    def _widest_of_parts(self, found: _Whole, absent: Collection[str]) -> dict[str, Any] | None:
        """Return the rule that cuts or joins tensors for all blocks of a list and with their biases, if it does so."""
        names = [found.whole, *found.candidates[0]]
        for wide in (
            [
                LIST_NUMBER.sub("*", parent) + name.removeprefix(parent)
                for name in names
                for parent in [_divided(name)[0]]
            ],
            names,
        ):
            for leaf in ("*", _divided(found.whole)[2]):
                whole, *parts = (re.sub(r"(?<=[._])(weight|bias)$", leaf, name) for name in wide)
                rule = {"from": whole, "to": parts} if found.is_split else {"from": parts, "to": whole}
                sizes = {"sizes": found.sizes} if found.is_split and len({*found.sizes}) > 1 else {}
                rule |= found.how | sizes
                given = {{"from": "source", "to": "target"}.get(name, name): value for name, value in rule.items()}
                if whole.count("*") <= MAX_REPEATS and self._fits(RemapRule(**given), absent):
                    return rule
        return None

    def _widest(self, source: str, target: str) -> Proposal | None:
        """Return the rule for all blocks of a list, if it leads from such tensors to such, else that for one."""
        glob = [LIST_NUMBER.sub("*", name) for name in (source, target)]
        if LIST_NUMBER.findall(source) == LIST_NUMBER.findall(target) and 0 < glob[0].count("*") <= MAX_REPEATS:
            end = "" if source in self.sources or source.endswith("*") else ".*"
            # `Pattern` refuses more stars, which would take long to match.
            if glob[0].count("*") < MAX_REPEATS or not end:
                wide = glob[0] + end, glob[1] + end
                if self._fits(RemapRule(*wide)):
                    return wide
        return (source, target) if self._fits(RemapRule(source, target)) else self._in_another_layout(source, target)

    def _in_another_layout(self, source: str, target: str) -> Proposal | None:
        """Return a rule for one tensor of a layer that is transposed, or has other dimensions of size one."""
        for name, shape in self.sources.items():
            new = target + name.removeprefix(source)
            wanted = self.targets.get(new)
            if wanted is None or shape == wanted or not is_at(name, source) or orders_differ(name, new, certain=True):
                continue
            # A rule to copy that is refused for its shape would send the reader round in a circle.
            if shape == wanted[::-1] and len(shape) == 2:
                return {"from": name, "to": new, "transpose": True}
            if [size for size in shape if size != 1] == [size for size in wanted if size != 1]:
                return {"from": name, "to": new, "shape": [*wanted]}
        return None

    def _fits(self, rule: RemapRule, absent: Collection[str] = ()) -> bool:
        """Whether a rule leads from tensors without a match to such of the model, or to absent parts."""
        try:
            made = remap_keys({n: torch.empty(shape, device="meta") for n, shape in self.sources.items()}, [rule])
        except CheckpointError:  # it would give two of them one name
            return False
        ruled = [name for name in made.rules_of if made.rules_of[name]]
        # A star may take in more than was meant, such as a layer that has its match: then it is not proposed.
        return bool(ruled) and all(
            (self.targets.get(name) == made[name].shape or (absent and name not in self.targets))
            and not orders_differ(made.origins[name], name, certain=True)
            for name in ruled
        )

    def with_other_orders(self) -> str:
        """Return the sentence about tensors left over whose elements are in two orders; empty if there are none."""
        pairs = [
            (source, target)
            for source, shape in self.sources.items()
            for target, wanted in self.targets.items()
            if shape == wanted and orders_differ(source, target)
        ]
        # The pair that a reader finds most alike, and the same one each time.
        pairs.sort(key=lambda pair: (_in_common(*pair), pair), reverse=True)
        return describe_orders(pairs) or describe_fused([*self.sources, *self.targets])


class _Whole(NamedTuple):
    """A tensor as large as several of the other side together.

    Attributes:
        whole: Its name.
        candidates: The names that these may be, each in an order.
        sizes: The lengths of the first of them.
        how: Further arguments of a rule that cuts or joins them.
        is_split: Whether the file has the whole.
        is_said: Whether its name says the parts and their order.
    """

    whole: str
    candidates: list[list[str]]
    sizes: list[int]
    how: dict[str, Any]
    is_split: bool
    is_said: bool


def _wholes(wholes: Mapping[str, Shape], others: Mapping[str, Shape], is_split: bool) -> Iterator[_Whole]:
    groups: dict[tuple[str, ...], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in others:
        parent, _, leaf = _divided(name)
        groups[(leaf, *LIST_NUMBER.findall(parent))][parent].append(name)
    for whole, shape in wholes.items():
        parent, part, leaf = _divided(whole)
        found = groups.get((leaf, *LIST_NUMBER.findall(parent)), {})
        near = dict.fromkeys((parent, f"{parent}.{part}".lstrip(".")))  # beside it, or in a list of its name
        for other in (*near, *islice(found.keys() - near, _MOST_TRIED)):
            names = found.get(other, [])
            if not 0 < len(names) <= 4 * _MOST_TRIED or describe_fused([whole]):
                continue
            said = _parts_said(part, names)
            # Behind other names its own must say what it is made of
            some = islice(names, _MOST_TRIED if other in near else 0)
            sets = [said] if said else [[*each] for count in (2, 3, 4) for each in combinations(some, count)]
            made = [(each, *layout) for each in sets if (layout := _layout(shape, each, others, is_split))]
            if made:
                yield _Whole(whole, [each for each, *_ in made[:3]], *made[0][1:], is_split, bool(said))


def _divided(name: str) -> tuple[str, str, str]:
    """Return the path of the module around a layer, the layer's name, and `weight` or `bias`."""
    found = re.search(r"(?:^|[._])(weight|bias)$", name)
    parent, _, part = (name[: found.start()] if found else name).rpartition(".")
    return parent, part, found[1] if found else ""


_INITIALS = {"q": "query", "k": "key", "v": "value"}


def _parts_said(name: str, parts: Sequence[str]) -> list[str]:
    """Return the parts that a name says, in its order; of query, key and value also one that there is not.

    `vk` says value and key, `gate_up_proj` gate and up, and `w12` the two of a gated layer, the gate first, as in timm.
    """
    letters = re.search(r"(?<![a-z])w?([qkv]{2,3})(?![a-z])", name.lower())
    numbers = re.fullmatch(r"(.*?)_?([1-9])([1-9])", name.lower())
    if letters or "fused query, key and value" in words_of(name):
        said = [{_INITIALS[letter]} for letter in (letters[1] if letters else "qkv")]
    elif numbers:
        said = [{f"{numbers[1]}{numbers[2]}", "gate"}, {f"{numbers[1]}{numbers[3]}", "up"}]
    else:
        said = [{word} for word in re.split(r"[._]", name.lower())]
    words = {part: words_of(_divided(part)[1]) for part in parts}
    common = frozenset.intersection(*words.values()) if len(parts) > 1 else frozenset()
    found = [[part for part in parts if "norm" not in words[part] and one & (words[part] - common)] for one in said]
    named = [part for each in found for part in each]
    if len(named) > len({*named}) or max(map(len, found)) > 1:
        return []
    roles = [min(one) for one in said]
    if {*roles} <= {*_INITIALS.values()} and len(named) == len(said) - 1:
        return [each[0] if each else _named_like(named[0], roles, roles[found.index([])]) for each in found]
    return named if len(named) > 1 else []


def _named_like(name: str, roles: Sequence[str], wanted: str) -> str:
    """Return the name of another of query, key and value, spelled like that of one of them."""
    parent, part, _ = _divided(name)
    start = len(parent) + bool(parent)
    words = "|".join((*roles, *(role[0] for role in roles)))
    new = re.sub(rf"(?<![a-z])(w?)({words})(?![a-z])", lambda m: m[1] + (wanted if m[2] in roles else wanted[0]), part)
    return name[:start] + new + name[start + len(part) :]


def _layout(
    whole: Shape, parts: Sequence[str], others: Mapping[str, Shape], is_split: bool
) -> tuple[list[int], dict[str, Any]] | None:
    """Return the lengths of parts, and the arguments of the rule for them; None if they are not the whole."""
    known = [others[part] for part in parts if part in others]
    # The bias that one of them lacks has the rest
    rest = (whole[0] - sum(shape[0] for shape in known),) if {*map(len, (whole, *known))} == {1} else (0,)
    shapes = [others.get(part, rest) for part in parts]
    if len({*map(len, (whole, *shapes))}) > 1 or not whole or min(map(min, shapes)) < 1:
        return None
    for dim, how in ((0, {}), (0, {"transpose": True}), (-1, {"dim": -1})):
        turn = len(whole) == 2 and "transpose" in how
        # Of the file: the one before it is cut, or the others before they are joined
        one = whole[::-1] if turn and is_split else whole
        pieces = [shape[::-1] if turn and not is_split else shape for shape in shapes]
        joined = [*pieces[0]]
        joined[dim] = sum(shape[dim] for shape in pieces)
        if tuple(joined) == one and all(
            (*shape[:dim], *shape[dim:][1:]) == (*one[:dim], *one[dim:][1:]) for shape in pieces
        ):
            return [shape[dim] for shape in pieces], how
    return None


def _in_common(source: str, target: str) -> tuple[int, int]:
    """Return how many words two names have in common, and how many letters the names of their layers."""
    layers = [{*name.rpartition(".")[0].rpartition(".")[2]} for name in (source, target)]
    return len(words_of(source) & words_of(target)), len(layers[0] & layers[1])


def is_at(name: str, path: str) -> bool:
    """Whether a tensor is that of a layer, or is in a part of the model that is written as `part.*`."""
    stem = path.removesuffix("*").removesuffix(".")
    return name == stem or not stem or name.startswith((f"{stem}.", f"{stem}_weight", f"{stem}_bias"))


def in_words(rule: Proposal) -> str:
    """Return what a rule does, as an argument with its meaning."""
    source, target = (rule["from"], rule["to"]) if isinstance(rule, dict) else rule
    return f"rules=[{rule!r}] takes {source} as {target or 'the whole model'}, and the rest is matched as before"


def suggested_patterns(names: Sequence[str], known: Sequence[str], most: int | None = None) -> list[str]:
    """Return patterns that match these names and, among those known, no others: globs where they are shorter.

    With `most`, there are at most so many, and they match the first of the names.

    Examples:
        >>> suggested_patterns(["fc.weight", "fc.bias", "a.0.bias", "a.1.bias"], ["a.0.weight", "a.1.weight"])
        ['fc.*', 'a.*.bias']
    """
    wanted = set(names)
    others = [name for name in known if name not in wanted]
    patterns: list[str] = []
    left = list(names)
    while left and len(patterns) != most:
        # One that matches another name would accept, or leave out, what nobody has looked at.
        globs = (glob for glob in _globs(left[0], left) if not any(map(Pattern(glob).matches, others)))
        patterns.append(next(globs, _escaped(left[0])))
        pattern = Pattern(patterns[-1])
        left = [name for name in left if not pattern.matches(name)]
    return patterns


def _globs(name: str, names: Sequence[str]) -> Iterator[str]:
    """Yield globs for a name, from the widest: all below a parent, then names that differ only in numbers."""
    ends = [found.start() for found in re.finditer(r"\.", name)]
    yield from (f"{_escaped(name[:end])}.*" for end in ends)
    numbered = LIST_NUMBER.sub("*", _escaped(name))
    if sum(map(Pattern(numbered).matches, names)) > 1:
        yield numbered


def _escaped(name: str) -> str:
    # A name may hold what a glob takes for a sign; in brackets it stands for itself.
    return re.sub(r"[*?[]", lambda found: f"[{found[0]}]", name)
