"""Signals between the construction of AutoResume and the first batch: noted, and acted on where nothing is lost."""

import copy
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment

from lightning_tricks import AutoResume, Tricks, TricksMixin
from lightning_tricks.auto_resume import CheckpointFolder
from lightning_tricks.auto_resume.core.signals import EARLY_SIGNALS
from tests.auto_resume.killing import STOPPED, differences, resumed_at, run
from tests.contract.checks import Interrupts
from tests.small import QUIET, EvaluatedNet, Net, cases, loader

EARLY = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
OPTIONS = {"samples": 28, "epochs": 2, "validate": 3}
FORKED = {**OPTIONS, "ranks": 2, "strategy": "ddp_fork"}


@pytest.fixture
def received():
    """The signals that come to handlers of the process that are no others' business."""
    numbers = []
    before = {number: signal.signal(number, lambda number, frame: numbers.append(number)) for number in EARLY}
    yield numbers
    gc.collect()  # callbacks that wait
    for number, handler in before.items():
        signal.signal(number, handler)


def handlers():
    return [signal.getsignal(number) for number in sorted(signal.valid_signals())]


def saved(folder):
    return [one.file for one in CheckpointFolder(folder / "resume").manifests()]


def trainer(*callbacks, **options):
    return Trainer(callbacks=list(callbacks), **{"max_epochs": 1, **QUIET, **options})


# -- in processes of their own


@pytest.mark.oldest
@cases(
    "moment, name, saves",
    ("prepare_data", "SIGUSR1", 0),
    ("on_sanity_check_start", "SIGUSR1", 0),
    ("training_step", "SIGTERM", 1),
)
def test_the_run_stops_at_its_first_save_point_or_before_the_first_batch(tmp_path, moment, saves, name):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    assert run(killed, {**OPTIONS, "kill": [moment, 1, name, 0]}) == STOPPED
    assert len(saved(killed)) == saves
    assert run(killed, OPTIONS) == run(whole, {**OPTIONS, "guarded": False}) == 0
    assert differences(killed, whole) == []


@pytest.mark.oldest
@pytest.mark.trap("resume: SIGTERM saves nothing and exits 0; SIGINT saves nothing; SystemExit is 1 under ddp_fork")
@cases(
    "moment, name, rank",
    ("script", "SIGTERM", 0),
    ("configure_model", "SIGUSR1", 1),
    ("on_train_batch_end", "SIGTERM", "launcher"),
    ("on_train_batch_end", "SIGINT", 1),
)
def test_a_signal_to_one_process_stops_all_ranks(tmp_path, moment, name, rank):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    assert run(killed, {**FORKED, "kill": [moment, 1, name, rank]}) == STOPPED
    assert run(killed, FORKED) == run(whole, {**FORKED, "guarded": False}) == 0
    assert differences(killed, whole) == []


@pytest.mark.parametrize(("options", "moment"), [(OPTIONS, "script"), (OPTIONS, "on_train_start"), (FORKED, "script")])
def test_a_resumed_run_that_is_stopped_before_its_first_batch_resumes_from_the_same_save(tmp_path, options, moment):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    assert run(killed, {**options, "kill": ["on_train_batch_end", 5, "SIGTERM", 0]}) == STOPPED
    before = saved(killed)
    assert run(killed, {**options, "kill": [moment, 1, "SIGUSR1", 0]}) == STOPPED
    assert saved(killed) == before
    assert run(killed, options) == run(whole, {**options, "guarded": False}) == 0
    assert differences(killed, whole) == []
    assert len(set(resumed_at(killed))) == 1


