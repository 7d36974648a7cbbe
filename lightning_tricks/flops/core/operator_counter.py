"""Count the operators that run, each by its rule, and attribute them to the modules that call them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle

from lightning_tricks._shared.tensors import tensors_in
from lightning_tricks._torch_compat.operators import OpOverload, TorchDispatchMode, is_composite, without_dispatch_modes
from lightning_tricks._torch_compat.tensors import tree_map
from lightning_tricks.flops.core import operator_costs


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
    cost: operator_costs.Cost | None = None


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
    if name in operator_costs.MATMUL_COSTS:
        return OperatorRule("matmul", operator_costs.MATMUL_COSTS[name])
    if registered := _registered_rule(packet):
        return registered
    out_of_place_name = name.removesuffix("_")
    if out_of_place_name in operator_costs.ESTIMATED_COSTS:
        return OperatorRule("other", operator_costs.ESTIMATED_COSTS[out_of_place_name])
    if (
        operator.is_view
        or out_of_place_name in operator_costs.FREE_OPERATORS
        or operator.namespace in ("prim", "c10d", "_c10d_functional")
    ):
        return OperatorRule("free")
    if torch.Tag.pointwise in operator.tags:
        return OperatorRule("other", operator_costs.elements_written)
    return OperatorRule("composite" if is_composite(operator) else "unknown")


def _registered_rule(packet: Any) -> OperatorRule | None:
    """Return the rule for a formula of torch, or for one that was registered there; formulas there return FLOPs."""
    if packet not in flop_registry:
        return None
    formula = flop_registry[packet]
    return OperatorRule("matmul", lambda out, /, *args, **kwargs: formula(*args, **kwargs, out_val=out) / 2)


def _from_shape_formula(formula: Callable[..., float]) -> operator_costs.Cost:
    def cost(out: Any, /, *args: Any, **kwargs: Any) -> float:
        args, kwargs, shape = tree_map(lambda one: one.shape if isinstance(one, Tensor) else one, (args, kwargs, out))
        return formula(*args, **kwargs, out_shape=shape) / 2

    return cost


@dataclass
class ModuleCost:
    """The cost of one module in the forward pass, including the modules that it calls.

    Attributes:
        macs: Multiply-accumulates of matrix products and convolutions.
        own_macs: Those multiply-accumulates that run outside its submodules.
        other_flops: FLOPs of all other operators.
        calls: The number of its calls.
        input_shapes: The shapes of the input tensors of its first call.
        output_shapes: The shapes of the output tensors of its first call.
    """

    macs: float = 0
    own_macs: float = 0
    other_flops: float = 0
    calls: int = 0
    input_shapes: tuple[tuple[int, ...], ...] = ()
    output_shapes: tuple[tuple[int, ...], ...] = ()


class OperatorCounter(TorchDispatchMode):
    """Counts every operator that runs while it is active, and the cost of each submodule of `model`.

    Args:
        model: The module that is run.
        operators: Formulas by operator, see `find_rule`.
        modules: Rules with thop's signature by module class; a rule replaces the count of all that a module calls.

    Attributes:
        total: The cost of the forward pass.
        backward_macs: The multiply-accumulates that ran in `backward_pass()`.
        uncounted: The number of calls of each operator that has no rule.
        seen_operators: The operators that were called, and their overload packets.
        module_costs: The cost of each module.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        model: nn.Module,
        operators: Mapping[Any, Callable[..., float]] | None = None,
        modules: Mapping[type, Callable[..., Any]] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = ModuleCost()
        self.backward_macs: float = 0
        self.uncounted: Counter[str] = Counter()
        self.module_costs: dict[nn.Module, ModuleCost] = {}
        self._operators = operators or {}
        self._modules = modules or {}
        self._parts = [part for part in model.modules() if not isinstance(part, torch.jit.ScriptModule)]
        self._rules: dict[Any, OperatorRule] = {}
        self._call_stack: list[tuple[nn.Module | None, ModuleCost]] = [(None, self.total)]
        self._in_backward = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch asks each mode; nothing is compiled while models are counted, and operators run faster with False
        return False

    @property
    def seen_operators(self) -> set[Any]:
        """The operators that were called, and their overload packets."""
        return {*self._rules, *(getattr(operator, "overloadpacket", None) for operator in self._rules)}

    @contextmanager
    def attribute_to_modules(self) -> Iterator[None]:
        """Attribute operators to the submodules that call them, by hooks that are removed on exit."""
        handles: list[RemovableHandle] = []
        for part in self._parts:
            handles.append(part.register_forward_pre_hook(self._enter, prepend=True))
            handles.append(part.register_forward_hook(self._leave, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            while len(self._call_stack) > 1:
                self._pop_call()

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Count the operators that run inside as part of the backward pass."""
        before, self._in_backward = self._in_backward, True
        try:
            yield
        finally:
            self._in_backward = before

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if not self._in_backward:
            self._call_stack.append((module, ModuleCost()))

    def _leave(self, module: nn.Module, inputs: Any, kwargs: Any, output: Any) -> None:
        if self._in_backward or all(module is not part for part, _ in self._call_stack):
            return
        while self._call_stack[-1][0] is not module:  # modules that an exception has left
            self._pop_call()
        own = self._call_stack[-1][1]
        if type(module) in self._modules:
            own.macs = own.own_macs = _apply_thop_rule(self._modules[type(module)], module, inputs, output)
        self._pop_call()
        total = self.module_costs.setdefault(module, ModuleCost())
        if not total.calls:
            total.input_shapes, total.output_shapes = tensor_shapes((inputs, kwargs)), tensor_shapes(output)
        total.calls += 1
        total.own_macs += own.own_macs
        if all(module is not part for part, _ in self._call_stack):  # unless it has called itself
            total.macs += own.macs
            total.other_flops += own.other_flops

    def _pop_call(self) -> None:
        _, own = self._call_stack.pop()
        self._call_stack[-1][1].macs += own.macs
        self._call_stack[-1][1].other_flops += own.other_flops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count it."""
        kwargs = kwargs or {}
        rule = self._rules.get(func)
        if rule is None:
            rule = self._rules[func] = find_rule(func, self._operators)
        if rule.kind == "composite":  # such operators are dispatched only in inference mode
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        if rule.kind != "free":
            self._add(func, rule, out, args, kwargs)
        return out

    def _add(self, func: Any, rule: OperatorRule, out: Any, args: Any, kwargs: Any) -> None:
        running = self._call_stack[-1][1]
        if rule.cost is None:
            # the backward operators of torch without a rule belong to pointwise operators, normalizations and poolings
            if not self._in_backward or getattr(func, "namespace", "") not in ("aten", "prims"):
                self.uncounted[str(func)] += 1
        elif rule.kind == "matmul" and self._in_backward:
            self.backward_macs += rule.cost(out, *args, **kwargs)
        elif rule.kind == "matmul":
            macs = rule.cost(out, *args, **kwargs)
            running.macs += macs
            running.own_macs += macs
        elif not self._in_backward:
            running.other_flops += rule.cost(out, *args, **kwargs)


def _apply_thop_rule(rule: Callable[..., Any], module: nn.Module, inputs: Any, output: Any) -> float:
    """Return the MACs that a rule with thop's signature adds to `module.total_ops` for one call."""
    with without_dispatch_modes():
        module.total_ops = torch.zeros(1, dtype=torch.float64, device="cpu")
        rule(module, inputs, output)
        counted = float(module.total_ops)
        del module.total_ops
    return counted


def tensor_shapes(value: Any) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of all tensors in a value."""
    return tuple(tuple(tensor.shape) for tensor in tensors_in(value))
