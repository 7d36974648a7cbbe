"""How the processes of one training run come to use the GPUs that the first of them has selected.

Lightning starts the other ranks itself, with the environment of the first: that has a variable, with the number of the
process that has selected. torchrun, srun, mpirun and others start all ranks at once: the first of each machine leaves a
file in the folder of the locks.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import platform
import secrets
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_tricks._shared.extras import import_extra
from lightning_tricks.devices.core.gpu_locks import FOLDER_VARIABLE, GpuLockError, lock_folder

VARIABLE = "LIGHTNING_TRICKS_SELECTED_GPUS"
CPU = "cpu"
_GRACE = 120.0  # seconds that the ranks of one run may start one after another
_LARGEST_FILE = 1 << 16
_TORCHRUN = "TORCHELASTIC_RUN_ID"
_TORCHRUN_REPORTS = "TORCHELASTIC_ERROR_FILE"


class RankError(RuntimeError):
    """This rank cannot use what the first rank of its machine has selected; the message says why."""


@dataclass(frozen=True)
class Launch:
    """The ranks that were started with this process.

    Attributes:
        local_rank: The rank on this machine.
        key: What all ranks of this machine and no other processes have in common.
    """

    local_rank: int
    key: str


@dataclass(frozen=True)
class _Launcher:
    sign: str  # the variable by which it is known
    rank: str
    size: str
    names: tuple[str, ...]  # variables that tell one launch from another
    parent: bool = False  # whether all ranks of a machine are children of one process, where nothing else tells


_LAUNCHERS = (
    _Launcher(
        _TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE", (_TORCHRUN, "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT"), True
    ),
    _Launcher(
        "SLURM_STEP_ID",
        "SLURM_LOCALID",
        "SLURM_STEP_NUM_TASKS",
        ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    ),
    _Launcher("PMIX_NAMESPACE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", ("PMIX_NAMESPACE",)),
    _Launcher(
        "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", (), parent=True
    ),
    _Launcher("LOCAL_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", ("MASTER_PORT",), parent=True),
)


def inherited_choice(environment: Mapping[str, str]) -> list[str] | None:
    """Return what the process that launched this rank has selected, or None if Lightning launched no such rank.

    Other programs that a script starts inherit the variable too, but with the local rank 0, or without one.
    """
    if _TORCHRUN in environment or _number(environment.get("LOCAL_RANK")) < 1 or not _follows_a_choice(environment):
        return None
    return _announced_choice(environment)


def repeated_choice(environment: Mapping[str, str]) -> list[str] | None:
    """Return the choice that is in force if this process only imports the main module of its parent once more.

    multiprocessing does so in each process that it spawns, those of a DataLoader and of ddp_spawn among them: a call of
    `select_gpus` at the top level of a script is repeated there, and has to return what it has returned before.
    """
    # what multiprocessing itself asks to refuse a new process meanwhile
    repeats = getattr(multiprocessing.current_process(), "_inheriting", False)
    return _announced_choice(environment) if repeats else None


def announce_choice(choice: Sequence[str]) -> None:
    """Set the variable by which the processes that this one starts learn what it has selected."""
    os.environ[VARIABLE] = f"{os.getpid()}:{','.join(choice)}"


def withdraw_choice() -> None:
    """Remove the variable, so that new child processes do not inherit the selection."""
    os.environ.pop(VARIABLE, None)


def _announced_choice(environment: Mapping[str, str]) -> list[str] | None:
    _, colon, choice = environment.get(VARIABLE, "").partition(":")
    return choice.split(",") if colon else None


def _follows_a_choice(environment: Mapping[str, str]) -> bool:
    """Return whether this process or its parent has selected.

    Where an older ancestor has, the variable is only a relic: that process was the driver of a sweep, say, and has
    started a launcher or workers, whose ranks have nothing to do with its selection.
    """
    leader = _number(environment.get(VARIABLE, "").partition(":")[0])
    if leader in (os.getpid(), os.getppid()):
        return True
    if sys.platform != "win32" or leader < 0:
        return False
    psutil = _psutil()
    with suppress(psutil.Error, OSError):  # the python.exe of a virtual environment starts another one
        return bool(psutil.Process(os.getppid()).ppid() == leader)
    return False


def find_launch(environment: Mapping[str, str]) -> Launch | None:
    """Return the launch that this process is a rank of, or None if no launcher has started several."""
    for launcher in _LAUNCHERS:
        rank = _number(environment.get(launcher.rank))
        if launcher.sign not in environment or rank < 0 or environment.get(launcher.size) == "1":
            continue
        if launcher.sign == "LOCAL_RANK" and _follows_a_choice(environment):
            return None  # started by a script that has selected GPUs for itself
        named = [environment.get(variable) for variable in launcher.names]
        reports = environment.get(_TORCHRUN_REPORTS) if launcher.sign == _TORCHRUN else None
        if reports:
            named.append(str(Path(reports).parent.parent))  # <folder of the launch>/<rank>/error.json
        elif launcher.parent:
            named += [str(os.getppid()), start_of(os.getppid())]
        text = json.dumps([launcher.sign, named, platform.node(), _user()])
        return Launch(rank, hashlib.sha256(text.encode()).hexdigest()[:32])
    return None


def is_rank(environment: Mapping[str, str]) -> bool:
    """Return whether other processes may use what this one has selected."""
    return "LOCAL_RANK" in environment or find_launch(environment) is not None


def publish_choice(launch: Launch, choice: Sequence[str], error: str | None = None) -> None:
    """Leave what the first rank has selected, or why it failed, to the others.

    Raises:
        GpuLockError: If the file cannot be written.
    """
    path = handoff_path(launch)
    content = {"pid": os.getpid(), "started": start_of(os.getpid()), "choice": list(choice), "error": error}
    staged = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    known = _read(path)
    if known is not None and known["error"] is None and known["pid"] != os.getpid():
        return  # this is not a rank, but a program that the first rank has started
    try:
        _remove_old(path.parent)
        descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(content, file)
        staged.replace(path)
    except OSError as problem:
        with suppress(OSError):
            staged.unlink(missing_ok=True)
        raise GpuLockError(f"{path} cannot be written ({problem}). Set {FOLDER_VARIABLE} to another folder.") from None


def await_choice(launch: Launch, timeout: float) -> list[str]:
    """Return what the first rank has selected.

    Args:
        launch: The launch.
        timeout: How long the first rank may wait for GPUs, in seconds.

    Raises:
        RankError: If it has failed, or says nothing for a long time.
    """
    path = handoff_path(launch)
    deadline = time.monotonic() + timeout + _GRACE
    while (content := _read(path)) is None:
        if time.monotonic() > deadline:
            raise RankError(
                f"Local rank {launch.local_rank} has waited {timeout + _GRACE:g} s for the GPUs that local rank 0 of "
                "its launch selects. All ranks have to call select_gpus. A program that a rank has started must "
                "not inherit LOCAL_RANK, SLURM_LOCALID or OMPI_COMM_WORLD_LOCAL_RANK."
            )
        time.sleep(0.1)
    if content["error"] is not None:
        raise RankError(f"Local rank 0, which selects the GPUs of this launch, has failed: {content['error']}")
    return list(content["choice"])


def handoff_path(launch: Launch) -> Path:
    """Return the path of the file that the first rank of a launch leaves to the others."""
    return lock_folder() / f"ranks-{launch.key}.json"


def _read(path: Path) -> dict[str, Any] | None:
    """Return the content of a file of this user that is meant for now; anyone can put files into the folder."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != _user():
                return None
            content = json.loads(file.read(_LARGEST_FILE))
        choice, error = content["choice"], content["error"]
        plain = isinstance(choice, list) and all(isinstance(uuid, str) for uuid in choice)
        # a writer that has ended wrote for earlier ranks, or failed
        valid = content["started"] == start_of(content["pid"]) or (error and status.st_mtime > _own_start())
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return content if plain and valid and isinstance(error, str | None) else None


def _remove_old(folder: Path) -> None:
    """Remove the files of launches that have ended."""
    for path in folder.glob("ranks-*.json"):
        with suppress(OSError):
            if path.lstat().st_uid == _user() and _read(path) is None:
                path.unlink()


def start_of(pid: int) -> str | None:
    """Return when a process was started, the same for all who ask; None if it has ended."""
    try:
        with Path(f"/proc/{pid:d}/stat").open(encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[19]  # psutil's depends on the clock of the host
    except (OSError, IndexError):
        pass
    psutil = _psutil()
    with suppress(psutil.Error, OSError):
        return str(psutil.Process(pid).create_time())
    return None


def _own_start() -> float:
    return float(_psutil().Process().create_time()) - 1.0


def _psutil() -> Any:
    return import_extra("psutil", "devices", "Selecting GPUs for several ranks needs psutil")


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else -1
