"""Every argument that is a path, of all that is public: an address is opened as one, or refused before it does harm."""

import importlib
import inspect
import os
import pkgutil
import re
from dataclasses import fields
from pathlib import Path

import fsspec
import pytest
import torch
from lightning.pytorch import Callback, LightningModule

import lightning_tricks
from lightning_tricks import Tricks, TricksMixin, count_flops, load_weights, read_checkpoint, save_weights
from lightning_tricks._shared.checks import check_path, file_argument, is_address, path_argument
from lightning_tricks.auto_resume import CheckpointFolder, DurableCheckpointIO, save_durably, write_durably
from lightning_tricks.checkpoint_remapping import align, read_rules
from lightning_tricks.cli import main
from lightning_tricks.conformal import ConformalRegressor
from lightning_tricks.devices import GpuLockError
from lightning_tricks.devices.core.gpu_locks import FOLDER_VARIABLE, existing_lock_folder
from lightning_tricks.ensembles import VotingClassifier
from lightning_tricks.finetuning import add_lora, load_adapter, load_trainable, save_adapter
from lightning_tricks.finetuning.core.trainable_weights import base_fingerprints, leave_out_base
from lightning_tricks.hang_watch import compare_ranks
from lightning_tricks.model_report import summarize_model
from lightning_tricks.run_fingerprint import read_ranks
from lightning_tricks.run_report import read_record
from lightning_tricks.tricks import callback_of
from tests.architecture.persisted_names import command_actions, subcommands

_NAMED = re.compile("path|dir|file|folder")
_TYPED = re.compile(r"\b(Path|PathLike|Source|RulesArgument)\b")


class Net(TricksMixin, LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)


_LAYER, _LINEAR = torch.nn.Linear(2, 2), {"in_features": 2, "out_features": 2}
_WEIGHTS = _LAYER.state_dict()
_MEMBERS = VotingClassifier(torch.nn.Linear, 2, estimator_args=_LINEAR).state_dict()
_SMALL = {"state_dict": dict(_WEIGHTS)}
leave_out_base(_SMALL, _LAYER, base_fingerprints(_LAYER))

add_lora(_CHANGED := torch.nn.Sequential(torch.nn.Linear(8, 8)))

# Argument -> a call with the path of a file or folder that is on a disk
LOCAL = {
    "Alignment.save.path": align(_LAYER, _WEIGHTS).save,
    "CheckpointFolder.path": CheckpointFolder,
    "Ensemble.load_from_checkpoint.hparams_file": lambda given: VotingClassifier.load_from_checkpoint(
        "none.ckpt", hparams_file=given
    ),
    "FlopsCount.write.path": count_flops(_LAYER, torch.zeros(1, 2)).write,
    "ModelReportSummary.write.folder": summarize_model(_LAYER, graph=False).write,
    "Tricks.preset.dirpath": lambda given: Tricks.preset("regression", dirpath=given),
    "TricksMixin.load_from_checkpoint.hparams_file": lambda given: Net.load_from_checkpoint("none", hparams_file=given),
    "load_adapter.folder": lambda given: load_adapter(_LAYER, given),
    "compare_ranks.folder": compare_ranks,
    "align.rules": lambda given: align(_LAYER, _WEIGHTS, given),
    "load_weights.rules": lambda given: load_weights(_LAYER, "none.ckpt", rules=given),
    "read_ranks.path": read_ranks,
    "read_record.folder": read_record,
    "read_rules.path": read_rules,
    "save_adapter.folder": lambda given: save_adapter(_CHANGED, given),
    "save_durably.path": lambda given: save_durably({}, given),
    "save_weights.path": lambda given: save_weights(_LAYER, given),
    "write_durably.path": lambda given: write_durably(given, lambda stream: stream.write(b"")),
}
# Argument -> what a file holds, and a call with its path or its address
OPENED = {
    "ConformalPredictor.load_from_checkpoint.checkpoint_path": (
        {"state_dict": ConformalRegressor(_LAYER).state_dict(), "pytorch-lightning_version": "2.5.0"},
        lambda given: ConformalRegressor.load_from_checkpoint(given, module=_LAYER, weights_only=True),
    ),
    "DurableCheckpointIO.save_checkpoint.path": ({}, lambda given: DurableCheckpointIO().save_checkpoint({}, given)),
    "Ensemble.load_from_checkpoint.checkpoint_path": (
        {"state_dict": _MEMBERS, "hyper_parameters": {"n_estimators": 2}},
        lambda given: VotingClassifier.load_from_checkpoint(given, estimator=torch.nn.Linear, estimator_args=_LINEAR),
    ),
    "TorchensembleInterchange.from_torchensemble.model_or_path": (
        {"model": {f"estimators_.0.{name}": value for name, value in _WEIGHTS.items()}},
        lambda given: VotingClassifier.from_torchensemble(given, torch.nn.Linear, _LINEAR),
    ),
    "TricksMixin.load_from_checkpoint.checkpoint_path": (
        {"state_dict": Net().state_dict(), "pytorch-lightning_version": "2.5.0"},
        Net.load_from_checkpoint,
    ),
    "load_trainable.path": (_SMALL, lambda given: load_trainable(_LAYER, given)),
    "load_weights.path": (_WEIGHTS, lambda given: load_weights(_LAYER, given)),
    "read_checkpoint.path": (_WEIGHTS, read_checkpoint),
}
# Values of commands that are texts and no files
TEXTS = {
    "ckpt align": {"--accept", "--arguments", "--key", "model"},
    "ckpt remap": {"--key"},
    "ckpt show": {"--key"},
    "flops": {"--dtype", "model"},
    "gpus": {"--id", "--min-free-memory", "program"},
    "report": {"--sort"},
    "schedule": {"--interval", "--kind"},
}
_COMMANDS = [
    (parser.prog.partition(" ")[2].replace("  ", " "), action)
    for parser, action in command_actions()
    if action.nargs != 0 and not subcommands(action)
]
_PATHS = [(command, action) for command, action in _COMMANDS if action.type is path_argument]


