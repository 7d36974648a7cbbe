"""What belongs to a run beside its checkpoints: its directory and id, its loggers, and files that others write."""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.nn.parameter import is_lazy

from lightning_tricks._lightning_compat.callbacks import allow_existing_config
from lightning_tricks._lightning_compat.flavor import (
    LightningModule,
    MisconfigurationException,
    Trainer,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_tricks._lightning_compat.loggers import muted_logger
from lightning_tricks._lightning_compat.sharded import is_sharding
from lightning_tricks._shared.file_locks import DirectoryLock, this_process
from lightning_tricks._shared.patterns import strip_compile_prefix
from lightning_tricks._shared.rng import restore_rng_state
from lightning_tricks._shared.tensors import gather_objects
from lightning_tricks._shared.text import list_names
from lightning_tricks.auto_resume.core.checkpoint_folder import CheckpointFolder, Manifest
from lightning_tricks.auto_resume.core.data.rng_state import RNG_STATE_KEY, as_rng_state, raw_rng_state
from lightning_tricks.auto_resume.core.store.mirror_process import MirrorProcess
from lightning_tricks.auto_resume.logger_state import LoggerState
from lightning_tricks.auto_resume.model_checkpoint_files import ModelCheckpointFiles, Origin, read_origin

_RUN_FILE = "run.json"  # of all fits: the run's id, and the processes that trained in it, which event files name
_START_FILE = "start.json"  # of each fit: where the loggers were at its start, and the random state before `setup`
_MAX_PROCESSES = 1000
_SECONDS_TO_APPEAR = 30.0  # for a file of rank zero on the other ranks: network file systems cache directories
_SECONDS_TO_END = 5.0  # for a killed process, which holds its locks until its memory is freed


class RunFiles:
    """Locks the directory of a run, and restores loggers and the files of ModelCheckpoint as they were at a save.

    Methods are for rank zero, which alone writes files, unless they say otherwise.

    Args:
        trainer: The Trainer of the fit.
        root: The directory of all fits of a run.
        folder: The directory of this fit.
        installed: What is installed for the time of the fit is entered on it.
        mirror: What copies the directory to an object store; None where it outlives the machine itself.

    Attributes:
        problem: Why the directory cannot be used, or "".
        await_save: Waits for a save that is being written.
        others: The checkpoints that others write.
        has_parts: Whether each node keeps and sends the shards of its own ranks.
    """

    def __init__(
        self,
        trainer: Trainer,
        root: Path,
        folder: CheckpointFolder,
        installed: ExitStack,
        mirror: MirrorProcess | None = None,
    ) -> None:
        self.trainer, self.folder, self.root, self.problem = trainer, folder, CheckpointFolder(root), ""
        self._fit = 1 if folder.path == self.root.path else int(folder.path.name[3:])
        self._installed = installed
        self._lock = DirectoryLock(self.root.private / "lock")
        installed.callback(self._lock.close)
        self.mirror = mirror
        self.has_parts = mirror is not None and trainer.num_nodes > 1 and is_sharding(trainer.strategy)
        self.loggers = LoggerState([] if mirror is None else trainer.loggers, folder.private, ())
        self.await_save: Callable[[], object] = lambda: None
        self.others = ModelCheckpointFiles(trainer, Origin(fit=self._fit), lambda: self.await_save())
        self._has_saves, self._start = False, dict[str, Any]()  # what was noted where the fit started first

    @property
    def is_writer(self) -> bool:
        """Whether this rank begins what is written to the directory: rank zero, or the first one of a node."""
        return self.trainer.local_rank == 0 and (self.has_parts or self.trainer.node_rank == 0)

    def open(self) -> None:
        """Lock the directory, and let the loggers, which have not begun, continue where they were; on all ranks."""
        is_rank_zero = self.trainer.node_rank == 0 and self.trainer.local_rank == 0  # `global_rank` is not set yet
        with self.noting_problems():
            if is_rank_zero:
                self._lock_directory()
            processes = self._note_process() if is_rank_zero and not self.problem else []
            if not self.problem and (is_rank_zero or self.mirror is None):  # else nothing may have been fetched yet
                own = None if self.mirror is None else self.root.path
                self._open_loggers(LoggerState(self.trainer.loggers, self.folder.private, processes, own), is_rank_zero)
        if self.problem:
            for logger in self.trainer.loggers:
                self._installed.enter_context(muted_logger(logger))

    @contextmanager
    def noting_problems(self) -> Iterator[None]:
        """Turn an error of the file system into a `problem`, which all ranks can then be told."""
        try:
            yield
        except OSError as error:
            self.problem = (
                f"AutoResume: the directory {self.folder.path} cannot be written ({error}). Free disk space, make it "
                "writable or remove anything that is not a regular file, and run the same command again. Existing "
                "checkpoints are complete; another dirpath would start a new run."
            )

    def _lock_directory(self, only: tuple[str, str] | None = None) -> None:
        """Lock the directory, and let it hold what the store has, or this checkpoint alone; else set `problem`."""
        self.folder.prepare()
        self.root.prepare()
        until = time.monotonic() + _SECONDS_TO_END
        while True:
            processes = self._processes()
            last = processes[-1] if processes else {}
            acquired, is_certain = self._lock.acquire(last)
            if acquired or last == this_process() or time.monotonic() > until:
                break
            time.sleep(0.1)
        if not acquired:
            self.problem = (
                f"AutoResume: the directory {self.root.path} is in use by process {last.get('pid', '?')} on "
                f"{last.get('host', '?')}: two runs would overwrite each other's checkpoints. Wait until it ends, or "
                "choose another dirpath."
            )
            return
        if not is_certain:
            rank_zero_warn(
                f"AutoResume: the file system of {self.root.path} does not support locks. A second run in this "
                "directory is detected on the same host only."
            )
        if self.mirror is not None:
            self._installed.callback(self.mirror.close, self.mirror.timeout)
            problem = self.mirror.start(lambda sentence: rank_zero_info(f"AutoResume: {sentence}"), only)
            self.problem = problem and f"AutoResume: {problem}"
        self.folder.clean_up()  # of killed processes

    def _note_process(self) -> list[Any]:
        """Return the processes that used the directory, those of the machine before as well, this one last."""
        processes = self._processes()
        run = str(self.root.read_private(_RUN_FILE).get("run") or secrets.token_hex(16))
        self.others.origin = Origin(run, secrets.token_hex(8), self._fit)
        processes = [*(process for process in processes if process != this_process()), this_process()][-_MAX_PROCESSES:]
        self.root.write_private(_RUN_FILE, {"run": run, "processes": processes})
        return processes

    def _processes(self) -> list[Any]:
        """Return the processes that are recorded to have used the directory."""
        known = self.root.read_private(_RUN_FILE).get("processes")
        return [process for process in known if isinstance(process, dict)] if isinstance(known, list) else []

    def _open_loggers(self, loggers: LoggerState, is_writer: bool) -> None:
        """Let the loggers continue, and `setup` draw the random numbers that it drew when the run started."""
        manifests, start = self.folder.manifests(), self.folder.read_private(_START_FILE)
        records = manifests[0].loggers if manifests else start.get("loggers")
        self.loggers, self._has_saves = loggers, bool(manifests)
        if others := loggers.restore_versions(records, is_writer=is_writer):
            rank_zero_warn(
                f"AutoResume: {'; '.join(others)} as before. Values that were logged before are not removed."
            )
        if manifests or start:
            allow_existing_config(self.trainer)
        if not manifests:
            self._start = {RNG_STATE_KEY: raw_rng_state()}
            if is_writer:
                loggers.restore(records)
            return
        self._start = start
        if self.trainer.world_size == 1:  # several ranks draw the same numbers only if they are seeded, and then always
            with suppress(KeyError, TypeError, ValueError, RuntimeError):  # of a file that somebody changed
                restore_rng_state(as_rng_state(start[RNG_STATE_KEY]))

    def prepare(self) -> None:
        """Note where the loggers are at the start of the fit."""
        with self.noting_problems():
            if not self._has_saves:
                self._start["loggers"] = self.loggers.records()
                self.folder.write_private(_START_FILE, self._start)

    def on_saved(self) -> None:
        """Let a checkpoint that was just written be sent."""
        if self.mirror is not None:
            self.mirror.notify()

    def finish_sending(self, timeout: float | None) -> str:
        """Wait until all is sent to an address, at most for some seconds; return why it was not, or ""."""
        problem = "" if self.mirror is None else self.mirror.close(timeout)
        return problem and f"AutoResume: the last save is only in {self.root.path}: {problem.rstrip('.')}."

    def follow_rank_zero(self) -> None:
        """Let the loggers of other ranks have the versions that were fetched; all ranks have to call it."""
        if self.mirror is not None and self.trainer.world_size > 1:
            self.loggers.set_versions(self.trainer.strategy.broadcast(self.loggers.versions()))

    def begin_on_nodes(self, manifest: Manifest | None) -> None:
        """Let each node have the checkpoint that rank zero resumes, and send its shards; all ranks have to call it.

        Raises:
            MisconfigurationException: On all ranks, if a node cannot fetch it.
        """
        if self.mirror is None or self.trainer.world_size == 1:
            return
        is_first = self.trainer.node_rank > 0 and self.trainer.local_rank == 0
        if is_first and (self.has_parts or manifest not in (None, *self.folder.manifests())):
            place = "" if self._fit == 1 else f"{self.folder.path.name}/"
            with self.noting_problems():
                self._lock_directory((place, manifest.file) if manifest else None)
        raise_for_problem(next(filter(None, gather_objects(self.problem)), ""))

    def check_shared(self) -> None:
        """Check that all ranks see what rank zero writes; all ranks have to call it.

        Raises:
            MisconfigurationException: On all ranks, if one of them does not.
        """
        if self.trainer.world_size == 1 or self.mirror is not None:
            return
        path, until = self.folder.private / f"seen-{secrets.token_hex(8)}", time.monotonic() + _SECONDS_TO_APPEAR
        if self.trainer.is_global_zero:
            with suppress(OSError):  # of a directory that became full, no rank sees it
                path.touch()
        path = path.with_name(self.trainer.strategy.broadcast(path.name))
        # a look at the directory renews what is cached of it
        while not (sees := path.parent.is_dir() and path in path.parent.iterdir()) and time.monotonic() < until:
            time.sleep(0.1)
        ranks = gather_objects((sees, f"{this_process()['host']}:{self.folder.path.absolute()}"))
        if self.trainer.is_global_zero:
            path.unlink(missing_ok=True)
        blind = [f"rank {rank} at {place}" for rank, (sees, place) in enumerate(ranks) if not sees]
        if blind:
            raise MisconfigurationException(
                f"AutoResume: rank 0 writes to {ranks[0][1]}, which {list_names(blind, 3)} cannot see. Each "
                "rank reads the checkpoints when the run resumes: give an absolute dirpath on a file system that all "
                "nodes share."
            )

    def fit_that_wrote(self, path: str | os.PathLike[str]) -> int | None:
        """Return the number of this run's fit that wrote a checkpoint; 0 if none did, None if it cannot be read."""
        origin = read_origin(path)
        if origin is None:
            return None
        return origin.fit if origin.run == self.others.origin.run else 0

    def on_selected(self, resumed: Manifest | None, user_path: str | os.PathLike[str] | None) -> None:
        """Note from where steps are repeated: a save, the start of the fit, or nowhere if it resumes what was given."""
        newest = max((manifest.number for manifest in self.folder.manifests()), default=0)
        self.others.origin = replace(self.others.origin, save=newest)
        if resumed is not None:
            run = resumed.run
            self.others.continued = {**dict(run.get("starts", ())), run.get("start", ""): resumed.number}
        elif not newest and (user_path is None or self.fit_that_wrote(user_path) != self._fit):
            self.others.continued = {}
        if self._has_saves and not newest:  # all of them are damaged
            self.loggers.restore(self._start.get("loggers"))

    def on_fit_end(self, manifest: Manifest) -> None:
        """Note that what was logged after the last save of a fit is part of the run."""
        for logger in self.trainer.loggers:
            logger.save()
        try:
            self.folder.rewrite_manifest(manifest, loggers=self.loggers.records())
        except OSError as error:
            rank_zero_warn(f"AutoResume: the final positions of the loggers could not be written ({error}).")

    def discard_rows_after(self, manifest: Manifest) -> None:
        """Remove from the loggers what was logged after a save."""
        if manifest.finished and CheckpointFolder(self.root.path / f"fit{self._fit + 1}").manifests():
            return  # the later fit removes its own rows
        self.loggers.restore(manifest.loggers)


def run_identity(module: LightningModule) -> dict[str, Any]:
    """Return what distinguishes a run from those of other models: the names and shapes of its parameters."""
    parameters = {strip_compile_prefix(name): parameter for name, parameter in module.named_parameters()}
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items() if not is_lazy(parameter)}
    return {"parameters": hashlib.sha256(repr(sorted(shapes.items())).encode()).hexdigest()[:16]}


def raise_for_problem(problem: str) -> None:
    """Raise an error with a problem, if there is one."""
    if problem:
        raise MisconfigurationException(problem)
