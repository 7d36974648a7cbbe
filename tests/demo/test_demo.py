"""The command as a newcomer runs it: real processes, real report."""

import faulthandler
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from lightning_tricks import demo
from lightning_tricks.cli import main
from lightning_tricks.demo_resume import KILLED_AFTER, show_resume
from tests.auto_resume.killing import run
from tests.contract.cases import CASES
from tests.documents.generated import DOCS

_COMMAND = str(Path(sys.executable).with_name("lightning-tricks"))
_THREE_EPOCHS = ("demo", "--max-epochs", "3", "--accelerator", "cpu", "--no-kill")


def _run(*arguments):
    environment = {**os.environ, "COLUMNS": "110"}
    return subprocess.run(
        [_COMMAND, *arguments], capture_output=True, text=True, check=False, timeout=300, env=environment
    )


def _demo(folder, options):
    """The demo in a process that has loaded everything already."""
    os.environ["COLUMNS"] = "110"
    if options.get("kill"):
        threading.Thread(target=_kill_when_saved, args=(Path(options["out"]),), daemon=True).start()
    # With these Lightning starts other ranks
    sys.modules["__main__"].__spec__ = None
    sys.argv = [_COMMAND, *options["arguments"]]
    main(sys.argv[1:])


def _kill_when_saved(out):
    while not list(out.glob("resume/.auto_resume/0*")):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


def _fork(folder, out, arguments=_THREE_EPOCHS, kill=False):
    arguments = arguments if out is None else (*arguments, "--out", str(out))
    faulthandler.cancel_dump_traceback_later()  # pytest's timer: a fork cannot set one while it runs
    status = run(folder, {"out": str(out), "arguments": arguments, "kill": kill}, script=_demo)
    return status, (folder / "output.txt").read_text()


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """The demo, twice into the same folder: as the command, and in a fork of this process."""
    folder = tmp_path_factory.mktemp("demo")
    out = folder / "deep" / "report"
    command = _run(*_THREE_EPOCHS, "--out", str(out))
    return out, command, _fork(folder / "again", out)


def _table(text):
    """The lines of the last table."""
    return [line for line in text.rpartition("1,797 digits")[2].splitlines() if line.startswith("│")]


def test_shows_every_trick_and_what_it_did(two_runs):
    _, command, _ = two_runs
    assert command.returncode == 0, command.stderr
    text = "\n".join(_table(command.stdout))
    for case in CASES.values():
        assert case.callback.__module__.split(".")[1] in text
    for what in ("clipped steps", "seed", "accuracy", "train loss"):
        assert what in text
    assert "Warning" not in command.stderr


def test_runs_with_one_seed_are_the_same(two_runs):
    _, command, (status, printed) = two_runs
    assert status == 0, printed
    assert _table(command.stdout) == _table(printed)


@pytest.mark.thorough
def test_killed_and_continued_it_is_the_same(two_runs, tmp_path):
    _, undisturbed, _ = two_runs
    out = tmp_path / "out"
    assert _fork(tmp_path / "killed", out, kill=True)[0] == -9
    assert list(out.glob("resume/.auto_resume/0*"))
    status, printed = _fork(tmp_path / "resumed", out)
    assert status == 0, printed
    tables = [_table(text) for text in (printed, undisturbed.stdout)]
    assert len(tables[0]) > 10
    assert tables[0] == tables[1]
    assert not (out / "resume").exists()


def test_the_documentation_shows_this_table(two_runs):
    _, command, _ = two_runs
    texts = (DOCS / "demo.md").read_text(), command.stdout
    aside = r"[\d.]+|\s+|\w+(?=: f1)"  # numbers, and which class is the hardest
    shown, printed = ([re.sub(aside, " ", line) for line in _table(text)] for text in texts)
    assert len(shown) > 10
    assert shown == printed, "numbers aside, docs/demo.md shows what the demo prints"


def test_writes_a_report_that_agrees(two_runs):
    out, _, _ = two_runs
    report = json.loads((out / "report.json").read_text())
    assert report["seeding"]["seed"].startswith("42 ")
    clipped, of, steps = report["gradient_clipping"]["clipped steps"].split()[:3]
    assert (of, int(steps)) == ("of", 3 * 38)
    assert 0 < int(clipped) < int(steps)
    assert report["gradient_clipping"]["gradient norm after"].endswith("largest 2.00")
    test_accuracy = report["training"]["accuracy"].split("test ")[1]
    assert float(test_accuracy.rstrip("%")) > 90, "the model has learned"
    page = out / "run" / "report.html"
    assert "steps were clipped" in page.read_text() or "gradient norm" in page.read_text()
    assert two_runs[1].stdout.splitlines()[-1].endswith(str(page.resolve())), "the last line is where to look"
    assert {path.name for path in (out / "logs").iterdir()} == {"version_0", "version_1"}
    (checkpoint,) = (out / "logs" / "version_0" / "checkpoints").iterdir()
    with pytest.warns(UserWarning, match="These tricks are off, as a checkpoint must not decide"):
        loaded = demo.DigitsClassifier.load_from_checkpoint(checkpoint, weights_only=True)
    assert loaded.tricks.seeding == 42


@pytest.mark.thorough
def test_two_devices_and_another_precision(tmp_path):
    arguments = ("demo", "--max-epochs", "1", "--accelerator", "cpu", "--devices", "2", "--no-kill")
    arguments += ("--precision", "bf16-mixed")
    status, printed = _fork(tmp_path, None, arguments)
    assert status == 0, printed
    report = json.loads(Path("lightning_tricks_demo/report.json").read_text())
    assert report["training"]["steps"] == "19 in 1 epochs, bf16-mixed, 2 x CPUAccelerator"
    assert printed.count("clipped steps") == 1, "rank zero alone reports"


def test_a_run_is_killed_and_resumed_before_the_readers_eyes(capsys):
    show_resume()
    lines = capsys.readouterr().out.splitlines()
    whole, resumed = (re.search(r"76 steps, sha256 of the weights (\w{16})", line) for line in (lines[2], lines[4]))
    assert whole[1] == resumed[1]
    assert lines[3].split() == ["killed", str(KILLED_AFTER), "steps"]
    assert f"resumed at step {KILLED_AFTER}: equal, bit for bit" in lines[4]


def test_a_child_that_fails_is_an_error_with_its_words(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setattr("lightning_tricks.demo_resume.__name__", "lightning_tricks.no_such_module")
    with pytest.raises(RuntimeError, match="No module named"):
        show_resume()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-epochs", "0"], "must be an integer >= 1, got '0'"),
        (["--seed", "-1"], r"[0, 2**32 - 1]"),
        (["--seed", "x"], "invalid int value: 'x'"),
        (["--precision", "fp4"], "'fp4' is invalid"),
        (["--accelerator", "cpu", "--devices", "0"], "must be an integer >= 1, got '0'"),
        (["--out", "a_file"], "a_file"),
    ],
)
def test_bad_arguments_are_one_sentence(arguments, words, capsys):
    Path("a_file").write_text("mine")
    with pytest.raises(SystemExit) as stopped:
        main(["demo", *arguments])
    error = capsys.readouterr().err
    assert stopped.value.code == (2 if error.startswith("usage: ") else 1)
    assert words in error
    assert "Traceback" not in error
    assert Path("a_file").read_text() == "mine"


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
