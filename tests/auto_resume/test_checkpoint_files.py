"""Checkpoints are intact at any moment: with real files, real kills and real limits of the file system."""

import hashlib
import json
import os
import random
import resource
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_tricks import cli
from lightning_tricks.auto_resume import CheckpointFolder, save_durably, write_durably
from lightning_tricks.auto_resume.core.checkpoint_folder import fit_folders
from lightning_tricks.auto_resume.core.manifests import FORMAT, NewerFormatError
from tests.auto_resume.killing import die_after

KNOWN = {"epoch": 1, "step": 2, "batches": 3, "finished": False}


def checkpoint(seed=0, size=1000):
    return {"weights": torch.rand(size, generator=torch.Generator().manual_seed(seed)), "step": seed}


@given(st.binary(max_size=5000), st.binary(max_size=5000))
@settings(max_examples=25, deadline=None)
def test_a_write_is_atomic(tmp_path_factory, old, new):
    path = tmp_path_factory.mktemp("folder") / "file"
    write_durably(path, lambda stream: stream.write(old))

    def fails(stream):
        stream.write(new)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_durably(path, fails)
    assert path.read_bytes() == old
    digest, size = write_durably(path, lambda stream: stream.write(new))
    assert (path.read_bytes(), size, len(digest)) == (new, len(new), 64)
    assert [file.name for file in path.parent.iterdir()] == ["file"]


def test_save_durably_is_torch_save(tmp_path):
    digest, size = save_durably(checkpoint(3), tmp_path / "a.ckpt")
    loaded = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert torch.equal(loaded["weights"], checkpoint(3)["weights"])
    assert size == (tmp_path / "a.ckpt").stat().st_size
    assert digest == hashlib.sha256((tmp_path / "a.ckpt").read_bytes()).hexdigest()


def test_a_new_file_has_the_permissions_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        write_durably(tmp_path / "file", lambda stream: stream.write(b""))
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


@pytest.mark.trap("resume: 4 of 12 kills left an unreadable file with TMPDIR on another filesystem")
def test_a_hundred_kills_leave_only_intact_checkpoints(tmp_path, monkeypatch):
    """A process writes one checkpoint after the other and is killed, with TMPDIR on another file system."""
    if Path("/dev/shm").is_dir():
        monkeypatch.setenv("TMPDIR", "/dev/shm")
    folder, chance, seen = CheckpointFolder(tmp_path / "run"), random.Random(0), 0
    for _ in range(100):
        moment = chance.uniform(0.002, 0.04)
        pid = os.fork()
        if pid == 0:
            try:
                die_after(moment)
                folder.prepare()
                folder.clean_up()
                for number in range(1000):
                    folder.save(checkpoint(number, 200_000), **KNOWN)
                    folder.prune(2)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGPROF
        assert [folder.find_problem(manifest) for manifest in folder.manifests()] == [""] * len(folder.manifests())
        newest = folder.newest(pytest.fail)
        if newest is not None:
            assert newest.number >= seen
            seen = newest.number
            loaded = torch.load(folder.path / newest.file, weights_only=True)
            assert torch.equal(loaded["weights"], checkpoint(loaded["step"], 200_000)["weights"])
    assert seen > 20
    folder.clean_up()
    folder.prune(2)
    assert len(folder.manifests()) == 2
    assert len(list(folder.path.iterdir())) == 5, "litter beside two checkpoints, their manifests and .auto_resume"
    assert not list(folder.private.glob("*.partial"))


def test_the_newest_intact_checkpoint_is_found_and_damaged_ones_are_quarantined(tmp_path):
    folder, said = CheckpointFolder(tmp_path), []
    for seed in range(4):
        folder.save(checkpoint(seed), **KNOWN)
    whole, *broken = (tmp_path / manifest.file for manifest in reversed(folder.manifests()[:3]))
    data = bytearray(broken[0].read_bytes())
    data[len(data) // 2] ^= 1  # one bit
    broken[0].write_bytes(data)
    os.truncate(broken[1], 100)
    found = folder.newest(said.append)
    assert found is not None
    assert tmp_path / found.file == whole
    assert len(said) == 2
    assert "100 bytes instead of" in said[0]
    assert "SHA-256 differs" in said[1]
    assert all("it was renamed to *.corrupt" in sentence for sentence in said)
    assert len(list(tmp_path.glob("*.corrupt"))) == 4
    assert folder.newest(pytest.fail) == found


def test_the_manifest_of_a_missing_file_is_quarantined(tmp_path):
    folder, said = CheckpointFolder(tmp_path), []
    manifest = folder.save(checkpoint(), **KNOWN)
    (tmp_path / manifest.file).unlink()
    assert folder.newest(said.append) is None
    assert "cannot be read (No such file or directory)" in said[0]


def test_a_later_release_is_refused(tmp_path):
    folder = CheckpointFolder(tmp_path)
    manifest = folder.save(checkpoint(), **KNOWN)
    path = tmp_path / f"{manifest.file}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99, "unheard": "of"}))
    with pytest.raises(NewerFormatError, match=rf"has format 99.*formats up to {FORMAT}.*Install that release"):
        folder.newest(pytest.fail)
    assert (tmp_path / manifest.file).exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"file": "x"}', '{"file": 7}'])
