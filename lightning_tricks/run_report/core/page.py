"""The page of one run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from lightning_tricks.run_report.core.curves import (
    COST,
    DEVICES,
    LEARNING_RATE,
    NOISY,
    KeyParts,
    Picture,
    best_point,
    keys_of_topic,
    metric_pictures,
    sign_of_better,
    smooth,
    unit_of,
)
from lightning_tricks.run_report.core.findings import find_all
from lightning_tricks.run_report.core.html import (
    figure,
    findings_list,
    first_and_folded,
    folded,
    page,
    section,
    side_by_side,
    table,
)
from lightning_tricks.run_report.core.numbers import format_number, format_seconds, format_time
from lightning_tricks.run_report.core.part_sections import (
    class_sections,
    code_section,
    cost_parts,
    device_parts,
    gradient_figures,
    picture_sections,
    repeatability_section,
    settings_section,
)
from lightning_tricks.run_report.core.record import RunRecord
from lightning_tricks.run_report.core.svg import Line, line_chart

_COLORS = {"train": 0, "val": 1, "test": 2, "": 6}
_MOST_PICTURES = 4  # that are not folded
_STATUS = {
    "running": "had not ended when this page was written",
    "finished": "finished",
    "stopped": "stopped",
    "failed": "failed",
}


def run_page(record: RunRecord) -> str:
    """Return the page of one run as HTML."""
    pictures = [metric_figure(record, picture) for picture in metric_pictures(record)]
    pictures = [one for one in pictures if one]
    body = [
        _header(record),
        section("What stands out", [findings_list(find_all(record))]),
        section(
            "Loss and metrics",
            [
                first_and_folded(pictures, _MOST_PICTURES),
                values_table(record),
                _note_of_left_out(record),
            ],
        ),
        section(
            "Learning rate and gradients",
            [side_by_side([_topic_figure(record, LEARNING_RATE, "learning rate"), *gradient_figures(record)])],
        ),
        *class_sections(record),
        *picture_sections(record),
        section("Cost", [side_by_side([*cost_parts(record), *_single_figures(record, keys_of_topic(record, COST))])]),
        section("Devices", [*device_parts(record), *_device_figures(record)]),
        repeatability_section(record),
        code_section(record),
        settings_section(record),
    ]
    return page(f"Report of {record.module or 'a run'}", [part for part in body if part], record.status == "running")


def metric_figure(record: RunRecord, picture: Picture) -> str:
    """Return the curves of one metric, or "" if there is nothing to draw."""
    lines: list[Line] = []
    kinds = {(parts.stage, parts.kind) for parts, _ in picture.curves}
    for parts, key in picture.curves:
        points = record.curve(key)
        label, color = _label(parts, len(picture.curves)), _COLORS[parts.stage]
        is_step = parts.kind == "step" or (parts.kind == "" and _is_of_steps(record, key))
        if is_step and len(points) > NOISY:
            lines.append(Line(label, points, color, is_faint=True))
            if (parts.stage, "epoch") not in kinds:
                lines.append(Line(f"{label}, running mean" if label else "running mean", smooth(points), color))
        else:
            best = best_point(points, sign_of_better(picture.name)) if parts.stage in ("val", "test") else None
            lines.append(Line(label, points, color, best=best if len(points) > 1 else None))
    if not any(len(line.points) > 1 for line in lines):
        return ""
    chart = line_chart(lines, may_be_log="loss" in picture.name.lower())
    return figure(picture.name, chart, lines)


def _label(parts: KeyParts, count: int) -> str:
    words = [parts.stage, f"({parts.kind})" if parts.kind else ""]
    return " ".join(word for word in words if word) if parts.stage or count > 1 else ""


def _is_of_steps(record: RunRecord, key: str) -> bool:
    return any(row.kind == "step" for row in record.rows if key in row.values)


def _topic_figure(record: RunRecord, topic: str, name: str) -> str:
    keys = keys_of_topic(record, topic)[:7]
    lines = [
        Line(key.rpartition("/")[2] if len(keys) > 1 else "", record.curve(key), place)
        for place, key in enumerate(keys)
    ]
    return figure(name, line_chart(lines), lines) if lines else ""


def _single_figures(record: RunRecord, keys: Sequence[str]) -> list[str]:
    return [figure(key, line_chart([Line("", record.curve(key), 0)], y_label=unit_of(key))) for key in keys[:24]]


def _device_figures(record: RunRecord) -> list[str]:
    keys = keys_of_topic(record, DEVICES)
    shown = [key for key in keys if "/val_" not in key]
    more = folded("In validation", side_by_side(_single_figures(record, [key for key in keys if key not in shown])))
    return [side_by_side(_single_figures(record, shown)), more]


def _header(record: RunRecord) -> str:
    words = [_STATUS[record.status], format_time(record.started), f"the fit took {format_seconds(record.seconds)}"]
    if record.message:
        words[0] = f"{words[0]}: {record.message}"
    tiles = [("steps", f"{record.step:,}"), ("epochs", f"{record.epochs:,}"), *_best_values(record)]
    shown = "".join(f"<li><b>{escape(value)}</b><span>{escape(name)}</span></li>" for name, value in tiles)
    return (
        f'<header><h1>{escape(record.module or "Run")}</h1><p class="soft">{escape(" · ".join(words))}</p>'
        f'<ul class="tiles">{shown}</ul></header>'
    )


def _best_values(record: RunRecord) -> list[tuple[str, str]]:
    tiles = []
    for picture in metric_pictures(record):
        for parts, key in picture.curves:
            points = record.curve(key)
            best = best_point(points, sign_of_better(picture.name)) if parts.stage == "val" else None
            if best is not None and parts.kind != "step":
                tiles.append((f"best {key}, epoch {best.epoch}", format_number(best.value)))
    return tiles[:3]


def values_table(record: RunRecord) -> str:
    """Return a table of the last and the best value of each metric, or ""."""
    rows = []
    for picture in metric_pictures(record):
        for parts, key in picture.curves:
            points = [point for point in record.curve(key) if not math.isnan(point.value)]
            if points:
                of_epochs = parts.stage != "test" and parts.kind != "step" and not _is_of_steps(record, key)
                best = best_point(points, sign_of_better(picture.name)) if of_epochs else None
                shown = f"{format_number(best.value)} (epoch {best.epoch})" if best is not None else ""
                rows.append((key, format_number(points[-1].value), shown))
    return folded("Last and best values", table(("value", "last", "best (epochs count from 0)"), rows)) if rows else ""


def _note_of_left_out(record: RunRecord) -> str:
    count = record.keys_left_out
    return f'<p class="soft">{count:,} more keys were logged and not recorded.</p>' if count else ""
