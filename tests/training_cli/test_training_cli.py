"""`lightning-tricks fit`, `validate`, `test` and `predict`, as people write them."""

import copy
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback

from lightning_tricks import OptimizerSpec, ScheduleSpec, SeedEverything, seed_everything, training_cli
from lightning_tricks.auto_resume.attribute_parts import AttributeOwners
from lightning_tricks.auto_resume.core.attributes.tracking import AttributeTracker
from lightning_tricks.cli import main
from lightning_tricks.demo import Digits, DigitsClassifier
from lightning_tricks.gradient_clipping.core.methods import METHODS
from tests.architecture.persisted_names import actions_of
from tests.contract.cases import CASES
from tests.devices.fake_nvml import FakeGpu, FakeNvml
from tests.small import PUBLIC, cases, same

pytestmark = pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")

_CALLBACKS = [n for n, kind in PUBLIC.items() if inspect.isclass(kind) and issubclass(kind, Callback)]
_MODULES = [n for n in PUBLIC if n.endswith(("Classifier", "Regressor")) and n != "CalibratedClassifier"]
_DIGITS = ["--data", "lightning_tricks.demo.Digits"]
_NET = """
from torch import nn
from lightning.pytorch import LightningModule
from lightning_tricks import OptimizerSpec, ScheduleSpec
from lightning_tricks.lr_schedules import build_optimizer, build_schedule

class Net(LightningModule):
    def __init__(self, width: int = 8, optimizer: OptimizerSpec | None = None, schedule: ScheduleSpec | None = None):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
        self.optimizer, self.schedule = optimizer, schedule
    def training_step(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])
    def validation_step(self, batch):
        pass
    def test_step(self, batch):
        self.log("width", float(self.net[1].out_features))
    def configure_optimizers(self):
        optimizer = build_optimizer(self, self.optimizer or OptimizerSpec())
        if self.schedule is None:
            return optimizer
        return [optimizer], [build_schedule(optimizer, self.schedule, self.trainer)]

class Broken(LightningModule):
    def __init__(self):
        super().__init__()
        self.width = len(3)
"""


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Runs the command in a folder with a user's module, and returns its exit status."""
    (tmp_path / "my_project.py").write_text(_NET)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_project", raising=False)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["lightning-tricks", *arguments])
        try:
            return main()
        except SystemExit as stopped:
            return stopped.code

    yield run
    sys.modules.pop("my_project", None)


@pytest.fixture
def config(command, capsys):
    def read(*arguments):
        assert command(*arguments, "--print_config=") == 0
        return yaml.safe_load(capsys.readouterr().out)

    return read


@pytest.fixture
def trained(monkeypatch):
    """The weights with which each fit in this test began, and with which it ended."""
    seen = []

    def look(self):
        seen.append(copy.deepcopy(self.state_dict()))

    for hook in ("on_fit_start", "on_fit_end"):
        monkeypatch.setattr(LightningModule, hook, look)
    return seen


@pytest.mark.oldest
def test_every_callback_is_known_by_its_short_name(config):
    callbacks = [{"class_path": name, "init_args": dict(case.arguments)} for name, case in CASES.items()]
    assert sorted(CASES) == sorted(_CALLBACKS)
    Path("all.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": callbacks}}))
    found = config("fit", "--config", "all.yaml", "--model", "my_project.Net")["trainer"]["callbacks"]
    assert [callback["class_path"] for callback in found] == [f"lightning_tricks.{name}" for name in CASES]


@pytest.mark.parametrize("name", _MODULES)
def test_every_ensemble_is_known_by_its_short_name(name, command, capsys):
    assert command("fit", "--model.help", name) == 0
    assert re.search(rf"lightning_tricks\.\w+\.{name}", capsys.readouterr().out)


@pytest.mark.parametrize("name", [*_CALLBACKS, *_MODULES, *METHODS, "OptimizerSpec", "ScheduleSpec"])
def test_every_argument_has_a_help_text(name):
    kind = PUBLIC.get(name) or METHODS[name]
    parser = ArgumentParser()
    parser.add_class_arguments(kind, "given", fail_untyped=False)
    texts = {action.dest: action.help for action in actions_of(parser) if action.dest.startswith("given.")}
    assert {f"given.{parameter}" for parameter in inspect.signature(kind).parameters} <= texts.keys()
    without = [argument for argument, text in texts.items() if not (text or "").strip()]
    assert not without, f"{name} documents no {', '.join(without)}"


