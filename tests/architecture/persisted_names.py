"""Names that outlive a process: in checkpoints, files, logs, configurations and shells.

`persisted_names.txt` lists them; `python -m tests.architecture.persisted_names` writes it anew. All of them are found
by running what writes them, through public names alone.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import enum
import inspect
import json
import logging
import os
import random
import re
import runpy
import sys
import tempfile
import typing
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from safetensors import safe_open
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics import MeanMetric

from lightning_tricks import AutoResume, GradientClipping, TrainableCheckpoint, Tricks, count_flops
from lightning_tricks.auto_resume.core.tensor_block import unpack
from lightning_tricks.checkpoint_remapping import align
from lightning_tricks.cli import main
from lightning_tricks.devices import Gpu
from lightning_tricks.devices.core.device_summary import QUANTITIES
from lightning_tricks.finetuning import LoRASettings, add_lora, save_adapter
from lightning_tricks.gradient_clipping import AGC, PercentileClip, ZScoreClip
from lightning_tricks.model_report import summarize_model
from lightning_tricks.seeding import isolated_rng
from lightning_tricks.training_cli import TricksCLI, TricksParser
from lightning_tricks.tricks import callback_of
from tests.contract.cases import CASES
from tests.contract.checks import Interrupts
from tests.contract.lab import Lab
from tests.small import PUBLIC, QUIET, Net, loader

ROOT = Path(__file__).parents[2]
LISTING = Path(__file__).with_suffix(".txt")
_OF_LIGHTNING = ("callbacks", "state_dict", "loops", "optimizer_states", "lr_schedulers", "epoch", "global_step")
_SAYS_WHAT_IT_IS = ("kind", "moment", "format")  # keys whose values are names as well
_NAMED_BY_OTHERS = (  # keys whose keys are a user's
    *("values", "lost", "fingerprint", "drawable", "gradients", "masks", "arguments"),
    *("state_dict", "rank_pattern", "alpha_pattern"),
    *("derived", "told", "origins", "files"),
)
_SPECS = ("OptimizerSpec", "ScheduleSpec", "AGC", "ClipValue", "PercentileClip", "ZScoreClip")


def listing() -> str:
    """All names, a section for each place where they stand."""
    levels = {name: logging.getLogger(name).level for name in ("lightning.pytorch", "lightning.fabric")}
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder, isolated_rng(seed=0):
        warnings.simplefilter("ignore")
        before = Path.cwd()
        os.chdir(folder)
        for name in levels:
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            sections = {title: sorted(set(gather(Path(folder)))) for title, gather in _SECTIONS.items()}
        finally:
            os.chdir(before)
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)
    return "\n".join(f"# {title}\n" + "".join(f"{name}\n" for name in names) for title, names in sections.items())


def paths_in(value: Any, place: str = "") -> Iterator[str]:
    """The keys of nested dicts and lists, as dotted paths; also the values that say of what kind something is."""
    if isinstance(value, Mapping) and value:
        others = place.rpartition(".")[2] in _NAMED_BY_OTHERS
        for key, part in value.items():
            if key in _SAYS_WHAT_IT_IS and isinstance(part, str | int):
                yield f"{place}.{key} = {part!r}"
            elif key == "state" and value.get("kind") == "generator":
                yield f"{place}.state"  # as its library makes it
            elif key == "attributes" and ".ranks[]." in place:
                yield f"{place}.attributes"  # the same again, of another moment
            else:
                yield from paths_in(part, f"{place}.<name>" if others else f"{place}.{key}")
    elif isinstance(value, list | tuple) and value:
        for part in value:
            yield from paths_in(part, f"{place}[]")
    else:
        yield place


def files_in(folder: Path) -> Iterator[str]:
    """The files below a folder, and the fields of those that hold JSON or a table."""
    for path in folder.rglob("*"):
        if path.is_dir():
            continue
        name = re.sub(r"[0-9a-f]{16,}|\d+", "<n>", path.relative_to(folder).as_posix())
        yield name
        if path.suffix == ".json":
            yield from paths_in(json.loads(path.read_text()), f"{name}: ")
        elif path.suffix == ".jsonl":
            for line in path.read_text().splitlines():
                yield from paths_in(json.loads(line), f"{name}: ")
        elif path.suffix == ".csv":
            with path.open(newline="") as file:
                yield from (f"{name}: {field}" for field in next(csv.reader(file)))


def _fields_of_tricks(folder: Path) -> Iterator[str]:
    of_callbacks = {case.callback.__name__: dict(case.arguments) for case in CASES.values()}
    given = {field.name: of_callbacks[kind.__name__] for field in fields(Tricks) if (kind := callback_of(field.name))}
    tricks = Tricks(**given, optimizer=True, schedule=True)
    yield from (f"Tricks.{field.name}" for field in fields(Tricks))
    yield from paths_in(tricks.as_dict(), "Tricks.as_dict()")
    yield from paths_in(Tricks(gradient_clipping={"method": AGC(0.1)}).as_dict(), "Tricks.as_dict()")


def _arguments(folder: Path) -> Iterator[str]:
    """What YAML and hyper-parameters name: arguments and, where they are words, their values."""
    described = {name: kind for name, kind in PUBLIC.items() if name.endswith(("Classifier", "Regressor"))}
    described |= {name: PUBLIC[name] for name in (*CASES, *_SPECS, "RemapRule")}
    for name, kind in described.items():
        hints = typing.get_type_hints(kind.__init__)
        for argument in _arguments_of(kind):
            yield f"{name}({argument})"
            yield from (f"{name}({argument}={word!r})" for word in _words(hints.get(argument)))


def _arguments_of(kind: Any) -> Iterable[str]:
    return inspect.signature(kind).parameters


def _words(hint: Any) -> Iterator[str]:
    if typing.get_origin(hint) is typing.Literal:
        yield from (word for word in typing.get_args(hint) if isinstance(word, str))
    else:
        for part in typing.get_args(hint):
            yield from _words(part)


class _Color(enum.Enum):
    RED = 1


class _Samples(Dataset):
    """Has a memory, which workers keep for themselves."""

    def __init__(self) -> None:
        self.given, self.random = 0, random.Random(0)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        self.given += 1
        return torch.full((4,), self.random.random())


class _Data(LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.samples = _Samples()

    def train_dataloader(self) -> DataLoader:
        self.asked += 1
        generator = torch.Generator().manual_seed(0)
        return DataLoader(self.samples, batch_size=1, shuffle=True, num_workers=1, generator=generator)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.samples, batch_size=4)


class _Changing(LightningModule):
    """Changes whatever AutoResume saves beside weights."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 4})
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        self.frozen = nn.Linear(1, 1)
        self.more = nn.ModuleList([nn.Linear(1, 1)])
        self.mean = MeanMetric()
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.history: list[Any] = []
        self.removed = 1
        self.randoms = (torch.Generator(), random.Random(0), np.random.default_rng(0), np.random.RandomState(0))

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.net(batch).sum())
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()
        self.seen += 1
        self.mean(batch)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("loss", batch.mean(), on_step=True, on_epoch=True)
        vars(self).pop("removed", None)
        self.plain = [1, 2**2000, 1j, "a", b"a", bytearray(b"a"), None, (1,), {1}, {"a": 1}, range(1), slice(1)]
        self.values = [
            _Color.RED,
            torch.float32,
            torch.device("cpu"),
            torch.Size([1]),
            datetime.timedelta(1),
            Path("a"),
        ]
        self.paths = [Path("a")]
        self.times = [datetime.date(2020, 1, 1), datetime.datetime(2020, 1, 1), datetime.time(1)]
        self.arrays = [np.ones(1), np.float32(1), torch.ones(1)]
        self.same = self.arrays
        self.opened = [print, object()]
        for source in self.randoms:
            torch.rand(1, generator=source) if isinstance(source, torch.Generator) else source.random()

    def validation_step(self, batch, batch_idx):
        self.log("val", batch.mean())

    def on_train_start(self):
        if not hasattr(self.net[0], "weight_mask"):
            prune.l1_unstructured(self.net[0], "weight", amount=1)
        self.frozen.requires_grad_(False).eval()
        self.trainer.limit_val_batches = 1
        if len(self.trainer.optimizers[0].param_groups) == 1:
            self.trainer.optimizers[0].add_param_group({"params": list(self.more.parameters())})

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class _Lists(Callback):
    """Lists files that a later save removes."""

    def __init__(self, folder: Path) -> None:
        names: set[str] = set()
        self.names = lambda: names

        def look(*_: Any) -> None:
            names.update(files_in(folder))

        self.on_train_batch_start = look


