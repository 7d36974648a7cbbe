"""The page of a run, read as its reader does: each number on it is computed anew from the record."""

import math
import random
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from lightning_tricks._shared.report_parts import (
    ClassValues,
    ClippedSteps,
    ConfusionMatrix,
    DeviceUse,
    Facts,
    Pictures,
    Reliability,
)
from lightning_tricks.run_report import RunRecord, comparison_page, find_all, run_page
from lightning_tricks.run_report.core.record import GitState, Resume, Row
from tests.run_report.test_pictures import dots, moves, readers_with_rule, texts, with_class

PNG = "iVBORw0KGgoAAA=="
BETTER = {"loss": min, "f1": max, "acc": max, "other": None}
COLORS = {"train": "c0", "val": "c1", "test": "c2", "": "c6"}
STEPS, EPOCHS = 120, 6


class Tree(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.root = ElementTree.Element("root")
        self.open = [self.root]
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        one = ElementTree.SubElement(self.open[-1], tag, {name: value or "" for name, value in attrs})
        if tag not in ("meta", "img", "wbr"):
            self.open.append(one)

    def handle_startendtag(self, tag, attrs):
        ElementTree.SubElement(self.open[-1], tag, {name: value or "" for name, value in attrs})

    def handle_endtag(self, tag):
        assert self.open.pop().tag == tag

    def handle_data(self, data):
        last = self.open[-1]
        if len(last):
            last[-1].tail = (last[-1].tail or "") + data
        else:
            last.text = (last.text or "") + data


def words(one):
    return " ".join("".join(one.itertext()).split())


def sections(page):
    return {words(one.find("h2")): one for one in Tree(page).root.iter("section")}


def figures(section):
    return {words(one.find(".//h3")): one for one in section.iter("figure") if one.find(".//h3") is not None}


def rows(table):
    return [[words(cell) for cell in row] for row in table.iter("tr")]


def tables(section):
    """The tables by the heading before them, or by what folds them."""
    found = {}
    for parent in section.iter():
        for before, one in zip([None, *parent], parent, strict=False):
            if one.tag == "table":
                found["" if before is None else words(before)] = rows(one)
    return found


def legend(figure):
    return [words(one) for one in figure.find("figcaption").iter("span")]


def readings(figure):
    """What a picture shows under the pointer: the lines of text of each strip, from left to right."""
    strips = with_class(figure.find("svg"), "at")
    edges = [[float(number) for number in re.findall(r"[\d.]+", one.find("path").get("d"))] for one in strips]
    assert [left for left, _, right, *_ in edges[1:]] == [right for _, _, right, *_ in edges[:-1]], "no gaps"
    assert (edges[0][0], edges[-1][2]) == (58, 526)
    return [[words(line) for line in one.iter("tspan")] for one in strips]


def drawn(figure):
    """The lines of a picture: class -> the points that they go through, as the axes say."""
    picture = figure.find("svg")
    is_log = any("(log)" in text for text, _, _ in texts(picture, "middle"))
    step, value = readers_with_rule(picture)
    assert not is_log
    found = {}
    for one in with_class(picture, "line", "path"):
        found[one.get("class")] = [(step(x), value(y)) for part in moves(one.get("d")) for x, y in part]
    return found


def near(found, expected):
    """Whether points lie where they should, as exactly as pixels are drawn."""
    assert [step for step, _ in found] == pytest.approx([step for step, _ in expected], abs=0.3)
    values = [value for _, value in expected]
    spread = max(values) - min(values)
    assert [value for _, value in found] == pytest.approx(values, abs=0.01 * (spread or abs(values[0])))


def shown(value):
    """A number with four digits, as people write it."""
    if math.isnan(value):
        return "NaN"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.4g}"


def percent(share):
    share *= 100
    return f"{share:.2g} %" if 0 < share < 1 else f"{share:.4g} %" if 99 < share < 100 else f"{share:.0f} %"


