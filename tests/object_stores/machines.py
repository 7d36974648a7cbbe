"""A run of the training script on one machine after the other, each with an empty disk, and its sending process."""

import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_tricks.auto_resume import CheckpointFolder
from tests.auto_resume.curves import scalars
from tests.auto_resume.killing import differences, run
from tests.small import Hooks, unseen

SHORT = {"samples": 28, "epochs": 2, "validate": "none"}  # 7 batches of 4, twice
SCRATCH, LOGS = "resume", "resume/logs"


def on(machine: Path, address: str, **options: Any) -> dict[str, Any]:
    """Return options of the script for a run at an address, with its local files in the folder of a machine.

    A save is complete where the step that made it ends, so that a test knows what a kill leaves.
    """
    resume = {
        "scratch": machine / SCRATCH,
        "every_n_train_steps": 2,
        "asynchronous": False,
        **options.pop("resume", {}),
    }
    return {**SHORT, "logs": LOGS, **options, "address": address, "resume": resume}


def at(hook: str, number: int, act: Callable[[], object]) -> Hooks:
    """Return a callback that acts at the n-th call of a hook."""
    counter = unseen(itertools.count(1))  # no value that is saved
    return Hooks(**{hook: lambda *_: act() if next(counter()) == number else None})


def senders(process: int | None = None) -> list[int]:
    """Return the processes that send for a run, this one by default."""
    parent = os.getpid() if process is None else process
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(child) for child in children if b"mirror_process" in Path(f"/proc/{child}/cmdline").read_bytes()]


def kill_all(name: str = "SIGKILL") -> None:
    """Send the sending process of this run a signal, and then this process."""
    kill_sender(name)
    os.kill(os.getpid(), getattr(signal, name))


def kill_sender(name: str = "SIGKILL") -> None:
    """Send the sending process of this run a signal."""
    for child in senders():
        os.kill(child, getattr(signal, name))


def wait_until(is_so: Callable[[], object], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)


def sent_step(machine: Path) -> int:
    return int(CheckpointFolder(machine / SCRATCH).read_private("mirror.json").get("step", -1))


def output(machine: Path) -> str:
    """Return what the runs on a machine printed."""
    file = machine / "output.txt"
    return file.read_text() if file.exists() else ""


def assert_ends(machine: Path, options: dict[str, Any]) -> None:
    assert run(machine, options) == 0, output(machine)[-3000:]


def assert_as_undisturbed(machines: list[Path], whole: Path, options: dict[str, Any]) -> None:
    """Compare what machines have left of a run, the last one at its end, with an undisturbed run."""
    assert run(whole, {**options, "address": "", "guarded": False, "more": [], "kill": None}) == 0
    last = machines[-1]
    for before in machines[:-1]:
        if (before / "logged.jsonl").exists():
            later = (last / "logged.jsonl").read_text() if (last / "logged.jsonl").exists() else ""
            (last / "logged.jsonl").write_text((before / "logged.jsonl").read_text() + later)
    assert differences(last, whole) == []
    for name in options.get("loggers", ()):
        assert rows(last / LOGS / name) == rows(whole / LOGS / name), name


def rows(folder: Path) -> list[Any]:
    """Return what a logger of the script has written."""
    versions = sorted(path for path in folder.iterdir() if path.is_dir())
    if (versions[0] / "metrics.csv").exists():
        return [(version / "metrics.csv").read_text() for version in versions]
    return [scalars(version) for version in versions]
