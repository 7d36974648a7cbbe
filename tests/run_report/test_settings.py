"""Each single edit of a script is named by the comparison of two reports, and what was not recorded is said."""

import html
import re
import types

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset, WeightedRandomSampler

from lightning_tricks import GradientClipping, RunReport
from lightning_tricks.run_report import comparison_page, find_all, read_record
from lightning_tricks.run_report.core.comparison_page import differing_settings
from lightning_tricks.run_report.run_settings import SettingTexts
from tests.small import QUIET, EvaluatedNet, digits, loader


class Noisy(Callback):
    """A user's callback, one argument of which it stores under another name."""

    def __init__(self, scale=1.0, seed=0):
        self.scale, self._seed, self.stored = scale, seed, scale


class Forgets(Callback):
    def __init__(self, rate=0.1):
        self.other_name = rate


class Data(TensorDataset):
    def __init__(self, noise=0.1, transform=None, length=8):
        super().__init__(torch.zeros(40, 64), torch.zeros(40, dtype=torch.long))
        self.noise, self.transform, self.length = noise, transform, length


def callbacks(**changes):
    made = {
        "stop": EarlyStopping("val/acc", patience=9, strict=False),
        "clip": GradientClipping(1.0),
        "rates": LearningRateMonitor(),
        "noisy": Noisy(),
    }
    return {"callbacks": lambda: [one for one in {**made, **changes}.values() if one is not None]}


class Script:
    """What a script sets; each edit is one entry of `EDITS`."""

    arguments = types.MappingProxyType({"width": 8, **{f"p{number}": 0.5 for number in range(500)}})
    dropout, activation, frozen = 0.1, nn.ReLU, False
    optimizer = torch.optim.SGD
    groups = staticmethod(lambda ps: [{"params": ps[:2], "weight_decay": 0.1}, {"params": ps[2:]}])
    rate, momentum = 0.1, 0.9
    schedule = staticmethod(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5))
    interval = "epoch"
    data = staticmethod(Data)
    loader = types.MappingProxyType({"batch_size": 4, "shuffle": True})
    trainer = types.MappingProxyType({})
    callbacks = staticmethod(callbacks()["callbacks"])
    variables = types.MappingProxyType({})
    seed = 0

    def fit(self, folder, monkeypatch):
        seed_everything(self.seed, verbose=False)
        script = self

        class Net(EvaluatedNet):
            def __init__(self, **arguments):
                super().__init__()
                self.save_hyperparameters(arguments)
                self.drop, self.act = nn.Dropout(script.dropout), script.activation()

            def configure_optimizers(self):
                groups = script.groups(list(self.parameters()))
                optimizer = script.optimizer(groups, lr=script.rate, momentum=script.momentum)
                return [optimizer], [{"scheduler": script.schedule(optimizer), "interval": script.interval}]

        module = Net(**self.arguments)
        next(module.parameters()).requires_grad_(not self.frozen)
        options = {
            "max_steps": 1,
            "log_every_n_steps": 1,
            "limit_val_batches": 1,
            **QUIET,
            "logger": CSVLogger(folder / "logs"),
            **self.trainer,
        }
        with monkeypatch.context() as patch:
            for name, value in self.variables.items():
                patch.setenv(name, value)
            trainer = Trainer(callbacks=[RunReport(folder), *self.callbacks()], **options)
            trainer.fit(module, DataLoader(self.data(), **self.loader), DataLoader(Data(), 4))
        return read_record(folder)


def with_argument(**changes):
    return {"arguments": {**Script.arguments, **changes}}


def steps(optimizer, factor=0.5):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor**step)


