"""Count FLOPs, MACs and parameters of any model, for a forward pass or a whole training step, and log the MFU.

When to use it: to compare architectures before training them (`count_flops`, `lightning-tricks flops`), to find the
most expensive module, and to measure the fraction of the device's peak that a training run uses (`FlopsReport`).

Differences from other counters: every operator is counted as it runs, so attention, functional calls, parameters
without a module, recurrent layers and compiled modules are included. The backward pass and the activations that
checkpointing computes again are measured, not assumed to be a multiple of the forward pass. A copy of the model without
data is run, so counting is cheap and leaves the model unchanged, after an exception too.

Caveats: one MAC is two FLOPs. `macs` and `flops` are those of matrix products and convolutions; the FLOPs of
normalizations, poolings and pointwise operators are estimates and are counted separately, in `other_flops`. A causal
mask does not halve the cost of attention, as in `torch.utils.flop_counter`. Triton kernels without a formula appear in
`uncounted`. Under tensor parallelism the whole model is counted.

Sources: `torch.utils.flop_counter` (the tests compare with its formulas), thop (a backend applies its rules),
Chowdhery et al., "PaLM: Scaling language modeling with pathways", arXiv 2204.02311 (model FLOPs utilization).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_tricks.flops.callback import FlopsReport as FlopsReport
    from lightning_tricks.flops.core.flops_count import FlopsCount as FlopsCount
    from lightning_tricks.flops.core.flops_count import FlopsRow as FlopsRow
    from lightning_tricks.flops.core.model_flops import count_flops as count_flops
else:  # or a type checker would take any name for one of the package
    from lightning_tricks._lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
