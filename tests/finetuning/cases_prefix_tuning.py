"""What PrefixTuning promises."""

import torch

from lightning_tricks import PrefixTuning, isolated_rng
from lightning_tricks.finetuning import PrefixSettings, add_prefixes
from tests.contract.case import Case
from tests.contract.lab import Lab, Setting
from tests.finetuning.cases_lora import dtype_of, plain
from tests.small import Net


def verify(lab: Lab, setting: Setting, callback: type = PrefixTuning) -> None:
    """The keys and values are trained, and the base has the bits that it had."""
    arguments = {**setting.net, **lab.net, "built_late": False}  # so that there are layers before they are sharded
    with isolated_rng(seed=0):
        model = Net(**arguments).to(dtype_of(setting))
    names = set(plain(model.state_dict()))
    add_prefixes(model, PrefixSettings(3), generator=torch.Generator().manual_seed(0))
    ranks = lab.fit([callback(length=3)], setting, net=arguments)
    assert len(ranks) == setting.ranks
    for weights in (plain(rank.weights) for rank in ranks):
        assert weights.keys() - names == {f"net.5.attention.prefix.{what}" for what in ("keys", "values")}
        for name, value in plain(model.state_dict()).items():
            assert torch.equal(weights[name], value) == (name in names), name


CASE = Case(
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
    verify=verify,
)
