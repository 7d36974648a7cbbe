"""AutoResume as users meet it: what it refuses, what it says, and what it leaves alone."""

import enum
import errno
import json
import logging
import os
import re
import resource
import runpy
import signal
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_tricks import AutoResume, GradientClipping, cli, seed_everything
from lightning_tricks._shared.files import open_file
from lightning_tricks._shared.tensors import parameters_of
from lightning_tricks.auto_resume import CheckpointFolder, run_files
from lightning_tricks.auto_resume.core import signals
from lightning_tricks.auto_resume.trainer_parts import SHAPING_SETTINGS
from tests.auto_resume.killing import STOPPED
from tests.contract.checks import Interrupts
from tests.small import QUIET, Net, cases, digits, loader, same

NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")


def fit(*callbacks, module=None, epochs=2, data=None, ckpt_path=None, **trainer):
    seed_everything(3, verbose=False)
    fitter = Trainer(max_epochs=epochs, callbacks=list(callbacks), **{**QUIET, **trainer})
    fitter.fit(module() if module else Net(dropout=0.2), data or loader(shuffle=True), ckpt_path=ckpt_path)
    return fitter


def stop(*callbacks, step=13, **options):
    with pytest.raises(SystemExit) as left:
        fit(*callbacks, Interrupts(step), **options)
    return left.value.code


def weights(trainer):
    return {name: value.clone() for name, value in trainer.lightning_module.state_dict().items()}


@cases(
    "arguments, words",
    ({"dirpath": ""}, "dirpath must be the path of a directory, got ''"),
    ({"every_n_epochs": 1.5}, "every_n_epochs must be a whole number >= 1, got 1.5"),
    ({"train_time_interval": 10}, "train_time_interval must be a timedelta or a dict.*got 10"),
    ({"train_time_interval": {"minute": 1}}, "train_time_interval takes no 'minute'.*Did you mean 'minutes'?"),
    ({"train_time_interval": {"minutes": 0}}, "must be positive"),
    ({"keep_last": 0}, "keep_last must be a whole number >= 1, got 0"),
    ({"signals": "SIGTERM"}, "signals must be a list of names, got 'SIGTERM'"),
    ({"signals": ["TERM"]}, "signals must be one of SIG.*, got 'TERM'.*SIGTERM"),
    ({"signals": ["SIGKILL"]}, "signals must be one of SIG.*, got 'SIGKILL'"),
    ({"exit_code": 256}, r"exit_code must be in \[0, 255\], got 256"),
    ({"on_failed_save": "retry"}, "on_failed_save must be one of warn, raise"),
)
def test_bad_arguments(arguments, words):
    with pytest.raises((TypeError, ValueError), match=words):
        AutoResume(**{"dirpath": "runs", **arguments})


def test_default_signals_that_the_system_lacks_are_left_out(monkeypatch):
    assert AutoResume("runs").signals == signals.DEFAULT_SIGNALS == ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
    of_windows = ("SIGTERM", "SIGINT", "SIGABRT", "SIGBREAK")
    monkeypatch.setattr(signals.signal, "Signals", enum.IntEnum("Signals", of_windows))
    found = runpy.run_path(signals.__file__)
    assert found["DEFAULT_SIGNALS"] == ("SIGTERM", "SIGINT")
    assert found["KNOWN_SIGNALS"] == of_windows


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(MisconfigurationException, match=r"file/runs cannot be written \(.*Free disk space, make it w"):
        fit(AutoResume(tmp_path / "file" / "runs"))


def test_a_disk_that_is_full_when_a_run_is_started_again(tmp_path):
    """The size of a file is limited for real, as a quota does."""

    def limited(size, folder):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            fit(AutoResume(folder))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    words = (
        r"cannot be written \(.*File too large.*\)\. Free disk space, make it writable or remove anything that is not "
        r"a regular file, and run the same command again\. Existing checkpoints are complete"
    )
    for name, size in (("a", 2000), ("b", 20)):
        if name == "b":
            stop(AutoResume(tmp_path / "b"))
        with pytest.raises(MisconfigurationException, match=words):
            limited(size, tmp_path / name)
    assert same(weights(fit(AutoResume(tmp_path / "b"))), weights(fit()))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["run.json", "start.json"])
