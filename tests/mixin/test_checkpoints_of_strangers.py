"""What a checkpoint's hyper-parameters can make a module with TricksMixin do: nothing but be a module."""

import dataclasses
import enum
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from lightning import __version__ as lightning_version
from lightning.pytorch import LightningModule, Trainer

import lightning_tricks
from lightning_tricks import Tricks, TricksMixin
from lightning_tricks.checkpoint_remapping import CheckpointError, UnsafeCheckpointError
from lightning_tricks.ensembles import VotingClassifier
from lightning_tricks.gradient_clipping import AGC, ClipValue, PercentileClip, ZScoreClip
from lightning_tricks.gradient_clipping.core.methods import METHODS, ClipNorm
from tests.small import PUBLIC, QUIET, cases, loader

_OF_CLI = {"_instantiator": "lightning.pytorch.cli.instantiate_module"}
_NAMED = "These tricks are off, as a checkpoint must not decide which files are read or written"


class Net(TricksMixin, LightningModule):
    def __init__(self, tricks: Tricks | dict | None = None):
        super().__init__(tricks=tricks)
        self.net = torch.nn.Linear(64, 10)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Configured(Net):
    def __init__(self, config):
        super().__init__(config["nested"]["tricks"])


class Spread(Net):
    def __init__(self, **options):
        super().__init__(Tricks(**options))


def file_of(hyper_parameters, module=Net, path="stranger.ckpt"):
    """Write what a stranger may send: Lightning's format with hyper-parameters of their choice."""
    weights = {f"net.{name}": value for name, value in torch.nn.Linear(64, 10).state_dict().items()}
    version = {"pytorch-lightning_version": lightning_version}
    torch.save({**version, "state_dict": weights, "hyper_parameters": hyper_parameters}, path)
    return path


@pytest.fixture
def calls(monkeypatch):
    """What is exported is called: its name is written down, and nothing else happens."""
    made = []
    for package in (lightning_tricks, lightning_tricks.gradient_clipping):
        for name in {*package.__all__} - {"Tricks", "TricksMixin", "GradientClipping", *METHODS}:
            monkeypatch.setattr(package, name, lambda *_, name=name, **__: made.append(name), raising=False)
    return made


def test_only_descriptions_of_methods_are_built(calls):
    for name in {*PUBLIC, "cli.main", "os.system"} - METHODS.keys():
        for hidden in (f"lightning_tricks.{name}", name, f"lightning_tricks.gradient_clipping.{name}"):
            for where in ("method", "groups"):
                described = {"class_path": hidden, "init_args": {}}
                value = described if where == "method" else {"net.*": described}
                words = r"class_path must be one of lightning_tricks.gradient_clipping.AGC, "
                with pytest.raises(ValueError, match=words):
                    Tricks(gradient_clipping={where: value})
    assert calls == []


@pytest.mark.parametrize("more", [{}, _OF_CLI], ids=["saved", "by LightningCLI"])
def test_a_checkpoint_calls_nothing_that_is_exported(calls, more):
    described = {"class_path": "lightning_tricks.save_weights", "init_args": {"path": "victim"}}
    path = file_of({**more, "tricks": {"gradient_clipping": {"method": described}}})
    with pytest.raises(ValueError, match=r"got 'lightning_tricks.save_weights'"):
        Net.load_from_checkpoint(path)
    assert calls == []


@pytest.mark.parametrize("method", [AGC(0.02), ClipNorm(2.0), ClipValue(0.5), PercentileClip(20.0), ZScoreClip(3.0)])
@pytest.mark.parametrize("more", [{}, _OF_CLI], ids=["saved", "by LightningCLI"])
def test_every_method_comes_back(method, more):
    tricks = Tricks(gradient_clipping={"method": method})
    loaded = Net.load_from_checkpoint(file_of({**more, "tricks": tricks.as_dict()}))
    assert loaded.tricks.callbacks()[0].method == method


def test_other_descriptions_are_refused_when_they_are_saved():
    @dataclasses.dataclass(frozen=True)
    class AGC(lightning_tricks.gradient_clipping.AGC):
        """A method of somebody's own, under a name of ours."""

    with pytest.raises(TypeError, match="contains a AGC, which cannot be saved as plain values in a checkpoint"):
        Tricks(gradient_clipping={"method": AGC()}).as_dict()


_FILES = {
    "auto_resume": "victim",
    "run_fingerprint": {"path": "victim/record.jsonl", "detail": "layer"},
    "checkpoint_remapping": {"path": "victim/weights.pt", "rules": "victim/rules.yaml"},
    "flops_report": {"path": "victim/flops.md", "depth": 2},
    "model_report": "victim",
}


def wrapped(way, tricks):
    """Return a module class and the hyper-parameters that bring it these tricks."""
    return {
        "by name": (Net, {"tricks": tricks}),
        "nested": (Configured, {"config": {"nested": {"tricks": tricks}}}),
        "spread": (Spread, tricks),
        "by LightningCLI": (Net, {**_OF_CLI, "tricks": tricks}),
        "of a subclass": (Net, {**_OF_CLI, "_class_path": f"{Spread.__module__}.Spread", **tricks}),
    }[way]