def _public_functions():
    """Yield name and function of all that is public: of a class its `__init__` and its own methods."""
    rooms = [module.name for module in pkgutil.iter_modules(lightning_tricks.__path__) if module.name[0] != "_"]
    for package in (lightning_tricks, *(importlib.import_module(f"lightning_tricks.{room}") for room in rooms)):
        for public in (getattr(package, name) for name in getattr(package, "__all__", ())):
            if inspect.isclass(public):
                if not issubclass(public, Callback | Exception):  # the contract asks callbacks
                    yield public.__name__, public
                for name, method in inspect.getmembers(public, inspect.isroutine):
                    if name[0] != "_" and str(getattr(method, "__module__", "")).startswith("lightning_tricks."):
                        yield method.__qualname__, method
            elif callable(public):
                yield getattr(public, "__qualname__", ""), public


def test_each_path_argument_of_a_public_function_is_listed():
    found = {
        f"{name}.{parameter.name}"
        for name, function in _public_functions()
        for parameter in inspect.signature(function).parameters.values()
        if _NAMED.search(parameter.name) or _TYPED.search(str(parameter.annotation))
        if not str(parameter.annotation).startswith("Callable")
    }
    assert found == {*LOCAL, *OPENED}


@pytest.mark.parametrize("argument", LOCAL)
@pytest.mark.parametrize("address", ["s3://bucket/run.csv", Path("s3://bucket/run.csv")], ids=["text", "Path"])
def test_an_address_is_refused_before_anything_is_read_or_written(argument, address):
    name = argument.rpartition(".")[2]
    with pytest.raises(ValueError, match=rf"^{name} must be the path of .*, got '{address}', which is an address\. Mo"):
        LOCAL[argument](address)
    assert not list(Path().iterdir())


@pytest.mark.parametrize("argument", OPENED)
def test_an_address_is_opened(argument, tmp_path):
    content, call = OPENED[argument]
    address, files = f"memory:/{tmp_path}/weights.pt", fsspec.filesystem("memory")
    with files.open(address, "wb") as file:
        torch.save(content, file)
    written = files.modified(address)
    call(address)
    assert (files.modified(address) > written) == ("save" in argument)
    with pytest.raises(
        ValueError, match=r"path must be the path of .*, got 'memory:/[^/].*\. Give an address as a str"
    ):
        call(Path(address))
    assert not list(Path().iterdir())


def test_each_value_of_a_command_is_a_path_or_listed_as_none():
    texts = {}
    for command, action in _COMMANDS:
        if action.type in (None, Path, str) and action.choices is None:
            texts.setdefault(command, set()).add((action.option_strings or [action.dest])[-1])
    assert texts == TEXTS
    assert len(_PATHS) == 12
    opened = {command for command, action in _COMMANDS if action.type is file_argument}  # by read_checkpoint, or Mirror
    assert opened == {"ckpt align", "ckpt remap", "ckpt show", "resume fetch", "resume status", "resume verify"}


