"""How often files are read and flushed: a save reads nothing back, a resume reads its checkpoint once."""

import collections
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lightning_tricks import AutoResume
from lightning_tricks.auto_resume import CheckpointFolder, save_durably
from lightning_tricks.auto_resume.core.checkpoint_contents import (
    KeptCheckpoint,
    find_objects,
    load_plain_data,
    object_pickle,
)
from lightning_tricks.checkpoint_remapping.core.errors import CheckpointError
from tests.auto_resume.test_callback import fit, stop, weights
from tests.auto_resume.test_objects import Argued
from tests.contract.processes import run_and_exit
from tests.small import Net, same

pytestmark = pytest.mark.oldest
KNOWN = {"epoch": 1, "step": 2, "batches": 3, "finished": False}


def checkpoints_read(work):
    """Return the names of the checkpoints that a function opens to read them, in a process of its own."""
    pid = os.fork()
    if pid == 0:
        names = []

        def note(event, arguments):
            reads = event == "open" and (arguments[1] or "r").startswith("r")
            if reads and str(arguments[0]).endswith("meta.pt"):
                names.append(Path(arguments[0]).parent.name)

        def child():
            sys.addaudithook(note)
            work()
            Path("names.json").write_text(json.dumps(names))

        run_and_exit(child)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return json.loads(Path("names.json").read_text())


class ChangesAtStart(Net):
    """Its hook at an epoch's start changes weights and optimizer, which a resume has to undo."""

    def __init__(self):
        super().__init__(dropout=0.2)

    def on_train_epoch_start(self):
        with torch.no_grad():
            for one in self.parameters():
                one.mul_(1.01)
        for state in self.optimizers().optimizer.state.values():
            state["exp_avg"] = state["exp_avg"] * 0.9


class HalvesInTheFile(ChangesAtStart):
    """Its hooks change what is saved, and what is read in place."""

    def on_save_checkpoint(self, checkpoint):
        checkpoint["state_dict"] = {name: value / 2 for name, value in checkpoint["state_dict"].items()}
        checkpoint["mine"] = [1, 2]

    def on_load_checkpoint(self, checkpoint):
        assert checkpoint.pop("mine").pop() == 2
        for value in checkpoint["state_dict"].values():
            value.mul_(2)


@pytest.mark.parametrize(("module", "times"), [(ChangesAtStart, 1), (Net, 1), (HalvesInTheFile, 3)])
def test_a_resume_reads_its_checkpoint_once(tmp_path, module, times):
    """Again only where a hook wrote to the memory of what was read."""
    undisturbed = weights(fit(module=module))
    assert stop(AutoResume(tmp_path / "runs"), module=module) == 75
    newest = CheckpointFolder(tmp_path / "runs").manifests()[0].file

    def resume():
        assert same(weights(fit(AutoResume(tmp_path / "runs"), module=module)), undisturbed)

    assert checkpoints_read(resume) == [newest] * times


def test_a_larger_file_is_opened_once(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_tricks.auto_resume.core.checkpoint_folder._MAX_BYTES_IN_MEMORY", 100)
    test_a_resume_reads_its_checkpoint_once(tmp_path, ChangesAtStart, 1)


@pytest.mark.parametrize(("module", "times"), [(Net, 0), (Argued, 1)])
def test_a_save_reads_nothing_back(tmp_path, module, times):
    """Objects among the hyper-parameters are looked at once."""
    guard = AutoResume(tmp_path / "runs", every_n_train_steps=1)
    assert len(set(checkpoints_read(lambda: fit(guard, module=module)))) == times


def test_each_file_is_flushed_once_before_an_older_one_is_removed(tmp_path, monkeypatch):
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("the name of an open file is known on Linux alone")
    folder, events, flush, rename = CheckpointFolder(tmp_path), [], os.fsync, os.rename
    older = folder.save({"step": 0}, **KNOWN)

    def flushed(number):
        events.append(Path(f"/proc/self/fd/{number}").readlink().name)
        flush(number)

    def renamed(path, target, **options):
        events.append(f"{Path(path).name} -> {Path(target).name}")
        rename(path, target, **options)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(os, "replace", renamed)
    newer = folder.save({"step": 1}, **KNOWN)
    folder.prune(1)
    written = ["meta.pt", "manifest.json", "writing", f"writing -> {newer.file}", ".auto_resume"]
    assert events == [*written, f"{older.file} -> removing-{older.file}"]


class Tagged(torch.Tensor):
    pass


def tagged():
    value = torch.ones(2)
    value.path = Path("here")
    return value


VALUES = {
    "numbers": [1, 2.5, None, True, "a", 2**3000],
    "nested": {"a": [(1, {"b": {2, 3}})], 4: b"bytes", "c": 1j},
    "tensors": [torch.rand(2), nn.Parameter(torch.rand(2)), torch.rand(2).requires_grad_() * 2],
    "types of numbers": [torch.ones(2, dtype=one) for one in (torch.bfloat16, torch.uint16, torch.float8_e4m3fn)],
    "ordered": collections.OrderedDict(a=torch.Size([1]), b=torch.float32, c=torch.device("cpu")),
    "metadata": nn.BatchNorm1d(2).state_dict(),
    "optimizer": torch.optim.Adam([nn.Parameter(torch.ones(2))]).state_dict(),
    "sparse": torch.eye(2).to_sparse(),
    "buffer": nn.Buffer(torch.ones(2)),
    "counter": collections.Counter("aab"),
    "defaults": collections.defaultdict(list, a=[1]),
    "frozen": frozenset({1}),
    "bytes": bytearray(b"x"),
    "number of numpy": np.float64(1),
    "text of numpy": np.str_("a"),
    "array": {"a": np.ones(2)},
    "key": {np.int64(1): 2},
    "class": [Path],
    "function": [torch.relu],
    "path": (1, [Path("here")]),
    "subclass": torch.ones(2).as_subclass(Tagged),
    "attribute of a tensor": tagged(),
    "module": nn.Linear(1, 1),
    "call": os.getcwd,
}


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
@pytest.mark.parametrize("name", VALUES)
def test_what_is_refused_is_found_in_memory(tmp_path, name):
    """In doubt the file is looked at, and never left out."""
    checkpoint = {"state_dict": {}, "mine": VALUES[name]}
    save_durably(checkpoint, tmp_path / "a.ckpt")
    try:
        found = find_objects(load_plain_data(tmp_path / "a.ckpt"))
    except CheckpointError:
        found = {("mine",): "refused"}
    in_memory = object_pickle(checkpoint)
    assert in_memory or not found
    assert bool(in_memory) == (list(VALUES).index(name) > list(VALUES).index("optimizer"))
    assert object_pickle(checkpoint) == in_memory


def test_what_is_kept_is_what_was_read():
    values = {"state_dict": collections.OrderedDict(w=torch.ones(2)), "list": [1], "hyper_parameters": {"a": Path("b")}}
    values["state_dict"]._metadata = {"": {"version": 1}}
    kept = KeptCheckpoint(values)
    for_hooks = kept.copy()
    assert list(for_hooks) == list(values)
    assert for_hooks["state_dict"]._metadata == {"": {"version": 1}}
    for_hooks["list"].append(2)
    for_hooks["state_dict"]["v"] = for_hooks["state_dict"].pop("w") + 1
    assert kept.is_intact
    assert kept.values["list"] == [1]
    assert list(kept.values["state_dict"]) == ["w"]
    kept.copy()["state_dict"]["w"].zero_()
    assert not kept.is_intact
    assert not KeptCheckpoint({"mine": {"a": Path("b")}}).is_intact
