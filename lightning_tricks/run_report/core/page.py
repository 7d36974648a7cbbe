"""The page of one run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

from lightning_tricks._shared import report_parts
from lightning_tricks._shared.text import format_number, format_percent
from lightning_tricks.run_report.core import curves
from lightning_tricks.run_report.core.comparison_page import differing_settings, values_of
from lightning_tricks.run_report.core.findings import find_all
from lightning_tricks.run_report.core.record import RunRecord
from lightning_tricks.run_report.core.rendering import render
from lightning_tricks.run_report.core.svg import Figure, Line, line_chart, matrix_chart, reliability_chart

_COLORS = {"train": 0, "val": 1, "test": 2, "": 6}
_LONGEST_TEXT = 300
_MOST_CURVES = 21  # of a picture
_MOST_MATRIX = 60  # classes that are drawn
_BASE64 = re.compile(r"iVBORw0KGgo[A-Za-z0-9+/]*={0,2}")  # of a PNG file
_MOST_PICTURE_BYTES = 200_000


def run_page(record: RunRecord, before: tuple[str, RunRecord] | None = None) -> str:
    """Return the HTML page of one run.

    Args:
        record: The run.
        before: The name and the record of another run to compare it with, or None.
    """
    resumes = [(resume.step, f"resumed at step {resume.step:,}") for resume in record.resumes[-50:]]
    pictures = [_metric_figure(record, name, drawn, resumes) for name, drawn in curves.metric_pictures(record).items()]
    rates = curves.keys_of_topic(record, curves.LEARNING_RATE)[:_MOST_CURVES]
    costs = curves.keys_of_topic(record, curves.COST)[:24]
    learning_rates = {curves.label_of_rate(key): key for key in rates}
    return render(
        "run.html",
        f"Report of {record.module or 'a run'}",
        run=record,
        is_running=record.status == "running",
        tiles=_tiles(record),
        findings=find_all(record),
        before=before and _compared(record, *before),
        curves=[shown for shown in pictures if shown is not None],
        values=_last_and_best(record),
        facts=record.parts_of(report_parts.Facts),
        throughput=throughput(record),
        rates_and_norms=[*_figures_of(record, "learning rate", learning_rates), *_gradient_figures(record)],
        classes=_classes(record),
        pictures=[(part, _png_files(part)) for part in record.parts_of(report_parts.Pictures)],
        cost_curves=[one for key in costs for one in _figures_of(record, key, {"": key})],
        devices=_device_uses(record),
        device_curves=_device_figures(record),
    )


def _metric_figure(
    record: RunRecord, name: str, drawn: Sequence[tuple[curves.KeyParts, str]], marks: Sequence[tuple[int, str]]
) -> Figure | None:
    """Return the curves of one metric, or None if there is nothing to draw."""
    lines: list[Line] = []
    styles: dict[str, tuple[int, int]] = {}  # series -> its colour and its dashes
    kinds = {(parts.series, parts.kind) for parts, _ in drawn}
    for (parts, key), label in zip(drawn[:_MOST_CURVES], curves.curve_labels(drawn), strict=False):
        points = record.curve(key)
        color, dash = styles.setdefault(parts.series, _style(parts.stage, list(styles.values())))
        is_step = parts.kind == "step" or (parts.kind == "" and _is_of_steps(record, key))
        if is_step and len(points) > curves.NOISY:
            lines.append(Line(label, points, color, is_faint=True))
            if (parts.series, "epoch") not in kinds:
                mean = f"{label}, running mean" if label else "running mean"
                lines.append(Line(mean, curves.smooth(points), color, dash=dash))
        else:
            best = curves.best_point(points, curves.sign_of_better(name)) if parts.stage in ("val", "test") else None
            lines.append(Line(label, points, color, dash=dash, best=best if len(points) > 1 else None))
    if not any(len(line.points) > 1 for line in lines):
        return None
    left_out = len(drawn) - _MOST_CURVES
    note = f"{left_out:,} more are in the table below." if left_out > 0 else ""
    return Figure(name, line_chart(lines, marks=marks, may_be_log="loss" in name.lower()), lines, note)


def _style(stage: str, taken: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return a colour, if possible that of the stage, and dashes that the other curves of a picture do not have."""
    used = [color for color, _ in taken]
    colors = (_COLORS[stage], 3, 4, 5, 6, 2, 1, 0)
    return next((color for color in colors if color not in used), len(taken) % 7), len(taken) % 4


def _is_of_steps(record: RunRecord, key: str) -> bool:
    return any(row.kind == "step" for row in record.rows if key in row.values)


def _figures_of(record: RunRecord, name: str, keys: Mapping[str, str]) -> list[Figure]:
    """Return the curves of keys, which are given by their labels, in one picture, or nothing if there are none."""
    labels = list(keys) if len(keys) > 1 else [""]
    labelled = enumerate(zip(labels, keys.values(), strict=False))
    lines = [Line(label, record.curve(key), place % 7, dash=place % 4) for place, (label, key) in labelled]
    units = (curves.unit_of(key) for key in keys.values())
    return [Figure(name, line_chart(lines, y_label=next(units)), lines)] if lines else []


