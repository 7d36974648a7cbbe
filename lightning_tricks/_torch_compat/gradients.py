"""Calls of torch's functions that clip gradients, and of checkpointing that gives none."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

from lightning_tricks._torch_compat.guards import needs_private


@contextmanager
def observing_clipping(called: Callable[[list[Tensor], float], None]) -> Iterator[None]:
    """Call a function before torch clips gradients, by norm or by value, until the context is left.

    Whoever has imported torch's functions before holds the functions themselves, and so do Lightning and timm: what
    they call is replaced in the functions, not in the module.

    Args:
        called: Gets the parameters, and the bound that their gradients are clipped to.
    """
    with ExitStack() as stack:
        # torch since 2.6 (nn/utils/clip_grad.py, `_no_grad`) wraps both in closures over `func`. `clip_grad_norm_`
        # calls the first of them, with the parameters and the norm that it has computed.
        for function in (torch.nn.utils.clip_grads_with_norm_, torch.nn.utils.clip_grad_value_):
            with needs_private("GradientClipping", KeyError):
                cell = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))["func"]
            stack.enter_context(_replaced(cell, "cell_contents", _calling_first(cell.cell_contents, called)))
        yield


@contextmanager
def observing_cut_checkpoints(called: Callable[[], None]) -> Iterator[None]:
    """Call a function where reentrant checkpointing gets no input that requires a gradient, so that it gives none."""
    with needs_private("LoRA, Adapters, PrefixTuning or GradualUnfreezing"):
        # Called in `CheckpointFunction.forward` (utils/checkpoint.py), which only warns "None of the inputs have
        # requires_grad=True": adapters inside of the part, with frozen weights before it, would not be trained.
        plain = checkpoint.check_backward_validity

    def check(inputs: Iterable[Any]) -> None:
        # An iterable may be read once only, and torch reads it again.
        inputs = list(inputs)
        if not any(isinstance(one, Tensor) and one.requires_grad for one in inputs):
            called()
        plain(inputs)

    with _replaced(checkpoint, "check_backward_validity", check):
        yield


def _calling_first(plain: Callable[..., None], called: Callable[[list[Tensor], float], None]) -> Callable[..., None]:
    signature = inspect.signature(plain)

    def clip(*args: Any, **kwargs: Any) -> None:
        # Callers give the bound by position or by its name.
        given = signature.bind(*args, **kwargs)
        parameters, bound, *_ = given.args
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)  # of a generator, once
        called(parameters, float(bound))
        plain(parameters, *given.args[1:])

    return clip


@contextmanager
def _replaced(owner: Any, name: str, function: Callable[..., None]) -> Iterator[None]:
    plain = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        if getattr(owner, name) is function:  # or somebody has put another one around it since, which still calls it
            setattr(owner, name, plain)
