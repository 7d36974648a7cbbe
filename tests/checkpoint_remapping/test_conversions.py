"""`find_conversion`: networks of two projects get each other's values, and what is not of the family no conversion."""

import contextlib
import itertools
import re

import pytest
import torch
import transformers

from lightning_tricks.checkpoint_remapping import AmbiguousAlignmentError, RemapRule, remap_keys
from lightning_tricks.checkpoint_remapping.core.matching.conversion import find_conversion
from lightning_tricks.checkpoint_remapping.core.matching.conversion_tables import FAMILIES
from lightning_tricks.checkpoint_remapping.core.matching.synonyms import is_computed
from tests.checkpoint_remapping.other_projects import (
    CONTAINERS,
    HIDDEN,
    LAYERS,
    PAIRS,
    VOCABULARY,
    Pair,
    is_as_wanted,
    model,
    unset,
)

# Whose names are converted into each other's
_GROUPS = [
    ("Llama", "HF", "lit_gpt", "Baichuan", "Phi3"),
    ("Llama", "Meta", "torchtune"),
    ("Qwen3", "HF", "lit_gpt"),
    ("CLIP", "HF", "OpenAI"),
    ("CLIP's images", "HF", "OpenAI"),
    ("Whisper", "HF", "OpenAI"),
]
CONVERTED = {Pair(name, *pair) for name, *which in _GROUPS for pair in itertools.permutations(which, 2)}

_SIZES = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
_DECODER = {
    "vocab_size": VOCABULARY, "intermediate_size": 48, "tie_word_embeddings": False, "pad_token_id": 0, **_SIZES
}  # fmt: skip
_TOWER = {"intermediate_size": 64, **_SIZES}
_TRANSFORMERS = {
    ("Llama", "HF"): ("LlamaForCausalLM", _DECODER),
    ("Llama", "Phi3"): ("Phi3ForCausalLM", _DECODER),
    ("Qwen3", "HF"): ("Qwen3ForCausalLM", {"num_key_value_heads": 2, "head_dim": 8, **_DECODER}),
    ("CLIP", "HF"): (
        "CLIPModel",
        {
            "text_config": {"vocab_size": VOCABULARY, "max_position_embeddings": 12, "eos_token_id": 2, **_TOWER},
            "vision_config": {"image_size": 16, "patch_size": 4, **_TOWER},
            "projection_dim": 24,
        },
    ),
    ("CLIP's images", "HF"): (
        "CLIPVisionModelWithProjection", {"image_size": 16, "patch_size": 4, "projection_dim": 24, **_TOWER}
    ),
    ("Whisper", "HF"): (
        "WhisperForConditionalGeneration",
        {
            "vocab_size": VOCABULARY, "num_mel_bins": 8, "d_model": HIDDEN, "max_source_positions": 10,
            "max_target_positions": 12, "pad_token_id": 0,
            **{f"{side}_layers": LAYERS for side in ("encoder", "decoder")},
            **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
            **{f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")},
        },
    ),
}  # fmt: skip


def shapes(architecture, project):
    return {name: tuple(tensor.shape) for name, tensor in model(architecture, project).state_dict().items()}


@pytest.mark.parametrize(("architecture", "project"), _TRANSFORMERS)
def test_the_names_are_those_of_transformers(architecture, project):
    name, arguments = _TRANSFORMERS[architecture, project]
    kind = getattr(transformers, name)
    with torch.device("meta"):
        real = kind(kind.config_class(**arguments)).state_dict()
    found = {name: tuple(tensor.shape) for name, tensor in real.items()}
    assert {name: shape for name, shape in found.items() if not is_computed(name, shape)} == shapes(
        architecture, project
    )


def converted(pair, container="sorted"):
    """Whether a conversion gives each tensor its values; None where there is none."""
    state = CONTAINERS[container](model(pair.architecture, pair.origin).state_dict())
    found = find_conversion(
        {name: tuple(tensor.shape) for name, tensor in state.items()}, shapes(pair.architecture, pair.target)
    )
    if found is None:
        return None
    rules = [
        RemapRule(
            *(names if len(names) > 1 else names[0] for names in (m.sources, m.targets)),
            m.transpose,
            m.shape,
            sizes=m.sizes,
        )
        for m in found.matches
    ]
    target, used = unset(pair.architecture, pair.target), found.sources()
    made = remap_keys({name: value for name, value in state.items() if name in used}, [rules])
    target.load_state_dict(dict(made), strict=False)
    return is_as_wanted(pair, target)


@pytest.mark.parametrize("pair", sorted(CONVERTED), ids=str)
def test_each_tensor_gets_its_values(pair):
    assert all(converted(pair, container) for container in CONTAINERS)


def test_nothing_else_is_converted():
    found = []
    for pair in PAIRS:
        with contextlib.suppress(AmbiguousAlignmentError):  # of one architecture, in another order
            found += [pair] if converted(pair) is not None else []
    assert sorted(found) == sorted(CONVERTED)


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
    target = {name: shape for name, shape in shapes("Llama", "Phi3").items() if name != "lm_head.weight"}
    found = find_conversion(source, target)
    assert found.targets() == set(target)
    assert source.keys() - found.sources() == {"lm_head.weight"}


_QUERIES = {
    "HF": "model.layers.0.self_attn.q_proj.weight", "Meta": "layers.0.attention.wq.weight",
    "torchtune": "layers.0.attn.q_proj.weight",
}  # fmt: skip


def test_the_order_of_rotations_is_no_matter_of_names():
    """Meta rotates neighbors, Hugging Face halves; names and shapes don't tell the number of heads that it takes."""
    for pair in itertools.product(("Meta", "torchtune"), ("HF", "lit_gpt", "Phi3")):
        for one, other in (pair, pair[::-1]):
            with pytest.raises(AmbiguousAlignmentError, match=r"Llama in two projects.*a split is not") as error:
                find_conversion(shapes("Llama", one), shapes("Llama", other))
            if "HF" in pair:
                formula = re.search(r"here w = (.*?) for each", str(error.value))[1]
                w, wanted = (model("Llama", side).state_dict()[_QUERIES[side]] for side in (one, other))
                assert not torch.equal(w, wanted)
                assert torch.equal(eval(formula, {"w": w, "heads": 4}), wanted)


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
