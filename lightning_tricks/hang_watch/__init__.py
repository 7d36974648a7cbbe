"""Find out why a run hangs: the position of each rank, the rank that is behind, and differing batches or logged values.

When to use it: a run on multiple GPUs or nodes stops without an error, at 100 % utilization, or a dataloader waits
forever. Usually one rank skipped a batch, logged a value that the others did not, or waits for something else.

How it works: each rank writes its position to a small memory-mapped file. When nothing moves, Python code may not run,
because C code can hold the interpreter's lock; `faulthandler` then writes the stacks from a thread that needs no lock.
Ranks do not communicate.

Caveats: `faulthandler` has one timer per process, which the fit uses. The run is not ended.

Source: CPython, `faulthandler.dump_traceback_later`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_tricks.hang_watch.callback import HangWatch as HangWatch
    from lightning_tricks.hang_watch.functional import compare_ranks as compare_ranks
else:  # or a type checker would take any name for one of the package
    from lightning_tricks._lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
