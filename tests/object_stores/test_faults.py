"""What goes wrong while a run sends, and what others did to its objects: it is said, and the run goes on."""

import json

import pytest

from lightning_tricks.auto_resume import CheckpointFolder
from tests.auto_resume.killing import STOPPED, resumed_at, run
from tests.object_stores.machines import (
    SCRATCH,
    assert_as_undisturbed,
    assert_ends,
    at,
    kill_sender,
    on,
    output,
    senders,
    wait_until,
)

META, MANIFEST = "meta.pt", "manifest.json"
FILES = ".auto_resume/files.json"


@pytest.fixture
def first(tmp_path):
    return tmp_path / "first"


@pytest.fixture
def second(tmp_path):
    return tmp_path / "second"


def checkpoints(store, file=META):
    return sorted(name for name in store.names() if "-epoch=" in name and name.endswith(file))


@pytest.mark.parametrize(("status", "code"), [(403, "AccessDenied"), (500, "InternalError")])
@pytest.mark.parametrize("on_failed_save", ["warn", "raise"])
def test_writing_fails_from_some_step_on(on_failed_save, status, code, s3, first):
    """It is said at the next save, and training goes on; or ends with an error."""

    def fail():
        s3.server.set_faults(fail=status, code=code, methods=["PUT"], key=META)

    def wait():
        wait_until(lambda: CheckpointFolder(first / SCRATCH).read_private("mirror.json").get("problem"))

    resume = {"every_n_train_steps": 3, "on_failed_save": on_failed_save}  # none between the wait and what is said
    more = [at("on_train_start", 1, fail), at("on_train_batch_start", 6, wait)]
    result = run(first, on(first, s3.address, epochs=1, resume=resume, more=more))
    if on_failed_save == "raise":
        assert result == 1
        assert "OSError: AutoResume: " in output(first)
        assert "max_epochs" not in output(first)
    else:
        assert result == 0, output(first)[-3000:]
        assert "AutoResume: the checkpoint before step 6 was not sent: " in output(first)
        assert f"AutoResume: the last save is only in {first / SCRATCH}: " in output(first)
    assert not checkpoints(s3, MANIFEST)


def test_no_step_waits_for_what_is_sent(s3, first, tmp_path):
    """All steps are done, and all saves, while the store does not answer."""

    def hold():
        s3.server.set_faults(hold=True)

    more = [at("on_train_batch_start", 2, hold), at("on_train_end", 1, s3.server.set_faults)]
    options = on(first, s3.address, more=more, resume={"every_n_train_steps": 1})
    assert_ends(first, options)
    assert_as_undisturbed([first], tmp_path / "whole", options)


def test_a_signal_waits_no_longer_than_send_timeout(s3, first):
    def hold():
        s3.server.set_faults(hold=True, methods=["PUT"], key=META)

    resume = {"every_n_train_steps": 100, "every_n_epochs": None, "send_timeout": {"seconds": 1}}
    kill = ["on_train_batch_start", 4, "SIGTERM", 0]
    more = [at("on_train_batch_start", 2, hold)]
    assert run(first, on(first, s3.address, resume=resume, kill=kill, more=more)) == STOPPED
    words = f"is only in {first / SCRATCH}: sending to {s3.address} took longer than 1 s."
    assert words in output(first), output(first)[-2500:]
    s3.server.set_faults()
    assert not checkpoints(s3, MANIFEST)
    assert_ends(first, on(first, s3.address))  # from the local folder
    assert set(resumed_at(first)) == {4}
    assert "not sent" not in output(first)
    assert checkpoints(s3, MANIFEST)


def test_the_sending_process_is_killed(folder_store, first, second, tmp_path):
    """It is said at the next save, and training and sending go on."""

    def kill():
        kill_sender()
        wait_until(lambda: not senders())

    options = on(
        first,
        folder_store.address,
        more=[at("on_train_batch_start", 6, kill)],
        kill=["on_train_batch_start", 11, "SIGTERM", 0],
    )
    assert run(first, options) == STOPPED, output(first)[-2500:]
    assert "the process that sends ended with status -9. Another one was started" in output(first)
    more = on(second, folder_store.address)
    assert_ends(second, more)
    assert set(resumed_at(second)) == {11}
    assert_as_undisturbed([first, second], tmp_path / "whole", more)


