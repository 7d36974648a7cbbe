"""`TricksCLI`: Lightning's command line with the callbacks, ensembles and settings of the collection by short name."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from traceback import walk_tb
from typing import Any, NoReturn

from lightning_tricks._guards import LIGHTNING_PACKAGES
from lightning_tricks._lazy import public_packages
from lightning_tricks._lightning_compat.cli import ConfigurationOnlyCLI
from lightning_tricks._lightning_compat.flavor import (
    LIGHTNING,
    OTHER,
    Callback,
    LightningArgumentParser,
    LightningDataModule,
    LightningModule,
    MisconfigurationException,
    SaveConfigCallback,
    Trainer,
    get_filesystem,
    lightning_version,
    rank_zero_info,
)
from lightning_tricks._shared.checks import check_names, did_you_mean
from lightning_tricks._shared.extras import import_extra
from lightning_tricks._shared.lightning_name import VARIABLE
from lightning_tricks._shared.read_budget import check_aliases
from lightning_tricks.devices import GpuLockError, NoGpuAvailableError, RankError, select_gpus
from lightning_tricks.mixin import TricksMixin
from lightning_tricks.seeding import SeedEverything

_SELECT_GPUS = (
    "The number of free GPUs to train on, which are locked until the process ends; or a dict of arguments of "
    "lightning_tricks.select_gpus such as {n: 1, min_free_memory: 20GiB, timeout: 600}. It replaces "
    "trainer.accelerator and trainer.devices."
)
_OPTIONS = ["ckpt_path", "config", "data", "model", "print_config", "seed_everything", "select_gpus"]
_OPTIONS += [f"trainer.{name}" for name in signature(Trainer).parameters]
_GPU_ERRORS = (GpuLockError, NoGpuAvailableError, RankError)
_KNOWN_SUBCLASSES = re.compile(r",? *known subclasses: [^)\n]*(?=\))")


class TricksParser(LightningArgumentParser):
    """A parser that prints no list of all metrics beside each option, and says what is wrong in one line."""

    def dump(self, *args: Any, **kwargs: Any) -> str:
        """Return the configuration; in its comments, types are not followed by their subclasses."""
        lines = super().dump(*args, **kwargs).splitlines(keepends=True)
        return "".join(_KNOWN_SUBCLASSES.sub("", line) if line.lstrip().startswith("#") else line for line in lines)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Exit with status 2 and one line; a parser that is asked to raises the error instead."""
        if not self.exit_on_error:
            super().error(message, ex)
        classes = [kind for base in (Callback, LightningModule, LightningDataModule) for kind in _subclasses(base)]
        program = Path(sys.argv[0]).name.replace("__main__.py", "lightning-tricks")
        self.exit(2, f"{program}: error: {condense_message(message, classes, _OPTIONS)}\n")


class SaveConfigOnce(SaveConfigCallback):
    """Save the configuration beside the logs, where it is not saved yet; no file is overwritten.

    A run that is resumed logs to the folder of the run before, which has the same configuration in `config.yaml`. A
    configuration that differs is saved as `config-2.yaml`, and so on.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Save it on rank zero, once in a process."""
        if self.already_saved:
            return
        if self.overwrite or self.multifile or not self.save_to_log_dir:  # by `save_config_kwargs`
            super().setup(trainer, pl_module, stage)
            return
        self.already_saved = True
        folder = trainer.log_dir  # all ranks must ask: it is a broadcast
        if trainer.is_global_zero:
            self._save_beside_logs(str(folder or trainer.default_root_dir))  # a logger may have no folder
            self.save_config(trainer, pl_module, stage)

    def _save_beside_logs(self, folder: str) -> None:
        text = self.parser.dump(self.config, skip_none=False)
        files, number, file = get_filesystem(folder), 1, Path(self.config_filename)
        while files.isfile(path := f"{folder}/{file}"):
            with files.open(path, "r") as saved:
                if saved.read() == text:
                    return
            number += 1
            file = Path(self.config_filename).with_stem(f"{Path(self.config_filename).stem}-{number}")
        files.makedirs(folder, exist_ok=True)
        with files.open(path, "w") as target:
            target.write(text)
        if number > 1:
            rank_zero_info(
                f"{folder}/{self.config_filename} contains another configuration: this one was saved to {path}."
            )


