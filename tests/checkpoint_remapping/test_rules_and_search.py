"""`load_weights(rules=...)`: rules pin what they name, the rest is matched as without them."""

import ast
import contextlib
import re
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_tricks import load_weights
from lightning_tricks._shared.text import render_text
from lightning_tricks.checkpoint_remapping import AmbiguousAlignmentError, CheckpointError, RemapRule
from lightning_tricks.checkpoint_remapping.core.matching.matches import Proposals
from tests.checkpoint_remapping.models import module_of, randomized
from tests.small import cases


class TwoHeads(nn.Module):
    """A trunk and two heads of one shape, under any names."""

    def __init__(self, trunk, *heads, widths=(5, 4, 6)):
        super().__init__()
        for index, (old, new) in enumerate(pairwise(widths)):
            self.add_module(f"{trunk}{index}", nn.Linear(old, new))
        for name in heads:
            self.add_module(name, nn.Linear(widths[-1], 2))


def snapshot(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def unchanged(model, before):
    return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def assert_loaded(target, source):
    assert torch.equal(target.stem0.weight, source.trunk0.weight)
    assert torch.equal(target.stem1.bias, source.trunk1.bias)
    assert torch.equal(target.mu.weight, source.bar.weight)
    assert torch.equal(target.logvar.weight, source.foo.weight)
    assert torch.equal(target.logvar.bias, source.foo.bias)


RULES = {
    "a pair": [("bar", "mu")],
    "a dict": {"bar": "mu", "foo": "logvar"},
    "tensors": [("bar.weight", "mu.weight"), ("bar.bias", "mu.bias")],
    "a glob": [("bar.*", "mu.*")],
    "all of them": [("bar", "mu"), ("foo", "logvar"), ("trunk0", "stem0"), ("trunk1", "stem1"), "only"],
}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("in_file", [True, False])
def test_what_rules_leave_is_matched(rules, in_file):
    source, target = TwoHeads("trunk", "foo", "bar"), TwoHeads("stem", "mu", "logvar")
    with pytest.raises(AmbiguousAlignmentError):
        load_weights(target, source.state_dict())
    if in_file:
        lines = [{"from": k, "to": v} for k, v in rules.items()] if isinstance(rules, dict) else rules
        lines = [line if isinstance(line, str | dict) else {"from": line[0], "to": line[1]} for line in lines]
        Path("rules.yaml").write_text("".join(f"- {line}\n" for line in lines).replace("'", '"'))
        rules = "rules.yaml"
    report = load_weights(target, source.state_dict(), rules=rules)
    assert (report.loaded, report.missing, report.unexpected) == (8, [], [])
    assert_loaded(target, source)
    assert report.renamed["bar.weight"] == "mu.weight"
    reasons = {match.targets[0]: match.reason for match in report.alignment.matches}
    if "only" not in (RULES["all of them"] if rules == "rules.yaml" else rules):
        assert reasons["mu.weight"] == "a rule"
        assert "rule" not in reasons["stem0.weight"]


@pytest.mark.parametrize("wrap", ["module._orig_mod.", "net.module."])
@pytest.mark.parametrize("written", ["as in the file", "without wrappers"])
def test_rules_see_the_names_of_the_file_and_those_in_messages(wrap, written):
    source, target = TwoHeads("trunk", "foo", "bar"), TwoHeads("stem", "mu", "logvar")
    file = {f"{wrap}{name}": value for name, value in source.state_dict().items()}
    clean = wrap.replace("module.", "").replace("_orig_mod.", "")
    prefix = wrap if written == "as in the file" else clean
    report = load_weights(target, file, rules=[(f"{prefix}bar", "mu"), (f"{prefix}foo", "logvar")])
    assert report.loaded == 8
    assert_loaded(target, source)
    assert report.renamed[f"{wrap}bar.weight"] == "mu.weight"


@pytest.mark.parametrize("target_name", ["mu", "_orig_mod.mu"])
def test_a_compiled_model_and_a_submodule(target_name):
    source, inner = TwoHeads("trunk", "foo", "bar"), TwoHeads("stem", "mu", "logvar")
    compiled = torch.compile(inner, backend="eager")
    assert load_weights(compiled, source.state_dict(), rules=[("bar", target_name)]).loaded == 8
    assert_loaded(inner, source)
    holder = nn.ModuleDict({"encoder": TwoHeads("stem", "mu", "logvar"), "other": nn.Linear(2, 2)})
    load_weights(holder, source.state_dict(), rules=[("bar", "mu")], submodule="encoder")
    assert_loaded(holder["encoder"], source)
    on_meta = TwoHeads("stem", "mu", "logvar").to("meta")
    load_weights(on_meta, source.state_dict(), rules=[("bar", "mu")])
    assert_loaded(on_meta, source)


def test_a_tensor_that_only_wrappers_tell_from_a_pinned_one_is_asked_about():
    source, target = TwoHeads("trunk", "foo", "bar"), TwoHeads("stem", "mu", "logvar")
    file = source.state_dict() | {f"module.mu.{leaf}": torch.ones(2, 6)[: 1 + i] for i, leaf in enumerate("ab")}
    with pytest.raises(CheckpointError, match=r"2 tensors are left over in the file: mu.a, mu.b"):
        load_weights(target, file, rules=[("bar", "mu"), ("foo", "logvar")])
    file = source.state_dict() | {"module.mu.weight": torch.ones(2, 6), "module.mu.bias": torch.ones(2)}
    with pytest.raises(CheckpointError, match=r"would both become 'mu.weight': drop or rename one of them"):
        load_weights(target, file, rules=[("bar", "mu"), ("foo", "logvar")])
    report = load_weights(target, file, rules=[("module.mu", None), ("bar", "mu"), ("foo", "logvar")])
    assert report.loaded == 8
    assert_loaded(target, source)


def test_only_these_rules():
    source, target = TwoHeads("trunk", "foo", "bar"), TwoHeads("stem", "mu", "logvar")
    before = snapshot(target)
    for rules in ([("bar", "mu"), "only"], "wrappers", None):
        with pytest.raises(CheckpointError):
            load_weights(target, source.state_dict(), rules=rules)
    report = load_weights(
        target, source.state_dict(), rules=[("bar", "mu"), "only"], allow_missing="*", allow_unexpected="*"
    )
    assert report.loaded == 2
    assert torch.equal(target.mu.weight, source.bar.weight)
    assert torch.equal(target.stem0.weight, before["stem0.weight"])
    with pytest.raises(ValueError, match='"only" must be the last of the rules'):
        load_weights(target, source.state_dict(), rules=["only", ("bar", "mu")])


@cases(
    "rules, words",
    ([("bar", "muu")], r"the rule bar -> muu makes muu.weight, muu.bias, which .*Did you mean 'mu.weight'"),
    ([("trunk0", "mu")], r"mu.weight \(2x6 in the model, 4x5 in the file\)"),
    ([("bar", "mu"), ("foo", "mu")], "'bar.weight' and 'foo.weight' would both become 'mu.weight'"),
    ([RemapRule("bar.weight", "mu.weight", transpose=True)], r"mu.weight \(2x6 in the model, 6x2 in the file\)"),
    ([("numbers", "mu.bias")], r"mu.bias \(torch.float32 in the model, torch.int8 in the file\)"),
)
def test_rules_that_do_not_fit_change_nothing(rules, words):
    source, target = TwoHeads("trunk", "foo", "bar"), TwoHeads("stem", "mu", "logvar")
    before = snapshot(target)
    file = source.state_dict() | {"numbers": torch.zeros(2, dtype=torch.int8)}
    with pytest.raises(CheckpointError, match=words):
        load_weights(target, file, rules=rules)
    assert unchanged(target, before)


def test_what_is_said_is_about_what_is_missing_and_names_a_rule_that_matches_nothing():
    """What is ambiguous and allowed to be missing is not named in place of what is not allowed."""
    source, target = TwoHeads("trunk", "foo", "bar"), TwoHeads("trunk", "mu", "logvar")
    report = load_weights(target, source.state_dict(), rules=[("bar", "mu"), ("bazz", "mu")])
    assert "the rule bazz -> mu matched nothing" in report.diagnosis
    assert "rules lead to mu.bias, mu.weight" in report.diagnosis
    target.extra = nn.Linear(9, 9)
    allowed = {"allow_missing": ["mu.*", "logvar.*"], "allow_unexpected": "*"}
    with pytest.raises(CheckpointError, match=r"2 tensors are missing in the file: extra.weight, extra.bias"):
        load_weights(target, source.state_dict(), **allowed)


def test_splits_fusions_and_buffers_beside_the_search():
    """What a rule splits is pinned; buffers and the rest are matched by themselves."""

    def attention(**outputs):
        net = nn.ModuleDict({name: nn.Linear(4, size) for name, size in outputs.items()})
        net.register_buffer("scale", torch.randn(3))
        return net

    fused, split = attention(fused=12, fc=7), attention(q=4, k=4, v=4, out=7)
    rules = [RemapRule("fused.*", ("q.*", "k.*", "v.*"))]
    report = load_weights(split, fused.state_dict(), rules=rules)
    assert report.loaded == report.total == 9
    assert torch.equal(split["k"].weight, fused["fused"].weight[4:8])
    assert torch.equal(split["out"].weight, fused["fc"].weight)
    assert torch.equal(split.scale, fused.scale)
    assert report.renamed["fused.bias"] == "q.bias + k.bias + v.bias"
    report.alignment.save("rules.yaml")
    again = attention(q=4, k=4, v=4, out=7)
    assert load_weights(again, fused.state_dict(), rules="rules.yaml").loaded == 9
    assert unchanged(again, snapshot(split))
    other = attention(fused=12, fc=7)
    load_weights(other, split.state_dict(), rules=[RemapRule(("q.*", "k.*", "v.*"), "fused.*")])
    assert unchanged(other, snapshot(fused))


@pytest.mark.parametrize("prefix", ["", "module.", "net."])
def test_a_saved_alignment_is_repeated_exactly(prefix):
    """Also what was left on both sides stays left."""
    source, target = TwoHeads("trunk", "foo", "bar"), TwoHeads("stem", "mu", "logvar")
    file = {f"{prefix}{name}": value for name, value in source.state_dict().items()}
    allowed = {"allow_missing": "*", "allow_unexpected": "*"}
    report = load_weights(target, file, **allowed)
    assert sorted(report.missing) == ["logvar.bias", "logvar.weight", "mu.bias", "mu.weight"]
    report.alignment.save("rules.yaml")
    assert Path("rules.yaml").read_text().endswith("- only\n")
    again = load_weights(target, file, rules="rules.yaml", **allowed)
    assert (again.missing, again.loaded, again.renamed) == (report.missing, report.loaded, report.renamed)
    pinned = load_weights(target, file, rules=[(f"{prefix}bar", "mu")])
    pinned.alignment.save("rules.yaml")
    assert load_weights(target, file, rules="rules.yaml").renamed == pinned.renamed
    applied = pinned.alignment.apply(file)
    assert torch.equal(applied["mu.weight"], source.bar.weight)


def test_the_message_about_what_is_ambiguous_can_be_pasted():
    """It names what is alike and nothing else, under wrappers' parts or not."""
    source, target = TwoHeads("trunk", "foo", "bar"), TwoHeads("stem", "mu", "logvar")
    inside = {f"net.{n.replace('foo', 'foo._orig_mod')}": value for n, value in source.state_dict().items()}
    for file, model in ((source.state_dict(), target), (inside, torch.compile(target, backend="eager"))):
        with pytest.raises(AmbiguousAlignmentError, match=r"which of (net\.)?bar, (net\.)?foo in") as error:
            load_weights(model, file)
        assert "trunk" not in str(error.value)
        assert "stem" not in str(error.value)
        rules = re.search(r"rules=(\[.*?\]) takes", str(error.value))[1]
        load_weights(model, file, rules=ast.literal_eval(rules))
        assert torch.equal(target.mu.weight, source.bar.weight)
        assert torch.equal(target.logvar.weight, source.foo.weight)


@pytest.mark.parametrize(("old", "new"), [("one", "other"), ("one.table", "other.weight"), ("in_one", "in_other")])
def test_rules_in_messages_fit_tensors_without_a_layer(old, new):
    sides = [
        {"trunk.weight": torch.randn(4, 5)}
        | {f"{name}{i}{'_weight' if '_' in name else ''}": torch.randn(4, 4) for i in "ab"}
        for name in (old, new)
    ]
    net = module_of(sides[1])
    with pytest.raises(AmbiguousAlignmentError) as error:
        load_weights(net, sides[0])
    rules = ast.literal_eval(re.search(r"rules=(\[.*?\]) takes", str(error.value))[1])
    with contextlib.suppress(AmbiguousAlignmentError):
        load_weights(net, sides[0], rules=rules)
        return
    report = load_weights(net, sides[0], rules=rules, allow_missing="*", allow_unexpected="*")
    assert report.loaded == 2


@pytest.mark.parametrize("ending", [[], ["only"]])
def test_matches_name_what_is_in_the_file_also_where_a_rule_changed_it(ending):
    net = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 3)})
    file = {f"fc.{old}.{tensor}": value for old in "ab" for tensor, value in nn.Linear(2, 3).state_dict().items()}
    report = load_weights(net, file, rules=[{"fc.a": "b", "fc.b": "a"}, *ending])
    exchanged = {"fc.a.weight": "b.weight", "fc.a.bias": "b.bias", "fc.b.weight": "a.weight", "fc.b.bias": "a.bias"}
    assert {match.sources[0]: match.targets[0] for match in report.alignment.matches} == exchanged == report.renamed
    assert {match.reason for match in report.alignment.matches} == {"a rule"}
    assert "fc.a.weight" in render_text(report.alignment.report())
    applied = report.alignment.apply(file)
    assert all(torch.equal(applied[new], file[old]) for old, new in exchanged.items())
    assert all(torch.equal(net.state_dict()[new], file[old]) for old, new in exchanged.items())


