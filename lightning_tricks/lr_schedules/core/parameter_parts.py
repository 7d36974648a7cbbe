"""Which parameters of a model each optimizer of a spec steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_tricks._shared.modules import names_of_parameters
from lightning_tricks._shared.patterns import LIST_NUMBER, Pattern, strip_compile_prefix
from lightning_tricks._shared.text import counted, format_shape, list_names
from lightning_tricks.lr_schedules.core.combined_optimizer import part_names
from lightning_tricks.lr_schedules.core.layers import layer_of_parameters
from lightning_tricks.lr_schedules.core.optimizer_spec import OptimizerSpec


@dataclass(frozen=True)
class Part:
    """The parameters that one optimizer steps.

    Attributes:
        name: The name of the optimizer among several; empty if it is the only one.
        spec: The optimizer.
        parameters: Its parameters, with their qualified names.
        passed_on: The names of those that `only` names and the optimizer does not take: they are no matrices.
    """

    name: str
    spec: OptimizerSpec
    parameters: Mapping[nn.Parameter, str]
    passed_on: Sequence[str]


def parts_of(module: nn.Module, spec: OptimizerSpec) -> list[Part]:
    """Divide the trainable parameters of a model among the optimizers of a spec, each of which takes what is left.

    Raises:
        ValueError: If nothing is trainable, a pattern matches nothing, an optimizer has no parameters, some have no
            optimizer, or an optimizer that takes matrices only does not say which.
    """
    names = names_of_parameters(module)
    left = {parameter: own[0] for parameter, own in names.items() if parameter.requires_grad}
    if not left:
        raise ValueError(f"{type(module).__name__} has no trainable parameters (requires_grad=True).")
    parts: list[Part] = []
    for label, one in zip(part_names(one.name for one in spec.chain), spec.chain, strict=True):
        if one.only is None and one.takes_matrices:
            raise _which_matrices(module, one, {name: p for p, name in left.items() if p.ndim == 2})
        patterns = [Pattern(text) for text in one.only or ("*",)]
        # a pattern for what is frozen is not a misspelling
        check_patterns_match(patterns, [name for own in names.values() for name in own])
        named = [p for p in left if any(pattern.matches(name) for pattern in patterns for name in names[p])]
        own = {p: left[p] for p in named if p.ndim == 2 or not one.takes_matrices}
        passed_on = [left[p] for p in named if p not in own]
        if not own:
            where = f"only={[*one.only]}" if one.only else "what the others leave"
            lacks = "matrices" if one.takes_matrices else "parameters"
            raise ValueError(f"{one.name} has nothing to step: {where} holds no trainable {lacks}.")
        parts.append(Part(label if len(spec.chain) > 1 else "", one, own, passed_on))
        left = {parameter: name for parameter, name in left.items() if parameter not in own}
    if left:
        raise ValueError(
            f"{counted(len(left), 'trainable parameter')} would have no optimizer, as {one.name} steps "
            f"only={[*(one.only or ())]}: {list_names(left.values())}. Give it rest=OptimizerSpec(...) for them, or "
            "freeze them (requires_grad=False)."
        )
    return parts


def check_patterns_match(patterns: Sequence[Pattern], names: Sequence[str]) -> None:
    """Raise an error for a pattern that matches no name."""
    for pattern in patterns:
        if not any(map(pattern.matches, names)):
            raise ValueError(
                f"pattern {pattern.text!r} matches none of the {len(names)} parameters: {list_names(names, 5)}"
            )


def _which_matrices(module: nn.Module, spec: OptimizerSpec, matrices: Mapping[str, nn.Parameter]) -> ValueError:
    """Return an error that lists the matrices of a model, and the lines to choose from."""
    if not matrices:
        return ValueError(f"{spec.name} takes matrices only, and {type(module).__name__} has none that it could train.")
    alike: dict[tuple[str, str], list[str]] = {}
    for name, one in matrices.items():
        alike.setdefault((LIST_NUMBER.sub("*", name), format_shape(one.shape)), []).append(name)
    rows = [
        f"  {names[0]}: {shape}" if len(names) == 1 else f"  {pattern}: {len(names)} of {shape}"
        for (pattern, shape), names in alike.items()
    ]
    lines = [f"  only={_globs(list(matrices), [])}  # all of them"]
    try:
        layers = {strip_compile_prefix(name): layer for name, layer in layer_of_parameters(module).items()}
    except ValueError:  # there is one layer only
        layers = {}
    hidden = [name for name in matrices if 0 < layers.get(name, 0) < max(layers.values())]
    if hidden:
        others = [name for name in matrices if name not in hidden]
        lines.insert(0, f"  only={_globs(hidden, others)}  # without the first and the last layer")
    return ValueError(
        f"{spec.name} takes matrices only, and which of them is for you to say. Those of {type(module).__name__} are\n"
        + "\n".join(rows)
        + "\nChoose by one of these lines, or one like them, and give rest=OptimizerSpec(...) for what is left:\n"
        + "\n".join(lines)
    )


def _globs(chosen: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return few patterns, made of the names themselves, that match all of the chosen and none of the others."""
    found: list[Pattern] = []
    for name in chosen:
        if any(pattern.matches(name) for pattern in found):
            continue
        path, _, last = name.rpartition(".")
        number = LIST_NUMBER.search(path)
        wide = [f"{name[: number.start()]}*.{last}", LIST_NUMBER.sub("*", name)] if number else []
        patterns = map(Pattern, (*wide, name))
        found.append(next(pattern for pattern in patterns if not any(map(pattern.matches, others))))
    return [pattern.text for pattern in found]
