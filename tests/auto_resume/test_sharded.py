"""Runs whose model is sharded over ranks, by FSDP2 and in two dimensions: killed, resumed, evaluated, damaged."""

import io
import os
import pickle
import random
import signal
import warnings
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from packaging.version import Version
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import DTensor

from lightning_tricks import AutoResume, LoRA, TrainableCheckpoint, seed_everything
from lightning_tricks._shared.shards import _MetadataUnpickler
from lightning_tricks.auto_resume import CheckpointFolder
from lightning_tricks.auto_resume.core import signals
from tests.auto_resume.killing import STOPPED, differences, kill_at, resumed_at, run
from tests.auto_resume.training import ON_FILES
from tests.small import QUIET, EvaluatedNet, cases, fork, loader

pytestmark = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.7"), reason="FSDP2 of torch 2.6 needs an accelerator"
)
FSDP2 = {"ranks": 2, "strategy": "fsdp2", "samples": 28, "epochs": 2, "val_loaders": 1, "sanity": 0}
TENSOR = {**FSDP2, "ranks": 4, "strategy": "fsdp2 tensor"}


def chance_kill(options, seed):
    """A kill while files are written, of any rank; rank zero writes more of them."""
    chance = random.Random(seed)
    rank = chance.randrange(options["ranks"])
    return [ON_FILES, chance.randrange(1, 12) if rank else chance.randrange(20, 120), "SIGKILL", rank]