def test_a_record_that_cannot_be_written_is_said_by_all_ranks(tmp_path, name, ranks):
    """Nor is a pipe in its place waited for."""
    (tmp_path / ".auto_resume").mkdir(parents=True)
    os.mkfifo(tmp_path / ".auto_resume" / name)
    options = {"strategy": "ddp_fork", "devices": 2} if ranks == 2 else {}
    words = rf"cannot be written \(.*{name} is a pipe, not a file\)\. Free disk space"
    with pytest.raises(Exception, match=words):
        fit(AutoResume(tmp_path), **options)


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize("text", ["", "[]", '{"processes": 1, "time": "x", "max_epochs": [], "rng": 3}', "[" * 100_000])
def test_damaged_records_of_a_run_that_was_stopped(tmp_path, text, capsys):
    def script(*callbacks):
        files = ModelCheckpoint(tmp_path / "files", every_n_train_steps=3, save_top_k=-1)
        return fit(*callbacks, files, AutoResume(tmp_path / "runs"), enable_checkpointing=True)

    with pytest.raises(RuntimeError, match="gone"):
        script(Crashes())
    records = list((tmp_path / "runs" / ".auto_resume").glob("*.json*"))
    assert {path.name for path in records} >= {"run.json", "start.json", "status.json"}
    for path in records:
        path.write_text(text)
    assert cli.main(["resume", "status", str(tmp_path / "runs")]) == 0
    assert same(weights(script()), weights(fit()))


def test_a_file_may_be_rewritten_while_a_run_continues_from_it(tmp_path):
    class Overwrites(Callback):
        def on_train_start(self, trainer, pl_module):
            (path,) = folder.glob(".auto_resume/0*/meta.pt")
            size = path.stat().st_size
            with path.open("r+b") as file:
                file.write(b"\x3f" * size)

    results = []
    for callbacks in ((), (Overwrites(),)):
        folder = tmp_path / str(len(callbacks))
        stop(AutoResume(folder, keep_last=1))
        results.append(weights(fit(AutoResume(folder, keep_last=1), *callbacks)))
    assert same(*results)


class Hyper(Net):
    def __init__(self, dropout=0.2, lr=0.1):
        super().__init__(dropout=dropout)
        self.save_hyperparameters()


IN_TWOS = ("accumulate_grad_batches", "check_val_every_n_epoch", "overfit_batches", "reload_dataloaders_every_n_epochs")
IN_HALVES = ("gradient_clip_val", "limit_train_batches", "limit_val_batches", "val_check_interval")
OTHER_SETTINGS = {
    **dict.fromkeys((*IN_TWOS, "min_epochs", "min_steps"), 2),
    **dict.fromkeys(IN_HALVES, 0.5),
    "gradient_clip_algorithm": "value",
    "precision": "bf16-mixed",
}


@pytest.mark.filterwarnings("ignore:You requested to overfit", "ignore:Precision bf16")
def test_each_setting_that_shapes_the_training_is_asked_about(tmp_path):
    assert OTHER_SETTINGS.keys() == {*SHAPING_SETTINGS, "precision", "min_epochs", "min_steps"}
    stop(AutoResume(tmp_path))
    for name, value in OTHER_SETTINGS.items():
        words = rf"(?i)settings:\n(.*\n)*?  Trainer\.{name}: .* -> '?{value}"
        with pytest.raises(MisconfigurationException, match=words):
            fit(AutoResume(tmp_path), **{name: value})
    assert same(weights(fit(AutoResume(tmp_path))), weights(fit()))


class Exchanges(Callback):
    """Exchanges the last optimizer in the fit."""

    def on_train_epoch_start(self, trainer, pl_module):
        *others, last = trainer.optimizers
        trainer.strategy.optimizers = [*others, torch.optim.RMSprop(parameters_of(last))]


@pytest.mark.parametrize("optimization", ["adamw", "manual"])
def test_the_state_of_an_optimizer_that_a_hook_exchanged_is_refused(tmp_path, optimization):
    script = {"module": lambda: Net(optimization=optimization)}
    stop(AutoResume(tmp_path), Exchanges(), **script)
    with pytest.raises(MisconfigurationException, match="has the state of RMSprop, which a hook created"):
        fit(AutoResume(tmp_path), Exchanges(), **script)