LONG = "x" * 2000
EDITS = {
    "a hyper-parameter": (with_argument(width=9), "width (hyper-parameter)"),
    "a hyper-parameter in the seventh digit": (with_argument(p3=0.50000001), "p3 (hyper-parameter)"),
    "the end of a long text": (with_argument(text=LONG + "y"), "text (hyper-parameter)"),
    "the end of a long list": (with_argument(many=[*range(5000), 1]), "many (hyper-parameter)"),
    "a nested one": (
        with_argument(deep={"a": {"b": {"c": {"d": {"e": {"f": 2}}}}}}),
        "deep.a.b.c.d.e.f (hyper-parameter)",
    ),
    "an argument of Lightning's callback": (
        callbacks(stop=EarlyStopping("val/acc", patience=8, strict=False)),
        "EarlyStopping.patience",
    ),
    "an argument of this package's callback": (callbacks(clip=GradientClipping(2.0)), "GradientClipping.max_norm"),
    "an argument of the user's callback": (callbacks(noisy=Noisy(2.0)), "Noisy.scale"),
    "a private argument of it": (callbacks(noisy=Noisy(seed=1)), "Noisy.seed"),
    "one callback less": (callbacks(rates=None), "LearningRateMonitor"),
    "a group's weight decay": (
        {"groups": lambda ps: [{"params": ps[:2], "weight_decay": 0.2}, {"params": ps[2:]}]},
        "weight_decay of group 0 of optimizer 0",
    ),
    "which parameters are in a group": (
        {"groups": lambda ps: [{"params": ps[:1], "weight_decay": 0.1}, {"params": ps[1:]}]},
        "groups of optimizer 0",
    ),
    "the learning rate": ({"rate": 0.2}, "lr of group 1 of optimizer 0"),
    "the optimizer": ({"optimizer": torch.optim.RMSprop}, "optimizer 0"),
    "an argument of the schedule": (
        {"schedule": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.25)},
        "StepLR.gamma",
    ),
    "the function of a schedule": (
        {"schedule": lambda optimizer: steps(optimizer, 0.25)},
        "LambdaLR.lr_lambdas[0].factor",
    ),
    "when it steps": ({"interval": "step"}, "StepLR.interval"),
    "dropout": ({"dropout": 0.2}, "layer drop.p"),
    "an activation": ({"activation": nn.GELU}, "layer act.type"),
    "a frozen layer": ({"frozen": True}, "trained parameters"),
    "the batch size": ({"loader": {"batch_size": 8, "shuffle": True}}, "train_dataloader.batch_size"),
    "the order of the data": ({"loader": {"batch_size": 4}}, "train_dataloader.shuffle"),
    "the sampler": (
        {"loader": {"batch_size": 4, "sampler": WeightedRandomSampler([1.0] * 40, 40)}},
        "train_dataloader.sampler",
    ),
    "an argument of the data set": ({"data": lambda: Data(noise=0.2)}, "train_dataloader.dataset.noise"),
    "an argument that is called length": ({"data": lambda: Data(length=9)}, "train_dataloader.dataset.length"),
    "a subset": ({"data": lambda: Subset(Data(), list(range(30)))}, "train_dataloader.dataset.type"),
    "clipping by the Trainer": (
        {"trainer": {"gradient_clip_val": 0.5}, **callbacks(clip=None)},
        "gradient_clip_val (trainer)",
    ),
    "accumulation": ({"trainer": {"accumulate_grad_batches": 2}}, "accumulate_grad_batches (trainer)"),
    "precision": ({"trainer": {"precision": "bf16-mixed"}}, "precision (trainer)"),
    "anomaly detection": ({"trainer": {"detect_anomaly": True}}, "anomaly detection (trainer)"),
    "the seed": ({"seed": 1}, "seed (trainer)"),
    "a variable of the environment": ({"variables": {"NCCL_DEBUG": "INFO"}}, "environment.NCCL_DEBUG"),
}
BASES = {
    "the end of a long text": with_argument(text=LONG + "x"),
    "the end of a long list": with_argument(many=[*range(5000), 2]),
    "a nested one": with_argument(a={"b": {"c": {"d": {"e": {"f": 1}}}}}),
    "the function of a schedule": {"schedule": steps},
    "clipping by the Trainer": callbacks(clip=None),
}


def recorded(folder, monkeypatch, edits):
    script = Script()
    vars(script).update(edits)
    return script.fit(folder, monkeypatch)