def _of_auto_resume(folder: Path) -> Iterator[str]:
    """Its part of a checkpoint and its directory, at the start, stopped, with a damaged checkpoint and at the end."""
    directory = folder / "resumed"
    lists = _Lists(directory)
    for interrupts in ([Interrupts(4)], [Interrupts(3)], []):
        saved = ModelCheckpoint(folder / "mine", every_n_train_steps=2, monitor="loss_step")
        callbacks = [AutoResume(directory, every_n_train_steps=1, asynchronous=False), saved, lists, *interrupts]
        options = {**QUIET, "enable_checkpointing": True, "logger": CSVLogger(folder / "logs", version=0)}
        with isolated_rng(seed=0):
            trainer = Trainer(max_epochs=2, callbacks=callbacks, **options)
            try:
                trainer.fit(_Changing(), _Data())
            except SystemExit:
                newest = max(directory.glob(".auto_resume/0*/meta.pt"))
                yield from _added_to(newest)
                if not list(directory.glob(".auto_resume/*.corrupt")):
                    newest.write_bytes(newest.read_bytes()[:-100])
    yield from _added_to(max(directory.glob(".auto_resume/0*/meta.pt")))
    yield from (f"dirpath/{name}" for name in {*lists.names(), *files_in(directory)})
    yield from (f"beside ModelCheckpoint's files/{name}" for name in files_in(folder / "mine") if "/" in name)