@pytest.mark.oldest
@pytest.mark.trap("resume: SIGHUP and SIGUSR1 kill")
@pytest.mark.parametrize("moment", ["script", "on_train_batch_end"])
def test_a_hangup_detaches(tmp_path, moment):
    """Before the fit and in it: training continues; output that goes to a file stays there."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    kill = {"kill": [moment, 1, "SIGHUP", 0]}
    assert run(killed, {**OPTIONS, **kill}) == run(whole, {**OPTIONS, "guarded": False}) == 0
    assert differences(killed, whole) == []
    assert (killed / "resume" / "train.log").exists()
    assert "max_epochs=2` reached" in (killed / "output.txt").read_text()
    assert CheckpointFolder(killed / "resume").read_status()["state"] == "finished"


def test_a_second_signal_stops_at_once(tmp_path):
    def script(folder, options):
        guard = AutoResume(folder / "resume", exit_code=99)
        os.kill(os.getpid(), signal.SIGUSR1)
        os.write(1, f"goes on with {guard.signals}".encode())
        os.kill(os.getpid(), signal.SIGTERM)
        os.write(1, b"not any more")

    assert run(tmp_path, {}, script=script) == 99
    said = (tmp_path / "output.txt").read_text()
    assert "goes on" in said
    assert "not any more" not in said


@pytest.mark.parametrize(("second", "status"), [("SIGUSR1", 44), ("SIGTERM", STOPPED)])
def test_a_second_signal_is_handed_on_as_well(tmp_path, second, status):
    """To handlers that were found, of which that of SIGUSR1 leaves in its own way."""

    def script(folder, options):
        signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(44))
        signal.signal(signal.SIGTERM, lambda number, frame: os.write(1, b"bypassed;"))
        guard = AutoResume(folder / "resume")
        os.kill(os.getpid(), signal.SIGTERM)
        os.write(1, f"goes on with {guard.signals};".encode())
        os.kill(os.getpid(), getattr(signal, second))

    assert run(tmp_path, {}, script=script) == status
    assert (tmp_path / "output.txt").read_text().endswith(";bypassed;")


def test_children_of_the_process_are_not_concerned(tmp_path):
    """Such as the workers of a pool that prepares data, which is ended by SIGTERM."""
    guard, forks = AutoResume(tmp_path), multiprocessing.get_context("fork")
    begun = forks.Event()

    def work():
        begun.set()
        while True:
            signal.pause()

    worker = forks.Process(target=work)
    worker.start()
    assert begun.wait(60)
    worker.terminate()
    worker.join(20)
    status = worker.exitcode
    worker.kill()
    assert status == -signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL, guard


# -- handlers of this process


def test_noted_between_construction_and_fit(tmp_path, received):
    guard, before = AutoResume(tmp_path), signal.getsignal(signal.SIGINT)
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(SystemExit) as left:
        trainer(guard).fit(Net(), loader())
    assert left.value.code == STOPPED
    assert received == [signal.SIGUSR1], "it is handed on at the stop"
    assert signal.getsignal(signal.SIGINT) == before
    trainer(guard).fit(Net(), loader())


def test_handlers_are_as_they_were_when_no_callback_waits(tmp_path, received):
    before = handlers()
    first, second = AutoResume(tmp_path / "a"), AutoResume(tmp_path / "b")
    assert handlers() != before
    del first
    assert handlers() != before
    os.kill(os.getpid(), signal.SIGTERM)
    assert received == []
    del second
    gc.collect()
    assert handlers() == before
    assert received == [signal.SIGTERM], "nobody can stop at it any more"


def test_nothing_is_noted_in_a_notebook(tmp_path, received, monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    guard = AutoResume(tmp_path)
    os.kill(os.getpid(), signal.SIGTERM)
    assert received == [signal.SIGTERM], guard


@pytest.mark.oldest
def test_a_trainer_without_it_handles_signals_as_ever(tmp_path, received, monkeypatch):
    """Lightning composes its handler of SIGTERM with ours, and lets Slurm requeue where a signal has no handler yet."""

    class Looks(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            found.append(repr(signal.getsignal(signal.SIGUSR1)))
            if batch_idx == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    found, before = [], handlers()
    guard = AutoResume(tmp_path)
    with pytest.raises(SystemExit):
        trainer(Looks()).fit(Net(), loader())
    with pytest.raises(SystemExit) as left:
        trainer(guard).fit(Net(), loader())
    assert (len(found), left.value.code, received) == (2, STOPPED, [signal.SIGTERM])
    assert handlers() == before
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setattr(SLURMEnvironment, "detect", lambda: False)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    guard = AutoResume(tmp_path)
    with pytest.raises(SystemExit):
        trainer(Looks(), plugins=[SLURMEnvironment()]).fit(Net(), loader())
    assert "_HandlersCompose" in found[-1], guard


def test_a_handler_that_the_trainer_keeps_passes_on_what_nobody_waits_for(tmp_path, received):
    class Deletes(Callback):
        def on_train_start(self, trainer, pl_module):
            guards.clear()
            gc.collect()

    guards = [AutoResume(tmp_path)]
    trainer(Deletes()).fit(Net(), loader())
    assert signal.getsignal(signal.SIGTERM) == EARLY_SIGNALS._note
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
    assert received == [signal.SIGTERM] * 2


def test_a_handler_that_is_installed_later_stays(tmp_path, received):
    def later(number, frame):
        """The user's."""

    guard = AutoResume(tmp_path)
    signal.signal(signal.SIGUSR1, later)
    before = handlers()
    trainer(guard).fit(Net(), loader())
    assert signal.getsignal(signal.SIGUSR1) is later
    del guard
    gc.collect()
    assert signal.getsignal(signal.SIGUSR1) is later
    assert handlers() != before


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_each_way_to_leave_restores_the_handlers(tmp_path, received):
    class Breaks(Callback):
        def setup(self, trainer, pl_module, stage):
            raise ZeroDivisionError

    before = handlers()
    guard, another = AutoResume(tmp_path / "a"), AutoResume(tmp_path / "b")
    trainer(guard).validate(EvaluatedNet(), loader(), verbose=False)
    assert handlers() != before
    del another
    assert handlers() == before
    trainer(guard, fast_dev_run=True).fit(EvaluatedNet(), loader())
    assert handlers() == before
    for breaking in (Breaks(), Interrupts(3)):
        with pytest.raises((ZeroDivisionError, SystemExit)):
            trainer(guard, breaking).fit(EvaluatedNet(), loader())
        assert handlers() == before
    trainer(guard).fit(EvaluatedNet(), loader())
    assert handlers() == before


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_a_signal_in_a_validation_before_the_fit(tmp_path, received):
    class Sends(Callback):
        def on_validation_end(self, trainer, pl_module):
            os.kill(os.getpid(), signal.SIGUSR1)

    guard = AutoResume(tmp_path)
    assert trainer(guard, Sends()).validate(EvaluatedNet(), loader(), verbose=False)
    AutoResume(tmp_path / "another")  # ends at once
    gc.collect()
    assert received == []
    with pytest.raises(SystemExit):
        trainer(guard).fit(EvaluatedNet(), loader())
    assert received == [signal.SIGUSR1]


