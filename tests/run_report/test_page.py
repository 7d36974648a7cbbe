"""Pages: what is shown, what is left out, two runs, the command, and what git says."""

import re
from pathlib import Path

import pytest

from lightning_tricks import MetricsMonitor, RunReport, run_report
from lightning_tricks._shared.report_parts import ClassValues, ClippedSteps, ConfusionMatrix, Pictures, Reliability
from lightning_tricks.cli import main
from lightning_tricks.run_report import RunRecord, comparison_page, read_record, run_page
from lightning_tricks.run_report.core.comparison_page import differing_settings
from lightning_tricks.run_report.core.record import GitState, Resume, Row, write_rows, write_run
from lightning_tricks.run_report.core.run_writer import RunWriter
from lightning_tricks.run_report.core.svg import make_scale
from tests.run_report.test_callback import train
from tests.run_report.test_whole_page import Tree
from tests.small import EvaluatedNet, cases

EVIL = "<script>alert('x')</script>\"'&"


def luminance(color):
    """The relative luminance of a colour, as the Web Content Accessibility Guidelines define it."""
    digits = color[1:] if len(color) == 7 else "".join(2 * one for one in color[1:])
    parts = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def blend(color, back, opacity):
    parts = [
        round(opacity * int(color[at : at + 2], 16) + (1 - opacity) * int(back[at : at + 2], 16)) for at in (1, 3, 5)
    ]
    return "#" + "".join(f"{part:02x}" for part in parts)


@pytest.mark.parametrize("is_dark", [False, True])
def test_texts_and_curves_are_legible_in_light_and_in_dark_mode(is_dark):
    style = run_page(full_record()).partition("<style>")[2].partition("</style>")[0]
    light, dark = (dict(re.findall(r"--(\w+):(#\w+)", part)) for part in re.findall(r":root{(.*?)}", style, re.DOTALL))
    color = dark if is_dark else light
    color["back"] = color["back"].replace("#fff", "#ffffff")
    for back in ("back", "pale", "warm"):
        assert contrast(color["ink"], color[back]) > 7
        assert contrast(color["soft"], color[back]) > 4.5
    assert contrast(color["bad"], color["back"]) > 4.5
    assert min(contrast(color[f"c{number}"], color["back"]) for number in range(7)) > 3
    for count in range(1, 101):  # the numbers in a confusion matrix
        part = ConfusionMatrix(stage="val", epoch=0, classes=["a", "b"], counts=[[count, 100 - count], [0, 1]])
        page = run_page(RunRecord(parts=[part]))
        cells = re.findall(r'<rect class="cell (\w+)"[^>]*fill-opacity="([\d.]+)"', page)
        texts = re.findall(r'<text [^>]*class="(light|dark)">', page)
        shown = [cell for cell in cells if float(cell[1])]
        assert len(texts) == len(shown) == (2 if count == 100 else 3)
        for text, (kind, opacity) in zip(texts, shown, strict=True):
            ink = "#fff" if text == "light" else color["cell"]
            assert contrast(ink, blend(color[kind], color["back"], float(opacity))) > 4.5


def headings(page):
    return re.findall(r"<h2>(.*?)</h2>", page)


def full_record(**known):
    keys = f"train/{EVIL}", f"val/{EVIL}/dataloader_idx_{EVIL}", "grad_norm/pre_clip", f"lr-{EVIL}", "learning_rate"
    rows = [Row("step", step, 0, dict.fromkeys(keys, 1 / (1 + step))) for step in range(100)]
    parts = [
        ClippedSteps(optimizer=0, steps=100, clipped=100, skipped=2, max_norm=1.0),
        ConfusionMatrix(stage="val", epoch=0, classes=[EVIL, "b"], counts=[[3, 1], [0, 4]]),
        Reliability(stage="val", epoch=0, label="accuracy", confidence=[0.9], share=[0.8], weight=[1.0]),
        Pictures(
            title=EVIL, captions=[EVIL, "x"], mistakes=[True], pictures=["iVBORw0KGgoAAA==", 'x" onerror="alert(1)']
        ),
    ]
    given = {
        "module": EVIL,
        "message": EVIL,
        "status": "failed",
        "arguments": [(EVIL, EVIL)],
        "versions": [("torch", EVIL)],
        "git": GitState("abc", EVIL, [EVIL], f"+{EVIL}", True),
    }
    return RunRecord(**{**given, "rows": rows, "parts": parts, **known})


@cases(
    "make",
    run_page,
    lambda record: comparison_page(record, full_record(seconds=3.0), (EVIL, "B")),
    lambda record: run_page(record, (EVIL, full_record(arguments=[(EVIL, "0" * 100)] * 20, status="finished"))),
)
def test_all_text_is_escaped_and_all_tags_are_closed(make):
    page = Tree(make(full_record()))
    assert page.open == [page.root], "each tag is closed"
    elements = list(page.root.iter())
    assert {"script", "link", "iframe"}.isdisjoint(one.tag for one in elements)
    assert "alert('x')" in "".join(page.root.itertext())
    loaded = [one.get(name) for one in elements for name in ("src", "href", "data", "srcset") if one.get(name)]
    assert all(address.startswith("data:image/png;base64,") for address in loaded), "it loads nothing"
    assert not [name for one in elements for name in one.attrib if name.startswith("on")]


