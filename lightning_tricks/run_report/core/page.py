"""The page of one run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape

from lightning_tricks._shared.report_parts import (
    ClassValues,
    ClippedSteps,
    ConfusionMatrix,
    DeviceUse,
    Facts,
    Pictures,
    Reliability,
)
from lightning_tricks._shared.text import list_names
from lightning_tricks.run_report.core.comparison_page import differing_settings, values_table
from lightning_tricks.run_report.core.curves import (
    COST,
    DEVICES,
    GRADIENTS,
    LEARNING_RATE,
    NOISY,
    KeyParts,
    best_point,
    curve_labels,
    keys_of_topic,
    metric_curves,
    metric_pictures,
    sign_of_better,
    smooth,
    unit_of,
)
from lightning_tricks.run_report.core.findings import find_all
from lightning_tricks.run_report.core.html import (
    facts_table,
    figure,
    findings_list,
    first_and_folded,
    folded,
    gallery,
    page,
    paragraph,
    preformatted,
    section,
    side_by_side,
    stacked,
    table,
)
from lightning_tricks.run_report.core.numbers import format_number, format_percent, format_seconds, format_time
from lightning_tricks.run_report.core.record import RunRecord
from lightning_tricks.run_report.core.svg import Line, line_chart, matrix_chart, reliability_chart
from lightning_tricks.run_report.core.throughput import samples_per_second, throughput

_COLORS = {"train": 0, "val": 1, "test": 2, "": 6}
_MOST_PICTURES = 4  # that are not folded
_MOST_VALUES, _MOST_SETTINGS = 6, 8  # of the run before that are not folded
_LONGEST_TEXT = 300
_MOST_CURVES = 21  # of a picture
_MOST_MATRIX = 60  # classes that are drawn
_MOST_CLASSES = 40  # rows of the table of classes
_COST_TITLES = ("FLOPs", "Model")
_METRICS_TITLE = "Other metrics"  # and of which stage
_STATUS = {
    "running": "had not ended when this page was written",
    "finished": "finished",
    "stopped": "stopped",
    "failed": "failed",
}


def run_page(record: RunRecord, before: tuple[str, RunRecord] | None = None) -> str:
    """Return the page of one run as HTML.

    Args:
        record: The run.
        before: The name and the record of another run that it is compared with, or None.
    """
    resumes = [(resume.step, f"resumed at step {resume.step:,}") for resume in record.resumes[-50:]]
    figures = [_metric_figure(record, name, curves, resumes) for name, curves in metric_pictures(record).items()]
    left_out = record.keys_left_out
    costs = [part for part in record.parts_of(Facts) if part.title in _COST_TITLES]
    metrics = [part for part in record.parts_of(Facts) if part.title.startswith(_METRICS_TITLE)]
    costs[:0] = [part] if (part := throughput(record)) is not None else []
    body = [
        _header(record),
        section("What stands out", [findings_list(find_all(record))]),
        _before_section(record, *before) if before is not None else "",
        section(
            "Loss and metrics",
            [
                first_and_folded([shown for shown in figures if shown], _MOST_PICTURES),
                _values_table(record),
                side_by_side([*map(_facts, metrics)]),
                f'<p class="soft">{left_out:,} more keys were logged and not recorded.</p>' if left_out else "",
            ],
        ),
        section(
            "Learning rate and gradients",
            [side_by_side([_topic_figure(record, LEARNING_RATE, "learning rate"), *_gradient_figures(record)])],
        ),
        *_class_sections(record),
        *_picture_sections(record),
        section("Cost", [side_by_side([*map(_facts, costs), *_cost_figures(record)])]),
        section("Devices", [*_device_parts(record), side_by_side(_device_figures(record))]),
        _repeatability_section(record),
        _code_section(record),
        _settings_section(record),
    ]
    return page(f"Report of {record.module or 'a run'}", [part for part in body if part], record.status == "running")


def _metric_figure(
    record: RunRecord, name: str, curves: Sequence[tuple[KeyParts, str]], marks: Sequence[tuple[int, str]]
) -> str:
    """Return the curves of one metric, or "" if there is nothing to draw."""
    lines: list[Line] = []
    styles: dict[str, tuple[int, int]] = {}  # series -> its colour and its dashes
    kinds = {(parts.series, parts.kind) for parts, _ in curves}
    for (parts, key), label in zip(curves[:_MOST_CURVES], curve_labels(curves), strict=False):
        points = record.curve(key)
        color, dash = styles.setdefault(parts.series, _style(parts.stage, list(styles.values())))
        is_step = parts.kind == "step" or (parts.kind == "" and _is_of_steps(record, key))
        if is_step and len(points) > NOISY:
            lines.append(Line(label, points, color, is_faint=True))
            if (parts.series, "epoch") not in kinds:
                mean = f"{label}, running mean" if label else "running mean"
                lines.append(Line(mean, smooth(points), color, dash=dash))
        else:
            best = best_point(points, sign_of_better(name)) if parts.stage in ("val", "test") else None
            lines.append(Line(label, points, color, dash=dash, best=best if len(points) > 1 else None))
    if not any(len(line.points) > 1 for line in lines):
        return ""
    left_out = len(curves) - _MOST_CURVES
    note = f"{left_out:,} more are in the table below." if left_out > 0 else ""
    return figure(name, line_chart(lines, marks=marks, may_be_log="loss" in name.lower()), lines, note)


def _style(stage: str, taken: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return a colour, if possible that of the stage, and dashes that the other curves of a picture do not have."""
    used = [color for color, _ in taken]
    colors = (_COLORS[stage], 3, 4, 5, 6, 2, 1, 0)
    return next((color for color in colors if color not in used), len(taken) % 7), len(taken) % 4


