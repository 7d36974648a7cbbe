"""Agreement of a run's ranks while they train: whether to stop, and whether it is time to save."""

from __future__ import annotations

import time
from typing import Any

import torch

_SECONDS_BETWEEN_EXCHANGES = 0.1  # approximately


class RankAgreement:
    """Combines the answers of all ranks, rarely enough to cost no time beside the training steps.

    A single rank answers at once. Of several ranks each calls `any_rank` at the same steps; the number of steps between
    two exchanges follows from the pace of the slowest rank, which is exchanged as well. The exchange uses the CPU, so
    that it does not wait for a GPU.
    """

    def __init__(self) -> None:
        self._group: Any = None
        self._is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._is_distributed = self._is_distributed and torch.distributed.get_world_size() > 1
        if self._is_distributed and torch.distributed.get_backend() != "gloo":
            self._group = torch.distributed.new_group(backend="gloo")
        self._steps_left = 1  # steps until the next exchange
        self._steps_between = 1
        self._last_exchange = time.monotonic()

    def any_rank(self, *questions: bool) -> list[bool]:
        """Return for each question whether any rank answers True; False for all between two exchanges."""
        if not self._is_distributed:
            return list(questions)
        self._steps_left -= 1
        if self._steps_left:
            return [False] * len(questions)
        now = time.monotonic()
        seconds_per_step = (now - self._last_exchange) / self._steps_between
        answers = torch.tensor([*map(float, questions), seconds_per_step], dtype=torch.float64)
        torch.distributed.all_reduce(answers, torch.distributed.ReduceOp.MAX, group=self._group)
        *highest, slowest = answers.tolist()
        self._steps_between = self._steps_left = max(1, min(1000, int(_SECONDS_BETWEEN_EXCHANGES / max(slowest, 1e-9))))
        self._last_exchange = time.monotonic()
        return [answer > 0 for answer in highest]
