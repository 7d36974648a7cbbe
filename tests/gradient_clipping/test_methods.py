"""Every method of clipping, in every setting, against what it should do to the gradients that came in."""

import math
import pickle
import sys

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from timm.utils.agc import adaptive_clip_grad as timm_agc

from lightning_tricks import GradientClipping
from lightning_tricks.gradient_clipping import (
    AGC,
    ClipValue,
    PercentileClip,
    PercentileThreshold,
    ZScoreClip,
    ZScoreThreshold,
)
from tests.contract.checks import assert_same_run
from tests.contract.lab import SETTINGS, full, gradient_norm
from tests.small import HostReads, Net, cases, same

_METHODS = {
    "value": ClipValue(0.01),
    "agc": AGC(0.01, exclude="net.4.*"),
    "percentile": PercentileClip(50, history=5),
    "zscore": ZScoreClip(z=0.1, decay=0.5, warmup_steps=2),
    "groups": None,
}
_GROUPS = {"net.0.*": 0.2, "re:weight$": AGC(0.02)}
_RAN_ON_CPU = [name for name, setting in SETTINGS.items() if not setting.accelerator]


class _Watch(Callback):
    """Copies the unscaled gradients, once before and once after the callback under test."""

    def __init__(self):
        self.seen = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        # what unscales is the first of the two to be called after GradientClipping
        scale = 1.0
        raw = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([full(p.grad).double().square().sum() for p in raw]).sum().sqrt().item()
        if norm > 0:
            scale = gradient_norm(trainer, optimizer) / norm
        names = {parameter: name.replace("_orig_mod.", "") for name, parameter in pl_module.named_parameters()}
        found = {names[p]: (full(p), full(p.grad) * scale) for p in raw}
        self.seen.append((trainer.optimizers.index(optimizer), found))


def _expected(method, weights, gradients, thresholds):
    """What a reference implementation makes of the gradients of a group."""
    total = torch.stack([g.double().square().sum() for g in gradients.values()]).sum().sqrt()
    if isinstance(method, ClipValue):
        return {name: g.clamp(-method.clip_value, method.clip_value) for name, g in gradients.items()}
    if isinstance(method, AGC):
        result = {}
        for name, gradient in gradients.items():
            parameter = torch.nn.Parameter(weights[name].float())
            parameter.grad = gradient.float().clone()
            timm_agc(parameter, method.clip_factor, method.eps)
            result[name] = gradient if name.startswith("net.4") and method.exclude else parameter.grad
        return result
    limit = method if isinstance(method, float) else thresholds.update(total.float()).item()
    factor = min(1.0, limit / (total.item() + 1e-6))
    return {name: g * factor for name, g in gradients.items()}


@pytest.mark.parametrize("setting", _RAN_ON_CPU)
@pytest.mark.parametrize("kind", _METHODS)
@pytest.mark.sampled(3)
def test_in_every_setting(lab, kind, setting):
    chosen, method = SETTINGS[setting], _METHODS[kind]
    callback = GradientClipping(groups=_GROUPS) if method is None else GradientClipping(method=method)
    before, after = _Watch(), _Watch()

    class Checks(Callback):
        def on_train_end(self, trainer, pl_module):
            _check(kind, method, before.seen, after.seen, chosen.tolerance)
            assert trainer.callback_metrics  # logged

    ranks = lab.fit([before, callback, after, Checks()], chosen)
    assert len(ranks) == chosen.ranks
    assert all(math.isfinite(value) for value in ranks[0].metrics.values())


def _check(kind, method, before, after, tolerance):
    assert len(before) == len(after) > 0
    thresholds = {}
    touched = 0
    for (optimizer, old), (_, new) in zip(before, after, strict=True):
        weights = {name: weight for name, (weight, _) in old.items()}
        gradients = {name: gradient for name, (_, gradient) in old.items()}
        if kind == "groups":
            first = {name: g for name, g in gradients.items() if name.startswith("net.0.")}
            second = {name: g for name, g in gradients.items() if name not in first and name.endswith("weight")}
            rest = {name: g for name, g in gradients.items() if name not in first and name not in second}
            parts = [(0.2, first), (_GROUPS["re:weight$"], second), (1.0, rest)]
        else:
            parts = [(method, gradients)]
        for how, part in parts:
            if not part:
                continue
            if isinstance(how, PercentileClip | ZScoreClip):
                fresh = PercentileThreshold(50, 5) if kind == "percentile" else ZScoreThreshold(0.1, 0.5, 2)
                threshold = thresholds.setdefault(optimizer, fresh)
            else:
                threshold = None
            expected = _expected(how, weights, part, threshold)
            for name in part:
                wanted = expected[name].to(new[name][1].dtype)
                torch.testing.assert_close(new[name][1], wanted, rtol=10 * tolerance, atol=1e-6)
                touched += not torch.equal(new[name][1], part[name])
    assert touched or (kind == "zscore" and len(before) < 10), "nothing was clipped"


