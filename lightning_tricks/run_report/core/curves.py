"""Curves for pictures: which keys belong into one picture, means of noisy values, fewer points."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from lightning_tricks._shared.report_parts import ClassValues
from lightning_tricks.run_report.core.record import Point, RunRecord

_STAGES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "validate", "eval", "evaluation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_LOWER_IS_BETTER = re.compile(
    r"(^|[^a-z])(loss|error|err|mae|mse|rmse|mape|perplexity|ppl|ece|nll|brier|aurc|fpr|wer|cer|fid)($|[^a-z])"
)
_HIGHER_IS_BETTER = re.compile(
    r"(^|[^a-z])(acc|accuracy|f1|auc|auroc|aupr|precision|recall|iou|miou|dice|r2|map|ap|kappa|mcc|bleu|psnr|ssim|top\d"
    r"|rew|reward|return)($|[^a-z])"
)
# `loss_scale` and `kl_loss_weight` are not losses, `std_loss` is: the last word of a name tells the kind of value
_SETTING = r"(scal(e|er|ing)|weight|coef(f|ficient)?|factor|lambda|beta|temperature|threshold|ratio|count|std|lr)s?"
_NO_METRIC = re.compile(rf"[ .-]{_SETTING}( \d+)?($|/)|loss[ .-]{_SETTING}[ .-]")
_WEIGHT = re.compile(r"(^|[^a-z])(weight|coef(f|ficient)?|factor|lambda|beta|anneal(ing)?)s?( \d+)?($|/)")
NOISY = 60  # points from which a mean is drawn
LEARNING_RATE, GRADIENTS, COST, DEVICES = "learning rate", "gradients", "cost", "devices"
_DEVICE = re.compile(r"^(gpu\d+|host)/")
_UNITS = {"_gib": "GiB", "temperature": "°C", "_w": "W", "_mhz": "MHz"}
_UNITS |= dict.fromkeys(("utilization", "data_wait", "throttled", "fan"), "%")


@dataclass(frozen=True)
class KeyParts:
    """The parts of a logged key.

    Attributes:
        name: The name of the value, without its stage, such as "loss".
        stage: "train", "val", "test" or "".
        kind: "step", "epoch" or "": the suffix that Lightning adds to what is logged twice.
        loader: The number of the dataloader, or "".
        series: The key without its kind; the values of one series at steps and epochs are one curve to the reader.
    """

    name: str
    stage: str
    kind: str
    loader: str = ""
    series: str = ""

    @property
    def quantity(self) -> str:
        """What the name means, however it is spelled: "valAcc", "val/acc" and "val_accuracy" are one quantity."""
        words = re.sub(r"(?<=[a-z])(?=[A-Z])|[ ._-]+", " ", self.name).lower()
        return re.sub(r"\bacc\b", "accuracy", words)


def split_key(key: str) -> KeyParts:
    """Return the parts of a logged key.

    Examples:
        >>> split_key("val/loss")
        KeyParts(name='loss', stage='val', kind='', loader='', series='val/loss')
        >>> split_key("train_acc_step").kind, split_key("loss/val/dataloader_idx_1").loader
        ('step', '1')
    """
    base, _, loader = key.partition("/dataloader_idx_")
    kind = next((kind for kind in ("step", "epoch") if base.endswith(f"_{kind}")), "")
    base = base.removesuffix(f"_{kind}") if kind else base
    words = re.split(r"([/_. -]|(?<=[a-z])(?=[A-Z]))", base)
    stage = ""
    for place in dict.fromkeys((0, len(words) - 1, *range(0, len(words), 2))):
        if words[place].lower() in _STAGES and len(words) > 1:
            stage = _STAGES[words[place].lower()]
            del words[max(place - 1, 0) : place + 1 + (place == 0)]
            break
    return KeyParts("".join(words), stage, kind, loader, f"{base} {loader}".rstrip())


def sign_of_better(name: str) -> int:
    """Return 1 for a metric that should be high, -1 for one that should be low, 0 where that is unknown."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", name).lower()
    if _NO_METRIC.search(name):
        return 0
    return -1 if _LOWER_IS_BETTER.search(name) else int(bool(_HIGHER_IS_BETTER.search(name)))


def is_weight(key: str) -> bool:
    """Return whether a key is that of the weight of a part of the loss, such as "kl_weight"."""
    return bool(_WEIGHT.search(key.lower().replace("_", " ")))


def topic_of(key: str) -> str:
    """Return the topic of a key that is not a metric, or ""."""
    if key.startswith(("learning_rate/", "lr-")) or split_key(key).name.lower() in ("learning_rate", "lr"):
        return LEARNING_RATE
    if key.startswith("grad_norm/"):
        return GRADIENTS
    if key.startswith(("flops/", "params/")):
        return COST
    return DEVICES if _DEVICE.match(key) else ""


def unit_of(key: str) -> str:
    """Return the unit of what `DeviceMonitor` logs under a key, or "".

    Examples:
        >>> unit_of("gpu0/val_power_w"), unit_of("host/ram_used_gib"), unit_of("flops/mfu")
        ('W', 'GiB', '')
    """
    return next((unit for end, unit in _UNITS.items() if topic_of(key) == DEVICES and key.endswith(end)), "")


def keys_of_topic(record: RunRecord, topic: str) -> list[str]:
    """Return the keys of a topic that have at least two points."""
    return [key for key in record.logged_keys() if topic_of(key) == topic and len(record.curve(key)) > 1]


