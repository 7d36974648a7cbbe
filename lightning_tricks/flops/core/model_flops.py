"""FLOPs of any module: every operator is counted as it runs, on tensors without storage."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_tricks._shared.checks import check_choice
from lightning_tricks._shared.dry_run.input_advice import example_input_code
from lightning_tricks._shared.dry_run.model_call import ModelCall, find_call
from lightning_tricks._shared.dry_run.model_copy import unwrap_model
from lightning_tricks._shared.dry_run.runner import Copies, dry_run, find_loss
from lightning_tricks._shared.dry_run.trainer_stub import redirect_backward, run_backward
from lightning_tricks.flops.core.flops_count import FlopsCount, FlopsRow
from lightning_tricks.flops.core.operator_counter import ModuleCost, OperatorCounter
from lightning_tricks.flops.core.thop_backend import has_thop_rule, thop_macs

Backend = Literal["torch", "thop"]


# A child of Lightning's logger: shown and silenced together with Lightning's own messages.
_log = logging.getLogger("lightning.pytorch.tricks.flops")


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

    The model is not run: a stand-in of it is, on tensors that have shapes and no data, which takes neither its compute
    nor its memory. Modules, gradients, random state, hooks and modes stay as they are, also when the model fails. The
    counts are the same in training and evaluation mode, with and without gradients, compiled or not, on CPU, CUDA and
    the meta device. Where the model looks at values (`if x.sum() > 0`), a real copy of it is run, and `notes` says so.

    Args:
        model: Any module; a LightningModule, too. BatchNorm counts as in evaluation mode.
        inputs: What it is called with: a tensor; a tuple of positional arguments; a dict of keyword arguments; or a
            batch as the module's `training_step` gets it, which a list always is. They may lie on another device. None
            stands for the module's `example_input_array`.
        backend: "torch" counts operators as they run. "thop" applies thop's rules for module classes, to a real copy in
            evaluation mode: it has no rule for attention, nor for what a module does itself in its `forward`.
        backward: Whether to count a backward pass as well, `train_step_flops`: from the loss of the `training_step`,
            or from a `loss` among the outputs, or else from the sum of all floating-point outputs.
        custom_ops: Rules of your own. By module class, with thop's signature `rule(module, inputs, output)`, which adds
            to `module.total_ops`; it counts the module in place of all that it calls. By operator (such as
            `torch.ops.mylib.op`), with the signature that `torch.utils.flop_counter.register_flop_formula` has, which
            returns FLOPs; what is registered there is honoured, too.
        compare: Whether to count with the other backend as well, into `peer`.

    Raises:
        TypeError: If `model` is no module, or `inputs` are no tensors but a shape, an array, a DataLoader.
        ValueError: If `backend` is unknown, there are no inputs, there is no output to run the backward pass from, or
            thop shall count one.
        Exception: The model's own error, with a remark how `inputs` was used.

    Example:
        >>> count = count_flops(nn.Conv2d(3, 8, 3, padding=1), torch.empty(1, 3, 32, 32), backward=True)
        >>> count.macs, count.flops, count.train_step_flops  # the images need no gradient
        (221184, 442368, 884736)
    """
    call = find_call(model, inputs)
    if call is None:
        name, own = type(unwrap_model(model)).__name__, example_input_code(unwrap_model(model))
        raise ValueError(f"inputs=None needs an example_input_array, and {name} has none: give inputs, such as {own}.")
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
    if backend == "torch":
        count = _count_with_torch(model, call, backward, modules, operators)
        return replace(count, peer=_count_with_thop(model, call, modules)) if compare else count
    count = _count_with_thop(model, call, modules)
    return replace(count, peer=_count_with_torch(model, call, False, {}, operators)) if compare else count


def check_backend(backend: object, backward: bool) -> None:
    """Raise a ValueError for a backend that there is not, or that cannot count a backward pass."""
    check_choice("backend", backend, ("torch", "thop"))
    if backward and backend == "thop":
        raise ValueError('backward=True needs backend="torch": thop has no rules for a backward pass.')


def _count_with_torch(
    model: nn.Module, call: ModelCall, backward: bool, modules: Mapping[type, Any], operators: Mapping[Any, Any]
) -> FlopsCount:
    def action(model_copy: nn.Module, values: ModelCall, copies: Copies) -> tuple[nn.Module, OperatorCounter]:
        counter = OperatorCounter(model_copy, copies.call, operators, modules)
        with counter, counter.attribute_to_modules():
            _run(model_copy, values, counter, backward)
        return model_copy, counter

    (model_copy, counter), notes = dry_run(model, call, action)
    for note in notes:
        _log.info("FLOPs of %s: %s.", type(model_copy).__name__, note)
    _warn_about_unused(model, [str(key) for key in operators if key not in counter.seen_operators], "operator")
    step = 2 * (counter.total.macs + counter.backward_macs) if backward else None
    return _build_count(model_copy, counter.total, counter.module_costs, dict(counter.uncounted), step, notes)


