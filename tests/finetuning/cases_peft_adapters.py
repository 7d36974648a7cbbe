"""What PeftAdapters promises."""

import torch

from lightning_tricks import isolated_rng
from lightning_tricks.finetuning import PeftAdapters
from tests.contract.case import Case
from tests.contract.lab import Lab, Net, Setting

_CONFIG = {"peft_type": "IA3", "target_modules": ["net.0"], "feedforward_modules": []}
_ADAPTER = "net.0.ia3_l.default"


def verify(lab: Lab, setting: Setting, callback: type = PeftAdapters) -> None:
    """The adapter is trained, and the base has the bits that it had."""
    arguments = {**setting.net, "built_late": False}  # so that there is something to adapt before it is sharded
    with isolated_rng(seed=0):
        base = Net(**arguments).to(dtype_of(setting)).state_dict()
    ranks = lab.fit([callback(_CONFIG)], setting, net=arguments)
    assert len(ranks) == setting.ranks
    for rank in ranks:
        weights = {name.replace(".base_layer.", "."): value for name, value in rank.weights.items()}
        assert not torch.equal(adapter := weights.pop(_ADAPTER), torch.ones_like(adapter))
        assert weights.keys() == base.keys()
        for name, value in base.items():
            assert torch.equal(weights[name], value), name


def dtype_of(setting: Setting) -> torch.dtype:
    true = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
    return true.get(setting.trainer.get("precision"), torch.float32)


CASE = Case(
    callback=PeftAdapters,
    arguments={"config": _CONFIG},
    kind="structural",
    neutral=None,
    why_no_neutral="a model without adapters has none of their parameters",
    of_one_fit=("report",),
    instances=1,
    not_beside=("LoRA", "Adapters", "PrefixTuning"),
    waits={"configure_and_adapt": 1},
    verify=verify,
    refuses={"compile": "is compiled"},
)