def label_of_rate(key: str) -> str:
    """Return what the parameter group is called that a key of `RunReport` is the learning rate of, or else the key.

    Examples:
        >>> [label_of_rate(key) for key in ("learning_rate/head", "learning_rate/0.1", "learning_rate/1", "lr-Adam")]
        ["group 'head'", 'group 1 of optimizer 0', 'optimizer 1', 'lr-Adam']
    """
    name = key.removeprefix("learning_rate/")
    number, _, place = name.partition(".")
    if name == key or not (number + place).isdecimal():
        return key if name == key else f"group {name!r}"
    return f"group {place} of optimizer {number}" if place else f"optimizer {number}"


def learning_rates(record: RunRecord) -> list[list[Point]]:
    """Return the curves of the learning rates."""
    return [finite(record.curve(key)) for key in keys_of_topic(record, LEARNING_RATE)]


def metric_pictures(record: RunRecord) -> dict[str, list[tuple[KeyParts, str]]]:
    """Return the pictures of losses and metrics, losses first: one for each quantity, however its keys are spelled.

    Values of single classes are left out.

    Returns:
        Name -> the parts and the key of each curve.
    """
    of_classes = {key for part in record.parts_of(ClassValues) for key in part.keys}
    pictures: dict[str, list[tuple[KeyParts, str]]] = {}
    for key in record.logged_keys():
        if not topic_of(key) and key not in of_classes:
            parts = split_key(key)
            pictures.setdefault(parts.quantity, []).append((parts, key))
    stages = ["train", "val", "test", ""]
    for curves in pictures.values():
        curves.sort(key=lambda curve: (stages.index(curve[0].stage), curve[0].series, curve[0].kind))
    order = {"loss": 0, "accuracy": 1}
    quantities = sorted(pictures, key=lambda quantity: (order.get(quantity, 2), "loss" not in quantity))
    return {pictures[quantity][0][0].name: pictures[quantity] for quantity in quantities}


def curve_labels(curves: Sequence[tuple[KeyParts, str]]) -> list[str]:
    """Return what the legend of a picture says of each curve: stage, loader and kind, or the key where these agree."""
    labels = []
    for parts, _ in curves:
        words = parts.stage, parts.loader and f"loader {parts.loader}", parts.kind and f"({parts.kind})"
        labels.append(" ".join(word for word in words if word))
    if len(curves) == 1:
        return labels if curves[0][0].stage or curves[0][0].loader else [""]
    pairs = zip(labels, curves, strict=True)
    return [label if label and labels.count(label) == 1 else key for label, (_, key) in pairs]


def metric_curves(record: RunRecord) -> list[tuple[KeyParts, str]]:
    """Return the parts and the keys of all losses and metrics, in the order of the pictures."""
    return [curve for curves in metric_pictures(record).values() for curve in curves]


def best_point(points: Sequence[Point], sign: int) -> Point | None:
    """Return the first of the best points, or None if there is none, or if it is unknown which values are better."""
    finite = [point for point in points if math.isfinite(point.value)]
    return max(finite, key=lambda point: sign * point.value) if finite and sign else None


def smooth(points: Sequence[Point]) -> list[Point]:
    """Return the running mean of a curve over a twenty-fifth of it, without values that are not finite."""
    finite_points = finite(points)
    sums = [0.0, *accumulate(point.value for point in finite_points)]
    smooth, half = [], max(5, len(points) // 25) // 2
    for place, point in enumerate(finite_points):
        first, last = max(0, place - half), min(len(finite_points), place + half + 1)
        mean = (sums[last] - sums[first]) / (last - first)
        smooth.append(Point(point.step, point.epoch, mean, mean, mean))
    return smooth


def mean_of_noisy(points: Sequence[Point]) -> Sequence[Point]:
    """Return the running mean of a curve of many points, or else the curve."""
    return smooth(points) if len(points) > NOISY else points


def equal_parts(points: Sequence[Point], count: int) -> list[Sequence[Point]]:
    """Return a curve in `count` parts of neighbours, of the same length but for one point."""
    return [points[place * len(points) // count : (place + 1) * len(points) // count] for place in range(count)]


def thin_points(points: Sequence[Point], most: int = 1000) -> list[Point]:
    """Return at most about `most` points: of each group of neighbours the lowest and the highest, in their order."""
    if len(points) <= most:
        return list(points)
    chosen = []
    for group in equal_parts(points, most // 2):
        worst = [place for place, point in enumerate(group) if not math.isfinite(point.value)][:1]
        places = range(len(group))
        low = min(places, key=lambda place: group[place].low)
        high = max(places, key=lambda place: group[place].high)
        chosen += [group[place] for place in sorted({low, high, *worst})]
    return chosen


def finite(points: Sequence[Point]) -> list[Point]:
    """Return the points whose value is finite."""
    return [point for point in points if math.isfinite(point.value)]


def losses(record: RunRecord, stage: str) -> list[tuple[str, list[Point]]]:
    """Return the keys and the curves of the losses of a stage; of one in steps and epochs that of the steps."""
    found: dict[str, tuple[KeyParts, str]] = {}
    for parts, key in metric_curves(record):
        is_loss = "loss" in parts.name.lower() and sign_of_better(parts.name) < 0
        if is_loss and parts.stage == stage and (parts.series not in found or parts.kind == "step"):
            found[parts.series] = parts, key
    return [(key, record.curve(key)) for _, key in found.values()]


def watched(record: RunRecord) -> list[tuple[str, int, list[Point]]]:
    """Return the values of validation that tell how good a model is: the loss, or else the first such metric.

    Returns:
        Key, sign of better, and curve of each.
    """
    of_validation = [
        (key, sign_of_better(parts.name), record.curve(key))
        for parts, key in metric_curves(record)
        if parts.stage == "val" and parts.kind != "step" and sign_of_better(parts.name)
    ]
    return of_validation[:1]
