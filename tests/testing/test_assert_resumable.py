"""`assert_resumable` passes programs that resume exactly, and names what differs first in those that do not."""

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.utilities import CombinedLoader
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.utils.data import DataLoader

from lightning_tricks import AutoResume, RunFingerprint, Tricks, TricksMixin
from lightning_tricks.testing import assert_resumable
from tests.contract.processes import run_and_exit
from tests.documents.blocks import blocks_of
from tests.documents.generated import DOCS
from tests.end_together.test_callback import Stream
from tests.small import Hooks, Net, cases, digits, loader
from tests.testing import projects
from tests.testing.projects import project, validated

AFTER, BEFORE = "Usual causes: ", "This is before the first stop: "
pytestmark = pytest.mark.filterwarnings("default")  # what AutoResume warns of is passed on


@pytest.fixture(autouse=True)
def temporary(monkeypatch):
    """Let temporary folders be made in one of their own, which is empty at the end."""
    with tempfile.TemporaryDirectory() as name:  # a short path, as sockets lie in it
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)
        assert [path.name for path in Path(name).iterdir()] == []


def failure(make, **arguments):
    with pytest.raises(AssertionError) as error:
        assert_resumable(make, **arguments)
    return str(error.value)


# What resumes exactly


@pytest.mark.parametrize("name", ["resume.py", "classifier.py", "ensemble.py"])
def test_programs_of_the_docs(name):
    """The two others of the five do not train."""
    assert assert_resumable(projects.program(name), stops=2).equal_batches == 16


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["digits.yaml", "ensemble.yaml"])
def test_configurations_of_the_docs(name):
    assert assert_resumable(projects.program(name)).equal_batches == 16


def test_the_template_of_the_docs():
    (template,) = (block.code for block in blocks_of(DOCS / "existing-project.md") if "def make(folder)" in block.code)
    names = {}
    exec(template, names)
    names["test_training_resumes_exactly"]()


