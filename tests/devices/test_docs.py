"""docs/devices.md says what is true: its code runs, its commands print what it says, its links lead somewhere."""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import psutil
import pytest

from lightning_tricks import cli
from lightning_tricks.devices import Gpu, GpuProcess, commands
from lightning_tricks.devices.core.gpu_fields import FIELDS
from lightning_tricks.devices.testing import FakeGpu, FakeNvml, FakeProcess
from tests.architecture.test_readme import _RUN_EACH

_PAGE = Path(__file__).parents[2] / "docs" / "devices.md"
_TEXT = _PAGE.read_text()
# A block may be a part of a list, and what it prints follows it
_BLOCK = re.compile(r"^ *```(\w+)\n(.*?)^ *```\n(?:\n```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)
_BLOCKS = [match.groups() for match in _BLOCK.finditer(_TEXT)]
_COMMANDS = [
    (line.strip().removeprefix("$ "), output)
    for language, code, output in _BLOCKS
    if language == "console"
    for line in code.splitlines()
]
_OTHERS = {"fuser", "kill", "lsof", "nvidia-smi", "plink", "ps", "ssh", "systemctl", "tail", "tensorboard", "tmux"}


def _machine():
    """The machine that the page shows."""
    training = FakeProcess(4242, memory="61GiB")
    return FakeNvml(
        [
            FakeGpu(
                memory_used="61.6GiB",
                utilization=97,
                temperature=68,
                power=689,
                throttle_reasons=4,
                processes=[training],
            ),
            FakeGpu(temperature=33, power=72),
            FakeGpu(fails={"nvmlDeviceGetHandleByIndex": "GPU_IS_LOST"}),
        ]
    )


@pytest.fixture
def machine(monkeypatch):
    command = ["python", "train.py", "--config", "resnet50.yaml"]
    process = SimpleNamespace(name=lambda: "python", cmdline=lambda: command, username=lambda: "jane")
    monkeypatch.setattr(psutil, "Process", lambda pid: process)
    monkeypatch.setenv("COLUMNS", "100")
    with _machine() as nvml:
        yield nvml


def test_every_block_is_found():
    assert len(_BLOCKS) + sum(output is not None for *_, output in _BLOCKS) == _TEXT.count("```") / 2
    assert {language for language, *_ in _BLOCKS} == {"python", "console", "powershell"}


_PYTHON = [(code, output) for language, code, output in _BLOCKS if language == "python"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Code -> the folder with what it printed."""
    folders = {code: tmp_path_factory.mktemp("block") for code, _ in _PYTHON}
    blocks = json.dumps([(code, str(folder)) for code, folder in folders.items()])
    environment = {**os.environ, "LIGHTNING_TRICKS_LOCK_DIR": str(tmp_path_factory.mktemp("locks"))}
    subprocess.run([sys.executable, "-W", "ignore", "-c", _RUN_EACH, blocks], env=environment, check=True)
    return folders


@pytest.mark.parametrize(("code", "output"), _PYTHON)
def test_python_block_prints_what_it_says(code, output, runs):
    folder = runs[code]
    assert (folder / "status").read_text() == "0", (folder / "error").read_text()
    assert (folder / "output").read_text().rstrip().endswith((output or "").rstrip())


def _our_arguments(command):
    """What follows each `lightning-tricks` in a command."""
    for part in re.findall(r"lightning-tricks ([^)|]*)", command):
        yield shlex.split(part)


@pytest.mark.parametrize("command", [command for command, _ in _COMMANDS])
def test_command_exists(command):
    ours = list(_our_arguments(command))
    if not ours:
        words = [word for word in command.split() if word != "sudo"]
        assert words[0] in _OTHERS
    for arguments in ours:
        ran = []
        parse = argparse.ArgumentParser.parse_args

        def keep(parser, argv, parse=parse, ran=ran):
            parsed = parse(parser, argv)
            ran.append(parsed.run)
            parsed.run = lambda arguments: 0
            return parsed

        with patch.object(argparse.ArgumentParser, "parse_args", keep):
            assert cli.main(arguments) == 0
        assert ran


@pytest.mark.parametrize(("command", "output"), [(command, output) for command, output in _COMMANDS if output])
def test_command_prints_what_it_says(command, output, machine, capsys):
    assert cli.main(shlex.split(command)[1:]) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == output.splitlines()


@pytest.mark.parametrize(
    "command", [command for command, output in _COMMANDS if re.match("lightning-tricks (gpus|env)", command)]
)
def test_command_runs(command, machine, capsys, monkeypatch):
    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "time", SimpleNamespace(sleep=interrupt))
    assert cli.main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out


def test_the_names_in_the_table_of_columns_exist():
    rows = [line.split(" | ") for line in re.findall(r"^\| (.*) \|$", _TEXT, re.MULTILINE)][2:]
    assert len(rows) == 15
    attributes = {field.name for field in fields(Gpu)}
    attributes |= {f"GpuProcess.{field.name}" for field in fields(GpuProcess)}
    for title, _, ours, query in (row for row in rows if len(row) == 4 and row[0] != "CUDA Version"):
        assert {*re.findall("`(.+?)`", ours)} <= attributes, title
        assert {*re.findall("`(.+?)`", query)} <= {*FIELDS}, title
        assert "`" in ours, title
        assert "`" in query, title


def _anchor(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_links_lead_somewhere():
    anchors = {_anchor(heading) for heading in re.findall(r"^#+ (.*)$", _TEXT, re.MULTILINE)}
    links = re.findall(r"\]\(([^)]+)\)", _TEXT)
    assert links
    for link in links:
        file, _, anchor = link.partition("#")
        assert not file or (_PAGE.parent / file).exists(), link
        assert file or anchor in anchors, link
