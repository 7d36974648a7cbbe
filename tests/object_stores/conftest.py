"""Servers and folders to which runs send their checkpoints."""

import importlib.util
from pathlib import Path

import pytest

from tests.object_stores.stores import FolderStore, S3Server, S3Store

NEEDED = ("moto", "flask", "flask_cors", "s3fs")  # of the extra 'test'


@pytest.fixture(scope="session")
def s3_server():
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        pytest.skip(f"needs {', '.join(missing)}")
    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def s3(s3_server, monkeypatch):
    """An empty place on the server, which answers all requests when the test begins."""
    s3_server.set_faults()
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-tests")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-tests")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # of botocore; s3fs tries again itself
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    return S3Store(s3_server)


@pytest.fixture
def folder_store(tmp_path):
    return FolderStore(tmp_path / "store")


@pytest.fixture(autouse=True)
def _in_child(monkeypatch):
    """Let the processes that runs start do what `in_child/sitecustomize.py` says."""
    monkeypatch.syspath_prepend(Path(__file__).with_name("in_child"))
