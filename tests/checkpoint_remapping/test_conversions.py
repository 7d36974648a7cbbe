"""`find_conversion`: models of two projects have equal outputs, and whatever is not of the family has no conversion."""

import itertools

import pytest
import torch
from torch import nn

from lightning_tricks import remap_keys
from lightning_tricks.checkpoint_remapping import AmbiguousAlignmentError, RemapRule
from lightning_tricks.checkpoint_remapping.core.conversions.conversion import find_conversion
from lightning_tricks.checkpoint_remapping.core.conversions.tables import FAMILIES
from tests.checkpoint_remapping.other_projects import ARCHITECTURES
from tests.checkpoint_remapping.pairs import CONTAINERS, PAIRS, TOLERANCE, Pair, model, unset

# Whose names are converted into each other's
_GROUPS = [
    ("Llama", "HF", "lit-gpt", "Baichuan", "Phi-3"),
    ("Llama", "Meta", "torchtune"),
    ("Phi-3", "HF", "Llama"),
    ("Qwen3", "HF", "lit-gpt"),
    ("CLIP", "HF", "OpenAI"),
    ("CLIP's images", "HF", "OpenAI"),
    ("Whisper", "HF", "OpenAI"),
]
CONVERTED = {Pair(name, *pair) for name, *which in _GROUPS for pair in itertools.permutations(which, 2)}


def _shapes_of(tensors):
    """Return the shapes of the tensors of a model, or among others, by name."""
    tensors = tensors.state_dict() if isinstance(tensors, nn.Module) else tensors
    return {name: tuple(value.shape) for name, value in tensors.items() if isinstance(value, torch.Tensor)}


def converted(matching, state):
    rules = [
        RemapRule(
            *(names if len(names) > 1 else names[0] for names in (m.sources, m.targets)),
            m.transpose,
            m.shape,
            sizes=m.sizes,
        )
        for m in matching.matches
    ]
    used = matching.sources()
    return dict(remap_keys({name: value for name, value in state.items() if name in used}, [rules]))


def difference(pair, container="sorted"):
    """Return how much outputs differ after a conversion; None where there is none."""
    source, target = model(pair.architecture, pair.origin), unset(pair.architecture, pair.target)
    state = CONTAINERS[container](source.state_dict())
    try:
        found = find_conversion(_shapes_of(state), _shapes_of(target))
    except AmbiguousAlignmentError:  # of one architecture, in another order
        found = None
    if found is None:
        return None
    target.load_state_dict(converted(found, state), strict=False)
    return ARCHITECTURES[pair.architecture].difference(pair.origin, source, pair.target, target)


@pytest.mark.parametrize("pair", sorted(CONVERTED), ids=str)
def test_outputs_agree(pair):
    assert all(difference(pair, container) < TOLERANCE for container in CONTAINERS)


def test_nothing_else_is_converted():
    assert [str(pair) for pair in PAIRS if pair not in CONVERTED and difference(pair) is not None] == []


def shapes(architecture, project):
    return _shapes_of(model(architecture, project))


REPRESENTATIVES = sorted({(name, *sorted((one, other))) for name, one, other in CONVERTED})


@pytest.mark.parametrize(("architecture", "one", "other"), REPRESENTATIVES)
def test_a_changed_member_does_not_fit(architecture, one, other):
    source, target = shapes(architecture, one), shapes(architecture, other)
    name = next(name for name in source if ".0." in name and name.endswith("weight") and len(source[name]) > 1)
    another = {name: (*source[name][:-1], source[name][-1] + 1)}
    without = {key: shape for key, shape in source.items() if key != name}
    renumbered = {key: shape for key, shape in source.items() if ".1." not in key}
    for changed in (source | another, without, renumbered, source | {"extra_norm.weight": (32,)}):
        assert find_conversion(changed, target) is None
        assert find_conversion(target, changed) is None
    assert find_conversion(source, target).matches[0].reason.startswith("the conversion of ")


