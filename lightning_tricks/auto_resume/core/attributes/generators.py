"""Random generators of torch, numpy and the standard library: their kinds and states."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from lightning_tricks.auto_resume.core.attributes.value_types import CannotRestoreError, is_subclass

_BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")


def generator_state(value: Any) -> tuple[str, Any] | None:
    """Return the name of a random generator's kind and its state; None if the value is no generator."""
    kind = type(value)
    if kind is torch.Generator:
        return f"torch {value.device}", value.get_state()
    if kind is random.Random:
        return "random", value.getstate()
    if kind is np.random.Generator:
        return f"numpy {type(value.bit_generator).__name__}", value.bit_generator.state
    if kind is np.random.RandomState:
        return f"legacy {type(value._bit_generator).__name__}", value.get_state(legacy=False)
    if is_subclass(kind, np.random.BitGenerator):
        return f"bits {kind.__name__}", value.state
    return None


def set_generator_state(value: Any, state: Any) -> None:
    """Set the state of a random generator."""
    kind = type(value)
    if kind is torch.Generator:
        value.set_state(state)
    elif kind is random.Random:
        value.setstate(state)
    elif kind is np.random.Generator:
        value.bit_generator.state = state
    elif is_subclass(kind, np.random.BitGenerator):
        value.state = state
    else:
        value.set_state(state)


def new_generator(name: str, state: Any) -> Any:
    """Return a new generator of a kind that `generator_state` named, with a state.

    Raises:
        CannotRestoreError: If NumPy's bit generator is of an unknown kind.
    """
    library, _, which = name.partition(" ")
    if library in ("numpy", "legacy", "bits") and which not in _BIT_GENERATORS:
        raise CannotRestoreError(f"NumPy's bit generator {which} is not supported")
    made: Any
    if library == "torch":
        made = torch.Generator(which)
    elif library == "random":
        made = random.Random()  # noqa: S311
    else:
        bits = getattr(np.random, which)()
        made = {"numpy": np.random.Generator, "legacy": np.random.RandomState}.get(library, lambda own: own)(bits)
    set_generator_state(made, state)
    return made
