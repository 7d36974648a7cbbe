"""What a model is made of, for any module and any loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_tricks._shared.dry_run.model_call import ModelCall, find_call
from lightning_tricks._shared.dry_run.model_copy import is_sharded, unwrap_model
from lightning_tricks._shared.dry_run.runner import NoGradientError, dry_run, find_loss
from lightning_tricks._shared.dry_run.trainer_stub import redirect_backward, run_backward
from lightning_tricks._shared.tensors import tensors_in
from lightning_tricks.model_report.core.autograd_graph import dot_source
from lightning_tricks.model_report.core.report_summary import ModelMemory, ModelReportSummary, ParameterRow


def summarize_model(
    model: nn.Module,
    inputs: Any = None,
    *,
    depth: int = 3,
    graph: bool | Mapping[str, Any] = True,
    optimizers: Optimizer | Iterable[Optimizer] = (),
) -> ModelReportSummary:
    """Describe a model: parameters, layers, memory, and the graph of one call.

    The model stays as it is: layers and graph are those of a copy without data, or with data where the model looks at
    values.

    Args:
        model: Any module.
        inputs: What it is called with, as `count_flops` takes it; None for the module's `example_input_array` or, where
            there is none, for no layers and no graph.
        depth: How deep the modules in torchinfo's summary may lie.
        graph: Whether to make the graph, or options for torchviz's `make_dot` (`{"show_attrs": True}`).
        optimizers: Whose state counts as memory.

    Returns:
        A `ModelReportSummary`, which prints as tables and writes files.

    Raises:
        TypeError: If `model` is no module.
        Exception: The model's own error, with a remark how `inputs` was used.

    Example:
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
    """Describe a model and one call of it; see `summarize_model`."""
    model = unwrap_model(model)
    notes: list[str] = []
    layers = dot = None
    if call is None:
        notes.append("no layers and no graph: there are no inputs and no example_input_array")
    else:
        if _is_installed("torchinfo", "no summary of the layers", notes):
            try:
                layers, how = dry_run(
                    model, call, lambda model_copy, values, _: _torchinfo_layers(model_copy, values, depth)
                )
                notes += how
            except Exception as error:
                dry_run(
                    model, call, lambda model_copy, values, _: values.run(model_copy)
                )  # raises where it is the model's fault
                notes.append(
                    f"no summary of the layers: torchinfo cannot take this model ({str(error).splitlines()[0]})"
                )
        if graph is not False and _is_installed("torchviz", "no graph", notes):
            options = {} if graph is True else dict(graph)
            try:
                dot, _ = dry_run(
                    model, call, lambda model_copy, values, _: _autograd_graph(model_copy, values, options)
                )
            except NoGradientError:
                notes.append("no graph: nothing that the model returned requires a gradient")
    optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    return ModelReportSummary(
        model=type(model).__name__,
        parameters=tuple(_parameter_rows(model)),
        memory=_memory(model, optimizers),
        layers=layers,
        graph=dot,
        notes=tuple(dict.fromkeys(notes)),
    )


def _is_installed(package: str, what: str, notes: list[str]) -> bool:
    if find_spec(package) is None:
        notes.append(f"{what}: {package} is not installed (pip install 'lightning-tricks[reports]')")
        return False
    return True


def _torchinfo_layers(model_copy: nn.Module, call: ModelCall, depth: int) -> str:
    import torchinfo

    data, keywords = (list(call.args), call.kwargs) if call.args else (dict(call.kwargs), {})
    columns = ("input_size", "output_size", "num_params")
    called = model_copy
    if call.method == "training_step":
        called, data = TrainingStep(model_copy, call), list(call.args[:1])
        if hasattr(data[0], "_fields"):  # torchinfo would rebuild a named tuple from one argument
            data = [tuple(data[0])]
    vars(called).update(train=lambda mode=True: called, eval=lambda: called)  # torchinfo would set the mode everywhere
    try:
        with torch.enable_grad(), redirect_backward(model_copy, run_backward):
            statistics = torchinfo.summary(
                called, input_data=data, depth=depth, col_names=columns, verbose=0, **keywords
            )
    except RuntimeError as error:  # torchinfo's, around the model's own
        raise (error.__cause__ or error) from None
    # without what it says of FLOPs and sizes, which are estimates
    lines = str(statistics).splitlines()
    unwanted = ("Total mult-adds", "Input size", "Forward/backward", "Params size", "Estimated Total")
    lines = [line for line in lines if not line.startswith(unwanted)]
    return "\n".join(lines[:-1] if lines[-1] == lines[-2] else lines)


