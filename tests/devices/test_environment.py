"""The report for a bug report: true, complete, and without what is nobody's business."""

import getpass
import json
import os
import platform
import re
import socket
import subprocess
import sys
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path

import pytest
import torch

from lightning_tricks import cli
from lightning_tricks.devices.testing import FakeGpu, FakeNvml
from tests.devices.boards import LOST, MIG_ENABLED, UNIFIED_MEMORY

# Those that a report names in any case
PACKAGES = ("lightning_tricks", "lightning", "torchmetrics", "torchensemble", "thop", "numpy", "nvidia-ml-py")


@pytest.fixture
def command(capsys):
    """Returns what `lightning-tricks env` prints on a machine with these GPUs."""

    def command(nvml, *options):
        with nvml or nullcontext():
            assert cli.main(["env", *options]) == 0
        return capsys.readouterr().out

    return command


@pytest.fixture
def report_of(command):
    """Returns the report on a machine with these GPUs; None for those of this machine."""
    return lambda nvml: json.loads(command(nvml, "--json"))


def test_versions_are_true(report_of):
    report = report_of(FakeNvml())
    assert report["python"].startswith(platform.python_version())
    assert report["torch"] == torch.__version__
    assert report["cuda"] == torch.version.cuda
    assert report["packages"]["lightning"] == metadata.version("lightning")
    assert {*PACKAGES} <= {*report["packages"]}
    assert report["packages"]["rich"] == metadata.version("rich")
    assert platform.machine() in report["os"]
    assert re.fullmatch(r".+ \((\d+ cores, )?\d+ threads(, \d+ of them usable)?\)", report["cpu"])
    assert re.fullmatch(r"[\d.]+ [GT]iB", report["ram"])


def test_gpus(report_of):
    gpus = [
        FakeGpu(),
        FakeGpu(),
        FakeGpu(name="NVIDIA GB10", fails=UNIFIED_MEMORY),
        FakeGpu(mig_mode=True, fails=MIG_ENABLED),
        FakeGpu(fails=LOST),
        FakeGpu(fails={"nvmlDeviceGetName": "GPU_IS_LOST"}),
    ]
    report = report_of(FakeNvml(gpus, driver_version="550.54", cuda_version=12040))
    assert report["driver"] == "550.54, for CUDA up to 12.4"
    assert report["gpus"] == [
        "2 x NVIDIA H100 80GB HBM3, 80 GiB",
        "1 x NVIDIA GB10",
        "1 x NVIDIA H100 80GB HBM3, 80 GiB, MIG",
        "2 x GPU that does not answer (GPU is lost)",
    ]


def test_no_process_is_looked_at(report_of):
    nvml = FakeNvml([FakeGpu()])
    report_of(nvml)
    assert not [name for name in nvml.calls if "Processes" in name]


@pytest.mark.parametrize(
    ("nvml", "words"),
    [
        (FakeNvml(init_error="LIBRARY_NOT_FOUND"), "this machine has no NVIDIA driver"),
        (FakeNvml(init_error="DRIVER_NOT_LOADED"), "not loaded"),
        (FakeNvml(fails={"nvmlDeviceGetCount": "UNKNOWN"}), "how many GPUs"),
    ],
)
def test_without_a_driver_that_works(nvml, words, report_of):
    report = report_of(nvml)
    assert report["driver"].startswith("unknown: ")
    assert words in report["driver"]
    assert report["gpus"] == []


def test_a_driver_that_does_not_tell_its_version(report_of):
    fails = {"nvmlSystemGetDriverVersion": "UNKNOWN"}
    assert report_of(FakeNvml([FakeGpu()], fails=fails))["driver"] is None
    fails = {"nvmlSystemGetCudaDriverVersion_v2": "UNKNOWN"}
    assert report_of(FakeNvml([FakeGpu()], fails=fails))["driver"] == "580.65.06"


def test_without_the_extra(monkeypatch, report_of):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setitem(sys.modules, "psutil", None)
    report = report_of(None)
    assert "needs nvidia-ml-py, from the extra 'devices'" in report["driver"]
    assert report["cpu"]
    if hasattr(os, "sysconf"):
        assert report["ram"]


