"""The comparison of two runs shows only settings that differ in effect, and calls learning rates by their groups."""

import html
import re
import time

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, Timer
from torch import nn

from lightning_tricks import GradientClipping, RunReport
from lightning_tricks.run_report import RunRecord, comparison_page, read_record, run_page
from lightning_tricks.run_report.core.comparison_page import differing_settings
from lightning_tricks.run_report.core.record import Row, read_run, write_rows, write_run
from tests.run_report.test_settings import WHERE, callbacks, recorded
from tests.run_report.test_whole_page import Tree, figures, legend, sections
from tests.small import QUIET, EvaluatedNet, cases, loader

EVIL = "</td><script>alert('x')</script>&\"'"


def differences(first, second):
    """What differs but for folders: name -> both texts."""
    return {name: texts for name, *texts in differing_settings(first, second) if name not in WHERE}


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """Trains two scripts, given by their edits, and returns what differs."""
    return lambda *edits: differences(
        *(recorded(tmp_path / str(place), monkeypatch, one) for place, one in enumerate(edits))
    )


def test_callback_that_one_run_lacks_is_one_line(compare):
    second = EarlyStopping("train/loss", strict=False)
    assert compare(callbacks(more=second), callbacks(stop=None, clip=None, timer=Timer())) == {
        "EarlyStopping": ["EarlyStopping", "-"],
        "GradientClipping": ["GradientClipping", "-"],
        "EarlyStopping[1]": ["EarlyStopping", "-"],
        "Timer": ["-", "Timer"],
    }


def test_order_of_callbacks_is_a_difference(compare):
    one, other = GradientClipping(1.0), EarlyStopping("val/acc", strict=False)
    orders = [callbacks(stop=None, clip=None, a=pair[0], b=pair[1]) for pair in ((one, other), (other, one))]
    assert list(compare(*orders)) == ["callbacks (trainer)"]


def test_order_is_a_difference_beside_a_callback_that_one_run_lacks(compare):
    one, other = GradientClipping(1.0), EarlyStopping("val/acc", strict=False)
    orders = callbacks(stop=None, clip=None, a=one, b=other), callbacks(stop=None, clip=None, a=other, b=one, c=Timer())
    assert list(compare(*orders)) == ["callbacks (trainer)", "Timer"]


@cases(
    "name, group, setting",
    ("callbacks", "trainer", None),
    ("optimizer", "trainer", "optimizer 0"),
    ("optimizer 1", "trainer", "optimizer 1"),
    ("schedulers", "trainer", "scheduler 0"),
    ("training batch size", "data", "train_dataloader.batch_size"),
    ("validation workers", "data", "val_dataloaders.num_workers"),
)
def test_fact_is_left_out_only_if_a_setting_tells_it(name, group, setting):
    """Of a model of many layers, the settings of optimizers and data are beyond those that are recorded."""
    others = [("layer a.type", "Linear")] if setting else []
    of_both = [{group: [(name, text)], "settings": others} for text in ("A, B", "A")]
    assert differences(*(RunRecord(**known) for known in of_both)) == {f"{name} ({group})": ["A, B", "A"]}
    if setting:
        told = [{**known, "settings": [(setting, known[group][0][1])]} for known in of_both]
        assert differences(*(RunRecord(**known) for known in told)) == {setting: ["A, B", "A"]}


def test_what_both_have_hides_nothing_that_one_lacks():
    names = ["version of zope"], ["version of zope", "version of zope.interface"]
    first, second = (RunRecord(settings=[(name, "1") for name in both]) for both in names)
    assert differences(first, second) == {"version of zope.interface": ["-", "1"]}


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_layer_scheduler_and_loader_that_one_run_lacks_are_one_line_each(tmp_path):
    class Deeper(EvaluatedNet):
        def __init__(self):
            super().__init__()
            self.more = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Dropout(), nn.ReLU()))

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    runs = []
    for name, kind, *validation in (("a", EvaluatedNet), ("b", Deeper, loader())):
        options = {**QUIET, "num_sanity_val_steps": 1, "max_steps": 1}
        Trainer(callbacks=[RunReport(tmp_path / name)], **options).fit(kind(), loader(), *validation)
        runs.append(read_record(tmp_path / name))
    found = differences(*runs)
    for name, kind in {"layer more": "Sequential", "scheduler 0": "StepLR", "val_dataloaders": "DataLoader"}.items():
        assert found.pop(name) == ["-", kind]
    others = {"limit_val_batches (trainer)", "module.type", "trained parameters", "groups of optimizer 0"}
    assert all(name in others or name.startswith("validation ") for name in found)


