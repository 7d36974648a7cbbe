"""Run the package as Windows and macOS would: without what they lack, and by their rules for files.

`python -X utf8=0 -X warn_default_encoding -m tests.architecture.other_systems FOLDER` forks a process for each system.
In it, the modules of the package find stand-ins for `os`, `sys`, `signal` and others; all other modules find the real
ones. An audit hook applies the rules for files to everybody who works in FOLDER. The package's modules are imported,
and its callbacks keep promises of the contract.
"""

from __future__ import annotations

import builtins
import enum
import errno
import fcntl
import io
import os
import pickle
import pkgutil
import re
import signal
import sys
import tempfile
import traceback
import warnings
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from importlib import import_module
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


def run(system: System, folder: Path) -> None:
    """Import everything, and let every callback keep its promises."""
    warnings.filterwarnings("error", category=EncodingWarning, module=r"lightning_tricks\b")
    package = import_module("lightning_tricks")
    for module in pkgutil.walk_packages(package.__path__, "lightning_tricks."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
    from tests.contract.cases import CASES
    from tests.contract.checks import every_stage_alone, resume_anywhere, safe_state
    from tests.contract.lab import Lab

    checks = (resume_anywhere, every_stage_alone) if system is WINDOWS else (safe_state,)
    for name, case in CASES.items():
        case.callback(**{key: value for key, value in case.arguments.items() if case.callback.requires_argument(key)})
        made = case.make()
        assert type(pickle.loads(pickle.dumps(made))) is case.callback, name  # as each spawned process gets it
        for check in checks:
            place = folder / f"{name}-{check.__name__}"
            place.mkdir()
            os.chdir(place)
            check(case, Lab(place, case.net))
    commands(folder)
    streams(folder)
    if system is WINDOWS:
        spawned_workers(folder)


def commands(folder: Path) -> None:
    """Run the commands whose output tells of the machine, into a pipe with the encoding of Windows."""
    from lightning_tricks.cli import main

    for words in (["env"], ["--help"], ["schedule", "--help"], ["fingerprint", "--help"], ["ckpt", "--help"]):
        with io.TextIOWrapper(io.BytesIO(), encoding="cp1252") as pipe, redirect_stdout(pipe):
            with suppress(SystemExit):  # by `--help`
                assert main(words) in (0, None)
            pipe.flush()
            assert pipe.buffer.getvalue()


def streams(folder: Path) -> None:
    """Read a checkpoint from a stream."""
    import torch
    from lightning.pytorch import Trainer

    from lightning_tricks import TricksMixin
    from tests.contract.lab import QUIET, Net, loader

    class Mine(TricksMixin, Net):
        pass

    trainer = Trainer(max_steps=1, **QUIET)
    trainer.fit(Mine(), loader())
    trainer.save_checkpoint(folder / "mine.ckpt")
    loaded = Mine.load_from_checkpoint(io.BytesIO((folder / "mine.ckpt").read_bytes()))
    assert torch.equal(loaded.net[0].weight, trainer.lightning_module.net[0].weight)


class Noisy:
    """Random pixels from the worker that reads them."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        import torch

        return index / 40 + torch.rand(64), index % 10


def spawned_workers(folder: Path) -> None:
    """Stop and resume with a worker that is spawned, as all are there; the whole run has a forked one."""
    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader

    from lightning_tricks import AutoResume, isolated_rng
    from tests.contract.checks import Interrupts
    from tests.contract.lab import QUIET, Net, same

    def fit(place, method, seed, *callbacks):
        with isolated_rng(seed=0):
            net = Net()
        options = {"batch_size": 4, "shuffle": True, "num_workers": 1, "persistent_workers": True}
        with isolated_rng(seed=seed):
            trainer = Trainer(callbacks=[AutoResume(folder / place), *callbacks], max_epochs=2, **QUIET)
            trainer.fit(net, DataLoader(Noisy(), multiprocessing_context=method, **options))
        return net.state_dict()

    whole = fit("whole", "fork", 0)
    with suppress(SystemExit):
        fit("stopped", "spawn", 0, Interrupts(13))
    assert same(fit("stopped", "spawn", 5), whole)


def main(folder: Path) -> int:
    """Run on both systems at once; return how many failed."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import lightning.pytorch  # noqa: F401
    import torch
    import torchmetrics  # noqa: F401

    torch.set_num_threads(1)
    torch.zeros((), requires_grad=True).backward()
    children = []
    for system in (WINDOWS, MACOS):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                (folder / system.platform).mkdir()
                become(system, folder / system.platform)
                run(system, folder / system.platform)
                code = 0
            except BaseException:
                os.write(2, f"on {system.platform}:\n{traceback.format_exc()}".encode())
            finally:
                os._exit(code)
        children.append(child)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
