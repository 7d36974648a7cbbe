"""Checkpoints that a kill at any moment leaves readable: written durably, listed in manifests, verified before use."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import IO, Any

import torch

from lightning_tricks._shared.files import PARTIAL_SUFFIX, atomic_write

FORMAT = 2  # of the manifests and of what AutoResume adds to a checkpoint
PRIVATE_DIR = ".auto_resume"  # the folder, in a directory of checkpoints, of what nobody else reads or writes
_CORRUPT_SUFFIX = ".corrupt"
_MANIFEST_SUFFIX = ".json"
_CHECKPOINT_NAME = re.compile(r"(\d{6,})-epoch=\d+-step=\d+\.ckpt")
_STAGED_NAME = re.compile(rf"\.{_CHECKPOINT_NAME.pattern}(\.json)?\..+{re.escape(PARTIAL_SUFFIX)}")
_LOG_HEADER = b"AutoResume: the terminal of this run is gone.\n"  # begins a log
_MAX_MANIFEST_BYTES = 1 << 24  # bytes
# In the private folder: the manifest of the checkpoint that is about to be there, and of one about to be removed
_WRITING_RECORD, _REMOVING_RECORD = "writing.json", "removing.json"


class NewerFormatError(ValueError):
    """A checkpoint was written by a later release, which may have stored more than this one knows of."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What is known of a checkpoint without reading it.

    Attributes:
        file: Name of the checkpoint, beside its manifest.
        sha256: Of the file's bytes.
        bytes: Size of the file.
        epoch: Epochs completed.
        step: Optimizer steps done (`trainer.global_step`).
        batches: Batches done in the epoch that runs.
        finished: Whether the fit was at its end.
        written: Seconds since the Unix epoch.
        modified: The file's time of modification, in nanoseconds; 0 where it is not known.
        loggers: Where the loggers of the run stand, one record each.
        run: What tells this run from another: names -> plain values.
        versions: Of Python and the libraries.
        format: Of this record.
    """

    file: str
    sha256: str
    bytes: int
    epoch: int
    step: int
    batches: int
    finished: bool
    written: float
    modified: int = 0
    loggers: Sequence[Mapping[str, Any]] = field(default_factory=list)
    run: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def number(self) -> int:
        """The place among the checkpoints of its directory."""
        return int(self.file.partition("-")[0])


def write_durably(
    path: str | os.PathLike[str],
    write: Callable[[IO[bytes]], object],
    before_replace: Callable[[Path, str, int], object] | None = None,
) -> tuple[str, int]:
    """Write a file so that, whenever the process or the machine stops, the path holds the old or the new one, whole.

    The bytes are staged beside the target, on the same file system whatever TMPDIR says, flushed to the disk and
    renamed; then the directory is flushed. An error leaves the old file and no staged one.

    Args:
        path: Of the file; its directory must exist.
        write: Called with a stream that takes bytes.
        before_replace: Called with the staged file, its SHA-256 and its size right before it takes the place of the
            old one.

    Returns:
        The SHA-256 of the bytes, as hexadecimal digits, and their number.

    Raises:
        OSError: If the directory cannot be written or is full.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     digest, size = write_durably(Path(folder) / "note", lambda stream: stream.write(b"kept"))
        ...     (Path(folder) / "note").read_bytes(), size
        (b'kept', 4)
    """
    with atomic_write(Path(path)) as staged:
        with staged.open("wb") as file:
            hashing_stream = _HashingStream(file)
            hashing_stream.write_with(write)
        if before_replace is not None:
            before_replace(staged, hashing_stream.digest.hexdigest(), hashing_stream.size)
    return hashing_stream.digest.hexdigest(), hashing_stream.size


def save_durably(
    value: Any, path: str | os.PathLike[str], before_replace: Callable[[Path, str, int], object] | None = None
) -> tuple[str, int]:
    """`torch.save` through `write_durably`: return the file's SHA-256 and its size in bytes."""
    return write_durably(path, lambda stream: torch.save(value, stream), before_replace)