def _is_of_steps(record: RunRecord, key: str) -> bool:
    return any(row.kind == "step" for row in record.rows if key in row.values)


def _topic_figure(record: RunRecord, topic: str, name: str) -> str:
    keys = keys_of_topic(record, topic)
    return _figure_of(record, name, {key.removeprefix("learning_rate/"): key for key in keys[:_MOST_CURVES]})


def _figure_of(record: RunRecord, name: str, keys: Mapping[str, str]) -> str:
    """Return the curves of keys, which are given by their labels, in one picture, or "" if there is none."""
    labels = list(keys) if len(keys) > 1 else [""]
    lines = [
        Line(label, record.curve(key), place % 7, dash=place % 4)
        for place, (label, key) in enumerate(zip(labels, keys.values(), strict=False))
    ]
    return figure(name, line_chart(lines, y_label=unit_of(next(iter(keys.values())))), lines) if lines else ""


def _cost_figures(record: RunRecord) -> list[str]:
    return [_figure_of(record, key, {"": key}) for key in keys_of_topic(record, COST)[:24]]


def _device_figures(record: RunRecord) -> list[str]:
    """Return a picture of each quantity, with a curve of each GPU, in training and in validation."""
    quantities: dict[str, dict[str, str]] = {}
    for key in keys_of_topic(record, DEVICES):
        device, _, name = key.partition("/")
        quantity = f"{device.rstrip('0123456789')}/{name.removeprefix('val_')}"
        label = f"{device}, validation" if name.startswith("val_") else device
        quantities.setdefault(quantity, {})[label] = key
    shown = [dict(sorted(keys.items())) for keys in list(quantities.values())[:24]]
    names = [next(iter(keys.values())) if len(keys) == 1 else quantity for quantity, keys in quantities.items()]
    return [_figure_of(record, name, keys) for name, keys in zip(names, shown, strict=False)]


def _header(record: RunRecord) -> str:
    words = [_STATUS[record.status], format_time(record.started), f"the fit took {format_seconds(record.seconds)}"]
    if record.message:
        words[0] = f"{words[0]}: {record.message}"
    tiles = [("steps", f"{record.step:,}"), ("epochs", f"{record.epochs:,}")]
    if (rate := samples_per_second(record)) is not None:
        tiles.append(("samples a second" + f", on rank 0 of {record.ranks}" * (record.ranks > 1), format_number(rate)))
    tiles += _best_values(record)
    shown = "".join(f"<li><b>{escape(value)}</b><span>{escape(name)}</span></li>" for name, value in tiles)
    return (
        f'<header><h1>{escape(record.module or "Run")}</h1><p class="soft">{escape(" · ".join(words))}</p>'
        f'<ul class="tiles">{shown}</ul></header>'
    )


def _best_values(record: RunRecord) -> list[tuple[str, str]]:
    """Return the best value of validation of the first metrics, one of each."""
    tiles: dict[str, tuple[str, str]] = {}
    for parts, key in metric_curves(record):
        is_of_epochs = parts.stage == "val" and parts.kind != "step" and parts.quantity not in tiles
        best = best_point(record.curve(key), sign_of_better(parts.name)) if is_of_epochs else None
        if best is not None:
            tiles[parts.quantity] = f"best {key}, epoch {best.epoch}", format_number(best.value)
    return list(tiles.values())[:3]


