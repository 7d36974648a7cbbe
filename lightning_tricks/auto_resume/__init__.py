"""Kill a run anywhere, run the same command again, and get bit-identical weights.

When to use it: in every run that may be stopped: by a dropped SSH session, a scheduler's time limit, a preempted spot
instance, Ctrl-C, or a machine crash.

Unlike Lightning's checkpoints, these contain the random state of each rank and each dataloader worker, the position in
the epoch's order, partial epoch means of `self.log`, states of torchmetrics, buffers that differ between ranks, and a
validation that is due.

Caveats: a resume is exact on the same machine with the same number of ranks and workers. With other numbers the run
also resumes: each sample of the epoch is still read once, and a warning says what is no longer exact. Models may be
sharded by `ModelParallelStrategy` (FSDP2 and tensor parallel); FSDP1 and DeepSpeed raise an error.

Source: files are written as databases do it (write beside, flush, rename, flush the directory); exit status 75 is
EX_TEMPFAIL of sysexits.h.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_tricks.auto_resume.callback import AutoResume as AutoResume
    from lightning_tricks.auto_resume.checkpoint_writer import DurableCheckpointIO as DurableCheckpointIO
    from lightning_tricks.auto_resume.core.checkpoint_folder import CheckpointFolder as CheckpointFolder
    from lightning_tricks.auto_resume.core.durable_writing import save_durably as save_durably
    from lightning_tricks.auto_resume.core.durable_writing import write_durably as write_durably
else:  # or a type checker would take any name for one of the package
    from lightning_tricks._lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
