"""The record of a run: its files, thinning, and what is not one."""

import json
import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_tricks._shared.report_parts import ClippedSteps, Facts, Pictures
from lightning_tricks.run_report import RunRecord, RunReportError, read_record
from lightning_tricks.run_report.core.curves import is_weight, sign_of_better, smooth, split_key, thin_points
from lightning_tricks.run_report.core.record import (
    RUN_FILE,
    VALUES_FILE,
    GitState,
    Point,
    Position,
    Resume,
    Row,
    write_rows,
    write_run,
)
from lightning_tricks.run_report.core.run_writer import RunWriter, ValueRecorder, keep_first_rows, merge_rows, thin_rows
from tests.small import cases


def some_record(**known):
    rows = [
        Row("step", 0, 0, {"a": 1.0, "number": math.nan}),
        Row("epoch", 1, 0, {"b": -math.inf}, 2, {"b": 0.1}, {"b": 2.0}),
    ]
    parts = [
        Facts(title="Seed", facts=[("seed", "1")], sentences=["yes"], warnings=["It differs."]),
        ClippedSteps(optimizer=0, steps=3, clipped=1, skipped=0, max_norm=None),
        Pictures(title="worst", captions=["a"], pictures=["iVBORw0KGgo="], mistakes=[True]),
    ]
    given = {
        "module": "Net",
        "git": GitState("abc", changed=[" M a"]),
        "resumes": [Resume(3, 1, 2.5, ["x"])],
        "arguments": [("lr", "0.1")],
    }
    return RunRecord(**{**given, "parts": parts, "rows": rows, **known})


def save(folder, record):
    write_run(folder, record)
    write_rows(folder, record.rows)


def test_record_is_read_as_it_was_written(tmp_path):
    record = some_record()
    save(tmp_path, record)
    for line in (tmp_path / VALUES_FILE).read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # strict, also of numbers that are not finite
    again = read_record(tmp_path)
    assert repr(again) == repr(record)
    assert repr([vars(part) for part in again.parts]) == repr(
        [
            {name: list(value) if isinstance(value, tuple) else value for name, value in vars(part).items()}
            for part in record.parts
        ]
    )


def test_value_with_the_name_of_the_format_may_be_nan(tmp_path):
    save(tmp_path, RunRecord(rows=[Row("epoch", 0, 0, {"number": math.nan}), Row("epoch", 1, 1, {"number": 2.0})]))
    assert str([point.value for point in read_record(tmp_path).curve("number")]) == "[nan, 2.0]"


def test_row_that_was_not_written_whole_is_left_out(tmp_path):
    save(tmp_path, some_record())
    with (tmp_path / VALUES_FILE).open("a") as file:
        file.write('{"kind": "step", "step": 7')
    assert len(read_record(tmp_path).rows) == 2


@cases(
    "name, change, words",
    (RUN_FILE, lambda text: "[]", "is not a file of RunReport"),
    (RUN_FILE, lambda text: text.replace('"version": 2', '"version": 1'), "version 1, and .* reads version 2"),
    (RUN_FILE, lambda text: text.replace('"version": 2', '"version": 3'), "has version 3"),
    (RUN_FILE, lambda text: text.replace('"running"', '"flying"'), "status must be"),
    (RUN_FILE, lambda text: text.replace('"facts"', '"axioms"', 1), "is not a file of RunReport"),
    (RUN_FILE, lambda text: text.replace('"seconds": 0.0', '"seconds": "0"'), "seconds must be float, got str"),
    (RUN_FILE, lambda text: "[" * 100_000, "nested too deeply"),
    (RUN_FILE, lambda text: text.replace('"yes"', '"yes", ' * 99_999 + '"yes"'), "a list of 100,000 entries"),
    (VALUES_FILE, lambda text: text.replace('"step": 0', '"step": "0"'), "damaged in line 1: step must be int"),
    (VALUES_FILE, lambda text: text.replace('"step": 0', f'"step": {10**400}'), "step must be below .* 1,329 bits"),
    (VALUES_FILE, lambda text: text.replace('"a": 1.0', '"a": [1.0]'), "damaged in line 1"),
    (VALUES_FILE, lambda text: text.replace('"kind": "step"', '"kind": "stop"'), "damaged in line 1"),
    (VALUES_FILE, lambda text: text.replace('"count": 2', '"count": 0'), "damaged in line 2"),
)
def test_damaged_file_is_one_sentence(tmp_path, name, change, words):
    save(tmp_path, some_record())
    text = (tmp_path / name).read_text()
    changed = change(text)
    assert changed != text
    (tmp_path / name).write_text(changed)
    with pytest.raises(RunReportError, match=words):
        read_record(tmp_path)


