"""A directory of numbered checkpoints, which are verified before they are used."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import tempfile
import time
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch

from lightning_tricks._shared.checks import check_path
from lightning_tricks._shared.file_locks import this_process
from lightning_tricks._shared.files import PARTIAL_SUFFIX, flush_directory
from lightning_tricks._shared.host_copies import stage_on_host
from lightning_tricks.auto_resume.core.durable_writing import file_digest, write_atomically
from lightning_tricks.auto_resume.core.manifests import (
    CHECKPOINT_KEY,
    CHECKPOINT_NAME,
    FORMAT,
    MAIN_SHARD,
    Manifest,
    NewerFormatError,
    installed_versions,
    load_json,
    load_manifest,
)
from lightning_tricks.auto_resume.core.safe_loading import load_plain_data

PRIVATE_DIR = ".auto_resume"  # in a directory of checkpoints, the folder of AutoResume's own files
_CORRUPT_SUFFIX = ".corrupt"
_MANIFEST_SUFFIX = ".json"
_STAGED_NAME = re.compile(rf"\.{CHECKPOINT_NAME.pattern}(\.json)?\..+{re.escape(PARTIAL_SUFFIX)}")
_MAX_BYTES_IN_MEMORY = 2**28  # of a file that is read at once; of a larger one, the bytes are compared first
_MAX_THREADS = 4
_LOG_HEADER = b"AutoResume: the terminal of this run is gone.\n"  # the first line of a log
# In the private folder: the manifest of the checkpoint that is being written, which is moved beside it when that is
# there, and of the one that is being removed
_WRITING_RECORD, _REMOVING_RECORD = "writing.json", "removing.json"


class CheckpointFolder:
    """A directory of numbered checkpoints, each with a manifest; other programs may write files there, too.

    A checkpoint is complete once it has a manifest, which is written after it. A file is removed or renamed only if a
    manifest lists it with the bytes that it has: its name alone does not tell that it was written here. A checkpoint of
    shards is a folder, as Lightning writes it, which appears under its name once all is in it.

    Args:
        path: Path of the directory; `~` is the home directory. `prepare` creates the directory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.expanduser(check_path("path", path, "a directory")))  # noqa: PTH111 - Path's raises without a home
        self.private = self.path / PRIVATE_DIR

    def prepare(self) -> None:
        """Create the directory, and check that it can be written.

        Raises:
            OSError: If it cannot be created or written.
        """
        self.private.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.path):
            pass

    def manifests(self) -> list[Manifest]:
        """Return the manifests of all checkpoints, newest first; other files are ignored."""
        found = []
        for path in self.path.glob(f"*.ckpt{_MANIFEST_SUFFIX}"):
            try:
                found.append(load_manifest(path, path.name.removesuffix(_MANIFEST_SUFFIX)))
            except (OSError, RecursionError, TypeError, ValueError):  # truncated, or written by another program
                continue
        return sorted(found, key=lambda manifest: manifest.number, reverse=True)

    def unrecorded(self) -> list[Path]:
        """Return the checkpoints whose manifest is missing or damaged.

        Files of other programs may bear such names: without a manifest, only those with AutoResume's part count.
        """
        known = {manifest.file for manifest in self.manifests()}
        found = []
        for path in sorted(self.path.glob("*.ckpt")):
            if CHECKPOINT_NAME.fullmatch(path.name) and path.name not in known:
                manifest = path.with_name(f"{path.name}{_MANIFEST_SUFFIX}")
                main = main_file(path)
                is_damaged = manifest.is_file() and (not _is_json(manifest) or _is_whole_archive(main))
                if is_damaged or _has_own_part(main):
                    found.append(path)
        return found

    @property
    def shards_in_writing(self) -> Path:
        """The folder for the shards of the checkpoint that `save` writes next."""
        return self.private / "writing"

    def prepare_shards(self) -> None:
        """Create `shards_in_writing`, empty."""
        shutil.rmtree(self.shards_in_writing, ignore_errors=True)
        self.shards_in_writing.mkdir(parents=True)

    def save(self, checkpoint: Mapping[str, Any], **known: Any) -> Manifest:
        """Write a checkpoint and then its manifest; both are on the disk when this returns.

        Args:
            checkpoint: What `torch.save` writes.
            **known: The fields of `Manifest` that are not computed from the file. With `shards`, these files are in
                `shards_in_writing`, and on the disk.

        Returns:
            The manifest.

        Raises:
            OSError: If the disk is full; the checkpoints before are kept.
        """
        name = self._next_name(known["epoch"], known["step"])
        self.private.mkdir(exist_ok=True)
        staged_values = stage_on_host(dict(checkpoint))
        made: list[Manifest] = []

        def write_record(staged: Path, digest: str, size: int) -> None:
            modified = staged.stat().st_mtime_ns
            made.append(
                Manifest(
                    file=name,
                    sha256=digest,
                    bytes=size,
                    modified=modified,
                    written=time.time(),
                    versions=installed_versions(),
                    **known,
                )
            )
            # tells after a kill that the file, which then lacks only its manifest, was written here
            self._write_json(f"{PRIVATE_DIR}/{_WRITING_RECORD}", vars(made[0]), flush=("file",))

        target = self.shards_in_writing / MAIN_SHARD if known.get("shards") else self.path / name
        write_atomically(target, lambda stream: torch.save(staged_values, stream), write_record, flush=("file",))
        if target.parent != self.path:
            flush_directory(target.parent)
            target.parent.replace(self.path / name)
        try:
            (self.private / _WRITING_RECORD).replace(self.path / f"{name}{_MANIFEST_SUFFIX}")
        except BaseException:  # a checkpoint without a manifest would never be removed
            self._remove_files(made[0])
            raise
        flush_directory(self.path)  # both names at once
        return made[0]

    def rewrite_manifest(self, manifest: Manifest, **known: Any) -> None:
        """Write a manifest again, with new values in some fields."""
        self._write_json(f"{manifest.file}{_MANIFEST_SUFFIX}", vars(replace(manifest, **known)))

    def _next_name(self, epoch: int, step: int) -> str:
        names = {path.name for path in self.path.iterdir()}
        matches = [CHECKPOINT_NAME.match(name) for name in names]
        number = max((int(match[1]) for match in matches if match), default=0)
        while True:
            number += 1
            name = f"{number:06d}-epoch={epoch}-step={step}.ckpt"
            if not {name, f"{name}{_MANIFEST_SUFFIX}"} & names:
                return name

    def find_problem(self, manifest: Manifest) -> str:
        """Return what is wrong with a checkpoint's file; empty if it has the bytes that were written."""
        problem, stream = self._open(manifest)
        if stream is not None:
            stream.close()
        return problem

    def _open(self, manifest: Manifest) -> tuple[str, IO[bytes] | None]:
        """Return what is wrong with a checkpoint's file; or "", and the file with the bytes that were written."""

        def problem_of(shard: str) -> str:
            problem, stream = _open_intact(self.path / manifest.file / shard, *manifest.shards[shard])
            if stream is not None:
                stream.close()
            return problem and f"has a shard {shard} that {problem}"

        if manifest.shards:
            with ThreadPoolExecutor(_MAX_THREADS) as threads:  # digests are computed without Python's lock
                for problem in filter(None, threads.map(problem_of, manifest.shards)):
                    return problem, None
        return _open_intact(self.path / manifest.main_file, manifest.sha256, manifest.bytes)

    def newest(self, warn: Callable[[str], object]) -> Manifest | None:
        """Return the manifest of the newest intact checkpoint, and quarantine the damaged ones that are newer.

        Args:
            warn: Called with a sentence for each newer checkpoint that is damaged, or whose manifest is.

        Raises:
            NewerFormatError: If a checkpoint was written by a later release.
        """
        manifest, stream = self.open_newest(warn) or (None, None)
        if stream is not None:
            stream.close()
        return manifest

    def open_newest(self, warn: Callable[[str], object]) -> tuple[Manifest, IO[bytes]] | None:
        """Return what `newest` does, and the file, open, whose bytes were compared."""
        unrecorded, found = self.unrecorded(), self._open_newest_intact(warn)
        used = "the run starts again" if found is None else f"{found[0].file} is used"
        for path in unrecorded:
            if found is None or int(path.name.partition("-")[0]) > found[0].number:
                warn(
                    f"{path} is not used, as its manifest is missing or damaged and it cannot be verified: {used}. "
                    "Remove the file if you do not need it."
                )
        return found

    def _open_newest_intact(self, warn: Callable[[str], object]) -> tuple[Manifest, IO[bytes]] | None:
        for manifest in self.manifests():
            if manifest.format > FORMAT:
                raise NewerFormatError(
                    f"{self.path / manifest.file} has format {manifest.format}, written by lightning_tricks "
                    f"{manifest.versions.get('lightning_tricks', '?')}; this release knows formats up to {FORMAT}. "
                    "Install that release, or choose another dirpath to start again."
                )
            problem, stream = self._open(manifest)
            if stream is not None:
                return manifest, stream
            self.quarantine(manifest)
            name = self.path / manifest.file
            warn(f"{name} {problem}: it was renamed to *{_CORRUPT_SUFFIX}; the checkpoint before it is used.")
        return None

    def quarantine(self, manifest: Manifest) -> None:
        """Rename a manifest, and its checkpoint unless another program replaced it by an intact one."""
        path = self.path / manifest.main_file
        names = [f"{manifest.file}{_MANIFEST_SUFFIX}"]
        if path.is_file() and (self.is_own(manifest) or not _is_whole_archive(path)):
            names.append(manifest.file)
        for name in names:
            target = self.path / f"{name}{_CORRUPT_SUFFIX}"
            if os.path.lexists(self.path / name) and not os.path.lexists(target):
                (self.path / name).replace(target)

    def is_own(self, manifest: Manifest) -> bool:
        """Whether a manifest's file is the one that was written with it."""
        try:
            state = (self.path / manifest.main_file).stat()
        except OSError:
            return False
        if state.st_size == manifest.bytes and state.st_mtime_ns == manifest.modified:
            return True
        return not self.find_problem(manifest)

    def prune(self, keep: int) -> None:
        """Remove all checkpoints but the newest `keep`."""
        for manifest in self.manifests()[keep:]:
            self.private.mkdir(exist_ok=True)
            (self.path / f"{manifest.file}{_MANIFEST_SUFFIX}").replace(self.private / _REMOVING_RECORD)
            self._remove_recorded()

    def _remove_recorded(self) -> None:
        """Remove the checkpoint whose manifest was moved to the private folder, and then the manifest."""
        record = self.private / _REMOVING_RECORD
        with suppress(OSError, RecursionError, TypeError, ValueError):
            manifest = load_manifest(record)
            if self.is_own(manifest):
                self._remove_files(manifest)
        record.unlink(missing_ok=True)

    def _remove_files(self, manifest: Manifest) -> None:
        for name in manifest.all_files:  # the main one last, by which the others are known after a kill
            (self.path / name).unlink(missing_ok=True)
        if manifest.shards:
            with suppress(OSError):  # somebody else has put a file there
                (self.path / manifest.file).rmdir()

    def clean_up(self) -> None:
        """Remove temporary files of killed processes, and complete a checkpoint that lacks only its manifest.

        No other process may write checkpoints here meanwhile.
        """
        staged = [path for path in self.path.glob(f".*{PARTIAL_SUFFIX}") if _STAGED_NAME.fullmatch(path.name)]
        for path in (*staged, *self.private.glob(f".*{PARTIAL_SUFFIX}")):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.shards_in_writing, ignore_errors=True)
        self._remove_recorded()
        writing = self.private / _WRITING_RECORD
        with suppress(OSError, RecursionError, TypeError, ValueError):
            manifest = load_manifest(writing)
            target = self.path / f"{manifest.file}{_MANIFEST_SUFFIX}"
            if not os.path.lexists(target) and not self.find_problem(manifest):
                writing.replace(target)
        writing.unlink(missing_ok=True)

    def log_path(self) -> Path:
        """Return the path of the log in this directory, which is created unless it exists."""
        number = 0
        while True:
            number += 1
            path = self.path / f"train{f'-{number}' if number > 1 else ''}.log"
            try:
                with path.open("xb") as file:
                    file.write(_LOG_HEADER)
            except FileExistsError:
                with path.open("rb") as file:
                    if file.read(len(_LOG_HEADER)) != _LOG_HEADER:
                        continue
            return path

    def write_status(self, **status: Any) -> None:
        """Record the progress of a run for `read_status`, with the process and the time."""
        self.private.mkdir(parents=True, exist_ok=True)
        values = {**this_process(), "time": time.time(), **status}
        self._write_json(f"{PRIVATE_DIR}/status.json", values, flush=())  # only people read it

    def read_status(self) -> dict[str, Any]:
        """Return what `write_status` wrote last; empty if nothing was written."""
        return self.read_private("status.json")

    def read_private(self, name: str) -> dict[str, Any]:
        """Return what a file of the private folder holds; empty if it cannot be read."""
        try:
            return load_json(self.private / name)
        except (OSError, RecursionError, TypeError, ValueError):
            return {}

    def write_private(self, name: str, values: Mapping[str, Any]) -> None:
        """Write a JSON file to the private folder, for `read_private`."""
        self._write_json(f"{PRIVATE_DIR}/{name}", values)

    def _write_json(self, name: str, values: Mapping[str, Any], flush: Collection[str] = ("file", "directory")) -> None:
        text = json.dumps(values, indent=1, default=dict) + "\n"
        write_atomically(self.path / name, lambda stream: stream.write(text.encode()), flush=flush)


