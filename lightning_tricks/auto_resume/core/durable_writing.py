"""Files that are written durably: a kill at any moment leaves the old file or the new one, never a part."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import IO, Any

import torch

from lightning_tricks._shared.checks import check_path
from lightning_tricks._shared.files import atomic_write


def write_durably(
    path: str | os.PathLike[str],
    write: Callable[[IO[bytes]], object],
    before_replace: Callable[[Path, str, int], object] | None = None,
) -> tuple[str, int]:
    """Replace a file atomically and durably: whenever the process or machine stops, the old or the new file is whole.

    The bytes are written to a temporary file beside the target (not in TMPDIR, which may be on another file system),
    flushed to the disk and renamed; then the directory is flushed. An error leaves the old file and no temporary one.

    Args:
        path: Path of the file; its directory must exist.
        write: Called with a stream that takes bytes.
        before_replace: Called with the path of the temporary file, its SHA-256 and its size right before it replaces
            the old file.

    Returns:
        The SHA-256 of the bytes, as hexadecimal digits, and their number.

    Raises:
        OSError: If the directory cannot be written, or the disk is full.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     digest, size = write_durably(Path(folder) / "note", lambda stream: stream.write(b"kept"))
        ...     (Path(folder) / "note").read_bytes(), size
        (b'kept', 4)
    """
    return write_atomically(path, write, before_replace, flush=("file", "directory"))


def write_atomically(
    path: str | os.PathLike[str],
    write: Callable[[IO[bytes]], object],
    before_replace: Callable[[Path, str, int], object] | None = None,
    *,
    flush: Collection[str] = (),
) -> tuple[str, int]:
    """Replace a file as `write_durably` does, and flush to the disk what `atomic_write` is told to flush."""
    with atomic_write(Path(check_path("path", path, "a file")), flush=flush) as staged:
        with staged.open("wb") as file:
            hashing_stream = _HashingStream(file)
            hashing_stream.write_with(write)
        if before_replace is not None:
            before_replace(staged, hashing_stream.digest.hexdigest(), hashing_stream.size)
    return hashing_stream.digest.hexdigest(), hashing_stream.size


def save_durably(
    value: Any, path: str | os.PathLike[str], before_replace: Callable[[Path, str, int], object] | None = None
) -> tuple[str, int]:
    """Save a value by `torch.save` through `write_durably`.

    Args:
        value: The value to save.
        path: Path of the file; its directory must exist.
        before_replace: See `write_durably`.

    Returns:
        The SHA-256 of the file, as hexadecimal digits, and its size in bytes.

    Raises:
        OSError: If the directory cannot be written, or the disk is full.
    """
    return write_durably(path, lambda stream: torch.save(value, stream), before_replace)


def file_digest(file: IO[bytes]) -> Any:
    """Return the SHA-256 of the rest of an open file, as an object of hashlib."""
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest


class _HashingStream:
    """A stream that writes to a file and computes the digest and the size of what it wrote."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.size, self.digest = file, 0, hashlib.sha256()
        self.error: OSError | None = None

    def write_with(self, write: Callable[[IO[bytes]], object]) -> None:
        """Let a function write to the stream; where the disk is full, `torch.save` would raise a misleading error."""
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
