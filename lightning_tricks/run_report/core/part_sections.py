"""The sections of a page that show what the callbacks know."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from lightning_tricks._shared.report_parts import (
    ClassValues,
    ClippedSteps,
    ConfusionMatrix,
    DeviceUse,
    Facts,
    Pictures,
    Reliability,
)
from lightning_tricks.run_report.core.curves import GRADIENTS, keys_of_topic
from lightning_tricks.run_report.core.finding import steps_of
from lightning_tricks.run_report.core.html import (
    facts_table,
    figure,
    folded,
    gallery,
    paragraph,
    preformatted,
    section,
    side_by_side,
    stacked,
    table,
)
from lightning_tricks.run_report.core.numbers import format_number, format_percent, format_time
from lightning_tricks.run_report.core.record import RunRecord
from lightning_tricks.run_report.core.svg import Line, line_chart, matrix_chart, reliability_chart

_MOST_MATRIX = 60  # classes that are drawn
_MOST_CLASSES = 40  # rows of the table of classes
_COST_TITLES = ("FLOPs", "Model")


def gradient_figures(record: RunRecord) -> list[str]:
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
    words = f"{part.clipped:,} of {steps_of(record, part)} clipped"
    return words + (f", {part.skipped:,} skipped." if part.skipped else ".")


def class_sections(record: RunRecord) -> list[str]:
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
    """Return what a confusion matrix says of each class."""
    columns = replace(part, counts=list(zip(*part.counts, strict=False)))  # its recalls are the precisions
    rows = [
        (name, f"{sum(row):,}", *("" if math.isnan(share) else format_percent(share) for share in shares))
        for name, row, *shares in zip(part.classes, part.counts, part.recalls, columns.recalls, strict=False)
    ]
    return figure("classes" + _epoch(part), _table_of_classes(("class", "samples", "recall", "precision"), rows))


def picture_sections(record: RunRecord) -> list[str]:
    """Return the pictures that callbacks have kept, such as the most confident mistakes."""
    return [
        section(part.title, [gallery(part.captions, part.pictures), paragraph(part.note, "soft") if part.note else ""])
        for part in record.parts_of(Pictures)
    ]


def cost_parts(record: RunRecord) -> list[str]:
    """Return FLOPs and parameters as tables."""
    return [_facts(part) for part in record.parts_of(Facts) if part.title in _COST_TITLES]


def _facts(part: Facts) -> str:
    said = "".join(paragraph(sentence, "soft") for sentence in part.sentences)
    return f"<div>{facts_table(part.facts, part.title)}{said}</div>"


def device_parts(record: RunRecord) -> list[str]:
    """Return what each rank's devices did in training."""
    parts = []
    uses = record.parts_of(DeviceUse)
    for part in uses:
        rank = f"Rank {part.rank}: " if len(uses) > 1 else ""
        parts += [paragraph(f"{rank}{sentence}") for sentence in part.verdict]
    rows = [
        (*([str(part.rank)] if len(uses) > 1 else []), *row)
        for part in sorted(uses, key=lambda one: one.rank)
        for row in part.rows
    ]
    columns = (*(["rank"] if len(uses) > 1 else []), "device", "quantity", "mean", "maximum")
    return [*parts, table(columns, rows, texts=len(columns) - 2)] if rows else parts


def repeatability_section(record: RunRecord) -> str:
    """Return seed, resumes, fingerprint and versions."""
    others = [_facts(part) for part in record.parts_of(Facts) if part.title not in _COST_TITLES]
    resumes = [
        (f"{one.step:,}", str(one.epoch), format_time(one.time), ", ".join(one.not_restored[:10]) or "nothing")
        for one in record.resumes
    ]
    columns = ("step", "epoch", "time", "not restored")
    resumed = f"<div><h3>Resumes</h3>{table(columns, resumes[-50:], texts=4)}</div>" if resumes else ""
    versions = facts_table(record.versions, "Versions")
    return section("Repeatability", [side_by_side([*others, resumed, versions])])


def code_section(record: RunRecord) -> str:
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


def settings_section(record: RunRecord) -> str:
    """Return hyper-parameters, the Trainer's arguments and facts about the data."""
    left = stacked([facts_table(record.arguments, "Hyper-parameters"), facts_table(record.data, "Data")])
    others = folded(f"All other settings ({len(record.settings):,})", facts_table(record.settings))
    return section("Settings", [side_by_side([left, facts_table(record.trainer, "Trainer")]), others])
