"""`align`: the right tensor in the right place, proved by the models' outputs, or a refusal."""

import ast
import itertools
import re
import string
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchvision import models

from lightning_tricks import load_weights, read_checkpoint
from lightning_tricks._shared.text import render_text
from lightning_tricks.checkpoint_remapping import (
    AmbiguousAlignmentError,
    CheckpointError,
    align,
    max_output_difference,
    read_rules,
    remap_keys,
)
from lightning_tricks.checkpoint_remapping.core.matching.justification import Evidence, Justification
from lightning_tricks.checkpoint_remapping.core.matching.layers import (
    Layer,
    are_numbered_in_order,
    group_layers,
    is_ordered,
)
from lightning_tricks.checkpoint_remapping.core.matching.path_context import (
    Fork,
    Side,
    common_start,
    norms_as_registered,
    norms_by_name,
)
from tests.checkpoint_remapping.models import ARCHITECTURES, inputs, module_of, randomized, without_initial_values
from tests.small import cases, same

DIRECTED = [(name, *pair) for name, who in ARCHITECTURES.items() for pair in itertools.permutations(who, 2)]


_SUGGESTED = ("RegNet", "MobileNetV3")  # what is loaded where it is accepted alone


@cache
def model(architecture, origin):
    with without_initial_values():
        built = ARCHITECTURES[architecture][origin]()
    return randomized(built)


def unset(architecture, origin):
    """A model whose outputs are no numbers until all of its weights are loaded."""
    copy = deepcopy(model(architecture, origin))
    for tensor in copy.state_dict().values():
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)
    return copy


@pytest.mark.trap("checkpoints: shape agreement proves nothing, same-shape conv3 and shortcut get swapped")
@pytest.mark.trap("checkpoints: HF BertEncoder <-> nn.TransformerEncoder fails with templates")
@pytest.mark.parametrize(("architecture", "origin", "other"), DIRECTED)
@pytest.mark.sampled(2)
def test_outputs_agree(architecture, origin, other):
    source, target = model(architecture, origin), unset(architecture, other)
    allowed = {"allow_unexpected": "*.total_ops"}
    accept = "*" if architecture in _SUGGESTED else ()
    if accept:
        with pytest.raises(AmbiguousAlignmentError, match=r"a likely match, which may be wrong.*accept="):
            load_weights(target, source.state_dict(), **allowed)
        assert all(value.isnan().all() for name, value in target.named_parameters())
    report = load_weights(target, source.state_dict(), **allowed, accept=accept)
    assert not report.mismatched
    # EfficientNet of Hugging Face pads its first convolution otherwise
    assert max_output_difference(source, target, inputs(architecture)) < (
        2e-3 if architecture == "EfficientNet-B0" else 1e-4
    )


@pytest.mark.parametrize(("architecture", "origin", "other"), DIRECTED)
@pytest.mark.sampled(2, 1)
def test_the_order_of_a_file_does_not_matter(architecture, origin, other):
    """A .safetensors comes sorted by name: the mapping is the same one."""
    source, target = model(architecture, origin).state_dict(), model(architecture, other)
    assert align(target, dict(sorted(source.items()))) == align(target, source)


@given(st.randoms(use_true_random=False), st.sampled_from(["resnet50", "mobilenetv2_100", "vit_tiny_patch16_224"]))
@settings(max_examples=30)
def test_other_words_never_mislead(random, name):
    """Every word of the names is another one, and the order is lost: right, or refused."""
    net = small_timm(name)
    words = sorted({word for path in net for word in re.findall("[a-z_]+", path.rpartition(".")[0])})
    others = dict(zip(words, random.sample(string.ascii_lowercase, len(words)), strict=True))

    def renamed(path):
        parent, _, leaf = path.rpartition(".")
        return f"{re.sub('[a-z_]+', lambda word: others[word[0]] * 3, parent)}.{leaf}".lstrip(".")

    names = random.choice([list, sorted, lambda paths: random.sample(list(paths), len(paths))])(net)
    truth = {renamed(path): path for path in names}
    try:
        found = align(net, {new: net[path] for new, path in truth.items()})
    except AmbiguousAlignmentError:
        return
    assert all(truth[old] == new for old, new in found.renamed.items())


@cache
def small_timm(name):
    return timm.create_model(name).state_dict()


def heads(*names, trunk="trunk"):
    return {f"{trunk}.weight": torch.zeros(4, 5)} | {f"{name}.weight": torch.zeros(2, 4) for name in names}


def _sizes(trunk="trunk", **sizes):
    return {f"{trunk}.weight": (4, 5)} | {f"{name.replace('__', '.')}.weight": size for name, size in sizes.items()}


