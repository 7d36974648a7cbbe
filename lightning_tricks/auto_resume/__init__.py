"""Kill a run anywhere, run the same command again, and get the weights that it would have had, bit for bit.

When to use it: in every run that may be stopped: by a dropped SSH session, a scheduler's time limit, a spot instance
that is taken back, Ctrl-C, a crash of the machine.

What a checkpoint of Lightning leaves out, and this one holds: the random streams of each rank and each DataLoader
worker, the place in the epoch's order, partial epoch means of `self.log`, states of torchmetrics, buffers that differ
between ranks, a validation that is due.

Caveats: same machine, same number of ranks and workers. With another number it goes on as well and says what is no
longer exact. DeepSpeed, FSDP and `ModelParallelStrategy` are refused.

Source: the order of writing (stage, flush, rename, flush the directory) is that of databases; exit status 75 is
EX_TEMPFAIL of sysexits.h.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_tricks.auto_resume.callback import AutoResume as AutoResume
    from lightning_tricks.auto_resume.core.checkpoint_files import CheckpointFolder as CheckpointFolder
    from lightning_tricks.auto_resume.core.checkpoint_files import save_durably as save_durably
    from lightning_tricks.auto_resume.core.checkpoint_files import write_durably as write_durably
    from lightning_tricks.auto_resume.durable_checkpoint_io import DurableCheckpointIO as DurableCheckpointIO

    __all__ = ["AutoResume", "CheckpointFolder", "DurableCheckpointIO", "save_durably", "write_durably"]
else:  # or a type checker would take any name for one of the package
    from lightning_tricks._lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "callback": ("AutoResume",),
            "durable_checkpoint_io": ("DurableCheckpointIO",),
            "core.checkpoint_files": ("CheckpointFolder", "save_durably", "write_durably"),
        },
    )
