"""What Adapters promises."""

import torch

from lightning_tricks import Adapters, isolated_rng
from tests.contract.case import Case
from tests.contract.lab import Lab, Setting
from tests.finetuning.cases_lora import dtype_of, plain
from tests.small import Net

_LAYERS = ["net.0", "net.4"]


def verify(lab: Lab, setting: Setting, callback: type = Adapters) -> None:
    """The adapters are trained, all of them, and the base has the bits that it had."""
    arguments = {**setting.net, "built_late": False}  # so that there are layers before they are sharded
    with isolated_rng(seed=0):
        base = plain(Net(**arguments).to(dtype_of(setting)).state_dict())
    ranks = lab.fit([callback(bottleneck=3, target_modules=_LAYERS)], setting, net=arguments)
    assert len(ranks) == setting.ranks
    for weights in (plain(rank.weights) for rank in ranks):
        ends = (f"{way}_{what}" for way in ("down", "up") for what in ("weight", "bias"))
        added = {f"{layer}.adapter.{end}" for end in ends for layer in _LAYERS}
        assert weights.keys() == base.keys() | added
        for name, value in base.items():
            assert torch.equal(weights[name], value), name
        for name in added:
            assert weights[name].abs().sum() > 0, name


CASE = Case(
    callback=Adapters,
    arguments={
        "bottleneck": 2,
        "target_modules": ["net.0", "net.4"],
        "kind": "parallel",
        "nonlinearity": "gelu",
        "scale": 2.0,
        "modules_to_save": ["net.1"],
    },
    kind="structural",
    neutral=None,
    why_no_neutral="an adapter without a bottleneck would learn nothing",
    of_one_fit=("report",),
    instances=1,
    when_idle={"target_modules": ["net.4"], "modules_to_save": []},  # AdamW reads one value for each tensor
    waits={"configure_and_adapt": 1},
    verify=verify,
)
