"""Locks between all processes of a machine that end with the process that holds them, also if it is killed.

They are locks of the operating system on empty files. The package filelock is not used: its older versions truncate
the file that a symbolic link in a shared folder points to, cannot open the file of another user there, and let a forked
child release the lock of its parent; newer ones use files that outlive a killed process where a file system has no
locks.
"""

from __future__ import annotations

import errno
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


class FileLocks:
    """The locks that this process holds for one purpose; forked children hold none of them.

    Args:
        mode: The permissions of files that are created, whatever the umask; None for those of the umask.

    Attributes:
        held: The descriptor of each lock -> the device and the inode of its file.
    """

    def __init__(self, mode: int | None = None) -> None:
        self.held: dict[int, tuple[int, int]] = {}
        self._mode = mode
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.forget)

    def try_lock(self, path: Path, without_locks: Callable[[], bool] | None = None) -> int | None:
        """Lock a file, which is created if it is missing, without waiting.

        Args:
            path: Path of the file; a symbolic link is not followed.
            without_locks: Called where the file system has no locks; returns whether to go on as if it were locked.
                None raises the error of the operating system.

        Returns:
            The descriptor to `unlock`, or None if this process or another one holds the lock.

        Raises:
            OSError: If the file cannot be opened, or its file system has no locks.
        """
        while True:
            descriptor = _open(path, self._mode)
            status = os.fstat(descriptor)
            inode = status.st_dev, status.st_ino
            if inode in self.held.values():  # on Windows and without locks, a process could lock a file twice
                os.close(descriptor)
                return None
            self.held[descriptor] = inode  # before it is locked: an interrupt in between leaves no unknown lock
            try:
                locked = _lock(descriptor, without_locks)
                removed = locked and os.name == "posix" and os.fstat(descriptor).st_nlink == 0
            except BaseException:
                self._close(descriptor)
                raise
            if locked and not removed:
                return descriptor
            self._close(descriptor)
            if not locked:
                return None

    def unlock(self, descriptor: int) -> None:
        """Release a lock; in a forked child, which does not hold it, this does nothing."""
        if descriptor in self.held:
            with suppress(OSError):
                _unlock(descriptor)
            self._close(descriptor)

    def keep(self, descriptors: Iterable[int]) -> None:
        """Release all locks but these, also those that an interrupted call has left behind."""
        for descriptor in self.held.keys() - set(descriptors):
            self.unlock(descriptor)

    def _close(self, descriptor: int) -> None:
        self.held.pop(descriptor, None)
        os.close(descriptor)

    def forget(self) -> None:
        """Close the descriptors that a forked child has of its parent's locks."""
        # the child shares the lock: it would keep it when the parent ends, or release it when it ends itself
        for descriptor in self.held:
            with suppress(OSError):
                os.close(descriptor)
        self.held.clear()


DIRECTORY_LOCKS = FileLocks()  # those of `DirectoryLock`


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

        descriptor = DIRECTORY_LOCKS.try_lock(self.path, without_locks)
        if descriptor is None:
            return False, is_certain
        self._descriptor = descriptor
        return True, is_certain

    def close(self) -> None:
        """Release the lock."""
        if self._descriptor is not None:
            DIRECTORY_LOCKS.unlock(self._descriptor)
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


def lock_holder(path: Path) -> int | None:
    """Return the id of the process that holds a lock, where the operating system tells it (Linux)."""
    if sys.platform != "linux":
        return None
    try:
        status = path.stat()
        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            words = line.split()
            if words[1] == "FLOCK" and words[5] == device and int(words[4]) > 0:
                return int(words[4])
    except (OSError, IndexError, ValueError):
        pass
    return None


def _open(path: Path, mode: int | None) -> int:
    flags = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    while True:
        # not with O_CREAT: Linux forbids that for a file of another user in a folder that all write to
        try:
            return os.open(path, flags)
        except FileNotFoundError:
            pass
        except OSError as error:
            # made under a strict umask, by another user, a moment ago; or a container has mounted it read-only
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            return os.open(path, flags & ~os.O_RDWR | os.O_RDONLY)
        with suppress(FileExistsError):
            descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
            if mode is not None and hasattr(os, "fchmod"):
                os.fchmod(descriptor, mode)
            return descriptor


if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int, without_locks: Callable[[], bool] | None) -> bool:
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except PermissionError:
            return False
        return True

    def _unlock(descriptor: int) -> None:
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _lock(descriptor: int, without_locks: Callable[[], bool] | None) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # what file systems say where another process holds it
            return False
        except OSError:
            if without_locks is None:
                raise
            return without_locks()
        return True

    def _unlock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
