"""The journal of files that other callbacks write, the copies of logged rows, and the lock, without a fit."""

import errno
import hashlib
import json
import os
from unittest.mock import patch

import pytest

from lightning_tricks._shared import file_locks as lock
from lightning_tricks.auto_resume.core.attributes.attribute_access import patched
from lightning_tricks.auto_resume.core.checkpoint_folder import CheckpointFolder
from lightning_tricks.auto_resume.core.file_journal import FileJournal
from lightning_tricks.auto_resume.logger_state import CsvRowsCopy, newest_event_second


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "mine"
    made.mkdir()
    return made


def journal_of(tmp_path, folder):
    journal = FileJournal(tmp_path / "journal.jsonl")
    journal.start("1.ckpt", {"mine": folder})
    return journal


def write(journal, path, text):
    journal.before_change("mine", path)
    staged = path.with_name("staged")  # a checkpoint takes its place whole
    staged.write_text(text)
    staged.replace(path)
    journal.record_digest(path, hashlib.sha256(text.encode()).hexdigest())


def contents(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_files_are_restored(tmp_path, folder):
    for name in ("replaced", "removed", "spared"):
        (folder / name).write_text("old")
    journal = journal_of(tmp_path, folder)
    write(journal, folder / "replaced", "newer")
    write(journal, folder / "replaced", "newest")
    journal.before_change("mine", folder / "removed")
    (folder / "removed").unlink()
    journal.before_change("mine", folder / "spared")  # the process was killed before it wrote
    write(journal, folder / "made", "new")
    assert FileJournal(journal.path).restore_files({"mine": folder}) == []
    assert contents(folder) == {"replaced": "old", "removed": "old", "spared": "old"}


def test_unrecorded_files_are_kept_and_reported(tmp_path, folder):
    journal = journal_of(tmp_path, folder)
    journal.before_change("mine", folder / "made")
    (folder / "made").write_text("by somebody")
    (said,) = FileJournal(journal.path).restore_files({"mine": folder})
    assert "made is kept, because its bytes are not those that the run wrote" in said
    assert contents(folder) == {"made": "by somebody"}


def test_a_journal_that_no_run_writes_is_not_read(tmp_path, folder):
    journal = journal_of(tmp_path, folder)
    assert journal.base == "1.ckpt"
    with journal.path.open("ab") as file:
        file.write(b" " * (1 << 24))
    assert journal.base is None


@pytest.mark.parametrize("where", ["aside", "mine/inside", "zebra"])
def test_files_of_other_folders_are_not_touched(tmp_path, folder, where):
    """Whether their names come before the folder's or after it."""
    other = tmp_path / where
    other.mkdir()
    (other / "file").write_text("old")
    journal = journal_of(tmp_path, folder)
    write(journal, other / "file", "newer")
    (folder / "file").write_text("old")
    journal.before_change("mine", folder / "file")
    write(journal, other / "file", "new")
    entries = [json.loads(line) for line in journal.path.read_text().splitlines()]
    assert [entry.get("name") for entry in entries] == [None, "file"], "the folder's own, and no digest"
    journal.restore_files({"mine": folder})
    assert (other / "file").read_text() == "new"
    assert sorted(path.name for path in other.iterdir()) == ["file"]


def test_a_save_removes_backups(tmp_path, folder):
    (folder / "file").write_text("old")
    journal = journal_of(tmp_path, folder)
    write(journal, folder / "file", "new")
    assert len(contents(folder)) == 2
    journal.start("2.ckpt", {"mine": folder})
    assert contents(folder) == {"file": "new"}
    assert journal.base == "2.ckpt"
    assert FileJournal(journal.path).restore_files({"mine": folder}) == []
    assert contents(folder) == {"file": "new"}


def test_a_save_goes_on_where_a_backup_is_gone(tmp_path, folder):
    """A kill between the removal of the backups and the new journal leaves such a journal."""
    (folder / "file").write_text("old")
    journal = journal_of(tmp_path, folder)
    write(journal, folder / "file", "new")
    (folder / ".file.1.before").unlink()
    FileJournal(journal.path).start("2.ckpt", {"mine": folder})
    assert (contents(folder), journal.base) == ({"file": "new"}, "2.ckpt")


def test_attributes_that_are_replaced_for_a_while_leave_no_trace():
    class Owner:
        of_class = "class"

    owner = Owner()
    owner.own = "own"
    with patched(owner, {"of_class": 1, "own": 2, "new": 3}):
        assert (owner.of_class, owner.own, owner.new) == (1, 2, 3)
    assert vars(owner) == {"own": "own"}


def test_rows_of_another_file_are_copied_again(tmp_path):
    first, second = tmp_path / "first.csv", tmp_path / "second.csv"
    first.write_text("step,loss\n0,1.0\n1,0.5\n")
    second.write_text("step,loss\n7,0.25\n")
    copy = CsvRowsCopy(tmp_path / "copy.csv")
    assert copy.update(first)["rows"] == 2
    assert copy.update(second) == {"rows": 1, "header": ["step", "loss"]}
    second.write_text("step,loss,more\n7,0.25,1\n8,0.2,2\n")
    record = copy.update(second)
    assert record == {"rows": 2, "header": ["step", "loss", "more"]}
    assert copy.restore(second, {**record, "rows": 1}) == ""
    assert second.read_text().splitlines() == ["step,loss,more", "7,0.25,1"]


def test_the_first_copy_of_an_instance_is_complete(tmp_path):
    source = tmp_path / "metrics.csv"
    source.write_text("step\n0\n1\n2\n")
    (tmp_path / "copy.csv").write_text("step\n9\n")
    copy = CsvRowsCopy(tmp_path / "copy.csv")
    assert copy.update(source)["rows"] == 3
    source.write_text("step\n0\n1\n2\n3\n")
    assert copy.update(source)["rows"] == 4
    assert (tmp_path / "copy.csv").read_text() == source.read_text()


def test_the_newest_second_without_event_files(tmp_path):
    assert newest_event_second(tmp_path) == 0
    (tmp_path / "events.out.tfevents.1700000000.host.1.0").touch()
    assert newest_event_second(tmp_path) == 1_700_000_000


def test_a_missing_private_folder_is_created_again(tmp_path):
    folder = CheckpointFolder(tmp_path / "runs")
    folder.prepare()
    folder.private.rmdir()
    folder.write_status(state="running")
    assert folder.read_status()["state"] == "running"


def test_without_file_locks_the_last_holder_decides(tmp_path):
    """A running process holds the lock; one that exited, or of which nothing is known, does not."""
    refuses = OSError(errno.ENOTSUP, "no locks here")
    living = {"pid": os.getppid(), "host": os.uname().nodename}
    gone = {"pid": 2**22 + 1, "host": os.uname().nodename}
    with patch("fcntl.flock", side_effect=refuses):
        assert lock.DirectoryLock(tmp_path / "lock").acquire(living) == (False, False)
        for last in (gone, {"pid": 1, "host": "elsewhere"}, {}):
            held = lock.DirectoryLock(tmp_path / "lock")
            assert held.acquire(last) == (True, False)
            held.close()
            held.close()
    assert lock.DIRECTORY_LOCKS.held == {}
