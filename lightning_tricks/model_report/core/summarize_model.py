"""`summarize_model`: a report on any module, for any training loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_tricks._shared.dry_run.model_call import ModelCall, find_call
from lightning_tricks._shared.dry_run.model_copy import unwrap_model
from lightning_tricks._shared.dry_run.runner import NoGradientError, dry_run, find_loss
from lightning_tricks._shared.dry_run.trainer_stub import redirect_backward, run_backward
from lightning_tricks._shared.extras import install_command
from lightning_tricks._shared.tensors import full_tensor, local_part, tensors_in
from lightning_tricks._torch_compat.memory import parts_of_sparse
from lightning_tricks.model_report.core.report_summary import ModelMemory, ModelReportSummary, ParameterRow

# torchinfo's estimates of FLOPs and sizes
_UNWANTED = ("Total mult-adds", "Input size", "Forward/backward", "Params size", "Estimated Total")


def summarize_model(
    model: nn.Module,
    inputs: Any = None,
    *,
    depth: int = 3,
    graph: bool | Mapping[str, Any] = True,
    optimizers: Optimizer | Iterable[Optimizer] = (),
) -> ModelReportSummary:
    """Summarize a model: its parameters, layers and memory, and the autograd graph of one call.

    The model stays unchanged: layers and graph are those of a copy without data or, if the model depends on values, of
    a copy with data.

    Args:
        model: Any module.
        inputs: The inputs of the model, as for `count_flops`. None uses the module's `example_input_array`; without it,
            there are no layers and no graph.
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
    """Describe a model and a given call of it, or None for only the model; see `summarize_model`."""
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
        parameters=_parameter_rows(model),
        memory=_measure_memory(model, optimizers),
        layers=layers,
        graph=dot,
        notes=tuple(dict.fromkeys(notes)),
    )


def _find_layers(model: nn.Module, call: ModelCall, depth: int, notes: list[str]) -> str | None:
    if not _is_installed("torchinfo", "no summary of the layers", notes):
        return None
    try:
        layers, how = dry_run(model, call, lambda model_copy, call: _torchinfo_layers(model_copy, call, depth))
    except Exception as error:
        dry_run(model, call, lambda model_copy, call: call.run(model_copy))  # raises if the model itself fails
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


def _autograd_graph(model_copy: nn.Module, call: ModelCall, options: Mapping[str, Any]) -> str:
    losses: list[Tensor] = []
    with torch.enable_grad(), redirect_backward(model_copy, lambda loss, *_, **__: losses.append(loss)):
        out = call.run(model_copy)
    return _dot_source(losses[0] if losses else find_loss(out, call), model_copy, **options)


def _is_installed(package: str, what: str, notes: list[str]) -> bool:
    if find_spec(package) is None:
        notes.append(f"{what}: {package} is not installed ({install_command('reports')})")
        return False
    return True


def _dot_source(output: Tensor, model: nn.Module, **options: Any) -> str:
    """Return the autograd graph of a tensor as DOT source, made by torchviz's `make_dot`.

    Args:
        output: A tensor that requires a gradient.
        model: The module whose parameters are named in the graph.
        **options: Options of `make_dot`: `show_attrs`, `show_saved`, `max_attr_chars`.

    Raises:
        ImportError: If torchviz is not installed.
        TypeError: If `make_dot` has no such option.
    """
    with warnings.catch_warnings():  # torchviz compares versions with distutils
        warnings.simplefilter("ignore", DeprecationWarning)
        from torchviz import make_dot

        return str(make_dot(output, params=dict(model.named_parameters()), **options).source)


# torchinfo's summary of the layers


def _torchinfo_layers(model_copy: nn.Module, call: ModelCall, depth: int) -> str:
    """Return torchinfo's summary of the layers of a model, without its estimates of FLOPs and sizes.

    The totals are those of the model's parameters after the call, each counted once: torchinfo adds up what each call
    of a layer had, whose parameters may be shared, not made yet, or frozen for one optimizer's backward pass.

    Args:
        model_copy: A copy of a model; changed in place.
        call: The call whose shapes are shown.
        depth: The depth of the deepest modules in the summary.

    Raises:
        ImportError: If torchinfo is not installed.
        Exception: The model's own error.
    """
    import torchinfo

    data, keywords = (list(call.args), call.kwargs) if call.args else (dict(call.kwargs), {})
    columns = ("input_size", "output_size", "num_params")
    called, levels = model_copy, depth
    if call.method == "training_step":
        called, data, levels = _TrainingStep(model_copy, call), list(call.args[:1]), depth + 1
        if hasattr(data[0], "_fields"):  # torchinfo would rebuild a named tuple from one argument
            data = [tuple(data[0])]
    # keeps torchinfo from changing the modes of the modules
    vars(called).update(train=lambda mode=True: called, eval=lambda: called)
    try:
        with torch.enable_grad(), redirect_backward(model_copy, run_backward):
            statistics = torchinfo.summary(
                called, input_data=data, depth=levels, col_names=columns, verbose=0, **keywords
            )
    except RuntimeError as error:  # torchinfo raises it from the model's own error
        raise (error.__cause__ or error) from None
    for layer in statistics.summary_list:
        layer.calculate_num_params()
    lines = [line for line in str(statistics).splitlines() if not line.startswith(_UNWANTED)]
    lines = [_total(model_copy, line.partition(":")[0]) or line for line in lines]
    return "\n".join(lines[:-1] if lines[-1] == lines[-2] else lines)


