"""What torch knows of other processes: the store by which ranks have found each other, and the one before a fork."""

from __future__ import annotations

from typing import Any

import torch

from lightning_tricks._torch_compat.guards import needs_private, set_private


@needs_private("RunFingerprint")
def store_of_ranks(prefix: str) -> Any:
    """Return the store of the default process group, for keys with a prefix; using it is no collective."""
    from torch.distributed import distributed_c10d

    untyped: Any = distributed_c10d
    # A collective would need all ranks at the same point: those that have diverged, which are looked for, may not come.
    return untyped.PrefixStore(prefix, untyped._get_default_store())


def allow_forked_ranks() -> None:
    """Let a fork start ranks by forks on a machine without a GPU, although the process before it has looked for one."""
    # `is_available` makes torch take each later fork for a bad one, in which Lightning (fabric,
    # strategies/launchers/multiprocessing.py) starts no ranks, not even for the CPU.
    if not torch.cuda.is_available():
        with needs_private("assert_resumable"):
            set_private(torch.cuda, _is_in_bad_fork=lambda: False)
