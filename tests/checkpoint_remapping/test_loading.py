"""`load_weights`, `save_weights`, `replace_head`, `max_output_difference`."""

import contextlib
import json
import math
import os
import textwrap
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_tricks import load_weights, read_checkpoint, save_weights
from lightning_tricks._shared.patterns import Pattern
from lightning_tricks.checkpoint_remapping import (
    AmbiguousAlignmentError,
    CheckpointError,
    NotACheckpointError,
    NothingLoadedError,
    align,
    max_output_difference,
)
from lightning_tricks.checkpoint_remapping.core.matching.matches import suggested_patterns
from tests.checkpoint_remapping.models import randomized
from tests.small import cases

pytestmark = pytest.mark.oldest


def small():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 5))


def snapshot(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def unchanged(model, before):
    return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


X = torch.randn(2, 3, 4, 4)


# Loading


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_loads_into_models_with_and_without_values(name, device):
    source = randomized(small())
    save_weights(source, name)
    with torch.device(device):
        target = small()
    target[3].weight.requires_grad_(False)
    parameter = target[0].weight
    report = load_weights(target, name)
    assert (report.loaded, report.total, report.missing, report.unexpected, report.mismatched) == (9, 9, [], [], [])
    assert max_output_difference(source, target, X) == 0
    assert (parameter is target[0].weight) == (device == "cpu")
    assert [p.requires_grad for p in target.parameters()] == [True] * 4 + [False, True]


def test_takes_the_models_precision_unless_tensors_are_assigned():
    source = small()
    load_weights(target := small(), source.state_dict(), assign=True)
    assert target[0].weight.data_ptr() == source[0].weight.data_ptr()
    target = small().to(torch.float64)
    load_weights(target, source.state_dict())
    assert target[0].weight.dtype == torch.float64
    assert torch.equal(target[0].weight, source[0].weight.double())
    with torch.device("meta"):
        target = small().to(torch.bfloat16)
    load_weights(target, source.state_dict())
    assert target[0].weight.dtype == torch.bfloat16
    assert not target[0].weight.is_meta


@pytest.mark.gpu
def test_assigned_tensors_come_to_the_device_of_the_model():
    target = small().cuda()
    load_weights(target, small().state_dict(), assign=True)
    assert {tensor.device.type for tensor in target.state_dict().values()} == {"cuda"}


@pytest.mark.trap("checkpoints: strict_loading=False with module. prefixes loads 0 of 4 tensors and says it loaded")
def test_one_equal_name_of_many_may_be_by_chance_and_the_error_says_what_to_do():
    model, file = small(), {"3.weight": torch.ones(5, 16)}
    with pytest.raises(NothingLoadedError, match=r"only 3\.weight, of the model's 9 tensors, has .* rules=None takes"):
        load_weights(model, file, allow_missing="*")
    load_weights(model, file, rules=None, allow_missing="*")
    assert (model[3].weight == 1).all()


def test_nothing_loaded_is_an_error():
    target = small()
    before = snapshot(target)
    everything = {"allow_missing": "*", "allow_unexpected": "*", "allow_mismatched": "*"}
    with pytest.raises(NothingLoadedError, match="No tensor of the checkpoint fits Sequential"):
        load_weights(target, {"other": torch.zeros(7)}, **everything)
    prefixed = {f"module.{name}": value for name, value in small().state_dict().items()}
    with pytest.raises(NothingLoadedError, match=r"the checkpoint has module.0.weight"):
        load_weights(target, prefixed, rules=None, **everything)
    assert unchanged(target, before)
    assert load_weights(target, prefixed).loaded == load_weights(target, prefixed, rules="wrappers").loaded == 9


@pytest.mark.trap("checkpoints: a shape mismatch raises even with strict=False")
def test_each_problem_names_the_argument_that_allows_it():
    file = small().state_dict() | {"extra.weight": torch.zeros(2)}
    file["3.weight"], file["3.bias"] = torch.zeros(7, 16), torch.zeros(7)
    del file["0.bias"]
    target = small()
    before = snapshot(target)
    with pytest.raises(CheckpointError) as error:
        load_weights(target, file)
    words = str(error.value)
    assert "does not fit Sequential, which was not modified" in words
    assert "3.weight (5x16 in the model, 7x16 in the file), 3.bias" in words
    assert "interpolate" not in words, "these are no positions"
    for remedy in ("allow_mismatched=['3.*']", "allow_missing=['0.bias']", "allow_unexpected=['extra.*']"):
        assert f"{remedy} allows that" in words
    assert unchanged(target, before)
    report = load_weights(target, file, allow_mismatched="3.*", allow_missing=["0.b*"], allow_unexpected="re:^extra")
    assert (report.loaded, report.missing, report.unexpected) == (6, ["0.bias"], ["extra.weight"])
    assert report.mismatched == ["3.weight", "3.bias"]
    assert torch.equal(target[3].weight, before["3.weight"])
    assert torch.equal(target[0].weight, file["0.weight"])
    with pytest.raises(ValueError, match="a pattern must not be empty"):
        load_weights(target, file, allow_missing="")
    with pytest.raises(TypeError, match="allow_missing must be a pattern or a list of patterns, got 1"):
        load_weights(target, file, allow_missing=1)


def test_submodules():
    outer, source = nn.ModuleDict({"backbone": small(), "other": small()}), small()
    before = snapshot(outer["other"])
    assert load_weights(outer, source.state_dict(), submodule="backbone").loaded == 9
    assert max_output_difference(source, outer["backbone"], X) == 0
    assert unchanged(outer["other"], before)
    with pytest.raises(AttributeError, match="nothing"):
        load_weights(outer, source.state_dict(), submodule="nothing")


@cases(
    "value, words",
    (torch.ones(5, 16, dtype=torch.int8), r"torch.float32 in the model, torch.int8 in the file"),
    (torch.ones(5, 16, dtype=torch.bool), r"torch.float32 in the model, torch.bool in the file"),
    (torch.ones(5, 16, dtype=torch.complex64), r"torch.float32 in the model, torch.complex64 in the file"),
    (torch.eye(5, 16).to_sparse(), r"torch.float32 in the model, torch.float32 \(torch.sparse_coo\) in the file"),
)
def test_other_kinds_are_named_and_counted(value, words):
    target = small()
    before = snapshot(target)
    file = small().state_dict() | {"3.weight": value}
    with pytest.raises(CheckpointError, match=rf"3.weight \(.*{words}\).*allow_mismatched=\['3.weight'\]"):
        load_weights(target, file)
    assert unchanged(target, before)
    report = load_weights(target, file, allow_mismatched="3.weight")
    assert (report.loaded, report.mismatched, report.alignment.loaded) == (8, ["3.weight"], 8)
    assert str(report).startswith(
        "8/9 tensors, 134/214 parameters; 0 renamed, 0 reshaped, 0 missing, 0 unexpected, 1 m"
    )
    assert torch.equal(target[3].weight, before["3.weight"])


def _quantized(scheme):
    """The layer of a model as libraries store it: codes, and what their numbers mean."""
    rows, columns = 16, 32
    int32, uint8, e4m3 = torch.int32, torch.uint8, torch.float8_e4m3fn
    return {
        "fp8 of blocks": {"weight": torch.ones(rows, columns).to(e4m3), "weight_scale_inv": torch.ones(1, 1)},
        "fp8 with names of its own": {"weight": torch.ones(rows, columns).to(e4m3), "s": torch.ones(rows)},
        "gptq": {
            "qweight": torch.ones(columns // 8, rows, dtype=int32), "qzeros": torch.ones(1, 2, dtype=int32),
            "scales": torch.ones(1, rows), "g_idx": torch.ones(columns, dtype=int32),
        },
        "bitsandbytes, 4 bits": {
            "weight": torch.ones(256, 1, dtype=uint8), "weight.absmax": torch.ones(8),
            "weight.quant_map": torch.ones(16), "weight.quant_state.bitsandbytes__nf4": torch.ones(70, dtype=uint8),
        },
        "packed": {
            "weight_packed": torch.ones(rows, 4, dtype=int32), "weight_scale": torch.ones(rows, 1),
            "weight_shape": torch.tensor([rows, columns]),
        },
    }[scheme]  # fmt: skip


@pytest.mark.parametrize("prefix", ["", "module.", "model.net."])
@cases("scheme", "fp8 of blocks", "fp8 with names of its own", "gptq", "bitsandbytes, 4 bits", "packed")
def test_codes_are_no_weights_whatever_is_allowed(scheme, prefix):
    def build():
        return nn.Sequential(nn.Linear(4, 32), nn.LayerNorm(32), nn.Linear(32, 16), nn.LayerNorm(16))

    file, model = build().state_dict(), build()
    del file["2.weight"]
    file |= {f"2.{name}": tensor for name, tensor in _quantized(scheme).items()}
    file = {f"{prefix}{name}": tensor for name, tensor in file.items()}
    before = snapshot(model)
    everything = {} if "fp8" not in scheme else {"allow_unexpected": "*", "allow_missing": "*"}
    for options in ({}, everything):
        with pytest.raises(CheckpointError, match=r"It holds codes of quantized weights: .*2\.\w+ is torch") as error:
            load_weights(model, file, **options)
        assert "Dequantize them" in str(error.value)
        assert "allow_" not in str(error.value)
    assert unchanged(model, before)


def test_codes_of_each_part_of_a_fused_tensor_count():
    parts = ("q_proj", "k_proj", "v_proj")
    file = {f"attn.{part}.weight": torch.ones(4, 4, dtype=torch.int8) for part in parts}
    file |= {f"attn.{part}.weight_scale": torch.ones(4) for part in parts}
    model = nn.ModuleDict({"attn": nn.ModuleDict({"qkv": nn.Linear(4, 12, bias=False)})})
    with pytest.raises(CheckpointError, match=r"attn.q_proj.weight is torch.int8, .* what its numbers mean, as of 2 m"):
        load_weights(model, file)


def test_numbers_of_8_bits_without_a_scale_are_weights_and_said():
    source, target = randomized(small()), small()
    file = {
        n: tensor.to(torch.float8_e5m2) if tensor.dim() > 1 else tensor for n, tensor in source.state_dict().items()
    }
    report = load_weights(target, file)
    assert "0.weight, 3.weight have 8 bits in the file, and are loaded with that precision" in report.diagnosis
    assert torch.equal(target[3].weight, file["3.weight"].float())
    target.register_buffer("counts", torch.ones(2, 2, dtype=torch.int64))
    file["counts"] = torch.zeros(2, 2).to(torch.float8_e5m2)
    report = load_weights(target, file, allow_mismatched="counts")
    assert "; 0.weight, 3.weight have 8 bits" in report.diagnosis, "what is left out is not loaded"
    extra = {"more.index": torch.ones(3, 3, dtype=torch.int64), "more.scale": torch.ones(3), "3.note": torch.ones(1)}
    with pytest.raises(CheckpointError, match=r"3 tensors are left over in the file"):
        load_weights(small(), source.state_dict() | extra)
    load_weights(small(), source.state_dict() | extra, allow_unexpected=["more.*", "3.note"])


def _deep(layers=60, width=4):
    def block():
        return nn.ModuleDict({"cross_attention_queries": nn.Linear(width, width), "norm": nn.LayerNorm(width)})

    return nn.ModuleDict({"pretrained_backbone_network": nn.ModuleDict({f"layer_{i}": block() for i in range(layers)})})


def _wrong_ways(state):
    """Files that are wrong in hundreds of tensors, each in its own way, and what they are loaded with."""
    names, numbered = [*state], [*enumerate(state.items())]
    left_over = {f"x{i}.{name}.of_{i}": tensor for i, (name, tensor) in numbered}
    other_shapes = {n: torch.zeros(7, *t.shape[1:]) if i % 3 == 0 else t for i, (n, t) in numbered}
    quantized = {n: t.to(torch.float8_e4m3fn) if t.dim() == 2 else t for n, t in state.items()}
    return {
        "missing": {name: tensor for i, (name, tensor) in numbered if i % 7},
        "left over": state | left_over,
        "of other shapes": other_shapes,
        "of other kinds": {name: tensor.int() if i % 3 == 0 else tensor for i, (name, tensor) in numbered},
        "all of these": {name: other_shapes[name] for name in names if len(name) % 5} | left_over,
        "nothing fits": {name: torch.zeros(9) for name in names},
        "no values": {name: tensor.to("meta") for name, tensor in state.items()},
        "two models": {f"{side}.{name}": t for side in ("student", "teacher") for name, t in state.items()},
        "TensorFlow": {f"{name.replace('.', '/')}/kernel": tensor for name, tensor in state.items()},
        "codes": quantized | {f"{name}_scale": torch.ones(()) for name, t in state.items() if t.dim() == 2},
        "LoRA": state | {name.replace("weight", "lora_A.default.weight"): tensor for name, tensor in state.items()},
        "several sets": {f"group_{i}": state | {names[0]: state[names[0]] + i} for i in range(300)},
        "rules to nothing": (state, [(name, f"nothing.{name}") for name in names]),
        "rules of nothing": (state, [(f"nothing.{name}", names[0]) for name in names]),
        "rules to one": (state, [dict.fromkeys(names[:200], names[0])]),
        "rules to other shapes": (state, [dict(zip(names[::4], names[2::4], strict=True)), "only"]),
        "long names": {f"{'a' * 250}.{i}.weight": torch.zeros(3) for i in range(20)},
        "one shard": {name: state[name] for name in names[:200]},
    }


@pytest.mark.parametrize("way", _wrong_ways({"a": torch.ones(1), "b": torch.ones(1), "c": torch.ones(1)}))
def test_every_message_is_short_and_begins_with_what_helps(way):
    model = _deep()
    state = snapshot(model)
    file = _wrong_ways(state)[way]
    file, rules = file if isinstance(file, tuple) else (file, "auto")
    if way == "one shard":
        save_weights(file, "model-00001-of-00002.pt")
        file = "model-00001-of-00002.pt"
    said = []
    for step in (load_weights, lambda model, file, rules: align(model, file, rules).diagnosis):
        try:
            said.append(str(step(model, file, rules=rules)))
        except (CheckpointError, TypeError) as error:  # of a path, in `align`
            said.append(str(error))
    assert unchanged(model, state)
    lines = [textwrap.wrap(text, 100) for text in said]
    assert [len(each) for each in lines if len(each) > 15] == []
    first = {
        "one shard": "give the index of all shards", "LoRA": "call add_lora(model) first", "codes": "It holds codes",
        "missing": "allow_missing=['", "several sets": "Choose one with key=", "of other shapes": "allow_mismatched=['",
    }  # fmt: skip
    assert first.get(way, "") in " ".join(lines[0][:5])


def _normed(norm):
    conv = norm(nn.Conv1d(4, 6, 3), dim=2)  # as that of the positions of wav2vec 2.0
    layers = [norm(nn.Conv1d(2, 4, 3)), conv, nn.ReLU(), norm(nn.ConvTranspose1d(6, 5, 4))]
    return nn.Sequential(*layers, nn.Flatten(), norm(nn.Linear(45, 3)), norm(nn.Linear(3, 1), dim=None))


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("prefix", ["", "module.generator."])
def test_weight_norm_becomes_what_the_model_has(prefix):
    old, new = nn.utils.weight_norm, nn.utils.parametrizations.weight_norm
    inputs = torch.randn(2, 2, 10)
    for file_norm in (old, new):
        source = randomized(_normed(file_norm))
        file = {f"{prefix}{name}": tensor for name, tensor in source.state_dict().items()}
        for model_norm in (old, new, lambda layer, dim=0: layer):
            target = _normed(model_norm)
            report = load_weights(target, file)
            assert max_output_difference(source, target, inputs) < 1e-6  # torch divides in another order
            is_plain = "0.weight" in target.state_dict()
            assert is_plain == ("5 tensors were computed from the file's weight norm" in report.diagnosis)
            with pytest.raises(CheckpointError) if not is_plain else contextlib.nullcontext() as error:
                load_weights(target, _normed(lambda layer, dim=0: layer).state_dict())
            if not is_plain:
                assert "The model computes weights from others" in str(error.value)


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("kind", ["spectral_norm", "orthogonal", "weight_norm", "old_spectral_norm", "pruned"])
def test_weights_that_one_side_computes_are_named_and_not_taken_for_plain_ones(kind):
    new, old = nn.utils.parametrizations, nn.utils.spectral_norm
    how = {"old_spectral_norm": old, "pruned": lambda layer: nn.utils.prune.l1_unstructured(layer, "weight", 0.3)}
    made = nn.Sequential(how.get(kind, getattr(new, kind, None))(nn.Linear(4, 6)), nn.Linear(6, 2))
    plain = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    for net, file, side in ((made, plain, "model"), (plain, made, "file")):
        if (kind, side) == ("weight_norm", "file"):
            continue  # which is computed
        with pytest.raises(CheckpointError, match=rf"The {side} computes weights from others, such as 0\.") as error:
            load_weights(net, file.state_dict())
        assert "rules=" not in str(error.value)


@cases(
    "beside, is_refused",
    ({"scales": {"2.weight": torch.tensor(0.01)}}, True),
    ({"scales": {"2.weight": 0.01}}, True),
    ({"scales": {"module.2": 0.01}}, True),
    ({"quantization": {"layers": {"2.weight_scale": torch.ones(5, 1)}}}, True),
    ({"ema": {"2.weight": torch.ones(5, 16), "2.weight_updates": torch.tensor(3)}}, False),
    ({"optimizer": {"state": {"2.weight": {"step": 3}}}, "epoch": 3}, False),
)
@pytest.mark.parametrize("source", ["dict", "w.pt"])
def test_codes_whose_scales_lie_in_another_dict_are_refused(beside, is_refused, source):
    state = {"2.weight": torch.ones(5, 16).to(torch.float8_e4m3fn), "2.bias": torch.zeros(5)}
    file = {"state_dict": {f"module.{name}": tensor for name, tensor in state.items()}, **beside}
    torch.save(file, "w.pt")
    net = nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))
    refused = pytest.raises(CheckpointError, match="It holds codes of quantized weights") if is_refused else None
    with refused or contextlib.nullcontext():
        load_weights(net, file if source == "dict" else source, key="state_dict")


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_a_sparse_weight_is_not_missing(make, prefix):
    net = nn.Linear(2, 2)
    file = {f"{prefix}weight": make(torch.eye(2)), f"{prefix}bias": torch.zeros(2)}
    torch.save({"state_dict": file, "epoch": 3}, "w.pt")
    words = (
        rf"state_dict.{prefix}weight is made by torch._utils._rebuild_sparse\w*tensor, which is not read: save a plain"
    )
    with pytest.raises(CheckpointError, match=words) as error:
        load_weights(net, "w.pt")
    assert "allow_missing" not in str(error.value)
    assert "which is not read" in load_weights(net, "w.pt", allow_missing="weight").diagnosis
    with pytest.raises(CheckpointError, match="make both dense"):
        load_weights(net, file)
    net.weight = nn.Parameter(make(torch.eye(2)))
    with pytest.raises(CheckpointError, match="make both dense"):
        load_weights(net, nn.Linear(2, 2).state_dict())


