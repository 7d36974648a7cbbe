"""Adapters that peft saves for many architectures, loaded by `load_adapter`: what peft merges, or an error in words."""

import pytest
import torch
from torch import nn

from lightning_tricks.finetuning import load_adapter, merge, save_adapter
from tests.finetuning.peft_models import ARCHITECTURES, perturb
from tests.small import recorded_warnings, without_warnings

peft = pytest.importorskip("peft")

_WORDS = (
    "by more than a change of their weights",  # convolutions with groups and the like
    "twice: as a layer, and as a part of the attention",
    "which share a weight in the model",
    "are one tensor in the model",
    "LoRA of this package has no such setting",
)


def build(name):
    torch.manual_seed(3)
    return ARCHITECTURES[name][0]().eval()


def of_each_kind(name):
    """Name the first layer of each kind of layers that have weights of their own, or attention."""
    kinds = {}
    for full, part in build(name).named_modules():
        has_matrix = any(one.ndim > 1 for one in part.parameters(recurse=False))
        if full and (has_matrix or isinstance(part, nn.MultiheadAttention)):
            kinds.setdefault((type(part), full.rpartition(".")[2]), full)
    return list(kinds.values())


def adapt_by_peft(name, **config):
    """Return a model with an adapter of peft, all of whose values are random; None if peft has none for it."""
    with without_warnings():
        try:
            model = peft.get_peft_model(build(name), peft.LoraConfig(**{"r": 4, "lora_alpha": 6, **config})).eval()
        except (AttributeError, TypeError, ValueError):
            return None
    return perturb(model)


def merged_by_peft(model):
    """Return what peft makes of its adapter; None if it cannot merge it."""
    try:
        merged = model.merge_and_unload().state_dict()
    except RuntimeError:  # or a NotImplementedError
        return None
    named = {name.replace(".modules_to_save.default", ""): value for name, value in merged.items()}
    return {name: value for name, value in named.items() if ".original_module." not in name}


def verdict(name, folder, **config):
    """Return what becomes of an adapter: None if peft has none, the words of a refusal, or an empty text."""
    if (model := adapt_by_peft(name, **config)) is None:
        return None
    with without_warnings():
        model.save_pretrained(folder)
        truth = merged_by_peft(model)
    plain, batch = build(name), ARCHITECTURES[name][1]
    before = {key: value.clone() for key, value in plain.state_dict().items()}
    try:
        load_adapter(plain, folder)
    except ValueError as error:
        assert all(torch.equal(value, before[key]) for key, value in plain.state_dict().items())
        return str(error)
    with torch.no_grad():
        side = first_of(plain(batch))
        saved_again = outputs_by_peft_of_what_we_save(plain, name, folder / "ours")
        torch.testing.assert_close(side if saved_again is None else saved_again, side, rtol=1e-4, atol=1e-5)
        assert truth is not None, f"{name}, {config}: loaded, and peft cannot merge it"
        merged = merge(plain).state_dict()
        assert merged.keys() == truth.keys()
        assert merged.keys() == before.keys()
        wrong = [key for key in merged if not torch.allclose(merged[key], truth[key], rtol=1e-4, atol=1e-5)]
        assert not wrong, f"{name}, {config}: {wrong}"
        whole = first_of(plain(batch))
    torch.testing.assert_close(side, whole, rtol=1e-3, atol=1e-4)
    return ""


def first_of(out):
    return out if isinstance(out, torch.Tensor) else out[0]


def outputs_by_peft_of_what_we_save(model, name, folder):
    """Return what peft computes with an adapter that we save; None where it is known to compute something else."""
    if name == "attentions":  # peft's adapters are ignored by torch's fused layers in evaluation
        return None
    with recorded_warnings() as caught:
        save_adapter(model, folder)
        if any("peft does not" in str(warning.message) or "peft <=" in str(warning.message) for warning in caught):
            return None
        return first_of(peft.PeftModel.from_pretrained(build(name), folder).eval()(ARCHITECTURES[name][1]))


def loadable(name, folder):
    """Name the layers whose adapters are loaded, and make sure that those of the others are refused in words."""
    found = {kind: verdict(name, folder / kind, target_modules=[kind]) for kind in of_each_kind(name)}
    assert not [text for text in found.values() if text and not any(words in text for words in _WORDS)]
    return [kind for kind, text in found.items() if text == ""]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_targets(name, tmp_path):
    kinds = loadable(name, tmp_path)
    found = verdict(name, tmp_path / "all", target_modules="all-linear")
    assert found == "" or "target_parameters=[" in found or "share a weight" in found  # experts in one tensor; ties
    several = {
        "target_modules": kinds[::2],
        "modules_to_save": kinds[1:2],
        "rank_pattern": dict.fromkeys(kinds[::3], 2),
        "alpha_pattern": {f"^{kind}": number + 2 for number, kind in enumerate(kinds)},
    }
    assert verdict(name, tmp_path / "several", **several) == ""


def test_a_part_of_an_attention_beside_the_whole(tmp_path):
    found = verdict("attentions", tmp_path, target_modules=["cross", "out_proj"])
    assert "it changes cross.out_proj.weight twice: as a layer, and as a part of the attention" in found