_TEXT_AND_IMAGE = {f"{tower}.{i}.w": (3, 3) for tower in ("text", "image") for i in range(3)}
_BRANCH = {"conv.weight": (4, 4, 1, 1), "bn.weight": (4,), "bn.bias": (4,)}
_NORMS = {f"h.{i}.norm{n}.weight": (4,) for i in range(2) for n in (1, 2, 3)}
_NORMS |= {f"h.{i}.{name}{n}.weight": (4 + n, 4 + m) for i in range(2) for n in range(3) for m, name in enumerate("ab")}
_SUBLAYERS = {f"b.{i}.layer.{n}.norm.weight": (4,) for i in range(2) for n in range(3)}
_SUBLAYERS |= {
    f"b.{i}.layer.{n}.{name}.weight": (4 + n, 4 + m) for i in range(2) for n in range(3) for m, name in enumerate("ab")
}
REFUSED = {
    "heads": (_sizes(foo=(2, 4), bar=(2, 4)), _sizes(mu=(2, 4), logvar=(2, 4))),
    "heads on another trunk": (_sizes("stem", foo=(2, 4), bar=(2, 4)), _sizes(mu=(2, 4), logvar=(2, 4))),
    "numbered heads": (_sizes(heads__0=(2, 4), heads__1=(2, 4)), _sizes(mu=(2, 4), logvar=(2, 4))),
    "heads by letters and numbers": (_sizes(head_a=(2, 4), head_b=(2, 4)), _sizes(out1=(2, 4), out2=(2, 4))),
    "parameters": ({"foo": (3,), "bar": (3,)}, {"mu": (3,), "logvar": (3,)}),
    "towers": (_TEXT_AND_IMAGE, {f"towers.{t}.{i}.w": (3, 3) for t in range(2) for i in range(3)}),
    "a square matrix that is left": (_sizes(foo=(4, 4)), _sizes(one=(4, 4))),  # these fit easily
    "one more in the file": (_sizes(foo=(7,), extra=(8,)), _sizes(one=(7,))),  # which may be what is wanted
    "one more in the model": (_sizes(foo=(7,)), _sizes(one=(7,), extra=(8,))),
    "two for one": (_sizes(foo=(7,), bar=(7,)), _sizes(one=(7,))),
    "two for one, both ways": (_sizes(foo=(7,), bar=(7,), baz=(9,)), _sizes(one=(7,), two=(9,), three=(9,))),
    "a name without a number": (_sizes(m__fc1=(4, 4), m__fc2=(4, 4)), _sizes("stem", n__conv=(4, 4), n__conv2=(4, 4))),
    "a number too many": (_sizes(m__conv=(4, 4), m__conv2=(4, 4)), _sizes("stem", n__fc1=(4, 4), n__fc2=(4, 4))),
    "letters and numbers": ({f"t.{a}.weight": (5, 7) for a in "abcd"}, {f"n.{i}.weight": (5, 7) for i in range(4)}),
    "a word and numbers": ({f"t.{a}.weight": (5, 7) for a in ("a", "proj")}, {f"n.{i}.weight": (5, 7) for i in (0, 1)}),
    "order alone": (
        {"x.1.one.weight": (9,), "x.2.two.weight": (9,), "stem.weight": (3, 5)},
        {"y.1.three.weight": (9,), "y.2.four.weight": (9,), "stem.weight": (3, 5)},
    ),
    "three norms of a block, and one of each of its numbered parts": (_NORMS, _SUBLAYERS),
    "a word of both": (
        {f"m.{branch}.{leaf}": shape for branch in ("branch_1x_1", "branchpool") for leaf, shape in _BRANCH.items()},
        {f"m.{branch}.{leaf}": shape for branch in ("branch1x1", "branch_pool") for leaf, shape in _BRANCH.items()},
    ),
}  # fmt: skip


@pytest.mark.trap("checkpoints: must refuse two same-shape heads, foo and bar -> mu and logvar")
@pytest.mark.parametrize("turned", [1, -1])
@pytest.mark.parametrize("kind", REFUSED)
def test_where_two_ways_are_left_it_is_refused(kind, turned):
    file, net = map(_zeros, REFUSED[kind][::turned])
    with pytest.raises(AmbiguousAlignmentError, match="it is ambiguous which of") as error:
        align(net, file)
    assert ("foo" in str(error.value)) == ("foo" in str(REFUSED[kind]))
    if kind in ("letters and numbers", "a word and numbers", "order alone") or kind.startswith("three norms"):
        with pytest.raises(AmbiguousAlignmentError):
            align(net, file, accept="*")


def test_the_last_layers_left_are_suggested_where_no_two_are_alike():
    file = {"trunk.weight": torch.zeros(4, 5), "foo.weight": torch.zeros(7), "bar.weight": torch.zeros(9)}
    net = {"trunk.weight": torch.zeros(4, 5), "one.weight": torch.zeros(9), "two.weight": torch.zeros(7)}
    assert align(net, file).renamed == {}
    assert align(net, file, accept="*").renamed == {"foo.weight": "two.weight", "bar.weight": "one.weight"}


_LISTS = {
    "decoder": "ups.",
    "up": "ups.",
    "heads.": "tasks.",
    "refinenet": "layers.",
    "flows.": "blocks.",
    "gen.scales.": "d.",
}


@pytest.mark.parametrize("numbers", ["123", "321"])
@pytest.mark.parametrize("turned", [1, -1])
@pytest.mark.parametrize("kinds", [("conv",), ("conv", "proj", "norm")])
@pytest.mark.parametrize("lists", _LISTS.items())
def test_numbers_behind_words_of_two_meanings_are_a_suggestion(lists, kinds, turned, numbers):
    """They may be counted from the other end, though the list is the only one and stands between a stem and a head."""

    def net(path, head, counted):
        sizes = {"conv.weight": (8, 8, 3, 3), "conv.bias": (8,), "proj.weight": (16, 8, 1, 1)}
        sizes |= {f"norm.{leaf}": (16,) for leaf in ("weight", "bias", "running_mean", "running_var")}
        parts = {f"{path}{n}.{part}": size for n in counted for part, size in sizes.items() if part.startswith(kinds)}
        return _zeros({"stem.weight": (8, 4, 3, 3), **parts, f"{head}.weight": (2, 8, 1, 1)})

    file, own = map(net, lists[::turned], ("outc", "final"), (numbers, "012"))
    found = align(own, file)
    assert found.renamed == {"outc.weight": "final.weight"}
    assert {*own} - {name for match in found.suggested for name in match.targets} == {"stem.weight", "final.weight"}