def _device_figures(record: RunRecord) -> list[Figure]:
    """Return a picture of each quantity, with a curve of each GPU, in training and in validation."""
    quantities: dict[str, dict[str, str]] = {}
    for key in curves.keys_of_topic(record, curves.DEVICES):
        device, _, name = key.partition("/")
        quantity = f"{device.rstrip('0123456789')}/{name.removeprefix('val_')}"
        label = f"{device}, validation" if name.startswith("val_") else device
        quantities.setdefault(quantity, {})[label] = key
    shown = [dict(sorted(keys.items())) for keys in list(quantities.values())[:24]]
    names = [next(iter(keys.values())) if len(keys) == 1 else quantity for quantity, keys in quantities.items()]
    return [one for name, keys in zip(names, shown, strict=False) for one in _figures_of(record, name, keys)]


def _tiles(record: RunRecord) -> list[tuple[str, str]]:
    """Return what stands on top: how long the run was, and the best value of validation of the first three metrics."""
    rate = throughput(record).facts[:1] if record.samples_per_second is not None else ()
    tiles = {"steps": f"{record.step:,}", "epochs": f"{record.epochs:,}", **dict(rate)}
    quantities: dict[str, tuple[str, str]] = {}
    for parts, key in curves.metric_curves(record):
        is_of_epochs = parts.stage == "val" and parts.kind != "step" and parts.quantity not in quantities
        best = curves.best_point(record.curve(key), curves.sign_of_better(parts.name)) if is_of_epochs else None
        if best is not None:
            quantities[parts.quantity] = f"best {key}, epoch {best.epoch}", format_number(best.value)
    return [*tiles.items(), *list(quantities.values())[:3]]


def _compared(record: RunRecord, name: str, before: RunRecord) -> dict[str, Any]:
    """Return what differs from another run, in the metrics that both have and in the settings."""
    shared = {key for _, key in curves.metric_curves(before)}
    common = [(parts, key) for parts, key in curves.metric_curves(record) if key in shared and parts.kind != "step"]
    common.sort(key=lambda curve: curve[0].stage not in ("val", "test"))
    return {
        "name": name,
        "run": before,
        "metrics": values_of((before, record), [key for _, key in common]),
        "settings": [[text[:_LONGEST_TEXT] for text in row] for row in differing_settings(before, record)],
    }


def _last_and_best(record: RunRecord) -> list[tuple[str, str, str]]:
    """Return the last and the best value of each metric."""
    rows = []
    for parts, key in curves.metric_curves(record):
        points = [point for point in record.curve(key) if not math.isnan(point.value)]
        if points:
            of_epochs = parts.stage != "test" and parts.kind != "step" and not _is_of_steps(record, key)
            best = curves.best_point(points, curves.sign_of_better(parts.name)) if of_epochs else None
            shown = f"{format_number(best.value)} (epoch {best.epoch})" if best is not None else ""
            rows.append((key, format_number(points[-1].value), shown))
    return rows


def _gradient_figures(record: RunRecord) -> list[Figure]:
    """Return the norms of the gradients of each optimizer, with clipped and skipped steps."""
    keys = curves.keys_of_topic(record, curves.GRADIENTS)
    clipped = {part.optimizer: part for part in record.parts_of(report_parts.ClippedSteps)}
    figures = []
    for key in sorted(key for key in keys if key.endswith("/pre_clip")):
        prefix = key.removesuffix("pre_clip")
        number = prefix.removeprefix("grad_norm/").strip("/")
        part = clipped.get(int(number) if number.isdecimal() else 0)
        before, after = record.curve(key), record.curve(f"{prefix}post_clip")
        lines = [Line("before clipping", before, 1), Line("after clipping", after, 0)]
        lines = [line for line in lines if line.points]
        rule = None if part is None or part.max_norm is None else (part.max_norm, "max_norm")
        skips = [point for point in before if not math.isfinite(point.value)]
        marks = [(point.step, f"not finite at step {point.step:,}") for point in skips[:200]]
        picture = line_chart(lines, y_label="norm", rule=rule, marks=marks, may_be_log=True)
        title = f"gradient norm of optimizer {number}" if number else "gradient norm"
        note = ""
        if part is not None:
            skipped = f", {part.skipped:,} skipped" if part.skipped else ""
            note = f"{part.clipped:,} of {record.describe_steps(part)} clipped{skipped}."
        figures.append(Figure(title, picture, lines, note))
    return figures


