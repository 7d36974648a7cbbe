"""Pictures of curves, matrices and bars as SVG for an HTML page, whose style sheet gives the colours.

The values under the pointer are part of the picture, and the style sheet shows them: no script is needed.

The pictures are drawn here, not by matplotlib, so that a report needs no further package, is made anew in milliseconds
at the end of each epoch, and stays small. Texts are escaped.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from lightning_tricks._shared.text import distinct_numbers, format_number
from lightning_tricks.run_report.core.curves import thin_points
from lightning_tricks.run_report.core.record import Point

_WIDTH, _HEIGHT = 540, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 526, 10, 204
_MOST_MARKERS = 60
_MOST_POINTS = 3000  # of all curves of a picture
_MOST_READINGS, _MOST_READ = 60, 8  # places at which values are shown, and values at one of them


@dataclass(frozen=True)
class Scale:
    """A linear or logarithmic scale from values to pixels.

    Attributes:
        low: The value at `start`.
        high: The value at `end`.
        start: The pixel of the lowest value.
        end: The pixel of the highest value.
        is_log: Whether it is logarithmic.
    """

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel of a value; values outside lie on the edge."""
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = (math.log10(max(number, 1e-300)) for number in (value, low, high))
        if math.isnan(value):
            return self.start
        share = min(max((value - low) / (high - low), 0.0), 1.0)
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int) -> list[float]:
        """Return at most about `most` round numbers on the scale."""
        if self.is_log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            return [10.0**power for power in range(first, last + 1, max(1, math.ceil((last - first + 1) / most)))]
        length = self.high - self.low
        step = 10.0 ** math.floor(math.log10(length / most))
        step *= next((factor for factor in (1, 2, 5) if length / (step * factor) <= most), 10)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [place * step for place in range(first, last + 1)]


