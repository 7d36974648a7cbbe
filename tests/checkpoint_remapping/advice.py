"""Do what the message of a refusal says, again and again, as somebody would who knows which tensor is which."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

from lightning_tricks.checkpoint_remapping import CheckpointError, align, remap_keys
from lightning_tricks.checkpoint_remapping.core.loading import LoadReport, plan_loading
from tests.checkpoint_remapping.models import module_of
from tests.checkpoint_remapping.perturbations import Architecture, File

RIGHT, WRONG, LOOPS, STUCK = ENDS = ("right", "WRONG", "loops", "stuck")
WARNED = "wrong, warned"  # somebody who takes all as it stands, and whom a line warned
_WARNINGS = re.compile(r"may be wrong|it is ambiguous|if one of them is another's|compare outputs", re.IGNORECASE)
MOST_STEPS = 60
_ARGUMENT = re.compile(
    r"(rules|accept|allow_missing|allow_unexpected|allow_mismatched)=(\[.*?\])"
    r"(?= (?:with patterns for [\d,]+ more )?(?:takes|allows))"
)


def follow(model: Architecture, file: File) -> tuple[str, int, str]:
    """Load a file and follow the advice of each error; return how it ended, after how many errors, and the last one.

    A rule is given as it is proposed if it is true, and else with the true target. What a message would allow is
    allowed if it is true that the file has no tensor for it.
    """
    module, tensors = module_of(model.tensors), file.tensors(model)
    given: dict[str, list[Any]] = {}
    seen = set[str]()
    for step in range(MOST_STEPS):
        try:
            report = plan_loading(module, tensors, **given).report
        except CheckpointError as error:
            message = str(error)
        else:
            return _verdict(model, file, report), step, ""
        if message in seen:
            return LOOPS, step, message
        seen.add(message)
        advice = [(name, ast.literal_eval(value)) for name, value in _ARGUMENT.findall(message)]
        taken = [(name, _known(model, file, message, name, values, given.get("rules", []))) for name, values in advice]
        if not any(values for _, values in taken):
            return STUCK, step, message
        for name, values in taken:
            given[name] = [*given.get(name, []), *values]
    return STUCK, MOST_STEPS, message


def follow_blindly(model: Architecture, file: File) -> str:
    """Take the first advice of each error as it stands, without a look; return how it ended."""
    module, tensors = module_of(model.tensors), file.tensors(model)
    plan, is_warned = load_blindly(lambda **given: plan_loading(module, tensors, **given))
    end = _verdict(model, file, plan.report) if plan else STUCK
    return WARNED if end == WRONG and is_warned else end


def load_blindly(load: Callable[..., Any]) -> tuple[Any, bool]:
    """Return what loads with the first `rules` or `accept` of each error as it stands, and whether each line warned."""
    given: dict[str, list[Any]] = {}
    is_warned = True
    for _ in range(MOST_STEPS):
        try:
            return load(**given), is_warned and bool(given)
        except CheckpointError as error:
            advice = [(name, value) for name, value in _ARGUMENT.findall(str(error)) if name in ("rules", "accept")]
            if not advice or advice[0] in [(name, str(values[-1:])) for name, values in given.items()]:
                break
            is_warned &= bool(_WARNINGS.search(str(error)))
            given[advice[0][0]] = [*given.get(advice[0][0], []), *ast.literal_eval(advice[0][1])]
    return None, is_warned


def _verdict(model: Architecture, file: File, report: LoadReport) -> str:
    """Return whether each learned tensor of the file is in its place."""
    origins = {new: old for old, new in report.renamed.items()}
    found = {target: origins.get(target, target) for match in report.alignment.matches for target in match.targets}
    if any(file.truth.get(origin) != target for target, origin in found.items()):
        return WRONG
    wanted = (model.learned & set(file.truth.values())) - file.resized
    return RIGHT if wanted <= found.keys() else STUCK


def _known(
    model: Architecture, file: File, message: str, argument: str, values: list[Any], given: list[Any]
) -> list[Any]:
    """Return what somebody takes of an advice who knows which tensor is which."""
    if argument == "accept":
        return values if _are_true(model, file, given) else []
    if argument == "rules":
        pairs = [value for value in values if isinstance(value, tuple)]
        return [rule for source, target in pairs if (rule := _true_rule(file, message, source, target, given))]
    if argument == "allow_missing":
        absent = model.tensors.keys() - file.truth.values()
        return [pattern for pattern in values if _matching(pattern, model.tensors) <= absent]
    if argument == "allow_mismatched":
        return [pattern for pattern in values if _matching(pattern, model.tensors) <= file.resized]
    return []  # each tensor of a file is one of the model's


def _are_true(model: Architecture, file: File, rules: list[Any]) -> bool:
    """Return whether all that is suggested is true."""
    found = align(dict(model.tensors), file.tensors(model), rules or "auto")
    pairs = [(tuple(map(found.name_in_file, match.sources)), match.targets) for match in found.suggested]
    return all(tuple(map(file.truth.get, names)) == targets for names, targets in pairs)


def _matching(pattern: str, names: Any) -> set[str]:
    expression = re.compile("".join(".*" if part == "*" else re.escape(part) for part in re.split(r"(\*)", pattern)))
    return {name for name in names if expression.fullmatch(name)}


def _true_rule(
    file: File, message: str, source: str, target: str, given: list[tuple[str, str]]
) -> tuple[str, str] | None:
    """Return a rule if it is true of what the given ones leave, else that for one layer of it with the true target."""
    clean = remap_keys(dict.fromkeys(file.truth), ["wrappers"])
    truth = {name: file.truth[origin] for name, origin in clean.origins.items()}
    left = remap_keys(dict.fromkeys(truth), given)
    truth = {name: truth[name] for name, origin in left.origins.items() if name not in left.rules_of}
    made = remap_keys(dict.fromkeys(truth), [(source, target)])
    ruled = {origin: name for name, origin in made.origins.items() if name in made.rules_of}
    if not ruled:
        return None
    wrong = [origin for origin, new in ruled.items() if truth[origin] != new]
    if all(_is_inside(origin, source) and _is_inside(truth[origin], target) for origin in wrong):
        return source, target  # of a layer whose tensors have other names, and are matched as before
    name = next((origin for origin in wrong if origin.rpartition(".")[0] in message), wrong[0])
    if source.endswith("*"):  # the same rule with the true name behind it
        wide = re.sub(r"(?<![^.])\d+(?![^.])", "*", truth[name])
        ends = source.rpartition(".")[2] == "*"
        wide = wide.rpartition(".")[0] + ".*" if ends else wide
        if wide.count("*") == source.count("*"):
            made = remap_keys(dict.fromkeys(truth), [(source, wide)])
            if all(truth[origin] == new for new, origin in made.origins.items() if new in made.rules_of):
                return source, wide
    ending = next(
        e for e in (".weight", ".bias", "_weight", "_bias", "") if name.endswith(e) and truth[name].endswith(e)
    )
    if ending.startswith("."):
        return name.removesuffix(ending), truth[name].removesuffix(ending)
    return name, truth[name]


def _is_inside(name: str, layer: str) -> bool:
    return name.startswith(f"{layer}.") and "." not in name.removeprefix(f"{layer}.")