def test_the_parts_of_a_tensor_that_rules_fuse_are_named():
    file = {"a.weight": torch.zeros(2, 3), "b.weight": torch.ones(2, 3), "c.bias": torch.zeros(4)}
    report = load_weights(nn.Linear(3, 4), file, rules=[(("a.weight", "b.weight"), "weight"), ("c", "")])
    assert [match.sources for match in report.alignment.matches] == [("a.weight", "b.weight"), ("c.bias",)]


class Blocks(nn.Module):
    """Blocks of two norms beside layers of their own sizes, in numbered lists."""

    def __init__(self, name: str, *layers: str) -> None:
        super().__init__()
        kinds = (lambda: nn.Linear(4, 8), lambda: nn.Linear(8, 4), lambda: nn.LayerNorm(4), lambda: nn.LayerNorm(4))
        blocks = ({layer: kind() for layer, kind in zip(layers, kinds, strict=True)} for _ in range(3))
        self.add_module(name, nn.ModuleList(map(nn.ModuleDict, blocks)))


def test_a_rule_is_evidence_against_equal_guesses_in_other_blocks():
    source = randomized(Blocks("blocks", "fc1", "fc2", "norm1", "norm2"))
    target = Blocks("layers", "linear1", "linear2", "ln_1", "ln_2")
    load_weights(target, source.state_dict())
    assert torch.equal(target.layers[1].ln_1.weight, source.blocks[1].norm1.weight)
    with pytest.raises(AmbiguousAlignmentError, match=r"blocks\.1\.norm1, blocks\.1\.norm2 in the checkpoint"):
        load_weights(target, source.state_dict(), rules=[("blocks.0.norm1", "layers.0.ln_2")])
    load_weights(target, source.state_dict(), rules=[("blocks.*.norm1.*", "layers.*.ln_2.*")])
    assert torch.equal(target.layers[1].ln_1.weight, source.blocks[1].norm2.weight)
    report = load_weights(target, source.state_dict(), rules=[("blocks.0.norm1", "layers.0.ln_1")])
    assert report.loaded == report.total


