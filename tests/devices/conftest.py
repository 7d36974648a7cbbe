"""Locks of the tests' own, and no selection that an earlier test has left."""

import os
from pathlib import Path

import pytest

from lightning_tricks.devices.core import gpu_locks, result, visible_devices

_VARIABLES = ("CUDA_", "LOCAL_", "MASTER_", "MPI_", "OMPI_", "PMIX_", "SLURM_", "TORCHELASTIC_")


@pytest.fixture(autouse=True)
def lock_folder(monkeypatch, tmp_path):
    """Give a test a folder of locks of its own, and no launcher, nor CUDA, which other tests may have initialized."""
    for name in [name for name in os.environ if name.startswith(_VARIABLES)]:
        monkeypatch.delenv(name)
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))  # for scripts that import the fake
    for module in (result, visible_devices):
        monkeypatch.setattr(module, "uuids_seen_by_cuda", lambda: None)
    monkeypatch.setenv(gpu_locks.FOLDER_VARIABLE, str(tmp_path / "locks"))
    result.state.release()
    monkeypatch.delenv(result.CHOICE_VARIABLE, raising=False)
    yield tmp_path / "locks"
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    result.state.release()
