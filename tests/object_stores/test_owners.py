"""One run writes to a place at a time: others wait or are refused, and what was taken over is left alone."""

import os
import signal

import pytest

from tests.auto_resume.killing import run, start, wait_for
from tests.object_stores.machines import (
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