def test_a_damaged_manifest_is_ignored(tmp_path, text):
    folder = CheckpointFolder(tmp_path)
    kept = folder.save(checkpoint(), **KNOWN)
    (tmp_path / "000009-x.ckpt.json").write_text(text)
    assert folder.manifests() == [kept]


@pytest.mark.parametrize("text", ["", '{"file": ', "[]", None])
def test_a_checkpoint_whose_manifest_is_damaged_is_named(tmp_path, text, capsys):
    folder, said = CheckpointFolder(tmp_path), []
    kept, lost = (folder.save({**checkpoint(seed), "auto_resume": {}}, **KNOWN) for seed in range(2))
    path = tmp_path / f"{lost.file}.json"
    path.unlink() if text is None else path.write_text(text)
    (tmp_path / ".auto_resume" / "writing.json").unlink(missing_ok=True)
    folder.clean_up()
    assert folder.newest(said.append) == kept
    assert [sentence.partition(",")[0] for sentence in said] == [f"{tmp_path / lost.file} is not used"]
    assert f"{kept.file} is used. Remove the file" in said[0]
    for command, status in (("verify", 1), ("status", 0)):
        assert cli.main(["resume", command, str(tmp_path)]) == status
        assert f"{lost.file}: is not used, as its manifest is missing or damaged" in capsys.readouterr().out
    folder.save(checkpoint(2), **KNOWN)
    assert folder.newest(pytest.fail).number == 3, "there is a newer one"
    folder.prune(0)
    assert folder.newest(said.append) is None
    assert "the run starts again. Remove the file" in said[-1]
    assert (tmp_path / lost.file).exists()


def test_a_checkpoint_that_is_damaged_with_its_manifest_is_named(tmp_path):
    folder, said = CheckpointFolder(tmp_path), []
    kept, lost = (folder.save(checkpoint(seed), **KNOWN) for seed in range(2))
    for path in (tmp_path / lost.file, tmp_path / f"{lost.file}.json"):
        os.truncate(path, 0)
    assert folder.newest(said.append) == kept
    assert lost.file in said[0]


def test_files_of_others_with_such_names_are_not_named(tmp_path):
    folder = CheckpointFolder(tmp_path)
    kept = folder.save(checkpoint(), **KNOWN)
    torch.save({"state_dict": {}, "hyper_parameters": {"auto_resume": {}}}, tmp_path / "000007-epoch=1-step=2.ckpt")
    (tmp_path / "000008-epoch=1-step=2.ckpt").write_text("named alike, with a record of its own")
    (tmp_path / "000008-epoch=1-step=2.ckpt.json").write_text("[1]")
    (tmp_path / "000009-epoch=1-step=2.ckpt").mkdir()
    assert folder.newest(pytest.fail) == kept


def test_numbers_increase(tmp_path):
    folder = CheckpointFolder(tmp_path)
    for _ in range(3):
        folder.save(checkpoint(), **KNOWN)
    folder.quarantine(folder.manifests()[0])
    assert folder.save(checkpoint(), **KNOWN).number == 4
    folder.prune(1)
    assert [manifest.number for manifest in folder.manifests()] == [4]


def test_a_full_disk_keeps_earlier_checkpoints(tmp_path):
    """The size of a file is limited for real, as a quota does."""
    folder = CheckpointFolder(tmp_path)
    kept = folder.save(checkpoint(), **KNOWN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            folder.save(checkpoint(size=100_000), **KNOWN)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert folder.newest(pytest.fail) == kept
    assert len(list(tmp_path.iterdir())) == 3


class TakesThePlace:
    """Creates a directory while it is saved."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        (self.path / "in the way").mkdir(parents=True)
        return str, ("saved",)


@pytest.mark.parametrize("place", [".auto_resume/writing.json", "000002-epoch=1-step=2.ckpt.json"])
def test_a_manifest_that_cannot_be_written_leaves_no_checkpoint_without_one(tmp_path, place):
    folder = CheckpointFolder(tmp_path)
    kept = folder.save(checkpoint(), **KNOWN)
    with pytest.raises(OSError, match=r"json"):
        folder.save({**checkpoint(), "more": TakesThePlace(tmp_path / place)}, **KNOWN)
    assert [path.name for path in tmp_path.glob("*.ckpt")] == [kept.file]
    assert folder.newest(pytest.fail) == kept
    assert not list(tmp_path.rglob("*.partial"))


def test_an_error_of_torch_save_itself_is_raised_as_it_is(tmp_path):
    def fails(stream):
        raise RuntimeError("cannot serialize this")

    with pytest.raises(RuntimeError, match="cannot serialize this"):
        write_durably(tmp_path / "file", fails)
    assert list(tmp_path.iterdir()) == []


def test_folders_of_later_fits(tmp_path):
    for name in ("fit10", "fit2", "fitted"):
        (tmp_path / name).mkdir()
    assert [folder.path.name for folder in fit_folders(tmp_path)] == [tmp_path.name, "fit2", "fit10"]