def some_record(seed):
    numbers = random.Random(seed)
    per_epoch, found = STEPS // EPOCHS, []
    for step in range(STEPS):
        level = math.exp(-step / 40)
        found.append(Row("step", step, step // per_epoch, {
            "train/loss_step": 1 + level + numbers.gauss(0, 0.1),
            "train/acc": 0.9 - level / 2 + numbers.gauss(0, 0.05),
            "learning_rate": 0.1 * (1 - step / STEPS),
            "grad_norm/pre_clip": math.nan if step in (30, 60) else 2 + numbers.random(),
            "grad_norm/post_clip": 1.0,
        }))  # fmt: skip
        if step % per_epoch == per_epoch - 1:
            found.append(Row("epoch", step, step // per_epoch, {
                "train/loss_epoch": 1 + level,
                "val/loss": 1.1 + numbers.random(),
                "val/acc": numbers.random(),
                "val/f1": numbers.random(),
                "other": numbers.random() * 5000,
                "val/acc_cat": numbers.random(),
                "gpu0/power_w": 200 + 50 * numbers.random(),
                "gpu0/val_power_w": 100 + 50 * numbers.random(),
                "flops/mfu": 0.3 + 0.1 * numbers.random(),
            }))  # fmt: skip
    found.append(Row("epoch", STEPS, EPOCHS, {"test/acc": numbers.random()}))
    size = numbers.choice((3, 4))
    names = ["cat", "dog", "cow", "hen"][:size]
    counts = [[numbers.randrange(5, 40) * (1 + 9 * (a == b)) for a in range(size)] for b in range(size)]
    counts[1] = [0] * size
    parts = [
        ClippedSteps(optimizer=0, steps=STEPS, clipped=numbers.randrange(120), skipped=seed, max_norm=1.0),
        ConfusionMatrix(stage="val", epoch=5, classes=names, counts=counts),
        ConfusionMatrix(stage="test", epoch=6, classes=names, counts=counts),
        Reliability(stage="val", epoch=5, label="accuracy", confidence=[0.6, 0.9], share=[0.5, 0.7], weight=[0.4, 0.6]),
        ClassValues(
            stage="val", epoch=5, classes=names[:2], metrics=["f1"], values=[[0.25], [None]], keys=["val/acc_cat"]
        ),
        Facts(title="FLOPs", facts=[("forward", f"{seed} kFLOP")], sentences=["Counted once."], section="cost"),
        Facts(title="Seed", facts=[("seed", str(seed))]),
        Facts(title="Other metrics, val", facts=[("kappa", "0.5")], section="metrics"),
        DeviceUse(rank=1, data_wait=3.0, rows=[("gpu1", "power w", "8 W", "9 W")], verdict=["All is well."]),
        DeviceUse(rank=0, data_wait=2.0, rows=[("gpu0", "power w", "6 W", "7 W")], verdict=["All is better."]),
        Pictures(
            title="Most confident mistakes (val)",
            captions=["a at 9%, is b", "!c"],
            mistakes=[True],
            pictures=[PNG, PNG],
            note="Epoch 5.",
        ),
    ]
    return RunRecord(
        module="Net",
        status="finished",
        started=86_400.0,
        seconds=3725.0,
        validation_seconds=725.0,
        batches=STEPS,
        samples=3 * STEPS,
        ranks=2,
        step=STEPS,
        epochs=EPOCHS,
        rows=found,
        parts=parts,
        arguments=[("lr", "0.1"), ("width", str(seed))],
        trainer=[("precision", "32-true")],
        data=[("training batches", "20")],
        versions=[("torch", "2.9")],
        git=GitState("c" * 40, "main", [" M a.py", "?? b"], "+1\n-2\n", True),
        resumes=[Resume(1234, 2, 0.0, ["x", "y"]), Resume(1235, 3, 60.0)],
        keys_left_out=1234,
    )


def curve(record, key):
    return [(row.step, row.epoch, row.values[key]) for row in record.rows if key in row.values]


def best(record, key, choose):
    """The epoch and the value of the best, the first of equals."""
    points = curve(record, key)
    value = choose(value for _, _, value in points)
    return next((epoch, one) for _, epoch, one in points if one == value)


SEEDS = pytest.mark.parametrize("seed", range(3))


@SEEDS
def test_head_of_the_page(seed):
    record = some_record(seed)
    header = Tree(run_page(record)).root.find(".//header")
    assert words(header.find("h1")) == "Net"
    assert words(header.find("p")) == "finished · 1970-01-02 00:00 UTC · the fit took 1 h 2 min"
    tiles = [(words(one.find("b")), words(one.find("span"))) for one in header.iter("li")]
    expected = [("120", "steps"), ("6", "epochs"), (shown(3 * 120 / 3725), "samples a second, on rank 0 of 2")]
    for key in ("val/loss", "val/acc", "val/f1"):
        epoch, value = best(record, key, BETTER[key[4:]])
        expected.append((shown(value), f"best {key}, epoch {epoch}"))
    assert tiles == expected


