"""Stand-ins for the modules of Python without what Windows and macOS lack, and their rules for files."""

from __future__ import annotations

import builtins
import enum
import errno
import fcntl
import io
import os
import re
import shutil
import signal
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

_LINUX_ONLY = {"sched_getaffinity", "sched_setaffinity", "posix_fadvise", "posix_fallocate", "memfd_create", "getxattr"}
_LINUX_ONLY |= {"pipe2", "fdatasync", "getrandom", "eventfd", "copy_file_range", "splice", "setns", "unshare"}
_LINUX_ONLY |= {"O_DIRECT", "O_PATH", "O_TMPFILE", "O_NOATIME", "O_LARGEFILE", "O_RSYNC", "setxattr", "listxattr"}
_POSIX_ONLY = re.compile(
    "fork|forkpty|wait|wait3|wait4|waitid|W[A-Z]+|[gs]ete?(u|g)id|[gs]etre[sug]+id|getpgid|getpgrp|setpgrp|setpgid|setsid"
    "|getsid|killpg|[gs]etgroups|initgroups|uname|sysconf.*|confstr.*|f?pathconf.*|f?statvfs|.?chown|chroot|f?chdir_fd|mkfifo"
    "|mknod|major|minor|makedev|nice|[gs]etpriority|getloadavg|sched_.*|p(read|write)v?|readv|writev|sendfile|openpty"
    "|ttyname|tc[gs]etpgrp|ctermid|sync|fchdir|fchmod|lockf|posix_.*|F_.*|P_[PA].*|PRIO_.*|RTLD_.*|EX_.*|register_at_fork"
    "|[gs]et_blocking|O_(NONBLOCK|NDELAY|CLOEXEC|DIRECTORY|NOFOLLOW|SYNC|DSYNC|NOCTTY|ASYNC|ACCMODE)"
)
_BAD_NAME = re.compile(r'.*[<>:"|?*\\\x00-\x1f].*|.*[. ]|(?i:con|prn|aux|nul|com\d|lpt\d)(\..*)?')


@dataclass(frozen=True)
class System:
    """What a system is called in Python, and what of Linux it lacks."""

    platform: str
    os_name: str
    signals: tuple[str, ...]
    modules: tuple[str, ...] = ()
    no_os: Any = field(default=re.compile("|".join(_LINUX_ONLY)))
    no_signal: Any = field(default=re.compile("SIG(POLL|PWR|STKFLT|CLD|RTM.*)|sigwaitinfo|sigtimedwait"))


_POSIX_SIGNALS = ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGKILL", "SIGSTOP", "SIGCHLD", "SIGPIPE")
_SIGNALS = ("SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM")
WINDOWS = System(
    "win32",
    "nt",
    _SIGNALS,
    ("fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "posix", "readline", "syslog", "curses"),
    re.compile(f"{'|'.join(_LINUX_ONLY)}|{_POSIX_ONLY.pattern}"),
    re.compile(
        "SIG(?!ABRT|FPE|ILL|INT|SEGV|TERM|_DFL|_IGN).*|alarm|.etitimer|ITIMER.*|pause|pthread_.*|sig[a-z]*|Sigmasks"
    ),
)
MACOS = System("darwin", "posix", _SIGNALS + _POSIX_SIGNALS)


class StandIn(ModuleType):
    """A module without some of its names, and with others changed; what is set is set in the module itself."""

    def __init__(self, module: ModuleType, lacks: re.Pattern[str], **changed: Any) -> None:
        super().__init__(module.__name__)
        object.__setattr__(self, "parts", (module, lacks, changed))

    def __getattribute__(self, name: str) -> Any:
        module, lacks, changed = object.__getattribute__(self, "parts")
        if name in changed:
            return changed[name]
        if lacks.fullmatch(name):
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r} on this system")
        return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "parts")[0], name, value)


