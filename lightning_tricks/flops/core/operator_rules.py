"""How each operator counts: as MACs, as other FLOPs, as nothing, or as the operators that it is composed of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lightning_tricks._torch_compat.operators import OpOverload, is_composite
from lightning_tricks._torch_compat.tensors import tree_map
from lightning_tricks.flops.core.estimated_costs import ESTIMATED_COSTS, FREE_OPERATORS, elements_written
from lightning_tricks.flops.core.matmul_costs import MATMUL_COSTS, Cost


class OperatorRule(NamedTuple):
    """How an operator counts.

    Attributes:
        kind: `matmul` for an operator that is counted in MACs, `other` for one that is counted in FLOPs, `free` for one
            that costs nothing, `composite` for one that is counted as the operators it is composed of, and `unknown`
            for all others.
        cost: The cost of one call, as a function of its result and its arguments; None for `free`, `composite` and
            `unknown`.
    """

    kind: Literal["matmul", "other", "free", "composite", "unknown"]
    cost: Cost | None = None


def find_rule(operator: Any, custom: Mapping[Any, Callable[..., float]]) -> OperatorRule:
    """Return the rule of an operator.

    Args:
        operator: An `OpOverload` or a higher-order operator.
        custom: Formulas by operator, which come before all others. As those of
            `torch.utils.flop_counter.register_flop_formula`, they are called with shapes in place of tensors and return
            FLOPs.
    """
    packet = getattr(operator, "overloadpacket", operator)
    for key in (operator, packet):
        if key in custom:
            return OperatorRule("matmul", _from_shape_formula(custom[key]))
    if not isinstance(operator, OpOverload):
        return _registered_rule(packet) or OperatorRule("unknown")
    name = operator.name().partition(".")[0]
    if name in MATMUL_COSTS:
        return OperatorRule("matmul", MATMUL_COSTS[name])
    if registered := _registered_rule(packet):
        return registered
    out_of_place_name = name.removesuffix("_")
    if out_of_place_name in ESTIMATED_COSTS:
        return OperatorRule("other", ESTIMATED_COSTS[out_of_place_name])
    if (
        operator.is_view
        or out_of_place_name in FREE_OPERATORS
        or operator.namespace in ("prim", "c10d", "_c10d_functional")
    ):
        return OperatorRule("free")
    if torch.Tag.pointwise in operator.tags:
        return OperatorRule("other", elements_written)
    if is_composite(operator):
        return OperatorRule("composite")
    return OperatorRule("unknown")


def _registered_rule(packet: Any) -> OperatorRule | None:
    """Return the rule for a formula of torch, or for one that was registered there; formulas there return FLOPs."""
    if packet not in flop_registry:
        return None
    formula = flop_registry[packet]
    return OperatorRule("matmul", lambda out, /, *args, **kwargs: formula(*args, **kwargs, out_val=out) / 2)


def _from_shape_formula(formula: Callable[..., float]) -> Cost:
    def cost(out: Any, /, *args: Any, **kwargs: Any) -> float:
        args, kwargs, shape = tree_map(
            lambda leaf: leaf.shape if isinstance(leaf, Tensor) else leaf, (args, kwargs, out)
        )
        return formula(*args, **kwargs, out_shape=shape) / 2

    return cost
