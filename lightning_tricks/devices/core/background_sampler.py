"""A thread that measures something again and again beside the training."""

from __future__ import annotations

import threading
from collections.abc import Callable

_PATIENCE = 10.0  # seconds


class BackgroundSampler:
    """Calls a function every few seconds, in a thread that ends with the process, or when it is stopped.

    Args:
        sample: The function; it is called once more when the thread is stopped. If it raises, it is not called again.
        interval: The seconds between two calls, > 0.
        finish: Called by the thread when it ends, so that nothing is released while `sample` hangs.

    Attributes:
        error: What the function raised; None while it runs.
    """

    def __init__(self, sample: Callable[[], None], interval: float, finish: Callable[[], None] = lambda: None) -> None:
        self.error: Exception | None = None
        self._sample = sample
        self._interval = interval
        self._finish = finish
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lightning_tricks device monitor", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        try:
            self._thread.start()
        except RuntimeError:  # there may be no more threads
            self._finish()
            raise

    def stop(self) -> bool:
        """Stop the thread, and return whether it has ended; one that hangs is waited for 10 seconds, once."""
        patience = 0.0 if self._stop.is_set() else _PATIENCE
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(patience)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._interval):
                self._sample()
            self._sample()
        except Exception as error:  # told by the thread that trains
            self.error = error
        finally:
            self._finish()
