"""`remap_keys`: apply rules to the names and shapes of a state dict, or strip what wrappers add to names."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_tricks._shared.checks import did_you_mean
from lightning_tricks._shared.text import format_shape, list_names
from lightning_tricks.checkpoint_remapping.core.errors import CheckpointError
from lightning_tricks.checkpoint_remapping.core.rules import (
    RemapRule,
    Rules,
    is_pattern,
    parse_steps,
    read_rules,
    rename,
    source_expression,
)

FUSION = " + "  # between the names of tensors that are fused
_MAX_NEW_NAME_LENGTH = 10_000  # characters of a name that rules make


class Remapped(dict[str, Any]):
    """A state dict after rules were applied.

    Attributes:
        renamed: The new names by the old ones, where they differ; names of fused and split tensors joined by `" + "`.
        dropped: The old names that rules dropped.
        unmatched: The rules that matched nothing.
        origins: The old names by the new ones; names of fused tensors joined by `" + "`.
        rules_of: The rules that each new name comes from; names that only lost wrappers' parts have none.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        super().__init__(tensors)
        self.renamed: dict[str, str] = {}
        self.dropped: list[str] = []
        self.unmatched: list[str] = []
        self.origins = {name: name for name in tensors}
        self.rules_of: dict[str, tuple[RemapRule, ...]] = {}


def remap_keys(state_dict: Mapping[str, Any], rules: Rules) -> Remapped:
    """Rename, drop, transpose, reshape, split and fuse the tensors of a state dict, which is not modified.

    Args:
        state_dict: Tensors by name.
        rules: Steps, each applied to the result of the one before: a `RemapRule` or a dict of its arguments
            (`from` and `to` stand for `source` and `target`), a pair `(source, target)`, or `"wrappers"`, which strips
            what DataParallel, DDP, torch.compile, FSDP and thop add to names. A dict `{source: target}`, or a list
            inside the list, is one step: none of its rules sees the result of another. `"only"` at the end is for
            `load_weights` and has no effect here.

    Returns:
        A new dict in the order of the old one, with the names that were changed and dropped, and the rules that
        matched nothing.

    Raises:
        CheckpointError: If two tensors would get the same name, or a tensor does not have the shape that a rule needs.
        TypeError, ValueError: If a rule is invalid.

    Examples:
        >>> list(remap_keys({"module.conv1.weight": torch.zeros(1)}, ["wrappers", ("conv1", "stem.conv")]))
        ['stem.conv.weight']
    """
    result = Remapped(state_dict)
    for step in parse_steps(rules):
        if step == "wrappers":
            result = _without_wrappers(result)
        elif step != "only":
            result = _Step(step, result).apply()
    result.renamed = renamed_from((origin, name) for name, origin in result.origins.items())
    return result


def _without_wrappers(tensors: Remapped) -> Remapped:
    """Strip what wrappers add to names; names that only change here come from no rule of the caller."""
    clean = strip_wrappers(tensors)
    strip = [RemapRule(old, new) for old, new in clean.items() if new != old]
    if not strip:
        tensors.unmatched.append("wrappers")
    result = _Step(strip, tensors).apply()
    result.rules_of = {clean[old] or "": rules for old, rules in tensors.rules_of.items() if clean[old] is not None}
    return result


