"""A lock that allows one process at a time in a directory, and ends with the process that holds it."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_tricks._shared.file_locks import FileLocks

LOCKS = FileLocks()


class DirectoryLock:
    """A lock on a file, which child processes do not inherit: forked DataLoader workers may outlive a killed run.

    On a file system without locks, the record of the last holder decides: if it names a process on this host, that
    process must have exited.

    Args:
        path: Path of the file, which is created and stays.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def acquire(self, last_holder: Mapping[str, Any]) -> tuple[bool, bool]:
        """Acquire the lock without waiting.

        Args:
            last_holder: The process that held it last: "pid" and "host", see `this_process`.

        Returns:
            Whether the lock was acquired, and whether the file system guarantees that.

        Raises:
            OSError: If the file cannot be created.
        """
        is_certain = True

        def without_locks() -> bool:
            nonlocal is_certain
            is_certain = False
            return has_exited(last_holder) is not False

        descriptor = LOCKS.try_lock(self.path, without_locks)
        if descriptor is None:
            return False, is_certain
        self._descriptor = descriptor
        return True, is_certain

    def close(self) -> None:
        """Release the lock."""
        if self._descriptor is not None:
            LOCKS.unlock(self._descriptor)
            self._descriptor = None


def this_process() -> dict[str, Any]:
    """Return a record of this process for `acquire` and `has_exited`."""
    return {"pid": os.getpid(), "host": platform.node()}


def has_exited(process: Mapping[str, Any]) -> bool | None:
    """Whether the process of a record has exited; None where that is unknown, as for another host."""
    pid = process.get("pid")
    if process.get("host") != platform.node() or not isinstance(pid, int) or not 0 < pid < 1 << 31:
        return None
    if os.name != "posix":  # where signal 0 does not test for a process
        return None
    try:
        os.kill(pid, 0)
    except PermissionError:
        return False
    except OSError:
        return True
    return None if pid == os.getpid() else False
