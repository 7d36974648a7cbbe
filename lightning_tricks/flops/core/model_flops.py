"""`count_flops`: the FLOPs of any module, by one of two backends.

"torch" counts operators as they run, "thop" applies rules for module classes.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_tricks._shared.checks import check_choice
from lightning_tricks._shared.dry_run.model_call import ModelCall, example_input_code, find_call
from lightning_tricks._shared.dry_run.model_copy import unwrap_model
from lightning_tricks._shared.dry_run.runner import NoDataError, dry_run, find_loss
from lightning_tricks._shared.dry_run.trainer_stub import redirect_backward, run_backward
from lightning_tricks._shared.lightning_name import lightning_logger
from lightning_tricks._torch_compat.operators import HigherOrderOperator, OpOverload, OpOverloadPacket
from lightning_tricks.flops.core.flops_count import FlopsCount, FlopsRow
from lightning_tricks.flops.core.operator_counter import ModuleCost, OperatorCounter
from lightning_tricks.flops.core.thop_rules import has_thop_rule, thop_macs

Backend = Literal["torch", "thop"]


def count_flops(
    model: nn.Module,
    inputs: Any = None,
    *,
    backend: Backend = "torch",
    backward: bool = False,
    custom_ops: Mapping[Any, Callable[..., Any]] | None = None,
    compare: bool = False,
) -> FlopsCount:
    """Count the FLOPs of one call of a model, and of each module in it.

    The model itself is not run. A copy runs on tensors that have shapes but no data, which takes neither the compute
    nor the memory of the model. Modules, gradients, random state, hooks and modes stay unchanged, even if the model
    raises an exception. The counts are the same in training and evaluation mode, with and without gradients, compiled
    or not, on CPU, CUDA and the meta device. If the model depends on values (`if x.sum() > 0`), a copy with data is run
    instead, and `notes` tells you.

    Args:
        model: Any module, including a LightningModule. BatchNorm counts as in evaluation mode.
        inputs: The inputs of the model: a tensor; a tuple of positional arguments; a dict of keyword arguments; or a
            batch for the module's `training_step` (a list is always a batch). Inputs may be on another device than the
            model. None uses the module's `example_input_array`.
        backend: "torch" counts operators as they run. "thop" applies thop's rules for module classes to a copy with
            data in evaluation mode: it has no rule for attention, and it misses what a module computes in its own
            `forward`.
        backward: Whether to count a backward pass too, into `train_step_flops`. It starts from the loss of the
            `training_step`, from a `loss` among the outputs, or else from the sum of all outputs that require a
            gradient.
        custom_ops: Your own rules. A rule for a module class has thop's signature `rule(module, inputs, output)` and
            adds to `module.total_ops`; it replaces the count of everything that the module calls. A rule for an
            operator (such as `torch.ops.mylib.op`) has the signature of
            `torch.utils.flop_counter.register_flop_formula` and returns FLOPs; formulas that are registered there are
            used as well.
        compare: Whether to count with the other backend too, into `peer`; thop cannot count a model without data or a
            sharded one, and `notes` tells you.

    Returns:
        The counts of the model and of each of its modules. Printed, they are a table.

    Raises:
        TypeError: If `model` is not a module, or `inputs` are not tensors (but a shape, an array or a DataLoader).
        ValueError: If `backend` is unknown, if there are no inputs, if no output requires a gradient, or if thop is to
            count a backward pass.
        Exception: The model's own error, with a hint on how `inputs` was used.

    Examples:
        >>> import torch
        >>> count = count_flops(nn.Conv2d(3, 8, 3, padding=1), torch.empty(1, 3, 32, 32), backward=True)
        >>> count.macs, count.flops, count.train_step_flops  # the images need no gradient
        (221184, 442368, 884736)
    """
    call = find_call(model, inputs)
    if call is None:
        name, example = type(unwrap_model(model)).__name__, example_input_code(unwrap_model(model))
        raise ValueError(
            f"inputs=None needs an example_input_array, and {name} has none: give inputs, such as {example}."
        )
    return count_call(model, call, backend=backend, backward=backward, custom_ops=custom_ops, compare=compare)


def count_call(
    model: nn.Module,
    call: ModelCall,
    *,
    backend: str = "torch",
    backward: bool = False,
    custom_ops: Mapping[Any, Callable[..., Any]] | None = None,
    compare: bool = False,
) -> FlopsCount:
    """Count the FLOPs of a given call; see `count_flops`."""
    check_backend(backend, backward)
    modules, operators = _split_custom_ops(custom_ops or {})
    present = {type(module) for module in model.modules()}
    _warn_about_unused(model, [key.__name__ for key in modules if key not in present], "module")
    peer = None
    if backend == "torch":
        count, called = _count_with_torch(model, call, backward, modules, operators)
        if compare:
            try:
                peer = _count_with_thop(model, call, modules)
            except NoDataError as error:
                count = replace(count, notes=(*count.notes, f"not compared, as thop needs data: {error}"))
    else:
        count, called = _count_with_thop(model, call, modules), set(operators)
        if compare:
            peer, called = _count_with_torch(model, call, False, {}, operators)
    _warn_about_unused(model, [str(key) for key in operators if key not in called], "operator")
    return replace(count, peer=peer)


def check_backend(backend: object, backward: bool) -> None:
    """Raise a ValueError if a backend is unknown or cannot count a backward pass."""
    check_choice("backend", backend, ("torch", "thop"))
    if backward and backend == "thop":
        raise ValueError('backward=True needs backend="torch": thop has no rules for a backward pass.')


def _split_custom_ops(custom_ops: Mapping[Any, Callable[..., Any]]) -> tuple[dict[type, Any], dict[Any, Any]]:
    """Return the rules for module classes and the rules for operators."""
    modules, operators = {}, {}
    for key, rule in custom_ops.items():
        if not callable(rule):
            raise TypeError(f"custom_ops: the rule of {key!r} must be callable, got {rule!r}.")
        if isinstance(key, type) and issubclass(key, nn.Module):
            modules[key] = rule
        elif isinstance(key, OpOverload | OpOverloadPacket | HigherOrderOperator):
            operators[key] = rule
        else:
            raise TypeError(f"custom_ops: a key must be a module class or an operator of torch.ops, got {key!r}.")
    return modules, operators


def _warn_about_unused(model: nn.Module, names: list[str], what: str) -> None:
    if names:
        warnings.warn(
            f"custom_ops: no {what} of {type(model).__name__} is {' or '.join(names)}, so this rule counted nothing. A "
            "rule applies to exactly its class or operator.",
            stacklevel=4,
        )


def _count_with_torch(
    model: nn.Module, call: ModelCall, backward: bool, modules: Mapping[type, Any], operators: Mapping[Any, Any]
) -> tuple[FlopsCount, set[Any]]:
    """Count the operators of one call as they run, on a copy of the model.

    Args:
        model: Any module.
        call: How to call it.
        backward: Whether to count a backward pass as well.
        modules: Rules by module class, see `count_flops`.
        operators: Rules by operator, see `count_flops`.

    Returns:
        The counts, and the operators that were called.
    """

    def count(model_copy: nn.Module, call: ModelCall) -> tuple[nn.Module, OperatorCounter]:
        counter = OperatorCounter(model_copy, operators, modules)
        with counter, counter.attribute_to_modules():
            _run(model_copy, call, counter, backward)
        return model_copy, counter

    (model_copy, counter), notes = dry_run(model, call, count)
    for note in notes:
        lightning_logger("flops").info("FLOPs of %s: %s.", type(model_copy).__name__, note)
    counted = _build_count(
        model_copy,
        counter.total,
        counter.module_costs,
        train_step_flops=_to_int(2 * (counter.total.macs + counter.backward_macs)) if backward else None,
        uncounted=dict(counter.uncounted),
        backend="torch",
        notes=notes,
    )
    return counted, counter.seen_operators


def _count_with_thop(model: nn.Module, call: ModelCall, modules: Mapping[type, Any]) -> FlopsCount:
    """Count one call by thop's rules, on a copy of the model with data; see `_count_with_torch`."""

    def count(model_copy: nn.Module, call: ModelCall) -> tuple[nn.Module, OperatorCounter, dict[nn.Module, float]]:
        counter = OperatorCounter(model_copy)
        with counter, counter.attribute_to_modules():  # finds the modules that thop should have counted
            macs = thop_macs(model_copy, lambda: _run(model_copy, call, counter, backward=False), modules)
        return model_copy, counter, macs

    (model_copy, counter, macs), _ = dry_run(model, call, count, needs_data=True)
    module_costs: dict[nn.Module, ModuleCost] = {}
    without_rule: set[nn.Module] = set()
    uncounted: dict[str, int] = {}
    for module, cost in counter.module_costs.items():
        kind = type(module).__name__
        if cost.own_macs and not has_thop_rule(module, modules):
            without_rule.add(module)
            uncounted[kind] = uncounted.get(kind, 0) + cost.calls
        module_costs[module] = replace(cost, macs=macs.get(module, 0), other_flops=0)
    details: dict[str, Any] = {"train_step_flops": None, "uncounted": uncounted, "backend": "thop"}
    return _build_count(model_copy, ModuleCost(macs=macs[model_copy]), module_costs, without_rule, **details)