def test_a_rule_for_a_block_that_is_counted_from_the_other_end_is_evidence_for_the_rest():
    file = {f"dec.{i}.{layer}": value for i in range(4) for layer, value in nn.Linear(4, 9).state_dict().items()}
    net = nn.ModuleDict({"up": nn.ModuleList(nn.Linear(4, 9) for _ in range(4))})
    with pytest.raises(AmbiguousAlignmentError):
        load_weights(net, file, rules=[("dec.3", "up.0")])
    load_weights(net, file, rules=[{f"dec.{3 - i}": f"up.{i}" for i in range(4)}])
    assert torch.equal(net["up"][1].weight, file["dec.2.weight"])


@cases(
    "one, other, orders",
    ("a.wq", "a.q_proj", ("rotary pairs of neighbors", "rotary halves of each head")),
    ("a.query_key_value", "a.qkv", ("query, key and value head by head", "query, key and value one after another")),
)
@pytest.mark.parametrize("turn", [1, -1])
def test_another_order_of_elements_is_said_instead_of_a_rule(one, other, orders, turn):
    (one, other), orders = (one, other)[::turn], orders[::turn]
    rest = {"b.weight": torch.zeros(3, 6)}
    source, net = (
        {f"{one}.weight": torch.rand(12, 6), **rest},
        module_of({f"{other}.weight": torch.zeros(12, 6), **rest}),
    )
    with pytest.raises(CheckpointError, match=f"{one}.weight has {orders[0]}, {other}.weight has {orders[1]}") as error:
        load_weights(net, source)
    assert ("rules=[" in str(error.value)) == ("if the model has rotary embeddings" in str(error.value))
    report = load_weights(net, source, rules=[(one, other)])
    assert "rules rename tensors that are stored in another order" in report.diagnosis
    w, heads = source[f"{one}.weight"], 2
    there = eval(re.search(r"w = (.*?) for each", report.diagnosis)[1], {"w": w, "heads": heads})
    load_weights(net, {f"{other}.weight": there, **rest})
    back = re.search(r"w = (.*?) for each", load_weights(
        module_of({f"{one}.weight": w, **rest}), {f"{other}.weight": w, **rest}, rules=[(other, one)]
    ).diagnosis)[1]  # fmt: skip
    assert not torch.equal(there, w)
    assert torch.equal(eval(back, {"w": there, "heads": heads}), w)


