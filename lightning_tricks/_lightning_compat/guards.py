"""Guards for Lightning's private symbols: where Lightning renamed one, an error says so, for reads and for writes."""

from __future__ import annotations

from lightning_tricks._guards import PrivateSymbolGuard, overriding, set_private
from lightning_tricks._lightning_compat.flavor import PACKAGE

__all__ = ["needs_private", "overriding", "set_private"]


class needs_private(PrivateSymbolGuard):  # noqa: N801  # a context manager
    """The guard of a private Lightning symbol."""

    library = PACKAGE
    supported = "2.5 to 2.6"
