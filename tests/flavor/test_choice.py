"""Which of Lightning's two packages is taken, in processes of their own."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from lightning_tricks._lightning_compat import flavor
from lightning_tricks._shared import lightning_name
from tests.flavor.copied import with_other_imports
from tests.small import cases

pytestmark = pytest.mark.newest  # the choice does not depend on versions

_TAKEN = (
    "from lightning_tricks._lightning_compat.flavor import LIGHTNING, Trainer; print(LIGHTNING, Trainer.__module__)"
)
_PL, _L = "pytorch_lightning", "lightning.pytorch"
_THOROUGH = pytest.mark.thorough
_PROGRAM = """
import sys
import torch
{imports}
import lightning_tricks
from lightning_tricks import GradientClipping, MetricsMonitor, Tricks, TricksMixin
from lightning_tricks.ensembles import VotingRegressor

class Net(TricksMixin, pl.LightningModule):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.net = torch.nn.Linear(4, 1)
    def forward(self, x): return self.net(x)
    def training_step(self, batch, batch_idx):
        y = self(batch[0])
        return {{"loss": torch.nn.functional.mse_loss(y, batch[1]), "preds": y, "target": batch[1]}}
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), 0.1)

data = torch.utils.data.TensorDataset(torch.ones(8, 4), torch.zeros(8, 1))
for model in (Net(tricks=Tricks(seed_everything=1)), VotingRegressor(torch.nn.Linear(4, 1), 2)):
    callbacks = [GradientClipping(max_norm=1.0)] + [MetricsMonitor({{"task": "regression"}})] * isinstance(model, Net)
    trainer = pl.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, callbacks=callbacks, accelerator="cpu")
    trainer.fit(model, torch.utils.data.DataLoader(data, 4))
[getattr(lightning_tricks, name) for name in lightning_tricks.__all__]
print(type(trainer).__module__.partition(".")[0], {{"lightning", "pytorch_lightning"}} & {{*sys.modules}})
"""

_RESUMED = """
import sys
import torch
{imports}
from lightning_tricks import AutoResume, SeedEverything

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss
    def configure_optimizers(self): return torch.optim.Adam(self.parameters())