@pytest.mark.parametrize("way", ["by name", "nested", "spread", "by LightningCLI", "of a subclass"])
def test_tricks_of_a_checkpoint_name_no_files(way):
    module, hyper_parameters = wrapped(way, {**_FILES, "seed_everything": 3})
    with pytest.warns(UserWarning, match=_NAMED) as said:
        tricks = module.load_from_checkpoint(file_of(hyper_parameters)).tricks
    assert tricks == Tricks(seed_everything=3)
    (words,) = [str(warning.message) for warning in said]
    for named in ("auto_resume.dirpath='victim'", "checkpoint_remapping.rules=", "flops_report.path='victim/flops.md'"):
        assert named in words


class Decided(Net):
    def __init__(self, width=3, config=None, more=None):
        super().__init__(
            Tricks(auto_resume=f"{width}/here", seed_everything=1) if config is None else config.get("tricks")
        )


def test_the_caller_may_name_files():
    Path("victim").mkdir()
    Path("victim/rules.yaml").write_text("[]")
    path = file_of({"tricks": _FILES})
    assert Net(Tricks(**_FILES)).tricks == Tricks(**_FILES)
    assert Net.load_from_checkpoint(path, tricks=Tricks(**_FILES)).tricks == Tricks(**_FILES)
    assert Net.load_from_checkpoint(path, tricks=_FILES).tricks == Tricks(**_FILES)  # nothing is left of the file
    path = file_of({"width": "~/victim", "more": 1})
    given = Decided.load_from_checkpoint(path, config={"tricks": Tricks(**_FILES)})
    assert given.tricks == Tricks(**_FILES)
    assert Decided.load_from_checkpoint(path, width="a", more=2).tricks == Tricks(
        auto_resume="a/here", seed_everything=1
    )
    with pytest.warns(UserWarning, match=_NAMED):  # wherever the rest of the path is from
        assert Decided.load_from_checkpoint(path).tricks == Tricks(seed_everything=1)
    with pytest.warns(UserWarning, match=_NAMED):
        assert Decided.load_from_checkpoint(path, config={"tricks": _FILES}).tricks == Tricks()


def test_what_is_loaded_within_a_module_of_a_file_names_no_files_either():
    class Student(Net):
        def __init__(self, teacher):
            super().__init__()
            self.found = Net.load_from_checkpoint("teacher.ckpt", tricks={"run_fingerprint": teacher}).tricks

        def on_load_checkpoint(self, checkpoint):
            self.found_later = Tricks(run_report=checkpoint["hyper_parameters"]["other"])

    file_of({}, path="teacher.ckpt")
    path = file_of({"teacher": "victim", "other": "victim"})
    with pytest.warns(UserWarning, match=_NAMED):
        student = Student.load_from_checkpoint(path)
    assert student.found == student.found_later == Tricks()
    with pytest.warns(UserWarning, match=_NAMED):
        student = Student.load_from_checkpoint(path, teacher="mine")
    assert (student.found, student.found_later) == (Tricks(run_fingerprint="mine"), Tricks())


def test_members_of_an_ensemble_get_no_paths_either():
    arguments = {"estimator": f"{__name__}:Net", "n_estimators": 1, "estimator_args": {"tricks": _FILES}}
    path = file_of(arguments)
    checkpoint = torch.load(path)
    checkpoint["state_dict"] = {f"estimators_.0.{name}": value for name, value in checkpoint["state_dict"].items()}
    torch.save(checkpoint, path)
    with pytest.warns(UserWarning, match=_NAMED):
        (member,) = VotingClassifier.load_from_checkpoint(path).estimators_
    assert member.tricks.auto_resume is None


def test_members_of_installed_packages_are_given():
    import torchvision  # noqa: F401

    for name in ("torchvision.models.resnet:ResNet", "torchmetrics:Accuracy", "lightning_tricks:AGC"):
        with pytest.raises(ValueError, match=r"load_from_checkpoint\(path, estimator=...\)"):
            VotingClassifier.load_from_checkpoint(file_of({"estimator": name, "n_estimators": 1}))
    inner = {"estimator": "torchvision.models.alexnet:AlexNet"}  # in an ensemble inside of one
    outer = {"estimator": "lightning_tricks.ensembles.voting:VotingClassifier", "estimator_args": inner}
    with pytest.raises(ValueError, match="is of an installed package"):
        VotingClassifier.load_from_checkpoint(file_of({**outer, "n_estimators": 1}))
    named = VotingClassifier("torchvision.models.alexnet:AlexNet", 1, {"num_classes": 2})
    assert type(named.estimators_[0]).__name__ == "AlexNet", "the caller names any imported class"


@pytest.mark.parametrize("version", ["x", 3, None, "2.5.0"])
def test_versions_that_are_none(version):
    path = file_of({})
    torch.save({**torch.load(path), "pytorch-lightning_version": version, "hparams": None}, path)
    assert Net.load_from_checkpoint(path).tricks == Tricks()
    for values in (["tricks"], 3, torch.ones(2)):
        with pytest.raises(CheckpointError, match="as hyper_parameters instead of names and values"):
            Net.load_from_checkpoint(file_of(values))


