"""Tables on the screen, and what becomes of a run whose output nobody reads."""

import io
import os
import sys
from contextlib import contextmanager, redirect_stdout, suppress

import pytest
from lightning.pytorch import Trainer
from rich.console import Console

from lightning_tricks import FlopsReport, MetricsMonitor, ModelReport
from lightning_tricks._shared.console import make_console, print_report
from lightning_tricks._shared.fitting_table import FittingTable
from lightning_tricks._shared.text import render_text
from lightning_tricks.cli import main
from tests.small import QUIET, Net, cases, loader

_WORDS = " ".join(["wide"] * 30)


@contextmanager
def unread():
    """Make a pipe that nobody reads any more the standard output; a fixture would be too early, pytest sets its own."""
    reader, writer = os.pipe()
    os.close(reader)
    output = os.fdopen(writer, "w", encoding="utf-8")
    try:
        with redirect_stdout(output):
            yield
    finally:
        with suppress(BrokenPipeError):
            output.close()


@cases(
    "callback",
    MetricsMonitor({"task": "multiclass", "num_classes": 10}, verbose=True),
    FlopsReport(verbose=True),
    ModelReport(verbose=True),
    ids=lambda callback: type(callback).__name__,
)
def test_a_pipe_that_nobody_reads_ends_no_run(callback):
    trainer = Trainer(max_epochs=1, callbacks=[callback], **QUIET)
    words = f"{type(callback).__name__} could not print its table: .*Broken pipe"
    with unread(), pytest.warns(UserWarning, match=words):
        trainer.fit(Net(), loader())
    assert trainer.global_step == 10


def test_a_closed_file_takes_no_table(monkeypatch):
    output = io.StringIO()
    output.close()
    monkeypatch.setattr(sys, "stdout", output)
    with pytest.warns(UserWarning, match="Trick could not print its table: I/O operation on closed file"):
        print_report("Trick", "text")


def test_a_width_that_nobody_knows_is_that_of_a_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "0")
    make_console().print("text")
    assert capsys.readouterr().out == "text\n"


def test_who_prints_is_told_that_nobody_reads():
    with unread(), pytest.raises(BrokenPipeError):
        make_console().print("text")


@pytest.mark.parametrize("width", [40, 80, 200])
def test_lines_below_a_table_are_as_wide_as_the_terminal(width):
    table = FittingTable(notes=f"first\n{_WORDS}", title="a title")
    table.add_column("x")
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(table)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    below = lines[lines.index("first") + 1 :]
    assert " ".join(below) == _WORDS
    assert all(len(line) + len(" wide") > width for line in below[:-1])
    assert all(len(line) <= width for line in lines)


def test_below_a_table_nothing_is_markup_and_no_text_is_no_line():
    tables = FittingTable(notes="net[0] [bold]", title="net"), FittingTable(title="net")
    for table in tables:
        table.add_column("x")
    with_text, without = (render_text(table).splitlines() for table in tables)
    assert with_text == [*without, "net[0] [bold]"]


@cases(
    "command, words",
    (["gpus", "--js"], "unrecognized arguments: --js"),
    (["schedule", "--tot", "10"], "the following arguments are required: --total"),
)
def test_an_option_by_its_beginning_is_refused(command, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(command)
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err