class Stops(pl.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == int(sys.argv[2]): raise RuntimeError("stopped")

data = torch.utils.data.TensorDataset(torch.arange(80.0).reshape(20, 4))
callbacks = [SeedEverything(1), AutoResume(sys.argv[1], every_n_train_steps=2), Stops()]
trainer = pl.Trainer(max_epochs=2, logger=pl.loggers.CSVLogger(sys.argv[1]), callbacks=callbacks, accelerator="cpu")
torch.manual_seed(0)
model = Net()
trainer.fit(model, torch.utils.data.DataLoader(data, 4, shuffle=True))
print(trainer.global_step, repr([p.tolist() for p in model.parameters()]))
"""


def _run(code, cwd, *arguments, check=True, **variables):
    environment = {name: value for name, value in os.environ.items() if name != "LIGHTNING_TRICKS_LIGHTNING"}
    return subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-W", "ignore::FutureWarning", "-c", code, *arguments],
        cwd=cwd,
        env={**environment, "PYTHONPATH": str(Path(__file__).parents[2]), **variables},
        capture_output=True,
        text=True,
        check=check,
    )


@cases(
    "loaded, installed, variable, taken",
    ([], ["lightning", _PL], "", _L),
    ([], ["lightning"], "", _L),
    ([], [_PL], "", _PL),
    ([], [], "", _L),
    (["lightning", _L], ["lightning", _PL], "", _L),
    ([_PL], ["lightning", _PL], "", _PL),
    ([_PL, "lightning", _L], ["lightning", _PL], "", _PL),
    (["lightning", _L, _PL], ["lightning", _PL], "", _L),
    (["lightning", _L, _PL], ["lightning", _PL], _PL, _PL),
    ([_PL], ["lightning", _PL], _L, _L),
)
def test_the_one_that_the_program_imported_first(loaded, installed, variable, taken, monkeypatch):
    monkeypatch.setenv("LIGHTNING_TRICKS_LIGHTNING", variable)
    monkeypatch.setattr(lightning_name, "find_spec", lambda name: name if name in installed else None)
    with patch.object(sys, "modules", dict.fromkeys(["sys", *loaded])):
        assert lightning_name.lightning_name() == taken


@pytest.mark.parametrize(("imports", "package"), [(f"import {_PL} as pl", _PL), (f"import {_L} as pl", "lightning")])
def test_a_program_loads_one_package(imports, package, tmp_path):
    said = _run(_PROGRAM.format(imports=imports), tmp_path).stdout.splitlines()[-1]
    assert said == f"{package} {{{package!r}}}"


@cases("first, second", (_PL, _L), pytest.param(_PL, _PL, marks=_THOROUGH), pytest.param(_L, _PL, marks=_THOROUGH))
def test_a_run_that_one_of_them_began_is_resumed_with_either(first, second, tmp_path):
    first, second = (_RESUMED.format(imports=f"import {name} as pl") for name in (first, second))
    whole = _run(first, tmp_path, "whole", "-1").stdout.splitlines()[-1]
    assert "RuntimeError: stopped" in _run(first, tmp_path, "run", "7", check=False).stderr
    resumed = _run(second, tmp_path, "run", "-1")
    assert resumed.stdout.splitlines()[-1] == whole
    assert whole.startswith("10 ")
    assert "AutoResume: the run resumes at epoch 1, step 6" in resumed.stderr


def test_what_is_said_goes_to_its_log(tmp_path):
    said = _run("import pytorch_lightning, lightning_tricks; lightning_tricks.seed_everything(1)", tmp_path).stderr
    assert "Seed set to 1" in said


def test_a_variable_that_names_neither_is_an_error(tmp_path):
    run = _run(_TAKEN, tmp_path, check=False, LIGHTNING_TRICKS_LIGHTNING="torch")
    assert "LIGHTNING_TRICKS_LIGHTNING=torch in the environment must be lightning.pytorch or pytorch_l" in run.stderr


def test_what_a_refusal_says_helps(tmp_path):
    late = _PROGRAM.format(imports=f"from lightning_tricks import AutoResume\nimport {_PL} as pl")
    run = _run(late, tmp_path, check=False)
    assert (
        "import `pytorch_lightning`, or the library that imports it, before `lightning.pytorch` and lightning_tricks"
        in run.stderr
    )
    assert _PL in _run(late, tmp_path, LIGHTNING_TRICKS_LIGHTNING=_PL).stdout
    assert _PL in _run(f"import {_PL}\n{late}", tmp_path).stdout


def test_the_command_line_says_how_to_take_a_module_of_the_other_one(tmp_path):
    (tmp_path / "mine.py").write_text(f"from {_PL}.demos.boring_classes import BoringModel\n")
    code = "from lightning_tricks.cli import main; raise SystemExit(main(['fit', '--model', 'mine.BoringModel']))"
    said = _run(code, tmp_path, check=False).stderr
    assert "subclass of LightningModule. If it is one of `pytorch_lightning`, set LIGHTNING_TRICKS_LIGHT" in said


def test_type_checkers_see_the_names_that_are_found():
    tree = ast.parse(Path(flavor.__file__).read_text())
    seen = {
        (node.module, name.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("lightning.")
        for name in node.names
    }
    assert seen == {(f"lightning.{home}", name) for name, home in flavor._HOME_OF.items()}
    assert all(getattr(flavor, name) is not None for name in flavor._HOME_OF)
    with pytest.raises(ImportError, match="no_such_name"):
        exec("from lightning_tricks._lightning_compat.flavor import no_such_name")


def test_the_copy_of_a_program_changes_its_imports_alone():
    program = (
        "import lightning\nfrom lightning.pytorch import Trainer\n    import lightning as L\nx = lightning.Trainer\n"
    )
    assert with_other_imports(program) == (
        "import lightning_fabric, pytorch_lightning, pytorch_lightning as lightning\n"
        "from pytorch_lightning import Trainer\n"
        "    import pytorch_lightning as L\nx = lightning.Trainer\n"
    )
