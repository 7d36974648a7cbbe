"""`save_adapter` and `load_adapter`, with peft as the oracle."""

import copy
import inspect
import json
import re
import warnings
from contextlib import contextmanager

import pytest
import torch
import transformers
from lightning.pytorch import LightningModule
from packaging.version import Version
from torch import nn

from lightning_tricks import load_weights
from lightning_tricks.finetuning import LoRA, LoRASettings, add_lora, load_adapter, merge, save_adapter
from tests.finetuning.models import swin
from tests.finetuning.peft_models import perturb
from tests.small import cases, fork, recorded_warnings, without_warnings

peft = pytest.importorskip("peft")

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


class Attention(nn.Module):
    """`nn.MultiheadAttention` outside of a layer with a fused path."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x):
        return self.out(self.embedding(x))


def seeded(make, *arguments, **named):
    torch.manual_seed(3)
    return make(*arguments, **named).eval()


def read_with_peft(base, folder):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`", UserWarning)
        return peft.PeftModel.from_pretrained(base, folder).eval()


def save_with_peft(model, folder):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(save_embedding_layers|Could not find a config file)", UserWarning)
        model.save_pretrained(folder)


def adapted(make, **settings):
    model = seeded(make)
    add_lora(model, LoRASettings(**{"rank": 2, "alpha": 6.0, **settings}))
    return perturb(model)


IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
MODELS = {
    "Linear": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)),
        torch.randn(5, 6, generator=torch.Generator().manual_seed(0)),
        {"modules_to_save": "4", "rank_pattern": {"2": 3}},
    ),
    "rslora": (lambda: nn.Sequential(nn.Linear(6, 4)), torch.ones(5, 6), {"use_rslora": True}),
    "Conv1d": (lambda: nn.Sequential(nn.Conv1d(3, 4, 3, 2, 1)), IMAGE.flatten(2), {"target_modules": "0"}),
    "Conv2d": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, (3, 2)), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding="same")),
        IMAGE,
        {"target_modules": ["0", "2"]},
    ),
    "Conv3d": (
        lambda: nn.Sequential(nn.Conv3d(3, 4, 3)),
        IMAGE[:, :, None].repeat(1, 1, 4, 1, 1),
        {"target_modules": "0"},
    ),
    "Embedding": (lambda: nn.Sequential(nn.Embedding(11, 8, 0)), torch.arange(11)[None], {"target_modules": "0"}),
    "trained whole": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))),
        torch.ones(5, 6),
        {"target_modules": "0", "modules_to_save": "1"},
    ),
    "tied": (Tied, torch.arange(11)[None], {"target_modules": "embedding"}),
    "ambiguous": (
        lambda: nn.Sequential(nn.Sequential(nn.Linear(6, 6)), nn.Linear(6, 6)),
        torch.ones(5, 6),
        {"target_modules": "0.0", "rank_pattern": {"0.0": 1}},
    ),
    "suffix": (
        lambda: nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.ModuleDict({"a": nn.Linear(6, 6)})}),
        None,
        {"target_modules": "a"},
    ),
}


@contextmanager
def refused(words, kind=ValueError):
    """Expect an error of `load_adapter` that names none but its arguments, and settings of the file."""
    with pytest.raises(kind, match=words) as caught:
        yield
    known = {*inspect.signature(load_adapter).parameters, *peft.LoraConfig.__dataclass_fields__, "of_a_later_version"}
    told = re.sub(r"\w+\([^()]*\)", "", str(caught.value))  # without calls of other functions
    assert set(re.findall(r"\b([a-z_]+)=", told)) <= known


def outputs(model, batch):
    with torch.no_grad():
        if batch is None:
            inner = getattr(model, "base_model", None)
            model = model if inner is None else inner.model
            batch = torch.ones(5, 6)
            return model["b"]["a"](model["a"](batch))
        return model(batch)


@pytest.mark.parametrize("name", MODELS)
def test_peft_computes_what_we_saved(name, tmp_path):
    make, batch, settings = MODELS[name]
    model = adapted(make, **settings)
    save_adapter(model, tmp_path)
    base = seeded(make)
    assert not torch.allclose(outputs(base, batch), outputs(model, batch), atol=1e-3)
    torch.testing.assert_close(outputs(read_with_peft(base, tmp_path), batch), outputs(model, batch), **TOLERANCE)


@pytest.mark.parametrize("name", MODELS)
def test_we_compute_what_peft_saved(name, tmp_path):
    make, batch, settings = MODELS[name]
    model = adapted(make, **settings)
    save_adapter(model, tmp_path / "ours")
    saved_by_peft = read_with_peft(seeded(make), tmp_path / "ours")
    save_with_peft(saved_by_peft, tmp_path / "peft")
    plain = seeded(make)
    report = load_adapter(plain, tmp_path / "peft")
    assert torch.equal(outputs(plain, batch), outputs(model, batch))
    assert report.added == sum(part.A.numel() + part.B.numel() for part in plain.modules() if hasattr(part, "A"))
    again = seeded(make)
    add_lora(again, LoRASettings(**{"rank": 2, "alpha": 6.0, **settings}))
    load_adapter(again, tmp_path / "peft")  # into a model that has the same LoRA
    assert torch.equal(outputs(again, batch), outputs(model, batch))
    merge(again)
    torch.testing.assert_close(outputs(again, batch), outputs(model, batch), **TOLERANCE)


@pytest.mark.trap("finetuning: MultiheadAttention of peft adds the change of out_proj twice")
def test_multihead_attention(tmp_path):
    batch = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    model = adapted(Attention)
    with pytest.warns(UserWarning, match=r"attention.out_proj \(peft <= 0.21 adds its change twice"):
        save_adapter(model, tmp_path / "ours")
    again = seeded(Attention)
    load_adapter(again, tmp_path / "ours")
    assert torch.equal(outputs(again, batch), outputs(model, batch))

    by_peft = read_with_peft(seeded(Attention), tmp_path / "ours")
    assert not torch.allclose(outputs(by_peft, batch), outputs(model, batch), atol=1e-2)
    save_with_peft(by_peft, tmp_path / "peft")
    load_adapter(plain := seeded(Attention), tmp_path / "peft")  # what peft computes, not what its file says
    torch.testing.assert_close(outputs(plain, batch), outputs(by_peft, batch), **TOLERANCE)
    with torch.no_grad():
        by_peft.base_model.model.attention.base_layer.out_proj.lora_B["default"].weight.div_(2)
    torch.testing.assert_close(outputs(by_peft, batch), outputs(model, batch), **TOLERANCE)


class Zoo(nn.Module):
    """Layers that peft has no LoRA for, each a child."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.rnn = nn.LSTM(4, 4, batch_first=True)
        self.up = nn.ConvTranspose2d(3, 4, 3)
        self.grouped = nn.Conv2d(4, 4, 3, groups=2)
        self.dilated = nn.Conv2d(4, 4, 3, dilation=2)
        self.bag = nn.EmbeddingBag(7, 4)
        self.twice = self.again = nn.Linear(4, 4)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.cross = nn.MultiheadAttention(4, 2, kdim=6, vdim=6)

    def forward(self, images):
        images = self.dilated(self.grouped(self.up(self.scale[:, None, None] * images)))
        rows = self.rnn(images.flatten(2).transpose(1, 2))[0] + self.bag(torch.arange(4)[None])
        keys = rows.repeat(1, 1, 2)[..., :6]
        return self.normed(self.again(self.twice(rows))) + self.cross(rows, keys, keys)[0]


