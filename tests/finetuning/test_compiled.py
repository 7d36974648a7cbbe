"""Added parameters and checkpoints of modules that are compiled: in whichever way, before or after."""

import itertools
from functools import partial

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn

from lightning_tricks import Adapters, AutoResume, CheckpointRemapping, LoRA, TrainableCheckpoint, load_weights
from lightning_tricks.finetuning import (
    AdapterSettings,
    LoRASettings,
    PrefixSettings,
    add_adapters,
    add_lora,
    add_prefixes,
    load_adapter,
    merge,
    save_adapter,
)
from lightning_tricks.seeding import isolated_rng
from tests.contract.checks import Interrupts
from tests.small import QUIET, EvaluatedNet, loader, recorded_warnings

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's own

_WAYS = ("wrapped part", "wrapped", "part in place", "in place")
_TRICKS = {
    "LoRA": lambda model: add_lora(model, LoRASettings(2)),
    "Adapters": lambda model: add_adapters(model, AdapterSettings(4, kind="houlsby")),
    "PrefixTuning": lambda model: add_prefixes(model, PrefixSettings(3)),
}


class _Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        with isolated_rng(seed=0):
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.net = nn.TransformerEncoder(layer, 1)

    def forward(self, x):
        return self.net(x)


def _compiled(model, way, **options):
    options = {"backend": "eager", **options}
    if way == "wrapped part":
        model.net = torch.compile(model.net, **options)
    elif way == "part in place":
        model.net.compile(**options)
    elif way == "in place":
        model.compile(**options)
    return torch.compile(model, **options) if way == "wrapped" else model


def _disturb(model):
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)


def _plain(values):
    return {name.replace("_orig_mod.", ""): value for name, value in values}


def _assert_same(model, other, x):
    for training in (False, True):
        outputs = [each.train(training)(x) for each in (model, other)]
        torch.testing.assert_close(*outputs)
    for output, each in zip(outputs, (model, other), strict=True):
        each.zero_grad()
        output.square().sum().backward()
    mine, others = (_plain((n, p.grad) for n, p in each.named_parameters()) for each in (model, other))
    torch.testing.assert_close(mine, others)


