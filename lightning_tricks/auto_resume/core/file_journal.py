"""Restores files that other callbacks write in a run, as they were at its last save."""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_tricks._shared.files import PARTIAL_SUFFIX, flush_directory
from lightning_tricks.auto_resume.core.checkpoint_folder import _SHARD_NAME as SHARD_NAME
from lightning_tricks.auto_resume.core.checkpoint_folder import MAIN_FILE as MAIN_SHARD
from lightning_tricks.auto_resume.core.durable_writing import file_digest, write_atomically

_BACKUP_SUFFIX = ".before"  # the suffix of files that were replaced or removed since the last save
_MAX_JOURNAL_BYTES = 1 << 24  # bytes
_FOLDER_KEY = "place"  # of the folder in an entry; part of the format of journals


class FileJournal:
    """Records which files are written and removed after a save, and keeps backups of them until the next save.

    A resumed run repeats what it did since its last save. After `restore_files` it finds the files of then: new ones
    are removed, and others are as they were. A file is removed only if it has the digest that was recorded when it was
    written; a folder, which strategies write that shard a model, only if nothing but shards is in it. Files that were
    created after the save get no backup: the backups take the space of one save at most.

    Args:
        path: Path of the journal.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._backups: dict[tuple[str, str], str] = {}  # (key of the folder, name) -> name of the backup
        self._folders: Mapping[str, Path] = {}
        self._is_flushed = False

    def start(self, base: str, folders: Mapping[str, Path]) -> None:
        """Start a new journal after a save, or before the first one, and remove the backups.

        Args:
            base: Name of the checkpoint that was saved; empty before the first one.
            folders: Folders whose files are recorded, by their keys in the journal.
        """
        self._folders = folders
        entries = self._entries()
        for folder, _, backup in _backups_in(entries, folders):
            _remove(folder / backup)
        if folders:
            write_atomically(self.path, lambda stream: stream.write(_json_line({"base": base})))
        else:
            self.path.unlink(missing_ok=True)
        self._backups.clear()
        self._is_flushed = False  # a journal without entries has nothing to restore

    @property
    def base(self) -> str | None:
        """The checkpoint after which the journal starts, empty before the first one; None if there is no journal."""
        base = next((entry["base"] for entry in self._entries() if "base" in entry), None)
        return base if isinstance(base, str) else None

    def before_change(self, folder_key: str, path: Path) -> None:
        """Record that a file is about to be written or removed, and back it up if it existed at the save."""
        folder = self._folders.get(folder_key)
        if folder is None or path.parent != folder or (folder_key, path.name) in self._backups:
            return
        backup = ""
        if os.path.lexists(path):
            backup = next(name for name in _backup_names(path) if not os.path.lexists(path.with_name(name)))
        self._add({_FOLDER_KEY: folder_key, "name": path.name, "kept": backup})
        self._backups[folder_key, path.name] = backup
        if backup:
            try:
                os.link(path, path.with_name(backup), follow_symlinks=False)
            except (NotImplementedError, OSError):  # a file system without hard links, or a folder
                path.replace(path.with_name(backup))

    def record_digest(self, path: Path, digest: str) -> None:
        """Record the digest of the bytes that a file is about to have."""
        for folder_key, folder in self._folders.items():
            if path.parent == folder and (folder_key, path.name) in self._backups:
                self._add({_FOLDER_KEY: folder_key, "name": path.name, "sha256": digest})

    def record_state(self, epoch: int, step: int, *, flush: bool = True) -> None:
        """Record the position of a fit whose state is about to be written to a file, whichever that is.

        Without `flush` a killed process leaves the record, and a power failure may not.
        """
        self._add({"epoch": epoch, "step": step}, flush=flush)

    @property
    def states(self) -> set[tuple[Any, Any]]:
        """The positions that `record_state` recorded since the journal started: epoch and step."""
        positions = [(entry.get("epoch"), entry.get("step")) for entry in self._entries()]
        return {position for position in positions if all(type(count) is int for count in position)}

    def restore_files(self, folders: Mapping[str, Path]) -> list[str]:
        """Restore the files as they were at the save.

        Args:
            folders: The folders that `start` was given.

        Returns:
            A sentence for each file that is kept since it has other bytes than were recorded.
        """
        problems, entries = [], self._entries()
        for folder, name, backup in reversed(list(_backups_in(entries, folders, all_names=True))):
            path = folder / name
            for staged in folder.glob(f".{glob.escape(name)}.*{PARTIAL_SUFFIX}"):
                staged.unlink(missing_ok=True)
            if backup and not os.path.lexists(folder / backup):
                continue
            if os.path.lexists(path) and not (backup and _is_same(path, folder / backup)):
                digests = {entry.get("sha256") for entry in entries if entry.get("name") == name}
                if not (_holds_only_shards(path) or _digest_of_path(path) in digests):
                    problems.append(f"{path} is kept, because its bytes are not those that the run wrote.")
                    continue
            _remove(path)
            if backup:
                (folder / backup).replace(path)
        return problems

    def _add(self, entry: Mapping[str, Any], *, flush: bool = True) -> None:
        with self.path.open("ab") as file:
            file.write(_json_line(entry))
            if not flush:
                return
            file.flush()
            os.fsync(file.fileno())
        if not self._is_flushed:
            flush_directory(self.path.parent)
            self._is_flushed = True

    def _entries(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        with suppress(OSError, ValueError, RecursionError):  # the last line may be truncated
            if self.path.is_file() and self.path.stat().st_size <= _MAX_JOURNAL_BYTES:
                for line in self.path.read_text(encoding="utf-8").splitlines():
                    entry = json.loads(line)
                    if isinstance(entry, dict):
                        found.append(entry)
        return found


def link_digest(target: str) -> str:
    """Return what the journal records as the digest of a symbolic link."""
    return f"link to {target}"


def _backups_in(
    entries: list[dict[str, Any]], folders: Mapping[str, Path], all_names: bool = False
) -> Iterator[tuple[Path, str, str]]:
    """Yield folder, name and name of the backup for each file; entries with paths as names are ignored."""
    for entry in entries:
        folder_key, name, backup = (entry.get(key) for key in (_FOLDER_KEY, "name", "kept"))
        if not (
            isinstance(name, str) and isinstance(backup, str) and isinstance(folder_key, str) and folder_key in folders
        ):
            continue
        is_plain_name = name not in ("", ".", "..") and not re.search(r"[/\\\0]", name)
        if is_plain_name and (backup in _backup_names(Path(name)) or (not backup and all_names)):
            yield folders[folder_key], name, backup


def _backup_names(path: Path) -> list[str]:
    return [f".{path.name}.{number}{_BACKUP_SUFFIX}" for number in range(1, 100)]


def _is_same(path: Path, other: Path) -> bool:
    return os.path.samestat(path.lstat(), other.lstat())


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _holds_only_shards(path: Path) -> bool:
    if path.is_symlink() or not path.is_dir():
        return False
    return all(part.name == MAIN_SHARD or SHARD_NAME.fullmatch(part.name) for part in path.iterdir())


def _digest_of_path(path: Path) -> str:
    if path.is_symlink():
        return link_digest(str(path.readlink()))
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return str(file_digest(file).hexdigest())


def _json_line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry).encode() + b"\n"