def version_of_noisy(added, **given):
    """A callback of a user's, to which a later version of the class has added arguments."""
    names = ["scale=1.0", *added]
    space = {}
    stored = "; ".join(f"self.{name} = {name}" for name in (one.partition("=")[0] for one in names))
    exec(f"def __init__(self, {', '.join(names)}): {stored}", space)
    return type("Noisy", (Callback,), {"__init__": space["__init__"]})(**given)


@cases(
    "added, given, rows",
    (["rate=0.1", "names=('a', 'b')", "limit=None"], {}, {}),
    (["rate=0.1"], {"rate": 0.1}, {}),
    (["rate=0.1"], {"rate": 0.2}, {"Noisy.rate": ["-", "0.2"]}),
    (["options=dict(a=1, b=2)"], {"options": {"a": 1, "b": 3}}, {"Noisy.options.b": ["-", "3"]}),
    (["limit=10"], {"limit": None}, {"Noisy.limit": ["-", "None"]}),
    (["api_key='x'"], {}, {"Noisy.api_key": ["-", "(not shown)"]}),
    (["rate=0.1"], {"scale": 2.0}, {"Noisy.scale": ["1", "2"]}),
)
def test_argument_that_one_run_lacks_is_no_difference_at_its_default(compare, added, given, rows):
    older, newer = (callbacks(noisy=version_of_noisy(*made)) for made in ([()], [added]))
    newer = callbacks(noisy=version_of_noisy(added, **given))
    assert compare(older, newer) == rows


def test_dict_instead_of_a_default_of_none_is_a_difference(compare):
    older, newer = (callbacks(noisy=version_of_noisy(["best=None"], best=best)) for best in (None, {"acc": "max"}))
    assert compare(older, newer) == {"Noisy.best.acc": ["-", "max"]}


def test_default_that_changed_is_a_difference(compare):
    assert compare(
        callbacks(noisy=version_of_noisy(["rate=0.1"])), callbacks(noisy=version_of_noisy(["rate=0.2"]))
    ) == {"Noisy.rate": ["0.1", "0.2"]}


def test_hyperparameter_that_one_run_lacks_is_no_difference_at_its_default(tmp_path):
    class Net(EvaluatedNet):
        def __init__(self, width=8):
            super().__init__()
            self.save_hyperparameters()

    older = Net

    class Net(EvaluatedNet):
        def __init__(self, width=8, dropout=0.5, clip=None, depth=3):
            super().__init__()
            self.save_hyperparameters()

    runs = []
    for name, module in (("a", older()), ("b", Net(depth=4))):
        Trainer(callbacks=[RunReport(tmp_path / name)], max_steps=1, **QUIET).fit(module, loader(), loader())
        runs.append(read_record(tmp_path / name))
    assert differences(*runs) == {"depth (hyper-parameter)": ["-", "4"]}


def test_what_lightning_binds_to_a_callback_is_no_argument_of_it(tmp_path):
    class Logs(Callback):
        def __init__(self, log=True):
            self._log = log

    Trainer(callbacks=[RunReport(tmp_path), Logs(False)], max_steps=1, **QUIET).fit(EvaluatedNet(), loader(), loader())
    assert dict(read_record(tmp_path).settings)["Logs.log"] == "False"


def test_another_class_of_optimizer_is_one_line_and_what_it_does_otherwise(compare):
    adam, adamw = ({"optimizer": lambda groups, lr, momentum, kind=kind: kind(groups, lr)} for kind in (
        torch.optim.Adam, torch.optim.AdamW
    ))  # fmt: skip
    groups = {"groups": lambda ps: [{"params": ps[:2], "name": "body"}, {"params": ps[2:], "name": "head", "lr": 1.0}]}
    found = compare({**adam, **groups}, {**adamw, **groups})
    decoupled = {name: found.pop(name) for name in list(found) if name.startswith("decoupled_weight_decay of group")}
    assert all(texts == ["False", "True"] for texts in decoupled.values())  # of torch 2.7 and later
    assert found == {
        "optimizer 0": ["Adam", "AdamW"],
        "weight_decay of group 'body'": ["0", "0.01"],
        "weight_decay of group 'head'": ["0", "0.01"],
    }


def test_groups_are_compared_by_name_not_by_place(compare):
    def groups(*named):
        return {"groups": lambda ps: [{"params": ps[place:][:2], "name": n, "lr": lr} for place, n, lr in named]}

    found = compare(groups((0, "body", 0.1), (2, "head", 0.2)), groups((2, "head", 0.3), (0, "body", 0.1)))
    assert found.pop("groups of optimizer 0")  # whose order AutoResume needs
    assert found == {"lr of group 'head'": ["0.2", "0.3"]}


