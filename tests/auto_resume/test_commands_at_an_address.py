"""`lightning-tricks resume` at an address, and of a local folder that is sent to one."""

import json
import os
import re
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest

from lightning_tricks import AutoResume, HangWatch, ModelReport, RunFingerprint, load_weights, seed_everything
from lightning_tricks.auto_resume import CheckpointFolder
from lightning_tricks.auto_resume.core.store.mirror import Mirror
from lightning_tricks.auto_resume.core.store.object_store import ObjectStore, StoreError
from lightning_tricks.cli import main
from tests.small import Net, cases, fit, loader, same

KNOWN = {"epoch": 1, "batches": 0, "finished": False}


def _resume(capsys, *arguments, status=0):
    """Return what the command prints, and what it says of errors."""
    try:
        left = main(["resume", *map(str, arguments)])
    except SystemExit as stopped:
        left = stopped.code
    said = capsys.readouterr()
    assert left == status, said.err
    assert len(said.err.splitlines()) <= 1 or "usage" in said.err
    return said.out, said.err


@pytest.fixture
def store(tmp_path):
    """A folder that serves as the store, with two checkpoints of the first fit and one of the second."""
    folder = CheckpointFolder(tmp_path / "store")
    for step in (1, 2):
        folder.save({"state_dict": Net().state_dict()}, step=step, **KNOWN)
    folder.write_status(state="stopped", epoch=1, step=2, max_epochs=3, max_steps=-1)
    CheckpointFolder(folder.path / "fit2").save({}, step=7, **KNOWN)
    (folder.path / "metrics.csv").write_text("loss\n1\n")
    (folder.path / "notes.txt").write_text("of somebody else")
    folder.write_private("files.json", {"files": {"metrics.csv": [7, 1], "../outside": [1, 1], "gone": [1, 1]}})
    return folder.path


def test_status_shows_what_it_shows_for_a_directory(store, capsys):
    local, _ = _resume(capsys, "status", store)
    with patch.object(CheckpointFolder, "find_problem", side_effect=AssertionError("it reads the small records alone")):
        there, _ = _resume(capsys, "status", f"file://{store}/")
    assert there == local.replace(f"{store}", f"file://{store}")
    assert there.count("file://") == 1
    (first, second), _ = (json.loads(part or "[]") for part in _resume(capsys, "status", f"file://{store}", "--json"))
    assert (first["folder"], second["folder"]) == (f"file://{store}", f"file://{store}/fit2")
    assert [each["step"] for each in (*first["checkpoints"], *second["checkpoints"])] == [2, 1, 7]
    assert (first["state"], first["mirror"], second["state"]) == ("stopped", None, None)


def test_status_passes_over_what_is_not_complete_or_was_just_removed(store, capsys):
    (store / ".auto_resume" / "000009-epoch=1-step=9").mkdir()  # which is being sent
    (store / ".auto_resume" / "000009-epoch=1-step=9" / "meta.pt").touch()
    get = ObjectStore.get

    def removed(self, name, path):
        if "step=1/" in name:
            path.parent.mkdir(parents=True)
            raise FileNotFoundError(name)
        get(self, name, path)

    with patch.object(ObjectStore, "get", removed):
        said, _ = _resume(capsys, "status", f"file://{store}")
    assert re.findall(r"  (\S+): ", said) == ["000002-epoch=1-step=2", "000001-epoch=1-step=7"]


def test_verify_compares_each_checkpoint_and_holds_one_at_a_time(store, capsys):
    held, find_problem = [], Mirror.find_problem

    def observed(self, folder, name):
        found = find_problem(self, folder, name)
        held.append(len(list(Path(self.scratch).rglob("meta.pt"))))
        return found

    with patch.object(Mirror, "find_problem", observed):
        said, _ = _resume(capsys, "verify", f"file://{store}")
    names = ("000002-epoch=1-step=2", "000001-epoch=1-step=1")
    places = [*(f".auto_resume/{name}" for name in names), "fit2/.auto_resume/000001-epoch=1-step=7"]
    assert said.splitlines() == [f"file://{store}/{place}: complete" for place in places]
    assert held == [1, 1, 2], "one of each fit"
    os.truncate(store / places[0] / "meta.pt", 10)
    (store / places[1] / "meta.pt").unlink()
    said, _ = _resume(capsys, "verify", f"file://{store}", "--json", status=1)
    problems = [each["problem"] for each in json.loads(said)]
    assert problems == ["meta.pt has other bytes than were written (its SHA-256 differs)", "meta.pt is missing", None]
    assert {path.name for path in (store / ".auto_resume").iterdir()} >= {*names}, "nothing is renamed"


def test_verify_does_not_complain_about_what_a_run_removes_meanwhile(store, capsys):
    find_problem = Mirror.find_problem

    def removed(self, folder, name):
        if name.endswith("step=1"):
            shutil.rmtree(store / ".auto_resume" / name)
        return find_problem(self, folder, name)

    with patch.object(Mirror, "find_problem", removed):
        said, _ = _resume(capsys, "verify", f"file://{store}")
    assert [line.endswith("complete") for line in said.splitlines()] == [True, True]


