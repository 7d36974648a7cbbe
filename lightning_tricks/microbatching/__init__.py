"""Train on batches that do not fit in memory, in microbatches that do, with the gradient of the whole batch.

When to use it: where a batch runs out of memory and the batch size is not to change, because learning rate, schedule
and results depend on it. `Microbatching()` cuts a batch only when memory has run out, and remembers the size that fits.

What it does that `accumulate_grad_batches` does not: one batch of the loader stays one step, with its hooks, its place
in the epoch and its logged values; microbatches of unequal sizes count by their rows; a loss that is no mean or sum
over the rows is refused; ranks agree on a size, and synchronise once for a batch.

Caveats: `training_step` is called once for each microbatch. Layers with batch statistics see a microbatch at a time.

Source: Huang et al., arXiv 1811.06965 (the word microbatch); the search is that of Composer's `auto` microbatching.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_tricks.microbatching.callback import Microbatching as Microbatching
else:  # or a type checker would take any name for one of the package
    from lightning_tricks._lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