@pytest.mark.parametrize("change", [0, 1])
def test_copies_of_equal_values_are_one_and_no_question(change):
    state = small().state_dict()
    two = {"student": state, "teacher": {name: tensor + change for name, tensor in state.items()}}
    for both in (two, {f"{part}.{name}": tensor for part, side in two.items() for name, tensor in side.items()}):
        target = small()
        words = r"several sets of weights|it is ambiguous which of student.\*, teacher.\*"
        with pytest.raises(CheckpointError, match=words) if change else contextlib.nullcontext():
            load_weights(target, both)
        assert unchanged(target, state) == (not change)


def test_a_tensor_with_an_empty_name_is_refused_in_words():
    file = {**small().state_dict(), "": torch.ones(1)}
    torch.save(file, "w.pt")
    for source in (file, "w.pt"):
        with pytest.raises(NotACheckpointError, match="a checkpoint with a tensor whose name no layer has, ''"):
            load_weights(small(), source)


@pytest.mark.parametrize("name", ["0.weight", "1.running_mean"])
@pytest.mark.parametrize("options", [{}, {"assign": True}, {"rules": None}])
def test_tensors_without_values_are_found_first(name, options):
    target = small()
    before = snapshot(target)
    file = small().state_dict()
    file[name] = file[name].to("meta")
    with pytest.raises(CheckpointError, match=f"has no values for {name}: its tensors are on the meta device"):
        load_weights(target, file, **options)
    assert unchanged(target, before)
    torch.save(file, "w.pt")
    with pytest.raises(CheckpointError, match=f"w.pt has no values for {name}"):
        load_weights(target, "w.pt", **options)
    save_weights(small(), "w.safetensors")
    with pytest.raises(CheckpointError, match=r"read the file without map_location='meta'"):
        load_weights(target, read_checkpoint("w.safetensors", map_location="meta"))
    assert unchanged(target, before)
    with torch.device("meta"):
        empty = small()
    with pytest.raises(CheckpointError, match="has no values for"):
        load_weights(empty, file)
    kept = load_weights(target, {n: t for n, t in file.items() if n != name}, allow_missing=name)
    assert kept.loaded == 8