def test_folder_without_a_record_is_named(tmp_path):
    with pytest.raises(RunReportError, match=r"holds no report: run.json is missing"):
        read_record(tmp_path)


def test_random_bytes_are_no_record(tmp_path):
    source = random.Random(0)
    save(tmp_path, some_record())
    for name in (RUN_FILE, VALUES_FILE):
        data = (tmp_path / name).read_bytes()
        for _ in range(100):
            changed = bytearray(data)
            changed[source.randrange(len(data))] = source.randrange(256)
            (tmp_path / name).write_bytes(changed)
            try:
                read_record(tmp_path)
            except RunReportError:
                continue
        (tmp_path / name).write_bytes(data)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.integers(1, 10))
def test_thinning_keeps_mean_extremes_and_count(values, most):
    rows = [Row("step", place, 0, {"a": value}) for place, value in enumerate(values)]
    thinned = rows
    while len(thinned) > most:
        thinned = thin_rows(thinned, most)
    assert sum(row.count for row in thinned) == len(values)
    assert min(row.low.get("a", row.values["a"]) for row in thinned) == min(values)
    assert max(row.high.get("a", row.values["a"]) for row in thinned) == max(values)
    mean = sum(row.values["a"] * row.count for row in thinned) / len(values)
    assert mean == pytest.approx(sum(values) / len(values), abs=1e-6)
    assert [row.step for row in thinned] == sorted(row.step for row in thinned)


def test_thinning_merges_rows_of_one_kind_only_and_keeps_their_order():
    rows = [Row("step", place, 0, {"a": 1.0}) for place in range(11)]
    rows.insert(5, Row("epoch", 4, 0, {"b": 2.0}))
    rows.append(Row("epoch", 10, 0, {"b": 2.0}))  # after the last step, which has no other to merge with
    steps = [("step", step, 2) for step in (1, 3, 5, 7, 9)] + [("step", 10, 1)]
    expected = [*steps[:2], ("epoch", 4, 1), *steps[2:], ("epoch", 10, 1)]
    assert [(row.kind, row.step, row.count) for row in thin_rows(rows, 8)] == expected


def test_merged_row_ignores_nan_in_its_extremes_only():
    merged = merge_rows([Row("step", 0, 0, {"a": math.nan}), Row("step", 1, 0, {"a": 2.0})])
    assert math.isnan(merged.values["a"])
    assert (merged.low["a"], merged.high["a"]) == (2.0, 2.0)


def long_run(folder, monkeypatch, losses):
    monkeypatch.setattr("lightning_tricks.run_report.core.run_writer._MOST_ROWS", 100)
    record = RunRecord()
    save(folder, record)
    recorder = ValueRecorder(folder, record)
    for step, loss in enumerate(losses):
        recorder.add("step", step, 0, {"loss": loss})
    recorder.flush()
    return record, recorder


def test_long_run_stays_bounded_on_disk(tmp_path, monkeypatch):
    losses = [torch.tensor(float(step == 1234)) for step in range(3000)]
    _, recorder = long_run(tmp_path, monkeypatch, losses)
    again = read_record(tmp_path)
    assert len(again.rows) <= 100 + 256
    assert (recorder.num_rows, sum(row.count for row in again.rows)) == (3000, 3000)
    (spike,) = (point for point in again.curve("loss") if point.high == 1.0)
    assert abs(spike.step - 1234) < 64


def test_long_run_stays_bounded_in_memory(tmp_path, monkeypatch):
    """The rows of the record are those of its file, also after they were thinned."""
    record, _ = long_run(tmp_path, monkeypatch, map(float, range(1000)))
    assert len(record.rows) <= 100 + 256
    assert record.rows == read_record(tmp_path).rows


def test_rows_wait_until_there_are_256(tmp_path):
    record = RunRecord()
    save(tmp_path, record)
    recorder = ValueRecorder(tmp_path, record)
    for step in range(257):
        assert len(record.rows) == 256 * (step == 256)
        recorder.add("step", step, 0, {"loss": 1.0})
    assert len(read_record(tmp_path).rows) == 256
    recorder.flush()
    recorder.flush()  # of nothing
    assert [row.step for row in read_record(tmp_path).rows] == list(range(257))


def test_values_of_any_type_are_read_at_once(tmp_path):
    record = RunRecord()
    save(tmp_path, record)
    recorder = ValueRecorder(tmp_path, record)
    parameter = torch.ones(1, requires_grad=True)
    recorder.add("step", 0, 0, {"a": torch.tensor(3), "b": parameter * 2, "c": 0.1, "d": torch.tensor(0.1), "e": 7})
    recorder.flush()
    assert record.rows[0].values == {"a": 3.0, "b": 2.0, "c": 0.1, "d": torch.tensor(0.1).item(), "e": 7.0}


