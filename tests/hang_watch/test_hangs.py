"""Runs that really stand still: what their ranks write, and what the command says about them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_tricks.cli import main
from tests.small import cases

ROOT = Path(__file__).parents[2]


def hang(kind, folder, ranks=2):
    """Start a run, wait until all its ranks have written their stacks, and kill it."""
    output = folder.with_suffix(".txt")
    with output.open("w", encoding="utf-8") as file:
        command = [sys.executable, "-m", "tests.hang_watch.hanging", kind, str(folder)]
        run = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True)
        try:
            until = time.monotonic() + 240
            while sum(path.stat().st_size > 0 for path in folder.glob("rank*.stacks")) < ranks:
                assert run.poll() is None, output.read_text(encoding="utf-8")
                assert time.monotonic() < until, output.read_text(encoding="utf-8")
                time.sleep(0.1)
            time.sleep(0.5)  # until they are whole
        finally:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()


def said_of(folder, capsys):
    capsys.readouterr()
    assert main(["hang", str(folder)]) == 0
    return capsys.readouterr().out


def test_a_rank_that_sleeps(tmp_path, capsys):
    hang("sleep", tmp_path / "hang")
    said = said_of(tmp_path / "hang", capsys)
    assert "2 of 2 ranks stood still for 1 s." in said
    assert "Behind: rank 1." in said
    assert "on_train_batch_start, batch 3 of epoch 0, step 3, in training_step (hanging.py:" in said
    assert "on_before_backward, batch 3 of epoch 0" in said

    assert main(["hang", str(tmp_path / "hang"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(rank["rank"], rank["batches"], rank["backwards"]) for rank in report["ranks"]] == [(0, 4, 4), (1, 4, 3)]
    assert any(function == "training_step" for _, _, function in report["ranks"][1]["frames"])

    (tmp_path / "hang" / "rank1.hang").unlink()
    assert "There is no record of rank 1." in said_of(tmp_path / "hang", capsys)


@cases(
    "kind, words",
    ("skip", ["Backward passes: "]),
    (
        "shorter",
        [
            "Batches started: ",
            "If their loaders have different numbers of batches: EndTogether() ends each epoch on all ranks.",
        ],
    ),
    ("keys", ["Only rank 1 logged 'extra' in val epoch 0."]),
    ("loader", ["Behind: rank 1.", "fetch of a train batch", "in __getitem__ (hanging.py:"]),
)
def test_a_rank_that_does_something_else(kind, words, tmp_path, capsys):
    hang(kind, tmp_path / "hang")
    said = said_of(tmp_path / "hang", capsys)
    assert [text for text in words if text not in said] == []


def test_a_rank_that_is_told_to_stop_alone_needs_no_other_loaders(tmp_path, capsys):
    hang("stops", tmp_path / "hang")
    said = said_of(tmp_path / "hang", capsys)
    assert "trainer.should_stop is set on rank 1 alone: set it on all ranks" in said
    assert "EndTogether" not in said


def test_a_rank_whose_fit_has_ended(tmp_path, capsys):
    hang("ends", tmp_path / "hang", ranks=1)
    said = said_of(tmp_path / "hang", capsys)
    assert "1 of 2 ranks stood still for 1 s.\nEnded: rank 1.\n" in said
    assert "Behind" not in said
    assert "  rank 1: " in said
    assert "the end of its run, batch 3 of epoch 0, step 3" in said


@pytest.mark.skipif(sys.platform == "win32", reason="it sleeps by libc")
def test_c_code_that_holds_the_interpreters_lock(tmp_path, capsys):
    hang("holds the lock", tmp_path / "hang", ranks=1)
    said = said_of(tmp_path / "hang", capsys)
    assert "1 of 1 ranks stood still" in said
    assert "in training_step (hanging.py:" in said
