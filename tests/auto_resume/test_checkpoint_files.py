"""Checkpoints are intact at any moment: with real files, real kills and real limits of the file system."""

import hashlib
import json
import os
import shutil
import signal
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_tricks import AutoResume, cli
from lightning_tricks._shared.files import NotAFileError
from lightning_tricks.auto_resume import CheckpointFolder, save_durably
from lightning_tricks.auto_resume.core.checkpoint_folder import FORMAT, UnusableFolderError, _checksum, fit_folders
from tests.auto_resume import stored_format
from tests.auto_resume.training import signal_at_change
from tests.small import cases

KNOWN = {"epoch": 1, "step": 2, "batches": 3, "finished": False}


def checkpoint(seed=0, size=1000):
    return {"weights": torch.rand(size, generator=torch.Generator().manual_seed(seed)), "step": seed}


def test_save_durably_is_torch_save(tmp_path):
    digest, size = save_durably(checkpoint(3), tmp_path / "a.ckpt")
    loaded = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert torch.equal(loaded["weights"], checkpoint(3)["weights"])
    assert size == (tmp_path / "a.ckpt").stat().st_size
    assert digest == hashlib.sha256((tmp_path / "a.ckpt").read_bytes()).hexdigest()


@pytest.mark.trap("resume: 4 of 12 kills left an unreadable file with TMPDIR on another filesystem")
def test_killed_before_each_change_of_a_file(tmp_path, monkeypatch):
    """Of a save and a removal: there are one or two whole checkpoints, and the next start tidies up."""
    if Path("/dev/shm").is_dir():
        monkeypatch.setenv("TMPDIR", "/dev/shm")
    moments = 0
    while True:
        folder = CheckpointFolder(tmp_path / str(moments))
        folder.prepare()
        folder.save(checkpoint(1), **KNOWN)
        pid = os.fork()
        if pid == 0:
            try:
                signal_at_change(folder.path, moments + 1, "SIGKILL", 0)
                folder.save(checkpoint(2), **KNOWN)
                folder.prune(1)
            finally:
                os._exit(0)  # or this process would run the other tests as well
        was_killed = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        folder.clean_up()
        found = [(one.number, folder.find_problem(one)) for one in folder.manifests()]
        assert found in ([(1, "")], [(2, ""), (1, "")], [(2, "")])
        assert len(list(folder.private.iterdir())) == len(found)
        if not was_killed:
            break
        moments += 1
    assert moments > 6
    assert found == [(2, "")]


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1  # one bit
    path.write_bytes(data)


def replace_by(make):
    def replace(path):
        path.unlink()
        make(path)

    return replace


def bind_socket(path):
    here = Path.cwd()
    os.chdir(path.parent)  # its address may have a hundred characters
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(path.name)
    os.chdir(here)


OTHER_BYTES = {"meta.pt": "other bytes than were written", "manifest.json": "is damaged"}
DAMAGE = {
    "a flipped bit": (flip, OTHER_BYTES),
    "truncated": (lambda path: os.truncate(path, 90), OTHER_BYTES),
    "empty": (lambda path: os.truncate(path, 0), OTHER_BYTES),
    "missing": (Path.unlink, "cannot be read (No such file or directory)"),
    "deep": (lambda path: path.write_text("[" * 100_000), OTHER_BYTES),
    "no mapping": (lambda path: path.write_text("[]"), OTHER_BYTES),
    "a pipe": (replace_by(os.mkfifo), "is a pipe, not a file"),  # whoever opens it waits for ever
    "a socket": (replace_by(bind_socket), "is a socket, not a file"),
    "a folder": (replace_by(os.mkdir), "is a directory, not a file"),
    "a circle of links": (replace_by(lambda path: path.symlink_to(path)), "cannot be read (Too many levels"),
}


@pytest.mark.parametrize("file", ["meta.pt", "manifest.json"])
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_set_aside(tmp_path, kind, file, capsys):
    folder, said = CheckpointFolder(tmp_path), []
    older, kept, lost = (folder.save(checkpoint(seed), **KNOWN) for seed in range(3))
    path = folder.private / lost.file
    harm, words = DAMAGE[kind]
    harm(path / file)
    words = words if isinstance(words, str) else words[file]
    for command, status in (("verify", 1), ("status", 0)):
        assert cli.main(["resume", command, str(tmp_path)]) == status
        assert command == "status" or f"{path}: " in (out := capsys.readouterr().out)
        assert command == "status" or words in out
    assert folder.newest(said.append) == kept
    (sentence,) = said
    assert sentence.startswith(f"the checkpoint {path} cannot be used: ")
    assert words in sentence
    assert file in sentence
    assert sentence.endswith(f". It was renamed to *.corrupt; the newest intact one is {kept.file}.")
    assert path.with_name(f"{path.name}.corrupt").is_dir()
    assert folder.newest(pytest.fail) == kept
    assert folder.save(checkpoint(), **KNOWN).number == 4, "numbers increase"
    folder.prune(1)
    assert {one.name for one in folder.private.iterdir()} == {"000004-epoch=1-step=2", f"{lost.file}.corrupt"}
    assert older.number == 1


