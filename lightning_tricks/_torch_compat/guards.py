"""Guards for torch's private symbols: where torch renamed one, an error says so, for reads and for writes."""

from __future__ import annotations

from lightning_tricks._guards import PrivateSymbolGuard, overriding, set_private

__all__ = ["needs_private", "overriding", "set_private"]


class needs_private(PrivateSymbolGuard):  # noqa: N801  # a context manager
    """The guard of a private torch symbol."""

    library = "torch"
    supported = "2.6 to 2.15"
