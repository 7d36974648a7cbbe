"""The selection of a process, the locks that it holds until it ends, and how the ranks that it starts learn of it.

Ranks that Lightning starts have the environment of the first, with a variable that names the process that has selected.
Those of torchrun, srun or mpirun start at once and have nothing from each other: there the launcher itself is started
on GPUs that are selected before, by `lightning-tricks gpus --select`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

from lightning_tricks._shared.extras import import_extra
from lightning_tricks.devices.core.gpu import Gpu
from lightning_tricks.devices.core.gpu_locks import LOCKS
from lightning_tricks.devices.core.visible_devices import VARIABLE as VISIBLE_VARIABLE
from lightning_tricks.devices.core.visible_devices import uuids_seen_by_cuda

CHOICE_VARIABLE = "LIGHTNING_TRICKS_SELECTED_GPUS"
CPU = "cpu"
_ONE_A_MACHINE = re.compile(r"1(\(x[0-9]+\))?")  # Slurm writes 1(x2) for two machines
# The variable by which a launcher is known, its name, the variables that tell how many ranks it has started here
_TORCHRUN = "TORCHELASTIC_RUN_ID"
_LAUNCHERS = (
    (_TORCHRUN, "torchrun", ("LOCAL_WORLD_SIZE",)),
    ("SLURM_STEP_ID", "srun", ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE")),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "mpirun", ("OMPI_COMM_WORLD_LOCAL_SIZE",)),
    ("MPI_LOCALRANKID", "mpirun", ("MPI_LOCALNRANKS",)),
    ("LOCAL_RANK", "", ("LOCAL_WORLD_SIZE",)),
)
_ABOUT_LIGHTNING = (
    " If Lightning starts them, call select_gpus before the Trainer runs; a program that a rank starts must not "
    "inherit LOCAL_RANK."
)
# CUDA_VISIBLE_DEVICES as it was set here, and before; in the environment, as the programs that are started inherit both
_REPLACED_VARIABLE = "LIGHTNING_TRICKS_REPLACED_DEVICES"


class RankError(RuntimeError):
    """Raised if this rank cannot select GPUs or use the selection of the first rank; the message gives the reason."""


class NoGpuAvailableError(RuntimeError):
    """Raised if not enough GPUs qualify; the message gives the reason for each.

    Attributes:
        final: Whether waiting would not help.
    """

    def __init__(self, message: str, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


@dataclass(frozen=True, eq=False)
class Selection:
    """The result of `select_gpus`, for `Trainer(accelerator=selection.accelerator, devices=selection.devices)`.

    The GPUs stay selected until this process ends, you call `release`, or a `with` statement on this object ends.

    Attributes:
        accelerator: "cuda" or "cpu".
        devices: CUDA's indices in this process, ascending; 1 on the CPU.
        gpus: The state of the GPUs when they were selected, in the same order.
        cuda_visible_devices: The value of CUDA_VISIBLE_DEVICES with which another program uses them: UUIDs (PCI bus
            indices if the driver reports none), or "-1" on the CPU.
    """

    accelerator: Literal["cuda", "cpu"]
    devices: list[int] | int
    gpus: tuple[Gpu, ...] = ()
    cuda_visible_devices: str = "-1"

    def release(self) -> None:
        """Let other processes select the GPUs; this does nothing after a later call of `select_gpus`."""
        if state.selection is self:
            state.release()

    def __enter__(self) -> Selection:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        names = ", ".join(f"GPU {gpu.index} ({gpu.name})" for gpu in self.gpus)
        return f"Selection(accelerator={self.accelerator!r}, devices={self.devices!r}{names and f': {names}'})"


class _State:
    """The selection of this process: it has one at a time.

    Attributes:
        selection: The selection; None if there is none.
        choice: The keys of its devices, or "cpu" alone, which other ranks use; it outlives `release` if there are any.
        leads: Whether this process has chosen itself.
        locks: The descriptors of its locks by the keys of the devices.
        guard: Held by the thread that reads or changes all this.
    """

    def __init__(self) -> None:
        self.guard = threading.RLock()
        self.selection: Selection | None = None
        self.choice: list[str] | None = None
        self.leads = False
        self.locks: dict[str, int] = {}

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Let one thread choose, and leave no lock that belongs to no selection, wherever an exception interrupts."""
        with self.guard:
            LOCKS.keep(self.locks.values())  # an exception may also have interrupted the cleanup below
            try:
                yield
            finally:
                LOCKS.keep(self.locks.values())

    def visible_value(self) -> str | None:
        """Return CUDA_VISIBLE_DEVICES as it was before a selection changed it, of this process or one before it."""
        value = os.environ.get(VISIBLE_VARIABLE)
        replaced = os.environ.get(_REPLACED_VARIABLE)
        if replaced is None:
            return value
        new, before = json.loads(replaced)
        return before if value == new else value

    def take(
        self,
        selection: Selection,
        choice: Sequence[str] = (CPU,),
        locks: dict[str, int] | None = None,
        visible: str | None = None,
        leads: bool = True,
    ) -> Selection:
        """Replace the selection, and give up the locks that the new one does not have.

        Args:
            selection: The new selection.
            choice: The keys of its devices.
            locks: Its locks.
            visible: What CUDA_VISIBLE_DEVICES has to be for it; None if that does not matter.
            leads: Whether this process has chosen it.
        """
        self._show(visible)
        announce_choice(choice)
        self.selection, self.choice, self.locks, self.leads = selection, list(choice), locks or {}, leads
        LOCKS.keep(self.locks.values())  # last: an interrupt before this leaves too many locks, and none too few
        return selection

    def release(self) -> None:
        """Give up the selection."""
        with self.guard:
            locks = self.locks
            self.selection, self.locks = None, {}
            for descriptor in locks.values():
                LOCKS.unlock(descriptor)
            self._show(None)
            if not has_launched_ranks(os.environ):  # which do not know that it was released
                self.choice = None
                os.environ.pop(CHOICE_VARIABLE, None)  # so that new child processes do not inherit it

    def forget(self) -> None:
        """Let a forked child begin without a selection; the locks are its parent's."""
        if self.choice is not None:
            announce_choice(self.choice)  # what it launches finds the selection under its number
        self.guard = threading.RLock()  # a thread that the child does not have may hold that of the parent
        self.selection, self.choice, self.locks, self.leads = None, None, {}, False

    def _show(self, visible: str | None) -> None:
        """Set CUDA_VISIBLE_DEVICES, or restore it with None; interrupted anywhere, `visible_value` stays the same."""
        before = self.visible_value()
        if visible is not None:
            if os.environ.get(VISIBLE_VARIABLE) != before:
                _set_visible(before)
            os.environ[_REPLACED_VARIABLE] = json.dumps([visible, before])
            os.environ[VISIBLE_VARIABLE] = visible
        elif uuids_seen_by_cuda() is None:  # else CUDA has read it
            _set_visible(before)
            os.environ.pop(_REPLACED_VARIABLE, None)


