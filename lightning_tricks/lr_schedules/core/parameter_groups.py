"""Parameter groups of a model, for optimizers."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_tricks._shared.modules import names_of_parameters
from lightning_tricks._shared.patterns import Pattern, strip_compile_prefix
from lightning_tricks.lr_schedules.core.layers import NORM, layer_of_parameters, parameters_of_norms
from lightning_tricks.lr_schedules.core.optimizer_spec import NO_DECAY_WORDS, OptimizerSpec
from lightning_tricks.lr_schedules.core.parameter_parts import Part, check_patterns_match, parts_of


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
    layers = layer_of_parameters(module) if spec.layer_decay is not None else {}

    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in module.named_parameters():
        if parameter not in part.parameters:
            continue
        plain = strip_compile_prefix(name)
        pattern = next((pattern.text for pattern in patterns if any(map(pattern.matches, names[parameter]))), None)
        options: dict[str, Any] = {"lr": spec.lr, "weight_decay": spec.weight_decay}
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