@pytest.mark.parametrize(("ranks", "file"), [(1, "meta.pt"), (2, "meta.pt"), (1, "manifest.json")])
def test_what_cannot_be_read_is_refused_by_all_ranks(tmp_path, monkeypatch, ranks, file):
    """It may be intact: another start finds it as it was."""
    stop(AutoResume(tmp_path, every_n_train_steps=5))
    newest = CheckpointFolder(tmp_path).manifests()[0]

    def denies(path):
        if path.name == file and newest.file in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return open_file(path)

    options = {"strategy": "ddp_fork", "devices": 2} if ranks == 2 else {}
    with monkeypatch.context() as patched:
        patched.setattr("lightning_tricks.auto_resume.core.checkpoint_folder.open_file", denies)
        with pytest.raises(Exception, match=rf"{newest.file}: {file} cannot be read \(Permission denied\), and may be"):
            fit(AutoResume(tmp_path), **options)
    assert CheckpointFolder(tmp_path).manifests()[0] == newest
    assert same(weights(fit(AutoResume(tmp_path))), weights(fit()))


@pytest.mark.trap("resume: an OnExceptionCheckpoint that resumes suppresses the default ModelCheckpoint")
def test_the_default_checkpoint_callback_stays_and_its_files_are_durable(tmp_path):
    trainer = fit(AutoResume(tmp_path / "runs"), enable_checkpointing=True, default_root_dir=tmp_path)
    assert trainer.checkpoint_callback.best_model_path
    kinds = []

    class Looks(ModelCheckpoint):
        def on_train_epoch_end(self, trainer, pl_module):
            kinds.append(type(trainer.strategy.checkpoint_io).__name__)
            super().on_train_epoch_end(trainer, pl_module)

    trainer = fit(Looks(tmp_path / "own"), AutoResume(tmp_path / "other"), enable_checkpointing=True)
    assert kinds == ["DurableCheckpointIO"] * 2
    assert type(trainer.strategy.checkpoint_io) is TorchCheckpointIO


def test_nothing_is_left_on_loaders(tmp_path):
    def held():
        return {name: value for name, value in vars(data).items() if "__pl" not in name and name != "worker_init_fn"}

    data = DataLoader(digits(), batch_size=4, shuffle=True)  # on which Lightning leaves those
    before = held()
    for ends in (fit, stop):
        ends(AutoResume(tmp_path / ends.__name__), data=data)
        assert held() == before


@pytest.mark.parametrize("place", ["", "memory:/"])
def test_a_given_checkpoint_and_its_own(tmp_path, lightning_log, place):
    given = f"{place}{tmp_path}/given.ckpt"
    fit(epochs=1).save_checkpoint(given)
    stop(AutoResume(tmp_path / "runs"), step=3, ckpt_path=given)
    trainer = fit(AutoResume(tmp_path / "runs"), ckpt_path=given)
    said = [line for _, line in lightning_log if "the run resumes from" in line]
    assert re.search(rf"from '\d+-epoch=1-step=13', not from '{given}'. To start from the latter", said[-1])
    assert trainer.global_step == 20


def test_nothing_is_announced_before_a_refusal(tmp_path, lightning_log):
    logging.getLogger("lightning.pytorch").setLevel(logging.INFO)
    fit(epochs=1).save_checkpoint(tmp_path / "given.ckpt")
    fit(AutoResume(tmp_path / "runs"))
    lightning_log.clear()
    differs = "net.0.weight has shape (8, 64) in this run and (16, 64) in the checkpoint"
    remedy = "Choose another dirpath to start a new run; load_weights loads the weights that fit."
    with pytest.raises(MisconfigurationException, match=rf"another model(.|\n)*{re.escape(differs)}(.|\n)*{remedy}"):
        fit(AutoResume(tmp_path / "runs"), module=lambda: Net(hidden=8), ckpt_path=tmp_path / "given.ckpt")
    assert not [line for _, line in lightning_log if "resumes" in line or "had finished" in line]


def test_what_lies_at_an_address_is_named_at_a_resume(tmp_path):
    """Weights are exact; files of ModelCheckpoint and loggers at an address are not those of the undisturbed run."""
    root = f"memory:/{tmp_path}"
    options = {"default_root_dir": root, "log_every_n_steps": 1, "enable_checkpointing": True}
    whole = weights(fit())
    stop(AutoResume(tmp_path / "runs"), ModelCheckpoint(f"{root}/best"), logger=CSVLogger(root), **options)
    words = rf"{root}/best is an address, .*: all that the run wrote stays"
    files = ModelCheckpoint(f"{root}/best")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Checkpoint directory memory:")
        with pytest.warns(UserWarning, match=words):
            trainer = fit(AutoResume(tmp_path / "runs"), files, logger=CSVLogger(root), **options)
    assert same(weights(trainer), whole)
    assert not [path for path in Path().iterdir() if ":" in path.name]