def test_one_that_waits_while_another_trains(tmp_path, received):
    first, second = AutoResume(tmp_path / "a"), AutoResume(tmp_path / "b")
    trainer(first).fit(Net(), loader())
    os.kill(os.getpid(), signal.SIGTERM)
    assert received == []
    with pytest.raises(SystemExit):
        trainer(second).fit(Net(), loader())


def test_one_that_is_discarded_while_another_trains(tmp_path, received):
    class Discards(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            of_fit = handlers()
            others.clear()
            gc.collect()
            assert handlers() == of_fit

    others = [AutoResume(tmp_path / "b")]
    trainer(AutoResume(tmp_path / "a"), Discards()).fit(Net(), loader())


def test_copies_and_other_threads_install_nothing(tmp_path, received):
    before, made = handlers(), []
    thread = threading.Thread(target=lambda: made.append(AutoResume(tmp_path)))
    thread.start()
    thread.join()
    assert handlers() == before
    for copied in (pickle.loads(pickle.dumps(made[0])), copy.deepcopy(made[0])):
        assert handlers() == before
        trainer(copied).fit(Net(), loader())
        assert handlers() == before


def test_from_inside_the_module(tmp_path, received):
    class Guarded(TricksMixin, Net):
        pass

    module = Guarded(tricks=Tricks(auto_resume={"dirpath": str(tmp_path)}))
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as left:
        trainer().fit(module, loader())
    assert left.value.code == STOPPED
    assert received == [signal.SIGTERM]
