"""What Microbatching promises."""

import math

import torch

from lightning_tricks import Microbatching
from tests.contract.case import Case
from tests.contract.lab import Lab, Setting

_HALF = ("bf16", "fp16", "16-true", "bf16-true", "fp16 fused", "bf16 fused", "emulated", "CUDA")


def targets(batch: list[torch.Tensor]) -> torch.Tensor:
    return (batch[1] != -100).sum()


def verify(lab: Lab, setting: Setting, callback: type = Microbatching) -> None:
    """Batches in halves of two rows have the gradients of whole batches, and lead to the same weights.

    Weights by targets are those by rows here, but that a window at the end of an epoch counts its own batches.
    """
    bare = lab.fit_bare(setting)
    cut = lab.fit([callback(2)], setting)
    counted = lab.fit([callback(2, count=targets)], setting)  # with as many targets as rows
    assert len(cut) == len(counted) == setting.ranks
    tolerance = 3e-2 if setting.name in _HALF else 1e-4
    pairs = [*zip(cut, bare, strict=True), *([] if setting.name == "accumulation" else zip(counted, bare, strict=True))]
    for rank, bare_rank in pairs:
        assert len(rank.steps) == len(bare_rank.steps) > 0
        assert math.isclose(rank.steps[0].before, bare_rank.steps[0].before, rel_tol=tolerance)
        if setting.closures_vary:
            continue  # a line search in fp32 makes much of a difference in the last bit: test_callback has float64
        for name, weight in rank.weights.items():
            difference = torch.linalg.vector_norm(weight.double() - bare_rank.weights[name].double())
            assert difference <= tolerance * torch.linalg.vector_norm(bare_rank.weights[name].double()) + tolerance
        assert rank.weights.keys() == bare_rank.weights.keys()


CASES = (
    Case(
        callback=Microbatching,
        arguments={"size": 2, "on_mismatch": "warn"},
        kind="changer",
        neutral={"size": 1000},
        instances=1,
        waits={"closure": 13},  # in the first batch, whose rows are compared two by two with parts of them
        verify=verify,
        refuses={"manual": "automatic optimization", "FSDP2": "does not work under ModelParallelStrategy"},
    ),
)