def _count_with_thop(model: nn.Module, call: ModelCall, modules: Mapping[type, Any]) -> FlopsCount:
    def action(
        model_copy: nn.Module, values: ModelCall, copies: Copies
    ) -> tuple[nn.Module, OperatorCounter, dict[nn.Module, float]]:
        counter = OperatorCounter(model_copy, copies.call)
        with counter, counter.attribute_to_modules():  # to see what thop does not
            macs = thop_macs(model_copy, lambda: _run(model_copy, values, counter, backward=False), modules)
        return model_copy, counter, macs

    (model_copy, counter, macs), _ = dry_run(model, call, action, real=True)
    module_costs: dict[nn.Module, ModuleCost] = {}
    without_rule: set[nn.Module] = set()
    uncounted: dict[str, int] = {}
    for module, module_cost in counter.module_costs.items():
        kind = type(module).__name__
        if module_cost.own_macs and not has_thop_rule(module, modules):
            without_rule.add(module)
            uncounted[kind] = uncounted.get(kind, 0) + module_cost.calls
        module_costs[module] = replace(module_cost, macs=macs.get(module, 0), other_flops=0)
    return _build_count(
        model_copy,
        ModuleCost(macs=macs[model_copy]),
        module_costs,
        uncounted,
        None,
        (),
        backend="thop",
        without_rule=without_rule,
    )


def _run(model_copy: nn.Module, call: ModelCall, counter: OperatorCounter, backward: bool) -> None:
    def backward_pass(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with counter.backward_pass():
            run_backward(loss, *args, **kwargs)

    steps_itself = call.method == "training_step" and not getattr(model_copy, "automatic_optimization", True)
    with torch.enable_grad() if backward else contextlib.nullcontext():
        with redirect_backward(model_copy, backward_pass) if steps_itself else contextlib.nullcontext():
            out = call.run(model_copy)
        if backward and not steps_itself:
            with counter.backward_pass():
                find_loss(out, call).backward()


def _build_count(
    model_copy: nn.Module,
    total: ModuleCost,
    module_costs: Mapping[nn.Module, ModuleCost],
    uncounted: dict[str, int],
    train_step_flops: float | None,
    notes: tuple[str, ...],
    backend: str = "torch",
    without_rule: set[nn.Module] | None = None,
) -> FlopsCount:
    rows = []
    for name, module in model_copy.named_modules():
        module_cost = module_costs.get(module, ModuleCost())
        if module is model_copy:
            module_cost = replace(
                module_cost, macs=total.macs, other_flops=total.other_flops, calls=module_cost.calls or 1
            )
        parameters = list(module.parameters())
        rows.append(
            FlopsRow(
                name,
                type(module).__name__,
                params=sum(p.numel() for p in parameters),
                trainable_params=sum(p.numel() for p in parameters if p.requires_grad),
                macs=_as_int_if_whole(module_cost.macs),
                flops=_as_int_if_whole(2 * module_cost.macs),
                other_flops=_as_int_if_whole(module_cost.other_flops),
                share=module_cost.macs / total.macs if total.macs else 0.0,
                calls=module_cost.calls,
                input_shapes=module_cost.input_shapes,
                output_shapes=module_cost.output_shapes,
                has_rule=module not in (without_rule or ()),
            )
        )
    whole = rows[0]
    step = None if train_step_flops is None else _as_int_if_whole(train_step_flops)
    return FlopsCount(
        macs=whole.macs,
        flops=whole.flops,
        other_flops=whole.other_flops,
        train_step_flops=step,
        params=whole.params,
        trainable_params=whole.trainable_params,
        uncounted=uncounted,
        rows=tuple(rows),
        backend=backend,
        notes=notes,
    )


def _split_custom_ops(custom_ops: Mapping[Any, Callable[..., Any]]) -> tuple[dict[type, Any], dict[Any, Any]]:
    modules, operators = {}, {}
    for key, rule in custom_ops.items():
        if not callable(rule):
            raise TypeError(f"custom_ops: the rule of {key!r} must be callable, got {rule!r}.")
        if isinstance(key, type) and issubclass(key, nn.Module):
            modules[key] = rule
        elif isinstance(key, torch._ops.OpOverload | torch._ops.OpOverloadPacket | torch._ops.HigherOrderOperator):
            operators[key] = rule
        else:
            raise TypeError(f"custom_ops: a key must be a module class or an operator of torch.ops, got {key!r}.")
    return modules, operators


def _warn_about_unused(model: nn.Module, names: list[str], what: str) -> None:
    if names:
        warnings.warn(
            f"custom_ops: no {what} of {type(model).__name__} is {' or '.join(names)}, so this rule counted nothing. A "
            "rule is for exactly its class or operator.",
            stacklevel=4,
        )


def _as_int_if_whole(value: float) -> float:
    return int(value) if value == int(value) else value
