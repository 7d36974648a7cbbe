"""`summarize_model`: a report on any module, for any training loop, as numbers, tables and files."""

from __future__ import annotations

import csv
import io
import json
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_tricks._shared.checks import check_path
from lightning_tricks._shared.dry_run.model_call import ModelCall, find_call
from lightning_tricks._shared.dry_run.model_copy import unwrap_model
from lightning_tricks._shared.dry_run.runner import NoGradientError, dry_run, find_loss
from lightning_tricks._shared.dry_run.trainer_stub import redirect_backward, run_backward
from lightning_tricks._shared.extras import install_command
from lightning_tricks._shared.lightning_name import lightning_logger
from lightning_tricks._shared.modules import describe_without_gradient
from lightning_tricks._shared.tensors import full_tensor, local_part, read_numbers, tensors_in
from lightning_tricks._shared.text import format_bytes, format_shape, render_text
from lightning_tricks._torch_compat.memory import parts_of_sparse

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table


# torchinfo's estimates of FLOPs and sizes
_UNWANTED = ("Total mult-adds", "Input size", "Forward/backward", "Params size", "Estimated Total")
DOT_NOT_INSTALLED = (
    "graph.dot was written, but not drawn: graphviz's program `dot` is not installed (on Debian: apt install graphviz)."
)


@dataclass(frozen=True)
class ParameterRow:
    """One parameter tensor.

    Attributes:
        name: The qualified name of the parameter; of a shared parameter, the first one.
        shape: Its shape, or the shape of the whole tensor if it is sharded; None if it is not initialized.
        dtype: The name of its dtype, such as `float32`.
        trainable: Whether it requires a gradient.
        mean: The mean of its elements; None if it has no values (on the meta device, or not initialized).
        std: The population standard deviation of its elements; None if it has no values.
        grad_norm: The L2 norm of its gradient; None if it has no gradient.
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: str
    trainable: bool
    mean: float | None
    std: float | None
    grad_norm: float | None


@dataclass(frozen=True)
class ModelMemory:
    """The memory of a model on this rank, in bytes.

    Attributes:
        weights: The size of the parameters; shared parameters count once.
        buffers: The size of the buffers.
        gradients: The size of the gradients.
        optimizer_state: The size of the tensors in the state of the optimizers.
    """

    weights: int
    buffers: int
    gradients: int
    optimizer_state: int

    @property
    def total(self) -> int:
        """The sum of all sizes."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class ModelReportSummary:
    """The report of `summarize_model`. Printed, it is one table per part.

    Attributes:
        model: The name of the model's class.
        parameters: One row for each parameter tensor.
        memory: The memory of the model.
        layers: torchinfo's summary; None without inputs or if torchinfo is not installed.
        graph: The autograd graph of one call as DOT source; None if it was not requested or could not be made.
        notes: The missing parts, with the reasons.
        without_gradient: The trainable parameters that no backward pass reached before the first optimizer step, with
            the ranks if it is not so on all; empty for `summarize_model`, which does not train.
    """

    model: str
    parameters: tuple[ParameterRow, ...]
    memory: ModelMemory
    layers: str | None
    graph: str | None
    notes: tuple[str, ...]
    without_gradient: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return everything except the graph as JSON-serializable values."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        del plain["graph"]
        return plain

    def table(self) -> Table:
        """Return the parameters as a rich table."""
        from rich.text import Text

        from lightning_tricks._shared.fitting_table import FittingTable, FoldedName

        memory = ", ".join(
            f"{field.name.replace('_', ' ')} {format_bytes(getattr(self.memory, field.name))}"
            for field in fields(ModelMemory)
        )
        drop = ("dtype", "std", "trains", "grad norm", "mean", "shape")
        table = FittingTable(drop=drop, notes=f"memory: {memory}", title=f"Parameters of {self.model}")
        for heading in ("parameter", "shape", "dtype", "trains"):
            table.add_column(heading)
        for heading in ("mean", "std", "grad norm"):
            table.add_column(heading, justify="right")
        for row in self.parameters:
            numbers = ["" if n is None else f"{n:.3g}" for n in (row.mean, row.std, row.grad_norm)]
            shape = "lazy" if row.shape is None else format_shape(row.shape) or "scalar"
            others = (shape, row.dtype, "yes" if row.trainable else "no", *numbers)
            table.add_row(FoldedName(row.name), *map(Text, others))
        return table

    def write(self, folder: str | Path) -> list[Path]:
        """Write `parameters.csv`, `report.json`, `layers.txt` and `graph.dot`, and draw `graph.svg` and `graph.png`.

        The pictures need graphviz's program `dot`.

        Args:
            folder: The folder for the files; it is created if it does not exist.

        Returns:
            The paths of the written files.
        """
        folder = Path(check_path("folder", folder, "a folder"))
        folder.mkdir(parents=True, exist_ok=True)
        texts = {"parameters.csv": self._csv(), "report.json": json.dumps(self.to_dict(), indent=2) + "\n"}
        if self.layers is not None:
            texts["layers.txt"] = self.layers + "\n"
        if self.graph is not None:
            texts["graph.dot"] = self.graph
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        pictures = render_graph(folder / "graph.dot") if self.graph is not None else []
        return [*(folder / name for name in texts), *pictures]

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.text import Text

        layers = [Text(self.layers, no_wrap=True, overflow="ellipsis")] if self.layers else []
        unused = [describe_without_gradient(self.without_gradient) + "."] if self.without_gradient else []
        return Group(self.table(), *layers, *map(Text, [*unused, *self.notes]))

    def __str__(self) -> str:
        return render_text(self)

    def _csv(self) -> str:
        file = io.StringIO()
        writer = csv.DictWriter(file, [field.name for field in fields(ParameterRow)], lineterminator="\n")
        writer.writeheader()
        for row in self.parameters:
            writer.writerow(asdict(row) | {"shape": format_shape(row.shape or ())})
        return file.getvalue()


def render_graph(source: Path) -> list[Path]:
    """Draw a DOT file as SVG and as PNG in the same folder, or log that `dot` is not installed.

    Returns:
        The paths of the pictures.
    """
    if shutil.which("dot") is None:
        lightning_logger("model_report").info(DOT_NOT_INSTALLED)
        return []
    import graphviz

    return [
        Path(graphviz.render("dot", kind, outfile=source.with_suffix(f".{kind}"), filepath=source))
        for kind in ("svg", "png")
    ]


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
    return dict(zip(values, read_numbers(list(values.values())), strict=True))


def _mean_and_std(values: Tensor) -> Tensor:
    values = values.abs() if values.is_complex() else values
    return torch.stack([values.double().mean(), values.double().std(correction=0)])


def _norm(gradient: Tensor) -> Tensor:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    norm: Tensor = torch.linalg.vector_norm(values)
    return norm.double().reshape(1)


def _local_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of some tensors, of sharded ones those of this rank's part."""
    return sum(map(_stored_bytes, map(local_part, tensors)))


def _stored_bytes(tensor: Tensor) -> int:
    parts = parts_of_sparse(tensor)
    if hasattr(tensor, "__tensor_flatten__"):  # a subclass that packs or wraps others
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return sum(map(_stored_bytes, parts)) if parts else tensor.numel() * tensor.element_size()
