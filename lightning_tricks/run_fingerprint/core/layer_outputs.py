"""The outputs of a model's layers, seen by forward hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from lightning_tricks._torch_compat.modules import compiled_module, compiles_in_place, own_buffers, own_parameters

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
                    hooks.enter_context(module.register_forward_hook(_hook(name, module, on_output)))
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


def _hook(name: str, layer: nn.Module, on_output: Callable[[str, Any], None]) -> Callable[[nn.Module, Any, Any], None]:
    # A copy of the model has a copy of this hook, perhaps with a copy of all that it refers to. It must not record.
    layer_id = id(layer)

    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        # torch.compile would break its graph at the call
        if id(module) == layer_id and not torch.compiler.is_compiling():
            on_output(name, output)

    return hook
