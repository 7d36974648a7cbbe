"""Matches: which tensors of a file become which of a model; and the rules and patterns that errors propose."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import combinations, islice, product
from typing import Any, Literal

import torch

from lightning_tricks._shared.patterns import LIST_NUMBER, MAX_REPEATS, Pattern
from lightning_tricks._shared.text import format_shape, list_names
from lightning_tricks.checkpoint_remapping.core.matching.synonyms import (
    describe_fused,
    describe_orders,
    orders_differ,
    words_of,
)
from lightning_tricks.checkpoint_remapping.core.remapping import FUSION, remap_keys

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
            meaning and numbers behind them, sizes that no other layer has, and neighbors in the trunk; `"weak"` is a
            suggestion: lists beside the trunk, sizes alone, numbers behind different words, orders in fused ones.
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
_MOST_LINES = 4  # of rules for blocks, in a message
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
        """Return the sentence about a tensor that has the size of several of the other side, with rules; or nothing."""
        sides = self.sources, self.targets
        for is_split, (wholes, others) in ((True, sides), (False, sides[::-1])):
            for whole, sets, is_said in islice(_wholes(wholes, others), 8 * _MOST_TRIED):
                there, how = list_names(filter(others.__contains__, sets[0])), "a split" if is_split else "a fusion"
                lacks = "" if {*sets[0]} <= others.keys() else f" and what the {'model' if is_split else 'file'} lacks"
                if lacks and not is_split:
                    values = f"{{**weights, {whole!r}: torch.cat([...])}}"
                    return f"{whole} may be {there}{lacks} in one: load_weights(model, {values}), with zeros for that"
                rules = (rule for parts in sets[:_MOST_TRIED] for rule in self._for_parts(whole, parts, is_split))
                if first := next(rules, None):
                    order = "as its name says" if is_said else "but nothing says that it is this one"
                    order += "".join(f", or it is {rule}" for rule in islice(rules, 2))
                    return (
                        f"{whole} may be {there}{lacks} in one: rules=[{first!r}] takes it so, by {how} in this "
                        f"order, {order}. Compare outputs with max_output_difference: some projects fuse head by head"
                    )
        return ""

    def _for_parts(self, whole: str, parts: Sequence[str], is_split: bool) -> list[dict[str, Any]]:
        """Return the rules that split or fuse tensors, for all blocks of a list and for biases where they fit these."""
        names, sides = (whole, *parts), (self.sources, self.targets)
        few = Proposals(*({name: side[name] for name in names if name in side} for side in sides))
        shapes, may_add = {**few.sources, **few.targets}, not {*parts} <= {*few.sources, *few.targets}
        rest = (shapes[whole][0] - sum(shapes[part][0] for part in parts if part in shapes),)
        wide = [LIST_NUMBER.sub("*", name) for name in names]
        both = [re.sub("(?<=[._])(weight|bias)$", "*", name) for name in wide]
        leaves = {re.sub("(weight|bias)$", leaf, whole) for leaf in ("weight", "bias")}
        made: list[dict[str, Any]] = []
        for turned, dim in ((False, 0), (True, 0), (True, -1), (False, -1)):
            sizes = [shapes.get(part, rest)[dim] for part in parts]
            how = {"transpose": turned, "dim": dim, "sizes": sizes if is_split and len({*sizes}) > 1 else None}
            more = {name: value for name, value in how.items() if value}
            # Wide rules are tried on all tensors, of which there may be thousands: only if the narrow one fits
            rules = [
                {"from": one, "to": others, **more} if is_split else {"from": others, "to": one, **more}
                for one, *others in (names, wide, *[both][: leaves <= sides[not is_split].keys()])
                if one.count("*") <= MAX_REPEATS
            ]
            if few._fits(rules[0], may_add):
                made.append(next((rule for rule in rules[:0:-1] if self._fits(rule, may_add)), rules[0]))
            if made and not turned:
                break  # sizes alone do not show that a tensor is the other way round
        return made

    def backwards(self, rule: Proposal | None) -> str:
        """Return the sentence about a list that is counted from the other end, which no star says; or nothing."""
        if not isinstance(rule, tuple) or "*" not in rule[0]:
            return ""
        stems = [name.partition("*")[0] for name in rule]
        found = (re.match(rf"{re.escape(stems[0])}([0-9]{{1,9}})(?![^.])", name) for name in self.sources)
        numbers = sorted({int(number[1]) for number in found if number})
        pairs = {f"{stems[0]}{n}": f"{stems[1]}{m}" for n, m in zip(numbers, numbers[::-1], strict=True)}
        shown = dict(islice(pairs.items(), _MOST_LINES))
        more = ", and so on" if len(pairs) > _MOST_LINES else ""
        what = f"; a star is the same number on both sides: if they count from opposite ends, rules=[{shown}]{more}"
        return what if len(pairs) > 1 else ""

    def _widest(self, source: str, target: str) -> Proposal | None:
        """Return the rule for all blocks of a list, if it leads from such tensors to such, else that for one."""
        glob = [LIST_NUMBER.sub("*", name) for name in (source, target)]
        if LIST_NUMBER.findall(source) == LIST_NUMBER.findall(target) and 0 < glob[0].count("*") <= MAX_REPEATS:
            end = "" if source in self.sources or source.endswith("*") else ".*"
            # `Pattern` refuses more stars, which would take long to match.
            if glob[0].count("*") < MAX_REPEATS or not end:
                wide = glob[0] + end, glob[1] + end
                if self._fits(wide):
                    return wide
        return (source, target) if self._fits((source, target)) else self._in_another_layout(source, target)

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

    @cached_property
    def _without_values(self) -> dict[str, torch.Tensor]:
        return {name: torch.empty(shape, device="meta") for name, shape in self.sources.items()}

    def _fits(self, rule: Proposal, may_add: bool = False) -> bool:
        """Whether a rule leads from tensors without a match to tensors of their shapes without one, or adds some."""
        try:
            made = remap_keys(self._without_values, [rule])
        except ValueError:  # it would give two of them one name, or does not fit them
            return False
        ruled = [name for name in made.rules_of if made.rules_of[name]]
        # A star may take in more than was meant, such as a layer that has its match: then it is not proposed.
        return bool(ruled) and all(
            (self.targets.get(name, made[name].shape if may_add else None) == made[name].shape)
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


_ROLES = {"q": "query", "k": "key", "v": "value", "g": "gate", "u": "up"}  # in the usual order


@lru_cache(maxsize=65536)
def _divided(name: str) -> tuple[str, str, str]:
    """Return the path of the module around a layer, the name of the layer, and `weight` or `bias`."""
    found = re.search(r"(?:^|[._])(weight|bias)$", name)
    parent, _, layer = (name[: found.start()] if found else name).rpartition(".")
    return parent, layer, found[1] if found else ""


def _wholes(wholes: Mapping[str, Shape], others: Mapping[str, Shape]) -> Iterator[tuple[str, list[list[str]], bool]]:
    """Yield tensors that may be several others together, what these may be, and whether the name says them."""
    alike: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for name, shape in others.items():
        parent, _, leaf = _divided(name)
        place = (len(shape), leaf, *LIST_NUMBER.findall(parent))
        alike[place].append(name)
    for whole, shape in islice(wholes.items(), 128 * _MOST_TRIED):
        parent, layer, leaf = _divided(whole)
        names = alike.get((len(shape) or None, leaf, *LIST_NUMBER.findall(parent)), [])[: 8 * _MOST_TRIED]
        beside = [name for name in names if _divided(name)[0] in (parent, f"{parent}.{layer}".lstrip("."))]
        # Behind other names, a name must say what it is made of
        said = _parts_said(whole, beside) or _parts_said(whole, names)
        some = sorted(beside[:_MOST_TRIED], key=lambda name: [role not in words_of(name) for role in _ROLES.values()])
        sets = [said] if said else [[*each] for count in (2, 3, 4) for each in combinations(some, count)]
        # The part that a model lacks has the rest of a bias
        left = [math.prod(shape) - sum(math.prod(others.get(name, (0,))) for name in each) for each in sets]
        has_rest = len(shape) == 1 and not {*said} <= others.keys()
        sets = [each for each, rest in zip(sets, left, strict=True) if (rest > 0 if has_rest else rest == 0)]
        if sets and not describe_fused([whole]):
            yield whole, sets, bool(said)


def _parts_said(whole: str, parts: Sequence[str]) -> list[str]:
    """Return the parts that a name says, in its order; of query, key and value also one that there is not.

    `vk` says value and key, `gate_up_proj` gate and up, `w13` says `w1` and `w3`.
    """
    name = _divided(whole)[1].lower()
    letters = re.search(r"(?<![a-z])w?([qkv]{2,3})(?![a-z])", name)
    said = [_ROLES[letter] for letter in letters[1]] if letters else name.split("_")
    if numbers := re.fullmatch(r"(.*?)_?([1-9])([1-9])", name):
        said = [numbers[1] + numbers[2], numbers[1] + numbers[3]]
    words = {part: words_of(_divided(part)[1]) for part in parts}
    common = frozenset.intersection(*words.values()) if len(parts) > 1 else frozenset()
    found = [
        [part for part in parts if word in words[part] - common and "norm" not in words[part]]
        or [f"{whole}_{word}"] * bool(letters)
        for word in said
    ]
    named = [part for each in found for part in each]
    is_clear = max(map(len, found)) == 1 and len({*named}) == len(named) > 1 and len({*named} - {*parts}) < 2
    return named if is_clear else []


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