def test_help_of_a_callback_and_of_the_command(command, capsys):
    assert command("fit", "--trainer.callbacks.help", "GradientClipping") == 0
    assert "The largest norm allowed" in capsys.readouterr().out
    assert command("fit", "--help") == 0
    assert "--select_gpus" in capsys.readouterr().out


def test_a_callback_is_appended_on_the_command_line(config):
    given = ["--trainer.callbacks+=GradientClipping", "--trainer.callbacks.max_norm=0.5"]
    given += ["--trainer.callbacks.method=AGC", "--trainer.callbacks.method.clip_factor=0.1"]
    given += ["--trainer.callbacks+=FlopsReport"]
    clipping, flops = config("fit", "--model", "my_project.Net", *given)["trainer"]["callbacks"]
    assert clipping["init_args"]["max_norm"] == 0.5
    assert clipping["init_args"]["method"]["class_path"] == "lightning_tricks.gradient_clipping.AGC"
    assert clipping["init_args"]["method"]["init_args"]["clip_factor"] == 0.1
    assert flops["class_path"] == "lightning_tricks.FlopsReport"


@pytest.mark.oldest
def test_a_module_of_the_working_directory_trains_as_in_a_script(command, trained):
    arguments = ["--model", "my_project.Net", "--model.optimizer.lr=0.01", "--model.optimizer.name=SGD"]
    arguments += ["--model.schedule.kind=warmup_cosine", "--model.schedule.warmup=5 steps", *_DIGITS]
    arguments += ["--trainer.max_steps=20", "--trainer.logger=false", "--trainer.enable_checkpointing=false"]
    seeded = ["--trainer.callbacks+=SeedEverything", "--trainer.callbacks.seed=7"]
    assert command("fit", *arguments, *seeded) == 0

    from my_project import Net

    seed_everything(7)
    module = Net(optimizer=OptimizerSpec("SGD", lr=0.01), schedule=ScheduleSpec("warmup_cosine", warmup="5 steps"))
    options = {"max_steps": 20, "logger": False, "enable_checkpointing": False}
    Trainer(callbacks=[SeedEverything(7)], **options).fit(module, Digits())
    begun, ended, begun_of_script, ended_of_script = trained
    assert same(begun, begun_of_script)
    assert same(ended, ended_of_script)
    assert not same(begun, ended)


@cases(
    "seeded",
    ["--seed_everything=7"],
    ["--seed_everything=7", "--trainer.callbacks+=SeedEverything", "--trainer.callbacks.seed=7"],
)
def test_seeds_that_agree_are_one_seed(seeded, command, trained):
    arguments = ["--model", "my_project.Net", *_DIGITS, "--trainer.fast_dev_run=true"]
    for _ in range(2):
        assert command("fit", *arguments, *seeded) == 0
        torch.rand(1)
    seed_everything(7)
    from my_project import Net

    assert same(trained[0], Net().state_dict())
    assert same(trained[1], trained[3])


def test_nothing_is_seeded_unless_it_is_asked_for(command, trained):
    torch.manual_seed(3)
    expected = torch.get_rng_state()
    arguments = ["--model", "my_project.Net", "--trainer.max_steps=0", "--trainer.logger=false", *_DIGITS]
    command("fit", *arguments)
    from my_project import Net

    torch.set_rng_state(expected)
    assert same(trained[0], Net().state_dict())


