"""Files that others write while a run trains, put back to what they were at its last save."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_tricks._shared.files import PARTIAL
from lightning_tricks.auto_resume.core.checkpoint_files import digest_of, write_durably

_KEPT = ".before"  # ends the names of files that were replaced or removed since the last save
_MOST = 1 << 24  # bytes of a journal


class FileJournal:
    """Notes which files are written and removed after a save, and keeps what they were, until the next save.

    A killed run repeats what it did since its last save. It finds the same files there when `undo` has been called:
    new ones are removed, others as they were. Removed is only what has the digest that was noted when it was written.
    A file that came after the save is not kept: a run needs the room of the files of one save at most.

    Args:
        path: Of the journal.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: dict[tuple[str, str], str] = {}  # the place and name of each touched file -> the name that keeps it
        self._folders: Mapping[str, Path] = {}

    def begin(self, base: str, folders: Mapping[str, Path]) -> None:
        """Start anew after a save, or before the first.

        Args:
            base: Name of the checkpoint, or nothing.
            folders: Whose files are written: a name of the place -> the folder.
        """
        self._folders = folders
        entries = self._entries()
        for folder, _, kept in _kept_in(entries, folders):
            (folder / kept).unlink(missing_ok=True)
        write_durably(self.path, lambda stream: stream.write(_line({"base": base})))
        self._seen.clear()

    @property
    def base(self) -> str | None:
        """The checkpoint that the journal follows, nothing for a start; None where there is no journal."""
        base = next((entry["base"] for entry in self._entries() if "base" in entry), None)
        return base if isinstance(base, str) else None

    def touch(self, place: str, path: Path) -> None:
        """Note that a file is about to be written or removed, and keep it, if it was there at the save."""
        folder = self._folders.get(place)
        if folder is None or path.parent != folder or (place, path.name) in self._seen:
            return
        kept = ""
        if os.path.lexists(path):
            kept = next(name for name in _names_for(path) if not os.path.lexists(path.with_name(name)))
        self._add({"place": place, "name": path.name, "kept": kept})
        self._seen[place, path.name] = kept
        if kept:
            try:
                os.link(path, path.with_name(kept), follow_symlinks=False)
            except (NotImplementedError, OSError):  # of a file system without links
                path.replace(path.with_name(kept))

    def note(self, path: Path, digest: str) -> None:
        """Note the digest of the bytes that a file is about to have."""
        for place, folder in self._folders.items():
            if path.parent == folder and (place, path.name) in self._seen:
                self._add({"place": place, "name": path.name, "sha256": digest})

    def undo(self, folders: Mapping[str, Path]) -> list[str]:
        """Put all files back; return a sentence for each that is left alone, since nobody knows whose it is."""
        said, entries = [], self._entries()
        for folder, name, kept in reversed(list(_kept_in(entries, folders, all_names=True))):
            path = folder / name
            for staged in folder.glob(f".{glob.escape(name)}.*{PARTIAL}"):
                staged.unlink(missing_ok=True)
            if kept and not os.path.lexists(folder / kept):
                continue
            if os.path.lexists(path) and not (kept and _is_same(path, folder / kept)):
                digests = {entry.get("sha256") for entry in entries if entry.get("name") == name}
                if _digest(path) not in digests:
                    said.append(f"{path} is not what was written there, and is left alone.")
                    continue
            path.unlink(missing_ok=True)
            if kept:
                (folder / kept).replace(path)
        return said

    def _add(self, entry: Mapping[str, Any]) -> None:
        with self.path.open("ab") as file:
            file.write(_line(entry))
            file.flush()
            os.fsync(file.fileno())

    def _entries(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        with suppress(OSError, ValueError, RecursionError):  # the last line may be cut short
            if self.path.is_file() and self.path.stat().st_size <= _MOST:
                for line in self.path.read_text(encoding="utf-8").splitlines():
                    entry = json.loads(line)
                    if isinstance(entry, dict):
                        found.append(entry)
        return found


def digest_of_link(target: str) -> str:
    """Return what stands for the digest of a symbolic link."""
    return f"link to {target}"


def _kept_in(
    entries: list[dict[str, Any]], folders: Mapping[str, Path], all_names: bool = False
) -> Iterator[tuple[Path, str, str]]:
    """Yield folder, name and the name that keeps it for each touched file, where these are plain names."""
    for entry in entries:
        place, name, kept = (entry.get(key) for key in ("place", "name", "kept"))
        if not (isinstance(name, str) and isinstance(kept, str) and isinstance(place, str) and place in folders):
            continue
        plain = name not in ("", ".", "..") and not re.search(r"[/\\\0]", name)
        if plain and (kept in _names_for(Path(name)) or (not kept and all_names)):
            yield folders[place], name, kept


def _names_for(path: Path) -> list[str]:
    return [f".{path.name}.{number}{_KEPT}" for number in range(1, 100)]


def _is_same(path: Path, other: Path) -> bool:
    one, two = path.lstat(), other.lstat()
    return (one.st_dev, one.st_ino) == (two.st_dev, two.st_ino)


def _digest(path: Path) -> str:
    if path.is_symlink():
        return digest_of_link(str(path.readlink()))
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return str(digest_of(file).hexdigest())


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry).encode() + b"\n"
