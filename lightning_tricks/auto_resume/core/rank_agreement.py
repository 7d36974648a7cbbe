"""What the ranks of a run agree on while they train: whether to stop, and whether it is time to save."""

from __future__ import annotations

import time
from typing import Any

import torch

_SECONDS = 0.1  # between two questions, about


class Agreement:
    """Asks all ranks the same questions, seldom enough to cost nothing beside the steps.

    A rank alone answers at once. Of several each calls `ask` at the same steps: how many steps lie between two
    exchanges follows from the slowest rank's pace, which is exchanged with them. They go over the CPU, so that no GPU
    is waited for.
    """

    def __init__(self) -> None:
        self._group: Any = None
        self._several = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._several = self._several and torch.distributed.get_world_size() > 1
        if self._several and torch.distributed.get_backend() != "gloo":
            self._group = torch.distributed.new_group(backend="gloo")
        self._left = 1  # steps until the next exchange
        self._between = 1
        self._since = time.monotonic()

    def ask(self, *questions: bool) -> list[bool]:
        """Return for each question whether any rank says yes; no, where it is not time to exchange."""
        if not self._several:
            return list(questions)
        self._left -= 1
        if self._left:
            return [False] * len(questions)
        now = time.monotonic()
        pace = (now - self._since) / self._between
        answers = torch.tensor([*map(float, questions), pace], dtype=torch.float64)
        torch.distributed.all_reduce(answers, torch.distributed.ReduceOp.MAX, group=self._group)
        *said, slowest = answers.tolist()
        self._between = self._left = max(1, min(1000, int(_SECONDS / max(slowest, 1e-9))))
        self._since = time.monotonic()
        return [answer > 0 for answer in said]
