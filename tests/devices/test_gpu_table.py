"""`lightning-tricks gpus`: GPUs as a table and as JSON values."""

import json
import os
from dataclasses import fields
from types import SimpleNamespace

import psutil
import pytest

from lightning_tricks import cli
from lightning_tricks.devices import Gpu
from tests.devices.boards import CONSUMER_BOARD, LOST, MIG_ENABLED, UNIFIED_MEMORY
from tests.devices.fake_nvml import FakeGpu, FakeMigSlice, FakeNvml, FakeProcess
from tests.small import cases

_BUSY = FakeGpu(
    memory_used="79.2GiB",
    utilization=100,
    memory_utilization=41,
    temperature=71,
    power=690,
    throttle_reasons=0x5,
    processes=[FakeProcess(os.getpid(), "79GiB"), FakeProcess(2**31 - 1, "512MiB", "G")],
)
_DESKTOP = FakeGpu(
    name="NVIDIA GeForce RTX 4090",
    memory_total="24GiB",
    memory_used="1.1GiB",
    temperature=45,
    power=20,
    power_limit=450,
    performance_state=8,
    persistence_mode=False,
    display_active=True,
    fails=CONSUMER_BOARD,
)
_SLICED = FakeGpu(
    name="NVIDIA A100-SXM4-40GB",
    mig_mode=True,
    memory_total="40GiB",
    mig_slices=[FakeMigSlice("MIG-f1e2", name="NVIDIA A100-SXM4-40GB MIG 1g.5gb", memory_total="5GiB")],
    fails=MIG_ENABLED,
)
_SHARED = FakeGpu(name="NVIDIA GB10", fails={**UNIFIED_MEMORY, "nvmlDeviceGetPowerUsage": "UNKNOWN"})
_HOT = FakeGpu(temperature=90, throttle_reasons=0x68, compute_mode=3, ecc_errors=3)


_ALL = [_BUSY, _DESKTOP, FakeGpu(fails=LOST), _SHARED, _SLICED, _HOT]
_OWN = [field.name for field in fields(Gpu)]


class _Nothing:
    """The functions that a driver lacks which tells only how many GPUs there are."""

    def __contains__(self, name):
        return name not in ("nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex")


@pytest.fixture
def printed(capsys, monkeypatch):
    """Returns what the command prints on a machine with these GPUs, in a terminal of this width."""

    def printed(gpus, *options, width=100, missing=()):
        monkeypatch.setenv("COLUMNS", str(width))
        with FakeNvml(gpus, missing=missing):
            assert cli.main(["gpus", *options]) == 0
        return capsys.readouterr().out

    return printed


@pytest.fixture
def refused(capsys):
    """Returns what the command says of wrong arguments."""

    def refused(gpus, *options):
        with FakeNvml(gpus), pytest.raises(SystemExit):
            cli.main(["gpus", *options])
        return capsys.readouterr().err

    return refused


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_table_fits_and_tells_all(printed, width):
    text = printed(_ALL, width=width)
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= width
    assert max(map(len, lines[:9])) <= 100
    assert lines[0] == "6 GPUs, driver 580.65.06"
    wide = width >= 100
    busy = "  0  NVIDIA H100 80GB HBM3    79.2/80.0 GiB  ━━━━━━━━━╸  100 %  71 °C  690/700 W  P0 throttled"
    assert lines[3] == (busy if wide else "  0  H100 80GB HBM3    79.2/80.0 GiB  100 %  71 °C  690/700 W  P0 throttled")
    assert lines[4].split()[-6:] == ["%", "45", "°C", "20/450", "W", "P8"]
    assert lines[5].split() == ["2", "-", "-", "-", "-", "-", "no", "answer"]
    assert "MIG 1g.5gb" in lines[8]
    assert "0.0/5.0 GiB" in lines[8]
    for remark in (
        "GPU 0 is throttled: power cap.",
        "GPU 1 drives a display.",
        "GPU 2 does not answer: GPU is lost.",
        "GPU 3 could not be read: power: Unknown Error.",
        "GPU 4, MIG slice 0: MIG-f1e2",
        "GPU 5 is in compute mode Exclusive_Process.",
        "GPU 5 had 3 uncorrected memory errors since its start.",
    ):
        assert remark in lines
    assert not [line for line in lines if "…" in line and str(os.getpid()) not in line], "nothing else is cut off"


