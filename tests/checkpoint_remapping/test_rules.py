"""`remap_keys` and its rules."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_tricks import load_weights
from lightning_tricks.checkpoint_remapping import CheckpointError, RemapRule, read_rules, remap_keys
from tests.small import cases


def ones(*names):
    return {name: torch.ones(1) for name in names}


def counted(*shape):
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


@cases(
    "rule, name, expected",
    (("fc", "head"), "fc.weight", "head.weight"),
    (("fc", "head"), "fc2.weight", "fc2.weight"),
    (("fc.weight", "head"), "fc.weight", "head"),
    (("module.", ""), "module.fc.weight", "fc.weight"),
    (("module", ""), "module.fc.weight", "fc.weight"),
    (("module.", ""), "net.module.weight", "net.module.weight"),
    (("*", "net.*"), "fc.weight", "net.fc.weight"),
    (("layer*.conv?.*", "blocks.*.c.*"), "layer1.0.conv2.weight", "blocks.1.0.c.weight"),
    (("*.gamma", "*.weight"), "norm.gamma", "norm.weight"),
    (("re:layer(\\d+)\\.(\\d+)", "stages.\\1.\\2"), "net.layer1.0.weight", "net.stages.1.0.weight"),
    ({"from": "a", "to": "b"}, "a.weight", "b.weight"),
    ({"a": "b", "b": "a"}, "b.weight", "a.weight"),
    (RemapRule("a", "b"), "a", "b"),
    ("wrappers", "net._orig_mod.module.fc.weight", "net.fc.weight"),
)
def test_names(rule, name, expected):
    remapped = remap_keys(ones(name), [rule])
    assert list(remapped) == [expected]
    assert remapped.renamed == ({name: expected} if expected != name else {})


def test_rules_follow_each_other_and_say_what_they_did():
    found = remap_keys(
        ones("module.fc.weight", "module.fc.total_ops", "module.aux.weight"),
        ["wrappers", ("fc", "head"), ("aux.*", None), ("nothing", "here")],
    )
    assert list(found) == ["head.weight"]
    assert found.renamed == {"module.fc.weight": "head.weight"}
    assert found.dropped == ["module.fc.total_ops", "module.aux.weight"]
    assert found.unmatched == ["nothing -> here"]
    assert remap_keys(ones("fc.weight"), ["wrappers"]).unmatched == ["wrappers"]


def test_a_list_inside_the_list_is_applied_at_once():
    swapped = [[("a", "b"), ("b", "a")]]
    assert list(remap_keys(ones("a.x", "b.x"), swapped)) == ["b.x", "a.x"]
    assert list(remap_keys(ones("a.x"), [("a", "b"), ("b", "a")])) == ["a.x"]


def test_collisions_name_both():
    with pytest.raises(CheckpointError, match=r"'b.w' and 'a.w' would both become 'b.w': drop or rename one"):
        remap_keys(ones("a.w", "b.w"), [("a", "b")])
    with pytest.raises(CheckpointError, match="turns the name 'a' into an empty one"):
        remap_keys(ones("a"), [("a", "")])


def test_shapes():
    weights = {"w": counted(2, 3), "v": counted(6)}
    found = remap_keys(weights, [RemapRule("w", None, transpose=True), {"from": "v", "to": "u", "shape": [3, 2, 1, 1]}])
    assert torch.equal(found["w"], weights["w"].T)
    assert torch.equal(found["u"], weights["v"].reshape(3, 2, 1, 1))
    assert found["u"].data_ptr() == weights["v"].data_ptr()
    with pytest.raises(CheckpointError, match=r"w \(2x3\) cannot be reshaped to 4x2"):
        remap_keys(weights, [RemapRule("w", "w", shape=(4, 2))])
    with pytest.raises(CheckpointError, match="has no two dimensions to transpose"):
        remap_keys(weights, [RemapRule("v", "v", transpose=True)])


def test_split_and_fuse_are_inverse():
    weights = {"l.0.qkv.weight": counted(6, 2), "l.0.qkv.bias": counted(6), "l.1.qkv.weight": counted(6, 2)}
    split = remap_keys(weights, [RemapRule("l.*.qkv.*", ("l.*.q.*", "l.*.k.*", "l.*.v.*"))])
    assert torch.equal(split["l.0.k.weight"], weights["l.0.qkv.weight"][2:4])
    fused = remap_keys(split, [RemapRule(("l.*.q.*", "l.*.k.*", "l.*.v.*"), "l.*.qkv.*")])
    assert list(fused) == list(weights)
    assert all(torch.equal(fused[name], value) for name, value in weights.items())
    assert fused.renamed["l.0.q.bias + l.0.k.bias + l.0.v.bias"] == "l.0.qkv.bias"
    assert split.renamed["l.0.qkv.bias"] == "l.0.q.bias + l.0.k.bias + l.0.v.bias"
    unequal = remap_keys({"kv": counted(5, 2)}, [RemapRule("kv", ("k", "v"), sizes=(2, 3))])
    assert [tuple(part.shape) for part in unequal.values()] == [(2, 2), (3, 2)]
    with pytest.raises(CheckpointError, match=r"kv \(5x2\) cannot be split into 2 parts"):
        remap_keys({"kv": counted(5, 2)}, [RemapRule("kv", ("k", "v"))])
    words = r"q cannot become qkv: the other parts of q \+ k \+ v -> qkv are missing"
    with pytest.raises(CheckpointError, match=words):
        remap_keys({"q": counted(2)}, [RemapRule(("q", "k", "v"), "qkv")])
    with pytest.raises(CheckpointError, match=r"cannot be fused"):
        remap_keys({"q": counted(2, 2), "k": counted(2)}, [RemapRule(("q", "k"), "qk")])


@cases(
    "rules, error, words",
    ("fc", TypeError, "rules must be a list of rules, got 'fc'"),
    ([5], TypeError, "a rule must be a RemapRule, a dict, a pair"),
    ([("", "a")], ValueError, "a source must not be empty"),
    ([(1, "a")], TypeError, "must be strings, got 1"),
    ([("re:(", "a")], ValueError, "is not a valid regular expression"),
    ([("re:a(b)", r"\2")], ValueError, "the target does not fit the source: invalid group reference 2"),
    ([("a", "*.b")], ValueError, r"the target has more '\*' than the source"),
    ([(("a", "b"), None)], ValueError, "several sources are fused into one target"),
    ([RemapRule], TypeError, "a rule must be a RemapRule"),
)
def test_what_is_no_rule(rules, error, words):
    with pytest.raises(error, match=words):
        remap_keys(ones("a"), rules)


def test_rules_from_a_file():
    Path("rules.yaml").write_text("- wrappers\n- {from: fc, to: head}\n- - {from: a, to: b}\n  - {from: b, to: a}\n")
    found = remap_keys(ones("module.fc.w", "module.a.w", "module.b.w"), read_rules("rules.yaml"))
    assert list(found) == ["head.w", "b.w", "a.w"]
    for text in ("- {from: [1]}\n", "just words"):
        Path("rules.yaml").write_text(text)
        with pytest.raises(CheckpointError, match=r"rules.yaml is not a file of rules"):
            read_rules("rules.yaml")


def test_a_module_of_its_own_name_stays():
    """`module` goes only where no two names become one by it."""
    assert list(remap_keys(ones("a.module.w", "a.w"), ["wrappers"])) == ["a.module.w", "a.w"]
    assert list(remap_keys(ones("module._orig_mod.a.w"), ["wrappers"])) == ["a.w"]


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.body = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 10)


WRAPPERS = st.sampled_from(["module", "_orig_mod", "_forward_module", "_fsdp_wrapped_module"])
PREFIXES = st.sampled_from(["model", "net", "student", "backbone", "encoder_q", "averaged_model", "ema"])


@given(
    st.lists(WRAPPERS | PREFIXES, max_size=5),
    st.dictionaries(st.sampled_from(["stem", "body", "head", "stem.0", "body.1"]), WRAPPERS, max_size=3),
    st.booleans(),
)
@settings(max_examples=60)
@pytest.mark.trap("checkpoints: prefixes and wrappers in the wild, at any depth")
def test_any_stack_of_wrappers_loads_every_tensor(stack, inner, counters):
    original, other = Deep(), Deep()
    wrapped = {}
    for name, tensor in original.state_dict().items():
        for place, wrapper in inner.items():
            if name.startswith(f"{place}."):
                name = name.replace(f"{place}.", f"{place}.{wrapper}.", 1)
        wrapped[".".join([*stack, name])] = tensor
    if counters:
        wrapped[".".join([*stack, "total_ops"])] = torch.zeros(1)
        wrapped["n_averaged"] = torch.tensor(3)
    report = load_weights(other, wrapped)
    assert report.loaded == report.total == len(original.state_dict())
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in original.state_dict().items())
