"""Locks of the tests' own, and no selection that an earlier test has left."""

import os

import pytest

from lightning_tricks.devices.core import lock_files, selection, selection_ranks, visible_machine

_VARIABLES = ("CUDA_", "LOCAL_", "MASTER_", "OMPI_", "PMIX_", "SLURM_", "TORCHELASTIC_")


@pytest.fixture(autouse=True)
def lock_folder(monkeypatch, tmp_path):
    """Give a test a folder of locks of its own, and no launcher, nor CUDA, which other tests may have initialized."""
    for name in [name for name in os.environ if name.startswith(_VARIABLES)]:
        monkeypatch.delenv(name)
    for module in (selection, visible_machine):
        monkeypatch.setattr(module, "uuids_seen_by_cuda", lambda: None)
    monkeypatch.setenv(lock_files.FOLDER_VARIABLE, str(tmp_path / "locks"))
    selection.state.release()
    monkeypatch.delenv(selection_ranks.VARIABLE, raising=False)
    yield tmp_path / "locks"
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    selection.state.release()