class CheckpointFolder:
    """A directory of numbered checkpoints, each with a manifest, among files of whoever else writes there.

    A checkpoint counts once its manifest is there, which is written after it. Removed and renamed is only what a
    manifest lists with the bytes that the file has; the name alone is nobody's.

    Args:
        path: Of the directory; `~` is the home directory. `prepare` makes it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.expanduser(path))  # noqa: PTH111 - Path's raises where there is no home
        self.private = self.path / PRIVATE_DIR

    def prepare(self) -> None:
        """Make the directory, and see that it can be written.

        Raises:
            OSError: If it cannot.
        """
        self.private.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.path):
            pass

    def manifests(self) -> list[Manifest]:
        """Return the records of all checkpoints, newest first; others' files are passed over."""
        found = []
        for path in self.path.glob(f"*.ckpt{_MANIFEST_SUFFIX}"):
            try:
                found.append(_load_manifest(path, path.name.removesuffix(_MANIFEST_SUFFIX)))
            except (OSError, RecursionError, TypeError, ValueError):  # cut short by a disk, or another's
                continue
        return sorted(found, key=lambda manifest: manifest.number, reverse=True)

    def save(self, checkpoint: Mapping[str, Any], **known: Any) -> Manifest:
        """Write a checkpoint and then its manifest.

        Args:
            checkpoint: For `torch.save`.
            **known: The fields of `Manifest` that the file itself does not tell.

        Raises:
            OSError: If there is no room; what was there before is still there.
        """
        name = self._next_name(known["epoch"], known["step"])
        self.private.mkdir(exist_ok=True)
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
            self._write_json(
                f"{PRIVATE_DIR}/{_WRITING_RECORD}", asdict(made[0])
            )  # whose file it is, if that is all that is left

        save_durably(dict(checkpoint), self.path / name, write_record)
        self.rewrite_manifest(made[0])
        return made[0]

    def rewrite_manifest(self, manifest: Manifest, **known: Any) -> None:
        """Write a manifest, with other values in some fields."""
        manifest = replace(manifest, **known)
        try:
            self._write_json(f"{manifest.file}{_MANIFEST_SUFFIX}", asdict(manifest))
        except BaseException:
            if not known:  # a checkpoint without a manifest is nobody's
                (self.path / manifest.file).unlink(missing_ok=True)
            raise

    def _next_name(self, epoch: int, step: int) -> str:
        names = {path.name for path in self.path.iterdir()}
        matches = [_CHECKPOINT_NAME.match(name) for name in names]
        number = max((int(match[1]) for match in matches if match), default=0)
        while True:
            number += 1
            name = f"{number:06d}-epoch={epoch}-step={step}.ckpt"
            if not {name, f"{name}{_MANIFEST_SUFFIX}"} & names:
                return name

    def find_problem(self, manifest: Manifest) -> str:
        """Return what is wrong with a checkpoint's file, or nothing where its bytes are those that were written."""
        path = self.path / manifest.file
        try:
            size = path.stat().st_size
            if size != manifest.bytes:
                return f"has {size} bytes instead of {manifest.bytes}"
            with path.open("rb") as file:
                digest = file_digest(file)
        except OSError as error:
            return f"cannot be read ({error.strerror or error})"
        return "" if digest.hexdigest() == manifest.sha256 else "has other bytes than were written (SHA-256 differs)"

    def newest(self, warn: Callable[[str], object]) -> Manifest | None:
        """Return the newest checkpoint whose bytes are whole, and set broken ones aside.

        Args:
            warn: Called with a sentence for each that was set aside.

        Raises:
            NewerFormatError: If the newest was written by a later release.
        """
        for manifest in self.manifests():
            if manifest.format > FORMAT:
                raise NewerFormatError(
                    f"{self.path / manifest.file} has format {manifest.format}, written by lightning_tricks "
                    f"{manifest.versions.get('lightning_tricks', '?')}; this release knows formats up to {FORMAT}. "
                    "Install that release, or choose another dirpath to begin afresh."
                )
            problem = self.find_problem(manifest)
            if not problem:
                return manifest
            self.quarantine(manifest)
            warn(f"{self.path / manifest.file} {problem}: set aside as *{_CORRUPT_SUFFIX}; the one before it is used.")
        return None

    def quarantine(self, manifest: Manifest) -> None:
        """Rename a manifest, and its checkpoint unless somebody else put a whole one in its place."""
        path = self.path / manifest.file
        names = [f"{manifest.file}{_MANIFEST_SUFFIX}"]
        if path.is_file() and (self.is_own(manifest) or not _is_whole_archive(path)):
            names.append(manifest.file)
        for name in names:
            target = self.path / f"{name}{_CORRUPT_SUFFIX}"
            if os.path.lexists(self.path / name) and not os.path.lexists(target):
                (self.path / name).replace(target)

    def is_own(self, manifest: Manifest) -> bool:
        """Whether the file of a manifest is the one that was written with it."""
        try:
            state = (self.path / manifest.file).stat()
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
        """Remove the checkpoint whose manifest says that in the private folder, and then the manifest."""
        record = self.private / _REMOVING_RECORD
        with suppress(OSError, RecursionError, TypeError, ValueError):
            manifest = _load_manifest(record)
            if self.is_own(manifest):
                (self.path / manifest.file).unlink(missing_ok=True)
        record.unlink(missing_ok=True)

    def clean_up(self) -> None:
        """Remove what killed processes staged, and finish a checkpoint that lacks only its manifest.

        Nobody else may write checkpoints here meanwhile.
        """
        staged = [path for path in self.path.glob(f".*{PARTIAL_SUFFIX}") if _STAGED_NAME.fullmatch(path.name)]
        for path in (*staged, *self.private.glob(f".*{PARTIAL_SUFFIX}")):
            path.unlink(missing_ok=True)
        self._remove_recorded()
        writing = self.private / _WRITING_RECORD
        with suppress(OSError, RecursionError, TypeError, ValueError):
            manifest = _load_manifest(writing)
            if not os.path.lexists(self.path / f"{manifest.file}{_MANIFEST_SUFFIX}") and not self.find_problem(
                manifest
            ):
                self.rewrite_manifest(manifest)
        writing.unlink(missing_ok=True)

    def log_path(self) -> Path:
        """Return the path of a log that begins as ours do, and make it where there is none."""
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
        """Write down how far a run has come, for `read_status`."""
        self.private.mkdir(parents=True, exist_ok=True)
        self.write_private("status.json", {"pid": os.getpid(), "host": platform.node(), "time": time.time(), **status})

    def read_status(self) -> dict[str, Any]:
        """Return what `write_status` wrote last, or nothing."""
        return self.read_private("status.json")

    def read_private(self, name: str) -> dict[str, Any]:
        """Return what a file of the private folder holds, or nothing."""
        try:
            return _load_json(self.private / name)
        except (OSError, RecursionError, ValueError):
            return {}

    def write_private(self, name: str, values: Mapping[str, Any]) -> None:
        """Write a file of the private folder for `read_private`."""
        self._write_json(f"{PRIVATE_DIR}/{name}", values)

    def _write_json(self, name: str, values: Mapping[str, Any]) -> None:
        text = json.dumps(values, indent=1, default=dict) + "\n"
        write_durably(self.path / name, lambda stream: stream.write(text.encode()))