def test_lazy_modules_are_refused():
    with pytest.raises(CheckpointError, match=r"weight, bias have no shape yet: run a batch through the model first"):
        load_weights(nn.LazyLinear(3), nn.Linear(2, 3).state_dict())


@pytest.mark.parametrize("layer", ["attention", "attn"])
def test_the_bias_of_a_layer_called_attention_is_no_mask(layer):
    """GPT-2 has a mask of this name, with four dimensions, that it computes for itself."""
    with_bias, without = (
        nn.ModuleDict({"net": nn.Linear(8, 8), layer: nn.Linear(8, 1, bias)}) for bias in (True, False)
    )
    before = snapshot(with_bias)
    with pytest.raises(CheckpointError, match=rf"1 tensor is missing in the file: {layer}.bias"):
        load_weights(with_bias, without.state_dict())
    assert unchanged(with_bias, before)
    with pytest.raises(CheckpointError, match=rf"1 tensor is left over in the file: {layer}.bias"):
        load_weights(without, with_bias.state_dict())
    integer = with_bias.state_dict() | {f"{layer}.bias": torch.ones(1, dtype=torch.int64)}
    with pytest.raises(CheckpointError, match=rf"of other shapes or kinds: {layer}.bias"):
        load_weights(with_bias, integer)
    masked = without.state_dict() | {f"{layer}.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool)}
    assert load_weights(without, masked).unexpected == []


@pytest.mark.parametrize("renames", ["state_dict", "load_state_dict"])
def test_a_module_that_renames_its_tensors_in_one_direction_is_told(renames):
    def rename(module, state, *_):
        state["kernel"] = state.pop("weight")

    module = nn.Linear(2, 3, bias=False)
    if renames == "state_dict":
        module.register_state_dict_post_hook(rename)
    else:
        module.register_load_state_dict_pre_hook(rename)
    weights = dict.fromkeys(module.state_dict(), torch.ones(3, 2))
    with pytest.raises(CheckpointError, match=r"Linear.load_state_dict did not take kernel.* although state_dict\(\)"):
        load_weights(module, weights)


def test_two_sets_of_weights_that_differ_in_a_wrapper_alone_are_both_seen():
    source, compiled = small().state_dict(), small().state_dict()
    both = source | {f"_orig_mod.{name}": value for name, value in compiled.items()}
    target = small()
    with pytest.raises(CheckpointError, match=r"8 tensors are left over in the file: _orig_mod\.0\.weight"):
        load_weights(target, both)
    load_weights(target, both, allow_unexpected="_orig_mod.*")
    assert unchanged(target, source)
    save_weights(both, "w.pt")
    assert read_checkpoint("w.pt").state_dict.keys() == both.keys()


@pytest.mark.parametrize("key", ["state_dict", "anything"])
@pytest.mark.parametrize("module", [True, False])
def test_what_torch_load_returned_is_unpacked(key, module):
    source, target = small(), small()
    optimizer = torch.optim.Adam(source.parameters()).state_dict()
    values = {"epoch": 3, "optimizer": optimizer, key: source if module else source.state_dict()}
    assert load_weights(target, values).loaded == 9
    assert max_output_difference(source, target, X) == 0
    assert load_weights(target, {"inner": values}, key=f"inner.{key}").loaded == 9


def test_a_dict_without_weights_or_with_several_is_named():
    target = small()
    before = snapshot(target)
    both = {"student": small().state_dict(), "teacher": small().state_dict()}
    with pytest.raises(CheckpointError, match=r"several sets of weights. Choose one with key=: 'student', 'teacher'"):
        load_weights(target, both)
    assert unchanged(target, before)
    assert load_weights(target, both, key="teacher").loaded == 9
    words = r"The dict of weights is a checkpoint without weights: it holds epoch"
    with pytest.raises(NotACheckpointError, match=words):
        load_weights(target, {"epoch": 3})
    arrays = {name: tensor.numpy() for name, tensor in small().state_dict().items()}
    assert load_weights(target, arrays).loaded == load_weights(target, {"model": arrays}).loaded == 9
    with pytest.raises(CheckpointError, match=r"without weights at key='nope'. Its weights are at student, teacher"):
        load_weights(target, both, key="nope")
    dotted = {"net.best": small().state_dict(), "net.last": small().state_dict()}
    with pytest.raises(CheckpointError, match=r"Choose one with key=: 'net.best', 'net.last'"):
        load_weights(target, dotted)
    assert load_weights(target, dotted, key="net.best").loaded == 9


@pytest.mark.parametrize("pattern", ["model-{:05d}-of-00002.safetensors", "pytorch_model-{:05d}-of-00002.bin"])
def test_one_shard_of_several_names_the_index(pattern):
    source, target = small(), small()
    before = snapshot(target)
    tensors = source.state_dict()
    parts = [dict(list(tensors.items())[:4]), dict(list(tensors.items())[4:])]
    names = [pattern.format(number) for number in (1, 2)]
    for name, part in zip(names, parts, strict=True):
        save_weights(part, name)
    index = pattern.partition("-")[0] + Path(pattern).suffix + ".index.json"
    places = {key: name for name, part in zip(names, parts, strict=True) for key in part}
    Path(index).write_text(json.dumps({"weight_map": places}))
    for number, name in enumerate(names, 1):
        words = rf"^{name} \(shard {number} of 2 of a model: give the index of all shards, {index}\)"
        with pytest.raises(CheckpointError, match=words):
            load_weights(target, name)
    assert unchanged(target, before)
    assert load_weights(target, index).loaded == 9
    assert max_output_difference(source, target, X) == 0
    Path("single-00001-of-00001.bin").write_bytes(b"")
    save_weights(parts[0], "single-00001-of-00001.bin")
    with pytest.raises(CheckpointError, match=r"^single-00001-of-00001.bin does not fit"):
        load_weights(target, "single-00001-of-00001.bin")


def test_suggestions_name_what_is_missing_and_no_more():
    linear = nn.Sequential(*(nn.Linear(3, 3) for _ in range(12)))
    blocks = nn.ModuleDict({"h": linear, "norm": nn.Sequential(nn.BatchNorm1d(3))})
    file = {name: value for name, value in blocks.state_dict().items() if not name.endswith("bias") or "norm" in name}
    words = r"12 tensors are missing .*allow_missing=\['h.\*.bias'\] allows"
    with pytest.raises(CheckpointError, match=words) as error:
        load_weights(blocks, file | {"norm.0.running_mean": torch.zeros(4)})
    assert "allow_mismatched=['norm.0.running_mean']" in str(error.value)
    file = {name: value for name, value in blocks.state_dict().items() if name != "h.3.bias"}
    with pytest.raises(CheckpointError, match=r"allow_missing=\['h.3.bias'\] allows"):
        load_weights(blocks, file)


def test_suggestions_may_match_the_counters_of_norms():
    two = nn.ModuleDict({"one": small(), "other": small()})
    file = {f"one.{name}": value for name, value in small().state_dict().items()}
    file = {name: value for name, value in file.items() if not name.endswith("num_batches_tracked")}
    words = r"8 tensors are missing in the file: .*allow_missing=\['other\.\*'\] allows"
    with pytest.raises(CheckpointError, match=words):
        load_weights(two, file)
    two = nn.ModuleDict({"one": small()})
    more = file | {f"other.{name}": value for name, value in small().state_dict().items()} | {"other.x": torch.ones(2)}
    with pytest.raises(CheckpointError, match=r"9 tensors are left over .*allow_unexpected=\['other\.\*'\] allows"):
        load_weights(two, more)


def test_equal_names_come_before_a_prefix_that_only_counters_speak_for():
    ours, others = randomized(small()).state_dict(), small().state_dict()
    file = {f"one.{name}": value for name, value in ours.items() if not name.endswith("num_batches_tracked")}
    file |= {f"other.{name}": value for name, value in others.items()}
    target = nn.ModuleDict({"one": small()})
    assert load_weights(target, file, allow_unexpected="other.*").renamed == {}
    assert torch.equal(target["one"][0].weight, ours["0.weight"])
    with pytest.raises(AmbiguousAlignmentError, match=r"which of one\.\*, other\.\* in the checkpoint"):
        load_weights(small(), file)


@given(st.sets(st.sampled_from([*sorted(small().state_dict()), "a.b.c", "a.b.d", "a.0.x", "a.1.x", "a[0]", "a*"])))
def test_suggested_patterns_match_these_names_alone(wanted):
    known = [*small().state_dict(), "a.b.c", "a.b.d", "a.0.x", "a.1.x", "a[0]", "a*", "a0"]
    patterns = [Pattern(text) for text in suggested_patterns(sorted(wanted), known)]
    assert {name for name in known if any(pattern.matches(name) for pattern in patterns)} == wanted


def test_extra_state_and_what_stays_on_meta():
    class Counting(nn.Linear):
        steps = 0

        def get_extra_state(self):
            return {"steps": self.steps}

        def set_extra_state(self, state):
            self.steps = state["steps"]

    source, target = Counting(2, 3), Counting(2, 3)
    source.steps = 7
    torch.save(source.state_dict(), "w.pt")
    load_weights(target, "w.pt")
    assert target.steps == 7

    with torch.device("meta"):
        partial = nn.Linear(2, 3)
        partial.register_buffer("kept", torch.zeros(2))
    report = load_weights(partial, nn.Linear(2, 3).state_dict(), allow_missing="kept")
    assert report.diagnosis.endswith("Still on the meta device, without values: kept.")


def test_a_head_is_not_taken_for_positions():
    """Ten classes are a token and a grid of 3x3, and five are a token and one of 2x2."""
    target = nn.Linear(6, 5, bias=False)
    words = r"weight \(5x6 in the model, 10x6 in the file\) belongs to a linear layer"
    with pytest.raises(CheckpointError, match=words):
        load_weights(target, {"weight": torch.ones(10, 6)}, interpolate="*")


@pytest.mark.parametrize(("old", "new"), [((2, 4, 3), (2, 9, 3)), ((1, 4, 3), (1, 9, 6)), ((1, 5, 7, 7), (1, 6, 7, 7))])
def test_what_is_no_grid_of_positions_is_not_interpolated(old, new):
    target = nn.ParameterDict({"pos_embed": torch.zeros(new)})
    with pytest.raises(CheckpointError):
        load_weights(target, {"pos_embed": torch.ones(old)}, interpolate="pos_embed")
    assert not target["pos_embed"].any()


@pytest.mark.parametrize("window", [None, (4, 8)])
def test_tables_of_windows_and_maps_of_positions_are_interpolated(window):
    """Tables are square unless a module around says its window, as Swin's do."""
    sides = [2 * side - 1 for side in window or (8, 8)]
    target = nn.Module()
    target.window_size = window
    target.pos_embed = nn.Parameter(torch.zeros(1, 6, 9, 8))
    target.table = nn.Parameter(torch.zeros(math.prod(sides), 4))
    source = {"pos_embed": torch.randn(1, 6, 7, 5), "table": torch.randn(13 * 13, 4)}
    assert load_weights(target, source, interpolate=["table", "pos_*"]).loaded == 2
    maps, tables = (
        nn.functional.interpolate(grid, size, mode="bicubic", antialias=True)
        for grid, size in ((source["pos_embed"], (9, 8)), (source["table"].T.reshape(1, 4, 13, 13), sides))
    )
    torch.testing.assert_close(target.pos_embed.data, maps)
    torch.testing.assert_close(target.table.data, tables.reshape(4, -1).T)


# Saving


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".pth", ".ckpt", ".bin"])
def test_saves_clean_names_whole_or_not_at_all(suffix, monkeypatch):
    path = Path(f"w{suffix}")
    model = nn.Sequential(torch.compile(small(), backend="eager"))
    model[0].register_buffer("total_ops", torch.zeros(1))
    save_weights(nn.DataParallel(model), path)
    assert set(read_checkpoint(path).state_dict) == {f"0.{name}" for name in small().state_dict()}
    save_weights(model, path, clean=False)
    assert set(read_checkpoint(path).state_dict) == set(model.state_dict())
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_weights(small(), path)
    assert path.read_bytes() == before
    assert list(Path().iterdir()) == [path]


