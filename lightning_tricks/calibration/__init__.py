"""Calibrated probabilities for ensembles and any other classifier: of the rows that get 0.8, eight in ten are right.

When to use it: if somebody acts on a probability: a threshold, a cost, or a prediction that a person reviews. Networks
are mostly overconfident, boosted ensembles underconfident. `calibrate(module, loader)` fits a map to held-out data
after training; no weight changes.

Which method: start with `temperature`, one number, which never changes the predicted class; use `vector` if some
classes are too likely and you have some hundred rows for each; `isotonic` with thousands of rows, if the error is not
a matter of scale.

Caveats: use neither rows of the training nor rows on which you judge the result: the table that `calibrate` returns
is measured on the rows that it was fitted to. Calibration does not extend to other kinds of data, such as noise, and
further training makes it stale.

Sources: Guo et al., arXiv 1706.04599 (temperature, vector); Zadrozny and Elkan, KDD 2002 (isotonic); scikit-learn's
`CalibratedClassifierCV`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_tricks._shared.calibration import Calibration as Calibration
    from lightning_tricks.calibration.calibrated_classifier import CalibratedClassifier as CalibratedClassifier
    from lightning_tricks.calibration.calibrated_classifier import CalibrationTable as CalibrationTable
    from lightning_tricks.calibration.calibrated_classifier import calibrate as calibrate
    from lightning_tricks.calibration.calibrated_classifier import calibration_scores as calibration_scores
else:  # or a type checker would take any name for one of the package
    from lightning_tricks._lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
