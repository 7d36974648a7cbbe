"""The locks of GPUs: a folder that all jobs of a machine share, with a file for each GPU that was ever selected."""

from __future__ import annotations

import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_tricks._shared.file_locks import FileLocks, lock_holder

FOLDER_VARIABLE = "LIGHTNING_TRICKS_LOCK_DIR"
_FOLDER = "lightning-tricks-gpus"
_CHOOSING = "choosing.lock"
LONGEST_CHOICE = 60.0  # seconds, where a choice takes less than one
_REMEDY = f"Set {FOLDER_VARIABLE} to a local folder that all users of the machine can write to, or pass lock=False."

LOCKS = FileLocks(mode=0o666)  # all users lock the same files


class GpuLockError(RuntimeError):
    """Raised if the folder of the locks cannot be used; the message names the variable that sets another one."""


def lock_folder() -> Path:
    """Return the folder of the locks, which is created if it is missing.

    Raises:
        GpuLockError: If it cannot be created, or is not a folder.
    """
    folder, chosen = named_folder()
    try:
        _make_shared(folder, parents=chosen)
        mode = (folder.stat() if chosen else folder.lstat()).st_mode
    except OSError as error:
        raise GpuLockError(f"The folder {folder} for GPU locks cannot be created ({error}). {_REMEDY}") from error
    if not stat.S_ISDIR(mode):
        raise GpuLockError(f"{folder}, the path for GPU locks, is not a folder. {_REMEDY}")
    return folder


def existing_lock_folder() -> Path | None:
    """Return the folder of the locks, or None if it holds no locks that this user can read."""
    folder, chosen = named_folder()
    if folder.is_symlink() and not chosen:
        return None
    # who locks a GPU makes this file before; who only looks needs not be able to write there
    return folder if os.access(folder / _CHOOSING, os.R_OK) else None


def named_folder() -> tuple[Path, bool]:
    """Return the path of the folder, and whether the user has chosen it."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen and not Path(chosen).is_absolute():
        raise GpuLockError(f"{FOLDER_VARIABLE} must be an absolute path, the same for all jobs, got {chosen!r}.")
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
    """Return the descriptor of a lock, for `LOCKS.unlock`, or None if another process holds it.

    Raises:
        GpuLockError: If the file cannot be opened, or its file system has no locks.
    """
    try:
        return LOCKS.try_lock(path)
    except OSError as error:
        raise GpuLockError(f"The lock {path} cannot be used ({error}). {_REMEDY}") from error


def is_locked(path: Path) -> bool:
    """Return whether a lock is held, as far as this user can tell. Call it while no other process chooses."""
    try:
        descriptor = try_lock(path) if path.exists() else -1
    except GpuLockError:
        return False
    if descriptor is not None:
        LOCKS.unlock(descriptor)
    return descriptor is None


@contextmanager
def choosing(folder: Path) -> Iterator[None]:
    """Let one process at a time choose, so that two that want the same two GPUs do not get one each.

    Raises:
        GpuLockError: If another process has been choosing for a minute.
    """
    path = folder / _CHOOSING
    deadline = time.monotonic() + LONGEST_CHOICE
    while (descriptor := try_lock(path)) is None:
        if time.monotonic() > deadline:
            who = f"process {pid}" if (pid := lock_holder(path)) else "another process"
            raise GpuLockError(
                f"{who} has been choosing GPUs for {LONGEST_CHOICE:g} s, and holds the lock {path}. End it."
            )
        time.sleep(0.02)
    try:
        yield
    finally:
        LOCKS.unlock(descriptor)
