"""Conformal prediction: sets of classes and intervals that hold the truth in a chosen share of the cases.

When to use it: where somebody acts on a prediction and must know how often it is wrong. `ConformalClassifier(module,
loader, alpha=0.1)` predicts a set of classes for each row, `ConformalRegressor` an interval, around any trained module.
For new rows that are exchangeable with those of the loader, the set or interval holds the truth with a probability of
at least `1 - alpha`, whatever the model and the distribution.

What it does that a quantile of the errors does not: the rank ceil((n + 1)(1 - alpha)) makes the promise exact for
any number of rows, and too few rows for an alpha are an error that says how many are needed. Scores adapt to the row
("aps", "raps", "normalised", "quantile"), and groups get quantiles of their own. Nothing of the module changes. The
result is a LightningModule, so that `trainer.predict` works, with its calibration in the state dict.

Caveats: the rows of the loader must not have trained the module, nor chosen it. The promise is an average over
calibrations and rows: of one calibration with n rows the coverage varies by about sqrt(alpha (1 - alpha) / n), and
within a class or group that has no quantile of its own it may be lower. It ends where the data drift.

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