def test_a_proposed_rule_fits_the_layout():
    """A rule that leads to a tensor of another shape would only be refused."""
    file = {name: torch.randn(9, 5, 1, 1) for name in ("foo.weight", "bar.weight")}
    net = nn.ModuleDict({name: nn.Linear(5, 9, bias=False) for name in ("mu", "logvar")})
    rules: list = []
    for _ in range(2):
        with contextlib.suppress(CheckpointError):
            assert load_weights(net, file, rules=rules).loaded == 2
            return
        with pytest.raises(CheckpointError) as error:
            load_weights(net, file, rules=rules)
        rules += ast.literal_eval(re.search(r"rules=(\[.*?\]) takes", str(error.value))[1])
    assert load_weights(net, file, rules=rules).loaded == 2


@cases(
    "shape, wanted, how",
    ((3, 4), (4, 3), {"transpose": True}),
    ((1, 4), (4,), {"shape": [4]}),
    ((3, 4), (3, 4, 1, 1), {"shape": [3, 4, 1, 1]}),
    ((2, 3, 4), (4, 3, 2), None),
    ((3, 4), (5, 4), None),
)
def test_a_rule_for_another_layout_is_proposed_where_there_is_one(shape, wanted, how):
    found = Proposals({"a.weight": shape}, {"b.weight": wanted}).for_layers(["a"], ["b"])
    assert found == (how and {"from": "a.weight", "to": "b.weight", **how})


