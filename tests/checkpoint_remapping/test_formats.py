"""Files that keep tensors in another form than the model: stacked, fused, of another rank, beside others."""

import random
import re

import pytest
import torch

from lightning_tricks import load_weights
from lightning_tricks.checkpoint_remapping import AmbiguousAlignmentError, CheckpointError
from tests.checkpoint_remapping.models import module_of

ORDERS = ("as registered", "shuffled")


def arranged(tensors, order):
    names = list(tensors)
    if order == "shuffled":
        random.Random(0).shuffle(names)
    return {name: tensors[name].clone() for name in names}


def loaded(shapes, tensors, order="as registered", **arguments):
    """Return what a model with tensors of these shapes has after it was loaded."""
    model = module_of({name: torch.full(shape, torch.nan) for name, shape in shapes.items()})
    load_weights(model, arranged(tensors, order), **arguments)
    return model.state_dict()


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def assert_load_into_each_other(one, other, order):
    for file, model in ((one, other), (other, one)):
        assert equal(loaded({name: tensor.shape for name, tensor in model.items()}, file, order), model)


def randn(**shapes):
    generator = torch.Generator().manual_seed(1)
    return {name.replace("__", "."): torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize("order", ORDERS)
def test_fused_key_and_value(order):
    apart = randn(**{
        f"{i}__attention__{name}__{leaf}": (8, 8) if leaf == "weight" else (8,)
        for i in range(2) for name in ("query", "key", "value") for leaf in ("weight", "bias")
    })  # fmt: skip
    fused = {}
    for i in range(2):
        for leaf in ("weight", "bias"):
            fused[f"blocks.{i}.attn.q.{leaf}"] = apart[f"{i}.attention.query.{leaf}"]
            fused[f"blocks.{i}.attn.kv.{leaf}"] = torch.cat(
                [apart[f"{i}.attention.{n}.{leaf}"] for n in ("key", "value")]
            )
    assert_load_into_each_other(apart, fused, order)


@pytest.mark.parametrize("order", ORDERS)
def test_fused_weights_beside_biases_of_query_and_value(order):
    apart, fused = {}, {}
    for i in range(2):
        parts = randn(query=(8, 8), key=(8, 8), value=(8, 8), q_bias=(8,), v_bias=(8,))
        apart |= {f"blocks.{i}.attention.{name}.weight": parts[name] + i for name in ("query", "key", "value")}
        apart |= {f"blocks.{i}.attention.{name}.bias": parts[f"{name[0]}_bias"] + i for name in ("query", "value")}
        fused[f"blocks.{i}.attn.qkv.weight"] = torch.cat([parts[name] + i for name in ("query", "key", "value")])
        fused |= {f"blocks.{i}.attn.{name}_bias": parts[f"{name}_bias"] + i for name in "qv"}
    assert_load_into_each_other(apart, fused, order)


@pytest.mark.parametrize("order", ORDERS)
def test_fused_queries_of_more_heads_than_keys_and_values(order):
    apart, fused = {}, {}
    for i in range(2):
        parts = [torch.randn(rows, 12) for rows in (12, 4, 4)]
        apart |= {f"layers.{i}.attn.{name}_proj.weight": part for name, part in zip("qkv", parts, strict=True)}
        fused[f"layers.{i}.attention.qkv.weight"] = torch.cat(parts)
    assert_load_into_each_other(apart, fused, order)


@pytest.mark.parametrize("order", ORDERS)
def test_fused_layer_that_is_a_convolution(order):
    apart = randn(attn__q__weight=(6, 6), attn__k__weight=(6, 6), attn__v__weight=(6, 6))
    fused = {"attention.qkv.weight": torch.cat(list(apart.values()))[:, :, None, None]}
    for names, file in (({"attention.qkv.weight": (18, 6, 1, 1)}, apart), (dict.fromkeys(apart, (6, 6)), fused)):
        with pytest.raises(CheckpointError):  # in some, query, key and value of each head are side by side
            loaded(names, file, order)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ones", [(1, 1), (1,)])
def test_a_convolution_is_not_reshaped_to_a_transposed_matrix(ones, order):
    """Its elements would be in another order; the other way round, a transposed matrix becomes a convolution."""
    file = randn(a__weight=(8, 4), a__bias=(8,))
    convolution = file | {"a.weight": file["a.weight"].view(8, 4, *ones)}
    with pytest.raises(CheckpointError, match=r"b\.weight"):
        loaded({"b.weight": (4, 8), "b.bias": (8,)}, convolution, order)
    transposed = {"b.weight": file["a.weight"].mT, "b.bias": file["a.bias"]}
    found = loaded({name: tensor.shape for name, tensor in convolution.items()}, transposed, order)
    assert equal(found, convolution)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ones", [(), (1, 1)])
def test_a_convolution_beside_transposed_matrices_is_not_transposed(ones, order):
    file = randn(b__0__fc__weight=(8, 4), b__0__fc__bias=(8,), b__0__mix__weight=(4, 4, *ones), b__0__mix__bias=(4,))
    model = {name.replace("b.", "h."): tensor for name, tensor in file.items()}
    model["h.0.fc.weight"], model["h.0.mix.weight"] = file["b.0.fc.weight"].mT, file["b.0.mix.weight"].view(4, 4, 1, 1)
    shapes = {name: tensor.shape for name, tensor in model.items()}
    if ones:
        assert equal(loaded(shapes, file, order), model)
    else:  # a square matrix may be either way round
        with pytest.raises(CheckpointError, match=r"h\.0\.mix\.weight"):
            loaded(shapes, file, order)


def _turned(tensors, kept=()):
    return {name: t if name in kept or t.dim() != 2 else t.mT.contiguous() for name, t in tensors.items()}


def _blocks(bias):
    """Return two blocks whose attention is square, under names that say nothing of their place in the block."""
    sizes = {"q": (8, 8), "k": (8, 8), "up": (12, 8), "down": (8, 12)}
    tensors = {f"layers.{i}.{name}.weight": torch.randn(size) for i in range(2) for name, size in sizes.items()}
    if bias:
        tensors |= {name.replace("weight", "bias"): torch.randn(len(t)) for name, t in tensors.items()}
    return tensors | {"embed.weight": torch.randn(50, 8)}


_WORDS = {"layers": "h", "q.": "query.", "k.": "key.", "up": "fc1", "down": "fc2", "embed": "wte"}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("words", [{}, {"layers": "h"}, _WORDS], ids=["same", "another list", "other"])
def test_a_file_whose_matrices_are_the_other_way_round(words, bias, order):
    """Oblong ones show it, and the square ones of its blocks follow; without equal names or biases none does."""
    right = _blocks(bias)
    other = _turned(right, ["embed.weight"])
    for model, turned in ((right, other), (other, right)):
        file = {}
        for name, tensor in turned.items():
            for old, new in words.items():
                name = name.replace(old, new)
            file[name] = tensor
        shapes = {name: tensor.shape for name, tensor in model.items()}
        if words and not bias:
            with pytest.raises(AmbiguousAlignmentError, match=r"(fc1|fc2|up|down)"):
                loaded(shapes, file, order)
            rules = [
                {"from": f"h.*.{words.get(new, new)}.weight", "to": f"layers.*.{new}.weight", "transpose": True}
                for new in ("up", "down")
            ]
            assert equal(loaded(shapes, file, order, rules=rules), model)
        else:
            assert equal(loaded(shapes, file, order), model)


@pytest.mark.parametrize("kept", [(), ("layers.0.up.weight",)], ids=["an embedding", "a mixed file"])
def test_square_matrices_whose_kind_does_not_agree_are_asked_for(kept):
    right = _blocks(bias=False) | {"square.weight": torch.randn(8, 8)}
    file = _turned(right, ["embed.weight", "square.weight", *kept])
    shapes = {name: tensor.shape for name, tensor in right.items()}
    with pytest.raises(AmbiguousAlignmentError, match=r"whether the square .* are transposed") as error:
        loaded(shapes, file)
    rules = eval(re.search(r"give rules=(\[.*?\])", str(error.value))[1])
    assert len(rules) == (3 if kept else 1)
    rules = [(r["from"], r["to"]) if r["from"] == "square.weight" else r for r in rules]
    assert equal(loaded(shapes, file, rules=rules), right)


def test_an_equal_name_of_another_size_is_no_other_layer():
    right = randn(a__weight=(9, 4), b__weight=(5, 3), c__bias=(7,))
    file = right | {"a.weight": right["b.weight"], "b.weight": right["a.weight"]}
    with pytest.raises(CheckpointError, match=r"a\.weight \(9x4 in the model, 5x3 in the file\)"):
        loaded({name: tensor.shape for name, tensor in right.items()}, file)


def test_vectors_of_another_rank():
    file = {f"stages.{i}.grn.{name}": torch.randn(5 + i) for i in range(2) for name in ("weight", "bias")}
    names = {f"layers.{i}.mlp.grn.{name}": (1, 1, 1, 5 + i) for i in range(2) for name in ("gamma", "beta")}
    got = loaded(names, file)
    for name, tensor in got.items():
        old = name.replace("layers", "stages").replace("mlp.", "").replace("gamma", "weight").replace("beta", "bias")
        assert torch.equal(tensor.flatten(), file[old])


@pytest.mark.parametrize("order", ORDERS)
def test_the_encoder_of_a_masked_autoencoder(order):
    sizes = {"attn.proj.weight": (8, 8), "mlp.fc1.weight": (12, 8), "mlp.fc2.weight": (8, 12), "norm1.weight": (8,)}
    names = {f"{i}.{leaf}": size for i in range(2) for leaf, size in sizes.items()}
    file = randn(**{f"{side}.{name}": size for side in ("vit.layer", "decoder.layers") for name, size in names.items()})
    truth = {name.replace("vit.layer", "blocks"): tensor for name, tensor in file.items() if "decoder" not in name}
    shapes = {name: tensor.shape for name, tensor in truth.items()}
    with pytest.raises(CheckpointError):
        loaded(shapes, file)
    assert equal(loaded(shapes, file, order, allow_unexpected="decoder.*"), truth)


def test_what_may_be_left_over_is_loaded_if_the_model_has_it():
    net = {"conv.weight": (4, 3, 3, 3), "head.weight": (2, 4), "head.bias": (2,)}
    file = {name: torch.randn(shape) for name, shape in net.items()}
    assert equal(loaded(net, file, allow_unexpected=["head.*", "conv.*"]), file)
