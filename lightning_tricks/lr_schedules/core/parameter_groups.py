"""Parameter groups of a model: which optimizer of a spec steps them, by which options, in which layer they are."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_tricks._shared.modules import names_of_parameters
from lightning_tricks._shared.patterns import LIST_NUMBER, Pattern, strip_compile_prefix
from lightning_tricks._shared.text import counted, format_shape, list_names
from lightning_tricks.lr_schedules.core.combined_optimizer import part_names
from lightning_tricks.lr_schedules.core.optimizer_spec import NO_DECAY_WORDS, OptimizerSpec


def parameter_groups(module: nn.Module, spec: OptimizerSpec) -> list[dict[str, Any]]:
    """Group the trainable parameters of a model by their options in a spec.

    Frozen parameters are left out, as `BaseFinetuning` expects; tied ones appear once.

    Args:
        module: The model.
        spec: The description of the optimizer, or of several.

    Returns:
        Groups for an optimizer, each with its own `name`, its `params` and their options.

    Raises:
        ValueError: If nothing is trainable, a pattern matches nothing, or `layer_decay` finds one layer only; and as in
            `parts_of`.
    """
    return [group for part in parts_of(module, spec) for group in groups_of_part(module, part)]


def groups_of_part(module: nn.Module, part: Part) -> list[dict[str, Any]]:
    """Group the parameters of one optimizer of a spec."""
    spec = part.spec
    patterns = [Pattern(text) for text in spec.groups or ()]
    undecayed = [Pattern(text) for text in spec.no_decay if text not in NO_DECAY_WORDS]
    names = names_of_parameters(module)
    # a pattern for what is frozen is not a misspelling
    known = [name for p, own in names.items() if p in part.parameters or not p.requires_grad for name in own]
    check_patterns_match([*patterns, *undecayed], known)
    norms = parameters_of_norms(module)
    layers, decay = layer_of_parameters(module) if spec.layer_decay is not None else {}, spec.decay

    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in module.named_parameters():
        if parameter not in part.parameters:
            continue
        plain = strip_compile_prefix(name)
        pattern = next((pattern.text for pattern in patterns if any(map(pattern.matches, names[parameter]))), None)
        options: dict[str, Any] = {"lr": spec.lr, "weight_decay": decay}
        options.update((spec.groups or {}).get(pattern or "", {}))
        exempt = (
            ("bias" in spec.no_decay and "bias" in plain.rpartition(".")[2])
            or ("norm" in spec.no_decay and (name in norms or NORM.search(plain)))
            or any(pattern.matches(own) for pattern in undecayed for own in names[parameter])
        )
        label = ", ".join(filter(None, [part.name, pattern])) or "parameters"
        if exempt and options["weight_decay"]:
            label, options["weight_decay"] = f"{label}, no decay", 0.0
        if spec.layer_decay is not None:
            label = f"{label}, layer {layers[name]}"
            options["lr"] *= spec.layer_decay ** (max(layers.values()) - layers[name])
        groups.setdefault(label, {"name": label, "params": [], **options})["params"].append(parameter)
    return list(groups.values())


@dataclass(frozen=True)
class Part:
    """The parameters that one optimizer steps.

    Attributes:
        name: The name of the optimizer among several; empty if it is the only one.
        spec: The optimizer.
        parameters: Its parameters, with their qualified names, "embedding.weight = head.weight" of a tied one.
        passed_on: The names and shapes of those that `only` names and the optimizer does not take: they are not 2-D.
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
        own = {p: " = ".join(names[p]) for p in named if p.ndim == 2 or not one.takes_matrices}
        passed_on = [f"{left[p]} ({format_shape(p.shape)})" for p in named if p not in own]
        if not own:
            where = f"only={[*one.only]}" if one.only else "what the others leave"
            lacks = f"2-D weights, all it takes: {list_names(passed_on)} is for rest" if passed_on else "parameters"
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


_PLAIN = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# names of attributes and classes; not `normal_head`, `normalizing_flow` and `NormalizedLinear`
NORM = re.compile(r"(?:[nN]orm|NORM)(?:s|ali[sz](?:ation|er)s?)?(?![a-z])")


def layer_of_parameters(module: nn.Module) -> dict[str, int]:
    """Number the layers of a model from its stem, 0, to its head, for layer-wise learning rates.

    Each child of a stack is a layer; a stack is an nn.Sequential, nn.ModuleList or nn.ModuleDict with two children of
    the same class. All modules before the first stack, and between two, form one layer each; after the last, and in a
    model without one, each module with its own parameters is a layer. A normalization joins the module that it follows.
    For timm's ViTs, Mixers and ResNets these are timm's layers.

    Args:
        module: The model.

    Returns:
        Qualified name of each parameter -> its layer.

    Raises:
        ValueError: If there is only one layer.

    Examples:
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> layer_of_parameters(net)
        {'0.weight': 0, '0.bias': 0, '2.weight': 1, '2.bias': 1}
    """
    stacked = list(_children_of_stacks(module, ""))
    names = [name for name, _ in module.named_parameters()]
    owners = [next((path for path in stacked if name.startswith(f"{path}.")), None) for name in names]
    norms = parameters_of_norms(module)
    last_stacked = max((place for place, owner in enumerate(owners) if owner), default=-1)

    layers: dict[str, int] = {}
    layer, before = -1, ""
    for place, (name, owner) in enumerate(zip(names, owners, strict=True)):
        holder = name.rpartition(".")[0]
        current = owner or ("between stacks" if place < last_stacked else holder)
        if name in norms and owner in (None, holder) and layer >= 0:
            current = before
        layer += current != before or layer < 0
        layers[name], before = layer, current
    if layer < 1:
        raise ValueError(
            f"{type(module).__name__} has only one layer: layer_decay needs several modules with parameters."
        )
    return layers


def _children_of_stacks(module: nn.Module, prefix: str) -> Iterator[str]:
    """Find the children of stacks; one that is a plain stack itself is opened."""
    for name, child in module.named_children():
        path = f"{prefix}.{name}".lstrip(".")
        if _is_stack(module) and not (type(child) in _PLAIN and _is_stack(child)):
            if _has_parameters(child):
                yield path
        else:
            yield from _children_of_stacks(child, path)


def _is_stack(module: nn.Module) -> bool:
    if not isinstance(module, _PLAIN):
        return False
    classes = Counter(type(child) for child in module.children() if _has_parameters(child))
    return any(count > 1 for count in classes.values())


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def parameters_of_norms(module: nn.Module) -> set[str]:
    """Return the parameters of modules whose class is called a norm; names like `net.1.weight` do not say so."""
    return {
        f"{path}.{name}".lstrip(".")
        for path, part in module.named_modules()
        if NORM.search(type(part).__name__)
        for name, _ in part.named_parameters(recurse=False)
    }
