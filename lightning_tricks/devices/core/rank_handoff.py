"""How the ranks that Lightning starts come to use the GPUs that the first of them has selected.

They start with the environment of the first, which has a variable with the number of the process that has selected.
The ranks of torchrun, srun or mpirun start at once and have nothing from each other: there the launcher itself is
started on GPUs that are selected before, by `lightning-tricks gpus --select`.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from lightning_tricks._shared.extras import import_extra

VARIABLE = "LIGHTNING_TRICKS_SELECTED_GPUS"
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
    " Where Lightning starts them, call select_gpus before the Trainer runs; a program that a rank starts must not "
    "inherit LOCAL_RANK."
)


class RankError(RuntimeError):
    """This rank cannot select GPUs, or not use what the first rank has selected; the message says why."""


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
            f"Trainer(devices='auto') uses them. Here each rank would select GPUs of its own, as {sign} says that "
            f"{launcher or 'a launcher'} has started several." + ("" if launcher else _ABOUT_LIGHTNING)
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
    os.environ[VARIABLE] = f"{os.getpid()}:{','.join(choice)}"


def withdraw_choice() -> None:
    """Remove the variable, so that new child processes do not inherit the selection."""
    os.environ.pop(VARIABLE, None)


def _announced_choice(environment: Mapping[str, str]) -> list[str] | None:
    _, colon, choice = environment.get(VARIABLE, "").partition(":")
    return choice.split(",") if colon else None


def _follows_a_choice(environment: Mapping[str, str]) -> bool:
    """Return whether this process or its parent has selected, and starts the ranks itself.

    Where an older ancestor has, the variable is only a relic: that process was the driver of a sweep, say, and has
    started a launcher or workers, whose ranks have nothing to do with its selection.
    """
    leader = _number(environment.get(VARIABLE, "").partition(":")[0])
    if _TORCHRUN in environment or leader < 0:
        return False
    if leader in (os.getpid(), os.getppid()):
        return True
    if sys.platform != "win32":
        return False
    psutil = import_extra("psutil", "devices", "Selecting GPUs for several ranks needs psutil")
    with suppress(psutil.Error, OSError):  # the python.exe of a virtual environment starts another one
        return bool(psutil.Process(os.getppid()).ppid() == leader)
    return False


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else -1