def _total(model: nn.Module, name: str) -> str:
    """Return the line with one of torchinfo's totals; an empty string for any other line."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters() if not is_lazy(p)]
    total, trainable = sum(size for size, _ in sizes), sum(size for size, trains in sizes if trains)
    totals = {"Total params": total, "Trainable params": trainable, "Non-trainable params": total - trainable}
    return f"{name}: {totals[name]:,}" if name in totals else ""


class _TrainingStep(nn.Module):
    """Runs a module's `training_step` as its `forward`, because torchinfo calls modules with only data.

    Args:
        module: The module.
        call: The call of the step.
    """

    def __init__(self, module: nn.Module, call: ModelCall) -> None:
        super().__init__()
        self.module = module
        self.call = call

    def forward(self, batch: Any) -> Any:
        """Run the step with a batch."""
        kind = type(self.call.args[0])
        batch = kind(*batch) if hasattr(kind, "_fields") else batch
        return self.module.training_step(batch, *self.call.args[1:])  # type: ignore[operator]


# Statistics of the parameters, and the memory of the model


def _parameter_rows(model: nn.Module) -> tuple[ParameterRow, ...]:
    """Return one row for each parameter tensor of a model."""
    parameters = dict(model.named_parameters())
    with_values = {name: p for name, p in parameters.items() if not is_lazy(p) and not p.is_meta and p.numel()}
    statistics = _statistics(_mean_and_std, with_values)
    norms = _statistics(_norm, {name: p.grad for name, p in with_values.items() if p.grad is not None})
    rows = []
    for name, parameter in parameters.items():
        mean, std = statistics.get(name, (None, None))
        shape = None if is_lazy(parameter) else tuple(parameter.shape)
        dtype = str(parameter.dtype).removeprefix("torch.")
        norm = norms[name][0] if name in norms else None
        rows.append(ParameterRow(name, shape, dtype, parameter.requires_grad, mean, std, norm))
    return tuple(rows)


def _measure_memory(model: nn.Module, optimizers: Iterable[Optimizer]) -> ModelMemory:
    """Return the memory of a model and of the state of its optimizers on this rank."""
    parameters = [parameter for parameter in model.parameters() if not is_lazy(parameter)]
    states = (list(optimizer.state.values()) for optimizer in optimizers)
    return ModelMemory(
        weights=_local_bytes(parameters),
        buffers=_local_bytes(buffer for buffer in model.buffers() if not is_lazy(buffer)),
        gradients=_local_bytes(parameter.grad for parameter in parameters if parameter.grad is not None),
        optimizer_state=_local_bytes(tensor for state in states for tensor in tensors_in(state)),
    )


def _statistics(function: Callable[[Tensor], Tensor], tensors: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Return the values of a function for all tensors that can be computed with, by name."""
    values = {}
    for name, tensor in tensors.items():
        with suppress(Exception):  # quantized, packed, nested or sparse tensors may lack an operator
            values[name] = function(full_tensor(tensor).detach())
    return dict(zip(values, _read_to_host(list(values.values())), strict=True))


def _mean_and_std(values: Tensor) -> Tensor:
    values = values.abs() if values.is_complex() else values
    return torch.stack([values.double().mean(), values.double().std(correction=0)])


def _norm(gradient: Tensor) -> Tensor:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    norm: Tensor = torch.linalg.vector_norm(values)
    return norm.double().reshape(1)


def _read_to_host(values: list[Tensor]) -> list[list[float]]:
    """Read small tensors, with one transfer for each device."""
    found: dict[int, list[float]] = {}
    for device in {value.device for value in values}:
        indices = [index for index, value in enumerate(values) if value.device == device]
        found |= dict(zip(indices, torch.stack([values[index] for index in indices]).tolist(), strict=True))
    return [found[index] for index in range(len(values))]


def _local_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of some tensors, of sharded ones those of this rank's part."""
    return sum(map(_stored_bytes, map(local_part, tensors)))


def _stored_bytes(tensor: Tensor) -> int:
    parts = parts_of_sparse(tensor)
    if hasattr(tensor, "__tensor_flatten__"):  # a subclass that packs or wraps others
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return sum(map(_stored_bytes, parts)) if parts else tensor.numel() * tensor.element_size()
