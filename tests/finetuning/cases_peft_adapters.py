"""What PeftAdapters promises."""

import pytest
import torch

from lightning_tricks.finetuning.peft_adapters import PeftAdapters
from tests.contract.case import Case
from tests.contract.lab import Lab, Setting

_CONFIG = {"peft_type": "LOHA", "r": 2, "alpha": 4, "target_modules": ["0"], "modules_to_save": ["4"]}


def verify(lab: Lab, setting: Setting, callback: type = PeftAdapters) -> None:
    """The adapters and the new head are trained, and the base keeps its bits."""
    pytest.importorskip("peft")
    trained = lab.fit([callback(_CONFIG, submodule="net")], setting)
    begin = lab.fit([callback(_CONFIG, submodule="net")], setting, max_epochs=0 if setting.ranks == 1 else 1)
    assert len(trained) == setting.ranks
    for rank, before in zip(trained, begin, strict=True):
        changed = {name for name, value in rank.weights.items() if not torch.equal(value, before.weights[name])}
        adapters = {name for name in rank.weights if "hada_" in name or ".modules_to_save." in name}
        assert len(adapters) == 6
        assert changed == adapters


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
