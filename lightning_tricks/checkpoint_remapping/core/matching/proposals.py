"""Rules that would decide what an alignment leaves without a match, as its errors propose them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

from lightning_tricks._shared.patterns import LIST_NUMBER
from lightning_tricks.checkpoint_remapping.core.matching.matches import Shape
from lightning_tricks.checkpoint_remapping.core.matching.synonyms import words_of
from lightning_tricks.checkpoint_remapping.core.remapping import remap_keys
from lightning_tricks.checkpoint_remapping.core.rules import RemapRule

Proposal = tuple[str, str] | dict[str, Any]
_MOST_TRIED = 8  # pairs of layers for which a rule is tried
_MOST_STARS = 3  # that a file of rules may have


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
        endings = [name.rpartition(".") for name in (source, target)]
        if endings[0][0] and endings[0][2] == endings[1][2] and (rule := self._for_layer(endings[0][0], endings[1][0])):
            return rule
        return self._widest(source, target)

    def _widest(self, source: str, target: str) -> Proposal | None:
        """Return the rule for all blocks of a list, if it leads from such tensors to such, else that for one."""
        glob = [LIST_NUMBER.sub("*", name) for name in (source, target)]
        if LIST_NUMBER.findall(source) == LIST_NUMBER.findall(target) and 0 < glob[0].count("*") <= _MOST_STARS:
            end = "" if source in self.sources or source.endswith("*") else ".*"
            if glob[0].count("*") < _MOST_STARS or not end:
                wide = glob[0] + end, glob[1] + end
                if self._fits(*wide):
                    return wide
        return (source, target) if self._fits(source, target) else self._in_another_layout(source, target)

    def _in_another_layout(self, source: str, target: str) -> Proposal | None:
        """Return a rule for one tensor of a layer that is transposed, or has other dimensions of size one."""
        for name, shape in self.sources.items():
            new = target + name.removeprefix(source)
            wanted = self.targets.get(new)
            if wanted is None or shape == wanted or not is_at(name, source):
                continue
            if shape == wanted[::-1] and len(shape) == 2:
                return {"from": name, "to": new, "transpose": True}
            if [size for size in shape if size != 1] == [size for size in wanted if size != 1]:
                return {"from": name, "to": new, "shape": [*wanted]}
        return None

    def _fits(self, source: str, target: str) -> bool:
        """Whether a rule leads from tensors without a match to tensors of their shapes without one."""
        made = remap_keys(dict(self.sources), [RemapRule(source, target)])
        ruled = [name for name in made.rules_of if made.rules_of[name]]
        return bool(ruled) and all(self.targets.get(name) == made[name] for name in ruled)


def is_at(name: str, path: str) -> bool:
    """Whether a tensor is that of a layer, or is in a part of the model that is written as `part.*`."""
    stem = path.removesuffix("*").removesuffix(".")
    return name == stem or not stem or name.startswith((f"{stem}.", f"{stem}_weight", f"{stem}_bias"))


def in_words(rule: Proposal) -> str:
    """Return what a rule does, as an argument with its meaning."""
    source, target = (rule["from"], rule["to"]) if isinstance(rule, dict) else rule
    return f"rules=[{rule!r}] takes {source} as {target}, and the rest is matched as before"
