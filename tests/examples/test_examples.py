"""The programs and configurations of `examples/` do what their README says."""

import copy
import os
import re
import runpy
import shlex
import signal
import sys
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule
from torchvision.models import ViT_B_16_Weights, resnet18

from lightning_tricks import Tricks, seed_everything
from lightning_tricks.cli import main
from lightning_tricks.demo import DigitsNet
from tests.auto_resume.killing import run

_EXAMPLES = Path(__file__).parents[2] / "examples"
_README = (_EXAMPLES / "README.md").read_text()
_PROGRAMS = sorted(_EXAMPLES.glob("*.py"))


def _run(name, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    return runpy.run_path(str(_EXAMPLES / name), run_name="__main__")


def _command(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["lightning-tricks", *arguments])
    main()


@pytest.fixture
def here():
    """The working directory, with the examples in it."""
    Path("examples").symlink_to(_EXAMPLES)
    return Path.cwd()


@pytest.mark.parametrize("program", _PROGRAMS, ids=lambda path: path.stem)
def test_a_program_has_at_most_15_lines(program):
    lines = program.read_text().splitlines()
    assert len(lines) <= 15
    assert max(map(len, lines)) <= 120


def test_the_readme_and_the_page_list_all_of_them():
    listed = re.findall(r"^\| `([\w.]+\.(?:py|yaml))` \|", _README, re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in _EXAMPLES.iterdir() if path.suffix in (".py", ".yaml"))
    page = (_EXAMPLES.parent / "docs" / "five-programs.md").read_text()
    assert sorted(re.findall(r'^--8<-- "examples/([\w.]+)"$', page, re.MULTILINE)) == [path.name for path in _PROGRAMS]


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_the_classifier_is_seeded_clipped_and_measured(monkeypatch):
    trainers = [_run("classifier.py", monkeypatch)["trainer"] for _ in range(2)]
    values = [{name: value.item() for name, value in trainer.callback_metrics.items()} for trainer in trainers]
    assert values[0] == values[1], "a seed makes two runs the same"
    assert values[0]["val/acc"] > 0.85
    assert 0 < values[0]["grad_norm/clipped_fraction"] <= 1


def _killed_at_step(folder, options):
    """Run a program, or the command, in a process that is killed after so many steps."""
    steps = iter(range(options.get("kill_after", 10**9)))

    def on_train_batch_end(self, *_):
        if next(steps, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    LightningModule.on_train_batch_end = on_train_batch_end
    os.chdir(folder)
    sys.argv = options["argv"]
    if options["argv"][0].endswith(".py"):
        torch.save(runpy.run_path(options["argv"][0])["trainer"].model.state_dict(), "end.pt")
    else:
        main()


def test_a_killed_program_resumes(tmp_path):
    argv = [str(_EXAMPLES / "resume.py")]
    assert run(tmp_path / "killed", {"argv": argv, "kill_after": 57}, script=_killed_at_step) == -signal.SIGKILL
    assert not (tmp_path / "killed" / "end.pt").exists()
    for folder in ("killed", "whole"):
        status = run(tmp_path / folder, {"argv": argv}, script=_killed_at_step)
        assert status == 0, (tmp_path / folder / "output.txt").read_text()
    assert "the run resumes at" in (tmp_path / "killed" / "output.txt").read_text()
    resumed, whole = (torch.load(tmp_path / folder / "end.pt") for folder in ("killed", "whole"))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_flops_of_a_vit_are_those_that_torchvision_states(monkeypatch, capsys):
    cost = _run("flops_of_a_vit.py", monkeypatch)["cost"]
    assert cost.macs == pytest.approx(ViT_B_16_Weights.IMAGENET1K_V1.meta["_ops"] * 1e9, rel=1e-3)
    assert "17.6 GMAC" in capsys.readouterr().out


def test_a_new_head_on_weights_of_data_parallel(monkeypatch, capsys):
    pretrained = torch.nn.DataParallel(resnet18())
    torch.save({"epoch": 90, "state_dict": pretrained.state_dict()}, "mine.pt")
    net = _run("new_head.py", monkeypatch, "mine.pt")["model"].net
    assert net.fc.out_features == 10
    source = pretrained.module.state_dict()
    loaded = {name: value for name, value in net.state_dict().items() if name[:3] != "fc."}
    assert all(torch.equal(value, source[name].to(value.device)) for name, value in loaded.items())
    assert capsys.readouterr().out.startswith("120/122 tensors")
    _run("new_head.py", monkeypatch)
    assert Path("resnet18.pt").exists(), "without a file it makes one"


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_an_ensemble_knows_what_it_does_not_know(monkeypatch):
    names = _run("ensemble.py", monkeypatch)
    assert len(names["ensemble"].estimators_) == 5
    assert (names["known"].mean.argmax(1) == names["labels"]).float().mean() > 0.85
    assert names["noise"].epistemic.mean() > 2 * names["known"].epistemic.mean()


@pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")
def test_configurations_train_test_and_go_on(monkeypatch, here, capsys):
    _command(monkeypatch, "fit", "--config", "examples/digits.yaml", "--trainer.max_epochs=2")
    best = torch.load("runs/digits/checkpoints/best.ckpt", weights_only=True)
    _command(
        monkeypatch, "test", "--config", "examples/digits.yaml", "--ckpt_path", "runs/digits/checkpoints/best.ckpt"
    )
    assert "test/acc" in capsys.readouterr().out
    _command(monkeypatch, "fit", "--config", "examples/finetune.yaml")
    (tuned,) = here.glob("runs/finetune/version_0/checkpoints/*.ckpt")
    change = {
        name: (value - best["state_dict"][name]).abs().max()
        for name, value in torch.load(tuned, weights_only=True)["state_dict"].items()
        if name.endswith(("8.weight", "5.weight", "0.weight"))
    }
    assert len(change) == 3
    assert 0 < change["net.0.weight"] < change["net.8.weight"] < 0.1, (
        "the later layers trained longer, from its weights"
    )


@pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")
def test_an_ensemble_trains_from_a_configuration(monkeypatch, here):
    _command(monkeypatch, "fit", "--config", "examples/ensemble.yaml", "--trainer.max_epochs=1")
    (checkpoint,) = here.glob("runs/ensemble/version_0/checkpoints/*.ckpt")
    weights = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert sum(name.endswith(".8.bias") for name in weights) == 5


def test_a_killed_command_resumes_and_its_configuration_runs_again(tmp_path):
    argv = ["lightning-tricks", "fit", "--config", str(_EXAMPLES / "digits.yaml"), "--trainer.max_epochs=2"]
    killed, again = tmp_path / "killed", tmp_path / "again"
    assert run(killed, {"argv": argv, "kill_after": 57}, script=_killed_at_step) == -signal.SIGKILL
    config = killed / "runs/digits/version_0/config.yaml"
    saved = config.read_bytes()
    assert run(killed, {"argv": argv}, script=_killed_at_step) == 0, (killed / "output.txt").read_text()
    assert "the run resumes at" in (killed / "output.txt").read_text()
    assert config.read_bytes() == saved
    assert not list(killed.glob("runs/**/config-2.yaml")), "one run, one configuration"
    assert not (killed / "runs/digits/version_1").exists()

    argv = ["lightning-tricks", "fit", "--config", str(config)]
    assert run(again, {"argv": argv}, script=_killed_at_step) == 0, (again / "output.txt").read_text()
    resumed, undisturbed = (_weights_at_end(folder) for folder in (killed, again))
    assert resumed.keys() == undisturbed.keys()
    assert all(torch.equal(resumed[name], undisturbed[name]) for name in resumed)
    assert (again / "runs/digits/version_0/config.yaml").read_bytes() == saved


def _weights_at_end(folder):
    newest = max(folder.glob("runs/digits/resume/.auto_resume/0*/meta.pt"))
    return torch.load(newest, weights_only=True)["state_dict"]


_VALUES = {
    "--ngpu 2": ("trainer.devices", "2"),
    "--ngpu 2, those that are free": ("select_gpus", 2),
    "--ngpu 1, with 20 GiB free, waiting for it": ("select_gpus", {"n": 1, "min_free_memory": "20GiB", "timeout": 600}),
    "--gpu_id 1": ("trainer.devices", [1]),
    "--gpu_id 0,1": ("trainer.devices", [0, 1]),
    "--workers 4": ("data.init_args.num_workers", 4),
    "--workers 4, shorter": ("data.init_args.num_workers", 4),
    "--nodes 2": ("trainer.num_nodes", 2),
    "--batch-size 64": ("data.init_args.batch_size", 64),
    "--epochs 90": ("trainer.max_epochs", 90),
    "--lr 0.1": ("model.init_args.tricks.optimizer.lr", 0.1),
    "--amp": ("trainer.precision", "bf16-mixed"),
    "--clip-grad 1.0": ("model.init_args.tricks.gradient_clipping", 1.0),
    "--seed 1": ("model.init_args.tricks.seed_everything", 1),
    "--seed 1, where the model has no tricks": ("seed_everything", 1),
    "--resume last.ckpt": ("ckpt_path", "last.ckpt"),
}
_ROWS = {
    old.replace("`", ""): new
    for old, new in re.findall(r"^\| (`--.+?) \| `(--.+?)` \|$", _README.partition("## From argparse")[2], re.MULTILINE)
}


@pytest.mark.parametrize("old", _ROWS)
def test_an_older_option_is_what_the_readme_says(old, monkeypatch, here, capsys):
    arguments = ["fit", "--config", "examples/digits.yaml", *shlex.split(_ROWS[old]), "--print_config="]
    with pytest.raises(SystemExit) as stopped:
        _command(monkeypatch, *arguments)
    assert stopped.value.code == 0
    value = yaml.safe_load(capsys.readouterr().out)
    key, expected = _VALUES[old]
    for part in key.split("."):
        value = value[part]
    assert value == expected


def test_the_model_of_the_configuration_is_that_of_a_script(monkeypatch, here, capsys):
    """The weights that `digits.yaml` begins with are those of a script with the same tricks."""
    config = yaml.safe_load((_EXAMPLES / "digits.yaml").read_text())
    seeding = Tricks(**config["model"]["init_args"]["tricks"]).seed_everything
    seed_everything(seeding, verbose=False)
    expected = DigitsNet().state_dict()
    seen = []
    monkeypatch.setattr(LightningModule, "on_fit_start", lambda self: seen.append(copy.deepcopy(self.net.state_dict())))
    _command(monkeypatch, "fit", "--config", "examples/digits.yaml", "--trainer.fast_dev_run=true")
    assert all(torch.equal(seen[0][name].to(value.device), value) for name, value in expected.items())