@pytest.mark.parametrize(("one", "other"), [("decoder", "decoder."), ("blocks.", "h."), ("encoder.layer.", "stages.")])
def test_numbers_behind_words_of_one_meaning_are_evidence(one, other):
    file, own = (_zeros({f"{path}{n}.conv.weight": (8, 8, 3, 3) for n in range(3)}) for path in (one, other))
    assert align(own, file).renamed == dict(zip(file, own, strict=True))


_PARTS = ("q.", "k.", "v.")


@pytest.mark.parametrize("turned", [1, -1])
@cases(
    "names, is_evidence",
    (("qkv.", _PARTS), True),
    (("in_proj_", _PARTS), True),
    (("qkv.", "in_proj_"), True),
    *(((name, _PARTS), False) for name in ("qkv_proj.", "c_attn.", "in_proj.", "linear_qkv.", "to_qkv.")),
    *(((name, "qkv."), False) for name in ("qkv_proj.", "c_attn.", "in_proj.")),
    (("c_attn.", "in_proj_"), False),
    (("c_attn.", "qkv_proj."), False),
)
def test_the_order_in_a_fused_tensor_is_evidence_where_its_name_says_it(names, turned, is_evidence):
    """CodeGen, DeBERTa, GPTBigCode and Megatron have queries, keys and values head by head or in groups."""

    def net(blocks, parts):
        parts = (parts,) if isinstance(parts, str) else parts
        sizes = {f"attn.{part}{leaf}": size for part in parts for leaf, size in _layer(12 // len(parts), 4).items()}
        sizes |= {f"up.{leaf}": size for leaf, size in _layer(9, 4).items()}
        return _zeros({f"{blocks}.{i}.{name}": size for i in range(2) for name, size in sizes.items()})

    found = align(*map(net, ("layers", "h"), names[::turned]))
    assert (found.loaded == found.total) == is_evidence
    assert all("attn" in match.targets[0] and "one after another" in match.reason for match in found.suggested)


def _layer(outputs, inputs):
    return {"weight": (outputs, inputs), "bias": (outputs,)}


@pytest.mark.parametrize("is_turned", [True, False])
def test_square_parts_of_a_fused_matrix_are_turned_as_their_file_is(is_turned):
    def encoder():
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def turned(tensor):
        return tensor.t().contiguous() if tensor.dim() == 2 and is_turned else tensor

    one, other = randomized(encoder()), encoder()
    parts = {name: zip("qkv", value.chunk(3), strict=True) for name, value in one.state_dict().items()}
    file = {
        name.replace("in_proj_", f"{part}_proj."): turned(value)
        for name, pieces in parts.items()
        if "in_proj" in name
        for part, value in pieces
    }
    file |= {name: turned(value) for name, value in one.state_dict().items() if "in_proj" not in name}
    load_weights(other, file)
    assert same(dict(one.state_dict()), dict(other.state_dict()))
    unclear = {name: value for name, value in file.items() if not name.startswith("layers.0.linear")}
    if is_turned:
        rule = re.escape("{'from': ['layers.*.self_attn.q_proj.weight', 'layers.*.self_attn.k_proj.weight', 'layers.")
        unclear |= {"layers.0.linear1.weight": one.layers[0].linear1.weight.detach()}
        with pytest.raises(AmbiguousAlignmentError, match=rule):
            load_weights(other, unclear, allow_missing="layers.0.linear*")


@pytest.mark.parametrize("is_ruled", [False, True])
def test_a_rule_for_one_matrix_leaves_the_doubt_about_the_square_ones(is_ruled):
    """One is (in, out) in the file, and the other one is not, whether a rule names it or not."""
    own = _zeros({f"b.{name}.weight": size for name, size in (("up", (8, 4)), ("down", (4, 8)), ("o", (4, 4)))})
    file = _zeros({f"b.{name}.weight": size for name, size in (("up", (4, 8)), ("back", (4, 8)), ("o", (4, 4)))})
    if is_ruled:
        rules = [{"from": "b.up.weight", "to": "b.up.weight", "transpose": True}, ("b.back", "b.down")]
    else:
        own, rules = {name.replace("down", "back"): value for name, value in own.items()}, "auto"
    with pytest.raises(AmbiguousAlignmentError, match=r"whether the square b\.o\.weight"):
        align(own, file, rules)


def _pyramid(lateral, output, channels):
    """A pyramid of features, whose lateral convolutions differ in size and whose outputs do not."""
    shapes = {"stem.weight": (16, 3, 7, 7)}
    shapes |= {f"{lateral}.{level}.weight": (4, width, 1, 1) for level, width in enumerate(channels)}
    return shapes | {f"{output}.{level}.weight": (4, 4, 3, 3) for level in range(len(channels))}


def _zeros(shapes):
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("channels", [(8, 16), (8, 16, 32)])
def test_outputs_of_a_pyramid_are_counted_as_its_lateral_convolutions_are(channels):
    net = _zeros(_pyramid("fpn.inner_blocks", "fpn.layer_blocks", channels))
    found = align(net, _zeros(_pyramid("neck.lateral_convs", "neck.fpn_convs", channels)), accept="*.layer_blocks.*")
    assert found.renamed["neck.fpn_convs.1.weight"] == "fpn.layer_blocks.1.weight"
    with pytest.raises(AmbiguousAlignmentError, match=r"which of neck\.fpn_convs\.0"):
        align(net, _zeros(_pyramid("neck.lateral_convs", "neck.fpn_convs", channels[::-1])))


def test_a_list_whose_ends_differ_in_what_follows_the_number_may_count_backwards():
    """The first and the last branch of a pyramid of dilated convolutions have one size; the last one pools before."""

    def branches(name, numbers):
        shapes = {f"{name}.{number}.0.weight": (8, 64, 3, 3) for number in numbers[1:-1]}
        return shapes | {
            f"{name}.{numbers[0]}.0.weight": (8, 64, 1, 1),
            f"{name}.{numbers[-1]}.1.weight": (8, 64, 1, 1),
        }

    net = _zeros(branches("convs", range(5)))
    assert align(net, _zeros(branches("blocks", range(1, 6)))).renamed["blocks.1.0.weight"] == "convs.0.0.weight"
    with pytest.raises(AmbiguousAlignmentError, match=r"which of blocks\.1\.1, blocks\.5\.0"):
        align(net, _zeros(branches("blocks", range(5, 0, -1))))


def _two_norms(path, names):
    """Two convolutions of different sizes and their norms, which have one size."""
    shapes = {f"{path}.{names[0]}.weight": (8, 4, 3, 3), f"{path}.{names[2]}.weight": (8, 8, 3, 3)}
    for norm in (names[1], names[3]):
        shapes |= {f"{path}.{norm}.{tensor}": (8,) for tensor in ("weight", "bias", "running_mean", "running_var")}
    return {name: shapes[name] for part in names for name in shapes if name.startswith(f"{path}.{part}.")}


_NUMBERED, _FIRST_WITHOUT = ("conv1", "bn1", "conv2", "bn2"), ("conv", "norm", "conv2", "norm2")


@cases(
    "one, other, fits",
    (_NUMBERED, _FIRST_WITHOUT, False),
    (_FIRST_WITHOUT, _NUMBERED, False),
    (_NUMBERED, ("c1", "n1", "c2", "n2"), True),
)
def test_norms_are_told_apart_by_numbers_that_both_have(one, other, fits):
    file, net = _zeros(_two_norms("m", one)), _zeros(_two_norms("n", other))
    if fits:
        assert align(net, file, accept="n.*").renamed == dict(zip(file, net, strict=True))
    else:
        with pytest.raises(AmbiguousAlignmentError):
            align(net, file)


@pytest.mark.parametrize("shape", [(8, 4, 3, 3), (2, 4), (5, 5)])
def test_parts_behind_one_word_are_matched_by_their_numbers(shape):
    file = _zeros({f"old.heads.{i}.fc.weight": shape for i in range(2)})
    net = _zeros({f"new.heads.{i}.out.weight": shape for i in range(2)})
    assert align(net, file).renamed == dict(zip(file, net, strict=True))


@cases(
    "shape, fits",
    ((2, 4), False),
    ((2, 4, 3), False),
    ((2, 4, 3, 3), False),
    ((8, 4, 3), True),
    ((8, 4, 3, 3), True),
    ((8, 1, 3, 3), True),
    ((4, 4, 3, 3), True),
)
def test_two_branches_that_cannot_follow_each_other_are_counted_from_either(shape, fits):
    """As the mean and the variance are; a convolution to a multiple of the channels may be one of groups."""
    file = _zeros({"trunk.weight": (4, 5), **{f"model.blocks.{i}.fc.weight": shape for i in range(2)}})
    net = _zeros({"stem.weight": (4, 5), **{f"backbone.layers.{i}.out.weight": shape for i in range(2)}})
    if fits:
        assert align(net, file).renamed == dict(zip(file, net, strict=True))
    else:
        assert align(net, file).suggested
        assert "trunk.weight" in align(net, file).renamed


def test_gate_and_input_of_metas_llama_are_told_by_what_leads_back():
    sizes, words = ((8, 4), (4, 8), (8, 4)), ("gate_proj", "down_proj", "up_proj")
    file = _zeros({f"layers.{i}.ff.w{n}.weight": size for i in range(2) for n, size in enumerate(sizes, 1)})
    net = _zeros({f"h.{i}.mlp.{word}.weight": size for i in range(2) for word, size in zip(words, sizes, strict=True)})
    assert align(net, file).renamed == dict(zip(file, net, strict=True))


@pytest.mark.parametrize("ones", [(1, 1), (1,)])
def test_where_ones_are_tells_layers_of_one_size_apart(ones):
    """Words may mislead: a scale of the logits has ones behind it, and a scale of the heads has none."""
    stem = {"fc.weight": (3, 5)}
    file = _zeros(stem | {"a.logit_scale": (4, *ones), "a.gate": (4,)})
    net = _zeros(stem | {"b.scale": (4,), "b.temperature": (4, *ones)})
    assert align(net, file, accept="b.*").renamed == {"a.logit_scale": "b.temperature", "a.gate": "b.scale"}


@pytest.mark.parametrize(("one", "other"), list(itertools.permutations(["norm_in", "norm_out", "norm_final"], 2)))
@pytest.mark.parametrize("block", ["", "blocks.0."])
def test_a_norm_without_a_number_is_not_any_other_one(one, other, block):
    norms = [{f"{block}{name}.weight": (4,) for name in ("norm1", "norm2", last)} for last in (one, other)]
    stems = [{f"{block}{name}.weight": (4, 5), f"{block}{name}2.weight": (5, 4)} for name in ("fc", "lin")]
    with pytest.raises(AmbiguousAlignmentError):
        align(_zeros(norms[0] | stems[0]), _zeros(norms[1] | stems[1]))


@pytest.mark.parametrize(("kernels", "fits"), [(((1, 5), (5, 1)), True), (((5, 1), (1, 5)), False)])
def test_numbers_of_norms_follow_those_of_their_convolutions(kernels, fits):
    """As sizes match the convolutions, so are the norms beside them counted."""

    def net(path, conv, norm, sizes):
        blocks = [f"{path}.{i}" for i in range(2)]
        shapes = {f"{b}.{norm}{n}.{t}": (8,) for b in blocks for n in (1, 2) for t in ("weight", "bias")}
        return _zeros(
            {f"{b}.{conv}{n}.weight": (8, 8, *size) for b in blocks for n, size in enumerate(sizes, 1)} | shapes
        )

    file = net("layers", "conv", "bn", ((1, 5), (5, 1)))
    if fits:
        assert (
            align(net("blocks", "conv_", "norm", kernels), file).renamed["layers.0.bn1.weight"]
            == "blocks.0.norm1.weight"
        )
    else:
        with pytest.raises(AmbiguousAlignmentError):
            align(net("blocks", "conv_", "norm", kernels), file)


def test_a_series_of_square_layers_is_evidence():
    file, net = (
        {f"{side}.{i}.{name}.weight": (5, 5) for i in range(3)} for side, name in (("layers", "in"), ("h", "out"))
    )
    found = align(_zeros(net), _zeros(file))
    assert found.renamed == dict(zip(file, net, strict=True))
    assert {match.reason for match in found.matches} == {"the only layers of these sizes in this order"}


def test_whether_names_are_in_the_order_of_a_model():
    names = [f"{part}.weight" for part in "badcfe"]
    assert is_ordered(dict.fromkeys(names))
    assert not is_ordered(dict.fromkeys(sorted(names)))
    assert not is_ordered(dict.fromkeys([*names, "b.bias"])), "a module is registered at once"


@pytest.mark.parametrize(("one", "other"), [(".conv", ".0"), (".0", ".conv"), (".a", ".proj"), (".proj", ".a")])
def test_a_word_and_a_number_have_no_order(one, other):
    assert Fork(("net",), (one,), (other,), by_letters=False).numbers is None
    layers = [Layer(f"net{name}", position) for position, name in enumerate((one, other))]
    assert not are_numbered_in_order(layers)


def _square_block(*names):
    tensors = {"weight": (4,), "bias": (4,), "running_mean": (4,), "running_var": (4,)}
    shapes = {}
    for name in names:
        shapes |= (
            {f"b.{name}.weight": (4, 4, 3, 3)} if "conv" in name else {f"b.{name}.{t}": s for t, s in tensors.items()}
        )
    return group_layers(shapes)


@cases(
    "names, ordered, expected",
    (("conv_a", "norm_a", "conv_b", "norm_b"), True, {"conv_a": "norm_a", "conv_b": "norm_b"}),
    (("norm_a", "conv_a", "norm_b", "conv_b"), True, {}),  # a norm before its convolution
    (("conv1", "conv2", "bn1", "bn2"), False, {"conv1": "bn1", "conv2": "bn2"}),
    (("conv", "bn"), False, {"conv": "bn"}),
    (("conv_a", "conv_b", "bn_a", "bn_b"), False, {}),
)
def test_norms_follow_their_convolutions_or_have_their_numbers(names, ordered, expected):
    layers = _square_block(*names)
    found = norms_as_registered(layers) if ordered else norms_by_name(layers)
    assert {convolution.name: norm.name for convolution, norm in found.items()} == expected


def test_a_convolution_of_each_channel_stands_between_those_beside_it():
    """It has one input for each group, and takes all channels that the one before returns."""
    shapes = {"net.narrow.weight": (16, 8, 1, 1), "net.wide.weight": (8, 4, 1, 1), "net.each.weight": (8, 1, 3, 3)}
    for number, channels in enumerate((8, 8, 16), 1):
        shapes |= {f"net.bn{number}.{name}": (channels,) for name in ("weight", "bias", "running_mean", "running_var")}
    found = norms_by_name(group_layers(shapes))
    assert {layer.name: norm.name for layer, norm in found.items()} == {"wide": "bn1", "each": "bn2", "narrow": "bn3"}


@pytest.mark.parametrize("first", ["left", "right"])
def test_what_one_branch_alone_has_tells_it_from_the_other_whichever_comes_first(first):
    names = {"net.left.a": "m.one.x", "net.left.b": "m.one.y", "net.right.a": "m.two.x"}
    shapes = (5, 5), (5, 6), (5, 5)
    file, net = (
        group_layers({f"{name}.weight": shape for name, shape in zip(side, shapes, strict=True)})
        for side in (names, names.values())
    )
    found = Justification(Side(file), Side(net, ordered=True), dict(zip(file, net, strict=True)))
    one, other = (file[0], file[2]) if first == "left" else (file[2], file[0])
    assert found.evidence(one, other) == Evidence.NEIGHBORS


def test_what_several_paths_start_with():
    assert common_start([("0", "1"), ("0", "1", "2"), ("0", "3")]) == ("0",)
    assert common_start([("0", "1"), ("0", "1", "2")]) == ("0", "1")
    assert common_start([("4",), ("0",)]) == common_start([("0",), ("4",)]) == common_start([]) == ()


def test_an_embedding_of_positions_stays_one_beside_other_parameters():
    """It is a parameter where the other model has a parameter of positions, not of anything else."""
    file = _zeros({"wpe.weight": (7, 5), "gain": (3,), "fc.weight": (4, 6), "fc.bias": (4,)})
    net = _zeros({"scale": (3,), "lin.weight": (4, 6), "lin.bias": (4,)})
    for name, shape in (("table.weight", (7, 5)), ("pos_embed", (1, 7, 5))):
        assert align({name: torch.zeros(shape), **net}, file).renamed["wpe.weight"] == name


def test_words_settle_it():
    found = align(heads("mu", "logvar"), heads("fc_logvar", "fc_mu", trunk="stem"))
    assert found.renamed["fc_mu.weight"] == "mu.weight"
    assert found.renamed["fc_logvar.weight"] == "logvar.weight"


@pytest.mark.parametrize("name", ["student", "teacher"])
def test_student_and_teacher_are_not_chosen_between(name):
    net = models.resnet18()
    both = {
        f"{part}.{n}": t + (part == "teacher") for part in ("student", "teacher") for n, t in net.state_dict().items()
    }
    with pytest.raises(AmbiguousAlignmentError, match=r"student\.\*, teacher\.\* in the checkpoint is which of \*"):
        load_weights(models.resnet18(), both)
    report = load_weights(
        models.resnet18(), both, rules=[(f"{name}.", "")], allow_unexpected=["student.*", "teacher.*"]
    )
    assert report.loaded == 122
    pair = nn.ModuleDict({"online": models.resnet18(), "target": models.resnet18()})
    with pytest.raises(AmbiguousAlignmentError, match=r"online\.\*, target\.\* in the model.*submodule="):
        load_weights(pair, net.state_dict())
    assert load_weights(pair, net.state_dict(), submodule="target").loaded == 122


@pytest.mark.parametrize("is_fused", [False, True])
@cases("query, key", ("q_norm", "k_norm"), ("query_norm", "key_norm"), ("query_layernorm", "key_layernorm"))
def test_a_norm_of_the_query_is_not_taken_for_the_query(query, key, is_fused):
    def block(fused, *norms):
        parts = {"qkv": 32} if fused else {"q_proj": 16, "k_proj": 8, "v_proj": 8}
        layers = {name: nn.Linear(16, size, bias=False) for name, size in parts.items()}
        attention = nn.ModuleDict({**layers, **{name: nn.LayerNorm(4) for name in norms}})
        return nn.ModuleDict({"norm": nn.LayerNorm(16), "attn": attention, "mlp": nn.Linear(16, 16)})

    sides = (not is_fused, query, key), (is_fused, "q_norm", "k_norm")
    source, target = (randomized(nn.Sequential(*(block(*side) for _ in range(3)))) for side in sides)
    assert load_weights(target, source.state_dict()).missing == []
    one, other = ([t for n, t in net[1]["attn"].state_dict().items() if "norm" not in n] for net in (source, target))
    assert torch.equal(torch.cat(one), torch.cat(other))


@cases("interleaved, plain", ("attn.query_key_value", "attn.qkv"), ("attention.wq", "self_attn.q_proj"))
def test_weights_with_an_order_of_their_own_are_not_taken_for_others(interleaved, plain):
    """GPT-NeoX interleaves heads, Meta's Llama the halves of each: equal shapes would load, and be wrong."""

    def layers(name):
        sizes = {name: (12, 4), "mlp": (8, 4)}
        return {f"layers.{i}.{part}.weight": torch.zeros(size) for i in range(3) for part, size in sizes.items()}

    found = align(layers(plain), layers(interleaved))
    assert len(found.missing) == len(found.unexpected) == 3


def test_another_depth_or_width_is_not_forced():
    with pytest.raises(CheckpointError, match=r"80 tensors are missing in the file.*allow_missing="):
        load_weights(models.resnet34(), models.resnet18().state_dict())
    with pytest.raises(CheckpointError):
        load_weights(models.vit_b_16(), models.resnet18().state_dict())


def test_a_report_and_a_rule_file():
    source = model("ResNet-18", "torchvision").state_dict()
    target = ARCHITECTURES["ResNet-18"]["HF"]()
    found = align(target, source)
    table = render_text(found.report())
    assert "122/122 tensors, 11.7 M/11.7 M parameters; 122 renamed, 0 reshaped, 0 missing" in table
    assert "the names are another project's" in table
    assert all(column in table for column in ("in the file", "in the model", "why", "evidence"))
    found.save("rules.yaml")
    rules = read_rules("rules.yaml")
    assert set(remap_keys(source, rules)) == set(target.state_dict())
    report = load_weights(target, source, rules="rules.yaml")
    assert report.loaded == 122
    assert max_output_difference(model("ResNet-18", "torchvision"), target, inputs("ResNet-18")) < 1e-5
    assert "from: conv1.weight" in Path("rules.yaml").read_text()


def test_a_report_shows_what_has_no_counterpart():
    file = {"a.weight": torch.zeros(3, 2), "b.weight": torch.zeros(5, 2), "extra.bias": torch.zeros(7)}
    net = {"a.weight": torch.zeros(3, 2), "b.weight": torch.zeros(4, 2), "lacking.bias": torch.zeros(2, 3, 4)}
    rows = [line for line in render_text(align(net, file).report()).splitlines() if "." in line]
    for words in (("lacking.bias", "MISSING"), ("extra.bias", "UNEXPECTED"), ("b.weight", "MISMATCHED: 5x2 and 4x2")):
        assert sum(all(word in row for word in words) for row in rows) == 1, words


def _doubts(found):
    """The weak matches, with what makes them weak."""
    return {match.targets[0]: match.reason for match in found.matches if match.strength == "weak"}


def test_equal_names_rules_words_and_conversions_are_strong_evidence():
    net = ARCHITECTURES["ResNet-18"]["torchvision"]()
    for prefix, reason in (("net.", "the same name, with 'net' in front"), ("", "the same name")):
        found = align(net, {f"{prefix}{name}": tensor for name, tensor in net.state_dict().items()})
        assert not _doubts(found)
        assert {match.reason for match in found.matches} == {reason}
    assert not _doubts(load_weights(net, net.state_dict(), rules=[("fc", "fc")]).alignment)
    converted = align(*(nn.ModuleDict({name: nn.Linear(4, 4) for name in names}) for names in (_ONE, _OTHER)))
    assert [match.strength for match in converted.matches] == ["strong"] * 6
    found = align(ARCHITECTURES["ViT-B"]["timm"](), model("ViT-B", "HF").state_dict())
    assert not _doubts(found)
    assert "24 fused tensors are taken to be query, key and value, one after another" in found.diagnosis


_ONE, _OTHER = ("query", "key", "value"), ("q_proj", "k_proj", "v_proj")


def test_weak_evidence_is_told_with_what_it_rests_on():
    alone = align(nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.LayerNorm(5)}), _renamed_layers(), accept="b.*")
    assert "2 of 4 matches are accepted suggestions: max_output_difference shows" in alone.diagnosis
    assert {name: reason.partition("; ")[2] for name, reason in _doubts(alone).items()} == dict.fromkeys(
        ("b.weight", "b.bias"), "nothing but its size says so"
    )
    rows = render_text(alone.report()).splitlines()
    assert [row.split()[-2] for row in rows for name in ("a.bias", "b.bias") if name in row] == ["strong", "weak"]