def test_layers_that_peft_has_not(tmp_path):
    model = seeded(Zoo)
    add_lora(model, LoRASettings(rank=1, target_modules="*"))
    model.scale.requires_grad_()
    perturb(model)
    with pytest.warns(UserWarning, match="peft does not") as caught:
        save_adapter(model, tmp_path)
    assert "rnn (weight_ih_l0 of LSTM)" in str(caught[0].message)
    assert "more" in str(caught[0].message)
    plain = seeded(Zoo)
    load_adapter(plain, tmp_path)
    assert torch.equal(outputs(plain, IMAGE), outputs(model, IMAGE))
    assert {name for name, value in plain.named_parameters() if value.requires_grad} == {
        name for name, value in model.named_parameters() if value.requires_grad
    }


@pytest.mark.trap("finetuning: Adapter-only saves by a `requires_grad` filter lose BatchNorm statistics")
def test_running_statistics_are_saved(tmp_path):
    def make():
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())

    model = adapted(make, target_modules="0").train()
    for _ in range(20):
        model(5 + 3 * IMAGE)
    model.eval()
    save_adapter(model, tmp_path)
    load_adapter(plain := seeded(make), tmp_path)
    assert torch.equal(outputs(plain, IMAGE), outputs(model, IMAGE))
    torch.testing.assert_close(
        outputs(read_with_peft(seeded(make), tmp_path), IMAGE), outputs(model, IMAGE), **TOLERANCE
    )