class Writes(Callback):
    """Writes a checkpoint where a fit ends in an error, as people do."""

    def __init__(self, path):
        self.path = path

    def on_exception(self, trainer, pl_module, exception):
        trainer.save_checkpoint(self.path)


class Crashes(Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 17:
            raise RuntimeError("gone")


OTHERS = {  # what writes as well, and the `ckpt_path` of the script
    "on exception": (lambda folder: OnExceptionCheckpoint(folder), None),
    "last": (lambda folder: ModelCheckpoint(folder, save_last=True, every_n_train_steps=1), "last"),
    "of a stranger": (lambda folder: Writes(folder / "a.ckpt"), "a.ckpt"),
}


@pytest.mark.filterwarnings(
    "ignore:.*the best checkpoint .* is gone", "ignore:.*was called without a model", "ignore:Checkpoint directory"
)
@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available")
@pytest.mark.parametrize("end", ["stopped", "crashed", "damaged"])
@pytest.mark.parametrize("writer", OTHERS)
def test_what_others_wrote_in_the_run_is_not_taken(tmp_path, writer, end):
    make, given = OTHERS[writer]

    def script(*callbacks):
        path = tmp_path / "files" / given if given and "." in given else given
        keep = AutoResume(tmp_path / "runs", every_n_train_steps=5)
        given_path = path if path == "last" or (path and path.exists()) else None
        return fit(make(tmp_path / "files"), *callbacks, keep, enable_checkpointing=True, ckpt_path=given_path)

    (tmp_path / "files").mkdir()
    whole = fit()
    with pytest.raises(RuntimeError if end == "crashed" else SystemExit):
        script(Crashes() if end == "crashed" else Interrupts(17))
    assert list((tmp_path / "files").glob("*.ckpt"))
    newest = max((tmp_path / "runs").glob(".auto_resume/0*/meta.pt"))
    if end == "damaged":
        os.truncate(newest, 100)
        with pytest.warns(UserWarning, match="has other bytes than were written"):
            assert same(weights(script()), weights(whole))
    else:
        assert same(weights(script()), weights(whole))


@pytest.mark.filterwarnings("ignore:.*was called without a model", "ignore:.*there is no last checkpoint available")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
def test_a_file_that_cannot_be_read_and_one_from_before_the_first_save(tmp_path, lightning_log):
    logging.getLogger("lightning.pytorch").setLevel(logging.INFO)

    def callbacks():
        return AutoResume(tmp_path / "runs", every_n_epochs=None), OnExceptionCheckpoint(tmp_path)

    with pytest.raises(RuntimeError, match="gone"):
        fit(*callbacks(), Crashes(), enable_checkpointing=True)
    with pytest.warns(UserWarning, match="on_exception.ckpt' before its own first save, and resumes from it as Light"):
        stop(*callbacks(), step=2, enable_checkpointing=True)
    os.truncate(tmp_path / "on_exception.ckpt", 100)
    fit(*callbacks(), enable_checkpointing=True)
    said = [line for _, line in lightning_log if "the run resumes from" in line]
    assert re.search(r"'\d+-epoch=1-step=19', not from '.*on_exception.ckpt'", said[-1])


def test_the_second_fit_resumes_the_second_fit(tmp_path):
    """A script that fits twice with one instance, stopped in its second fit, resumes there."""

    def script(*callbacks):
        seed_everything(3, verbose=False)
        module = Net(dropout=0.2)
        trainer = Trainer(max_epochs=1, callbacks=list(callbacks), **QUIET)
        trainer.fit(module, loader(shuffle=True))
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, loader(shuffle=True))
        return trainer

    whole = script()
    with pytest.raises(SystemExit):
        script(AutoResume(tmp_path), Interrupts(16))
    resumed = script(AutoResume(tmp_path))
    assert same(weights(resumed), weights(whole))
    assert (tmp_path / "fit2" / ".auto_resume" / "status.json").exists()


