"""Modules: their mode, how Lightning calls their steps, and parameters that a backward pass did not reach."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_tricks._shared.patterns import strip_compile_prefix
from lightning_tricks._shared.text import counted, list_names
from lightning_tricks._torch_compat.modules import compiled_module

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")  # FSDP1 and activation checkpointing


def names_of_modules(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Return each module with all its qualified names, of which one that is registered in two places has several.

    The names are those without the prefixes of `torch.compile`; the module inside a compiled one stands for both. That
    of the model is "".
    """
    names: dict[nn.Module, list[str]] = {}
    for name, part in model.named_modules(remove_duplicate=False):
        if compiled_module(part) is None:
            names.setdefault(part, []).append(strip_compile_prefix(f"{name}.")[:-1])
    return names


def names_of_parameters(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return each parameter, told apart by identity, with all its qualified names, of which tied ones have several.

    The names are those without the prefixes that wrappers insert.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        names.setdefault(parameter, []).append(strip_compile_prefix(name))
    return names


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and restore the mode of each of its modules on exit."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def explained_arguments() -> Iterator[None]:
    """Say what a batch must hold, where a module does not take as many arguments as a batch gives it.

    Raises:
        TypeError: In place of Python's own.
    """
    try:
        yield
    except TypeError as error:
        if "positional argument" not in str(error) and "keyword argument" not in str(error):
            raise
        remedy = "a batch must contain what `forward` takes, and then the labels: drop the rest in collate_fn"
        raise TypeError(f"{error}; {remedy}.") from error


def parts_with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """Return the parts of a model, by name, of which a state dict holds what their `get_extra_state` returns."""
    own = nn.Module.get_extra_state
    return {name: part for name, part in model.named_modules() if type(part).get_extra_state is not own}


def step_arguments(step: Callable[..., Any], batch: Any, batch_idx: int) -> tuple[Any, ...]:
    """Return the positional arguments with which Lightning calls a `training_step`.

    The second one is the index of the batch, whatever its name in the step; a step with one argument gets the batch.
    """
    spec, names = _declared(step)
    return (batch, batch_idx) if len(names) >= 2 or "batch_idx" in names or spec.varargs else (batch,)


def takes_dataloader_iter(step: Callable[..., Any]) -> bool:
    """Whether Lightning gives a step the iterator over the data (`dataloader_iter`) instead of a batch."""
    return "dataloader_iter" in _declared(step)[1]


def _declared(step: Callable[..., Any]) -> tuple[inspect.FullArgSpec, list[str]]:
    """Return the signature as Lightning sees it: one decorator is unwrapped, and the first argument is `self`."""
    spec = inspect.getfullargspec(getattr(step, "__wrapped__", step))
    return spec, spec.args[1:]


def parameters_without_gradient(module: nn.Module) -> list[str]:
    """Return the names of the parameters that require a gradient and have none; call it after the first backward pass.

    A parameter that the loss does not depend on never changes, and DistributedDataParallel fails at it with an error
    that names no parameter. Nothing is read from the device.

    Args:
        module: The module. After later backward passes, gradients that were set to zero instead of None hide it.

    Returns:
        The qualified names, without the prefixes of `torch.compile`; for a tied parameter, its first name.

    Examples:
        >>> import torch
        >>> model = torch.nn.ModuleDict({"used": torch.nn.Linear(1, 1), "unused": torch.nn.Linear(1, 1)})
        >>> model["used"](torch.ones(1)).sum().backward()
        >>> parameters_without_gradient(model)
        ['unused.weight', 'unused.bias']
    """
    return names_without_gradient({strip_compile_prefix(name): one for name, one in module.named_parameters()})


def names_without_gradient(parameters: Mapping[str, Tensor]) -> list[str]:
    """Return the names of those of the parameters that require a gradient and have none."""
    return [name for name, parameter in parameters.items() if parameter.requires_grad and parameter.grad is None]


def describe_without_gradient(names: Sequence[str], rank: int | None = None) -> str:
    """Return the words for parameters without a gradient, with the rank on which that was seen if there are several.

    Examples:
        >>> describe_without_gradient(["head.bias"], rank=1)
        'on rank 1, 1 trainable parameter got no gradient: head.bias'
    """
    place = "" if rank is None else f"on rank {rank}, "
    return f"{place}{counted(len(names), 'trainable parameter')} got no gradient: {list_names(names, 10)}"
