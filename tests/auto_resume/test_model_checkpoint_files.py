"""The checkpoints that others write in a run: after kills they are those of the run that was never stopped."""

import os
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from packaging.version import Version

from lightning_tricks import AutoResume, seed_everything
from lightning_tricks.auto_resume import CheckpointFolder
from lightning_tricks.auto_resume.model_checkpoint_files import ORIGIN_KEY, ModelCheckpointFiles, Origin, read_origin
from tests.auto_resume.killing import run
from tests.small import QUIET, Net, cases, loader

pytestmark = [
    pytest.mark.oldest,
    pytest.mark.filterwarnings("ignore:Checkpoint directory", "ignore:.*was called without a model"),
    pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available"),
]
EVERY = 4  # steps between two saves; an epoch has 6


class Scores(Net):
    """Logs scores of which some are better than those before, and some are equal."""

    def training_step(self, batch, batch_idx):
        outputs = super().training_step(batch, batch_idx)
        self.log("loss", outputs["loss"])
        return outputs

    def validation_step(self, batch, batch_idx):
        self.log("score", float((self.trainer.global_step * 7) % 5))


class Ends(Callback):
    """Ends the process, as far as a test may, where `at` says; it sees that what the state names is there."""

    at = ()

    def on_train_start(self, trainer, pl_module):
        for callback in trainer.checkpoint_callbacks if Ends.at != ("gone",) else ():
            named = [*getattr(callback, "best_k_models", ()), getattr(callback, "best_model_path", "")]
            assert all(map(os.path.exists, filter(None, named))), named

    def on_train_batch_end(self, trainer, *_):
        if Ends.at == ("step", trainer.global_step):
            raise RuntimeError("gone")

    def on_validation_end(self, trainer, *_):
        if Ends.at[:1] == ("validation",) and trainer.global_step >= Ends.at[1]:
            raise RuntimeError("gone")


def script(folder, arguments, *others, at=(), guarded=True, dirpath="files{}", **options):
    """Train; return what the ModelCheckpoints remember."""
    seed_everything(1, verbose=False)
    Ends.at = at
    files = [ModelCheckpoint(folder / dirpath.format(number), **of) for number, of in enumerate(arguments)]
    guards = [AutoResume(folder / "runs", every_n_train_steps=EVERY, **options)] * guarded
    limits = {"max_epochs": 3, "limit_train_batches": 6, "limit_val_batches": 1, "enable_checkpointing": True}
    trainer = Trainer(callbacks=[*files, *guards, *others, Ends()], **{**QUIET, **limits})
    with pytest.raises(RuntimeError, match="gone") if at and at != ("gone",) else nullcontext():
        trainer.fit(Scores(), loader(shuffle=True), loader())
    left_out = ("_last_time_checked", "_fs")  # a time, and what does not compare
    return [
        {name: repr(value).replace(str(folder), "") for name, value in vars(one).items() if name not in left_out}
        for one in files
    ]


def contents(folder):
    """What each checkpoint holds: the step and the weights, or where a link points to."""
    found = {}
    for path in sorted(folder.glob("files*/*")):
        name = f"{path.parent.name[-1]} {path.name}"  # after the number of the callback
        if path.is_symlink():
            found[name] = str(path.readlink())
        else:
            saved = torch.load(path, weights_only=True)
            found[name] = saved["global_step"], [value.tolist() for value in saved["state_dict"].values()]
    return found


KINDS = {
    "best": [{"monitor": "score"}],
    "three best": [{"monitor": "score", "save_top_k": 3, "every_n_train_steps": 2}],
    "names that come again": [{"save_top_k": -1, "every_n_train_steps": 2, "filename": "{epoch}"}],
    "names of scores": [{"monitor": "score", "save_top_k": -1, "filename": "{score:.0f}"}],
    "last alone": [{"save_top_k": 0, "save_last": True, "every_n_train_steps": 1}],
    "one name, and weights": [
        {"monitor": "score", "filename": "best", "save_last": True},
        {"every_n_train_steps": 2, "save_weights_only": True, "save_top_k": -1},
    ],
    "links": [
        {"monitor": "loss", "save_top_k": 2, "save_last": "link", "every_n_train_steps": 2},
        {"save_top_k": -1, "save_last": "link", "every_n_train_steps": 2},
    ],
}
ENDS = [("step", 3)], [("step", 7)], [("validation", 5), ("step", 9)], [("step", 15), ("validation", 18)]


@pytest.mark.filterwarnings("ignore:.*could not find the monitored key")  # of a Lightning before 2.6
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_files_and_state_are_those_of_the_undisturbed_run(tmp_path, kind, asynchronous):
    whole = script(tmp_path / "whole", KINDS[kind], guarded=False)
    for number, ends in enumerate(ENDS[2 * asynchronous :]):
        folder = tmp_path / str(number)
        for end in ends:
            script(folder, KINDS[kind], at=end, asynchronous=asynchronous)
        assert script(folder, KINDS[kind], asynchronous=asynchronous) == whole, ends
        assert contents(folder) == contents(tmp_path / "whole"), ends


