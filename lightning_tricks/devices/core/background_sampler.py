"""A thread that measures something again and again beside the training."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundSampler:
    """Calls a function every few seconds, in a thread that ends with the process, or when it is stopped.

    Args:
        sample: The function. If it raises, it is not called again.
        interval: The seconds between two calls, > 0.

    Attributes:
        error: What the function raised; None while it runs.
    """

    def __init__(self, sample: Callable[[], None], interval: float) -> None:
        self.error: Exception | None = None
        self._sample = sample
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lightning_tricks device monitor", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, and wait until it has ended; a driver that hangs is waited for 10 seconds."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            try:
                self._sample()
            except Exception as error:  # told by the thread that trains
                self.error = error
                return
