"""One process at a time in a directory: a lock that ends with the process which holds it."""

from __future__ import annotations

import errno
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LOCKED_ERRORS = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)

# Of this process, as (device, inode) -> its id. POSIX gives a lock to a process, not to an object: the second one in it
# would get it as well, and closing any descriptor of the file would give both back.
_HELD_KEYS: dict[tuple[int, int], int] = {}


class DirectoryLock:
    """A lock on a file that no child process inherits: forked DataLoader workers outlive a killed run without it.

    Where the file system knows no locks, the record of who was there last decides: on the same host, the process that
    it names has to have ended.

    Args:
        path: Of the file; it is made, and stays.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1
        self._inode_key = (-1, -1)

    def acquire(self, last_holder: Mapping[str, Any]) -> tuple[bool, bool]:
        """Take the lock.

        Args:
            last_holder: Who held it last: "pid" and "host".

        Returns:
            Whether it is ours, and whether the file system guarantees that.

        Raises:
            OSError: If the file cannot be made.
        """
        if self.path.exists() and _HELD_KEYS.get(_inode_key(self.path.stat())) == os.getpid():
            return False, True  # opening the file and closing it would give the lock back
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
        """Give the lock back."""
        if self._descriptor < 0:
            return
        if _HELD_KEYS.get(self._inode_key) == os.getpid():
            del _HELD_KEYS[self._inode_key]
        os.close(self._descriptor)
        self._descriptor = -1


def this_process() -> dict[str, Any]:
    """Return the record of this process for `acquire` and `has_exited`."""
    return {"pid": os.getpid(), "host": platform.node()}


def has_exited(process: Mapping[str, Any]) -> bool | None:
    """Whether the process that a record names has ended; None where that cannot be known, as of another host's."""
    pid = process.get("pid")
    if process.get("host") != platform.node() or not isinstance(pid, int) or not 0 < pid < 1 << 31:
        return None
    if os.name != "posix":  # where signal 0 is no question
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
    """Lock without waiting; return whether that went, and whether it means anything here."""
    try:
        import fcntl
    except ImportError:
        return _lock_on_windows(descriptor)
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
