"""`lightning-tricks fingerprint diff` as a user runs it."""

import subprocess
import sys

import pytest

from lightning_tricks.cli import main
from tests.run_fingerprint.test_callback import at_step, draw, record


@pytest.fixture
def runs(tmp_path):
    record(tmp_path / "a.jsonl")
    record(tmp_path / "b.jsonl", [at_step(5, draw)])
    return str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")


def test_equal_runs(runs, capsys):
    assert main(["fingerprint", "diff", runs[0], runs[0]]) == 0
    assert capsys.readouterr().out == "No difference: 20 batches are equal, bit for bit.\n"


def test_diff_names_the_divergence(runs):
    command = [sys.executable, "-c", "from lightning_tricks.cli import main; raise SystemExit(main())"]
    done = subprocess.run([*command, "fingerprint", "diff", *runs], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines() == [
        "The runs diverge at step 5, in epoch 0, batch 5: forward. The output of net.5 differs (2 of 7 differ).",
        "The output of the layer that ran before it, net.4, is equal.",
        "Batch and weights were equal: look at dropout and other random numbers, at kernels that are not "
        "deterministic, and at what changes weights between steps.",
        "5 batches are equal before it.",
    ]


def test_files_that_cannot_be_compared_are_an_error(runs, tmp_path, capsys):
    record(tmp_path / "c.jsonl", detail="step")
    (tmp_path / "notes.txt").write_text("no record")
    for other, words in (
        ("c.jsonl", "A has detail='layer' and B has detail='step'"),
        ("notes.txt", "not a file of RunFingerprint"),
        ("missing", "No such file"),
    ):
        with pytest.raises(SystemExit) as left:
            main(["fingerprint", "diff", runs[0], str(tmp_path / other)])
        assert left.value.code == 2
        assert words in capsys.readouterr().err