def make_scale(values: Iterable[float], start: float, end: float, *, may_be_log: bool = False) -> Scale:
    """Return a scale on which all finite values lie, with a margin; logarithmic where they span three decades.

    Args:
        values: The values.
        start: The pixel of the lowest value.
        end: The pixel of the highest value.
        may_be_log: Whether the scale may be logarithmic.
    """
    finite = [value for value in values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    if may_be_log and low > 0 and high / low >= 1000:
        return Scale(low / 1.3, high * 1.3, start, end, is_log=True)
    if high == low:
        margin = abs(low) / 10 or 0.5
    elif math.isfinite(high - low):
        margin = 0.05 * (high - low)
    else:  # of the largest numbers there are
        low, high, margin = low / 4, high / 4, 0.0
    bottom = 0.0 if 0 <= low <= 0.3 * (high - low) else low - margin  # a scale from zero is easier to read
    return Scale(bottom, high + margin, start, end)


@dataclass(frozen=True)
class Line:
    """One curve of a picture.

    Attributes:
        label: What the legend says; "" for nothing.
        points: Its points.
        color: The number of its colour, from 0 to 6.
        is_faint: Whether it stands behind another one.
        dash: The number of its dashes: 0 for none, to 3.
        best: The point that is marked, or None.
    """

    label: str
    points: Sequence[Point]
    color: int = 0
    is_faint: bool = False
    dash: int = 0
    best: Point | None = None


@dataclass(frozen=True)
class Figure:
    """A picture, or a table, with its title.

    Attributes:
        title: The title.
        picture: The picture as SVG, or "".
        lines: The curves that the legend lists.
        note: What stands below, or "".
        columns: The names of the table's columns.
        rows: Its rows.
        texts: How many of its first columns are texts.
    """

    title: str
    picture: str = ""
    lines: Sequence[Line] = ()
    note: str = ""
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    texts: int = 1


def line_chart(
    lines: Sequence[Line],
    *,
    y_label: str = "",
    rule: tuple[float, str] | None = None,
    marks: Sequence[tuple[int, str]] = (),
    may_be_log: bool = False,
) -> str:
    """Draw curves over steps.

    Args:
        lines: The curves.
        y_label: The name of the vertical axis, with its unit.
        rule: A value with its name, at which a horizontal line is drawn.
        marks: Steps with a text each, marked on the horizontal axis.
        may_be_log: Whether the vertical axis may be logarithmic, where values span three decades.
    """
    most = min(1000, max(_MOST_POINTS // max(len(lines), 1), 100))
    drawn = [(line, thin_points(line.points, most)) for line in lines]
    all_points = [point for _, points in drawn for point in points]
    x = make_scale((point.step for point in all_points), _LEFT, _RIGHT)
    front = [point for line, points in drawn for point in points if not line.is_faint]
    heights = [value for point in front or all_points for value in (point.value, point.low, point.high)]
    if not make_scale(heights, 0, 1, may_be_log=may_be_log).is_log:  # else faint curves may lie below
        heights = [value for point in all_points for value in (point.value, point.low, point.high)]
        may_be_log = False
    y = make_scale([*heights, *([rule[0]] if rule else [])], _BOTTOM, _TOP, may_be_log=may_be_log)
    whole = [value for value in x.ticks(6) if x.low <= value and value == int(value)]
    parts = [_frame(x, y, whole, "step", f"{y_label} (log)" if y_label and y.is_log else y_label)]
    parts += [_curve(line, points, x, y) for line, points in drawn]
    if rule is not None and math.isfinite(rule[0]):
        height = y(rule[0])
        parts.append(f'<line class="rule" x1="{_LEFT}" x2="{_RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>')
        parts.append(_text(_RIGHT, height - 4, rule[1], "end", ' class="label"'))
    for step, words in marks:
        parts.append(f'<path class="mark" d="M{x(step):.1f} {_BOTTOM}l-4 7h8z"><title>{escape(words)}</title></path>')
    parts += _readings(drawn, x)
    return _svg(_HEIGHT, parts, ", ".join(line.label for line in lines if line.label))


def _svg(height: float, parts: Sequence[str], label: str) -> str:
    """Return a whole picture that is as wide as its place."""
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def _text(x: float, y: float, words: str, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(words)}</text>'


def _frame(x: Scale, y: Scale, x_ticks: Sequence[float], x_label: str, y_label: str) -> str:
    parts = []
    y_ticks = y.ticks(5)
    for value, words in zip(y_ticks, distinct_numbers(y_ticks), strict=True):
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(_text(_LEFT - 7, y(value) + 4, words, "end"))
    for value, words in zip(x_ticks, distinct_numbers(x_ticks), strict=True):
        where = f'x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{_BOTTOM}" y2="{_BOTTOM + 4}"'
        parts.append(f'<line class="axis" {where}/>')
        parts.append(_text(x(value), _BOTTOM + 17, words))
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_RIGHT}" y1="{_BOTTOM}" y2="{_BOTTOM}"/>')
    parts.append(_text((_LEFT + _RIGHT) / 2, _HEIGHT - 4, x_label))
    if y_label:
        middle = (_TOP + _BOTTOM) / 2
        parts.append(_text(11, middle, y_label, "middle", f' transform="rotate(-90 11 {middle:.0f})"'))
    return "".join(parts)


def _readings(drawn: Sequence[tuple[Line, Sequence[Point]]], x: Scale) -> list[str]:
    """Return upright strips, each with the values at a step, which show while the pointer is in the strip."""
    steps: dict[int, Point] = {}  # strip -> the point whose step it shows
    distinct = {point.step for _, points in drawn for point in points}
    if len(distinct) <= _MOST_READINGS:
        places = {step: place for place, step in enumerate(sorted(distinct))}
    else:
        places = {step: int(_MOST_READINGS * (x(step) - _LEFT) / (_RIGHT - _LEFT + 1)) for step in distinct}
    for _, points in sorted(drawn, key=lambda pair: len(pair[1])):  # those of a few points, such as of epochs, first
        for point in points:
            steps.setdefault(places[point.step], point)
    if not steps:
        return []
    shown = [steps[place] for place in sorted(steps)]
    middles = [(one.step + other.step) / 2 for one, other in pairwise(shown)]
    texts: list[list[str]] = [[f"step {point.step:,}, epoch {point.epoch}"] for point in shown]
    for line, points in drawn:
        for place, at in enumerate(shown if points else ()):
            after = bisect(points, at.step, key=lambda point: point.step)
            near = min(points[max(after - 1, 0) : after + 1], key=lambda point: abs(point.step - at.step))
            if points[0].step <= at.step <= points[-1].step or bisect(middles, near.step) == place:
                where = "" if near.step == at.step else f" at step {near.step:,}"
                texts[place].append(f"{line.label} {format_number(near.value)}{where}".lstrip())
    edges = [_LEFT, *(round(x(middle), 1) for middle in middles), _RIGHT]
    strips = zip(pairwise(edges), shown, texts, strict=True)
    return [_reading(left, right, x(point.step), lines) for (left, right), point, lines in strips]


def _reading(left: float, right: float, middle: float, lines: Sequence[str]) -> str:
    is_right = middle > (_LEFT + _RIGHT) / 2
    x = f"{left - 6 if is_right else right + 6:.0f}"
    words = "".join(f'<tspan x="{x}" dy="16">{escape(line)}</tspan>' for line in lines[: 1 + _MOST_READ])
    kind = "at end" if is_right else "at"
    return f'<g class="{kind}"><path d="M{left} {_TOP}H{right}V{_BOTTOM}H{left}z"/><text y="{_TOP}">{words}</text></g>'


def _curve(line: Line, points: Sequence[Point], x: Scale, y: Scale) -> str:
    kinds = f"c{line.color}{' faint' if line.is_faint else ''}{f' d{line.dash}' if line.dash else ''}"
    parts = []
    finite = [point for point in points if math.isfinite(point.value)]
    if any(point.low != point.high for point in finite):
        upper = [f"{x(point.step):.1f} {y(point.high):.1f}" for point in finite]
        lower = [f"{x(point.step):.1f} {y(point.low):.1f}" for point in reversed(finite)]
        parts.append(f'<path class="band {kinds}" d="M{"L".join(upper + lower)}z"/>')
    if len(finite) > 1:
        parts.append(f'<path class="line {kinds}" d="{_path(points, x, y)}"/>')
    dots = [("dot", point, 2.6) for point in finite] if len(finite) <= _MOST_MARKERS and not line.is_faint else []
    for kind, point, radius in [*dots, *([("best", line.best, 6)] if line.best is not None else [])]:
        where = f'cx="{x(point.step):.1f}" cy="{y(point.value):.1f}"'
        parts.append(f'<circle class="{kind} {kinds}" {where} r="{radius}"/>')
    return "".join(parts)


def _path(points: Sequence[Point], x: Scale, y: Scale) -> str:
    """Return a path that has a gap where values are not finite."""
    parts, is_drawing = [], False
    for point in points:
        if math.isfinite(point.value):
            parts.append(f"{'L' if is_drawing else 'M'}{x(point.step):.1f} {y(point.value):.1f}")
        is_drawing = math.isfinite(point.value)
    return "".join(parts)


def matrix_chart(counts: Sequence[Sequence[int]], classes: Sequence[str]) -> str:
    """Draw a confusion matrix: rows are targets, the colour is the share of the row."""
    size = len(counts)
    longest = max((len(name) for name in classes), default=1)
    left = min(24 + 7 * longest, 150)
    cell = min(44.0, (_WIDTH - 4 - left) / size)
    parts = []
    for row, of_target in enumerate(counts):
        total = sum(of_target) or 1
        for column, count in enumerate(of_target):
            opacity, kind = (count / total) ** 0.6, "right" if row == column else "wrong"
            place = f'x="{left + column * cell:.1f}" y="{row * cell + 2:.1f}" width="{cell:.1f}" height="{cell:.1f}"'
            said = escape(f"{count:,} of {sum(of_target):,} {classes[row]} predicted as {classes[column]}")
            parts.append(f'<rect class="cell {kind}" {place} fill-opacity="{opacity:.3f}"><title>{said}</title></rect>')
            if count and size <= 20:
                middle = left + (column + 0.5) * cell
                kind = "light" if kind == "right" and opacity > 0.93 else "dark"  # a contrast of 4.5 at least
                parts.append(_text(middle, (row + 0.5) * cell + 6, f"{count}", more=f' class="{kind}"'))
        if size <= 40:
            parts.append(_text(left - 6, (row + 0.5) * cell + 6, _short(classes[row]), "end"))
    bottom = size * cell + 2
    if size <= 40:
        for column, name in enumerate(classes):
            middle = left + (column + 0.5) * cell
            turned = longest > 4 or cell < 18
            more = f' transform="rotate(-60 {middle:.1f} {bottom + 14:.1f})"' if turned else ""
            parts.append(_text(middle, bottom + 15, _short(name), "end" if turned else "middle", more))
    height = bottom + 22 + (min(6 * longest, 100) if longest > 4 or cell < 18 else 0)
    parts.append(_text(left + size * cell / 2, height + 10, "prediction"))
    parts.append(_text(11, bottom / 2, "target", more=f' transform="rotate(-90 11 {bottom / 2:.0f})"'))
    return _svg(height + 16, parts, "confusion matrix")


def _short(name: str) -> str:
    return name if len(name) <= 18 else f"{name[:17]}…"


def reliability_chart(confidence: Sequence[float], share: Sequence[float], weight: Sequence[float], label: str) -> str:
    """Draw how often predictions of some confidence are right, with the share of the samples below."""
    x, y = Scale(0, 1, _LEFT, _RIGHT), Scale(0, 1, _BOTTOM, _TOP)
    parts = [_frame(x, y, x.ticks(5), "confidence", label)]
    for middle, part in zip(confidence, weight, strict=True):
        where = f'x="{x(middle) - 9:.1f}" width="18" y="{y(part):.1f}" height="{_BOTTOM - y(part):.1f}"'
        parts.append(f'<rect class="weight" {where}><title>{part:.1%} of the samples</title></rect>')
    parts.append(f'<line class="rule" x1="{_LEFT}" y1="{_BOTTOM}" x2="{_RIGHT}" y2="{_TOP}"/>')
    points = list(zip(confidence, share, strict=True))
    for (a, b), (c, d) in pairwise(points):
        parts.append(f'<line class="line c0" x1="{x(a):.1f}" y1="{y(b):.1f}" x2="{x(c):.1f}" y2="{y(d):.1f}"/>')
    for (a, b), part in zip(points, weight, strict=True):
        r = 4 if part >= 0.01 else 2  # few samples say little
        said = escape(f"confidence {a:.2f}, {label} {b:.2f}")
        parts.append(f'<circle class="dot c0" cx="{x(a):.1f}" cy="{y(b):.1f}" r="{r}"><title>{said}</title></circle>')
    return _svg(_HEIGHT, parts, f"{label} over confidence")