class Grouped(EvaluatedNet):
    """Its optimizers have the groups whose names are given; None for a group without one."""

    def __init__(self, *optimizers):
        super().__init__()
        self.names, self.automatic_optimization = optimizers, len(optimizers) == 1
        self.more = nn.ParameterList(torch.zeros(1) for names in optimizers for _ in names)

    def training_step(self, batch, batch_idx):
        loss = sum(part.sum() for part in self.more)
        if not self.automatic_optimization:
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
        return loss

    def configure_optimizers(self):
        parts, made = iter(self.more), []
        for number, names in enumerate(self.names):
            named = [{} if name is None else {"name": name} for name in names]
            groups = [{"params": [next(parts)], "lr": 0.1 * (1 + place), **one} for place, one in enumerate(named)]
            made.append(torch.optim.SGD(groups, 0.01 * (1 + number)))
        return made


@cases(
    "optimizers, keys, titles",
    ([["body", "head"]], ["body", "head"], ["lr of group 'body'", "lr of group 'head'"]),
    ([["body", None]], ["body", "0.1"], ["lr of group 'body'", "lr of group 1 of optimizer 0"]),
    ([["a", "a"]], ["a", "0.1"], ["lr of group 'a'", "lr of group 1 of optimizer 0"]),
    ([["1", "0.0"]], ["0.0", "0.1"], ["lr of group 0 of optimizer 0", "lr of group 1 of optimizer 0"]),
    ([["no_decay", 3]], ["no_decay", "0.1"], ["lr of group 'no_decay'", "lr of group 1 of optimizer 0"]),
    ([[None], [None]], ["0", "1"], ["lr of optimizer 0", "lr of optimizer 1"]),
    ([["a", None], ["a"]], ["a", "0.1", "1"], ["lr of group 'a'", "lr of group 1 of optimizer 0", "lr of optimizer 1"]),
    ([["d"], ["g"]], ["d", "g"], ["lr of group 'd'", "lr of group 'g'"]),
    ([["only"]], None, ["learning rate"]),
)
def test_learning_rates_are_named_by_group(tmp_path, optimizers, keys, titles):
    fitter = Trainer(callbacks=[RunReport(tmp_path)], max_epochs=1, log_every_n_steps=1, **QUIET)
    fitter.fit(Grouped(*optimizers), loader(), loader())
    record = read_record(tmp_path)
    rates = [key for key in record.logged_keys() if key.startswith("learning_rate")]
    assert rates == (["learning_rate"] if keys is None else [f"learning_rate/{key}" for key in keys])
    of_all = [0.1 * (1 + place) for names in optimizers for place in range(len(names))]
    assert [record.curve(key)[0].value for key in rates] == pytest.approx(of_all)
    found = figures(sections(comparison_page(record, record))["Learning rate and gradients"])
    assert list(found) == titles
    (picture,) = figures(sections(run_page(record))["Learning rate and gradients"]).values()
    assert legend(picture) == ([] if keys is None else [title.removeprefix("lr of ") for title in titles])
    settings = dict(record.settings)
    named = {title: f"{rate:g}" for title, rate in zip(titles, of_all, strict=True)}
    assert {title: settings[title] for title in titles if title in settings}.items() <= named.items()
    assert len(named.keys() & settings) == (0 if keys is None or keys == ["d", "g"] else len(keys))


def test_resumed_run_continues_the_curves_of_its_groups(tmp_path):
    def fit(epochs, **options):
        fitter = Trainer(callbacks=[RunReport(tmp_path / "run")], max_epochs=epochs, log_every_n_steps=1, **QUIET)
        fitter.fit(Grouped(["body", "head"]), loader(), loader(), **options)
        return fitter

    fit(1).save_checkpoint(tmp_path / "a.ckpt")
    fit(2, ckpt_path=tmp_path / "a.ckpt", weights_only=False)
    record = read_record(tmp_path / "run")
    assert len(record.resumes) == 1
    assert [len(record.curve(f"learning_rate/{name}")) for name in ("body", "head")] == [20, 20]


def old_record(**known):
    """A record of a version that neither knew defaults nor names of groups."""
    rows = [Row("step", step, 0, {"learning_rate/0.0": 0.1, "learning_rate/0.1": 0.2}) for step in range(3)]
    settings = {"Clip.type": "Clip", "Clip.log": "log", "Clip.norm": "2", "optimizer 0": "Adam", "Adam.eps": "1e-08"}
    settings |= {"Adam.groups[1].lr": "0.2", "val_dataloaders.batch_size": "4"}
    return RunRecord(module="Net", rows=rows, settings=list(settings.items()), **known)


