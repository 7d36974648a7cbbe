"""One command that a scheduler requeues while nobody watches: killed, preempted, on a full disk, twice at once.

Each start has another date, job, process, host, port, run id, output folder and state of git, in its hyper-parameters
and in names of folders. The chain must end as the undisturbed run, bit for bit.
`python -m tests.auto_resume.requeues --result FILE` is what `make requeues` runs; it ends with status 1 if one did not.
"""

import argparse
import json
import os
import platform
import random
import resource
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import lightning
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_tricks import seed_everything
from tests.auto_resume.killing import STOPPED, differences, run, start, wait_for
from tests.auto_resume.scenarios.frame import BATCHES, DEFAULTS, Job, Net
from tests.auto_resume.training import Kill, Notes, digest, signal_at_change
from tests.contract.processes import append_output_to

KILLED = "killed"
EMPTY, FULL, TWICE, IN_A_SAVE = TROUBLES = ("empty checkpoint", "full disk", "two starts at once", "stopped in a save")
# Where a start is killed: a hook, and from which to which of its calls. Two steps are saved before
MOMENTS = {
    "on_train_batch_start": (4, 8),
    "on_before_zero_grad": (4, 8),
    "on_after_backward": (4, 8),
    "on_train_batch_end": (3, 7),
    "on_validation_start": (1, 1),
    "on_validation_end": (1, 1),
    "on_train_epoch_end": (1, 1),
    "a change of a file": (1, 60),
}
MOST_LINES = 6  # of AutoResume in a start that resumes and is stopped
STEPS_AT_MOST = 9  # of a start that nothing else has ended


@dataclass
class Start:
    """What one start of the command met and did."""

    number: int
    what: str
    moment: str
    status: int
    said: str

    @property
    def resumed_at(self) -> str:
        """The step that it resumed at; empty if it did not resume."""
        _, found, later = self.said.partition("AutoResume: the run resumes at")
        return later.split("step ")[1].split()[0] if found else ""

    @property
    def lines(self) -> list[str]:
        """What AutoResume said; under pytest it is logged several times."""
        lines = map(str.strip, self.said.splitlines())
        return list(dict.fromkeys(line for line in lines if line.startswith("AutoResume")))

    @property
    def last_line(self) -> str:
        """What stands at the end of the job's log."""
        return ["", *filter(str.strip, self.said.splitlines())][-1]

    def __str__(self) -> str:
        resumed = f"resumed at {self.resumed_at}; " if self.resumed_at else ""
        return f"start {self.number} ({self.what}; {resumed}{self.moment}; status {self.status}; {self.last_line})"


def surroundings(number: int) -> dict[str, Any]:
    """Return what is another one at each start, as programs keep it among their hyper-parameters."""
    chance, now = random.Random(number), datetime(2026, 11, 27, 3) + timedelta(minutes=41 * number)
    name = f"digits-{now:%m%d-%H%M}"
    return {
        "lr": 0.05,
        "started": str(now),
        "timestamp": now.timestamp(),
        "output_dir": f"outputs/{now:%Y-%m-%d}/{now:%H-%M-%S}",
        "slurm_job_id": 4711 + number,
        "hostname": f"node-{number % 7}",
        "pid": os.getpid(),
        "master_port": 29500 + number,
        "attempt": number,
        "run": {"id": f"{chance.getrandbits(32):08x}", "name": name},
        "git": {"sha": f"{chance.getrandbits(160):040x}", "dirty": bool(number % 2)},
        "argv": ["train.py", f"run={name}"],
    }


class RequeuedNet(Net):
    """Keeps its surroundings among its hyper-parameters."""

    def __init__(self, config: dict[str, Any], steps: int) -> None:
        super().__init__()
        self.save_hyperparameters(config)
        self.steps = steps

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class RunIds(Notes):
    def __init__(self, folder: Path, version: str) -> None:
        super().__init__(folder)
        self.run_id = version

    @property
    def version(self) -> str:
        return self.run_id

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Nothing."""


class Waits(Callback):
    """Waits in its first batch until a file is there, so that a start cannot end before another one has begun."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        end = time.monotonic() + 60
        while not self.file.exists():
            time.sleep(0.02)
            if time.monotonic() > end:
                raise TimeoutError("two starts at once were both let in.")


