"""Checkpoints that are written while training goes on."""

import threading
import time
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from packaging.version import Version

from lightning_tricks import AutoResume, TrainableCheckpoint
from lightning_tricks._shared.host_copies import HostCopies
from lightning_tricks.auto_resume import CheckpointFolder, checkpoint_writer
from lightning_tricks.seeding import isolated_rng
from tests.auto_resume.killing import differences, kill_at, own_state, run
from tests.auto_resume.test_objects import Argued
from tests.auto_resume.training import ON_FILES
from tests.small import QUIET, Net, cases, loader, same

SMALL = {"samples": 28, "epochs": 2, "val_loaders": 1, "sanity": 0}
KEEPS = {"checkpointing": [{"dirpath": "mine", "save_top_k": 1, "save_last": True, "every_n_train_steps": 3}]}
CASES = {
    "one process": {},
    "two ranks": {"ranks": 2, "strategy": "ddp_fork"},
    "two ranks by default": {"ranks": 2, "strategy": "ddp_fork", "asynchronous": None},
    "ModelCheckpoint": KEEPS,
    "shards": {"ranks": 2, "strategy": "fsdp2"},
}


@pytest.mark.parametrize("number", [29, 47, 68, pytest.param(0, id="in a step")])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(5)
def test_killed_while_it_writes(tmp_path, case, number):
    """The checkpoint before, or the new one, is resumed, bit for bit."""
    options = {**SMALL, **CASES[case]}
    if options.get("strategy") == "fsdp2" and Version(torch.__version__) < Version("2.7"):
        pytest.skip("FSDP2 of torch 2.6 needs an accelerator")
    asynchronous = options.pop("asynchronous", True)
    options["resume"] = {"every_n_train_steps": 1, "asynchronous": asynchronous}
    kill = [ON_FILES, number, "SIGKILL", 0] if number else kill_at("in the middle of a step", "SIGKILL", options)
    assert run(tmp_path / "whole", {**options, "guarded": False}) == 0
    assert run(tmp_path / "killed", {**options, "kill": kill}) != 0
    assert run(tmp_path / "killed", options) == 0, (tmp_path / "killed/output.txt").read_text()[-3000:]
    assert differences(tmp_path / "killed", tmp_path / "whole") == []
    folder = CheckpointFolder(tmp_path / "killed/resume")
    assert {path.name for path in folder.private.iterdir() if path.is_dir()} == {one.file for one in folder.manifests()}


class Slow:
    """Lets each save of a folder wait until it is told to go on, and notes the steps."""

    def __init__(self, monkeypatch):
        self.go_on, self.begun, self.written = threading.Event(), [], []
        save = CheckpointFolder.save

        def slow_save(folder, checkpoint, **known):
            self.begun.append(known["step"])
            assert self.go_on.wait(20)
            self.written.append(known["step"])
            return save(folder, checkpoint, **known)

        monkeypatch.setattr(CheckpointFolder, "save", slow_save)


class GoesOn(Callback):
    """Lets the saves go on when a step has begun, and notes the steps that have."""

    def __init__(self, slow, step):
        self.slow, self.step, self.steps = slow, step, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.steps.append(trainer.global_step)
        if trainer.global_step == self.step:
            self.slow.go_on.set()


def fit(folder, *callbacks, steps=10, module=lambda: Net(dropout=0.2), **options):
    guard = AutoResume(folder, every_n_epochs=None, **options)
    with isolated_rng(seed=0):
        net = module()
    torch.manual_seed(1)
    Trainer(callbacks=[guard, *callbacks], max_steps=steps, **QUIET).fit(net, loader(shuffle=True))
    return net


@pytest.mark.parametrize("asynchronous", [True, None])
def test_training_goes_on_and_does_not_change_what_is_written(tmp_path, monkeypatch, asynchronous):
    """What is written of a step is what a save that waits writes of it."""
    fit(tmp_path / "waits", every_n_train_steps=4, keep_last=9, asynchronous=False)
    slow = Slow(monkeypatch)
    goes_on = GoesOn(slow, 7)
    fit(tmp_path / "goes on", goes_on, every_n_train_steps=4, keep_last=9, asynchronous=asynchronous)
    assert slow.begun == slow.written == [4, 8, 10]
    assert goes_on.steps == list(range(10))
    files = [sorted((tmp_path / name).glob(".auto_resume/000001-*/meta.pt")) for name in ("waits", "goes on")]
    waits, goes = (torch.load(file, weights_only=True) for (file,) in files)
    for name in ("state_dict", "optimizer_states", "lr_schedulers", "loops"):
        assert same(waits[name], goes[name])
    waits, goes = (own_state(file)["ranks"][0]["rng"] for (file,) in files)
    assert same(waits, goes)


class Keeps(Net):
    """Saves an object, whose copy may be none."""

    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = Path("here")