CASES = {
    "a rank": (FSDP2, kill_at("in the middle of an epoch", "SIGKILL", FSDP2, 1)),
    "all ranks, in two dimensions": (TENSOR, kill_at("just after validation", "SIGKILL", TENSOR, "group")),
    "a signal, in two dimensions": (TENSOR, kill_at("in the middle of an epoch", "SIGTERM", TENSOR, 2)),
    "fp16 with accumulation": (
        {**FSDP2, "precision": "16-mixed", "accumulate": 2},
        kill_at("in mid-accumulation", "SIGKILL", FSDP2, 0),
    ),
    "a net on the meta device": (
        {**FSDP2, "strategy": "fsdp2 meta"},
        kill_at("at an epoch's end", "SIGKILL", FSDP2, 1),
    ),
    "manual optimization": (
        {**FSDP2, "optimization": "manual"},
        kill_at("in the middle of an epoch", "SIGKILL", FSDP2),
    ),
    "in a save, in two dimensions": (TENSOR, chance_kill(TENSOR, 2)),  # the seventh, so that it is no rest of a sample
    **{f"in a save, {seed}": (FSDP2, chance_kill(FSDP2, seed)) for seed in range(4)},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(3)
def test_killed_and_resumed_is_as_undisturbed(tmp_path, case):
    """Each rank has its shards again, bit for bit, and its own buffers and random numbers."""
    options, kill = CASES[case]
    assert run(tmp_path / "whole", {**options, "guarded": False}) == 0, (tmp_path / "whole/output.txt").read_text()
    status = run(tmp_path / "killed", {**options, "kill": kill})
    assert status == (STOPPED if kill[2] == "SIGTERM" else -9 if kill[3] == "group" else 256 - 9)
    assert run(tmp_path / "killed", options) == 0, (tmp_path / "killed/output.txt").read_text()[-3000:]
    assert differences(tmp_path / "killed", tmp_path / "whole") == []
    assert kill[0] == ON_FILES or resumed_at(tmp_path / "killed")[0] > 0
    assert "AutoResume: " not in _warnings(tmp_path / "killed/output.txt")
    folder = CheckpointFolder(tmp_path / "killed/resume")
    assert {path.name for path in folder.private.iterdir() if path.is_dir()} == {one.file for one in folder.manifests()}


def _warnings(file: Path) -> str:
    said = (line for line in file.read_text().splitlines() if line.startswith("AutoResume: "))
    return "\n".join(line for line in said if "resumes at" not in line and "stopped by" not in line)


class Averaged(EvaluatedNet):
    """A net with averages of its weights that it keeps by itself."""

    averages = None

    def on_train_start(self):
        self.averages = {name: value.detach().clone() for name, value in self.named_parameters()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for name, value in self.named_parameters():
            self.averages[name].lerp_(value.detach(), 0.1)


def trainer(*callbacks, ranks=2, **options):
    strategy = ModelParallelStrategy(ranks, 1) if ranks else "auto"
    return Trainer(callbacks=list(callbacks), strategy=strategy, devices=ranks or 1, **QUIET, **options)


def whole_weights(module):
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in module.state_dict().items()
    }


class Stops(Callback):
    """Asks the run to stop at a step."""

    training_arguments = ()  # it is there once

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step and trainer.is_global_zero:
            os.kill(os.getpid(), signal.SIGTERM)


def fit(folder, stop=0, ranks=2, callbacks=(), note=None, **options):
    """Fit in forks until a step, or to the end; there each rank saves what `note` returns of the module."""

    def work(rank):
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_: print(message, file=(folder / "said.txt").open("a"))
        signals._SECONDS_BETWEEN_EXCHANGES = 0.0  # in this fork: ranks agree at once
        seed_everything(3, verbose=False)
        module, others = Averaged(), [*callbacks, *([Stops(stop)] if stop else [])]
        fitting = trainer(AutoResume(folder / "runs", **options), *others, ranks=ranks, max_epochs=2)
        fitting.fit(module, loader(shuffle=True), loader())
        torch.save(note(module) if note else None, folder / f"note.{rank}.pt")

    if stop:
        with pytest.raises(SystemExit):
            fork(work, ranks)
        return []
    fork(work, ranks)
    return [torch.load(folder / f"note.{rank}.pt", weights_only=False) for rank in range(ranks)]


def test_attributes_that_hold_shards_are_restored(tmp_path):
    """As in averages of the weights that are kept by hand."""

    def averages(module):
        return {name: value.to_local() for name, value in module.averages.items()}

    (tmp_path / "whole").mkdir()
    wanted = fit(tmp_path / "whole", note=averages)
    fit(tmp_path, 8)
    found = fit(tmp_path, note=averages)
    assert len(found) == len(wanted) == 2
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_lightning_evaluates_the_checkpoint(tmp_path):
    """It is a folder as Lightning's own strategy writes it."""
    saved = fit(tmp_path, note=whole_weights)
    newest = max((tmp_path / "runs").glob(".auto_resume/0*"))

    def work(rank):
        warnings.simplefilter("always")
        module = Averaged()
        trainer().test(module, loader(), ckpt_path=newest, verbose=False)
        torch.save(whole_weights(module), tmp_path / f"tested.{rank}.pt")

    fork(work, 2)
    tested = torch.load(tmp_path / "tested.0.pt", weights_only=False)
    assert all(torch.equal(tested[name], value) for name, value in saved[0].items())


def test_another_strategy(tmp_path):
    """A run of shards goes on without them; one that was whole does not go on with shards, and the error says so."""
    sharded = fit(tmp_path, note=whole_weights)
    seed_everything(3, verbose=False)
    module = Averaged()
    with pytest.warns(UserWarning, match="the run had 2 ranks and resumes with 1"):
        trainer(AutoResume(tmp_path / "runs"), ranks=0, max_epochs=2).fit(module, loader(shuffle=True), loader())
    assert all(torch.equal(sharded[0][name], value) for name, value in module.state_dict().items())
    trainer(AutoResume(tmp_path / "whole"), ranks=0, max_epochs=1).fit(Averaged(), loader(shuffle=True), loader())

    def goes_on(rank):
        words = "was saved without shards, and ModelParallelStrategy restores shards"
        with pytest.raises(MisconfigurationException, match=words):
            trainer(AutoResume(tmp_path / "whole"), ranks=1, max_epochs=2).fit(
                Averaged(), loader(shuffle=True), loader()
            )

    fork(goes_on, 1)


@cases("file, harm", ("__1_0.distcp", "a bit"), (".metadata", "a bit"), ("meta.pt", "a bit"), (".metadata", "a pipe"))
def test_a_set_with_a_damaged_file_is_set_aside(tmp_path, file, harm):
    """All of it, and the one before is used."""
    fit(tmp_path, 4, every_n_train_steps=2)
    folder = CheckpointFolder(tmp_path / "runs")
    newest = folder.manifests()[0]
    path = folder.path_of(newest) / file
    if harm == "a pipe":  # whoever opens it waits for ever
        path.unlink()
        os.mkfifo(path)
    else:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    assert folder.find_problem(newest)
    fit(tmp_path)
    said = (tmp_path / "said.txt").read_text()
    assert f"{path} is a pipe" in said if harm == "a pipe" else f"{file} has other bytes than were written" in said
    assert (folder.private / f"{newest.file}.corrupt").is_dir()


def test_a_rank_that_cannot_write_costs_one_save(tmp_path, monkeypatch):
    """Every rank learns of it, training goes on, and the next save is whole."""
    from torch.distributed.checkpoint import FileSystemWriter

    write, failed = FileSystemWriter.write_data, []

    def write_data(self, *args, **kwargs):
        if os.environ["LOCAL_RANK"] == "1" and not failed:
            failed.append(1)
            raise OSError(28, "No space left on device")
        return write(self, *args, **kwargs)

    monkeypatch.setattr(FileSystemWriter, "write_data", write_data)
    fit(tmp_path, every_n_train_steps=5, every_n_epochs=None)
    said = (tmp_path / "said.txt").read_text()
    assert "step 5 could not be saved" in said
    assert "rank 1: [Errno 28] No space left on device" in said
    assert [manifest.step for manifest in CheckpointFolder(tmp_path / "runs").manifests()] == [10, 10]


def test_lora_is_resumed_and_what_it_leaves_frozen_is_not_saved(tmp_path):
    """Its layers are added before the model is sharded."""
    lora = {"callbacks": [LoRA(2, target_modules=["net.0"]), TrainableCheckpoint()]}
    (tmp_path / "whole").mkdir()
    wanted = fit(tmp_path / "whole", note=whole_weights, **lora)
    fit(tmp_path, 4, **lora)
    saved = CheckpointFolder(tmp_path / "runs").manifests()[0]
    stored = FileSystemReader(CheckpointFolder(tmp_path / "runs").path_of(saved)).read_metadata().state_dict_metadata
    found = fit(tmp_path, note=whole_weights, **lora)
    assert any("lora" in name for name in found[0])
    assert all(torch.equal(found[0][name], value) for name, value in wanted[0].items())
    left_out = {name for name in found[0] if f"state_dict.{name}" not in stored}
    assert any("net.0" in name for name in left_out)
    assert not any("lora" in name and not name.endswith(".scale") for name in left_out)


def test_metadata_are_read_without_running_their_code(tmp_path):
    """A pickle that would call something is an error."""

    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "called"),)

    for module, name in (("torch.distributed.checkpoint.filesystem", "FileSystemWriter"), ("torch", "load")):
        with pytest.raises(pickle.UnpicklingError, match="which is not allowed there"):
            _MetadataUnpickler(io.BytesIO()).find_class(module, name)
    file = tmp_path / ".metadata"
    file.write_bytes(pickle.dumps(Hostile()))
    with file.open("rb") as stream, pytest.raises(pickle.UnpicklingError, match="mkdir"):
        _MetadataUnpickler(stream).load()
    assert not (tmp_path / "called").exists()