def test_a_saved_configuration_runs_again_and_none_is_overwritten(command):
    Path("config.yaml").write_text(yaml.safe_dump({"seed_everything": 1, "model": "my_project.Net"}))
    short = [*_DIGITS, "--trainer.max_steps=2", "--trainer.logger=false", "--trainer.enable_checkpointing=false"]
    mine = Path("config.yaml").read_text()
    for _ in range(2):
        assert command("fit", "--config", "config.yaml", *short) == 0
    assert Path("config.yaml").read_text() == mine, "without a logger, the folder is the working directory"
    saved = Path("config-2.yaml").read_bytes()
    for _ in range(2):
        assert command("fit", "--config", "config-2.yaml") == 0
    assert Path("config-2.yaml").read_bytes() == saved
    assert not Path("config-3.yaml").exists(), "the same configuration is there once"
    assert command("fit", "--config", "config-2.yaml", "--trainer.max_steps=3") == 0
    assert "max_steps: 3" in Path("config-3.yaml").read_text()


def test_a_logger_without_a_folder_leaves_the_configuration_in_that_of_the_trainer(command):
    Path("my_logger.py").write_text(
        "from lightning.pytorch.loggers.logger import DummyLogger\nclass Nowhere(DummyLogger):\n    save_dir = None\n"
    )
    arguments = ["--model", "my_project.Net", *_DIGITS, "--trainer.max_steps=1"]
    arguments += ["--trainer.logger=my_logger.Nowhere", "--trainer.enable_checkpointing=false"]
    assert command("fit", *arguments, "--trainer.default_root_dir=here") == 0
    assert Path("here/config.yaml").exists()
    assert not Path("None").exists()


def test_a_script_says_how_its_configuration_is_saved(command):
    class Copies(training_cli.SaveConfigOnce):
        def save_config(self, trainer, pl_module, stage):
            self.parser.save(self.config, "copy.yaml", overwrite=True)

    def train(steps, **options):
        arguments = ["fit", "--trainer.logger=false", "--trainer.enable_checkpointing=false"]
        arguments += [
            "--model.class_path=lightning_tricks.demo.DigitsClassifier",
            "--model.init_args.tricks.optimizer=true",
        ]
        training_cli.TricksCLI(args=[*arguments, *_DIGITS, f"--trainer.max_steps={steps}"], **options)

    train(1, save_config_callback=Copies)
    assert "max_steps: 1" in Path("config.yaml").read_text()
    assert Path("copy.yaml").exists()
    train(2, save_config_kwargs={"overwrite": True})
    assert "max_steps: 2" in Path("config.yaml").read_text()
    assert not Path("config-2.yaml").exists()


def test_auto_resume_does_not_read_the_parser_at_each_save():
    """It has some 50,000 objects, which take longer than the steps between two saves."""
    parser = ArgumentParser()
    callback, module = SaveConfigCallback(parser, parser.parse_args([])), DigitsClassifier()
    trainer = Trainer(callbacks=[callback], logger=False, accelerator="cpu")
    trainer.strategy.connect(module)
    owners = AttributeOwners(trainer, module)
    tracker = AttributeTracker(owners.module_and_callbacks, skipped=owners.skipped_names)
    parser.prog, callback.config["new"], callback.of_a_subclass = "changed", 1, 2
    changes = tracker.changes()
    assert len(changes["values"]) == 1
    assert "of_a_subclass" in str(changes["values"].keys())
    assert not changes["lost"]


def test_print_config_says_what_each_option_is(command, capsys):
    arguments = ["fit", "--model", "my_project.Net", "--trainer.callbacks+=GradientClipping"]
    assert command(*arguments, "--print_config") == 0
    text = capsys.readouterr().out
    for name, parameter in (("max_norm", "The largest norm allowed"), ("devices", "The devices to use")):
        assert re.search(rf"# {parameter}[^\n]*\n(?: *#[^\n]*\n)* *{name}:", text)
    assert "known subclasses" not in text
    Path("printed.yaml").write_text(text)
    assert command("fit", "--config", "printed.yaml", *_DIGITS, "--trainer.fast_dev_run=true") == 0


def test_print_config_without_ruamel_has_the_values(command, capsys, monkeypatch):
    monkeypatch.setattr(training_cli, "find_spec", lambda name: None)
    assert command("fit", "--model", "my_project.Net", "--print_config") == 0
    assert yaml.safe_load(capsys.readouterr().out)["model"]["class_path"] == "my_project.Net"


