"""Position embeddings: as nn.Embedding or as a parameter, and on grids of other sizes, square or not."""

import pytest
import timm
import torch
import transformers
from torch import nn

from lightning_tricks import load_weights
from lightning_tricks.checkpoint_remapping import CheckpointError, max_output_difference
from tests.checkpoint_remapping.models import randomized

TOKENS = torch.arange(6)[None]


class Text(nn.Module):
    """A small text encoder whose positions are an nn.Embedding, or a parameter with one dimension more or none."""

    def __init__(self, kind, name, words="tokens", ids=False):
        super().__init__()
        self.name = name
        self.add_module(words, nn.Embedding(20, 8))
        if kind == "embedding":
            self.add_module(name, nn.Embedding(6, 8))
        else:
            self.register_parameter(name, nn.Parameter(torch.randn((1, 6, 8) if kind == "1nd" else (6, 8))))
        if ids:
            self.register_buffer("position_ids", torch.arange(6)[None])
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2))
        self.table = words

    def forward(self, x):
        own = getattr(self, self.name)
        x = getattr(self, self.table)(x) + (own.weight if isinstance(own, nn.Embedding) else own)
        for block in self.blocks:
            x = block(x)
        return x


EMBEDDINGS = [("embedding", "wpe"), ("embedding", "pos_emb")]
PARAMETERS = [("1nd", "pos_emb"), ("nd", "positional_embedding")]
PAIRS = [pair for one in EMBEDDINGS for other in PARAMETERS for pair in ((one, other), (other, one))]


@pytest.mark.parametrize(("one", "other"), PAIRS)
@pytest.mark.parametrize("prefix", ["", "module.", "text._orig_mod."])
def test_embeddings_and_parameters_of_positions_load_into_each_other(one, other, prefix):
    source, target = randomized(Text(*one, ids=True)), Text(*other, words="token_embedding")
    file = {f"{prefix}{name}": value for name, value in source.state_dict().items()}
    for tensors in (file, dict(sorted(file.items()))):
        report = load_weights(target, tensors)
        assert (report.loaded, report.missing, report.unexpected) == (report.total, [], [])
        assert max_output_difference(source, target, TOKENS) == 0
    back = Text(*one, words="words", ids=True)
    assert load_weights(back, target.state_dict()).missing == ["position_ids"]
    assert max_output_difference(source, back, TOKENS) == 0


@pytest.mark.parametrize("size", [(160, 224), (64, 144), (160, 160)])
@pytest.mark.parametrize("tokens", [1, 0])
def test_grids_that_are_not_square_are_those_of_the_models_patches(size, tokens):
    """4 x 9 patches are as many as 6 x 6."""
    options = {} if tokens else {"class_token": False, "global_pool": "avg"}
    source = randomized(timm.create_model("vit_tiny_patch16_224", **options))
    target = timm.create_model("vit_tiny_patch16_224", img_size=size, **options)
    with pytest.raises(CheckpointError, match=r"interpolate=\['pos_embed'\] resizes positions"):
        load_weights(target, source.state_dict())
    report = load_weights(target, nn.DataParallel(source).state_dict(), interpolate="pos_embed")
    oracle = timm.layers.resample_abs_pos_embed(
        source.pos_embed, [side // 16 for side in size], num_prefix_tokens=tokens
    )
    torch.testing.assert_close(target.pos_embed, oracle, rtol=1e-5, atol=1e-6)
    assert (report.loaded, report.mismatched, report.alignment.mismatched) == (report.total, [], ())
    assert str(report).startswith(f"{report.total}/{report.total} tensors")
    assert "0 mismatched" in str(report)
    assert "resized" in {match.targets[0]: match.reason for match in report.alignment.matches}["pos_embed"]


def test_a_norm_or_a_linear_layer_is_no_embedding_of_positions():
    source = nn.ModuleDict({"pos_proj": nn.Linear(6, 8), "position": nn.LayerNorm(8)})
    target = nn.ModuleDict({"pos_projection": nn.Linear(6, 8), "position_norm": nn.LayerNorm(8)})
    assert load_weights(target, source.state_dict()).renamed["position.bias"] == "position_norm.bias"


def test_a_model_of_transformers_says_its_grid():
    def vit(size):
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        return transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=size))

    source, target = randomized(vit(64)), vit((32, 80))
    load_weights(target, source.state_dict(), interpolate="*position_embeddings")
    positions = (model.embeddings.position_embeddings for model in (source, target))
    old, new = positions
    oracle = timm.layers.resample_abs_pos_embed(old, [2, 5], num_prefix_tokens=1)
    torch.testing.assert_close(new, oracle, rtol=1e-5, atol=1e-6)


def test_an_unknown_grid_is_refused_with_what_to_do():
    target = nn.ParameterDict({"pos_embed": torch.zeros(1, 12, 3)})
    with pytest.raises(CheckpointError, match=r"does not say its grid of patches. Resize the tensor yourself: load_we"):
        load_weights(target, {"pos_embed": torch.ones(1, 16, 3)}, interpolate="pos_embed")
    wide = timm.create_model("vit_tiny_patch16_224", img_size=(64, 96)).state_dict()
    square = timm.create_model("vit_tiny_patch16_224")
    before = square.pos_embed.clone()
    with pytest.raises(CheckpointError, match="it is not a square grid of positions in the file"):
        load_weights(square, wide, interpolate="pos_embed")
    assert torch.equal(square.pos_embed, before)
    assert not target["pos_embed"].any()


def test_embeddings_of_positions_are_resized_into_a_parameter_of_the_same_name():
    """With one dimension more or less."""
    source = {"pos": torch.randn(16, 3), "other": torch.ones(2)}
    target = nn.ParameterDict({"pos": torch.zeros(1, 25, 3), "other": torch.zeros(2)})
    assert load_weights(target, source, interpolate="pos").loaded == 2
    oracle = nn.functional.interpolate(source["pos"].T.reshape(1, 3, 4, 4), (5, 5), mode="bicubic", antialias=True)
    torch.testing.assert_close(target["pos"].detach()[0], oracle.reshape(3, 25).T)
