"""`PeftAdapters`: what peft adds, and what it does not check."""

import copy
import pickle
import warnings

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_tricks import isolated_rng, load_weights
from lightning_tricks.finetuning import LoRA, LoRASettings, PeftAdapters, TrainableCheckpoint, add_lora
from tests.contract.lab import QUIET, EvaluatedNet, loader

peft = pytest.importorskip("peft")

IA3 = {"peft_type": "IA3", "target_modules": ["0"], "feedforward_modules": ["0"]}


def lora(*targets, **more):
    return {"peft_type": "LORA", "r": 2, "target_modules": list(targets), **more}


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def inject_by_peft(model, config):
    return peft.inject_adapter_in_model(peft.get_peft_config(dict(config)), model)


def inject(model, config):
    return PeftAdapters(config).adapt(model)


def trainable(model):
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


METHODS = {
    "IA3": {},
    "OFT": {"r": 2, "oft_block_size": 0},
    "BOFT": {"boft_block_size": 2},
    "LOHA": {"r": 2},
    "LOKR": {"r": 2},
    "LORA": {"r": 2, "use_dora": True},
    "HRA": {"r": 2},
}


@pytest.mark.filterwarnings("ignore:Failed to load the CUDA extension:UserWarning")  # of BOFT, on a CPU
@pytest.mark.filterwarnings("ignore:Setting boft_n_butterfly_factor to 1:UserWarning")
@pytest.mark.parametrize("method", METHODS)
def test_methods(method):
    config = {"peft_type": method, "target_modules": ["0"], **METHODS[method]}
    if method == "IA3":
        config["feedforward_modules"] = []
    model, by_peft, batch = net(), net(), torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    expected = model(batch)
    state = torch.get_rng_state()
    report = inject(model, config)
    assert torch.equal(torch.get_rng_state(), state)  # the run's random numbers are those without adapters
    inject_by_peft(by_peft, config)
    assert model.state_dict().keys() == by_peft.state_dict().keys()
    torch.testing.assert_close(model(batch), expected)
    assert report.layers == {"0": "Linear"}
    assert report.added == report.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad) > 0
    assert str(report).startswith(f"Adapters of peft ({method}) in 1 Linear add {report.added:,} values; ")
    model(batch).sum().backward()
    assert not [name for name, p in model.named_parameters() if p.requires_grad != (p.grad is not None)]


def test_modules_to_save_are_trained_whole():
    model = net()
    report = inject(model, {**IA3, "modules_to_save": ["2"]})
    assert report.saved == ("2",)
    assert report.trainable == report.added + 8 * 4 + 4
    assert "with all of 2" in str(report)


def test_equal_values_from_equal_seeds():
    models = []
    for draws in (0, 3):
        torch.manual_seed(7)
        torch.rand(draws)
        inject(model := net(), lora("0"))
        models.append(model)
    first, second = (model.state_dict() for model in models)
    assert all(torch.equal(value, second[name]) for name, value in first.items())


# --- what peft accepts ---


@pytest.mark.trap("finetuning: A pattern of several that matches nothing is accepted")
def test_a_pattern_without_a_match():
    inject_by_peft(net(), lora("0", "nothing"))  # not a word
    before = net()
    for argument, pattern in (
        ("target_modules", ["0", "nothing"]),
        ("exclude_modules", ["nothing"]),
        ("modules_to_save", ["nothing"]),
        ("target_modules", "no.*"),
    ):
        model = net()
        with pytest.raises(ValueError, match=rf"config: {argument}: 'no.*' matches none of the 3 modules"):
            inject(model, {**lora("0"), argument: pattern})
        assert_as_before(model, before)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with pytest.raises(ValueError, match="'1' matches none of the adapted layers"):
            inject(net(), lora("0", rank_pattern={"1": 3}))


def assert_as_before(model, before):
    assert model.state_dict().keys() == before.state_dict().keys()
    assert [type(part) for part in model.modules()] == [type(part) for part in before.modules()]
    assert vars(model).keys() == vars(before).keys()
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.trap("finetuning: `r=64` on Linear(4, 2) is accepted")
@pytest.mark.parametrize("method", ["LORA", "LOHA", "LOKR"])
def test_a_rank_larger_than_the_layer(method):
    inject_by_peft(net(), {**lora("0"), "peft_type": method, "r": 64})
    model = net()
    with pytest.raises(ValueError, match=r"r=64 exceeds the largest possible rank of 0, 6 \(shape \(8, 6\)\)"):
        inject(model, {**lora("0"), "peft_type": method, "r": 64})
    assert_as_before(model, net())


