"""What PeftAdapters promises."""

import torch

from lightning_tricks.finetuning.peft_adapters import PeftAdapters
from tests.contract.case import Case
from tests.contract.lab import Lab, Setting

_CONFIG = {"peft_type": "IA3", "target_modules": ["0"], "feedforward_modules": []}
_TRAINED = {"net.0.ia3_l.default"}


def verify(lab: Lab, setting: Setting, callback: type = PeftAdapters) -> None:
    """The adapters and the new head are trained, and the base keeps its bits."""
    ranks = lab.fit([callback(_CONFIG, submodule="net")], setting)
    longer = lab.fit([callback(_CONFIG, submodule="net")], setting, max_epochs=3)
    assert len(ranks) == setting.ranks
    for rank, after in zip(ranks, longer, strict=True):
        changed = {name for name, value in rank.weights.items() if not torch.equal(value, after.weights[name])}
        assert changed == _TRAINED


CASE = Case(
    callback=PeftAdapters,
    arguments={"config": _CONFIG, "submodule": "net"},
    kind="structural",
    neutral=None,
    why_no_neutral="a model without adapters has none of their parameters",
    instances=1,
    verify=verify,
    refuses={"compile": "is compiled"},
    untested={"CUDA": "no GPU run yet"},
)