def _added_to(checkpoint: Path) -> Iterator[str]:
    values = torch.load(checkpoint, weights_only=True)
    if (own := values.get("auto_resume")) is not None:
        yield from (f"checkpoint.auto_resume.shared.{name}" for name in own["shared"])
        values["auto_resume"] = {**own, "shared": unpack(own["shared"]), "ranks": [unpack(one) for one in own["ranks"]]}
    added = {key: value for key, value in values.items() if key not in _OF_LIGHTNING and "lightning" not in key}
    of_callbacks = {key: state for key, state in values["callbacks"].items() if "ModelCheckpoint" not in key}
    found = paths_in({**added, **({"callbacks": of_callbacks} if of_callbacks else {})}, "checkpoint")
    yield from (name for name in found if "ModelCheckpoint" not in name)


def _state_of_callbacks(folder: Path) -> Iterator[str]:
    """What each callback adds to a checkpoint in the middle of an epoch, and to that of AutoResume."""
    lab = Lab(folder / "states")
    methods = (AGC(0.1), PercentileClip(), ZScoreClip())
    makers: list[Any] = [(case.make, case.net) for name, case in CASES.items() if name != "AutoResume"]
    makers += [(lambda method=method: GradientClipping(method=method), {}) for method in methods]
    for make, lab.net in makers:
        callback, directory = make(), folder / "states" / str(len(list(lab.folder.glob("*"))))
        try:
            lab.fit([callback, AutoResume(directory, asynchronous=False), Interrupts(3)], probe=False)
        except SystemExit:
            (checkpoint,) = directory.glob(".auto_resume/0*/meta.pt")
        states = torch.load(checkpoint, weights_only=True)
        yield f"{type(callback).__name__}: state_key {callback.state_key}"
        yield from (name for name in paths_in(states["callbacks"], "callbacks") if name != "callbacks")
        for rank in map(unpack, states["auto_resume"]["ranks"]):
            yield from (name for name in paths_in(rank["callbacks"], "ranks[].callbacks") if name.count("."))
        yield from paths_in(callback.state_dict(), f"{type(callback).__name__}.state_dict()")


def _small_checkpoint(folder: Path) -> Iterator[str]:
    """What a checkpoint has that leaves weights out, and the files of an adapter."""
    module = Net()
    module.net[0].requires_grad_(False)
    trainer = Trainer(callbacks=[TrainableCheckpoint()], **{**QUIET, "max_epochs": 1})
    trainer.fit(module, loader())
    trainer.save_checkpoint(folder / "small.ckpt")
    yield from _added_to(folder / "small.ckpt")
    add_lora(module, LoRASettings(rank=2))
    save_adapter(module.net, folder / "adapter")
    yield from (name for name in files_in(folder / "adapter") if "auto_mapping" not in name)
    with safe_open(folder / "adapter" / "adapter_model.safetensors", "pt") as file:
        yield from (f"adapter_model.safetensors: metadata {name}" for name in file.metadata())
        yield from (f"adapter_model.safetensors: {name}" for name in file.keys())  # noqa: SIM118  # it is no dict


