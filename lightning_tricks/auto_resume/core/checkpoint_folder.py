"""A directory of numbered checkpoints: each a folder with a manifest, which gets its name once it is complete."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import IO, Any

from lightning_tricks._shared.checks import check_path
from lightning_tricks._shared.file_locks import this_process
from lightning_tricks._shared.files import MAIN_FILE, PARTIAL_SUFFIX, check_kind, flush_directory, open_file
from lightning_tricks.auto_resume.core.durable_writing import file_digest, write_atomically, write_flushed

FORMAT = 4  # of the manifests and of what AutoResume adds to a checkpoint; every release reads the one before, too
CHECKPOINT_KEY = "auto_resume"  # of what AutoResume adds to a checkpoint
PRIVATE_DIR = ".auto_resume"  # in a directory of checkpoints; nobody else writes there
MANIFEST, CORRUPT_SUFFIX, _REMOVING = "manifest.json", ".corrupt", "removing-"
CHECKPOINT_NAME = re.compile(r"\d{6,}-epoch=\d+-step=\d+")
_SHARD_NAME = re.compile(r"\.metadata(\.tmp)?|__\d+_\d+\.distcp")
_DAMAGE = (AttributeError, KeyError, RecursionError, TypeError, ValueError)  # what a damaged record raises
_DAMAGED_OR_MISSING = (None, errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # others may pass, such as a lack of permission
_MAX_JSON_BYTES = 1 << 24
_MAX_BYTES_IN_MEMORY = 2**28  # of a file that is read at once; of a larger one, the bytes are compared first


class UnusableFolderError(Exception):
    """There are checkpoints that this release or this user cannot read, and which may not be passed over."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What is known of a checkpoint without reading it: a JSON file in its folder, which is the last one written.

    Attributes:
        file: Name of the folder.
        sha256: SHA-256 of the bytes of its main file, as hexadecimal digits.
        bytes: Size of that file.
        epoch: Number of completed epochs.
        step: Number of optimizer steps (`trainer.global_step`).
        batches: Number of batches of the current epoch that were trained on.
        finished: Whether the fit was complete.
        written: Time of the save, in seconds since the Unix epoch.
        loggers: Positions of the run's loggers, one record each.
        run: What distinguishes this run from others: names -> plain values.
        shards: The files beside the main one: names -> SHA-256 and size.
        format: Format of the checkpoint. Any later one has a `checksum`, too.
    """

    file: str
    sha256: str
    bytes: int
    epoch: int
    step: int
    batches: int
    finished: bool
    written: float
    loggers: Sequence[Mapping[str, Any]] = field(default_factory=list)
    run: Mapping[str, Any] = field(default_factory=dict)
    shards: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def number(self) -> int:
        """Number of the checkpoint in its directory; a later one has a larger number."""
        return _number(self.file)

    @property
    def files(self) -> dict[str, tuple[str, int]]:
        """The files in the folder beside the manifest, the main one last: names -> SHA-256 and size."""
        return {**self.shards, MAIN_FILE: (self.sha256, self.bytes)}

    def record(self) -> dict[str, Any]:
        """Return what its file holds: the fields, and a checksum of them."""
        values = json.loads(json.dumps(vars(self), default=dict))
        return {**values, "checksum": _checksum(values)}


def load_manifest(checkpoint: Path) -> Manifest:
    """Read the manifest in the folder of a checkpoint.

    Raises:
        OSError: If it cannot be read.
        UnusableFolderError: If a later release wrote it.
        ValueError: If it is damaged, or names a file that cannot be in the folder.
    """
    try:
        values = load_json(checkpoint / MANIFEST)
        is_intact = values.pop("checksum") == _checksum(values)
        if is_intact and values["format"] > FORMAT:
            raise UnusableFolderError(
                f"{checkpoint} has format {values['format']}, and this release reads formats up to {FORMAT}. Install "
                "a newer release, or choose another dirpath to start again."
            )
        manifest = Manifest(**{known.name: values[known.name] for known in fields(Manifest) if known.name in values})
        is_intact = is_intact and manifest.file == checkpoint.name and all(map(_SHARD_NAME.fullmatch, manifest.shards))
    except _DAMAGE:
        is_intact = False
    if not is_intact:
        raise ValueError(f"{MANIFEST} is damaged")
    return manifest


class CheckpointFolder:
    """The checkpoints in `<path>/.auto_resume`: folders such as `000012-epoch=3-step=900`, with `manifest.json`.

    Each is written as `writing` and renamed once it is complete and on disk. Its files never change, except that a
    manifest may be replaced.

    Args:
        path: Path of the directory; `~` is the home directory. `prepare` creates the directory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.expanduser(check_path("path", path, "a directory")))  # noqa: PTH111 - Path's raises without a home
        self.private = self.path / PRIVATE_DIR

    def prepare(self) -> None:
        """Create the directory, and check that it is writable and contains only files and folders.

        Raises:
            OSError: If it cannot be created, read or written, or there is a pipe, for example, in place of a file.
        """
        self.private.mkdir(parents=True, exist_ok=True)
        for path in self.private.iterdir():
            with suppress(FileNotFoundError):  # another process has removed it
                mode = path.stat().st_mode
                if not stat.S_ISDIR(mode) or path.suffix not in ("", CORRUPT_SUFFIX):
                    check_kind(path, mode)
        with tempfile.TemporaryFile(dir=self.private):
            pass

    def manifests(self) -> list[Manifest]:
        """Return the manifests of all checkpoints, newest first; `problems` reports unreadable ones."""
        return [found for found in self._manifests().values() if isinstance(found, Manifest)]

    def problems(self) -> dict[Path, str]:
        """Return the problems of checkpoints with unreadable manifests."""
        return {path: found for path, found in self._manifests().items() if isinstance(found, str)}

    def _manifests(self) -> dict[Path, Manifest | str]:
        found: dict[Path, Manifest | str] = {}
        with suppress(OSError):  # of the directory itself, which `prepare` raises
            for path in self._checkpoints():
                try:
                    found[path] = load_manifest(path)
                except (OSError, UnusableFolderError, ValueError) as error:
                    found[path] = _describe(error)
        return found

    def _checkpoints(self) -> list[Path]:
        """Return what has the name of a checkpoint, newest first."""
        paths = self.private.iterdir() if self.private.exists() else ()
        named = (path for path in paths if CHECKPOINT_NAME.fullmatch(path.name))
        return sorted(named, key=lambda path: _number(path.name), reverse=True)

    @property
    def writing(self) -> Path:
        """The folder of the checkpoint that `save` writes next; other ranks put their shards there before."""
        return self.private / "writing"

    def begin(self) -> None:
        """Create `writing`, empty."""
        remove_path(self.writing)
        self.writing.mkdir(parents=True)

    def save(self, checkpoint: Mapping[str, Any], **known: Any) -> Manifest:
        """Write a checkpoint and its manifest; both are on disk when this returns.

        Args:
            checkpoint: The value that `torch.save` writes.
            **known: The fields of `Manifest` that are not computed here. With `shards`, these files are in `writing`,
                and on the disk.

        Returns:
            The manifest.

        Raises:
            OSError: If the disk is full; the checkpoints before are kept.
        """
        import torch  # whoever copies or shows a checkpoint does without it

        from lightning_tricks._shared.host_copies import stage_on_host

        if not known.get("shards"):
            self.begin()
        numbers = (_number(path.name.removeprefix(_REMOVING)) for path in self.private.iterdir())
        name = f"{max(numbers, default=0) + 1:06d}-epoch={known['epoch']}-step={known['step']}"
        try:
            staged = stage_on_host(dict(checkpoint))
            digest, size = write_flushed(self.writing / MAIN_FILE, lambda stream: torch.save(staged, stream))
            known |= {"file": name, "sha256": digest, "bytes": size, "written": time.time()}
            manifest = Manifest(**known)
            self.keep(manifest)
        except BaseException:  # what is written of it may fill the disk
            remove_path(self.writing)
            raise
        return manifest

    def keep(self, manifest: Manifest) -> None:
        """Let what is in `writing` be the checkpoint of a manifest, or this machine's part of it."""
        write_flushed(self.writing / MANIFEST, lambda stream: stream.write(_json(manifest.record())))
        flush_directory(self.writing)
        self.writing.rename(self.private / manifest.file)
        flush_directory(self.private)

    def rewrite_manifest(self, manifest: Manifest, **known: Any) -> None:
        """Write a manifest again, with new values in some fields."""
        self.write_private(f"{manifest.file}/{MANIFEST}", replace(manifest, **known).record())

    def path_of(self, manifest: Manifest) -> Path:
        """Return the path of a checkpoint for `torch.load`; or that of its folder, as Lightning reads one of shards."""
        folder = self.private / manifest.file
        return folder if manifest.shards else folder / MAIN_FILE

    def find_problem(self, manifest: Manifest) -> str:
        """Return what is wrong with the files of a checkpoint; empty if they have the bytes that were written."""
        try:
            self._open(manifest).close()
        except (OSError, ValueError) as error:
            return _describe(error)
        return ""

    def _open(self, manifest: Manifest) -> IO[bytes]:
        """Open the main file of a checkpoint, all of whose files have the bytes that were written.

        Raises:
            OSError: If a file cannot be read.
            ValueError: If a file has other bytes.
        """
        *shards, main = ((self.private / manifest.file / name, *of) for name, of in manifest.files.items())
        if shards:
            with ThreadPoolExecutor(4) as threads:  # digests are computed without Python's lock
                for stream in threads.map(open_intact, *zip(*shards, strict=True)):
                    stream.close()
        return open_intact(*main)

    def newest(self, warn: Callable[[str], object]) -> Manifest | None:
        """Return the manifest of the newest intact checkpoint, and rename newer ones that are damaged.

        Args:
            warn: Called with a sentence for each newer checkpoint that is damaged.

        Raises:
            UnusableFolderError: If another release wrote a checkpoint, or it cannot be read for a reason other than
                damage, such as missing permission.
        """
        if (found := self.open_newest(warn)) is None:
            return None
        found[1].close()
        return found[0]

    def open_newest(self, warn: Callable[[str], object]) -> tuple[Manifest, IO[bytes]] | None:
        """Return what `newest` does, and its main file, open, whose bytes were compared."""
        problems: dict[Path, str] = {}
        found = None
        for path in self._checkpoints():
            try:
                manifest = load_manifest(path)
                found = manifest, self._open(manifest)
                break
            except (OSError, ValueError) as error:
                if getattr(error, "errno", None) not in _DAMAGED_OR_MISSING:
                    raise UnusableFolderError(
                        f"{path}: {_describe(error)}, and may be intact. Make it readable and run the same command "
                        "again, or choose another dirpath to start again."
                    ) from error
                problems[path] = _describe(error)
        used = "no other checkpoint is intact" if found is None else f"the newest intact one is {found[0].file}"
        for path, problem in problems.items():
            if path.is_dir():  # else another program has put it there
                path.replace(path.with_name(f"{path.name}{CORRUPT_SUFFIX}"))
                problem += f". It was renamed to *{CORRUPT_SUFFIX}"
            warn(f"the checkpoint {path} cannot be used: {problem}; {used}.")
        return found

    def prune(self, keep: int) -> None:
        """Remove all checkpoints but the newest `keep`."""
        for path in list(filter(Path.is_dir, self._checkpoints()))[keep:]:
            remove_path(path.replace(self.aside(path.name)))

    def aside(self, name: str) -> Path:
        """Return where a checkpoint is while it is removed."""
        return self.private / f"{_REMOVING}{name}"

    def clear(self) -> None:
        """Remove all records, and put checkpoints aside for `clean_up`; a lock and what processes print stay."""
        self.clean_up()
        for path in [*self.private.iterdir()] if self.private.exists() else ():
            if CHECKPOINT_NAME.fullmatch(path.name):
                path.replace(self.aside(path.name))
            elif path.name != "lock" and path.suffix != ".log":
                remove_path(path)

    def clean_up(self) -> None:
        """Remove what killed processes left behind; no other process may write checkpoints here meanwhile."""
        for path in (self.writing, *self.private.glob(f"{_REMOVING}*"), *self.private.glob(f".*{PARTIAL_SUFFIX}")):
            remove_path(path)

    def write_status(self, **status: Any) -> None:
        """Record the progress of a run for `read_status`, with the process and the time."""
        self.private.mkdir(parents=True, exist_ok=True)
        values = {**this_process(), "time": time.time(), **status}
        self.write_private("status.json", values, flush=())  # only people read it

    def read_status(self) -> dict[str, Any]:
        """Return the last status that `write_status` wrote; empty if there is none."""
        return self.read_private("status.json")

    def read_private(self, name: str) -> dict[str, Any]:
        """Return the contents of a file in the private folder; empty if it cannot be read."""
        try:
            return load_json(self.private / name)
        except (OSError, *_DAMAGE):
            return {}

    def write_private(self, name: str, values: Mapping[str, Any], flush: Sequence[str] = ("file", "directory")) -> None:
        """Write a JSON file to the private folder, for `read_private`."""
        write_atomically(self.private / name, lambda stream: stream.write(_json(values)), flush=flush)