def test_a_rule_for_a_layer_speaks_for_its_block():
    """Where blocks are counted from the other end, the layers without a rule are not taken in the order of numbers."""
    leaves = {"conv.weight": (4, 4), "norm.weight": (4,), "norm.bias": (4,)}
    wanted = {f"layers.{i}.{leaf}": torch.randn(size) for i in range(4) for leaf, size in leaves.items()}
    state = {
        f"gada.{3 - i}.{leaf}".replace("conv", "guvu").replace("norm", "zaba"): wanted[f"layers.{i}.{leaf}"].clone()
        for i in range(4)
        for leaf in leaves
    }
    net = module_of({name: torch.zeros_like(tensor) for name, tensor in wanted.items()})
    rules = [(f"gada.{3 - i}.guvu", f"layers.{i}.conv") for i in range(4)]
    with pytest.raises(CheckpointError, match="zaba"):
        load_weights(net, state, rules=rules)
    load_weights(net, state, rules=[*rules, *((f"gada.{3 - i}.zaba", f"layers.{i}.norm") for i in range(4))])
    assert unchanged(net, wanted)


_ATTENTION = {
    "q.weight": (16, 16),
    "k.weight": (8, 16),
    "v.weight": (8, 16),
    "q.bias": (16,),
    "k.bias": (8,),
    "v.bias": (8,),
}
_GATED = {"gate_proj.weight": (24, 16), "up_proj.weight": (24, 16)}
_NAME, _NOTHING = "as its name says", "but nothing says"


def _turned(parts):
    return torch.cat([tensor.T if tensor.dim() > 1 else tensor for tensor in parts], -1)


