"""Conformal prediction: sets of classes and intervals that contain the truth with a chosen probability.

When to use it: if you must know how often a prediction is wrong. `ConformalClassifier(module, loader, alpha=0.1)`
predicts a set of classes for each row, `ConformalRegressor` an interval, with any trained module. For new rows that are
exchangeable with the rows of the loader, the set or interval contains the truth with a probability of at least
`1 - alpha`, whatever the model and the distribution.

Unlike a plain quantile of the errors, the rank ceil((n + 1)(1 - alpha)) makes the guarantee exact for any number of
rows, and too few rows for an alpha raise an error with the number you need. Scores can adapt to each row ("aps",
"raps", "normalised", "quantile"), and groups can have their own quantiles. The module does not change. The result is a
LightningModule, so `trainer.predict` works, with the calibration in the state dict.

Caveats: do not use rows by which you trained or chose the module. The guarantee is an average over calibrations and
rows: the coverage of one calibration with n rows varies by about sqrt(alpha (1 - alpha) / n), and it may be lower
within a class or group that has no quantile of its own. It ends if the data drift.

Sources: Vovk, Gammerman and Shafer, Algorithmic Learning in a Random World, 2005; Vovk, arXiv 1209.2673 (groups); Lei
et al., arXiv 1604.04173 ("absolute", "normalised"); Sadinle, Lei and Wasserman, arXiv 1609.00451 ("lac"); Romano,
Patterson and Candes, arXiv 1905.03222 ("quantile"); Romano, Sesia and Candes, arXiv 2006.02544 ("aps"); Angelopoulos et
al., arXiv 2009.14193 ("raps").
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_tricks.conformal.classifier import ConformalClassifier as ConformalClassifier
    from lightning_tricks.conformal.regressor import ConformalRegressor as ConformalRegressor
else:  # or a type checker would take any name for one of the package
    from lightning_tricks._lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