def _ensembles(folder: Path) -> Iterator[str]:
    """What a checkpoint of an ensemble holds beside that of another module."""
    for name, kind in PUBLIC.items():
        if name in ("ConformalClassifier", "ConformalRegressor"):
            conformal = kind(nn.Linear(2, 2))
            yield from (f"{name}: state_dict.{key}" for key in conformal.state_dict() if not key.startswith("module."))
            yield from (f"{name}: hyper_parameters.{key}" for key in conformal.hparams)
            yield f"{name}: calibrated_as {bytes(conformal.calibrated_as.tolist()).decode()}"
        elif name.endswith(("Classifier", "Regressor")) and name != "CalibratedClassifier":
            outputs = 10 if name.endswith("Classifier") else 1
            x, y = torch.rand(8, 64), torch.arange(8) % 2
            data = DataLoader(TensorDataset(x, y if outputs > 1 else y.unsqueeze(1) / 2), batch_size=4)
            for options in ({"vectorize": True}, {"vectorize": False}) if "vectorize" in _arguments_of(kind) else ({},):
                arguments = _arguments_of(kind)
                first = next((name for name in ("estimator", "estimators") if name in arguments), "")
                members = {first: nn.Linear(64, outputs)} if first else {"n_outputs": outputs}
                short = {name: value for name, value in {"cycle": 1, "cv": 2}.items() if name in arguments}
                ensemble = kind(**members, n_estimators=2, seed=0, **short, **options)
                saves = ModelCheckpoint(folder, f"{name}-{{epoch}}", save_top_k=-1)
                trainer = Trainer(
                    max_epochs=2, limit_train_batches=2, callbacks=[saves], **{**QUIET, "enable_checkpointing": True}
                )
                trainer.fit(ensemble, data)
                trainer.save_checkpoint(folder / "ensemble.ckpt")
                fold = [folder / f"{name}-epoch=2.ckpt"] if "cv" in short else []
                for file in (*fold, folder / "ensemble.ckpt"):
                    yield from (f"{name}: {found}" for found in _added_to(file))
                yield from (f"{name}: state_dict.{key}" for key in ensemble.state_dict())
                yield from (f"{name}: logs {key}" for key in trainer.callback_metrics)


def _files(folder: Path) -> Iterator[str]:
    """What the callbacks write beside checkpoints, and what people save with the functions."""
    for where in (folder / "written", folder / "rules"):
        where.mkdir()
    os.chdir(folder / "written")
    logger = CSVLogger(folder / "written" / "logs", name="", version=0)
    options = {**QUIET, "logger": logger, "log_every_n_steps": 1, "max_epochs": 1, "limit_train_batches": 2}
    changed = {"ImageLogger": {"every_n_epochs": 1}, "MetricsMonitor": {"log_plots": True}}
    changed["GradualUnfreezing"] = {"schedule": {0: "*"}}
    for name, case in CASES.items():
        if name != "AutoResume":
            Trainer(callbacks=[case.make(**changed.get(name, {}))], **options).fit(Net(**case.net), loader())
    os.chdir(folder)
    yield from files_in(folder / "written")
    for path in (folder / "written").glob("recorded/*"):
        for line in path.read_text().splitlines():
            content = json.loads(line)
            yield from (f"recorded: {found}" for found in paths_in(content))
            yield from (f"recorded: columns[{kind}]" for kind, *_ in content.get("columns", ()))
    model = nn.Sequential(nn.Linear(4, 2))
    counted = count_flops(model, torch.ones(1, 4), backward=True, compare=True)
    yield from paths_in(counted.to_dict(), "FlopsCount")
    yield f"FlopsCount.to_csv(): {counted.to_csv().splitlines()[0]}"
    yield from paths_in(summarize_model(model, torch.ones(1, 4)).to_dict(), "ModelSummary")
    yield from (f"DeviceMonitor: logs {key}" for key in QUANTITIES)
    yield from paths_in(asdict(Gpu(index=0)), "gpus --json")
    source = {"model.fc.weight": torch.ones(4, 2), "model.fc.bias": torch.ones(2), "other": torch.ones(1)}
    align(model, source).save(folder / "rules" / "rules.yaml")
    align(model, {f"module.a.{name}": value for name, value in model.state_dict().items()}).save(folder / "prefix.yaml")
    for path in (folder / "rules" / "rules.yaml", folder / "prefix.yaml"):
        yield from (f"rules: {line}" for line in path.read_text().splitlines() if line[0] != "#")


