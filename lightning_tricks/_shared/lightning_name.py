"""Which of Lightning's two packages the program uses, found without importing one of them."""

from __future__ import annotations

import logging
import os
import sys
from importlib.util import find_spec

VARIABLE = "LIGHTNING_TRICKS_LIGHTNING"
FABRIC = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


def lightning_name() -> str:
    """Return "lightning.pytorch" or "pytorch_lightning".

    The variable `LIGHTNING_TRICKS_LIGHTNING` decides. Without it, the one that was imported first is taken: libraries
    that train with one of them may load what imports the other. If neither was, `pytorch_lightning` is taken where it
    alone is installed.

    Raises:
        ValueError: If the variable is neither of the two names.
    """
    default, other = FABRIC
    if given := os.environ.get(VARIABLE):
        if given not in FABRIC:
            raise ValueError(
                f"{VARIABLE}={given} in the environment must be {default} or {other}: set it to one of them."
            )
        return given
    if loaded := [name for name in tuple(sys.modules) if name in FABRIC]:  # in the order of their imports
        return loaded[0]
    return other if find_spec(other) and not find_spec("lightning") else default


def lightning_logger(room: str) -> logging.Logger:
    """Return the logger of a room, below that of Lightning, whose level and handler it has."""
    return logging.getLogger(f"{lightning_name()}.tricks.{room}")