@pytest.mark.parametrize(("command", "action"), _PATHS, ids=lambda part: getattr(part, "dest", part))
def test_a_command_refuses_an_address(command, action, capsys):
    argv, needed = command.split(), lambda other: other is action or other.required or not other.option_strings
    given = [argument for name, argument in _COMMANDS if name == command and needed(argument)]
    for argument in sorted(given, key=lambda argument: bool(argument.option_strings)):
        argv += [*argument.option_strings[-1:], "s3://bucket/run" if argument is action else "1"]
    with pytest.raises(SystemExit, match=r"^2$"):
        main(argv)
    name = "/".join(action.option_strings) or action.metavar or action.dest
    assert re.search(
        f"error: argument {name}: it must be .* got 's3://bucket/run', which is an add", capsys.readouterr().err
    )
    assert not list(Path().iterdir())


def test_the_ckpt_command_opens_addresses(tmp_path):
    address = f"memory:/{tmp_path}/layer.pt"
    with fsspec.open(address, "wb") as file:
        torch.save(_WEIGHTS, file)
    assert main(["ckpt", "show", address]) == 0
    Path("rules.yaml").write_text("- {from: weight, to: w}", encoding="utf-8")
    assert main(["ckpt", "remap", address, "-r", "rules.yaml", "-o", "renamed.pt"]) == 0
    assert torch.load("renamed.pt").keys() == {"w", "bias"}


def test_the_folder_of_the_locks_is_no_address(monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, "s3://bucket/locks")
    with pytest.raises(GpuLockError, match=r"must be an absolute path, .* got 's3://bucket/locks'"):
        existing_lock_folder()


class _Elsewhere(os.PathLike):
    """A path of a library for object stores: its text is the address, and asking for its path would download it."""

    def __init__(self, text, path=None):
        self.text, self.path = text, path

    def __str__(self):
        return self.text

    def __fspath__(self):
        if self.path is None:
            raise AssertionError("downloaded")
        return self.path


@pytest.mark.parametrize(
    "address",
    [
        "s3://bucket/run",
        "S3://bucket/run",
        "file:///run",
        "simplecache::s3://bucket/run",
        "./s3://bucket/run",
        r"s3:\bucket\run",
        " s3://bucket/run",
        Path("s3://bucket/run"),
        _Elsewhere("s3://bucket/run"),
        _Elsewhere("<an object>", "s3://bucket/run"),
        _Elsewhere("<an object>", b"s3://bucket/run"),
    ],
    ids=str,
)
def test_an_address_is_known(address):
    assert is_address(address)
    with pytest.raises(ValueError, match="which is an address"):
        check_path("path", address, "a file")


@pytest.mark.parametrize(
    "path",
    ["run", "/run", "~/run", "C:/run", r"C:\run", "c://run", "/mnt/s3:/run", "a:b", "a::b", "2:/run", "..", "über:run"],
)
def test_a_local_path_is_none(path):
    assert not is_address(path)
    assert not is_address(Path(path))
    assert check_path("path", path, "a file") == path


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ("runs:/x", "If it is a local path, give it as an absolute one."),
        ("file:///runs/x", "Give the path without file://."),
        ("s3://bucket", "Mount that storage and give the path there, or copy the files with a tool of that storage."),
    ],
)
def test_the_remedy_is_that_of_the_address(given, remedy):
    with pytest.raises(ValueError, match=f"{re.escape(remedy)}$"):
        check_path("path", given, "a folder")
    assert check_path("path", f"{Path.cwd()}/{given}", "a folder")


def test_the_paths_that_no_checkpoint_may_set_are_all_that_tricks_have_and_are_listed():
    looks_like_one, are_dropped = set(), set()
    for trick in fields(Tricks):
        callback = callback_of(trick.name)
        if callback is None:
            continue
        for name, parameter in inspect.signature(callback).parameters.items():
            if _NAMED.search(name) or _TYPED.search(str(parameter.annotation)):
                looks_like_one.add(f"{trick.name}.{name}")
        are_dropped |= {f"{trick.name}.{name}" for name in callback.path_arguments}
    text = (Path(lightning_tricks.__file__).parents[1] / "SECURITY.md").read_text(encoding="utf-8")
    listed = re.search(r"Tricks among them name no files:(.*?)are\s+dropped", text, re.DOTALL)[1]
    assert looks_like_one <= are_dropped == set(re.findall("`(.*?)`", listed))