def _run(model_copy: nn.Module, call: ModelCall, counter: OperatorCounter, backward: bool) -> None:
    def counted_backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with counter.backward_pass():
            run_backward(loss, *args, **kwargs)

    is_manual = call.method == "training_step" and not getattr(model_copy, "automatic_optimization", True)
    with torch.enable_grad() if backward else contextlib.nullcontext():
        with redirect_backward(model_copy, counted_backward) if is_manual else contextlib.nullcontext():
            out = call.run(model_copy)
        if backward and not is_manual:
            with counter.backward_pass():
                find_loss(out, call).backward()


def _build_count(
    model_copy: nn.Module,
    total: ModuleCost,
    module_costs: Mapping[nn.Module, ModuleCost],
    without_rule: Collection[nn.Module] = (),
    **details: Any,
) -> FlopsCount:
    rows = []
    for name, module in model_copy.named_modules():
        cost = module_costs.get(module, ModuleCost())
        if module is model_copy:
            cost = replace(cost, macs=total.macs, other_flops=total.other_flops, calls=cost.calls or 1)
        parameters = list(module.parameters())
        rows.append(
            FlopsRow(
                name,
                type(module).__name__,
                params=sum(p.numel() for p in parameters),
                trainable_params=sum(p.numel() for p in parameters if p.requires_grad),
                macs=_to_int(cost.macs),
                flops=_to_int(2 * cost.macs),
                other_flops=_to_int(cost.other_flops),
                share=cost.macs / total.macs if total.macs else 0.0,
                calls=cost.calls,
                input_shapes=cost.input_shapes,
                output_shapes=cost.output_shapes,
                has_rule=module not in without_rule,
            )
        )
    model_row = rows[0]
    return FlopsCount(
        macs=model_row.macs,
        flops=model_row.flops,
        other_flops=model_row.other_flops,
        params=model_row.params,
        trainable_params=model_row.trainable_params,
        rows=tuple(rows),
        **details,
    )


def _to_int(value: float) -> float:
    """Return a whole number as an int, and any other number as it is."""
    return int(value) if value == int(value) else value
