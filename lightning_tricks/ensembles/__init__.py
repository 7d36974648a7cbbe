"""Ensembles as LightningModules: the Trainer trains the members, all at once if that is faster.

When to use it: to gain the last per cent of accuracy, to get better probabilities, and to find out where a model is
uncertain. `VotingClassifier(Net, 5)` is a LightningModule like any other, and works with every precision, strategy,
callback and checkpoint of the Trainer. `StackingClassifier` trains a meta-learner on out-of-fold predictions, and
`cross_validate` runs any LightningModule in folds.

Unlike torchensemble, it stacks the parameters of members of the same structure (except convolutions) in one module,
which takes a fraction of the time; the best checkpoint restores the best ensemble, and a run resumes; nothing learns
from validation data; the validation loss is computed from the combined probabilities; members can be different,
pretrained and weighted; `predict_uncertainty` separates noise in the data from uncertainty of the model.

Which one: start with `Voting`. Use `GradientBoosting` and `SoftGradientBoosting` if only accuracy matters, as they
estimate no uncertainty between members; `SnapshotEnsemble` and `FastGeometric` if you can train little more than one
model; `AdversarialTraining` against small perturbations; `Stacking` to learn how to weigh different kinds of members.

Caveats: each member sees the samples in its own order, so a batch has `n_estimators` times as many rows;
`shared_order=True` needs less memory and makes members less diverse. Under fp16, all members of a process share one
GradScaler. `Trainer(gradient_clip_val=...)` clips each member separately, `GradientClipping` the ensemble as one model.
Set `vectorize=False` if a member draws from Python's random module: members that run at once would share the draw.
Under DDP, each rank trains all members on its samples or, with `members="sharded"`, some members on all samples.

Sources: Lakshminarayanan et al., arXiv 1612.01474 (voting, adversarial training); Breiman, Machine Learning 24, 1996
(bagging); Huang et al., arXiv 1704.00109 (snapshots); Garipov et al., arXiv 1802.10026 (fast geometric); Friedman,
Annals of Statistics 29, 2001 (boosting); Feng et al., arXiv 2006.04059 (soft boosting); Frosst and Hinton, arXiv
1711.09784 (trees); Wolpert, Neural Networks 5, 1992 (stacking); torchensemble 0.2, whose classes these are named after.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_tricks.ensembles.adversarial_training import (
        AdversarialTrainingClassifier as AdversarialTrainingClassifier,
    )
    from lightning_tricks.ensembles.adversarial_training import (
        AdversarialTrainingRegressor as AdversarialTrainingRegressor,
    )
    from lightning_tricks.ensembles.boosting import SoftGradientBoostingClassifier as SoftGradientBoostingClassifier
    from lightning_tricks.ensembles.boosting import SoftGradientBoostingRegressor as SoftGradientBoostingRegressor
    from lightning_tricks.ensembles.core.combination import Uncertainty as Uncertainty
    from lightning_tricks.ensembles.core.combination import classification_uncertainty as classification_uncertainty
    from lightning_tricks.ensembles.core.combination import regression_uncertainty as regression_uncertainty
    from lightning_tricks.ensembles.cross_validation import CrossValidation as CrossValidation
    from lightning_tricks.ensembles.cross_validation import cross_validate as cross_validate
    from lightning_tricks.ensembles.ensemble import Ensemble as Ensemble
    from lightning_tricks.ensembles.gradient_boosting import GradientBoostingClassifier as GradientBoostingClassifier
    from lightning_tricks.ensembles.gradient_boosting import GradientBoostingRegressor as GradientBoostingRegressor
    from lightning_tricks.ensembles.neural_forest import NeuralForestClassifier as NeuralForestClassifier
    from lightning_tricks.ensembles.neural_forest import NeuralForestRegressor as NeuralForestRegressor
    from lightning_tricks.ensembles.snapshot import FastGeometricClassifier as FastGeometricClassifier
    from lightning_tricks.ensembles.snapshot import FastGeometricRegressor as FastGeometricRegressor
    from lightning_tricks.ensembles.snapshot import SnapshotEnsembleClassifier as SnapshotEnsembleClassifier
    from lightning_tricks.ensembles.snapshot import SnapshotEnsembleRegressor as SnapshotEnsembleRegressor
    from lightning_tricks.ensembles.stacking import StackingClassifier as StackingClassifier
    from lightning_tricks.ensembles.stacking import StackingRegressor as StackingRegressor
    from lightning_tricks.ensembles.voting import BaggingClassifier as BaggingClassifier
    from lightning_tricks.ensembles.voting import BaggingRegressor as BaggingRegressor
    from lightning_tricks.ensembles.voting import FusionClassifier as FusionClassifier
    from lightning_tricks.ensembles.voting import FusionRegressor as FusionRegressor
    from lightning_tricks.ensembles.voting import VotingClassifier as VotingClassifier
    from lightning_tricks.ensembles.voting import VotingRegressor as VotingRegressor
else:  # or a type checker would take any name for one of the package
    from lightning_tricks._lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
