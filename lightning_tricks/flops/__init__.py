"""Count FLOPs, MACs and parameters of any model, of a forward pass and of a whole training step, and log the MFU.

When to use it: to compare architectures before a run is spent on them (`count_flops`, `lightning-tricks flops`), to see
which module the compute goes to, and to know how much of the device's peak a training run uses (`FlopsReport`).

What it does that other counters do not: it counts every operator as it runs, so that attention, functional calls, bare
parameters, recurrent layers and compiled modules are in it; it measures the backward pass and what activation
checkpointing computes again instead of taking three times the forward pass; it runs a stand-in without data, so that it
is cheap and the model stays as it is, also when something fails.

Caveats: one MAC is two FLOPs, and `macs` and `flops` are matrix products and convolutions alone; norms, pools and
pointwise operators are estimates, kept apart in `other_flops`. A causal mask does not halve attention, as in
`torch.utils.flop_counter`. Triton kernels without a formula appear in `uncounted`. Under tensor parallelism the count
is that of the whole model.

Sources: `torch.utils.flop_counter` (the formulas that it has are a test's oracle), thop (its rules, as a backend),
Chowdhery et al., "PaLM: Scaling language modeling with pathways", arXiv 2204.02311 (model FLOPs utilization).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_tricks.flops.callback import FlopsReport as FlopsReport
    from lightning_tricks.flops.core.flops_count import FlopsCount as FlopsCount
    from lightning_tricks.flops.core.flops_count import FlopsRow as FlopsRow
    from lightning_tricks.flops.core.model_flops import count_flops as count_flops

    __all__ = ["FlopsCount", "FlopsReport", "FlopsRow", "count_flops"]
else:  # or a type checker would take any name for one of the package
    from lightning_tricks._lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "callback": ("FlopsReport",),
            "core.flops_count": ("FlopsCount", "FlopsRow"),
            "core.model_flops": ("count_flops",),
        },
    )
