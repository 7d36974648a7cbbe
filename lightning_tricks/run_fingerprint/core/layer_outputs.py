"""The layers of a model: what they put out, and what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_tricks._shared.patterns import strip_compile_prefix

# in evaluation they take another path where a hook is on one of their modules
_WITH_FAST_PATH = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)


class ModelTensors:
    """The parameters and buffers of a model, by qualified name; their places are found once, and looked up each time.

    Args:
        model: Whose.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places: dict[str, tuple[dict[str, Any], str]] = {}
        seen: set[int] = set()
        for prefix, module in model.named_modules():
            for held in (module._parameters, module._buffers):
                for name, value in held.items():
                    if value is not None and id(value) not in seen:
                        seen.add(id(value))
                        self._places[strip_compile_prefix(f"{prefix}.{name}" if prefix else name)] = (held, name)

    def __call__(self) -> dict[str, Tensor]:
        """Return what is in the places now."""
        found = {name: held.get(key) for name, (held, key) in self._places.items()}
        return {name: tensor for name, tensor in found.items() if tensor is not None and not is_lazy(tensor)}


class LayerOutputs:
    """The layers of a model whose outputs are looked at: those without children, or with tensors of their own.

    Of what `torch.compile` has compiled the whole is looked at; modules that compile in place, and those of
    TorchScript, are left alone.

    Args:
        model: Whose.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = list(_layers_in(model))

    def watch(self, see: Callable[[str, Any], None]) -> Callable[[], None]:
        """Call `see` with the name and the output of each layer when it has run; return what ends that."""
        handles = [
            module.register_forward_hook(_hook(name, module, see))
            for name, module, with_fast_path in self._layers
            if all(_is_trained(outer) for outer in with_fast_path)
        ]

        def end() -> None:
            for handle in handles:
                handle.remove()

        return end


def _layers_in(
    module: nn.Module, name: str = "", with_fast_path: tuple[nn.Module, ...] = (), met: set[nn.Module] | None = None
) -> Iterator[tuple[str, nn.Module, tuple[nn.Module, ...]]]:
    """Yield names and layers, and around each of them the modules with a fast path."""
    met = set() if met is None else met
    if module in met or isinstance(module, torch.jit.ScriptModule) or module._compiled_call_impl is not None:
        return
    met.add(module)
    if isinstance(module, _WITH_FAST_PATH):
        with_fast_path = (*with_fast_path, module)
    children = {} if "_orig_mod" in module._modules else dict(module.named_children())
    if name and not (children and not module._parameters and not module._buffers):
        yield name, module, with_fast_path
    for key, child in children.items():
        yield from _layers_in(child, f"{name}.{key}" if name else key, with_fast_path, met)


def _is_trained(module: nn.Module) -> bool:
    return module.training and any(parameter.requires_grad for parameter in module.parameters())


def _hook(name: str, layer: nn.Module, see: Callable[[str, Any], None]) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        # a copy of the model takes the hook along; the compiler would break its graph here
        if module is layer and not torch.compiler.is_compiling():
            see(name, output)

    return hook
