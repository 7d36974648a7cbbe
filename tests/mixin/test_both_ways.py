"""The tricks of `TricksMixin` and the same callbacks in the Trainer's list: the same run, bit for bit."""

import dataclasses

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_tricks import Tricks, TricksMixin, seed_everything
from lightning_tricks.tricks import callback_of
from tests.contract.cases import CASES
from tests.contract.lab import FP32
from tests.small import QUIET, EvaluatedNet, Net, cases, loader, same

FIELDS = {kind.__name__: field.name for field in dataclasses.fields(Tricks) if (kind := callback_of(field.name))}
_CASES = {case.callback.__name__: case for case in CASES.values()}
_PRESETS = {
    "classification": {"num_classes": 10},
    "regression": {"metrics_monitor": None},
    "finetune": {"num_classes": 10},
    "reproducible": {},
}


class _Mixed(TricksMixin, Net):
    pass


class _MixedAndEvaluated(TricksMixin, EvaluatedNet):
    pass


def test_every_callback_has_a_field():
    assert FIELDS.keys() == _CASES.keys()


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_is_the_callback(lab, tmp_path, monkeypatch, name):
    case = _CASES[name]
    seed = case.arguments.get("seed", 0)
    runs, left = [], []  # what a fit leaves, as what callbacks do last is in their order
    for way in ("mixin", "callback"):
        (tmp_path / way).mkdir()
        monkeypatch.chdir(tmp_path / way)
        seed_everything(seed, verbose=False)
        if way == "mixin":
            module = _Mixed(**case.net, tricks=Tricks(**{FIELDS[name]: case.arguments}))
        else:
            module = Net(**case.net)
        callbacks = [] if way == "mixin" else [case.callback(**case.arguments)]
        runs += lab.fit(callbacks, FP32, module=module, start=seed)
        left.append(dict(module.state_dict()))
    mixin, callback = runs
    assert same(*left)
    assert same(mixin.optimizers, callback.optimizers)
    assert {*mixin.metrics} == {*callback.metrics}
    assert same(mixin.rng, callback.rng)
    if case.kind != "observer" and name != "SpikeGuard":  # which changes nothing where no spike is
        assert not same(left[0], lab.fit_bare(FP32, **case.net)[0].weights)


@pytest.mark.parametrize("name", _PRESETS)
def test_a_preset_is_its_callbacks(tmp_path, name):
    runs = []
    for way in ("mixin", "callback"):
        tricks = Tricks.preset(name, dirpath=str(tmp_path / way), **_PRESETS[name])
        seed_everything(42, verbose=False)
        module = _MixedAndEvaluated(tricks=tricks) if way == "mixin" else EvaluatedNet()
        callbacks = [] if way == "mixin" else tricks.callbacks()
        trainer = Trainer(max_epochs=2, callbacks=callbacks, **QUIET)
        trainer.fit(module, loader(shuffle=True), loader())
        values = {key: value for key, value in trainer.callback_metrics.items() if not key.endswith("mfu")}
        runs.append((dict(module.state_dict()), values, torch.get_rng_state()))
    assert same(*runs)
    assert ("val/acc" in runs[0][1]) == ("num_classes" in _PRESETS[name])


def test_a_preset_needs_no_argument_and_any_field_replaces_its_own():
    for name in _PRESETS:
        tricks = Tricks.preset(name, seed_everything=7, flops_report=None, run_fingerprint="steps.jsonl")
        assert (tricks.seed_everything, tricks.flops_report, tricks.run_fingerprint) == (7, None, "steps.jsonl")
        assert Tricks(**Tricks.preset(name).as_dict()) == Tricks.preset(name)
    assert "acc" in Tricks.preset("classification").callbacks()[-1].logged_keys("val").pop()
    with pytest.raises(ValueError, match=r"got .clasification.\. Did you mean .classification.\?"):
        Tricks.preset("clasification")
    for word in ("num_classes", "dirpath", *FIELDS.values()):
        with pytest.raises(TypeError, match=rf"Tricks.preset takes no '{word}_'\. .* Did you mean '{word}'\?"):
            Tricks.preset("regression", **{f"{word}_": None})
    with pytest.raises(TypeError, match="dirpath must be the path of a folder, got 5"):
        Tricks.preset("reproducible", dirpath=5)
    with pytest.raises(ValueError, match="num_classes must be a whole number >= 2, got 1"):
        Tricks.preset("classification", num_classes=1)
    with pytest.raises(ValueError, match="num_classes=10: the preset 'regression' measures errors of numbers"):
        Tricks.preset("regression", num_classes=10)


@cases(
    "name, value",
    ("metrics_monitor", {"task": "multiclass", "num_classes": 3}),
    ("gradual_unfreezing", {0: "fc.*", 5: "*"}),
)
def test_a_field_takes_a_dict_that_is_the_first_argument(name, value):
    tricks = Tricks(**{name: value})
    (callback,) = tricks.callbacks()
    assert getattr(callback, "metrics" if name == "metrics_monitor" else "schedule") == value
    assert Tricks(**tricks.as_dict()) == tricks