def fit_folders(path: str | os.PathLike[str]) -> Iterator[CheckpointFolder]:
    """Yield the folders of the fits that wrote to a directory: the directory itself, `fit2`, `fit3` and so on."""
    first = CheckpointFolder(path)
    yield first
    later = [folder for folder in first.path.glob("fit*") if folder.name[3:].isdecimal() and folder.is_dir()]
    for folder in sorted(later, key=lambda folder: int(folder.name[3:])):
        yield CheckpointFolder(folder)


def differences(saved: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """Say in which entries two records of a run differ: one phrase for each, nested names joined by dots."""
    found = []
    for name in {**saved, **present}:
        saved_value, present_value = saved.get(name), present.get(name)
        if isinstance(saved_value, Mapping) and isinstance(present_value, Mapping):
            found += [f"{name}.{phrase}" for phrase in differences(saved_value, present_value)]
        elif saved_value != present_value:
            found.append(f"{name} was {saved_value!r} and is {present_value!r}")
    return found


def installed_versions() -> dict[str, str]:
    """Return the versions that decide about bits: Python's, torch's and, where they are installed, the others'."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("lightning", "lightning_tricks"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


class _HashingStream:
    """A stream that computes the digest of what it passes on."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.size, self.digest = file, 0, hashlib.sha256()
        self.error: OSError | None = None

    def write_with(self, write: Callable[[IO[bytes]], object]) -> None:
        """Let a function write; `torch.save` speaks of a wrong position where the disk is full."""
        try:
            write(self)  # type: ignore[arg-type]
        except RuntimeError:
            if self.error is not None:
                raise self.error from None
            raise

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.size += len(data)
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


def file_digest(file: IO[bytes]) -> Any:
    """Return the SHA-256 of what is left to read of a file, as an object of hashlib."""
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest


def _load_json(path: Path) -> dict[str, Any]:
    if not path.is_file() or path.stat().st_size > _MAX_MANIFEST_BYTES:
        raise ValueError(f"{path} is no record.")
    values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise TypeError(f"{path} holds no mapping.")
    return values


def _load_manifest(path: Path, file: str | None = None) -> Manifest:
    """Read a manifest of a checkpoint beside it; one that names another file, or what is no checkpoint, is refused."""
    values = _load_json(path)
    manifest = Manifest(**{one.name: values[one.name] for one in fields(Manifest) if one.name in values})
    counts = (manifest.bytes, manifest.epoch, manifest.step, manifest.batches, manifest.modified, manifest.format)
    is_valid = (
        isinstance(manifest.file, str)
        and _CHECKPOINT_NAME.fullmatch(manifest.file) is not None
        and manifest.file == (file or manifest.file)
        and re.fullmatch("[0-9a-f]{64}", manifest.sha256) is not None
        and all(type(count) is int and count >= 0 for count in counts)
        and isinstance(manifest.finished, bool)
        and isinstance(manifest.written, int | float)
        and isinstance(manifest.run, dict)
        and isinstance(manifest.versions, dict)
        and isinstance(manifest.loggers, list)
    )
    if not is_valid:
        raise ValueError(f"{path} is no manifest of a checkpoint beside it.")
    return manifest


def _is_whole_archive(path: Path) -> bool:
    """Whether a file is what `torch.save` leaves: stored records whose checksums are right."""
    try:
        with zipfile.ZipFile(path) as archive:
            stored = all(record.compress_type == zipfile.ZIP_STORED for record in archive.infolist())
            return not stored or archive.testzip() is None
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError, EOFError):
        return False