class TricksCLI(ConfigurationOnlyCLI):
    """LightningCLI, in which everything public of the collection is known by its short name.

    `lightning-tricks fit`, `validate`, `test` and `predict` run it, and so does a script of your own that ends with
    `TricksCLI()` or `TricksCLI(MyModule, MyDataModule)`. It differs from LightningCLI as follows.

    - Nothing is seeded unless it is asked for, by `--seed_everything` or by the callback `SeedEverything`, which is
      applied before the model is built: its initial weights come from the seed. Different seeds are an error.
    - The configuration that is saved beside the logs overwrites nothing, so that a command can be run again, and
      `AutoResume` resumes.
    - `--select_gpus 1` trains on a GPU that is free.
    - `--print_config` says above each option what it is, if ruamel.yaml is installed (it is in the extra `cli`).
    - The classes and arguments come from the command line and its files, never from the checkpoint of `--ckpt_path`.
    - What is wrong is said in one line.

    Args:
        model_class: The LightningModule; None for any, by `--model module.Class`.
        datamodule_class: The LightningDataModule; None for any, by `--data module.Class`, or none.
        **options: Further arguments of LightningCLI.
    """

    def __init__(self, model_class: Any = None, datamodule_class: Any = None, **options: Any) -> None:
        for package in map(import_module, public_packages()):
            for name in dir(package):
                getattr(package, name)  # jsonargparse knows the short names of classes that are imported
        defaults = {"save_config_callback": SaveConfigOnce, "seed_everything_default": False}
        super().__init__(model_class, datamodule_class, **{**defaults, **options})

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Return a `TricksParser`; LightningCLI takes the class of its parser as an argument only in newer versions."""
        kwargs.setdefault("dump_header", [f"{LIGHTNING}=={lightning_version()}"])
        kwargs.setdefault("allow_abbrev", False)  # an option that is misspelt by its end would be taken for another
        parser = TricksParser(**kwargs)
        jsonargparse = import_extra("jsonargparse", "cli", "TricksCLI needs jsonargparse[signatures]")
        action = jsonargparse.ActionConfigFile
        parser.add_argument("-c", "--config", action=action, help="A YAML or JSON file with options.")
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add `--select_gpus`."""
        parser.add_argument("--select_gpus", type=int | dict[str, Any] | None, default=None, help=_SELECT_GPUS)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the arguments; `--print_config` prints comments as well."""
        args = sys.argv[1:] if args is None else args
        if not isinstance(args, list | tuple):
            super().parse_arguments(parser, args)
            return
        has_comments = find_spec("ruamel") and find_spec("ruamel.yaml")
        args = [f"{arg}=comments" if arg == "--print_config" and has_comments else arg for arg in args]
        try:
            with _aliases_checked():
                self.config = parser.parse_args(args)
        except UnicodeDecodeError as error:
            parser.error(f"a --config file is not text in UTF-8: {error}")

    def before_instantiate_classes(self) -> None:
        """Seed as `SeedEverything` does, before the model is built."""
        for spec in self._configured_callbacks():
            kind = _import(spec.class_path)
            if issubclass(kind, SeedEverything):
                with self._errors_in_one_line():
                    callback = kind(**(spec.get("init_args") or {}))
                self._check_seed(callback, "SeedEverything")
                callback.before_module_init()

    def instantiate_classes(self) -> None:
        """Build everything; what an argument of a trick or of the Trainer has wrong is said in one line."""
        with self._errors_in_one_line():
            super().instantiate_classes()
        if isinstance(self.model, TricksMixin):
            for callback in self.model.tricks.callbacks():
                if isinstance(callback, SeedEverything):
                    self._check_seed(callback, "Tricks(seed_everything=...) of the model")

    @contextmanager
    def _errors_in_one_line(self) -> Iterator[None]:
        try:
            yield
        except (MisconfigurationException, ModuleNotFoundError, *_GPU_ERRORS, TypeError, ValueError) as error:
            for said in _chain(error):  # jsonargparse raises its own error from what a class said
                if _package_that_raised(said) in (*LIGHTNING_PACKAGES, "lightning_tricks"):
                    self.parser.error(str(said))
            if _package_that_raised(said) == "jsonargparse":
                self.parser.error(str(error))
            raise  # a user's own code, with the line

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Return the Trainer, on the GPUs that `--select_gpus` selects."""
        wanted = self._configuration().get("select_gpus")
        if wanted is not None:
            arguments = {"n": wanted} if isinstance(wanted, int) else dict(wanted)
            check_names("select_gpus", arguments, signature(select_gpus).parameters)
            selection = select_gpus(**arguments)
            kwargs = {"accelerator": selection.accelerator, "devices": selection.devices, **kwargs}
        return super().instantiate_trainer(**kwargs)

    def _configuration(self) -> Any:
        return self.config if self.subcommand is None else self.config[self.subcommand]

    def _configured_callbacks(self) -> list[Any]:
        given = self._configuration().get("trainer.callbacks") or []
        return [spec for spec in (given if isinstance(given, list) else [given]) if hasattr(spec, "class_path")]

    def _check_seed(self, callback: SeedEverything, where: str) -> None:
        """Exit with an error if two parts of the configuration name different seeds."""
        seeds = {"--seed_everything": self._configuration().get("seed_everything")}
        for spec in self._configured_callbacks():
            if issubclass(_import(spec.class_path), SeedEverything):
                seeds["SeedEverything"] = spec.init_args.seed
        for other, seed in seeds.items():
            if seed is not None and seed is not False and seed != callback.seed:
                self.parser.error(
                    f"{other} has the seed {seed} and {where} has {callback.seed}: leave out one of them, or give "
                    "both the same seed"
                )


