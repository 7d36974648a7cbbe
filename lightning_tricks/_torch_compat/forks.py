"""What torch remembers of the process that a process was forked from."""

from __future__ import annotations

import torch

from lightning_tricks._torch_compat.guards import needs_private, set_private


def allow_forked_ranks() -> None:
    """Let a fork start ranks by forks on a machine without a GPU, although the process before it has looked for one."""
    if not torch.cuda.is_available():
        with needs_private("assert_resumable"):
            set_private(torch.cuda, _is_in_bad_fork=lambda: False)
