"""Pictures: who reads a point off the axes that are drawn gets its value."""

import math
from html import unescape
from xml.etree import ElementTree

import pytest

from lightning_tricks.run_report import comparison_page, run_page
from lightning_tricks.run_report.core.record import Point
from lightning_tricks.run_report.core.svg import Line, line_chart, matrix_chart, reliability_chart
from tests.run_report.runs import record_of
from tests.small import cases

FALLS = [Point(step, 0, *[1 / (1 + step)] * 3) for step in range(0, 500, 25)]


def parse(picture):
    return ElementTree.fromstring(picture)


def with_class(picture, name, tag="*"):
    return [one for one in picture.iter() if name in one.get("class", "").split() and tag in ("*", one.tag)]


def texts(picture, anchor):
    found = (one for one in picture.iter("text") if one.get("text-anchor") == anchor)
    return [(one.text, float(one.get("x")), float(one.get("y"))) for one in found]


def number(text):
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def straight(ticks):
    """What turns a pixel into a value, from numbers that stand at pixels."""
    (first, at_first), (last, at_last) = ticks[0], ticks[-1]
    slope = (last - first) / (at_last - at_first)
    return lambda pixel: first + (pixel - at_first) * slope


def readers(picture, is_log=False):
    """What reads the horizontal axis, and what the vertical one, off the numbers and lines that are drawn."""
    lines = [float(one.get("y1")) for one in with_class(picture, "grid")]
    upright = [number(text) for text, _, _ in texts(picture, "end")]
    assert len(lines) == len(upright) >= 2
    below = [(number(text), x) for text, x, y in texts(picture, "middle") if number(text) is not None]
    heights = straight([(math.log10(value) if is_log else value, y) for value, y in zip(upright, lines, strict=True)])
    return straight(below), (lambda pixel: 10 ** heights(pixel)) if is_log else heights


def dots(picture, name="dot"):
    return [(float(one.get("cx")), float(one.get("cy"))) for one in with_class(picture, name)]


def moves(path):
    """The points of a path, one list for each part without a gap."""
    return [[tuple(map(float, point.split())) for point in part.split("L")] for part in path.split("M")[1:]]


@cases(
    "values",
    [0.9, 0.5, 0.3, 0.2],
    [-3.0, 4.0, -1.0, 2.0],
    [1000.0, 1010.0, 1005.0, 1001.0],
    [0.0, 1e-4, 2e-4, 1.5e-4],
    [40.0, 100.0, 70.0, 50.0],
)
def test_points_are_where_the_axes_say(values):
    points = [Point(10 * place, place, value, value, value) for place, value in enumerate(values)]
    picture = parse(line_chart([Line("val", points, best=points[-1])]))
    step, value = readers(picture)
    span = max(values) - min(values)
    (path,) = [moves(one.get("d")) for one in with_class(picture, "line", "path")]
    for places in (dots(picture), path[0]):
        assert [step(x) for x, _ in places] == pytest.approx([0, 10, 20, 30], abs=0.1)
        assert [value(y) for _, y in places] == pytest.approx(values, abs=0.01 * span)
    assert dots(picture, "best") == [dots(picture)[-1]]


@cases(
    "values, upright, below",
    ([0.0, 10.5], ["0", "5", "10"], ["0", "20", "40", "60"]),
    ([99.9999, 100.0], ["99.9999", "99.99995", "100"], ["0", "20", "40", "60"]),
    ([2.0, 2.0], ["1.8", "1.9", "2", "2.1", "2.2"], ["0", "20", "40", "60"]),
)
def test_numbers_on_the_axes_are_few_and_all_different(values, upright, below):
    points = [Point(60 * place, 0, *[value] * 3) for place, value in enumerate(values)]
    picture = parse(line_chart([Line("", points)]))
    assert [text for text, _, _ in texts(picture, "end")] == upright
    assert [text for text, _, _ in texts(picture, "middle")] == [*below, "step"]


