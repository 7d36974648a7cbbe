"""Explain a run that hangs: where each rank is, which one is behind, and which batches or logged values differ.

When to use it: a run on several ranks stops without an error, at 100 % utilization; or a loader waits for ever. The
usual causes are that a rank left out a batch, logged a value that the others did not, or waits for something else.

How it works: each rank writes where it is into a small file that is mapped into its memory. When nothing moves, Python
code may not run, as C code can hold the interpreter's lock; `faulthandler` then writes the stacks, from a thread that
needs no lock. No rank asks another one for anything.

Caveats: `faulthandler` has one timer in a process, which the fit takes. The run is not ended.

Source: CPython, `faulthandler.dump_traceback_later`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_tricks.hang_watch.callback import HangWatch as HangWatch
    from lightning_tricks.hang_watch.core.comparison import compare_ranks as compare_ranks
else:  # or a type checker would take any name for one of the package
    from lightning_tricks._lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