def linear():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


@pytest.fixture
def folder(tmp_path):
    save_adapter(adapted(linear, modules_to_save="2"), tmp_path)
    return tmp_path


def change_config(folder, **values):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@cases(
    "values, message",
    ({"peft_type": "IA3"}, "load the adapters of other methods with peft"),
    ({"use_dora": True}, "use_dora=True"),
    ({"bias": "all"}, "bias='all'"),
    ({"bias": "lora_only"}, "bias='lora_only'"),
    ({"lora_bias": True}, "lora_bias=True"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ({"of_a_later_version": 1}, "of_a_later_version=1"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' has changed the weights of the base"),
    ({"init_lora_weights": "olora"}, "init_lora_weights='olora' has changed the weights of the base"),
    ({"r": "8"}, "r must be a whole number"),
    ({"r": 0}, "r must be a whole number"),
    ({"lora_alpha": None}, "lora_alpha must be a number"),
    ({"lora_alpha": float("nan")}, "lora_alpha must be a number"),
    ({"lora_dropout": 1}, "lora_dropout"),
    ({"alpha_pattern": {"(a+)+": 1}}, "repeats a group"),
    ({"alpha_pattern": {"[": 1}}, "not a regular expression"),
    ({"alpha_pattern": [1]}, "alpha_pattern must be a mapping"),
    ({"modules_to_save": "2"}, "modules_to_save must be a list"),
    ({"peft_version": "x"}, "peft_version must be a version"),
)
def test_config_is_checked(folder, values, message):
    change_config(folder, **values)
    with refused(message):
        load_adapter(seeded(linear), folder)


@cases("values", {"lora_dropout": 0.1}, {"init_lora_weights": "gaussian"}, {"init_lora_weights": "orthogonal"}, ids=str)
def test_settings_that_matter_in_training_alone(folder, values):
    load_adapter(plain := seeded(linear), folder)
    change_config(folder, **values)
    load_adapter(other := seeded(linear), folder)
    assert torch.equal(outputs(other, torch.ones(5, 6)), outputs(plain, torch.ones(5, 6)))


def test_files_are_checked(folder, tmp_path_factory):
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    with refused("not downloaded", FileNotFoundError):
        load_adapter(seeded(linear), "someone/adapter")
    with refused("folder must be the path", TypeError):
        load_adapter(seeded(linear), None)
    text = config.read_text()
    config.write_text("[" * 100_000)
    with refused(r"adapter_config.json: its lists and mappings are nested too deeply"):
        load_adapter(seeded(linear), folder)
    config.write_text(" " * (5 << 20))
    with refused("larger than 4 MiB"):
        load_adapter(seeded(linear), folder)
    config.write_text("[]")
    with refused("a mapping is needed"):
        load_adapter(seeded(linear), folder)
    config.write_text(text)
    weights.write_bytes(weights.read_bytes()[:100])
    with refused("corrupt or truncated"):
        load_adapter(seeded(linear), folder)
    weights.rename(folder / "adapter_model.bin")
    with refused(r"no adapter_model.safetensors.*adapter_model.bin is a pickle", FileNotFoundError):
        load_adapter(seeded(linear), folder)


@cases(
    "make, message",
    (lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4)), r"shapes differ: 2.weight is \(4, 8\)"),
    (
        lambda: nn.Sequential(nn.ReLU(), nn.ReLU(), nn.Linear(8, 4)),
        r"1 of 1 layers have no such matrix .* in Sequential: 0 \(ReLU\)\. If they are quantized",
    ),
    (lambda: nn.ModuleDict({"model": linear()}), "Pass model of the model"),
    (lambda: nn.Sequential(nn.Linear(6, 8)), "2 tensors are not in the model: 2.bias, 2.weight"),
)
def test_another_base(folder, make, message):
    model = seeded(make)
    before = copy.deepcopy(model.state_dict())
    with refused(message):
        load_adapter(model, folder)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