@pytest.mark.trap("mc_name_collision: a file of that name may be another's")
def test_files_of_others_are_kept(tmp_path):
    """Whatever they are: the checkpoint of another run, a file that is none, a pipe."""
    kind = [{"every_n_train_steps": 1, "save_top_k": -1, "filename": "{step}"}]
    script(tmp_path, kind, at=("step", 11))  # and it resumes after step 8
    files = tmp_path / "files0"
    other = torch.load(files / "step=9.ckpt", weights_only=True)
    other[ORIGIN_KEY]["run"] = "another"
    torch.save(other, files / "step=9.ckpt")
    (files / "step=10.ckpt").write_text("another's")
    os.mkfifo(files / "step=13.ckpt")
    script(tmp_path, kind)
    assert read_origin(files / "step=9.ckpt").run == "another"
    assert (files / "step=10.ckpt").read_text() == "another's"
    assert (files / "step=13.ckpt").is_fifo()
    assert {path.name for path in files.glob("*-v*")} == {f"step={step}-v1.ckpt" for step in (9, 10, 13)}
    assert len(list(files.iterdir())) == 18 + 3, "all others are written once"


class Object:
    """One that a checkpoint may hold among the hyper-parameters."""

    def __setstate__(self, state):
        pytest.fail("code of the file was run")


@pytest.mark.parametrize("entry", [{}, 7, ["run"], {"run": "a"}, {"run": "a", "save": "9"}, {"run": "a", "x": 1}])
def test_an_entry_that_is_none(tmp_path, entry):
    """What another program wrote under that name says nothing."""
    torch.save({ORIGIN_KEY: entry}, tmp_path / "a.ckpt")
    assert read_origin(tmp_path / "a.ckpt") in (Origin(), Origin("a"))


def test_an_origin_is_read_without_running_code(tmp_path):
    """Beside objects, as hyper-parameters may be; of a folder of shards; and of what cannot be read."""
    origin, thing = Origin("id", "start", 1, 3), Object()
    thing.value = 1
    torch.save({ORIGIN_KEY: vars(origin), "hyper_parameters": {"x": thing}}, tmp_path / "a.ckpt")
    (tmp_path / "shards").mkdir()
    torch.save({ORIGIN_KEY: vars(origin)}, tmp_path / "shards" / "meta.pt")
    torch.save([1], tmp_path / "list")
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")
    assert read_origin(tmp_path / "a.ckpt") == read_origin(tmp_path / "shards") == origin
    for name in ("list", "empty", "pipe", "missing", "s3://bucket/a.ckpt"):
        assert read_origin(f"{tmp_path}/{name}" if "://" not in name else name) is None, name


@cases(
    "origin, absent",
    (Origin("run", "before", 2, 3), True),  # after the save that is resumed
    (Origin("run", "before", 2, 4), True),  # after one that was damaged since
    (Origin("run", "before", 3, 0), True),  # in a later fit
    (Origin("run", "killed before its first save", 2, 2), True),
    (Origin("run", "before", 2, 2), False),
    (Origin("run", "before", 1, 9), False),  # in the fit before
    (Origin("run", "now", 2, 3), False),  # Lightning's own -v1
    (Origin("another", "before", 2, 3), False),
    (Origin(), False),
)
def test_what_is_written_again(tmp_path, origin, absent):
    trainer, path = Trainer(**QUIET), tmp_path / "a.ckpt"
    torch.save({ORIGIN_KEY: vars(origin)}, path)
    files = ModelCheckpointFiles(trainer, Origin("run", "now", 2, 3), lambda: None)
    files.continued = {"before": 3}
    assert files.counts_as_absent(path) == absent


def test_removals_are_put_off_until_the_next_save(tmp_path):
    """Of what was there at the last one; a name that comes again meanwhile is free, and what it names then stays."""
    callback = ModelCheckpoint(tmp_path)
    trainer = Trainer(callbacks=[callback], **{**QUIET, "enable_checkpointing": True})
    strategy, files = trainer.strategy, ModelCheckpointFiles(trainer, Origin("run", "now", 1, 3), lambda: None)
    old, again, new, link = (tmp_path / name for name in ("old.ckpt", "again.ckpt", "new.ckpt", "last.ckpt"))
    old.touch()
    again.touch()
    link.symlink_to("old.ckpt")
    staged = [tmp_path / f".{name}.{'0' * 16}.partial" for name in ("new.ckpt", "else.ckpt")]
    for path in staged:
        path.touch()
    with files.observed():
        strategy.save_checkpoint({}, new)
        assert [path.exists() for path in staged] == [False, True], "what a killed process left"
        for path in (old, again, new, link):
            strategy.remove_checkpoint(path)
        assert [os.path.lexists(path) for path in (old, again, new, link)] == [True, True, False, False]
        assert not callback.file_exists(old, trainer)
        strategy.save_checkpoint({}, again)
        assert callback.file_exists(again, trainer)
        strategy.save_checkpoint({}, new)
        files.on_save(4)
        assert [path.exists() for path in (old, again, new)] == [False, True, True]
        strategy.remove_checkpoint(new)
        assert new.exists(), "the save is over after which it was made"
    assert read_origin(again) == Origin("run", "now", 1, 3)