def _of_depth(backbone, fusion, places):
    """A trunk, and beside it a list of fusion layers that a project counts from the finest or from the coarsest."""
    blocks = {f"{backbone}.{i}.wide.weight": (60, 90) for i in range(3)}
    return _zeros(blocks | {f"{fusion}{place}.conv.weight": (4, 4, 3, 3) for place in places} | {"head.weight": (1, 4)})


@pytest.mark.parametrize(("fusion", "places"), [("scratch.refinenet", "4321"), ("neck.up.", "0123"), ("fuse.", "0123")])
def test_a_list_beside_the_trunk_is_suggested_whatever_it_is_called(fusion, places):
    net, file = _of_depth("layer", "neck.fusion.layers.", "0123"), _of_depth("blocks", fusion, places)
    found = align(net, file)
    assert found.loaded == 4, "the trunk and the head"
    assert {name for match in found.suggested for name in match.targets} == {name for name in net if "fusion" in name}
    assert "SUGGESTED" in render_text(found.report())
    module = module_of(net)
    with pytest.raises(AmbiguousAlignmentError, match=r"4 tensors of the model have a likely match") as raised:
        load_weights(module, file)
    accept = re.search(r"accept=(\[.*?\]) takes", str(raised.value))[1]
    assert load_weights(module, file, accept=ast.literal_eval(accept)).loaded == 8
    rules = [(f"{fusion}{place}", f"neck.fusion.layers.{number}") for number, place in enumerate(places)]
    assert load_weights(module, file, rules=rules).loaded == 8
    with pytest.raises(AmbiguousAlignmentError):
        load_weights(module, file, accept="other.*")


