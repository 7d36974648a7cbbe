"""Whole numbers that a module keeps in its state dict and reads without waiting for the device."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch


def register_count(module: Any, buffer: str, attribute: str) -> None:
    """Add a count, 0 at first, as a buffer of the state dict and as an attribute, a plain int.

    Args:
        module: The module that gets both.
        buffer: Name of the buffer.
        attribute: Name of the attribute.
    """
    module.register_buffer(buffer, torch.zeros((), dtype=torch.int64))
    setattr(module, attribute, 0)
    module.register_load_state_dict_post_hook(partial(_read_count, buffer, attribute))


def set_count(module: Any, buffer: str, attribute: str, value: int) -> None:
    """Set a registered count to a value."""
    setattr(module, attribute, value)
    getattr(module, buffer).fill_(value)


def _read_count(buffer: str, attribute: str, module: Any, keys: Any) -> None:
    setattr(module, attribute, int(getattr(module, buffer)))
