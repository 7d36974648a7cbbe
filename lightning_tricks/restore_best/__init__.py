"""End a fit with the weights of its best validation, which are kept in the memory of the host.

When to use it: the model is tested, exported or used right after `fit`, and the last epoch is not the best one. Beside
`EarlyStopping`, whose fit ends some validations after the best.

Caveats: two copies of weights and buffers are in the memory of the host on each rank, and one in each checkpoint, so
that a resumed run knows it. Checkpoints of the fit hold the last weights as ever; only what `fit` leaves in the module
differs.

Source: Keras, `EarlyStopping(restore_best_weights=True)`; Prechelt, "Early Stopping - But When?" (1998).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_tricks.restore_best.callback import RestoreBest as RestoreBest
else:  # or a type checker would take any name for one of the package
    from lightning_tricks._lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