@pytest.mark.parametrize("words", [("down", "up"), ("a", "b"), ("up", "down")])
def test_the_largest_list_behind_another_one_of_convolutions_is_a_suggestion(words):
    """The decoder of a UNet of one width, in a model whose order of registration is that of the names, and is not."""

    def unet(down, up, numbers):
        sizes = {(down, str(i), f"conv{c}"): (8, 8, 3, 3) for i in range(3) for c in (1, 2)}
        sizes |= {(up, n, f"conv{c}"): (8, 8 * (3 - c), 3, 3) for n in numbers for c in (1, 2)}
        return _zeros({f"{'.'.join(path)}.weight": size for path, size in sizes.items()})

    for numbers in ("012", "210"):
        found = align(unet(*words, "012"), unet("enc", "dec", numbers))
        assert not [match for match in found.matches if words[1] in match.targets[0].split(".")]
        assert found.suggested


def test_lists_whose_sizes_say_the_order_are_evidence():
    sizes = {f"{i}.conv.weight": (2**i, 4, 3, 3) for i in range(1, 4)} | {f"{i}.norm.weight": (5,) for i in range(1, 4)}
    trunk = {f"{i}.fc.weight": (50, 60) for i in range(4)}
    file, net = ({**{f"{a}.{n}": s for n, s in trunk.items()}, **{f"{b}.{n}": s for n, s in sizes.items()}} for a, b in
                 (("blocks", "decoder.up"), ("layer", "neck.fuse")))  # fmt: skip
    assert not align(_zeros(net), _zeros(file)).suggested