_NEUTRAL = (ClipValue(math.inf), AGC(math.inf), PercentileClip(100), ZScoreClip(z=math.inf))


@cases("setting, method", *(("fp16 fused", method) for method in _NEUTRAL), ("FSDP2", AGC(math.inf)), ids=str)
def test_neutral_values_are_absence(lab, method, setting):
    chosen = SETTINGS[setting]
    assert_same_run(lab.fit([GradientClipping(method=method)], chosen), lab.fit_bare(chosen))


@pytest.mark.parametrize("method", [PercentileClip(50, history=5), ZScoreClip(z=0.1, decay=0.5, warmup_steps=2)])
def test_thresholds_are_restored_by_a_resume(lab, method):
    whole, first, second = (GradientClipping(method=method) for _ in range(3))
    (long,) = lab.fit([whole])
    lab.fit([first], max_epochs=1, save_to=lab.folder / "one.ckpt")
    torch.load(lab.folder / "one.ckpt", weights_only=True)
    (resumed,) = lab.fit([second], ckpt_path=lab.folder / "one.ckpt")
    assert same(resumed.weights, long.weights)
    assert same(second.state_dict(), whole.state_dict())


@pytest.mark.parametrize("method", [m for m in _METHODS.values() if m], ids=str)
def test_reads_no_value_back(lab, method):
    counts = []
    for callbacks in ([], [GradientClipping(method=method, groups={"net.0.*": 0.1})]):
        with HostReads() as reads:
            lab.fit(callbacks, probe=False, log_every_n_steps=1)
        counts.append(reads.count)
    assert counts[1] <= counts[0] + 1, "one at the end of the fit, to say how many steps were clipped"


def test_reports_what_the_patterns_match(lab, lightning_log):
    groups = {"net.0.*": 0.1, "re:^net": AGC(0.02, exclude="net.4.bias")}
    lab.fit([GradientClipping(groups=groups)], max_epochs=1)
    (said,) = [message for _, message in lightning_log if "clips by group" in message]
    assert "net.0.*: 2 tensors (1,040 values) by ClipNorm(max_norm=0.1)" in said
    assert "re:^net: 3 tensors (192 values)" in said
    assert "excluded: net.4.bias" in said
    assert "the rest" not in said


@cases(
    "groups, pattern",
    ({"nett.*": 0.1}, r"nett\.\*"),
    ({"net.*": 0.1, "net.0.*": 0.2}, r"net\.0\.\*"),
    ({"net.0.*": AGC(exclude="head.*")}, r"head\.\*"),
)
def test_refuses_patterns_that_match_nothing(lab, groups, pattern):
    with pytest.raises(MisconfigurationException, match=f"pattern '{pattern}' matches none of the 6 parameters"):
        lab.fit([GradientClipping(groups=groups)])


