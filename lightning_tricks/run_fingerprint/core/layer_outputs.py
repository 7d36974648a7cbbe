"""The outputs of a model's layers, seen by forward hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from lightning_tricks._torch_compat.modules import compiled_module, compiles_in_place, own_buffers, own_parameters
from lightning_tricks._torch_compat.tensors import outside_transforms

# in evaluation these take a fast path, unless a hook is on one of their modules
_WITH_FAST_PATH = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)


class LayerOutputs:
    """The outputs of the layers of a model: of modules without children, or with tensors of their own.

    What `torch.compile` has compiled counts as one layer; modules that compile in place, and those of TorchScript, are
    left alone.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = list(_layers_in(model))

    @contextmanager
    def hooked(self, on_output: Callable[[str, Any], None]) -> Iterator[None]:
        """Call `on_output` with the qualified name and the output of each layer that runs in the block."""
        with ExitStack() as hooks:
            for name, module, with_fast_path in self._layers:
                # a hook would make torch leave the fast path of a module around it: only those in training get hooks
                if all(_is_trained(outer) for outer in with_fast_path):
                    hooks.enter_context(module.register_forward_hook(_Hook(name, module, on_output)))
            yield


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
        if id(module) == self._layer_id and not (torch.compiler.is_compiling() or torch.jit.is_tracing()):
            with outside_transforms(output) as plain:
                self._on_output(self._name, plain)

    def __reduce__(self) -> tuple[Any, ...]:  # for deep copies and pickle
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _ignore


def _ignore(module: nn.Module, inputs: Any, output: Any) -> None:
    """Do nothing."""