class Poison:
    def __reduce__(self):
        return Path.touch, (Path("ran"),)


def test_a_download_does_not_resume_delete_or_write():
    victim = Path("victim")
    victim.mkdir()
    torch.save({"x": Poison()}, victim / "best.ckpt")
    (victim / "record.jsonl").write_text("mine")
    before = {file: file.read_bytes() for file in victim.iterdir()}
    with pytest.warns(UserWarning, match=_NAMED):
        module = Net.load_from_checkpoint(file_of({"tricks": {**_FILES, "model_report": None}}))
    Trainer(max_epochs=1, **QUIET).fit(module, loader())
    assert {file: file.read_bytes() for file in victim.iterdir()} == before
    assert {file.name for file in Path().iterdir()} == {"victim", "stranger.ckpt"}


# What LightningCLI would build of hyper-parameters


class Mode(enum.Enum):
    FAST = 1
    EXACT = 2


@dataclasses.dataclass
class Options:
    width: int = 3
    modes: tuple[Mode, ...] = ()
    folder: Path | None = None


class FromCli(Net):
    def __init__(
        self,
        mode: Mode = Mode.FAST,
        options: Options | None = None,
        sizes: tuple[int, int] = (1, 2),
        layers: dict[str, list[Mode]] | None = None,
        lr: float | str = 0.1,
        place: str | Path = "here",
        exact: Decimal | None = None,
        names: dict[str, list[int]] | None = None,
        choice: Literal["a", "b"] = "a",
        name: str = "net",
        part: torch.nn.Module | None = None,
        function: Callable | None = None,
        kind: type[torch.nn.Module] = torch.nn.ReLU,
        anything: Any = None,
        bare=None,
        tricks: Tricks | None = None,
        **more,
    ):
        super().__init__(tricks=tricks)
        self.arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}


def test_plain_values_come_back_and_others_are_given():
    plain = {
        "lr": "auto",
        "names": {"a": [1, 2]},
        "choice": "b",
        "name": "torch.nn.ReLU",
        "anything": {"a": [1, "b"]},
        "bare": "os.system",
        "extra": 7,
        "tricks": {"seed_everything": 3},
        "mode": None,
    }
    others = {"mode": "EXACT", "options": {"width": 4}, "sizes": [3, 4], "layers": {"a": ["FAST"]}, "place": "there"}
    loaded = FromCli.load_from_checkpoint(file_of({**_OF_CLI, **plain}))
    more = loaded.arguments.pop("more")
    assert {name: loaded.arguments[name] for name in plain if name != "extra"} | more == plain
    assert loaded.tricks == Tricks(seed_everything=3)
    path = file_of({**_OF_CLI, **plain, **others})
    with pytest.raises(CheckpointError, match=r"path, mode=..., options=..., sizes=..., layers=..., place=...\)"):
        FromCli.load_from_checkpoint(path)
    given = {"mode": Mode.EXACT, "options": Options(4), "sizes": (3, 4), "layers": {"a": [Mode.FAST]}, "place": Path()}
    arguments = FromCli.load_from_checkpoint(path, **given).arguments
    assert {name: arguments[name] for name in given} == given
    assert FromCli.load_from_checkpoint(file_of(others)).arguments["sizes"] == [3, 4]  # not written by LightningCLI


_EVIL = {"class_path": "evil_module.Evil", "init_args": {"x": 1}}


@pytest.mark.trap("checkpoints: LightningCLI's instantiator imports and calls what hyper-parameters name")
@cases(
    "name, value",
    ("part", _EVIL),
    ("function", "evil_module.run"),
    ("kind", "evil_module.Evil"),
    ("anything", [{"deep": _EVIL}]),
    ("bare", _EVIL),
    ("extra", _EVIL),
    ("layers", {"a": _EVIL}),
    ("options", _EVIL),
    ("mode", "evil_module.Evil"),
    ("exact", 1.5),
)
@pytest.mark.parametrize("subclass", [{}, {"_class_path": f"{__name__}.FromCli"}], ids=["class", "subclass"])
def test_hyperparameters_build_nothing(name, value, subclass, monkeypatch):
    monkeypatch.syspath_prepend(".")
    Path("evil_module.py").write_text("import pathlib; pathlib.Path('ran').touch()")
    path = file_of({**_OF_CLI, **subclass, name: value})
    with pytest.raises(CheckpointError, match=rf"path, {name}=\.\.\.\).* would run code of the file: {name} "):
        FromCli.load_from_checkpoint(path)
    assert not Path("ran").exists()
    assert "evil_module" not in sys.modules
    given = object()
    assert FromCli.load_from_checkpoint(file_of({**_OF_CLI, name: value}), **{name: given}).tricks == Tricks()


def test_class_paths_that_are_no_text_are_refused():
    with pytest.raises(UnsafeCheckpointError, match="not an imported subclass"):
        Net.load_from_checkpoint(file_of({**_OF_CLI, "_class_path": ["os", "system"]}))
