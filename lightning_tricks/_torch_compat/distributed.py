"""The store through which the processes of torch.distributed have found each other."""

from __future__ import annotations

from typing import Any

from lightning_tricks._torch_compat.guards import needs_private


@needs_private("RunFingerprint")
def store_of_ranks(prefix: str) -> Any:
    """Return the store of the default process group, for keys with a prefix; using it is no collective."""
    from torch.distributed import distributed_c10d

    untyped: Any = distributed_c10d
    return untyped.PrefixStore(prefix, untyped._get_default_store())