@pytest.mark.oldest
@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("trick", _TRICKS)
@pytest.mark.parametrize("order", ["added, compiled", "compiled, added", "compiled, called, added"])
def test_compiled_before_or_after(order, trick, way):
    torch._dynamo.reset()
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(2))
    plain, model = _Encoder(), _Encoder()
    _TRICKS[trick](plain)
    if order != "added, compiled":
        model = _compiled(model, way)
    if "called" in order:
        model(x).sum().backward()
        model.zero_grad()
    report = _TRICKS[trick](model)
    if order == "added, compiled":
        model = _compiled(model, way)
    assert set(report.layers) == set(_TRICKS[trick](_Encoder()).layers)
    assert _plain(model.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    for each in (plain, model):
        _disturb(each)
    _assert_same(model, plain, x)
    if trick == "LoRA":
        for each in (model, plain):
            merge(each)
        torch.testing.assert_close(model(x), plain(x))


def test_attention_that_is_compiled_alone_gets_its_prefix():
    x = torch.randn(2, 5, 8)
    plain = nn.MultiheadAttention(8, 2, batch_first=True)
    model = torch.compile(plain, backend="eager")
    before = model(x, x, x)[0]
    assert list(add_prefixes(model, PrefixSettings(3)).layers) == [""]
    _disturb(model)
    assert not torch.allclose(model(x, x, x)[0], before)
    assert torch.equal(model(x, x, x)[0], plain(x, x, x)[0])


@pytest.mark.parametrize("name", ["net.layers.0.self_attn", "net.layers.0.linear2", "net.layers.0.linear1"])
def test_a_forward_of_the_layer_itself_is_refused_where_it_would_hide_what_is_added(name):
    model, x = _Encoder(), torch.randn(2, 5, 8)
    layer = model.get_submodule(name)
    layer.forward = torch.compile(layer.forward, backend="eager")
    add = partial(add_adapters, settings=AdapterSettings(4, kind="parallel"))
    if name.endswith("self_attn"):
        add = partial(add_prefixes, settings=PrefixSettings(3))
    names = [*model.state_dict()]
    with pytest.raises(ValueError, match="would never be called, as it has its own `forward`"):
        add(model)
    assert [*model.state_dict()] == names, "nothing was changed"
    del layer.forward
    add(model)
    layer.forward = torch.compile(layer.forward, backend="eager")
    before = model(x)
    _disturb(model)
    assert not torch.allclose(model(x), before)


class _Late(EvaluatedNet):
    """Compiles its layers in one of the places where people do that."""

    way = None

    def build(self):
        with isolated_rng(seed=0):
            self.net = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
        self._compile_in("__init__")

    def setup(self, stage):
        self._compile_in("setup")
        if self.way == "in place":
            self.net.compile(backend="eager")

    def configure_model(self):
        self._compile_in("configure_model")

    def _compile_in(self, place):
        if self.way == place and not hasattr(self.net, "_orig_mod"):
            self.net = torch.compile(self.net, backend="eager")


_PLACES = (None, "__init__", "setup", "configure_model", "in place", "Trainer")
_PAIRS = [pair for pair in itertools.product(_PLACES, _PLACES) if None in pair or pair[0] == pair[1]]


@pytest.fixture
def fit(monkeypatch, tmp_path):
    """Return a function that trains two epochs with a module that is compiled in a place."""

    def fit(way, *callbacks, ckpt_path=None, epochs=2):
        torch._dynamo.reset()
        monkeypatch.setattr(_Late, "way", way)
        module = _Late("adamw")
        trainer = Trainer(callbacks=list(callbacks), max_epochs=epochs, default_root_dir=tmp_path, **QUIET)
        given = torch.compile(module, backend="eager") if way == "Trainer" else module
        with isolated_rng(seed=1):
            trainer.fit(given, loader(), loader(), ckpt_path=ckpt_path)
        return trainer

    return fit


def _assert_same_run(trainer, other):
    mine, others = (_plain(each.lightning_module.state_dict().items()) for each in (trainer, other))
    torch.testing.assert_close(mine, others)
    assert trainer.global_step == other.global_step == 20
    mine, others = (list(each.optimizers[0].state_dict()["state"].values()) for each in (trainer, other))
    torch.testing.assert_close(mine, others)


def _adaptation(kind):
    return LoRA(4) if kind == "LoRA" else Adapters(4, target_modules="net.0")


_SAVERS = {
    "TrainableCheckpoint": lambda: [TrainableCheckpoint()],
    "CheckpointRemapping": lambda: [CheckpointRemapping(clean_on_save=True)],
    "both": lambda: [TrainableCheckpoint(), CheckpointRemapping(clean_on_save=True)],
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", ["LoRA", "Adapters"])
@pytest.mark.parametrize("saver", _SAVERS)
@pytest.mark.parametrize(("saved", "resumed"), _PAIRS)
def test_checkpoints_load_in_either_direction(saved, resumed, saver, kind, fit, tmp_path):
    fit(saved, _adaptation(kind), *_SAVERS[saver](), epochs=1).save_checkpoint(tmp_path / "a.ckpt")
    names = torch.load(tmp_path / "a.ckpt")["state_dict"].keys()
    assert not [name for name in names if "_orig_mod" in name]
    trainer = fit(resumed, _adaptation(kind), *_SAVERS[saver](), ckpt_path=tmp_path / "a.ckpt")
    _assert_same_run(trainer, fit(None, _adaptation(kind)))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("others", [list, *_SAVERS.values()], ids=["alone", *_SAVERS])
@pytest.mark.parametrize(("saved", "resumed"), _PAIRS)
def test_auto_resume_in_the_middle_of_an_epoch(saved, resumed, others, fit, tmp_path):
    guard = tmp_path / "guard"
    with pytest.raises(SystemExit):
        fit(saved, LoRA(4), *others(), AutoResume(guard), Interrupts(13))
    wraps = [way in ("__init__", "setup", "configure_model") for way in (saved, resumed)]
    if wraps[0] != wraps[1]:  # kernels round otherwise: the user says that this is meant
        with pytest.raises(Exception, match=r"net: \w+ -> \w+\nNothing was trained .* on_change='new'|other settings"):
            fit(resumed, LoRA(4), *others(), AutoResume(guard))
    with recorded_warnings() as caught:
        trainer = fit(resumed, LoRA(4), *others(), AutoResume(guard, on_change="new"))
    assert not [each for each in caught if "AutoResume" in str(each.message)]
    _assert_same_run(trainer, fit(None, LoRA(4)))


@pytest.mark.parametrize("way", _WAYS)
def test_files_of_adapters_and_weights(way, tmp_path):
    x = torch.randn(2, 5, 8)
    plain, model = _Encoder(), _compiled(_Encoder(), way)
    add_lora(model, LoRASettings(2))
    _disturb(model)
    save_adapter(model, tmp_path / "of compiled")
    load_adapter(plain, tmp_path / "of compiled")
    save_adapter(plain, tmp_path / "of plain")
    load_adapter(other := _compiled(_Encoder(), way), tmp_path / "of plain")
    torch.save(model.state_dict(), tmp_path / "of compiled.pt")
    torch.save(plain.state_dict(), tmp_path / "of plain.pt")
    loaded = []
    for file, make in (("of compiled.pt", _Encoder), ("of plain.pt", lambda: _compiled(_Encoder(), way))):
        target = make()
        add_lora(target, LoRASettings(2))
        report = load_weights(target, tmp_path / file)
        assert not report.missing
        assert not report.unexpected
        loaded.append(target)
    for each in (plain, other, *loaded):
        torch.testing.assert_close(each(x), model(x))
