"""Predictions: those of all ranks and loaders, in the order of the data set, in one file.

When to use it: whenever `trainer.predict` should leave a file behind, above all on several ranks, or where the
predictions do not fit into memory.

What the usual snippets get wrong: `trainer.predict` returns those of its own rank alone, in the order of its sampler,
and keeps all of them in memory; a sampler that fills up the last round repeats samples; a callback that writes a file
for each rank leaves the order, the repeated samples and the merging to the reader; after a kill, all begins anew.

Caveats: a table of the indices is held in memory, texts in npz and pt, and bfloat16 in pt. Several nodes need a shared
disk.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_tricks.predictions.callback import PredictionWriter as PredictionWriter
else:  # or a type checker would take any name for one of the package
    from lightning_tricks._lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
