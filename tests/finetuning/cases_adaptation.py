"""What LoRA, Adapters and PrefixTuning promise: what they add is trained, and the base has the bits that it had."""

import torch
from torch import nn

from lightning_tricks import Adapters, LoRA, PrefixTuning
from lightning_tricks.finetuning import PrefixSettings, add_prefixes
from lightning_tricks.seeding import isolated_rng
from tests.contract.case import Case
from tests.contract.lab import Lab, Setting
from tests.small import Net

_ADDED_BY_LORA = {
    *(f"net.{layer}.lora_weight.{part}" for layer in (0, 4) for part in ("A", "B", "scale")),
    *(f"net.5.attention.out_proj.lora_weight.{part}" for part in ("A", "B", "scale")),
    *(f"net.5.attention.lora_in_proj_weight.{part}" for part in ("A", "B", "scale")),
}
_ADDED_BY_ADAPTERS = {
    f"net.{layer}.adapter.{way}_{part}" for layer in (0, 4) for way in ("down", "up") for part in ("weight", "bias")
}
_ADDED_BY_PREFIXES = {f"net.5.attention.prefix.{part}" for part in ("keys", "values")}


def plain(weights: dict) -> dict:
    """Weights by their names in a module that is not compiled."""
    return {name.replace("_orig_mod.", ""): value for name, value in weights.items()}


def _add_prefixes(model: nn.Module) -> None:
    add_prefixes(model, PrefixSettings(3), generator=torch.Generator().manual_seed(0))


def _verifies(make, added, add=lambda model: None):
    """Return what verifies a callback; `add` gives a model those of its values with which it does not start at zero."""

    def verify(lab: Lab, setting: Setting) -> None:
        arguments = {**setting.net, **lab.net, "built_late": False}  # so that there are layers before they are sharded
        true = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
        with isolated_rng(seed=0):
            model = Net(**arguments).to(true.get(setting.trainer.get("precision"), torch.float32))
        base = set(plain(model.state_dict()))
        add(model)
        start = plain(model.state_dict())
        ranks = lab.fit([make()], setting, net=arguments)
        assert len(ranks) == setting.ranks
        for weights in (plain(rank.weights) for rank in ranks):
            assert weights.keys() == base | added
            for name, value in weights.items():
                unchanged = torch.equal(value, start.get(name, torch.zeros_like(value)))
                assert unchanged == (name in base), name

    return verify


LORA = Case(
    callback=LoRA,
    arguments={
        "rank": 2,
        "alpha": 4.0,
        "target_modules": ["net.0", "net.4", "net.5.*"],
        "modules_to_save": ["net.1"],
        "rank_pattern": {"net.4": 3},
        "use_rslora": True,
    },
    kind="structural",
    neutral=None,
    why_no_neutral="a change of rank 0 would learn nothing",
    of_one_fit=("report",),
    instances=1,
    net={"attention": True},
    when_idle={"target_modules": ["net.4"], "modules_to_save": []},  # AdamW reads one value for each tensor
    waits={"configure_and_adapt": 1},
    verify=_verifies(lambda: LoRA(rank=3), _ADDED_BY_LORA),
)
ADAPTERS = Case(
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
    verify=_verifies(lambda: Adapters(bottleneck=3, target_modules=["net.0", "net.4"]), _ADDED_BY_ADAPTERS),
)
PREFIX_TUNING = Case(
    callback=PrefixTuning,
    arguments={"length": 2, "target_modules": ["net.5.*"], "exclude": ["net.0"], "modules_to_save": ["net.1"]},
    kind="structural",
    neutral=None,
    why_no_neutral="a prefix without keys would learn nothing",
    of_one_fit=("report",),
    instances=1,
    starts_equal=False,
    net={"attention": True},
    when_idle={"modules_to_save": []},
    waits={"configure_and_adapt": 2},
    verify=_verifies(lambda: PrefixTuning(length=3), _ADDED_BY_PREFIXES, _add_prefixes),
)
