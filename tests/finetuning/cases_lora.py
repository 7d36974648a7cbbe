"""What LoRA promises."""

import torch

from lightning_tricks import LoRA, isolated_rng
from tests.contract.case import Case
from tests.contract.lab import Lab, Setting
from tests.small import Net

_LAYERS = ["net.0", "net.4"]


def verify(lab: Lab, setting: Setting, callback: type = LoRA) -> None:
    """The low-rank changes are trained, all of them, and the base has the bits that it had."""
    arguments = {**setting.net, "built_late": False}  # so that there is something to change before it is sharded
    with isolated_rng(seed=0):
        base = plain(Net(**arguments).to(dtype_of(setting)).state_dict())
    ranks = lab.fit([callback(rank=3)], setting, net=arguments)
    assert len(ranks) == setting.ranks
    for weights in (plain(rank.weights) for rank in ranks):
        added = {f"{layer}.lora_weight.{matrix}" for layer in _LAYERS for matrix in ("A", "B", "scale")}
        assert weights.keys() == base.keys() | added
        for name, value in base.items():
            assert torch.equal(weights[name], value), name
        for name in added:
            assert weights[name].abs().sum() > 0, name


def plain(weights: dict) -> dict:
    """Weights by their names in a module that is not compiled."""
    return {name.replace("_orig_mod.", ""): value for name, value in weights.items()}


def dtype_of(setting: Setting) -> torch.dtype:
    true = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
    return true.get(setting.trainer.get("precision"), torch.float32)


CASE = Case(
    callback=LoRA,
    arguments={
        "rank": 2,
        "alpha": 4.0,
        "target_modules": ["net.0", "net.4"],
        "modules_to_save": ["net.1"],
        "rank_pattern": {"net.4": 3},
        "use_rslora": True,
    },
    kind="structural",
    neutral=None,
    why_no_neutral="a change of rank 0 would learn nothing",
    of_one_fit=("report",),
    instances=1,
    when_idle={"target_modules": ["net.4"], "modules_to_save": []},  # AdamW reads one value for each tensor
    waits={"configure_and_adapt": 1},
    verify=verify,
)