@SEEDS
def test_findings_and_order_of_the_sections(seed):
    record = some_record(seed)
    page = run_page(record)
    found = sections(page)
    assert list(found) == [
        *("What stands out", "Loss and metrics", "Learning rate and gradients", "Classes (val)", "Classes (test)"),
        *("Most confident mistakes (val)", "Cost", "Devices", "Reproducibility", "Code", "Settings"),
    ]
    items = [(one.get("class"), words(one)) for one in found["What stands out"].iter("li")]
    assert items == [(one.level, one.text) for one in find_all(record)]
    assert 'http-equiv="refresh"' not in page
    assert 'http-equiv="refresh"' in run_page(RunRecord(status="running"))
    assert "<b>5</b><span>samples a second</span>" in run_page(RunRecord(seconds=10.0, samples=50, batches=5))
    for status, said in (
        ("running", "was running when this page was written"),
        ("failed", "failed: Oh!"),
        ("stopped", "stopped"),
    ):
        other = Tree(run_page(RunRecord(status=status, message="Oh!" * (status == "failed")))).root
        assert words(other.find(".//header/p")).startswith(said)
        assert words(other.find(".//h1")) == "Run"


@SEEDS
def test_curves_of_metrics(seed):
    record = some_record(seed)
    pictures = figures(sections(run_page(record))["Loss and metrics"])
    assert list(pictures) == ["loss", "acc", "f1", "other"]
    assert legend(pictures["loss"]) == ["train (epoch)", "train (step)", "val", "best"]
    assert legend(pictures["acc"]) == ["train", "train, running mean", "val", "test", "best"]
    assert legend(pictures["f1"]) == ["val", "best"]
    assert legend(pictures["other"]) == []
    lines = {"loss": {"line c0": "train/loss_epoch", "line c0 faint": "train/loss_step", "line c1 d1": "val/loss"}}
    lines |= {"acc": {"line c0 faint": "train/acc", "line c1 d1": "val/acc"}, "f1": {"line c1": "val/f1"}}
    lines |= {"other": {"line c6": "other"}}
    for name, keys in lines.items():
        there = drawn(pictures[name])
        for kind, key in keys.items():
            near(there.pop(kind), [(step, value) for step, _, value in curve(record, key)])
        if name == "acc":  # a mean over a twenty-fifth, or five
            values = [value for _, _, value in curve(record, "train/acc")]
            means = [values[max(0, place - 2) : place + 3] for place in range(STEPS)]
            near(there.pop("line c0"), [(step, sum(part) / len(part)) for step, part in enumerate(means)])
        assert there == {}
        rings = dots(pictures[name].find("svg"), "best")
        if BETTER[name] is not None:
            epoch, value = best(record, f"val/{name}", BETTER[name])
            step, height = readers_with_rule(pictures[name].find("svg"))
            near([(step(x), height(y)) for x, y in rings], [(20 * epoch + 19, value)])
        else:
            assert rings == []
    assert readings(pictures["f1"]) == [
        [f"step {step}, epoch {epoch}", f"val {shown(value)}"] for step, epoch, value in curve(record, "val/f1")
    ]
    found = readings(pictures["loss"])  # 60 strips, among them those with the values of epochs
    assert len(found) <= 60
    assert [line.split()[0] for line in found[-1][1:]] == ["train", "train", "val"]
    assert {first.split()[1].rstrip(",") for first, *_ in found} >= {
        str(step) for step, _, _ in curve(record, "val/loss")
    }


def test_a_mean_is_drawn_of_many_steps_and_of_no_epochs():
    def legends(kind, count, *keys):
        found = [Row(kind, place, place, dict.fromkeys(keys, place % 7)) for place in range(count)]
        return {
            name: legend(one)
            for name, one in figures(sections(run_page(RunRecord(rows=found)))["Loss and metrics"]).items()
        }

    assert legends("epoch", 100, "val/acc", "other") == {"acc": ["val", "best"], "other": []}
    assert legends("step", 60, "train/acc", "other") == {"acc": ["train"], "other": []}
    assert legends("step", 61, "train/acc", "x") == {"acc": ["train", "train, running mean"], "x": ["running mean"]}
    assert legends("step", 61, "loss_step", "loss_epoch") == {"loss": ["(epoch)", "(step)"]}
    assert legends("step", 61, "loss_step") == {"loss": ["running mean"]}