def edit(folder, change):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


@cases(
    "change, message",
    (lambda tensors: tensors.pop("base_model.model.0.lora_A.weight"), "one of the matrices A and B is missing: 0.w"),
    (lambda tensors: tensors.pop("base_model.model.2.bias"), "1 tensors of modules_to_save='2' are missing: 2.bias"),
    (lambda tensors: tensors.update(x=torch.ones(1)), "'x' does not begin with"),
    (
        lambda tensors: tensors.update({"base_model.model.0.lora_B.weight": torch.ones(3)}),
        r"1 shapes differ: 0.weight is \(8, 6\) in the model, and its change is \(1, 3\) @ \(2, 6\)",
    ),
)
def test_incomplete_files(folder, change, message):
    edit(folder, change)
    with refused(message):
        load_adapter(seeded(linear), folder)


@cases(
    "settings, message",
    ({"target_modules": ["0", "2"], "modules_to_save": []}, "2.weight are not in the file, and nothing are not"),
    ({"rank": 3}, r"0 has \(rank, alpha, use_rslora\) = \(2, 6.0, False\) in the file, and \(3, 6.0, False\)"),
    ({"alpha": 3.0}, r"and \(2, 3.0, False\) in the model"),
    ({"use_rslora": True}, r"and \(2, 6.0, True\) in the model"),
)
def test_a_model_with_another_lora(folder, settings, message):
    model = adapted(linear, **{"modules_to_save": "2", **settings})
    with refused(message):
        load_adapter(model, folder)


def test_tied_weights_that_were_trained_apart(tmp_path):
    save_adapter(adapted(Tied, target_modules="embedding"), tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop("base_model.model.out.lora_A.weight").add_(1))
    with refused("one of the matrices"):
        load_adapter(seeded(Tied), tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop("base_model.model.out.lora_B.weight"))
    with refused("changes embedding and out differently"):
        load_adapter(seeded(Tied), tmp_path)


def test_a_tied_layer_that_peft_trained_whole_is_not_written_into_the_others(tmp_path):
    """peft unties it, as it trains a copy."""

    def make():
        return nn.ModuleDict({"body": nn.Linear(8, 8), "language": Tied()})

    config = peft.LoraConfig(r=2, target_modules=["body"], modules_to_save=["language.out"])
    perturb(peft.get_peft_model(seeded(make), config)).save_pretrained(tmp_path)
    with refused(r"language\.out\.weight and language\.embedding\.weight differ .* untie them"):
        load_adapter(seeded(make), tmp_path)
    untied = seeded(make)
    untied["language"].out.weight = nn.Parameter(untied["language"].out.weight.detach().clone())
    before = untied["language"].embedding.weight.clone()
    load_adapter(untied, tmp_path)
    assert torch.equal(untied["language"].embedding.weight, before)
    assert not torch.equal(untied["language"].out.weight, before)
    trained = adapted(make, target_modules="body", modules_to_save="language.out")
    save_adapter(trained, tmp_path / "ours")  # which trained both, as they are one
    load_adapter(plain := seeded(make), tmp_path / "ours")
    assert torch.equal(plain["language"].embedding.weight, trained["language"].out.weight)


