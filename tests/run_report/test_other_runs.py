"""The run before, and the table of many runs."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from lightning_tricks import RunReport
from lightning_tricks.cli import main
from lightning_tricks.run_report import RunRecord, read_record, run_page
from lightning_tricks.run_report.core import other_runs
from lightning_tricks.run_report.core.other_runs import ends_of, find_run_before, make_overview
from lightning_tricks.run_report.core.record import RUN_FILE, VALUES_FILE, Row, write_rows, write_run
from tests.run_report.test_callback import Logs, train
from tests.run_report.test_page import EVIL
from tests.run_report.test_whole_page import Tree, rows, sections, words
from tests.small import cases


def record_of(started=100.0, values=(0.5, 0.9, 0.7), key="val/acc", **known):
    found = [Row("epoch", step, step, {key: value}) for step, value in enumerate(values)]
    given = {"id": f"{started}", "module": "Net", "status": "finished", "step": len(values), "epochs": len(values)}
    return RunRecord(**{**given, "started": started, "rows": found, **known})


def save(folder, record):
    folder.mkdir(parents=True)
    write_run(folder, record)
    write_rows(folder, record.rows)
    return record


def before(page):
    return sections(page).get("Compared with the previous run")


@pytest.mark.oldest
def test_page_shows_what_differs_from_the_run_before(tmp_path):
    class Other(Logs):
        pass

    train([RunReport(tmp_path / "first")], max_epochs=1)
    train([RunReport(tmp_path / "second")], Other(), seed=1)
    assert before((tmp_path / "second" / "report.html").read_text(encoding="utf-8")) is None, "another module"
    train([RunReport(tmp_path / "third")], Logs(), seed=1)
    section = before((tmp_path / "third" / "report.html").read_text(encoding="utf-8"))
    assert words(section.find("p")).startswith("first: finished, ")
    first, third = (read_record(tmp_path / name) for name in ("first", "third"))
    values = {row[0]: row[1:] for row in rows(section.findall(".//table")[0])}
    assert list(values)[:2] == ["value", "val/loss"]
    last = [record.curve("val/loss")[-1].value for record in (first, third)]
    best = [min(point.value for point in record.curve("val/loss")) for record in (first, third)]
    shown = [float(text) for text in values["val/loss"]]
    assert shown == pytest.approx([*last, last[1] - last[0], *best], rel=1e-3)
    assert not any("_step" in key for key in values)
    settings = {row[0]: row[1:] for table in section.findall(".//table")[1:] for row in rows(table)}
    assert settings["max_epochs (trainer)"] == ["1", "2"]
    assert settings["seed (trainer)"] == ["0", "1"]


def test_run_before_is_the_newest_finished_one_of_the_module_that_started_earlier(tmp_path):
    own = save(tmp_path / "own", record_of(500.0))
    save(tmp_path / "older", record_of(100.0))
    save(tmp_path / "newer", record_of(300.0))
    save(tmp_path / "later", record_of(600.0))
    save(tmp_path / "other", record_of(400.0, module="Other"))
    save(tmp_path / "stopped", record_of(450.0, status="stopped"))
    save(tmp_path / "copy", replace(own, started=450.0))
    for number, name in enumerate(("later", "newer", "older")):
        os.utime(tmp_path / name / RUN_FILE, (number, number))  # when a file was copied says nothing
    name, record = find_run_before(tmp_path / "own", own)
    assert (name, record.started) == ("newer", 300.0)
    assert [point.value for point in record.curve("val/acc")] == [0.5, 0.9, 0.7]
    assert find_run_before(tmp_path / "older", read_record(tmp_path / "older")) is None


def test_runs_in_folders_of_one_name_are_neighbours(tmp_path):
    save(tmp_path / "a" / "report", record_of(100.0))
    own = save(tmp_path / "b" / "report", record_of(200.0))
    assert find_run_before(tmp_path / "b" / "report", own)[0] == "a/report"


def test_a_page_names_its_run_and_files_of_auto_resume_are_no_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        save(tmp_path / name / "report", record_of(100.0))
        (tmp_path / name / ".auto_resume").mkdir()
        (tmp_path / name / ".auto_resume" / RUN_FILE).write_text("{}")
    assert main(["report", ".", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (len(found["runs"]), found["left_out"]) == (2, [])
    assert main(["report", "a/report/report.html", "b/report"]) == 0
    assert (tmp_path / "comparison.html").exists()


def test_neighbours_that_are_broken_large_or_links_are_passed_over(tmp_path, monkeypatch):
    own = save(tmp_path / "own", record_of(500.0))
    save(tmp_path / "good", record_of(50.0))
    for name in ("damaged", "rows", "large", "pipe", "overflows"):
        save(tmp_path / name, record_of(100.0))
    (tmp_path / "damaged" / RUN_FILE).write_text("{" * 100_000)
    (tmp_path / "rows" / VALUES_FILE).unlink()
    text = (tmp_path / "overflows" / RUN_FILE).read_text()
    (tmp_path / "overflows" / RUN_FILE).write_text(text.replace('"seconds": 0.0', f'"seconds": 1{"0" * 400}'))
    if hasattr(os, "mkfifo"):
        (tmp_path / "pipe" / RUN_FILE).unlink()
        os.mkfifo(tmp_path / "pipe" / RUN_FILE)
    with (tmp_path / "large" / VALUES_FILE).open("ab") as file:
        file.truncate(100 << 20)
    save(tmp_path / "elsewhere" / "deep" / "linked", record_of(400.0))
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "deep" / "linked", target_is_directory=True)
    assert find_run_before(tmp_path / "own", own)[0] == "good"
    seen = []
    monkeypatch.setattr(
        other_runs.on_disk, "read_run", lambda path: seen.append(path) or record_of(1.0, module="Other")
    )
    for number in range(100):
        save(tmp_path / f"n{number}", record_of(100.0))
    assert find_run_before(tmp_path / "own", own) is None
    assert len(seen) == 20


def test_hostile_neighbour_is_escaped_cut_and_does_not_end_the_page(tmp_path):
    values = {EVIL: [1.0, math.inf], "val/acc": [0.1, math.nan]}
    found = [Row("epoch", step, 0, {key: value[step] for key, value in values.items()}) for step in range(2)]
    known = {"arguments": [(EVIL, "x" * 10_000)] * 3 + [(f"a{number}", EVIL) for number in range(3000)]}
    save(tmp_path / "<b>", record_of(100.0, rows=found, seconds=math.inf, epochs=10**18, **known))
    own = save(tmp_path / "own", record_of(500.0, rows=found))
    page = run_page(own, find_run_before(tmp_path / "own", own))
    assert {"script", "b>"}.isdisjoint(one.tag for one in Tree(page).root.iter())
    assert page.count("x" * 300) == 1
    assert "x" * 301 not in page
    assert len(page) < 300_000
    assert words(before(page).find("p")).startswith("<b>: finished")


def test_ends_of_a_record_have_the_same_last_and_best_values():
    record = record_of(values=[0.5, 0.9, math.nan, 0.2, 0.9, 0.7, math.nan])
    few = ends_of(replace(record))
    assert [point.step for point in few.curve("val/acc")] == [1, 3, 6]
    alone = ends_of(record_of(values=[math.nan]))
    assert len(alone.curve("val/acc")) == 1


def runs(tmp_path):
    for name, started, values in (("a", 100.0, (0.5, 0.9, 0.7)), ("b", 200.0, (0.95,)), ("c/d", 300.0, (0.1, 0.2))):
        record = record_of(started, values, seconds=60.0, samples=600, batches=60)
        record.rows = [
            replace(row, values={**row.values, "val/loss": 1 - row.values["val/acc"]}) for row in record.rows
        ]
        save(tmp_path / name, record)
    save(tmp_path / "none", record_of(400.0, key="other"))
    save(tmp_path / "a" / "earlier-1", record_of(50.0))
    return tmp_path


def printed(capsys, *arguments):
    assert main(["report", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def table_of(text):
    """The title, and the words of the head and of each row."""
    title, head, _, *others = text.rstrip().splitlines()
    return title.strip(), head.split(), [re.split(r"\s{2,}", line.strip()) for line in others]


@cases(
    "arguments, title, order",
    ([], "by val/loss, the lowest first", ["b", "a", "c/d", "none"]),
    (["--sort", "val/acc"], "by val/acc, the highest first", ["b", "a", "c/d", "none"]),
    (["--sort", "val/acc", "--min"], "by val/acc, the lowest first", ["c/d", "a", "b", "none"]),
    (["--max"], "by val/loss, the highest first", ["c/d", "a", "b", "none"]),
    (["--sort", "other"], "by other, the highest last value first", ["none", "a", "b", "c/d"]),
)
def test_runs_are_sorted_by_a_metric(tmp_path, capsys, monkeypatch, arguments, title, order):
    monkeypatch.setenv("COLUMNS", "140")
    found, head, lines = table_of(printed(capsys, runs(tmp_path), *arguments))
    assert found == f"4 runs, {title}"
    assert [line[0] for line in lines] == order
    assert head[:1] == ["run"]
    assert "took" in head
    if arguments[:2] == ["--sort", "val/acc"]:
        row = next(line for line in lines if line[0] == "a")
        best = {1: "0.9", -1: "0.5"}[-1 if "--min" in arguments else 1]
        assert row[1:6] == [best, "0.7", "finished", "3", "1970-01-01 00:01"]
        assert row[6:] == ["0.1", "3", "1 min 0 s", "10"]


@cases(
    "width, columns",
    (140, ["run", "best", "last", "status", "epochs", "started", "best", "val/acc", "steps", "took", "samples/s"]),
    (80, ["run", "best", "last", "status", "epochs", "started", "val/acc", "steps"]),
    (40, ["run", "best", "last", "status"]),
    (20, ["run", "best"]),
)
def test_narrow_terminals_lose_columns_and_no_names(tmp_path, capsys, monkeypatch, width, columns):
    monkeypatch.setenv("COLUMNS", str(width))
    name = "a-name-of-forty-characters-0123456789012"
    runs(tmp_path)
    (tmp_path / "a").rename(tmp_path / name)
    text = printed(capsys, tmp_path)
    assert all(len(line) <= width for line in text.splitlines())
    lines = text.splitlines()
    head = next(place for place, line in enumerate(lines) if line.startswith("run"))
    assert lines[head].split() == columns
    first = [line[: lines[head].index("best")].strip() for line in lines[head + 2 :]]
    assert name in "".join(first)


def test_json_has_all_metrics_and_says_what_was_left_out(tmp_path, capsys):
    runs(tmp_path)
    save(tmp_path / "bad", record_of())
    (tmp_path / "bad" / RUN_FILE).write_text("[]")
    found = json.loads(printed(capsys, tmp_path, "--json"), parse_constant=pytest.fail)
    assert (found["sort"], [run["run"] for run in found["runs"]]) == ("val/loss", ["b", "a", "c/d", "none"])
    assert found["runs"][1]["metrics"]["val/acc"] == {"last": 0.7, "best": 0.9, "epoch": 1}
    assert found["runs"][1]["samples_per_second"] == 10
    assert len(found["left_out"]) == 1
    assert "bad" in found["left_out"][0]
    text = printed(capsys, tmp_path)
    assert "Left out: " in text
    assert "is not a file of RunReport" in text.replace("\n", " ")


def test_two_runs_are_compared_and_with_an_option_listed(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(runs(tmp_path))
    assert "Report: comparison.html" in printed(capsys, "a", "b")
    assert printed(capsys, "a", "b", "--max").startswith("2 runs, by val/loss, the highest first")
    assert printed(capsys, "a", "b", "none").startswith("3 runs, by val/loss")
    assert printed(capsys, "c").startswith("1 run, by val/loss")
    assert "Report: a" in printed(capsys, "a")


@cases(
    "arguments, message",
    (["--sort", "val/ac"], "Did you mean 'val/acc'?"),
    (["--out", "x.html"], "a table of runs is printed"),
    (["--max", "--min"], "not allowed with"),
)
def test_wrong_arguments_are_named(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        main(["report", str(runs(tmp_path)), *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_names_do_nothing_to_a_terminal(tmp_path, capsys):
    bad = "\x1b[2J[red]a"
    save(tmp_path / "one", record_of(100.0, key=f"val/{bad} loss", module=bad))
    save(tmp_path / "two", record_of(200.0, key=f"val/{bad} loss"))
    text = printed(capsys, tmp_path)
    assert "\x1b" not in text
    assert "\\x1b[2J[red]a" in text.replace("\n", "")


def test_folder_with_very_many_names_is_refused_in_words(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(other_runs, "_MOST_ENTRIES", 5)
    with pytest.raises(SystemExit):
        main(["report", str(runs(tmp_path))])
    assert "contains more than 5 entries" in capsys.readouterr().err


def test_runs_without_metrics_are_sorted_by_time():
    found = make_overview([("old", RunRecord(started=1.0)), ("new", RunRecord(started=2.0))])
    assert [name for name, _ in found.runs] == ["new", "old"]
    assert found.key == ""
    assert found._columns()["status"] == ["not ended"] * 2, "nobody knows whether they run or were killed"


def test_page_of_a_run_is_made_anew_with_the_run_before(tmp_path, capsys):
    runs(tmp_path)
    printed(capsys, tmp_path / "b")
    section = before((tmp_path / "b" / "report.html").read_text(encoding="utf-8"))
    assert words(section.find("p")).startswith("a: finished")
    assert not (tmp_path / "a" / "report.html").exists()


def test_pages_and_tables_are_made_without_loading_torch(tmp_path):
    code = f"""import sys
from lightning_tricks.cli import main
for arguments in ({str(tmp_path / "a")!r},), ({str(tmp_path)!r},):
    main(["report", *arguments])
assert "torch" not in sys.modules"""
    runs(tmp_path)
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env={**os.environ, "COLUMNS": "80"})