def job(folder: Path, options: dict[str, Any]) -> None:
    """Train, in surroundings that are others at each start."""
    append_output_to(folder / f"{options['name']}.txt")
    around = surroundings(options["number"])
    socket.gethostname = platform.node = lambda: around["hostname"]
    os.environ |= {"MASTER_PORT": str(around["master_port"]), "PBS_JOBID": str(around["slurm_job_id"])}
    if options.get("bytes"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (options["bytes"], options["bytes"]))
    if options.get("change"):
        signal_at_change(folder / "resume", *options["change"])
    seed_everything(7, verbose=False)
    output = folder / around["output_dir"]
    fixed = ModelCheckpoint(folder / "best", "{epoch}-{step}", monitor="val_loss", save_top_k=2, save_last=True)
    dated = ModelCheckpoint(output / "checkpoints", "{epoch}", monitor="loss_epoch", mode="max")
    others: list[Callback] = [Waits(folder / options["waits"])] if options.get("waits") else []
    if options.get("change"):
        others.append(Kill("on_train_batch_end", STEPS_AT_MOST, "SIGKILL"))
    csv = CSVLogger(folder / "csv", "")
    loggers = [Notes(folder), csv, CSVLogger(output, "csv"), RunIds(output, around["run"]["id"])]
    module = RequeuedNet(around, BATCHES * options["epochs"])
    trainer = Job(folder, {**DEFAULTS, **options}).fit(
        module, fixed, dated, *others, logger=loggers, max_epochs=options["epochs"]
    )
    trainer.test(module, Job(folder, DEFAULTS).held_out(), ckpt_path="best", verbose=False)
    found = {
        "rows": (Path(csv.log_dir) / "metrics.csv").read_text().splitlines(),
        "best": _weights(fixed.best_model_path),
        "last": _weights(fixed.last_model_path),
        "best files": sorted(Path(name).name for name in fixed.best_k_models),
        "files": sorted(file.name for file in (folder / "best").iterdir()),
        "tested": {name: float(value).hex() for name, value in trainer.callback_metrics.items()},
        "best in a dated folder": _weights(dated.best_model_path),
    }
    (folder / "end.files.json").write_text(json.dumps(found, indent=1))


def _weights(path: str) -> str:
    """The digest of the weights in a checkpoint; empty if it is not there."""
    with suppress(FileNotFoundError, IsADirectoryError):
        return digest(torch.load(path, weights_only=True)["state_dict"])
    return ""