def test_a_bit_that_flips_in_a_manifest_is_damage(tmp_path):
    """Wherever it is, as a manifest decides how many rows a logger has."""
    folder = CheckpointFolder(tmp_path)
    manifest = folder.save({}, **KNOWN, loggers=[{"kind": "csv", "rows": 8}], run={"a": 1.5})
    path = folder.private / manifest.file / "manifest.json"
    data = path.read_bytes()
    for place in range(len(data)):
        path.write_bytes(bytes([*data[:place], data[place] ^ 1 << place % 7, *data[place + 1 :]]))
        assert folder.manifests() in ([], [manifest])
        assert folder.manifests() == [] or (place > 0 and data[place : place + 1].isspace())


@cases(
    "lie",
    {"file": "000009-epoch=0-step=1"},
    {"shards": {"../meta.pt": ["0" * 64, 1]}},
    {"format": "3"},
    {"format": None},
)
def test_a_forged_manifest_is_damaged(tmp_path, lie):
    folder = CheckpointFolder(tmp_path)
    manifest = folder.save(checkpoint(), **KNOWN)
    path = folder.private / manifest.file / "manifest.json"
    path.write_text(json.dumps(replace(manifest, **lie).record()))
    assert folder.manifests() == []
    assert folder.problems() == {path.parent: "manifest.json is damaged"}


def test_the_only_checkpoint_is_damaged(tmp_path):
    folder, said = CheckpointFolder(tmp_path), []
    flip(folder.path_of(folder.save(checkpoint(), **KNOWN)))
    assert folder.newest(said.append) is None
    assert "no other checkpoint is intact" in said[0]


def test_a_later_release_is_refused(tmp_path):
    folder = CheckpointFolder(tmp_path)
    manifest = folder.save(checkpoint(), **KNOWN)
    path = folder.private / manifest.file / "manifest.json"
    values = {**replace(manifest, format=FORMAT + 1).record(), "unheard": "of"}
    values.pop("checksum")
    path.write_text(json.dumps({**values, "checksum": _checksum(values)}))
    with pytest.raises(
        UnusableFolderError, match=rf"has format {FORMAT + 1}, .*formats up to {FORMAT}. Install a newer release"
    ):
        folder.newest(pytest.fail)
    assert folder.problems().keys() == {path.parent}


@pytest.mark.parametrize("make", [Path.touch, os.mkfifo, bind_socket, lambda path: path.symlink_to("/nowhere")])
def test_what_another_program_put_in_place_of_a_checkpoint_stays(tmp_path, make):
    folder, said = CheckpointFolder(tmp_path), []
    kept = folder.save(checkpoint(), **KNOWN)
    path = folder.private / "000007-epoch=1-step=2"
    make(path)
    mode = path.lstat().st_mode
    assert folder.newest(said.append) == kept
    assert len(said) == 1
    assert f"{path} cannot be used: manifest.json cannot be read" in said[0]
    assert "renamed" not in said[0]
    assert folder.save(checkpoint(), **KNOWN).number == 8
    folder.prune(1)
    folder.clean_up()
    assert path.lstat().st_mode == mode


@pytest.mark.parametrize("name", ["status.json", "run.json", "rows-0.csv", "lock", "anything"])
@pytest.mark.parametrize("kind", ["a pipe", "a socket", "a directory"])
def test_a_pipe_in_place_of_a_file_is_named(tmp_path, name, kind):
    """At the start, before anybody opens it."""
    folder = CheckpointFolder(tmp_path)
    folder.prepare()
    make = {"a pipe": os.mkfifo, "a socket": bind_socket, "a directory": os.mkdir}[kind]
    make(folder.private / name)
    if kind == "a directory" and "." not in name:
        folder.prepare()
        return
    with pytest.raises(NotAFileError, match=f"{name} is {kind}, not a file"):
        folder.prepare()


def test_folders_of_later_fits(tmp_path):
    for name in ("fit10", "fit2", "fitted"):
        (tmp_path / name).mkdir()
    assert [folder.path.name for folder in fit_folders(tmp_path)] == [tmp_path.name, "fit2", "fit10"]


@pytest.mark.parametrize("written", [FORMAT - 1, FORMAT])
def test_a_folder_that_is_stored_is_resumed(written, tmp_path, caplog):
    """Of this format and of the one before: what the release of then wrote, bit by bit."""
    shutil.copytree(stored_format.STORED / str(written), tmp_path / "runs")
    caplog.set_level("INFO", "lightning.pytorch")
    resumed, whole = stored_format.train(AutoResume(tmp_path / "runs")), stored_format.train()
    assert f"resumes at epoch 1, step {stored_format.STOPPED_AT} " in caplog.text
    assert len(resumed.losses) == len(whole.losses) == 9
    assert torch.allclose(torch.tensor(resumed.losses), torch.tensor(whole.losses), rtol=1e-4)
    assert resumed.seen == whole.seen == 36