def test_templates_escape_all_but_our_own_svg():
    templates = "".join(path.read_text() for path in Path(run_report.__file__).with_name("templates").iterdir())
    assert re.findall(r"[\w.]+ *\| *safe", templates) == ["one.picture|safe"]
    assert "autoescape" not in templates


def test_what_there_is_no_data_for_is_left_out():
    assert headings(run_page(RunRecord(module="Net"))) == []
    assert headings(run_page(RunRecord(versions=[("torch", "2")]))) == ["Reproducibility"]


def test_curves_that_are_not_shown_are_counted():
    def page_of(count):
        rows = [Row("epoch", step, step, {f"m{number}": 1.0 for number in range(count)}) for step in range(2)]
        return run_page(RunRecord(rows=rows))

    for count, figures, note in (
        (4, 4, ""),
        (5, 5, "1 more curve"),
        (64, 64, "60 more curves"),
        (70, 64, "60 more curves, and 6 that are not shown"),
    ):
        page = page_of(count)
        assert page.count("<figure>") == figures
        assert [text for text in re.findall("<summary>(.*?)</summary>", page) if "more" in text] == [note] * bool(note)
        assert f"<td>m{count - 1}</td>" in page


def test_curves_of_one_quantity_share_a_picture_and_differ_in_colour_and_dashes():
    keys = ["train_loss_epoch", "Train/Loss", "val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1", "loss/test"]
    keys += ["trainAcc", "val/accuracy", "balanced_acc", "valBalancedAcc", "lr", "learning_rate", "lr-Adam"]
    keys += ["gpu0/power_w", "gpu1/power_w"]
    rows = [Row("epoch", step, step, dict.fromkeys(keys, 0.1 * step)) for step in range(3)]
    page = run_page(RunRecord(rows=rows))
    titles = re.findall(r"<figcaption><h3>(.*?)</h3>", page)
    assert titles == ["Loss", "Acc", "BalancedAcc", "learning rate", "gpu/power_w"]
    legends = re.findall(r"<figcaption>(.*?)</figcaption>", page)
    labels = [re.findall(r"<i></i>(.*?)</span>", legend) for legend in legends]
    assert labels[0] == ["train", "train (epoch)", "val loader 0", "val loader 1", "test", "best"]
    assert labels[1:3] == [["train", "val", "best"], ["val", "balanced_acc", "best"]]
    assert labels[3:] == [["lr", "learning_rate", "lr-Adam"], ["gpu0", "gpu1"]]
    for legend in legends:
        styles = re.findall(r'class="key k(\d)(?: d(\d))?"', legend)
        assert len({color for color, _ in styles}) == len(styles) >= 2
        assert len(set(styles)) == len(styles)
        assert len({dash for _, dash in styles[:4]}) == min(len(styles), 4)


def test_resumes_are_marked_in_the_pictures_of_metrics():
    rows = [Row("epoch", step, step, {"val/loss": 1.0}) for step in range(3)]
    page = run_page(RunRecord(rows=rows, resumes=[Resume(1, 1, 0.0)]))
    assert re.findall(r'class="mark"[^>]*><title>(.*?)<', page) == ["resumed at step 1"]


def test_large_record_makes_a_small_page():
    rows = [Row("step", step, 0, {f"m{number}": step * 0.37 for number in range(4)}) for step in range(20_000)]
    assert len(run_page(RunRecord(rows=rows))) < 400_000


def test_comparison_names_what_differs_and_nothing_else():
    same = {"versions": [("torch", "2.6")], "trainer": [("precision", "32-true")]}
    header = "diff --git a/{0}.py b/{0}.py\n@@\n+{1}\n"
    diffs = ["".join(header.format(*pair) for pair in pairs) for pairs in (["a1", "b1"], ["a1", "b2", "c1"])]
    one = RunRecord(arguments=[("lr", "0.1"), ("width", "8")], git=GitState("a" * 40, diff=diffs[0]), **same)
    other = RunRecord(arguments=[("lr", "0.2"), ("depth", "3")], git=GitState("a" * 40, diff=diffs[1]), **same)
    assert differing_settings(one, other) == [
        ("lr (hyper-parameter)", "0.1", "0.2"),
        ("width (hyper-parameter)", "8", "-"),
        ("depth (hyper-parameter)", "-", "3"),
        ("uncommitted changes, which differ in", "b.py", "b.py, c.py"),
    ]
    assert differing_settings(one, one) == []


