"""One run writes to a place at a time: others wait or are refused, and what was taken over is left alone."""

import json
import os
import shutil
import signal
import threading
import time

import pytest

from tests.auto_resume.killing import run, start, wait_for
from tests.object_stores.machines import (
    SCRATCH,
    assert_ends,
    at,
    kill_all,
    kill_sender,
    on,
    output,
    senders,
    sent_step,
    wait_until,
)

OTHER = "another-host"


def test_a_second_run_is_refused(s3, tmp_path, monkeypatch):
    """With the process and the host of the first one, which goes on."""
    monkeypatch.setenv("TESTS_SECONDS_ALIVE", "6")
    first, second = tmp_path / "first", tmp_path / "second"
    told = tmp_path / "told"
    more = [at("on_train_batch_start", 3, lambda: wait_until(told.exists))]
    one = start(first, on(first, s3.address, epochs=1, more=more))
    try:
        wait_until(lambda: "saves to" in output(first))
        assert run(second, on(second, s3.address, epochs=1)) == 1
    finally:
        told.touch()
    assert wait_for(one) == 0, output(first)[-3000:]
    words = f"AutoResume: {s3.address} is in use by process {one} on {os.uname().nodename}: two runs would overwrite"
    assert words in output(second)
    assert not (second / "logged.jsonl").exists()
    assert_ends(second, on(second, s3.address, epochs=2))


@pytest.mark.parametrize("kind", ["folder_store", "s3"])
def test_a_run_that_was_suspended_publishes_nothing_more(kind, tmp_path, monkeypatch, request):
    """Another one has taken over: it ends with an error, and the store is what the other one left."""
    store = request.getfixturevalue(kind)
    monkeypatch.setenv("TESTS_SECONDS_ALIVE", "1.5")
    first, second = tmp_path / "first", tmp_path / "second"

    def suspend():
        wait_until(lambda: sent_step(first) == 4)
        kill_all("SIGSTOP")

    one = start(first, on(first, store.address, more=[at("on_train_batch_start", 5, suspend)]))
    wait_until(lambda: os.waitpid(one, os.WNOHANG | os.WUNTRACED)[0])
    sender = senders(one)
    monkeypatch.setenv("TESTS_HOST", OTHER)
    try:
        assert_ends(second, on(second, store.address))
        left = {name: store.read(name) for name in store.names()}
    finally:
        for process in (*sender, one):
            os.kill(process, signal.SIGCONT)
    assert wait_for(one) == 1, output(first)[-3000:]
    assert f"AutoResume: another process has taken over {store.address}, as this one showed no sign" in output(first)
    assert {name: store.read(name) for name in left} == left
    assert store.names() - left.keys() <= {".auto_resume/owner-000001.json"}  # if it wrote that just then


def test_a_sender_that_is_started_again_leaves_what_another_run_has_taken_over(folder_store, tmp_path, monkeypatch):
    """Its local checkpoints are in use: nothing is fetched over them."""
    monkeypatch.setenv("TESTS_SECONDS_ALIVE", "1.5")
    first, second, third = tmp_path / "first", tmp_path / "second", tmp_path / "third"

    def take_over():
        kill_sender()
        wait_until(lambda: not senders())
        (tmp_path / "killed").touch()
        wait_until((tmp_path / "taken").exists)

    one = start(first, on(first, folder_store.address, more=[at("on_train_batch_start", 5, take_over)]))
    wait_until((tmp_path / "killed").exists)
    try:
        assert_ends(second, on(second, folder_store.address))
        left = {name: folder_store.read(name) for name in folder_store.names()}
    finally:
        (tmp_path / "taken").touch()
    assert wait_for(one) == 1, output(first)[-3000:]
    assert "has taken over" in output(first)
    checkpoints = {name for name in left if "-epoch=" in name}
    assert {name for name in folder_store.names() if "-epoch=" in name} == checkpoints
    assert all(folder_store.read(name) == left[name] for name in checkpoints)
    assert_ends(third, on(third, folder_store.address))


def _killed_in_an_upload(machine, store, seconds):
    """Kill a run while a file is on its way, which does not arrive; return its sender."""
    store.server.set_faults(hold=True, methods=["PUT"], key="meta.pt")
    sender = machine.with_name("sender")
    note = at("on_train_batch_start", 1, lambda: sender.write_text(str(*senders())))
    resume = {"every_n_train_steps": 4, "send_timeout": {"seconds": seconds}}
    kill = ["on_train_batch_start", 6, "SIGKILL", 0]
    assert run(machine, on(machine, store.address, epochs=1, resume=resume, more=[note], kill=kill)) == -signal.SIGKILL
    return int(sender.read_text())


def _runs(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_sender_whose_upload_hangs_holds_the_next_start_for_send_timeout(s3, tmp_path, monkeypatch):
    """On another host, which knows of the end of the run from what its sender writes."""
    monkeypatch.setenv("TESTS_SECONDS_ALIVE", "3")
    first, second = tmp_path / "first", tmp_path / "second"
    sender = _killed_in_an_upload(first, s3, 4)
    monkeypatch.setenv("TESTS_HOST", OTHER)
    other = start(second, on(second, s3.address, epochs=1))
    wait_until(lambda: f"sends its last checkpoint, by process {sender} there: end that one" in output(second))
    wait_until(lambda: "saves to" in output(second))
    assert not _runs(sender)
    s3.server.set_faults()
    assert wait_for(other) == 0, output(second)[-3000:]


def test_a_sender_whose_scratch_folder_is_gone_ends(s3, tmp_path):
    sender = _killed_in_an_upload(tmp_path / "first", s3, 600)
    shutil.rmtree(tmp_path / "first" / SCRATCH)
    (tmp_path / "first" / SCRATCH).write_text("no folder")
    s3.server.set_faults()
    wait_until(lambda: not _runs(sender))


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_sender_that_never_ends_is_waited_for_as_long_as_it_may_send(is_alone, folder_store, tmp_path, monkeypatch):
    """It is taken over if the process that trains has ended, and is the owner otherwise."""
    monkeypatch.setenv("TESTS_SECONDS_ALIVE", "2")
    ended, machine = threading.Event(), tmp_path / "first"
    record = {"pid": 1, "worker": 1, "host": OTHER, "finishing": True, "alone": is_alone}

    def renew():
        while not ended.wait(0.1):
            folder_store.write(".auto_resume/owner-000001.json", json.dumps({**record, "sign": time.time()}).encode())

    (sender := threading.Thread(target=renew)).start()
    try:
        status = run(machine, on(machine, folder_store.address, epochs=1, resume={"send_timeout": {"seconds": 1}}))
    finally:
        ended.set()
        sender.join()
    assert (status == 0) == is_alone, output(machine)[-3000:]
    words = f"\nAutoResume: waiting up to 3 s for process 1 on {OTHER}, which sends its last checkpoint"
    assert output(machine).count(words) == 1
    assert ("is in use by" in output(machine)) != is_alone


def test_an_owner_from_the_future_is_none_for_ever(folder_store, tmp_path, monkeypatch):
    """A record that nobody renews while a start watches, whatever its time says."""
    monkeypatch.setenv("TESTS_SECONDS_ALIVE", "1.5")
    name = ".auto_resume/owner-000001.json"
    folder_store.write(name, json.dumps({"pid": 1, "worker": 1, "host": "gone", "sign": "a"}).encode())
    os.utime(folder_store.folder / name, (time.time() + 1e8,) * 2)
    assert_ends(tmp_path / "first", on(tmp_path / "first", folder_store.address, epochs=1))