def _before_section(record: RunRecord, name: str, before: RunRecord) -> str:
    """Return what differs from another run, in the metrics that both have and in the settings."""
    runs, names = (before, record), (name, "this run")
    when = f"{name}: {_STATUS[before.status]}, {format_time(before.started)}, {before.epochs:,} epochs"
    shared = {key for _, key in metric_curves(before)}
    curves = [(parts, key) for parts, key in metric_curves(record) if key in shared and parts.kind != "step"]
    curves.sort(key=lambda curve: curve[0].stage not in ("val", "test"))
    keys = [key for _, key in curves]
    settings = [[text[:_LONGEST_TEXT] for text in row] for row in differing_settings(before, record)]
    more_keys, more = keys[_MOST_VALUES:], settings[_MOST_SETTINGS : _MOST_SETTINGS + 300]
    columns = ("setting", *names)
    return section(
        "Against the run before",
        [
            paragraph(f"{when}, {format_seconds(before.seconds)}.", "soft"),
            values_table(runs, names, keys[:_MOST_VALUES]),
            folded(f"{len(more_keys):,} more value{'s' * (len(more_keys) > 1)}", values_table(runs, names, more_keys)),
            table(columns, settings[:_MOST_SETTINGS], texts=3)
            if settings
            else paragraph("Nothing that is recorded of the settings differs."),
            folded(
                f"{len(settings) - _MOST_SETTINGS:,} more settings differ", table(columns, more, texts=3) * bool(more)
            ),
        ],
    )


def _values_table(record: RunRecord) -> str:
    """Return a table of the last and the best value of each metric, or ""."""
    rows = []
    for parts, key in metric_curves(record):
        points = [point for point in record.curve(key) if not math.isnan(point.value)]
        if points:
            of_epochs = parts.stage != "test" and parts.kind != "step" and not _is_of_steps(record, key)
            best = best_point(points, sign_of_better(parts.name)) if of_epochs else None
            shown = f"{format_number(best.value)} (epoch {best.epoch})" if best is not None else ""
            rows.append((key, format_number(points[-1].value), shown))
    return folded("Last and best values", table(("value", "last", "best (epochs count from 0)"), rows)) if rows else ""


def _gradient_figures(record: RunRecord) -> list[str]:
    """Return the norms of the gradients of each optimizer, with clipped and skipped steps."""
    keys = keys_of_topic(record, GRADIENTS)
    clipped = {part.optimizer: part for part in record.parts_of(ClippedSteps)}
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
        title = "gradient norm" + (f" of optimizer {number}" if number else "")
        figures.append(figure(title, picture, lines, _clip_note(record, part) if part is not None else ""))
    return figures


def _clip_note(record: RunRecord, part: ClippedSteps) -> str:
    words = f"{part.clipped:,} of {record.describe_steps(part)} clipped"
    return words + (f", {part.skipped:,} skipped." if part.skipped else ".")


def _class_sections(record: RunRecord) -> list[str]:
    """Return the confusion matrix, the reliability and the values of single classes of each stage."""
    parts: list[ConfusionMatrix | Reliability | ClassValues] = [
        *record.parts_of(ConfusionMatrix),
        *record.parts_of(Reliability),
        *record.parts_of(ClassValues),
    ]
    sections = []
    for stage in dict.fromkeys(part.stage for part in parts):
        matrices = [_matrix(part) for part in record.parts_of(ConfusionMatrix) if part.stage == stage]
        curves = [_reliability(part) for part in record.parts_of(Reliability) if part.stage == stage]
        classes = [_classes(part) for part in record.parts_of(ClassValues) if part.stage == stage]
        if not classes:
            classes = [_recalls(part) for part in record.parts_of(ConfusionMatrix) if part.stage == stage]
        sections.append(section(f"Classes ({stage})", [side_by_side([*matrices, stacked([*curves, *classes])])]))
    return sections


def _epoch(part: ConfusionMatrix | Reliability | ClassValues) -> str:
    """Return the epoch of an evaluation; a test is in none."""
    return "" if part.stage.endswith("test") else f", epoch {part.epoch}"


def _matrix(part: ConfusionMatrix) -> str:
    if len(part.counts) <= _MOST_MATRIX and part.is_square:
        return figure("confusion matrix" + _epoch(part), matrix_chart(part.counts, part.classes))
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
    return figure("most frequent confusions", table(("target", "prediction", "count"), rows, texts=2))


def _reliability(part: Reliability) -> str:
    picture = reliability_chart(part.confidence, part.share, part.weight, part.label)
    note = f"Expected calibration error {part.calibration_error:.3f}. Bars: the share of the samples."
    return figure("reliability" + _epoch(part), picture, note=note)


