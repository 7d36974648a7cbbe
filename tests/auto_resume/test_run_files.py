"""Loggers and ModelCheckpoint after kills: rows, files and attributes are those of the run that was never stopped."""

import csv
import sys
import types
from collections.abc import Mapping

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_tricks import AutoResume
from tests.auto_resume.curves import other_files, scalars
from tests.auto_resume.killing import STOPPED, differences, run
from tests.auto_resume.test_callback import Hyper, fit, stop
from tests.contract.checks import Interrupts
from tests.small import QUIET, Net, cases, loader

pytestmark = pytest.mark.oldest

MONITOR = "val_loss/dataloader_idx_0"
BOTH = {"loggers": ["csv", "tensorboard"], "epochs": 2, "samples": 28, "tests": True}


OWN = {"dirpath": "mine", "every_n_train_steps": 2, "filename": "{epoch}", "save_last": "link"}
BEST = {"monitor": MONITOR, "mode": "max", "save_top_k": -1, "filename": "best"}
AGAIN = {"version": 3, "resume": {"every_n_train_steps": 5}, "checkpointing": [OWN, BEST]}  # names that come again
RANKS = {"ranks": 2, "strategy": "ddp_fork", "tests": False, "early": 4, "checkpointing": [{"monitor": MONITOR}]}


@pytest.mark.trap("resume: ModelCheckpoint's best is forgotten, and each start opens a new version")
@cases(
    "options, kills",
    (AGAIN, [("on_train_batch_end", 9), ("on_validation_end", 1), ("on_train_end", 1)]),
    (RANKS, [("on_train_batch_end", 4), ("on_train_batch_end", 9)]),
    ids=["again", "ranks"],
)
def test_killed_and_resumed_leaves_what_the_undisturbed_run_leaves(tmp_path, options, kills):
    options = {**BOTH, **options}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run(whole, {**options, "guarded": False}) == 0, (whole / "output.txt").read_text()[-3000:]
    for hook, number in kills:
        assert run(killed, {**options, "kill": [hook, number, "SIGKILL", 0]}) in (-9, STOPPED, 1)
    assert run(killed, options) == 0, (killed / "output.txt").read_text()[-3000:]
    assert differences(killed, whole) == []
    assert other_files(killed, whole) == []
    assert not [*killed.rglob("*.before"), *killed.rglob("*.partial")]
    assert "The dirpath has changed" not in (killed / "output.txt").read_text()


def test_a_finished_run_started_again_leaves_its_rows_once(tmp_path):
    options = {**BOTH, "checkpointing": [{"monitor": MONITOR}]}
    for folder, starts in (("whole", 1), ("again", 2)):
        assert [run(tmp_path / folder, options) for _ in range(starts)] == [0] * starts
    assert differences(tmp_path / "again", tmp_path / "whole") == []
    assert other_files(tmp_path / "again", tmp_path / "whole") == []


# -- within one process


class Logs(Callback):
    """Logs as users do before and in a fit."""

    def on_fit_start(self, trainer, pl_module):
        for logger in trainer.loggers:
            logger.log_metrics({"begun": 1.0}, 0)

    def on_train_epoch_start(self, trainer, pl_module):
        for logger in trainer.loggers:
            logger.log_metrics({"epoch_begun": 1.0}, trainer.global_step)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for logger in trainer.loggers:
            logger.log_metrics({"loss": float(outputs["loss"])}, trainer.global_step)
            if trainer.global_step == 8:
                logger.log_metrics({"late": 2.0}, trainer.global_step)
            if isinstance(logger, TensorBoardLogger):
                logger.log_metrics({"both": {"a": 1.0, "b": 2.0 * trainer.global_step}}, trainer.global_step)


def log(tmp_path, name, kind, ends=fit, before=False, version=None, guarded=True, **options):
    logger = kind(tmp_path / name, version=version)
    second = kind(tmp_path / name, name="lightning_logs/second", version="other")
    if before:
        logger.log_hyperparams({"lr": 0.1})
    callbacks = [AutoResume(tmp_path / name / "guarded", every_n_train_steps=5)] * guarded
    ends(*callbacks, Logs(), logger=[logger, second], log_every_n_steps=1, **options)
    return logger


def read(folder):
    found = {}
    for path in sorted(folder.glob("lightning_logs/**/*")):
        name = path.relative_to(folder).as_posix()
        if path.name == "metrics.csv":
            found[name] = list(csv.DictReader(path.read_text().splitlines()))
        elif "tfevents" in path.name:
            found[name.rpartition("/")[0]] = {tag: sorted(rows) for tag, rows in scalars(path.parent).items()}
        elif path.is_file():
            found[name] = path.read_text()
    return found