@pytest.mark.trap("finetuning: A module used in two places is adapted in one")
def test_a_module_in_two_places():
    def make():
        shared = nn.Linear(4, 4)
        return nn.Sequential(shared, nn.ReLU(), shared)

    inject_by_peft(by_peft := make(), lora("0", "2"))
    assert type(by_peft[2]) is nn.Linear
    model = make()
    with pytest.raises(ValueError, match="0, 2 are one module"):
        inject(model, lora("0", "2"))
    assert model[0] is model[2]
    assert_as_before(model, make())


@pytest.mark.trap("finetuning: Tied parameters are adapted twice")
def test_tied_weights_are_said_aloud():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    report = inject(model, lora("0"))
    assert "0.weight, 2.weight" in report.remark
    assert "0.weight, 2.weight share a weight, but no adapter" in str(report)


@pytest.mark.trap("finetuning: Injecting again under the same name resets the trained `lora_B` to 0")
def test_second_injection():
    model = net()
    inject_by_peft(model, lora("0"))
    with torch.no_grad():
        model[0].lora_B["default"].weight.fill_(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inject_by_peft(again := copy.deepcopy(model), lora("0"))
    assert not again[0].lora_B["default"].weight.any()
    with pytest.raises(ValueError, match=r"has adapters of peft already, .* injected by others"):
        inject(model, lora("0"))
    assert model[0].lora_B["default"].weight.all()

    ours = net()
    report = inject(ours, lora("0"))
    assert inject(ours, lora("0")) == report
    assert inject(pickle.loads(pickle.dumps(ours)), lora("0")) == report
    with pytest.raises(ValueError, match="of another configuration"):
        inject(ours, lora("0", lora_alpha=3))
    add_lora(other := net(), LoRASettings(rank=1))
    with pytest.raises(ValueError, match=r"has adapters already, such as 0\.lora_weight"):
        inject(other, lora("0"))


@pytest.mark.trap("finetuning: Adapters put into a model in eval mode are in train mode")
def test_adapters_have_the_mode_of_their_layer():
    def make():
        model = net()
        model[0].eval()
        model[2].eval()
        return model

    config = lora("0", lora_dropout=0.5, modules_to_save=["2"])
    inject_by_peft(by_peft := make(), config)
    assert by_peft[0].lora_dropout["default"].training
    inject(model := make(), config)
    assert model.training
    assert not any(part.training for child in (model[0], model[2]) for part in child.modules())
    inject(model := net(), config)
    assert all(part.training for part in model.modules())


@pytest.mark.trap("finetuning: MultiheadAttention: base weights are merged and unmerged at each forward")
def test_multihead_attention():
    def make():
        return nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2)})

    inject_by_peft(by_peft := make(), lora("attention"))
    weight, rows = by_peft["attention"].base_layer.in_proj_weight, torch.ones(3, 4)
    by_peft["attention"](rows, rows, rows)
    assert by_peft["attention"].base_layer.in_proj_weight is not weight
    model = make()
    parameters = list(model.parameters())
    with pytest.raises(ValueError, match=r"attention is an nn.MultiheadAttention.*Use LoRA\(...\)"):
        inject(model, lora("attention"))
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert_as_before(model, make())


@pytest.mark.parametrize(
    "layer",
    [
        nn.LSTM(4, 4),
        nn.GRU(4, 4),
        nn.ConvTranspose2d(4, 4, 3),
        nn.EmbeddingBag(4, 4),
        nn.Bilinear(4, 4, 4),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_that_peft_refuses(layer):
    model = nn.Sequential(nn.Linear(4, 4), layer)
    with pytest.raises(ValueError, match="peft cannot adapt Sequential"):
        inject(model, lora("0", "1"))
    assert type(model[0]) is nn.Linear  # peft leaves it adapted
    assert model[1] is layer
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_compiled_modules():
    for model in (nn.Sequential(torch.compile(nn.Linear(4, 4), backend="eager")), net()):
        if type(model[0]) is nn.Linear:
            model[2].compile(backend="eager")
        with pytest.raises(ValueError, match="is compiled: add the adapters first"):
            inject(model, lora("0"))


@pytest.mark.filterwarnings("ignore:`init_lora_weights` is 'eva' but `eva_config` is not specified:UserWarning")
@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (None, TypeError, "config must be a peft.PeftConfig"),
        ({}, ValueError, r"config\['peft_type'\] must be one of .*LORA"),
        ({"peft_type": "LoRA"}, ValueError, "Did you mean 'LORA'"),
        ({"peft_type": "LORA", "rank": 8}, TypeError, "LoraConfig takes no 'rank'"),
        ({"peft_type": "ADALORA"}, ValueError, "after each step"),
        ({"peft_type": "PREFIX_TUNING"}, ValueError, r"Use PrefixTuning\(...\)"),
        ({"peft_type": "PROMPT_TUNING"}, ValueError, r"Use PrefixTuning\(...\)"),
        ({"peft_type": "P_TUNING"}, ValueError, r"Use PrefixTuning\(...\)"),
        ({"peft_type": "VERA", "target_modules": ["0"]}, ValueError, "layers of VERA share values"),
        (lora("0", megatron_config={"a": 1}), ValueError, "megatron_config needs data, files or other modules"),
        (lora("0", init_lora_weights="eva"), ValueError, "eva_config needs data"),
        ({**IA3, "inference_mode": True}, ValueError, "would train nothing"),
        ({**IA3, "feedforward_modules": ["1"]}, ValueError, "feedforward_modules"),
    ],
)
def test_configs_are_checked(config, error, message):
    with pytest.raises(error, match=message):
        PeftAdapters(config)