def test_keys_beyond_the_first_thousand_are_counted(tmp_path):
    record = RunRecord()
    save(tmp_path, record)
    recorder = ValueRecorder(tmp_path, record)
    recorder.add("step", 0, 0, {str(number): 1.0 for number in range(1003)})
    recorder.flush()
    assert (len(record.logged_keys()), record.keys_left_out) == (1000, 3)


ROWS = [Row("step", step, 0, {"a": 1.0}) for step in range(5)]


@cases(
    "rows, count, kept",
    (ROWS, 3, 3),
    (ROWS, 5, 5),
    (ROWS, 0, 0),
    ([replace(ROWS[1], count=2), replace(ROWS[3], count=2), ROWS[4]], 3, 1),
)
def test_rows_of_a_checkpoint_are_found(rows, count, kept):
    assert len(keep_first_rows(rows, count)) == kept


def write(folder, count, position=None, status="running", saves=9, **known):
    """Record a run of so many rows, resumed at a position; return the positions that it saved, and the writer."""
    folder.mkdir(exist_ok=True)
    writer = RunWriter(folder, RunRecord(module="Net"))
    if position is None:
        writer.start()
    else:
        writer.resume(position, Resume(position.rows, 0, 0.0))
    positions = [writer.position()]
    for number in range(1, count + 1):
        writer.values.add("step", writer.values.num_rows, 0, {"a": float(number), **known})
        if number <= saves:
            positions.append(writer.position())
    writer.write(status, ())
    writer.close()
    return positions, writer


def values(folder, key="a"):
    return [row.values.get(key) for row in read_record(folder).rows]


def test_resume_without_its_record_says_so_and_starts_anew(tmp_path):
    _, writer = write(tmp_path, 2, Position("unheard", 10))
    assert [one.step for one in read_record(tmp_path).resumes] == [10]
    assert writer.said == [f"the values before step 10 were not found in {tmp_path}"]
    assert values(tmp_path) == [1, 2]


def test_damaged_record_is_moved_aside_by_a_resume(tmp_path):
    (tmp_path / RUN_FILE).write_text("{")
    (tmp_path / VALUES_FILE).write_text("")
    write(tmp_path, 1, Position("", 10))
    assert (tmp_path / "earlier-1" / RUN_FILE).read_text() == "{"
    assert json.loads((tmp_path / RUN_FILE).read_text())["format"] == "lightning_tricks.run_report"


def test_resume_finds_its_record_where_another_run_has_moved_it(tmp_path):
    positions, _ = write(tmp_path, 3, mine=1.0)
    write(tmp_path, 5, status="finished")
    _, writer = write(tmp_path, 2, positions[3])
    assert values(tmp_path) == [1, 2, 3, 1, 2]
    assert values(tmp_path / "earlier-2") == [1, 2, 3, 4, 5]
    assert read_record(tmp_path / "earlier-2").status == "finished"
    assert [sentence.split(" ")[1] for sentence in writer.said] == ["report", "record"]


@cases(
    "saves, status, is_kept", (4, "running", True), (2, "running", False), (2, "failed", False), (2, "finished", True)
)
def test_rows_after_a_checkpoint_are_kept_aside_unless_they_come_again(tmp_path, saves, status, is_kept):
    positions, _ = write(tmp_path, 4, saves=saves, status=status)
    write(tmp_path, 1, positions[2])
    assert values(tmp_path) == [1, 2, 1]
    assert [values(folder) for folder in tmp_path.glob("earlier-*")] == [[1, 2, 3, 4]] * is_kept


def test_resume_does_not_take_the_rows_of_another_branch(tmp_path):
    positions, _ = write(tmp_path, 4, branch=1.0)
    write(tmp_path, 6, positions[2], branch=2.0)  # back to the second row, and beyond the fourth
    assert values(tmp_path, "branch") == [1, 1, 2, 2, 2, 2, 2, 2]
    write(tmp_path, 1, positions[4], branch=3.0)  # the fourth row of the first branch
    assert values(tmp_path, "branch") == [1, 1, 1, 1, 3]
    assert values(tmp_path / "earlier-2", "branch") == [1, 1, 2, 2, 2, 2, 2, 2]
    assert len(read_record(tmp_path).resumes) == 1


def test_resume_again_from_one_checkpoint_continues_one_record(tmp_path):
    positions, _ = write(tmp_path, 2)
    for _ in range(3):
        later, _ = write(tmp_path, 2, positions[2])
    assert values(tmp_path) == [1, 2, 1, 2]
    write(tmp_path, 1, later[1])
    assert values(tmp_path) == [1, 2, 1, 1]
    assert len(read_record(tmp_path).resumes) == 4