class TrainingStep(nn.Module):
    """Calls a module's `training_step`, for torchinfo, which calls modules with data alone.

    Args:
        module: The module.
        call: The call of the step.
    """

    def __init__(self, module: nn.Module, call: ModelCall) -> None:
        super().__init__()
        self.module = module
        self.call = call

    def forward(self, batch: Any) -> Any:
        """Call it."""
        kind = type(self.call.args[0])
        batch = kind(*batch) if hasattr(kind, "_fields") else batch
        return self.module.training_step(batch, *self.call.args[1:])  # type: ignore[operator]


def _autograd_graph(model_copy: nn.Module, call: ModelCall, options: Mapping[str, Any]) -> str:
    losses: list[Tensor] = []
    with torch.enable_grad(), redirect_backward(model_copy, lambda loss, *_, **__: losses.append(loss)):
        out = call.run(model_copy)
    return dot_source(losses[0] if losses else find_loss(out, call), model_copy, **options)


def _parameter_rows(model: nn.Module) -> list[ParameterRow]:
    parameters = dict(model.named_parameters())
    known = {name: p for name, p in parameters.items() if not is_lazy(p) and not p.is_meta and p.numel()}
    statistics = dict(zip(known, _read_to_host([_mean_and_std(p) for p in known.values()]), strict=True))
    graded = {name: p.grad for name, p in known.items() if p.grad is not None}
    norms = dict(zip(graded, _read_to_host([_norm(grad) for grad in graded.values()]), strict=True))
    rows = []
    for name, parameter in parameters.items():
        mean, std = statistics.get(name, (None, None))
        shape = None if is_lazy(parameter) else tuple(parameter.shape)
        dtype = str(parameter.dtype).removeprefix("torch.")
        norm = norms[name][0] if name in norms else None
        rows.append(ParameterRow(name, shape, dtype, parameter.requires_grad, mean, std, norm))
    return rows


def _mean_and_std(tensor: Tensor) -> Tensor:
    values = _plain(tensor).detach()
    values = values.abs() if values.is_complex() else values
    return torch.stack([values.double().mean(), values.double().std(correction=0)])


def _norm(gradient: Tensor) -> Tensor:
    gradient = _plain(gradient).detach()
    dense = gradient if gradient.layout == torch.strided else gradient.to_dense()
    norm: Tensor = torch.linalg.vector_norm(dense)
    return norm.double().reshape(1)


def _plain(tensor: Tensor) -> Tensor:
    whole: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return whole


def _read_to_host(values: list[Tensor]) -> list[list[float]]:
    """Read small tensors with one transfer for each device."""
    found: dict[int, list[float]] = {}
    for device in {value.device for value in values}:
        places = [place for place, value in enumerate(values) if value.device == device]
        found |= dict(zip(places, torch.stack([values[place] for place in places]).tolist(), strict=True))
    return [found[place] for place in range(len(values))]


def _memory(model: nn.Module, optimizers: Iterable[Optimizer]) -> ModelMemory:
    parameters = [parameter for parameter in model.parameters() if not is_lazy(parameter)]
    return ModelMemory(
        weights=_local_bytes(parameters),
        buffers=_local_bytes(buffer for buffer in model.buffers() if not is_lazy(buffer)),
        gradients=_local_bytes(parameter.grad for parameter in parameters if parameter.grad is not None),
        optimizer_state=_local_bytes(t for optimizer in optimizers for t in tensors_in(list(optimizer.state.values()))),
    )


def _local_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of this rank's part of some tensors."""
    local = [tensor.to_local() if is_sharded(tensor) else tensor for tensor in tensors]  # type: ignore[attr-defined]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)
