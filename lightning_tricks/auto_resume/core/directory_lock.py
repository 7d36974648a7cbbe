"""A lock that allows one process at a time in a directory, and ends with the process that holds it."""

from __future__ import annotations

import errno
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LOCKED_ERRORS = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)

# The locks of this process: (device, inode) -> process id. POSIX gives a lock to a process, not to an object: a second
# object in the process would acquire it as well, and closing any descriptor of the file would release both.
_HELD_KEYS: dict[tuple[int, int], int] = {}


class DirectoryLock:
    """A lock on a file, which child processes do not inherit: forked DataLoader workers may outlive a killed run.

    On a file system without locks, the record of the last holder decides: if it names a process on this host, that
    process must have exited.

    Args:
        path: Path of the file, which is created and stays.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1
        self._inode_key = (-1, -1)

    def acquire(self, last_holder: Mapping[str, Any]) -> tuple[bool, bool]:
        """Acquire the lock without waiting.

        Args:
            last_holder: The process that held it last: "pid" and "host", see `this_process`.

        Returns:
            Whether the lock was acquired, and whether the file system guarantees that.

        Raises:
            OSError: If the file cannot be created.
        """
        if self.path.exists() and _HELD_KEYS.get(_inode_key(self.path.stat())) == os.getpid():
            return False, True  # closing another descriptor of the file would release the lock
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        acquired, is_certain = _lock(descriptor)
        if acquired and not is_certain:
            acquired = has_exited(last_holder) is not False
        if not acquired:
            os.close(descriptor)
            return False, is_certain
        self._descriptor, self._inode_key = descriptor, _inode_key(os.fstat(descriptor))
        _HELD_KEYS[self._inode_key] = os.getpid()
        return True, is_certain

    def close(self) -> None:
        """Release the lock."""
        if self._descriptor < 0:
            return
        if _HELD_KEYS.get(self._inode_key) == os.getpid():
            del _HELD_KEYS[self._inode_key]
        os.close(self._descriptor)
        self._descriptor = -1


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


def _inode_key(state: os.stat_result) -> tuple[int, int]:
    return state.st_dev, state.st_ino


def _lock(descriptor: int) -> tuple[bool, bool]:
    """Lock a file without waiting; return whether it is locked, and whether the file system supports locks."""
    if sys.platform == "win32":
        return _lock_on_windows(descriptor)
    import fcntl

    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return (False, True) if error.errno in _LOCKED_ERRORS else (True, False)
    return True, True


def _lock_on_windows(descriptor: int) -> tuple[bool, bool]:
    import importlib

    msvcrt: Any = importlib.import_module("msvcrt")
    try:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    except OSError:
        return False, True
    return True, True