def _renamed_layers():
    sizes = {"x.weight": (2, 3), "x.bias": (2,), "y.weight": (5,), "y.bias": (5,)}
    return {name: torch.zeros(size) for name, size in sizes.items()}


def test_rules_of_prefixes_are_short():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for wrapped in ({f"module.net.{n}": t for n, t in net.state_dict().items()}, net.state_dict()):
        found = align(net, wrapped)
        found.save("rules.yaml")
        assert len(Path("rules.yaml").read_text().splitlines()) <= 3
        assert list(remap_keys(wrapped, read_rules("rules.yaml"))) == list(net.state_dict())
    fused = align(nn.ModuleDict({"qkv": nn.Linear(4, 12)}), _separate())
    fused.save("rules.yaml")
    assert remap_keys(_separate(), read_rules("rules.yaml"))["qkv.weight"].shape == (12, 4)
    split = align(_separate(), {"qkv.weight": torch.zeros(12, 4), "qkv.bias": torch.zeros(12)})
    assert set(split.apply({"qkv.weight": torch.zeros(12, 4), "qkv.bias": torch.zeros(12)})) == set(_separate())


def _separate():
    return {f"{n}.{leaf}": torch.zeros(s) for n in ("q", "k", "v") for leaf, s in (("weight", (4, 4)), ("bias", (4,)))}


