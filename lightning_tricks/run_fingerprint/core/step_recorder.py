"""The fingerprints of each step of a fit: of the batch, layers' outputs, loss, gradients and weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_tricks._shared.patterns import strip_compile_prefix
from lightning_tricks._shared.tensors import parameters_of
from lightning_tricks._torch_compat.modules import compiled_module, compiles_in_place, own_buffers, own_parameters
from lightning_tricks._torch_compat.tensors import outside_transforms
from lightning_tricks.run_fingerprint.core import record as on_disk
from lightning_tricks.run_fingerprint.core.fingerprint import ABSENT, Condensed, Mixer, children_of, condense
from lightning_tricks.run_fingerprint.core.ranks import RankExchange, RepeatedBatches, divided_data
from lightning_tricks.run_fingerprint.core.record import Column, FingerprintRecord, IncompleteResume, RecordHeader

_ROWS = 128  # in a block
# in evaluation these take a fast path, unless a hook is on one of their modules
_WITH_FAST_PATH = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)


class StepRecorder:
    """Records the batch, loss, gradients and weights of a fit's steps, as a whole or by layer.

    Args:
        writer: The writer of the fingerprints.
        model: The model that is trained.
        is_replicated: Whether all ranks should have a parameter equal, by its name; None if ranks are not compared.
    """

    def __init__(self, writer: RowWriter, model: nn.Module, is_replicated: Callable[[str], bool] | None = None) -> None:
        self.writer, self.model, self._is_replicated = writer, model, is_replicated
        self._by_layer = writer.header.detail == "layer"
        self._stepped = False
        self._hooks: list[RemovableHandle] = []
        self.find_layers()

    def find_layers(self) -> None:
        """Find the layers and tensors of the model again."""
        self._tensors = ModelTensors(self.model, self._is_replicated)
        self._outputs = LayerOutputs(self.model) if self._by_layer else None

    def record_initial_weights(self, step: int, epoch: int, loaders: Mapping[str, Iterable[Any]] | None = None) -> None:
        """Record the weights before the first batch, and, where ranks are compared, the data that they divide."""
        self.writer.start_row(step, epoch, -1)
        for name, own in (loaders or {}).items():
            if divided := divided_data(own):
                self.writer.add("dataset", divided, name)
        self._add_weights()
        self.writer.end_row()

    def on_batch_start(self, step: int, epoch: int, number: int, batch: Any) -> None:
        """Record a batch, and hook the layers until it ends."""
        self.close()  # the hooks of a batch that was skipped
        self._stepped = False
        self.writer.start_row(step, epoch, number)
        self._add("data", children_of(batch))
        if self._outputs is not None:
            self._hooks = self._outputs.hook(lambda name, output: self.writer.add("forward", output, name))

    def on_backward_start(self, loss: Any) -> None:
        """Record a loss."""
        if self.writer.has_open_row:
            self.writer.add("loss", loss)

    def on_optimizer_step(self, optimizer: Optimizer) -> None:
        """Record the gradients of an optimizer."""
        if self.writer.has_open_row:
            self._stepped = True
            if self._is_replicated is not None:
                self.writer.add("rate", [group.get("lr") for group in optimizer.param_groups])
            own = set(map(id, parameters_of(optimizer)))
            tensors = self._tensors().items()
            self._add("gradient", {name: t.grad for name, t in tensors if id(t) in own and t.grad is not None})

    def on_batch_end(self, loss: Any, *, may_have_stepped: bool) -> None:
        """Record the weights after a step, and the loss, if `on_backward_start` did not.

        Raises:
            OSError: If the rows cannot be written.
        """
        self.close()
        if not self.writer.has_open_row:
            return
        if loss is not None and not self.writer.has("loss"):
            self.writer.add("loss", loss)
        if self._stepped or may_have_stepped:
            self._add_weights()
        self.writer.end_row()

    def on_exception(self) -> None:
        """Write all rows, also that of the interrupted step.

        Raises:
            OSError: If the rows cannot be written.
        """
        self.close()
        self.writer.end_row()
        self.writer.flush()

    def close(self) -> None:
        """Remove the hooks from the layers."""
        while self._hooks:
            self._hooks.pop().remove()

    def _add_weights(self) -> None:
        for kind, are_replicated in (("replicated", True), ("weights", False)):
            if tensors := self._tensors(are_replicated):
                self._add(kind, tensors)

    def _add(self, kind: str, values: Mapping[str, Any]) -> None:
        if not self._by_layer:
            self.writer.add(kind, values)
            return
        for name, value in values.items():
            self.writer.add(kind, value, name)


class RowWriter:
    """Collects the fingerprints of one rank and writes them to its file.

    Args:
        path: The file.
        header: How the run is recorded.

    Attributes:
        num_rows: How many rows were ended, written or not.
        watchers: Look at the rows that were written.
    """

    def __init__(self, path: Path, header: RecordHeader) -> None:
        self.path, self.header = path, header
        self.num_rows = 0
        self.watchers: list[RepeatedBatches | RankExchange] = []
        self._file: IO[str] | None = None  # stays this run's where another one moves it aside
        self._digest = FingerprintRecord(header).digest()
        self._columns: dict[Column, None] = {}  # in the order of a step
        self._written_columns: tuple[Column, ...] = ()
        self._keys: list[tuple[int, int, int]] = []
        self._descriptions: list[list[int]] = []  # of the values in the block
        self._mixer = Mixer()  # has their words
        self._key: tuple[int, int, int] | None = None
        self._row: dict[Column, Condensed] = {}
        self._calls: dict[tuple[str, str], int] = {}  # how often each kind and name came in the row

    def start_file(self, record: FingerprintRecord | None = None) -> None:
        """Write a new file in place of an existing one, with the rows of a record that it continues.

        Raises:
            OSError: If it cannot be written.
        """
        self.close()
        record = FingerprintRecord(self.header) if record is None else record
        on_disk.write_record(self.path, record)
        self._file = self.path.open("a", encoding="utf-8")
        self._digest = record.digest()
        self.num_rows = len(record)
        self._written_columns = record.blocks[-1][0] if record.blocks else ()
        self._columns = dict.fromkeys(self._written_columns)

    def digest(self) -> str:
        """Return a hash of the rows that were written."""
        return str(self._digest.hexdigest())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
        self._file = None

    @property
    def has_open_row(self) -> bool:
        """Whether a row was started and not ended."""
        return self._key is not None

    def start_row(self, step: int, epoch: int, batch: int) -> None:
        """Start the row of a batch, and drop a row that was not ended."""
        self._key, self._row, self._calls = (step, epoch, batch), {}, {}

    def add(self, kind: str, value: Any, name: str = "") -> None:
        """Add the fingerprint of a value to the row; the second one of a kind and name is recorded as call 2."""
        call = self._calls[kind, name] = self._calls.get((kind, name), 0) + 1
        self._row[Column(kind, name, call)] = condense(value)

    def has(self, kind: str) -> bool:
        """Whether the row has a fingerprint of a kind, without a name."""
        return (kind, "") in self._calls

    def end_row(self) -> None:
        """Keep the row; write the block if it is full or if the row has new columns."""
        if self._key is None:
            return
        if not self._row.keys() <= self._columns.keys():
            self.flush()
            self._columns = dict.fromkeys(_merged(self._columns, self._row))
        self._keys.append(self._key)
        values = [self._row.get(column, ABSENT) for column in self._columns]
        self._mixer.add([value.words for value in values])
        self._descriptions.append([value.description for value in values])
        self.num_rows += 1
        self._key, self._row = None, {}
        if len(self._keys) >= _ROWS:
            self.flush()

    def flush(self) -> None:
        """Copy the rows that are not written yet to the host, and append them to the file.

        Raises:
            OSError: If that fails; the rows are lost.
        """
        keys, descriptions, columns = self._keys, self._descriptions, tuple(self._columns)
        if not keys:
            return
        self._keys, self._descriptions = [], []
        values = self._mixer.take().cpu().numpy() + np.array(descriptions, np.int64)
        table = np.concatenate([np.array(keys, np.int64), values], axis=1)
        self._append(on_disk.format_rows(columns, table, self._written_columns))
        self._digest.update(table.astype(on_disk.INTEGER).tobytes())
        self._written_columns = columns
        for watcher in self.watchers:
            watcher.watch(columns, table)

    def add_resume(self, step: int, epoch: int, not_restored: Sequence[str]) -> None:
        """Append the names of state that a resume could not restore.

        Raises:
            OSError: If that fails.
        """
        self._append(on_disk.format_resume(IncompleteResume(self.num_rows, step, epoch, tuple(not_restored))))

    def _append(self, lines: str) -> None:
        if self._file is None or os.fstat(self._file.fileno()).st_nlink == 0:
            raise OSError("another fit has replaced it")
        self._file.write(lines)
        self._file.flush()


def _merged(known: Iterable[Column], row: Iterable[Column]) -> list[Column]:
    """Insert the new columns of a row into the known ones, each after its predecessor in the row."""
    new: dict[Column | None, list[Column]] = {column: [] for column in (None, *known)}
    before = None
    for column in row:
        if column in new:
            before = column
        else:
            new[before].append(column)
    return new[None] + [each for column in known for each in (column, *new[column])]


class ModelTensors:
    """The parameters and buffers of a model, by qualified name.

    Which module holds each of them is found once; each call returns what these modules hold now.

    Args:
        model: The model.
        is_replicated: Whether a parameter should be equal on all ranks, by its name in the model.
    """

    def __init__(self, model: nn.Module, is_replicated: Callable[[str], bool] | None = None) -> None:
        self._holders: list[tuple[str, dict[str, Any], str, bool]] = []
        seen: set[int] = set()
        for prefix, module in model.named_modules():
            parameters = own_parameters(module)
            for holder in (parameters, own_buffers(module)):
                for name, value in holder.items():
                    if value is not None and id(value) not in seen:
                        seen.add(id(value))
                        path = f"{prefix}.{name}" if prefix else name
                        replicated = is_replicated is not None and holder is parameters and is_replicated(path)
                        self._holders.append((strip_compile_prefix(path), holder, name, replicated))

    def __call__(self, are_replicated: bool | None = None) -> dict[str, Tensor]:
        """Return qualified name -> tensor, without those that are None or lazy by now; of all, or of one sort."""
        return {
            name: tensor
            for name, holder, key, replicated in self._holders
            if are_replicated in (None, replicated) and (tensor := holder.get(key)) is not None and not is_lazy(tensor)
        }


class LayerOutputs:
    """The outputs of the layers of a model: of modules without children, or with tensors of their own.

    What `torch.compile` has compiled counts as one layer; modules that compile in place, and those of TorchScript, are
    left alone.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = list(_layers_in(model))

    def hook(self, on_output: Callable[[str, Any], None]) -> list[RemovableHandle]:
        """Call `on_output` with the qualified name and the output of each layer that runs, until they are unhooked."""
        # a hook would make torch leave the fast path of a module around it: only those in training get hooks
        return [
            module.register_forward_hook(_Hook(name, module, on_output))
            for name, module, with_fast_path in self._layers
            if all(_is_trained(outer) for outer in with_fast_path)
        ]


