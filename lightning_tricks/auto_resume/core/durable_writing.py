"""Files that are written durably: a kill at any moment leaves the old file or the new one, never a part."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import IO, Any

from lightning_tricks._shared.checks import check_path
from lightning_tricks._shared.files import atomic_write

_BUFFER_SIZE = 1 << 20


def write_durably(path: str | os.PathLike[str], write: Callable[[IO[bytes]], object]) -> tuple[str, int]:
    """Replace a file atomically and durably: whenever the process or machine stops, the old or new file is complete.

    The bytes are written to a temporary file beside the target (not in TMPDIR, which may be on another file system),
    flushed to the disk and renamed; then the directory is flushed. An error leaves the old file and no temporary one.

    Args:
        path: Path of the file; its directory must exist.
        write: Called with a binary stream.

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
    return write_atomically(path, write, flush=("file", "directory"))


def write_atomically(
    path: str | os.PathLike[str],
    write: Callable[[IO[bytes]], object],
    *,
    flush: Collection[str] = (),
    hashes: bool = True,
) -> tuple[str, int]:
    """Replace a file as `write_durably` does, and flush to the disk what `atomic_write` is told to flush.

    Without `hashes`, which takes half of the time of a large file, the digest is that of no bytes.
    """
    with atomic_write(Path(check_path("path", path, "a file")), flush=flush) as staged:
        return _write(staged, write, hashes=hashes)


def write_flushed(path: Path, write: Callable[[IO[bytes]], object]) -> tuple[str, int]:
    """Write a file, flush its bytes to the disk, and return what `write_durably` does.

    It is for a folder that nobody reads before it is complete.
    """
    return _write(path, write, flushes=True)


def save_durably(value: Any, path: str | os.PathLike[str]) -> tuple[str, int]:
    """Save a value by `torch.save` through `write_durably`.

    Args:
        value: The value to save.
        path: Path of the file; its directory must exist.

    Returns:
        The SHA-256 of the file, as hexadecimal digits, and its size in bytes.

    Raises:
        OSError: If the directory cannot be written, or the disk is full.
    """
    import torch  # other files are written without it

    return write_durably(path, lambda stream: torch.save(value, stream))


def file_digest(file: IO[bytes]) -> Any:
    """Return the SHA-256 of the rest of an open file, as an object of hashlib."""
    # In blocks: a checkpoint may be larger than the memory.
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest


def _write(
    path: Path, write: Callable[[IO[bytes]], object], *, flushes: bool = False, hashes: bool = True
) -> tuple[str, int]:
    with path.open("wb", buffering=0) as file:
        hashing = _HashingFile(file, hashes)
        stream = io.BufferedWriter(hashing, _BUFFER_SIZE)  # or each small write of `torch.save` would be hashed alone
        try:
            write(stream)
            stream.flush()
        except RuntimeError:
            # torch 2.15 closes its zip writer on the way out, whose error hides the cause: "unexpected pos"
            # (inline_container.cc).
            if hashing.error is not None:  # where the disk is full, `torch.save` raises a misleading error
                raise hashing.error from None
            raise
        if flushes:
            # A rename may be on the disk before the bytes are: after a power failure, the name would lead to an empty
            # file.
            os.fsync(file.fileno())
    return hashing.digest.hexdigest(), hashing.size


class _HashingFile(io.RawIOBase):
    """Writes to a file, and computes the size and, where it `hashes`, the digest of what it wrote."""

    def __init__(self, file: io.RawIOBase, hashes: bool) -> None:
        self.file, self.hashes, self.size, self.digest = file, hashes, 0, hashlib.sha256()
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            # A raw file may write less than it was given, on a disk that is nearly full; BufferedWriter calls again
            # with the rest.
            written = self.file.write(data) or 0
        except OSError as error:
            self.error = error
            raise
        if self.hashes:
            self.digest.update(memoryview(data)[:written])
        self.size += written
        return written
