"""What `TrainableCheckpoint` leaves out of a checkpoint, and how a model gives it back."""

import copy
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_tricks.finetuning.core.trainable_weights import (
    BaseMismatchError,
    base_fingerprints,
    complete_checkpoint,
    complete_state_dict,
    forget,
    leave_out_base,
    load_trainable,
    recorded_base,
    trainable_names,
)
from lightning_tricks.seeding import isolated_rng
from tests.small import HostReads, cases, same


class WithExtraState(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = ["a"]

    def get_extra_state(self):
        return {"words": list(self.words)}

    def set_extra_state(self, state):
        self.words = state["words"]


def build(seed=0, *, tied=False):
    with isolated_rng(seed=seed):
        model = nn.Sequential(
            OrderedDict(
                backbone=nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Embedding(5, 6)),
                note=WithExtraState(),
                head=nn.Linear(6, 5, bias=False),
            )
        )
    model.backbone.requires_grad_(False)
    if tied:
        model.head.weight = model.backbone[2].weight
    return model


def train(model):
    """Change what training changes: the head, the statistics and the extra state."""
    with torch.no_grad():
        model.head.weight.add_(1)
        model.backbone[1].running_mean.add_(2)
    model.note.words.append("b")
    return model


def saved(model, base=None):
    """A smaller checkpoint of a model, and the names that it lacks."""
    base = base_fingerprints(build()) if base is None else base
    forget(base, model, trainable_names(model))
    checkpoint = {"state_dict": model.state_dict(), "pytorch-lightning_version": "2.6.6"}
    return checkpoint, leave_out_base(checkpoint, model, base)


def test_new_names_are_saved():
    model = build()
    model.backbone[0].register_buffer("mask", torch.ones(3))
    checkpoint, _ = saved(model)
    assert "backbone.0.mask" in checkpoint["state_dict"]


@pytest.mark.parametrize("change", ["data", "trainable"])
def test_tied_weights_are_saved_under_all_names(change):
    model = build(tied=True)
    base = base_fingerprints(model)
    assert not model.head.weight.requires_grad
    if change == "data":
        model.head.weight.data.add_(1)
    else:
        model.head.weight.requires_grad_(True)
    checkpoint, _ = saved(model, base)
    assert {"head.weight", "backbone.2.weight"} <= checkpoint["state_dict"].keys()
    loaded = build(tied=True)
    loaded.load_state_dict(complete_state_dict(loaded, checkpoint))
    assert same(dict(loaded.state_dict()), dict(model.state_dict()))
    assert loaded.head.weight is loaded.backbone[2].weight


def test_parts_of_one_tensor_are_saved_together():
    model = build()
    model.backbone.register_buffer("part", model.backbone[0].weight.data[:2])
    base = base_fingerprints(model)
    forget(base, model, {"backbone.part"})
    _, left_out = saved(model, base)
    assert not {"backbone.part", "backbone.0.weight"} & set(left_out)
    assert "backbone.0.bias" in left_out


def test_nothing_is_removed_where_tied_weights_keep_each_other():
    tied = nn.ModuleDict({"one": nn.Linear(2, 2, bias=False), "other": nn.Linear(2, 2, bias=False)})
    tied["one"].weight = tied["other"].weight
    base = {name: record for name, record in base_fingerprints(tied).items() if name == "one.weight"}
    checkpoint = {"state_dict": tied.state_dict()}
    assert leave_out_base(checkpoint, tied, base) == []
    assert checkpoint["state_dict"].keys() == tied.state_dict().keys()


def test_averaged_weights_beside_the_present_ones():
    """Lightning's WeightAveraging saves two state dicts; a tensor is left out of each that has it as in the base."""
    model = train(build())
    average = copy.deepcopy(model)
    average.backbone[0].bias.data.add_(1)
    checkpoint = {"state_dict": average.state_dict(), "current_model_state": model.state_dict()}
    base = base_fingerprints(build())
    forget(base, model, trainable_names(model))
    left_out = leave_out_base(checkpoint, model, base)
    assert "backbone.0.bias" in left_out
    assert [name for name in left_out if name in checkpoint["state_dict"]] == ["backbone.0.bias"]
    assert not [name for name in left_out if name in checkpoint["current_model_state"]]
    whole = complete_checkpoint(build(), checkpoint)
    assert same(dict(whole["state_dict"]), dict(average.state_dict()))
    assert same(dict(whole["current_model_state"]), dict(model.state_dict()))


def _flip(model):
    model.backbone[0].weight.data[3, 3] += 2**-20


def _reshape(model):
    model.backbone[2] = nn.Embedding(4, 6).requires_grad_(False)


def _convert(model):
    model.backbone[0].bias.data = model.backbone[0].bias.data.bfloat16()


def _count_in_halves(model):
    model.backbone[1].num_batches_tracked = torch.tensor(0.5)


def _rename(model):
    model.backbone[1] = nn.Identity()


