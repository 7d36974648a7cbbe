"""The files that "In an existing project" changes, in a project of the public template's shape: killed, it resumes."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import lightning
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from tests.small import QUIET, cases

pytestmark = pytest.mark.newest

_ROOT = Path(__file__).parents[2]
_PAGE = (_ROOT / "docs" / "existing-project.md").read_text(encoding="utf-8")
_FILES = re.findall(r"^```text\n((?:defaults|run|metrics_monitor):.*?)^```", _PAGE, re.MULTILINE | re.DOTALL)
_PROGRAM = """
import functools, os, signal
import lightning
import hydra, torch
from lightning_tricks.demo import Digits, DigitsNet

class Net(lightning.LightningModule):
    def __init__(self, optimizer):
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net, self.criterion = DigitsNet(), torch.nn.CrossEntropyLoss()
    def forward(self, x): return self.net(x)
    def configure_optimizers(self): return self.hparams.optimizer(self.parameters())
    {steps}

class Stops(lightning.Callback):
    def on_train_batch_end(self, trainer, *_):
        if os.environ.get("STOP") and trainer.global_step == 45:
            signal.raise_signal(signal.SIGTERM)

@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(config):
    callbacks = [hydra.utils.instantiate(callback) for callback in config.callbacks.values()]
    loggers = [lightning.pytorch.loggers.CSVLogger(config.paths.output_dir, "csv")]
    options = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 2}
    trainer = lightning.Trainer(callbacks=[*callbacks, Stops()], logger=loggers, **options)
    model = Net(functools.partial(torch.optim.Adam, lr=1e-3))
    trainer.fit(model, Digits())
    trainer.test(model, Digits(), ckpt_path=trainer.checkpoint_callback.best_model_path, verbose=False)
    print("tested:", "test/f1" in trainer.callback_metrics)

main()
"""
_CONFIG = """
defaults: [_self_, {callbacks: default}, {hydra: default}]
task_name: train
paths: {log_dir: logs, output_dir: "${hydra:runtime.output_dir}"}
"""
_CALLBACKS = """
model_checkpoint:
  _target_: lightning.pytorch.callbacks.ModelCheckpoint
  dirpath: ${paths.output_dir}/checkpoints
  monitor: val/acc
  mode: max
early_stopping: {_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val/acc, mode: max}
"""


@pytest.fixture
def project(tmp_path):
    callbacks, run, metrics = _FILES
    files = {
        "train.yaml": _CONFIG,
        "callbacks/default.yaml": _CALLBACKS,
        "callbacks/tricks.yaml": f"{callbacks}\n{metrics}",
        "hydra/default.yaml": run,
    }
    for name, text in files.items():
        (tmp_path / "configs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "configs" / name).write_text(text)
    steps = re.findall(r"^```py\n(def model_step.*?)^```", _PAGE, re.MULTILINE | re.DOTALL)[0]
    (tmp_path / "train.py").write_text(_PROGRAM.replace("{steps}", steps.replace("\n", "\n    ")))
    return tmp_path


def _start(project, *given, **variables):
    command = [sys.executable, "-W", "ignore", "train.py", "callbacks=tricks", *given]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), **variables}
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)


@cases("folder", "+run_name=digits", pytest.param("hydra.run.dir=logs/train/runs/digits", marks=pytest.mark.thorough))
def test_a_hydra_project_resumes_in_a_folder_that_stays(project, folder):
    stopped = _start(project, folder, STOP="1")
    assert stopped.returncode == 75, stopped.stderr
    again = _start(project, folder)
    assert again.returncode == 0, again.stderr
    assert "AutoResume: the run resumes at epoch 1, step 45" in again.stderr
    assert "tested: True" in again.stdout
    output = project / "logs/train/runs/digits"
    assert {path.name for path in output.iterdir()} >= {"checkpoints", "csv", "resume"}
    assert [path.name for path in (output / "csv").iterdir()] == ["version_0"]


@pytest.mark.thorough
def test_a_hydra_project_finds_nothing_in_a_new_folder(project):
    folder = "hydra.run.dir=logs/${now:%H-%M-%S-%f}"
    assert _start(project, folder, STOP="1").returncode == 75
    assert "resumes" not in _start(project, folder).stderr


@pytest.mark.thorough
def test_a_fixed_folder_for_resuming_alone_says_what_it_splits(project):
    given = (
        "hydra.run.dir=logs/${now:%H-%M-%S-%f}",
        "callbacks.auto_resume.dirpath=${paths.log_dir}/${task_name}/resume",
    )
    assert _start(project, *given, STOP="1").returncode == 75
    command = [sys.executable, "train.py", "callbacks=tricks", *given]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    again = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=True)
    assert "AutoResume: the run resumes" in again.stderr
    assert "Give ModelCheckpoint a fixed dirpath" in again.stderr


def test_hyperparameters_that_are_left_out_are_not_in_the_checkpoint(tmp_path):
    class Net(BoringModel):
        def __init__(self, net, optimizer):
            super().__init__()
            self.save_hyperparameters(ignore=["net", "optimizer"])
            self.layer, self.make_optimizer = net, optimizer

        def configure_optimizers(self):
            return self.make_optimizer(self.parameters())

    trainer = lightning.Trainer(max_steps=1, **QUIET)
    trainer.fit(Net(torch.nn.Linear(32, 2), functools.partial(torch.optim.SGD, lr=0.1)))
    trainer.save_checkpoint(tmp_path / "net.ckpt")
    assert "layer.weight" in torch.load(tmp_path / "net.ckpt", weights_only=True)["state_dict"]