def test_free_gpus_are_selected_or_the_cpu(command, monkeypatch):
    built = []
    monkeypatch.setattr(DigitsClassifier, "on_fit_start", lambda self: built.append(self.trainer))
    limits = "{n: 1, min_free_memory: 900TiB, fallback: cpu}"
    arguments = ["--model", "lightning_tricks.demo.DigitsClassifier", "--model.tricks.optimizer=true", *_DIGITS]
    assert command("fit", *arguments, "--trainer.fast_dev_run=true", f"--select_gpus={limits}") == 0
    assert type(built[0].accelerator).__name__ == "CPUAccelerator"
    assert built[0].num_devices == 1


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_no_class_is_taken_from_a_checkpoint(command):
    """Newer versions of Lightning import and build what the hyper-parameters of `--ckpt_path` name."""
    arguments = ["--model", "my_project.Net", *_DIGITS]
    fit = ["--trainer.max_steps=1", "--trainer.logger=false", "--trainer.default_root_dir=run"]
    assert command("fit", *arguments, *fit) == 0
    (file,) = Path("run").rglob("*.ckpt")
    checkpoint = torch.load(file, weights_only=True)
    checkpoint["hyper_parameters"] = {"_class_path": "imported_from_checkpoint.Net", "width": 16}
    torch.save(checkpoint, "changed.ckpt")
    Path("imported_from_checkpoint.py").write_text("open('imported', 'w').close()\nfrom my_project import Net\n")
    assert command("test", *arguments, "--ckpt_path=changed.ckpt", "--trainer.logger=false") == 0
    assert not Path("imported").exists()


_ERRORS = {
    "a misspelt callback": (
        ["--trainer.callbacks+=GradientCliping"],
        "'GradientCliping'. Did you mean 'GradientClipping'?",
    ),
    "a misspelt argument": (
        ["--trainer.callbacks+=GradientClipping", "--trainer.callbacks.max_nrm=1"],
        "Option 'max_nrm' is not accepted. GradientClipping takes max_norm, .* Did you mean 'max_norm'?",
    ),
    "a wrong type": (
        ["--trainer.callbacks+=GradientClipping", "--trainer.callbacks.max_norm=abc"],
        "max_norm: Expected a <class 'float'>. Got value: abc.",
    ),
    "a wrong value": (
        ["--trainer.callbacks+=GradientClipping", "--trainer.callbacks.max_norm=-1"],
        "error: max_norm must be a number > 0 .*, got -1.0.",
    ),
    "a misspelt trick": (
        ["--model.tricks.seed_everythin=3"],
        "Tricks takes seed_everything, .* Did you mean 'seed_everything'?",
    ),
    "a wrong value of a trick": (
        ["--model.tricks.gradient_clipping=-1"],
        "Tricks(gradient_clipping=-1.0): max_norm must",
    ),
    "a wrong value in a spec": (["--model.tricks.schedule.kind=cosine"], "Did you mean 'warmup_cosine'?"),
    "a misspelt module": (
        ["--model=my_projct.Net"],
        "No module named 'my_projct'. Python looks for modules in the working",
    ),
    "an unknown option": (
        ["--trainer.maxepochs=3"],
        "--trainer.maxepochs=3. Did you mean 'trainer.max_epochs'? `fit --help` lists them all.",
    ),
    "an option by its beginning": (
        ["--ckpt=a.ckpt"],
        "unrecognized arguments: --ckpt=a.ckpt. Did you mean 'ckpt_path'?",
    ),
    "a seed out of range": (
        ["--trainer.callbacks+=SeedEverything", "--trainer.callbacks.seed=-1"],
        "error: seed must be an integer in .*, got -1.",
    ),
    "two seeds": (
        ["--seed_everything=1", "--trainer.callbacks+=SeedEverything"],
        "--seed_everything has the seed 1 and SeedEverything has 42: leave out one of them",
    ),
    "two seeds, one in the module": (
        ["--seed_everything=1", "--model.tricks.seed_everything=2"],
        "--seed_everything has the seed 1 and Tricks(seed_everything=...) of the model has 2",
    ),
    "a misspelt limit": (["--select_gpus={m: 1}"], "select_gpus takes no 'm'. It takes n, "),
    "a value of Lightning": (["--trainer.accelerator=abacus"], "error: You selected an invalid accelerator name"),
    "an unknown option in a file": (
        ["--config=unknown.yaml"],
        "option 'trainer.max_epoch'. Did you mean 'trainer.max_epochs'?",
    ),
    "a file without options": (["--config=empty.yaml"], "Unexpected config. A --config file contains options"),
    "a file that is no text": (["--config=bytes.yaml"], "a --config file is not text in UTF-8: "),
    "aliases without bound": (["--config=aliases.yaml"], "stand for more than 100,000 values, or for themselves"),
    "aliases of themselves": (["--config=circle.yaml"], "stand for more than 100,000 values, or for themselves"),
    "a file that is not there": (["--config=nothing.yaml"], "config: File does not exist: "),
}