def test_changes_of_several_ranks_in_a_layer(tmp_path):
    model = adapted(lambda: nn.ModuleDict({"rnn": nn.LSTM(4, 4)}), target_modules="rnn")
    with pytest.warns(UserWarning, match="peft does not"):
        save_adapter(model, tmp_path)
    front = "base_model.model.rnn.lora_"
    edit(tmp_path, lambda tensors: tensors.update({f"{front}A.weight_hh_l0": torch.ones(1, 4)}))
    edit(tmp_path, lambda tensors: tensors.update({f"{front}B.weight_hh_l0": torch.ones(16, 1)}))
    load_adapter(plain := nn.ModuleDict({"rnn": nn.LSTM(4, 4)}), tmp_path)
    before = plain.rnn.base_weight("weight_hh_l0").clone()
    torch.testing.assert_close(merge(plain).rnn.weight_hh_l0, before + 6.0)
    edit(tmp_path, lambda tensors: [tensors.pop(f"{front}{matrix}.weight_hh_l0") for matrix in "AB"])
    with refused(r"the matrices of 1 weights are missing: rnn\.weight_hh_l0"):
        load_adapter(nn.ModuleDict({"rnn": nn.LSTM(4, 4)}), tmp_path)


def test_a_part_of_a_lightning_module_and_compiled_parts(tmp_path):
    module = LightningModule()
    module.model = seeded(linear)
    LoRA(rank=2, target_modules="model.0").adapt(module)
    perturb(module)
    module.model[0] = torch.compile(module.model[0], backend="eager")
    save_adapter(module.model, tmp_path)
    compiled = seeded(linear)
    compiled[0] = torch.compile(compiled[0], backend="eager")
    for model in (seeded(linear), compiled):
        load_adapter(model, tmp_path)
        assert torch.equal(outputs(model, torch.ones(5, 6)), outputs(module.model, torch.ones(5, 6)))


def test_a_rank_beyond_that_of_the_layer(tmp_path):
    model = perturb(peft.get_peft_model(seeded(linear), peft.LoraConfig(r=64, target_modules=["0"]))).eval()
    save_with_peft(model, tmp_path)
    load_adapter(plain := seeded(linear), tmp_path)
    torch.testing.assert_close(outputs(plain, torch.ones(5, 6)), outputs(model, torch.ones(5, 6)), **TOLERANCE)
    front = "base_model.model.0.lora_"
    edit(tmp_path, lambda tensors: tensors.update({f"{front}A.weight": torch.ones(0, 6)}))
    edit(tmp_path, lambda tensors: tensors.update({f"{front}B.weight": torch.ones(8, 0)}))
    with refused("shapes differ"):
        load_adapter(seeded(linear), tmp_path)


def test_quantized_layers_are_not_those_of_another_model(folder):
    with without_warnings():  # which torch is to remove some day
        model = torch.ao.quantization.quantize_dynamic(seeded(linear), {nn.Linear})
    with refused(r"1 of 1 layers have no such matrix of .* in Sequential: 0 \(Linear\)\. If they are quantized, load"):
        load_adapter(model, folder)


def test_layers_with_a_forward_pass_of_their_own_are_refused(tmp_path):
    def make():
        return nn.Sequential(_Shifted(9, 6))

    save_with_peft(peft.get_peft_model(seeded(make), peft.LoraConfig(r=2, target_modules=["0"])), tmp_path)
    with refused(r"of 1 layers by more than a change of their weights: 0 \(_Shifted with a forward pass of its own\)"):
        load_adapter(seeded(make), tmp_path)


def test_sharded_models(tmp_path):
    if Version(torch.__version__) < Version("2.7"):
        pytest.skip("FSDP2 of torch 2.6 needs an accelerator")
    save_adapter(adapted(linear), tmp_path / "whole")
    fork(lambda rank: _shard_and_refuse(tmp_path), 1)


def _shard_and_refuse(tmp_path):
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    model = adapted(linear)
    fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
    with refused("the model is sharded already"):
        load_adapter(model, tmp_path / "whole")
    with pytest.raises(ValueError, match="does not have all values"):
        save_adapter(model, tmp_path / "part")


