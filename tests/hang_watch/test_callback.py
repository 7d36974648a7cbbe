"""HangWatch in fits that do not hang: what it leaves, what it says of long steps, and its arguments."""

import faulthandler
import os
import pickle
import re
import time
from datetime import timedelta
from threading import TIMEOUT_MAX, Thread

import pytest
from lightning.pytorch import Callback, Trainer

from lightning_tricks import HangWatch
from lightning_tricks.cli import main
from lightning_tricks.hang_watch import compare_ranks
from lightning_tricks.hang_watch.functional import RankRecord, read_record
from tests.small import QUIET, EvaluatedNet, cases, loader


def fit(callbacks, module=None, **trainer):
    trainer = Trainer(callbacks=callbacks, **{**QUIET, "max_epochs": 1, **trainer})
    trainer.fit(module or EvaluatedNet(), loader(), loader())


class Lasts(Callback):
    """Lets one hook take its time."""

    def __init__(self, hook, seconds, times=1):
        self.seconds, self.left = seconds, times
        setattr(self, hook, self.wait)

    def wait(self, *_, **__):
        if self.left:
            self.left -= 1
            time.sleep(self.seconds)


@cases(
    "timeout, seconds",
    ("10 minutes", 600),
    ("1 minute", 60),
    ("1.5 Hours", 5400),
    (" 90  seconds ", 90),
    (timedelta(hours=1), 3600),
    ({"minutes": 2, "seconds": 3}, 123),
    ("100000 weeks", TIMEOUT_MAX),
)
def test_times(timeout, seconds):
    watch = HangWatch(timeout)
    assert watch.timeout == timeout
    assert watch._seconds == seconds


@cases(
    "timeout", "10", "ten minutes", "10 parsecs", "", "0 seconds", "-1 minutes", "nan hours", "inf hours", "10minutes"
)
def test_texts_that_are_no_time(timeout):
    with pytest.raises(ValueError, match="timeout must be a time such as '10 minutes' or '90 seconds', got "):
        HangWatch(timeout)


@cases(
    "timeout, words",
    (10, "timeout must be a timedelta or a dict of its arguments"),
    (None, "got None"),
    ({"minute": 1}, "timeout takes no 'minute'.*Did you mean 'minutes'"),
    ({"minutes": "1"}, "got {'minutes': '1'}"),
    (timedelta(0), "timeout must be positive"),
    ({"hours": float("nan")}, "timeout must be a timedelta or a dict.*nan"),
)
def test_other_values_that_are_no_time(timeout, words):
    with pytest.raises((TypeError, ValueError), match=words):
        HangWatch(timeout)


def test_hooks_that_move_give_no_alarm(tmp_path):
    waits = Lasts("on_validation_batch_end", 0.3, times=10)
    fit([HangWatch("2 seconds", tmp_path / "hang"), waits])
    assert waits.left == 0
    assert not (tmp_path / "hang").exists()


def test_a_long_step_leaves_its_stacks_and_a_warning(tmp_path, capsys):
    words = r"the run stood still for [2-9] s and now continues; `lightning-tricks hang .*hang` shows"
    with pytest.warns(UserWarning, match=words):
        fit([HangWatch("1 second", tmp_path / "hang"), Lasts("on_validation_batch_start", 1.6)])
    stacks = (tmp_path / "hang" / "rank0.stacks").read_text(encoding="utf-8")
    assert "in wait\n" in stacks
    assert re.search(r"The rank moved on after [2-9] s, at on_validation_batch_start\.", stacks)
    assert main(["hang", str(tmp_path / "hang")]) == 0
    said = capsys.readouterr().out
    assert "0 of 1 ranks stood still for 1 s, 1 did before." in said
    assert "the end of its run, epoch 0, step" in said, "the batch of a validation is no place in the training"
    assert re.search(
        r"; stood still earlier for [2-9] s, at on_validation_batch_start, in wait \(test_callback\.py:", said
    )


@pytest.mark.parametrize("hook", ["on_train_end", "on_fit_end"])
def test_what_stands_still_at_the_very_end_is_said(tmp_path, monkeypatch, hook):
    class Leaves(Callback):
        def on_train_start(self, *_):
            monkeypatch.chdir(tmp_path.parent)

    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="now continues; `lightning-tricks hang 'a b'` shows"):
        fit([HangWatch({"seconds": 0.3}, "a b"), Leaves(), Lasts(hook, 0.7)], limit_val_batches=0)
    (rank,) = compare_ranks(tmp_path / "a b").ranks
    assert (rank["hook"], rank["frames"]) == ("the end of its run", [])
    assert re.fullmatch("[1-9] s, at on_train_end", rank["lasted"])


def test_an_outer_watch_goes_on_after_an_inner_one(tmp_path, monkeypatch):
    outer = RankRecord(tmp_path / "outer", 0.3, {"rank": 0})
    RankRecord(tmp_path / "inner", 1000, {"rank": 0}).close()
    time.sleep(0.6)
    monkeypatch.setattr(time, "time", lambda: 0.0)  # somebody sets the clock
    assert outer.move("later") >= 0.6
    outer.close()
    (rank,) = compare_ranks(tmp_path / "outer").ranks
    assert re.fullmatch("[1-9] s, at start", rank["lasted"])