@pytest.fixture(scope="module")
def unedited(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        return [Script().fit(tmp_path_factory.mktemp("unedited"), patch) for _ in range(2)]


WHERE = {"CSVLogger.save_dir", "CSVLogger.root_dir", "default_root_dir (trainer)"}


def test_runs_of_one_script_differ_in_nothing(unedited):
    assert {name for name, *_ in differing_settings(*unedited)} <= WHERE
    assert differing_settings(unedited[0], unedited[0]) == []
    assert "No recorded setting or version differs." in comparison_page(unedited[0], unedited[0])


@pytest.mark.filterwarnings("ignore:The `srun` command:UserWarning", "ignore:.*anomaly.*")
@pytest.mark.parametrize("edit", EDITS)
def test_single_edit_is_named(tmp_path, monkeypatch, unedited, edit):
    changes, name = EDITS[edit]
    base = recorded(tmp_path / "base", monkeypatch, BASES[edit]) if edit in BASES else unedited[0]
    named = {name: texts for name, *texts in differing_settings(base, recorded(tmp_path / "a", monkeypatch, changes))}
    assert name in named
    assert named[name][0] != named[name][1]


def test_what_was_not_recorded_is_said(tmp_path, monkeypatch):
    record = recorded(
        tmp_path,
        monkeypatch,
        {
            **callbacks(more=Forgets()),
            **with_argument(api_key="hush", helper=Forgets()),
            "data": lambda: Data(0.1, nn.ReLU()),
        },
    )
    page = html.unescape(re.sub("<[^>]*>", "", comparison_page(record, record)))
    said = page.partition("Not recorded for A, and not compared: ")[2]
    for words in (
        "rate of Forgets",
        "values that may be secret: api_key",
        "more than the type of helper",
        "dataset.transform",
    ):
        assert words in said


def test_arguments_of_the_module_are_recorded_once(tmp_path):
    """A hyper-parameter is no setting once more; an argument of a layer with its name is."""

    class Sized(EvaluatedNet):
        def __init__(self, width=8, p=0.5):
            super().__init__()
            self.save_hyperparameters("p")
            self.width, self.p, self.drop = width, p, nn.Dropout(p)

    Trainer(callbacks=[RunReport(tmp_path)], max_steps=1, **QUIET).fit(Sized(), loader(), loader())
    record = read_record(tmp_path)
    settings = dict(record.settings)
    assert (settings["module.width"], settings["layer drop.p"]) == ("8", "0.5")
    assert "module.p" not in settings
    assert dict(record.arguments) == {"p": "0.5"}


class OfTwoLoaders(EvaluatedNet):
    """Is trained on the batches of the longer one of two loaders, and validated on those of each."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch["long"], batch_idx)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        return self.evaluate(batch, batch_idx)


def record_of_two_loaders(folder, mode, **limits):
    short = DataLoader(Subset(digits(), range(20)), 4)
    trainer = Trainer(callbacks=[RunReport(folder)], max_epochs=1, **limits, **QUIET)
    trainer.fit(OfTwoLoaders(), CombinedLoader({"short": short, "long": loader()}, mode), [short, loader()])
    return read_record(folder)


def test_batches_are_those_of_all_loaders(tmp_path):
    """In training, loaders are read side by side; in validation, one after the other."""
    data = dict(record_of_two_loaders(tmp_path, "max_size_cycle", limit_train_batches=3, limit_val_batches=2).data)
    assert (data["training batches"], data["validation batches"]) == ("3 of 10", "4 of 15")


@pytest.mark.parametrize(("limit", "batches"), [(3, "3 of 5"), (1000, "5 of 5"), (0.5, "2 of 5")])
def test_limit_leaves_out_nothing_where_the_shortest_loader_ends_before(tmp_path, limit, batches):
    """Training with the mode "min_size" has as many batches as the shortest loader."""
    record = record_of_two_loaders(tmp_path, "min_size", limit_train_batches=limit)
    assert dict(record.data)["training batches"] == batches
    assert any("Only a part of the data" in one.text for one in find_all(record)) == (limit != 1000)


def test_settings_beyond_the_first_3000_are_one_digest():
    found = SettingTexts()
    for number in range(3000):
        found.add(f"a{number}", number)
    assert found.pairs() == [(f"a{number}", str(number)) for number in range(3000)]
    found.add("b", 1)
    found.add("c", 1)
    assert len(found.pairs()) == 3001
    name, text = found.pairs()[-1]
    assert (name, len(text)) == ("2 more", 12)
    found.add("c", 2)
    assert found.pairs()[-1][1] != text
