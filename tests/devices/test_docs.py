"""docs/devices.md says what is true of nvidia-smi, and its commands print what it says on the machine that it shows."""

import re
import shlex
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from lightning_tricks import cli
from lightning_tricks.devices import Gpu, GpuProcess, NoGpuAvailableError
from tests.devices.fake_nvml import FakeGpu, FakeNvml, FakeProcess
from tests.documents.blocks import blocks_of

_PAGE = Path(__file__).parents[2] / "docs" / "devices.md"
_TEXT = _PAGE.read_text()
_COMMANDS = [(command, block.output) for block in blocks_of(_PAGE, language="console") for command in block.commands]


def _machine():
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


@pytest.mark.parametrize(("command", "output"), [(command, output) for command, output in _COMMANDS if output])
def test_command_prints_what_it_says(command, output, machine, capsys):
    assert cli.main(shlex.split(command)[1:]) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == output.splitlines()


@pytest.mark.parametrize(
    "command",
    [command for command, output in _COMMANDS if re.match("lightning-tricks gpus", command) and " -- " not in command],
)
def test_command_runs(command, machine, capsys, monkeypatch):
    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    assert cli.main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out


def test_the_names_in_the_table_of_columns_exist():
    rows = [line.split(" | ") for line in re.findall(r"^\| (.*) \|$", _TEXT, re.MULTILINE)][2:]
    assert len(rows) == 15
    attributes = {field.name for field in fields(Gpu)}
    attributes |= {f"GpuProcess.{field.name}" for field in fields(GpuProcess)}
    for title, _, ours in (row for row in rows if row[0] != "CUDA Version"):
        assert {*re.findall("`(.+?)`", ours)} <= attributes, title
        assert "`" in ours, title


def test_the_error_of_a_choice_is_that_of_the_page():
    page = _PAGE.parent / "tricks" / "devices.md"
    code, error = re.search(
        r"```py\n(.*?select_gpus\(2.*?)```.*?```text\n(1 of 3.*?)```", page.read_text(), re.DOTALL
    ).groups()
    gpus = [FakeGpu(memory_used="79GiB"), FakeGpu(utilization=98), FakeGpu()]
    with FakeNvml(gpus), pytest.raises(NoGpuAvailableError) as raised:
        exec(code, {})
    assert f"{raised.value}\n" == error