def test_processes_stand_below(printed):
    lines = printed(_ALL, width=120).splitlines()
    (mine,) = [line for line in lines if line.split()[1:2] == [str(os.getpid())]]
    assert mine.split()[3:6] == ["79", "GiB", "C"]
    (other,) = [line for line in lines if str(2**31 - 1) in line]
    assert other.split() == ["0", str(2**31 - 1), "-", "512", "MiB", "G", "-"]
    assert "Command" not in printed([FakeGpu()])


def test_colours_only_where_there_are_colours(printed, monkeypatch):
    assert "\x1b[" not in printed(_ALL)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    coloured = printed(_ALL)
    assert "\x1b[31m90 °C" in coloured
    assert "\x1b[33m71 °C" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in printed(_ALL).replace("\x1b[3m", "")  # the title is slanted


def test_no_gpus(printed):
    assert printed([]) == "There is a driver, but no GPU.\n"
    assert json.loads(printed([], "--json")) == []


def test_nothing_is_known(printed):
    lines = printed([FakeGpu()], missing=_Nothing()).splitlines()
    assert lines[0].rstrip() == "1 GPU, driver unknown"
    assert lines[3].split() == ["0", *["-"] * 6]
    assert lines[-1] == "GPU 0 does not report its processes."


def test_mig_mode_without_slices(printed):
    assert printed([FakeGpu(mig_mode=True)]).endswith("\nGPU 0 is in MIG mode and has no slices.\n")


@cases(
    "text, shown",
    ("[red]train[/red].py [/]", "[red]train[/red].py [/]"),
    ("a\x1b[2Jb\nc\rd", "a\\x1b[2Jb\\nc\\rd"),
    ("caf\udce9.py", "caf\\udce9.py"),
    ("\u202egnp.py", "\\u202egnp.py"),
    ("\x07\x00", "\\x07\\x00"),
    ("学习.py", "学习.py"),
)
def test_text_of_others_is_shown_and_not_acted_on(text, shown, printed, monkeypatch):
    process = SimpleNamespace(name=lambda: text, cmdline=lambda: [text], username=lambda: text)
    monkeypatch.setattr(psutil, "Process", lambda pid: process)
    gpus = [FakeGpu(name=text, processes=[FakeProcess(1)])]
    monkeypatch.setenv("FORCE_COLOR", "1")
    table = printed(gpus, width=200)
    table.encode()
    assert table.count(shown) == 3, "the name, the user and the command"
    assert "\x1b[2J" not in table
    assert not {"\x07", "\r", "\u202e"} & {*table}


def test_json_is_plain(printed):
    plain = json.loads(printed(_ALL, "--json"))
    assert [gpu["index"] for gpu in plain] == list(range(6))
    assert [*plain[0]] == _OWN
    assert (plain[2]["name"], plain[2]["error"]) == (None, "GPU is lost")
    assert (plain[0]["power"], plain[0]["throttle_reasons"]) == (690.0, ["power cap"])
    assert plain[0]["processes"][0]["memory"] == 79 << 30
    assert {name for name, value in plain[2].items() if value is not None} == {
        "index",
        "error",
        "driver_version",
        "mig_slices",
        "unreadable",
    }


# Which GPUs


@cases(
    "ids, found",
    ("0", [0]),
    ("5,0,5", [5, 0]),
    (" 1 , 4 ", [1, 4]),
    ("GPU-00000004", [4]),
    ("gpu-00000005-0000-4000-8000-000000000000,0", [5, 0]),
    ("MIG-f1", [4]),
    ("00000000:02:00.0", [1]),
    ("2", [2]),
)
def test_ids(ids, found, printed):
    assert [gpu["index"] for gpu in json.loads(printed(_ALL, "--json", "--id", ids))] == found


@cases(
    "ids, words",
    ("6", "got '6'. It has 0 (GPU-00000000-"),
    ("-1", "got '-1'"),
    ("GPU-7", "got 'GPU-7'"),
    ("GPU-", "got 'GPU-', which fits 0 (GPU-00000000"),
    ("0,x", "got 'x'"),
    (",", "must be indices or UUIDs of GPUs, such as '0,1', got ','"),
)
def test_ids_that_name_none_or_several(ids, words, refused):
    assert words in refused(_ALL, f"--id={ids}")


def test_ids_where_there_is_no_gpu(refused):
    assert "It has none" in refused([], "--id", "0")
