"""The file: what was written is read, a cut is survived, and what is no fingerprint is refused."""

import json

import pytest
import torch

from lightning_tricks.run_fingerprint import FingerprintRecordError, read_ranks
from lightning_tricks.run_fingerprint.core.record import Column, RecordHeader, rank_path, read_first_rows, read_record
from lightning_tricks.run_fingerprint.core.step_recorder import RowWriter
from tests.small import cases


def recorded(path, steps, each=lambda step: {"loss": step}, header=None, begin=0):
    writer = RowWriter(path, header or RecordHeader(detail="step"))
    if not begin:
        writer.start_file()
    elif (kept := read_first_rows(path, writer.header, begin)) is None:
        return None
    else:
        writer.start_file(kept)
    for step in range(begin, steps):
        writer.start_row(step, step // 100, step % 100)
        for kind, value in each(step).items():
            writer.add(kind, value)
        writer.end_row()
    writer.flush()
    writer.close()
    return writer


def test_rows_come_back_in_their_order(tmp_path):
    path = tmp_path / "deep" / "run.jsonl"
    recorded(path, 300)
    record = read_record(path)
    assert [row.key for row in record] == [(step, step // 100, step % 100) for step in range(300)]
    assert len({row.as_dict()[Column("loss")] for row in record}) == len(record) == 300
    assert [len(table) for _, table in record.blocks] == [128, 128, 44]
    assert path.stat().st_size < 300 * 50


def test_columns_that_come_later_stand_where_the_step_made_them(tmp_path):
    def each(step):
        many = {"data": 1} if step == 0 else {"data": 1, "loss": 2, "weights": 3}
        return many if step < 2 else {"data": 1, "forward": 1, "loss": 2, "gradient": 4, "weights": 3}

    recorded(tmp_path / "run.jsonl", 4, each)
    blocks = read_record(tmp_path / "run.jsonl").blocks
    assert [[column.kind for column in columns] for columns, _ in blocks] == [
        ["data"],
        ["data", "loss", "weights"],
        ["data", "forward", "loss", "gradient", "weights"],
    ]
    assert blocks[-1][1].shape == (2, 8)


def test_repeated_calls_get_columns_of_their_own(tmp_path):
    writer = RowWriter(tmp_path / "run.jsonl", RecordHeader(detail="step"))
    writer.start_file()
    writer.start_row(0, 0, 0)
    for value in (1, 2, 1):
        writer.add("forward", torch.tensor(value), "net.0")
    writer.end_row()
    writer.flush()
    writer.close()
    (row,) = read_record(tmp_path / "run.jsonl")
    assert row.columns == tuple(Column("forward", "net.0", call) for call in (1, 2, 3))
    assert row.values[0] == row.values[2] != row.values[1]


@pytest.mark.parametrize("keep", [1, 127, 128, 129, 200, 300])
def test_a_resumed_file_equals_that_of_one_run(tmp_path, keep):
    def each(step):
        return {"loss": step} if step < 150 else {"loss": step, "weights": -step}

    recorded(tmp_path / "whole.jsonl", 300, each)
    path = tmp_path / "run.jsonl"
    path.write_bytes((tmp_path / "whole.jsonl").read_bytes())
    writer = recorded(path, 300, each, begin=keep)
    assert writer.num_rows == 300
    rows, whole = list(read_record(path)), list(read_record(tmp_path / "whole.jsonl"))
    assert [(row.key, row.as_dict()) for row in rows] == [(row.key, row.as_dict()) for row in whole]


def test_a_file_that_was_cut_keeps_its_whole_lines(tmp_path):
    path = tmp_path / "run.jsonl"
    recorded(path, 300)
    whole = path.read_bytes()
    for length in range(len(whole) - 1, whole.index(b"\n"), -97):
        path.write_bytes(whole[:length])
        assert len(read_record(path)) in (0, 128, 256)
    path.write_bytes(whole[:-5])
    assert recorded(path, 400, begin=257) is None
    assert recorded(path, 400, begin=250).num_rows == len(read_record(path)) == 400


def test_a_record_with_another_header_is_not_resumed(tmp_path):
    path = tmp_path / "run.jsonl"
    assert recorded(path, 10, begin=5) is None
    recorded(path, 10)
    assert recorded(path, 10, begin=5, header=RecordHeader(detail="layer")) is None
    assert len(read_record(path)) == 10


def test_other_files_are_refused_with_an_error(tmp_path):
    path = tmp_path / "run.jsonl"
    for content in (b"", b"[1, 2]\n", b'{"format": "x", "version": 1}\n', b"\xff\xfe\x00"):
        path.write_bytes(content)
        with pytest.raises(FingerprintRecordError, match=r"run.jsonl is not a file of RunFingerprint"):
            read_record(path)
    with pytest.raises(FingerprintRecordError, match=f"{tmp_path.name} is "):
        read_record(tmp_path)


@cases(
    "old, new, words",
    ('"version": 2', '"version": 3', "version 3, but this lightning_tricks reads version 2: update"),
    ('"version": 2', '"version": true', "is not a file of RunFingerprint"),
    ('"world_size": 1', '"world_size": 0', "damaged header: world_size must be"),
    ('"detail": "step"', '"detail": "all"', "damaged header: detail must be"),
    ('"version": 2', '"version": 2, "unheard_of": 1', "damaged header: .*unheard_of"),
    ('"rank": 0', '"rank": [0]', "is not a file of RunFingerprint"),
    ('"rows": "', '"rows": "?', "damaged in line 3"),
    *(
        ('["loss", "", 1]', column, "damaged in line 2: a column is malformed")
        for column in ('["losses"]', '["forward", 3]', '["forward", "net", "2"]', '["forward", "net", true]')
    ),
)
def test_what_no_run_writes_is_refused(tmp_path, old, new, words):
    path = tmp_path / "run.jsonl"
    recorded(path, 10)
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    with pytest.raises(FingerprintRecordError, match=words):
        read_record(path)


def test_a_resume_without_its_numbers_is_damage(tmp_path):
    path = tmp_path / "run.jsonl"
    recorded(path, 10)
    with path.open("a") as file:
        file.write(json.dumps({"resume": [1, "2", 0, []]}) + "\n")
    with pytest.raises(FingerprintRecordError, match="damaged in line 4: a resume is malformed"):
        read_record(path)


def test_ranks_have_files_of_their_own(tmp_path):
    for rank in (0, 1):
        header = RecordHeader(detail="step", rank=rank, world_size=2)
        recorded(rank_path(tmp_path / "run.jsonl", rank), 3 + rank, header=header)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.jsonl", "run.rank1.jsonl"]
    assert [len(record) for record in read_ranks(tmp_path / "run.jsonl")] == [3, 4]
    (tmp_path / "run.rank1.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match="rank1"):
        read_ranks(tmp_path / "run.jsonl")
