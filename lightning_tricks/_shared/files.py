"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PARTIAL = ".partial"  # ends the names of files that are being written


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a file beside `path` to write, which takes its place when it is whole and on the disk.

    An error leaves what was there before, and no other file.
    """
    staged = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        yield staged
        with staged.open("rb+") as file:
            os.fsync(file.fileno())
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)
    _flush_directory(path.parent)


def _flush_directory(path: Path) -> None:
    if os.name != "posix":  # where a directory cannot be opened
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # of file systems that flush names by themselves
            os.fsync(handle)
    finally:
        os.close(handle)