def fit_folders(path: str | os.PathLike[str]) -> Iterator[CheckpointFolder]:
    """Yield the folders of all fits that wrote to a directory: the directory itself, `fit2`, `fit3` and so on."""
    first = CheckpointFolder(path)
    yield first
    later = [folder for folder in first.path.glob("fit*") if folder.name[3:].isdecimal() and folder.is_dir()]
    for folder in sorted(later, key=lambda folder: int(folder.name[3:])):
        yield CheckpointFolder(folder)


def main_file(checkpoint: Path) -> Path:
    """Return the file of a checkpoint that is read first: the checkpoint itself, or what a folder has beside shards."""
    return checkpoint / MAIN_SHARD if checkpoint.is_dir() else checkpoint


def _open_intact(path: Path, digest: str, size: int) -> tuple[str, IO[bytes] | None]:
    """Return what is wrong with a file; or "", and the file with the bytes that were written."""
    try:
        found = path.stat().st_size
        if found != size:
            return f"has {found} bytes instead of {size}", None
        stream: IO[bytes] = path.open("rb")
        if size <= _MAX_BYTES_IN_MEMORY:
            with stream:
                stream = io.BytesIO(stream.read())
        if file_digest(stream).hexdigest() == digest:
            stream.seek(0)
            return "", stream
        stream.close()
        return "has other bytes than were written (SHA-256 differs)", None
    except OSError as error:
        return f"cannot be read ({error.strerror or error})", None


def _is_json(path: Path) -> bool:
    """Whether a file holds JSON, and is not one that was damaged."""
    try:
        load_json(path)
    except TypeError:  # it holds no mapping
        return True
    except (OSError, RecursionError, ValueError):
        return False
    return True


def _has_own_part(path: Path) -> bool:
    """Whether a checkpoint has what AutoResume adds to those of a Trainer."""
    try:
        return CHECKPOINT_KEY in load_plain_data(path)
    except Exception:  # of the file system, of torch, or of a file that is something else
        return False


def _is_whole_archive(path: Path) -> bool:
    """Whether a file is an intact archive, as `torch.save` writes it: stored records with valid checksums."""
    try:
        with zipfile.ZipFile(path) as archive:
            stored = all(record.compress_type == zipfile.ZIP_STORED for record in archive.infolist())
            return not stored or archive.testzip() is None
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError, EOFError):
        return False