def test_nothing_to_save(tmp_path):
    with pytest.raises(ValueError, match="no LoRA to save"):
        save_adapter(linear(), tmp_path)
    model = linear()
    add_lora(model, LoRASettings(rank=2))
    with pytest.raises(ValueError, match="does not have all values"):
        save_adapter(model.to("meta"), tmp_path)
    assert not list(tmp_path.iterdir())


def test_names_that_end_alike_do_no_harm_where_all_are_saved(tmp_path):
    def make():
        inner = nn.ModuleDict({"bn": nn.BatchNorm1d(6)})
        return nn.ModuleDict({"fc": nn.Linear(6, 6), "inner": inner, "bn": nn.BatchNorm1d(6)})

    def run(model):
        return model["bn"](model["inner"]["bn"](model["fc"](torch.ones(5, 6))))

    model = adapted(make).train()
    for _ in range(3):
        run(model)
    save_adapter(model.eval(), tmp_path)  # without a warning
    by_peft = read_with_peft(seeded(make), tmp_path).base_model.model
    torch.testing.assert_close(run(by_peft), run(model), **TOLERANCE)


def test_of_two_modules_whose_names_end_alike_one_is_saved_and_loaded(tmp_path):
    def make():
        return nn.ModuleDict(
            {"body": nn.Linear(6, 8), "head": nn.Linear(8, 2), "aux": nn.ModuleDict({"head": nn.Linear(8, 2)})}
        )

    with without_warnings():  # peft would take both
        save_adapter(model := adapted(make, target_modules="body", modules_to_save="head"), tmp_path)
    load_adapter(plain := seeded(make), tmp_path)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("settings", [{"modules_to_save": "head"}, {"modules_to_save": (), "target_modules": "head"}])
def test_a_module_of_two_names_is_saved_and_loaded_once(settings, tmp_path):
    def make():
        net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
        return nn.ModuleDict({"net": net, "head": net[1]})

    with pytest.warns(UserWarning, match=r"peft does not: net\.1 \(used as net\.1, head\)"):
        save_adapter(model := adapted(make, **settings), tmp_path)
    load_adapter(plain := seeded(make), tmp_path)
    assert plain["head"] is plain["net"][1]
    assert torch.equal(outputs(plain["net"], torch.ones(5, 6)), outputs(model["net"], torch.ones(5, 6)))


class _Shifted(nn.Embedding):
    def forward(self, tokens):
        return super().forward(tokens + 1)


class _Scaled(nn.Embedding):
    """The embedding of Gemma: peft multiplies by `embed_scale` what it adds."""

    embed_scale = torch.tensor(3.0)

    def forward(self, tokens):
        return super().forward(tokens) * self.embed_scale


class _ScaledEach(_Scaled):
    embed_scale = torch.arange(8.0)


class _ScaledOtherwise(nn.Embedding):
    def forward(self, tokens):
        return super().forward(tokens) * 3


class _Plain(nn.Linear):
    def forward(self, x):
        return x @ self.weight.t() + self.bias


class _Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@cases(
    "layer, is_read",
    (_Scaled, True),
    (_ScaledEach, False),
    (_ScaledOtherwise, False),
    (_Plain, True),
    (_Doubled, False),
)
def test_a_subclass_is_named_where_peft_computes_something_else(layer, is_read, tmp_path):
    def make():
        return nn.Sequential(layer(8, 8))

    x = torch.arange(8)[None] if issubclass(layer, nn.Embedding) else torch.eye(8)
    model = adapted(make, target_modules="0", modules_to_save=())
    with recorded_warnings() as caught:
        save_adapter(model, tmp_path)
        by_peft = outputs(read_with_peft(seeded(make), tmp_path), x)
    said = [str(warning.message) for warning in caught if "peft does not: 0 (" in str(warning.message)]
    assert bool(said) != is_read
    assert torch.allclose(by_peft, outputs(model, x), atol=1e-5) == is_read