@pytest.mark.filterwarnings("ignore:Experiment logs directory")
@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
@pytest.mark.parametrize("version", [None, "run7"])
@pytest.mark.parametrize("before", [False, True], ids=["", "logged before"])
def test_a_logger_resumes(tmp_path, kind, version, before):
    """Also where hyper-parameters are logged before the fit, as templates do: that begins a version."""
    options = {"version": version, "before": before, "module": Hyper}
    log(tmp_path, "whole", kind, guarded=False, **options)
    log(tmp_path, "killed", kind, ends=stop, step=7, **options)
    log(tmp_path, "killed", kind, ends=stop, step=4, **options)
    assert log(tmp_path, "killed", kind, **options).version == (version or 0)
    assert read(tmp_path / "killed") == read(tmp_path / "whole")


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_run_that_is_refused_changes_no_rows(tmp_path):
    log(tmp_path, "a", CSVLogger, ends=stop, step=7, version=1)
    before = read(tmp_path / "a")
    with pytest.raises(MisconfigurationException, match="other settings"):
        log(tmp_path, "a", CSVLogger, version=1, module=lambda: Hyper(dropout=0.5))
    assert read(tmp_path / "a") == before


def test_rows_of_another_run_in_the_same_place_are_left_alone(tmp_path):
    """The logs were removed, and another run took their version."""
    log(tmp_path, "a", CSVLogger, ends=stop, step=7)
    metrics = tmp_path / "a" / "lightning_logs" / "version_0" / "metrics.csv"
    metrics.write_text("loss,step\n0.5,1\n")
    with pytest.warns(UserWarning, match="CSVLogger writes to version 1, not to version 0 as before"):
        log(tmp_path, "a", CSVLogger)
    assert metrics.read_text() == "loss,step\n0.5,1\n"
    log(tmp_path, "whole", CSVLogger, guarded=False)
    whole = read(tmp_path / "whole")["lightning_logs/version_0/metrics.csv"]
    assert read(tmp_path / "a")["lightning_logs/version_1/metrics.csv"] == whole, "whole in the new place"


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_later_fits_continue_the_rows_of_the_first(tmp_path, kind):
    def script(name, *callbacks, guarded=True):
        logger, guard = kind(tmp_path / name), AutoResume(tmp_path / name / "guarded", every_n_train_steps=3)
        for epochs in (1, 2, 3):
            last = callbacks if epochs == 3 else ()
            fit(*[guard] * guarded, Logs(), *last, logger=logger, epochs=epochs, log_every_n_steps=1)

    script("whole", guarded=False)
    with pytest.raises(SystemExit):
        script("killed", Interrupts(5))
    script("killed")
    killed, whole = read(tmp_path / "killed"), read(tmp_path / "whole")
    assert killed == whole


@pytest.mark.parametrize("logger", ["CSVLogger", "false"])
@pytest.mark.parametrize("step", [4, 13])
def test_lightning_cli_finds_its_config_there(tmp_path, step, logger, monkeypatch):
    """It refuses a directory that has one."""
    monkeypatch.setattr(sys, "argv", ["train"])

    def command(*callbacks):
        folder = f"--trainer.default_root_dir={tmp_path}"
        arguments = [f"--trainer.logger={logger}", folder]
        arguments += [f"--trainer.logger.save_dir={tmp_path}"] * (logger != "false")
        defaults = {**QUIET, "max_epochs": 2, "log_every_n_steps": 1, "logger": None}
        defaults["callbacks"] = [AutoResume(tmp_path / "runs"), *callbacks]
        cli = LightningCLI(Net, seed_everything_default=3, run=False, trainer_defaults=defaults, args=arguments)
        cli.trainer.fit(cli.model, loader(shuffle=True))

    with pytest.raises(SystemExit):
        command(Interrupts(step))
    command()
    assert [*tmp_path.rglob("config.yaml")] == [
        tmp_path / ("config.yaml" if logger == "false" else "lightning_logs/version_0/config.yaml")
    ]


# -- loggers of servers: injected objects stand for libraries that are not installed


class Run:
    def __init__(self, number):
        self.id, self.rows, self.config = number, [], types.SimpleNamespace(update=lambda *_, **__: None)

    def log(self, values):
        self.rows.append(values)