@pytest.mark.filterwarnings("ignore:.*was called without a model", "ignore:Checkpoint directory")
@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available")
def test_what_the_second_fit_wrote_is_not_taken_by_the_first(tmp_path):
    def script(folder, *callbacks):
        guard = AutoResume(folder / "runs")
        fit(guard, enable_checkpointing=True, epochs=1)
        files = [ModelCheckpoint(folder / "files", every_n_train_steps=1), OnExceptionCheckpoint(folder)]
        return fit(guard, *files, *callbacks, enable_checkpointing=True)

    whole = script(tmp_path / "whole")
    with pytest.raises(RuntimeError, match="gone"):
        script(tmp_path / "killed", Crashes())
    assert same(weights(script(tmp_path / "killed")), weights(whole))


def test_a_fit_from_the_checkpoint_of_the_one_before(tmp_path):
    def script(folder, *callbacks):
        guard = AutoResume(folder / "runs")
        fit(guard).save_checkpoint(folder / "first.ckpt")
        return fit(guard, *callbacks, epochs=3, ckpt_path=folder / "first.ckpt")

    whole = script(tmp_path / "whole")
    with pytest.raises(SystemExit):
        script(tmp_path / "killed", Interrupts(3))
    assert same(weights(script(tmp_path / "killed")), weights(whole))


class Apart(AutoResume):
    """Has a directory of its own in each process, as on nodes without a shared file system."""

    @property
    def dirpath(self):
        return self.base / str(os.getpid())

    @dirpath.setter
    def dirpath(self, base):
        self.base = base