@pytest.mark.filterwarnings("ignore:.*does not resume from a checkpoint that contains objects")
@cases(
    "module, max_bytes, asynchronous, goes_on",
    (Net, 2**29, None, True),
    (Net, 100, None, False),
    (Net, 100, True, True),
    (Net, 2**29, False, False),
    (Keeps, 2**29, None, False),
    (Argued, 2**29, None, False),
)
def test_by_default_training_goes_on_where_a_copy_is_small_and_certain(
    tmp_path, monkeypatch, module, max_bytes, asynchronous, goes_on
):
    """The last save of a fit always waits."""
    threads, save = [], CheckpointFolder.save

    def noting_thread(folder, checkpoint, **known):
        threads.append(threading.current_thread() is threading.main_thread())
        return save(folder, checkpoint, **known)

    monkeypatch.setattr(CheckpointFolder, "save", noting_thread)
    monkeypatch.setattr(checkpoint_writer, "_MAX_BYTES_OF_COPY", max_bytes)
    fit(tmp_path, module=module, every_n_train_steps=4, asynchronous=asynchronous)
    assert threads == [not goes_on, not goes_on, True]


@pytest.mark.parametrize("on_failed_save", ["warn", "raise"])
def test_a_save_that_failed_is_reported_by_the_next(tmp_path, monkeypatch, on_failed_save):
    """Training goes on, or ends with an error that names the step."""
    save, steps = CheckpointFolder.save, []

    def save_or_fail(folder, checkpoint, **known):
        if known["step"] == 2:
            raise OSError(28, "No space left on device")
        steps.append(known["step"])
        return save(folder, checkpoint, **known)

    monkeypatch.setattr(CheckpointFolder, "save", save_or_fail)
    options = {"every_n_train_steps": 2, "asynchronous": True, "on_failed_save": on_failed_save, "steps": 6}
    expected = r"step 2 could not be saved in .*: \[Errno 28\] No space left on device. There is no earlier checkpoint"
    if on_failed_save == "raise":
        with pytest.raises(OSError, match=expected):
            fit(tmp_path, **options)
        assert steps == []
    else:
        with pytest.warns(UserWarning, match=expected):
            fit(tmp_path, **options)
        assert steps == [4, 6]


def test_an_error_in_the_fit_waits_for_the_last_checkpoint(tmp_path, monkeypatch):
    """It is whole when the error leaves the Trainer."""
    slow = Slow(monkeypatch)

    class Fails(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 3:
                threading.Thread(target=lambda: (time.sleep(0.3), slow.go_on.set())).start()
                raise RuntimeError("an error of the script")

    with pytest.raises(RuntimeError, match="an error of the script"):
        fit(tmp_path, Fails(), every_n_train_steps=2, asynchronous=True)
    assert [manifest.step for manifest in CheckpointFolder(tmp_path).manifests()] == [2]


def test_frozen_weights_are_neither_copied_nor_written(tmp_path, monkeypatch):
    """With TrainableCheckpoint beside it."""
    sizes, take = [], HostCopies.take

    def noting_sizes(copies, value):
        copied = take(copies, value)
        sizes.append(sum(held.numel() for name, held in copied[0]["state_dict"].items() if ".weight" in name))
        return copied

    class Frozen(Callback):
        def setup(self, trainer, pl_module, stage):
            pl_module.net[0].requires_grad_(False)

    monkeypatch.setattr(HostCopies, "take", noting_sizes)
    net = fit(tmp_path, Frozen(), TrainableCheckpoint(), every_n_train_steps=2, asynchronous=True)
    trained = [value.numel() for name, value in net.named_parameters() if ".weight" in name and value.requires_grad]
    assert set(sizes) == {sum(trained)}


def test_copies_share_what_was_shared_and_use_their_memory_again():
    """Views of one storage stay views of one; the next copy takes no new memory."""
    whole, copies = torch.arange(6.0), HostCopies()
    value = {"a": whole, "b": [OrderedDict(d=whole.view(2, 3).T)], "c": {1, 2}, "empty": torch.empty(0)}
    first = copies.take(value)
    whole.zero_()
    value["c"].add(3)
    assert (first["a"].tolist(), first["b"][0]["d"].tolist(), first["c"]) == (
        [*range(6)],
        [[0, 3], [1, 4], [2, 5]],
        {1, 2},
    )
    place = first["a"].data_ptr()
    assert first["b"][0]["d"].untyped_storage().data_ptr() == place
    second = copies.take(value)
    assert (second["a"].data_ptr(), second["a"].tolist()) == (place, [0] * 6)


def test_what_is_no_choice_is_refused(tmp_path):
    with pytest.raises(TypeError, match="asynchronous must be True, False or None, got 'wait'"):
        AutoResume(tmp_path, asynchronous="wait")
