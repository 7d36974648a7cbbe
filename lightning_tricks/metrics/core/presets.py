"""Metrics for the usual tasks under short names, some with other values in edge cases than torchmetrics'."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Literal

import torchmetrics.classification as tm
import torchmetrics.regression as tmr
import torchmetrics.retrieval as tmir
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_tricks._shared.checks import check_choice, check_count, check_names
from lightning_tricks._shared.extras import import_extra
from lightning_tricks.metrics.core import own_metrics as own
from lightning_tricks.metrics.core.own_metrics import BalancedAccuracy as BalancedAccuracy


class Preset(MetricCollection):
    """A MetricCollection that knows the plain values it was made of.

    Its compute groups are declared, so that metrics whose states are equal by chance are never taken for one.

    Attributes:
        spec: `{"task": ..., ...}`, of which `preset(**spec)` makes the same again.
        main: The names of those that people plot.
    """

    def __init__(
        self, metrics: Mapping[str, Metric], groups: Sequence[Sequence[str]], spec: dict[str, Any], main: Sequence[str]
    ) -> None:
        grouped = {name for group in groups for name in group}
        alone = [[name] for name in metrics if name not in grouped]
        present = [[name for name in group if name in metrics] for group in groups]
        super().__init__(dict(metrics), compute_groups=[group for group in [*present, *alone] if group])
        self.spec, self.main = spec, tuple(main)


class SoftTargetPreset(Preset):
    """A preset whose targets may be probabilities; metrics of classes get the likeliest class."""

    def update(self, preds: Tensor, target: Tensor) -> None:  # type: ignore[override]  # torch has another `update`
        """Add a batch."""
        super().update(**own.split_soft_target({"preds": preds, "target": target}))

    def forward(self, preds: Tensor, target: Tensor) -> dict[str, Any]:
        """Add a batch, and return the values of only this batch."""
        return super().forward(**own.split_soft_target({"preds": preds, "target": target}))


def binary_metrics(threshold: float = 0.5, ignore_index: int | None = None) -> Preset:
    """Make the metrics of a binary classification.

    `preds` are probabilities of 1 or 0/1, of shape (N, ...), `target` is 0/1 of the same shape. `acc`; `precision`,
    `recall` and `f1` of class 1; `specificity`, the recall of class 0; `kappa` (Cohen) and `mcc` (Matthews); `auroc`
    and `ap` (average precision), exact, which keep 5 to 12 bytes for each sample.

    Args:
        threshold: A probability above it counts as 1.
        ignore_index: A value of `target` whose elements do not count.

    Examples:
        >>> import torch
        >>> metrics = binary_metrics()
        >>> metrics.update(torch.tensor([0.2, 0.8, 0.6]), torch.tensor([0, 1, 0]))
        >>> round(metrics.compute()["acc"].item(), 4)
        0.6667
    """
    decided: dict[str, Any] = {"threshold": threshold, "ignore_index": ignore_index}
    scored: dict[str, Any] = {"ignore_index": ignore_index}
    metrics = {
        "acc": tm.BinaryAccuracy(**decided),
        "precision": tm.BinaryPrecision(**decided),
        "recall": tm.BinaryRecall(**decided),
        "f1": tm.BinaryF1Score(**decided),
        "specificity": tm.BinarySpecificity(**decided),
        "kappa": tm.BinaryCohenKappa(**decided),
        "mcc": own.BinaryMatthewsCorrCoef(**decided),
        "auroc": own.BinaryAUROC(**scored),
        "ap": own.BinaryAveragePrecision(**scored),
    }
    groups = [["acc", "precision", "recall", "f1", "specificity"], ["kappa", "mcc"], ["auroc", "ap"]]
    return Preset(metrics, groups, {"task": "binary", **decided}, ["acc", "f1", "auroc"])


def multiclass_metrics(
    num_classes: int | None = None,
    ignore_index: int | None = None,
    top_k: int | None = None,
    curves: bool = False,
    soft_targets: bool = False,
    from_logits: bool = True,
) -> Preset:
    """Make the metrics of a multiclass classification.

    `preds` are scores of shape (N, C, ...) or classes of shape (N, ...), `target` classes of shape (N, ...). `acc`
    counts samples (micro); `balanced_acc` is the mean recall of the classes that occur; `precision`, `recall`, `f1`
    and `specificity` are means over the classes (macro); `kappa` (Cohen) and `mcc` (Matthews).

    Args:
        num_classes: C, the number of classes, at least 2. Without it, only `acc` and `acc_top<k>` are computed.
        ignore_index: A class of `target` whose rows do not count.
        top_k: Adds `acc_top<k>`, the share of samples whose class is among the k highest scores.
        curves: Adds `auroc` and `ap` (one class against the rest, macro, exact): `preds` must be probabilities, and are
            all kept until the end of the epoch.
        soft_targets: Whether `target` may also contain probabilities of the classes, floats of shape (N, C, ...) that
            sum to 1, as from mixup, label smoothing and distillation; batches with classes may be mixed in. Adds
            `cross_entropy`, `brier` (the sum of squares over the classes, 0 to 2) and `expected_acc` (the target's
            probability of the predicted class), each the mean over the samples, computed with the probabilities
            themselves. All other metrics use the likeliest class, the first of several.
        from_logits: Whether `preds` are logits when soft targets are compared; otherwise they are probabilities.

    Examples:
        >>> import torch
        >>> metrics = multiclass_metrics(3)
        >>> metrics.update(torch.tensor([0, 1, 2, 2]), torch.tensor([0, 1, 1, 2]))
        >>> {name: round(value.item(), 2) for name, value in metrics.compute().items() if name in ("acc", "recall")}
        {'acc': 0.75, 'recall': 0.83}
    """
    common: dict[str, Any] = {"num_classes": num_classes, "ignore_index": ignore_index}
    metrics = {"acc": _share_in_top_k(1, common)} if num_classes is None else _multiclass_metrics(common)
    if top_k is not None:
        check_count("top_k", top_k)
        if num_classes is not None and top_k > num_classes:
            raise ValueError(f"top_k must be at most num_classes ({num_classes}), got {top_k}.")
        metrics[f"acc_top{top_k}"] = _share_in_top_k(top_k, common)
    if curves:
        if num_classes is None:
            raise ValueError("curves=True needs num_classes, the number of classes.")
        metrics["auroc"] = own.MulticlassAUROC(average="macro", **common)
        metrics["ap"] = own.MulticlassAveragePrecision(average="macro", **common)
    if soft_targets:
        if num_classes is None:
            raise ValueError("soft_targets=True needs num_classes, the number of classes.")
        if curves and from_logits:
            raise ValueError(
                "curves=True needs probabilities: return softmax of the logits, and give from_logits=False."
            )
        metrics |= {name: own.SoftTargetScore(name, from_logits, ignore_index) for name in own.SOFT_TARGET_VALUES}
    spec: dict[str, Any] = {"task": "multiclass", **common, "top_k": top_k, "curves": curves}
    spec |= {"soft_targets": True, "from_logits": from_logits} if soft_targets else {}
    groups = [["balanced_acc", "precision", "recall", "f1", "specificity"], ["kappa", "mcc"], ["auroc", "ap"]]
    make = SoftTargetPreset if soft_targets else Preset
    return make(metrics, [*groups, own.SOFT_TARGET_VALUES], spec, ["acc", "f1", "auroc", f"acc_top{top_k}"])


def _share_in_top_k(top_k: int, common: dict[str, Any]) -> Metric:
    return own.TopKAccuracy(average="micro", top_k=top_k, validate_args=False, **common)


def _multiclass_metrics(common: dict[str, Any]) -> dict[str, Metric]:
    check_count("num_classes", common["num_classes"], minimum=2)
    macro = {**common, "average": "macro"}
    return {
        "acc": tm.MulticlassAccuracy(average="micro", **common),
        "balanced_acc": BalancedAccuracy(**macro),
        "precision": tm.MulticlassPrecision(**macro),
        "recall": tm.MulticlassRecall(**macro),
        "f1": tm.MulticlassF1Score(**macro),
        "specificity": tm.MulticlassSpecificity(**macro),
        "kappa": tm.MulticlassCohenKappa(**common),
        "mcc": own.MulticlassMatthewsCorrCoef(**common),
    }


def multilabel_metrics(num_labels: int, threshold: float = 0.5, ignore_index: int | None = None) -> Preset:
    """Make the metrics of a multilabel classification.

    `preds` are probabilities or 0/1 of shape (N, L), `target` 0/1 of the same shape. `acc` counts elements (micro);
    `exact_match` counts samples whose labels are all right; `precision`, `recall`, `f1`, `auroc` and `ap` (mAP) are
    means over the labels (macro).

    Args:
        num_labels: L, the number of labels, at least 2.
        threshold: A probability above it counts as 1.
        ignore_index: A value of `target` whose elements do not count.

    Examples:
        >>> import torch
        >>> metrics = multilabel_metrics(2)
        >>> metrics.update(torch.tensor([[0.9, 0.1], [0.7, 0.8]]), torch.tensor([[1, 0], [0, 1]]))
        >>> metrics.compute()["exact_match"]
        tensor(0.5000)
    """
    check_count("num_labels", num_labels, minimum=2)
    common: dict[str, Any] = {"num_labels": num_labels, "ignore_index": ignore_index}
    decided = {**common, "threshold": threshold}
    macro = {**decided, "average": "macro"}
    metrics = {
        "acc": tm.MultilabelAccuracy(average="micro", **decided),
        "precision": tm.MultilabelPrecision(**macro),
        "recall": tm.MultilabelRecall(**macro),
        "f1": tm.MultilabelF1Score(**macro),
        "exact_match": tm.MultilabelExactMatch(**decided),
        "auroc": own.MultilabelAUROC(average="macro", **common),
        "ap": own.MultilabelAveragePrecision(average="macro", **common),
    }
    groups = [["acc", "precision", "recall", "f1"], ["auroc", "ap"]]
    return Preset(metrics, groups, {"task": "multilabel", **decided}, ["acc", "f1", "ap"])


def regression_metrics(num_outputs: int = 1) -> Preset:
    """Make the metrics of a regression.

    `preds` and `target` have the shape (N,) or, with several outputs, (N, K). `mae`, `mse`, `rmse` and `r2`; with
    several outputs each is the mean over them (scikit-learn's `uniform_average`), and `MetricsMonitor` also logs one
    value for each output.

    Args:
        num_outputs: K, the number of outputs.

    Examples:
        >>> import torch
        >>> metrics = regression_metrics()
        >>> metrics.update(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
        >>> metrics.compute()["mse"]
        tensor(2.)
    """
    check_count("num_outputs", num_outputs)
    metrics = {
        "mae": tmr.MeanAbsoluteError(num_outputs=num_outputs),
        "mse": tmr.MeanSquaredError(num_outputs=num_outputs),
        "rmse": tmr.MeanSquaredError(squared=False, num_outputs=num_outputs),
        "r2": own.R2Score(multioutput="raw_values" if num_outputs > 1 else "uniform_average"),
    }
    spec = {"task": "regression", "num_outputs": num_outputs}
    return Preset(metrics, [["mse", "rmse"]], spec, ["mae", "rmse", "r2"])


def retrieval_metrics(top_k: int | None = None, ignore_index: int | None = None) -> Preset:
    """Make the metrics of a ranking: how high the relevant documents of each query are ranked.

    `preds` are scores, `target` is 0/1 and `indexes` is the query of each row, all of shape (N,). `map` (mean average
    precision), `mrr` (mean reciprocal rank), `ndcg`, `precision`, `recall` and `hit_rate`, each the mean over the
    queries; a query without a relevant document counts as 0.

    Args:
        top_k: Only the first `top_k` documents of a query count; None uses all.
        ignore_index: A value of `target` whose rows do not count.

    Examples:
        >>> import torch
        >>> metrics = retrieval_metrics()
        >>> query = torch.tensor([0, 0, 1, 1])
        >>> metrics.update(torch.tensor([0.9, 0.1, 0.2, 0.8]), torch.tensor([1, 0, 1, 0]), indexes=query)
        >>> metrics.compute()["map"]
        tensor(0.7500)
    """
    if top_k is not None:
        check_count("top_k", top_k)
    common: dict[str, Any] = {"top_k": top_k, "ignore_index": ignore_index}
    metrics = {
        "map": tmir.RetrievalMAP(**common),
        "mrr": tmir.RetrievalMRR(**common),
        "ndcg": tmir.RetrievalNormalizedDCG(**common),
        "precision": tmir.RetrievalPrecision(**common),
        "recall": tmir.RetrievalRecall(**common),
        "hit_rate": tmir.RetrievalHitRate(**common),
    }
    return Preset(metrics, [], {"task": "retrieval", **common}, ["map", "ndcg"])


def segmentation_metrics(num_classes: int, ignore_index: int | None = None) -> Preset:
    """Make the metrics of a semantic segmentation, over all pixels of the dataset.

    `preds` are scores of shape (N, C, H, W) or classes of shape (N, H, W), `target` classes of shape (N, H, W).
    `pixel_acc` counts pixels; `mean_acc` (recall of the classes that occur), `miou` and `dice` (F1) are means over the
    classes; `fw_iou` is the intersection over union, weighted by the frequency of the classes. A class that occurs
    neither in the targets nor in the predictions is in no mean, and its own value is NaN.

    Args:
        num_classes: C, the number of classes, at least 2.
        ignore_index: A class of `target`, such as 255, whose pixels do not count, whatever is predicted there. If it is
            one of the C classes, that class is in no mean.

    Examples:
        >>> import torch
        >>> metrics = segmentation_metrics(2)
        >>> metrics.update(torch.tensor([[[0, 1], [1, 1]]]), torch.tensor([[[0, 0], [1, 1]]]))
        >>> round(metrics.compute()["miou"].item(), 4)
        0.5833
    """
    check_count("num_classes", num_classes, minimum=2)
    common: dict[str, Any] = {"num_classes": num_classes, "ignore_index": ignore_index}
    metrics = {
        "pixel_acc": own.RegionOverlap(measure="recall", average="frequency", **common),
        "mean_acc": own.RegionOverlap(measure="recall", **common),
        "miou": own.RegionOverlap(measure="iou", **common),
        "dice": own.RegionOverlap(measure="dice", **common),
        "fw_iou": own.RegionOverlap(measure="iou", average="frequency", **common),
    }
    groups = [["pixel_acc", "mean_acc", "miou", "dice", "fw_iou"]]
    return Preset(metrics, groups, {"task": "segmentation", **common}, ["pixel_acc", "miou"])


def detection_metrics(
    num_classes: int, box_format: Literal["xyxy", "xywh", "cxcywh"] = "xyxy", iou_type: Literal["bbox", "segm"] = "bbox"
) -> Preset:
    """Make the metrics of object detection as COCO defines them, exact over all images of the dataset.

    `preds` is a list with one dict per image: `boxes` (M, 4) in pixels, `scores` (M,) and `labels` (M,); `target` has
    the same keys without scores, and optionally `iscrowd` (M,) and `area` (M,); other keys are ignored. `map` is the
    mean over the classes and over the thresholds 0.5 to 0.95 of the intersection over union; `map_50` and `map_75` use
    one threshold; `mar_1`, `mar_10` and `mar_100` are mean recalls with so many detections per image; `map_small`,
    `map_medium`, `map_large` and the same of `mar` are of objects below 32 x 32 pixels, between, and from 96 x 96 on.
    With class names, `map` and `mar_100` are also computed per class. A value without objects is NaN.

    It needs the extra `detection`: torchvision, and pycocotools or faster-coco-eval.

    Args:
        num_classes: C: labels are 0 to C - 1; the background counts if it has a label, as in torchvision.
        box_format: The meaning of the four numbers of a box: corners, corner and size, or center and size.
        iou_type: `"segm"` compares `masks` (M, H, W) of bool or uint8 in place of boxes.

    Raises:
        ModuleNotFoundError: If a package is missing; the message names the extra.
    """
    check_count("num_classes", num_classes)
    check_choice("box_format", box_format, ("xyxy", "xywh", "cxcywh"))
    check_choice("iou_type", iou_type, ("bbox", "segm"))
    import_extra("torchvision", "detection", "detection_metrics needs torchvision")
    backend = "faster_coco_eval" if find_spec("faster_coco_eval") else "pycocotools"
    import_extra(backend, "detection", "detection_metrics needs pycocotools or faster-coco-eval")
    from lightning_tricks.metrics.core.detection import DetectionPrecision

    given: dict[str, Any] = {"num_classes": num_classes, "box_format": box_format, "iou_type": iou_type}
    metric = DetectionPrecision(backend=backend, **given)
    return Preset({"map": metric}, [], {"task": "detection", **given}, ["map", "map_50"])


def calibration_metrics(num_classes: int, ignore_index: int | None = None) -> Preset:
    """Make the metrics of the calibration of probabilities of a classification.

    `preds` are probabilities of shape (N, C), `target` classes of shape (N,). `ece` and `adaptive_ece` (expected
    calibration error of the predicted class, over 15 bins of equal width, and of equally many rows), `classwise_ece`
    (of the probability of each class, mean), `brier` (0 to 2; with two classes 0 to 1), `nll` (nats), and `aurc` (area
    under the risk-coverage curve). With `class_names`, `classwise_ece`, `brier` and `nll` are also computed per class.
    All probabilities are kept until the end of the epoch. A `RunReport` shows the reliability diagram.

    Args:
        num_classes: C, the number of classes, at least 2.
        ignore_index: A class of `target` whose rows do not count.

    Examples:
        >>> import torch
        >>> metrics = calibration_metrics(2)
        >>> metrics.update(torch.tensor([[0.25, 0.75], [0.25, 0.75]]), torch.tensor([1, 0]))
        >>> metrics.compute()["ece"].item()
        0.25
    """
    common: dict[str, Any] = {"num_classes": check_count("num_classes", num_classes, minimum=2)}
    common["ignore_index"] = ignore_index
    metrics: dict[str, Metric] = {
        "ece": own.CalibrationError(**common),
        "adaptive_ece": own.AdaptiveCalibrationError(**common),
        "classwise_ece": own.ClasswiseCalibrationError(average="macro", **common),
        "brier": own.BrierScore(average="macro", **common),
        "nll": own.NegativeLogLikelihood(average="weighted", **common),
        "aurc": own.RiskCoverageArea(**common),
    }
    return Preset(metrics, [list(metrics)], {"task": "calibration", **common}, ["ece", "nll", "brier"])


def ood_metrics() -> Preset:
    """Make the metrics of scores that detect out-of-distribution data, such as the uncertainty of an ensemble.

    `preds` are scores of any range, of shape (N,), high for out-of-distribution samples; `target` is 1 for these and 0
    for in-distribution samples. `auroc`; `aupr`, the average precision of out-of-distribution samples; `fpr95`, the
    share of in-distribution samples above the threshold that finds 95 % of the others. All are exact, and NaN if only
    one kind occurs.

    Examples:
        >>> import torch
        >>> metrics = ood_metrics()
        >>> metrics.update(torch.tensor([0.1, 2.5, 0.7, 0.3]), torch.tensor([0, 1, 1, 0]))
        >>> metrics.compute()["fpr95"].item()
        0.0
    """
    metrics: dict[str, Metric] = {
        "auroc": own.OODAUROC(),
        "aupr": own.OODAveragePrecision(),
        "fpr95": own.FalsePositiveRate95(),
    }
    return Preset(metrics, [list(metrics)], {"task": "ood"}, list(metrics))


PRESETS: dict[str, Callable[..., Preset]] = {
    "binary": binary_metrics,
    "calibration": calibration_metrics,
    "multiclass": multiclass_metrics,
    "multilabel": multilabel_metrics,
    "ood": ood_metrics,
    "regression": regression_metrics,
    "retrieval": retrieval_metrics,
    "segmentation": segmentation_metrics,
    "detection": detection_metrics,
}


def preset(task: str, **arguments: Any) -> Preset:
    """Make a preset from plain values, as in YAML: `{"task": "multiclass", "num_classes": 10}`.

    Raises:
        TypeError: If an argument is unknown or missing.
        ValueError: If the task is unknown.
    """
    make = PRESETS[check_choice("task", task, PRESETS)]
    check_names(f"The preset {task!r}", arguments, inspect.signature(make).parameters)
    try:
        inspect.signature(make).bind(**arguments)
    except TypeError as error:
        known = ", ".join(inspect.signature(make).parameters)
        raise TypeError(f"The preset {task!r} takes {known}: {error}.") from error
    return make(**arguments)
