"""Metrics of training, validation and test: exact on any number of ranks, for each class, with plots.

When to use it: instead of calling a metric in a step and logging it. Steps only return predictions and targets.

What the usual idioms get wrong, without an error: `log_dict(collection(preds, target))` computes every metric twice in
each step (an epoch of a small model takes 3 to 5 times as long); torchmetrics' compute groups join metrics that have
equal states after the first batch, which the sanity check provides; one metric shared by two stages or loaders mixes
them; DistributedSampler's repeated samples count; a resume within an epoch loses the metrics of its first part.

Caveats: a loss that is the mean over a batch counts the repeated samples of that batch, unless the step returns the
loss of each sample. A custom metric is updated in each step; torchmetrics' classification, regression and retrieval
metrics are updated with several batches at once.

Sources: torchmetrics; scikit-learn where it defines a metric differently.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_tricks._shared.mean_loss import MeanLoss as MeanLoss
    from lightning_tricks.metrics.callback import MetricsMonitor as MetricsMonitor
    from lightning_tricks.metrics.core.presets import BalancedAccuracy as BalancedAccuracy
    from lightning_tricks.metrics.core.presets import binary_metrics as binary_metrics
    from lightning_tricks.metrics.core.presets import calibration_metrics as calibration_metrics
    from lightning_tricks.metrics.core.presets import detection_metrics as detection_metrics
    from lightning_tricks.metrics.core.presets import multiclass_metrics as multiclass_metrics
    from lightning_tricks.metrics.core.presets import multilabel_metrics as multilabel_metrics
    from lightning_tricks.metrics.core.presets import ood_metrics as ood_metrics
    from lightning_tricks.metrics.core.presets import preset as preset
    from lightning_tricks.metrics.core.presets import regression_metrics as regression_metrics
    from lightning_tricks.metrics.core.presets import retrieval_metrics as retrieval_metrics
    from lightning_tricks.metrics.core.presets import segmentation_metrics as segmentation_metrics
    from lightning_tricks.metrics.core.suite import MetricSuite as MetricSuite
    from lightning_tricks.metrics.key_checks import MetricsError as MetricsError
else:  # or a type checker would take any name for one of the package
    from lightning_tricks._lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
