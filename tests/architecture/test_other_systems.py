"""What works here works where Linux is missing: on Windows and macOS, as far as a Linux machine can show."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_tricks._shared.console import make_console, write_output


def test_the_package_works_without_what_windows_and_macos_lack(tmp_path):
    options = ["-X", "utf8=0", "-X", "warn_default_encoding", "-W", "ignore::EncodingWarning"]
    run = subprocess.run(
        [sys.executable, *options, "-m", "tests.architecture.other_systems", str(tmp_path)],
        env={**os.environ, "PYTHONIOENCODING": "cp1252", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr.decode(errors="replace")


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_a_character_that_the_output_lacks_is_a_question_mark(encoding, monkeypatch, tmp_path):
    path = tmp_path / "piped"
    with path.open("w", encoding=encoding) as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        make_console(width=60).print("├─ 層: 3")
        write_output("層 4\n")
        monkeypatch.undo()
    assert path.read_text(encoding=encoding) == "?? ?: 3\n? 4\n"