@pytest.mark.parametrize("mistake", _ERRORS)
def test_a_mistake_is_one_line(mistake, command, capsys):
    arguments, words = _ERRORS[mistake]
    Path("unknown.yaml").write_text("trainer: {max_epoch: 3}")
    Path("empty.yaml").touch()
    Path("bytes.yaml").write_bytes(b"\xff")
    doubled = [f"&a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40)]
    Path("aliases.yaml").write_text(f"trainer: {{logger: [&a0 [x], {', '.join(doubled)}]}}")
    Path("circle.yaml").write_text("trainer: &a {logger: *a}")
    model = ["--model", "lightning_tricks.demo.DigitsClassifier", *_DIGITS]
    assert command("fit", *model, *arguments) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("Seed set to")]
    assert line.startswith("lightning-tricks: error: ")
    assert re.search(re.escape(words).replace(r"\.\*", ".*"), line), line


def test_a_folder_of_locks_that_cannot_be_used_is_one_line(command, capsys, monkeypatch):
    Path("file").touch()
    monkeypatch.setenv("LIGHTNING_TRICKS_LOCK_DIR", str(Path("file").absolute()))
    with FakeNvml([FakeGpu()]):
        assert command("fit", "--model", "my_project.Net", *_DIGITS, "--select_gpus=1") == 2
    assert re.fullmatch(r"lightning-tricks: error: .*file, the path for GPU locks.*\n", capsys.readouterr().err)


def test_gpus_without_the_extra_are_one_line(command, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert command("fit", "--model", "my_project.Net", *_DIGITS, "--select_gpus=1") == 2
    assert re.fullmatch(r"lightning-tricks: error: .* pip install \"nvidia-ml-py.*\n", capsys.readouterr().err)


def test_no_model_says_how_to_name_one(command, capsys):
    assert command("fit") == 2
    assert "Write `fit --config FILE`" in capsys.readouterr().err


def test_an_error_of_a_users_own_code_is_raised_with_its_line(command):
    with pytest.raises(ValueError, match="has no len") as raised:
        command("fit", "--model", "my_project.Broken", *_DIGITS)
    assert isinstance(raised.value.__cause__, TypeError)


@pytest.mark.parametrize("package", ["jsonargparse", "docstring_parser", "typeshed_client"])
def test_without_the_extra_the_error_names_it(package, command, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    assert command("fit", "--model", "my_project.Net") == 1
    assert 'pip install "jsonargparse[' in capsys.readouterr().err.splitlines()[-1]


def test_the_card_lists_each_command(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = re.findall(r"^    (\w+)\b", capsys.readouterr().out, re.MULTILINE)
    card = (Path(__file__).parents[2] / "docs" / "tricks" / "command-line.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| \[?`(\w+)", card.partition("### The other commands")[2].partition("```")[0], re.MULTILINE)
    assert sorted(commands) == sorted([*table, "fit", "validate", "test", "predict"])


def test_help_of_all_commands_lists_these_and_loads_no_torch():
    code = "import sys; from lightning_tricks.cli import main\ntry: main(['--help'])\nfinally: print(*sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert all(f"\n    {stage} " in printed for stage in ("fit", "validate", "test", "predict"))
    assert not {"torch", "lightning", "jsonargparse"} & set(printed.split())