@SEEDS
def test_table_of_last_and_best_values(seed):
    record = some_record(seed)
    section = sections(run_page(record))["Loss and metrics"]
    assert words(section).endswith("1,234 more keys were logged and not recorded.")
    expected = [["value", "last", "best (epochs count from 0)"]]
    for key in (
        "train/loss_epoch",
        "train/loss_step",
        "val/loss",
        "train/acc",
        "val/acc",
        "test/acc",
        "val/f1",
        "other",
    ):
        points, said = curve(record, key), ""
        if key in ("train/loss_epoch", "val/loss", "val/acc", "val/f1"):
            epoch, value = best(record, key, min if "loss" in key else max)
            said = f"{shown(value)} (epoch {epoch})"
        expected.append([key, shown(points[-1][2]), said])
    assert tables(section)["Last and best values"] == expected


@SEEDS
def test_learning_rate_and_gradients(seed):
    record = some_record(seed)
    found = figures(sections(run_page(record))["Learning rate and gradients"])
    assert list(found) == ["learning rate", "gradient norm"]
    near(drawn(found["learning rate"])["line c0"], [(step, value) for step, _, value in curve(record, "learning_rate")])
    norms = drawn(found["gradient norm"])
    before = [(step, value) for step, _, value in curve(record, "grad_norm/pre_clip")]
    near(norms["line c1"], [point for point in before if not math.isnan(point[1])])
    marks = [words(one) for one in with_class(found["gradient norm"].find("svg"), "mark")]
    assert marks == ["not finite at step 30", "not finite at step 60"]
    assert [value for _, value in norms["line c0"]] == pytest.approx([1.0] * STEPS, abs=0.02)
    assert legend(found["gradient norm"]) == ["before clipping", "after clipping"]
    (part,) = record.parts_of(ClippedSteps)
    skipped = f", {seed} skipped." if seed else "."
    assert words(found["gradient norm"].find("small")) == f"{part.clipped} of 120 steps clipped{skipped}"


@SEEDS
def test_classes(seed):
    record = some_record(seed)
    found = sections(run_page(record))
    matrix = record.parts_of(ConfusionMatrix)[0]
    of_val, of_test = figures(found["Classes (val)"]), figures(found["Classes (test)"])
    assert list(of_val) == ["confusion matrix, epoch 5", "reliability, epoch 5", "metrics of each class, epoch 5"]
    assert list(of_test) == ["confusion matrix", "classes"]
    assert rows(of_val["metrics of each class, epoch 5"].find("table")) == [
        ["class", "f1"],
        ["cat", "0.25"],
        ["dog", ""],
    ]
    assert words(of_val["reliability, epoch 5"].find("small")).startswith("Expected calibration error 0.160.")
    titles = [words(one) for one in of_test["confusion matrix"].iter("title")]
    assert titles == [
        f"{count} of {sum(row)} {target} predicted as {predicted}"
        for target, row in zip(matrix.classes, matrix.counts, strict=True)
        for predicted, count in zip(matrix.classes, row, strict=True)
    ]
    expected = [["class", "samples", "recall", "precision"]]
    for place, name in enumerate(matrix.classes):
        row, column = matrix.counts[place], [of[place] for of in matrix.counts]
        recall = percent(row[place] / sum(row)) if sum(row) else ""
        expected.append([name, str(sum(row)), recall, percent(row[place] / sum(column)) if sum(column) else ""])
    assert rows(of_test["classes"].find("table")) == expected


