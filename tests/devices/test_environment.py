"""The report for a bug report: true, complete, and without what is nobody's business."""

import getpass
import json
import os
import platform
import re
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from lightning_tricks.devices.core import environment
from lightning_tricks.devices.core.environment import PACKAGES, environment_report, environment_text
from lightning_tricks.devices.testing import LOST, MIG_ENABLED, UNIFIED_MEMORY, FakeGpu, FakeNvml


def test_versions_are_true():
    report = environment_report(nvml=FakeNvml())
    assert report["python"].startswith(platform.python_version())
    assert report["torch"] == torch.__version__
    assert report["cuda"] == torch.version.cuda
    assert report["packages"]["lightning"] == metadata.version("lightning")
    assert {*PACKAGES} <= {*report["packages"]}
    assert report["packages"]["rich"] == metadata.version("rich")
    assert platform.machine() in report["os"]
    assert re.fullmatch(r".+ \((\d+ cores, )?\d+ threads(, \d+ of them usable)?\)", report["cpu"])
    assert re.fullmatch(r"[\d.]+ [GT]iB", report["ram"])


def test_gpus():
    gpus = [
        FakeGpu(),
        FakeGpu(),
        FakeGpu(name="NVIDIA GB10", fails=UNIFIED_MEMORY),
        FakeGpu(mig_mode=True, fails=MIG_ENABLED),
        FakeGpu(fails=LOST),
        FakeGpu(fails={"nvmlDeviceGetName": "GPU_IS_LOST"}),
    ]
    report = environment_report(nvml=FakeNvml(gpus, driver_version="550.54", cuda_version=12040))
    assert report["driver"] == "550.54, for CUDA up to 12.4"
    assert report["gpus"] == [
        "2 x NVIDIA H100 80GB HBM3, 80 GiB",
        "1 x NVIDIA GB10",
        "1 x NVIDIA H100 80GB HBM3, 80 GiB, MIG",
        "2 x GPU that does not answer (GPU is lost)",
    ]


def test_no_process_is_looked_at():
    nvml = FakeNvml([FakeGpu()])
    environment_report(nvml=nvml)
    assert not [name for name in nvml.calls if "Processes" in name]


@pytest.mark.parametrize(
    ("nvml", "words"),
    [
        (FakeNvml(init_error="LIBRARY_NOT_FOUND"), "this machine has no NVIDIA driver"),
        (FakeNvml(init_error="DRIVER_NOT_LOADED"), "not loaded"),
        (FakeNvml(fails={"nvmlDeviceGetCount": "UNKNOWN"}), "how many GPUs"),
    ],
)
def test_without_a_driver_that_works(nvml, words):
    report = environment_report(nvml=nvml)
    assert report["driver"].startswith("unknown: ")
    assert words in report["driver"]
    assert report["gpus"] == []


def test_a_driver_that_does_not_tell_its_version():
    fails = {"nvmlSystemGetDriverVersion": "UNKNOWN"}
    assert environment_report(nvml=FakeNvml([FakeGpu()], fails=fails))["driver"] is None
    fails = {"nvmlSystemGetCudaDriverVersion_v2": "UNKNOWN"}
    assert environment_report(nvml=FakeNvml([FakeGpu()], fails=fails))["driver"] == "580.65.06"


def test_without_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setitem(sys.modules, "psutil", None)
    report = environment_report()
    assert "needs nvidia-ml-py, from the extra 'devices'" in report["driver"]
    assert report["cpu"]
    if hasattr(os, "sysconf"):
        assert report["ram"]


def test_a_torch_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)
    report = environment_report(nvml=FakeNvml())
    assert (report["cuda"], report["cudnn"], report["nccl"]) == (None, None, None)
    assert re.search("^CUDA of torch: +none$", environment_text(report), re.MULTILINE)


def test_a_torch_for_rocm(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.2.4")
    report = environment_report(nvml=FakeNvml())
    assert report["rocm"] == "6.2.4"
    assert "ROCm of torch:" in environment_text(report)


def test_a_library_that_does_not_load(monkeypatch):
    def broken():
        raise RuntimeError("cuDNN version incompatibility at /home/jane/lib")

    monkeypatch.setattr(torch.backends.cudnn, "version", broken)
    assert environment_report(nvml=FakeNvml())["cudnn"] is None


@pytest.mark.parametrize(("number", "words"), [(90100, "9.1.0"), (92600, "9.26.0"), (8902, "8.9.2"), (7605, "7.6.5")])
def test_versions_of_cudnn(number, words, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: number)
    assert environment_report(nvml=FakeNvml())["cudnn"] == words


def test_packages_that_are_not_there(monkeypatch):
    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(environment.metadata, "version", version)
    report = environment_report(nvml=FakeNvml())
    assert report["packages"] == dict.fromkeys(PACKAGES)
    assert re.search("^thop: +not installed$", environment_text(report), re.MULTILINE)


def test_a_processor_that_does_not_tell_its_name(monkeypatch):
    monkeypatch.setattr(environment, "_cpu_model", lambda: None)
    assert environment_report(nvml=FakeNvml())["cpu"].startswith(platform.machine())


def test_it_tells_nothing_about_the_user(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "sesame-secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5e5a3e")
    report = environment_report(nvml=FakeNvml([FakeGpu()]))
    text = json.dumps(report) + environment_text(report)
    folders = (f"{Path.home()}/", str(Path.cwd()), sys.prefix, "/lib/")
    for secret in ("sesame", "GPU-", socket.gethostname(), *folders):
        assert secret not in text
    if getpass.getuser() not in ("root", "user"):  # words of other things
        assert getpass.getuser() not in text


def test_it_looks_right_in_a_code_block():
    report = environment_report(nvml=FakeNvml([FakeGpu(), FakeGpu(name="NVIDIA L4")]))
    lines = environment_text(report).splitlines()
    column = lines[0].index(report["python"])
    assert all(line[column - 1] == " " != line[column] for line in lines)
    assert all(line == line.rstrip() for line in lines)
    assert not [line for line in lines if "\t" in line or "`" in line or "\x1b" in line]
    number = next(i for i, line in enumerate(lines) if line.startswith("GPUs:"))
    assert lines[number + 1] == " " * column + "1 x NVIDIA L4, 80 GiB"


def test_it_loads_no_lightning_and_creates_no_cuda_context():
    code = """
import sys, torch
from lightning_tricks.devices.core.environment import environment_report
environment_report()
assert not {"lightning", "lightning_fabric", "pytorch_lightning"} & {*sys.modules}
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
def test_the_gpus_of_this_machine():
    report = environment_report()
    assert torch.cuda.get_device_name(0) in " ".join(report["gpus"])
    assert report["cudnn"]
    assert report["nccl"]