def become(system: System, folder: Path) -> None:
    """Let the package, which is not imported yet, find this process on another system."""
    assert not any(name.partition(".")[0] == "lightning_tricks" for name in sys.modules)
    nothing, files = re.compile("(?!)"), _FileRules(system, folder)
    if system is WINDOWS:
        vars(shutil)["_use_fd_functions"] = False  # by which Linux opens the folders that it removes
    stand_ins = {
        "os": StandIn(os, system.no_os, name=system.os_name, **({"kill": _no_kill} if system is WINDOWS else {})),
        "sys": StandIn(sys, nothing, platform=system.platform),
        "signal": StandIn(signal, system.no_signal, Signals=_signals_of(system), signal=_handles_only(system)),
        "tempfile": StandIn(
            tempfile,
            nothing,
            NamedTemporaryFile=files.named_temporary_file,
            TemporaryFile=files.named_temporary_file,  # which opens the directory on Linux alone
        ),
    }
    if system is WINDOWS:
        sys.modules["msvcrt"] = SimpleNamespace(LK_NBLCK=2, LK_UNLCK=0, locking=_locking)  # type: ignore[assignment]
    real = builtins.__import__

    def imported(name, globals=None, locals=None, fromlist=(), level=0):  # noqa: A002
        if level == 0 and str((globals or {}).get("__name__")).partition(".")[0] == "lightning_tricks":
            if name in system.modules:
                raise ModuleNotFoundError(f"No module named {name!r} on this system", name=name)
            if name in stand_ins:
                return stand_ins[name]
        return real(name, globals, locals, fromlist, level)

    builtins.__import__ = imported
    sys.addaudithook(files)


def _signals_of(system: System) -> Any:
    return enum.IntEnum("Signals", {name: int(getattr(signal, name)) for name in system.signals})


def _handles_only(system: System) -> Any:
    known = [int(number) for number in _signals_of(system)]

    def handle(number, handler):
        if number not in known:
            raise ValueError(f"signal {number} is none of this system")
        return signal.signal(number, handler)

    return handle


def _no_kill(pid: int, number: int) -> None:
    raise RuntimeError(f"on Windows, os.kill({pid}, {number}) ends the process, or sends Ctrl-C to the whole console")


def _locking(descriptor: int, mode: int, length: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB if mode else fcntl.LOCK_UN)
    except BlockingIOError:
        raise PermissionError(errno.EACCES, "locked") from None


class _FileRules:
    """An audit hook that refuses what a system refuses of files, in one folder."""

    def __init__(self, system: System, folder: Path) -> None:
        self.is_windows, self.folder = system is WINDOWS, f"{folder}{os.sep}"
        self.removed_when_closed: set[str] = set()
        self.busy = False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.busy or event not in ("open", "os.rename", "os.remove", "os.mkdir", "os.symlink", "os.fork"):
            return
        self.busy = True
        try:
            self._check(event, [os.path.abspath(os.fsdecode(a)) for a in arguments if isinstance(a, str | bytes)])  # noqa: PTH100
        finally:
            self.busy = False

    def _check(self, event: str, paths: list[str]) -> None:
        if _caller().startswith("lightning_tricks"):
            if self.is_windows and event in ("os.fork", "os.symlink"):
                raise OSError(errno.EPERM, f"{event} on Windows")
            if event == "open" and paths and paths[0].startswith(("/proc/", "/sys/")):
                raise FileNotFoundError(errno.ENOENT, "not on this system", paths[0])
        if not self.is_windows:
            return
        for path in paths[:2] if event == "os.rename" else paths[:1]:
            if path in self.removed_when_closed and event == "open":
                raise PermissionError(errno.EACCES, "opened once more while it is to be removed", path)
            if not path.startswith(self.folder):
                continue
            if any(_BAD_NAME.fullmatch(part) for part in Path(path[len(self.folder) :]).parts):
                raise OSError(errno.EINVAL, "no name of a file on Windows", path)
            if event == "open" and Path(path).is_dir():
                raise PermissionError(errno.EACCES, "a directory cannot be opened on Windows", path)
            if event in ("os.rename", "os.remove") and path in _open_files():
                raise PermissionError(errno.EACCES, "moved or removed while it is open", path)

    def named_temporary_file(self, *arguments: Any, **options: Any) -> Any:
        """Make one that nobody can open again, as on Windows."""
        self.busy = True  # here the audited name is that of the directory
        try:
            file = tempfile.NamedTemporaryFile(*arguments, **options)  # noqa: SIM115
        finally:
            self.busy = False
        if options.get("delete", True):
            self.removed_when_closed.add(file.name)
        return file


def _caller() -> str:
    """The module outside the standard library that does something."""
    frame = sys._getframe(2)
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name != __name__ and name.partition(".")[0] not in sys.stdlib_module_names:
            return name
        frame = frame.f_back
    return ""


def _open_files() -> set[str]:
    """The files that this process has open, or mapped into memory."""
    found = {line.split(maxsplit=5)[-1].rstrip() for line in io.open("/proc/self/maps", encoding="utf-8")}  # noqa: UP020, SIM115
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115
        except OSError:  # that of the listing itself
            continue
    return found