def _classes(part: ClassValues) -> str:
    rows = [
        (name, *("" if value is None else format_number(value) for value in values))
        for name, values in zip(part.classes, part.values, strict=False)
        if len(values) == len(part.metrics)
    ]
    return figure("metrics of each class" + _epoch(part), _table_of_classes(("class", *part.metrics), rows))


def _table_of_classes(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of the first classes, and below it one of the others that is folded."""
    shown, others = table(columns, rows[:_MOST_CLASSES]), rows[_MOST_CLASSES:]
    return shown + (folded(f"{len(others)} more classes", table(columns, others)) if others else "")


def _recalls(part: ConfusionMatrix) -> str:
    """Return a table with recall and precision of each class, from a confusion matrix."""
    columns = replace(part, counts=list(zip(*part.counts, strict=False)))  # its recalls are the precisions
    rows = [
        (name, f"{sum(row):,}", *("" if math.isnan(share) else format_percent(share) for share in shares))
        for name, row, *shares in zip(part.classes, part.counts, part.recalls, columns.recalls, strict=False)
    ]
    return figure("classes" + _epoch(part), _table_of_classes(("class", "samples", "recall", "precision"), rows))


def _picture_sections(record: RunRecord) -> list[str]:
    """Return the pictures that callbacks have kept, such as the most confident mistakes: what is none has a heading."""
    sections = []
    for part in record.parts_of(Pictures):
        pairs = list(zip(part.captions, part.pictures, strict=False))
        wrong = [pair for pair in pairs if pair[0].startswith("!")]
        is_about_mistakes = bool(wrong) or "mistake" in part.title.lower()
        right = gallery([pair for pair in pairs if pair not in wrong])
        heading = "<h3>Predicted rightly</h3>" * bool(is_about_mistakes and right)
        note = paragraph(part.note, "soft") if part.note else ""
        sections.append(section(part.title, [gallery(wrong), heading, right, note]))
    return sections


def _facts(part: Facts) -> str:
    said = "".join(paragraph(sentence, "soft") for sentence in part.sentences)
    return f"<div>{facts_table(part.facts, part.title)}{said}</div>"


def _device_parts(record: RunRecord) -> list[str]:
    """Return the use of each rank's devices in training."""
    uses = record.parts_of(DeviceUse)
    rows = [
        (*([str(part.rank)] if len(uses) > 1 else []), *row)
        for part in sorted(uses, key=lambda use: use.rank)
        for row in part.rows
    ]
    columns = (*(["rank"] if len(uses) > 1 else []), "device", "quantity", "mean", "maximum")
    return [table(columns, rows, texts=len(columns) - 2)] if rows else []


def _repeatability_section(record: RunRecord) -> str:
    """Return seed, resumes, fingerprint and versions."""
    parts = [part for part in record.parts_of(Facts) if not part.title.startswith((*_COST_TITLES, _METRICS_TITLE))]
    resumes = [
        (f"{resume.step:,}", str(resume.epoch), format_time(resume.time), list_names(resume.not_restored[:10], 10))
        for resume in record.resumes
    ]
    columns = ("step", "epoch", "time", "not restored")
    resumed = f"<div><h3>Resumes</h3>{table(columns, resumes[-50:], texts=4)}</div>" if resumes else ""
    versions = facts_table(record.versions, "Versions")
    return section("Repeatability", [side_by_side([*map(_facts, parts), resumed, versions])])


def _code_section(record: RunRecord) -> str:
    """Return the git commit and the differences to it."""
    git = record.git
    if git is None:
        return ""
    facts = [("commit", git.commit), *([("branch", git.branch)] if git.branch else [])]
    facts.append(("changed files", f"{len(git.changed):,}" if git.changed else "none"))
    if git.not_compared:
        files = ", ".join(git.not_compared[:20]) + (", ..." if len(git.not_compared) > 20 else "")
        facts.append(("not compared", files if files != "." else "the checkout: git did not answer"))
    changed = preformatted("\n".join(git.changed)) if git.changed else ""
    cut = paragraph("Only the beginning was kept.", "soft") if git.is_cut else ""
    diff = folded(f"Differences to the commit ({git.diff.count(chr(10)):,} lines)", preformatted(git.diff) + cut)
    return section("Code", [facts_table(facts), folded("Changed files", changed), diff if git.diff else ""])


def _settings_section(record: RunRecord) -> str:
    """Return hyper-parameters, the Trainer's arguments and facts about the data."""
    left = stacked([facts_table(record.arguments, "Hyper-parameters"), facts_table(record.data, "Data")])
    others = folded(f"All other settings ({len(record.settings):,})", facts_table(record.settings))
    return section("Settings", [side_by_side([left, facts_table(record.trainer, "Trainer")]), others])