def test_arguments_are_checked(monkeypatch):
    with pytest.raises(TypeError, match="submodule must be the name"):
        PeftAdapters(IA3, submodule="")
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ModuleNotFoundError, match="needs peft, from the extra 'finetune'"):
        PeftAdapters(IA3)


# --- in a fit ---


class Module(LightningModule):
    """Any model on images (N, 3, 8, 8) or rows (N, 5, 8), trained for a step."""

    def __init__(self, model, batch):
        super().__init__()
        self.model = model
        self.batch = batch

    def training_step(self, batch, batch_idx):
        return self.model(self.batch).square().mean()

    def validation_step(self, batch, batch_idx):
        self.model(self.batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module, callback, **options):
    few = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 1}
    Trainer(callbacks=[callback], **{**QUIET, **few, **options}).fit(module, loader(), loader())


ROWS = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.trap("finetuning: `nn.TransformerEncoderLayer` in `eval()` without gradients takes torch's fused path")
def test_fused_layers():
    def make():
        torch.manual_seed(0)
        return nn.TransformerEncoderLayer(8, 2, 8, batch_first=True, dropout=0.0)

    inject_by_peft(by_peft := make(), lora("linear1", init_lora_weights=False))
    with torch.no_grad():
        trained, evaluated = by_peft.train()(ROWS), by_peft.eval()(ROWS)
        torch.testing.assert_close(evaluated, make().eval()(ROWS))  # without the adapter
        assert not torch.allclose(trained, evaluated, atol=1e-3)
    with pytest.raises(MisconfigurationException, match=r"no effect in evaluation: model.linear1.*LoRA\(...\)"):
        fit(Module(make(), ROWS), PeftAdapters(lora("linear1")))


@pytest.mark.trap("finetuning: torchvision Swin: 48 of 48 LoRA tensors get no gradient; ViT, `all-linear`: 4 of 14")
@pytest.mark.parametrize("name", ["Swin", "ViT"])
def test_layers_that_are_not_called(name):
    models = pytest.importorskip("torchvision.models")
    if name == "Swin":
        model = models.SwinTransformer([2, 2], 4, [2], [1], [2, 2], num_classes=3)
        config, silent = lora("qkv", "proj", modules_to_save=["head"]), "attn.proj"
    else:
        model = models.VisionTransformer(8, 4, 1, 2, 8, 8, num_classes=3)
        config, silent = {**lora(), "target_modules": "all-linear"}, "self_attention.out_proj"
    inject_by_peft(by_peft := copy.deepcopy(model), config)
    by_peft.train()(IMAGES).sum().backward()
    without = [n for n, p in by_peft.named_parameters() if p.requires_grad and p.grad is None]
    assert any(silent in name for name in without)
    with pytest.raises(MisconfigurationException, match=rf"no effect in .*{silent}"):
        fit(Module(model, IMAGES), PeftAdapters(config))


@pytest.mark.parametrize("submodule", [None, "net"])
def test_fit(submodule):
    module, callback = EvaluatedNet(), PeftAdapters({**IA3, "modules_to_save": ["4"]}, submodule=submodule)
    frozen = {name: value.clone() for name, value in module.net.state_dict().items()}
    fit(module, callback)
    assert str(callback.report).startswith("Adapters of peft (IA3) in 1 Linear add 64 values; 234 of ")
    state = module.net.state_dict()
    assert torch.equal(state["0.base_layer.weight"], frozen["0.weight"])
    assert torch.equal(state["1.weight"], frozen["1.weight"])
    assert not torch.equal(state["4.modules_to_save.default.weight"], frozen["4.weight"])
    assert not torch.equal(state["0.ia3_l.default"], torch.ones(1, 64))
    adapter = module.net[0]
    fit(module, pickle.loads(pickle.dumps(callback)))  # no second injection
    assert module.net[0] is adapter
    assert type(adapter.base_layer) is nn.Linear
    with pytest.raises(MisconfigurationException, match="of another configuration"):
        fit(module, PeftAdapters(lora("0"), submodule=submodule))


