"""Runs of the training script in processes of their own, killed, started again, and compared bit for bit."""

import json
import logging
import os
import pty
import random
import re
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch.utils.data._utils import worker

from lightning_tricks.auto_resume.core.tensor_block import unpack
from tests.auto_resume.training import DEFAULTS, ON_FILES, train
from tests.contract.processes import append_output_to, run_and_exit

STOPPED = 75
Script = Callable[[Path, dict[str, Any]], Any]

# Where a run is killed: a hook, and which of its calls, as (options) -> number
PHASES = {
    "before the first step": ("on_train_start", lambda options: 1),
    "in the sanity check": ("on_validation_batch_start", lambda options: 1),
    "in the middle of an epoch": ("on_train_batch_start", lambda options: batches(options) + 4),
    "in the middle of a step": ("on_before_zero_grad", lambda options: 5),
    "in mid-accumulation": ("on_after_backward", lambda options: batches(options) + 2),
    "in the last batch of an epoch": ("on_train_batch_end", lambda options: batches(options)),
    "just before validation": ("on_validation_start", lambda options: 2),
    "just after validation": ("on_validation_end", lambda options: 2),
    "at an epoch's end": ("on_train_epoch_end", lambda options: 1),
    "at an epoch's start": ("on_train_epoch_start", lambda options: 2),
    "after the last step": ("on_train_end", lambda options: 1),
    "after the fit": ("on_fit_end", lambda options: 1),
}
IN_A_SAVE = "while files are written"


def one_in_three_with_the_oldest(*cases: Any) -> list[Any]:
    """Return the cases as parameters, of which every third runs with the oldest versions too."""
    return [pytest.param(case, marks=[pytest.mark.newest] if index % 3 else []) for index, case in enumerate(cases)]


def batches(options: dict[str, Any]) -> int:
    return {**DEFAULTS, **options}["samples"] // 4


def kill_at(phase: str, name: str, options: dict[str, Any], rank: int = 0) -> list[Any]:
    """Return what the script takes as "kill"."""
    hook, number = PHASES[phase]
    return [hook, number(options), name, rank]


def run(folder: Path, options: dict[str, Any], **how: Any) -> int:
    """Run a script in a fork of this process, as `start` does, and return its exit status."""
    return wait_for(start(folder, options, **how))


def start(folder: Path, options: dict[str, Any], *, script: Script = train, cpu_seconds: float = 0) -> int:
    """Start a script in a fork of this process, which is killed when it has worked for so long; return its id."""
    folder.mkdir(parents=True, exist_ok=True)
    pid = os.fork()
    if pid == 0:
        die_after(cpu_seconds)
        _be_a_script(folder, options, script)
    return pid


def wait_for(pid: int) -> int:
    """Return the exit status of a script that was started."""
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # workers that torch's watchdog does not end
    return status


def start_on_terminal(folder: Path, options: dict[str, Any]) -> tuple[int, int]:
    """Start the script in a fork that leads a new terminal's session; return its id and the terminal's other end."""
    pid, terminal = pty.fork()
    if pid == 0:
        _be_a_script(folder, options, train, on_terminal=True)
    return pid, terminal


def die_after(cpu_seconds: float) -> None:
    """Let this process be killed, as if by SIGKILL, when it has worked for so many seconds; 0 is never."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends a process at once
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)


def _be_a_script(folder: Path, options: dict[str, Any], script: Script, on_terminal: bool = False) -> NoReturn:
    def work() -> None:
        torch.cuda._is_in_bad_fork = lambda: False  # it trains on the CPU, and may fork ranks whoever looked for a GPU
        worker.MP_STATUS_CHECK_INTERVAL = 0.2  # seconds, not 5, until workers see that their rank was killed
        if "SIGKILL" in str(options.get("kill")):
            _wait_less_for_ranks()
        if not on_terminal:
            os.setpgid(0, 0)  # a signal to its process group is not for us
            append_output_to(folder / "output.txt")
        for logger in ("lightning.pytorch", "lightning.fabric"):
            for handler in logging.getLogger(logger).handlers:
                if isinstance(handler, logging.StreamHandler):
                    handler.setStream(sys.stderr)
        warnings.resetwarnings()
        warnings.showwarning = lambda message, *_: sys.stderr.write(f"{message}\n")
        for name in ("SIGTERM", "SIGHUP", "SIGUSR1"):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        script(folder, options)

    run_and_exit(work)


def _wait_less_for_ranks() -> None:
    """Let torch wait 3 seconds, not 30, until it kills the ranks that wait for one that was killed."""
    join = BaseProcess.join
    BaseProcess.join = lambda process, timeout=None: join(process, timeout and min(timeout, 3))  # type: ignore[method-assign]


def logged(folder: Path) -> dict[tuple[int, str], str]:
    """What the run logged, the last value of each name at each step."""
    found = {}
    for line in (folder / "logged.jsonl").read_text().splitlines():
        step, values = json.loads(line)
        found |= {(step, name): value for name, value in values.items()}
    return found


def differences(folder: Path, whole: Path) -> list[str]:
    """In what a run differs from another: what it left, and what it logged."""
    found = []
    for file in sorted(whole.glob("end.*.json")):
        wanted, present = json.loads(file.read_text()), json.loads((folder / file.name).read_text())
        found += [f"{file.stem}: {name}" for name in wanted if wanted[name] != present.get(name)]
    wanted_log, present_log = logged(whole), logged(folder)
    found += [
        f"logged {name} at step {step}"
        for step, name in {**wanted_log, **present_log}
        if wanted_log.get((step, name)) != present_log.get((step, name))
    ]
    return found


def resumed_at(folder: Path) -> list[int]:
    """Return the steps at which the runs in a folder resumed, as they logged."""
    lines = (folder / "output.txt").read_text().splitlines()
    return [int(line.split("step ")[1].split()[0]) for line in lines if "AutoResume: the run resumes at" in line]


def own_state(file: Path) -> dict[str, Any]:
    """Return what AutoResume added to a checkpoint: what all ranks share, and of each rank."""
    entry = torch.load(file, weights_only=True)["auto_resume"]
    return {"shared": unpack(entry["shared"]), "ranks": [*map(unpack, entry["ranks"])]}


def warned(folder: Path, wanted: str) -> bool:
    """Return whether a run logged what a regular expression describes, since it first resumed."""
    output = (folder / "output.txt").read_text()
    _, _, later = output.partition("AutoResume: the run resumes at")
    return re.search(wanted, later or output) is not None


def phases_of(options: dict[str, Any]) -> list[str]:
    return [phase for phase in PHASES if options["validate"] != "none" or not ("valid" in phase or "sanity" in phase)]


def random_kill(options: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """Choose a kill that can happen with these options."""
    if str(options.get("strategy")).startswith("fsdp2"):
        rank = chance.randrange(options["ranks"])
        if chance.random() < 0.4:  # rank zero writes more
            change = chance.randrange(1, 150 if rank == 0 else 14)
            return {"phase": IN_A_SAVE, "kill": [ON_FILES, change, "SIGKILL", rank]}
        phase = chance.choice(phases_of(options))
        name, target = chance.choice((("SIGKILL", rank), ("SIGKILL", "group"), ("SIGTERM", rank)))
        return {"phase": phase, "kill": [*kill_at(phase, name, options)[:3], target]}
    phase = chance.choice(phases_of(options))
    names = ["SIGKILL", "SIGTERM", "SIGINT", "SIGUSR1"]
    return {"phase": phase, "kill": kill_at(phase, chance.choice(names), options)}
