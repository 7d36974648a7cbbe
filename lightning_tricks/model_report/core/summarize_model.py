"""`summarize_model`: a report on any module, for any training loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_tricks._shared.dry_run.model_call import ModelCall, find_call
from lightning_tricks._shared.dry_run.model_copy import unwrap_model
from lightning_tricks._shared.dry_run.runner import NoGradientError, TensorCopies, dry_run, find_loss
from lightning_tricks._shared.dry_run.trainer_stub import redirect_backward
from lightning_tricks._shared.extras import install_command
from lightning_tricks.model_report.core.autograd_graph import dot_source
from lightning_tricks.model_report.core.parameter_statistics import measure_memory, parameter_rows
from lightning_tricks.model_report.core.report_summary import ModelReportSummary
from lightning_tricks.model_report.core.torchinfo_layers import torchinfo_layers


def summarize_model(
    model: nn.Module,
    inputs: Any = None,
    *,
    depth: int = 3,
    graph: bool | Mapping[str, Any] = True,
    optimizers: Optimizer | Iterable[Optimizer] = (),
) -> ModelReportSummary:
    """Describe a model: its parameters, its layers, its memory, and the autograd graph of one call.

    The model is left unchanged: layers and graph are those of a copy without data or, if the model depends on values,
    of a copy with data.

    Args:
        model: Any module.
        inputs: What the model is called with, as for `count_flops`. None for the module's `example_input_array`; if it
            has none, there are no layers and no graph.
        depth: The depth of the deepest modules in torchinfo's summary, >= 1.
        graph: Whether to make the graph, or options for torchviz's `make_dot` (`{"show_attrs": True}`).
        optimizers: The optimizers whose state counts as memory.

    Returns:
        A `ModelReportSummary`, which prints as tables and writes files.

    Raises:
        TypeError: If `model` is not a module.
        Exception: The model's own error, with a hint on how `inputs` was used.

    Examples:
        >>> summary = summarize_model(nn.Linear(8, 4), torch.zeros(2, 8))
        >>> summary.memory.weights, [row.name for row in summary.parameters]
        (144, ['weight', 'bias'])
    """
    call = find_call(model, inputs)
    return summarize_call(model, call, depth=depth, graph=graph, optimizers=optimizers)


def summarize_call(
    model: nn.Module,
    call: ModelCall | None,
    *,
    depth: int = 3,
    graph: bool | Mapping[str, Any] = True,
    optimizers: Optimizer | Iterable[Optimizer] = (),
) -> ModelReportSummary:
    """Describe a model and a given call of it, or None for the model alone; see `summarize_model`."""
    model = unwrap_model(model)
    notes: list[str] = []
    layers = dot = None
    if call is None:
        notes.append("no layers and no graph: there are no inputs and no example_input_array")
    else:
        layers = _find_layers(model, call, depth, notes)
        if graph is not False:
            dot = _find_graph(model, call, {} if graph is True else dict(graph), notes)
    optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    return ModelReportSummary(
        model=type(model).__name__,
        parameters=parameter_rows(model),
        memory=measure_memory(model, optimizers),
        layers=layers,
        graph=dot,
        notes=tuple(dict.fromkeys(notes)),
    )


def _find_layers(model: nn.Module, call: ModelCall, depth: int, notes: list[str]) -> str | None:
    if not _is_installed("torchinfo", "no summary of the layers", notes):
        return None
    try:
        layers, how = dry_run(model, call, lambda model_copy, call, _: torchinfo_layers(model_copy, call, depth))
    except Exception as error:
        dry_run(model, call, lambda model_copy, call, _: call.run(model_copy))  # raises if the model itself fails
        notes.append(f"no summary of the layers: torchinfo cannot take this model ({str(error).splitlines()[0]})")
        return None
    notes += how
    return layers


def _find_graph(model: nn.Module, call: ModelCall, options: Mapping[str, Any], notes: list[str]) -> str | None:
    if not _is_installed("torchviz", "no graph", notes):
        return None
    try:
        dot, _ = dry_run(model, call, partial(_autograd_graph, options=options))
    except NoGradientError:
        notes.append("no graph: no output of the model requires a gradient")
        return None
    return dot


def _autograd_graph(model_copy: nn.Module, call: ModelCall, _: TensorCopies, options: Mapping[str, Any]) -> str:
    losses: list[Tensor] = []
    with torch.enable_grad(), redirect_backward(model_copy, lambda loss, *_, **__: losses.append(loss)):
        out = call.run(model_copy)
    return dot_source(losses[0] if losses else find_loss(out, call), model_copy, **options)


def _is_installed(package: str, what: str, notes: list[str]) -> bool:
    if find_spec(package) is None:
        notes.append(f"{what}: {package} is not installed ({install_command('reports')})")
        return False
    return True