def test_record_of_an_older_version_is_compared(tmp_path):
    write_run(tmp_path, old_record())
    file = tmp_path / "run.json"
    text = file.read_text()
    assert text.count(' "defaults": [],\n') == 1
    file.write_text(text.replace(' "defaults": [],\n', ""))
    old = read_run(file)
    assert old.defaults == []
    settings = {**dict(old.settings), "val_dataloaders.type": "DataLoader", "Clip.more": "1", "Clip.norm": "3"}
    new = RunRecord(settings=list(settings.items()), defaults=["Clip.more", "Clip.norm", "val_dataloaders.type"])
    assert differences(old, new) == {"Clip.norm": ["2", "3"]}
    assert differences(old, RunRecord(settings=[("optimizer 0", "Adam")])) == {
        "Clip": ["Clip", "-"],
        **{name: [text, "-"] for name, text in old.settings if not name.startswith(("Clip", "optimizer"))},
    }
    found = figures(sections(comparison_page(old_record(), old_record()))["Learning rate and gradients"])
    assert list(found) == ["lr of group 0 of optimizer 0", "lr of group 1 of optimizer 0"]


def test_curves_come_before_differences_and_settings_before_what_came_of_them():
    rows = [Row("epoch", step, step, {"val/loss": 1.0}) for step in range(2)]
    first, second = (RunRecord(arguments=[("lr", text)], step=len(text), rows=rows) for text in ("0.1", "0.25"))
    page = comparison_page(first, second)
    assert re.findall("<h2>(.*?)</h2>", page)[:3] == ["Loss and metrics", "Last and best values", "What differs"]
    assert page.index("lr (hyper-parameter)") < page.index(">steps<")
    assert "<script" not in page


def test_stages_of_a_run_differ_in_their_dashes_and_runs_in_their_colours():
    keys = ["train/loss", "val/loss/dataloader_idx_0", "val/loss/dataloader_idx_1", "test/loss"]
    rows = [Row("epoch", step, step, dict.fromkeys(keys, 1.0)) for step in range(2)]
    page = comparison_page(RunRecord(rows=rows), RunRecord(rows=rows[::-1]))
    legend = re.findall(r'class="key k(\d)(?: d(\d))?"><i></i>(.) (.*?)</span>', page)
    assert len(legend) == len({(color, dash) for color, dash, *_ in legend}) == 8
    assert {(color, run) for color, _, run, _ in legend} == {("0", "A"), ("1", "B")}


def test_hostile_names_and_texts_are_escaped_and_cost_no_time(tmp_path):
    dotted, many = "a." * 50_000, [f"{EVIL}{number}.type" for number in range(2000)]
    settings = [(dotted, "1"), *((name, EVIL) for name in many), (f"scheduler {EVIL}", EVIL), ("optimizer 0", EVIL)]
    keys = [f"learning_rate/{EVIL}", "learning_rate/" + "9" * 5000 + ".1", "learning_rate/"]
    rows = [Row("step", step, 0, dict.fromkeys(keys, 0.1)) for step in range(3)]
    record = RunRecord(settings=settings, defaults=[EVIL, dotted], trainer=[("callbacks (trainer)", EVIL)], rows=rows)
    write_run(tmp_path, record)
    write_rows(tmp_path, rows)
    read, began = read_record(tmp_path), time.process_time()
    for runs in ((read, RunRecord()), (RunRecord(), read), (read, read)):
        page = Tree(comparison_page(*runs, (EVIL, "B")))
        assert page.open == [page.root]
        assert not [one for one in page.root.iter() if one.tag == "script"]
    assert time.process_time() - began < 20
    assert f"lr of group {EVIL!r}" in html.unescape(comparison_page(read, read))


def test_run_of_many_layers_can_be_read(tmp_path):
    """A record has no list of more than 30,000 entries."""

    class Wide(EvaluatedNet):
        def __init__(self):
            super().__init__()
            self.many = nn.ModuleList(nn.Dropout() for _ in range(16_000))

    Trainer(callbacks=[RunReport(tmp_path)], max_steps=1, **QUIET).fit(Wide(), loader(), loader())
    record = read_record(tmp_path)
    assert len(record.settings) <= 3001 + len(record.versions) + 1000
    assert len(record.defaults) <= 6000
