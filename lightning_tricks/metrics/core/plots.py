"""Plots of metrics: confusion matrix, curves, bars by class, values over the run; without matplotlib's global state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_tricks._shared.checks import did_you_mean
from lightning_tricks._shared.extras import import_extra
from lightning_tricks.metrics.core.counts import pr_curve, reliability_curve, roc_curve
from lightning_tricks.metrics.core.history import EvaluationData
from lightning_tricks.metrics.core.metric_table import per_class_names

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = {"train": "C0", "val": "C1", "test": "C2"}
_MAX_CURVES = 20
_MAX_NUMBERS = 20  # classes up to which the cells show their numbers


def make_figures(data: EvaluationData, class_names: Sequence[str] = ()) -> dict[str, Figure]:
    """Make the plots for which there is data: "confusion_matrix", "curves" and, with several classes, "classes"."""
    record = data.record
    title = f"{record.prefix}, epoch {record.epoch}, step {record.step}"
    figures = {}
    if data.confusion is not None:
        figures["confusion_matrix"] = confusion_figure(data.confusion, class_names, title)
    if data.scores is not None:
        figures["curves"] = curves_figure(data.scores, data.kind, class_names, title)
    by_class = record.of_classes(class_names)
    if by_class and data.kind in ("multiclass", "multilabel"):
        figures["classes"] = classes_figure(by_class, title)
    return figures


def new_figure(width: float, height: float) -> Figure:
    """Make a figure without a window and outside the global state of matplotlib.

    Raises:
        ModuleNotFoundError: If matplotlib is missing; the message names the extra.
    """
    backend = import_extra("matplotlib.backends.backend_agg", "reports", "Plots need matplotlib")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=100)
    backend.FigureCanvasAgg(figure)
    return figure


def as_array(figure: Figure) -> npt.NDArray[np.uint8]:
    """Render a figure to an array of shape (H, W, 3)."""
    canvas: Any = figure.canvas
    canvas.draw()
    return np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[..., :3])


def confusion_figure(matrix: Tensor, class_names: Sequence[str] = (), title: str = "") -> Figure:
    """Plot a confusion matrix twice: counts, and shares of each class of the targets.

    Args:
        matrix: Counts of shape (C, C), rows are targets; or (L, 2, 2), for which the shares of each label are plotted.
        class_names: Names of the classes.
        title: The title of the figure.
    """
    if matrix.ndim == 3:
        return _label_matrix_figure(matrix, class_names, title)
    counts = matrix.cpu().double()
    shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
    classes = len(counts)
    side = 3 + min(classes, 30) * 0.28
    figure = new_figure(2 * side + 0.8, side)
    left, right = figure.subplots(1, 2)
    for axes, values, heading, form in (
        (left, counts, "counts", "{:.0f}"),
        (right, shares, "share of the target's class", "{:.2f}"),
    ):
        _draw_cells(axes, values, form)
        _set_class_ticks(axes, classes, class_names)
        axes.set(xlabel="prediction", ylabel="target", title=heading)
    figure.suptitle(title)
    return figure


def _label_matrix_figure(matrix: Tensor, class_names: Sequence[str], title: str) -> Figure:
    counts = matrix.cpu().double()
    values = torch.stack([counts[:, 1, 1], counts[:, 1, 0], counts[:, 0, 1], counts[:, 0, 0]], 1)
    figure = new_figure(6, 1.5 + 0.3 * len(counts))
    axes = figure.subplots()
    _draw_cells(axes, values / values.sum(1, keepdim=True).clamp(min=1), "{:.0f}", shown=values)
    names = list(class_names) or [str(number) for number in range(len(counts))]
    axes.set_yticks(range(len(counts)), names)
    axes.set_xticks(range(4), ["true positive", "false negative", "false positive", "true negative"])
    figure.suptitle(title)
    return figure


def _draw_cells(axes: Any, values: Tensor, form: str, shown: Tensor | None = None) -> None:
    highest = float(values.max()) or 1.0
    axes.imshow(values.numpy(), cmap="Blues", vmin=0, vmax=highest, aspect="auto" if shown is not None else "equal")
    if max(values.shape) <= _MAX_NUMBERS:
        for row, column in np.ndindex(*values.shape):
            value = float((values if shown is None else shown)[row, column])
            color = "white" if float(values[row, column]) > highest / 2 else "black"
            if value:
                axes.text(column, row, form.format(value), ha="center", va="center", color=color, fontsize=8)


def _set_class_ticks(axes: Any, classes: int, class_names: Sequence[str]) -> None:
    if class_names and classes <= 2 * _MAX_NUMBERS:
        axes.set_xticks(range(classes), class_names, rotation=90 if max(map(len, class_names)) > 2 else 0)
        axes.set_yticks(range(classes), class_names)
    elif classes <= _MAX_NUMBERS:
        axes.set_xticks(range(classes))
        axes.set_yticks(range(classes))


def curves_figure(histograms: Tensor, kind: str, class_names: Sequence[str] = (), title: str = "") -> Figure:
    """Plot ROC, precision-recall and reliability curves of scores.

    Args:
        histograms: Counts of shape (K, 2, B), of `count_scores_`.
        kind: "binary", "multiclass" (whose last histogram is that of the highest scores) or "multilabel".
        class_names: Names of the classes.
        title: The title of the figure.
    """
    histograms = histograms.cpu()
    top_scores = histograms[-1] if kind == "multiclass" else histograms.sum(0)
    each = histograms[:-1] if kind == "multiclass" else histograms
    figure = new_figure(13, 4.4)
    roc, pr, reliability = figure.subplots(1, 3)
    for number, histogram in enumerate(each[:_MAX_CURVES]):
        name = "" if kind == "binary" else class_names[number] if class_names else str(number)
        if histogram[0].sum() and histogram[1].sum():
            roc.plot(*_numpy(roc_curve(histogram)), label=name, linewidth=1)
            pr.plot(*_numpy(pr_curve(histogram)), label=name, linewidth=1)
    roc.plot([0, 1], [0, 1], color="grey", linewidth=0.5)
    roc.set(xlabel="false positive rate", ylabel="true positive rate", title="ROC", xlim=(0, 1), ylim=(0, 1.02))
    pr.set(xlabel="recall", ylabel="precision", title="precision and recall", xlim=(0, 1), ylim=(0, 1.02))
    if kind != "binary":
        pr.legend(fontsize=7, ncols=2, loc="lower left")
    confidence, positives, share = _numpy(reliability_curve(top_scores))
    reliability.bar(confidence, share, width=0.05, color="lightgrey", label="share of the samples")
    label = "accuracy" if kind == "multiclass" else "share of positives"
    reliability.plot(confidence, positives, marker=".", label=label)
    reliability.plot([0, 1], [0, 1], color="grey", linewidth=0.5)
    reliability.set(xlabel="probability", title="reliability", xlim=(0, 1), ylim=(0, 1.02))
    reliability.legend(fontsize=8, loc="upper left")
    figure.suptitle(title)
    return figure


def classes_figure(values: Mapping[str, Mapping[str, float]], title: str = "") -> Figure:
    """Plot bars for each class.

    Args:
        values: Metric -> class -> value.
        title: The title of the figure.
    """
    classes = list(dict.fromkeys(name for of_metric in values.values() for name in of_metric))
    figure = new_figure(3 + min(60, 0.14 * len(classes) * len(values)), 4)
    axes = figure.subplots()
    width = 0.8 / len(values)
    for number, (metric, of_classes) in enumerate(values.items()):
        heights = [of_classes.get(name, 0.0) for name in classes]
        axes.bar([place + number * width for place in range(len(classes))], heights, width, label=metric)
    middle = [place + 0.4 - width / 2 for place in range(len(classes))]
    axes.set_xticks(middle, classes, rotation=90 if max(map(len, classes)) > 3 else 0)
    axes.set_ylim(0, 1.02)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle(title)
    return figure


def history_figure(
    rows: Sequence[Mapping[str, Any]], metrics: Sequence[str] | None = None, class_names: Sequence[str] = ()
) -> Figure:
    """Plot values over the optimizer steps, one plot for each metric with a line for each stage.

    Args:
        rows: The result of `History.rows()`.
        metrics: The metrics to plot; None for all but those of single classes.
        class_names: Names of the classes.

    Raises:
        ValueError: If a metric has no values.
    """
    names = dict.fromkeys(row["metric"] for row in rows)
    per_class = per_class_names(names, class_names)
    wanted = [name for name in names if name not in per_class] if metrics is None else list(metrics)
    for name in wanted:
        if name not in names:
            raise ValueError(f"There are no values of {name!r}, only of {', '.join(names)}.{did_you_mean(name, names)}")
    rows = [row for row in rows if row["metric"] in wanted]
    lines: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for row in rows:
        stage = row["stage"] if row["loader"] is None else f"{row['stage']}/{row['loader']}"
        lines.setdefault(row["metric"], {}).setdefault(stage, []).append((row["step"], row["value"]))
    columns = max(1, min(4, len(lines)))
    height = max(1, -(-len(lines) // columns))
    figure = new_figure(3.6 * columns, 2.8 * height)
    plots = np.atleast_1d(figure.subplots(height, columns)).ravel()
    for axes, (metric, stages) in zip(plots, lines.items(), strict=False):
        for stage, points in stages.items():
            color = _COLORS.get(stage)  # the same in each plot
            axes.plot(*zip(*points, strict=True), marker=".", label=stage, color=color)
        axes.set(title=metric, xlabel="step")
        axes.legend(fontsize=8)
    for axes in plots[len(lines) :]:
        axes.set_axis_off()
    return figure


def _numpy(tensors: Sequence[Tensor]) -> list[npt.NDArray[Any]]:
    return [tensor.numpy() for tensor in tensors]
