"""Nested ranges that always balance, whatever ends a step."""

from __future__ import annotations

from collections.abc import Callable


class RangeStack:
    """The open ranges of a training loop: a step, a phase in it, and a wait for data, which may interrupt both.

    Each method first closes what has to be closed, so that a boundary that never came leaves nothing open.

    Args:
        push: Opens a range with a name inside the ranges that are open.
        pop: Closes the range that was opened last.
    """

    def __init__(self, push: Callable[[str], object], pop: Callable[[], object]) -> None:
        self._push, self._pop = push, pop
        self._open: list[str] = []
        self._depth_before_wait: int | None = None

    def begin_step(self, name: str) -> None:
        """Close what is open, and open a step."""
        self.close()
        self._begin(name)

    def begin_phase(self, name: str) -> None:
        """Close the phase that is open, if any, and open another; outside of a step this does nothing."""
        if self._open and self._depth_before_wait != 0:
            self._close_to(1)
            self._begin(name)

    def end_phase(self) -> None:
        """Close the phase that is open, if any."""
        self._close_to(1)

    def begin_wait(self, name: str) -> None:
        """Open a wait for data inside of what is open."""
        self.end_wait()
        self._depth_before_wait = len(self._open)
        self._begin(name)

    def end_wait(self) -> None:
        """Close the wait for data, if one is open."""
        if self._depth_before_wait is not None:
            self._close_to(self._depth_before_wait)

    def close(self) -> None:
        """Close all ranges."""
        self._close_to(0)

    def _begin(self, name: str) -> None:
        self._push(name)
        self._open.append(name)

    def _close_to(self, depth: int) -> None:
        while len(self._open) > depth:
            self._open.pop()
            self._pop()
        if self._depth_before_wait is not None and len(self._open) <= self._depth_before_wait:
            self._depth_before_wait = None
