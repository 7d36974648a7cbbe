"""Checkpoints that a kill at any moment leaves readable: written durably, listed in manifests, verified before use."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any

import torch

from lightning_tricks._shared.files import PARTIAL, replacing

FORMAT = 1  # of the manifests and of what AutoResume adds to a checkpoint
_CORRUPT = ".corrupt"
_MANIFEST = ".json"


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
    run: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def number(self) -> int:
        """The place among the checkpoints of its directory."""
        return int(self.file.partition("-")[0])


def write_durably(path: str | os.PathLike[str], write: Callable[[IO[bytes]], object]) -> tuple[str, int]:
    """Write a file so that, whenever the process or the machine stops, the path holds the old or the new one, whole.

    The bytes are staged beside the target, on the same file system whatever TMPDIR says, flushed to the disk and
    renamed; then the directory is flushed. An error leaves the old file and no staged one.

    Args:
        path: Of the file; its directory must exist.
        write: Called with a stream that takes bytes.

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
    with replacing(Path(path)) as staged, staged.open("wb") as file:
        hashing = _Hashing(file)
        hashing.take(write)
    return hashing.digest.hexdigest(), hashing.size


def save_durably(value: Any, path: str | os.PathLike[str]) -> tuple[str, int]:
    """`torch.save` through `write_durably`: return the file's SHA-256 and its size in bytes."""
    return write_durably(path, lambda stream: torch.save(value, stream))


class CheckpointFolder:
    """A directory of numbered checkpoints, each with a manifest.

    A checkpoint counts once its manifest is there, which is written after it. What a killed process left beside them
    is removed by `clean`.

    Args:
        path: Of the directory; `prepare` makes it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def prepare(self) -> None:
        """Make the directory, and see that it can be written.

        Raises:
            OSError: If it cannot.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        write_durably(self.path / ".writable", lambda stream: stream.write(b""))
        (self.path / ".writable").unlink()

    def manifests(self) -> list[Manifest]:
        """Return the records of all checkpoints, newest first; unreadable records are passed over."""
        found = []
        for path in self.path.glob(f"*.ckpt{_MANIFEST}"):
            try:
                found.append(_manifest_of(json.loads(path.read_text(encoding="utf-8"))))
            except (AttributeError, KeyError, OSError, TypeError, ValueError):  # cut short by a disk, not by us
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
        last = max((int(path.name.partition("-")[0]) for path in self.path.glob("*-*.ckpt*")), default=0)
        name = f"{last + 1:06d}-epoch={known['epoch']}-step={known['step']}.ckpt"
        digest, size = save_durably(dict(checkpoint), self.path / name)
        manifest = Manifest(
            file=name, sha256=digest, bytes=size, written=time.time(), versions=installed_versions(), **known
        )
        try:
            self._write_json(f"{name}{_MANIFEST}", asdict(manifest))
        except OSError:
            (self.path / name).unlink(missing_ok=True)
            raise
        return manifest

    def problem_of(self, manifest: Manifest) -> str:
        """Return what is wrong with a checkpoint's file, or nothing where its bytes are those that were written."""
        path = self.path / manifest.file
        try:
            size = path.stat().st_size
            if size != manifest.bytes:
                return f"has {size} bytes instead of {manifest.bytes}"
            with path.open("rb") as file:
                digest = _digest(file)
        except OSError as error:
            return f"cannot be read ({error.strerror or error})"
        return "" if digest.hexdigest() == manifest.sha256 else "has other bytes than were written (SHA-256 differs)"

    def newest(self, tell: Callable[[str], object]) -> Manifest | None:
        """Return the newest checkpoint whose bytes are whole, and set broken ones aside.

        Args:
            tell: Called with a sentence for each that was set aside.

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
            problem = self.problem_of(manifest)
            if not problem:
                return manifest
            self.set_aside(manifest)
            tell(f"{self.path / manifest.file} {problem}: set aside as *{_CORRUPT}; the one before it is used.")
        return None

    def set_aside(self, manifest: Manifest) -> None:
        """Rename a checkpoint and its manifest, so that nothing takes it for one."""
        for name in (manifest.file, f"{manifest.file}{_MANIFEST}"):
            path = self.path / name
            if path.exists():
                path.replace(path.with_name(f"{name}{_CORRUPT}"))

    def prune(self, keep: int) -> None:
        """Remove all checkpoints but the newest `keep`."""
        for manifest in self.manifests()[keep:]:
            (self.path / f"{manifest.file}{_MANIFEST}").unlink(missing_ok=True)  # first: no record without a file
            (self.path / manifest.file).unlink(missing_ok=True)

    def clean(self) -> None:
        """Remove what killed processes left: staged files, and checkpoints whose manifest was never written."""
        known = {manifest.file for manifest in self.manifests()}
        for path in self.path.glob(f".*{PARTIAL}"):
            path.unlink(missing_ok=True)
        for path in self.path.glob("*.ckpt"):
            if path.name not in known and not path.with_name(f"{path.name}{_MANIFEST}").exists():
                path.unlink(missing_ok=True)

    def write_status(self, **status: Any) -> None:
        """Write down how far a run has come, for `read_status`."""
        self._write_json("status.json", {"pid": os.getpid(), "host": platform.node(), "time": time.time(), **status})

    def read_status(self) -> dict[str, Any]:
        """Return what `write_status` wrote last, or nothing."""
        try:
            status = json.loads((self.path / "status.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return status if isinstance(status, dict) else {}

    def _write_json(self, name: str, values: Mapping[str, Any]) -> None:
        text = json.dumps(values, indent=1, default=dict) + "\n"
        write_durably(self.path / name, lambda stream: stream.write(text.encode()))


def folders_in(path: str | os.PathLike[str]) -> Iterator[CheckpointFolder]:
    """Yield the folders of the fits that wrote to a directory: the directory itself, `fit2`, `fit3` and so on."""
    yield CheckpointFolder(path)
    later = [folder for folder in Path(path).glob("fit*") if folder.name[3:].isdecimal() and folder.is_dir()]
    for folder in sorted(later, key=lambda folder: int(folder.name[3:])):
        yield CheckpointFolder(folder)


def differences(saved: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """Say in which entries two records of a run differ: one phrase for each, nested names joined by dots."""
    found = []
    for name in {**saved, **present}:
        left, right = saved.get(name), present.get(name)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            found += [f"{name}.{phrase}" for phrase in differences(left, right)]
        elif left != right:
            found.append(f"{name} was {left!r} and is {right!r}")
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


class _Hashing:
    """A stream that computes the digest of what it passes on."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.size, self.digest = file, 0, hashlib.sha256()
        self.error: OSError | None = None

    def take(self, write: Callable[[IO[bytes]], object]) -> None:
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


def _digest(file: IO[bytes]) -> Any:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest


def _manifest_of(values: Mapping[str, Any]) -> Manifest:
    known = {one.name for one in fields(Manifest)}
    manifest = Manifest(**{name: value for name, value in values.items() if name in known})
    int(manifest.file.partition("-")[0])  # raises for another's file
    return manifest