def _demo(folder: Path) -> Iterator[str]:
    """Keys that the demo's tricks log in training, validation and test, and its files."""
    from lightning_tricks.demo import Digits, DigitsClassifier

    out = folder / "demo"
    example = ROOT / "examples" / "demo"
    with patch.object(sys, "path", [str(example), *sys.path]):  # where a script has its folder
        tricks = runpy.run_path(str(example / "every_trick.py"))["tricks"](out)
    quiet = dict.fromkeys(("enable_progress_bar", "enable_checkpointing", "enable_model_summary"), False)
    limits = {"limit_train_batches": 3, "limit_val_batches": 2, "limit_test_batches": 2}
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", logger=CSVLogger(out, name="logs"), log_every_n_steps=1, **quiet, **limits
    )
    module, data = DigitsClassifier(tricks), Digits()
    trainer.fit(module, data)
    keys = set(trainer.callback_metrics)
    trainer.test(module, data, verbose=False)
    yield from keys | set(trainer.callback_metrics)


def command_actions() -> Iterator[tuple[argparse.ArgumentParser, argparse.Action]]:
    """Yield what the parsers of `lightning-tricks` and of its commands take, but for those of LightningCLI."""
    parsers: list[argparse.ArgumentParser] = []

    def keep(parser: argparse.ArgumentParser, *_: Any) -> Any:
        parsers.append(parser)
        raise SystemExit

    with patch.object(argparse.ArgumentParser, "parse_args", keep), suppress(SystemExit):
        main([])
    for parser in parsers:  # which grow
        for action in actions_of(parser):
            yield parser, action
            parsers.extend(subcommands(action))


def actions_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return what a parser takes."""
    return parser._actions


def subcommands(action: argparse.Action) -> list[argparse.ArgumentParser]:
    """Return the parsers of the commands among which an action chooses."""
    return list(action.choices.values()) if isinstance(action.choices, dict) else []


def _commands(folder: Path) -> Iterator[str]:
    for parser, action in command_actions():
        if commands := subcommands(action):
            yield from (command.prog.replace("  ", " ") for command in commands)
        elif "--help" not in action.option_strings:
            names = "|".join(action.option_strings) or f"<{action.dest}>"
            choices = "" if action.choices is None else " {" + ",".join(map(str, action.choices)) + "}"
            yield f"{parser.prog} {names}{choices}"
    own = TricksParser()
    TricksCLI.add_arguments_to_parser(None, own)
    options = {option for action in actions_of(own) for option in action.option_strings}
    yield from (f"lightning-tricks fit {option}" for option in sorted(options - {"-h", "--help", "--print_config"}))


def _outside(folder: Path) -> Iterator[str]:
    """Environment variables, extras, scripts."""
    for path in (ROOT / "lightning_tricks").rglob("*.py"):
        names = re.findall(r"environ(?:\.get\(|\[)\"(\w+)\"", path.read_text())
        yield from (f"environment variable {name}" for name in names)
    text = (ROOT / "pyproject.toml").read_text()
    for section, what in (("project.optional-dependencies", "extra"), ("project.scripts", "script")):
        lines = text.partition(f"[{section}]\n")[2].partition("\n[")[0].splitlines()
        yield from (f"{what} {line.split(' = ')[0]}" for line in lines if re.match(r"[a-z-]+ = ", line))


_SECTIONS: dict[str, Any] = {
    "Fields of Tricks": _fields_of_tricks,
    "Arguments, in YAML and hyper-parameters": _arguments,
    "State of callbacks in checkpoints": _state_of_callbacks,
    "AutoResume's part of a checkpoint, and its directory": _of_auto_resume,
    "Checkpoints without what did not train, and files of adapters": _small_checkpoint,
    "Checkpoints of ensembles": _ensembles,
    "Files": _files,
    "Logged keys": _demo,
    "Commands": _commands,
    "Environment variables, extras, scripts": _outside,
}


if __name__ == "__main__":
    LISTING.write_text(listing())
