"""The report for a bug report: true, complete, and without what is nobody's business."""

import getpass
import json
import platform
import re
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch.utils import collect_env

from lightning_tricks import cli
from lightning_tricks.devices import commands


@pytest.fixture(scope="module")
def once():
    return collect_env.get_env_info()


@pytest.fixture
def printed(capsys, monkeypatch, once):
    """Returns what `lightning-tricks env` prints; programs such as pip were asked once."""

    def printed(*options):
        assert cli.main(["env", *options]) == 0
        return capsys.readouterr().out

    monkeypatch.setattr(collect_env, "get_env_info", lambda: once)
    return printed


def test_versions_are_true(printed):
    report = json.loads(printed("--json"))
    assert report["packages"]["lightning"] == metadata.version("lightning")
    assert report["packages"]["rich"] == metadata.version("rich")
    text = printed()
    assert text.startswith(f"lightning_tricks: {metadata.version('lightning_tricks')}\n")
    assert f"\n\nPyTorch version: {torch.__version__}\n" in text
    assert f"Python version: {platform.python_version()} " in text
    assert f"cuDNN version: {torch.backends.cudnn.version() or 'No CUDA'}" in text.replace(
        "Could not collect", "No CUDA"
    )


def test_packages_that_are_not_there(monkeypatch, printed):
    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert json.loads(printed("--json"))["packages"] == dict.fromkeys(commands._PACKAGES)
    assert re.search("^thop: not installed$", printed(), re.MULTILINE)


def test_a_report_of_torch_that_fails_leaves_the_versions(monkeypatch, printed):
    def fails():
        raise RuntimeError("Could not collect pip list output (pip or uv module not available)")

    monkeypatch.setattr(collect_env, "get_env_info", fails)
    assert "\n\ntorch.utils.collect_env fails: RuntimeError('Could not collect pip list" in printed()


def test_it_tells_no_names_and_no_paths(printed, once, monkeypatch):
    paths = "Probably one of the following:\n/home/jane/cudnn/libcudnn.so.9"
    monkeypatch.setattr(collect_env, "get_env_info", lambda: once._replace(cudnn_version=paths))
    text = printed("--json") + printed()
    for secret in (f"{Path.home()}/", str(Path.cwd()), sys.prefix, "/lib", "jane"):
        assert secret not in text
    for name in {getpass.getuser(), socket.gethostname()} - {"root", "user"}:  # words of other things
        assert not re.search(rf"\b{re.escape(name)}\b", text)


@pytest.mark.oldest
def test_it_loads_no_lightning():
    code = """
import sys
from lightning_tricks import cli
assert cli.main(["env"]) == 0
assert not {"lightning", "lightning_fabric", "pytorch_lightning"} & {*sys.modules}
"""
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert f"PyTorch version: {torch.__version__}" in out


@pytest.mark.gpu("it asks the driver")
def test_the_gpus_of_this_machine(printed):
    assert torch.cuda.get_device_name(0) in printed()