def test_beside_another_callback_that_freezes():
    ours, pefts = LoRA(2, target_modules="net.4"), PeftAdapters(lora("net.0"))
    for callbacks, words in (
        ([ours, pefts], "has adapters already"),
        ([pefts, ours], r"net.4.lora_weight were added to the module after"),
    ):
        with pytest.raises(MisconfigurationException, match=words):
            Trainer(callbacks=callbacks, **QUIET, max_epochs=1).fit(EvaluatedNet(), loader(), loader())


def test_only_the_submodule_is_frozen():
    module = Module(nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}), ROWS)
    with pytest.raises(ValueError, match="'0' matches none"):
        PeftAdapters(lora("0"), submodule="model").adapt(module)
    with pytest.raises(ValueError, match=r"submodule='model\.c'"):
        PeftAdapters(lora("a"), submodule="model.c").adapt(module)
    module.model["c"] = nn.Sequential(nn.Linear(8, 8))
    PeftAdapters(lora("0"), submodule="model.c").adapt(module)
    assert [name.rpartition("model.")[2] for name in trainable(module)] == [
        "a.weight",
        "a.bias",
        "b.weight",
        "b.bias",
        "c.0.lora_A.default.weight",
        "c.0.lora_B.default.weight",
    ]


def test_config_object_and_dict_are_one():
    config = peft.IA3Config(target_modules=["0"], feedforward_modules=["0"])
    one, other = net(), net()
    assert inject(one, config) == inject(other, IA3)
    assert config.target_modules == {"0"}  # as it was
    assert inject(net(), {**IA3, "target_modules": [0]}).layers == {"0": "Linear"}  # as jsonargparse reads YAML


@pytest.mark.trap("finetuning: Full checkpoints get `*.base_layer.weight` keys: plain ones no longer load")
def test_small_checkpoints(tmp_path):
    config = lora("net.0", use_dora=True, modules_to_save=["net.4"])

    def trained(max_epochs, callbacks=(), **options):
        with isolated_rng(seed=0):
            module = EvaluatedNet()
        trainer = Trainer(callbacks=[PeftAdapters(config), *callbacks], max_epochs=max_epochs, **QUIET)
        trainer.fit(module, loader(), loader(), **options)
        return trainer, module

    trainer, _ = trained(1, [TrainableCheckpoint()])
    trainer.save_checkpoint(tmp_path / "small.ckpt")
    names = {name for name in torch.load(tmp_path / "small.ckpt", weights_only=True)["state_dict"] if "(" not in name}
    assert names == {
        *(f"net.0.lora_{part}.default.weight" for part in ("A", "B", "magnitude_vector")),
        *(f"net.4.modules_to_save.default.{part}" for part in ("weight", "bias")),
    }
    resumed = trained(2, [TrainableCheckpoint()], ckpt_path=tmp_path / "small.ckpt")[1].state_dict()
    full = trained(2)[1].state_dict()
    assert all(torch.equal(value, resumed[name]) for name, value in full.items())
    with pytest.raises(RuntimeError, match=r"net.0.base_layer.weight"):
        EvaluatedNet().load_state_dict(full)


@pytest.mark.trap("finetuning: `get_peft_model(LightningModule)` is refused by the Trainer")
def test_get_peft_model():
    wrapped = peft.get_peft_model(EvaluatedNet(), peft.get_peft_config(lora("net.0")))
    with pytest.raises(TypeError, match="must be a `LightningModule`"):
        Trainer(**QUIET).fit(wrapped, loader())


@pytest.mark.parametrize("config", [IA3, lora("0", "2")], ids=["IA3", "LORA"])
def test_weights_of_the_base_are_loaded_into_a_model_with_adapters(config):
    pretrained = {f"module.{name}": value + 1 for name, value in net().state_dict().items()}
    inject(model := net(), config)
    report = load_weights(model, pretrained)
    loaded = {name.replace(".base_layer.", "."): value for name, value in model.state_dict().items()}
    assert report.loaded == report.total == len(pretrained) == 4
    assert all(torch.equal(loaded[name.removeprefix("module.")], value) for name, value in pretrained.items())
    assert "tensors of adapters keep their values" in str(report)
