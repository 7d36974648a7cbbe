"""Restore the weights of the best validation when fit returns, from host memory.

When to use it: you test, export or use the model right after `fit`, and the last epoch is not the best one. Beside
`EarlyStopping`, which stops some validations after the best.

Caveats: host memory contains two copies of weights and buffers on each rank, and each checkpoint one, so that a resumed
run knows it. Checkpoints of the fit contain the last weights as before; only the weights that `fit` leaves in the
module differ.

Source: Keras, `EarlyStopping(restore_best_weights=True)`; Prechelt, "Early Stopping - But When?" (1998).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_tricks.restore_best.callback import RestoreBest as RestoreBest
else:  # or a type checker would take any name for one of the package
    from lightning_tricks._lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