def test_groups_find_parameters_that_are_added_later(lab):
    class Grows(Net):
        def on_train_epoch_start(self):
            if self.current_epoch == 1:
                self.more = torch.nn.Linear(10, 10)
                self.optimizers().optimizer.add_param_group({"params": self.more.parameters()})

        def training_step(self, batch, batch_idx):
            scores = self.net(batch[0])
            return torch.nn.functional.cross_entropy(self.more(scores) if hasattr(self, "more") else scores, batch[1])

    seen = {}

    class Looks(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            if hasattr(pl_module, "more"):
                seen["norm"] = torch.stack([p.grad.norm() for p in pl_module.more.parameters()]).norm().item()

    lab.fit([GradientClipping(groups={"re:^(more|net.4)": 1e-3}), Looks()], module=Grows(), probe=False)
    assert seen["norm"] <= 1e-3 * (1 + 1e-4)


@cases(
    "arguments, error, words",
    ({"method": AGC(), "max_norm": 1.0}, ValueError, "max_norm=1.0 and method=AGC.* choose one"),
    ({"method": 0.5}, TypeError, r"method must be a ClipMethod such as AGC\(0.01\).*got 0.5"),
    ({"groups": {"net.*": -1}}, ValueError, r"groups\['net.\*'\] must be a number > 0 .*got -1"),
    ({"groups": {"re:(": 1.0}}, ValueError, r"pattern 're:\(' is not a regular expression"),
    ({"groups": [("net", 1.0)]}, TypeError, "groups must be a dict"),
    ({"on_nonfinite": "skipp"}, ValueError, "on_nonfinite must be one of ignore, skip, raise.*Did you mean 'skip'"),
    ({"max_consecutive_skips": 3}, ValueError, "max_consecutive_skips=3 needs on_nonfinite=\"skip\", got 'ignore'"),
    ({"hold_lr_on_skip": True}, ValueError, 'needs on_nonfinite="skip"'),
    ({"on_nonfinite": "skip", "max_consecutive_skips": 0}, ValueError, "max_consecutive_skips must be .*>= 1"),
)
def test_refuses_bad_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        GradientClipping(**arguments)


@cases(
    "method, arguments",
    (ClipValue, {"clip_value": 0}),
    (AGC, {"clip_factor": -0.1}),
    (AGC, {"eps": 0}),
    (AGC, {"exclude": "re:["}),
    (PercentileClip, {"percentile": 101}),
    (PercentileClip, {"percentile": 0}),
    (PercentileClip, {"history": 0}),
    (ZScoreClip, {"z": 0}),
    (ZScoreClip, {"decay": 1.5}),
    (ZScoreClip, {"warmup_steps": 0}),
)
def test_methods_refuse_bad_values(method, arguments):
    ((name, value),) = arguments.items()
    words = "re:" if name == "exclude" else f"{name} must be .*{value}"
    with pytest.raises(ValueError, match=words):
        method(**arguments)


def test_methods_in_yaml(monkeypatch, tmp_path):
    text = """
    trainer:
      logger: false
      callbacks:
        - class_path: lightning_tricks.GradientClipping
          init_args:
            method: {class_path: lightning_tricks.gradient_clipping.ZScoreClip, init_args: {z: 3.0}}
            groups:
              net.0.*: 0.5
              re:bias$: {class_path: lightning_tricks.gradient_clipping.AGC, init_args: {exclude: [net.4.*]}}
            on_nonfinite: skip
            max_consecutive_skips: 5
    """
    (tmp_path / "config.yaml").write_text(text)
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["train.py", "--config", "config.yaml"])
        cli = LightningCLI(Net, run=False, save_config_callback=None, seed_everything_default=False)
        (callback,) = (c for c in cli.trainer.callbacks if isinstance(c, GradientClipping))
        assert callback.method == ZScoreClip(z=3.0)
        assert callback.groups == {"net.0.*": 0.5, "re:bias$": AGC(exclude="net.4.*")}
        assert (callback.on_nonfinite, callback.max_consecutive_skips) == ("skip", 5)
        cli.parser.save(cli.config, "config.yaml", overwrite=True)


def test_pickles_in_the_middle_of_a_fit(lab):
    class Pickles(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.sizes = [len(pickle.dumps(c)) for c in trainer.callbacks if isinstance(c, GradientClipping)]

    pickles = Pickles()
    lab.fit([GradientClipping(groups=_GROUPS, on_nonfinite="skip"), pickles], module=Net(hidden=512))
    assert max(pickles.sizes) < 16_384


def test_says_what_a_resume_with_another_method_drops(lab):
    lab.fit([GradientClipping(method=PercentileClip(20))], max_epochs=1, save_to=lab.folder / "one.ckpt")
    with pytest.warns(
        UserWarning,
        match="has another method than the checkpoint, so the statistics of '0:the rest' in the checkpoint are not",
    ):
        lab.fit([GradientClipping(0.5)], ckpt_path=lab.folder / "one.ckpt")
