"""Files of ModelCheckpoint and rows of loggers, taken back to where they were at a save: the pure core."""

import csv
import hashlib
import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_tricks.auto_resume.core.file_journal import FileJournal, link_digest
from lightning_tricks.auto_resume.logger_state import CsvRowsCopy, event_file_sizes, truncate_event_files

NAMES = ("a.ckpt", "b.ckpt", "last.ckpt")
OPERATIONS = st.tuples(st.sampled_from(("write", "remove", "link", "save", "kill")), st.sampled_from(NAMES))


class Writer:
    """Writes as ModelCheckpoint does, and remembers what was there at the last save."""

    def __init__(self, folder):
        self.folder, self.written = folder / "files", 0
        self.folder.mkdir(exist_ok=True)
        self.journal = FileJournal(folder / "journal")
        self.places = {"place": self.folder}
        self.saved = self.listing()
        self.journal.start("", self.places)

    def listing(self):
        return {
            path.name: str(path.readlink()) if path.is_symlink() else path.read_bytes()
            for path in self.folder.iterdir()
            if not path.name.startswith(".")
        }

    def write(self, name):
        self.written += 1
        data = str(self.written).encode()
        self.journal.before_change("place", self.folder / name)
        self.journal.record_digest(self.folder / name, hashlib.sha256(data).hexdigest())
        staged = self.folder / f".{name}.1.partial"
        staged.write_bytes(data)
        staged.replace(self.folder / name)

    def remove(self, name):
        self.journal.before_change("place", self.folder / name)
        (self.folder / name).unlink(missing_ok=True)

    def link(self, name):
        self.journal.before_change("place", self.folder / name)
        self.journal.record_digest(self.folder / name, link_digest("elsewhere"))
        (self.folder / name).unlink(missing_ok=True)
        (self.folder / name).symlink_to("elsewhere")

    def save(self, name):
        self.saved = self.listing()
        self.journal.start("1", self.places)

    def kill(self, name):
        self.journal = FileJournal(self.journal.path)
        assert self.journal.restore_files(self.places) == []
        assert self.listing() == self.saved
        self.journal.start("1", self.places)
        assert not list(self.folder.glob(".*"))


@given(st.lists(OPERATIONS, max_size=25))
@settings(max_examples=30, deadline=None)
def test_files_are_as_they_were_at_the_save(tmp_path_factory, operations):
    writer = Writer(tmp_path_factory.mktemp("run"))
    for operation, name in operations:
        getattr(writer, operation)(name)
    writer.kill("")


def test_a_file_that_somebody_changed_meanwhile_stays(tmp_path):
    writer = Writer(tmp_path)
    writer.write("a.ckpt")
    (writer.folder / "a.ckpt").write_bytes(b"mine")
    said = FileJournal(writer.journal.path).restore_files(writer.places)
    assert said == [f"{writer.folder / 'a.ckpt'} is kept, because its bytes are not those that the run wrote."]
    assert (writer.folder / "a.ckpt").read_bytes() == b"mine"


@pytest.mark.parametrize("name", ["../mine", "sub/mine", "/tmp/mine", "..", "", "a\0b"])
@pytest.mark.parametrize("kept", ["", "../mine", ".mine.1.before"])
def test_a_journal_that_somebody_made_reaches_nothing_else(tmp_path, name, kept):
    writer = Writer(tmp_path)
    (tmp_path / "mine").write_bytes(b"mine")
    digest = hashlib.sha256(b"mine").hexdigest()
    lines = [{"base": ""}, {"place": "place", "name": name, "kept": kept}]
    lines += [{"place": "place", "name": name, "sha256": digest}, {"place": ["place"]}, [], "{"]
    writer.journal.path.write_text("\n".join(map(json.dumps, lines)) + "\n{")
    journal = FileJournal(writer.journal.path)
    journal.restore_files(writer.places)
    journal.start("", writer.places)
    assert (tmp_path / "mine").read_bytes() == b"mine"


def write_rows(path, header, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, header)
        writer.writeheader()
        writer.writerows(rows)


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=8), st.data())
@settings(max_examples=30, deadline=None)
def test_rows_are_those_of_the_save(tmp_path_factory, growth, data):
    """Rows are added between saves, and columns, with which the file is written anew."""
    folder = tmp_path_factory.mktemp("rows")
    path, rows, header, records = folder / "metrics.csv", [], ["step"], []
    mirror = CsvRowsCopy(folder / "copy")
    for added, wider in growth:
        if wider:
            header = [*header, f"column {len(header)}"]
        rows += [dict.fromkeys(header, f'{len(rows) + i}, "two\nlines"') for i in range(added)]
        write_rows(path, header, rows)
        records.append((mirror.update(path), path.read_text()))
    record, text = data.draw(st.sampled_from(records))
    harm = data.draw(st.sampled_from(("none", "gone", "cut")))
    if harm == "gone":
        path.unlink()
    elif harm == "cut":
        os.truncate(path, 3)
    assert CsvRowsCopy(folder / "copy").restore(path, record) == ""
    assert path.read_text() == text


def test_lost_rows_are_reported(tmp_path):
    path = tmp_path / "metrics.csv"
    write_rows(path, ["step"], [{"step": 1}, {"step": 2}])
    mirror = CsvRowsCopy(tmp_path / "copy")
    record = mirror.update(path)
    path.unlink()
    (tmp_path / "copy").unlink()
    assert mirror.restore(path, record) == f"{path} has 0 of the 2 rows that were logged before the save."
    assert CsvRowsCopy(tmp_path / "none").update(path) == {"rows": 0, "header": None}


def test_event_files_of_others_are_left_alone(tmp_path):
    names = (
        "events.out.tfevents.1.host.7.0",
        "both_a/events.out.tfevents.1.host.7.1",
        "events.out.tfevents.1.host.8.0",
    )
    (tmp_path / "both_a").mkdir()
    for name in names:
        (tmp_path / name).write_bytes(b"12345")
    sizes = event_file_sizes(tmp_path, lambda path: ".host.7." in path.name)
    assert sizes == {names[0]: 5, names[1]: 5, names[2]: None}
    for name in (*names, "events.out.tfevents.2.host.7.0", "events.out.tfevents.2.host.9.0"):
        with (tmp_path / name).open("ab") as file:
            file.write(b"67")
    assert truncate_event_files(tmp_path, sizes, lambda path: ".host.7." in path.name) == ""
    left = {path.relative_to(tmp_path).as_posix(): path.read_bytes() for path in tmp_path.rglob("*tfevents*")}
    assert left == {
        names[0]: b"12345",
        names[1]: b"12345",
        names[2]: b"1234567",
        "events.out.tfevents.2.host.9.0": b"67",
    }
    os.truncate(tmp_path / names[0], 2)
    assert (
        truncate_event_files(tmp_path, sizes, lambda path: True)
        == f"{tmp_path} lacks what was logged before the save to {names[0]}."
    )