@pytest.mark.trap("checkpoints: gamma/beta vs weight/bias; num_batches_tracked missing")
def test_old_names_of_norms_and_missing_counters():
    norm, batch_norm = nn.LayerNorm(3), nn.BatchNorm1d(3)
    old = {"ln.gamma": torch.ones(3), "ln.beta": torch.zeros(3)}
    assert align(nn.ModuleDict({"ln": norm}), old).renamed == {"ln.gamma": "ln.weight", "ln.beta": "ln.bias"}
    weights = {name: value for name, value in batch_norm.state_dict().items() if not name.startswith("num")}
    sizes = {"m.a": 8, "m.b": 16}
    file = {
        f"{path}.{name}": t for path, n in sizes.items() for name, t in sorted(nn.BatchNorm1d(n).state_dict().items())
    }
    net = {
        name.replace("m.a", "n.x").replace("m.b", "n.y"): value for name, value in file.items() if "batches" not in name
    }
    assert len(align(net, file, accept="*").matches) == len(net) == 8, (
        "a counter that the model lacks stands between others"
    )
    report = load_weights(nn.BatchNorm1d(3), weights)
    assert (report.loaded, report.missing) == (4, ["num_batches_tracked"])
    assert "num_batches_tracked are computed by the model itself" in report.diagnosis