def test_one_more_norm_and_another_order_of_layers():
    source, target = shapes("CLIP's images", "HF"), shapes("CLIP's images", "OpenAI")
    assert find_conversion(source, target | {f"transformer.resblocks.{i}.ln_3.weight": (32,) for i in range(2)}) is None
    for old, new in (("layers.1", "layers.3"), ("layers.", "layers.1")):
        renumbered = {name.replace(old, new): shape for name, shape in source.items()}
        assert renumbered != source
        assert find_conversion(renumbered, target) is None


def test_what_a_model_may_lack_remains():
    source = shapes("Llama", "HF")
    target = {name: shape for name, shape in shapes("Llama", "Phi-3").items() if name != "lm_head.weight"}
    found = find_conversion(source, target)
    assert found.targets() == set(target)
    assert source.keys() - found.sources() == {"lm_head.weight"}


@pytest.mark.parametrize("fused", ["lit-gpt by heads", "InternLM2"])
def test_matrices_that_are_fused_head_by_head_are_not_converted(fused):
    for project in ("HF", "Meta", "lit-gpt", "Baichuan", "torchtune"):
        assert find_conversion(shapes("Llama", fused), shapes("Llama", project)) is None
        assert find_conversion(shapes("Llama", project), shapes("Llama", fused)) is None


def rotated_otherwise(name, heads, size, width):
    """Return rules for the official permutation of a query or key: from neighbors to halves of each head."""
    parts = (f"{name}.even", f"{name}.odd")
    return [
        RemapRule(name, parts, shape=(heads, size // 2, 2, width), dim=2),
        [RemapRule(part, part, shape=(heads, size // 2, width)) for part in parts],
        RemapRule(parts, name, dim=1),
        RemapRule(name, name, shape=(heads * size, width)),
    ]


def test_the_order_of_rotations_is_no_matter_of_names():
    """Meta rotates neighbors, Hugging Face halves; names and shapes don't tell the number of heads that it takes."""
    for pair in itertools.product(("Meta", "torchtune"), ("HF", "lit-gpt", "Phi-3")):
        for one, other in (pair, pair[::-1]):
            with pytest.raises(AmbiguousAlignmentError, match=r"Llama in two projects.*a rename or a split is not"):
                find_conversion(shapes("Llama", one), shapes("Llama", other))
    source, target = model("Llama", "Meta"), unset("Llama", "HF")
    words = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj"}
    rules = [
        {f"layers.*.attention.{old}.weight": f"model.layers.*.self_attn.{new}.weight" for old, new in words.items()},
        {f"layers.*.feed_forward.{old}.weight": f"model.layers.*.mlp.{new}_proj.weight"
         for old, new in (("w1", "gate"), ("w2", "down"), ("w3", "up"))},
        {"layers.*.attention_norm.weight": "model.layers.*.input_layernorm.weight"},
        {"layers.*.ffn_norm.weight": "model.layers.*.post_attention_layernorm.weight"},
        {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"},
    ]  # fmt: skip
    for i, name in itertools.product(range(3), "qk"):
        rules += rotated_otherwise(f"model.layers.{i}.self_attn.{name}_proj.weight", 4, 8, 32)
    target.load_state_dict(remap_keys(source.state_dict(), rules))
    outputs = [ARCHITECTURES["Llama"].outputs(*side) for side in (("Meta", source), ("HF", target))]
    torch.testing.assert_close(*outputs, atol=TOLERANCE, rtol=0)


def test_every_table_is_tested():
    tested = set()
    for pair in CONVERTED:
        found = find_conversion(shapes(pair.architecture, pair.origin), shapes(pair.architecture, pair.target))
        tested.add(found.matches[0].reason.removeprefix("the conversion of "))
    # The tower of texts is that of CLIP, and ConvNeXt is tested by timm's converter
    assert FAMILIES.keys() - tested == {"CLIP's texts", "ConvNeXt"}


@pytest.mark.parametrize("name", ["a." * 9999 + "weight", f"layers.{'9' * 9999}.attention.wq.weight", "weight", ""])
def test_names_that_are_no_models(name):
    assert find_conversion({name: (2, 2)}, shapes("Llama", "Meta")) is None
    assert find_conversion({}, {name: (2, 2)}) is None
