"""Open regular files only, and write files atomically."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

MAIN_FILE = "meta.pt"  # of a checkpoint that is a folder: what is not sharded; so Lightning names it
PARTIAL_SUFFIX = ".partial"  # ends the names of files that are being written: .{name}.{16 hexadecimal digits}.partial
_LONGEST_NAME = 200  # bytes of the name that a partial file takes over; file systems allow 255 in all


class NotAFileError(OSError):
    """The path is a directory, a pipe, a device or a socket instead of a regular file."""

    def __str__(self) -> str:
        return str(self.args[0])


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file to read its bytes; never a pipe, which would wait for a writer.

    Raises:
        NotAFileError: If it is a directory, a pipe, a device or a socket.
        OSError: If it does not exist or cannot be read.
    """
    check_kind(path, Path(path).stat().st_mode)  # before it is opened, as opening alone makes some devices act
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    handle = os.open(path, flags)
    try:
        check_kind(path, os.fstat(handle).st_mode)
    except BaseException:
        os.close(handle)
        raise
    return os.fdopen(handle, "rb")


def check_kind(path: str | os.PathLike[str], mode: int) -> None:
    """Raise an error if the mode of a path is not that of a regular file.

    Raises:
        NotAFileError: If it is that of a directory, a pipe, a device or a socket.
    """
    if stat.S_ISREG(mode):
        return
    kinds = {stat.S_IFDIR: "directory", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
    raise NotAFileError(f"{os.fspath(path)} is a {kinds.get(stat.S_IFMT(mode), 'device')}, not a file")


@contextmanager
def atomic_write(path: Path, *, flush: Collection[str] = ("file", "directory")) -> Iterator[Path]:
    """Yield the path of a temporary file beside `path`, which replaces it when it is complete and on the disk.

    The temporary file has an unpredictable name. The new file has the mode of the one that it replaces, or that of the
    umask. If `path` is a symbolic link, its target is replaced. After an exception, `path` is what it was before, and
    the temporary file is removed.

    Args:
        path: Path of the file.
        flush: What is flushed to the disk: the bytes of the "file", the names in the "directory". A process that is
            killed leaves the old or the new file in any case; a power failure may leave neither without the first, and
            the old one without the second.

    Raises:
        NotAFileError: If `path` is a directory, a pipe, a device or a socket.
        OSError: If the file cannot be written.
    """
    if path.is_symlink():
        path = Path(os.path.realpath(path))
    mode = None
    with suppress(FileNotFoundError):
        mode = path.stat().st_mode  # a circle of links raises here
        check_kind(path, mode)
    name = os.fsdecode(os.fsencode(path.name)[:_LONGEST_NAME])
    staged = path.with_name(f".{name}.{secrets.token_hex(8)}{PARTIAL_SUFFIX}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    handle = os.open(staged, flags, 0o666)
    try:
        if mode is None:
            mode = os.fstat(handle).st_mode
        os.close(handle)
        yield staged
        if "file" in flush:
            with staged.open("rb+") as file:
                os.fsync(file.fileno())
        staged.chmod(stat.S_IMODE(mode) & 0o777)
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)
    if "directory" in flush:
        flush_directory(path.parent)


def flush_directory(path: Path) -> None:
    """Flush the names in a directory to the disk."""
    if os.name != "posix":  # where a directory cannot be opened
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # on file systems that flush directories themselves
            os.fsync(handle)
    finally:
        os.close(handle)


def find_write_problem(path: Path, *, is_folder: bool = False) -> str:
    """Create the folder of a file that will be written, and return why the file cannot be written, or "".

    Args:
        path: The path of the file.
        is_folder: Whether it is the path of a folder that will hold the files.
    """
    folder = path if is_folder else path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not is_folder and path.is_dir():
            return "it is a directory"
    except OSError as error:
        return str(error)
    return "" if os.access(folder, os.W_OK) else f"{folder} is not writable"