def test_a_checkpoint_object_and_the_diagnosis_of_wrappers():
    net = nn.Sequential(nn.Linear(2, 2))
    torch.save(nn.DataParallel(net).state_dict(), "w.pt")
    found = align(net, read_checkpoint("w.pt"))
    assert found.diagnosis.startswith("all 2 keys carry `module.`: saved from DataParallel")
    compiled = torch.compile(net, backend="eager")
    assert "saved from a compiled model" in align(net, compiled.state_dict()).diagnosis
    assert align(compiled, net.state_dict()).loaded == 2
    assert "as `backbone`" in align(net, {f"backbone.{n}": t for n, t in net.state_dict().items()}).diagnosis
    more = {**nn.DataParallel(net).state_dict(), "head.weight": torch.zeros(3, 2)}
    assert align(net, more).diagnosis.startswith("2 of 3 keys carry `module.`")


def test_a_proposal_that_would_give_two_tensors_one_name_is_not_made():
    def tensors(conv, query, key, value, out):
        net = nn.ModuleDict({"skip": nn.BatchNorm2d(4), conv: nn.Conv2d(4, 4, (1, 11), groups=4, bias=False)})
        net["bn_conv"] = nn.BatchNorm2d(4)
        cross = nn.ModuleDict({name: nn.Linear(4, 4) for name in (query, key, value, out)})
        decoder = nn.ModuleDict({"self_attn": nn.ModuleDict({out: nn.Linear(4, 4)}), "text_cross_attn": cross})
        parts = {"encoder": nn.ModuleDict({"2": net}), "decoder": nn.ModuleDict({"2": decoder})}
        return nn.ModuleDict(parts).state_dict()

    model, file = tensors("conv", "q_proj", "k_proj", "v_proj", "o_proj"), tensors("conv2d", "q", "k", "v", "to_out")
    with pytest.raises(AmbiguousAlignmentError, match="ambiguous which of"):
        align(model, file)