@SEEDS
def test_mistakes_cost_devices_and_what_is_needed_to_repeat_the_run(seed):
    record = some_record(seed)
    found = sections(run_page(record))
    mistakes = found["Most confident mistakes (val)"]
    wrong, right = with_class(mistakes, "gallery")
    assert [(one.get("class"), words(one)) for one in wrong.iter("figure")] == [("wrong", "a at 9%, is b")]
    assert [(one.get("class"), words(one)) for one in right.iter("figure")] == [(None, "!c")]
    assert [words(one) for one in mistakes.iter("h3")] == ["Predicted correctly"]
    assert [one.get("src") for one in mistakes.iter("img")] == [f"data:image/png;base64,{PNG}"] * 2
    assert words(mistakes).endswith("Epoch 5.")

    assert tables(found["Cost"])["FLOPs"] == [["forward", f"{seed} kFLOP"]]
    assert [words(one) for one in found["Cost"].iter("p") if one.get("class") == "soft"] == [
        *("Rank 1: All is well.", "Rank 0: All is better.", "Counted once.")
    ]
    assert tables(found["Cost"])["Throughput"] == [
        ["samples a second, on rank 0 of 2", shown(3 * 120 / 3725)],
        ["samples a second, without validation, on rank 0 of 2", shown(3 * 120 / 3000)],
        ["batches a second, on rank 0 of 2", shown(120 / 3725)],
        ["share of the time in validation", "19 %"],
        ["share of the time of rank 1 waiting for data", "3 %"],
        ["share of the time of rank 0 waiting for data", "2 %"],
    ]
    near(
        drawn(figures(found["Cost"])["flops/mfu"])["line c0"],
        [(step, value) for step, _, value in curve(record, "flops/mfu")],
    )

    devices = found["Devices"]
    assert rows(devices.find("table"))[1:] == [
        ["0", "gpu0", "power w", "6 W", "7 W"],
        ["1", "gpu1", "power w", "8 W", "9 W"],
    ]
    power = figures(devices)
    assert list(power) == ["gpu/power_w"]
    assert legend(power["gpu/power_w"]) == ["gpu0", "gpu0, validation"]
    lines = drawn(power["gpu/power_w"])
    for kind, key in (("line c0", "gpu0/power_w"), ("line c1 d1", "gpu0/val_power_w")):
        near(lines[kind], [(step, value) for step, _, value in curve(record, key)])
    assert {text for text, _, _ in texts(power["gpu/power_w"].find("svg"), "middle")} >= {"step", "W"}

    assert tables(found["Loss and metrics"])["Other metrics, val"] == [["kappa", "0.5"]]
    repeat = tables(found["Reproducibility"])
    assert {*repeat} == {"Seed", "Versions", "Resumes"}
    assert repeat["Seed"] == [["seed", str(seed)]]
    assert repeat["Versions"] == [["torch", "2.9"]]
    resumes = [["1,234", "2", "1970-01-01 00:00 UTC", "x, y"], ["1,235", "3", "1970-01-01 00:01 UTC", "nothing"]]
    assert repeat["Resumes"] == [["step", "epoch", "time", "not restored"], *resumes]
    code = found["Code"]
    assert rows(code.find(".//table")) == [["commit", "c" * 40], ["branch", "main"], ["changed files", "2"]]
    assert [words(one) for one in code.iter("summary")] == ["Changed files", "Uncommitted changes (2 lines)"]
    assert [one.text for one in code.iter("pre")] == [" M a.py\n?? b", "+1\n-2\n"]
    assert words(code).endswith("Only the beginning was kept.")
    settings = tables(found["Settings"])
    assert settings == {
        "Hyper-parameters": [["lr", "0.1"], ["width", str(seed)]],
        "Data": [["training batches", "20"]],
        "Trainer": [["precision", "32-true"]],
    }


def test_two_runs_in_one_page():
    first, second = some_record(0), some_record(1)
    page = comparison_page(first, second, ("one", "two"))
    assert words(Tree(page).root.find(".//title")) == words(Tree(page).root.find(".//h1")) == "one and two"
    found = sections(page)
    assert list(found) == [
        *("Loss and metrics", "Last and best values", "Learning rate and gradients", "What differs", "What stands out")
    ]
    pictures = figures(found["Loss and metrics"])
    assert list(pictures) == ["loss", "acc", "f1", "other"]
    assert legend(pictures["f1"]) == ["one val", "two val", "best"]
    lines = drawn(pictures["f1"])
    for kind, record in (("line c0", first), ("line c1", second)):
        near(lines[kind], [(step, value) for step, _, value in curve(record, "val/f1")])
    rates = drawn(figures(found["Learning rate and gradients"])["learning rate"])
    for kind in ("line c0", "line c1 d1"):
        near(rates[kind], [(step, value) for step, _, value in curve(first, "learning_rate")])
    table = {row[0]: row[1:] for row in rows(found["Last and best values"].find("table"))}
    assert table["value"] == ["last, one", "last, two", "difference", "best, one", "best, two"]
    for key in ("val/loss", "val/f1", "other"):
        last = [curve(record, key)[-1][2] for record in (first, second)]
        choose = BETTER[key.rpartition("/")[2]]
        bests = ["", ""] if choose is None else [shown(best(record, key, choose)[1]) for record in (first, second)]
        assert table[key] == [*map(shown, last), shown(last[1] - last[0]), *bests]
    heads = [words(one) for one in found["What stands out"].iter("h3")]
    assert heads == ["one", "two"]
    items = [words(one) for one in found["What stands out"].iter("li")]
    assert items == [one.text for record in (first, second) for one in find_all(record)]