class Chain:
    def __init__(self, folder: Path, requeues: int, seed: int) -> None:
        self.killed, self.whole, self.requeues = folder / "killed", folder / "whole", requeues
        self.chance = random.Random(seed)
        self.epochs = 2 + requeues * 5 // BATCHES
        kinds = self.chance.sample(TROUBLES, len(TROUBLES))
        self.troubles = dict(zip(self.chance.sample(range(2, requeues), len(TROUBLES)), kinds, strict=True))
        self.starts: list[Start] = []

    def run(self) -> list[str]:
        """Requeue the command and take it to its end; return what is not as it must be."""
        undisturbed = {"number": 1000, "name": "whole", "epochs": self.epochs, "guarded": False}
        if run(self.whole, undisturbed, script=job) != 0:
            raise RuntimeError((self.whole / "whole.txt").read_text()[-3000:])
        (self.killed / "resume").mkdir(parents=True)
        for number in range(self.requeues):
            self._requeue(number)
        self._start(self.requeues, "to its end", "")
        return [*self._problems(), *self._differences()]

    def _requeue(self, number: int) -> None:
        what = self.troubles.get(number, KILLED)
        if what == TWICE:
            self._start_twice(number)
        elif what == IN_A_SAVE:
            self._start(number, what, "on_save_checkpoint", kill=["on_save_checkpoint", 2, "SIGTERM"])
        elif what == FULL:
            left = newest_checkpoint(self.killed).stat().st_size * 2 // 3
            moment = f"6. on_train_batch_end, SIGKILL; files of at most {left} bytes"
            self._start(number, what, moment, kill=["on_train_batch_end", 6, "SIGKILL"], bytes=left)
        else:
            if what == EMPTY:
                os.truncate(newest_checkpoint(self.killed), 0)
            moment = self.chance.choice(list(MOMENTS)[: 4 if number < 2 else None])  # the first ones get to a save
            kill = [moment, self.chance.randint(*MOMENTS[moment]), self.chance.choice(("SIGKILL", "SIGTERM")), 0]
            is_change = moment not in dir(Callback)
            given = {"change": kill[1:]} if is_change else {"kill": kill}
            self._start(number, what, f"{kill[1]}. {moment}, {kill[2]}", **given)

    def _start(self, number: int, what: str, moment: str, **options: Any) -> None:
        name = f"start {number}"
        given = {"number": number, "name": name, "epochs": self.epochs, **options}
        self._note(number, what, moment, run(self.killed, given, script=job), name)

    def _start_twice(self, number: int) -> None:
        """Start the command twice; end the one that is let in by SIGTERM when the other one has ended."""
        given = {"number": number, "epochs": self.epochs, "waits": f"go {number}"}
        pids = {start(self.killed, {**given, "name": f"start {number}{name}"}, script=job): name for name in "ab"}
        ended = None
        while ended is None:
            time.sleep(0.05)
            ended = next((pid for pid in pids if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)), None)
        (other,) = pids.keys() - {ended}
        os.kill(other, signal.SIGTERM)
        (self.killed / given["waits"]).touch()
        for pid in (ended, other):
            self._note(number, TWICE, "SIGTERM" if pid == other else "", wait_for(pid), f"start {number}{pids[pid]}")

    def _note(self, number: int, what: str, moment: str, status: int, name: str) -> None:
        self.starts.append(Start(number, what, moment, status, (self.killed / f"{name}.txt").read_text()))

    def _problems(self) -> list[str]:
        """Return what starts did that they may not do."""
        found = []
        for one in self.starts:
            allowed = {-signal.SIGKILL, STOPPED, 0}
            if one.what in (FULL, TWICE):
                allowed.add(1)
            is_told = one.status != 1 or ("AutoResume" in one.said and one.last_line.endswith("."))
            if one.status not in allowed or not is_told:
                found.append(f"{one}: another status, or no last line that says what to do")
            if "Traceback" in one.said and one.status != 1:
                found.append(f"{one}: a traceback")
            if one.what != FULL and one.status != 1 and len(one.lines) > MOST_LINES:
                found.append(f"{one}: {len(one.lines)} lines of AutoResume")
            if one.resumed_at and sum("slurm_job_id" in line for line in one.lines) != 1:
                found.append(f"{one}: not one line that names the hyper-parameters that differ")
        statuses = [one.status for one in self.starts if one.what == TWICE]
        if statuses not in ([1, STOPPED], []):
            found.append(f"of two starts at once one is to be refused, and one to go on; they ended with {statuses}")
        if self.starts[-1].status != 0:
            found.append("it did not come to its end")
        return found

    def _differences(self) -> list[str]:
        if self.starts[-1].status != 0:
            return []
        found = [one for one in differences(self.killed, self.whole) if one != "end.0: callbacks"]  # dated paths
        is_told = any("fixed dirpath" in line for one in self.starts for line in one.lines)
        return [one for one in found if not (is_told and "dated" in one)]


def newest_checkpoint(folder: Path) -> Path:
    """Return the file of the newest checkpoint of AutoResume that is not sharded."""
    return max((folder / "resume/.auto_resume").glob("*-epoch=*-step=*[0-9]/meta.pt"))


def as_lists(chains: list[Chain]) -> str:
    """Return what chains did as Markdown."""
    lines = [
        "# What `make requeues` found",
        "",
        "One command, started again and again, each time with another date, job, process, host, port, run id, output "
        f"folder and state of git; lightning {lightning.__version__}, torch {torch.__version__}.",
        "Status 75 is preempted and saved, 0 finished, 1 refused or failed, -9 killed.",
    ]
    for number, chain in enumerate(chains):
        lines += ["", f"## Chain {number}: {chain.epochs} epochs of {BATCHES} steps", ""]
        lines += [f"- {one}".replace(str(chain.killed), "")[:250] for one in chain.starts]
    return "\n".join([*lines, ""])


def main() -> None:
    """Run chains, and compare each with the undisturbed run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requeues", type=int, default=20, help="of each chain (%(default)s)")
    parser.add_argument("--chains", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path, help="a file for the table")
    arguments = parser.parse_args()
    chains, problems = [], []
    for number in range(arguments.chains):
        with tempfile.TemporaryDirectory() as folder:
            chains.append(Chain(Path(folder), arguments.requeues, arguments.seed + number))
            problems += [f"chain {number}: {problem}" for problem in chains[-1].run()]
    sys.stdout.write("\n".join([as_lists(chains), *problems, f"{len(problems)} not as they must be", ""]))
    if arguments.result:
        arguments.result.write_text("\n".join([as_lists(chains), *(f"- {one}" for one in problems)]))
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