def test_fetch_copies_the_newest_intact_checkpoints_and_the_files_of_the_run(store, tmp_path, capsys):
    os.truncate(store / ".auto_resume" / "000002-epoch=1-step=2" / "meta.pt", 10)
    before = sorted(store.rglob("*"))
    (target := tmp_path / "new" / "copy").mkdir(parents=True)
    said, warned = _resume(capsys, "fetch", f"file://{store}", target)
    assert re.findall(r"  (\S+): ", said) == ["000001-epoch=1-step=1", "000001-epoch=1-step=7"]
    assert f"{store}/.auto_resume/000002-epoch=1-step=2 cannot be used: meta.pt has other bytes" in warned
    assert sorted(store.rglob("*")) == before
    assert sorted(path.name for path in target.iterdir()) == [".auto_resume", "fit2", "metrics.csv"]
    assert not (tmp_path / "new" / "outside").exists()
    _resume(capsys, "verify", target)
    _, refused = _resume(capsys, "fetch", f"file://{store}", target, status=1)
    assert refused == f"lightning-tricks resume fetch: error: {target} is not empty. Give another folder.\n"


def test_a_folder_without_an_intact_checkpoint_stays_empty(store, tmp_path, capsys):
    for path in store.rglob("meta.pt"):
        os.truncate(path, 10)
    _, said = _resume(capsys, "fetch", f"file://{store}", tmp_path / "copy", status=1)
    assert said.endswith(f"file://{store} has no intact checkpoint.\n")
    assert not list((tmp_path / "copy").iterdir())


@pytest.mark.parametrize(("command", "status"), [("status", 1), ("verify", 2), ("fetch", 1)])
def test_an_address_that_cannot_be_used_is_one_sentence(command, status, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = ["copy"] if command == "fetch" else []
    for address in (f"file://{tmp_path}/none", "s3:/bucket/run"):
        _, said = _resume(capsys, command, address, *given, status=status)
        assert said.endswith(f"{address} contains no checkpoints of AutoResume. Give the dirpath of a run.\n")
    with patch("fsspec.core.url_to_fs", side_effect=ImportError("Install s3fs")):
        _, said = _resume(capsys, command, "s3://bucket/run", *given, status=status)
    assert "s3://bucket/run cannot be opened: s3:// needs the extra 's3': pip install " in said
    with patch.object(ObjectStore, "sizes", side_effect=StoreError("s3://bucket/run cannot be used: denied.")):
        _, said = _resume(capsys, command, f"file://{tmp_path}", *given, status=status)
    assert said.endswith(": error: s3://bucket/run cannot be used: denied.\n")


def test_status_of_a_scratch_folder_shows_what_was_sent_last(tmp_path, capsys):
    root, state = (
        CheckpointFolder(tmp_path),
        {"address": "s3://bucket/run", "sent": 1.0, "newest": "000001-epoch=1-step=1"},
    )
    root.save({}, step=1, **KNOWN)
    root.write_private("mirror.json", state)
    said = _resume(capsys, "status", tmp_path)[0].splitlines()
    assert re.fullmatch(r"  sent to s3://bucket/run: 000001-epoch=1-step=1, \d+ d ago", said[-1])
    CheckpointFolder(tmp_path / "fit2").save({}, step=3, **KNOWN)
    root.write_private("mirror.json", {**state, "problem": "the store said no"})
    said = _resume(capsys, "status", tmp_path)[0].splitlines()
    assert said[-1] == ("  sent to s3://bucket/run: nothing; not sent: 000001-epoch=1-step=3, as the store said no")
    *_, later = json.loads(_resume(capsys, "status", tmp_path, "--json")[0])
    assert later["mirror"] == {
        "address": "s3://bucket/run",
        "newest": None,
        "sent": 1.0,
        "problem": "the store said no",
    }
    root.write_private("mirror.json", {**state, "sent": "yesterday"})
    assert "yesterday" not in _resume(capsys, "status", tmp_path)[0]


def test_a_run_at_an_address_is_shown_fetched_resumed_and_its_weights_are_loaded(tmp_path, capsys):
    def run(*callbacks, epochs):
        seed_everything(3, verbose=False)
        return fit(Net(dropout=0.2), *callbacks, data=loader(shuffle=True), max_epochs=epochs).lightning_module

    address, scratch = f"file://{tmp_path}/store", tmp_path / "scratch"
    first = run(AutoResume(address, scratch=scratch), epochs=1)
    assert "finished" in _resume(capsys, "status", address)[0]
    assert f"sent to {address}: " in _resume(capsys, "status", scratch)[0]
    newest = CheckpointFolder(tmp_path / "store").manifests()[0].file
    report = load_weights(loaded := Net(), f"{address}/.auto_resume/{newest}/meta.pt")
    assert not report.missing
    assert same(loaded.state_dict(), first.state_dict())
    _resume(capsys, "fetch", address, tmp_path / "copy")
    resumed = run(AutoResume(tmp_path / "copy"), epochs=2)
    assert same(resumed.state_dict(), run(epochs=2).state_dict())


@cases(
    "make, name",
    (lambda place: HangWatch("1 hour", dirpath=place), "dirpath"),
    (lambda place: ModelReport(dirpath=place), "dirpath"),
    (lambda place: RunFingerprint(f"{place}/run.jsonl"), "path"),
    ids=["HangWatch", "ModelReport", "RunFingerprint"],
)
def test_what_callbacks_write_below_the_scratch_folder_is_sent_as_their_refusal_of_an_address_says(
    make, name, tmp_path
):
    words = rf"{name} must be .*, got 's3://.*or give a path below AutoResume's scratch folder, whose files are sent"
    with pytest.raises(ValueError, match=words):
        make("s3://bucket/run")
    beside = tmp_path / "scratch" / "beside"
    for order in (1, -1):
        own = [AutoResume(f"file://{tmp_path}/store", scratch=tmp_path / "scratch"), make(beside)]
        fit(Net(), *own[::order], max_epochs=1 if order == 1 else 2)
        local, sent = (
            {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
            for folder in (beside, tmp_path / "store" / "beside")
        )
        assert local.items() <= sent.items(), "HangWatch removes its own at the end, perhaps after the last send"
