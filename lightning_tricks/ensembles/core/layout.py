"""Which container the members of an ensemble get: stacked where that is possible and faster, or else sequential."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from lightning_tricks.ensembles.core.members import Members, SequentialMembers
from lightning_tricks.ensembles.core.same_values import different_attribute
from lightning_tricks.ensembles.core.stacked_layers import stacked_type
from lightning_tricks.ensembles.core.stacked_members import StackedMembers


def as_members(members: Sequence[nn.Module], vectorize: bool | str = "auto", why_not: str = "") -> Members:
    """Put members into the module that runs them faster.

    Args:
        members: At least one.
        vectorize: "auto" stacks what gains by it: members of one structure without convolutions, for which a loop is
            the faster one on a CPU. True stacks what can be stacked, False nothing.
        why_not: A reason against stacking that the members themselves do not show.

    Returns:
        A `StackedMembers`, or a `SequentialMembers` that bears the reason.
    """
    if vectorize is False or len(members) == 1:
        return SequentialMembers(members)
    reason = why_not or why_not_stack(members)
    if not reason and vectorize == "auto":
        kinds = map(stacked_type, members[0].modules())
        if any(not isinstance(kind, str) and kind.sequential_is_faster_on_cpu for kind in kinds):
            return SequentialMembers(members, "convolutions of their own are faster than one for all members")
    return SequentialMembers(members, reason) if reason else StackedMembers(members)


def as_sequential(members: Members, reason: str = "") -> SequentialMembers:
    """Return the same members, with their values, to be run one after another."""
    if isinstance(members, SequentialMembers):
        return members
    return SequentialMembers([members.member(index) for index in range(len(members))], reason)


def why_not_stack(members: Sequence[nn.Module]) -> str:
    """Return why members cannot be stacked, or nothing.

    They must be of one structure, and all their parameters in layers that have a stacked form.
    """
    first, *others = members
    names = [name for name, _ in first.named_parameters(remove_duplicate=False)]
    if len(names) != len(list(first.parameters())):
        return "layers share a parameter"
    if not names:
        return "the members have no parameters"
    for path, module in first.named_modules():
        where = f" ({path})" if path else ""
        if any(getattr(module, hooks) for hooks in _HOOKS):
            return f"{type(module).__name__} has hooks{where}"
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        if own and isinstance(kind := stacked_type(module), str):
            return f"{kind}{where}"
    for index, other in enumerate(others, start=1):
        difference = _different_structure(first, other)
        if difference is not None:
            return f"member {index} is of another structure than member 0{difference}"
    parameters = [id(value) for member in members for _, value in member.named_parameters(remove_duplicate=False)]
    return "members share a parameter" if len(set(parameters)) < len(parameters) else ""


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _different_structure(first: nn.Module, other: nn.Module) -> str | None:
    """Return where modules have other types, options, shapes, or other parameters that are trained; None if nowhere."""
    parts, others = ([*module.named_modules()] for module in (first, other))
    if [(path, type(part)) for path, part in parts] != [(path, type(part)) for path, part in others]:
        return ""
    counterparts = {(id(part), id(same)) for (_, part), (_, same) in zip(parts, others, strict=True)}
    for (path, part), (_, same) in zip(parts, others, strict=True):
        if _tensors(part) != _tensors(same):
            return f" ({path})" if path else ""
        if name := different_attribute(part, same, counterparts):
            return f" ({path}.{name})" if path else f" ({name})"
    return None


def _tensors(part: nn.Module) -> list[Any]:
    own = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
    return [(name, _shape(tensor), tensor.dtype, tensor.requires_grad) for name, tensor in own]


def _shape(tensor: Tensor) -> tuple[int, ...] | None:
    return None if nn.parameter.is_lazy(tensor) else tuple(tensor.shape)
