"""Jobs of submitit and of Hydra's launcher, as the page has them, end as undisturbed ones: saved and requeued."""

import importlib
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import submitit
import torch

from tests.documents.blocks import blocks_of
from tests.small import fork, same

pytestmark = pytest.mark.newest

_ROOT = Path(__file__).parents[2]
_PAGE = blocks_of(_ROOT / "docs" / "clusters.md", language="py")
(_JOB,) = (block.code.partition("\n\n\nexecutor =")[0] for block in _PAGE if "submitit" in block.code)
_PROGRAM = """
import os
import signal
import time
from pathlib import Path

import lightning.pytorch as lightning
import submitit
import torch

from lightning_tricks import AutoResume, seed_everything
from tests.small import QUIET, EvaluatedNet, loader

FOLDER = Path("{folder}")
SIGNALS = {signals}  # after a step, to the last rank, once
RANKS = {ranks}


class Stops(lightning.Callback):
    def on_train_batch_end(self, trainer, *_):
        time.sleep(0.05)  # so that ranks agree every other step
        step, name = trainer.global_step, SIGNALS.pop(trainer.global_step, "")
        if name and trainer.global_rank == RANKS - 1 and not (FOLDER / name).exists():
            (FOLDER / name).touch()
            os.kill(os.getpid(), getattr(signal, name))


class Trainer(lightning.Trainer):
    def __init__(self, callbacks):
        seed_everything(4, verbose=False)
        if RANKS > 1 and "SUBMITIT_EXECUTOR" in os.environ:
            submitit.helpers.TorchDistributedEnvironment().export()
        ranks = {{"strategy": "ddp", "devices": RANKS}} if RANKS > 1 else {{}}
        super().__init__(callbacks=[*callbacks, Stops()], max_epochs=3, **QUIET, **ranks)

    def fit(self, model, data):
        super().fit(model, data, loader())
        torch.save((model.state_dict(), torch.get_rng_state()), FOLDER / f"end{{self.global_rank}}.pt")


seed_everything(3, verbose=False)
model, data = EvaluatedNet(dropout=0.2), loader(shuffle=True)
"""
_OF_HYDRA = """
import hydra

@hydra.main(version_base="1.3", config_path=None)
def main(config):
    print("writes to", hydra.core.hydra_config.HydraConfig.get().runtime.output_dir)
{body}
main()
"""


def _write(folder, code, signals, ranks=1):
    """Write a program with code of the page, which trains a small net, and has signals sent to itself."""
    folder.mkdir()
    code = code.replace("/shared/runs/net", f"{folder}/runs")
    (folder / "program.py").write_text(_PROGRAM.format(folder=folder, signals=signals, ranks=ranks) + code)


def _job(folder, monkeypatch):
    """Return the job of a program, which other processes can import as well."""
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{_ROOT}", prepend=os.pathsep)
    monkeypatch.delitem(sys.modules, "program", raising=False)
    return importlib.import_module("program").Job()


def _ends(folder):
    return [torch.load(file) for file in sorted(folder.glob("end*.pt"))]


@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_job_of_submitit(ranks, tmp_path, monkeypatch):
    """At SIGUSR2 and SIGTERM it is requeued from where it was; the signal comes to one task."""
    whole, signalled = tmp_path / "whole", tmp_path / "signalled"
    _write(whole, _JOB, {}, ranks)
    job = _job(whole, monkeypatch)
    fork(lambda rank: job(), ranks)
    _write(signalled, _JOB, {4: "SIGUSR2", 10: "SIGTERM"}, ranks)
    executor = submitit.AutoExecutor(tmp_path / "log", cluster="local")
    executor.update_parameters(timeout_min=60, tasks_per_node=ranks)
    submitted = executor.submit(_job(signalled, monkeypatch))
    submitted.results()
    said = submitted.stderr()
    assert "AutoResume: stopped by SIGUSR2 at step" in said
    assert "AutoResume: stopped by SIGTERM at step" in said
    assert same(_ends(signalled), _ends(whole))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
def test_a_job_of_hydra(tmp_path, monkeypatch):
    """The same lines in a task function, and the folder that Hydra makes stays the same."""
    whole, signalled = tmp_path / "whole", tmp_path / "signalled"
    _write(whole, _JOB, {})
    fork(lambda rank: _job(whole, monkeypatch)(), 1)
    body = _JOB.partition("def __call__(self):\n")[2].partition("    def checkpoint")[0]
    body = textwrap.indent(textwrap.dedent(body), "    ")
    _write(signalled, _OF_HYDRA.format(body=body), {4: "SIGUSR2", 10: "SIGTERM"})
    command = [sys.executable, "program.py", "--multirun", "hydra/launcher=submitit_local"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=signalled, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (log,) = signalled.glob("multirun/*/*/.submitit/*/*.err")
    assert len(re.findall("AutoResume: stopped by (?:SIGUSR2|SIGTERM) at step", log.read_text())) == 2
    assert len(set(re.findall("writes to .*", log.with_suffix(".out").read_text()))) == 1
    assert same(_ends(signalled), _ends(whole))