def test_a_torch_without_cuda(monkeypatch, report_of, command):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)
    report = report_of(FakeNvml())
    assert (report["cuda"], report["cudnn"], report["nccl"]) == (None, None, None)
    assert re.search("^CUDA of torch: +none$", command(FakeNvml()), re.MULTILINE)


def test_a_torch_for_rocm(monkeypatch, report_of, command):
    monkeypatch.setattr(torch.version, "hip", "6.2.4")
    report = report_of(FakeNvml())
    assert report["rocm"] == "6.2.4"
    assert "ROCm of torch:" in command(FakeNvml())


def test_a_library_that_does_not_load(monkeypatch, report_of):
    def broken():
        raise RuntimeError("cuDNN version incompatibility at /home/jane/lib")

    monkeypatch.setattr(torch.backends.cudnn, "version", broken)
    assert report_of(FakeNvml())["cudnn"] is None


@pytest.mark.parametrize(("number", "words"), [(90100, "9.1.0"), (92600, "9.26.0"), (8902, "8.9.2"), (7605, "7.6.5")])
def test_versions_of_cudnn(number, words, monkeypatch, report_of):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: number)
    assert report_of(FakeNvml())["cudnn"] == words


def test_packages_that_are_not_there(monkeypatch, report_of, command):
    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    report = report_of(FakeNvml())
    assert report["packages"] == dict.fromkeys(PACKAGES)
    assert re.search("^thop: +not installed$", command(FakeNvml()), re.MULTILINE)


def test_a_processor_that_does_not_tell_its_name(monkeypatch, report_of):
    read = Path.read_text
    nothing = [Path("/proc/cpuinfo")]
    monkeypatch.setattr(Path, "read_text", lambda path, **options: "" if path in nothing else read(path, **options))
    assert report_of(FakeNvml())["cpu"].startswith(platform.machine())


@pytest.mark.skipif(sys.platform != "linux", reason="the file is of Linux")
def test_a_linux_that_does_not_tell_its_name(monkeypatch, report_of):
    def nothing():
        raise OSError("no file")

    monkeypatch.setattr(platform, "freedesktop_os_release", nothing)
    assert report_of(FakeNvml())["os"] == f"Linux {platform.release()} {platform.machine()}"
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: platform._parse_os_release(["ID=void"]))
    assert report_of(FakeNvml())["os"] == f"Linux, Linux {platform.release()} {platform.machine()}"


def test_it_tells_nothing_about_the_user(monkeypatch, command):
    monkeypatch.setenv("WANDB_API_KEY", "sesame-secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5e5a3e")
    nvml = FakeNvml([FakeGpu()])
    text = command(nvml, "--json") + command(nvml)
    folders = (f"{Path.home()}/", str(Path.cwd()), sys.prefix, "/lib/")
    for secret in ("sesame", "GPU-", socket.gethostname(), *folders):
        assert secret not in text
    if getpass.getuser() not in ("root", "user"):  # words of other things
        assert getpass.getuser() not in text


def test_it_looks_right_in_a_code_block(command):
    lines = command(FakeNvml([FakeGpu(), FakeGpu(name="NVIDIA L4")])).splitlines()
    column = lines[0].index(platform.python_version())
    assert all(line[column - 1] == " " != line[column] for line in lines)
    assert all(line == line.rstrip() for line in lines)
    assert not [line for line in lines if "\t" in line or "`" in line or "\x1b" in line]
    number = next(i for i, line in enumerate(lines) if line.startswith("GPUs:"))
    assert lines[number + 1] == " " * column + "1 x NVIDIA L4, 80 GiB"


def test_it_loads_no_lightning_and_creates_no_cuda_context():
    code = """
import sys, torch
from lightning_tricks import cli
assert cli.main(["env"]) == 0
assert not {"lightning", "lightning_fabric", "pytorch_lightning"} & {*sys.modules}
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
def test_the_gpus_of_this_machine(report_of):
    report = report_of(None)
    assert torch.cuda.get_device_name(0) in " ".join(report["gpus"])
    assert report["cudnn"]
    assert report["nccl"]