@contextmanager
def _aliases_checked() -> Iterator[None]:
    """Let jsonargparse, which copies what aliases stand for, refuse YAML that expands without bound."""
    jsonargparse = import_extra("jsonargparse", "cli", "TricksCLI needs jsonargparse[signatures]")
    load, yaml = jsonargparse.get_loader("yaml"), import_module("yaml")

    def checked(text: str) -> Any:
        check_aliases(text)
        return load(text)

    jsonargparse.set_loader("yaml", checked, (yaml.YAMLError,))
    try:
        yield
    finally:
        jsonargparse.set_loader("yaml", load, (yaml.YAMLError,))


def _import(class_path: str) -> type:
    module, _, name = class_path.rpartition(".")
    kind: type = getattr(sys.modules[module], name)
    return kind


def _subclasses(base: type) -> Iterator[type]:
    kind: type
    for kind in base.__subclasses__():
        yield kind
        yield from _subclasses(kind)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__


def _package_that_raised(error: BaseException) -> str:
    *_, (frame, _) = walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


_NOISE = (
    "Does not validate against any of the Union subtypes",
    "Subtypes:",
    "Errors:",
    "Expected a <class 'NoneType'>",
    "Expected a path but",
    "Given value",
    "Not a valid subclass of",
    "Subclass types expect one of",
    "a class path (str)",
    "a dict with",
)


def condense_message(message: str, classes: Iterable[type], options: Iterable[str] = ()) -> str:
    """Return one line with what is wrong and the remedy.

    Args:
        message: What jsonargparse says: a tree of all types that a value may have, and why it is none of them.
        classes: The classes that an option may name without their module, to suggest the most similar one.
        options: The names of options, for the same.
    """

    def ending(text: str) -> str:
        return "" if text.endswith((".", "!", "?")) else "."

    line = ""
    for part in _informative_lines(message):
        line += (
            part if not line else f" {part}" if line.endswith(":") else f"{ending(line)} {part[0].upper()}{part[1:]}"
        )
    line = re.sub(r"Parser key \"([^\"]+)\"", r"\1", line)
    line = re.sub(r"Problem with given class_path '([^']+)'", r"\1", line).rstrip(" :") or message
    remedy = _remedy(line, classes, options)
    line = re.sub(r"Expected a dot import path string: (\S+)", r"no class is called '\1'", line)
    if "Expected a" in line and "Got value" not in line and (found := re.findall(r"Given value: (.{1,80})$", message)):
        line += f". Got value: {found[-1]}"
    line = re.sub(r"NestedArg\(key='\w+', val='?(.*?)'?\)", r"\1", line)
    return f"{line}{ending(line)}{remedy}"


def _informative_lines(message: str) -> Iterator[str]:
    """Yield the lines that say something, each once; of the types that a value may have, only the first says why."""
    seen: set[str] = set()
    tried: dict[int, int] = {}  # indentation -> how many types were tried there
    skipped_below = -1
    for line in message.splitlines():
        indentation, text = len(line) - len(line.lstrip()), line.strip().removeprefix("- ")
        if -1 < skipped_below < indentation:
            continue
        skipped_below = -1
        if text.startswith("Problem with given class_path"):
            tried[indentation] = tried.get(indentation, 0) + 1
            if tried[indentation] > 1:
                skipped_below = indentation
                continue
        if text and not text.startswith(_NOISE) and text not in seen:
            seen.add(text)
            yield text


def _remedy(line: str, classes: Iterable[type], options: Iterable[str]) -> str:
    """Return a sentence that says what to write instead, or an empty string."""
    if found := re.search(r"Expected a dot import path string: (\S+)", line):
        names = sorted({kind.__name__ for kind in classes})
        return f"{did_you_mean(found[1], names)} Name a class of your own as module.Class."
    if found := re.search(r"([\w.]+): Option '([\w.]+)' is not accepted", line):
        module, _, name = found[1].rpartition(".")
        known = list(signature(getattr(import_module(module), name)).parameters)
        return f" {name} takes {', '.join(known) or 'no arguments'}.{did_you_mean(found[2], known)}"
    if re.search(r"subclass of Lightning|subclass of Callback", line) and OTHER in sys.modules:
        return f" If it is one of `{OTHER}`, set {VARIABLE}={OTHER} in the environment."
    if "No module named" in line:
        return " Python looks for modules in the working directory and among the installed packages."
    if found := re.search(r"arguments are required: (\w+)\.model", line):
        stage = found[1]
        return f" Write `{stage} --config FILE`, with a YAML file that has a model, or `{stage} --model module.Class`."
    if found := re.search(r"does not accept option '([\w.]+)'", line):
        return did_you_mean(found[1], options)
    if found := re.search(r"unrecognized arguments: --([\w.]+)", line):
        return f"{did_you_mean(found[1], options)} `fit --help` lists them all."
    if line.startswith("Unexpected config"):
        return " A --config file contains options, such as `trainer: {max_epochs: 5}`."
    return ""