def test_each_number_below_has_a_tick_and_the_name_of_the_axis_is_below_them():
    """The name stands in the middle of the axis."""
    picture = parse(line_chart([Line("", FALLS)]))
    axis = [[float(one.get(name)) for name in ("x1", "x2", "y1", "y2")] for one in with_class(picture, "axis", "line")]
    (whole,) = [line for line in axis if line[0] != line[1]]
    *numbers, (name, middle, lowest) = texts(picture, "middle")
    assert [text for text, _, _ in numbers] == ["0", "100", "200", "300", "400"]
    ticks = [line for line in axis if line is not whole]
    assert [x for x, _, _, _ in ticks] == [x for _, x, _ in numbers]
    assert all(left == right and whole[2] == top < bottom for left, right, top, bottom in ticks)
    assert (name, middle) == ("step", (whole[0] + whole[1]) / 2)
    assert max(y for _, _, y in numbers) + 10 <= lowest <= 240


def test_pointer_shows_of_each_curve_the_value_nearest_to_the_step():
    """The text stands beside its strip, on the side with more room."""
    even, odd = ([Point(step, 0, *[float(step)] * 3) for step in range(first, 600, 2)] for first in (0, 1))
    strips = with_class(parse(line_chart([Line("even", even), Line("odd", odd)])), "at")
    assert len(strips) > 50
    for strip in strips:
        first, *lines = ["".join(line.itertext()) for line in strip.iter("tspan")]
        step = int(first.removeprefix("step ").partition(",")[0])
        for line, name, is_there in zip(lines, ("even", "odd"), (step % 2 == 0, step % 2 == 1), strict=True):
            near = int(line.split()[1])
            assert line == f"{name} {near}" + f" at step {near}" * (not is_there)
            assert abs(near - step) == (not is_there)
        left, right = (float(number) for number in strip.find("path").get("d")[1:].partition("V")[0].split(" 10H"))
        (x,) = {float(line.get("x")) for line in strip.iter("tspan")}
        is_left = strip.get("class") == "at end"
        assert x == pytest.approx(left - 6 if is_left else right + 6, abs=0.5)
        assert (x if is_left else 540 - x) > 540 / 2 - 50


def test_scale_starts_at_zero_only_where_that_hides_nothing():
    def lowest(values):
        points = [Point(place, 0, value, value, value) for place, value in enumerate(values)]
        return readers(parse(line_chart([Line("", points)])))[1](204)

    assert lowest([0.1, 1.0]) == pytest.approx(0, abs=0.01)
    assert lowest([0.9, 1.0]) == pytest.approx(0.895, abs=0.001)
    assert lowest([-0.1, 1.0]) < -0.1


def test_logarithmic_scale_is_read_as_one():
    points = [Point(place, 0, *[10.0**-place] * 3) for place in range(5)]
    picture = parse(line_chart([Line("loss", points)], y_label="loss", may_be_log=True))
    assert "loss (log)" in [text for text, _, _ in texts(picture, "middle")]
    step, value = readers(picture, is_log=True)
    assert [step(x) for x, _ in dots(picture)] == pytest.approx(range(5), abs=0.02)
    assert [value(y) for _, y in dots(picture)] == pytest.approx([10.0**-place for place in range(5)], rel=0.05)
    linear = parse(line_chart([Line("loss", points)], y_label="loss"))
    assert "loss" in [text for text, _, _ in texts(linear, "middle")]


def test_value_that_is_not_finite_is_a_gap():
    values = [1.0, 2.0, math.nan, 4.0, math.inf, 6.0, 7.0]
    picture = parse(line_chart([Line("", [Point(place, 0, *[value] * 3) for place, value in enumerate(values)])]))
    (path,) = [moves(one.get("d")) for one in with_class(picture, "line", "path")]
    assert [len(part) for part in path] == [2, 1, 2]
    assert len(dots(picture)) == 5