def test_the_template_for_lightning_cli():
    """With a configuration whose paths are relative."""
    (template,) = (block.code for block in blocks_of(DOCS / "tricks" / "testing.md") if "LightningCLI" in block.code)
    save = {"class_path": "lightning_tricks.AutoResume", "init_args": {"dirpath": "runs/digits"}}
    trainer = {"accelerator": "cpu", "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "runs"}}}
    trainer |= {"enable_progress_bar": False, "limit_val_batches": 2, "callbacks": [save]}
    Path("config.yaml").write_text(json.dumps({"seed_everything": 1, "trainer": trainer}))
    names = {"os": os, "Path": Path, "LightningCLI": LightningCLI, "assert_resumable": assert_resumable}
    names |= {"MyModel": BoringModel, "MyData": BoringDataModule}
    exec(template, names)
    names["test_it_resumes"]()
    assert not Path("runs").exists()


@pytest.mark.parametrize("name", ["transformer", "manual_optimization"])
def test_modules_of_another_project(name):
    assert assert_resumable(projects.foreign(name), stops=2).equal_batches == 18


def test_a_closure_with_validation_workers_and_checkpoints(recwarn):
    workers = 2

    def make(folder):
        saves = ModelCheckpoint(folder / "best", monitor="loss", save_last=True)
        trainer, module, _, held_out = validated(folder, saves, Timer(), enable_checkpointing=True)
        data = DataLoader(digits(), 4, shuffle=True, num_workers=workers, persistent_workers=True)
        return trainer, module, data, held_out

    comparison = assert_resumable(make)
    assert str(comparison) == "No difference: 20 batches are equal, bit for bit."
    assert not [warning for warning in recwarn if "AutoResume" in str(warning.message)]


def test_an_auto_resume_of_the_project_is_used(tmp_path):
    class Mine(TricksMixin, Net):
        pass

    def by_the_module(folder):
        return project(lambda **_: Mine(tricks=Tricks(auto_resume={"dirpath": folder / "mine"})))

    def by_the_trainer(folder):
        folders.write_text(str(folder))
        own = RunFingerprint(tmp_path / "own.jsonl"), AutoResume(folder, every_n_train_steps=3, signals=["SIGINT"])
        return project(Net, None, *own)

    folders = tmp_path / "folder"
    assert assert_resumable(by_the_module).equal_batches == 20
    assert assert_resumable(by_the_trainer).equal_batches == 20
    assert not (tmp_path / "own.jsonl").exists()
    assert not Path(folders.read_text()).exists()


@pytest.mark.parametrize("workers", [0, 1])
def test_two_ranks(workers):
    def make(folder):
        options = {"strategy": "ddp_fork", "devices": 2, "max_epochs": 3}
        trainer, module, *_ = validated(folder, AutoResume(folder, every_n_train_steps=2), **options)
        return trainer, module, DataLoader(digits(), 4, shuffle=True, num_workers=workers), loader()

    assert assert_resumable(make, stops=2).equal_batches == 30


@pytest.mark.parametrize("ranks", [3, 4])
def test_gradients_of_several_ranks_are_added_in_the_order_of_the_run(ranks):
    """A new process has one set of buckets in its first step, and others later."""

    def make(folder):
        # of two saves at the end of an epoch, the second one may be that of a resumed process before its first step
        saves = AutoResume(folder, every_n_train_steps=5)
        trainer, module, *_ = validated(folder, saves, strategy="ddp_fork", devices=ranks, max_epochs=2)
        return trainer, module, DataLoader(digits(70), 4, shuffle=True), loader()

    assert assert_resumable(make, stops=2).equal_batches == 2 * ranks * -(-70 // (4 * ranks))


def test_a_stream_that_ends_before_the_other_loader():
    """Stopped after its end, while the Trainer has fetched a batch that it is not in."""

    class Beside(Net):
        def training_step(self, batch, batch_idx):
            stored, streamed = batch
            pairs = [stored] if streamed is None else [stored, streamed]
            return super().training_step([torch.cat(parts) for parts in zip(*pairs, strict=True)], batch_idx)

    def data():
        return CombinedLoader([loader(), DataLoader(Stream(0, [3]), 4)], "max_size")

    assert assert_resumable(lambda folder: project(Beside, data, max_epochs=1), stops=1).equal_batches == 10


def test_where_it_stops(tmp_path):
    """Each start, stop and validation batch, as the project sees them."""
    seen = tmp_path / "seen"

    class Sees(Callback):
        training_arguments = ()

        def on_train_start(self, trainer, pl_module):
            write(f"starts at {trainer.global_step}")

        def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
            write(f"validates {batch_idx}")

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            write(f"trains {batch_idx}")

    def write(line):
        with seen.open("a") as file:
            file.write(f"{line}\n")

    assert_resumable(lambda folder: validated(folder, Sees(), num_sanity_val_steps=2))
    *_, first, second, third, last = seen.read_text().split("starts at ")
    # 2 epochs of 10 batches, each with a validation of 10
    assert [part.splitlines()[0] for part in (first, second, third, last)] == ["0", "6", "6", "16"]
    assert first.splitlines()[-1] == "trains 5", "SIGTERM: this batch is finished"
    assert second.splitlines()[-1] == "validates 9", "SIGKILL: what came after the save is repeated"
    assert third.splitlines()[-1] == "trains 5"


def test_what_is_ignored():
    def make(folder):
        class Clock(Callback):
            def on_train_batch_end(self, trainer, pl_module, *_):
                pl_module.log_dict({"time/step": time.monotonic(), "loss": 1.0})

        return project(Net, None, Clock())

    said = failure(make, stops=1)
    assert "callback_metrics.time/step (epoch 0, batch 1)" in said
    assert BEFORE in said
    assert assert_resumable(make, stops=1, ignore=["time/*"]).equal_batches == 20


# Mistakes: what the message has to say, in this order

MISTAKES = {
    "not_seeded": ["step 0, before the first batch: start. net.0.weight differs", BEFORE],
    "python_random_without_seed": ["step 0, in epoch 0, batch 0: data. Part 0 of the batch differs (1 of 2", BEFORE],
    "generator_of_the_clock": ["step 0, in epoch 0, batch 0: data. Part 0 of the batch differs (2 of 2", BEFORE],
    "rate_of_the_clock": [
        "step 0, in epoch 0, batch 0: update. net.0.weight differs after the update",
        "learning_rates.0 (epoch 0, batch 0)",
        BEFORE,
    ],
    "counter_that_is_not_saved": [
        "step 6, in epoch 0, batch 6: forward. The output of loss differs",
        "Run B was resumed at step 6 without restoring: module.count (itertools.count)",
        "was stopped by SIGTERM in epoch 0, batch 5, resumed at step 6, was stopped by SIGKILL in epoch 0, batch 9",
        "AutoResume: these values were not restored: module.count",
        AFTER,
    ],
    "callback_without_state": [
        "step 6, in epoch 0, batch 6: update",
        "without restoring: callbacks.Decay.rates (list_iterator)",
        "learning_rates.0 (epoch 0, batch 6)",
        AFTER,
    ],
    "rate_since_the_start_of_the_process": [
        "step 6, in epoch 0, batch 6: update",
        "Warm.configure_optimizers.steps.cell_contents (itertools.count)",
        "learning_rates.0 (epoch 0, batch 7)",
        AFTER,
    ],
    "dataset_with_an_iterator": [
        "step 6, in epoch 0, batch 6: data",
        "the training loader differs from the stopped run, as these values were not restored: dataset.change.noise",
        AFTER,
    ],
    "metric_of_a_callback": [
        "Training: No difference: 20 batches are equal",
        "callback_metrics.batches_seen (epoch 0, batch 7)",
        "AutoResume: these values were not restored: callbacks.Seen.count (itertools.count)",
        AFTER,
    ],
    "setting_of_the_process": [
        "The run cannot be resumed: it was stopped by SIGTERM in epoch 0, batch 5.",
        "contains a run that was started with other settings:\n  SGD.lr: 0.1 -> 0.01",
    ],
    "draw_after_the_fit_resumed": ["Training: No difference: 20 batches are equal", "random_states.torch (end)", AFTER],
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake):
    said = failure(getattr(projects, mistake))
    place = 0
    for words in MISTAKES[mistake]:
        assert words in said[place:], said
        place += said[place:].index(words)


def test_a_stop_in_validation_is_named_by_its_numbers():
    clock = Hooks(on_train_batch_end=lambda _, module, *__: module.log("clock", time.monotonic()))
    said = failure(lambda folder: validated(folder, clock), stops=2)
    assert "in epoch 1, batch 9, validation batch 3 of loader 0, resumed at step" in said


def test_what_was_not_restored_is_a_warning_where_it_changed_nothing():
    class Remembers(Net):
        def on_train_batch_start(self, batch, batch_idx):
            self.batches = iter([batch_idx])

    with pytest.warns(UserWarning, match="these values changed in this fit, and cannot be saved: module.batches"):
        assert_resumable(lambda folder: project(Remembers), stops=1)


# Errors


def test_the_error_of_a_whole_run_is_shown():
    class Broken(Net):
        def training_step(self, batch, batch_idx):
            raise ZeroDivisionError("nothing to divide")

    with pytest.raises(ProcessRaisedException, match="ZeroDivisionError: nothing to divide"):
        assert_resumable(lambda folder: project(Broken))


def test_an_error_of_a_resumed_run_is_named():
    class Broken(Net):
        def on_train_start(self):
            if self.trainer.global_step:
                raise FileNotFoundError("vocabulary.txt")

    said = failure(lambda folder: project(Broken))
    assert "The run cannot be resumed: it was stopped by SIGTERM in epoch 0, batch 5" in said
    assert "FileNotFoundError: vocabulary.txt" in said


@cases(
    "make, words",
    (lambda folder: None, r"TypeError: The function must return \(trainer, module, ...\), got None"),
    (lambda folder: project()[1:], r"TypeError: The function must return .*got \(Net"),
    (lambda folder: project(Net, None, AutoResume("runs/mine")), "AutoResume must save to the folder .*runs/mine"),
    (lambda folder: project(strategy="ddp", devices=2), "Give the Trainer strategy=.ddp_fork.: .*DDPStrategy"),
)
def test_what_cannot_be_followed_is_refused(make, words):
    with pytest.raises(ProcessRaisedException, match=words):
        assert_resumable(make)
    assert not Path("runs").exists()


@pytest.mark.parametrize("arguments", [{"fast_dev_run": True}, {"limit_train_batches": 0}])
def test_a_run_without_a_resume_is_no_success(arguments):
    assert "No resume was tested, as the run was " in failure(lambda folder: project(**arguments))


@pytest.mark.parametrize("arguments", [{"stops": 0}, {"ignore": 3}, {"ignore": ["re:("]}])
def test_arguments_are_checked(arguments):
    with pytest.raises((TypeError, ValueError), match=next(iter(arguments))):
        assert_resumable(pytest.fail, **arguments)


def test_a_process_that_used_a_gpu_is_not_forked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="used no GPU"):
        assert_resumable(pytest.fail)


# What is left behind


def processes_of(group):
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int((folder / "stat").read_text().rpartition(")")[2].split()[2]) == group:
                found.append(folder.name)
        except OSError:
            continue
    return found


def pid_once_written(file):
    while not (file.exists() and file.read_text()):
        time.sleep(0.05)
    return int(file.read_text())


class Sleeps(Net):
    """Writes the id of its process, and never ends."""

    file = Path("pid")

    def training_step(self, batch, batch_idx):
        self.file.write_text(str(os.getpid()))
        time.sleep(0.1)
        return super().training_step(batch, batch_idx)


def sleeping(folder):
    trainer, module, _ = project(Sleeps, max_epochs=-1)
    return trainer, module, DataLoader(digits(), 4, num_workers=1)


def test_an_interrupt_ends_its_processes():
    """As Ctrl+C does, and the signal of a time limit for tests."""

    def interrupt():
        pids.append(pid_once_written(Sleeps.file))
        os.kill(os.getpid(), signal.SIGINT)

    pids = []
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        assert_resumable(sleeping)
    deadline = time.monotonic() + 20
    while processes_of(pids[0]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes_of(pids[0])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has died")
def test_its_processes_end_with_a_test_that_is_killed(temporary):
    test = os.fork()
    if test == 0:
        run_and_exit(lambda: assert_resumable(sleeping))
    pid = pid_once_written(Sleeps.file)
    os.kill(test, signal.SIGKILL)
    os.waitpid(test, 0)
    deadline = time.monotonic() + 20
    while processes_of(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes_of(pid)
    shutil.rmtree(*temporary.iterdir())  # nobody is left who does it
