"""Locks between all processes of a machine that end with the process that holds them, also if it is killed.

They are locks of the operating system on empty files. The package filelock is not used: its older versions truncate
the file that a symbolic link in a shared folder points to, cannot open the file of another user there, and let a forked
child release the lock of its parent; newer ones use files that outlive a killed process where a file system has no
locks.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FOLDER_VARIABLE = "LIGHTNING_TRICKS_LOCK_DIR"
_FOLDER = "lightning-tricks-gpus"
_CHOOSING = "choosing.lock"
_LONGEST_CHOICE = 60.0  # seconds, where a choice takes less than one
_REMEDY = f"Set {FOLDER_VARIABLE} to a local folder that all users of the machine can write to, or pass lock=False."

_open_locks: set[int] = set()  # descriptors


class GpuLockError(RuntimeError):
    """The folder of the locks cannot be used; the message names the variable that sets another one."""


def _close_in_forked_child() -> None:
    # the child shares the lock: it would keep it when the parent ends, or release it when it ends itself
    for descriptor in _open_locks:
        with suppress(OSError):
            os.close(descriptor)
    _open_locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_forked_child)


def lock_folder() -> Path:
    """Return the folder of the locks, which is made if it is missing.

    Raises:
        GpuLockError: If it cannot be made, or is no folder.
    """
    folder, chosen = _folder()
    try:
        _make_shared(folder, parents=chosen)
        mode = (folder.stat() if chosen else folder.lstat()).st_mode
    except OSError as error:
        raise GpuLockError(f"The folder {folder} for the locks of GPUs cannot be made ({error}). {_REMEDY}") from error
    if not stat.S_ISDIR(mode):
        raise GpuLockError(f"{folder}, where the locks of GPUs are to be, is not a folder. {_REMEDY}")
    return folder


def existing_lock_folder() -> Path | None:
    """Return the folder of the locks, or None if nobody has locked anything that this user can look at."""
    folder, chosen = _folder()
    if folder.is_symlink() and not chosen:
        return None
    # who locks a GPU makes this file before; who only looks needs not be able to write there
    return folder if os.access(folder / _CHOOSING, os.R_OK) else None


def _folder() -> tuple[Path, bool]:
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen and not Path(chosen).is_absolute():
        raise GpuLockError(f"{FOLDER_VARIABLE} must be an absolute path, or each job has its own, got {chosen!r}.")
    if chosen:
        return Path(chosen), True
    # not TMPDIR, which jobs of one machine may have each for itself
    return Path("/tmp" if os.name == "posix" else tempfile.gettempdir()) / _FOLDER, False  # noqa: S108


def _make_shared(folder: Path, parents: bool) -> None:
    if folder.exists():
        return
    if parents:
        folder.parent.mkdir(parents=True, exist_ok=True)
    # moved there when all may use it: a process that is killed in between leaves no folder that shuts others out
    staged = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        staged.chmod(0o1777)  # others may add files, and remove none but their own
        staged.rename(folder)
    except OSError:
        staged.rmdir()
        if not folder.exists():  # or another process was faster
            raise


def lock_path(folder: Path, key: str) -> Path:
    """Return the path of the lock of a device with this key."""
    return folder / f"{re.sub(r'[^A-Za-z0-9-]', '_', key)}.lock"


def try_lock(path: Path) -> int | None:
    """Lock a file, which is made if it is missing, without waiting.

    Returns:
        The descriptor to `unlock`, or None if another one holds the lock.

    Raises:
        GpuLockError: If the file cannot be opened, or its file system has no locks.
    """
    while True:
        try:
            descriptor = _open(path)
            _open_locks.add(descriptor)
            try:
                locked = _lock(descriptor)
                removed = locked and os.name == "posix" and os.fstat(descriptor).st_nlink == 0
            except BaseException:
                _close(descriptor)
                raise
        except OSError as error:
            raise GpuLockError(f"The lock {path} cannot be used ({error}). {_REMEDY}") from error
        if locked and not removed:
            return descriptor
        _close(descriptor)
        if not locked:
            return None


def unlock(descriptor: int) -> None:
    """Release a lock; in a forked child, which does not hold it, this does nothing."""
    if descriptor in _open_locks:
        with suppress(OSError):
            _unlock(descriptor)
        _close(descriptor)


def keep_locks(descriptors: Iterable[int]) -> None:
    """Release all locks of this process but these, also those that an interrupted call has left behind."""
    for descriptor in _open_locks - set(descriptors):
        unlock(descriptor)


def is_locked(path: Path) -> bool:
    """Return whether a lock is held, as far as this user can tell; to be asked while no other process chooses."""
    try:
        descriptor = try_lock(path) if path.exists() else -1
    except GpuLockError:
        return False
    if descriptor is not None:
        unlock(descriptor)
    return descriptor is None


@contextmanager
def choosing(folder: Path, sleep: Callable[[float], None] = time.sleep) -> Iterator[None]:
    """Let one process at a time choose, so that two that want the same two GPUs do not get one each.

    Raises:
        GpuLockError: If another process has been choosing for a minute.
    """
    path = folder / _CHOOSING
    deadline = time.monotonic() + _LONGEST_CHOICE
    while (descriptor := try_lock(path)) is None:
        if time.monotonic() > deadline:
            who = f"process {pid}" if (pid := holder(path)) else "another process"
            raise GpuLockError(f"{who} has been choosing GPUs for {_LONGEST_CHOICE:g} s, and holds {path}. End it.")
        sleep(0.02)
    try:
        yield
    finally:
        unlock(descriptor)


def holder(path: Path) -> int | None:
    """Return the number of the process that holds a lock, where the operating system tells it (Linux)."""
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


def _open(path: Path) -> int:
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
            if hasattr(os, "fchmod"):
                os.fchmod(descriptor, 0o666)  # whatever the umask
            return descriptor


def _close(descriptor: int) -> None:
    _open_locks.discard(descriptor)
    os.close(descriptor)


if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> bool:
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except PermissionError:
            return False
        return True

    def _unlock(descriptor: int) -> None:
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _lock(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # what file systems say where another one holds it
            return False
        return True

    def _unlock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