def _classes(record: RunRecord) -> list[tuple[str, list[Figure], list[Figure]]]:
    """Return stage, confusion matrices, and reliability and values of single classes of each stage."""
    matrices, of_classes = record.parts_of(report_parts.ConfusionMatrix), record.parts_of(report_parts.ClassValues)
    drawn = [(part.stage, _matrix(part)) for part in matrices]
    others = [(part.stage, _reliability(part)) for part in record.parts_of(report_parts.Reliability)]
    known = {part.stage for part in of_classes}
    others += [(part.stage, _class_values(part)) for part in of_classes]
    others += [(part.stage, _recalls(part)) for part in matrices if part.stage not in known]
    return [
        (stage, [one for its, one in drawn if its == stage], [one for its, one in others if its == stage])
        for stage in dict.fromkeys(stage for stage, _ in (*drawn, *others))
    ]


def _epoch(part: report_parts.ConfusionMatrix | report_parts.Reliability | report_parts.ClassValues) -> str:
    """Return the epoch of an evaluation; a test is in none."""
    return "" if part.stage.endswith("test") else f", epoch {part.epoch}"


def _matrix(part: report_parts.ConfusionMatrix) -> Figure:
    if len(part.counts) <= _MOST_MATRIX and part.is_square:
        return Figure("confusion matrix" + _epoch(part), matrix_chart(part.counts, part.classes))
    wrong = [
        (count, target, predicted)
        for target, row in enumerate(part.counts)
        for predicted, count in enumerate(row)
        if count and target != predicted
    ]
    names = dict(enumerate(part.classes))
    rows = [
        (names.get(target, str(target)), names.get(predicted, str(predicted)), f"{count:,}")
        for count, target, predicted in sorted(wrong, reverse=True)[:20]
    ]
    return Figure("most frequent confusions", columns=("target", "prediction", "count"), rows=rows, texts=2)


def _reliability(part: report_parts.Reliability) -> Figure:
    picture = reliability_chart(part.confidence, part.share, part.weight, part.label)
    note = f"Expected calibration error {part.calibration_error:.3f}. Bars: the share of the samples."
    return Figure("reliability" + _epoch(part), picture, note=note)


def _class_values(part: report_parts.ClassValues) -> Figure:
    of_classes = zip(part.classes, part.values, strict=False)
    rows = [(name, *map(format_number, row)) for name, row in of_classes if len(row) == len(part.metrics)]
    return Figure("metrics of each class" + _epoch(part), columns=("class", *part.metrics), rows=rows)


def _recalls(part: report_parts.ConfusionMatrix) -> Figure:
    """Return a table with recall and precision of each class, from a confusion matrix."""
    transposed = replace(part, counts=list(zip(*part.counts, strict=False)))  # its recalls are the precisions
    rows = [
        (name, f"{sum(row):,}", *("" if math.isnan(share) else format_percent(share) for share in shares))
        for name, row, *shares in zip(part.classes, part.counts, part.recalls, transposed.recalls, strict=False)
    ]
    return Figure("classes" + _epoch(part), columns=("class", "samples", "recall", "precision"), rows=rows)


def throughput(record: RunRecord) -> report_parts.Facts:
    """Return how fast a run trained and what it waited for, as far as it is known."""
    facts: dict[str, str] = {}
    rate = record.samples_per_second
    whose = f", on rank 0 of {record.ranks}" if record.ranks > 1 else ""
    training = record.seconds - record.validation_seconds
    if rate is not None:
        facts[f"samples a second{whose}"] = format_number(rate)
        if record.validation_seconds and training > 0:
            facts[f"samples a second, without validation{whose}"] = format_number(rate * record.seconds / training)
    if record.batches and record.seconds > 0:
        facts[f"batches a second{whose}"] = format_number(record.batches / record.seconds)
        facts["share of the time in validation"] = format_percent(record.validation_seconds / record.seconds)
    uses = record.parts_of(report_parts.DeviceUse)
    for use in uses:
        if use.data_wait is not None:
            rank = f" of rank {use.rank}" if len(uses) > 1 else ""
            facts[f"share of the time{rank} waiting for data"] = format_percent(use.data_wait / 100)
    verdicts = [f"Rank {use.rank}: {said}" if len(uses) > 1 else said for use in uses for said in use.verdict]
    if facts and not uses:
        verdicts = ["Add DeviceMonitor to see what training waits for."]
    return report_parts.Facts(title="Throughput", facts=list(facts.items()), sentences=verdicts)


def _png_files(part: report_parts.Pictures) -> list[tuple[str, str, bool]]:
    """Return captions, pictures and whether they show mistakes; what is no picture is left out."""
    files = zip(part.captions, part.pictures, chain(part.mistakes, repeat(False)), strict=False)
    return [file for file in files if len(file[1]) <= _MOST_PICTURE_BYTES and _BASE64.fullmatch(file[1])]


def _device_uses(record: RunRecord) -> list[tuple[str, ...]]:
    """Return rank, device, quantity, mean and maximum of what each rank's devices did; no rank where there is one."""
    uses = sorted(record.parts_of(report_parts.DeviceUse), key=lambda use: use.rank)
    return [(*([str(use.rank)] if len(uses) > 1 else []), *row) for use in uses for row in use.rows]
