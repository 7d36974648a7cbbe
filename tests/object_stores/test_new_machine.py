"""A run that goes on where nothing is left of it but what is in the store: it ends as the undisturbed one does."""

import signal

import fsspec
import pytest
import torch

from lightning_tricks.auto_resume import AutoResume, CheckpointFolder
from tests.auto_resume.killing import STOPPED, kill_at, resumed_at, run, start, wait_for
from tests.object_stores.machines import (
    SCRATCH,
    SHORT,
    assert_as_undisturbed,
    assert_ends,
    at,
    kill_all,
    on,
    output,
    wait_until,
)
from tests.small import Net, cases, fit, same

BOTH = {"loggers": ["csv", "tensorboard"]}
MIDDLE = "in the middle of an epoch"


@pytest.fixture
def machines(tmp_path):
    return [tmp_path / name for name in ("first", "second", "third")]


def assert_goes_on(store, machines, whole, **options):
    """Stopped by a signal in its second epoch, and started on an empty machine; return the step of the resume."""
    stopped = on(machines[0], store.address, **{"kill": kill_at(MIDDLE, "SIGTERM", {**SHORT, **options}), **options})
    assert run(machines[0], stopped) == STOPPED, output(machines[0])[-3000:]
    more = on(machines[1], store.address, **{**options, "kill": None})
    assert_ends(machines[1], more)
    assert_as_undisturbed(machines[:2], whole, more)
    return set(resumed_at(machines[1]))


@pytest.mark.oldest
@pytest.mark.parametrize("kind", ["folder_store", pytest.param("s3", marks=pytest.mark.newest)])
def test_stopped_by_a_signal(kind, machines, tmp_path, request):
    """The save is sent before the exit; weights, optimizer, random state and what loggers wrote are equal."""
    store = request.getfixturevalue(kind)
    assert assert_goes_on(store, machines, tmp_path / "whole", **BOTH) == {11}
    newest = CheckpointFolder(machines[1] / SCRATCH).manifests()[0]
    assert newest.finished
    assert f".auto_resume/{newest.file}/manifest.json" in store.names()


def test_no_random_number_of_the_script_is_drawn_for_a_retry(s3, machines, tmp_path, monkeypatch):
    """botocore takes those of `random` for the delay of each."""
    monkeypatch.delenv("AWS_MAX_ATTEMPTS")
    s3.server.set_faults(fail=503, code="SlowDown", share=0.3)
    options = on(machines[0], s3.address, epochs=1, resume={"every_n_train_steps": 4})
    assert_ends(machines[0], options)
    assert_as_undisturbed(machines[:1], tmp_path / "whole", options)


@cases(
    "options",
    {"resume": {"asynchronous": True}, "ballast": 4},
    {"ranks": 2, "strategy": "ddp_fork", "epochs": 25},  # they ask each other for signals every 0.1 s
    {"workers": 2, "persistent": True},
    ids=["asynchronous", "two ranks", "workers"],
)
def test_ways_to_train(options, folder_store, machines, tmp_path):
    assert_goes_on(folder_store, machines, tmp_path / "whole", **options)


def test_a_killed_run_is_sent_nevertheless(folder_store, machines, tmp_path):
    """The sending process finishes, and the next start goes on from the newest checkpoint."""
    options = on(machines[0], folder_store.address, kill=kill_at(MIDDLE, "SIGKILL", SHORT))
    assert run(machines[0], options) == -signal.SIGKILL
    more = on(machines[1], folder_store.address)
    assert_ends(machines[1], more)
    assert set(resumed_at(machines[1])) == {10}
    assert_as_undisturbed(machines[:2], tmp_path / "whole", more)


def test_a_start_waits_for_what_a_killed_run_sends(s3, machines, tmp_path):
    """Also while a large file is on its way."""
    s3.server.set_faults(hold=True, methods=["PUT"], key="meta.pt")
    options = {"epochs": 1, "resume": {"every_n_train_steps": 4}}
    first = on(machines[0], s3.address, **options, kill=["on_train_batch_start", 6, "SIGKILL", 0])
    assert run(machines[0], first) == -signal.SIGKILL
    more = on(machines[1], s3.address, **options)
    second = start(machines[1], more)
    wait_until(lambda: "which sends its last checkpoint" in output(machines[1]))
    s3.server.set_faults()
    assert wait_for(second) == 0, output(machines[1])[-3000:]
    assert set(resumed_at(machines[1])) == {4}
    assert_as_undisturbed(machines[:2], tmp_path / "whole", more)


def test_a_machine_that_lost_its_process_and_its_sender(folder_store, machines, tmp_path):
    """Whatever is complete in the store counts, and nothing is left there of what is not."""
    first = on(machines[0], folder_store.address, more=[at("on_train_batch_start", 9, kill_all)])
    assert run(machines[0], first) == -signal.SIGKILL
    more = on(machines[1], folder_store.address)
    assert_ends(machines[1], more)
    assert_as_undisturbed(machines[:2], tmp_path / "whole", more)
    checkpoints = {name.split("/")[1] for name in folder_store.names() if "-epoch=" in name}
    assert len(checkpoints) == 2


def test_names_with_spaces_and_of_other_alphabets(s3_server, s3, machines, tmp_path):
    place = type(s3)(s3_server, " a run/größe=日本")
    named = [tmp_path / "ein Rechner", tmp_path / "noch einér"]
    checkpointing = [{"dirpath": "resume/mine so", "filename": "{epoch} ü", "save_top_k": -1}]
    assert_goes_on(place, named, tmp_path / "whole", checkpointing=checkpointing, loggers=["csv"])
    mine = sorted(path.name for path in (tmp_path / "whole" / "resume/mine so").iterdir())
    assert sorted(path.name for path in (named[1] / "resume/mine so").iterdir()) == mine
    assert {f"mine so/{name}" for name in mine} <= place.names()


def test_several_fits_of_one_run(folder_store, machines):
    """Each has its folder in the store, and each is resumed where it was."""

    def script(folder, options):
        callback = AutoResume(folder_store.address, scratch=folder / SCRATCH, every_n_train_steps=4)
        for number, epochs in enumerate((1, options["epochs"])):
            net = Net(dropout=0.2)
            fit(net, callback, max_epochs=epochs)
            torch.save(net.state_dict(), folder / f"end{number}.pt")

    assert run(machines[0], {"epochs": 1}, script=script) == 0, output(machines[0])[-3000:]
    assert run(machines[1], {"epochs": 2}, script=script) == 0, output(machines[1])[-3000:]
    assert "the run resumes at epoch 1, step 10, extended" in output(machines[1])
    first, second = (torch.load(machine / "end0.pt") for machine in machines[:2])
    assert same(first, second)
    assert len([name for name in folder_store.names() if name.startswith("fit2/") and "manifest" in name]) == 2


def test_a_store_in_memory(tmp_path):
    """It lives in this process, and so does what sends to it."""
    address = f"memory://{tmp_path.name}/run"
    for epochs, machine in ((1, "first"), (2, "second")):
        callback = AutoResume(address, scratch=tmp_path / machine, every_n_train_steps=4)
        trainer = fit(Net(), callback, max_epochs=epochs)
    assert trainer.global_step == 20
    newest, *_ = CheckpointFolder(tmp_path / "second").manifests()
    assert newest.finished
    assert newest.step == 20
    assert len(fsspec.filesystem("memory").glob(f"/{tmp_path.name}/run/.auto_resume/*/manifest.json")) == 2
