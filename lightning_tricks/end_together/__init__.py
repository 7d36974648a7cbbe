"""Ranks with different numbers of batches end an epoch together, where the rank with the fewest ends.

When to use it: the ranks read streams or files of their own, so one runs out of batches before the others. Without it
DDP averages gradients of different epochs, and the run hangs at its end.

How it works: lengths that are certain are compared where an epoch begins, and the smallest counts. Otherwise the ranks
ask each other before each batch whether all have one, by one number on the CPU.

Caveats: batches that only some ranks have are left out, which a line tells you. A rank without batches does not take
empty steps: DDP divides by the number of all ranks, so the gradient of the others would shrink.

Source: PyTorch, "Distributed Training with Uneven Inputs Using the Join Context Manager"; Lightning issue 3325.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_tricks.end_together.callback import EndTogether as EndTogether
    from lightning_tricks.end_together.functional import until_a_rank_ends as until_a_rank_ends
else:  # or a type checker would take any name for one of the package
    from lightning_tricks._lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