def fit_folders(path: str | os.PathLike[str]) -> Iterator[CheckpointFolder]:
    """Yield the folders of all fits that wrote to a directory: the directory itself, `fit2`, `fit3` and so on."""
    first = CheckpointFolder(path)
    yield first
    later = [folder for folder in first.path.glob("fit*") if folder.name[3:].isdecimal() and folder.is_dir()]
    yield from map(CheckpointFolder, sorted(later, key=lambda folder: int(folder.name[3:])))


def main_file(checkpoint: Path) -> Path:
    """Return the file of a checkpoint that is read first: the checkpoint itself, or what a folder has beside shards."""
    return checkpoint / MAIN_FILE if checkpoint.is_dir() else checkpoint


def load_json(path: Path) -> dict[str, Any]:
    """Read the mapping that a JSON file of limited size holds."""
    with open_file(path) as file:
        data = file.read(_MAX_JSON_BYTES + 1)
    values = json.loads(data)
    if len(data) > _MAX_JSON_BYTES or not isinstance(values, dict):
        raise ValueError("it is too large, or contains no mapping")
    return values


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=1, default=dict) + "\n").encode()


def _checksum(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _number(name: str) -> int:
    """Return the number that the name of a checkpoint begins with; 0 for another name."""
    digits = name.partition("-")[0]
    return int(digits) if digits.isdecimal() else 0


def remove_path(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return f"{Path(error.filename or 'a file').name} cannot be read ({error.strerror})"
    return str(error)


def open_intact(path: Path, digest: str, size: int) -> IO[bytes]:
    """Open a file that has the bytes that were written.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it has other bytes.
    """
    stream: IO[bytes] = open_file(path)
    if size <= _MAX_BYTES_IN_MEMORY:
        with stream:
            stream = io.BytesIO(stream.read(size + 1))
    if file_digest(stream).hexdigest() != digest:
        stream.close()
        raise ValueError(f"{path.name} has other bytes than were written (its SHA-256 differs)")
    stream.seek(0)
    return stream
