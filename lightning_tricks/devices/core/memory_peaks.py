"""The peak of the memory in each stage of an epoch, and its growth from epoch to epoch."""

from __future__ import annotations

from collections.abc import Callable

_FEW_EPOCHS = 4  # in which memory has to grow one after another
_LEAST_GROWTH = 2**20  # bytes in these epochs together; the allocator hands out blocks of 512 bytes


class StagePeaks:
    """The peaks of stages that interrupt each other, as validation interrupts training.

    Args:
        read_peak: Returns the peak since the last reset, in bytes.
        reset_peak: Resets it.

    Attributes:
        overall: The peak since this object was created, in bytes.
    """

    def __init__(self, read_peak: Callable[[], int], reset_peak: Callable[[], None]) -> None:
        self._read_peak, self._reset_peak = read_peak, reset_peak
        self._stage = ""
        self._peaks: dict[str, int] = {}
        self.overall = 0

    def enter(self, stage: str) -> None:
        """Count what follows for a stage; "" for none."""
        peak = self._read_peak()
        self.overall = max(self.overall, peak)
        if self._stage:
            self._peaks[self._stage] = max(peak, self._peaks.get(self._stage, 0))
        self._reset_peak()
        self._stage = stage

    def take(self) -> dict[str, int]:
        """Return the peak of each stage since the last call, in bytes, and count what follows for none."""
        self.enter("")
        peaks, self._peaks = self._peaks, {}
        return peaks


class EpochGrowth:
    """How much memory was allocated at the ends of epochs."""

    def __init__(self) -> None:
        self._first: int | None = None
        self._epochs = 0
        self._last: list[int] = []

    def add(self, allocated: int) -> None:
        """Add the size at the end of an epoch, in bytes."""
        if self._first is None:
            self._first = allocated
        self._epochs += 1
        self._last = [*self._last[-_FEW_EPOCHS:], allocated]

    @property
    def per_epoch(self) -> int | None:
        """The growth from the end of the first epoch, by epoch, in bytes; None before the end of the second."""
        if self._first is None or self._epochs < 2:
            return None
        return round((self._last[-1] - self._first) / (self._epochs - 1))

    def steady(self) -> list[int]:
        """Return the sizes at the ends of the last epochs if they grew in each of them; else an empty list."""
        grows = all(before < after for before, after in zip(self._last, self._last[1:], strict=False))
        enough = len(self._last) > _FEW_EPOCHS and self._last[-1] - self._last[0] >= _LEAST_GROWTH
        return list(self._last) if grows and enough else []
