"""Train one module of others: bare, with all callbacks, stopped and resumed; print what came out as JSON.

python -m tests.foreign.train SCRIPT FOLDER
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
os.environ["HF_HUB_OFFLINE"] = "1"

import lightning
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from tests.foreign.projects import SCRIPTS
from tests.small import HostReads
from tests.styles.frame import STOPS, Job, added, differences, new_warnings, train

READS = "AutoResume", "DeviceMonitor"  # what they read seldom is no read of a step


class Names(Callback):
    """Notes the module that is trained, which some projects make themselves."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        kind = next(base for base in type(pl_module).__mro__ if not base.__module__.startswith("tests."))
        Observed.module = f"{kind.__module__.partition('.')[0]} {kind.__name__}"


class Observed(Job):
    module = ""

    def probes(self) -> list[Callback]:
        return [Names(), *super().probes()]


def seeded(script: Any) -> Any:
    """Let a script begin with a seed, as its users do."""

    def run(job: Job) -> None:
        lightning.seed_everything(1, verbose=False)
        script(Observed(job.folder, job.added, job.stop))

    return run


def reads_of_an_epoch(script: Any, folder: Path, callbacks: dict[str, Any]) -> int:
    """The reads of a later epoch: those of three epochs less those of two."""
    counts = []
    for epochs in (2, 3):

        class Longer(Job):
            def settings(self, epochs: int = epochs) -> dict[str, Any]:
                return {**super().settings(), "max_epochs": epochs, "log_every_n_steps": 1000}

        (folder / f"{epochs}").mkdir(parents=True)
        with warnings.catch_warnings(), HostReads() as reads:
            warnings.simplefilter("ignore")
            lightning.seed_everything(1, verbose=False)
            script(Longer(folder / f"{epochs}", callbacks))
        counts.append(reads.count)
    return counts[1] - counts[0]


def said(error: BaseException) -> str:
    frames = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)][-3:]
    return f"{type(error).__name__}: {str(error)[:600]} ({', '.join(frames)})"


def examine(name: str, folder: Path) -> dict[str, Any]:
    """Return what a script does with and without the callbacks."""
    project = SCRIPTS[name]
    package = project.package.partition("==")[0].partition("[")[0]
    found: dict[str, Any] = {"name": name, "project": package, "version": importlib.metadata.version(package)}
    script = seeded(project.script)
    try:
        bare = train(script, folder / "bare", {})
    except BaseException as error:
        return found | {"module": Observed.module, "bare": said(error)}
    found |= {"module": Observed.module, "steps": bare.end["steps"][0], "logged": len(bare.logged)}
    try:
        run = train(script, folder / "with", added(folder / "with"))
        found |= {"differs": differences(run, bare), "warnings": new_warnings(run, bare)}
        if found["differs"]:
            found["differs from itself"] = differences(train(script, folder / "bare again", {}), bare)
    except BaseException as error:
        return found | {"with": said(error)}
    for trusts in (False, True):  # the directory, with which it resumes what saves objects
        callbacks = added(folder / f"stopped {trusts}")
        callbacks["AutoResume"]["allow_pickle"] = trusts
        try:
            stopped = train(script, folder / f"stopped {trusts}", callbacks, STOPS)
        except BaseException as error:
            found["refused without allow_pickle" if "allow_pickle" in str(error) else "resume"] = said(error)
            if not trusts and "allow_pickle" in str(error):
                continue
        else:
            found |= {"resumed at": stopped.starts[1:], "resume differs": differences(stopped, bare)}
            found["resume warnings"] = [w for w in new_warnings(stopped, bare) if w not in run.warnings]
        break
    try:
        looking = {k: v for k, v in added(folder / "reads").items() if k not in READS}
        bare_reads = reads_of_an_epoch(project.script, folder / "bare reads", {})
        found["reads"] = [bare_reads, reads_of_an_epoch(project.script, folder / "reads", looking)]
    except BaseException as error:
        found["reads"] = said(error)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    result = examine(sys.argv[1], Path(sys.argv[2]))
    Path(sys.argv[2], "result.json").write_text(json.dumps(result, indent=1))
