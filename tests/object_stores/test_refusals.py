"""A store that cannot be used: one sentence, and nothing is trained."""

import re

from tests.auto_resume.killing import run
from tests.contract.processes import free_port
from tests.object_stores.machines import SCRATCH, assert_ends, on, output
from tests.small import cases


def assert_refused(machine, address, words, **options):
    """The run ends before its first step, with an error of one line."""
    assert run(machine, on(machine, address, **options)) == 1, output(machine)[-3000:]
    assert re.search(rf"MisconfigurationException: AutoResume: {words}.*$", output(machine), re.M), output(machine)[
        -900:
    ]
    assert not (machine / "logged.jsonl").exists()


@cases(
    "status, code, words",
    (403, "AccessDenied", "denied|Forbidden"),
    (403, "InvalidAccessKeyId", "denied|Forbidden|InvalidAccessKeyId"),
    (403, "SignatureDoesNotMatch", "denied|Forbidden|SignatureDoesNotMatch"),
    (400, "ExpiredToken", "expired|ExpiredToken"),
)
def test_what_the_server_refuses(status, code, words, s3, tmp_path):
    s3.server.set_faults(fail=status, code=code)
    rest = rf".*({words}|told to fail).*Check the address, the credentials and the connection\."
    assert_refused(tmp_path / "run", s3.address, rf"{s3.address} cannot be used: {rest}")


def test_writing_is_denied(s3, tmp_path):
    """Where all that is there can be read."""
    s3.server.set_faults(fail=403, code="AccessDenied", methods=["PUT"])
    assert_refused(tmp_path / "run", s3.address, f"{s3.address} cannot be used: .*Check the address")
    assert not s3.names()


def test_a_bucket_that_is_not_there(s3, tmp_path):
    address = s3.address.replace("bucket", "another-bucket")
    assert_refused(tmp_path / "run", address, f"{address} cannot be used: .*bucket does not exist.*Check the address")


def test_a_server_that_is_not_there(s3, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    assert_refused(tmp_path / "run", s3.address, f"{s3.address} cannot be used: .*[Cc]onnect.*Check the address")


@cases(
    "address, words",
    ("gs://bucket/run", r"cannot be opened: gs:// needs the extra 'gs': pip install"),
    ("nope://bucket/run", "cannot be used: .*Protocol not known: nope"),
)
def test_a_package_that_is_missing(address, words, tmp_path, monkeypatch):
    (tmp_path / "gcsfs.py").write_text("raise ImportError('not there')")
    monkeypatch.syspath_prepend(tmp_path)
    assert_refused(tmp_path / "run", address, f"{address} {words}")


def test_a_scratch_folder_of_another_run(folder_store, tmp_path):
    machine = tmp_path / "run"
    assert_ends(machine, on(machine, folder_store.address, epochs=1))
    (machine / "logged.jsonl").unlink()
    words = f"{machine / SCRATCH} has checkpoints of a run that was sent to {folder_store.address}, not to "
    assert_refused(machine, f"{folder_store.address}-2", f"{words}.*Give an empty scratch folder", epochs=1)
    assert not list(folder_store.folder.parent.glob("store-2/**/*.pt"))