@pytest.mark.parametrize("removes", [False, True])
def test_what_is_written_or_removed_during_a_save_belongs_to_the_next_interval(tmp_path, monkeypatch, removes):
    """The state of a save that is being written does not know of it."""
    go_on, save, path = threading.Event(), CheckpointFolder.save, tmp_path / "a.ckpt"

    def slow_save(folder, checkpoint, **known):
        assert go_on.wait(20)
        return save(folder, checkpoint, **known)

    class Acts(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == EVERY + 1:
                threading.Timer(0.2, go_on.set).start()
            if trainer.global_step == EVERY + 1 and removes:
                trainer.strategy.remove_checkpoint(path)
                assert path.exists()
            elif trainer.global_step == (2 if removes else EVERY + 1):
                trainer.save_checkpoint(path, weights_only=True)

    monkeypatch.setattr(CheckpointFolder, "save", slow_save)
    script(tmp_path, [], Acts(), asynchronous=True)
    assert not path.exists() if removes else read_origin(path).save == 1


def test_what_others_write_after_the_fit_and_for_an_exception_names_the_run(tmp_path):
    script(tmp_path, [], OnExceptionCheckpoint(tmp_path), at=("step", 7))
    first = read_origin(tmp_path / "on_exception.ckpt")
    assert (len(first.run), first.fit, first.save) == (32, 1, 2)
    guard = AutoResume(tmp_path / "more", every_n_train_steps=EVERY)
    trainer = Trainer(max_epochs=1, callbacks=[guard], **QUIET)
    seed_everything(1, verbose=False)
    trainer.fit(Net(), loader(shuffle=True))
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert len(read_origin(tmp_path / "after.ckpt").run) == 32


@pytest.mark.trap("dated_checkpoint_folder: Lightning drops its state, and another model is tested")
def test_a_folder_with_the_date_in_its_name(tmp_path):
    kind = [{"monitor": "score", "mode": "max", "save_top_k": 2, "filename": "{epoch}"}]
    (whole,) = script(tmp_path / "whole", kind, guarded=False, dirpath="files-1{}")
    script(tmp_path / "a", kind, at=("step", 15), dirpath="files-1{}")
    words = "Give ModelCheckpoint a fixed dirpath to keep all of them in one folder"
    with pytest.warns(UserWarning, match=words) as said:
        (again,) = script(tmp_path / "a", kind, dirpath="files-2{}")
    assert not [
        str(one.message) for one in said if "not restored" in str(one.message) or "has changed" in str(one.message)
    ]
    for name in ("best_model_score", "kth_value", "current_score"):
        assert again[name] == whole[name]
    best = {Path(value["best_model_path"].strip("'")).name for value in (whole, again)}
    assert len(best) == 1
    assert contents(tmp_path / "a").items() >= contents(tmp_path / "whole").items()


def test_a_best_checkpoint_that_is_gone_is_named(tmp_path):
    script(tmp_path, [{"monitor": "score"}], at=("validation", 12))
    for path in (tmp_path / "files0").iterdir():
        path.unlink()
    with pytest.warns(UserWarning, match=r"the best checkpoint .* is gone: ckpt_path='best' fails"):
        script(tmp_path, [{"monitor": "score"}], at=("gone",))


@pytest.mark.skipif(Version(torch.__version__) < Version("2.7"), reason="FSDP2 of torch 2.6 needs an accelerator")
def test_folders_of_shards_are_told_apart(tmp_path):
    """Also one that a kill left incomplete."""
    options = {"ranks": 2, "strategy": "fsdp2", "samples": 28, "epochs": 1, "val_loaders": 1, "sanity": 0}
    options |= {"resume": {"every_n_train_steps": 3}}
    options |= {"checkpointing": [{"dirpath": "mine", "save_top_k": -1, "every_n_train_steps": 1}]}
    assert run(tmp_path, {**options, "kill": ["files", 3, "SIGKILL", 1]}) != 0
    (tmp_path / "mine" / "epoch=0-step=5.ckpt").mkdir(exist_ok=True)
    assert run(tmp_path, options) == 0, (tmp_path / "output.txt").read_text()[-3000:]
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == [
        f"epoch=0-step={n}.ckpt" for n in range(1, 8)
    ]