def test_band_goes_from_the_lowest_to_the_highest_value():
    points = [Point(place, 0, 2.0 + place, 1.0, 5.0) for place in range(3)]
    picture = parse(line_chart([Line("", points)]))
    _, value = readers(picture)
    (band,) = with_class(picture, "band")
    heights = [value(y) for _, y in moves(band.get("d").removesuffix("z"))[0]]
    assert heights == pytest.approx([5, 5, 5, 1, 1, 1], abs=0.05)


def test_rule_is_at_its_value_and_marks_are_at_their_steps():
    picture = parse(line_chart([Line("", FALLS)], rule=(0.25, "max_norm"), marks=[(100, "resumed")]))
    step, value = readers_with_rule(picture)
    (rule,) = with_class(picture, "rule")
    assert value(float(rule.get("y1"))) == pytest.approx(0.25, abs=0.01)
    (mark,) = with_class(picture, "mark")
    assert step(float(mark.get("d").split()[0].removeprefix("M"))) == pytest.approx(100, abs=1)
    assert mark.find("title").text == "resumed"


def readers_with_rule(picture):
    for parent in picture.iter():
        for one in [one for one in parent if one.get("class") == "label"]:
            parent.remove(one)
    return readers(picture)


def test_matrix_has_each_count_in_its_cell():
    counts, classes = [[5, 1, 0], [2, 7, 3], [0, 0, 4]], ["cat", "dog", "cow"]
    picture = parse(matrix_chart(counts, classes))
    cells = {}
    for one in with_class(picture, "cell"):
        x, y, width, height = (float(one.get(name)) for name in ("x", "y", "width", "height"))
        cells[x, y] = (x + width / 2, y + height / 2, width, one)
    columns, rows = sorted({x for x, _ in cells}), sorted({y for _, y in cells})
    assert (len(columns), len(rows)) == (3, 3)
    written = [one for one in picture.iter("text") if one.get("class") in ("light", "dark")]
    assert len(written) == 6  # zeros are left out
    for i, y in enumerate(rows):
        for j, x in enumerate(columns):
            middle_x, middle_y, width, cell = cells[x, y]
            assert (
                cell.find("title").text == f"{counts[i][j]} of {sum(counts[i])} {classes[i]} predicted as {classes[j]}"
            )
            assert ("right" if i == j else "wrong") in cell.get("class")
            inside = [
                one.text
                for one in written
                if abs(float(one.get("x")) - middle_x) < 1 and abs(float(one.get("y")) - middle_y) < width / 4
            ]
            assert inside == ([str(counts[i][j])] if counts[i][j] else [])
            name = [text for text, at, _ in texts(picture, "middle") if text in classes and abs(at - middle_x) < 1]
            assert name == [classes[j]]
        assert [text for text, _, at in texts(picture, "end") if abs(at - rows[i] - width / 2) < width / 4] == [
            classes[i]
        ]
    shades = [float(cells[columns[j], rows[0]][3].get("fill-opacity")) for j in range(3)]
    assert shades[0] > shades[1] > shades[2] == 0


