"""The demo as a newcomer runs it: real processes, real report."""

import faulthandler
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_tricks import demo
from lightning_tricks.cli import main
from lightning_tricks.run_report import read_record
from tests.auto_resume.killing import run
from tests.documents.generated import DOCS

_FOLDER = Path(__file__).parents[2] / "examples" / "demo"
_DEMO = str(_FOLDER / "every_trick.py")
_THREE_EPOCHS = ("--max-epochs", "3", "--accelerator", "cpu")


def _run(program, *arguments):
    environment = {**os.environ, "COLUMNS": "100"}
    command = [sys.executable, program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)


def _demo(folder, options):
    """The demo in a process that has loaded everything already."""
    os.environ["COLUMNS"] = "100"
    # With these Lightning starts other ranks
    sys.modules["__main__"].__spec__ = None
    sys.argv = [_DEMO, *options["arguments"]]
    sys.path.insert(0, str(_FOLDER))
    runpy.run_path(_DEMO, run_name="__main__")


def _fork(folder, out, arguments=_THREE_EPOCHS):
    arguments = arguments if out is None else (*arguments, "--out", str(out))
    faulthandler.cancel_dump_traceback_later()  # pytest's timer: a fork cannot set one while it runs
    status = run(folder, {"arguments": arguments}, script=_demo)
    return status, (folder / "output.txt").read_text()


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """The demo, twice into the same folder: as a program, and in a fork of this process."""
    folder = tmp_path_factory.mktemp("demo")
    out = folder / "deep" / "report"
    program = _run(_DEMO, *_THREE_EPOCHS, "--out", str(out))
    return out, program, _fork(folder / "again", out)


def _table(text):
    return [line for line in text.rpartition("1,797 digits")[2].splitlines() if line.startswith("│")]


def test_runs_with_one_seed_are_the_same(two_runs):
    _, program, (status, printed) = two_runs
    assert program.returncode == 0, program.stderr
    assert "Warning" not in program.stderr
    assert status == 0, printed
    assert _table(program.stdout) == _table(printed)


def test_the_documentation_shows_this_table(two_runs):
    _, program, _ = two_runs
    texts = (DOCS / "demo.md").read_text(), program.stdout
    aside = r"[\d.]+|\s+|\w+(?=: f1)"  # numbers, and which class is the hardest
    shown, printed = ([re.sub(aside, " ", line) for line in _table(text)] for text in texts)
    assert len(shown) > 10
    assert shown == printed, "numbers aside, docs/demo.md shows what the demo prints"


def test_what_it_says_is_what_the_run_has_recorded(two_runs):
    out, program, _ = two_runs
    rows = {cells[2].strip(): cells[3].strip() for cells in (line.split("│") for line in _table(program.stdout))}
    record = read_record(out / "run" / "earlier-1")  # the second run has moved it
    norms = [point.value for point in record.curve("grad_norm/pre_clip")]
    assert rows["clipped steps"].startswith(f"{sum(norm > 2 for norm in norms)} of {3 * 38} (")
    assert rows["norm after"].endswith("largest 2.00")
    assert float(rows["accuracy"].split("test ")[1].rstrip("%")) > 90, "the model has learned"
    assert program.stdout.splitlines()[-1].endswith(str(out / "run" / "report.html")), "the last line is where to look"
    assert {path.name for path in (out / "logs").iterdir()} == {"version_0", "version_1"}
    (checkpoint,) = (out / "logs" / "version_0" / "checkpoints").iterdir()
    with pytest.warns(UserWarning, match="These tricks are off, as a checkpoint must not decide"):
        loaded = demo.DigitsClassifier.load_from_checkpoint(checkpoint, weights_only=True)
    assert loaded.tricks.seed_everything == 42


@pytest.mark.thorough
def test_two_devices_and_another_precision(tmp_path):
    arguments = ("--max-epochs", "1", "--accelerator", "cpu", "--devices", "2", "--precision", "bf16-mixed")
    status, printed = _fork(tmp_path, None, arguments)
    assert status == 0, printed
    assert "19 in 1 epochs, bf16-mixed, 2 x CPUAccelerator" in printed
    assert printed.count("clipped steps") == 1, "rank zero alone reports"


def test_a_run_is_killed_and_resumed_before_the_readers_eyes():
    shown = _run(str(_FOLDER / "kill_and_resume.py"))
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    whole, resumed = (re.search(r"76 steps, sha256 of the weights (\w{16})", line) for line in (lines[2], lines[4]))
    assert whole[1] == resumed[1]
    assert lines[3].split() == ["killed", "50", "steps"]
    assert lines[4].endswith(("resumed at step 50:", "resumed at step 40:")), "it may be killed while it still writes"
    assert lines[5].strip() == "equal, bit for bit"


def test_unknown_commands_are_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["nothing"])
    assert stopped.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_the_split_is_the_same_whatever_the_seed():
    splits = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        data = demo.Digits()
        data.setup("fit")
        splits.append(data)
    assert [len(split) for split in splits[0]._splits] == [1197, 300, 300]
    images = [next(iter(data.val_dataloader()))[0] for data in splits]
    assert torch.equal(*images)
    assert images[0].shape == (32, 1, 8, 8)
    assert images[0].min() >= 0
    assert images[0].max() <= 1
