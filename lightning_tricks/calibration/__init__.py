"""Calibrated probabilities: of the rows that get 0.8, eight in ten are right; for ensembles and any other classifier.

When to use it: wherever somebody acts on a probability, such as a threshold, a cost, or a prediction that is handed to
a person. Networks are mostly too sure, boosted ensembles too cautious. `calibrate(module, loader)` fits a map to
held-out data after training; no weight changes.

Which method: `temperature` first, one number, which never changes the predicted class; `vector` where single classes
are too likely, with some hundred rows for each; `isotonic` with thousands of rows, where the error is no matter of
scale.

Caveats: the rows must not be those of the training, nor those with which the result is judged: the table of
`calibrate` is of the rows that it was fitted to. Data of another kind, such as noise, are not calibrated by it.
Training that goes on makes it stale.

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