def test_what_cannot_be_saved():
    with pytest.raises(ValueError, match=r"path must end in .safetensors, .pt, .pth, .ckpt or .bin, got 'w.h5'"):
        save_weights(small(), "w.h5")
    with (
        torch.device("meta"),
        pytest.raises(ValueError, match=r"0.weight, 0.bias, 1.weight, 1.bias and 5 more are on the"),
    ):
        save_weights(small(), "w.pt")
    words = r"a._extra_state is not a tensor \(dict\), and .safetensors holds only tensors: use .pt"
    with pytest.raises(ValueError, match=words):
        save_weights({"a._extra_state": {}}, "w.safetensors")
    assert not list(Path().iterdir())


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64]


@given(
    st.dictionaries(
        st.text("abc.", min_size=1), st.tuples(st.lists(st.integers(0, 3)), st.sampled_from(DTYPES)), min_size=1
    )
)
@settings(max_examples=50)
def test_what_is_saved_is_read(shapes):
    tensors = {name: torch.randint(0, 2, size).to(dtype) for name, (size, dtype) in shapes.items()}
    for path in ("w.pt", "w.safetensors"):
        save_weights(tensors, path, clean=False)
        found = read_checkpoint(path).state_dict
        assert found.keys() == tensors.keys()
        assert all(
            torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in tensors.items()
        )


