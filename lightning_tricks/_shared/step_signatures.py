"""How Lightning calls a module's steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


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