@cases(
    "change, words",
    (_flip, r"Of 7 tensors that this checkpoint left out, 1 is of other values \(backbone.0.weight\). Build the mod"),
    (_reshape, r"1 is of another shape \(backbone.2.weight: 4x6 in the model, 5x6 before\)\. Build the model"),
    (_convert, r"1 is of another dtype \(backbone.0.bias: bfloat16 in the model, float32 before\)\."),
    (_count_in_halves, r"1 is of another dtype \(backbone.1.num_batches_tracked: float32 in the model, int64 before"),
    (_rename, r"4 are missing from the model \(backbone.1.weight, .*\)\. Build the model with the same pretrained"),
    (lambda model: model.to("meta"), r"7 are of other values"),
)
def test_another_base_is_refused(change, words, tmp_path):
    torch.save(saved(train(build()))[0], tmp_path / "small.ckpt")
    model = build()
    change(model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(BaseMismatchError, match=words):
        load_trainable(model, tmp_path / "small.ckpt")
    if change is not _rename:
        assert model.head.weight.is_meta or same(dict(model.state_dict()), dict(before)), "it was modified"


def test_all_differences_are_counted():
    model = build(seed=1)
    model.backbone[2] = nn.Embedding(4, 6)
    model.backbone[1] = nn.Identity()
    with pytest.raises(BaseMismatchError, match=r"4 are missing .*; 1 is of another shape .*; 2 are of other values"):
        complete_state_dict(model, saved(train(build()))[0])


def test_not_strict_ignores_names_and_compares_values(tmp_path):
    torch.save(saved(train(build()))[0], tmp_path / "small.ckpt")
    model = build()
    _rename(model)
    assert load_trainable(model, tmp_path / "small.ckpt", strict=False).unexpected_keys == ["backbone.1.running_mean"]
    _flip(model)
    with pytest.raises(BaseMismatchError, match=r"backbone\.0\.weight"):
        load_trainable(model, tmp_path / "small.ckpt", strict=False)


def test_a_base_in_higher_precision_gives_the_values_that_were_trained_with():
    model = build().bfloat16()
    base = base_fingerprints(model)
    checkpoint, left_out = saved(train(model), base)
    assert "backbone.0.weight" in left_out
    loaded = build()
    loaded.load_state_dict(complete_state_dict(loaded, checkpoint))
    for name, value in loaded.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, model.state_dict()[name].to(value.dtype)), name


def test_lazy_sparse_and_meta_tensors_are_saved():
    model = build()
    model.lazy = nn.LazyLinear(3)
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    model.register_buffer("meta", torch.empty(3, device="meta"))
    names = base_fingerprints(model).keys()
    assert "backbone.0.weight" in names
    assert not {"lazy.weight", "sparse", "meta"} & names


def test_versions_of_modules_are_kept():
    """Without its version, a BatchNorm would take the state dict for one of an old torch."""
    checkpoint, _ = saved(train(build()))
    whole = complete_state_dict(build(), checkpoint)
    assert whole._metadata == checkpoint["state_dict"]._metadata == build().state_dict()._metadata


_WEIGHTS = {"state_dict": {"weight": torch.zeros(1)}}


@cases(
    "content, words",
    (None, "file.ckpt does not exist. Is the path right"),
    (b"garbage", "file.ckpt is a text file"),
    (
        {"state_dict": {"weight": torch.zeros(1)}, "pytorch-lightning_version": "2.6.6"},
        "is a full checkpoint of the Trainer: .* load_weights",
    ),
    ({"weight": torch.zeros(1)}, "is another kind of file: TrainableCheckpoint left nothing out"),
    ({**_WEIGHTS, "trainable_checkpoint": {"format": 2}}, "has format 2, and this release reads format 1"),
    (
        {**_WEIGHTS, "trainable_checkpoint": {"format": 1, "left_out": {"state_dict": {"a": {}}}}},
        "record of what it left out is damaged",
    ),
    ({**_WEIGHTS, "trainable_checkpoint": []}, "record of what it left out is damaged"),
)
def test_other_files_are_refused_in_words(content, words, tmp_path):
    path = tmp_path / "file.ckpt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        load_trainable(build(), path)


def test_a_truncated_file_is_refused_in_words(tmp_path):
    path = tmp_path / "small.ckpt"
    torch.save(saved(train(build()))[0], path)
    path.write_bytes(path.read_bytes()[:-400])
    with pytest.raises(ValueError, match=r"small\.ckpt is corrupt or truncated"):
        load_trainable(build(), path)


_NAMES = [name for name in build().state_dict() if "extra" not in name]


@settings(max_examples=30)
@given(changed=st.sets(st.sampled_from(_NAMES)), always=st.sets(st.sampled_from(_NAMES)))
def test_whatever_changes_is_restored(changed, always):
    model, base = build(), base_fingerprints(build())
    forget(base, model, always | trainable_names(model))
    model.note.words.append("b")
    for name, value in model.state_dict().items():
        if name in changed:
            value.add_(1)
    checkpoint = {"state_dict": model.state_dict()}
    left_out = leave_out_base(checkpoint, model, base)
    assert set(left_out) == set(_NAMES) - changed - always - trainable_names(model)
    if not left_out:
        return
    assert recorded_base(checkpoint) == {name: base[name] for name in left_out}
    assert same(dict(complete_state_dict(build(), checkpoint)), dict(model.state_dict()))


def test_no_value_is_read_one_by_one():
    """As many transfers for ten times as many tensors."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(20))).requires_grad_(False)
    with HostReads() as reads:
        base = base_fingerprints(model)
    assert (len(base), reads.count) == (40, 1)
    checkpoint = {"state_dict": model.state_dict()}
    with HostReads() as reads:
        leave_out_base(checkpoint, model, base)
        complete_checkpoint(model, checkpoint)
    assert reads.count == 2