@cases("names", ["a", "b"], ["class 0", "class 1"], [f"n {number}" for number in range(10, 40)], ["x" * 30] * 12)
def test_names_below_a_matrix_stand_above_the_name_of_the_axis(names):
    """The names of the axes are in the middle, and in the picture."""
    size = len(names)
    picture = parse(matrix_chart([[1] * size] * size, names))
    _, height = map(float, picture.get("viewBox").split()[2:])
    cells = [[float(one.get(name)) for name in ("x", "y", "width")] for one in with_class(picture, "cell")]
    left, top = (min(cell[place] for cell in cells) for place in (0, 1))
    for text, end, _ in texts(picture, "end")[:size]:  # about 6 pixels for each character
        assert end - 6 * len(text) > 14, "the names of the rows stand beside the name of the axis"
    right, bottom = (max(cell[place] + cell[2] for cell in cells) for place in (0, 1))
    found = {one.text: one for one in picture.iter("text")}
    x, y = (float(found["prediction"].get(name)) for name in "xy")
    assert x == pytest.approx((left + right) / 2, abs=1)
    below = [one for one in picture.iter("text") if float(one.get("y")) > bottom and one is not found["prediction"]]
    assert len(below) == size
    for one in below:
        deep = 6 * len(one.text) * math.sin(math.pi / 3) if one.get("transform") else 3
        assert bottom < float(one.get("y")) + deep < y - 9
    assert y + 3 < height
    assert left >= 0 <= top
    assert right <= 540
    place = [float(found["target"].get(name)) for name in "xy"]
    assert place[1] == pytest.approx((top + bottom) / 2, abs=2)
    turned = [float(number) for number in found["target"].get("transform")[len("rotate(") : -1].split()]
    assert turned == [-90, place[0], pytest.approx(place[1], abs=0.5)]


def test_reliability_is_read_off_its_axes():
    confidence, share, weight = [0.15, 0.5, 0.95], [0.3, 0.45, 0.8], [0.005, 0.295, 0.7]
    picture = parse(reliability_chart(confidence, share, weight, "accuracy"))
    step, value = readers(picture)
    assert [step(x) for x, _ in dots(picture)] == pytest.approx(confidence, abs=0.01)
    assert [value(y) for _, y in dots(picture)] == pytest.approx(share, abs=0.01)
    radii = [float(one.get("r")) for one in with_class(picture, "dot")]
    assert radii == [2, 4, 4], "few samples say little"
    bars = [(float(one.get("x")) + 9, float(one.get("height"))) for one in with_class(picture, "weight")]
    assert [step(x) for x, _ in bars] == pytest.approx(confidence, abs=0.01)
    assert [value(204 - height) for _, height in bars] == pytest.approx(weight, abs=0.01)
    (diagonal,) = with_class(picture, "rule")
    ends = [(step(float(diagonal.get(f"x{end}"))), value(float(diagonal.get(f"y{end}")))) for end in (1, 2)]
    assert ends == [pytest.approx((0, 0), abs=0.01), pytest.approx((1, 1), abs=0.01)]


def pictures(page):
    return [parse(f"<svg{part.partition('</svg>')[0]}</svg>") for part in page.split("<svg")[1:]]


def test_two_points_make_a_picture_and_one_does_not():
    assert len(pictures(run_page(record_of({"val/acc": [0.1, 0.9]})))) == 1
    assert pictures(run_page(record_of({"val/acc": [0.1]}))) == []
    one, two = record_of({"val/acc": [0.1]}), record_of({"val/acc": [0.1, 0.9]})
    assert len(pictures(comparison_page(two, two))) == len(pictures(comparison_page(one, two))) == 1
    assert pictures(comparison_page(one, one)) == []


def test_comparison_smooths_a_noisy_curve_and_no_short_one():
    def heights(length):
        values = [float(step % 2) for step in range(length)]
        (picture,) = pictures(comparison_page(*[record_of({"loss": values}, "step")] * 2))
        _, value = readers(picture)
        return [value(y) for _, y in moves(with_class(picture, "line", "path")[0].get("d"))[0]][10:-10]

    assert max(heights(60)) - min(heights(60)) == pytest.approx(1, abs=0.05)
    assert max(heights(2000)) - min(heights(2000)) < 0.2


def test_value_that_one_run_lacks_is_an_empty_cell():
    page = comparison_page(record_of({"val/acc": [0.1, 0.5]}), record_of({"val/f1": [0.2, 0.4]}))
    table = unescape(page.partition("Last and best values")[2])
    rows = [[cell.split(">")[-1] for cell in row.split("</td>")[:-1]] for row in table.split("<tr")[2:4]]
    assert rows == [["val/acc", "0.5", "", "", "0.5", ""], ["val/f1", "", "0.4", "", "", "0.4"]]
