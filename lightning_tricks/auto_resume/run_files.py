"""What belongs to a fit beside its checkpoints: its directory, its loggers, the files of ModelCheckpoint."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from lightning_tricks._lightning_compat.checkpoints import observe_checkpoint_files
from lightning_tricks._lightning_compat.flavor import (
    LIGHTNING,
    LightningModule,
    MisconfigurationException,
    ModelCheckpoint,
    Trainer,
    rank_zero_warn,
)
from lightning_tricks._lightning_compat.guards import set_private
from lightning_tricks._lightning_compat.loggers import muted_logger
from lightning_tricks._lightning_compat.trainer import callbacks_of, callbacks_of_type
from lightning_tricks._shared.checks import is_address
from lightning_tricks._shared.file_locks import DirectoryLock, this_process
from lightning_tricks._shared.patterns import strip_compile_prefix
from lightning_tricks._shared.tensors import gather_objects, unsharded_class
from lightning_tricks._shared.text import list_names
from lightning_tricks.auto_resume.core.checkpoint_folder import CheckpointFolder, Manifest, fit_folders
from lightning_tricks.auto_resume.core.configuration import plain
from lightning_tricks.auto_resume.core.data.rng_state import RNG_STATE_KEY, pack_rng_state, unpack_rng_state
from lightning_tricks.auto_resume.core.file_journal import FileJournal, link_digest
from lightning_tricks.auto_resume.logger_state import LoggerState

_START_FILE = "start.json"  # where the loggers were when a fit started that has no checkpoint yet
_RNG_STATE_FILE = "streams.json"  # the random state before `setup`, which may create or split data
_PROCESSES_FILE, _JOURNAL_FILE = "processes.json", "files.jsonl"
_MAX_PROCESSES = 1000
_SECONDS_TO_APPEAR = 30.0  # for a file of rank zero on the other ranks: network file systems cache directories
_SECONDS_TO_END = 5.0  # for a killed process, which holds its locks until its memory is freed
_END_SUFFIX = " at its end"  # of a journal's base: what was written after it is part of the run


class RunFiles:
    """Locks the directory of a run, and restores loggers and the files of ModelCheckpoint as they were at a save.

    All methods except `open` and `check_shared` are for rank zero, which alone writes files.

    Args:
        trainer: The Trainer of the fit.
        module: The module that is trained.
        root: The directory of all fits of a run.
        folder: The directory of this fit.
        installed: What is installed for the time of the fit is entered on it.

    Attributes:
        problem: Why the directory cannot be used, or "".
    """

    def __init__(
        self, trainer: Trainer, module: LightningModule, root: Path, folder: CheckpointFolder, installed: ExitStack
    ) -> None:
        self.trainer, self.folder, self.root = trainer, folder, CheckpointFolder(root)
        identity = run_identity(module)
        run = {name: identity[name] for name in ("module", "arguments")}  # parameters may come later
        self._run_record = json.loads(json.dumps(run, default=str))
        self._lock = DirectoryLock(self.root.private / "lock")
        installed.callback(self._lock.close)
        self.loggers = LoggerState([], folder.private, ())
        self._journal = FileJournal(folder.private / _JOURNAL_FILE)
        self._installed = installed
        self._logger_records: Any = ()  # where the loggers were before this process
        self._is_first_start = True  # while no checkpoint was ever written
        self._initial_rng_state = ""
        self.problem = ""
        self.await_save: Callable[[], object] = lambda: None  # what is written to files now belongs to the next one

    def open(self) -> None:
        """Lock the directory, and let the loggers, which have not begun yet, continue where they were."""
        is_writer = self.trainer.node_rank == 0 and self.trainer.local_rank == 0  # `global_rank` is not set yet
        with self.noting_problems():
            processes = self._lock_directory() if is_writer else []
            if not self.problem:
                self._open_loggers(processes, is_writer)
        if self.problem:
            for logger in self.trainer.loggers:
                self._installed.enter_context(muted_logger(logger))

    @contextmanager
    def noting_problems(self) -> Iterator[None]:
        """Turn an error of the file system into a `problem`, which all ranks can then be told."""
        try:
            yield
        except OSError as error:
            advice = "Free space there or make it writable. Choose another dirpath if that is impossible."
            if any(folder.manifests() for folder in fit_folders(self.root.path)):
                advice = (
                    "The checkpoints there are complete. Free space or make it writable, and run the same command "
                    "again; another dirpath would start a new run."
                )
            self.problem = f"AutoResume: the directory {self.folder.path} cannot be written ({error}). {advice}"

    def _open_loggers(self, processes: list[Any], is_writer: bool) -> None:
        manifests, start = self.folder.manifests(), self.folder.read_private(_START_FILE)
        self._is_first_start = not manifests
        self._restore_initial_rng_state()
        self._logger_records = manifests[0].loggers if manifests else ()
        if not manifests and start.get("run") == self._run_record and isinstance(start.get("loggers"), list):
            self._logger_records = start["loggers"]
        self.loggers = LoggerState(self.trainer.loggers, self.folder.private, processes)
        self.loggers.restore_versions(self._logger_records, is_writer=is_writer)
        if self._logger_records:
            self._allow_existing_cli_config()
        if is_writer and self._is_first_start:
            self._warn(self.loggers.restore(self._logger_records, before_fit=True))

    def _restore_initial_rng_state(self) -> None:
        """Let `setup` draw the random numbers that it drew when the run started."""
        if self.trainer.world_size > 1:  # ranks draw the same numbers only if they are seeded, and then they do anyway
            return
        if self._is_first_start:
            self._initial_rng_state = base64.b64encode(pack_rng_state().numpy().tobytes()).decode()
            return
        with suppress(KeyError, TypeError, ValueError):  # the file is missing, or another version wrote it
            packed = base64.b64decode(self.folder.read_private(_RNG_STATE_FILE)[RNG_STATE_KEY])
            unpack_rng_state(torch.frombuffer(bytearray(packed), dtype=torch.uint8))

    def _lock_directory(self) -> list[Any]:
        """Return the processes that used the directory, this one included; set `problem` if it is in use."""
        self.folder.prepare()
        self.root.prepare()
        until = time.monotonic() + _SECONDS_TO_END
        while True:
            recorded = self.root.read_private(_PROCESSES_FILE).get("processes")
            recorded = recorded if isinstance(recorded, list) else []
            processes = [process for process in recorded if isinstance(process, dict)]
            process = processes[-1] if processes else {}
            acquired, is_certain = self._lock.acquire(process)
            if acquired or process == this_process() or time.monotonic() > until:
                break
            time.sleep(0.1)
        if not acquired:
            self.problem = (
                f"AutoResume: the directory {self.root.path} is in use by process {process.get('pid', '?')} on "
                f"{process.get('host', '?')}: two runs would overwrite each other's checkpoints. Wait for its end, or "
                "choose another dirpath."
            )
            return processes
        if not is_certain:
            rank_zero_warn(
                f"AutoResume: the file system of {self.root.path} does not support locks. A second run in this "
                "directory is detected on the same host only."
            )
        others = [process for process in processes if process != this_process()]
        processes = [*others, this_process()][-_MAX_PROCESSES:]
        self.root.write_private(_PROCESSES_FILE, {"processes": processes})
        return processes

    def prepare(self) -> None:
        """Remove what killed processes left behind, and note where the loggers are at the start of the fit."""
        with self.noting_problems():
            self.folder.clean_up()
            version_mismatches = self.loggers.version_mismatches(self._logger_records)
            if version_mismatches:
                rank_zero_warn(f"AutoResume: {'; '.join(version_mismatches)}. What was logged before is not removed.")
            if self._is_first_start:
                self.folder.write_private(_START_FILE, {"run": self._run_record, "loggers": self.loggers.records()})
                self.folder.write_private(_RNG_STATE_FILE, {RNG_STATE_KEY: self._initial_rng_state})

    def check_shared(self) -> None:
        """Check that all ranks see what rank zero writes; all ranks have to call it.

        Raises:
            MisconfigurationException: On all ranks, if one of them does not.
        """
        if self.trainer.world_size == 1:
            return
        path, process = self.folder.private / f"seen-{os.getpid()}-{time.time_ns()}", this_process()
        if self.trainer.is_global_zero:
            with suppress(OSError):  # of a directory that became full, no rank sees it
                path.touch()
        name = self.trainer.strategy.broadcast(path.name)
        sees = _appears(self.folder.private / name)
        ranks = gather_objects((sees, f"{process['host']}:{self.folder.path.absolute()}"))
        if self.trainer.is_global_zero:
            path.unlink(missing_ok=True)
        blind = [f"rank {rank} at {place}" for rank, (sees, place) in enumerate(ranks) if not sees]
        if blind:
            raise MisconfigurationException(
                f"AutoResume: rank 0 writes to {ranks[0][1]}, which does not appear to {list_names(blind, 3)}. Each "
                "rank reads the checkpoints when the run resumes: give an absolute dirpath on a file system that all "
                "nodes share."
            )

    def on_fit_start(self, resumed: Manifest | None) -> None:
        """Restore the files of ModelCheckpoint as they were at the save that is resumed, and observe them."""
        with self.noting_problems():
            self._restore_checkpoint_files(resumed)

    def _restore_checkpoint_files(self, resumed: Manifest | None) -> None:
        folders = self._checkpoint_folders()
        if resumed is not None and not resumed.finished:
            self._warn(self._not_on_a_disk())
        base = self._journal.base
        if base is None and resumed is not None and folders:
            rank_zero_warn(
                f"AutoResume: {self._journal.path} is missing or damaged, so that files which ModelCheckpoint wrote or "
                "removed after the save that is resumed stay as they are."
            )
        if base is not None and (resumed is None) == (not self.folder.manifests()):
            before = "" if resumed is None else resumed.file
            is_over = base.endswith(_END_SUFFIX) or base.partition("-")[0] < before.partition("-")[0]
            if not is_over:
                self._warn(self._journal.restore_files(folders))
        self._journal.start(resumed.file if resumed is not None else "", folders)
        for state_key, callback in self._model_checkpoints().items():
            self._installed.enter_context(
                observe_checkpoint_files(
                    callback,
                    partial(self._before_change, state_key),
                    lambda path, target: self._journal.record_digest(_absolute_path(path), link_digest(target)),
                )
            )

    def _before_change(self, state_key: str, path: Path) -> None:
        self.await_save()  # which starts the journal anew
        self._journal.before_change(state_key, _absolute_path(path))

    def record_file_digest(self, path: Path, digest: str) -> None:
        """Note the digest of a checkpoint that the Trainer is about to write."""
        self._journal.record_digest(_absolute_path(path), digest)

    def record_state(self, *, flush: bool = True) -> None:
        """Note that somebody else is about to write the present state to a file, or may do so."""
        self.await_save()
        with suppress(OSError):
            self._journal.record_state(self.trainer.current_epoch, self.trainer.global_step, flush=flush)

    def written_states(self, *, of_all_fits: bool) -> set[tuple[Any, Any]]:
        """Return epoch and step of all checkpoints that this fit wrote, or any fit of the run, also by others."""
        folders = list(fit_folders(self.root.path)) if of_all_fits else [self.folder]
        own = {(manifest.epoch, manifest.step) for folder in folders for manifest in folder.manifests()}
        return own.union(*(FileJournal(folder.private / _JOURNAL_FILE).states for folder in folders))

    def on_save(self, manifest: Manifest) -> None:
        """Note that a save was written, which a later process resumes."""
        self._is_first_start = False
        self._journal.start(manifest.file + _END_SUFFIX * manifest.finished, self._checkpoint_folders())
        (self.folder.private / _START_FILE).unlink(missing_ok=True)

    def on_fit_end(self, manifest: Manifest) -> None:
        """Note that what was logged and written after the last save of a fit is part of the run."""
        for logger in self.trainer.loggers:
            logger.save()
        try:
            self.folder.rewrite_manifest(manifest, loggers=self.loggers.records())
            self._journal.start(manifest.file + _END_SUFFIX, self._checkpoint_folders())
        except OSError as error:
            rank_zero_warn(f"AutoResume: the positions of the loggers at the end could not be written ({error}).")

    def discard_rows_after(self, manifest: Manifest) -> None:
        """Remove from the loggers what was logged after a save."""
        later = CheckpointFolder(self.root.path / f"fit{self._fit_number() + 1}")
        if manifest.finished and later.manifests():
            return  # the later fit removes its own rows
        try:
            self._warn(self.loggers.restore(manifest.loggers))
        except OSError as error:
            self._warn([f"rows that were logged after the save that is resumed could not be removed ({error})."])

    def _fit_number(self) -> int:
        return int(self.folder.path.name[3:]) if self.folder.path != self.root.path else 1

    def _model_checkpoints(self) -> dict[str, ModelCheckpoint]:
        callbacks = callbacks_of_type(self.trainer, ModelCheckpoint)
        return {callback.state_key: callback for callback in callbacks if callback.dirpath}

    def _checkpoint_folders(self) -> dict[str, Path]:
        """Return the local directories of the ModelCheckpoints by their `state_key`."""
        found = {state_key: str(callback.dirpath) for state_key, callback in self._model_checkpoints().items()}
        return {state_key: _absolute_path(Path(path)) for state_key, path in found.items() if not is_address(path)}

    def _not_on_a_disk(self) -> list[str]:
        """Return a sentence about what is not restored, as it was written to an address."""
        places = [callback.dirpath for callback in self._model_checkpoints().values()]
        places += [getattr(logger, "root_dir", None) for logger in self.trainer.loggers]
        addresses = sorted({str(place) for place in places if is_address(place)})
        said = (
            "the files of ModelCheckpoint and the rows of loggers are restored on a local or mounted disk only. In "
            f"{list_names(addresses)} files that were written after the save stay, files that were removed are missing,"
            " and loggers start anew."
        )
        return [said] if addresses else []

    def _allow_existing_cli_config(self) -> None:
        """Tell LightningCLI that its config was saved already, as it refuses a directory that has one."""
        cli = sys.modules.get(f"{LIGHTNING}.cli")
        for callback in callbacks_of(self.trainer):
            if cli is not None and isinstance(callback, cli.SaveConfigCallback):
                set_private(callback, already_saved=True)

    def _warn(self, sentences: list[str]) -> None:
        for sentence in sentences:
            rank_zero_warn(f"AutoResume: {sentence}")


def run_identity(module: LightningModule) -> dict[str, Any]:
    """Return what distinguishes a run: class of the module, names and shapes of parameters, and arguments."""
    parameters = {strip_compile_prefix(name): parameter for name, parameter in module.named_parameters()}
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items() if not is_lazy(parameter)}
    kind = unsharded_class(module)
    return {
        "module": f"{kind.__module__}.{kind.__qualname__}".replace("__main__.", ""),
        "parameters": hashlib.sha256(repr(sorted(shapes.items())).encode()).hexdigest()[:16],
        "arguments": plain(dict(module.hparams_initial)),  # a learning rate finder does not change these
    }


def raise_for_problem(problem: str) -> None:
    """Raise an error with a problem, if there is one."""
    if problem:
        raise MisconfigurationException(problem)


def _appears(path: Path) -> bool:
    """Whether a file that another process has written is there, or comes to be within some seconds."""
    until = time.monotonic() + _SECONDS_TO_APPEAR
    while True:
        with suppress(OSError):
            if path in path.parent.iterdir():  # a look at the directory renews what is cached of it
                return True
        if time.monotonic() > until:
            return False
        time.sleep(0.1)


def _absolute_path(path: Path) -> Path:
    return Path(os.path.abspath(path))  # noqa: PTH100 - resolves no links