def _layers_in(
    module: nn.Module, name: str = "", with_fast_path: tuple[nn.Module, ...] = (), met: set[nn.Module] | None = None
) -> Iterator[tuple[str, nn.Module, tuple[nn.Module, ...]]]:
    """Yield names and layers, and around each of them the modules with a fast path."""
    met = set() if met is None else met
    if module in met or isinstance(module, torch.jit.ScriptModule) or compiles_in_place(module):
        return
    met.add(module)
    if isinstance(module, _WITH_FAST_PATH):
        with_fast_path = (*with_fast_path, module)
    children = {} if compiled_module(module) is not None else dict(module.named_children())
    if name and not (children and not own_parameters(module) and not own_buffers(module)):
        yield name, module, with_fast_path
    for key, child in children.items():
        yield from _layers_in(child, f"{name}.{key}" if name else key, with_fast_path, met)


def _is_trained(module: nn.Module) -> bool:
    return module.training and any(parameter.requires_grad for parameter in module.parameters())


class _Hook:
    """Calls `on_output` with the output of a layer; a copy of the model has a copy that does nothing."""

    def __init__(self, name: str, layer: nn.Module, on_output: Callable[[str, Any], None]) -> None:
        self._name, self._layer_id, self._on_output = name, id(layer), on_output

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        # a shallow copy of the layer has this very hook; torch.compile would break its graph at the call, and a trace
        # would take it for a part of the model
        is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        if id(module) == self._layer_id and not (torch.compiler.is_compiling() or is_traced):
            with outside_transforms(output) as plain:
                self._on_output(self._name, plain)

    def __reduce__(self) -> tuple[Any, ...]:  # for deep copies and pickle
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _ignore


def _ignore(module: nn.Module, inputs: Any, output: Any) -> None:
    """Do nothing."""