@pytest.mark.parametrize("kind", ["IA3", "LORA"])
def test_weights_of_the_base_are_loaded_into_a_model_with_adapters_of_peft(kind):
    pretrained = {f"module.{name}": value + 1 for name, value in linear().state_dict().items()}
    more = {"r": 2} if kind == "LORA" else {"feedforward_modules": ["0"]}
    config = peft.get_peft_config({"peft_type": kind, "target_modules": ["0"], **more})
    report = load_weights(model := peft.inject_adapter_in_model(config, linear()), pretrained)
    loaded = {name.replace(".base_layer.", "."): value for name, value in model.state_dict().items()}
    assert report.loaded == report.total == len(pretrained)
    assert all(torch.equal(loaded[name.removeprefix("module.")], value) for name, value in pretrained.items())
    assert "tensors of adapters keep their values" in str(report)


_READS = r"0\.attn\.qkv \(ShiftedWindowAttention reads its weight without calling it\)"


@cases(
    "make, words",
    (lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding_mode="reflect")), "Conv2d with groups, dilation or"),
    (lambda: nn.Sequential(*[nn.Linear(6, 6)] * 2), "used as 0, 1"),
    (lambda: nn.Sequential(_Shifted(9, 6)), "_Shifted with a forward pass of its own"),
    (lambda: swin().features[1], _READS),
)
def test_what_peft_computes_otherwise_is_named(make, words, tmp_path):
    model = adapted(make, target_modules="*.attn.*" if words is _READS else "0", modules_to_save=())
    with pytest.warns(UserWarning, match=words):
        save_adapter(model, tmp_path)


def test_the_scale_of_the_file_is_that_of_the_model(tmp_path):
    """So that a checkpoint of the loaded model is one of this scale."""
    save_adapter(model := adapted(linear, alpha=3.0, use_rslora=True), tmp_path)
    load_adapter(plain := seeded(linear), tmp_path)
    assert plain.load_state_dict(model.state_dict())
    assert model.load_state_dict(plain.state_dict())


@pytest.mark.parametrize(("alpha", "written"), [(2.5, "2.5"), (0.5, "0.5"), (6.0, "6")])
def test_a_scale_is_written_as_it_is(alpha, written, tmp_path):
    save_adapter(model := adapted(linear, alpha=alpha), tmp_path)
    assert f'"lora_alpha": {written},' in (tmp_path / "adapter_config.json").read_text()
    load_adapter(plain := seeded(linear), tmp_path)
    assert torch.equal(outputs(plain, torch.ones(5, 6)), outputs(model, torch.ones(5, 6)))


def test_scales_of_single_layers(tmp_path):
    model = peft.get_peft_model(
        seeded(linear), peft.LoraConfig(r=2, lora_alpha=6, target_modules=["0", "2"], alpha_pattern={"^2": 14})
    )
    perturb(model).save_pretrained(tmp_path)
    load_adapter(plain := seeded(linear), tmp_path)
    assert (plain[0].lora_weight.scaling, plain[2].lora_weight.scaling) == (3, 7)
    torch.testing.assert_close(outputs(plain, torch.ones(5, 6)), outputs(model.eval(), torch.ones(5, 6)), **TOLERANCE)
    load_adapter(plain, tmp_path)
    save_adapter(plain, tmp_path / "again")
    load_adapter(other := seeded(linear), tmp_path / "again")
    assert torch.equal(outputs(other, torch.ones(5, 6)), outputs(plain, torch.ones(5, 6)))


@cases("projection, words", ("out_proj", "peft refuses it in models of the type mamba"), ("in_proj", None))
def test_what_peft_refuses_in_mamba_is_named(projection, words, tmp_path):
    def make():
        sizes = {"vocab_size": 16, "hidden_size": 8, "state_size": 4, "num_hidden_layers": 1}
        return transformers.MambaModel(transformers.MambaConfig(**sizes))

    with recorded_warnings() as caught:
        save_adapter(adapted(make, target_modules=f"*.{projection}", modules_to_save=()), tmp_path)
    assert [words in str(warning.message) for warning in caught] == [True] * bool(words)
    if words:
        with pytest.raises(ValueError, match="is incompatible with Mamba-based models"):
            read_with_peft(seeded(make), tmp_path)
    else:
        read_with_peft(seeded(make), tmp_path)