@pytest.mark.parametrize("damage", ["truncated", "missing", "manifest damaged", "manifest missing"])
def test_the_newest_checkpoint_is_damaged(damage, folder_store, first, second, tmp_path):
    """It is said, the one before is used, and later saves remove the older ones only."""
    kill = ["on_train_batch_start", 9, "SIGTERM", 0]
    assert run(first, on(first, folder_store.address, kill=kill)) == STOPPED
    before, newest = checkpoints(folder_store)[-2:]
    manifest = newest.replace(META, MANIFEST)
    if damage == "truncated":
        folder_store.write(newest, folder_store.read(newest)[:-100])
    elif damage == "missing":
        folder_store.remove(newest)
    elif damage == "manifest damaged":
        folder_store.write(manifest, folder_store.read(manifest)[:-9])
    else:
        folder_store.remove(manifest)
    more = on(second, folder_store.address)
    assert_ends(second, more)
    assert max(resumed_at(second)) < 9
    if damage != "manifest missing":  # else nobody knows that it was complete
        reason = {"truncated": "has other bytes", "missing": f"{META} is missing", "manifest damaged": "is damaged"}
        place = f"{folder_store.address}/{newest.rpartition('/')[0]}"
        assert f"AutoResume: the checkpoint {place} cannot be used: " in output(second)
        assert reason[damage] in output(second)
    assert_as_undisturbed([first, second], tmp_path / "whole", more)
    left = CheckpointFolder(second / SCRATCH).manifests()
    complete = checkpoints(folder_store, MANIFEST)
    assert len(complete) == 2
    assert left[0].finished
    assert f".auto_resume/{left[0].file}/{MANIFEST}" == complete[-1]
    assert before not in folder_store.names()


def test_objects_of_others_are_left_alone(folder_store, first, second):
    """Also one with the name of a file in the scratch folder."""
    others = {"logs/csv/version_0/metrics.csv": b"mine", "notes.txt": b"mine", ".auto_resume/x": b"", "fit2/y": b"z"}
    for name, data in others.items():
        folder_store.write(name, data)
    assert_ends(first, on(first, folder_store.address, loggers=["csv"], epochs=1))
    assert_ends(second, on(second, folder_store.address, loggers=["csv"]))
    assert {name: folder_store.read(name) for name in others} == others
    assert not (second / SCRATCH / "notes.txt").exists()


def test_a_record_that_names_places_outside(folder_store, first, second, tmp_path):
    """What was fetched lies in the scratch folder."""
    assert_ends(first, on(first, folder_store.address, epochs=1))
    names = ["../x", "a/../../x", f"{tmp_path}/x", "..\\x", "C:\\x", "", ".", ".auto_resume/run.json", "fine"]
    folder_store.write(FILES, json.dumps({"files": {name: [1, 1] for name in names}}).encode())
    (folder_store.folder.parent / "x").write_bytes(b"!")
    for name in ("fine", "..\\x", "C:\\x"):
        folder_store.write(name, b"!")
    before = {path for path in tmp_path.rglob("*") if second not in path.parents}
    assert_ends(second, on(second, folder_store.address, epochs=1))
    new = {path for path in tmp_path.rglob("*") if second not in path.parents} - before
    assert {path.relative_to(tmp_path).parts[0] for path in new} <= {"second", "store"}
    assert {path.name for path in (second / SCRATCH).iterdir()} == {".auto_resume", "fine"}
    assert not list((second).glob("*x"))


@pytest.mark.parametrize("record", [b"", b"[]", b'{"files": {"a": 1}}', b'{"files": {"a": [1e99, 1e99]}}', b"\xff"])
def test_a_record_that_is_damaged(record, folder_store, first, second):
    assert_ends(first, on(first, folder_store.address, epochs=1))
    folder_store.write(FILES, record)
    folder_store.write("a", b"")
    assert_ends(second, on(second, folder_store.address))
