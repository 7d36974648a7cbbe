"""How Lightning calls a module's steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def step_arguments(step: Callable[..., Any], batch: Any, batch_idx: int) -> tuple[Any, ...]:
    """Return the positional arguments with which Lightning calls a `training_step`.

    The second one is the batch's number, whatever the step calls it; a step that takes the batch alone gets no more.
    """
    spec, names = _declared(step)
    return (batch, batch_idx) if len(names) >= 2 or "batch_idx" in names or spec.varargs else (batch,)


def takes_dataloader_iter(step: Callable[..., Any]) -> bool:
    """Whether Lightning gives a step the iterator over the data, in place of a batch."""
    return "dataloader_iter" in _declared(step)[1]


def _declared(step: Callable[..., Any]) -> tuple[inspect.FullArgSpec, list[str]]:
    """Return what Lightning looks at: one decorator is unwrapped, and the first argument is taken for `self`."""
    spec = inspect.getfullargspec(getattr(step, "__wrapped__", step))
    return spec, spec.args[1:]