def test_ranks_without_a_shared_directory_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(run_files, "_SECONDS_TO_APPEAR", 0.0)
    with pytest.raises(Exception, match=r"(?s)rank 0 writes to .*which rank 1 at .* cannot see.*all nodes share"):
        fit(Apart(tmp_path), strategy="ddp_fork", devices=2)


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter`")
def test_refusals(tmp_path):
    class Fetches(Net):
        def training_step(self, dataloader_iter):
            """Never comes."""

    with pytest.raises(MisconfigurationException, match=r"dataloader_iter.*fetches batches by itself"):
        fit(AutoResume(tmp_path), module=Fetches)


@pytest.mark.parametrize("choice", ["warn", "raise"])
def test_a_disk_that_is_full_in_the_middle(tmp_path, choice):
    """Files are limited to a size that no checkpoint has: the old one stays."""

    class Fills(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 6:
                resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    guard = AutoResume(tmp_path, every_n_train_steps=5, every_n_epochs=None, on_failed_save=choice, asynchronous=False)
    try:
        if choice == "raise":
            with pytest.raises(OSError, match=r"step 10 could not be saved .*File too large.*The previous checkpoint"):
                fit(guard, Fills())
        else:
            with pytest.warns(UserWarning, match=r"could not be saved .*File too large.*Training continues"):
                assert fit(guard, Fills()).global_step == 20
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (kept,) = CheckpointFolder(tmp_path).manifests()
    assert (kept.step, [path.name for path in tmp_path.glob(".auto_resume/*5")]) == (5, [kept.file])
    assert not list(tmp_path.glob(".auto_resume/writing*")), "what was written of it takes no space"
    assert same(weights(fit(AutoResume(tmp_path))), weights(fit()))


def test_slurm_keeps_its_requeue_signal(tmp_path, monkeypatch):
    for name in ("NTASKS", "JOB_NAME", "JOB_ID", "STEP_ID", "PROCID", "LOCALID", "NODEID"):
        monkeypatch.setenv(f"SLURM_{name}", {"NTASKS": "1", "JOB_ID": "1", "JOB_NAME": "train"}.get(name, "0"))
    heeded = []

    class Asks(Callback):
        def on_train_batch_end(self, trainer, *args):
            heeded.append({name: repr(signal.getsignal(getattr(signal, name))) for name in ("SIGUSR1", "SIGTERM")})

    for requeues in (True, False):
        fit(AutoResume(tmp_path / str(requeues)), Asks(), plugins=[SLURMEnvironment(auto_requeue=requeues)], epochs=1)
        ours = {name: "StopRequest" in handler for name, handler in heeded[-1].items()}
        assert ours == {"SIGUSR1": not requeues, "SIGTERM": True}


@pytest.mark.parametrize(("workers", "saved"), [(1, [20, 4]), (2, [20]), (None, [20])])
def test_a_run_is_saved_when_ray_is_about_to_lose_a_node(tmp_path, monkeypatch, workers, saved):
    """What Ray Train answers is made up here; `make ray` asks it. It trains in a thread, where no signal comes."""

    class RayTrain:
        get_preemption_info = iter([None] * 3 + ["a node"] * 40).__next__

        @staticmethod
        def get_context():
            if workers is None:
                raise RuntimeError("`get_context` cannot be used outside of a Ray Train training function.")
            return SimpleNamespace(get_world_size=lambda: workers)

    monkeypatch.setitem(sys.modules, "ray.train", RayTrain)
    monkeypatch.setattr(signals, "_SECONDS_BETWEEN_QUESTIONS", 0.0)
    unheard = pytest.warns(UserWarning, match="a signal ends this fit without a save: call trainer.fit in the main thr")
    with nullcontext() if workers == 1 else unheard, ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: fit(AutoResume(tmp_path, every_n_epochs=None))).result()
    assert [one.step for one in CheckpointFolder(tmp_path).manifests()] == saved


def test_cadence(tmp_path):
    fit(AutoResume(tmp_path / "a", every_n_train_steps=4, every_n_epochs=None, keep_last=10))
    found = [(one.step, one.finished) for one in CheckpointFolder(tmp_path / "a").manifests()]
    assert found == [(20, True), (20, False), (16, False), (12, False), (8, False), (4, False)]
    fit(AutoResume(tmp_path / "b", train_time_interval={"microseconds": 1}, every_n_epochs=None))
    assert [one.step for one in CheckpointFolder(tmp_path / "b").manifests()] == [20, 20]
    fit(AutoResume(tmp_path / "c", every_n_epochs=2, keep_last=9), epochs=5)
    assert [one.epoch for one in CheckpointFolder(tmp_path / "c").manifests()] == [5, 4, 2]


@cases("steps, wanted", (None, [3, 6, 9, 12, 15, 18, 20]), (5, [3, 5, 8, 10, 13, 15, 18, 20, 20]))
def test_time_counts_from_the_last_save_whatever_asked_for_it(tmp_path, monkeypatch, steps, wanted):
    seconds = [0.0]

    class Takes(Callback):
        def on_train_batch_end(self, *args):
            seconds[0] += 1

    clock = SimpleNamespace(monotonic=lambda: seconds[0])
    monkeypatch.setattr("lightning_tricks.auto_resume.checkpoint_writer.time", clock)
    often = {"train_time_interval": {"seconds": 3}, "every_n_train_steps": steps, "every_n_epochs": None}
    fit(AutoResume(tmp_path, **often, keep_last=20), Takes())
    assert [one.step for one in reversed(CheckpointFolder(tmp_path).manifests())] == wanted


def test_cadence_where_a_batch_has_several_steps(tmp_path):
    """No multiple of the interval is missed, though the steps of several optimizers jump over it."""
    module = Net(optimization="manual")  # two optimizers
    options = {"every_n_train_steps": 3, "every_n_epochs": None, "keep_last": 20}
    Trainer(callbacks=[AutoResume(tmp_path, **options)], max_epochs=1, **QUIET).fit(module, loader())
    saved = [one.step for one in CheckpointFolder(tmp_path).manifests() if not one.finished]
    assert saved == [18, 16, 12, 10, 6, 4]


class Means(Net):
    """Learns without an optimizer of Lightning's, as k-means and optimizers that step in hooks of gradients do."""

    def __init__(self, returned, automatic, stop_at=-1):
        super().__init__(dropout=0.2)
        self.automatic_optimization, self.returned = automatic, returned
        self._stop_at = stop_at  # which is not compared
        self.register_buffer("means", torch.zeros(10))

    def training_step(self, batch, batch_idx):
        self.means += self.net(batch[0]).detach().mean(0)
        if self.trainer.current_epoch == 1 and batch_idx == self._stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx) if self.automatic_optimization else None

    def configure_optimizers(self):
        return self.returned


@pytest.mark.filterwarnings("ignore:.*fit will run with no optimizer")
@pytest.mark.parametrize(("returned", "automatic"), [(None, False), ([], False), (None, True)])
def test_a_fit_without_optimizers(tmp_path, returned, automatic):
    def run(stop_at, *callbacks):
        return fit(*callbacks, module=lambda: Means(returned, automatic, stop_at))

    whole = weights(run(-1))
    options = {"train_time_interval": {"microseconds": 1}, "every_n_epochs": None, "ignore": ["module._stop_at"]}
    for stop_at in (3, 9):
        folder = tmp_path / str(stop_at)
        with pytest.raises(SystemExit) as left:
            run(stop_at, AutoResume(folder, **options))
        assert left.value.code == STOPPED
        assert CheckpointFolder(folder).manifests()[0].batches == stop_at + 1
        assert same(weights(run(-1, AutoResume(folder, **options))), whole)


@pytest.mark.filterwarnings("ignore:.*fit will run with no optimizer")
def test_steps_that_nobody_counts_are_told(tmp_path):
    words = "every_n_train_steps=2 saved nothing in the first epoch, as Lightning counted"
    with pytest.warns(UserWarning, match=words):
        fit(AutoResume(tmp_path, every_n_train_steps=2), module=lambda: Means(None, False), epochs=3)


def test_commands(tmp_path, capsys):
    stop(AutoResume(tmp_path, every_n_train_steps=5))
    assert cli.main(["resume", "status", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"stopped, epoch 1 of 2, step 13, process \d+ on .*ago", said)
    assert re.search(r"-epoch=1-step=13: step 13, batch 3 of epoch 1, .* KiB, \d+ s ago", said)
    assert cli.main(["resume", "verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count(": complete") == 2
    os.truncate(next(Path(tmp_path).glob(".auto_resume/*13/meta.pt")), 10)
    assert cli.main(["resume", "verify", str(tmp_path)]) == 1
    assert "meta.pt has other bytes than were written" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["resume", "status", str(tmp_path / "nothing")])
    assert "contains no checkpoints of AutoResume. Give the dirpath of a run." in capsys.readouterr().err


def test_status_of_a_run_that_was_killed(tmp_path, capsys):
    folder = CheckpointFolder(tmp_path)
    pid = os.fork()
    if pid == 0:
        folder.write_status(state="running", epoch=1, step=2, max_epochs=3, max_steps=-1)
        os._exit(0)
    os.waitpid(pid, 0)
    assert cli.main(["resume", "status", str(tmp_path)]) == 0
    assert "killed, epoch 1 of 3, step 2" in capsys.readouterr().out
    folder.save({}, epoch=2, step=30, batches=1, finished=False)
    assert cli.main(["resume", "status", str(tmp_path), "--json"]) == 0
    (read,) = json.loads(capsys.readouterr().out)
    assert (read["epoch"], read["step"], read["checkpoints"][0]["step"]) == (2, 30, 30), "it was written later"


def test_a_fast_dev_run_is_left_alone(tmp_path, lightning_log):
    fit(AutoResume(tmp_path / "runs"), fast_dev_run=True)
    assert not (tmp_path / "runs").exists()
    assert any("a fast_dev_run is neither saved nor resumed" in line for _, line in lightning_log)


class _KeepsArguments(Net):
    """As modules of libraries do, which make their Trainer themselves."""

    def __init__(self, callbacks, more):
        super().__init__()
        self.save_hyperparameters("callbacks")
        self.arguments = {"callbacks": callbacks, **more}
        self.seen = []

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(batch_idx)


class _Looks(Callback):
    pass


def test_callbacks_in_what_a_module_keeps_are_not_entered_and_not_compared(tmp_path):
    def fit(max_steps, *others):
        callbacks = [AutoResume(tmp_path, every_n_train_steps=1), GradientClipping(1.0), *others]
        module = _KeepsArguments(callbacks, {"max_steps": max_steps})
        trainer = Trainer(max_steps=max_steps, callbacks=callbacks, **QUIET)
        trainer.fit(module, loader())
        return module.seen

    fit(2)
    assert len(fit(3, _Looks())) == 3, "not restored"


@pytest.mark.parametrize(("started_by", "warns"), [("srun", False), ("a script", True), ("nobody", False)])
def test_a_job_that_signals_of_slurm_miss_is_told_so(tmp_path, monkeypatch, recwarn, started_by, warns):
    """Slurm sends signals to what srun has started, and to nothing else."""
    if started_by != "nobody":
        monkeypatch.setenv("SLURM_JOB_ID", "1")
    if started_by == "srun":
        monkeypatch.setenv("SLURM_STEP_ID", "0")
    Trainer(**QUIET, max_steps=1, callbacks=[AutoResume(tmp_path)]).fit(Net(), loader())
    said = [str(warning.message) for warning in recwarn if "this job runs without srun" in str(warning.message)]
    assert len(said) == warns