def test_writers_of_one_folder_at_once_do_not_mix(tmp_path):
    first = RunWriter(tmp_path, RunRecord())
    first.start()
    positions, second = write(tmp_path, 3)
    assert second.said[0].endswith(f"the report of this one is in {tmp_path / 'at-once-1'}")
    first.values.add("step", 0, 0, {"a": 9.0})
    first.position()
    assert (values(tmp_path), values(tmp_path / "at-once-1")) == ([9], [1, 2, 3])
    write(tmp_path, 1)  # moves the record of the second one aside
    _, third = write(tmp_path, 1, positions[2])
    assert (third.folder, values(third.folder)) == (tmp_path / "at-once-1", [1, 2, 1])
    first.close()
    _, fourth = write(tmp_path, 2, positions[2])
    assert (fourth.folder, values(tmp_path), values(tmp_path / "earlier-1")) == (tmp_path, [1, 2, 1, 2], [9])


def test_row_that_was_not_written_whole_is_not_continued(tmp_path):
    positions, _ = write(tmp_path, 3)
    with (tmp_path / VALUES_FILE).open("a") as file:
        file.write('{"kind": "step", "st')
    write(tmp_path, 2, positions[3])
    assert values(tmp_path) == [1, 2, 3, 1, 2]


def test_parts_of_one_name_replace_each_other():
    record = some_record()
    record.add_parts([ClippedSteps(optimizer=0, steps=9, clipped=1, skipped=0, max_norm=None)])
    assert [part.steps for part in record.parts_of(ClippedSteps)] == [9]
    assert len(record.parts) == 3


KEYS = """
    val/loss=loss,val,      val_loss=loss,val,         loss/val=loss,val,       train_loss_step=loss,train,step
    training/acc_epoch=acc,train,epoch                 valid.f1=f1,val,         loss=loss,,
    val=val,,               interval_loss=interval_loss,,                       test/acc/dataloader_idx_2=acc,test,
    ema/val/acc=ema/acc,val,                           valLoss=Loss,val,        train~loss_step=loss,train,step
    eval_loss=loss,val,     a.b_train_step=a.b,train,step
"""


@pytest.mark.parametrize("case", KEYS.split())
def test_stage_of_a_key_is_found(case):
    key, _, parts = case.replace("~", " ").partition("=")
    found = split_key(key)
    assert [found.name, found.stage, found.kind] == parts.split(",")
    assert found.loader == ("2" if "dataloader_idx_2" in key else "")


@cases(
    "sign, keys",
    (-1, "loss total_loss std_loss loss_bbox loss/std kl_loss rmse val_err fid top1_error loss/scale_2_head"),
    (1, "acc mean_reward top5 f1_macro ema/auc"),
    (0, "loss_scale kl_loss_weight loss/kl_weight loss_weights/kl loss_weight_kl amp-loss-scaling acc_std"),
    (0, "err_ratio 0 loss_scale_0 specificity gloss lossy lr kl_weight"),
)
def test_what_is_better_is_known_of_metrics_and_not_of_settings(sign, keys):
    assert {key: sign_of_better(key) for key in keys.split()} == dict.fromkeys(keys.split(), sign)


def test_weights_of_parts_of_a_loss_are_known():
    weights = "kl_weight loss_weights/kl beta kl.beta annealing_2 lambda_1"
    others = "weighted_acc loss_scale alphabet weight_norm weight_decay/group loss"
    assert [key for key in f"{weights} {others}".split() if is_weight(key)] == weights.split()


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=200), st.integers(4, 20))
def test_thinned_curve_keeps_extremes(values, most):
    points = [Point(step, 0, value, value, value) for step, value in enumerate(values)]
    thinned = thin_points(points, most)
    assert len(thinned) <= max(most, 3 * (most // 2))
    assert [point.step for point in thinned] == sorted({point.step for point in thinned})
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) == len(values) and values:
        assert max(values) == max(point.value for point in thinned)
        assert min(values) == min(point.value for point in thinned)
    if len(finite) < len(values):
        assert any(not math.isfinite(point.value) for point in thinned)
        first = next(step for step, value in enumerate(values) if not math.isfinite(value))
        assert first in [point.step for point in thinned]


def test_a_smooth_curve_is_the_mean_of_neighbours():
    points = [Point(step, 0, value, value, value) for step, value in enumerate([1.0, 2.0, math.nan, 6.0, 3.0, 8.0])]
    assert [point.value for point in smooth(points)] == [3.0, 3.0, 4.0, 4.75, pytest.approx(17 / 3)]
