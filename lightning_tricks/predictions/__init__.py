"""Write the predictions of all ranks and dataloaders to one file, in the order of the dataset.

When to use it: whenever `trainer.predict` should leave a file behind, above all on multiple GPUs, or if the predictions
do not fit in memory.

What the usual snippets get wrong: `trainer.predict` returns the predictions of its own rank, in the order of its
sampler, and keeps all of them in memory; distributed samplers repeat samples; a callback that writes one file per rank
leaves order, repeated samples and merging to you; after a kill, everything starts again.

Caveats: a table of the indices is kept in memory, as are texts in npz and pt, and bfloat16 in pt. Multiple nodes need a
shared disk.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_tricks.predictions.callback import PredictionWriter as PredictionWriter
else:  # or a type checker would take any name for one of the package
    from lightning_tricks._lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
