"""Locks of the tests' own, and no selection that an earlier test has left."""

import pytest

from lightning_tricks.devices.core import lock_files, selection_ranks
from lightning_tricks.devices.core.selection import state

_LAUNCHERS = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_LOCALID", "SLURM_STEP_ID", "OMPI_COMM_WORLD_LOCAL_RANK")


@pytest.fixture(autouse=True)
def lock_folder(monkeypatch, tmp_path):
    """Give a test a folder of locks of its own."""
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", *_LAUNCHERS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(lock_files.FOLDER_VARIABLE, str(tmp_path / "locks"))
    state.release()
    monkeypatch.delenv(selection_ranks.VARIABLE, raising=False)
    yield tmp_path / "locks"
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    state.release()
