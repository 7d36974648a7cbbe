"""Skip or rewind the batches at which the loss, or the norm of the gradients, jumps out of its usual band.

When to use it: if a rare batch, or a rare state of the weights, makes the loss jump: large models, noisy data, long
unattended runs. "skip" leaves out the step of the batch; "rewind" returns to the weights before it, because the steps
before a spike have often damaged them already.

What the usual snippets do not do: the run ends bit for bit as a run whose dataloader leaves those batches out, with
random numbers, batch statistics, schedules, optimizer states and the values logged for the epoch; all ranks decide
alike; steps that a GradScaler skips in its search for a scale are not spikes.

Caveats: "skip" reads a value from the device before each step. "rewind" reads once in `every_n_train_steps`, and keeps
the weights and optimizer states a second time on the device. Attributes of a module, its datamodule or other callbacks
are not restored.

Sources: Chowdhery et al., "PaLM", arXiv 2204.02311, section 5.1 (restart before the spike, skip the batches); OLMo's
optimizers that skip a step whose loss or norm is an outlier among the last 128 (github.com/allenai/OLMo-core).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_tricks.spike_guard.callback import SpikeGuard as SpikeGuard
    from lightning_tricks.spike_guard.functional import RobustBand as RobustBand
else:  # or a type checker would take any name for one of the package
    from lightning_tricks._lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
