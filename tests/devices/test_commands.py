"""`lightning-tricks gpus` and `lightning-tricks env`."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from lightning_tricks.cli import main
from tests.devices.boards import LOST
from tests.devices.fake_nvml import FakeGpu, FakeNvml
from tests.small import cases


@pytest.fixture
def nvml():
    with FakeNvml([FakeGpu(memory_used="60GiB", utilization=93), FakeGpu(fails=LOST), FakeGpu(temperature=40)]) as nvml:
        yield nvml


def _error(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    captured = capsys.readouterr()
    assert stopped.value.code == (2 if captured.err.startswith("usage: ") else 1)
    assert "Traceback" not in captured.err
    assert captured.out == ""
    return captured.err


# gpus


@cases(
    "arguments, words",
    (["--id", "7"], "id must name GPUs of this machine, got '7'. It has 0 (GPU-00000000"),
    (["--watch", "0"], "must be seconds from 0.1 to 86400, got '0'"),
    (["--watch", "nan"], "must be seconds"),
    (["--watch", "inf"], "must be seconds"),
    (["--watch", "fast"], "must be seconds"),
    (["--format", "devices"], "--format says how to choose GPUs: add --select N"),
    (["--max-utilization", "0"], "--max-utilization says how to choose GPUs: add --select N"),
    (["--select", "2", "--json"], "--select prints only the GPUs that it chooses: leave out --json"),
    (["--select", "2", "--format", "devices", "--", "python"], "leave out --format"),
    (["--", "python", "train.py"], "'python' needs GPUs to start on: add --select N before --"),
    (["--select", "1", "--", "no_such_program"], "no program is called 'no_such_program' here"),
    (["--select", "1", "--min-free-memory", "much", "--", "python"], "min_free_memory must be a number of bytes"),
    (["--select", "two"], "invalid int value: 'two'"),
    (["--select", "1", "--format", "uuid"], "invalid choice: 'uuid'"),
)
def test_bad_arguments(nvml, arguments, words, capsys):
    assert words in _error(["gpus", *arguments], capsys)


@pytest.mark.parametrize("arguments", [[], ["--json"], ["--watch"], ["--id", "0"], ["--select", "1", "--", "true"]])
def test_without_a_driver(arguments, capsys):
    with FakeNvml(init_error="LIBRARY_NOT_FOUND"):
        error = _error(["gpus", *arguments], capsys)
    assert "this machine has no NVIDIA driver, or the container was started without its GPUs." in error


# gpus --watch


@pytest.fixture
def ctrl_c(monkeypatch):
    """Replaces waiting: the third time somebody presses Ctrl+C. Returns how long was waited."""

    def wait(seconds):
        waited.append(seconds)
        if len(waited) == 3:
            raise KeyboardInterrupt

    waited = []
    monkeypatch.setattr(time, "sleep", wait)
    return waited


def test_watch_shows_what_changes_until_it_is_interrupted(nvml, ctrl_c, capsys, monkeypatch):
    readings = iter([41, 42, 43])
    monkeypatch.setattr(FakeGpu, "temperature", property(lambda gpu: next(readings), lambda gpu, value: None))
    del nvml.gpus[1:]
    threads = threading.enumerate()
    assert main(["gpus", "--watch", "0.5"]) == 0
    captured = capsys.readouterr()
    assert re.findall(r"(\d+) °C", captured.out) == ["41", "42", "43"]
    assert captured.err == ""
    assert ctrl_c == [0.5] * 3
    assert threading.enumerate() == threads
    assert nvml.calls.count("nvmlInit") == nvml.calls.count("nvmlShutdown")


def test_a_driver_that_fails_while_it_is_watched(nvml, capsys, monkeypatch):
    def wait(seconds):
        nvml.fails = {"nvmlDeviceGetCount": "UNKNOWN"}

    monkeypatch.setattr(time, "sleep", wait)
    with pytest.raises(SystemExit, match="1"):
        main(["gpus", "--watch"])
    assert "NVML does not report how many GPUs there are (Unknown Error)" in capsys.readouterr().err


_SCRIPT = """
import sys, threading
from lightning_tricks.cli import main
from tests.devices.fake_nvml import FakeGpu, FakeNvml
with FakeNvml([FakeGpu(), FakeGpu()]):
    status = main(sys.argv[1:])
assert threading.active_count() == 1
sys.exit(status)
"""


def _watched_in_a_terminal(enough, *arguments, **environment):
    """Watch in a pseudo terminal, press Ctrl+C once `enough` stands there twice, and return all that was printed."""
    ours, theirs = os.openpty()
    command = [sys.executable, "-c", _SCRIPT, "gpus", "--watch", "0.1", *arguments]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", **environment}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        text = b""
        while text.count(enough) < 2:
            text += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        while chunk := _read(ours):
            text += chunk
    os.close(ours)
    assert process.returncode == 0
    assert b"Traceback" not in text
    assert b"KeyboardInterrupt" not in text
    return text.decode()


@pytest.mark.skipif(sys.platform == "win32", reason="a pseudo terminal is needed")
@pytest.mark.parametrize("environment", [{}, {"PYTHONIOENCODING": "ascii"}, {"TERM": "dumb"}])
def test_watch_in_a_terminal_leaves_it_as_it_was(environment):
    text = _watched_in_a_terminal(b"2 GPUs, driver", **environment)
    assert text.rfind("\x1b[?25h") >= text.rfind("\x1b[?25l"), "the cursor is visible"
    assert ("\x1b[?25l" in text) == (environment != {"TERM": "dumb"})


def _read(descriptor):
    try:
        return os.read(descriptor, 4096)
    except OSError:  # Linux: the other end is closed
        return b""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell with pipes")
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_who_reads_may_stop_reading(form):
    command = [sys.executable, "-c", _SCRIPT, "gpus", "--watch", "0.1", *form]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141, "128 + SIGPIPE"


# gpus --select


@pytest.fixture(autouse=True)
def everything_is_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_select_prints_uuids_or_what_the_trainer_takes_and_nothing_else(nvml, capsys):
    from lightning.fabric.utilities.device_parser import _normalize_parse_gpu_string_input as parsed

    nvml.gpus[0] = FakeGpu(memory_used="40GiB")
    del nvml.gpus[1]  # a lost one makes CUDA's numbers uncertain
    assert main(["gpus", "--select", "1"]) == 0
    assert main(["gpus", "--select", "2", "--format", "cuda_visible_devices"]) == 0
    uuids = [f"GPU-{number:08}-0000-4000-8000-000000000000" for number in range(2)]
    assert capsys.readouterr().out == f"{uuids[1]}\n{uuids[0]},{uuids[1]}\n"
    for n, numbers in ((1, [1]), (2, [0, 1])):
        assert main(["gpus", "--select", str(n), "--format", "devices"]) == 0
        assert parsed(capsys.readouterr().out.strip()) == numbers


@cases(
    "limit, words",
    (["--min-free-memory", "12GiB"], "less than min_free_memory=12 GiB"),
    (["--max-utilization", "5"], "more than max_utilization=5"),
    (["--max-temperature", "20"], "more than max_temperature=20"),
    (["--timeout", "0.1"], "0 of 3 GPUs qualify"),
)
def test_select_passes_the_limits_on_and_says_why_too_few_are_free(limit, words, nvml, capsys):
    nvml.gpus[2] = FakeGpu(memory_used="70GiB", utilization=6)
    if "--timeout" in limit:
        nvml.gpus[2].utilization = 11
    assert words in _error(["gpus", "--select", "1", *limit], capsys)
