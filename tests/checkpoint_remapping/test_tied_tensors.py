"""Tied tensors: a language model's embedding and output, under both names or one, whatever stands in front of them."""

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from lightning_tricks import load_weights, save_weights
from lightning_tricks.checkpoint_remapping import CheckpointError, max_output_difference
from tests.checkpoint_remapping.models import randomized
from tests.small import same

PREFIXES = ["", "module.", "model.net._orig_mod."]


class GPT(nn.Module):
    """As nanoGPT has it: the output layer is the embedding of the tokens."""

    def __init__(self, tied=True, head="lm_head", trunk="transformer"):
        super().__init__()
        self.names = trunk, head
        blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2))
        parts = {"wte": nn.Embedding(20, 8), "wpe": nn.Embedding(6, 8), "h": blocks, "ln_f": nn.LayerNorm(8)}
        self.add_module(trunk, nn.ModuleDict(parts))
        self.add_module(head, nn.Linear(8, 20, bias=False))
        if tied:
            parts["wte"].weight = getattr(self, head).weight

    def forward(self, x):
        parts = getattr(self, self.names[0])
        x = parts["wte"](x) + parts["wpe"].weight[: x.shape[1]]
        for block in parts["h"]:
            x = block(x)
        return getattr(self, self.names[1])(parts["ln_f"](x))


TOKENS = torch.arange(6)[None]


def prefixed(prefix, tensors, without=""):
    return {f"{prefix}{name}": value for name, value in tensors.items() if name != without}


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("without", ["", "lm_head.weight", "transformer.wte.weight"])
def test_a_tied_file_into_a_tied_model(prefix, without):
    source, target = randomized(GPT()), GPT()
    report = load_weights(target, prefixed(prefix, source.state_dict(), without))
    assert (report.loaded, report.missing, report.unexpected) == (report.total, [], [])
    assert max_output_difference(source, target, TOKENS) == 0
    assert target.lm_head.weight is target.transformer["wte"].weight


@pytest.mark.parametrize("prefix", PREFIXES)
def test_where_only_one_side_is_tied(prefix):
    source, target = randomized(GPT()), GPT(tied=False)
    load_weights(target, prefixed(prefix, source.state_dict()))
    assert max_output_difference(source, target, TOKENS) == 0
    assert target.lm_head.weight is not target.transformer["wte"].weight
    apart = randomized(GPT(tied=False)).state_dict()
    for model, file, words in (
        (
            target,
            prefixed(prefix, source.state_dict(), "lm_head.weight"),
            "1 tensor is missing in the file: lm_head.weight",
        ),
        (GPT(), prefixed(prefix, apart), "are one tensor in the model and two different ones in the checkpoint"),
    ):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(CheckpointError, match=words):
            load_weights(model, file)
        assert same(before, dict(model.state_dict()))
    report = load_weights(GPT(), prefixed(prefix, apart), rules=[(f"{prefix}lm_head", None)])
    assert report.loaded == report.total


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda net: torch.compile(net, backend="eager")])
def test_files_of_wrapped_models(name, wrap):
    """A .safetensors holds tied tensors once, and its header says under which other names."""
    source = randomized(GPT())
    save_weights(wrap(source), name, clean=False)
    for tied in (True, False):
        for target in (GPT(tied), nn.ModuleDict({"net": GPT(tied)}), wrap(GPT(tied))):
            assert load_weights(target, name).missing == []
    target = GPT(tied=False)
    load_weights(target, name)
    assert max_output_difference(source, target, TOKENS) == 0


def test_a_name_of_the_header_that_the_model_lacks_is_not_left_over():
    source = randomized(GPT())
    save_weights(source, "w.safetensors")
    trunk = GPT().transformer
    report = load_weights(nn.ModuleDict({"transformer": trunk}), "w.safetensors")
    assert (report.loaded, report.unexpected) == (report.total, [])
    assert torch.equal(trunk["wte"].weight, source.lm_head.weight)


@pytest.mark.parametrize("without", ["", "lm_head.weight", "transformer.wte.weight"])
@pytest.mark.parametrize("assign", [None, True])
def test_ties_survive_assigned_tensors(without, assign):
    source = randomized(GPT())
    target = GPT()
    if assign is None:
        with torch.device("meta"):
            target = GPT()
    report = load_weights(target, prefixed("module.", source.state_dict(), without), assign=assign)
    assert "meta" not in report.diagnosis
    assert target.lm_head.weight is target.transformer["wte"].weight
    assert max_output_difference(source, target, TOKENS) == 0
    assert len(list(target.parameters())) == len(list(source.parameters()))


SMALL = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 32, "vocab_size": 30}


def t5(tied):
    """T5 with an output layer of its own if it is not tied, whatever its configuration makes of that."""
    config = transformers.T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=30)
    model = transformers.T5ForConditionalGeneration(config)
    if not tied:
        model.lm_head.weight = nn.Parameter(torch.randn(30, 16))
    return model


FAMILIES = {
    "GPT-2": lambda tied: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=30, tie_word_embeddings=tied)
    ),
    "T5": t5,
    "BERT": lambda tied: transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, tie_word_embeddings=tied)),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prefix", ["", "model._orig_mod."])
def test_language_models_of_transformers(family, prefix, tmp_path):
    source = randomized(FAMILIES[family](True))
    source.tie_weights()
    ids = {"input_ids": TOKENS} | ({"decoder_input_ids": TOKENS[:, :4]} if family == "T5" else {})
    source.save_pretrained(tmp_path)
    for file in (source.state_dict(), load_file(tmp_path / "model.safetensors")):
        target = FAMILIES[family](True)
        report = load_weights(target, prefixed(prefix, file))
        assert report.missing == []
        assert max_output_difference(source, target, ids) == 0
    untied = FAMILIES[family](False)
    load_weights(untied, prefixed(prefix, source.state_dict()))
    assert max_output_difference(source, untied, ids) == 0
    other = randomized(FAMILIES[family](False))
    with pytest.raises(CheckpointError, match="are one tensor in the model and two different ones"):
        load_weights(FAMILIES[family](True), prefixed(prefix, other.state_dict()))


def test_other_words_for_both_names_and_a_rule_for_one_of_them():
    """A tied file under names of another project: its two names are one tensor there, too."""
    source, target = randomized(GPT()), GPT(head="decoder", trunk="backbone")
    assert load_weights(target, source.state_dict()).missing == []
    assert max_output_difference(source, target, TOKENS) == 0
    with pytest.raises(CheckpointError):
        load_weights(target, randomized(GPT(tied=False)).state_dict())
    file = prefixed("", source.state_dict(), "lm_head.weight")
    file["table"] = file.pop("transformer.wte.weight")
    target = GPT()
    assert load_weights(target, file, rules=[("table", "lm_head.weight")]).missing == []
    assert max_output_difference(source, target, TOKENS) == 0
