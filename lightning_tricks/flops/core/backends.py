"""The two backends: "torch" counts operators as they run, "thop" applies rules for module classes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tricks._shared.dry_run.model_call import ModelCall
from lightning_tricks._shared.dry_run.runner import TensorCopies, dry_run, find_loss
from lightning_tricks._shared.dry_run.trainer_stub import redirect_backward, run_backward
from lightning_tricks.flops.core.flops_count import FlopsCount, FlopsRow
from lightning_tricks.flops.core.operator_counter import ModuleCost, OperatorCounter
from lightning_tricks.flops.core.thop_rules import has_thop_rule, thop_macs

# A child of Lightning's logger, so that it is shown and silenced together with Lightning's own messages
_log = logging.getLogger("lightning.pytorch.tricks.flops")


def count_with_torch(
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

    def count(model_copy: nn.Module, call: ModelCall, copies: TensorCopies) -> tuple[nn.Module, OperatorCounter]:
        counter = OperatorCounter(model_copy, copies.run_operator, operators, modules)
        with counter, counter.attribute_to_modules():
            _run(model_copy, call, counter, backward)
        return model_copy, counter

    (model_copy, counter), notes = dry_run(model, call, count)
    for note in notes:
        _log.info("FLOPs of %s: %s.", type(model_copy).__name__, note)
    counted = _build_count(
        _build_rows(model_copy, counter.total, counter.module_costs),
        train_step_flops=_to_int(2 * (counter.total.macs + counter.backward_macs)) if backward else None,
        uncounted=dict(counter.uncounted),
        backend="torch",
        notes=notes,
    )
    return counted, counter.seen_operators


def count_with_thop(model: nn.Module, call: ModelCall, modules: Mapping[type, Any]) -> FlopsCount:
    """Count one call by thop's rules, on a copy of the model with data; see `count_with_torch`."""

    def count(
        model_copy: nn.Module, call: ModelCall, copies: TensorCopies
    ) -> tuple[nn.Module, OperatorCounter, dict[nn.Module, float]]:
        counter = OperatorCounter(model_copy, copies.run_operator)
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
    rows = _build_rows(model_copy, ModuleCost(macs=macs[model_copy]), module_costs, without_rule)
    return _build_count(rows, train_step_flops=None, uncounted=uncounted, backend="thop")


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


def _build_rows(
    model_copy: nn.Module,
    total: ModuleCost,
    module_costs: Mapping[nn.Module, ModuleCost],
    without_rule: Collection[nn.Module] = (),
) -> tuple[FlopsRow, ...]:
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
    return tuple(rows)


def _build_count(rows: tuple[FlopsRow, ...], **details: Any) -> FlopsCount:
    model_row = rows[0]
    return FlopsCount(
        macs=model_row.macs,
        flops=model_row.flops,
        other_flops=model_row.other_flops,
        params=model_row.params,
        trainable_params=model_row.trainable_params,
        rows=rows,
        **details,
    )


def _to_int(value: float) -> float:
    """Return a whole number as an int, and any other number as it is."""
    return int(value) if value == int(value) else value