def test_a_thread_that_trains_is_told_from_the_main_one(tmp_path):
    def train():
        record = RankRecord(tmp_path, 0.3, {"rank": 0})
        time.sleep(0.6)
        record.close()

    thread = Thread(target=train)
    thread.start()
    thread.join()
    assert "in train (test_callback.py:" in str(compare_ranks(tmp_path))


def test_records_of_a_run_on_more_ranks_are_left_out(tmp_path):
    for rank, world_size in ((1, 2), (0, 1)):
        RankRecord(tmp_path, 1000, {"rank": rank, "world_size": world_size})._start_timer()
        faulthandler.cancel_dump_traceback_later()
    assert str(compare_ranks(tmp_path)).startswith("0 of 1 ranks stood still for 1000 s.\n  rank 0: ")


def test_files_of_a_hang_are_kept_where_the_run_starts_again(tmp_path):
    with pytest.warns(UserWarning, match="the run stood still"):
        fit([HangWatch({"seconds": 0.3}, tmp_path), Lasts("on_train_batch_start", 0.7)])
    before = (tmp_path / "rank0.stacks").read_text(encoding="utf-8")
    fit([HangWatch("1 hour", tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["previous"]
    assert (tmp_path / "previous" / "rank0.stacks").read_text(encoding="utf-8") == before
    assert compare_ranks(tmp_path / "previous").ranks[0]["rank"] == 0
    with pytest.raises(FileNotFoundError, match=r"Files of an earlier start are in .*previous\."):
        compare_ranks(tmp_path)


class Breaks(Callback):
    def __init__(self, error):
        self.error = error

    def on_train_batch_end(self, *_):
        raise self.error


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_nothing_is_armed_after_an_exception(tmp_path, error):
    with pytest.raises((ZeroDivisionError, SystemExit, KeyboardInterrupt)):
        fit([HangWatch({"seconds": 0.3}, tmp_path / "hang"), Breaks(error)])
    (tmp_path / "hang").mkdir(exist_ok=True)
    time.sleep(0.6)
    assert not list((tmp_path / "hang").iterdir())


def test_settings_of_faulthandler_stay(tmp_path):
    was = faulthandler.is_enabled()
    fit([watch := HangWatch("1 hour", tmp_path)])
    assert faulthandler.is_enabled() == was
    copy = pickle.loads(pickle.dumps(watch))
    fit([copy])
    assert not list(tmp_path.rglob("rank0.hang"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_timer_of_the_parent_does_not_stop_forked_ranks(tmp_path):
    with (tmp_path / "others").open("w") as file:
        faulthandler.dump_traceback_later(1000, file=file)  # as pytest does
        try:
            fit([HangWatch("1 hour", tmp_path / "hang")], strategy="ddp_fork", devices=2, limit_val_batches=0)
        finally:
            faulthandler.cancel_dump_traceback_later()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_fork_in_the_middle_keeps_the_watch(tmp_path):
    record = RankRecord(tmp_path, 0.5, {"rank": 0, "world_size": 1})
    try:
        record.move("before")
        if (child := os.fork()) == 0:
            faulthandler.dump_traceback_later(1000)  # would wait for ever if the timer had been forked
            os._exit(0)
        os.waitpid(child, 0)
        time.sleep(1.0)
        assert (tmp_path / "rank0.stacks").stat().st_size > 0
        assert record.move("after") >= 1.0
    finally:
        record.close()


def test_the_record_says_where_the_run_is(tmp_path):
    record = RankRecord(tmp_path, 1000, {"rank": 2, "world_size": 3})
    record.start_epoch("train", 4)
    record.log("train", 'odd "näme"\n')
    record.start_epoch("val", 4)
    record.step, record.batch, record.batches = 7, 3, 9
    record.move("on_validation_batch_start")
    found = read_record(tmp_path / "rank2.hang")
    record.log("val", "loss")
    later = read_record(tmp_path / "rank2.hang")
    record.close()
    assert (found["hook"], found["key"], found["moves"]) == ("on_validation_batch_start", "", 1)
    assert [found[name] for name in ("epoch", "step", "batch", "batches")] == [4, 7, 3, 9]
    assert later["key"] == "loss"
    assert later["keys"] == [["train", 1, 'odd "näme"\n'], ["val", 1, "loss"]]
    assert not list(tmp_path.iterdir())


def test_thousands_of_keys_do_no_harm(tmp_path):
    record = RankRecord(tmp_path, 1000, {"rank": 0, "world_size": 1})
    for number in range(5000):
        record.log("train", f"a rather long name of a value, number {number}")
    found = read_record(tmp_path / "rank0.hang")
    record.close()
    assert 500 < len(found["keys"]) < 5000


_HEAD = b"1.0 1 0 0 0 0 0 -1 hook".ljust(512)


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 2**16, b"1.0 1 2 x", _HEAD + b"[]", b"1e999 " * 99, _HEAD + b"[" * 10_000]
    + [_HEAD + b'{"rank": 0, "world_size": %s, "keys": []}' % size for size in (b"0", b"99999999999", b'"2"')],
)
def test_a_file_that_is_no_record_is_named(tmp_path, capsys, content):
    (tmp_path / "rank0.hang").write_bytes(content)
    with pytest.raises(SystemExit):
        main(["hang", str(tmp_path)])
    assert "rank0.hang is not a record of HangWatch" in capsys.readouterr().err


def test_a_folder_without_a_record_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["hang", str(tmp_path)])
    assert "has no rank*.hang" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["hang", str(tmp_path / "nowhere")])
    assert "There is no folder" in capsys.readouterr().err
