"""What a fit has around it, outside of its checkpoints: its directory, its loggers, files of ModelCheckpoint."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_tricks._lightning_compat.checkpoints import watch_files
from lightning_tricks._lightning_compat.loggers import keep_still, let_begin
from lightning_tricks._lightning_compat.trainer import callbacks_of
from lightning_tricks.auto_resume.core.checkpoint_files import CheckpointFolder, Manifest
from lightning_tricks.auto_resume.core.data.rng_state import pack_streams, unpack_streams
from lightning_tricks.auto_resume.core.directory_lock import DirectoryLock, me
from lightning_tricks.auto_resume.core.file_journal import FileJournal, digest_of_link
from lightning_tricks.auto_resume.logger_versions import LoggersOfFit
from lightning_tricks.auto_resume.module_state import identity

_START = "start.json"  # where the loggers were when a fit began that has no checkpoint yet
_STREAMS = "streams.json"  # the random streams before `setup`, which may make or split data
_PROCESSES = "processes.json"
_MOST_PROCESSES = 1000
_END = " at its end"  # of a journal's base: what came then is part of the run


class Surroundings:
    """Keeps others out of a directory, and takes loggers and files of ModelCheckpoint back to where they were.

    Everything but `enter` is for rank zero, which alone writes files.

    Args:
        trainer: That fits.
        module: That is fitted.
        root: The directory of all fits of a run.
        folder: The directory of this fit.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, root: Path, folder: CheckpointFolder) -> None:
        self.trainer, self.folder, self.root = trainer, folder, CheckpointFolder(root)
        about = identity(module, None)
        run = {name: about[name] for name in ("module", "arguments")}  # parameters may come later
        self._run = json.loads(json.dumps(run, default=str))
        self._lock = DirectoryLock(self.root.private / "lock")
        self.loggers = LoggersOfFit([], folder.private, ())
        self._journal = FileJournal(folder.private / "files.jsonl")
        self._undo: list[Callable[[], None]] = []
        self._records: Any = ()  # of the loggers, before this process
        self._is_first = True  # no checkpoint was ever written
        self._streams = ""
        self.problem = ""

    def enter(self) -> None:
        """Take the directory, and let the loggers begin where they were; they have not begun yet."""
        writes = self.trainer.node_rank == 0 and self.trainer.local_rank == 0  # no rank knows its number yet
        processes: list[Any] = []
        if writes:
            try:
                processes = self._lock_directory()
            except OSError as error:
                self.problem = (
                    f"AutoResume: the directory {self.folder.path} cannot be written ({error}). Choose another dirpath."
                )
            if self.problem:
                for logger in self.trainer.loggers:
                    keep_still(logger)
                    self._undo.append(partial(let_begin, logger))
                return
        manifests, start = self.folder.manifests(), self.folder.read_private(_START)
        self._is_first = not manifests
        self._note_streams()
        self._records = manifests[0].loggers if manifests else ()
        if not manifests and start.get("run") == self._run and isinstance(start.get("loggers"), list):
            self._records = start["loggers"]
        self.loggers = LoggersOfFit(self.trainer.loggers, self.folder.private, processes)
        self.loggers.take_up(self._records, writes=writes)
        if self._records:
            self._spare_config()
        if writes and self._is_first:
            self._say(self.loggers.restore(self._records, before_fit=True))

    def _note_streams(self) -> None:
        """Let what `setup` draws be what it drew when the run began; ranks draw alike only where they are seeded."""
        if self.trainer.world_size > 1:
            return
        if self._is_first:
            self._streams = base64.b64encode(pack_streams().numpy().tobytes()).decode()
            return
        with suppress(KeyError, TypeError, ValueError):  # not written, or by another version
            packed = base64.b64decode(self.folder.read_private(_STREAMS)["streams"])
            unpack_streams(torch.frombuffer(bytearray(packed), dtype=torch.uint8))

    def _lock_directory(self) -> list[Any]:
        """Return the processes that were here before."""
        self.folder.prepare()
        self.root.prepare()
        known = self.root.read_private(_PROCESSES).get("processes", [])
        known = [one for one in known if isinstance(one, dict)] if isinstance(known, list) else []
        ours, sure = self._lock.acquire(known[-1] if known else {})
        if not ours:
            who = known[-1] if known else {}
            self.problem = (
                f"AutoResume: the directory {self.root.path} is in use by process {who.get('pid', '?')} on "
                f"{who.get('host', '?')}: two runs would write over each other's checkpoints. Wait for its end, or "
                "choose another dirpath."
            )
            return known
        if not sure:
            rank_zero_warn(
                f"AutoResume: the file system of {self.root.path} knows no locks. A second run in this directory is "
                "noticed on the same host only."
            )
        known = [*(one for one in known if one != me()), me()][-_MOST_PROCESSES:]
        self.root.write_private(_PROCESSES, {"processes": known})
        return known

    def set_up(self) -> None:
        """Remove what killed processes left, and note where the fit begins."""
        self.folder.clean()
        others = self.loggers.others(self._records)
        if others:
            rank_zero_warn(f"AutoResume: {'; '.join(others)}. What was logged before is not withdrawn.")
        if self._is_first:
            self.folder.write_private(_START, {"run": self._run, "loggers": self.loggers.records()})
            self.folder.write_private(_STREAMS, {"streams": self._streams})

    def fit_starts(self, resumed: Manifest | None) -> None:
        """Put files of ModelCheckpoint back to where they were at the save that is resumed, and follow them."""
        folders = self._folders()
        base = self._journal.base
        if base is not None and (resumed is None) == (not self.folder.manifests()):
            before = "" if resumed is None else resumed.file
            is_over = base.endswith(_END) or base.partition("-")[0] < before.partition("-")[0]
            if not is_over:
                self._say(self._journal.undo(folders))
        self._journal.begin(resumed.file if resumed is not None else "", folders)
        for place, callback in self._checkpointing().items():
            self._undo.append(
                watch_files(
                    callback,
                    lambda path, place=place: self._journal.touch(place, _absolute(path)),  # type: ignore[misc]
                    lambda path, target: self._journal.note(_absolute(path), digest_of_link(target)),
                )
            )

    def note_file(self, path: Path, digest: str) -> None:
        """Note the digest of a checkpoint that the Trainer is about to put in its place."""
        self._journal.note(_absolute(path), digest)

    def saved(self, manifest: Manifest) -> None:
        """Let a save be what is resumed from here on."""
        self._is_first = False
        self._journal.begin(manifest.file + _END * manifest.finished, self._folders())
        (self.folder.private / _START).unlink(missing_ok=True)

    def ended(self, manifest: Manifest) -> None:
        """Let what was logged and written after the last save of a fit be part of it."""
        for logger in self.trainer.loggers:
            logger.save()
        try:
            self.folder.amend(manifest, loggers=self.loggers.records())
            self._journal.begin(manifest.file + _END, self._folders())
        except OSError as error:
            rank_zero_warn(f"AutoResume: where the loggers stand at the end could not be written ({error}).")

    def withdraw(self, manifest: Manifest) -> None:
        """Withdraw from the loggers what came after a save."""
        later = CheckpointFolder(self.root.path / f"fit{self._number() + 1}")
        if manifest.finished and later.manifests():
            return  # that fit withdraws its own
        self._say(self.loggers.restore(manifest.loggers))

    def release(self) -> None:
        """Leave the callbacks as they were, and the directory to others."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._lock.release()

    def _number(self) -> int:
        return int(self.folder.path.name[3:]) if self.folder.path != self.root.path else 1

    def _checkpointing(self) -> dict[str, ModelCheckpoint]:
        callbacks = callbacks_of(self.trainer)
        return {one.state_key: one for one in callbacks if isinstance(one, ModelCheckpoint) and one.dirpath}

    def _folders(self) -> dict[str, Path]:
        """Return the local directories of ModelCheckpoint."""
        found = {place: str(callback.dirpath) for place, callback in self._checkpointing().items()}
        return {place: _absolute(Path(path)) for place, path in found.items() if "://" not in path}

    def _spare_config(self) -> None:
        """Tell LightningCLI that its config is there: it refuses a directory that has one."""
        cli = sys.modules.get("lightning.pytorch.cli")
        for callback in callbacks_of(self.trainer):
            if cli is not None and isinstance(callback, cli.SaveConfigCallback):
                callback.already_saved = True

    def _say(self, sentences: list[str]) -> None:
        for sentence in sentences:
            rank_zero_warn(f"AutoResume: {sentence}")


def refuse(problem: str) -> None:
    """Raise what is wrong, if anything is."""
    if problem:
        raise MisconfigurationException(problem)


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))  # noqa: PTH100 - resolves no links