@pytest.mark.parametrize(("count", "said"), [(300, []), (301, ["1"]), (1302, ["1,002"])])
def test_comparison_counts_the_settings_that_it_does_not_show(count, said):
    """The first 300 are shown."""
    runs = [RunRecord(arguments=[(f"a{number}", value) for number in range(count)]) for value in ("0.1", "0.2")]
    page = comparison_page(*runs)
    assert len(cells(page, "What differs")) == 3 * 300
    assert re.findall(r"([\d,]+) more settings differ\.", page) == said


def test_command_makes_pages_of_one_and_of_two_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        (tmp_path / name).mkdir()
        record = full_record(seconds=len(name))
        write_run(tmp_path / name, record)
        write_rows(tmp_path / name, record.rows)
    assert main(["report", "a"]) == 0
    assert (tmp_path / "a" / "report.html").read_text(encoding="utf-8") == run_page(read_record("a"))
    assert main(["report", "a", "b"]) == 0
    assert (tmp_path / "comparison.html").exists()
    assert "<h1>a and b</h1>" in (tmp_path / "comparison.html").read_text(encoding="utf-8")
    assert main(["report", "a", "b", "--out", "other.html"]) == 0
    assert "other.html" in capsys.readouterr().out
    (tmp_path / "old").mkdir()
    (tmp_path / "b").rename(tmp_path / "old" / "a")
    assert main(["report", "a", str(Path("old", "a"))]) == 0
    assert "<h1>a and old/a</h1>" in (tmp_path / "comparison.html").read_text(encoding="utf-8")


def test_command_replaces_no_file_that_is_no_report(tmp_path, capsys):
    record = full_record()
    write_run(tmp_path, record)
    write_rows(tmp_path, record.rows)
    (tmp_path / "mine.html").write_text("mine")
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path), "--out", str(tmp_path / "mine.html")])
    assert "give another path" in capsys.readouterr().err
    assert (tmp_path / "mine.html").read_text() == "mine"


@pytest.mark.parametrize("values", [[0.0, 1.0], [5.0], [], [1e-9, 1e9], [-3.0, 1e308], [1e-320, 1.0], [7.0, 7.0]])
@pytest.mark.parametrize("may_be_log", [True, False])
def test_scale_has_all_values_and_few_ticks(values, may_be_log):
    scale = make_scale(values, 0, 100, may_be_log=may_be_log)
    assert all(0 <= scale(value) <= 100 for value in values)
    assert [scale(value) for value in sorted(values)] == sorted(scale(value) for value in values)
    assert 1 <= len(scale.ticks(5)) <= 7
    assert all(scale.low <= tick <= scale.high * (1 + 1e-9) for tick in scale.ticks(5))


def test_monitors_with_prefixes_have_parts_of_their_own(tmp_path):
    preset = {"task": "multiclass", "num_classes": 10}
    train([RunReport(tmp_path), MetricsMonitor(preset), MetricsMonitor(preset, prefix="ema")], EvaluatedNet())
    assert [part.stage for part in read_record(tmp_path).parts_of(ConfusionMatrix)] == ["val", "ema/val"]


def cells(page, heading):
    part = page.partition(f"<h2>{heading}")[2].partition("<h2>")[0]
    return [re.sub("<.*?>", "", cell) for cell in re.findall(r"<(?:td|dd)[^>]*>(.*?)</(?:td|dd)>", part)]


def test_page_names_the_first_twenty_files_that_were_not_compared():
    """Dots stand for the others."""

    def shown(count):
        names = [f"f{number}" for number in range(count)]
        return cells(run_page(RunRecord(git=GitState("c" * 40, not_compared=names))), "Code")[-1]

    assert cells(run_page(RunRecord(git=GitState("c" * 40))), "Code") == ["commit", "c" * 40, "changed files", "none"]
    assert shown(2) == "f0, f1"
    assert shown(20).endswith("f18, f19")
    assert shown(21).endswith("f18, f19, ...")


@pytest.mark.parametrize("count", [40, 43])
def test_classes_beyond_the_first_forty_are_folded(count):
    """Each class has its row, in the first table or in the folded one."""
    names = [f"c{number}" for number in range(count)]
    part = ClassValues(stage="val", epoch=0, classes=names, metrics=["f1"], values=[[0.5]] * count)
    page = run_page(RunRecord(parts=[part]))
    assert cells(page, "Classes")[::2] == names
    assert re.findall("<summary>(.*?)</summary>", page) == ["3 more classes"] * (count > 40)
    assert cells(page.partition("</table>")[0], "Classes")[::2] == names[:40]


def test_further_reports_of_one_folder_are_numbered(tmp_path):
    for _ in range(12):
        writer = RunWriter(tmp_path, RunRecord())
        writer.start()
        writer.close()
    assert {one.name for one in tmp_path.glob("earlier-*")} == {f"earlier-{number}" for number in range(1, 12)}