@pytest.mark.parametrize("is_join", [False, True])
@cases(
    "parts, order, whole, join, said",
    (_ATTENTION, "kqv", "kqv", torch.cat, _NAME),
    (_ATTENTION, "vk", "vk_proj", torch.cat, _NAME),
    (_ATTENTION, "qkv", "W_pack", torch.cat, _NOTHING),
    (_ATTENTION, "kqv", "kqv", _turned, _NAME),
    (_GATED, ["gate_proj", "up_proj"], "gate_up_proj", torch.cat, _NAME),
    (_GATED, ["up_proj", "gate_proj"], "up_gate", torch.cat, _NAME),
    (_GATED, ["gate_proj", "up_proj"], "w12", torch.cat, _NOTHING),
    ({"w1.weight": (4, 8), "w3.weight": (4, 8)}, ["w1", "w3"], "w13", torch.cat, _NAME),
    ({f"fc.{i}.bias": (4,) for i in range(3)}, ["fc.0", "fc.1", "fc.2"], "fc", torch.cat, _NOTHING),
)
def test_a_tensor_of_the_size_of_missing_ones_gets_the_rule_that_splits_or_joins_them(
    parts, order, whole, join, said, is_join
):
    separate = {f"layers.{i}.{part}": torch.randn(size) for i in range(2) for part, size in parts.items()}
    joined = {**separate, "head.weight": torch.randn(5, 16)}
    separate["head.weight"] = joined["head.weight"]
    for block, leaf in product(("layers.0", "layers.1"), ("weight", "bias")):
        if found := [joined.pop(name) for part in order if (name := f"{block}.{part}.{leaf}") in joined]:
            joined[f"{block}.{whole}.{leaf}"] = join(found)
    file, wanted = (separate, joined) if is_join else (joined, separate)
    net, rules = module_of({name: torch.zeros_like(tensor) for name, tensor in wanted.items()}), []
    for _ in range(2 * len(parts)):
        with contextlib.suppress(CheckpointError):
            load_weights(net, file, rules=rules)
            break
        with pytest.raises(CheckpointError, match=f"{said}.*Compare outputs with max_output_difference") as error:
            load_weights(net, file, rules=rules)
        rules += ast.literal_eval(re.search(r"rules=(\[.*?\]) takes", str(error.value))[1])
    assert unchanged(net, wanted)


def test_a_fused_bias_without_that_of_the_key_gets_the_rule_that_leaves_it_or_the_sentence_that_adds_it():
    separate = {"q.bias": torch.randn(6), "v.bias": torch.randn(4), "k.weight": torch.randn(4, 3)}
    fused = torch.cat([separate["q.bias"], torch.zeros(4), separate["v.bias"]])
    joined = {"qkv.bias": fused, "k.weight": separate["k.weight"]}
    net = module_of({name: torch.zeros_like(tensor) for name, tensor in separate.items()})
    with pytest.raises(CheckpointError, match=r"q.bias, v.bias and what the model lacks in one") as error:
        load_weights(net, joined)
    rules = ast.literal_eval(re.search(r"rules=(\[.*?\]) takes", str(error.value))[1])
    load_weights(net, joined, rules=rules, allow_unexpected="qkv.bias_key")
    assert unchanged(net, separate)
    with pytest.raises(CheckpointError, match=r"and what the file lacks in one: .*'qkv.bias': torch.cat.*, with zeros"):
        load_weights(module_of({name: torch.zeros_like(tensor) for name, tensor in joined.items()}), separate)


@cases("names", ["a", "b", "c", "d"], ["one", "two", "three", "four"])
def test_where_several_sets_of_missing_tensors_fit_all_are_said(names):
    net = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in names})
    with pytest.raises(
        CheckpointError, match=r"but nothing says that it is this one, or it is \{'from': 'pack"
    ) as error:
        load_weights(net, {"pack.weight": torch.randn(8, 4), f"{names[3]}.weight": torch.randn(4, 4)})
    assert str(error.value).count("'to'") == 3


def test_a_list_that_may_be_counted_from_the_other_end_gets_the_lines_that_reverse_it():
    def net(trunk, behind):
        blocks = [nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 8)) for _ in range(6)]
        rest = [nn.ModuleDict({"conv": nn.Conv2d(8, 8, 3), "bn": nn.BatchNorm2d(8)}) for _ in range(4)]
        return randomized(nn.ModuleDict({trunk: nn.ModuleList(blocks), behind: nn.ModuleList(rest)}))

    source, target = net("blocks", "decoder"), net("trunk", "up")
    with pytest.raises(AmbiguousAlignmentError, match="if they count from opposite ends") as error:
        load_weights(target, source.state_dict())
    rules = re.search(r"opposite ends, rules=(\[\{.*?\}\])", " ".join(str(error.value).split()))[1]
    load_weights(target, source.state_dict(), rules=ast.literal_eval(rules))
    for name, tensor in source.decoder.state_dict().items():
        assert torch.equal(target.up.state_dict()[f"{3 - int(name[0])}{name[1:]}"], tensor)
