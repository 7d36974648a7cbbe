"""The rules of a caller: applied to the tensors of a file first, before the rest is matched."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lightning_tricks._shared.checks import did_you_mean
from lightning_tricks._shared.text import list_names
from lightning_tricks.checkpoint_remapping.core.errors import CheckpointError
from lightning_tricks.checkpoint_remapping.core.remapping import Remapped, remap_keys, strip_wrappers
from lightning_tricks.checkpoint_remapping.core.rules import RemapRule, Rules, parse_steps, read_rules

RulesArgument = Rules | str | os.PathLike[str] | None


@dataclass(frozen=True)
class AppliedRules:
    """What rules made of the tensors of a file.

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

    Rules see the names in the file or, if they fit better, those without wrappers' parts, which messages show.

    Raises:
        CheckpointError: If none of the names that a rule makes is one of the model, and the rest is matched; and as
            `remap_keys` and `read_rules` do.
    """
    steps, search = _steps_of(rules)
    known = {*model_names, *(new for new in strip_wrappers(model_names).values() if new)}
    remapped = remap_keys(tensors, steps)
    if search and steps and steps[0] != "wrappers" and _misfits(remapped, known):
        again = remap_keys(tensors, ["wrappers", *steps])
        if _misfits(again, known) < _misfits(remapped, known):
            steps, remapped = ["wrappers", *steps], again
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
        + [f"the rule {rule} matched nothing" for rule in remapped.unmatched],
    )


def _steps_of(rules: RulesArgument) -> tuple[list[Any], bool]:
    """Return the steps of an argument, and whether what they leave is matched."""
    if rules is None or rules == "auto":
        return [], rules == "auto"
    if rules == "wrappers":
        return ["wrappers"], False
    steps = parse_steps(read_rules(rules) if isinstance(rules, str | os.PathLike) else rules)
    return steps, steps[-1:] != ["only"]


def _misfits(remapped: Remapped, known: set[str]) -> int:
    """Return the number of rules that match nothing, and of names that rules make and the model does not have."""
    unmatched = [rule for rule in remapped.unmatched if rule != "wrappers"]
    return len(unmatched) + len(remapped.rules_of.keys() - known)


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
