"""Split a batch that does not fit in memory into microbatches, and train with the gradient of the whole batch.

When to use it: if a batch runs out of memory and the batch size must not change, because learning rate, schedule and
results depend on it. `Microbatching()` splits a batch only after memory ran out, and remembers the size that fits.

What `accumulate_grad_batches` does not do: one batch of the dataloader stays one step, with its hooks, its place in the
epoch and its logged values; microbatches of unequal sizes count by their rows; a loss that is not a mean or sum over
the rows is refused; ranks agree on a size, and synchronize once per batch.

With `count`, means over targets, such as tokens, are exact with microbatches, accumulation and DDP.

Caveats: `training_step` is called once per microbatch. Layers with batch statistics see one microbatch at a time.

Source: Huang et al., arXiv 1811.06965 (microbatches); the search is that of Composer's `auto` microbatching.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_tricks.microbatching.callback import Microbatching as Microbatching
else:  # or a type checker would take any name for one of the package
    from lightning_tricks._lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
