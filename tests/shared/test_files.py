"""Files that are replaced, and those that are read."""

import os
import stat
from pathlib import Path

import pytest

from lightning_tricks._shared.files import NotAFileError, atomic_write, open_file

posix = pytest.mark.skipif(os.name != "posix", reason="modes and links of POSIX")


def write(path, text="new"):
    with atomic_write(Path(path)) as staged:
        staged.write_text(text)
        return staged


def mode(path):
    return stat.S_IMODE(Path(path).stat().st_mode)


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield
    os.umask(before)


@posix
def test_modes(umask):
    write("f")
    assert mode("f") == 0o640
    for kept in (0o600, 0o444, 0o755):
        Path("f").chmod(kept)
        write("f")
        assert mode("f") == kept


def test_partial_files_cannot_be_foreseen_and_are_made_anew(monkeypatch):
    assert write("f").name != write("f").name
    with atomic_write(Path("f")) as staged:
        name = staged.name
        assert name.startswith(".f.")
        assert name.endswith(".partial")
        assert len(name) == len(".f..partial") + 16
    monkeypatch.setattr("lightning_tricks._shared.files.secrets.token_hex", lambda _: "0" * 16)
    Path("target").write_text("old")
    Path(f".f.{'0' * 16}.partial").symlink_to("target")
    with pytest.raises(FileExistsError):
        write("f", "over it")
    assert Path("target").read_text() == "old"
    assert Path(f".f.{'0' * 16}.partial").is_symlink()


@posix
def test_a_link_stays_and_what_it_points_to_is_written():
    Path("folder").mkdir()
    Path("folder/f").write_text("old")
    Path("f").symlink_to("folder/f")
    assert write("f").parent.name == "folder"
    assert Path("f").is_symlink()
    assert Path("folder/f").read_text() == "new"
    Path("nothing").symlink_to("folder/g")
    write("nothing")
    assert Path("folder/g").read_text() == "new"
    Path("circle").symlink_to("circle")
    with pytest.raises(OSError, match=r"circle|links"):
        write("circle")
    assert Path("circle").is_symlink()


@posix
def test_what_is_no_file_stays():
    os.mkfifo("pipe")
    Path("folder").mkdir()
    for path, words in (("pipe", "a pipe"), ("folder", "a directory"), ("/dev/null", "a device")):
        with pytest.raises(NotAFileError, match=f"{words}, not a file"):
            write(path)
        with pytest.raises(NotAFileError, match=f"{words}, not a file"):
            open_file(path)
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["folder", "pipe"]


def test_an_error_leaves_what_was_there():
    write("f", "old")
    with pytest.raises(TypeError):
        write("f", 5)
    assert [path.name for path in Path.cwd().iterdir()] == ["f"]
    assert Path("f").read_text() == "old"


def test_long_names():
    name = "ü" * 120
    write(name)
    assert [path.name for path in Path.cwd().iterdir()] == [name]