# Comparing


def test_max_output_difference_leaves_modes_and_random_numbers_alone():
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    net[2].eval()
    before, state = snapshot(net), torch.get_rng_state()
    assert max_output_difference(net, net, torch.randn(3, 4, generator=torch.Generator().manual_seed(0))) == 0
    assert [part.training for part in net] == [True, True, False]
    assert unchanged(net, before)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ValueError, match="the outputs must be tensors of equal shapes, got"):
        max_output_difference(nn.Linear(4, 2), nn.Linear(4, 3), torch.ones(1, 4))


class Outputs(nn.Module):
    def __init__(self, *values):
        super().__init__()
        self.values = [torch.tensor(value) for value in values]

    def forward(self, _):
        return self.values


@cases(
    "one, other, difference",
    (([1.0], [2.0]), ([1.0], [math.nan]), math.nan),
    (([1.0], [2.0]), ([math.nan], [2.0]), math.nan),
    (([4.0, math.inf],), ([4.0, math.inf],), 0.0),
    (([4.0, math.inf],), ([3.0, math.inf],), 0.25),
    (([4.0, math.inf],), ([4.0, 1.0],), math.inf),
    (([0.0],), ([1.0],), math.inf),
    (([2.0], [4j]), ([2.0], [2j]), 0.5),
)
def test_max_output_difference_of_what_is_no_ordinary_number(one, other, difference):
    found = max_output_difference(Outputs(*one), Outputs(*other), torch.ones(1))
    assert found == pytest.approx(difference, nan_ok=True)