@pytest.fixture
def wandb(monkeypatch):
    """`wandb`, of which a process has one run at most."""
    runs: dict[str, Run] = {}

    def init(**arguments):
        number = arguments.get("id") or f"run{len(runs)}"
        assert number not in runs or arguments["resume"] == "allow"
        module.run = runs.setdefault(number, Run(number))
        return module.run

    module = types.SimpleNamespace(run=None, init=init, runs=runs)
    kinds = types.SimpleNamespace(RunDisabled=Run, Run=Run)
    names = {"wandb": module, "wandb.sdk": kinds, "wandb.sdk.lib": kinds, "wandb.wandb_run": kinds}
    for name, value in names.items():
        monkeypatch.setitem(sys.modules, name, value)
    monkeypatch.setattr("lightning.pytorch.loggers.wandb._WANDB_AVAILABLE", True)
    return module


class Client:
    """An MLflow client of one server."""

    runs: Mapping = {}

    def get_run(self, number):
        return types.SimpleNamespace(
            info=types.SimpleNamespace(experiment_id="0", run_id=number), rows=self.runs[number]
        )

    def create_run(self, experiment_id, tags):
        self.runs[f"run{len(self.runs)}"] = []
        return self.get_run(f"run{len(self.runs) - 1}")

    def get_experiment_by_name(self, name):
        return types.SimpleNamespace(experiment_id="0", lifecycle_stage="active")

    def log_batch(self, run_id, metrics=(), params=()):
        self.runs[run_id] += metrics

    def set_terminated(self, run_id, status):
        """Nothing."""


@pytest.fixture
def mlflow(monkeypatch):
    client = type("Server", (Client,), {"runs": {}})
    entity = types.SimpleNamespace(Metric=lambda **values: values, Param=lambda **values: values)
    context = types.SimpleNamespace(resolve_tags=lambda tags: tags)
    tracking = types.SimpleNamespace(MlflowClient=lambda uri: client(), context=context)
    module = types.SimpleNamespace(set_tracking_uri=lambda uri: None, tracking=tracking, entities=entity)
    names = {"": module, ".tracking": tracking, ".tracking.context": context, ".entities": entity}
    for name, value in names.items():
        monkeypatch.setitem(sys.modules, f"mlflow{name}", value)
    monkeypatch.setattr("lightning.pytorch.loggers.mlflow._MLFLOW_AVAILABLE", True)
    return client


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_wandb_resumes_its_run(tmp_path, wandb):
    for ends in (stop, fit):
        wandb.run = None  # another process
        logger = WandbLogger(save_dir=str(tmp_path), project="digits")
        checkpointing = ModelCheckpoint(monitor="loss", save_top_k=2)
        callbacks = (AutoResume(tmp_path / "runs"), checkpointing, Logs())
        options = {"logger": logger, "log_every_n_steps": 1, "enable_checkpointing": True, "module": Losing}
        ends(*callbacks, **options)
    assert list(wandb.runs) == ["run0"]
    steps = [row["trainer/global_step"] for row in wandb.runs["run0"].rows if "late" in row]
    assert steps == [8]
    assert str(checkpointing.dirpath) == str(tmp_path / "digits" / "run0" / "checkpoints")
    assert len(checkpointing.best_k_models) == 2


@pytest.mark.filterwarnings("ignore:There is a wandb run already in progress")
def test_a_run_of_wandb_that_is_open_already_warns(tmp_path, wandb):
    options = {"log_every_n_steps": 1}
    stop(AutoResume(tmp_path / "runs"), logger=WandbLogger(save_dir=str(tmp_path)), **options)
    wandb.run = Run("mine")
    logger = WandbLogger(save_dir=str(tmp_path))
    assert logger.experiment.id == "mine"
    with pytest.warns(UserWarning, match="WandbLogger writes to version 'mine', not to version 'run0' as before"):
        fit(AutoResume(tmp_path / "runs"), logger=logger, **options)


def test_mlflow_resumes_its_run(tmp_path, mlflow):
    for ends in (stop, fit):
        loggers = [CSVLogger(tmp_path), MLFlowLogger(save_dir=str(tmp_path))]
        ends(AutoResume(tmp_path / "runs"), Logs(), logger=loggers, log_every_n_steps=1)
    assert list(mlflow.runs) == ["run0"]
    for key, steps in (("late", [8]), ("epoch_begun", [0, 10])):
        assert [row["step"] for row in mlflow.runs["run0"] if row["key"] == key] == steps


class Losing(Hyper):
    def training_step(self, batch, batch_idx):
        outputs = super().training_step(batch, batch_idx)
        self.log("loss", outputs["loss"])
        return outputs