def hand_over(selection: Selection) -> dict[str, str]:
    """Leave the locks of a selection to the program that replaces this one, and return the environment for it.

    The program keeps them until it ends, with the programs that inherit its files, as those that a shell starts.
    """
    for descriptor in state.locks.values():
        os.set_inheritable(descriptor, True)
    ours = (CHOICE_VARIABLE, _REPLACED_VARIABLE)
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    return environment | {VISIBLE_VARIABLE: selection.cuda_visible_devices}


def _set_visible(value: str | None) -> None:
    if value is None:
        os.environ.pop(VISIBLE_VARIABLE, None)
    else:
        os.environ[VISIBLE_VARIABLE] = value


state = _State()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=state.forget)


def refuse_to_choose(environment: Mapping[str, str], n: int) -> None:
    """Raise an error in a rank that does not learn what another one selects, so that each would select for itself.

    Args:
        environment: The environment of this process.
        n: How many GPUs it wants.

    Raises:
        RankError: If this is such a rank; the message has the command that selects for all of them.
    """
    if _follows_a_choice(environment):
        return  # Lightning starts the ranks
    for sign, launcher, sizes in _LAUNCHERS:
        if sign not in environment or any(_ONE_A_MACHINE.fullmatch(environment.get(size, "")) for size in sizes):
            continue
        line = f"lightning-tricks gpus --select {n} -- {launcher or '<launcher>'} ..."
        raise RankError(
            f"Leave select_gpus out, and start the run with `{line}`, which selects and locks GPUs for all ranks: "
            f"Trainer(devices='auto') uses them. Otherwise each rank would select GPUs for itself, as {sign} shows "
            f"that {launcher or 'a launcher'} has started several ranks." + ("" if launcher else _ABOUT_LIGHTNING)
        )


def inherited_choice(environment: Mapping[str, str]) -> list[str] | None:
    """Return what the process that launched this rank has selected, or None if Lightning launched no such rank.

    Other programs that a script starts inherit the variable too, but with the local rank 0, or without one.
    """
    if _number(environment.get("LOCAL_RANK")) < 1 or not _follows_a_choice(environment):
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


def has_launched_ranks(environment: Mapping[str, str]) -> bool:
    """Return whether ranks may use what this process has selected: Lightning gives it a rank when it starts others."""
    return "LOCAL_RANK" in environment


def announce_choice(choice: Sequence[str]) -> None:
    """Set the variable by which the processes that this one starts learn what it has selected."""
    os.environ[CHOICE_VARIABLE] = f"{os.getpid()}:{','.join(choice)}"


def _announced_choice(environment: Mapping[str, str]) -> list[str] | None:
    _, colon, choice = environment.get(CHOICE_VARIABLE, "").partition(":")
    return choice.split(",") if colon else None


def _follows_a_choice(environment: Mapping[str, str]) -> bool:
    """Return whether this process or its parent has selected, and starts the ranks itself.

    Where an older ancestor has, the variable is only a relic: that process was the driver of a sweep, say, and has
    started a launcher or workers, whose ranks have nothing to do with its selection.
    """
    leader = _number(environment.get(CHOICE_VARIABLE, "").partition(":")[0])
    if _TORCHRUN in environment or leader < 0:
        return False
    if leader in (os.getpid(), os.getppid()):
        return True
    if sys.platform != "win32":
        return False
    psutil = import_extra("psutil", "devices", "Selecting GPUs for multiple ranks needs psutil")
    with suppress(psutil.Error, OSError):  # the python.exe of a virtual environment starts another one
        return bool(psutil.Process(os.getppid()).ppid() == leader)
    return False


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else -1
