"""`lightning-tricks schedule`, and the pictures."""

import subprocess
import sys

import pytest
from matplotlib.figure import Figure

from lightning_tricks import ScheduleSpec
from lightning_tricks.cli import main
from lightning_tricks.lr_schedules import plot_schedule
from tests.small import cases


def test_shows_and_draws(capsys, tmp_path):
    picture = tmp_path / "wsd.png"
    assert main(["schedule", "--kind", "wsd", "--total", "10000", "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "300 (peak)" in printed
    assert "wsd, 10,000 steps" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_one_cycle_takes_its_start(capsys):
    assert main(["schedule", "--kind", "one_cycle", "--start-factor", "0.5", "--total", "100"]) == 0
    assert "0.5000" in capsys.readouterr().out


def test_recipe_in_epochs(capsys):
    arguments = "schedule --kind multistep --milestones 100 140 240 --interval epoch --total 3000 --steps-per-epoch 10"
    assert main(arguments.split()) == 0
    assert "1.0000" in capsys.readouterr().out


@cases(
    "arguments, words",
    ("--kind wsdd --total 10", "Did you mean 'wsd'"),
    ("--total 10 --warmup 20", "are longer than the schedule: 20 > 10 steps"),
    ("--total 0", "total_steps must be a whole number >= 1"),
    ("--kind wsd", "--total"),
    ("--total 10 --interval epoch", "steps_per_epoch"),
    ("--total 10 --lr nan", "--lr must be a number > 0"),
    ("--total 10 --lr -1", "--lr must be a number > 0"),
    ("--total 10 --plot /nowhere/a.png", "nowhere"),
    ("--total 10 --plot picture.docx", "docx"),
)
def test_says_what_is_wrong(arguments, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["schedule", *arguments.split()])
    error = capsys.readouterr().err
    assert stopped.value.code == (2 if error.startswith("usage: ") else 1)
    assert words in error


def test_help_loads_no_torch():
    code = "import sys; from lightning_tricks.cli import main\n"
    code += "try: main(['schedule', '--help'])\nexcept SystemExit: pass\n"
    code += "assert not {'torch', 'lightning', 'matplotlib'} & sys.modules.keys()"
    run = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_draws_on_given_axes():
    axes = plot_schedule(ScheduleSpec("wsd"), 100, lr=0.1)
    assert plot_schedule(ScheduleSpec(warmup="1 epoch"), 100, steps_per_epoch=10, ax=axes, label="cosine") is axes
    first, second = axes.get_lines()
    assert (first.get_label(), second.get_label()) == ("wsd", "cosine")
    assert list(first.get_ydata())[:101:50] == pytest.approx([0.025, 0.1, 0.0])
    assert axes.get_ylabel() == "learning rate"
    assert axes.get_ylim()[0] == 0
    assert plot_schedule(ScheduleSpec("constant"), 10).get_ylim()[0] == 0
    assert plot_schedule(ScheduleSpec(), 10, lr=0.1, ax=Figure().subplots()).get_ylabel() == "learning rate"


def test_says_which_extra_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="from the extra 'reports'"):
        plot_schedule(ScheduleSpec(), 10)