def renamed_from(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the new names by the old ones of (old, new) pairs that differ; several are joined by `" + "`."""
    renamed: dict[str, str] = {}
    for old, new in pairs:
        if old != new:
            renamed[old] = f"{renamed[old]} + {new}" if old in renamed else new
    return renamed


class _Step:
    """The rules of one step, and the tensors that they are applied to at once: none sees the result of another."""

    def __init__(self, rules: Sequence[RemapRule], tensors: Remapped) -> None:
        self.rules, self.tensors = rules, tensors
        self.patterns: list[tuple[int, RemapRule, re.Pattern[str]]] = []
        self.prefixes: dict[str, tuple[int, RemapRule]] = {}  # looked up, as there may be one for each tensor
        for position, rule in enumerate(rules):
            for source in rule.sources:
                if is_pattern(source):
                    self.patterns.append((position, rule, source_expression(source)))
                else:
                    self.prefixes.setdefault(source, (position, rule))
        self.rule_of = {name: self._find(name) for name in tensors}
        self.result = Remapped({})

    def _find(self, name: str) -> RemapRule | None:
        """Return the first rule that matches a name, None if none does."""
        ends = [found.start() for found in re.finditer(r"\.", name)]
        prefixes = [name, *(name[:end] for end in ends), *(name[: end + 1] for end in ends)]
        found = [self.prefixes[prefix] for prefix in prefixes if prefix in self.prefixes]
        found += [(position, rule) for position, rule, expression in self.patterns if expression.search(name)]
        return min(found, key=lambda pair: pair[0])[1] if found else None

    def apply(self) -> Remapped:
        """Return the new tensors."""
        used = set(map(id, self.rule_of.values()))
        self.result.dropped = self.tensors.dropped
        self.result.unmatched = self.tensors.unmatched + [str(rule) for rule in self.rules if id(rule) not in used]
        fusing = [rule for rule in self.rules if isinstance(rule.source, tuple)]
        fusions = {parts: (rule, new) for rule in fusing for parts, new in self._fusions(rule)}
        fused = {name: parts for parts in fusions for name in parts}
        for name, tensor in self.tensors.items():
            parts = fused.get(name, (name,))
            if name != parts[0]:
                continue  # a fused tensor stands where the first of its parts did
            made = [self._fused(parts, *fusions[parts])] if name in fused else self._renamed(name, tensor)
            if not made:
                self.result.dropped.append(self.tensors.origins[name])
            for new, value in made:
                self._add(new, value, parts)
        return self.result

    def _add(self, name: str, value: Any, sources: Sequence[str]) -> None:
        origin = FUSION.join(self.tensors.origins[source] for source in sources)
        if not name:
            raise CheckpointError(f"a rule turns the name {origin[:80]!r} into an empty one.")
        if len(name) > _MAX_NEW_NAME_LENGTH:
            raise CheckpointError(f"a rule makes a name of {len(name):,} characters from {origin[:80]!r}.")
        if name in self.result:
            raise CheckpointError(
                f"{origin!r} and {self.result.origins[name]!r} would both become {name!r}: drop or rename one of them."
            )
        self.result[name], self.result.origins[name] = value, origin
        rule = self.rule_of[sources[0]]
        rules = dict.fromkeys(before for source in sources for before in self.tensors.rules_of.get(source, ()))
        if rules or rule:
            self.result.rules_of[name] = (*rules, *([rule] if rule else ()))

    def _renamed(self, name: str, tensor: Any) -> list[tuple[str, Any]]:
        """Return the new names and values that one tensor becomes: one, several of a split, or none."""
        rule = self.rule_of[name]
        if rule is None:
            return [(name, tensor)]
        if rule.target is None and not (rule.transpose or rule.shape):
            return []
        (source,) = rule.sources
        value = _in_shape(rule, name, _transposed(rule, name, tensor))
        if rule.target is None:
            return [(name, value)]
        parts = _split(rule, name, value) if isinstance(rule.target, tuple) else [value]
        return [(rename(source, target, name), part) for target, part in zip(rule.targets, parts, strict=True)]

    def _fused(self, parts: Sequence[str], rule: RemapRule, target: str) -> tuple[str, Any]:
        """Return the name and the value of a fused tensor."""
        tensors = {part: self.tensors[part] for part in parts}
        try:
            fused = torch.cat([_transposed(rule, part, tensor) for part, tensor in tensors.items()], rule.dim)
        except (IndexError, RuntimeError) as error:
            raise _misfit(rule, "cannot be fused", tensors) from error
        return target, _in_shape(rule, FUSION.join(parts), fused)

    def _fusions(self, rule: RemapRule) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield, for each tensor that a rule makes of several, their names and the new one."""
        groups: dict[str, dict[int, str]] = {}
        (target,) = rule.targets
        for name in [name for name, found in self.rule_of.items() if found is rule]:
            for position, source in enumerate(rule.sources):
                if source_expression(source).search(name):
                    groups.setdefault(rename(source, target, name), {})[position] = name
                    break
        for new, parts in groups.items():
            if len(parts) < len(rule.sources):
                raise CheckpointError(
                    f"{', '.join(parts.values())} cannot become {new}: the other parts of {rule} are missing."
                )
            yield tuple(parts[position] for position in sorted(parts)), new


def _split(rule: RemapRule, name: str, value: Any) -> Sequence[Any]:
    count = len(rule.targets)
    length = value.shape[rule.dim] if -value.dim() <= rule.dim < value.dim() else 0
    sizes = list(rule.sizes or [length // count] * count)
    if sum(sizes) != length or min(sizes) < 0:
        raise _misfit(rule, f"cannot be split into {count} parts", {name: value})
    parts: Sequence[Any] = value.split(sizes, rule.dim)
    return parts


def _transposed(rule: RemapRule, name: str, tensor: Any) -> Any:
    if rule.transpose and tensor.dim() < 2:
        raise _misfit(rule, "has no two dimensions to transpose", {name: tensor})
    return tensor.mT if rule.transpose else tensor


def _in_shape(rule: RemapRule, name: str, tensor: Any) -> Any:
    try:
        return tensor if rule.shape is None else tensor.reshape(rule.shape)
    except (OverflowError, RuntimeError, TypeError) as error:
        raise _misfit(rule, f"cannot be reshaped to {format_shape(rule.shape or ())}", {name: tensor}) from error


def _misfit(rule: RemapRule, problem: str, tensors: Mapping[str, Any]) -> CheckpointError:
    shown = ", ".join(f"{name} ({format_shape(tensor.shape)})" for name, tensor in tensors.items())
    return CheckpointError(f"{shown} {problem}: {rule}.")


# What wrappers add to names, and who does; `module` alone may also be a module's own name
WRAPPERS = {
    "module": "saved from DataParallel, DistributedDataParallel or an averaged model",
    "_orig_mod": "saved from a compiled model (torch.compile)",
    "_forward_module": "saved from a model wrapped by Fabric or a strategy",
    "_fsdp_wrapped_module": "saved from FullyShardedDataParallel",
    "_checkpoint_wrapped_module": "saved with activation checkpointing",
    "_fpw_module": "saved from FullyShardedDataParallel",
}
_COUNTERS = ("total_ops", "total_params", "n_averaged")


def strip_wrappers(names: Iterable[str]) -> dict[str, str | None]:
    """Return each name without the parts that wrappers add, None for the counters of thop and of averaged models.

    The parts are removed at any depth. `module` is removed only if all names stay distinct, and so are the others.
    """
    whole = {name: None if name.rpartition(".")[2] in _COUNTERS else name for name in names}
    clean = _distinct(
        {name: new and (_without(new, WRAPPERS.keys() - {"module"}) or new) for name, new in whole.items()}, whole
    )
    return _distinct({name: new and (_without(new, ("module",)) or new) for name, new in clean.items()}, clean)


def _distinct(shorter: dict[str, str | None], names: dict[str, str | None]) -> dict[str, str | None]:
    """Return the shorter names, unless two of them are equal."""
    kept = [new for new in shorter.values() if new is not None]
    return shorter if len(set(kept)) == len(kept) else names


def _without(name: str, wrappers: Iterable[str]) -> str:
    return ".".join(part for part in name.split(".") if part not in wrappers)


RulesArgument = Rules | str | os.PathLike[str] | None


@dataclass(frozen=True)
class AppliedRules:
    """The tensors of a file after rules were applied.

    Attributes:
        tensors: The tensors under their new names.
        pinned: The names that rules made and that the model has.
        search: Whether the rest is matched.
        steps: The steps that were applied.
        origins: The names in the file by the new ones.
        ruled: Those of `origins` that rules made.
        notes: What should be said about the rules.
    """

    tensors: dict[str, torch.Tensor]
    pinned: frozenset[str]
    search: bool
    steps: list[Any]
    origins: Mapping[str, str]
    ruled: Mapping[str, str]
    notes: list[str]


def apply_rules(
    tensors: Mapping[str, torch.Tensor], rules: RulesArgument, model_names: Collection[str]
) -> AppliedRules:
    """Apply rules to the tensors of a file.

    Rules see the names without wrappers' parts, which messages show, or those in the file if a rule names such a part.

    Raises:
        CheckpointError: If none of the names that a rule makes is one of the model, and the rest is matched; and as
            `remap_keys` and `read_rules` do.
    """
    steps, search = _steps_of(rules)
    known = {*model_names, *(new for new in strip_wrappers(model_names).values() if new)}
    if search and steps and steps[0] != "wrappers" and not _names_wrappers(steps):
        adds = any(old != new for old, new in strip_wrappers(tensors).items())
        steps = ["wrappers"] * adds + steps
    remapped = remap_keys(tensors, steps)
    if search:
        _check_targets(remapped, known)
    pinned = frozenset(name for name in remapped.rules_of if name in known) if search else frozenset()
    return AppliedRules(
        tensors=dict(remapped),
        pinned=pinned,
        search=search,
        steps=steps,
        origins=remapped.origins,
        ruled={name: remapped.origins[name] for name in remapped.rules_of},
        notes=[f"rules lead to {list_names(sorted(pinned))}"] * bool(pinned)
        + [f"{list_names([f'the rule {rule}' for rule in remapped.unmatched])} matched nothing"]
        * bool(remapped.unmatched),
    )


def _steps_of(rules: RulesArgument) -> tuple[list[Any], bool]:
    """Return the steps of an argument, and whether what they leave is matched."""
    if rules is None or rules == "auto":
        return [], rules == "auto"
    if rules == "wrappers":
        return ["wrappers"], False
    steps = parse_steps(read_rules(rules) if isinstance(rules, str | os.PathLike) else rules)
    return steps, steps[-1:] != ["only"]


def _names_wrappers(steps: Iterable[Any]) -> bool:
    """Whether a rule names what wrappers add to names."""
    sources = [source for step in steps if isinstance(step, list) for rule in step for source in rule.sources]
    return any(part in (*WRAPPERS, *_COUNTERS) for source in sources for part in re.split(r"\W+", source))


def _check_targets(remapped: Remapped, known: set[str]) -> None:
    """Refuse a rule that makes names of which the model has none."""
    made: dict[RemapRule, list[str]] = {}
    for name, rules in remapped.rules_of.items():
        for rule in rules:
            made.setdefault(rule, []).append(name)
    for rule, names in made.items():
        if rule.target is not None and known.isdisjoint(names):
            raise CheckpointError(
                f"the rule {rule} makes {list_names(names)}, which the model does not have."
                f"{did_you_mean(names[0], known)} A rule must lead to names of the model, unless the last rule is "
                "'only': then nothing else is matched."
            )
